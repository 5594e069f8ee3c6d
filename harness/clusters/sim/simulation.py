"""Runs a coroutine in simulation."""

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
"""Python's defaults are 700, 10 and 10 (up to 3.13)."""

PYPY_COMPILER = "decay=0,threshold=500,function_threshold=800,trace_eagerness=80,trace_limit=4000,loop_longevity=100000"
"""PyPy counts how often code runs, and decays the counts at each minor collection, of which there are twenty per second
of cluster time: hot code was compiled minutes late. So it is if it must first reach the default counts of 1,039, 1,619
and 200. Traces of 6,000 steps, the default limit, took longer to compile than they saved. And PyPy drops loops that did
not run while 1,000 others were compiled; a simulation has some two thousand."""


def run_simulated(main: Coroutine[Any, Any, _T], *, seed: int, shuffle: bool = False) -> _T:
    """Run `main` to its end on a new simulated loop, as `asyncio.run` does on a real one. Never waits in real time.

    `main` runs outside every host; it makes network and hosts on the running loop. The same seed gives the same
    run. `shuffle`: see SimLoop. Raises what `main` raises, and SimulationError when the simulation cannot continue.
    """
    with (
        rare_collections(),
        route_logs(),
        _same_asyncio(),
        asyncio.Runner(loop_factory=lambda: SimLoop(seed, shuffle=shuffle)) as runner,
    ):
        return runner.run(_and_nothing_else(main))


async def _and_nothing_else(main: Coroutine[Any, Any, _T]) -> _T:
    """Run `main`, then kill what still runs on hosts; otherwise the loop would cancel it and wait."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    try:
        return await main
    finally:
        loop.kill_lanes()


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Run the cyclic garbage collector less often: a run holds the memory of all its nodes, which each collection
    traverses, and makes few cycles. Objects from before the run (mostly modules) are frozen, so they are not traversed
    again. PyPy's collector works differently and has no such settings.

    Use it around more than the run itself, so that what the run leaves is garbage at the end and is collected here:
    otherwise the next run would freeze it along with the modules, and so on, some 7 MB for each run. If a caller has
    frozen objects already, freezing and collecting are left to that caller."""
    if sys.implementation.name != "cpython":
        if sys.implementation.name == "pypy":
            importlib.import_module("pypyjit").set_param(PYPY_COMPILER)
        yield
        return
    before = gc.get_threshold()
    # Inside another such run the thresholds show it; they are checked first, since counting frozen objects is slow.
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
    """Make every version of Python take the same steps.

    Up to 3.11 `asyncio.wait_for` runs its argument in a task of its own, which takes more iterations of the loop and
    so changes the order in which tasks of one process continue. Here it works as from 3.12 on. A task group cancels
    its tasks in the order of a set, which differs on PyPy; here it is the order of their creation.
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
    """The operations of a set that a task group uses, in insertion order."""

    def add(self, task: asyncio.Task[Any]) -> None:
        """Add a task at the end."""
        self[task] = None

    def discard(self, task: asyncio.Task[Any]) -> None:
        """Remove a task; no effect when it is missing."""
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
