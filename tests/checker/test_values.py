"""Values compare as JSON does: true is not 1, 1 is 1.0, a list is no map, null is a value like any other."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checker import (
    ILLEGAL,
    CASRegister,
    FIFOQueue,
    GrowOnlySet,
    History,
    KeyValue,
    Log,
    Model,
    MultiRegister,
    OnlineGrowOnlySet,
    OnlineLog,
    OnlineRegister,
    Register,
    Set,
    Stack,
    Topic,
    UnorderedQueue,
    Verdict,
    VersionedRegister,
    check,
    check_bank,
    check_consumer_progress,
    check_counter,
    check_delay,
    check_exclusion,
    check_log,
    check_replicas,
    check_sequential,
    check_sessions,
    check_set,
    check_set_full,
    check_total_queue,
    check_unique_ids,
)
from checker.history import HistoryError, plain
from checker.values import FALSE, TRUE, exact, holds_boolean, truth

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, 1.0, 0.5, "", "1", "true"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)


def same(one: Any, other: Any) -> bool:
    """Equality as JSON defines it."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return (type(one) in (int, float) and type(other) in (int, float) and one == other) or one is other or (
        isinstance(one, str) and one == other
    )  # fmt: skip


@given(JSON, JSON)
def test_exact_values_are_equal_if_and_only_if_json_values_are(one: Any, other: Any) -> None:
    assert (exact(one) == exact(other)) is same(one, other)
    assert same(one, other) <= (hash(exact(one)) == hash(exact(other)))
    assert exact(exact(one)) == exact(one)
    assert same(plain(exact(one)), one)


@given(JSON)
def test_a_boolean_is_found_at_any_depth(value: Any) -> None:
    text = json.dumps(value).replace('"true"', "")
    assert holds_boolean([None, value]) is ("true" in text or "false" in text)


def test_truth_is_defined_for_booleans_only() -> None:
    assert [truth(value) for value in (True, False, TRUE, FALSE, 1, 0, None, "")] == [True, False] * 2 + [None] * 4


WRITTEN = [["w", "x", True]]
REGISTERS = (Register(), CASRegister(), Register(initial=7), CASRegister(initial=7))


@pytest.mark.parametrize("model", REGISTERS)
@pytest.mark.parametrize("checked", [check, check_sequential])
@pytest.mark.parametrize(
    ("written", "read", "fine"),
    [
        (True, 1, False), (1, True, False), (False, 0, False), (True, True, True), (1, 1.0, True), (1.0, 1, True),
        ([True], [1], False), ([1], [1.0], True), ({"a": True}, {"a": 1}, False), ({"a": 1}, {"a": 1.0}, True),
        ({"a": 1}, [["a", 1]], False), ("1", 1, False), ([[0, False]], [[0, 0]], False),
    ],
)  # fmt: skip
def test_a_register_compares_values_as_json_does(
    done, model: Model, checked: Any, written: Any, read: Any, fine: bool
) -> None:
    history = done((0, "write", written, written), (1, "read", None, read))
    assert checked(history, model).valid is fine


