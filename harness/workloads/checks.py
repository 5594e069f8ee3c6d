"""The checkers of `checker`, as workloads use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from checker import (
    Log,
    Register,
    Result,
    check,
    check_delay,
    check_log,
    check_total_queue,
    check_transaction_visibility,
)
from harness.systems.base import CheckOutcome
from harness.workloads.base import CheckContext

__all__ = [
    "delays",
    "linearizable_log",
    "linearizable_registers",
    "log_contents",
    "total_queue",
    "transaction_visibility",
]

Events = Sequence[Mapping[str, Any]]


def linearizable_registers(history: Events, context: CheckContext) -> CheckOutcome:
    """Whether every key behaves as one register that starts empty."""
    return _outcome(check(history, Register(), timeout_s=context.timeout_s, memory_mb=context.memory_mb))


def linearizable_log(history: Events, context: CheckContext) -> CheckOutcome:
    """Whether every key behaves as one append-only log."""
    return _outcome(check(history, Log(), timeout_s=context.timeout_s, memory_mb=context.memory_mb))


def log_contents(history: Events, context: CheckContext) -> CheckOutcome:
    """Whether anything was lost, duplicated, invented, reordered or stored twice."""
    return _outcome(check_log(history, timeout_s=context.timeout_s, memory_mb=context.memory_mb))


def total_queue(history: Events) -> CheckOutcome:
    """Whether everything acknowledged came out, and nothing else; duplicates are counted."""
    return _outcome(check_total_queue(history))


def delays(history: Events) -> CheckOutcome:
    """Whether no delayed message was early or lost; lateness is counted. Brokers note whole milliseconds (R)."""
    return _outcome(check_delay(history, resolution_ms=1.0, late_is_wrong=False))


def transaction_visibility(history: Events) -> CheckOutcome:
    """Whether transactional messages were seen if committed, and only then."""
    return _outcome(check_transaction_visibility(history))


def _outcome(result: Result) -> CheckOutcome:
    data = result.to_json()
    return CheckOutcome(data.pop("valid"), data.pop("reason"), data)
