"""Ends what a plug-in waits for without `await`: meanwhile nothing of the harness runs, neither the healing of the
fault that it may be waiting for nor what heeds Ctrl-C.

A thread looks whether the event loop still comes round. Where it does not, it signals the main thread, and the handler
raises `Blocked` in the plug-in's own code, if that is where the main thread is: a system call that waits ends by it.
Only where the loop runs in the main thread, for only that one handles signals. A signal that asks the run to end, which
the loop would hear of when it comes round, shortens the waiting.
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
"""How long the loop may stand still once somebody has asked the run to end: what a plug-in does at once takes less."""


class Blocked(Exception):
    """Raised in a plug-in's code that has kept the event loop from running for too long."""


@contextlib.contextmanager
def no_blocking(
    files: Collection[str], *, limit_s: float, tell: Callable[[str, bool], None], signals: Collection[int] = ()
) -> Iterator[None]:
    """While the block lasts, end what code of these files waits for while the running event loop stands still for
    longer than `limit_s`, or than `ASKED_LIMIT_S` where one of `signals` has come meanwhile, which the loop handles.
    `tell` is called with where that was, in words, and whether a signal had come, each time that it is done."""
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

    def patience_s() -> float:
        return min(limit_s, ASKED_LIMIT_S) if is_asked else limit_s

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        is_asked = True  # the loop itself hears of the signal by its wakeup descriptor

    def watch() -> None:
        while not is_over.wait(_TICK_S):
            if time.monotonic() - seen_s > patience_s():
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal seen_s
        stood_s = time.monotonic() - seen_s
        where = _place_in(files, frame)
        if stood_s > patience_s() and where is not None:
            seen_s = time.monotonic()  # another limit for what comes next
            said = (
                f"{where} kept the harness from running for {stood_s:.0f} s: what a plug-in waits for must be awaited"
            )
            tell(said, is_asked)
            raise Blocked(f"it waited for {stood_s:.0f} s without await")

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
            signal.siginterrupt(number, False)  # as the loop had it


def _place_in(files: Collection[str], frame: FrameType | None) -> str | None:
    """The innermost line of code of one of these files that is being executed; None where none is."""
    while frame is not None:
        if frame.f_code.co_filename in files:
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return None
