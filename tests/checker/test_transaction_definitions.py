"""Transactions against the definitions of their levels, implemented here once more by brute force.

A level of one order: some order of the committed transactions, and of any of unknown outcome, explains every read.
Snapshot isolation: some order of starts and commits does, where a transaction reads what was committed at its start
and its own writes, and of two concurrent ones only one writes a key.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from checker import History, Verdict, check_transactions
from checker.transactions import ISOLATION_LEVELS

SERIAL = {"serializable": None, "strong-session-serializable": "process", "strict-serializable": "time"}
SNAPSHOT = {
    "snapshot-isolation": None,
    "strong-session-snapshot-isolation": "process",
    "strong-snapshot-isolation": "time",
}
HISTORIES = 300


def troubled(rng: random.Random, workload: str, *, most: int = 5, odd: bool = False) -> History:
    """A few overlapping transactions on snapshots or on the latest state, with wrong reads.

    Some fail, or end info with or without effect; a client continues after either.  Reads may be truncated, or show
    what was never written, what failed, the reader's own future, or only a part of another's writes.  With ``odd``,
    values repeat, and include null and true.
    """
    is_list = workload == "list-append"
    state: dict[str, Any] = {}
    events: list[dict[str, Any]] = []
    open_ones: dict[int, dict[str, Any]] = {}
    written: list[tuple[str, Any]] = []
    issued, last, wanted = 0, 0, rng.randrange(2, most + 1)
    lie, is_snapshot, crash = rng.choice([0, 0, 0.15, 0.4]), rng.random() < 0.5, rng.choice([0, 0.2])
    clients = rng.randrange(1, 4)
    while issued < wanted or open_ones:
        idle = [process for process in range(clients) if process not in open_ones]
        if idle and issued < wanted and (not open_ones or rng.random() < 0.6):
            steps: list[list[Any]] = []
            for _ in range(rng.randrange(1, 4)):
                last += 1
                value = rng.choice([1, True, None, 1.0, [1], [True]]) if odd and rng.random() < 0.5 else last
                key = rng.choice("xy")
                steps.append(["r", key, None] if rng.random() < 0.5 else ["append" if is_list else "w", key, value])
            process = rng.choice(idle)
            open_ones[process] = {"steps": steps, "seen": dict(state)}
            issued += 1
            events.append({"process": process, "type": "invoke", "f": "txn", "value": steps})
            continue
        process = rng.choice(sorted(open_ones))
        one = open_ones.pop(process)
        kind = "info" if rng.random() < crash else "fail" if rng.random() < crash else "ok"
        view = dict(one["seen"] if is_snapshot else state)
        answers = [[f, key, play(view, f, key, value)] for f, key, value in one["steps"]]
        written += [(key, value) for f, key, value in one["steps"] if f != "r"]
        part = rng.randrange(4) if rng.random() < lie else 4
        if kind == "ok" or (kind == "info" and rng.random() < 0.6) or rng.random() < lie / 4:
            for f, key, value in one["steps"][:part]:
                if f != "r":
                    play(state, f, key, value)
        for step in answers:
            if step[0] == "r" and rng.random() < lie:
                step[2] = wrong_answer(rng, step, written, is_list)
        events.append({"process": process, "type": kind, "f": "txn", "value": answers if kind == "ok" else None})
    return History.from_events(events)


def wrong_answer(rng: random.Random, step: list[Any], written: list[tuple[str, Any]], is_list: bool) -> Any:
    values = [value for key, value in written if key == step[1]]
    if not is_list:
        return rng.choice([*values, None, 99])
    shown = list(step[2] or ())
    way = rng.randrange(4)
    if way == 0:
        return shown[: rng.randrange(len(shown) + 1)]
    if way == 1 and shown:
        del shown[rng.randrange(len(shown))]
        return shown
    return [*shown, rng.choice([*values, 99])]


def play(state: dict[str, Any], f: str, key: str, value: Any) -> Any:
    """What a step answers, and ``state`` after it."""
    if f == "r":
        return state.get(key)
    state[key] = [*(state.get(key) or []), value] if f == "append" else value
    return value


def same(one: Any, other: Any) -> bool:
    """As JSON: true is not 1, 1 is 1.0; an empty list may be null."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def explains(history: History, row: int, state: dict[str, Any], is_list: bool) -> dict[str, Any] | None:
    """The state after a transaction on that one, if it could have read there what it did."""
    after = dict(state)
    for f, key, value in history.result[row] if history.status[row] == "ok" else history.value[row]:
        seen = play(after, f, key, value)
        told = history.status[row] == "ok" and f == "r"
        if told and not (same(value or [], seen or []) if is_list else same(value, seen)):
            return None
    return after


