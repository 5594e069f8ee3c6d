"""Results of the checkers in `checker`, as outcomes for workloads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from checker import History, Model, Result, check, check_delay, check_log
from checker.limits import within_limits
from harness.systems.base import CheckOutcome
from harness.workloads.base import CheckContext

__all__ = ["OUT_OF_MEMORY", "Events", "delays", "judged", "linearizable", "log_contents"]

Events = History | Sequence[Mapping[str, Any]]

OUT_OF_MEMORY = "not judged: the machine, or a limit such as `ulimit -v`, gave no more memory"


def judged(checker: Callable[..., Result], history: Events, context: CheckContext, **options: Any) -> CheckOutcome:
    """Run a checker on a history within the limits of `context`, even if the checker itself takes no limits. If a limit
    of address space such as `ulimit -v` stops it, only this check is unknown."""
    limits = {"timeout_s": context.timeout_s, "memory_mb": context.memory_mb}
    try:
        if limits.keys() <= inspect.signature(checker).parameters.keys():
            return _as_outcome(checker(history, **limits, **options))
        return _as_outcome(within_limits(lambda: checker(history, **options), **limits))
    except MemoryError:
        return CheckOutcome("unknown", OUT_OF_MEMORY)


def linearizable(history: Events, model: Model, context: CheckContext) -> CheckOutcome:
    """Whether the operations, per key if there are keys, are linearizable with respect to `model`."""
    return judged(check, history, context, model=model)


def log_contents(history: Events, context: CheckContext) -> CheckOutcome:
    """Whether anything was lost, duplicated, invented, reordered or stored twice."""
    return judged(check_log, history, context)


def delays(history: Events, context: CheckContext, *, redelivers: bool = False) -> CheckOutcome:
    """Whether no delayed message was early or lost; late ones are counted. Brokers store whole milliseconds (R)."""
    return judged(check_delay, history, context, resolution_ms=1.0, late_is_wrong=False, redelivers=redelivers)


def _as_outcome(result: Result) -> CheckOutcome:
    """A checker's result, with its statistics and witness as details."""
    data = result.to_json()
    return CheckOutcome(data.pop("valid"), data.pop("reason"), data)
