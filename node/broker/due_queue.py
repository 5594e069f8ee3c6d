"""Tasks with a due time: what is due is done in portions, and tried again if the log or the disk refuses."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Iterable

from node.broker.ledger import DLedgerError
from node.broker.message_store import NotWritable
from node.logs import LogLimiter
from node.store.record import RecordError

__all__ = ["DueQueue", "loop_ms"]

logger = logging.getLogger("node.broker")

RECHECK_MS = 1000
"""Longest sleep while anything waits: a wall clock that was set forward is noticed within this time."""
RETRY_MS = 10_000
"""Delay after a message could not be read or put (R: 10 s)."""
BUSY_RETRY_MS = 500
"""Delay when the log accepts no more for the moment."""
PORTION = 64
"""Tasks done in one turn of the loop."""


def loop_ms() -> int:
    """The loop's time in ms, which never goes back."""
    return round(asyncio.get_running_loop().time() * 1000)


class DueQueue:
    """Calls `act(number)` for each number that was added, once `now_ms` has reached its time.

    What `act` raises decides what follows: DLedgerError is tried again soon, after NotWritable nothing is done until
    the next `start`, anything else is tried again in ten seconds."""

    def __init__(self, name: str, *, now_ms: Callable[[], int], act: Callable[[int], None]) -> None:
        self._name = name
        self._now_ms = now_ms
        self._act = act
        self._running = False
        self._due: list[tuple[int, int]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._retries: dict[int, asyncio.TimerHandle] = {}
        """Timers of the numbers that are tried again, by number."""
        self._complaints = LogLimiter(lambda: asyncio.get_running_loop().time())

    def start(self, waiting: Iterable[tuple[int, int]]) -> None:
        """Begin with these pairs of due time and number."""
        self.stop()
        self._running = True
        self._due = list(waiting)
        heapq.heapify(self._due)
        self._arm()

    def stop(self) -> None:
        """Stop, and forget everything that waits."""
        self._running = False
        self._due = []
        for retry in self._retries.values():
            retry.cancel()
        self._retries.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def add(self, due_ms: int, number: int) -> None:
        """Add a number; ignored unless started."""
        if self._running:
            heapq.heappush(self._due, (due_ms, number))
            if self._due[0] == (due_ms, number):
                self._arm()

    def _put_off(self, due_ms: int, number: int) -> None:
        """Try it again later, by the loop's time: a wall clock that is ahead may be set back by then."""
        if self._due[0] == (due_ms, number):
            heapq.heappop(self._due)
        else:  # before it failed, `act` added one that is due sooner
            self._due.remove((due_ms, number))
            heapq.heapify(self._due)
        loop = asyncio.get_running_loop()
        self._retries[number] = loop.call_later(RETRY_MS / 1000, self._again, due_ms, number)

    def _again(self, due_ms: int, number: int) -> None:
        del self._retries[number]
        self.add(due_ms, number)

    def _arm(self, least_ms: int = 0) -> None:
        """Set the timer for the first one that is due, if there is one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._due:
            wait_ms = max(least_ms, min(self._due[0][0] - self._now_ms(), RECHECK_MS))
            self._timer = asyncio.get_running_loop().call_later(wait_ms / 1000, self._run)

    def _run(self) -> None:
        self._timer = None
        for _ in range(PORTION):
            if not self._running or not self._due or self._due[0][0] > self._now_ms():
                break
            due_ms, number = self._due[0]
            try:
                self._act(number)
            except NotWritable:
                return  # `start` begins anew when this node is master again
            except DLedgerError as error:
                self._complaints.warning(logger, "put", "%s wait: %s", self._name, error)
                return self._arm(BUSY_RETRY_MS)
            except Exception as error:
                if not isinstance(error, (OSError, RecordError)):
                    logger.exception("%s, number %d met an error of its own", self._name, number)
                self._complaints.warning(logger, "read", "%s, number %d: %s", self._name, number, error)
                if self._running:
                    self._put_off(due_ms, number)
                continue
            if self._due and self._due[0][1] == number:
                heapq.heappop(self._due)
        self._arm()
