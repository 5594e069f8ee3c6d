"""A broker's log without DLedger: one master, its commit log, and no other members.

It has the interface of the replicated log, so everything above it is the same. Where DLedger counts entries, this log
has positions: the index of an entry is the position of its last byte, so that indices grow along the log and the next
entry begins at the index plus 1. A record's physical offset is its position.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from node.broker.ledger import DLedgerCode, DLedgerError, ReadMode, Role, StoredInPart
from node.broker.log_batches import RecordRun
from node.config import ClassicConfig
from node.remoting import ResponseCode
from node.retention import EXPIRY_CHECK_S
from node.runtime import Runtime
from node.store.bad_sectors import is_of_a_bad_sector
from node.store.commit_log import CommitLog, FlushPolicy, LogRefuses, NotYetDurable
from node.store.table_file import BACKUP_SUFFIX, decode_table, write_table

__all__ = ["ClassicLedger", "ClassicLogOptions", "ClassicStore"]

logger = logging.getLogger("node.broker")

TERM = 1
"""The master never changes, so there is one term."""
MAX_COMMITTED_BYTES = 256 * 1024
"""Bytes of records that are read from the log at once for dispatch."""
CHECKPOINT_INTERVAL_S = 10.0
"""Time from progress to the checkpoint that notes it: what recovery has to read again after a crash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    index: int
    body: bytes
    body_pos: int
    is_message: bool
    term: int = TERM


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """The role that the configuration gives this node: the master, or one of its slaves."""

    self_id: str
    role: Role = Role.LEADER
    term: int = TERM

    @property
    def leader_id(self) -> str | None:
        return self.self_id if self.is_leader else None

    @property
    def is_leader(self) -> bool:
        return self.role is Role.LEADER


class ClassicStore:
    """The log as the broker reads it."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log

    @property
    def ledger_begin_index(self) -> int:
        return self._log.begin_position

    @property
    def ledger_end_index(self) -> int:
        return self._log.end_position - 1

    @property
    def committed_index(self) -> int:
        return self._log.committed_position - 1

    @property
    def committed_pos(self) -> int:
        return self._log.committed_position

    @property
    def durable_index(self) -> int:
        """The last byte that survives a power cut."""
        return self._log.synced_position - 1

    def get(self, index: int) -> _Entry | None:
        """The entry that begins at position `index`. Raises OSError."""
        if not self._log.begin_position <= index < self._log.end_position:
            return None
        record, is_message = self._log.record_at(index)
        return _Entry(
            index=index + len(record) - 1, body=record if is_message else b"", body_pos=index, is_message=is_message
        )

    def holds(self, index: int, term: int) -> bool:
        """Whether an entry ends with the byte at `index`."""
        following = index + 1
        if term != TERM or not self._log.begin_position <= following <= self._log.end_position:
            return False
        if following == self._log.end_position or self._log.recent.get(following) is not None:
            return True
        try:
            return self.get(following) is not None
        except OSError:
            return False

    def read_committed(self, first_index: int, last_index: int) -> list[RecordRun]:
        """The records from position `first_index` on that end at `last_index` at most, as many as make a few
        milliseconds of work; none if the first is too large for that. Raises OSError."""
        size_bytes = min(last_index, self.committed_index) + 1 - first_index
        data = self._log.read_range(first_index, min(size_bytes, MAX_COMMITTED_BYTES)) if size_bytes > 0 else b""
        run = RecordRun(first_index, data, TERM)
        return [run] if run.ends else []

    def read_bytes(self, pos: int, size_bytes: int) -> bytes:
        return self._log.read(pos, size_bytes)

    def read_records(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes at places given as position and size; in one read if the places are adjacent and not all records
        are in memory. Raises OSError; what cannot be read whole may be short."""
        recent = self._log.recent
        records = [recent.get(position) for position, _ in places]
        if None not in records:
            return cast(list[bytes], records)
        first, (last, last_bytes) = places[0][0], places[-1]
        size_bytes = sum(size for _, size in places)
        if last + last_bytes - first != size_bytes:
            return [self._log.read(position, size) for position, size in places]
        data = self._log.read(first, size_bytes)
        return [data[position - first : position - first + size] for position, size in places]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicLogOptions:
    """Options of a classic log, the same for a master and a slave."""

    self_id: str
    data_dir: str
    segment_size_bytes: int
    flush_mode: str
    flush: FlushPolicy
    config: ClassicConfig


