"""Histories that one rule alone refutes, or one setting alone allows."""

from __future__ import annotations

from typing import Any

import pytest

from harness.workloads.base import CLIENT, CheckContext, Workload
from harness.workloads.choice import make_workload
from harness.workloads.delay import DelayWorkload
from harness.workloads.transactions import TransactionsWorkload

CONTEXT = CheckContext(timeout_s=10.0, memory_mb=512)


class Toys:
    """A system that offers clients and nothing else."""

    offers = frozenset({CLIENT})


Step = tuple[int, str, str, Any]
"""Process, type, f, value."""


def one_by_one(*operations: tuple[str, Any, Any]) -> list[Step]:
    """Successful operations (f, value, result) of one process, one after the other."""
    return [
        step
        for f, value, result in operations
        for step in ((0, "invoke", f, value), (0, "ok", f, result if result is not None else value))
    ]


def verdicts(name: str, settings: dict[str, str], steps: list[Step], **more: Any) -> dict[str, Any]:
    options = {f"workload.{key}": value for key, value in settings.items()}
    return judged_by(make_workload(name, system_class=Toys, system="toys", settings=options), steps, **more)


def judged_by(workload: Workload, steps: list[Step], **more: Any) -> dict[str, Any]:
    events = [
        {"index": at, "time": at * 10**9, "process": process, "type": kind, "f": f, "value": value, **more}
        for at, (process, kind, f, value) in enumerate(steps)
    ]
    return {check: outcome.valid for check, outcome in workload.check(events, CONTEXT).items()}


EMPTY = (0, "invoke", "dequeue", None), (0, "ok", "dequeue", None)
OVERTAKEN = [
    *one_by_one(("enqueue", 1, None), ("enqueue", 2, None), ("dequeue", None, 2), ("dequeue", None, 1)),
    *EMPTY,
]
TWICE = [*one_by_one(("enqueue", 1, None), ("dequeue", None, 1), ("dequeue", None, 1)), *EMPTY]
LOST_AND_TWICE = [
    *one_by_one(("enqueue", 1, None), ("enqueue", 2, None), ("dequeue", None, 1), ("dequeue", None, 1)),
    *EMPTY, *one_by_one(("enqueue", 3, None)),
]  # fmt: skip
LATE = [*one_by_one(("enqueue", 1, None)), *EMPTY, *one_by_one(("dequeue", None, 1)), *EMPTY]


@pytest.mark.parametrize(
    ("steps", "settings", "expected"),
    [
        (OVERTAKEN, {}, {"total-queue": True}),
        (OVERTAKEN, {"order": "any"}, {"total-queue": True, "linearizable": True}),
        (OVERTAKEN, {"order": "fifo"}, {"total-queue": True, "linearizable": False}),
        (LATE, {}, {"total-queue": True}),
        (LATE, {"order": "any"}, {"total-queue": True, "linearizable": False}),
        (TWICE, {}, {"total-queue": True}),
        (TWICE, {"delivery": "exactly-once"}, {"total-queue": False}),
        (LOST_AND_TWICE, {}, {"total-queue": "unknown"}),  # nobody found the queue empty at the end
        (LOST_AND_TWICE, {"delivery": "exactly-once"}, {"total-queue": False}),
    ],
)  # fmt: skip
def test_queues_are_checked_for_the_order_and_delivery_that_they_promise(
    steps: list[Step], settings: dict[str, str], expected: dict[str, Any]
) -> None:
    assert verdicts("queue", settings, steps) == expected


OLDER_FIRST = [
    *one_by_one(("insert", 1, None), ("insert", 2, None), ("extract", None, 2), ("extract", None, 1)),
    (0, "invoke", "extract", None), (0, "ok", "extract", None),
]  # fmt: skip


@pytest.mark.parametrize(("first", "valid"), [("largest", True), ("smallest", False)])
def test_a_priority_queue_gives_the_value_that_it_promises_first(first: str, valid: bool) -> None:
    assert verdicts("priority-queue", {"first": first}, OLDER_FIRST) == {"linearizable": valid}


def test_a_counter_within_its_bounds_may_not_be_linearizable() -> None:
    """Of two concurrent increments, each of two reads in turn has seen another one alone."""
    steps = [(1, "invoke", "increment", 1), (2, "invoke", "increment", 2)]
    steps += [*one_by_one(("read", None, 1), ("read", None, 2)), (1, "ok", "increment", 1), (2, "ok", "increment", 2)]
    assert verdicts("counter", {}, steps) == {"counter-bounds": True}
    assert verdicts("counter", {"check": "linearizable"}, steps) == {"counter-bounds": True, "linearizable": False}
    steps = one_by_one(("increment", 1, None), ("read", None, 3))
    assert verdicts("counter", {}, steps) == {"counter-bounds": False}


