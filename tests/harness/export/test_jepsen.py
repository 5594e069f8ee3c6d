"""Runs in Jepsen's files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checker import CASRegister, FIFOQueue, History, Model, Mutex, Register, Verdict, check, check_transactions
from checker.codecs import read
from checker.codecs.edn import parse_edn
from harness.export.jepsen import edn, events_as_edn, results_as_edn, time_name

TEXT = st.text(st.characters(exclude_categories=("Cs",)))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
)


@given(VALUES)
def test_a_value_is_read_back_as_it_was(value: Any) -> None:
    [found] = parse_edn(edn(value))
    assert found == value and repr(found) == repr(value)


def test_numbers_that_json_does_not_have_are_symbolic_values() -> None:
    assert edn([math.inf, -math.inf, math.nan]) == "[##Inf ##-Inf ##NaN]"
    assert parse_edn(edn([math.inf, -math.inf])) == [[math.inf, -math.inf]]


def events_of(*steps: tuple[int, str, str, Any] | tuple[int, str, str, Any, Any]) -> list[dict[str, Any]]:
    """Events (process, type, f, value, key) one after the other."""
    return [
        {"index": at, "time": at * 10, "process": process, "type": kind, "f": f, "value": value}
        | ({"key": rest[0]} if rest else {})
        for at, (process, kind, f, value, *rest) in enumerate(steps)
    ]


WRITE = [(0, "invoke", "write", 1, "x"), (0, "ok", "write", None, "x")]
CASES: dict[str, tuple[Model, list[Any]]] = {
    "fresh read": (Register(), [*WRITE, (1, "invoke", "read", None, "x"), (1, "ok", "read", 1, "x")]),
    "stale read": (Register(), [*WRITE, (1, "invoke", "read", None, "x"), (1, "ok", "read", None, "x")]),
    "read of a write of unknown outcome": (
        Register(),
        [(0, "invoke", "write", 1, "x"), (0, "info", "write", None, "x"), (1, "invoke", "read", None, "x"),
         (1, "ok", "read", 1, "x")],
    ),
    "read of a failed write": (
        Register(),
        [(0, "invoke", "write", 1, "x"), (0, "fail", "write", None, "x"), (1, "invoke", "read", None, "x"),
         (1, "ok", "read", 1, "x")],
    ),
    "set after a comparison": (
        CASRegister(),
        [(0, "invoke", "write", 1, 7), (0, "ok", "write", 1, 7), (1, "invoke", "cas", [1, 2], 7),
         (1, "ok", "cas", True, 7), (1, "invoke", "read", None, 7), (1, "ok", "read", 2, 7)],
    ),
    "set that a read does not see": (
        CASRegister(),
        [(0, "invoke", "write", 1, 7), (0, "ok", "write", 1, 7), (1, "invoke", "cas", [1, 2], 7),
         (1, "ok", "cas", True, 7), (1, "invoke", "read", None, 7), (1, "ok", "read", 1, 7)],
    ),
    "queue out of order": (
        FIFOQueue(),
        [(0, "invoke", "enqueue", 1), (0, "ok", "enqueue", 1), (0, "invoke", "enqueue", 2), (0, "ok", "enqueue", 2),
         (1, "invoke", "dequeue", None), (1, "ok", "dequeue", 2)],
    ),
    "lock held twice": (
        Mutex(),
        [(0, "invoke", "acquire", None, "a"), (0, "ok", "acquire", None, "a"), (1, "invoke", "acquire", None, "a"),
         (1, "ok", "acquire", None, "a")],
    ),
}  # fmt: skip


def exported(events: list[dict[str, Any]]) -> str:
    return "\n".join(events_as_edn(events))


def read_back(directory: Path, text: str, *, is_keyed: bool = False) -> History:
    path = directory / "history.edn"
    path.write_text(text)
    return read(path, "edn-keyed" if is_keyed else "edn")


@pytest.mark.parametrize("case", CASES)
def test_the_exported_history_has_the_verdict_of_the_original(tmp_path: Path, case: str) -> None:
    model, steps = CASES[case]
    events = events_of(*steps)
    original = check(History.from_events(events), model)
    again = check(read_back(tmp_path, exported(events), is_keyed="key" in events[0]), model)
    assert again.verdict is original.verdict is not Verdict.UNKNOWN, again.reason


def test_transactions_have_keywords_as_names_and_the_verdict_of_the_original(tmp_path: Path) -> None:
    skewed = [["append", "x", 1], ["r", "y", []]], [["append", "y", 2], ["r", "x", []]]
    events = [
        {"index": at, "time": at, "process": at % 2, "type": kind, "f": "txn", "value": [list(step) for step in steps]}
        for at, (kind, steps) in enumerate((kind, steps) for kind in ("invoke", "ok") for steps in skewed)
    ]
    text = exported(events)
    assert text.splitlines()[0] == (
        '{:process 0, :type :invoke, :f :txn, :value [[:append "x" 1] [:r "y" []]], :time 0, :index 0}'
    )
    original, again = check_transactions(events), check_transactions(read_back(tmp_path, text))
    assert original.verdict is again.verdict is Verdict.INVALID
    assert original.stats["anomalies"] == again.stats["anomalies"]


def test_completions_have_the_values_that_jepsen_gives_them() -> None:
    events = events_of(
        (0, "invoke", "cas", [1, 2], "k"), (0, "ok", "cas", False, "k"), (0, "invoke", "cas", [1, 2], "k"),
        (0, "ok", "cas", True, "k"), (0, "invoke", "write", 3, "k"), (0, "ok", "write", None, "k"),
        (0, "invoke", "dequeue", None), (0, "info", "dequeue", None), (1, "invoke", "read", None), (1, "ok", "read", 3),
    )  # fmt: skip
    found = parse_edn(exported(events))
    assert [(event["type"], event["value"]) for event in found if event["type"] != "invoke"] == [
        ("fail", ["k", [1, 2]]), ("ok", ["k", [1, 2]]), ("ok", ["k", 3]), ("info", None), ("ok", 3),
    ]  # fmt: skip
    assert [event["time"] for event in found] == [10 * at for at in range(10)]


def test_events_of_the_nemesis_are_info_and_names_that_are_no_keywords_are_strings() -> None:
    events = [
        {"index": 0, "time": 5, "process": "nemesis", "type": "invoke", "f": "inject", "value": {"id": "f1"}},
        {"index": 1, "time": 6, "process": "alice", "type": "invoke", "f": "set it", "value": None},
        {"index": 2, "time": 7, "process": "alice", "type": "fail", "f": "set it", "value": None,
         "node": "n1", "error": 'no "room"\n'},
    ]  # fmt: skip
    assert exported(events).splitlines() == [
        '{:process :nemesis, :type :info, :f :inject, :value {"id" "f1"}, :time 5, :index 0}',
        '{:process "alice", :type :invoke, :f "set it", :value nil, :time 6, :index 1}',
        '{:process "alice", :type :fail, :f "set it", :value nil, :time 7, :index 2, :node "n1", '
        ':error "no \\"room\\"\\n"}',
    ]


@pytest.mark.parametrize(("valid", "word"), [(True, True), (False, False), ("unknown", "unknown"), (None, "unknown")])
def test_results_say_whether_the_run_and_each_check_are_valid(valid: Any, word: Any) -> None:
    checks = {"linearizable": {"valid": valid, "reason": "r"}, "broken": 7}
    [found] = parse_edn(results_as_edn({"valid": valid, "reason": "why", "replay": "harness run", "checks": checks}))
    assert found == {
        "valid?": word, "reason": "why", "replay": "harness run", "linearizable": {"valid?": word, "reason": "r"}
    }  # fmt: skip
    assert parse_edn(results_as_edn({"checks": []})) == [{"valid?": "unknown", "reason": None, "replay": None}]


def test_the_directory_is_named_by_the_time_as_jepsen_does() -> None:
    assert time_name("2026-11-30T11:40:32.110464+00:00") == "20261130T114032.110Z"
