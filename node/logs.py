"""Logging of a node process: one line per event on stderr.

A line is `2026-01-31T12:00:00.000Z LEVEL logger message`. Control characters are escaped, so that bytes sent by
a stranger cannot forge a line. Lines that a peer could flood go through `node.remoting.complaints`.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TextIO

__all__ = ["LineFormatter", "configure_logging"]

MAX_LINE_CHARACTERS = 4000
"""A message beyond this is cut: a remark or key sent by a peer must not fill the disk."""


class LineFormatter(logging.Formatter):
    """Formats a record as one line in UTC; a traceback is appended to it with escaped line ends."""

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
