"""The online register against the full check: never a false alarm, and in the end the same verdict."""

from __future__ import annotations

import random

from checker import History, Log, OnlineLog, OnlineRegister, Register, Verdict, check
from checker.history import INFO
from checker.testing import random_history
from checker.testing.large import large_history


def as_events(history: History) -> list[dict[str, object]]:
    events: list[tuple[float, dict[str, object]]] = []
    for operation in history:
        base = {"process": operation.process, "f": operation.f}
        events.append((operation.invoked, {**base, "type": "invoke", "value": operation.value}))
        if operation.status != INFO and operation.returned is not None:
            value = operation.result if operation.status == "ok" else operation.value
            events.append((operation.returned, {**base, "type": operation.status, "value": value}))
    return [event for _, event in sorted(events, key=lambda pair: pair[0])]


def test_agrees_with_the_full_check() -> None:
    rng = random.Random(7)
    seen = set()
    for _ in range(3000):
        history = random_history("register", rng, operations=9, processes=3, spread=0, crash=0.15, lie=0.4)
        truth = check(history, Register()).verdict
        online = OnlineRegister()
        alarms = [problem for event in as_events(history) if (problem := online.feed(event))]
        assert bool(alarms) == (truth is Verdict.INVALID), [*history]
        seen.add(truth)
    assert seen == {Verdict.VALID, Verdict.INVALID}


def test_memory_follows_open_operations_not_history() -> None:
    online = OnlineRegister()
    largest = 0
    for event in as_events(large_history("register", 20_000, 5, seed=2)):
        assert online.feed(event) is None
        largest = max(largest, *(len(values.zones) for values in online._keys.values()), 0)
    assert largest < 200


def test_a_value_written_twice_is_not_judged(done) -> None:
    online = OnlineRegister()
    history = done((0, "write", 1, 1), (0, "write", 2, 2), (0, "write", 1, 1), (1, "read", None, 1))
    assert not any(online.feed(event) for event in history)


def test_the_online_log_agrees_with_the_full_check() -> None:
    rng = random.Random(8)
    seen = set()
    for _ in range(1500):
        history = random_history("log", rng, operations=9, processes=3, spread=0, crash=0.15, lie=0.3)
        truth = check(history, Log()).verdict
        online = OnlineLog()
        alarms = [problem for event in as_events(history) if (problem := online.feed(event))]
        assert bool(alarms) == (truth is Verdict.INVALID), [*history]
        seen.add(truth)
    assert seen == {Verdict.VALID, Verdict.INVALID}
