"""Worker processes that end with whoever began them, and whose death is reported instead of waited for."""

from __future__ import annotations

import concurrent.futures
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from typing import Any, ParamSpec, TypeVar

__all__ = ["end_with_parent", "map_in_processes", "worker_pool"]

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Given = ParamSpec("Given")

_INTERRUPTING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


class _WorkerPool(concurrent.futures.ProcessPoolExecutor):
    """A pool that is waited for by its processes.

    That of the standard library waits for its own thread. An interrupt meanwhile has `Thread.join` take that thread for
    ended: the interpreter's exit then waits for processes which nobody tells to end any more.
    """

    def __init__(self, processes: int) -> None:
        self._handlers: dict[signal.Signals, Any] = {}
        super().__init__(
            max_workers=processes,
            mp_context=multiprocessing.get_context("fork"),
            initializer=_begin,
            initargs=(os.getpid(), self._handlers),
        )

    def submit(
        self, fn: Callable[Given, Answer], /, *args: Given.args, **kwargs: Given.kwargs
    ) -> concurrent.futures.Future[Answer]:
        """As the base class has it, but who interrupts waits until it is done: an interrupt between two of its lines
        leaves something to do that no process is ever given, and for which the end of the pool waits for ever."""
        if threading.current_thread() is not threading.main_thread():
            return super().submit(fn, *args, **kwargs)  # handlers are called in the main thread only
        heard: list[int] = []
        self._handlers.update((number, signal.getsignal(number)) for number in _INTERRUPTING)
        try:
            for number, handler in self._handlers.items():
                if callable(handler):
                    signal.signal(number, lambda number, frame: heard.append(number))
            return super().submit(fn, *args, **kwargs)
        finally:
            try:
                _give_back(self._handlers)
                for each in heard:
                    signal.raise_signal(each)
            except BaseException:
                _give_back(self._handlers)
                raise

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As the base class has it. An interrupt while it waits kills the processes, and is raised."""
        processes = _processes_of(self)  # to shut down forgets them
        super().shutdown(wait=False, cancel_futures=cancel_futures)
        if not wait:
            return
        try:
            for process in processes:
                process.join()
        except BaseException:
            for process in processes:
                process.kill()
            raise


def worker_pool(processes: int) -> concurrent.futures.ProcessPoolExecutor:
    """A pool of forked processes, which share what is in memory already.

    Where the kernel is Linux they are killed when the caller's process dies, however it does: by themselves they would
    wait for work for ever. Ctrl-C is the caller's affair, who cancels what is not begun; another one while the pool is
    waited for kills them.
    """
    return _WorkerPool(processes)


def _begin(parent_pid: int, handlers: Mapping[signal.Signals, Any]) -> None:
    """In a process that was forked while interrupts waited."""
    _give_back(handlers)
    end_with_parent(parent_pid)


def _give_back(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None:  # None: not Python's
            signal.signal(number, handler)


def end_with_parent(parent_pid: int, number: int = signal.SIGKILL) -> None:
    """Let this process get a signal, which by itself kills it, when the one that started it dies, and leave Ctrl-C to
    that one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the kernel knew of our wish
        os._exit(1)


def map_in_processes(
    function: Callable[[Item], Answer],
    items: Sequence[Item],
    processes: int,
    *,
    until: Callable[[Answer], bool] | None = None,
) -> list[Answer | None]:
    """What ``function`` gives for each item, each computed in one of so many forked processes.

    None stands where a process was killed, by the kernel for want of memory for instance, before it had an answer.
    Those that ran beside it are lost with it; so each of them, and each that had not begun, is tried again in a process
    of its own.  ``until`` says of an answer that no other is wanted any more; None stands for those not there by then.
    What ``function`` raises is raised here.
    """
    answers: list[Answer | None] = [None] * len(items)
    for place in _map(function, items, range(len(items)), processes, answers, until):
        _map(function, items, [place], 1, answers, until)
        found = answers[place]
        if until is not None and found is not None and until(found):
            break
    return answers


def _map(
    function: Callable[[Item], Answer],
    items: Sequence[Item],
    places: Sequence[int],
    processes: int,
    answers: list[Answer | None],
    until: Callable[[Answer], bool] | None,
) -> list[int]:
    """Fill in the answers to the items at those places; the places whose process was killed, which have none."""
    lost = []
    with worker_pool(min(processes, len(places))) as pool:
        place_of: dict[concurrent.futures.Future[Answer], int] = {}
        try:
            for place in places:
                try:
                    place_of[pool.submit(function, items[place])] = place
                except BrokenProcessPool:  # a process was killed before all items were handed out
                    lost.append(place)
            for future in place_of if until is None else concurrent.futures.as_completed(place_of):
                place = place_of[future]
                try:
                    answers[place] = answer = future.result()
                except BrokenProcessPool:
                    lost.append(place)
                    continue
                if until is not None and until(answer):
                    _end(pool)
                    return []
        except BaseException:
            _end(pool)
            raise
    return sorted(lost)


def _end(pool: concurrent.futures.ProcessPoolExecutor) -> None:
    """End a pool and its processes, whose answers nobody wants any more; a search can take hours."""
    processes = _processes_of(pool)  # to shut down forgets them
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()


def _processes_of(pool: concurrent.futures.ProcessPoolExecutor) -> list[BaseProcess]:
    return list((getattr(pool, "_processes", None) or {}).values())
