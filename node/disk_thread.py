"""A thread that works for the event loop: the loop stands still for what is very short, and is woken for the rest.

Handing an operation to a pool and being woken by it costs the loop far more than a write into the page cache does, and
nearly every write is one. So the loop stands still for it, up to a bound that nobody notices; where the disk takes
longer, it goes on with other things, is told by the pool, and does not try again for a while. A disk that stalls
therefore never takes more from the loop than `BLOCKING_TIMEOUT_S` out of each `REST_S`. What waits for the disk in any
case, a sync, is begun at once and its end told, which one thread of its own does at half the price of a pool.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable

from node.runtime import Ended

__all__ = ["BLOCKING_TIMEOUT_S", "REST_S", "DiskThread"]

BLOCKING_TIMEOUT_S = 0.002
"""The longest that the loop stands still: a fiftieth of the shortest time in which anybody misses a heartbeat."""
REST_S = 0.1
"""From an operation that took longer until the loop stands still for one again."""


class _Hand:
    """What loop and thread share. Without a reference to the `DiskThread`, whose end is that of the thread."""

    def __init__(self) -> None:
        self.begin = threading.Lock()
        self.done = threading.Lock()
        self.operation: Callable[[], None] | None = None
        self.tell: Callable[[], None] | None = None
        self.error: BaseException | None = None
        self.begin.acquire()
        self.done.acquire()

    def run(self) -> None:
        while True:
            self.begin.acquire()
            operation = self.operation
            if operation is None:
                return
            try:
                operation()
            except BaseException as error:
                self.error = error
            self.operation = operation = None
            tell, self.tell = self.tell, None
            if tell is None:
                self.done.release()
                continue
            try:
                tell()
            except RuntimeError:
                pass  # the loop is closed: nobody waits any more
            tell = None

    def end(self) -> None:
        self.operation = None
        self.begin.release()

    def outcome(self) -> None:
        """Raise what the last operation raised."""
        error, self.error = self.error, None
        if error is not None:
            raise error


class DiskThread:
    """One operation at a time, begun by one thread: that of the loop."""

    def __init__(self) -> None:
        self._hand = _Hand()
        self._thread: threading.Thread | None = None
        self._is_busy = False
        self._rests_until_s = 0.0
        self._close = weakref.finalize(self, self._hand.end)

    @property
    def is_free(self) -> bool:
        """Whether nothing is under way, so that `run` and `run_blocking` may be called."""
        return not self._is_busy

    @property
    def is_quick(self) -> bool:
        """Whether the loop may stand still for an operation: nothing is under way, and none took long just now."""
        return not self._is_busy and (not self._rests_until_s or time.monotonic() >= self._rests_until_s)

    def _begin(self, operation: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._hand.run, name="disk-own", daemon=True)
            self._thread.start()
        self._is_busy = True
        self._hand.operation = operation
        self._hand.begin.release()

    def run_blocking(self, operation: Callable[[], None]) -> bool:
        """Do it while the loop stands still. True when it is done; raises what it raised. False when it takes longer:
        then `wait` must be called, from another thread, before anything else is begun here."""
        self._begin(operation)
        if not self._hand.done.acquire(True, BLOCKING_TIMEOUT_S):
            self._rests_until_s = time.monotonic() + REST_S
            return False
        self._is_busy = False
        self._hand.outcome()
        return True

    def wait(self) -> None:
        """Wait for the end of the operation that took longer; raises what it raised."""
        self._hand.done.acquire()
        try:
            self._hand.outcome()
        finally:  # not before: the loop begins the next operation as soon as this thread is free
            self._rests_until_s = time.monotonic() + REST_S
            self._is_busy = False

    def begin(self, first: Callable[[], None], then: Callable[[], None], tell: Ended) -> None:
        """Do `first` while the loop stands still, as long as that is short, and `then` while it goes on; `tell` is
        called in a later turn of the loop with what they raised, or None.

        Standing still gives the thread the interpreter's lock at once: a thread that is woken beside a busy loop waits
        for it longer than a sync takes.
        """
        loop = asyncio.get_running_loop()
        has_begun = threading.Lock()
        has_begun.acquire()

        def operation() -> None:
            try:
                first()
            finally:
                has_begun.release()
            then()

        def ended() -> None:
            self._is_busy = False
            error, self._hand.error = self._hand.error, None
            tell(error)

        def tell_loop() -> None:
            loop.call_soon_threadsafe(ended)

        self._hand.tell = tell_loop
        may_block = self.is_quick
        self._begin(operation)
        if may_block and not has_begun.acquire(True, BLOCKING_TIMEOUT_S):
            self._rests_until_s = time.monotonic() + REST_S

    async def run(self, first: Callable[[], None], then: Callable[[], None]) -> None:
        """The same, awaited; raises what they raised. Both run to their end even when the waiting task is cancelled,
        and the task then waits for the end as well before it passes the cancellation on."""
        loop = asyncio.get_running_loop()
        has_ended = False
        raised: BaseException | None = None
        waiter = loop.create_future()

        def tell(error: BaseException | None) -> None:
            nonlocal has_ended, raised
            has_ended, raised = True, error
            if not waiter.done():
                waiter.set_result(None)

        self.begin(first, then, tell)
        cancelled: asyncio.CancelledError | None = None
        while not has_ended:
            try:
                await waiter
            except asyncio.CancelledError as error:
                cancelled = error
                waiter = loop.create_future()
        if cancelled is not None:
            raise cancelled
        if raised is not None:
            raise raised

    def close(self) -> None:
        """End the thread; nothing may be under way."""
        self._close()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
