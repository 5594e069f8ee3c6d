"""Keeps simulated code out of the real world: what it must not touch raises while the guard is up.

The real clock, sockets, threads, files, entropy and the shared random generator would make a run different each
time. Only calls with code of a watched package on the stack are refused; the harness around it may read the time
and write its files. Log records carry the real time, which `logs.py` replaces, so calls that come through the
logging machinery pass.

The check walks the stack, so it costs something per refused function's call, and nothing otherwise.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import random
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from harness.clusters.sim.errors import NotSimulated

__all__ = ["Guard", "guarded"]

WATCHED = ("node",)
"""Packages whose code must stay inside the simulation."""

TRUSTED = ("logging", "traceback", "linecache", "warnings", "importlib", "tokenize", "gettext", "locale")
"""Modules of the standard library that may look at the clock or at source files on behalf of watched code."""

MAX_DEPTH = 60
"""Frames looked at; asyncio's own lie between the loop and the program, and programs are not that deep."""

_FORBIDDEN: tuple[tuple[Any, str, str], ...] = (
    *((time, name, "clocks come from the runtime and the loop") for name in (
        "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "sleep",
    )),
    *((random, name, "randomness comes from the runtime") for name in (
        "random", "randrange", "randint", "choice", "choices", "shuffle", "sample", "uniform", "getrandbits",
        "expovariate", "gauss", "betavariate", "seed", "randbytes",
    )),
    *((os, name, "randomness comes from the runtime") for name in ("urandom", "getrandom")),
    *((uuid, name, "randomness comes from the runtime") for name in ("uuid1", "uuid4")),
    *((os, name, "files are behind the runtime's disk") for name in (
        "open", "mkdir", "makedirs", "listdir", "scandir", "remove", "unlink", "rename", "replace", "stat", "fsync",
        "truncate", "pread", "pwrite",
    )),
    (builtins, "open", "files are behind the runtime's disk"),
    (socket, "getaddrinfo", "there is no name service"),
    (socket, "create_connection", "connections are the loop's"),
    (socket.socket, "__init__", "connections are the loop's"),
    (threading.Thread, "start", "there are no threads"),
)  # fmt: skip


class Guard:
    """What was refused while it was up: one line per attempt, in order."""

    def __init__(self, watched: tuple[str, ...] = WATCHED) -> None:
        self._watched = watched
        self.violations: list[str] = []

    def culprit(self) -> str | None:
        """The watched code on the stack above the refused function, as file:line; None when there is none."""
        frame = sys._getframe(2)
        for _ in range(MAX_DEPTH):
            package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if package in TRUSTED:
                return None
            if package in self._watched:
                return f"{frame.f_code.co_filename}:{frame.f_lineno}"
            if frame.f_back is None:
                return None
            frame = frame.f_back
        return None

    def wrap(self, original: Callable[..., Any], name: str, instead: str) -> Callable[..., Any]:
        """`original`, refused to watched code."""

        @functools.wraps(original)
        def refusing(*args: Any, **kwargs: Any) -> Any:
            culprit = self.culprit()
            if culprit is not None:
                message = f"{culprit} calls {name} in simulation: {instead}"
                self.violations.append(message)
                raise NotSimulated(message)
            return original(*args, **kwargs)

        return refusing


@contextlib.contextmanager
def guarded(watched: tuple[str, ...] = WATCHED) -> Iterator[Guard]:
    """Refuse the real world to watched code while the block runs.

    Raises NotSimulated at the attempt and, since the code may swallow that, again at the end of the block.
    """
    guard = Guard(watched)
    replaced: list[tuple[Any, str, Any]] = []
    for owner, name, instead in _FORBIDDEN:
        original = getattr(owner, name, None)
        if original is None:  # not on this platform
            continue
        title = f"{getattr(owner, '__module__', None) or owner.__name__}.{name}"
        replaced.append((owner, name, original))
        setattr(owner, name, guard.wrap(original, title, instead))
    try:
        yield guard
    finally:
        for owner, name, original in reversed(replaced):
            setattr(owner, name, original)
    if guard.violations:
        raise NotSimulated(guard.violations[0])
