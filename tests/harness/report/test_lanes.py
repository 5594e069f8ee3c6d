"""What each client did, against cells computed one by one."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from harness.report.collect import collect
from harness.report.lanes import FIRST_COLUMN_NS, MAX_COLUMNS, MAX_ROWS, RANK, ClientLanes, ClientSlots

OPERATIONS = st.lists(
    st.tuples(
        st.integers(0, 200), st.integers(-5, 3 * 10**9), st.integers(0, 2 * 10**9), st.sampled_from(sorted(RANK))
    ),
    max_size=30,
)


@given(operations=OPERATIONS, slots=st.integers(1, 100), most=st.sampled_from([10**6, 40, 5]))
def test_a_cell_holds_the_gravest_outcome_of_the_operations_under_way(
    operations: list[tuple[int, int, int, str]], slots: int, most: int
) -> None:
    lanes = ClientLanes(slots)
    for process, start_ns, length_ns, outcome in operations:
        lanes.add(process % slots, start_ns, start_ns + length_ns, outcome)
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


def test_the_process_that_replaces_one_ended_by_info_takes_its_row(tmp_path: Path) -> None:
    """Processes are numbered as they begin: here 3 follows 2, and 4 follows 1, of three clients."""
    path, lines = tmp_path / "history.jsonl", []
    for at, process, outcome in (
        (1, 0, "ok"),
        (2, 1, "ok"),
        (3, 2, "info"),
        (5, 3, "ok"),
        (6, 1, "info"),
        (7, 4, "ok"),
    ):
        for kind, part in (("invoke", 0), (outcome, 10)):
            time_ns = at * FIRST_COLUMN_NS + part
            lines.append(json.dumps({"time": time_ns, "process": process, "type": kind, "f": "read", "value": None}))
    path.write_text("\n".join(lines) + "\n")
    assert sorted(collect(path, clients=3).lanes.runs(100)[1]) == [
        ("info", 1, 6, 1), ("info", 2, 3, 1), ("ok", 0, 1, 1), ("ok", 1, 2, 1), ("ok", 1, 7, 1), ("ok", 2, 5, 1),
    ]  # fmt: skip


@given(
    clients=st.integers(1, 9),
    phases=st.lists(st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=30), min_size=1, max_size=3),
)
def test_no_two_clients_have_the_same_row_at_once(clients: int, phases: list[list[tuple[int, bool]]]) -> None:
    """Numbered as by the load: in turn, busy or not, and new ones for every phase."""
    slots, next_process = ClientSlots(clients), 0
    for phase in phases:
        processes = list(range(next_process, next_process + clients))
        next_process += clients
        at_work: dict[int, int] = {}
        for place, is_info in phase:
            process = processes[place % clients]
            if process not in at_work:
                at_work[process] = slots.begin(process)
                assert sorted(at_work.values()) == sorted(set(at_work.values()))
                assert all(0 <= slot < clients for slot in at_work.values())
                continue
            assert slots.end(process, "info" if is_info else "ok") == at_work.pop(process)
            if is_info:
                processes[place % clients], next_process = next_process, next_process + 1
        for process in at_work:
            slots.end(process, "info")
