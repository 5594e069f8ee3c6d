"""Log lines about peers, at a bounded rate: a flood of garbage must not flood the log."""

from __future__ import annotations

import logging
from collections.abc import Callable

from node.logs import LogLimiter

__all__ = ["Complaints"]

INTERVAL_S = 1.0
"""At most one line of each kind in this time: enough to see what is going on, too little to fill a disk."""


class Complaints:
    """Logs one line of each kind per second to one logger, and counts what it left out."""

    def __init__(self, logger: logging.Logger, now_s: Callable[[], float]) -> None:
        self._logger = logger
        self._limiter = LogLimiter(now_s, interval_s=INTERVAL_S)

    def warn(self, kind: str, message: str, *, error: BaseException | None = None) -> None:
        """Log `message` unless one of the same `kind` (a constant of the program, never a peer's text) was logged
        within the last second. With `error`, its traceback follows in the log."""
        self._limiter.warning(self._logger, kind, "%s", message, error=error)
