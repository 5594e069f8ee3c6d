"""Write skew: what counts as one, what is left open, and when nothing was tested."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from checker import Result, Verdict, check_write_skew
from checker.codecs import read as read_history

Line = tuple[Any, ...]

SKEW = [(0, "invoke", "insert", [1, None]), (1, "invoke", "insert", [None, 2])]
OK = [(0, "ok", "insert", [1, None]), (1, "ok", "insert", [None, 2])]
FIRST_ONLY = [OK[0], (1, "fail", "insert", [None, 2])]
FIRST_OPEN = [OK[0], (1, "info", "insert", [None, 2])]


def read(*rows: int, process: int = 2) -> list[Line]:
    return [(process, "invoke", "read", None), (process, "ok", "read", list(rows))]


def checked(lines: Sequence[Line], key: Any = 7) -> Result:
    return check_write_skew(
        [{"process": process, "type": kind, "f": f, "value": value, "key": key} for process, kind, f, value in lines]
    )


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ([*SKEW, *OK], "write-skew"),
        ([*SKEW, *FIRST_OPEN, *read(1, 2)], "write-skew"),
        ([*SKEW, *FIRST_OPEN, *read(1), *read(2)], "write-skew"),
        ([SKEW[0], OK[0], SKEW[1], OK[1]], "late-insert"),
        # An insert without an answer, seen before the other one began.
        ([SKEW[0], (0, "info", "insert", [1, None]), *read(1), SKEW[1], OK[1]], "late-insert"),
        ([*SKEW, *FIRST_ONLY, *read(1, 2)], "unexpected"),
        ([*SKEW, *FIRST_ONLY, *read(1, 1)], "unexpected"),
        ([*SKEW, *FIRST_ONLY, *read(1, 5)], "unexpected"),
        ([*read(1), *SKEW, *FIRST_ONLY], "unexpected"),
    ],
)
def test_two_rows_of_one_key_are_a_violation(lines: list[Line], kind: str) -> None:
    found = checked(lines)
    assert found.verdict is Verdict.INVALID and found.stats["counts"][kind] >= 1
    assert found.reason.startswith("Key 7: ") and found.witness is not None
    assert {kind} == {name for name in ("write-skew", "late-insert", "unexpected") if found.stats["counts"][name]}


def test_the_witness_is_both_inserts_each_before_the_other() -> None:
    witness = checked([*SKEW, *OK]).witness
    assert witness is not None
    assert [operation.value for operation in witness.operations] == [[1, None], [None, 2]]
    assert [(edge.source, edge.target, edge.kind) for edge in witness.edges] == [(0, 1, "rw"), (1, 0, "rw")]
    seen = checked([*SKEW, *FIRST_OPEN, *read(1, 2)]).witness
    assert seen is not None and [operation.f for operation in seen.operations] == ["insert", "insert", "read"]
    late = checked([SKEW[0], OK[0], SKEW[1], OK[1]])
    assert late.witness is not None and "the second began when" in late.reason
    assert [(edge.source, edge.target, edge.kind) for edge in late.witness.edges] == [(0, 1, "realtime"), (1, 0, "rw")]
    odd = checked([*SKEW, *FIRST_ONLY, *read(1, 5)])
    assert odd.witness is not None and odd.witness.edges == () and "nobody inserted" in odd.reason
    assert "shows row 1, twice" in checked([*SKEW, *FIRST_ONLY, *read(1, 1)]).reason
    assert "each of them found no row" in checked([*SKEW, *OK]).reason


def test_the_witness_of_three_rows_is_two_concurrent_inserts() -> None:
    third = (2, "invoke", "insert", [3, None]), (2, "ok", "insert", [3, None])
    found = checked([SKEW[0], OK[0], SKEW[1], third[0], OK[1], third[1]])
    assert found.stats["counts"]["write-skew"] == 1 and found.witness is not None
    assert [operation.value for operation in found.witness.operations] == [[None, 2], [3, None]]


def test_the_witness_of_three_concurrent_inserts_is_the_first_two() -> None:
    third = (2, "invoke", "insert", [3, None]), (2, "ok", "insert", [3, None])
    witness = checked([*SKEW, third[0], *OK, third[1]]).witness
    assert witness is not None and [operation.value for operation in witness.operations] == [[1, None], [None, 2]]


def test_an_insert_retried_after_an_unknown_outcome_is_one_row() -> None:
    again = [(0, "invoke", "insert", [1, None]), (0, "info", "insert", [1, None]), (1, "invoke", "insert", [1, None]),
             (1, "ok", "insert", [1, None])]  # fmt: skip
    assert checked([*again, *read(1)]).verdict is Verdict.VALID
    assert checked([*again, *read(1)]).stats["counts"]["unexpected"] == 0


def test_other_operations_are_ignored() -> None:
    others = [(3, "invoke", "txn", [["r", 1, None]]), (3, "ok", "txn", 5)]
    assert checked([*others, *SKEW, *FIRST_ONLY, *read(1)]).verdict is Verdict.VALID


def test_one_row_of_a_key_is_valid() -> None:
    found = checked([*SKEW, *FIRST_ONLY, *read(1)])
    assert found.verdict is Verdict.VALID and "1 keys, 1 of them" in found.reason
    assert found.stats["keys"] == found.stats["contended"] == 1 and set(found.stats["counts"].values()) == {0}


@pytest.mark.parametrize(
    ("lines", "undecided"),
    [
        ([*SKEW, *FIRST_OPEN], 1),
        ([*SKEW, *FIRST_OPEN, *read(1)], 0),
        # Reads that began too early to tell, and one that is too old.
        ([SKEW[0], OK[0], (2, "invoke", "read", None), SKEW[1], FIRST_OPEN[1], (2, "ok", "read", [1])], 1),
        ([*SKEW, *FIRST_OPEN, *read()], 1),
        # An insert that a read shows is not open, though the other still is.
        ([*SKEW, (0, "info", "insert", [1, None]), *read(1), (1, "fail", "insert", [None, 2])], 0),
        # Without a certain commit, one open insert leaves nothing undecided, and two do.
        ([*SKEW, (0, "fail", "insert", [1, None]), (1, "info", "insert", [None, 2])], 0),
        ([*SKEW, (0, "info", "insert", [1, None]), (1, "info", "insert", [None, 2])], 1),
        ([*SKEW, (0, "info", "insert", [1, None]), (1, "info", "insert", [None, 2]), *read()], 0),
    ],
)  # fmt: skip
def test_an_insert_of_unknown_outcome_is_no_violation_but_may_be_undecided(lines: list[Line], undecided: int) -> None:
    found = checked(lines)
    assert found.verdict is not Verdict.INVALID and found.stats["counts"]["undecided"] == undecided
    if found.verdict is Verdict.VALID:
        assert ("for 1 keys it is not known" in found.reason) == bool(undecided)


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [SKEW[0], OK[0], SKEW[1], (1, "fail", "insert", [None, 2])],
        [*SKEW, (0, "fail", "insert", [1, None]), (1, "fail", "insert", [None, 2])],
        [*SKEW, (0, "info", "insert", [1, None]), (1, "info", "insert", [None, 2])],
    ],
)
def test_a_history_without_a_contended_key_is_unknown(lines: list[Line]) -> None:
    found = checked(lines)
    assert found.verdict is Verdict.UNKNOWN and "nothing was tested" in found.reason


def test_inserts_of_different_keys_do_not_conflict() -> None:
    apart = [
        {"process": process, "type": kind, "f": f, "value": value, "key": process}
        for process, kind, f, value in [*SKEW, *OK]
    ]
    assert check_write_skew(apart).verdict is Verdict.UNKNOWN  # no two inserts of one key


def test_a_row_that_later_reads_lack_is_unknown_not_valid() -> None:
    found = checked([*SKEW, *FIRST_ONLY, *read()])
    assert found.verdict is Verdict.UNKNOWN and "lost, or the read was stale" in found.reason
    assert found.stats["counts"]["missing"] == 1


def test_keyed_histories_of_jepsen_are_read(tmp_path: Path) -> None:
    """There the key precedes the value, and there are no reads."""

    def verdict_of(second_key: int) -> Verdict:
        events = [(0, "invoke", 4, "11 nil"), (1, "invoke", second_key, "nil 12"), (0, "ok", 4, "11 nil"),
                  (1, "ok", second_key, "nil 12")]  # fmt: skip
        lines = [
            f"{{:process {process}, :type :{kind}, :f :insert, :value [{key} [{row}]], :index {index}}}\n"
            for index, (process, kind, key, row) in enumerate(events)
        ]
        path = tmp_path / "history.edn"
        path.write_text("".join(lines))
        return check_write_skew(read_history(path, "edn-keyed")).verdict

    assert verdict_of(4) is Verdict.INVALID
    assert verdict_of(5) is Verdict.UNKNOWN


def test_a_read_that_is_not_a_list_is_refused() -> None:
    with pytest.raises(TypeError, match="a list of rows"):
        checked([*SKEW, *FIRST_ONLY, (2, "invoke", "read", None), (2, "ok", "read", 1)])


def test_a_key_is_contended_by_concurrent_inserts_of_which_one_committed() -> None:
    """Not by two that were refused after a third one had committed; nor by one that began after a read had shown the
    other, although its client had no answer yet."""
    third = [(2, "invoke", "insert", [3, None]), (2, "ok", "insert", [3, None])]
    refused = [(0, "fail", "insert", [1, None]), (1, "fail", "insert", [None, 2])]
    assert checked([*third, *SKEW, *refused]).verdict is Verdict.UNKNOWN
    assert checked([third[0], *SKEW, *refused, third[1]]).verdict is Verdict.VALID
    known = [third[0], *read(3, process=4), SKEW[1], (1, "fail", "insert", [None, 2])]
    assert checked([*known, third[1]]).verdict is Verdict.UNKNOWN
    assert checked([*known, (2, "info", "insert", [3, None])]).verdict is Verdict.UNKNOWN
    assert checked([third[0], *SKEW, *read(3, process=4), *refused]).verdict is Verdict.VALID
    assert checked([SKEW[1], third[0], (1, "fail", "insert", [None, 2]), third[1]]).verdict is Verdict.VALID


def test_inserts_for_two_tables_are_not_split_into_key_and_value(tmp_path: Path) -> None:
    lines = [
        json.dumps({"process": process, "type": kind, "f": f, "value": [row, None]})
        for kind in ("invoke", "ok")
        for process, f, row in ((0, "insert", 7), (1, "insert", 8))
    ]
    (tmp_path / "h.jsonl").write_text("\n".join(lines))
    history = read_history(tmp_path / "h.jsonl")
    assert not history.keyed and check_write_skew(history).verdict is Verdict.INVALID
