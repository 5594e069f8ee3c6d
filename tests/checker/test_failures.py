"""An operation that failed did not happen; one that completed with a refusal observed the state."""

from __future__ import annotations

import random
from typing import Any

import pytest

from checker import CASRegister, History, KeyValue, Log, OnlineLog, Register, Verdict, check, check_sequential
from checker.codecs.lines import read_jepsen_log_text
from checker.codecs.source import FileEvents, FormatError
from checker.linearizability.budget import Budget
from checker.linearizability.engine import decide
from checker.testing.oracle import linearizable_by_force


@pytest.mark.parametrize("initial", [None, 0])
@pytest.mark.parametrize("error", [None, "not the leader"])
def test_a_failed_cas_constrains_nothing(events, initial: Any, error: str | None) -> None:
    history = events((0, "invoke", "cas", [initial, 1]), (0, "fail", "cas", [initial, 1]))
    if error:
        history[-1]["error"] = error
    for checked in (check, check_sequential):
        assert checked(history, CASRegister(initial=initial)).verdict is Verdict.VALID


@pytest.mark.parametrize("initial", [None, 0, 1])
def test_a_refused_cas_observed_another_value(done, initial: Any) -> None:
    model = CASRegister(initial=initial)
    for checked in (check, check_sequential):
        assert checked(done((0, "cas", [initial, 5], False)), model).verdict is Verdict.INVALID
        assert checked(done((0, "cas", [7, 5], False)), model).verdict is Verdict.VALID
        assert checked(done((0, "cas", [7, 5], [7, 5])), model).verdict is Verdict.INVALID
        swapped = done((0, "cas", [initial, 5], [initial, 5]), (0, "read", None, 5))
        assert checked(swapped, model).verdict is Verdict.VALID
    wrong = check(done((0, "write", 3, 3), (1, "cas", [3, 4], False)), model)
    assert wrong.witness is not None and "cas([3, 4]) -> False" in wrong.reason


def test_verdicts_agree_with_brute_force_under_all_kinds_of_failures() -> None:
    """Failures with and without an error, refusals and crashes; by the chosen engine and by the general one."""
    rng = random.Random(5)
    verdicts = []
    for _ in range(1500):
        model = CASRegister(initial=rng.choice([None, 0]))
        events: list[dict[str, Any]] = []
        asked: dict[int, dict[str, Any]] = {}
        while len(events) < 12:
            process = rng.randrange(3)
            if process not in asked:
                f = rng.choice(["read", "write", "cas", "cas"])
                value = None if f == "read" else rng.randrange(3)
                value = [rng.choice([None, 0, 1]), value] if f == "cas" else value
                event = {"process": process, "f": f, "value": value}
                asked[process] = event
                events.append({**event, "type": "invoke"})
                continue
            event = asked.pop(process)
            kind = rng.choice(["ok", "ok", "ok", "fail", "info"])
            if kind == "ok" and event["f"] == "read":
                event = {**event, "value": rng.choice([None, 0, 1, 2])}
            elif kind == "ok" and event["f"] == "cas":
                event = {**event, "value": rng.choice([False, event["value"]])}
            elif kind == "fail" and rng.random() < 0.5:
                event = {**event, "error": "refused"}
            events.append({**event, "type": kind})
        history = History.from_events(events)
        truth = linearizable_by_force(history, model)
        verdicts.append(truth)
        assert check(history, model).valid is truth, events
        (outcome,) = decide(history, history.rows_by_key(), model, Budget(), general_only=True)
        assert outcome.verdict.as_json is truth, events
    assert 0.2 < verdicts.count(True) / len(verdicts) < 0.8


def test_a_failed_cas_is_a_refusal_only_in_the_logs_of_porcupines_etcd_tests() -> None:
    lines = "{0} 0\t:invoke\t:cas\t[1 2]\n{0} 0\t:fail\t:cas\t[1 2]\n"
    etcd = read_jepsen_log_text(lines.format("INFO  jepsen.util -"), FileEvents("etcd.log"))
    assert (etcd.status, etcd.result) == (["ok"], [False])
    for prefix in ("INFO [2019-01-01 10:00:00,000] jepsen worker 0 - jepsen.util", ""):
        other = read_jepsen_log_text(lines.format(prefix), FileEvents("other.log"))
        assert (other.status, other.result) == (["fail"], [[1, 2]])


