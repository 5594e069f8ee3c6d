"""A small JSON file that follows a table in memory: written a while after a change, replaced as a whole.

RocketMQ writes its tables every few seconds whether they changed or not (R: ConfigManager, 5 s for consumer
offsets). Here the first change starts a timer and all changes until it fires go into one write, so an idle broker
does nothing. What is not yet written is lost with the machine; each table documents what that means.
The file has a checksum and a predecessor (`node/store/table_file.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from node.runtime import Disk
from node.store.table_file import read_table, write_table

__all__ = ["LazyFile"]

logger = logging.getLogger("node.broker")


class LazyFile:
    """Keeps the file at `path` up to date with `render()`, at most `delay_s` seconds behind."""

    def __init__(self, disk: Disk, path: str, *, delay_s: float, render: Callable[[], Any]) -> None:
        self._disk = disk
        self._path = path
        self._delay_s = delay_s
        self._render = render
        self._dirty = False
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self._stopped = False

    def load(self, adopt: Callable[[Any], object]) -> None:
        """Pass the file's content to `adopt`, if the file exists. Raises OSError; ValueError (TableDamaged is one) if
        it is damaged, or is JSON that `adopt` finds to be another table."""
        content = read_table(self._disk, self._path)
        if content is None:
            return
        try:
            adopt(content)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(f"{self._path} is damaged: {error!r}; restore it, or remove it to start empty") from error

    def touch(self) -> None:
        """The table has changed: write it within the delay."""
        self._dirty = True
        if self._timer is None and self._task is None and not self._stopped:
            self._timer = asyncio.get_running_loop().call_later(self._delay_s, self._begin)

    def _begin(self) -> None:
        self._timer = None
        self._task = asyncio.get_running_loop().create_task(self._write_and_go_on())

    async def _write_and_go_on(self) -> None:
        try:
            await self.flush()
        except OSError as error:
            logger.error("%s could not be written: %s", self._path, error)
        except Exception:
            logger.exception("writing %s met an error of its own", self._path)
        finally:
            self._task = None
        if self._dirty:
            self.touch()

    async def flush(self) -> None:
        """Write now what has changed; durable on return. Raises OSError, and the change then stays pending."""
        async with self._writing:
            if not self._dirty:
                return
            self._dirty = False
            try:
                await write_table(self._disk, self._path, self._render())
            except BaseException:
                self._dirty = True
                raise

    async def stop(self) -> None:
        """Write what is pending, for the last time; a failure is logged."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self.flush()
        except OSError as error:
            logger.error("%s could not be written: %s", self._path, error)
