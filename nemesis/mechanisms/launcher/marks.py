"""Which processes are a program's: by the mark in the environment with which its first one was started.

A process that a program has given away at once (it forks twice, as daemons do) is nobody's child any more by the time
that somebody looks. Its environment still has the mark of its program, unless it was given another one.
"""

from __future__ import annotations

import os

__all__ = ["HELPERS", "PROGRAM_VARIABLE", "is_helper", "mark_of", "marked"]

PROGRAM_VARIABLE = "SPLITBRAIN_PROGRAM"
"""The variable that an agent gives to each program that it starts, with a value that no other program has."""

HELPERS = b"fault-"
"""How the names of the launcher's own processes begin."""


def mark_of(pid: int) -> bytes | None:
    """The mark in the environment of a process; None where it has none, or may not be looked into."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return None
    return next((word for word in words if word.startswith(PROGRAM_VARIABLE.encode() + b"=")), None)


def marked(mark: bytes) -> list[int]:
    """Every process with a mark, but for the launcher's own and for this one."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and mark_of(pid) == mark and not is_helper(pid)]


def is_helper(pid: int) -> bool:
    """Whether a process is one of the launcher's own. One that is gone is none."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().startswith(HELPERS)
    except OSError:
        return False
