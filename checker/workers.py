"""Worker processes that end with whoever began them, and whose death is told instead of waited for."""

from __future__ import annotations

import concurrent.futures
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

__all__ = ["map_in_processes", "worker_pool"]

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def worker_pool(processes: int) -> concurrent.futures.ProcessPoolExecutor:
    """A pool of forked processes, which share what is in memory already.

    Where the kernel is Linux they are killed when the caller's process dies, however it does: by themselves they would
    wait for work for ever. Ctrl-C is the caller's affair, who cancels what is not begun.
    """
    return concurrent.futures.ProcessPoolExecutor(
        max_workers=processes,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_begin,
        initargs=(os.getpid(),),
    )


def _begin(parent_pid: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the kernel knew of our wish
        os._exit(1)


def map_in_processes(function: Callable[[Item], Answer], items: Sequence[Item], processes: int) -> list[Answer | None]:
    """What ``function`` gives for each item, each computed in one of so many forked processes.

    None stands where a process was killed, by the kernel for want of memory for instance, before it had an answer;
    those that run at that moment are lost with it. What ``function`` raises is raised here.
    """
    with worker_pool(min(processes, len(items))) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            return [_answer_of(future) for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            _kill(pool)
            raise


def _answer_of(future: concurrent.futures.Future[Answer]) -> Answer | None:
    try:
        return future.result()
    except BrokenProcessPool:
        return None


def _kill(pool: concurrent.futures.ProcessPoolExecutor) -> None:
    """End the processes of a pool whose answers nobody wants any more; a search can take hours."""
    for process in list((getattr(pool, "_processes", None) or {}).values()):
        process.kill()
