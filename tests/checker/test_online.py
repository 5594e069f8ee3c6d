"""Online checkers against the full check: never a false alarm, and each violation at the event that completes it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from checker import (
    FetchAndAdd,
    GrowOnlySet,
    History,
    Log,
    Model,
    OnlineFetchAndAdd,
    OnlineGrowOnlySet,
    OnlineLog,
    OnlineRegister,
    OnlineVersionedRegister,
    Register,
    Verdict,
    VersionedRegister,
    check,
)
from checker.history import INFO
from checker.online import Online, log, register, sets, sums
from checker.testing import SAMPLED_MODELS, random_history
from checker.testing.large import large_history

HISTORIES = 700
ONLINE: dict[str, tuple[Callable[[], Online], Model]] = {
    "register": (OnlineRegister, Register()),
    "log": (OnlineLog, Log()),
    "versioned-register": (OnlineVersionedRegister, VersionedRegister()),
    "fetch-and-add": (OnlineFetchAndAdd, FetchAndAdd()),
    "additions of one": (OnlineFetchAndAdd, FetchAndAdd()),
    "grow-only-set": (OnlineGrowOnlySet, GrowOnlySet()),
}


def _ones(rng: random.Random, fresh: int, spread: int) -> tuple[str, Any]:
    return ("read", None) if rng.random() < 0.4 else ("add", 1)


@pytest.fixture(autouse=True)
def additions_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SAMPLED_MODELS, "additions of one", (FetchAndAdd(), _ones))


def as_events(history: History) -> list[dict[str, Any]]:
    events: list[tuple[float, dict[str, Any]]] = []
    for operation in history:
        base = {"process": operation.process, "f": operation.f}
        events.append((operation.invoked, {**base, "type": "invoke", "value": operation.value}))
        if operation.status == INFO or operation.returned is None:
            # A history of operations does not say when one ended info: here a few events later.
            events.append((operation.invoked + 4.5, {**base, "type": "info", "value": operation.value}))
        else:
            value = operation.result if operation.status == "ok" else operation.value
            events.append((operation.returned, {**base, "type": operation.status, "value": value}))
    return [event for _, event in sorted(events, key=lambda pair: pair[0])]


def first_alarm(online: Online, events: list[dict[str, Any]]) -> int | None:
    """How many events it takes until the online checker reports a violation."""
    return next((count for count, event in enumerate(events, 1) if online.feed(event)), None)


def shortest_invalid(events: list[dict[str, Any]], model: Model) -> int | None:
    """How many events it takes until the full check finds them invalid."""
    if check(events, model, explained=False).verdict is not Verdict.INVALID:
        return None
    return next(
        count
        for count in range(1, len(events) + 1)
        if check(events[:count], model, explained=False).verdict is Verdict.INVALID
    )


def some_history(name: str, rng: random.Random, crash: float) -> list[dict[str, Any]]:
    clients, lie = rng.randrange(1, 5), rng.choice([0, 0.2, 0.5])
    size = rng.randrange(2, 11)
    return as_events(random_history(name, rng, operations=size, processes=clients, spread=0, crash=crash, lie=lie))


@pytest.mark.parametrize("name", ONLINE)
def test_a_violation_is_reported_at_the_event_that_makes_the_history_invalid(name: str) -> None:
    new, model = ONLINE[name]
    rng = random.Random(7)
    seen = set()
    for number in range(HISTORIES):
        events = some_history(name, rng, rng.choice([0, 0.1, 0.4]))
        alarm, truth = first_alarm(new(), events), shortest_invalid(events, model)
        if name == "fetch-and-add":
            # Which amounts fill a gap is not searched: only their sum is compared until all outcomes are known.
            assert alarm is None or (truth is not None and alarm >= truth), (number, events)
            if all(event["type"] != "info" for event in events):
                assert (alarm is None) == (truth is None), (number, events)
        else:
            assert alarm == truth, (number, events)
        seen.add(truth is None)
    assert seen == {True, False}


@pytest.mark.parametrize("name", ONLINE)
def test_a_small_window_causes_no_false_alarm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (log, register, sets, sums):
        monkeypatch.setattr(module, "WINDOW", 1)
    new, model = ONLINE[name]
    rng = random.Random(8)
    for number in range(HISTORIES):
        events = some_history(name, rng, 0.1)
        alarm, truth = first_alarm(new(), events), shortest_invalid(events, model)
        assert alarm is None or (truth is not None and alarm >= truth), (number, events)


def valid_operations(name: str, count: int, clients: int) -> list[dict[str, Any]]:
    """Many valid operations of clients that always overlap."""
    if name in ("register", "log"):
        return as_events(large_history(name, count, clients, seed=2))
    rng = random.Random(2)
    return as_events(random_history(name, rng, operations=count, processes=clients, crash=0.001, lie=0))


@pytest.mark.parametrize("clients", [5, 30])
@pytest.mark.parametrize("name", ONLINE)
def test_the_state_kept_is_bounded_by_open_operations_and_not_by_the_history(name: str, clients: int) -> None:
    online = ONLINE[name][0]()
    # A log's old messages may be read again at any time, so that they are kept as far as the window reaches.
    bound = log.WINDOW + 300 if name == "log" else 300
    events = valid_operations(name, 2_000 if name == "grow-only-set" else 20_000, clients)
    largest = 0
    for event in events:
        assert online.feed(event) is None
        largest = max(largest, online.held())
    assert 5 < largest < bound


@pytest.mark.parametrize("name", [name for name in ONLINE if name != "log"])
def test_a_hanging_operation_does_not_make_the_checker_keep_all_later_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (log, register, sets, sums):
        monkeypatch.setattr(module, "WINDOW", 50)
    online = ONLINE[name][0]()
    online.feed({"process": 1_000_000, "type": "invoke", "f": "read", "value": None})
    for event in valid_operations(name, 1_000, 3):
        assert online.feed(event) is None
        assert online.held() < 250


def test_each_key_is_judged_alone() -> None:
    online = OnlineFetchAndAdd()
    for key in range(3):
        for kind, value in (("invoke", 1), ("ok", 0)):
            assert online.feed({"process": 0, "type": kind, "f": "add", "key": key, "value": value}) is None
    online.feed({"process": 0, "type": "invoke", "f": "add", "key": 1, "value": 1})
    told = online.feed({"process": 0, "type": "ok", "f": "add", "key": 1, "value": 0})
    assert told == "key 1: process 0's add -> 0 is below 1, which had been reached before it began"


def test_a_value_written_twice_is_not_judged(done) -> None:
    history = done((0, "write", 1, 1), (0, "write", 2, 2), (0, "write", 1, 1), (1, "read", None, 1))
    assert first_alarm(OnlineRegister(), history) is None
    twice = done((0, "write", 1, 1), (0, "write", 1, 2), (0, "write", 1, 3), (1, "read", None, [1, 1]))
    assert first_alarm(OnlineVersionedRegister(), twice) is None
    again = done((0, "append", 1, [0, 1]), (0, "append", 1, [1, 1]), (0, "tail", None, 0))
    assert first_alarm(OnlineLog(), again) is None
    less = done((0, "add", 1, 0), (0, "add", -1, 1), (0, "read", None, 0))
    assert first_alarm(OnlineFetchAndAdd(), less) is None
    added = done((0, "add", 1, None), (0, "read", None, [1]), (0, "add", 1, None), (0, "read", None, [1]))
    assert first_alarm(OnlineGrowOnlySet(), added) is None


def test_malformed_answers_are_left_to_the_full_check(done) -> None:
    for new in (OnlineLog, OnlineVersionedRegister, OnlineFetchAndAdd, OnlineGrowOnlySet):
        f = "append" if new is OnlineLog else "write" if new is OnlineVersionedRegister else "add"
        assert first_alarm(new(), done((0, f, 1, "x"), (0, "read", None, 7.5), (0, "read", None, None))) is None


def test_a_read_of_null_is_no_violation_for_a_register_with_an_initial_value(done) -> None:
    history = done((0, "write", 1, 1), (1, "read", None, None))
    assert first_alarm(OnlineRegister(initial=0), history) is None
    assert first_alarm(OnlineRegister(), history) == 4


def test_every_named_process_but_the_nemesis_is_a_client(events) -> None:
    for name, silent in (("client-1", False), ("nemesis", True)):
        online = OnlineRegister()
        history = events((name, "invoke", "read", None), (name, "ok", "read", 7))
        assert ([online.feed(event) for event in history] == [None, None]) is silent
