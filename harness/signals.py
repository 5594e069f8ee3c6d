"""Signals that ask a command to end: SIGTERM, and the SIGHUP of a terminal that closes.

One that is ignored when the command starts, as SIGHUP is under nohup, stays ignored.
"""

from __future__ import annotations

__all__ = ["ended_by_signals", "fork", "heed_no_repeats", "interrupted_by_signals"]

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

_ENDING = (signal.SIGTERM, signal.SIGHUP)

SAME_WISH_S = 1.0
"""A second signal that comes so soon after the first is no other wish."""


def ended_by_signals() -> contextlib.AbstractContextManager[None]:
    """They end the command, which leaves its blocks as after Ctrl-C, with 128 and the signal's number as its status."""

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    return _handled(end)


def interrupted_by_signals() -> contextlib.AbstractContextManager[None]:
    """They interrupt as Ctrl-C does, for commands that then keep what they have found."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    return _handled(interrupt)


def fork() -> int:
    """os.fork, during which these signals and Ctrl-C wait; a child whose parent they then interrupt is killed. What
    their handlers raise within the hooks that Python calls around a fork, those of logging for one, is ignored: the
    command would go on as if nobody had asked it to end.

    To block the signals would not do: another thread gets them then, and its interpreter calls their handlers here.
    """
    if threading.current_thread() is not threading.main_thread():
        return os.fork()  # handlers are called in the main thread only
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
            _give_back(before)
            for who, heard in waiting:
                if who == os.getpid():
                    signal.raise_signal(heard)
        except BaseException:
            _give_back(before)
            if pid > 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise
    return pid


def heed_no_repeats() -> None:
    """Wait a second in which neither these signals nor Ctrl-C do anything. Who presses Ctrl-C twice, or whose shell and
    whose `make` both pass it on, has asked once; what follows keeps what was found, which another one would end."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *_ENDING)}
    try:
        time.sleep(SAME_WISH_S)
    finally:
        _give_back(before)


def _give_back(before: Mapping[signal.Signals, Any]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def _handled(handler: Callable[[int, object], NoReturn]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may have handlers
        return
    heeded = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        _give_back(before)
