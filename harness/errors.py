"""Whose fault an error is.

The harness tells three parties apart: the operator (a bad option, a missing package, no permission), the
system under test (it did not start, it stopped answering) and the harness itself (a bug here). The command
line turns the first into one line and exit status 254, the others into one line and 255; only a bug here
keeps its traceback, in the run's log.
"""

from __future__ import annotations

__all__ = [
    "EXIT_HARNESS_FAILED",
    "EXIT_OPERATOR",
    "NO_ROOM",
    "HarnessError",
    "InterruptedStartError",
    "OperatorError",
    "SystemUnderTestError",
    "how_to_get",
    "nearest",
    "one_line",
]

import difflib
import errno
import sys
from collections.abc import Iterable

from harness.pasteable import python_command

EXIT_OPERATOR = 254
EXIT_HARNESS_FAILED = 255

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of writing that whoever runs a command can mend, wherever they come up: on the way to a file, or to standard
output that leads to one."""


class OperatorError(Exception):
    """Something the operator can mend; the message is one line that says how. Exit status 254."""


class SystemUnderTestError(Exception):
    """The system under test failed in a way that leaves nothing to check (it never started, say)."""


class InterruptedStartError(SystemUnderTestError):
    """A run was interrupted before its system was up. There is nothing to check, and whoever interrupted it wants no
    further run either."""


class HarnessError(Exception):
    """The harness broke its own rules: a bug here. Exit status 255."""


def one_line(error: object) -> str:
    """What an error says, in one line whatever names are in it: a path may hold a line end, or what moves a
    terminal's cursor. Such characters are shown as Python writes them."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in str(error).strip()
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a mistyped name: " (did you mean X?)", or "" when nothing is near."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.55)
    return f" (did you mean {matches[0]}?)" if matches else ""


def how_to_get(package: str) -> str:
    """The mend for a missing package that comes ready for CPython only: pip, or another interpreter."""
    if sys.implementation.name != "cpython":
        return f"use CPython, for {sys.implementation.name} there are no wheels"
    return f"{python_command()} -m pip install {package}"
