"""A thread that works for the event loop while the loop waits for it, as long as that is very short.

Handing an operation to a pool and being woken by it costs the loop ten times what a write into the page cache does, and
nearly every write is one. So the loop stands still for it, up to a bound that nobody notices; where the disk takes
longer, it goes on with other things, is told by the pool, and does not try again for a while. A disk that stalls
therefore never takes more from the loop than `PATIENCE_S` out of each `REST_S`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["PATIENCE_S", "REST_S", "BriefWait"]

PATIENCE_S = 0.002
"""The longest that the loop stands still: a fiftieth of the shortest time in which anybody misses a heartbeat."""
REST_S = 0.1
"""From an operation that took longer until the loop waits for one again."""


class _Hand:
    """What loop and thread share. Without a reference to the `BriefWait`, which ends the thread when it goes."""

    def __init__(self) -> None:
        self.begin = threading.Lock()
        self.done = threading.Lock()
        self.operation: Callable[[], None] | None = None
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
            self.done.release()

    def end(self) -> None:
        self.operation = None
        self.begin.release()


class BriefWait:
    """One operation at a time, begun by one thread: that of the loop."""

    def __init__(self) -> None:
        self._hand = _Hand()
        self._thread: threading.Thread | None = None
        self._is_busy = False
        self._rests_until_s = 0.0
        self._close = weakref.finalize(self, self._hand.end)

    @property
    def is_ready(self) -> bool:
        """Whether `run` may be called: nothing is under way, and the last operation was not a long one."""
        return not self._is_busy and (not self._rests_until_s or time.monotonic() >= self._rests_until_s)

    def run(self, operation: Callable[[], None]) -> bool:
        """Do it. True when it is done; raises what it raised. False when it takes longer: then `wait` must be called,
        from another thread, before `is_ready` is true again."""
        hand = self._hand
        if self._thread is None:
            self._thread = threading.Thread(target=hand.run, name="disk-brief", daemon=True)
            self._thread.start()
        self._is_busy = True
        hand.operation = operation
        hand.begin.release()
        if not hand.done.acquire(True, PATIENCE_S):
            self._rests_until_s = time.monotonic() + REST_S
            return False
        self._is_busy = False
        if hand.error is not None:
            self._raise()
        return True

    def wait(self) -> None:
        """Wait for the end of the operation that took longer; raises what it raised."""
        self._hand.done.acquire()
        self._is_busy = False
        self._rests_until_s = time.monotonic() + REST_S
        if self._hand.error is not None:
            self._raise()

    def _raise(self) -> None:
        error, self._hand.error = self._hand.error, None
        assert error is not None
        raise error

    def close(self) -> None:
        """End the thread; nothing may be under way."""
        self._close()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
