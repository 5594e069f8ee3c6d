"""Transactions against the definition: every order of a handful, at three levels of isolation."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from checker import History, Verdict, check_transactions
from checker.transactions import ISOLATION_LEVELS
from checker.transactions import check as checking

LEVELS = ("serializable", "strong-session-serializable", "strict-serializable")
HISTORIES = 250


def random_transactions(rng: random.Random, workload: str) -> History:
    """Serial transactions of overlapping clients; some reads answer something else, some outcomes stay unknown."""
    write = "append" if workload == "list-append" else "w"
    state: dict[str, Any] = {}
    events: list[dict[str, Any]] = []
    running: dict[int, tuple[list[Any], list[Any] | None]] = {}
    idle = list(range(rng.randrange(1, 4)))
    issued, last, spare, wanted, lie = 0, 0, 100, rng.randrange(2, 7), rng.choice([0, 0.3, 0.6])
    while issued < wanted or running:
        if idle and issued < wanted and (not running or rng.random() < 0.5):
            process = idle.pop(rng.randrange(len(idle)))
            issued += 1
            steps: list[Any] = []
            for _ in range(rng.randrange(1, 4)):
                last += 1
                key = rng.choice("xy")
                steps.append(["r", key, None] if rng.random() < 0.5 else [write, key, last])
            running[process] = steps, None
            events.append({"process": process, "type": "invoke", "f": "txn", "value": steps})
            continue
        process = rng.choice(sorted(running))
        steps, answers = running[process]
        if answers is None:
            running[process] = steps, [[f, key, _apply(state, f, key, value)] for f, key, value in steps]
            continue
        crashed = rng.random() < 0.1
        if rng.random() < lie:
            for step in answers:
                if step[0] == "r" and workload == "list-append":
                    step[2] = (step[2] or [])[: rng.randrange(4)]
                elif step[0] == "r":
                    asked = [one for steps, _ in running.values() for one in steps]
                    seen = [value for f, key, value in asked if f == "w" and key == step[1]]
                    step[2] = rng.choice([None, state.get(step[1]), *seen])
        del running[process]
        result = None if crashed else answers
        events.append({"process": process, "type": "info" if crashed else "ok", "f": "txn", "value": result})
        spare += 1
        idle.append(spare if crashed else process)
    return History.from_events(events)


def _apply(state: dict[str, Any], f: str, key: str, value: Any) -> Any:
    if f == "r":
        return state.get(key)
    state[key] = [*(state.get(key) or []), value] if f == "append" else value
    return value


def some_order_explains(history: History, level: str, left: frozenset[int], state: dict[str, Any]) -> bool:
    """Tries them all; transactions of unknown outcome may be left out."""
    done = {row for row in left if history.status[row] == "ok"}
    if not done:
        return True
    for row in left:
        if any(_comes_first(history, level, other, row) for other in done - {row}):
            continue
        after = dict(state)
        certain = history.status[row] == "ok"
        answers = [
            (f, value, _apply(after, f, key, value))
            for f, key, value in (history.result[row] if certain else history.value[row])
        ]
        if certain and any(f == "r" and (told or None) != (seen or None) for f, told, seen in answers):
            continue
        if some_order_explains(history, level, left - {row}, after):
            return True
    return False


def _comes_first(history: History, level: str, one: int, other: int) -> bool:
    if level == "strict-serializable":
        return history.returned[one] < history.invoked[other]
    return level != "serializable" and history.process[one] == history.process[other] and one < other


@pytest.mark.parametrize("level", LEVELS)
def test_list_append_verdicts_agree_with_brute_force(level: str) -> None:
    rng = random.Random(5)
    seen = set()
    for number in range(HISTORIES):
        history = random_transactions(rng, "list-append")
        truth = some_order_explains(history, level, frozenset(range(len(history))), {})
        result = check_transactions(history, level=level)
        assert result.verdict is (Verdict.VALID if truth else Verdict.INVALID), f"{number}: {result.reason}"
        seen.add(truth)
    assert seen == {True, False}


@pytest.mark.parametrize("level", LEVELS)
def test_rw_register_verdicts_agree_with_brute_force(level: str) -> None:
    """Values do not show the order of versions; where no dependency does, the orders are searched."""
    rng = random.Random(9)
    caught = Counter[bool]()
    for number in range(2 * HISTORIES):
        history = random_transactions(rng, "rw-register")
        truth = some_order_explains(history, level, frozenset(range(len(history))), {})
        result = check_transactions(history, "rw-register", level=level)
        assert result.verdict is (Verdict.VALID if truth else Verdict.INVALID), f"{number}: {result.reason}"
        if result.witness is not None:
            caught["no order of these transactions" in result.witness.text] += 1
    assert caught[False] > 10 and caught[True] > 0


@pytest.mark.parametrize("workload", ["list-append", "rw-register"])
def test_a_witness_alone_is_invalid(workload: str) -> None:
    rng = random.Random(3)
    more = 0
    for number in range(4 * HISTORIES):
        history = random_transactions(rng, workload)
        level = rng.choice(ISOLATION_LEVELS)
        result = check_transactions(history, workload, level=level)
        if result.witness is None:
            continue
        alone = History.from_operations(result.witness.operations)
        assert check_transactions(alone, workload, level=level).verdict is Verdict.INVALID, f"{number}: {result.reason}"
        assert len(result.witness.operations) <= 6
        more += "follows from" in result.witness.text
    assert more or workload == "rw-register"


def test_an_order_of_hundreds_of_transactions_is_found_or_refuted_by_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "CUT_TIMEOUT_S", 120.0)  # reducing takes 0.7 s of processor time
    rng = random.Random(4)
    for _ in range(2):
        events = serial_transactions(rng, 220)
        assert check_transactions(events, "rw-register").stats["order"] == "found for strict-serializable"
        reads = [step for event in events if event["type"] == "ok" for step in event["value"] if step[0] == "r"]
        late = rng.choice([step for step in reads if step[2] is not None and step[2] > 100])
        late[2] = next(step[2] for step in reads if step[1] == late[1] and step[2] is not None)
        result = check_transactions(events, "rw-register")
        assert result.verdict is Verdict.INVALID and result.witness is not None
        assert len(result.witness.operations) <= 6
        alone = check_transactions(History.from_operations(result.witness.operations), "rw-register")
        assert alone.verdict is Verdict.INVALID


def serial_transactions(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Events of transactions on five registers that overlap in pairs and take effect in the order of invocation."""
    state: dict[str, Any] = {}
    events: list[dict[str, Any]] = []
    for number in range(count):
        steps = [["r", key, None] if rng.random() < 0.5 else ["w", key, number] for key in rng.sample("abcde", 2)]
        answers = [[f, key, _apply(state, f, key, value)] for f, key, value in steps]
        events.append({"process": number % 2, "type": "invoke", "f": "txn", "value": steps})
        events.append({"process": number % 2, "type": "ok", "f": "txn", "value": answers})
    for at in range(2, len(events) - 1, 4):
        # The return of every second transaction after the next one's invocation.
        events[at - 1], events[at] = events[at], events[at - 1]
    return events
