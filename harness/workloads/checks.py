"""What checkers of `checker` say, as workloads return it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from checker import History, Model, Result, check, check_delay, check_log
from harness.systems.base import CheckOutcome
from harness.workloads.base import CheckContext

__all__ = ["Events", "as_outcome", "delays", "linearizable", "log_contents"]

Events = History | Sequence[Mapping[str, Any]]


def linearizable(history: Events, model: Model, context: CheckContext) -> CheckOutcome:
    """Whether one order of the operations, of each key where there are keys, explains every result by `model`."""
    return as_outcome(check(history, model, timeout_s=context.timeout_s, memory_mb=context.memory_mb))


def log_contents(history: Events, context: CheckContext) -> CheckOutcome:
    """Whether anything was lost, duplicated, invented, reordered or stored twice."""
    return as_outcome(check_log(history, timeout_s=context.timeout_s, memory_mb=context.memory_mb))


def delays(history: Events, *, redelivers: bool = False) -> CheckOutcome:
    """Whether no delayed message was early or lost; lateness is counted. Brokers note whole milliseconds (R)."""
    return as_outcome(check_delay(history, resolution_ms=1.0, late_is_wrong=False, redelivers=redelivers))


def as_outcome(result: Result) -> CheckOutcome:
    """What a checker said, with its statistics and witness as details."""
    data = result.to_json()
    return CheckOutcome(data.pop("valid"), data.pop("reason"), data)
