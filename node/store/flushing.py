"""When an appended record counts as stored, and the errors reported when it does not."""

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
"""Called once: with None when something is stored, or with the reason why that is not known. Must not raise."""


class LogRefuses(Exception):
    """Nothing was appended: the disk is busy, full or failing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushPolicy:
    """When an asynchronous flush syncs."""

    interval_ms: int = 500
    """Time between two checks whether a sync is worth it (R: flushIntervalCommitLog)."""
    least_pages: int = 4
    """Unsynced pages at which it is (R: flushCommitLogLeastPages)."""
    thorough_interval_ms: int = 10_000
    """Time after which everything is synced, however little it is (R: flushCommitLogThoroughInterval)."""


class NotYetDurable(Exception):
    """The record is in the log but was not synced in time."""


DEFAULT_FLUSH = FlushPolicy()


class LogDamaged(ValueError):
    """The log does not match its checkpoint; the text names the file and the byte."""


def settle(stored: asyncio.Future[None], error: Exception | None) -> None:
    """Settle a future as an OnDone would be called, unless its owner has given it up."""
    if stored.done():
        return
    if error is None:
        stored.set_result(None)
    else:
        stored.set_exception(error)