class ClassicLedger:
    """One master's log, behind the interface of a replicated one."""

    def __init__(self, options: ClassicLogOptions, runtime: Runtime, *, role: Role = Role.LEADER) -> None:
        self._runtime = runtime
        self._config = options.config
        self._checkpoint_path = f"{options.data_dir}/checkpoint"
        self._listeners: list[Callable[[], None]] = []
        self._log_directory = f"{options.data_dir}/commitlog"
        is_transient = options.config.transient_pool and options.flush_mode == "async"
        self.log = CommitLog(
            runtime.disk,
            self._log_directory,
            segment_size_bytes=options.segment_size_bytes,
            flush_mode="transient" if is_transient else options.flush_mode,
            flush=options.flush,
            on_progress=self._progressed,
        )
        self.store = ClassicStore(self.log)
        self.member_state = _State(self_id=options.self_id, role=role)
        self.before_removed: Callable[[int], Awaitable[bool]] = _may_go
        """Asked before files are removed whether everything before a position may go. Raises OSError."""
        self.on_removed: Callable[[int], None] = lambda begin_position: None
        """Called with the log's new begin when files are about to be removed: from then on readers must find nothing
        that points to them. Raises OSError."""
        self._tasks: list[asyncio.Task[None]] = []
        self._dirty = asyncio.Event()
        self._checkpoint_lock = asyncio.Lock()
        self._is_open = False

    def _progressed(self) -> None:
        self._dirty.set()
        for listener in self._listeners:
            listener()

    async def start(self) -> None:
        """Recover. Raises LogDamaged (a ValueError), SegmentError, OSError."""
        checkpoint = self._read_checkpoint()
        position, is_clean = checkpoint or (0, False)
        await self.log.open(durable_position=position, is_clean=is_clean, is_known=checkpoint is not None)
        self._is_open = True
        await self._write_checkpoint(is_clean=False)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._checkpoint_forever()), loop.create_task(self._expire_forever())]
        for listener in self._listeners:
            listener()

    async def stop(self) -> None:
        """Flush everything and note whether the stop was clean."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.log.close()
        if self._is_open:
            self._is_open = False
            is_clean = self.log.synced_position == self.log.end_position
            try:
                await self._write_checkpoint(is_clean=is_clean)
            except OSError as error:
                logger.error("the checkpoint could not be written: %s", error)

    def _read_checkpoint(self) -> tuple[int, bool] | None:
        """Up to where the log was durable, and whether the stop was clean; None if no checkpoint tells. The previous
        checkpoint tells less, and nothing about the stop."""
        disk = self._runtime.disk
        for path in (self._checkpoint_path, self._checkpoint_path + BACKUP_SUFFIX):
            if not disk.exists(path):
                if self._runtime.disk.list(self._log_directory):
                    logger.warning("%s is missing", path)
                continue
            try:
                content = decode_table(disk.read_file(path))
                return int(content["position"]), bool(content["isClean"]) and path == self._checkpoint_path
            except (ValueError, KeyError, TypeError) as error:
                logger.warning("%s is damaged (%s)", path, error)
            except OSError as error:
                if not is_of_a_bad_sector(error):
                    raise
                logger.warning("%s is damaged (%s)", path, error)
        return None

    async def cut(self, position: int) -> None:
        """Truncate the log at `position`, see `CommitLog.cut`; the checkpoint never claims more than is durable.

        Raises OSError.
        """
        async with self._checkpoint_lock:
            await self._write_position(0, is_clean=False)
            await self.log.cut(position)
        await self._write_checkpoint(is_clean=False)

    async def _write_checkpoint(self, *, is_clean: bool) -> None:
        async with self._checkpoint_lock:
            log = self.log
            is_empty = log.written_position == log.begin_position  # then no file tells where it begins
            await self._write_position(0 if is_empty else log.synced_position, is_clean=is_clean)

    async def _write_position(self, position: int, *, is_clean: bool) -> None:
        content = {
            "position": position,
            "isClean": is_clean,
            "writtenAtMs": self._runtime.clock.wall_ms(),
        }
        await write_table(self._runtime.disk, self._checkpoint_path, content)

    async def _checkpoint_forever(self) -> None:
        while True:
            await self._dirty.wait()
            await asyncio.sleep(CHECKPOINT_INTERVAL_S)
            self._dirty.clear()
            try:
                await self._write_checkpoint(is_clean=False)
            except OSError as error:
                logger.error("the checkpoint could not be written: %s", error)
                self._dirty.set()
            except Exception:  # if this task ended, a restart would read ever more of the log
                logger.exception("a checkpoint of the log met an error of its own")
                self._dirty.set()

    async def _expire_forever(self) -> None:
        """Remove files that are too old, or too many for the space they may take."""
        while True:
            if self.log.end_position - self.log.begin_position <= self.log.segment_size_bytes:
                await self._dirty.wait()
            await asyncio.sleep(EXPIRY_CHECK_S)
            try:
                await self.expire()
            except OSError as error:
                logger.error("old files of the log could not be removed: %s", error)
            except Exception:  # without this task the disk would fill up, and nobody would know why
                logger.exception("the removal of old files met an error of its own")

    async def expire(self) -> None:
        """Check once for files to remove, see RetentionConfig. The newest file always stays. Raises OSError."""
        log = self.log
        before = log.begin_position
        try:
            while (position := self._may_be_removed()) is not None and await self.before_removed(position):
                self.on_removed(position)
                await log.remove_before(position)
        finally:  # some may be gone even if the next could not be removed
            if log.begin_position != before:
                logger.info("removed the log up to %d", log.begin_position)

    def _may_be_removed(self) -> int | None:
        """Where the oldest file ends, if it is to be removed."""
        log = self.log
        following = log.begin_position - log.begin_position % log.segment_size_bytes + log.segment_size_bytes
        if following < log.synced_position and self._config.lets_go(
            now_ms=self._runtime.clock.wall_ms(),
            next_stored_ms=log.first_timestamp_ms(following),
            log_bytes=log.end_position - log.begin_position,
        ):
            return following
        return None

    def append_batch(
        self,
        sizes: Sequence[int],
        encode: Callable[[Sequence[int]], Sequence[bytes]],
        on_done: Callable[[Exception | None], object],
    ) -> tuple[int, int, int]:
        """See `Ledger.append_batch`. Raises DLedgerError LEADER_PENDING_FULL. `on_done` may get StoredInPart
        (FLUSH_DISK_TIMEOUT), or DLedgerError DISK_ERROR when the outcome is unknown."""
        try:
            positions = self.log.append_batch(sizes, encode, partial(_call, on_done))
        except LogRefuses as error:
            raise DLedgerError(DLedgerCode.LEADER_PENDING_FULL, str(error)) from error
        first, end = positions[0], positions[-1] + sizes[-1]
        return first if len(sizes) == 1 or end - first == sum(sizes) else -1, end - 1, TERM

    def takes_together(self, count: int, size_bytes: int) -> bool:
        """All are on the disk at once, or none."""
        return True

    def add_commit_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def add_role_listener(self, listener: Callable[[int, Role], None]) -> None:
        """Roles never change here."""

    def read_barrier_now(self) -> int | None:
        """What `read_barrier` would return at once; None if it would raise or has to wait."""
        return self.store.committed_index

    def ask_barrier(self, mode: ReadMode, on_done: Callable[[int | DLedgerError], object]) -> bool:
        """See `Ledger.ask_barrier`."""
        index = self.read_barrier_now()
        if index is not None:
            on_done(index)
        return index is not None

    async def read_barrier(self, mode: ReadMode) -> int:
        """Nobody else can have written, so what is committed here is everything."""
        return self.store.committed_index


async def _may_go(position: int) -> bool:
    return True


def _call(on_done: Callable[[Exception | None], object], error: Exception | None) -> None:
    if isinstance(error, NotYetDurable):
        on_done(StoredInPart(ResponseCode.FLUSH_DISK_TIMEOUT, str(error)))
    elif error is not None:
        on_done(DLedgerError(DLedgerCode.DISK_ERROR, str(error)))
    else:
        on_done(None)
