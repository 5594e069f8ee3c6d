"""Which processes are a program's: by the mark in the environment with which its first one was started.

A process that a program has given away at once (it forks twice, as daemons do) is nobody's child any more by the time
that somebody looks. Its environment still has the mark of its program, unless it was given another one.
"""

from __future__ import annotations

import contextlib
import os

__all__ = ["HELPERS", "PROGRAM_VARIABLE", "is_helper", "living_thread", "mark_of", "marked"]

PROGRAM_VARIABLE = "SPLITBRAIN_PROGRAM"
"""The variable that an agent gives to each program that it starts, with a value that no other program has."""

HELPERS = b"fault-"
"""How the names of the launcher's own processes begin."""


def mark_of(pid: int) -> bytes | None:
    """The mark in the environment of a process; None where it has none, or may not be looked into."""
    words = list[bytes]()
    with contextlib.suppress(OSError), open(f"/proc/{living_thread(pid) or pid}/environ", "rb") as file:
        words = file.read().split(b"\0")
    return next((word for word in words if word.startswith(PROGRAM_VARIABLE.encode() + b"=")), None)


def living_thread(pid: int) -> int | None:
    """A thread of a process that has not ended; None when there is none. It is the first one, whose number is `pid`,
    unless that has ended before others: then /proc/PID is that of a zombie and shows nothing of what goes on."""
    with contextlib.suppress(OSError):
        if _has_ended(pid):
            return next(
                (thread for thread in map(int, os.listdir(f"/proc/{pid}/task")) if not _has_ended(thread)), None
            )
        return pid
    return None


def _has_ended(thread: int) -> bool:
    """Raises OSError when it is gone."""
    with open(f"/proc/{thread}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")


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
