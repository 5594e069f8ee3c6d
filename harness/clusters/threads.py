"""Work for many hosts at once: blocking calls of libraries in threads, and waiting for all of it."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Iterable
from typing import ParamSpec, TypeVar

__all__ = ["all_of", "in_thread", "renew_threads", "to_its_end"]

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` in a thread and return what it returns.

    A cancelled caller still waits for its end: what it makes must not appear after others were asked to clean up.
    """
    return await to_its_end(asyncio.to_thread(function, *args, **kwargs))


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


def renew_threads() -> None:
    """Have the running event loop's calls in threads (asyncio.to_thread) made by new ones from now on.

    A thread is in the network namespace of the one that started it, for good. What clients do in threads must be done
    in the clients' namespace. The threads so far end once they have nothing more to do and nobody holds their pool.
    """
    pool = concurrent.futures.ThreadPoolExecutor(thread_name_prefix="asyncio")
    asyncio.get_running_loop().set_default_executor(pool)


async def all_of(work: Iterable[Awaitable[object]]) -> None:
    """Everything at once; every one is waited for before the first error is raised."""
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
