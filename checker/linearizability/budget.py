"""Budgets of time and memory.  Past either, the answer is ``unknown``; nothing here ever raises MemoryError.

Memory is measured as the growth of the process, not estimated per operation, because that varies by a factor of ten
between histories.  If the estimate is large, a second thread watches the growth while the first one works.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from checker.free_memory import free_bytes

__all__ = ["Budget", "LimitReached", "no_collection", "resident_bytes"]

_PAGE_BYTES = resource.getpagesize()

#: Fraction of the free memory of this process that a check without an explicit limit may use.
DEFAULT_MEMORY_SHARE = 0.5
#: Used if it is not known how much memory is free.
DEFAULT_MEMORY_BYTES = 1 << 30
_MIB = 1 << 20
#: Memory that any machine running Python has; finding out how much is free costs more than a small check.
_SURELY_THERE_BYTES = 32 * _MIB


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Disable the cyclic garbage collector, which would repeatedly scan objects that all stay alive."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def resident_bytes() -> int:
    """Current resident memory of this process (Linux), or its peak so far if only that is known."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _default_memory_bytes() -> int:
    free = free_bytes()
    return DEFAULT_MEMORY_BYTES if free is None else int(free * DEFAULT_MEMORY_SHARE)


class LimitReached(Exception):
    """A limit was exceeded during watched work; the text says which."""


def _limit_reached_by(reason: str) -> type[LimitReached]:
    """A subclass that has this reason when constructed without arguments: an exception raised in another thread gets
    none, and may surface where nothing adds the reason, such as at the end of the watch."""

    class LimitReachedBy(LimitReached):
        def __init__(self) -> None:
            super().__init__(reason)

    return LimitReachedBy


#: Time between two checks of a watch: Python allocates some ten MiB in that time.
WATCH_INTERVAL_S = 0.02

#: Time after which the exception is raised again if the work continues.  Python ignores exceptions in ``__del__`` and
#: in callbacks of gc, such as Hypothesis has.
AGAIN_S = 1.0


class _Watch:
    """Raises :class:`LimitReached` in the thread that entered it once ``exhausted`` returns a reason.

    For work that does not check its budget itself.  The caller must discard the incomplete results of that work.
    """

    def __init__(self, exhausted: Callable[[], str | None]) -> None:
        self._exhausted = exhausted
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._times_raised = 0

    def __enter__(self) -> None:
        self._watched = threading.get_ident()
        self._thread = threading.Thread(target=self._look, name="budget watch", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads allowed: the work goes on unwatched
            self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_here = isinstance(error, LimitReached)
        while not self._over.is_set():
            try:
                with self._lock:
                    self._over.set()
            except LimitReached:  # raised as the work ended
                is_here = True
        if self._reason is None:
            if self._thread.ident is not None:
                self._thread.join()  # ends at once; a later fork then finds no other thread
            return
        if not is_here or self._times_raised > 1:
            # Raised as the work ended, but not delivered yet: it must not hit the code that follows.  It is delivered
            # at the next instruction of this thread, unless the work has caught it.
            with contextlib.suppress(LimitReached):
                for _ in range(10):
                    time.sleep(WATCH_INTERVAL_S)
        if kind is None or isinstance(error, LimitReached):
            raise LimitReached(self._reason) from None

    def _look(self) -> None:
        interval_s = WATCH_INTERVAL_S
        while not self._over.wait(interval_s):
            reason = self._exhausted()
            if reason is None:
                continue
            with self._lock:
                if not self._over.is_set():
                    self._reason = reason
                    self._times_raised += 1
                    target, exception = ctypes.c_ulong(self._watched), ctypes.py_object(_limit_reached_by(reason))
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(target, exception)
            interval_s = AGAIN_S


class Budget:
    """What a check may use: ``timeout_s`` seconds from now, ``memory_mb`` MiB beyond what the process holds now.

    Without ``timeout_s`` time is unlimited.  Without ``memory_mb`` the limit is half of the memory that the machine,
    the container and ``ulimit -v`` leave, so that a check never exhausts a machine's memory.
    """

    def __init__(self, *, timeout_s: float | None = None, memory_mb: float | None = None) -> None:
        if timeout_s is not None and timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, not {timeout_s}")
        if memory_mb is not None and memory_mb <= 0:
            raise ValueError(f"memory_mb must be positive, not {memory_mb}")
        self.timeout_s = timeout_s
        self.started = time.perf_counter()
        self._memory_bytes = None if memory_mb is None else int(memory_mb * _MIB)
        self._base_bytes: int | None = None if memory_mb is None else resident_bytes()

    @property
    def memory_bytes(self) -> int:
        """The limit.  The default is determined when first needed, which small checks never do."""
        if self._memory_bytes is None:
            self._memory_bytes = _default_memory_bytes()
        return self._memory_bytes

    def elapsed_s(self) -> float:
        """Seconds since the budget was made."""
        return time.perf_counter() - self.started

    def used_bytes(self) -> int:
        """Resident memory gained since the budget was made."""
        now = resident_bytes()
        if self._base_bytes is None:
            self._base_bytes = now
        return max(0, now - self._base_bytes)

    def late(self) -> str | None:
        """The time limit, if it has passed, as text; else ``None``.  Faster than `exhausted`."""
        if self.timeout_s is not None and self.elapsed_s() > self.timeout_s:
            return f"the time limit of {self.timeout_s:g} s was reached"
        return None

    def exhausted(self) -> str | None:
        """The limit that has been exceeded, as text, or ``None``."""
        if self.timeout_s is not None and self.elapsed_s() > self.timeout_s:
            return f"the time limit of {self.timeout_s:g} s was reached"
        used = self.used_bytes()
        if self._memory_bytes is None and used < _SURELY_THERE_BYTES:
            return None
        if used > self.memory_bytes:
            return f"the memory limit of {self.memory_bytes / _MIB:.0f} MiB was reached"
        return None

    def watched(self, expected_bytes: int) -> contextlib.AbstractContextManager[None]:
        """A context in which exceeding a limit raises :class:`LimitReached`.

        It only watches if ``expected_bytes`` is more than allowed: a watch costs more than a small check.  Interpreters
        other than CPython cannot interrupt a thread; there the expectation decides, and this raises at once.
        """
        refused = self.refuses_bytes(expected_bytes)
        if refused is None:
            return contextlib.nullcontext()
        if sys.implementation.name != "cpython":
            raise LimitReached(refused)
        self.used_bytes()  # growth is measured from here, at the latest
        return _Watch(self.exhausted)

    def watched_anyway(self) -> contextlib.AbstractContextManager[None]:
        """As `watched`, but whatever is expected, for work in which one step may take too long.  CPython only."""
        if sys.implementation.name != "cpython":
            return contextlib.nullcontext()
        self.used_bytes()
        return _Watch(self.exhausted)

    def refuses_bytes(self, expected: int) -> str | None:
        """Why an engine expected to need ``expected`` bytes should not start, or ``None``."""
        if self._memory_bytes is None and expected < _SURELY_THERE_BYTES:
            return None
        if expected > self.memory_bytes:
            return f"about {expected / _MIB:.0f} MiB are needed and {self.memory_bytes / _MIB:.0f} MiB allowed"
        return None
