"""Work for many hosts at once: blocking calls of libraries in threads, and waiting for all of it.

The harness's own threads are none of the event loop's (`asyncio.to_thread`): those are for clients, whose drivers may
block for as long as a fault lasts. The call that ends the fault must not stand in line behind them.
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
"""Calls of clients that block at the same time, those included whose operation's time is over: no thread can be ended.
asyncio's own bound, four more than there are processors, is less than clients have open when a replica is paused."""

_own = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, concurrent.futures.ThreadPoolExecutor]()
"""The harness's own threads, for each event loop."""


def begin_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """Have one of the harness's own threads call `function`."""
    loop = asyncio.get_running_loop()
    pool = _own.get(loop)
    if pool is None:
        pool = _own[loop] = concurrent.futures.ThreadPoolExecutor(thread_name_prefix="harness")
    return loop.run_in_executor(pool, functools.partial(function, *args, **kwargs))


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` in a thread and return what it returns.

    A cancelled caller still waits for its end: what it makes must not appear after others were asked to clean up.
    """
    return await to_its_end(begin_in_thread(function, *args, **kwargs))


async def to_its_end(work: Awaitable[T]) -> T:
    """Await `work`; a cancelled caller waits for its end, so that what was done is known."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # looked at, so that it is not reported as lost
        raise


def let_threads_go(loop: asyncio.AbstractEventLoop) -> None:
    """Have the harness's own threads of a loop end once they have nothing more to do."""
    _own.pop(loop, None)


def renew_threads() -> None:
    """Have calls in threads made by new ones from now on, those of the running event loop (asyncio.to_thread) as well.

    A thread is in the network namespace of the one that started it, for good. What clients do in threads must be done
    in the clients' namespace. The threads so far end once they have nothing more to do and nobody holds their pool.
    """
    loop = asyncio.get_running_loop()
    let_threads_go(loop)
    loop.set_default_executor(ClientThreads(MAX_CLIENT_THREADS, thread_name_prefix="asyncio"))


async def all_of(work: Iterable[Awaitable[object]]) -> None:
    """Everything at once; every one is waited for before the first error is raised."""
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
