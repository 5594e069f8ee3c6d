"""Log lines about peers, at a bounded rate: a flood of garbage must not become a flood of log."""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["Complaints"]

INTERVAL_S = 1.0
"""At most one line of each kind in this time: enough to see what goes on, too little to fill a disk."""


class Complaints:
    """Logs one line of each kind per second and counts what it left out."""

    def __init__(self, logger: logging.Logger, now_s: Callable[[], float]) -> None:
        self._logger = logger
        self._now_s = now_s
        self._next_s: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def warn(self, kind: str, message: str, *, error: BaseException | None = None) -> None:
        """Log `message` unless one of its `kind` (a fixed word of the program's, never a peer's) was logged
        within the last second. With `error`, its traceback follows in the log."""
        now_s = self._now_s()
        if now_s < self._next_s.get(kind, 0.0):
            self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
            return
        self._next_s[kind] = now_s + INTERVAL_S
        left_out = self._suppressed.pop(kind, 0)
        suffix = f" ({left_out} more of this kind since the last line)" if left_out else ""
        self._logger.warning("%s%s", message, suffix, exc_info=error)
