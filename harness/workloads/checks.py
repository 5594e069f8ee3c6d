"""The checkers of `checker`, as workloads use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from checker import Log, Register, Result, check, check_log
from harness.systems.base import CheckOutcome
from harness.workloads.base import CheckContext

__all__ = ["linearizable_log", "linearizable_registers", "log_contents"]

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


def _outcome(result: Result) -> CheckOutcome:
    data = result.to_json()
    return CheckOutcome(data.pop("valid"), data.pop("reason"), data)
