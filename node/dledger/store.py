"""The log of one member: its entries, and how far they are durable and committed.

Appending and cutting are synchronous and take effect in memory at once; the writer carries them to the disk
in the same order. Two marks follow the end of the log, *written* and *durable*; acknowledgements to a quorum count
up to `acked_index`, which is one of the two, depending on the flush mode. The quorum decides the committed index; this
class only ensures that it never decreases or passes the end of the log, and that no cut goes below it.

Every entry that is read from the disk is verified: its body by its CRC, its header by the index and by the chain CRC of
the previous entry. A reader gets the bytes that were appended or a LedgerCorrupt, which is also logged and counted. If
the index itself is damaged, the entry is found after the previous one. When a body is read by its position, the header
is verified only as far as it concerns the body, because nothing else of it is returned.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Sequence

from node.dledger.checkpointing import CheckpointTask
from node.dledger.config import DLedgerConfig
from node.dledger.entry import (
    HEADER,
    HEADER_SIZE_BYTES,
    NORMAL_MAGIC,
    BadEntry,
    Entry,
    parse_entry,
)
from node.dledger.entry_batch import EntryBatch, batch_of, encode_batch, scan_batch
from node.dledger.files import LedgerCorrupt, LedgerFiles
from node.dledger.index import UNIT, IndexUnit, pack_unit
from node.dledger.log_layout import LogLayout
from node.dledger.membership import Membership, check_members
from node.dledger.recovery import LogScan, Recovered, recover
from node.dledger.rpc import DLedgerCode, DLedgerError
from node.dledger.tail_cache import TailCache
from node.dledger.writer import LogWriter
from node.remoting.complaints import Complaints
from node.runtime import Runtime

__all__ = ["DLedgerStore"]

logger = logging.getLogger("node.dledger.store")

MAX_COMMITTED_BYTES = 256 * 1024
"""Size of the committed entries that are read from the log at once to be dispatched."""

INDEX_WRITE_BYTES = 1024 * 1024
"""If more index units than this are only in memory, a checkpoint is written without delay: 32,000 entries."""


class DLedgerStore:
    """The log. `open` before use, `close` after; listeners are called synchronously."""

    def __init__(self, config: DLedgerConfig, runtime: Runtime, members: Membership | None = None) -> None:
        self._config = config
        self._acks_durable = config.flush_mode == "sync"
        self.members = members or Membership(config.self_id, config.peers, joins=config.joins)
        """The members of the group according to the log."""
        self._files = LedgerFiles(config, runtime.disk)
        self._index = self._files.index
        self._layout = LogLayout(config)
        self.writer = LogWriter(config, self._files, runtime.clock, on_progress=self._progressed)
        self._complaints = Complaints(logger, lambda: asyncio.get_running_loop().time())
        # Plain attributes, as they are read many times for each entry; only this class changes them.
        self.ledger_begin_index = -1
        """Index of the first entry; -1 when the log is empty (S2)."""
        self.ledger_end_index = -1
        """Index of the last entry, durable or not; -1 when the log is empty (S2)."""
        self.ledger_end_term = -1
        """Term of the last entry: the entry's own, not the member's. -1 when the log is empty."""
        self.committed_index = -1
        self._end_pos = 0
        self._end_chain_crc = 0
        self._committed_pos = 0
        self._tail_cache = TailCache()
        self._last_read = -1, 0
        """Index and chain CRC of the last entry that was read from the disk: the one after it is often read next."""
        self._progress_listeners: list[Callable[[], None]] = []
        self._commit_listeners: list[Callable[[], None]] = []
        self._checkpoints = CheckpointTask(
            self._checkpoint, config.timing.checkpoint_interval_ms / 1000, self._complaints
        )
        self.corrupt_reads = 0
        """Reads that met damaged bytes."""

    async def open(self) -> None:
        """Recover the log from its files and start the writer.

        Raises LedgerCorrupt (names file and byte) when durable entries cannot be read back, SegmentError,
        OSError.
        """
        recovered = await recover(self._files)
        self._adopt(recovered)
        self.writer.start(self.ledger_end_index)
        self._checkpoints.start()

    @property
    def snapshot_dir(self) -> str:
        """The directory of the snapshots."""
        return f"{self._config.ledger_dir}/snapshot"

    async def close(self) -> None:
        """Write what is pending, unless the disk refuses, and a last checkpoint; close the files."""
        await self.writer.stop()
        if await self._checkpoints.stop() and self.writer.is_settled:
            await self._checkpoint()
        self._files.close()

    # What the log holds

    @property
    def end_pos(self) -> int:
        """Position after the last entry."""
        return self._end_pos

    @property
    def end_chain_crc(self) -> int:
        return self._end_chain_crc

    @property
    def committed_pos(self) -> int:
        """Position after the last committed entry; below it all members' bytes are the same."""
        return self._committed_pos

    @property
    def written_index(self) -> int:
        return self.writer.written_index

    @property
    def durable_index(self) -> int:
        return self.writer.durable_index

    @property
    def acked_index(self) -> int:
        """The last entry that this member may acknowledge."""
        return self.writer.durable_index if self._acks_durable else self.writer.written_index

    def get(self, index: int) -> Entry | None:
        """The entry, committed or not; None when the log does not hold it. Raises LedgerCorrupt, OSError."""
        if not self.ledger_begin_index <= index <= self.ledger_end_index or index < 0:
            return None
        batch = self._tail_cache.find(index) or self._read_batch(index, 1, 0)
        return batch.entry(index)

    def term_at(self, index: int) -> int:
        """Term of an entry; -1 when the log does not hold it. Raises LedgerCorrupt, OSError."""
        if not self.ledger_begin_index <= index <= self.ledger_end_index or index < 0:
            return -1
        if index == self.ledger_end_index:
            return self.ledger_end_term
        batch = self._tail_cache.find(index)
        return batch.term_of(index) if batch is not None else self._unit(index).term

    def read_batches(self, first_index: int, *, max_entries: int, max_bytes: int) -> list[EntryBatch]:
        """Consecutive entries from `first_index` on: at least one if the log has it, and as many more as fit. A read
        from disk ends with the file, or with the part that is only on disk. Raises LedgerCorrupt, OSError.
        """
        if not self.ledger_begin_index <= first_index <= self.ledger_end_index or first_index < 0:
            return []
        newest = self._tail_cache
        last_index = min(first_index + max_entries - 1, self.ledger_end_index)
        batch = newest.find(first_index)
        if batch is not None:
            if batch.first_index == first_index and batch.last_index == last_index and len(batch.raw) <= max_bytes:
                return [batch]
            newest.join(first_index, last_index, max_bytes)
            return newest.collect(first_index, last_index, max_bytes)
        if newest.begin_index is not None:  # beyond, the disk may still hold entries that were cut off
            last_index = min(last_index, newest.begin_index - 1)
        read = self._read_batch(first_index, last_index - first_index + 1, max_bytes)
        return [read.head(min(read.last_index, last_index))]

    def read_entries(self, first_index: int, *, max_entries: int, max_bytes: int) -> list[Entry]:
        """The same, as single entries."""
        batches = self.read_batches(first_index, max_entries=max_entries, max_bytes=max_bytes)
        return [entry for batch in batches for entry in batch.entries()]

    def read_committed(self, first_index: int, last_index: int) -> list[EntryBatch]:
        """Committed entries from `first_index` to at most `last_index`, no more than a few milliseconds of work
        (MAX_COMMITTED_BYTES); none if the log does not hold the first. Raises LedgerCorrupt, OSError."""
        count = min(last_index, self.committed_index) - first_index + 1
        return self.read_batches(first_index, max_entries=count, max_bytes=MAX_COMMITTED_BYTES) if count > 0 else []

    def read_bytes(self, position: int, size_bytes: int) -> bytes:
        """The first `size_bytes` of the entry body that begins at `position`, from memory or disk.

        Raises OSError: EINVAL outside the log, LedgerCorrupt if no intact entry's body begins there.
        """
        pos = position - HEADER_SIZE_BYTES
        if not self._files.data.begin_position <= pos < self._end_pos:
            raise OSError(errno.EINVAL, f"the log holds no body at {position}")
        newest_pos = self._tail_cache.begin_pos
        if newest_pos is not None and pos >= newest_pos:
            body = self._tail_cache.body_at(pos, size_bytes)
            if body is None:
                raise OSError(errno.EINVAL, f"no entry of the log begins at {pos}")
            return body
        entry = self._read(pos, HEADER_SIZE_BYTES + size_bytes)
        return entry.raw[HEADER_SIZE_BYTES : HEADER_SIZE_BYTES + size_bytes]

    def read_records(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """The first bytes of bodies, each given as position and size. Raises OSError."""
        return [self.read_bytes(position, size_bytes) for position, size_bytes in places]

    def holds(self, index: int, term: int) -> bool:
        """Whether the log has an entry with this index and term. Raises OSError."""
        entry = self.get(index)
        return entry is not None and entry.term == term

    # How it changes

    def append_as_leader(
        self, term: int, body_size_bytes: int, encode_body: Callable[[int], bytes], *, magic: int = NORMAL_MAGIC
    ) -> Entry:
        """Append an entry of `term`. `encode_body` gets the body's position and returns the body.

        Raises DLedgerError UNEXPECTED_ARGUMENT if it is too large, and whatever `encode_body` raises; nothing
        is appended then.
        """
        (batch,) = self.append_batch_as_leader(
            term, (body_size_bytes,), lambda positions: (encode_body(positions[0]),), magic=magic
        )
        return batch.entry(batch.first_index)

    def append_batch_as_leader(
        self,
        term: int,
        sizes: Sequence[int],
        encode: Callable[[Sequence[int]], Sequence[bytes]],
        *,
        magic: int = NORMAL_MAGIC,
    ) -> list[EntryBatch]:
        """The same for consecutive entries, all or none; `encode` gets the positions of all their bodies. Returns one
        batch, or more if a file ends in between."""
        positions, files = self._layout.of_bodies(sizes, self._end_pos)
        bodies = encode(positions)
        if list(map(len, bodies)) != list(sizes):
            raise ValueError(f"the bodies have other sizes than {sizes}, which were announced")
        index, chain_crc = self.ledger_end_index + 1, self._end_chain_crc
        if not files:
            batch = encode_batch(magic, index, term, positions[0] - HEADER_SIZE_BYTES, chain_crc, bodies)
            self._add(batch)
            return [batch]
        batches = []
        for first, following in zip([0, *files], [*files, len(bodies)], strict=True):
            if first < following:
                pos = positions[first] - HEADER_SIZE_BYTES
                batch = encode_batch(magic, index + first, term, pos, chain_crc, bodies[first:following])
                chain_crc = batch.chain_crc
                batches.append(batch)
        for batch in batches:
            self._add(batch)
        return batches

    def append_as_follower(self, batches: Sequence[EntryBatch]) -> None:
        """Append a leader's entries, parsed into consecutive batches.

        Raises DLedgerError INCONSISTENT_STATE, and appends nothing, when the first one does not continue this
        log: by index, by chain CRC, or by position (a leader with another segment size).
        """
        first = batches[0]
        if first.first_index != self.ledger_end_index + 1:
            raise DLedgerError(
                DLedgerCode.INCONSISTENT_STATE, f"entry {first.first_index} cannot follow {self.ledger_end_index}"
            )
        if not first.continues(self._end_chain_crc):
            raise DLedgerError(
                DLedgerCode.INCONSISTENT_STATE, f"entry {first.first_index} does not match its chain CRC"
            )
        end = self._end_pos
        for batch in batches:
            misplaced = self._layout.misplaced(batch, end)
            if misplaced is not None:
                index, pos, place = misplaced
                raise DLedgerError(
                    DLedgerCode.INCONSISTENT_STATE,
                    f"entry {index} belongs at {pos}, here it would be {place}: is data_segment_size_bytes"
                    " the same on all members?",
                )
            end = batch.end_pos
            for entry in batch.changes:
                check_members(entry)
        for batch in batches:
            self._add(batch)

    def may_truncate_to(self, index: int) -> bool:
        """Whether the log may be made to end at `index`: never below what is committed (dledger#316)."""
        return index >= self.committed_index

    def truncate(self, index: int) -> asyncio.Future[None]:
        """Remove every entry after `index`. The future is done when that is durable.

        Raises DLedgerError INCONSISTENT_STATE when committed entries would go, LedgerCorrupt, OSError.
        """
        if not self.may_truncate_to(index):
            raise DLedgerError(
                DLedgerCode.INCONSISTENT_STATE, f"cannot truncate to {index}: {self.committed_index} is committed"
            )
        last = self.get(index)
        if last is None:
            raise DLedgerError(DLedgerCode.INDEX_OUT_OF_RANGE, f"cannot truncate to {index}: it is not here")
        removed = self.ledger_end_index - index
        if removed:
            self.members.cut(index + 1)
            self._tail_cache.cut(index + 1)
            self._index.cut(index + 1)
            self._last_read = -1, 0
            self._ends_with(last)
        return self.writer.cut(last.end_pos, index + 1)

    def reset(self, first: Entry) -> asyncio.Future[None]:
        """Forget the whole log and begin again with `first`, a leader's first entry. The future is done when the old
        log is durably gone.

        Raises DLedgerError INCONSISTENT_STATE when `first` lies within or below what is committed here, or is
        not the first entry of a file.
        """
        if self.ledger_begin_index >= 0 and not self.may_truncate_to(first.index - 1):
            raise DLedgerError(
                DLedgerCode.INCONSISTENT_STATE,
                f"cannot begin again at {first.index}: {self.committed_index} is committed",
            )
        if first.pos % self._config.data_segment_size_bytes:
            raise DLedgerError(
                DLedgerCode.INCONSISTENT_STATE,
                f"a log cannot begin at {first.pos}: is data_segment_size_bytes the same on all members?",
            )
        self.members.log_is_gone(max(self.committed_index, self.ledger_begin_index - 1))
        self._tail_cache.clear()
        self._index.begin_at(first.index)
        self._last_read = -1, 0
        self.ledger_begin_index = -1
        self.ledger_end_index = first.index - 1
        self._end_pos = self._committed_pos = first.pos
        self.committed_index = first.index - 1
        gone = self.writer.cut(first.pos, first.index, is_reset=True, members=self.members.snapshot(-1))
        self._add(batch_of(first))
        return gone

    def update_committed_index(self, index: int) -> bool:
        """Advance the committed index to `index`, at most to the end of the log (dledger#278).

        Returns False if there is nothing to do: `index` is not new, or precedes the log. Raises LedgerCorrupt, OSError.
        """
        index = min(index, self.ledger_end_index)
        if index <= self.committed_index or index < self.ledger_begin_index:
            return False
        batch = self._tail_cache.find(index)
        self._committed_pos = batch.end_of(index) if batch is not None else self._unit(index).end_pos
        self.committed_index = index
        self._checkpoints.changed()
        self._tell(self._commit_listeners)
        return True

    @property
    def begin_pos(self) -> int:
        """The first position that the log holds."""
        return self._files.data.begin_position

    def first_of_next_file(self) -> Entry | None:
        """The entry that begins the log's second file or, if that is damaged or cannot be read, a later file: damage
        must not keep everything before it forever. None if there is no such entry, or if it is not the one that the log
        has there. Raises OSError if a file cannot be read and no later one can."""
        data = self._files.data
        pos = self.begin_pos
        unread: OSError | None = None
        while (pos := pos + data.room_at(pos)) < data.end_position:
            try:
                entry = self._read(pos, HEADER_SIZE_BYTES)
                return entry if self.get(entry.index) == entry else None
            except LedgerCorrupt:  # `_read` has logged it
                continue
            except OSError as error:
                unread = error
        if unread is not None:
            raise unread
        return None

    async def remove_before(self, first: Entry, *, on_begin: Callable[[int], None] = lambda position: None) -> bool:
        """Remove the files before `first`, which begins one. Returns False if that is not possible now: only committed
        and durable entries are removed, and the newest file stays. `on_begin` gets the log's new first position just
        before the removal. Raises OSError."""
        await self._checkpoint()
        async with self._files.index_lock:
            if not self.ledger_begin_index <= first.index <= self._files.checkpoint.committed_index:
                return False  # not durable yet, or the whole log was replaced meanwhile
            on_begin(first.pos)
            self.ledger_begin_index = first.index
            await self._files.remove_before(first.pos, first.index)
        return True

    def add_commit_listener(self, listener: Callable[[], None], *, is_first: bool = False) -> None:
        """Call `listener()` whenever the committed index has advanced; `is_first`: before those that are there."""
        self._commit_listeners.insert(0 if is_first else len(self._commit_listeners), listener)

    def add_progress_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener()` whenever something has become written or durable, or the disk has refused."""
        self._progress_listeners.append(listener)

    # Inside

    def _adopt(self, recovered: Recovered) -> None:
        last = recovered.last
        self.members.restore(recovered.members, last.index if last is not None else -1)
        if last is None:
            return
        self.ledger_begin_index = recovered.begin_index
        self._ends_with(last)
        if recovered.committed_index >= recovered.begin_index:
            self.committed_index = recovered.committed_index
            unit = self._unit(recovered.committed_index) if last.index != recovered.committed_index else None
            self._committed_pos = unit.end_pos if unit is not None else last.end_pos

    def _ends_with(self, last: Entry | EntryBatch) -> None:
        self.ledger_end_index = last.last_index if isinstance(last, EntryBatch) else last.index
        self.ledger_end_term = last.term
        self._end_pos = last.end_pos
        self._end_chain_crc = last.chain_crc

    def _add(self, batch: EntryBatch) -> None:
        for entry in batch.changes:
            self.members.put(entry)
        if self.ledger_begin_index < 0:
            self.ledger_begin_index = batch.first_index
        self._index.add(batch.first_index, batch.units)
        newest = self._tail_cache
        newest.add(batch)
        self._ends_with(batch)
        self.writer.add(batch)
        if newest.size_bytes > 2 * self._config.max_cached_bytes:
            newest.trim(self._config.max_cached_bytes, self.writer.written_index)

    def _unit(self, index: int) -> IndexUnit:
        unit = self._index.lookup(index) or self._find(index)
        if unit is None:
            raise self._damaged(
                LedgerCorrupt(f"{self._config.ledger_dir}/index", index * 32, f"the unit of entry {index} is not there")
            )
        return unit

    def _find(self, index: int) -> IndexUnit | None:
        """The unit of an entry, made again from the entry itself, which follows the previous one; None if it is not
        there, or if the index already has that unit. Raises OSError."""
        data = self._files.data
        before = self._index.lookup(index - 1) if index > self.ledger_begin_index else None
        if before is None and index > self.ledger_begin_index:
            return None
        position = before.end_pos if before is not None else data.begin_position
        try:
            entry = LogScan(data, position, next_index=index, chain_crc=self._chain_crc_before(index)).next()
        except BadEntry:
            return None
        unit = IndexUnit(*UNIT.unpack(pack_unit(entry)))
        if not self._index.repair(unit):
            return None
        path = f"{self._config.ledger_dir}/index"
        problem = f"the unit of entry {index} is another one's; without the directory a start makes all of them again"
        self._complaints.warn("index", str(LedgerCorrupt(path, index * 32, problem)))
        return unit

    def _chain_crc_before(self, index: int) -> int | None:
        """The chain CRC of the entry before `index`; None if it cannot be told. Raises OSError."""
        last_index, chain_crc = self._last_read
        if last_index == index - 1:
            return chain_crc
        if index <= self.ledger_begin_index:
            return 0 if index == 0 else None
        unit = self._index.lookup(index - 1)
        header = self._files.data.read(unit.pos, HEADER_SIZE_BYTES) if unit is not None else b""
        if unit is None or len(header) < HEADER_SIZE_BYTES:
            return None
        magic, size_bytes, own_index, term, pos, _, chain_crc, _, _ = HEADER.unpack(header)
        return chain_crc if (magic, pos, size_bytes, own_index, term) == unit else None

    def _read(self, pos: int, size_bytes: int) -> Entry:
        """The entry of at least `size_bytes` at `pos`; of its header only what concerns its body is verified."""
        data = self._files.data
        raw = data.read(pos, min(size_bytes, data.room_at(pos)))
        if len(raw) >= HEADER_SIZE_BYTES:
            whole = int.from_bytes(raw[4:8], "big", signed=True)
            if len(raw) < whole <= data.room_at(pos):
                raw = data.read(pos, whole)
        try:
            entry = parse_entry(raw)
            if entry.pos != pos:
                raise BadEntry(f"entry {entry.index} of position {entry.pos} stands here")
        except BadEntry as error:
            raise self._damaged(self._files.error_at(pos, str(error))) from error
        return entry

    def _read_batch(self, first_index: int, count: int, max_bytes: int) -> EntryBatch:
        """Up to `count` entries of one file in a single read, each verified, also to continue the previous one."""
        unit = self._unit(first_index)
        data = self._files.data
        chunk = data.read(unit.pos, min(max(max_bytes, unit.size_bytes), data.room_at(unit.pos)))
        batch, problem = scan_batch(chunk, 0, self._chain_crc_before(first_index), most=count)
        if batch is None or not batch.units.startswith(UNIT.pack(*unit)):
            if self._find(first_index) is not None:
                return self._read_batch(first_index, count, max_bytes)
            if batch is not None:
                problem = f"entry {batch.first_index} of position {batch.pos} stands here, the index has another one"
            raise self._damaged(self._files.error_at(unit.pos, problem))
        self._last_read = batch.last_index, batch.chain_crc
        return batch  # a problem after it is reported to whoever reads from there

    def _damaged(self, error: LedgerCorrupt) -> LedgerCorrupt:
        self.corrupt_reads += 1
        self._complaints.warn("damage", f"the log cannot be served: {error}")
        return error

    def _progressed(self) -> None:
        self._checkpoints.changed()
        if self._index.unwritten_bytes > INDEX_WRITE_BYTES:
            self._checkpoints.hurry()
        self._tell(self._progress_listeners)

    def _tell(self, listeners: list[Callable[[], None]]) -> None:
        for listener in listeners:
            try:
                listener()
            except Exception:
                logger.exception("a listener of the log failed")

    async def _checkpoint(self) -> None:
        async with self._files.index_lock:
            durable_index = self.writer.durable_index
            if not self.ledger_begin_index <= durable_index <= self.ledger_end_index or durable_index < 0:
                return
            await self._files.write_checkpoint(
                committed_index=min(self.committed_index, durable_index),
                durable_index=durable_index,
                durable_pos=self._unit(durable_index).end_pos,
                members=self.members.snapshot(durable_index),
            )
