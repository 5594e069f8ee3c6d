"""Messages that wait until a slave has them (S4; R: GroupTransferService).

They wait in the order of the log, so that a report releases a run of them from the front and one timer is enough.
Unlike in the seed's service, which polls every second for one request after another, no request waits for the one
before it: a report releases all that it covers at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

__all__ = ["MAX_WAITING", "GroupTransferService"]

MAX_WAITING = 100_000
"""The most messages that may wait, a few hundred bytes each; above this a SYNC_MASTER takes no more for the moment."""
TIMER_GRAIN_S = 0.001
"""A timer may fire this much early; its event counts as due then."""


class GroupTransferService:
    """Waiting callbacks by position: each gets True when a slave has the log up to there, False after `timeout_s`."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waiting: deque[tuple[int, float, Callable[[bool], object], int]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.waiting_count = 0
        """Messages that wait."""

    def has_room(self, count: int) -> bool:
        """Whether `count` more messages may wait."""
        return self.waiting_count + count <= MAX_WAITING

    def wait_for(self, position: int) -> asyncio.Future[bool]:
        """Wait for a slave to have everything below `position`, which must not decrease from call to call."""
        transferred: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.tell(position, partial(_settle, transferred))
        return transferred

    def tell(self, position: int, on_done: Callable[[bool], object], count: int = 1) -> None:
        """The same without a future, for `count` messages: `on_done` is called with the result. It must not raise."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._timeout_s
        self._waiting.append((position, due_s, on_done, count))
        self.waiting_count += count
        if self._timer is None:
            self._timer = loop.call_at(due_s, self._time_out)

    def confirmed(self, position: int) -> None:
        """A slave has everything below `position`."""
        while self._waiting and self._waiting[0][0] <= position:
            self._settle_oldest(True)

    def _settle_oldest(self, is_transferred: bool) -> None:
        _, _, on_done, count = self._waiting.popleft()
        self.waiting_count -= count
        on_done(is_transferred)

    def _time_out(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now_s = loop.time() + TIMER_GRAIN_S
        while self._waiting and self._waiting[0][1] <= now_s:
            self._settle_oldest(False)
        if self._waiting:
            self._timer = loop.call_at(self._waiting[0][1], self._time_out)

    def close(self) -> None:
        """Nothing will be transferred any more: everything that waits gets False."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            self._settle_oldest(False)


def _settle(transferred: asyncio.Future[bool], result: bool) -> None:
    if not transferred.done():
        transferred.set_result(result)
