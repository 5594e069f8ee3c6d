"""Running a coroutine in simulation."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import sys
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from harness.clusters.sim.logs import route_logs
from harness.clusters.sim.loop import SimLoop

__all__ = ["rare_collections", "run_simulated"]

_T = TypeVar("_T")

GC_THRESHOLDS = (20_000, 20, 50)
"""Python's own are 700, 10 and 10 (up to 3.13)."""

PYPY_COMPILER = "decay=0,threshold=500,function_threshold=800,trace_eagerness=80,trace_limit=4000,loop_longevity=100000"
"""PyPy counts what runs often, and takes off a part of its counts with each small collection, of which there are twenty
in a second of cluster time: what runs often was compiled minutes later. So is what is counted as far as its own 1,039,
1,619 and 200. Pieces of 6,000 steps, its own limit, took longer to compile than they saved. And it throws away what did
not run while 1,000 others were compiled; a simulation has some two thousand."""


def run_simulated(main: Coroutine[Any, Any, _T], *, seed: int, shuffle: bool = False) -> _T:
    """Run `main` to its end on a new simulated loop, as `asyncio.run` does on a real one. Takes no real time.

    `main` runs outside every host; it makes network and hosts on the running loop. The same seed gives the same
    run. `shuffle`: see SimLoop. Raises what `main` raises, and SimulationError when the simulation cannot go on.
    """
    with (
        rare_collections(),
        route_logs(),
        _same_asyncio(),
        asyncio.Runner(loop_factory=lambda: SimLoop(seed, shuffle=shuffle)) as runner,
    ):
        return runner.run(_and_nothing_else(main))


async def _and_nothing_else(main: Coroutine[Any, Any, _T]) -> _T:
    """What still runs on hosts when `main` ends is killed; the loop would otherwise cancel it and wait."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    try:
        return await main
    finally:
        loop.kill_lanes()


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Look for cycles of garbage more rarely: a run holds the memory of all its nodes, which each look goes through,
    and makes few cycles. What was there before the run (modules, mostly) is not looked through again. PyPy's collector
    works otherwise and has none of these knobs.

    Around more than the run itself what the run has left is garbage at the end, and goes: a next run would otherwise
    set it aside with the modules, and the one after that its own, some 7 MB each. Where somebody has set aside
    what was there already, that and the collecting are theirs."""
    if sys.implementation.name != "cpython":
        if sys.implementation.name == "pypy":
            importlib.import_module("pypyjit").set_param(PYPY_COMPILER)
        yield
        return
    before = gc.get_threshold()
    # Within such a run the thresholds say so; to count what is set aside goes through all of it.
    is_ours = before != GC_THRESHOLDS and gc.get_freeze_count() == 0
    gc.set_threshold(*GC_THRESHOLDS)
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.collect()
            gc.unfreeze()
        gc.set_threshold(*before)


@contextlib.contextmanager
def _same_asyncio() -> Iterator[None]:
    """Let every version of Python take the same steps.

    Up to 3.11 `asyncio.wait_for` runs its argument in a task of its own, which takes more turns of the loop and
    so changes the order in which tasks of one process go on. Here it works as from 3.12 on. A task group cancels its
    tasks in the order of a set, which is another on PyPy; here it is the order in which they were made.
    """
    wait_for, init = asyncio.wait_for, asyncio.TaskGroup.__init__

    def ordered_init(group: asyncio.TaskGroup) -> None:
        init(group)
        group.__dict__["_tasks"] = _OrderedTasks()

    asyncio.TaskGroup.__init__ = ordered_init  # type: ignore[assignment, method-assign]
    if sys.version_info < (3, 12):
        asyncio.wait_for = asyncio.tasks.wait_for = _wait_for
    try:
        yield
    finally:
        asyncio.wait_for = asyncio.tasks.wait_for = wait_for
        asyncio.TaskGroup.__init__ = init  # type: ignore[method-assign]


class _OrderedTasks(dict[asyncio.Task[Any], None]):
    """As much of a set as a task group uses, in the order of insertion."""

    def add(self, task: asyncio.Task[Any]) -> None:
        """Put it at the end."""
        self[task] = None

    def discard(self, task: asyncio.Task[Any]) -> None:
        """Remove it; nothing when it is not there."""
        self.pop(task, None)


async def _wait_for(fut: Any, timeout: Any) -> Any:
    if timeout is not None and timeout <= 0:
        future = asyncio.ensure_future(fut)
        if future.done():
            return future.result()
        future.cancel()
        await asyncio.wait((future,))
        try:
            return future.result()
        except asyncio.CancelledError as error:
            raise TimeoutError from error
    async with asyncio.timeout(timeout):
        return await fut
