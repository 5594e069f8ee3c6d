"""Signals that ask a command to end: SIGTERM, and SIGHUP from a closing terminal.

A signal that is ignored when the command starts, such as SIGHUP under nohup, stays ignored.
"""

from __future__ import annotations

__all__ = ["ended_by_signals", "fork", "ignore_repeated_signals", "interrupted_by_signals"]

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

_ENDING = (signal.SIGTERM, signal.SIGHUP)

REPEAT_WINDOW_S = 1.0
"""A signal within this time of another one counts as a repetition."""


def ended_by_signals() -> contextlib.AbstractContextManager[None]:
    """Within the block these signals end the command by SystemExit, with exit status 128 plus the signal's number."""

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    return _handled(end)


def interrupted_by_signals() -> contextlib.AbstractContextManager[None]:
    """Within the block these signals interrupt like Ctrl-C, for commands that then store their findings."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    return _handled(interrupt)


def fork() -> int:
    """os.fork with these signals and Ctrl-C deferred; if one of them then interrupts the parent, the child is killed.
    Exceptions of signal handlers in Python's fork hooks (of logging, for example) are ignored, so without this the
    command would go on as if it had not been asked to end.

    Blocking the signals is not enough: another thread gets them then, and the handlers still run in this one.
    """
    if threading.current_thread() is not threading.main_thread():
        return os.fork()  # handlers run only in the main thread
    waiting: list[tuple[int, int]] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *_ENDING)}
    pid = -1
    try:
        for number in before:
            if before[number] is not signal.SIG_IGN:
                signal.signal(number, lambda heard, frame: waiting.append((os.getpid(), heard)))
        pid = os.fork()
    finally:
        try:
            _restore_handlers(before)
            for who, heard in waiting:
                if who == os.getpid():
                    signal.raise_signal(heard)
        except BaseException:
            _restore_handlers(before)
            if pid > 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise
    return pid


def ignore_repeated_signals() -> None:
    """Ignore these signals and Ctrl-C for REPEAT_WINDOW_S. Pressing Ctrl-C twice, or a shell and `make` both passing it
    on, counts as one request; the repetition must not interrupt the storing of results that follows."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *_ENDING)}
    try:
        time.sleep(REPEAT_WINDOW_S)
    finally:
        _restore_handlers(before)


def _restore_handlers(before: Mapping[signal.Signals, Any]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def _handled(handler: Callable[[int, object], NoReturn]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set handlers
        return
    heeded = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        _restore_handlers(before)
