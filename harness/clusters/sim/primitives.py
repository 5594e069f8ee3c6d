"""Timers, futures and tasks of the simulated loop.

`asyncio.Task` and `asyncio.Future` hash by address, so a set of them iterates in an order that differs from
process to process, also inside asyncio (TaskGroup cancels its children in set order). Here tasks hash by the order of
their creation, and futures by the order in which they are first hashed. PyPy's sets iterate in insertion order, so
`simulation.py` gives task groups a collection that does so everywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import TYPE_CHECKING, Any, Protocol

from harness.clusters.sim.finalizers import without_finalizer
from harness.clusters.sim.lane import LANE, Lane

if TYPE_CHECKING:
    from asyncio import Future, Task
else:
    Future = without_finalizer(asyncio.Future, object)
    Task = without_finalizer(asyncio.Task, Future)

__all__ = ["CountingLoop", "SimFuture", "SimTask", "SimTimerHandle"]


class CountingLoop(Protocol):
    """What timers, futures and tasks need from their loop."""

    root: Lane
    future_count: int
    task_count: int

    def timer_cancelled(self) -> None: ...


class SimTimerHandle(asyncio.TimerHandle):
    """A callback that is due at a time."""

    __slots__ = ()

    def __init__(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], loop: CountingLoop, context: Context
    ) -> None:
        self._when = when
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = context
        self._cancelled = False
        self._scheduled = True

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._callback = self._args = None  # type: ignore[assignment]
            if self._scheduled:
                self._loop.timer_cancelled()

    def __repr__(self) -> str:
        return f"<SimTimerHandle at {self._when} {'cancelled' if self._cancelled else repr(self._callback)}>"

    __hash__ = object.__hash__


class SimFuture(Future[Any]):
    """A future with a hash that is the same in every process."""

    __slots__ = ("number",)

    number: int
    """Assigned when it is first needed, in that order: most futures are never put into a set or mapping."""

    def __hash__(self) -> int:
        try:
            return self.number
        except AttributeError:
            loop: CountingLoop = self.get_loop()  # type: ignore[assignment]
            number = self.number = loop.future_count = loop.future_count + 1
            return number


class SimTask(Task[Any]):
    """A task that knows its lane and has a hash that is the same in every process."""

    __slots__ = ("lane", "number")

    def __init__(
        self, coro: Coroutine[Any, Any, Any], *, loop: CountingLoop, name: str | None, context: Context
    ) -> None:
        number = self.number = loop.task_count = loop.task_count + 1
        self.lane: Lane = context.get(LANE) or loop.root
        super().__init__(coro, loop=loop, name=name or str(number), context=context)  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return self.number
