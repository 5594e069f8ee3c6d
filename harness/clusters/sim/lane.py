"""Lanes: what one simulated process schedules on the loop.

Every callback belongs to a lane, found through the context it was scheduled with. Within a lane the order is
asyncio's own, first in first out. A paused lane keeps its callbacks until it is resumed (a stopped process); a
dead one drops them (a killed process): its tasks never run again.
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
    """A callback that is ready to run, filled by the loop. Leaves out what asyncio keeps for its debug mode."""

    __slots__ = ()
    _callback: Callable[..., object]
    _context: Context

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None  # type: ignore[assignment]  # as asyncio does: lets the objects go

    def __repr__(self) -> str:
        return f"<SimHandle {'cancelled' if self._cancelled else repr(self._callback)}>"


class LaneLoop(Protocol):
    """What a lane asks of its loop."""

    def next_lane_number(self) -> int: ...
    def time(self) -> float: ...
    def list_lane(self, lane: Lane) -> None: ...
    def unlist(self, lane: Lane) -> None: ...
    def bury(self, lane: Lane) -> None: ...


class Lane:
    """One simulated process as the loop sees it. Made by `SimLoop.new_lane` or a subclass; `address` is the IP
    address that its connections come from."""

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
        """False when the loop must learn that the queue is no longer empty."""
        self.is_paused = False
        self.is_dead = False
        self.died_s = math.inf
        """Of a dead lane, the loop's time at its end."""
        self._held = 0
        """Of a paused lane, how many callbacks were ready when it was paused."""

    @property
    def is_running(self) -> bool:
        """Neither paused nor dead."""
        return not (self.is_paused or self.is_dead)

    def pause(self) -> None:
        """Hold back everything this lane schedules. Idempotent; nothing on a dead lane."""
        if not self.is_running:
            return
        self.is_paused = True
        self._held = len(self.queue)
        self._loop.unlist(self)
        self.listed = True  # nobody tells the loop while it is paused

    def resume(self) -> None:
        """Run on. What has come over sockets meanwhile is taken first, then the timers that have fallen due: an event
        loop that goes on polls before it looks at its clock. So a leader that was stopped answers before it notices
        that its time is over. Idempotent; nothing on a dead lane."""
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
        """Drop everything this lane has scheduled or ever will, and give up its tasks where they stand. Idempotent."""
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
        """Called by the loop when code of this lane raised SystemExit. A process ends with that."""
        self.kill()

    def __repr__(self) -> str:
        state = "dead" if self.is_dead else "paused" if self.is_paused else "running"
        return f"<{type(self).__name__} {self.name} {state}>"


LANE: ContextVar[Lane] = ContextVar("LANE")
"""The lane of the code that is running; unset for the harness's own."""