@pytest.mark.parametrize(("reads", "valid"), [("eventual", True), ("linearizable", False)])
def test_an_element_may_be_missing_at_first_unless_reads_are_linearizable(reads: str, valid: bool) -> None:
    steps = [*one_by_one(("add", 1, None), ("read", None, [1])), (0, "invoke", "read", None), (0, "ok", "read", [])]
    steps += one_by_one(("read", None, [1]))
    assert verdicts("set", {"reads": reads}, steps) == {"set-full": valid}


@pytest.mark.parametrize(
    ("isolation", "valid"), [("strict-serializable", False), ("serializable", True), ("snapshot-isolation", True)]
)
def test_a_stale_transaction_violates_only_the_isolation_that_excludes_it(isolation: str, valid: bool) -> None:
    steps = one_by_one(
        ("txn", [["append", 0, 1]], None),
        ("txn", [["r", 0, None]], [["r", 0, [1]]]),
    )
    stale = [(1, "invoke", "txn", [["r", 0, None]]), (1, "ok", "txn", [["r", 0, []]])]
    steps = [*steps[:2], *stale, *steps[2:]]
    assert verdicts("list-append", {"isolation": isolation}, steps) == {"isolation": valid}


def test_only_a_held_lock_is_released_if_that_is_checked() -> None:
    steps = one_by_one(("acquire", None, None), ("release", None, None), ("release", None, None))
    assert verdicts("mutex", {}, steps, key="lock0") == {"exclusion": True}
    checked = verdicts("mutex", {"check": "linearizable"}, steps, key="lock0")
    assert checked == {"exclusion": True, "linearizable": False}


@pytest.mark.parametrize(("balances", "valid"), [([-5, 5], True), ([0, 0], True), ([-5, 4], False), ([0, 5], False)])
def test_the_balances_of_a_bank_add_up_to_nothing_and_may_be_negative(balances: list[int], valid: bool) -> None:
    steps = one_by_one(("transfer", {"from": 0, "to": 1, "amount": 5}, None))
    steps += [(0, "invoke", "read", [0, 1]), (0, "ok", "read", [[0, balances[0]], [1, balances[1]]])]
    assert verdicts("bank", {"accounts": "2"}, steps) == {"bank": valid}


@pytest.mark.parametrize("name", ["register", "key-value", "cas-register", "versioned-register"])
@pytest.mark.parametrize("kind", ["ok", "fail", "info"])
def test_a_register_that_was_not_read_after_its_last_write_is_unknown(name: str, kind: str) -> None:
    put, get = ("put", "get") if name == "key-value" else ("write", "read")
    value: Any = "seven" if name == "key-value" else 7
    written, read = (1, [1, 7]) if name == "versioned-register" else (value, value)
    steps = [(0, "invoke", put, value), (0, "ok", put, written)]
    steps += [(0, "invoke", get, None), (0, kind, get, read if kind == "ok" else None)]
    assert verdicts(name, {}, steps, key=0) == {"linearizable": True if kind == "ok" else "unknown"}
    if name == "versioned-register":
        checked = verdicts(name, {"check": "sessions"}, steps, key=0)
        assert checked == {"sessions": True if kind == "ok" else "unknown"}


def test_of_the_registers_of_a_run_with_cas_only_the_newest_must_be_read_at_the_end() -> None:
    steps = [(0, "invoke", "write", 7), (0, "ok", "write", 7), (0, "invoke", "read", None), (0, "info", "read", None)]
    for keys, valid in (([1], "unknown"), ([1, 2], True)):  # two keys are in use at a time: 0 and 1, then 2 and 3
        events = [
            {"process": process, "type": kind, "f": f, "value": value, "key": key}
            for key in keys
            for process, kind, f, value in (steps if key == 1 else one_by_one(("write", 8, None), ("read", None, 8)))
        ]
        workload = make_workload("cas-register", system_class=Toys, system="toys", settings={"workload.keys": "2"})
        found = workload.check([{"index": at, "time": at, **event} for at, event in enumerate(events)], CONTEXT)
        assert found["linearizable"].valid == valid


def sent(message: int, delay_ms: int) -> list[Step]:
    return one_by_one(("send", {"message": message, "delay_ms": delay_ms}, None))


NOTHING = [(0, "invoke", "receive", None), (0, "ok", "receive", None)]


