"""The task that carries the log from memory to the disk: group commit, in order, with nothing else waiting for it.

What the log accepts is queued here. The task takes everything that is queued, writes it in one operation and syncs
once; meanwhile the next group gathers. A cut or a reset of the log is queued between the entries, so the disk sees
the changes in the order in which the log made them, while the log itself never waits.

Where the disk refuses (full, broken), the same group is tried again after a pause; nothing is acknowledged until
then. `stalled_ms` says for how long the oldest group has been waiting for its flush, whether the disk is slow,
stuck or refusing.

In flush mode `async` groups are only written. A sync follows when one is due: `flush_interval_ms` after the last if
`flush_least_pages` are unsynced by then, `flush_thorough_interval_ms` after it in any case, and at an orderly stop.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from node.dledger.config import PAGE_BYTES, DLedgerConfig
from node.dledger.files import LedgerFiles
from node.dledger.row import EntryRow
from node.dledger.rpc import DLedgerCode
from node.runtime import Clock

__all__ = ["MAX_GROUP_BYTES", "LogWriter"]

logger = logging.getLogger("node.dledger.store")

MAX_GROUP_BYTES = 8 * 1024 * 1024
"""Bytes of one write: a tenth of a second on a slow disk."""

MAX_UNSYNCED_BYTES = 64 * 1024 * 1024
"""Mode `async`: written bytes that wait for a sync, whatever the intervals say. They are kept in memory until then, in
case the sync fails."""

RETRY_PAUSE_S = 0.2
"""Between two tries of a write that the disk refused."""

STOP_TIMEOUT_S = 5.0
"""How long an orderly stop waits for the disk. Nobody was told that what is lost then was stored."""


@dataclass(slots=True, eq=False)
class _Cut:
    """The log ends at `position`, before `end_index`; or it begins anew there when `is_reset`."""

    position: int
    end_index: int
    is_reset: bool
    done: asyncio.Future[None]


class LogWriter:
    """Owns the changes of the data files. `on_progress` is called after each step that made something durable."""

    def __init__(
        self, config: DLedgerConfig, files: LedgerFiles, clock: Clock, *, on_progress: Callable[[], None]
    ) -> None:
        self._files = files
        self._clock = clock
        self._on_progress = on_progress
        self._sync_each_group = config.flush_mode == "sync"
        self._sync_interval_ns = config.flush_interval_ms * 1_000_000
        self._thorough_interval_ns = max(config.flush_interval_ms, config.flush_thorough_interval_ms) * 1_000_000
        self._least_bytes = config.flush_least_pages * PAGE_BYTES
        self._unsynced_bytes = 0
        self._is_stopping = False
        self._queue: deque[EntryRow | _Cut] = deque()
        self._writing_last = -1
        self._resting: asyncio.Future[None] | None = None
        self._settled = asyncio.Event()
        self._settled.set()
        self._task: asyncio.Task[None] | None = None
        self._waiting_since_ns: int | None = None
        self._last_sync_ns = 0
        self.written_index = -1
        """The last entry that is in the files."""
        self.durable_index = -1
        """The last entry that survives a power cut."""
        self.pending_bytes = 0
        """Bytes of entries that are not written yet."""
        self.failure: OSError | None = None
        """Why the disk refused the last operation; None when it did not."""
        self.group_total = 0
        self.entry_total = 0

    def start(self, last_index: int) -> None:
        """Begin; everything up to `last_index` is durable already."""
        self.written_index = self.durable_index = last_index
        self._last_sync_ns = self._clock.monotonic_ns()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="dledger-writer")

    async def stop(self) -> None:
        """Write and sync what is queued, unless the disk refuses or does not answer, and end."""
        task, self._task = self._task, None
        if task is None:
            return
        self._is_stopping = True
        self._wake()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._settled.wait()
        except TimeoutError:
            logger.error("stopping with %d bytes of the log not stored: the disk does not answer", self.pending_bytes)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    @property
    def is_settled(self) -> bool:
        """Whether everything that was queued is durable."""
        return not self.pending_bytes and not self._queue and self.durable_index == self.written_index

    @property
    def failure_code(self) -> DLedgerCode | None:
        """DISK_FULL or DISK_ERROR while the disk refuses; None otherwise."""
        if self.failure is None:
            return None
        return DLedgerCode.DISK_FULL if self.failure.errno == errno.ENOSPC else DLedgerCode.DISK_ERROR

    @property
    def stalled_ms(self) -> float:
        """For how long the oldest write or sync that is due has not completed; 0 when none is due."""
        if self._waiting_since_ns is None:
            return 0.0
        return (self._clock.monotonic_ns() - self._waiting_since_ns) / 1e6

    def add(self, row: EntryRow) -> None:
        """Queue the next entries of the log."""
        self._queue.append(row)
        self.pending_bytes += len(row.raw)
        self._awake()

    def cut(self, position: int, end_index: int, *, is_reset: bool = False) -> asyncio.Future[None]:
        """Queue the cut of everything from `end_index` on. Done when it is durable.

        The water marks go back at once, and entries that were not written yet are dropped.
        """
        queue = self._queue
        while queue:
            newest = queue[-1]
            if isinstance(newest, _Cut) or (newest.last_index < end_index and not is_reset):
                break
            queue.pop()
            self.pending_bytes -= len(newest.raw)
            if newest.first_index < end_index and not is_reset:
                kept = newest.head(end_index - 1)
                queue.append(kept)
                self.pending_bytes += len(kept.raw)
        cut = _Cut(position, end_index, is_reset, asyncio.get_running_loop().create_future())
        queue.append(cut)
        self.written_index = min(self.written_index, end_index - 1)
        self.durable_index = min(self.durable_index, end_index - 1)
        self._writing_last = -1 if is_reset else min(self._writing_last, end_index - 1)
        self._awake()
        return cut.done

    def _awake(self) -> None:
        if self._waiting_since_ns is None:
            self._waiting_since_ns = self._clock.monotonic_ns()
        if self.failure is None:
            self._settled.clear()
        self._wake()

    def _wake(self) -> None:
        """Let the task look at the queue, if it rests."""
        resting = self._resting
        if resting is not None:
            self._resting = None
            if not resting.done():
                resting.set_result(None)

    async def _run(self) -> None:
        while True:
            try:
                if not self._queue:
                    await self._rest()
                    continue
                first = self._queue[0]
                if isinstance(first, _Cut):
                    await self._cut_files(first)
                else:
                    await self._write_group()
            except OSError as error:
                await self._refused(error)
            except Exception:
                logger.exception("the log writer met an error of its own")
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _rest(self) -> None:
        """Nothing is queued: wait until something is, or until the next sync of mode `async` is due."""
        if self.durable_index >= self.written_index:
            self._settled.set()
            self._resting = asyncio.get_running_loop().create_future()
            await self._resting
            return
        due_ns = self._sync_due_ns() - self._clock.monotonic_ns()
        try:
            async with asyncio.timeout(max(due_ns, 0) / 1e9):
                self._resting = asyncio.get_running_loop().create_future()
                await self._resting
        except TimeoutError:
            await self._sync()

    def _sync_due_ns(self) -> int:
        """When what is written is to be synced (mode `async`), by the monotonic clock."""
        if self._is_stopping:
            return 0
        if self._unsynced_bytes >= MAX_UNSYNCED_BYTES:
            return self._last_sync_ns
        is_enough = self._unsynced_bytes >= self._least_bytes
        return self._last_sync_ns + (self._sync_interval_ns if is_enough else self._thorough_interval_ns)

    async def _write_group(self) -> None:
        group = self._take_group()
        self._writing_last = group[-1].last_index
        if self._queue:  # a cut that was queued behind an earlier one may have taken back what stood before that
            cut_ends = [each.end_index for each in self._queue if isinstance(each, _Cut)]
            if cut_ends:
                self._writing_last = min(self._writing_last, min(cut_ends) - 1)
        try:
            await self._files.write(group, sync=self._sync_each_group)
        except BaseException:
            self._put_back(group)
            raise
        size_bytes = len(group[0].raw) if len(group) == 1 else sum([len(row.raw) for row in group])
        self.pending_bytes -= size_bytes
        self.group_total += 1
        self.entry_total += sum([len(row.ends) for row in group])
        self.written_index = max(self.written_index, self._writing_last)
        if self._sync_each_group:
            self.durable_index = self.written_index
        else:
            self._unsynced_bytes += size_bytes
        self._succeeded()
        self._on_progress()
        if not self._sync_each_group and self._clock.monotonic_ns() >= self._sync_due_ns():
            await self._sync()

    def _put_back(self, group: list[EntryRow]) -> None:
        """Queue again what was not written, but for what was cut off meanwhile."""
        for row in reversed(group):
            if row.first_index > self._writing_last:
                self.pending_bytes -= len(row.raw)
                continue
            kept = row.head(min(row.last_index, self._writing_last))
            self.pending_bytes -= len(row.raw) - len(kept.raw)
            self._queue.appendleft(kept)

    def _take_group(self) -> list[EntryRow]:
        queue = self._queue
        group: list[EntryRow] = []
        size_bytes = 0
        while queue and size_bytes < MAX_GROUP_BYTES:
            row = queue[0]
            if isinstance(row, _Cut):
                break
            queue.popleft()
            group.append(row)
            size_bytes += len(row.raw)
        return group

    async def _sync(self) -> None:
        """Sync what is written; a cut that comes meanwhile limits what that has made durable."""
        if self._waiting_since_ns is None:
            self._waiting_since_ns = self._clock.monotonic_ns()
        self._writing_last = self.written_index
        covered_bytes = self._unsynced_bytes
        await self._files.data.sync()
        self._last_sync_ns = self._clock.monotonic_ns()
        self._unsynced_bytes -= covered_bytes
        self.durable_index = max(self.durable_index, min(self._writing_last, self.written_index))
        self._succeeded()
        self._on_progress()

    async def _cut_files(self, cut: _Cut) -> None:
        if cut.is_reset:
            await self._files.reset(cut.position, cut.end_index)
        else:
            await self._files.cut(cut.position, cut.end_index)
        self._queue.popleft()
        self._last_sync_ns = self._clock.monotonic_ns()
        self._succeeded()
        if not cut.done.done():
            cut.done.set_result(None)
        self._on_progress()

    def _succeeded(self) -> None:
        """An operation is done: the next one, if there is one, has been waiting from now on. What only waits for its
        time to be synced does not wait for the disk."""
        self._waiting_since_ns = self._clock.monotonic_ns() if self._queue else None
        if self.failure is not None:
            logger.warning("the disk takes writes again")
            self.failure = None
            if not self.is_settled:
                self._settled.clear()

    async def _refused(self, error: OSError) -> None:
        """Say so once, tell the log, and try again later."""
        if self.failure is None or self.failure.errno != error.errno:
            logger.error("the disk refuses to store the log: %s", error)
        self.failure = error
        self._settled.set()
        self._on_progress()
        await asyncio.sleep(RETRY_PAUSE_S)
