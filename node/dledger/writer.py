"""Carries the log from memory to the disk: group commit, in order, without making anything else wait.

Entries that the log accepts are queued here. In the next turn of the event loop everything that is queued is written in
one operation and synced once; meanwhile the next group gathers, and is written in the turn in which the disk is done
with the previous one. A cut or a reset of the log is queued between the entries, so the disk sees the changes in the
order in which the log made them, while the log itself never waits. Cuts, and separate syncs, are rare and have a task
each; a group takes two calls.

If the disk refuses a write (full, broken), the same group is tried again after a pause; nothing is acknowledged until
it succeeds. `stalled_ms` is how long the oldest group has been waiting for its flush, whether the disk is slow,
stuck or refusing.

In flush mode `async` groups are only written. A sync follows when one is due: `flush_interval_ms` after the last if
`flush_least_pages` are unsynced by then, `flush_thorough_interval_ms` after it in any case, and at an orderly stop.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from node.dledger.config import PAGE_BYTES, DLedgerConfig
from node.dledger.entry_batch import EntryBatch
from node.dledger.files import LedgerFiles
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
"""Pause before a write that the disk refused is tried again."""

STOP_TIMEOUT_S = 5.0
"""How long an orderly stop waits for the disk. Entries that are lost then were never acknowledged."""


@dataclass(slots=True, eq=False)
class _Cut:
    """The log ends at `position`, before `end_index`; if `is_reset`, it begins anew there, and of the former log only
    `members` is kept."""

    position: int
    end_index: int
    is_reset: bool
    members: tuple[tuple[int, dict[str, str]], ...]
    done: asyncio.Future[None]


class LogWriter:
    """Makes all changes of the data files. `on_progress` is called after each step, and if the disk refuses one."""

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
        self._is_running = False
        self._is_stopping = False
        self._has_ended = False
        self._is_busy = True
        """Whether an operation, or the pause after a failed one, is under way: queueing then needs no wake-up."""
        self._loop: asyncio.AbstractEventLoop
        self._queue: deque[EntryBatch | _Cut] = deque()
        self._group: list[EntryBatch] = []
        self._writing_last = -1
        self._settled = asyncio.Event()
        self._settled.set()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending: asyncio.Future[None] | None = None
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
        self.failure_code: DLedgerCode | None = None
        """DISK_FULL or DISK_ERROR while the disk refuses; None otherwise."""
        self.group_total = 0
        self.entry_total = 0

    def start(self, last_index: int) -> None:
        """Start; everything up to `last_index` is durable already."""
        self.written_index = self.durable_index = last_index
        self._last_sync_ns = self._clock.monotonic_ns()
        self._loop = asyncio.get_running_loop()
        self._is_running = True
        self._loop.call_soon(self._go_on)

    async def stop(self) -> None:
        """Write and sync what is queued, unless the disk refuses it once more or does not answer, and stop."""
        if not self._is_running:
            return
        self._is_running = False
        self._is_stopping = True
        if self.failure is not None:
            self._settled.clear()
            self._end_pause()
        self._wake()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._settled.wait()
        except TimeoutError:
            logger.error("stopping with %d bytes of the log not stored: the disk does not answer", self.pending_bytes)
        self._has_ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._is_busy = False
        if self._task is not None:
            self._task.cancel()
        while self._is_busy:  # the files must not be closed during an operation
            self._ending = self._loop.create_future()
            await self._ending

    @property
    def is_settled(self) -> bool:
        """Whether everything that was queued is durable."""
        return not self.pending_bytes and not self._queue and self.durable_index == self.written_index

    @property
    def stalled_ms(self) -> float:
        """How long the oldest write or sync that is due has not completed; 0 if none is due."""
        if self._waiting_since_ns is None:
            return 0.0
        return (self._clock.monotonic_ns() - self._waiting_since_ns) / 1e6

    def add(self, batch: EntryBatch) -> None:
        """Queue the next entries of the log."""
        self._queue.append(batch)
        self.pending_bytes += len(batch.raw)
        if self._waiting_since_ns is None:
            self._waiting_since_ns = self._clock.monotonic_ns()
        if self.failure is None:
            self._settled.clear()
        if not self._is_busy:
            self._is_busy = True
            self._loop.call_soon(self._go_on)

    def cut(
        self,
        position: int,
        end_index: int,
        *,
        is_reset: bool = False,
        members: tuple[tuple[int, dict[str, str]], ...] = (),
    ) -> asyncio.Future[None]:
        """Queue the cut of everything from `end_index` on. The future is done when it is durable. See
        `LedgerFiles.reset` for `members`.

        `written_index` and `durable_index` go back at once, and entries that were not written yet are dropped.
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
        cut = _Cut(position, end_index, is_reset, members, asyncio.get_running_loop().create_future())
        queue.append(cut)
        self.written_index = min(self.written_index, end_index - 1)
        self.durable_index = min(self.durable_index, end_index - 1)
        self._writing_last = -1 if is_reset else min(self._writing_last, end_index - 1)
        if self._waiting_since_ns is None:
            self._waiting_since_ns = self._clock.monotonic_ns()
        if self.failure is None:
            self._settled.clear()
        self._wake()
        return cut.done

    # One operation at a time

    def _wake(self) -> None:
        """Look at the queue in the next turn of the event loop, unless something is under way."""
        if not self._is_busy:
            self._is_busy = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Begin the next operation; none is under way."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._has_ended:
            self._rest()
            return
        try:
            if not self._queue:
                self._wait_for_more()
                return
            first = self._queue[0]
            if isinstance(first, _Cut):
                self._begin(self._cut_files(first))
            else:
                self._write_group()
        except OSError as error:
            self._refused(error)
        except Exception as error:
            self._failed(error)

    def _rest(self) -> None:
        self._is_busy = False
        if self._ending is not None and not self._ending.done():
            self._ending.set_result(None)

    def _wait_for_more(self) -> None:
        """Nothing is queued: rest until something is, or until the next sync of mode `async` is due."""
        if self.durable_index >= self.written_index:
            self._settled.set()
            self._rest()
            return
        due_ns = self._sync_due_ns() - self._clock.monotonic_ns()
        if due_ns <= 0:
            self._begin(self._sync())
            return
        self._rest()
        self._timer = self._loop.call_later(due_ns / 1e9, self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer = None
        if not self._is_busy:  # else something was queued in this very turn: it is written first
            self._is_busy = True
            self._begin(self._sync())

    def _begin(self, operation: Coroutine[Any, Any, None]) -> None:
        """Begin an operation of several steps, in a task."""
        self._task = self._loop.create_task(operation, name="dledger-writer")
        self._task.add_done_callback(self._attended)  # called even if it is cancelled before it has begun

    def _attended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        self._ended(asyncio.CancelledError() if task.cancelled() else task.exception())

    def _ended(self, error: BaseException | None) -> None:
        """The operation has ended."""
        if error is None:
            self._go_on()
        elif isinstance(error, OSError) and not self._has_ended:
            self._refused(error)
        elif isinstance(error, Exception) and not self._has_ended:
            self._failed(error)
        else:  # cancelled: with the loop, if not by `stop`
            self._has_ended = True
            self._rest()

    def _sync_due_ns(self) -> int:
        """When the written entries are due to be synced (mode `async`), by the monotonic clock."""
        if self._is_stopping:
            return 0
        if self._unsynced_bytes >= MAX_UNSYNCED_BYTES:
            return self._last_sync_ns
        is_enough = self._unsynced_bytes >= self._least_bytes
        return self._last_sync_ns + (self._sync_interval_ns if is_enough else self._thorough_interval_ns)

    def _write_group(self) -> None:
        group = self._group = self._take_group()
        self._writing_last = group[-1].last_index
        if self._queue:  # a cut queued after the first one may reach back into this group
            cut_ends = [each.end_index for each in self._queue if isinstance(each, _Cut)]
            if cut_ends:
                self._writing_last = min(self._writing_last, min(cut_ends) - 1)
        try:
            self._files.begin_write(group, self._group_written, sync=self._sync_each_group)
        except BaseException:
            self._put_back(group)
            raise

    def _group_written(self, error: BaseException | None) -> None:
        """The disk is done with the group, or has refused it."""
        group, self._group = self._group, []
        if error is not None or self._has_ended:
            self._put_back(group)
            self._ended(error)
            return
        try:
            self._advance(group)
        except Exception as raised:
            self._failed(raised)
            return
        if not self._sync_each_group and self._clock.monotonic_ns() >= self._sync_due_ns():
            self._begin(self._sync())
        else:
            self._go_on()

    def _advance(self, group: list[EntryBatch]) -> None:
        if len(group) == 1:
            size_bytes, count = len(group[0].raw), len(group[0].ends)
        else:
            size_bytes, count = sum([len(batch.raw) for batch in group]), sum([len(batch.ends) for batch in group])
        self.pending_bytes -= size_bytes
        self.group_total += 1
        self.entry_total += count
        if self._writing_last > self.written_index:
            self.written_index = self._writing_last
        if self._sync_each_group:
            self.durable_index = self.written_index
        else:
            self._unsynced_bytes += size_bytes
        self._succeeded()
        self._on_progress()

    def _put_back(self, group: list[EntryBatch]) -> None:
        """Queue again what was not written, except what was cut off meanwhile."""
        for batch in reversed(group):
            if batch.first_index > self._writing_last:
                self.pending_bytes -= len(batch.raw)
                continue
            kept = batch.head(min(batch.last_index, self._writing_last))
            self.pending_bytes -= len(batch.raw) - len(kept.raw)
            self._queue.appendleft(kept)

    def _take_group(self) -> list[EntryBatch]:
        queue = self._queue
        group: list[EntryBatch] = []
        size_bytes = 0
        while queue and size_bytes < MAX_GROUP_BYTES:
            batch = queue[0]
            if isinstance(batch, _Cut):
                break
            queue.popleft()
            group.append(batch)
            size_bytes += len(batch.raw)
        return group

    async def _sync(self) -> None:
        """Sync what is written; a cut that is queued meanwhile limits what counts as durable."""
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
            await self._files.reset(cut.position, cut.end_index, cut.members)
        else:
            await self._files.cut(cut.position, cut.end_index)
        self._queue.popleft()
        self._last_sync_ns = self._clock.monotonic_ns()
        self._succeeded()
        if not cut.done.done():
            cut.done.set_result(None)
        self._on_progress()

    def _succeeded(self) -> None:
        """An operation is done: the next one, if there is one, counts as waiting from now on. Entries whose sync is not
        due yet are not waiting for the disk."""
        self._waiting_since_ns = self._clock.monotonic_ns() if self._queue else None
        if self.failure is not None:
            logger.warning("the disk takes writes again")
            self.failure = self.failure_code = None
            if not self.is_settled:
                self._settled.clear()

    def _refused(self, error: OSError) -> None:
        """Log the error once, notify the log, and try again later."""
        if self.failure is None or self.failure.errno != error.errno:
            logger.error("the disk refuses to store the log: %s", error)
        self.failure = error
        self.failure_code = DLedgerCode.DISK_FULL if error.errno == errno.ENOSPC else DLedgerCode.DISK_ERROR
        self._settled.set()
        self._pause()
        self._on_progress()

    def _failed(self, error: Exception) -> None:
        """This should not happen: continue after a pause nevertheless."""
        logger.error("the log writer met an error of its own", exc_info=error)
        self._pause()

    def _pause(self) -> None:
        self._timer = self._loop.call_later(RETRY_PAUSE_S, self._go_on)

    def _end_pause(self) -> None:
        """End the pause after a refused operation, so that the next `_wake` has it tried at once."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._is_busy = False
