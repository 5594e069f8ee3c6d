"""Tasks and threads that a plug-in leaves running: tasks that ignore their cancellation, and threads, which cannot be
stopped. A run is judged without them, and the process exits without them: Python and asyncio would wait forever.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["END_S", "ClientThreads", "end_without_threads", "leave_task", "run_loop"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

END_S = 5.0
"""How long a cancelled task, or a thread, has to end once it is no longer needed."""

_TASKS = set[asyncio.Task[Any]]()
"""Tasks that do not end. References are kept, as garbage collection would close them, and not end them either."""


class ClientThreads(concurrent.futures.ThreadPoolExecutor):
    """Threads for calls of clients. Its shutdown waits for at most `END_S`."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See concurrent.futures.Executor."""
        super().shutdown(wait=False, cancel_futures=cancel_futures)
        due_s = time.monotonic() + END_S
        for thread in [*self._threads] if wait else ():
            thread.join(max(0.0, due_s - time.monotonic()))


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run, but without waiting forever for the tasks that it cancels."""
    with asyncio.Runner() as runner:
        try:
            return runner.run(main)
        finally:
            runner.run(_end_tasks())


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        _, going_on = await asyncio.wait(tasks, timeout=END_S)
        for task in going_on:
            logger.warning("a task of the plug-in is still running after being cancelled: %s", task)
            leave_task(task)


def leave_task(task: asyncio.Task[Any]) -> None:
    """Exclude a task from those that the event loop waits for when it is closed."""
    _TASKS.add(task)
    task.add_done_callback(_TASKS.discard)
    asyncio._unregister_task(task)
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def end_without_threads(status: int) -> None:
    """Make this process, whose work is done, exit with `status` even if threads or tasks are still running."""
    sys.stdout.flush()
    sys.stderr.flush()
    if _TASKS:
        os._exit(status)
    threading.Thread(target=_end_without_threads, args=(status,), name="end", daemon=True).start()


def _end_without_threads(status: int) -> None:
    time.sleep(END_S)
    if any(not thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate()):
        os._exit(status)
