"""Maps an entry's index to its position: one unit of 32 bytes for each entry, in separate files.

    offset  size  field
         0     4  magic of the entry
         4     8  pos
        12     4  size
        16     8  index
        24     8  term

Unit n lies at byte 32 n of the files taken together (R). The index is derived from the data and can be rebuilt from it,
so it is written lazily and not synced when an entry is acknowledged. Its units reach the files only after the data they
point to is durable, so a unit that survived a crash proves that its entry was durable; recovery uses that.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from node.dledger.entry import Entry
from node.store.bad_sectors import is_of_a_bad_sector
from node.store.segments import SegmentedFile

__all__ = ["UNIT", "UNIT_SIZE_BYTES", "IndexUnit", "LogIndex", "pack_unit"]

UNIT = struct.Struct(">iqiqq")
"""Magic, position, size, index and term."""
UNIT_SIZE_BYTES = UNIT.size


class IndexUnit(NamedTuple):
    """The location of one entry."""

    magic: int
    pos: int
    size_bytes: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls
    term: int

    @property
    def end_pos(self) -> int:
        return self.pos + self.size_bytes


def pack_unit(entry: Entry) -> bytes:
    """The unit of an entry."""
    return UNIT.pack(entry.magic, entry.pos, len(entry.raw), entry.index, entry.term)


class LogIndex:
    """The units of a log: the older ones in files, the newest in memory until they are written.

    `add`, `cut` and `lookup` are synchronous and see each other's effect at once. The operations on files are
    awaited one after the other by their caller.
    """

    def __init__(self, file: SegmentedFile) -> None:
        self._file = file
        self._first = 0
        """Index of the first unit in memory; those before are in the files."""
        self._units = bytearray()
        self._writing_until = 0
        self._is_half_cut = False
        """Whether a cut of the files failed, perhaps after they had become shorter: then a sync is still missing."""
        self._repaired: dict[int, IndexUnit] = {}
        """Units that replace wrong ones in the files, until the next start."""

    @property
    def unwritten_bytes(self) -> int:
        """Size of the units that are only in memory."""
        return len(self._units)

    @property
    def end_index(self) -> int:
        """Index after the last unit."""
        return self._first + len(self._units) // UNIT_SIZE_BYTES

    def add(self, index: int, units: bytes) -> None:
        """Add the packed units of the next entries; the first one is entry `index`."""
        if index != self.end_index:
            raise ValueError(f"the unit of entry {index} cannot follow {self.end_index - 1}")
        self._units += units

    def cut(self, end_index: int) -> None:
        """Forget the units from `end_index` on; files are cut later, by `truncate`."""
        kept = max(end_index - self._first, 0)
        del self._units[kept * UNIT_SIZE_BYTES :]
        self._first = min(self._first, end_index)
        self._writing_until = min(self._writing_until, end_index)
        self._repaired = {at: unit for at, unit in self._repaired.items() if at < end_index}

    def begin_at(self, index: int) -> None:
        """Forget everything; the next unit is that of `index`. Files follow later, by `reset`."""
        self._units.clear()
        self._first = index
        self._writing_until = 0
        self._repaired.clear()

    def repair(self, unit: IndexUnit) -> bool:
        """Use `unit`, made from its entry, if the files have another one. Returns whether they had. Raises OSError."""
        if unit.index >= self._first or self.lookup(unit.index) == unit:
            return False
        self._repaired[unit.index] = unit
        return True

    def lookup(self, index: int) -> IndexUnit | None:
        """The unit of `index`; None if it is missing or cannot be right. Raises OSError."""
        if index >= self._first:
            offset = (index - self._first) * UNIT_SIZE_BYTES
            if offset >= len(self._units):
                return None
            return IndexUnit(*UNIT.unpack_from(self._units, offset))
        return self._repaired.get(index) or self.lookup_file(index)

    def lookup_file(self, index: int) -> IndexUnit | None:
        """As `lookup`, but from the files alone."""
        data = self._read(index, 1)
        if len(data) < UNIT_SIZE_BYTES:
            return None
        unit = IndexUnit(*UNIT.unpack(data))
        return unit if unit.index == index and unit.pos >= 0 and unit.size_bytes > 0 else None

    def _read(self, index: int, count: int) -> bytes:
        """Up to `count` packed units from `index` on, from the files alone; none if the disk reports a bad sector: like
        damaged units, these can be made again from the entries. Raises OSError."""
        try:
            return self._file.read(index * UNIT_SIZE_BYTES, count * UNIT_SIZE_BYTES)
        except OSError as error:
            if not is_of_a_bad_sector(error):
                raise
            return b""

    def file_range(self) -> tuple[int, int]:
        """The first index in the files and the one after the last, counting whole units only."""
        begin = -(-self._file.begin_position // UNIT_SIZE_BYTES)
        return begin, self._file.end_position // UNIT_SIZE_BYTES

    async def write(self, end_index: int) -> None:
        """Write the units in memory that are before `end_index` to the files. Does nothing while the files are still to
        be cut. Raises OSError.
        """
        count = min(end_index, self.end_index) - self._first
        if count <= 0 or self._file.end_position != self._first * UNIT_SIZE_BYTES:
            return
        self._writing_until = self._first + count
        await self._file.append(bytes(self._units[: count * UNIT_SIZE_BYTES]))
        written = max(self._writing_until - self._first, 0)
        del self._units[: written * UNIT_SIZE_BYTES]
        self._first += written

    async def sync(self) -> None:
        """Make the written units durable. Raises OSError."""
        await self._file.sync()

    async def truncate(self, end_index: int) -> None:
        """Cut the files so that they hold no unit from `end_index` on, durably. Raises OSError."""
        position = end_index * UNIT_SIZE_BYTES
        if position < self._file.begin_position:
            await self._file.reset(position)
        elif position < self._file.end_position or self._is_half_cut:
            self._is_half_cut = True
            await self._file.truncate(min(position, self._file.end_position))
        self._is_half_cut = False

    async def reset(self, index: int) -> None:
        """Empty the files, durably; the next unit written is that of `index`. Raises OSError."""
        await self._file.reset(index * UNIT_SIZE_BYTES)

    async def replace_from(self, index: int, units: bytes) -> None:
        """Make the files hold the packed `units` from `index` on, and none after them. For recovery.

        Writes only where the files differ. Raises OSError.
        """
        begin, end = self.file_range()
        if not begin <= index <= end:
            await self.reset(index)
            held = b""
        else:
            held = self._read(index, len(units) // UNIT_SIZE_BYTES)
        same = _common_units(held, units)
        await self.truncate(index + same)
        await self._file.append(units[same * UNIT_SIZE_BYTES :])
        self.begin_at(index + len(units) // UNIT_SIZE_BYTES)


def _common_units(left: bytes, right: bytes) -> int:
    """Length of the common prefix of two sequences, in whole units."""
    low, high = 0, min(len(left), len(right)) // UNIT_SIZE_BYTES
    while low < high:  # equality of prefixes is monotonic: bisect instead of comparing unit by unit
        middle = (low + high + 1) // 2
        if left[: middle * UNIT_SIZE_BYTES] == right[: middle * UNIT_SIZE_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