def test_an_initial_value_is_compared_as_json_does(done) -> None:
    assert check(done((0, "read", None, 1)), Register(initial=True)).verdict is Verdict.INVALID
    assert check(done((0, "read", None, True)), Register(initial=1)).verdict is Verdict.INVALID
    assert check(done((0, "read", None, True)), Register(initial=True)).verdict is Verdict.VALID
    assert check(done((0, "read", None, [1])), Register(initial=[1.0])).verdict is Verdict.VALID  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "operations", "fine"),
    [
        (Set(), [("add", 1, True), ("add", 1, 1)], True),
        (Set(), [("add", 1, 1), ("add", 1, True)], False),
        (Set(), [("add", True, True), ("contains", 1, True)], False),
        (Set(), [("add", True, True), ("add", 1, True), ("read", None, [True, 1])], True),
        (Set(), [("add", True, True), ("read", None, [1])], False),
        (GrowOnlySet(), [("add", True, None), ("read", None, [1])], False),
        (GrowOnlySet(), [("add", True, None), ("add", 1, None), ("read", None, [1.0, True])], True),
        (FIFOQueue(), [("enqueue", True, None), ("dequeue", None, 1)], False),
        (FIFOQueue(), [("enqueue", True, None), ("enqueue", 1, None), ("dequeue", None, True)], True),
        (Stack(), [("push", 0, None), ("push", False, None), ("pop", None, 0)], False),
        (UnorderedQueue(), [("enqueue", True, None), ("dequeue", None, 1)], False),
        (Log(), [("append", True, [0, True]), ("read", {}, {"offset": 0, "messages": [1], "tail": 1})], False),
        (Log(), [("append", [1], [0, [1]]), ("read", {}, {"offset": 0, "messages": [[1.0]], "tail": 1})], True),
        (Log(), [("append", 5, [True, 5])], False),
        (Topic(), [("send", 1, [0, 0]), ("read", {}, {"queue": 0, "offset": 0, "messages": [True], "tail": 1})], False),
        (VersionedRegister(), [("write", True, 1), ("read", None, [1, 1])], False),
        (VersionedRegister(), [("write", 3, None), ("read", None, [1, 3])], True),
        (VersionedRegister(), [("write", 3, None), ("read", None, [2, 3])], False),
        (MultiRegister(), [("txn", WRITTEN, WRITTEN), ("txn", [["r", "x", None]], [["r", "x", 1]])], False),
        (MultiRegister(), [("txn", WRITTEN, WRITTEN), ("txn", [["r", "x", None]], [["r", "x", True]])], True),
        (CASRegister(), [("write", True, None), ("cas", [1, 2], [1, 2])], False),
        (CASRegister(), [("write", True, None), ("cas", [1, 2], False)], True),
        (KeyValue(), [("get", None, 0)], False),
        (KeyValue(), [("get", None, None)], True),
        (Topic(queues=1), [("send", 1, None), ("tail", {}, [0, 1])], True),
        (Topic(), [("send", 1, [2, None]), ("tail", {}, [2, 1])], True),
        (Topic(), [("send", 1, [2, None]), ("tail", {}, [2, 0])], False),
        (Topic(queues=2), [("send", 1, None), ("tail", {}, [0, 1]), ("tail", {}, [1, 1])], False),
    ],
)  # fmt: skip
def test_models_compare_values_as_json_does(done, model: Model, operations: list[tuple[Any, ...]], fine: bool) -> None:
    history = done(*((process, *operation) for process, operation in enumerate(operations)))
    for result in (check(history, model), check_sequential(_by_one_process(history), model)):
        assert result.valid is fine, result.reason


def _by_one_process(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**event, "process": 0} for event in history]


def test_keys_are_compared_as_json_does(events) -> None:
    rows = [(0, "invoke", "write", 5, True), (0, "ok", "write", 5, True)]
    rows += [(0, "invoke", "read", None, 1), (0, "ok", "read", None, 1)]
    result = check(events(*rows), Register())
    assert result.verdict is Verdict.VALID and result.stats["keys"] == 2
    wrong = check(events(*rows, (0, "invoke", "read", None, True), (0, "ok", "read", 6, True)), Register())
    assert wrong.to_json()["stats"]["first_invalid_keys"] == [True]


@pytest.mark.parametrize(
    ("value", "told"), [(1, False), ("true", False), (None, False), (0.5, False), (True, None), ([1], None), ({}, None)]
)
def test_a_history_knows_whether_its_values_rule_booleans_out(done, value: Any, told: bool | None) -> None:
    history = History.of(done((0, "write", value, value)))
    assert history.booleans is told
    assert History.of(list(history)).booleans is told


def test_a_witness_shows_values_as_they_were_recorded(done) -> None:
    result = check(done((0, "write", [True], [True]), (1, "read", None, [1])), Register())
    assert result.witness is not None
    assert [operation.result for operation in result.witness.operations][-1] == [1]
    assert '"value": [true]' in json.dumps(result.to_json()) or '"result": [1]' in json.dumps(result.to_json())


def test_a_user_model_gets_plain_values_and_still_tells_true_from_1(done) -> None:
    class Last(Model):
        def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
            if f == "write":
                assert value.__class__ in (bool, int)
                return value
            return state if result == state and result.__class__ is state.__class__ else ILLEGAL

    for written, read, fine in ((True, 1, False), (1, True, False), (True, True, True), (1, 1, True)):
        history = done((0, "write", 1, 1), (0, "write", written, written), (1, "read", None, read))
        assert check(history, Last()).valid is fine
        assert check_sequential(_by_one_process(history), Last()).valid is fine


def test_booleans_are_not_amounts_or_sums(done) -> None:
    with pytest.raises(HistoryError, match="a counter cannot be used with values like these"):
        check(done((0, "add", True, None), (0, "read", None, 1)), "counter")
    assert check(done((0, "add", 1, None), (0, "read", None, True)), "counter").verdict is Verdict.INVALID
    assert check(done((0, "add", 1, True), (0, "read", None, 1)), "fetch-and-add:initial=1").verdict is Verdict.INVALID


