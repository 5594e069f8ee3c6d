"""The commit log of a broker that does not replicate through DLedger: one record after another, in files of one size.

A file is named by the 20-digit position of its first byte. No record straddles two files: if the next record and
the eight-byte head of a blank one no longer fit, a blank record fills the file up (S1, CommitLog and MappedFile).

Appending is synchronous and goes to memory; one task writes what has accumulated to the file in a single write.
When a record counts as stored depends on the flush mode (S1, R):

    sync       written and synced, for all records of a group at once; after 5 s the sender gets FLUSH_DISK_TIMEOUT
    async      written; synced when four pages have accumulated, checked every 500 ms, and after 10 s in any case
    transient  in memory; written every 200 ms or when four pages have accumulated, then as async

Recovery: a checkpoint tells up to where the log is known to be durable and whether the last stop was clean. After an
unclean one, everything after the checkpoint is read, and the log ends before the first record that is not whole.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate

from node.runtime import Disk
from node.store.flushing import DEFAULT_FLUSH, FlushPolicy, LogDamaged, LogRefuses, NotYetDurable, OnDone
from node.store.recent_records import RecentRecords
from node.store.record import BLANK_MAGIC, RECORD_MAGIC, RecordError, decode_record, summarize_record
from node.store.segments import SegmentedFile, segment_name

__all__ = [
    "BLANK_HEAD_SIZE_BYTES",
    "DEFAULT_FLUSH",
    "CommitLog",
    "FlushPolicy",
    "LogDamaged",
    "LogRefuses",
    "NotYetDurable",
]

logger = logging.getLogger("node.store")

BLANK_HEAD_SIZE_BYTES = 8
"""Size and magic of a blank record; every file keeps room for it (R: END_FILE_MIN_BLANK_LENGTH)."""
FLUSH_TIMEOUT_S = 5.0
"""After which the sender of a record that is not yet synced is told so (R: syncFlushTimeout)."""
PAGE_BYTES = 4096
WRITE_LEAST_BYTES = 4 * PAGE_BYTES
"""Bytes in memory at which the write does not wait for more (R: commitCommitLogLeastPages)."""
COMMIT_INTERVAL_S = 0.2
"""Time between two writes of the transient buffer (R: commitIntervalCommitLog)."""
BUSY_S = 1.0
"""A write that takes longer means that the disk is busy: appends are refused (R: osPageCacheBusyTimeOutMills)."""
RETRY_S = 1.0
"""Time until a failed write is tried again."""
MAX_PENDING_BYTES = 64 << 20
"""Bytes of records in memory only; beyond it appends are refused."""
RECENT_BYTES = 8 << 20
"""Bytes of the newest records kept in memory, for dispatch and consumers that keep up."""
SCAN_BYTES = 4 << 20
"""Bytes that recovery reads at once."""


class CommitLog:
    """The log below `directory`. `on_progress` is called when `committed_position` advances."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        *,
        segment_size_bytes: int,
        flush_mode: str,
        on_progress: Callable[[], None],
        flush: FlushPolicy = DEFAULT_FLUSH,
    ) -> None:
        if flush_mode not in ("sync", "async", "transient"):
            raise ValueError(f"flush mode {flush_mode!r}")
        self._directory = directory
        self._segments = SegmentedFile(disk, directory, segment_size_bytes=segment_size_bytes)
        self._flush_mode = flush_mode
        self._flush = flush
        self._on_progress = on_progress
        self._writing: list[bytes] = []
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self.recent = RecentRecords(RECENT_BYTES)
        """The newest records; others may only read it."""
        self._waiters: deque[tuple[int, float, OnDone]] = deque()
        self._late_timer: asyncio.TimerHandle | None = None
        self._work = asyncio.Event()
        self._urgent = asyncio.Event()
        self._unsynced = asyncio.Event()
        self._disk_lock = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._write_began_s: float | None = None
        self._last_sync_s = 0.0
        self._stopping = False
        self.end_position = 0
        self.committed_position = 0
        self.failure: OSError | None = None
        self.flushes = 0
        self.truncated_bytes = 0
        """Bytes that recovery truncated."""

    @property
    def begin_position(self) -> int:
        return self._segments.begin_position

    @property
    def segment_size_bytes(self) -> int:
        return self._segments.segment_size_bytes

    @property
    def pending_bytes(self) -> int:
        """Bytes of records in memory only."""
        return self._pending_bytes

    @property
    def written_position(self) -> int:
        """Everything below survives a crash of the process."""
        return self._segments.end_position

    @property
    def synced_position(self) -> int:
        """Everything below survives a power cut."""
        return self._segments.synced_position

    async def open(self, *, durable_position: int, is_clean: bool, is_known: bool = True) -> None:
        """Recover the log. `durable_position` is where a record ended at the last checkpoint; after a clean stop it is
        the end. If a whole record straddles it, the checkpoint belongs to another log, and nothing is truncated.
        Without a checkpoint (not `is_known`) everything is read, and only what a crash explains is truncated: the end
        of the last file, never a damaged place before it. Raises LogDamaged, SegmentError, OSError."""
        self._loop = asyncio.get_running_loop()
        self._segments.open()
        segments = self._segments
        if segments.end_position < durable_position:
            raise LogDamaged(
                f"{segments.path_at(segments.end_position)}: the log ends at {segments.end_position},"
                f" {durable_position - segments.end_position} bytes of the log that were durable are missing"
            )
        gap = segments.first_gap(durable_position if is_known else segments.end_position)
        if gap:
            raise LogDamaged(f"{gap}; restore it, or the data directory from another copy")
        start = max(durable_position, segments.begin_position)
        is_clean = is_clean and durable_position == segments.end_position  # otherwise the files have changed since
        end = start if is_clean else self._scan(start)
        self.end_position = segments.end_position
        if end == start < segments.end_position and self._is_within_record(start):
            at = start % segments.segment_size_bytes
            raise LogDamaged(
                f"{segments.path_at(start)} holds a whole record across byte {at}, where the checkpoint says that one"
                " ends: the checkpoint is not of this log; restore the log's own, or remove checkpoint and"
                " checkpoint.bak to have all of the log read"
            )
        if not is_known and end < segments.end_position - segments.end_position % segments.segment_size_bytes:
            at = end % segments.segment_size_bytes
            path = segments.path_at(end)
            raise LogDamaged(f"{path} is damaged at byte {at}, and no checkpoint says what was durable")
        if end < segments.end_position:
            self.truncated_bytes = segments.end_position - end
            logger.warning("cutting %d bytes off the log at %d: they hold no whole record", self.truncated_bytes, end)
            await segments.truncate(end)
        if not is_clean:
            await segments.write_again(start)  # a failed sync of the previous process may have dropped it
        else:
            await segments.sync()
        self.end_position = self.committed_position = end
        self._last_sync_s = self._loop.time()
        self._tasks = [self._loop.create_task(self._write_forever())]
        if self._flush_mode != "sync":
            self._tasks.append(self._loop.create_task(self._sync_forever()))

    def _scan(self, position: int) -> int:
        """The end of the last whole record from `position` on."""
        segments = self._segments
        data, data_at = b"", position
        while position < segments.end_position:
            at = position - data_at
            head = data[at : at + BLANK_HEAD_SIZE_BYTES]
            size_bytes = int.from_bytes(head[:4], "big")
            if len(head) < BLANK_HEAD_SIZE_BYTES or at + size_bytes > len(data):
                wanted = max(SCAN_BYTES, size_bytes if size_bytes <= segments.room_at(position) else 0)
                fresh = segments.read(position, min(wanted, segments.room_at(position)))
                if data_at == position and len(fresh) <= len(data):
                    return position
                data, data_at = fresh, position
                continue
            if not self._is_whole(data, at, position, size_bytes):
                return position
            position += size_bytes
        return position

    def _is_within_record(self, position: int) -> bool:
        """Whether a whole record begins before `position` and ends after it."""
        try:
            begin = self.record_before(position)
        except OSError as error:
            if error.errno != errno.EBADMSG:
                raise
            return False  # something before it is damaged: unknown
        data = self._segments.read(begin, self._segments.room_at(begin)) if begin < position else b""
        return bool(data) and self._is_whole(data, 0, begin, int.from_bytes(data[:4], "big"))

    def _is_whole(self, data: bytes, at: int, position: int, size_bytes: int) -> bool:
        if int.from_bytes(data[at + 4 : at + 8], "big") == BLANK_MAGIC:
            return size_bytes == self._segments.room_at(position)
        try:
            message, end = decode_record(data, at)
        except RecordError:
            return False
        return message.physical_offset == position and end == at + size_bytes

    def append_batch(
        self, sizes: Sequence[int], encode: Callable[[Sequence[int]], Sequence[bytes]], on_done: OnDone
    ) -> Sequence[int]:
        """Append records of these sizes, one after another; `encode` gets their positions. Returns the positions.

        `on_done` is called once: with None when all count as stored, or with a NotYetDurable or OSError; in flush mode
        `transient` at once, before this returns. Raises LogRefuses: nothing was appended.
        """
        size_bytes = sum(sizes)
        self._check_room(size_bytes)
        began_s = self._write_began_s
        if began_s is not None and asyncio.get_running_loop().time() - began_s > BUSY_S:
            raise LogRefuses("the disk is busy")
        positions, blanks = self._lay_out(sizes, size_bytes)
        records = encode(positions)
        if blanks:
            for position, record in zip(positions, records, strict=True):
                if position in blanks:
                    self._add(blanks[position])
                self._add(record)
        else:
            self._add_batch(positions, records)
        loop = self._loop
        if self._flush_mode == "transient":
            self.committed_position = self.end_position
            loop.call_soon(self._on_progress)
            on_done(None)
        else:
            self._waiters.append((self.end_position, loop.time(), on_done))
            if self._late_timer is None and self._flush_mode == "sync":
                self._late_timer = loop.call_later(FLUSH_TIMEOUT_S, self._tell_late)
        self._work.set()
        if self._pending_bytes >= WRITE_LEAST_BYTES:
            self._urgent.set()
        return positions

    def _lay_out(self, sizes: Sequence[int], size_bytes: int) -> tuple[Sequence[int], dict[int, bytes]]:
        """Positions of records of these sizes, and the blank record to write before each that begins a file."""
        position = self.end_position
        room = self._segments.room_at(position)
        if size_bytes + BLANK_HEAD_SIZE_BYTES <= room:
            return (position,) if len(sizes) == 1 else list(accumulate(sizes[:-1], initial=position)), {}
        positions, blanks = [], {}
        for size_bytes in sizes:
            if size_bytes + BLANK_HEAD_SIZE_BYTES > room:
                if size_bytes + BLANK_HEAD_SIZE_BYTES > self._segments.segment_size_bytes:
                    raise LogRefuses(f"a record of {size_bytes} bytes does not fit into a file of the log")
                head = room.to_bytes(4, "big") + BLANK_MAGIC.to_bytes(4, "big")
                position += room
                blanks[position] = head + bytes(room - BLANK_HEAD_SIZE_BYTES)
                room = self._segments.segment_size_bytes
            positions.append(position)
            position += size_bytes
            room -= size_bytes
        return positions, blanks

    def append_copy(self, record: bytes) -> None:
        """Append a whole record, or a blank one, that another log has at `end_position`: a slave's append. Nobody
        waits for it; see `committed_position`. Raises LogRefuses: nothing was appended."""
        self._check_room(len(record))
        self._add(record)
        if self._flush_mode == "transient":
            self.committed_position = self.end_position
            asyncio.get_running_loop().call_soon(self._on_progress)
        self._work.set()
        if self._pending_bytes >= WRITE_LEAST_BYTES:
            self._urgent.set()

    def _check_room(self, size_bytes: int) -> None:
        if self._stopping:
            raise LogRefuses("the log is closing")
        if self.failure is not None:
            raise LogRefuses(f"the disk fails: {self.failure}")
        if self._pending_bytes + size_bytes > MAX_PENDING_BYTES:
            raise LogRefuses(f"{self._pending_bytes} bytes wait for the disk")

    def _add(self, data: bytes) -> None:
        self._add_batch((self.end_position,), (data,))

    def _add_batch(self, positions: Sequence[int], records: Sequence[bytes]) -> None:
        data = b"".join(records)  # now, while they are in the processor's cache
        self._pending.append(data)
        self._pending_bytes += len(data)
        self.end_position += len(data)
        self.recent.add(positions, data)

    async def _write_forever(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            if self._flush_mode == "transient":
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._urgent.wait(), COMMIT_INTERVAL_S)
                self._urgent.clear()
            try:
                self._complete()
                while self._pending:
                    await self._write_pending()
                    if self.failure is not None:
                        await asyncio.sleep(RETRY_S)
            except Exception:  # if this task ended, appends would be accepted and never written
                logger.exception("the writer of the log met an error of its own")
                self._work.set()
                await asyncio.sleep(RETRY_S)

    async def _write_pending(self) -> None:
        """Write pending records; if the disk refuses, `failure` is set."""
        group = self._writing = self._pending
        self._pending = []
        data = b"".join(group)
        self._write_began_s = asyncio.get_running_loop().time()
        try:
            async with self._disk_lock:
                await self._segments.append(data, sync=self._flush_mode == "sync")
        except BaseException as error:
            self._put_back()
            if not isinstance(error, OSError):
                raise
            self._failed(error)
            return
        finally:
            self._write_began_s = None
        self.failure = None
        self._writing = []
        self._pending_bytes -= len(data)
        if self._flush_mode == "sync":
            self.flushes += 1
        else:
            self._unsynced.set()
        if self._flush_mode != "transient":
            self.committed_position = self._segments.end_position
            self._complete()
        self._on_progress()  # in mode `transient` too: slaves get only what is written

    def _put_back(self) -> None:
        self._pending, self._writing = [*self._writing, *self._pending], []

    def _failed(self, error: OSError) -> None:
        """Pending records may or may not be stored in the end: they stay in memory and are written again."""
        if self.failure is None:
            logger.error("the log could not be written: %s", error)
        self.failure = error
        while self._waiters:
            self._waiters.popleft()[2](error)

    def _complete(self) -> None:
        while self._waiters and self._waiters[0][0] <= self.committed_position:
            self._waiters.popleft()[2](None)

    def _tell_late(self) -> None:
        self._late_timer = None
        loop = asyncio.get_running_loop()
        latest_s = loop.time() - FLUSH_TIMEOUT_S
        while self._waiters and self._waiters[0][1] <= latest_s:
            self._waiters.popleft()[2](NotYetDurable(f"not synced within {FLUSH_TIMEOUT_S:g} s"))
        if self._waiters:
            self._late_timer = loop.call_at(self._waiters[0][1] + FLUSH_TIMEOUT_S, self._tell_late)

    async def _sync_forever(self) -> None:
        """The asynchronous flush. Sleeps while there is nothing to sync."""
        loop = asyncio.get_running_loop()
        while True:
            await self._unsynced.wait()
            await asyncio.sleep(self._flush.interval_ms / 1000)
            unsynced_bytes = self._segments.end_position - self._segments.synced_position
            is_thorough = loop.time() - self._last_sync_s >= self._flush.thorough_interval_ms / 1000
            if unsynced_bytes < self._flush.least_pages * PAGE_BYTES and not is_thorough:
                continue
            self._unsynced.clear()
            try:
                await self.sync()
            except Exception as error:  # of any kind: if this task ended, nothing would be synced any more
                logger.error("the log could not be synced: %s", error, exc_info=not isinstance(error, OSError))
                self._unsynced.set()
                await asyncio.sleep(RETRY_S)

    async def sync(self) -> None:
        """Make everything written durable. Raises OSError."""
        async with self._disk_lock:
            await self._segments.sync()
        self.flushes += 1
        self._last_sync_s = asyncio.get_running_loop().time()

    def read(self, position: int, size_bytes: int) -> bytes:
        """Up to `size_bytes` of the record that begins at `position`. Raises OSError (EINVAL outside the log)."""
        record = self.recent.get(position)
        if record is not None:
            return record[:size_bytes] if size_bytes < len(record) else record
        if self._segments.end_position <= position < self.end_position:
            return self.read_range(position, size_bytes)
        if not self._segments.begin_position <= position < self._segments.end_position:
            raise OSError(errno.EINVAL, f"the log holds nothing at {position}")
        return self._segments.read(position, min(size_bytes, self._segments.room_at(position)))

    def read_range(self, position: int, size_bytes: int) -> bytes:
        """Up to `size_bytes` from `position` on, within one file; no record need begin there. Raises OSError."""
        if position < self._segments.end_position:
            return self._segments.read(position, min(size_bytes, self._segments.room_at(position)))
        at = self.end_position - self._pending_bytes
        for data in (*self._writing, *self._pending):
            if at <= position < at + len(data):
                return data[position - at : position - at + size_bytes]
            at += len(data)
        return b""

    def record_before(self, position: int) -> int:
        """Position of the record that contains the byte at `position`; the end of the log for a byte past it. Scans
        from the beginning of the file. Raises OSError: EBADMSG if no record begins where one should."""
        at = max(position - position % self._segments.segment_size_bytes, self.begin_position)
        data, data_at = b"", at
        while at < min(position, self.end_position):
            head = data[at - data_at : at - data_at + BLANK_HEAD_SIZE_BYTES]
            if len(head) < BLANK_HEAD_SIZE_BYTES:
                data, data_at = self.read_range(at, SCAN_BYTES), at
                head = data[:BLANK_HEAD_SIZE_BYTES]
            size_bytes = int.from_bytes(head[:4], "big")
            if size_bytes < BLANK_HEAD_SIZE_BYTES:
                size_bytes = len(self.record_at(at)[0])  # raises, and names the damage
            if at + size_bytes > position:
                return at
            at += size_bytes
        return at

    def record_at(self, position: int) -> tuple[bytes, bool]:
        """The whole record that begins at `position`, and whether it is a message rather than a blank one.

        Raises OSError: EBADMSG when no whole record begins there.
        """
        head = self.read(position, BLANK_HEAD_SIZE_BYTES)
        size_bytes, magic = int.from_bytes(head[:4], "big"), int.from_bytes(head[4:8], "big")
        record = self.read(position, size_bytes) if size_bytes >= BLANK_HEAD_SIZE_BYTES else b""
        if magic not in (RECORD_MAGIC, BLANK_MAGIC) or not record or len(record) != size_bytes:
            path = f"{self._directory}/{segment_name(position - position % self._segments.segment_size_bytes)}"
            at = position % self._segments.segment_size_bytes
            raise OSError(errno.EBADMSG, f"{path} is damaged at byte {at}: no record begins there")
        return record, magic == RECORD_MAGIC

    def first_timestamp_ms(self, position: int) -> int | None:
        """Store timestamp of the first message of the file that holds `position`; if that file begins with a blank or
        damaged record, that of a later file, which is no older. None if no file tells. Raises OSError."""
        segment = self.segment_size_bytes
        for base in range(max(position - position % segment, self.begin_position), self.end_position, segment):
            try:
                record, is_message = self.record_at(base)
                if is_message:
                    return summarize_record(record).store_timestamp_ms
            except RecordError:
                continue
            except OSError as error:
                if error.errno != errno.EBADMSG:
                    raise
        return None

    async def cut(self, position: int) -> None:
        """Truncate the log at `position`, where a record begins. If `position` is outside the log, drop everything: the
        log is then empty and begins there. Durable on return. Nobody may append meanwhile. Raises OSError."""
        while self._pending_bytes:
            if self.failure is not None:
                raise self.failure
            await asyncio.sleep(0.01)
        async with self._disk_lock:
            segments = self._segments
            if segments.begin_position < position <= segments.end_position:
                await segments.truncate(position)
            else:
                await segments.reset(position)
            self.end_position = self.committed_position = position
            self.recent.clear()

    async def remove_before(self, position: int) -> None:
        """Remove the files that hold nothing at or after `position`. Raises OSError."""
        async with self._disk_lock:
            await self._segments.remove_before(position)

    async def close(self) -> None:
        """Write and sync what is pending, unless the disk fails once more, and release the files."""
        self._stopping = True
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + FLUSH_TIMEOUT_S
        self._urgent.set()
        while self._pending_bytes and self.failure is None and loop.time() < deadline_s and self._tasks:
            self._work.set()
            await asyncio.sleep(0.01)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._late_timer is not None:
            self._late_timer.cancel()
        if self._tasks and self._pending and self.failure is not None:  # the next retry was not due yet
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_TIMEOUT_S):
                    await self._write_pending()
        if self._tasks and self.failure is None:
            try:
                await self.sync()
            except OSError as error:
                logger.error("the log could not be synced: %s", error)
        self._tasks = []
        self._segments.close()
