"""Consume queues: for each queue of a topic, where in the commit log its messages lie.

A queue is a dense row of 20-byte units, big-endian, one per message in queue order:

    offset  size  field
         0     8  physical offset of the record in the commit log
         8     4  size of the record
        12     8  hash of the message's tags (Java's String.hashCode, sign-extended), 0 without tags

Unit n lies at byte 20 n of the queue, in files named by the 20-digit offset of their first byte, under
`<directory>/<topic>/<queue id>/` (seed S1, ConsumeQueue; R: 300 000 units a file). Files grow as they are
written and are not filled up in advance, so two nodes with the same log have the same bytes.

Queues are derived: they hold nothing that the commit log does not, and can be rebuilt from it. So appends go to
memory, a lazy flush carries them to the files, and a checkpoint says how far the files can be trusted. At
start the queues are cut back to the checkpoint and what the log holds beyond is dispatched again; if files and
checkpoint do not fit together, everything is rebuilt. The checkpoint has a checksum of every file: a unit with a
flipped bit may look like any other, and a wrong hash of tags would hide a message from its consumers without a trace.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from node.runtime import Disk, File

__all__ = [
    "MAX_OPEN_FILES",
    "UNIT_SIZE_BYTES",
    "ConsumeQueue",
    "FileCache",
    "QueueGap",
    "Unit",
]

logger = logging.getLogger("node.store")

UNIT_SIZE_BYTES = 20
SUM_CHUNK_BYTES = 1 << 20
"""Read at once when checksums are compared."""
MAX_OPEN_FILES = 256
"""Queue files held open at once; a quarter of the 1024 descriptors that a process usually gets."""

_UNIT = struct.Struct(">qiq")


class Unit(NamedTuple):
    """One entry of a consume queue."""

    physical_offset: int
    size_bytes: int
    tag_hash: int


class QueueGap(Exception):
    """The log holds a message that lies further on in its queue than the next free place.

    Serving the queue would give messages wrong offsets, so whoever meets this stops and says so.
    """


class FileCache:
    """Keeps the most recently used files open, up to a bound, for all queues of a node."""

    def __init__(self, disk: Disk, *, max_open: int = MAX_OPEN_FILES) -> None:
        self._disk = disk
        self._max_open = max_open
        self._files: OrderedDict[str, File] = OrderedDict()
        self._pinned: str | None = None

    def open(self, path: str) -> File:
        """The file at `path`, which exists. Valid until the next `open` or `create` unless pinned."""
        file = self._files.get(path)
        if file is None:
            return self._keep(path, self._disk.open(path))
        self._files.move_to_end(path)
        return file

    async def create(self, path: str) -> File:
        """The file at `path`, made durably when there is none; its directories too."""
        if path not in self._files:
            file = await self._disk.create(path)
            if path not in self._files:  # a reader may have opened it meanwhile
                return self._keep(path, file)
            file.close()
        return self.open(path)

    def _keep(self, path: str, file: File) -> File:
        self._files[path] = file
        if len(self._files) > self._max_open:
            oldest = next((other for other in self._files if other not in (path, self._pinned)), path)
            if oldest != path:
                self._files.pop(oldest).close()
        return file

    def pin(self, path: str | None) -> None:
        """Keep this one file open while a write to it is awaited; None lets go of it."""
        self._pinned = path

    def forget(self, path: str) -> None:
        """Close `path` if it is open."""
        file = self._files.pop(path, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        """Close every file."""
        while self._files:
            self._files.popitem()[1].close()


class ConsumeQueue:
    """One queue of one topic. Offsets count units; `max_offset` is the next free one.

    `append` and `read` are synchronous and see each other's effect at once; `flush`, `sync` and `restore`
    touch files and are called by one task at a time.
    """

    def __init__(self, disk: Disk, files: FileCache, directory: str, *, units_per_file: int) -> None:
        self._disk = disk
        self._files = files
        self._directory = directory
        self._file_size_bytes = units_per_file * UNIT_SIZE_BYTES
        self._written_bytes = 0
        """Queue position up to which the units are in the files; the tail begins here."""
        self._tail = bytearray()
        self._sums: dict[int, tuple[int, int]] = {}
        self._summed_bytes = 0
        self._unsynced: dict[str, None] = {}
        self.min_offset = 0
        self.max_offset = 0

    @property
    def unflushed_bytes(self) -> int:
        """Size of the units that exist in memory only."""
        return len(self._tail)

    @property
    def flushed_bytes(self) -> int:
        """Position up to which the units are in the files."""
        return self._written_bytes

    @property
    def is_unsynced(self) -> bool:
        """Whether files hold written units that are not yet durable."""
        return bool(self._unsynced)

    def begin_at(self, offset: int) -> None:
        """Let an empty queue start at `offset`: the log no longer holds what came before."""
        if self.max_offset != self.min_offset:
            raise ValueError(f"{self._directory} is not empty")
        self.min_offset = self.max_offset = offset
        self._written_bytes = self._summed_bytes = offset * UNIT_SIZE_BYTES
        self._tail.clear()
        self._sums.clear()

    def sums(self) -> list[list[int]]:
        """Checksums of the queue's files as of this moment, oldest first: the position that each begins with, and the
        CRC-32 of everything from there to the end of the file or of the queue."""
        self._sum()
        first = self.min_offset * UNIT_SIZE_BYTES // self._file_size_bytes * self._file_size_bytes
        self._sums = {base: entry for base, entry in self._sums.items() if base >= first}
        return [list(entry) for entry in self._sums.values()]

    def _sum(self) -> None:
        """Take everything that was appended into the checksums."""
        end = self._written_bytes + len(self._tail)
        while self._summed_bytes < end:
            start = self._summed_bytes
            base = start - start % self._file_size_bytes
            stop = min(end, base + self._file_size_bytes)
            began, crc = self._sums.get(base, (start, 0))
            piece = self._tail[start - self._written_bytes : stop - self._written_bytes]
            self._sums[base] = (began, zlib.crc32(piece, crc))
            self._summed_bytes = stop

    def append(self, queue_offset: int, physical_offset: int, size_bytes: int, tag_hash: int) -> bool:
        """Add the unit of the message that the log calls number `queue_offset` of this queue.

        Returns False, and changes nothing, when the queue already holds that number (a repetition, R).
        Raises QueueGap when numbers in between are missing.
        """
        if queue_offset != self.max_offset:
            if queue_offset < self.max_offset:
                return False
            raise QueueGap(f"{self._directory}: number {queue_offset} follows {self.max_offset - 1}")
        self._tail += _UNIT.pack(physical_offset, size_bytes, tag_hash)
        self.max_offset += 1
        return True

    def trim(self, physical_offset: int) -> None:
        """Begin with the first message that lies at or behind `physical_offset`. Raises OSError."""
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

        Raises OSError when a file cannot be read or is shorter than it was.
        """
        if not self.min_offset <= offset < self.max_offset:
            return []
        count = min(count, self.max_offset - offset)
        start, end = offset * UNIT_SIZE_BYTES, (offset + count) * UNIT_SIZE_BYTES
        data = b"".join(self._read_files(start, min(end, self._written_bytes)))
        if end > self._written_bytes:
            skip = max(start - self._written_bytes, 0)
            data += self._tail[skip : end - self._written_bytes]
        return [Unit(*fields) for fields in _UNIT.iter_unpack(data)]

    def _read_files(self, start: int, end: int) -> Iterator[bytes]:
        while start < end:
            base = start - start % self._file_size_bytes
            size = min(end, base + self._file_size_bytes) - start
            data = self._files.open(self._path(base)).read(start - base, size)
            if len(data) != size:
                raise OSError(f"{self._path(base)} ends at {start - base + len(data)}, units follow there")
            yield data
            start += size

    def _path(self, base: int) -> str:
        return f"{self._directory}/{base:020d}"

    async def flush(self) -> None:
        """Carry the units in memory to the files; they then survive a crash of the process. Raises OSError."""
        while self._tail:
            self._sum()
            base = self._written_bytes - self._written_bytes % self._file_size_bytes
            path = self._path(base)
            data = bytes(self._tail[: base + self._file_size_bytes - self._written_bytes])
            self._unsynced[path] = None
            file = await self._files.create(path)
            self._files.pin(path)
            try:
                await file.write(self._written_bytes - base, data)
            finally:
                self._files.pin(None)
            self._written_bytes += len(data)
            del self._tail[: len(data)]

    async def sync(self) -> None:
        """Make what was flushed survive a power cut. Raises OSError."""
        for path in list(self._unsynced):
            file = self._files.open(path)
            self._files.pin(path)
            try:
                await file.sync()
            finally:
                self._files.pin(None)
            self._unsynced.pop(path, None)

    async def restore(self, min_offset: int, max_offset: int, sums: list[list[int]]) -> bool:
        """Take the units [min_offset, max_offset) from the files and delete everything behind them.

        Returns False when the files do not hold that many, or others than those of `sums`; they are then of no use.
        Raises OSError.
        """
        end = max_offset * UNIT_SIZE_BYTES
        first = min_offset * UNIT_SIZE_BYTES // self._file_size_bytes * self._file_size_bytes
        if min_offset == max_offset:
            first, sums = end, []  # nothing is held, whatever the files say
        names = self._disk.list(self._directory)
        for base in range(first, end, self._file_size_bytes):
            expected = min(end - base, self._file_size_bytes)
            if f"{base:020d}" not in names:
                logger.warning("%s is missing", self._path(base))
                return False
            size_bytes = self._files.open(self._path(base)).size_bytes()
            if size_bytes < expected:
                logger.warning("%s is %d bytes long, not %d", self._path(base), size_bytes, expected)
                return False
            if base + self._file_size_bytes > end:
                await self._files.open(self._path(base)).truncate(expected)
        for name in names:
            if not (name.isascii() and name.isdigit() and first <= int(name) < end):
                self._files.forget(f"{self._directory}/{name}")
                await self._disk.remove(f"{self._directory}/{name}")
        self._sums = {start - start % self._file_size_bytes: (start, crc) for start, crc in sums}
        if not self._are_as_summed(first, end):
            return False
        self.min_offset, self.max_offset = min_offset, max_offset
        self._written_bytes = self._summed_bytes = end
        self._tail.clear()
        self._unsynced.clear()
        return True

    def _are_as_summed(self, first: int, end: int) -> bool:
        """Whether every file from position `first` to `end` has the checksum that it should have."""
        for base in range(first, end, self._file_size_bytes):
            if base not in self._sums:
                logger.warning("the checkpoint says nothing of %s", self._path(base))
                return False
            start, wanted = self._sums[base]
            stop, crc = min(end, base + self._file_size_bytes), 0
            file = self._files.open(self._path(base))
            while start < stop:
                piece = file.read(start - base, min(SUM_CHUNK_BYTES, stop - start))
                if not piece:
                    break
                crc = zlib.crc32(piece, crc)
                start += len(piece)
            if crc != wanted:
                logger.warning("%s is damaged: its checksum is %08x, not %08x", self._path(base), crc, wanted)
                return False
        return True
