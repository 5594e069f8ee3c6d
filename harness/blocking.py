"""Interrupts plug-in code that blocks without `await`: meanwhile nothing in the harness runs, neither the healing of
the fault that the plug-in may be waiting for nor the handling of Ctrl-C.

A watchdog thread checks that the event loop makes progress. If not, it signals the main thread, and the handler raises
`Blocked` in the plug-in's code if the main thread is executing that; this also interrupts a blocking system call. It
works only if the loop runs in the main thread, which alone handles signals. A signal that asks the run to end, which
the loop cannot handle while it is blocked, shortens the limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from types import FrameType

__all__ = ["Blocked", "no_blocking"]

_SIGNAL = signal.SIGUSR2
_TICK_S = 0.25

ASKED_LIMIT_S = 1.0
"""How long the loop may be blocked once the run was asked to end: non-blocking plug-in code takes less."""


class Blocked(Exception):
    """Raised in plug-in code that has blocked the event loop for too long."""


@contextlib.contextmanager
def no_blocking(
    files: Collection[str], *, limit_s: float, tell: Callable[[str, bool], None], signals: Collection[int] = ()
) -> Iterator[None]:
    """During the `with` block, interrupt code of these files that blocks the running event loop for longer than
    `limit_s`, or than `ASKED_LIMIT_S` after one of `signals`, which the loop handles. Each time `tell` is called with a
    message about the place, and whether a signal had arrived."""
    if not files or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    is_over = threading.Event()
    seen_s = time.monotonic()
    is_asked = False

    def tick() -> None:
        nonlocal seen_s, is_asked
        seen_s, is_asked = time.monotonic(), False
        if not is_over.is_set():
            loop.call_later(_TICK_S, tick)

    def current_limit_s() -> float:
        return min(limit_s, ASKED_LIMIT_S) if is_asked else limit_s

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        is_asked = True  # the loop itself gets the signal through its wakeup descriptor

    def watch() -> None:
        while not is_over.wait(_TICK_S):
            if time.monotonic() - seen_s > current_limit_s():
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal seen_s
        stood_s = time.monotonic() - seen_s
        where = _place_in(files, frame)
        if stood_s > current_limit_s() and where is not None:
            seen_s = time.monotonic()  # restart the limit
            said = f"{where} blocked the harness for {stood_s:.0f} s: a plug-in must await whatever it waits for"
            tell(said, is_asked)
            raise Blocked(f"blocked for {stood_s:.0f} s without await")

    before = signal.signal(_SIGNAL, interrupt)
    heard = {number: signal.signal(number, ask) for number in signals}
    watcher = threading.Thread(target=watch, name="blocking", daemon=True)
    tick()
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()
        signal.signal(_SIGNAL, before)
        for number, handler in heard.items():
            signal.signal(number, handler)
            signal.siginterrupt(number, False)  # as the loop sets it


def _place_in(files: Collection[str], frame: FrameType | None) -> str | None:
    """The innermost frame that executes code of one of these files, as "file.py:12"; None if none does."""
    while frame is not None:
        if frame.f_code.co_filename in files:
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return None
