"""A thread that runs disk operations for the event loop: the loop blocks on very short ones, and is woken for the rest.

Handing an operation to a pool and being woken by it costs the loop far more than a write into the page cache does, and
nearly every write is one. So the loop blocks on it, up to a bound that nobody notices; if the disk takes longer, the
loop goes on with other things, is notified by the pool, and does not block again for a while. A disk that stalls
therefore never takes more from the loop than `BLOCKING_TIMEOUT_S` out of each `REST_S`. A sync has to wait for the
disk in any case: it is started at once and its end reported, which a dedicated thread does at half the price of a pool.
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
"""The longest that the loop blocks: a fiftieth of the shortest time in which anybody misses a heartbeat."""
REST_S = 0.1
"""From an operation that took longer until the loop blocks on one again."""


class _Hand:
    """State that loop and thread share. Holds no reference to the `DiskThread`, whose finalizer ends the thread."""

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
    """One operation at a time, started by one thread: that of the loop."""

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
        """Whether the loop may block on an operation: nothing is under way, and none took long just now."""
        return not self._is_busy and (not self._rests_until_s or time.monotonic() >= self._rests_until_s)

    def _begin(self, operation: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._hand.run, name="disk-own", daemon=True)
            self._thread.start()
        self._is_busy = True
        self._hand.operation = operation
        self._hand.begin.release()

    def run_blocking(self, operation: Callable[[], None]) -> bool:
        """Run `operation` while the loop blocks. True when it is done; raises what it raised. False if it takes longer:
        then `wait` must be called, from another thread, before anything else is started here."""
        self._begin(operation)
        if not self._hand.done.acquire(True, BLOCKING_TIMEOUT_S):
            self._rests_until_s = time.monotonic() + REST_S
            return False
        self._is_busy = False
        self._hand.outcome()
        return True

    def wait(self) -> None:
        """Wait for the end of the operation that took too long; raises what it raised."""
        self._hand.done.acquire()
        try:
            self._hand.outcome()
        finally:  # not earlier: the loop starts the next operation as soon as `_is_busy` is False
            self._rests_until_s = time.monotonic() + REST_S
            self._is_busy = False

    def begin(self, first: Callable[[], None], then: Callable[[], None], tell: Ended) -> None:
        """Run `first` while the loop blocks, as long as that is short, and `then` while it goes on; `tell` is called
        in a later turn of the loop with what they raised, or None.

        Blocking gives the thread the interpreter's lock at once: a thread that is woken beside a busy loop waits
        longer for it than a sync takes.
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
        """`begin`, awaited; raises what they raised. Both run to their end even if the waiting task is cancelled, which
        then waits for that end before it passes the cancellation on."""
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
