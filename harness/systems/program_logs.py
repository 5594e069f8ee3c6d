"""The last lines of programs' logs on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

__all__ = ["last_lines"]

MAX_LINES = 12
"""Log lines kept of a program that did not come back: enough for a Python traceback."""

MAX_LINE_CHARS = 300
TAIL_BYTES = 1 << 16

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
"""Terminal control sequences (ECMA-48, 5.4), which some programs write into logs too."""

_FRAMES = re.compile(r"\s+(at \S+\(|\.\.\. \d+ (more|common frames))")
"""Frames of Java stack traces, which are longer than MAX_LINES; the error is in the line above them."""


def last_lines(path: Path) -> Sequence[str]:
    """The last non-blank lines of a log, without colours and stack frames, truncated; empty if there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    plain = (_COLOURS.sub("", line) for line in lines)
    return [line[:MAX_LINE_CHARS] for line in plain if line.strip() and not _FRAMES.match(line)][-MAX_LINES:]
