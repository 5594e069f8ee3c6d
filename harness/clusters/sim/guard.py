"""Keeps simulated code out of the real world: calls that it must not make raise while the guard is up.

The real clock, sockets, threads, files, entropy and the shared random generator would make a run different each
time. Only calls with code of a watched package on the stack are refused; the harness around it may read the time
and write its files. Log records carry the real time, which `logs.py` replaces, so calls that come through the
logging machinery pass.

The check walks the stack, so each call of a guarded function costs something; nothing else does. Replacing a function
does not affect names that were imported from its module earlier. So an audit hook (`sys.addaudithook`, PEP 578) also
sees every file, socket and process that the interpreter opens, whatever the caller. Clocks, entropy and, before Python
3.12, threads raise no audit events; nor, on PyPy, do the functions of `os` and `fcntl`. There the replaced functions
are the only protection, and `tests/test_architecture.py` keeps the node from importing them.
"""

from __future__ import annotations

import _thread
import asyncio.events
import builtins
import contextlib
import fcntl
import functools
import io
import os
import random
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from harness.clusters.sim.errors import NotSimulated

__all__ = ["Guard", "guarded"]

WATCHED = ("node",)
"""Packages whose code must stay inside the simulation."""

TRUSTED = (
    "logging", "traceback", "linecache", "warnings", "importlib", "_frozen_importlib", "_frozen_importlib_external",
    "zipimport", "tokenize", "gettext", "locale",
)  # fmt: skip
"""Modules of the standard library that may look at the clock or at source files on behalf of watched code."""

_RUNNING_LOOP = getattr(getattr(asyncio.events, "_py__get_running_loop", None), "__code__", None)
"""asyncio's function that compares process ids, if it is written in Python and not in C, as on PyPy."""

MAX_DEPTH = 60
"""Frames examined; asyncio's own are between the loop and the program, and programs are not that deep."""

_FORBIDDEN: tuple[tuple[Any, str, str], ...] = (
    *((time, name, "use the clocks of the runtime and the loop") for name in (
        "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time",
        "process_time_ns", "thread_time", "thread_time_ns", "clock_gettime", "clock_gettime_ns", "sleep",
    )),
    *((random, name, "use the runtime's random numbers") for name in (
        "random", "randrange", "randint", "choice", "choices", "shuffle", "sample", "uniform", "getrandbits",
        "expovariate", "gauss", "betavariate", "seed", "randbytes",
    )),
    *((os, name, "use the runtime's random numbers") for name in ("urandom", "getrandom")),
    (random, "_urandom", "use the runtime's random numbers"),  # SystemRandom and secrets
    *((os, name, "a program must not depend on its process or machine") for name in ("getpid", "times", "getloadavg")),
    *((uuid, name, "use the runtime's random numbers") for name in ("uuid1", "uuid4")),
    *((os, name, "use the runtime's disk") for name in (
        "open", "mkdir", "makedirs", "listdir", "scandir", "remove", "unlink", "rename", "replace", "stat", "fsync",
        "truncate", "pread", "pwrite", "lstat", "access", "rmdir", "link", "symlink", "readlink", "mkfifo", "mknod",
        "ftruncate", "chmod", "fchmod", "chown", "fchown", "lchown", "utime", "chdir", "fchdir", "statvfs", "sendfile",
    )),
    *((fcntl, name, "use the runtime's disk") for name in ("fcntl", "flock", "ioctl", "lockf")),
    *((os, name, "let the cluster start programs on a host") for name in (
        "system", "fork", "forkpty", "execv", "execve", "posix_spawn", "posix_spawnp", "kill", "killpg", "putenv",
        "unsetenv",
    )),
    (builtins, "open", "use the runtime's disk"),
    (io, "open", "use the runtime's disk"),
    (socket, "getaddrinfo", "there is no name service"),
    (socket, "create_connection", "use the loop's connections"),
    (socket.socket, "__init__", "use the loop's connections"),
    (threading.Thread, "start", "there are no threads"),
    (_thread, "start_new_thread", "there are no threads"),
)  # fmt: skip


