"""Worker processes that end with their parent, and whose death is reported instead of blocking the caller."""

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
    """A pool whose shutdown waits for its processes.

    The standard library's pool waits for its own thread. If an interrupt comes meanwhile, `Thread.join` takes that
    thread for ended, and the interpreter's exit then waits for processes that nobody tells to end any more.
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
        """As the base class, but interrupts are deferred until it is done: an interrupt between two of its lines would
        leave a work item that no process ever gets, and the end of the pool would wait for it forever."""
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
        """As the base class. An interrupt while it waits kills the processes, and is raised."""
        processes = _processes_of(self)  # shutdown drops them
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
    """A pool of forked processes, which share the memory contents of the caller.

    On Linux they are killed when the caller's process dies, however it does: on their own they would wait for work
    forever. They ignore Ctrl-C: the caller handles it and cancels work that has not begun; another one while waiting
    for the pool kills them.
    """
    return _WorkerPool(processes)


def _begin(parent_pid: int, handlers: Mapping[signal.Signals, Any]) -> None:
    """Initialise a process that was forked while interrupts were deferred."""
    _give_back(handlers)
    end_with_parent(parent_pid)


def _give_back(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None:  # None: not Python's
            signal.signal(number, handler)


def end_with_parent(parent_pid: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal (default: SIGKILL) when its parent dies, and ignore Ctrl-C, which is
    left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call above took effect
        os._exit(1)


def map_in_processes(
    function: Callable[[Item], Answer],
    items: Sequence[Item],
    processes: int,
    *,
    until: Callable[[Answer], bool] | None = None,
) -> list[Answer | None]:
    """The result of ``function`` for each item, each computed in one of ``processes`` forked processes.

    A result is None if its process was killed before it had one, by the kernel for lack of memory for instance.
    Items that ran beside it are lost with it, so each of these, and each that had not begun, is retried in a process of
    its own.  If ``until`` is true of an answer, no more are computed; the missing ones are None.  Exceptions of
    ``function`` are raised here.
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
    """Fill in the answers for the items at these places.  Returns the places without one, whose process was killed."""
    lost = []
    with worker_pool(min(processes, len(places))) as pool:
        place_of: dict[concurrent.futures.Future[Answer], int] = {}
        try:
            for place in places:
                try:
                    place_of[pool.submit(function, items[place])] = place
                except BrokenProcessPool:  # a process was killed before all items were submitted
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
    """End a pool and its processes, whose answers are no longer needed; a search can take hours."""
    processes = _processes_of(pool)  # shutdown drops them
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()


def _processes_of(pool: concurrent.futures.ProcessPoolExecutor) -> list[BaseProcess]:
    return list((getattr(pool, "_processes", None) or {}).values())
