"""Logging of a node process: one line per event on stderr, and a rate limit for lines that a peer could cause.

A line is `2026-01-31T12:00:00.000Z LEVEL logger message`. Control characters are escaped, so that bytes sent by
a stranger cannot forge a line.
"""

from __future__ import annotations

import codecs
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TextIO

__all__ = ["LineFormatter", "LogLimiter", "configure_logging"]

MAX_LINE_CHARACTERS = 4000
"""A message beyond this is cut: a remark or key sent by a peer must not fill the disk."""

LIMITER_KEYS = 1024
"""Distinct keys that a limiter remembers; it starts over beyond, which only lets more lines through."""


codecs.lookup("unicode_escape")  # load it now: logging that no file can be opened must not open one


class LineFormatter(logging.Formatter):
    """Formats a record as one line in UTC; a traceback is appended with escaped line ends."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}: {self.formatException(record.exc_info)}"
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        if len(text) > MAX_LINE_CHARACTERS:
            text = f"{text[:MAX_LINE_CHARACTERS]}... ({len(text)} characters)"
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return f"{moment.removesuffix('+00:00')}Z {record.levelname} {record.name} {text}"


def configure_logging(level: str, stream: TextIO) -> None:
    """Send every log line of this process, at `level` ("debug" ... "error") and above, to `stream`."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class LogLimiter:
    """Lets one line per key and interval through, and reports how many were held back in between.

    `now_s` is a clock in seconds, usually the running loop's `time`.
    """

    def __init__(self, now_s: Callable[[], float], *, interval_s: float = 10.0) -> None:
        self._now_s = now_s
        self._interval_s = interval_s
        self._next_at: dict[str, float] = {}
        self._held_back: dict[str, int] = {}

    def warning(
        self,
        logger: logging.Logger,
        key: str,
        message: str,
        *arguments: object,
        error: BaseException | None = None,
        level: int = logging.WARNING,
    ) -> None:
        """Log `message % arguments`, as a warning unless `level` says otherwise, if none with this `key` was logged
        within the interval. With `error`, its traceback follows."""
        now = self._now_s()
        if now < self._next_at.get(key, float("-inf")):
            self._held_back[key] = self._held_back.get(key, 0) + 1
            return
        if len(self._next_at) >= LIMITER_KEYS:
            self._next_at.clear()
            self._held_back.clear()
        held_back = self._held_back.pop(key, 0)
        self._next_at[key] = now + self._interval_s
        suffix = f" ({held_back} like this since the last line)" if held_back else ""
        logger.log(level, f"{message}%s", *arguments, suffix, exc_info=error)
