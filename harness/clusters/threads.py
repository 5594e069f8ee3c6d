"""Work on many hosts at once: blocking library calls in threads, and waiting for all of them.

The harness's own threads are separate from the event loop's (`asyncio.to_thread`). Those are for clients, whose drivers
may block for as long as a fault lasts, and the call that ends the fault must not queue behind them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import weakref
from collections.abc import Awaitable, Callable, Iterable
from typing import ParamSpec, TypeVar

from harness.left_behind import ClientThreads

__all__ = ["all_of", "begin_in_thread", "in_thread", "let_threads_go", "renew_threads", "to_its_end"]

P = ParamSpec("P")
T = TypeVar("T")

MAX_CLIENT_THREADS = 1000
"""Client calls that may block at the same time, including those of operations that timed out: threads cannot be ended.
asyncio's own limit, four more than there are processors, is less than clients have open when a replica is paused."""

_own = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, concurrent.futures.ThreadPoolExecutor]()
"""The harness's own threads, for each event loop."""


def begin_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """Begin a call of `function` in one of the harness's own threads."""
    loop = asyncio.get_running_loop()
    pool = _own.get(loop)
    if pool is None:
        pool = _own[loop] = concurrent.futures.ThreadPoolExecutor(thread_name_prefix="harness")
    return loop.run_in_executor(pool, functools.partial(function, *args, **kwargs))


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` in a thread and return what it returns.

    A cancelled caller still waits for its end: what it makes must not appear after cleanup has begun.
    """
    return await to_its_end(begin_in_thread(function, *args, **kwargs))


async def to_its_end(work: Awaitable[T]) -> T:
    """Await `work`; a cancelled caller still waits for its end, so that the outcome is known."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not report it
        raise


def let_threads_go(loop: asyncio.AbstractEventLoop) -> None:
    """Have the harness's own threads of a loop end once they have nothing more to do."""
    _own.pop(loop, None)


def renew_threads() -> None:
    """Use new threads from now on, also for those of the running event loop (asyncio.to_thread).

    A thread stays in the network namespace of the thread that started it, and client calls must be made in the clients'
    namespace. The old threads end once they have nothing more to do and nobody holds their pool.
    """
    loop = asyncio.get_running_loop()
    let_threads_go(loop)
    loop.set_default_executor(ClientThreads(MAX_CLIENT_THREADS, thread_name_prefix="asyncio"))


async def all_of(work: Iterable[Awaitable[object]]) -> None:
    """Await everything at once; all of it has ended before the first error is raised."""
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