@pytest.mark.parametrize(
    ("longest_ms", "steps", "valid"),
    [
        # Nothing was there at 4 s. The broker may have held everything back until the other message was due, at 8 s.
        (5000, [*sent(1, 0), *sent(2, 0), *NOTHING], "unknown"),
        (500, [*sent(1, 0), *sent(2, 0), *NOTHING], False),
        # What is certain stays so: message 2 came before it was due, and message 7 was never sent.
        (5000, [*sent(1, 0), *sent(2, 5000), *one_by_one(("receive", None, 2)), *NOTHING], False),
        (5000, [*sent(1, 0), *sent(2, 0), *one_by_one(("receive", None, 7)), *NOTHING], False),
    ],
)
def test_a_delayed_value_that_is_missing_may_still_come_but_what_came_too_early_came_too_early(
    longest_ms: int, steps: list[Step], valid: Any
) -> None:
    assert verdicts("delay", {"longest_ms": str(longest_ms)}, steps) == {"delay": valid}


def ended(message: int, *, commit: bool) -> list[Step]:
    return one_by_one(("transact", {"message": message, "commit": commit}, None))


@pytest.mark.parametrize(
    ("steps", "valid"),
    [
        ([*ended(1, commit=True), *NOTHING], False),
        ([*ended(1, commit=True), *NOTHING, *ended(2, commit=False)], "unknown"),  # nobody looked afterwards
        ([*ended(1, commit=True), *ended(3, commit=False), *one_by_one(("receive", None, 3)), *NOTHING,
          *ended(2, commit=False)], False),
        ([*ended(1, commit=True), *one_by_one(("prepare", 3, None), ("receive", None, 3)), *NOTHING,
          *ended(2, commit=False)], False),
        ([*ended(1, commit=True), *one_by_one(("receive", None, 7)), *NOTHING, *ended(2, commit=False)], False),
    ],
)  # fmt: skip
def test_a_committed_value_that_is_missing_may_still_come_but_what_must_not_be_seen_was_seen(
    steps: list[Step], valid: Any
) -> None:
    assert verdicts("transactions", {}, steps) == {"transaction-visibility": valid}


# The broker's own forms, whose groups redeliver what was not acknowledged, and can tell what is still to come


def lag(number: int) -> list[Step]:
    return [(0, "invoke", "lag", None), (0, "ok", "lag", number)]


CRASHED = [(1, "invoke", "receive", None), (1, "info", "receive", None)]


@pytest.mark.parametrize(
    ("steps", "valid"),
    [
        ([*sent(1, 0), *sent(2, 0), *one_by_one(("receive", None, [1])), *CRASHED, *NOTHING, *lag(0)], False),
        ([*sent(1, 0), *sent(2, 0), *one_by_one(("receive", None, [1])), *NOTHING, *lag(1)], "unknown"),
        ([*sent(1, 5000), *one_by_one(("receive", None, [1])), *lag(1)], False),  # too early
        ([*sent(1, 0), *one_by_one(("receive", None, [7])), *lag(1)], False),  # never sent
    ],
)
def test_the_broker_redelivers_delayed_messages_and_what_came_too_early_came_too_early(
    steps: list[Step], valid: Any
) -> None:
    assert judged_by(DelayWorkload(), steps) == {"delay": valid}


@pytest.mark.parametrize(("after_ns", "valid"), [(999_000_001, True), (998_999_999, False)])
def test_the_broker_s_times_are_whole_milliseconds(after_ns: int, valid: bool) -> None:
    steps = [*sent(1, 1000), *one_by_one(("receive", None, [1])), *lag(0)]
    times = [0, 1, 2, after_ns, after_ns, after_ns]
    events = [
        {"index": at, "time": time, "process": process, "type": kind, "f": f, "value": value}
        for at, (time, (process, kind, f, value)) in enumerate(zip(times, steps, strict=True))
    ]
    assert DelayWorkload().check(events, CONTEXT)["delay"].valid is valid


@pytest.mark.parametrize(
    ("steps", "valid"),
    [
        ([*ended(1, commit=True), *CRASHED, *NOTHING, *lag(0)], False),
        ([*ended(1, commit=True), *NOTHING, *lag(1)], "unknown"),
        ([*ended(1, commit=False), *one_by_one(("receive", None, [1])), *lag(1)], False),
        ([*ended(1, commit=True), *one_by_one(("receive", None, [7])), *lag(1)], False),
    ],
)
def test_the_broker_redelivers_transactional_messages_and_what_was_rolled_back_must_not_be_seen(
    steps: list[Step], valid: Any
) -> None:
    steps = [
        (process, kind, f, {**value, "tell": True} if f == "transact" else value) for process, kind, f, value in steps
    ]
    assert judged_by(TransactionsWorkload(), steps) == {"transaction-visibility": valid}
