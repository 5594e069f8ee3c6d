"""Lanes: what one simulated process schedules on the loop.

Every callback belongs to a lane, found through the context that it was scheduled with. Within a lane the order is
asyncio's own, first in first out. A paused lane (a stopped process) keeps its callbacks until it is resumed; a
dead one (a killed process) drops them, and its tasks never run again.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any, Protocol

__all__ = ["LANE", "Lane", "LaneLoop", "SimHandle"]


class SimHandle(asyncio.Handle):
    """A callback that is ready to run; its fields are set by the loop. Omits what asyncio keeps for its debug mode."""

    __slots__ = ()
    _callback: Callable[..., object]
    _context: Context

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None  # type: ignore[assignment]  # as asyncio does: releases the objects

    def __repr__(self) -> str:
        return f"<SimHandle {'cancelled' if self._cancelled else repr(self._callback)}>"


class LaneLoop(Protocol):
    """What a lane needs from its loop."""

    def next_lane_number(self) -> int: ...
    def time(self) -> float: ...
    def list_lane(self, lane: Lane) -> None: ...
    def unlist(self, lane: Lane) -> None: ...
    def bury(self, lane: Lane) -> None: ...


class Lane:
    """One simulated process as the loop sees it. `address` is the IP address that its connections come from."""

    __slots__ = (
        "__dict__", "_held", "_loop", "address", "died_s", "is_dead", "is_paused", "listed", "name", "number", "queue",
    )  # fmt: skip

    def __init__(self, loop: LaneLoop, name: str, address: str = "") -> None:
        self._loop = loop
        self.name = name
        self.address = address
        self.number = loop.next_lane_number()
        self.queue: deque[SimHandle] = deque()
        self.listed = False
        """False if the loop must be notified when the queue is no longer empty."""
        self.is_paused = False
        self.is_dead = False
        self.died_s = math.inf
        """The loop's time at which the lane died; infinite while it lives."""
        self._held = 0
        """How many callbacks were ready when the lane was last paused."""

    @property
    def is_running(self) -> bool:
        """Neither paused nor dead."""
        return not (self.is_paused or self.is_dead)

    def pause(self) -> None:
        """Hold back everything that this lane schedules. Idempotent; no effect on a dead lane."""
        if not self.is_running:
            return
        self.is_paused = True
        self._held = len(self.queue)
        self._loop.unlist(self)
        self.listed = True  # so that the loop is not notified of the queue while the lane is paused

    def resume(self) -> None:
        """Continue. What has arrived on sockets meanwhile is handled first, then the timers that have become due: an
        event loop that continues polls before it looks at its clock. So a leader that was stopped answers before it
        notices that its time is over. Idempotent; no effect on a dead lane."""
        if not self.is_paused or self.is_dead:
            return
        self.is_paused = False
        waiting = list(self.queue)
        since = sorted(waiting[self._held :], key=lambda handle: isinstance(handle, asyncio.TimerHandle))
        self.queue.clear()
        self.queue.extend(waiting[: self._held] + since)
        self.listed = False
        if self.queue:
            self._loop.list_lane(self)

    def kill(self) -> None:
        """Drop everything that this lane has scheduled or ever will, and abandon its tasks. Idempotent."""
        if self.is_dead:
            return
        self.is_dead = True
        self.died_s = self._loop.time()
        self._loop.unlist(self)
        self.listed = True
        self.queue.clear()
        self.queue = deque(maxlen=0)
        self._loop.bury(self)

    def exit(self, status: Any) -> None:
        """Called by the loop when code of this lane raised SystemExit, which ends a process."""
        self.kill()

    def __repr__(self) -> str:
        state = "dead" if self.is_dead else "paused" if self.is_paused else "running"
        return f"<{type(self).__name__} {self.name} {state}>"


LANE: ContextVar[Lane] = ContextVar("LANE")
"""The lane of the code that is running; unset for the harness's own."""
