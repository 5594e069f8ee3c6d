"""Error classes by who is at fault.

There are three parties: the operator (a bad option, a missing package, no permission), the system under test (it did
not start, it stopped answering) and the harness itself (a bug here). The command line turns errors of the first into
one line and exit status 254, the others into one line and 255; only a bug here keeps its traceback, in the run's log.
An error that ends a command of several runs after a violation has the status of that: a violation is certain, whatever
comes after it.
"""

from __future__ import annotations

__all__ = [
    "EXIT_HARNESS_FAILED",
    "EXIT_INVALID",
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

import errno
import sys

from checker.nearest import nearest
from harness.pasteable import python_command

EXIT_INVALID = 1
EXIT_OPERATOR = 254
EXIT_HARNESS_FAILED = 255

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Write errors that the operator can fix, wherever they occur: for a file, or for standard output redirected to one."""


class OperatorError(Exception):
    """A problem that the operator can fix; the message is one line that says how. Exit status 254."""

    exit_status = EXIT_OPERATOR


class SystemUnderTestError(Exception):
    """The system under test failed in a way that leaves nothing to check (for example it never started)."""

    exit_status = EXIT_HARNESS_FAILED


class InterruptedStartError(SystemUnderTestError):
    """A run was interrupted before its system was up. There is nothing to check, and no further runs should start."""


class HarnessError(Exception):
    """The harness broke its own rules: a bug here. Exit status 255."""

    exit_status = EXIT_HARNESS_FAILED


def one_line(error: object) -> str:
    """An error's text as one line, whatever names it contains: a path may hold a newline, or a terminal control
    sequence. Such characters are shown as Python escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in str(error).strip()
    )


def how_to_get(package: str) -> str:
    """The fix for a missing package with wheels for CPython only: pip, or another interpreter."""
    if sys.implementation.name != "cpython":
        return f"use CPython, for {sys.implementation.name} there are no wheels"
    return f"{python_command()} -m pip install {package}"
