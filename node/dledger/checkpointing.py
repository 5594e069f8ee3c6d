"""Writes checkpoints of the log: within an interval of each change, and not at all while nothing changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from node.remoting.complaints import Complaints

__all__ = ["CheckpointTask"]

logger = logging.getLogger("node.dledger.store")


class CheckpointTask:
    """Calls `write` at most `interval_s` after `changed`, at once after `hurry` (3 s, R)."""

    def __init__(self, write: Callable[[], Awaitable[None]], interval_s: float, complaints: Complaints) -> None:
        self._write = write
        self._interval_s = interval_s
        self._complaints = complaints
        self._has_changed = asyncio.Event()
        self._hurries = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="dledger-checkpoint")

    async def stop(self) -> bool:
        """Stop the task. Returns whether it had been started."""
        task, self._task = self._task, None
        if task is None:
            return False
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return True

    def changed(self) -> None:
        """Note that there is something to write."""
        self._has_changed.set()

    def hurry(self) -> None:
        """Write the pending change, or else the next one, without waiting for the interval."""
        self._hurries.set()

    async def _run(self) -> None:
        while True:
            await self._has_changed.wait()
            self._has_changed.clear()
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._hurries.wait()
            except TimeoutError:
                pass
            self._hurries.clear()
            try:
                await self._write()
            except OSError as error:
                self._complaints.warn("checkpoint", f"no checkpoint: {error}")
                self._has_changed.set()
                await asyncio.sleep(self._interval_s)
            except Exception:
                logger.exception("the checkpoint met an error of its own")
