"""Limits for checkers that look at none themselves, since they need little more time than reading does."""

from __future__ import annotations

from collections.abc import Callable

from checker.linearizability.budget import Budget, LimitReached
from checker.verdict import Result, Verdict

__all__ = ["within_limits"]


def within_limits(judge: Callable[[], Result], timeout_s: float | None, memory_mb: float | None) -> Result:
    """What ``judge`` says; unknown where it passes a limit, as :class:`Budget` has them."""
    budget = Budget(timeout_s=timeout_s, memory_mb=memory_mb)
    try:
        with budget.watched_anyway():
            return judge()
    except LimitReached as limit:
        return Result(verdict=Verdict.UNKNOWN, reason=f"undecided: {limit}")
