"""Limits for checkers that check none themselves, because they need little more time than reading."""

from __future__ import annotations

from collections.abc import Callable

from checker.linearizability.budget import Budget, LimitReached
from checker.verdict import Result, Verdict

__all__ = ["within_limits"]


def within_limits(judge: Callable[[], Result], timeout_s: float | None, memory_mb: float | None) -> Result:
    """The result of ``judge``; unknown if it exceeds a limit (see :class:`Budget`)."""
    budget = Budget(timeout_s=timeout_s, memory_mb=memory_mb)
    try:
        with budget.watched_anyway():
            return judge()
    except LimitReached as limit:
        return Result(verdict=Verdict.UNKNOWN, reason=f"undecided: {limit}")
