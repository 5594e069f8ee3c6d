"""Consume queues: for each queue of a topic, where its messages are in the commit log.

A queue is a dense sequence of 20-byte units, big-endian, one per message in queue order:

    offset  size  field
         0     8  physical offset of the record in the commit log
         8     4  size of the record
        12     8  hash of the message's tags (Java's String.hashCode, sign-extended), 0 without tags

Unit n lies at byte 20 n of the queue, in files named by the 20-digit offset of their first byte, under
`<directory>/<topic>/<queue id>/` (seed S1, ConsumeQueue; R: 300 000 units a file). Files grow as they are
written and are not preallocated, so two nodes with the same log have the same bytes.

Queues are derived: they hold nothing that the commit log does not, and can be rebuilt from it. So appends go to
memory, a lazy flush writes them to the files, and a checkpoint says how far the files can be trusted. At
start the queues are cut back to the checkpoint, and what the log holds beyond it is dispatched again; if files and
checkpoint do not match, everything is rebuilt. The checkpoint has a checksum of every file: a unit with a
flipped bit may look valid, and a wrong tag hash would silently hide a message from its consumers.

Beside each queue a second sequence holds the CRC-32 of every record, four bytes per message, in `<directory>.crc/`. A
record in the log has a CRC of its body only (R); this one covers its head and its properties, too.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from node.runtime import Disk
from node.store.columns import WORD_MASK, pack_table, pack_words, split_longs
from node.store.file_cache import FileCache
from node.store.unit_files import UnitFiles

__all__ = ["CRC_SIZE_BYTES", "UNIT_SIZE_BYTES", "ConsumeQueue", "QueueGap", "Unit", "pack_unit", "pack_units"]

UNIT_SIZE_BYTES = 20
CRC_SIZE_BYTES = 4

_UNIT = struct.Struct(">qiq")
_CRC = struct.Struct(">I")
LONG_MASK = (1 << 64) - 1
LEAST_UNIFORM = 10
"""Fewest units, equal but for their positions, that are packed as a table; for fewer a loop is as quick."""


def pack_unit(position: int, size_bytes: int, tag_hash: int, crc: int) -> tuple[bytes, bytes]:
    """The unit of one message, and the CRC of its record, as stored in files."""
    return _UNIT.pack(position, size_bytes, tag_hash), _CRC.pack(crc)


def pack_units(
    positions: Sequence[int], sizes: Sequence[int], tag_hashes: Sequence[int], crcs: Sequence[int]
) -> tuple[bytes, bytes]:
    """The units of messages that follow each other in a queue, and the CRCs of their records, as stored in files."""
    if len(positions) == 1:
        return _UNIT.pack(positions[0], sizes[0], tag_hashes[0]), _CRC.pack(crcs[0])
    size, tag_hash = sizes[0], tag_hashes[0]
    if (
        len(positions) < LEAST_UNIFORM
        or sizes.count(size) != len(sizes) or tag_hashes.count(tag_hash) != len(tag_hashes)
    ):  # fmt: skip
        return b"".join(map(_UNIT.pack, positions, sizes, tag_hashes)), pack_words(crcs)
    upper, lower = split_longs(positions)
    tag = tag_hash & LONG_MASK
    row = [0, 0, size, tag >> 32, tag & WORD_MASK]
    return pack_table(row, len(positions), [(0, upper), (1, lower)]), pack_words(crcs)


class Unit(NamedTuple):
    """One entry of a consume queue."""

    physical_offset: int
    size_bytes: int
    tag_hash: int


class QueueGap(Exception):
    """The log holds a message whose number in its queue is beyond the next free one.

    Serving the queue would give messages wrong offsets, so whoever meets this stops and reports it.
    """


class ConsumeQueue:
    """One queue of one topic. Offsets count units; `max_offset` is the next free one.

    `append` and `read` are synchronous and see each other's effect at once; `flush`, `sync`, `remove_before` and
    `restore` touch files and are called by one task at a time. Without a `crc_directory` no CRCs are kept.
    """

    def __init__(
        self, disk: Disk, files: FileCache, directory: str, *, units_per_file: int, crc_directory: str | None = None
    ) -> None:
        self._directory = directory
        self._units = UnitFiles(disk, files, directory, unit_size_bytes=UNIT_SIZE_BYTES, units_per_file=units_per_file)
        self._crcs = None
        self._columns = [self._units]
        if crc_directory is not None:
            self._crcs = UnitFiles(
                disk, files, crc_directory, unit_size_bytes=CRC_SIZE_BYTES, units_per_file=units_per_file
            )
            self._columns.append(self._crcs)
        self.min_offset = 0
        self.max_offset = 0

    @property
    def unflushed_bytes(self) -> int:
        """Bytes that exist in memory only."""
        return sum(column.unflushed_bytes for column in self._columns)

    @property
    def is_unsynced(self) -> bool:
        """Whether the files hold anything that was written but is not yet durable."""
        return any(column.is_unsynced for column in self._columns)

    def begin_at(self, offset: int) -> None:
        """Let an empty queue start at `offset`: the log no longer holds what came before."""
        if self.max_offset != self.min_offset:
            raise ValueError(f"{self._directory} is not empty")
        self.min_offset = self.max_offset = offset
        for column in self._columns:
            column.begin_at(offset)

    def sums(self) -> list[list[list[int]]]:
        """Current checksums of the files of units and of CRCs; see UnitFiles."""
        return [column.sums(self.min_offset) for column in self._columns]

    def append(self, queue_offset: int, physical_offset: int, size_bytes: int, tag_hash: int, crc: int = 0) -> bool:
        """Add the unit of the message with number `queue_offset` in this queue, and its record's CRC.

        Returns False, and changes nothing, if the queue already holds that number (a repetition, R).
        Raises QueueGap if numbers in between are missing.
        """
        if queue_offset != self.max_offset:
            if queue_offset < self.max_offset:
                return False
            raise QueueGap(f"{self._directory}: number {queue_offset} follows {self.max_offset - 1}")
        self._units.append(_UNIT.pack(physical_offset, size_bytes, tag_hash))
        if self._crcs is not None:
            self._crcs.append(_CRC.pack(crc))
        self.max_offset += 1
        return True

    def append_units(self, queue_offset: int, units: bytes, crcs: bytes) -> bool:
        """Add packed units, the first with number `queue_offset`. Returns False, and changes nothing, if that is not
        the next number: `append` then decides for each message."""
        if queue_offset != self.max_offset:
            return False
        self._units.append(units)
        if self._crcs is not None:
            self._crcs.append(crcs)
        self.max_offset += len(units) // UNIT_SIZE_BYTES
        return True

    def trim(self, physical_offset: int) -> None:
        """Let the queue begin with the first message at or after `physical_offset`. Raises OSError."""
        low, high = self.min_offset, self.max_offset
        while low < high:
            middle = (low + high) // 2
            if self.read(middle, 1)[0].physical_offset < physical_offset:
                low = middle + 1
            else:
                high = middle
        self.min_offset = low

    def read(self, offset: int, count: int) -> list[Unit]:
        """Up to `count` units from `offset` on; none outside [min_offset, max_offset).

        Raises OSError if a file cannot be read or is shorter than it was.
        """
        if not self.min_offset <= offset < self.max_offset:
            return []
        data = self._units.read(offset, min(count, self.max_offset - offset))
        return [Unit(*fields) for fields in _UNIT.iter_unpack(data)]

    def read_crcs(self, offset: int, count: int) -> Sequence[int | None]:
        """The CRC-32 of the records of the units that `read` returns for the same arguments; None for each if none
        are kept. Raises OSError."""
        if not self.min_offset <= offset < self.max_offset:
            return ()
        count = min(count, self.max_offset - offset)
        if self._crcs is None:
            return (None,) * count
        return [crc for (crc,) in _CRC.iter_unpack(self._crcs.read(offset, count))]

    async def flush(self) -> None:
        """Write what is in memory to the files; it then survives a crash of the process. Raises OSError."""
        for column in self._columns:
            await column.flush()

    async def sync(self) -> None:
        """Make what was flushed survive a power cut. Raises OSError."""
        for column in self._columns:
            await column.sync()

    async def remove_before(self, offset: int) -> None:
        """Delete the files that only hold units before `offset`, which `trim` has dropped. Raises OSError."""
        for column in self._columns:
            await column.remove_before(offset)

    async def restore(self, min_offset: int, max_offset: int, sums: Sequence[Sequence[Sequence[int]]]) -> bool:
        """Take over the units [min_offset, max_offset) from the files and delete everything after them.

        Returns False if the files do not hold that many, or others than those of `sums`; they are then of no use.
        Raises OSError.
        """
        if len(sums) != len(self._columns):
            return False
        for column, column_sums in zip(self._columns, sums, strict=True):
            if not await column.restore(min_offset, max_offset, column_sums):
                return False
        self.min_offset, self.max_offset = min_offset, max_offset
        return True
