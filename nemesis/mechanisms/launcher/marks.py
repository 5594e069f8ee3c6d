"""Finds the processes of a program by a mark in the environment with which its first process was started.

A process that has detached itself at once (by forking twice, as daemons do) is no longer a descendant of the program
when somebody looks. Its environment still contains the program's mark, unless it was given another environment.
"""

from __future__ import annotations

import contextlib
import os
import time

__all__ = ["HELPERS", "PROGRAM_VARIABLE", "is_helper", "living_thread", "mark_of", "marked"]

PROGRAM_VARIABLE = "SPLITBRAIN_PROGRAM"
"""The variable that an agent sets, to a unique value, for each program that it starts."""

_EXEC_TIMEOUT_S, _EXEC_POLL_S = 1.0, 0.001
"""For a process to complete an exec, which takes less than a millisecond of processor time."""

_PF_KTHREAD = 0x00200000
"""Flag of kernel threads in /proc/PID/stat (linux/sched.h)."""

HELPERS = b"fault-"
"""Prefix of the names of the launcher's own processes."""


def mark_of(pid: int) -> bytes | None:
    """The mark in the environment of a process; None if it has none, or may not be inspected."""
    words, deadline = b"", time.monotonic() + _EXEC_TIMEOUT_S
    with contextlib.suppress(OSError):
        while not (words := _read(living_thread(pid) or pid, "environ")):
            if _has_no_environment(pid) or time.monotonic() > deadline:
                break
            time.sleep(_EXEC_POLL_S)
    name = PROGRAM_VARIABLE.encode() + b"="
    return next((word for word in words.split(b"\0") if word.startswith(name)), None)


def _read(pid: int, name: str) -> bytes:
    """The content of /proc/PID/`name`. Raises OSError."""
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()


def _has_no_environment(pid: int) -> bool:
    """Whether a process whose environment was empty really has none. During an exec the environment is empty too; the
    exec may be over by now, and then the new environment has not been read yet. Raises OSError."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    letter, flags, start, end = fields[0], int(fields[6]), int(fields[47]), int(fields[48])
    return letter in (b"Z", b"X") or bool(flags & _PF_KTHREAD) or start == end != 0


def living_thread(pid: int) -> int | None:
    """A thread of a process that has not ended; None when there is none. It is the main thread, whose id is `pid`,
    unless that has ended before others: then /proc/PID is a zombie's and shows nothing about the other threads."""
    with contextlib.suppress(OSError):
        if _has_ended(pid):
            return next(
                (thread for thread in map(int, os.listdir(f"/proc/{pid}/task")) if not _has_ended(thread)), None
            )
        return pid
    return None


def _has_ended(thread: int) -> bool:
    """Raises OSError when it is gone."""
    return _read(thread, "stat").rpartition(b")")[2].split()[0] in (b"Z", b"X")


def marked(mark: bytes) -> list[int]:
    """Every process with a mark, except the launcher's own processes and this one."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and mark_of(pid) == mark and not is_helper(pid)]


def is_helper(pid: int) -> bool:
    """Whether a process is one of the launcher's own; False if it is gone."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().startswith(HELPERS)
    except OSError:
        return False
