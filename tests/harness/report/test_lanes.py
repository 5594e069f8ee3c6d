"""What each client did, against cells worked out one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness.report.lanes import FIRST_COLUMN_NS, MAX_COLUMNS, MAX_ROWS, RANK, ClientLanes

OPERATIONS = st.lists(
    st.tuples(
        st.integers(0, 200), st.integers(-5, 3 * 10**9), st.integers(0, 2 * 10**9), st.sampled_from(sorted(RANK))
    ),
    max_size=30,
)


@given(operations=OPERATIONS, slots=st.integers(1, 100), most=st.sampled_from([10**6, 40, 5]))
def test_a_cell_holds_the_gravest_of_what_was_under_way(
    operations: list[tuple[int, int, int, str]], slots: int, most: int
) -> None:
    lanes = ClientLanes(slots)
    for process, start_ns, length_ns, outcome in operations:
        lanes.add(process, start_ns, start_ns + length_ns, outcome)
    column_ns, runs = lanes.runs(most)
    drawn = {}
    for outcome, row, first, length in runs:
        assert 0 <= row < min(slots, MAX_ROWS)
        assert length > 0 and first + length <= MAX_COLUMNS
        for column in range(first, first + length):
            assert (row, column) not in drawn, "no cell is drawn twice"
            drawn[row, column] = RANK[outcome]
    expected: dict[tuple[int, int], int] = {}
    for process, start_ns, length_ns, outcome in operations:
        row = process % slots * min(slots, MAX_ROWS) // slots
        for column in range(max(0, start_ns) // column_ns, max(0, start_ns + length_ns) // column_ns + 1):
            expected[row, column] = max(expected.get((row, column), 0), RANK[outcome])
    assert drawn == expected
    assert column_ns % FIRST_COLUMN_NS == 0
    assert len(runs) <= most or column_ns >= lanes.column_ns * MAX_COLUMNS // 16


def test_clients_that_take_turns_have_a_row_each() -> None:
    lanes = ClientLanes(3)
    for process in (0, 1, 2, 4):  # 4 follows 1
        lanes.add(process, process * 10**6, process * 10**6, "info" if process == 1 else "ok")
    assert sorted(lanes.runs(100)[1]) == [("info", 1, 1, 1), ("ok", 0, 0, 1), ("ok", 1, 4, 1), ("ok", 2, 2, 1)]
