"""A line on a terminal that shows the current work and its elapsed time, so that it does not look like a hang.

A timer signal writes it, not a thread: the work forks, and a child of a process with threads may inherit a lock that is
never released. Children do not inherit timers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

__all__ = ["elapsed_line"]

EVERY_S = 1.0
"""Delay before the line first shows, and interval of its updates."""


@contextlib.contextmanager
def elapsed_line(what: str) -> Iterator[None]:
    """Show `what` and the elapsed seconds on standard error during a `with` block, if that is a terminal; the line is
    erased at the end. Shows nothing outside the main thread, or if SIGALRM is already in use."""
    if not sys.stderr.isatty() or threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        yield
        return
    fd, began_s, shown = sys.stderr.fileno(), time.monotonic(), ""

    def show(_number: int, _frame: FrameType | None) -> None:
        nonlocal shown
        shown = f"{what}: {time.monotonic() - began_s:,.0f} s"
        _write(fd, f"\r{shown}")

    signal.signal(signal.SIGALRM, show)
    signal.setitimer(signal.ITIMER_REAL, EVERY_S, EVERY_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        if shown:
            _write(fd, f"\r{' ' * len(shown)}\r")


def _write(fd: int, text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal was closed
        os.write(fd, text.encode())