def test_a_step_of_a_multi_register_must_be_a_read_or_a_write(done) -> None:
    steps = [["append", "x", 1]]
    with pytest.raises(HistoryError, match=r"process 0's txn.*'append' is neither"):
        check(done((0, "txn", steps, steps)), "multi-register")


def test_the_error_names_the_operation_that_a_model_cannot_judge(done) -> None:
    history = done((0, "add", 1, True), (1, "read", None, [1]), (2, "read", None, 5))
    with pytest.raises(HistoryError, match=r"a set cannot be used with process 2's read\(\) -> 5 \(.*returned 5"):
        check(history, "set")
    odd = check(done((0, "contains", 7, 7)), "set")
    assert odd.verdict is Verdict.INVALID and "contains(7) -> 7" in odd.reason


def test_property_checkers_compare_values_as_json_does(done) -> None:
    assert check_unique_ids(done((0, "generate", None, True), (0, "generate", None, 1))).verdict is Verdict.VALID
    lost = check_set(done((0, "add", True, None), (0, "add", 1, None), (0, "read", None, [1])))
    assert (lost.verdict, lost.stats["counts"]["lost"]) == (Verdict.INVALID, 1)
    queue = check_total_queue(done((0, "enqueue", True, None), (0, "dequeue", None, 1), (0, "dequeue", None, None)))
    assert queue.stats["counts"]["unexpected"] == queue.stats["counts"]["lost"] == 1
    read = {"offset": 0, "messages": [1], "tail": 1}
    assert check_log(done((0, "append", True, [0, True]), (0, "read", {}, read))).verdict is Verdict.INVALID
    assert check_replicas({"n1": [True], "n2": [1]}).verdict is Verdict.INVALID
    assert check_replicas({"n1": [1.0], "n2": [1]}).verdict is Verdict.VALID


@pytest.mark.parametrize(
    ("checker", "operations"),
    [
        (check_counter, [("add", True, True), ("read", None, 1)]),
        (lambda events: check_counter(events, initial=True), [("read", None, 1)]),
        (check_bank, [("read", None, {"a": 1, "b": 1}), ("read", None, {"a": True, "b": 1})]),
        (lambda events: check_bank(events, total=True), [("read", None, {"a": 1})]),
        (check_sessions, [("read", None, [1, "a"]), ("read", None, [True, "a"])]),
        (check_consumer_progress, [("commit", None, {"group": "g", "queue": 0, "offset": True})]),
    ],
)
def test_no_checker_takes_a_boolean_for_a_number(done, checker: Any, operations: list[tuple[Any, ...]]) -> None:
    with pytest.raises(TypeError, match="true is not a number"):
        checker(done(*((0, *operation) for operation in operations)))


def test_a_boolean_delay_is_refused(done) -> None:
    with pytest.raises(TypeError, match="false is not a number"):
        check_delay(done((0, "send", {"message": 1, "delay_ms": False}, None)))


@pytest.mark.parametrize(
    ("checker", "one", "other"),
    [
        (check_counter, ("add", 1, 1), ("read", None, 0)),
        (check_exclusion, ("acquire", None, None), ("acquire", None, None)),
        (check_set_full, ("add", 5, 5), ("read", None, [])),
        (check_log, ("append", 5, [0, 5]), ("tail", None, 0)),
    ],
)
@pytest.mark.parametrize(
    ("keys", "same"),
    [
        ((1, True), False),
        ((False, 0.0), False),
        (({"a": 1}, [["a", 1]]), False),
        ((1, 1.0), True),
        (([1], [1.0]), True),
    ],
)
def test_property_checkers_compare_keys_as_json_does(
    events, checker: Any, one: tuple[Any, ...], other: tuple[Any, ...], keys: tuple[Any, Any], same: bool
) -> None:
    rows = []
    for process, ((f, value, result), key) in enumerate(zip((one, other), keys, strict=True)):
        rows += [(process, "invoke", f, value, key), (process, "ok", f, result, key)]
    assert (checker(events(*rows)).verdict is Verdict.INVALID) is same


@pytest.mark.parametrize(
    ("online", "operations"),
    [
        (OnlineRegister, [("write", True, True), ("read", None, 1)]),
        (OnlineGrowOnlySet, [("add", True, True), ("read", None, [1])]),
        (OnlineLog, [("append", True, [0, True]), ("read", {}, {"offset": 0, "messages": [1], "tail": 1})]),
    ],
)
def test_online_checkers_compare_values_as_json_does(done, online: Any, operations: list[tuple[Any, ...]]) -> None:
    *before, last = done(*((0, *operation) for operation in operations))
    checker = online()
    assert [checker.feed(event) for event in before] == [None] * len(before)
    assert checker.feed(last) is not None
