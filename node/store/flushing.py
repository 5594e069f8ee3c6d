"""When what was appended to a log counts as stored, and what its sender is told when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

__all__ = [
    "DEFAULT_FLUSH",
    "FlushPolicy",
    "LogDamaged",
    "LogRefuses",
    "NotYetDurable",
    "OnDone",
    "settle",
]

OnDone = Callable[[Exception | None], object]
"""Called once, with None when something is stored, or with why that is not known. Must not raise."""


class LogRefuses(Exception):
    """Nothing was appended: the disk is busy, full or failing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushPolicy:
    """When an asynchronous flush syncs."""

    interval_ms: int = 500
    """Between two looks whether it is worth it (R: flushIntervalCommitLog)."""
    least_pages: int = 4
    """Unsynced pages that make it so (R: flushCommitLogLeastPages)."""
    thorough_interval_ms: int = 10_000
    """After which everything is synced however little it is (R: flushCommitLogThoroughInterval)."""


class NotYetDurable(Exception):
    """The record is in the log, and was not synced in time."""


DEFAULT_FLUSH = FlushPolicy()


class LogDamaged(ValueError):
    """The log does not hold what its checkpoint says; the text names the file and the byte."""


def settle(stored: asyncio.Future[None], error: Exception | None) -> None:
    """Tell a future what a `OnDone` is told."""
    if stored.done():
        return
    if error is None:
        stored.set_result(None)
    else:
        stored.set_exception(error)