def precedes(history: History, one: int, other: int, order: str | None) -> bool:
    if order is None or history.status[one] != "ok" or history.returned[one] > history.invoked[other]:
        return False
    return order == "time" or history.process[one] == history.process[other]


def has_serial_order(history: History, workload: str, order: str | None) -> bool:
    rows = [row for row in range(len(history)) if history.status[row] != "fail"]

    def go(left: frozenset[int], state: dict[str, Any]) -> bool:
        if all(history.status[row] != "ok" for row in left):
            return True
        for row in left:
            if not any(precedes(history, other, row, order) for other in left):
                after = explains(history, row, state, workload == "list-append")
                if after is not None and go(left - {row}, after):
                    return True
        return False

    return go(frozenset(rows), {})


def has_snapshot_order(history: History, workload: str, order: str | None) -> bool:
    rows = [row for row in range(len(history)) if history.status[row] != "fail"]
    writes = {row: {step[1] for step in history.value[row] if step[0] != "r"} for row in rows}
    Running = dict[int, tuple[dict[str, Any], frozenset[str]]]

    def go(waiting: frozenset[int], running: Running, state: dict[str, Any]) -> bool:
        if all(history.status[row] != "ok" for row in (*waiting, *running)):
            return True
        for row, (after, _) in running.items():
            others = {other: each for other, each in running.items() if other != row}
            if not writes[row] & running[row][1]:
                told = {other: (view, lost | writes[row]) for other, (view, lost) in others.items()}
                if go(waiting, told, {**state, **{key: after[key] for key in writes[row]}}):
                    return True
        for row in waiting:
            if any(precedes(history, other, row, order) for other in (*waiting, *running)):
                continue
            after = explains(history, row, state, workload == "list-append")
            if after is not None and go(waiting - {row}, {**running, row: (after, frozenset())}, state):
                return True
        return False

    return go(frozenset(rows), {}, {})