_AUDITED = {
    **dict.fromkeys(("open", "os", "shutil", "tempfile", "glob", "pathlib", "mmap", "fcntl", "sqlite3"),
                    "use the runtime's disk"),
    **dict.fromkeys(("socket", "urllib", "http", "ftplib", "smtplib"), "use the loop's connections"),
    **dict.fromkeys(("subprocess", "pty", "signal"), "let the cluster start programs on a host"),
    **dict.fromkeys(("_thread",), "there are no threads"),
    **dict.fromkeys(("ctypes",), "use the runtime"),
}  # fmt: skip
"""First word of an audit event -> what to use instead."""


class Guard:
    """Refuses calls of watched code; `violations` has one line per attempt, in order."""

    def __init__(self, watched: tuple[str, ...] = WATCHED) -> None:
        self._watched = watched
        self.violations: list[str] = []

    def culprit(self) -> str | None:
        """The watched code on the stack above the refused function, as file:line; None when there is none."""
        frame: FrameType | None = sys._getframe(3)
        if frame is not None and frame.f_code is _RUNNING_LOOP:
            return None
        for _ in range(MAX_DEPTH):
            if frame is None:
                return None
            package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if package in TRUSTED:
                return None
            if package in self._watched:
                return f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        return None

    def wrap(self, original: Callable[..., Any], name: str, instead: str) -> Callable[..., Any]:
        """`original`, but refused to watched code."""

        @functools.wraps(original)
        def refusing(*args: Any, **kwargs: Any) -> Any:
            self.refuse(name, instead)
            return original(*args, **kwargs)

        return refusing

    def refuse(self, name: str, instead: str) -> None:
        """Record a violation and raise NotSimulated if the guarded function was called by watched code."""
        culprit = self.culprit()
        if culprit is not None:
            message = f"{culprit} calls {name} in simulation: {instead}"
            self.violations.append(message)
            raise NotSimulated(message)


_up: list[Guard] = []
"""The guards that are up, the newest last."""


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    instead = _AUDITED.get(event.partition(".")[0]) if _up else None
    if instead is not None:
        _up[-1].refuse(event, instead)


@functools.cache
def _listen() -> None:
    """Add the audit hook, once: it cannot be removed. It does nothing while no guard is up."""
    sys.addaudithook(_audit)


def _seeding(guard: Guard, original: Callable[..., None]) -> Callable[..., None]:
    """`random.Random.seed`, but refused to watched code that gives no seed, since that uses entropy."""

    @functools.wraps(original)
    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None:
            guard.refuse("random.Random.seed without a seed", "use the runtime's random numbers")
        original(self, a, version)

    return seed


@contextlib.contextmanager
def guarded(watched: tuple[str, ...] = WATCHED) -> Iterator[Guard]:
    """Refuse watched code access to the real world while the block runs.

    Raises NotSimulated at the attempt and, since the code may swallow that, again at the end of the block.
    """
    guard = Guard(watched)
    _listen()
    replaced: list[tuple[Any, str, Any]] = []
    for owner, name, instead in _FORBIDDEN:
        original = getattr(owner, name, None)
        if original is None:  # not on this platform
            continue
        title = f"{getattr(owner, '__module__', None) or owner.__name__}.{name}"
        replaced.append((owner, name, original))
        setattr(owner, name, guard.wrap(original, title, instead))
    replaced.append((random.Random, "seed", random.Random.seed))
    random.Random.seed = _seeding(guard, random.Random.seed)  # type: ignore[method-assign]
    _up.append(guard)
    try:
        yield guard
    finally:
        _up.remove(guard)
        for owner, name, original in reversed(replaced):
            setattr(owner, name, original)
    if guard.violations:
        raise NotSimulated(guard.violations[0])
