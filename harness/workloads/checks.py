"""The checkers of `checker`, as workloads use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from checker import (
    CASRegister,
    Counter,
    FetchAndAdd,
    FIFOQueue,
    GrowOnlySet,
    KeyValue,
    Log,
    Model,
    MultiRegister,
    Mutex,
    PriorityQueue,
    Register,
    Result,
    Stack,
    Topic,
    UnorderedQueue,
    VersionedRegister,
    check,
    check_bank,
    check_consumer_progress,
    check_counter,
    check_delay,
    check_exclusion,
    check_log,
    check_long_fork,
    check_sessions,
    check_set,
    check_set_full,
    check_total_queue,
    check_transaction_visibility,
    check_transactions,
    check_unique_ids,
)
from harness.systems.base import CheckOutcome
from harness.workloads.base import CheckContext

__all__ = [
    "Events",
    "bank_totals",
    "consumer_progress",
    "counter_bounds",
    "delays",
    "exclusion",
    "full_set",
    "last_read_of_set",
    "linearizable_cas_registers",
    "linearizable_counter",
    "linearizable_fetch_and_add",
    "linearizable_key_values",
    "linearizable_log",
    "linearizable_multi_register",
    "linearizable_mutex",
    "linearizable_priority_queue",
    "linearizable_queue",
    "linearizable_registers",
    "linearizable_set",
    "linearizable_stack",
    "linearizable_topic",
    "linearizable_versioned_registers",
    "log_contents",
    "long_forks",
    "session_guarantees",
    "total_queue",
    "transaction_visibility",
    "transactions",
    "unique_ids",
]

Events = Sequence[Mapping[str, Any]]


def linearizable_registers(history: Events, context: CheckContext) -> CheckOutcome:
    """Whether every key behaves as one register that starts empty."""
    return _linearizable(history, Register(), context)


def linearizable_cas_registers(history: Events, context: CheckContext) -> CheckOutcome:
    """Whether every key behaves as one register with compare-and-set that starts empty."""
    return _linearizable(history, CASRegister(), context)


def linearizable_counter(history: Events, context: CheckContext) -> CheckOutcome:
    """Whether one order of all additions explains every value read."""
    return _linearizable(history, Counter(), context)


def linearizable_mutex(history: Events, context: CheckContext) -> CheckOutcome:
    """Whether every key behaves as one lock."""
    return _linearizable(history, Mutex(), context)


def linearizable_queue(history: Events, context: CheckContext, *, fifo: bool) -> CheckOutcome:
    """Whether all of it is one queue that shows every value once, first in first out or in any order."""
    return _linearizable(history, FIFOQueue() if fifo else UnorderedQueue(), context)


def linearizable_log(history: Events, context: CheckContext) -> CheckOutcome:
    """Whether every key behaves as one append-only log."""
    return _linearizable(history, Log(), context)


def linearizable_topic(history: Events, context: CheckContext, *, queues: int) -> CheckOutcome:
    """Whether all of it is one topic of so many append-only logs."""
    return _linearizable(history, Topic(queues=queues), context)


def linearizable_stack(history: Events, context: CheckContext) -> CheckOutcome:
    """Whether all of it is one stack."""
    return _linearizable(history, Stack(), context)


def linearizable_priority_queue(history: Events, context: CheckContext, *, largest_first: bool) -> CheckOutcome:
    """Whether all of it is one priority queue."""
    return _linearizable(history, PriorityQueue(largest_first=largest_first), context)


def linearizable_fetch_and_add(history: Events, context: CheckContext) -> CheckOutcome:
    """Whether one order of all additions explains every sum."""
    return _linearizable(history, FetchAndAdd(), context)


def linearizable_multi_register(history: Events, context: CheckContext) -> CheckOutcome:
    """Whether one order of all transactions explains what was read."""
    return _linearizable(history, MultiRegister(), context)


def linearizable_versioned_registers(history: Events, context: CheckContext) -> CheckOutcome:
    """Whether every key behaves as one register that counts its writes."""
    return _linearizable(history, VersionedRegister(), context)


def linearizable_key_values(history: Events, context: CheckContext) -> CheckOutcome:
    """Whether every key behaves as one text that is replaced and added to."""
    return _linearizable(history, KeyValue(), context)


def linearizable_set(history: Events, context: CheckContext) -> CheckOutcome:
    """Whether all of it is one set that only grows."""
    return _linearizable(history, GrowOnlySet(), context)


def last_read_of_set(history: Events) -> CheckOutcome:
    """Whether the last read shows what was acknowledged, and nothing else."""
    return _outcome(check_set(history))


def session_guarantees(history: Events) -> CheckOutcome:
    """Whether every process only saw its own writes, and what it had seen, again."""
    return _outcome(check_sessions(history))


def consumer_progress(history: Events) -> CheckOutcome:
    """Whether stored offsets never went back."""
    return _outcome(check_consumer_progress(history))


def log_contents(history: Events, context: CheckContext) -> CheckOutcome:
    """Whether anything was lost, duplicated, invented, reordered or stored twice."""
    return _outcome(check_log(history, timeout_s=context.timeout_s, memory_mb=context.memory_mb))


def total_queue(history: Events, *, allow_duplicates: bool = True) -> CheckOutcome:
    """Whether everything acknowledged came out, and nothing else; duplicates are counted, or wrong."""
    return _outcome(check_total_queue(history, allow_duplicates=allow_duplicates))


def full_set(history: Events, *, linearizable: bool) -> CheckOutcome:
    """Whether every element stayed that was acknowledged or seen."""
    return _outcome(check_set_full(history, linearizable=linearizable))


def counter_bounds(history: Events) -> CheckOutcome:
    """Whether every value read is one that the additions so far allow."""
    return _outcome(check_counter(history))


def exclusion(history: Events) -> CheckOutcome:
    """Whether no two processes held a lock at once."""
    return _outcome(check_exclusion(history))


def bank_totals(history: Events, *, total: int) -> CheckOutcome:
    """Whether every read of all accounts adds up to `total`; balances may be negative."""
    return _outcome(check_bank(history, total=total, allow_negative=True))


def long_forks(history: Events) -> CheckOutcome:
    """Whether no two reads of a group saw two writes in opposite orders."""
    return _outcome(check_long_fork(history))


def unique_ids(history: Events) -> CheckOutcome:
    """Whether no id was given twice."""
    return _outcome(check_unique_ids(history))


def transactions(history: Events, context: CheckContext, *, workload: str, level: str) -> CheckOutcome:
    """Whether nothing rules out an isolation level (checker.transactions)."""
    return _outcome(
        check_transactions(history, workload, level=level, timeout_s=context.timeout_s, memory_mb=context.memory_mb)
    )


def delays(history: Events) -> CheckOutcome:
    """Whether no delayed message was early or lost; lateness is counted. Brokers note whole milliseconds (R)."""
    return _outcome(check_delay(history, resolution_ms=1.0, late_is_wrong=False))


def transaction_visibility(history: Events) -> CheckOutcome:
    """Whether transactional messages were seen if committed, and only then."""
    return _outcome(check_transaction_visibility(history))


def _linearizable(history: Events, model: Model, context: CheckContext) -> CheckOutcome:
    return _outcome(check(history, model, timeout_s=context.timeout_s, memory_mb=context.memory_mb))


def _outcome(result: Result) -> CheckOutcome:
    data = result.to_json()
    return CheckOutcome(data.pop("valid"), data.pop("reason"), data)
