"""A dense sequence of units of one size, in files of one size: what consume queues are made of.

Appends go to memory; `flush` writes them to the files, `sync` makes them durable. `sums` has a checksum of every file,
and `restore` brings them back to given bounds if the files match their checksums. Files grow as they are
written and are not preallocated, so two sequences of the same units have the same bytes.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Sequence

from node.runtime import Disk
from node.store.bad_sectors import is_of_a_bad_sector
from node.store.file_cache import FileCache

__all__ = ["UnitFiles"]

logger = logging.getLogger("node.store")

SUM_CHUNK_BYTES = 1 << 20
"""Bytes read at once when checksums are compared."""


class UnitFiles:
    """Units of `unit_size_bytes` in `directory`. Positions are bytes from where unit 0 would begin.

    `append` and `read` are synchronous and see each other's effect at once; `flush`, `sync`, `remove_before` and
    `restore` touch files and are called by one task at a time.
    """

    def __init__(
        self, disk: Disk, files: FileCache, directory: str, *, unit_size_bytes: int, units_per_file: int
    ) -> None:
        self._disk = disk
        self._files = files
        self._directory = directory
        self._unit_size_bytes = unit_size_bytes
        self._file_size_bytes = units_per_file * unit_size_bytes
        self._written_bytes = 0
        """Position up to which the units are in the files; the tail begins here."""
        self._tail = bytearray()
        self._sums: dict[int, tuple[int, int]] = {}
        self._summed_bytes = 0
        self._removed_before = 0
        """Position before which no file is left."""
        self._unsynced: dict[str, None] = {}

    @property
    def unflushed_bytes(self) -> int:
        """Bytes of units that exist in memory only."""
        return len(self._tail)

    @property
    def is_unsynced(self) -> bool:
        """Whether the files hold written units that are not yet durable."""
        return bool(self._unsynced)

    def begin_at(self, offset: int) -> None:
        """Let the sequence, which is empty, start at unit `offset`."""
        self._written_bytes = self._summed_bytes = offset * self._unit_size_bytes
        self._tail.clear()
        self._sums.clear()

    def append(self, units: bytes) -> None:
        """Add one unit, or some."""
        self._tail += units

    def sums(self, min_offset: int) -> list[list[int]]:
        """Current checksums of the files from that of unit `min_offset` on: the position at which each checksum
        starts, and the CRC-32 of everything from there to the end of the file or of the units."""
        self._sum()
        first = self._first_file(min_offset)
        self._sums = {base: entry for base, entry in self._sums.items() if base >= first}
        return [list(entry) for entry in self._sums.values()]

    def _first_file(self, offset: int) -> int:
        return offset * self._unit_size_bytes // self._file_size_bytes * self._file_size_bytes

    def _sum(self) -> None:
        """Include everything that was appended since in the checksums."""
        end = self._written_bytes + len(self._tail)
        while self._summed_bytes < end:
            start = self._summed_bytes
            base = start - start % self._file_size_bytes
            stop = min(end, base + self._file_size_bytes)
            began, crc = self._sums.get(base, (start, 0))
            piece = self._tail[start - self._written_bytes : stop - self._written_bytes]
            self._sums[base] = (began, zlib.crc32(piece, crc))
            self._summed_bytes = stop

    def read(self, offset: int, count: int) -> bytes:
        """The bytes of `count` units from `offset` on, all of which are held.

        Raises OSError if a file cannot be read or is shorter than it was.
        """
        start, end = offset * self._unit_size_bytes, (offset + count) * self._unit_size_bytes
        data = b"".join(self._read_files(start, min(end, self._written_bytes)))
        if end > self._written_bytes:
            skip = max(start - self._written_bytes, 0)
            data += self._tail[skip : end - self._written_bytes]
        return data

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
        """Write the units in memory to the files; they then survive a crash of the process. Raises OSError."""
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

    async def remove_before(self, offset: int) -> None:
        """Delete the files that hold nothing of unit `offset` or later, but never the last file. A crash in between
        leaves files that `restore` deletes when it is given that minimum. Raises OSError."""
        first = self._first_file(offset)
        if first > self._removed_before:
            names = [name for name in self._disk.list(self._directory) if name.isascii() and name.isdigit()]
            first = min(first, int(names[-1])) if names else first
            for name in names:
                if int(name) < first:
                    self._files.forget(f"{self._directory}/{name}")
                    await self._disk.remove(f"{self._directory}/{name}")
            self._removed_before = first

    async def restore(self, min_offset: int, max_offset: int, sums: Sequence[Sequence[int]]) -> bool:
        """Take over the units [min_offset, max_offset) from the files and delete everything after them.

        Returns False if the files do not hold that many, or others than those of `sums`; they are then of no use.
        Raises OSError.
        """
        end = max_offset * self._unit_size_bytes
        first = self._first_file(min_offset)
        if min_offset == max_offset:
            first, sums = end, []  # nothing is held, whatever is in the files
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
        self._written_bytes = self._summed_bytes = end
        self._removed_before = first
        self._tail.clear()
        self._unsynced.clear()
        return True

    def _are_as_summed(self, first: int, end: int) -> bool:
        """Whether every file from position `first` to `end` matches its checksum in `_sums`."""
        for base in range(first, end, self._file_size_bytes):
            if base not in self._sums:
                logger.warning("the checkpoint says nothing of %s", self._path(base))
                return False
            start, wanted = self._sums[base]
            stop, crc = min(end, base + self._file_size_bytes), 0
            file = self._files.open(self._path(base))
            while start < stop:
                try:
                    piece = file.read(start - base, min(SUM_CHUNK_BYTES, stop - start))
                except OSError as error:
                    if not is_of_a_bad_sector(error):
                        raise
                    logger.warning("%s is damaged: %s", self._path(base), error)
                    return False
                if not piece:
                    break
                crc = zlib.crc32(piece, crc)
                start += len(piece)
            if crc != wanted:
                logger.warning("%s is damaged: its checksum is %08x, not %08x", self._path(base), crc, wanted)
                return False
        return True