@pytest.mark.parametrize("workload", ["list-append", "rw-register"])
def test_serial_and_snapshot_levels_are_decided_as_defined(workload: str) -> None:
    rng = random.Random(17)
    seen = Counter[tuple[str, bool]]()
    for number in range(HISTORIES):
        history = troubled(rng, workload)
        for levels, has_order in ((SERIAL, has_serial_order), (SNAPSHOT, has_snapshot_order)):
            for level, order in levels.items():
                truth = has_order(history, workload, order)
                result = check_transactions(history, workload, level=level)
                expected = Verdict.VALID if truth else Verdict.INVALID
                assert result.verdict is expected, f"history {number}, {level}: {result.reason}"
                assert (level in result.stats["levels"]) is truth, f"history {number}, {level}"
                seen[level, truth] += 1
    assert all(seen[level, truth] > HISTORIES // 20 for level in (*SERIAL, *SNAPSHOT) for truth in (True, False))


@pytest.mark.parametrize("workload", ["list-append", "rw-register"])
def test_repeated_null_and_true_values_never_lead_to_a_wrong_verdict(workload: str) -> None:
    """Serial levels are decided; snapshot isolation of ambiguous keys may stay unknown."""
    rng = random.Random(18)
    seen = Counter[tuple[bool, Verdict]]()
    for number in range(HISTORIES):
        history = troubled(rng, workload, most=4, odd=True)
        for level, order in SERIAL.items():
            truth = has_serial_order(history, workload, order)
            verdict = check_transactions(history, workload, level=level).verdict
            assert verdict is (Verdict.VALID if truth else Verdict.INVALID), f"history {number}, {level}"
        truth = has_snapshot_order(history, workload, None)
        verdict = check_transactions(history, workload, level="snapshot-isolation").verdict
        assert verdict is not (Verdict.INVALID if truth else Verdict.VALID), f"history {number}"
        seen[truth, verdict] += 1
    assert min(seen[True, Verdict.VALID], seen[False, Verdict.INVALID]) > HISTORIES // 20


@pytest.mark.parametrize("workload", ["list-append", "rw-register"])
def test_a_witness_alone_is_invalid_by_definition(workload: str) -> None:
    """A value that none of them wrote counts as written by one left out, unless it is a garbage read."""
    rng = random.Random(19)
    shown = 0
    for number in range(HISTORIES):
        history = troubled(rng, workload)
        level = rng.choice(ISOLATION_LEVELS)
        result = check_transactions(history, workload, level=level)
        if result.witness is None:
            continue
        assert len(result.witness.operations) <= 6
        alone = History.from_operations(result.witness.operations)
        excerpt = check_transactions(alone, workload, level=level, excerpt="garbage-read" not in result.witness.text)
        assert excerpt.verdict is Verdict.INVALID, f"history {number}, {level}: {result.reason}"
        for levels, has_order in ((SERIAL, has_serial_order), (SNAPSHOT, has_snapshot_order)):
            assert level not in levels or not has_order(alone, workload, levels[level]), f"history {number}"
        shown += 1
    assert shown > HISTORIES // 20


@pytest.mark.parametrize("kind", ["read-uncommitted", "read-committed"])
def test_the_answers_of_a_weak_system_do_not_rule_out_its_own_level(kind: str) -> None:
    """Write locks until the end; reads of the latest values, or of committed and own ones."""
    rng = random.Random(20)
    ruled_out = 0
    for number in range(HISTORIES):
        history = weak(rng, is_dirty=kind == "read-uncommitted")
        levels = check_transactions(history).stats["levels"]
        assert kind in levels, f"history {number}: {check_transactions(history, level=kind).reason}"
        ruled_out += "snapshot-isolation" not in levels
    assert ruled_out > HISTORIES // 20


def weak(rng: random.Random, *, is_dirty: bool) -> History:
    """Transactions whose steps interleave; some are rolled back, and end fail or info."""
    lists: dict[str, list[tuple[int, int]]] = {"x": [], "y": []}
    locked: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    open_ones: dict[int, list[list[Any]]] = {}
    last = 0
    for process in range(5):
        steps = []
        for _ in range(rng.randrange(1, 4)):
            last += 1
            steps.append([rng.choice(["r", "append"]), rng.choice("xy"), last])
        open_ones[process] = [[f, key, None if f == "r" else value] for f, key, value in steps]
        events.append({"process": process, "type": "invoke", "f": "txn", "value": open_ones[process]})
    done: dict[int, list[list[Any]]] = {process: [] for process in open_ones}
    while open_ones:
        process = rng.choice(sorted(open_ones))
        steps, answers = open_ones[process], done[process]
        if len(answers) < len(steps):
            f, key, value = steps[len(answers)]
            holder = locked.get(key, process)
            if f == "append" and holder == process:
                locked[key] = process
                lists[key].append((process, value))
                answers.append([f, key, value])
            elif f == "r":
                shown = [value for writer, value in lists[key] if is_dirty or writer in (-1, process)]
                answers.append([f, key, shown])
            elif len([one for one in open_ones if one in locked.values()]) < 2 or rng.random() < 0.9:
                continue
        is_full = len(answers) == len(steps)
        if is_full and rng.random() < 0.6:
            continue
        if not is_full and rng.random() < 0.95:
            continue
        del open_ones[process]
        is_kept = is_full and rng.random() < 0.8
        for key, some in lists.items():
            lists[key] = [(-1 if writer == process else writer, value) for writer, value in some
                          if writer != process or is_kept]  # fmt: skip
        locked = {key: holder for key, holder in locked.items() if holder != process}
        kind = "info" if rng.random() < 0.2 else "ok" if is_kept else "fail"
        events.append({"process": process, "type": kind, "f": "txn", "value": answers if kind == "ok" else None})
    return History.from_events(events)