def test_the_last_column_of_jepsens_history_txt_is_the_error() -> None:
    text = (
        "0\t:invoke\t:write\t1\n0\t:info\t:write\t1\t:timed-out\n"
        "1\t:invoke\t:write\t2\n1\t:fail\t:write\t2\tConnection refused (n1: 2379\n"
        "2\t:invoke\t:read\tnil\n2\t:ok\t:read\t1\n"
    )
    history = read_jepsen_log_text(text, FileEvents("history.txt"))
    assert (history.status, history.value) == (["info", "fail", "ok"], [1, 2, None])
    assert history.errors == {0: ":timed-out", 1: "Connection refused (n1: 2379"}
    etcd = "INFO  jepsen.util - 0\t:invoke\t:cas\t[1 2]\nINFO  jepsen.util - 0\t:fail\t:cas\t[1 2]\t:no-leader\n"
    assert read_jepsen_log_text(etcd, FileEvents("etcd.log")).status == ["fail"]


@pytest.mark.parametrize("error", ["2\t:ok\t:read\t1", "x2\t:invoke\t:read\tnil"])
def test_a_second_event_on_the_line_of_a_failure_is_refused(error: str) -> None:
    with pytest.raises(FormatError, match=r"bad\.txt:2: two events on one line"):
        read_jepsen_log_text(f"0\t:invoke\t:write\t1\n0\t:fail\t:write\t1\t{error}\n", FileEvents("bad.txt"))


def test_a_read_of_null_fits_every_state_of_a_register_with_an_initial_value(done) -> None:
    """Whether null is written or not, unless ``none_is_any`` says otherwise."""
    for model in (Register(initial=0), CASRegister(initial=0)):
        first = done((0, "read", None, None), (0, "write", None, None))
        assert check(first, model).verdict is Verdict.VALID
        between = done((0, "write", 1, 1), (0, "write", None, None), (0, "read", None, None), (0, "read", None, 1))
        assert check(between, model).verdict is Verdict.INVALID
        after = done((0, "write", None, None), (0, "write", 1, 1), (0, "read", None, None), (0, "read", None, 1))
        assert check(after, model).verdict is Verdict.VALID
    assert check(done((0, "read", None, None)), Register(initial=0, none_is_any=False)).verdict is Verdict.INVALID
    assert check(done((0, "write", 1, 1), (0, "read", None, None)), Register(none_is_any=True)).verdict is Verdict.VALID


def test_a_violation_of_strings_is_found_after_a_failed_get(events, done) -> None:
    failed = events((0, "invoke", "get", None), (0, "fail", "get", None))
    wrong = done((0, "put", "a", "a"), (1, "append", "b", "b"), (1, "get", None, "a"))
    history = failed + [{**event, "index": at} for at, event in enumerate(wrong, 2)]
    result = check(history, KeyValue())
    assert result.verdict is Verdict.INVALID and result.witness is not None and len(result.witness.operations) <= 3


def test_an_append_acknowledged_without_an_offset_counts_as_appended(events, done) -> None:
    read = {"offset": 0, "messages": [2], "tail": 1}
    history = done((0, "append", 2, [None, 2]), (0, "read", {"offset": 0, "max": 5}, read))
    assert check(history, Log()).verdict is Verdict.VALID
    assert check(history, Log()).stats["not_applicable"] == {"A5 ranks from offsets": {"an append got no offset": 1}}
    assert check(done((0, "append", 2, [None, 2]), (0, "tail", {}, 0)), Log()).verdict is Verdict.INVALID
    assert check(done((0, "append", 2, None), (0, "tail", {}, 2)), Log()).verdict is Verdict.INVALID
    seen_first = events(
        (0, "invoke", "append", 2), (1, "invoke", "read", {"offset": 0, "max": 5}), (1, "ok", "read", read),
        (0, "ok", "append", [None, 2]), (1, "invoke", "tail", {}), (1, "ok", "tail", 0),
    )  # fmt: skip
    online = OnlineLog()
    assert [online.feed(event) is None for event in seen_first] == [True] * 5 + [False]
    assert check(seen_first[:4], Log()).verdict is Verdict.VALID


def test_a_read_of_a_message_at_a_negative_offset_is_invalid(done) -> None:
    before = {"offset": -2, "messages": [2], "tail": 3}
    history = done(*((0, "append", value, [value - 1, value]) for value in (1, 2, 3)), (0, "read", {}, before))
    assert check(history, Log()).verdict is check_sequential(history, Log()).verdict is Verdict.INVALID
