"""What programs have said last, from their logs on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

__all__ = ["last_lines"]

MAX_LINES = 12
"""Lines of a log that are kept of a program that did not come back: a traceback of Python fits."""

MAX_LINE_CHARS = 300
TAIL_BYTES = 1 << 16

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
"""Control sequences of terminals (ECMA-48, 5.4), which some programs write into logs as well."""

_FRAMES = re.compile(r"\s+(at \S+\(|\.\.\. \d+ (more|common frames))")
"""Of Java's stack traces, which are longer than MAX_LINES; what went wrong stands above them."""


def last_lines(path: Path) -> Sequence[str]:
    """The last lines of a log that say something, without colours, cut to a bounded length; none without a log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    plain = (_COLOURS.sub("", line) for line in lines)
    return [line[:MAX_LINE_CHARS] for line in plain if line.strip() and not _FRAMES.match(line)][-MAX_LINES:]
