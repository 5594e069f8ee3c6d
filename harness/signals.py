"""Signals that ask a command to end: SIGTERM, and the SIGHUP of a terminal that closes.

One that is ignored when the command starts, as SIGHUP is under nohup, stays ignored.
"""

from __future__ import annotations

__all__ = ["ended_by_signals", "fork", "interrupted_by_signals"]

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import NoReturn

_ENDING = (signal.SIGTERM, signal.SIGHUP)


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
    command would go on as if nobody had asked it to end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *_ENDING))
    pid = 0
    try:
        pid = os.fork()
    finally:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except BaseException:
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise
    return pid


@contextlib.contextmanager
def _handled(handler: Callable[[int, object], NoReturn]) -> Iterator[None]:
    heeded = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
