"""The message index: from a key to the log positions of its messages, in RocketMQ's file format.

A file is a hash table with chains (S4; R: IndexFile), all integers big-endian:

    offset       size  content
         0         40  header: begin and end store timestamp (8+8), begin and end physical offset (8+8),
                       slots in use (4), entries plus one (4)
        40    4*slots  for each slot the number of its newest entry, 0 for none
         .   20*count  entry n (entry 0 is not used): key hash (4), physical offset (8), seconds since the begin
                       timestamp (4), number of the slot's entry before this one (4)

The key is "topic#key", its hash Java's String.hashCode made positive. When a file is full, another follows, named by
the physical offset of its first message, so that a rebuilt index has the same files byte for byte.

Like the consume queues the index is derived. Entries go to memory and are written to the files at a checkpoint, entries
first and slots after them; slots that are ahead of the checkpoint after a crash are rolled back along their chains. The
checkpoint has checksums of entries and slots, because a flipped bit would only make a query find nothing.
"""

from __future__ import annotations

import asyncio
import re
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from node.interpreter import least_rows
from node.runtime import Disk, File
from node.store.bad_sectors import is_of_a_bad_sector
from node.store.columns import pack_table, split_longs
from node.store.key_hash import key_hash, key_hashes
from node.store.properties import KEYS, UNIQUE_KEY, property_value
from node.store.record import RecordSummary

__all__ = ["DEFAULT_ENTRIES", "DEFAULT_SLOTS", "KeyRun", "MessageIndex", "keys_of"]

DEFAULT_SLOTS = 5_000_000
"""R: maxHashSlotNum. The newest file's slots are held in memory, four bytes each."""
DEFAULT_ENTRIES = 20_000_000
"""R: maxIndexNum; a file holds one less."""
MAX_KEYS_PER_MESSAGE = 64
"""Keys of one message that are indexed."""
MAX_CHAIN = 200_000
"""Entries of one chain that a query follows in one file at most."""

_HEADER = struct.Struct(">qqqqii")
_ENTRY = struct.Struct(">iqii")
_PAGE_SLOTS = 1024
_CHUNK_BYTES = 1 << 22
"""Bytes read at once when checksums are compared."""
_UNWRITTEN, _UNSUMMED = 1, 2
_CHANGED = _UNWRITTEN | _UNSUMMED
_MAX_INT = 0x7FFFFFFF
_NAME = re.compile(r"\d{20}")
LEAST_TOGETHER = least_rows(4)
"""Fewest keys that are filed together; for fewer a loop costs less."""


def keys_of(properties_text: str) -> list[str]:
    """The keys of a message: its unique one, and those in KEYS, which are separated by blanks (R)."""
    keys = []
    unique = property_value(properties_text, UNIQUE_KEY)
    if unique:
        keys.append(unique)
    others = property_value(properties_text, KEYS)
    if others:
        keys += [key for key in others.split(" ") if key]
    return keys[:MAX_KEYS_PER_MESSAGE]


class KeyRun(NamedTuple):
    """Keys of messages that follow each other in the log, of one topic and stored in the same millisecond."""

    topic: str
    keys: list[bytes]
    """In UTF-8."""
    physical_offsets: list[int]
    """For each key, the offset of its message."""
    store_timestamp_ms: int


class HasKeyRuns(Protocol):
    """Messages, by their keys."""

    @property
    def key_runs(self) -> Sequence[KeyRun]:
        """In the order of the log."""
        ...


@dataclass(slots=True)
class _Header:
    begin_ms: int = 0
    end_ms: int = 0
    begin_offset: int = 0
    end_offset: int = 0
    used_slots: int = 0
    count: int = 1

    def pack(self) -> bytes:
        return _HEADER.pack(self.begin_ms, self.end_ms, self.begin_offset, self.end_offset, self.used_slots, self.count)


def _pages(slots: array[int], first: int, last: int | None = None) -> bytes:
    """Pages of slots from `first` to `last` (included; None: only the first), as stored in a file."""
    piece = slots[first * _PAGE_SLOTS : ((first if last is None else last) + 1) * _PAGE_SLOTS]
    if sys.byteorder == "little":
        piece.byteswap()
    return piece.tobytes()


def _used_pages(data: bytes) -> list[int]:
    """The pages that hold anything, of slots as stored in a file."""
    size = 4 * _PAGE_SLOTS
    empty = bytes(size)
    starts = range(0, len(data), size)
    return [page for page, start in enumerate(starts) if data[start : start + size] != empty[: len(data) - start]]


class _IndexFile:
    """One file. Entries from `flushed` on are in memory, and all slots while the file is written to."""

    def __init__(self, path: str, slots: int, header: _Header) -> None:
        self.path = path
        self.slot_count = slots
        self.header = header
        self.flushed = header.count
        self.tail = bytearray()
        self.slots: array[int] | None = None
        self.marks = bytearray(-(-slots // _PAGE_SLOTS))
        """For each page of slots: whether it has changed since it was written, and since its checksum was taken."""
        self.file: File | None = None
        self.summed = header.count
        """Entries before this one are in `entries_crc`."""
        self.entries_crc = 0
        self._page_crcs = array("I", bytes(4 * -(-slots // _PAGE_SLOTS)))
        self.slots_crc = 0

    @property
    def is_dirty(self) -> bool:
        """Whether anything is not in the file yet."""
        return bool(self.tail) or any(marks & _UNWRITTEN for marks in self.marks)

    def entry_at(self, number: int) -> int:
        return _HEADER.size + 4 * self.slot_count + _ENTRY.size * number

    def add(self, hashed: int, physical_offset: int, stored_ms: int) -> None:
        assert self.slots is not None
        header, slot = self.header, hashed % self.slot_count
        if header.count == 1:
            header.begin_ms, header.begin_offset = stored_ms, physical_offset
        seconds = min(max((stored_ms - header.begin_ms) // 1000, 0), _MAX_INT)
        before = self.slots[slot]
        self.tail += _ENTRY.pack(hashed, physical_offset, seconds, before)
        self.slots[slot] = header.count
        self.marks[slot // _PAGE_SLOTS] = _CHANGED
        header.used_slots += before == 0
        header.count += 1
        header.end_ms, header.end_offset = stored_ms, physical_offset

    def add_run(self, hashes: Sequence[int], physical_offsets: Sequence[int], stored_ms: int) -> None:
        """`add` for keys of messages that were stored in the same millisecond."""
        assert self.slots is not None
        header, slots, count = self.header, self.slots, self.header.count
        size = self.slot_count
        own = [hashed % size for hashed in hashes]
        if len(hashes) < LEAST_TOGETHER or len(set(own)) != len(own):
            for hashed, physical_offset in zip(hashes, physical_offsets, strict=True):
                self.add(hashed, physical_offset, stored_ms)
            return
        if count == 1:
            header.begin_ms, header.begin_offset = stored_ms, physical_offsets[0]
        seconds = min(max((stored_ms - header.begin_ms) // 1000, 0), _MAX_INT)
        befores, marks = array("I", map(slots.__getitem__, own)), self.marks
        for number, slot in enumerate(own, count):
            slots[slot] = number
            marks[slot // _PAGE_SLOTS] = _CHANGED
        upper, lower = split_longs(physical_offsets)
        columns = [(0, array("I", hashes)), (1, upper), (2, lower), (4, befores)]
        self.tail += pack_table([0, 0, 0, seconds, 0], len(own), columns)
        header.used_slots += befores.count(0)
        header.count += len(own)
        header.end_ms, header.end_offset = stored_ms, physical_offsets[-1]

    def sum(self) -> tuple[int, int]:
        """CRC-32 of the current entries and slots, as the file has them once it is flushed."""
        self.sum_entries()
        if self.slots is not None:
            for page in self.pages_marked(_UNSUMMED):
                self._page_crcs[page] = zlib.crc32(_pages(self.slots, page))
            self.slots_crc = zlib.crc32(self._page_crcs.tobytes())
        return self.entries_crc, self.slots_crc

    def pages_marked(self, mark: int) -> list[int]:
        """The pages with this mark, which is cleared."""
        pages = [page for page, marks in enumerate(self.marks) if marks & mark]
        for page in pages:
            self.marks[page] &= ~mark
        return pages

    def sum_entries(self) -> None:
        """Include every entry added since in the entries' checksum."""
        if self.summed < self.header.count:
            fresh = self.tail[_ENTRY.size * (self.summed - self.flushed) :]
            self.entries_crc, self.summed = zlib.crc32(fresh, self.entries_crc), self.header.count

    def sum_anew(self, slots: array[int], used: Iterable[int]) -> int:
        """The checksum of `slots`, computed page by page; all but the `used` pages are empty."""
        self.sum_empty()
        for page in used:
            self._page_crcs[page] = zlib.crc32(_pages(slots, page))
        return zlib.crc32(self._page_crcs.tobytes())

    def sum_empty(self) -> None:
        """Set the page checksums of empty slots: all full pages have the same, so that millions of slots are not read
        while everybody waits."""
        pages = len(self._page_crcs)
        last_slots = self.slot_count - (pages - 1) * _PAGE_SLOTS
        self._page_crcs = array("I", [zlib.crc32(bytes(4 * _PAGE_SLOTS))]) * pages
        self._page_crcs[-1] = zlib.crc32(bytes(4 * last_slots))

    def newest_of(self, hashed: int, file: File | None) -> int:
        slot = hashed % self.slot_count
        if self.slots is not None:
            return self.slots[slot]
        data = file.read(_HEADER.size + 4 * slot, 4) if file is not None else b""
        return int.from_bytes(data, "big")

    def entry(self, number: int, file: File | None) -> tuple[int, int, int, int]:
        """Raises OSError when the file does not hold the entry."""
        if number >= self.flushed:
            at = _ENTRY.size * (number - self.flushed)
            return _ENTRY.unpack_from(self.tail, at)
        data = file.read(self.entry_at(number), _ENTRY.size) if file is not None else b""
        if len(data) != _ENTRY.size:
            raise OSError(f"{self.path} ends before its entry {number}")
        return _ENTRY.unpack(data)


class MessageIndex:
    """The index files below `directory`, one of the things that the dispatcher derives from the log."""

    def __init__(
        self, disk: Disk, directory: str, *, slots: int = DEFAULT_SLOTS, entries: int = DEFAULT_ENTRIES
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._slots = slots
        self._entries = entries
        self._files: list[_IndexFile] = []
        self._stale: list[str] = []
        self._begin_offset = 0
        """Where the log begins: files may have entries of messages that were removed."""
        self._writing = asyncio.Lock()
        """Held by whoever writes files or removes them."""

    @property
    def last_update(self) -> tuple[int, int]:
        """Store timestamp and physical offset of the newest indexed message; zeros when there is none."""
        if not self._files:
            return 0, 0
        header = self._files[-1].header
        return header.end_ms, header.end_offset

    def dispatch(self, record: RecordSummary) -> None:
        """Index the keys of a message."""
        text = record.properties_text
        if KEYS not in text and UNIQUE_KEY not in text:
            return
        keys = [key.encode() for key in keys_of(text)]
        run = KeyRun(record.topic, keys, [record.physical_offset] * len(keys), record.store_timestamp_ms)
        self.dispatch_keys((run,))

    def dispatch_batch(self, batch: HasKeyRuns) -> None:
        """Index the keys of a batch of messages."""
        self.dispatch_keys(batch.key_runs)

    def dispatch_keys(self, runs: Iterable[KeyRun]) -> None:
        """Index keys of messages, in the order of the log."""
        for stored_ms, same_time in groupby(runs, key=attrgetter("store_timestamp_ms")):
            hashes: list[int] = []
            offsets: list[int] = []
            for run in same_time:
                hashes += key_hashes(run.topic, run.keys)
                offsets += run.physical_offsets
            at = 0
            while at < len(hashes):
                if not self._files or self._files[-1].header.count >= self._entries:
                    self._roll(offsets[at])
                end = at + self._entries - self._files[-1].header.count
                self._files[-1].add_run(hashes[at:end], offsets[at:end], stored_ms)
                at = end

    def _roll(self, physical_offset: int) -> None:
        # Two files may begin with keys of the same message: the offset plus 1 keeps their names apart.
        path = f"{self._directory}/{physical_offset:020d}"
        if self._files and self._files[-1].path == path:
            path = f"{self._directory}/{physical_offset + 1:020d}"
        made = _IndexFile(path, self._slots, _Header())
        made.slots = array("i", bytes(4)) * self._slots
        made.sum_empty()
        self._files.append(made)

    def find(self, topic: str, key: str, *, begin_ms: int, end_ms: int, most: int) -> list[int]:
        """Physical offsets of the newest messages, at most `most`, that may have this key and were stored in this time,
        in log order. Another key may have the same hash, so the caller checks the messages.

        Raises OSError.
        """
        hashed = key_hash(topic, key)
        found: list[int] = []
        for index_file in reversed(self._files):
            header = index_file.header
            if header.end_ms + 1000 < begin_ms or header.begin_ms > end_ms:
                continue
            for entry_hash, offset, seconds, _ in self._chain(index_file, hashed):
                stored_ms = header.begin_ms + 1000 * seconds
                if offset < self._begin_offset:
                    break  # a chain only leads to older entries
                if entry_hash == hashed and begin_ms - 999 <= stored_ms <= end_ms:
                    found.append(offset)
                    if len(found) >= most:
                        return sorted(set(found))
        return sorted(set(found))

    def _chain(self, index_file: _IndexFile, hashed: int) -> Iterator[tuple[int, int, int, int]]:
        file = None
        if index_file.flushed > 1 or index_file.slots is None:
            file = index_file.file or self._disk.open(index_file.path)
        try:
            number = index_file.newest_of(hashed, file)
            for _ in range(MAX_CHAIN):
                if not 0 < number < index_file.header.count:
                    return
                entry = index_file.entry(number, file)
                yield entry
                if entry[3] >= number:
                    return  # a damaged link: a chain only leads to older entries
                number = entry[3]
        finally:
            if file is not None and file is not index_file.file:
                file.close()

    def snapshot(self) -> Any:
        """The existing files, with their headers and checksums."""
        return {
            "slots": self._slots,
            "entries": self._entries,
            "files": [
                [each.path.rpartition("/")[2], *_HEADER.unpack(each.header.pack()), *each.sum()] for each in self._files
            ],
        }

    def restore(self, state: Any) -> None:
        """Continue from a snapshot; None: from nothing. Files that the snapshot does not name are removed by the next
        `flush`. Raises ValueError if the files do not match the snapshot; everything must then be derived anew.
        """
        self.close()
        self._files = []
        self._begin_offset = 0
        names = [name for name in self._disk.list(self._directory) if _NAME.fullmatch(name)]
        self._stale = [f"{self._directory}/{name}" for name in names]
        if state is None:
            return
        if (state["slots"], state["entries"]) != (self._slots, self._entries):
            raise ValueError(f"the index below {self._directory} was made with other sizes")
        for name, *numbers, entries_crc, slots_crc in state["files"]:
            index_file = _IndexFile(f"{self._directory}/{name}", self._slots, _Header(*numbers))
            if name not in names:
                raise ValueError(f"{index_file.path} is missing")
            file = self._disk.open(index_file.path)
            try:
                if file.size_bytes() < index_file.entry_at(index_file.header.count):
                    raise ValueError(f"{index_file.path} is too short")
                self._check_entries(index_file, file, entries_crc)
                is_newest = name == state["files"][-1][0]
                slots, used = self._read_slots(index_file, file)
                if index_file.sum_anew(slots, used) != slots_crc:
                    raise ValueError(f"{index_file.path} is damaged: the checksum of its slots is another")
                index_file.entries_crc, index_file.slots_crc = entries_crc, slots_crc
                index_file.slots = slots if is_newest else None
                self._files.append(index_file)
                self._stale.remove(index_file.path)
            except OSError as error:
                if not is_of_a_bad_sector(error):
                    raise
                raise ValueError(f"{index_file.path} is damaged: {error}") from error
            finally:
                file.close()

    @staticmethod
    def _check_entries(index_file: _IndexFile, file: File, wanted: int) -> None:
        start, end, crc = index_file.entry_at(1), index_file.entry_at(index_file.header.count), 0
        while start < end:
            piece = file.read(start, min(_CHUNK_BYTES, end - start))
            if not piece:
                break
            crc = zlib.crc32(piece, crc)
            start += len(piece)
        if crc != wanted:
            raise ValueError(f"{index_file.path} is damaged: the checksum of its entries is another")

    def _read_slots(self, index_file: _IndexFile, file: File) -> tuple[array[int], list[int]]:
        """The slots, rolled back to the entries that the snapshot knows, and their pages that are not empty: for a long
        time few of a file's millions of slots are used, and a start need not look at each."""
        data = file.read(_HEADER.size, 4 * self._slots)
        if len(data) != 4 * self._slots:
            raise ValueError(f"{index_file.path} is too short for its slots")
        used = _used_pages(data)
        slots = array("i", data)
        if sys.byteorder == "little":
            slots.byteswap()
        count = index_file.header.count
        for page in used:
            first = page * _PAGE_SLOTS
            numbers = slots[first : first + _PAGE_SLOTS]
            if max(numbers) < count and min(numbers) >= 0:
                continue
            for slot, number in enumerate(numbers, start=first):
                while number >= count:
                    data = file.read(index_file.entry_at(number), _ENTRY.size)
                    before = _ENTRY.unpack(data)[3] if len(data) == _ENTRY.size else number
                    if not 0 <= before < number:
                        raise ValueError(f"{index_file.path}: slot {slot} leads to a damaged entry")
                    number = before
                if number != slots[slot]:
                    slots[slot] = number
                    index_file.marks[page] |= _UNWRITTEN
        return slots, used

    async def flush(self) -> None:
        """Write what is in memory to the files, durably. Raises OSError; what failed is written again next time."""
        async with self._writing:
            await self._flush()

    async def _flush(self) -> None:
        while self._stale:
            await self._disk.remove(self._stale[-1])
            self._stale.pop()
        for index_file in list(self._files):
            if index_file.is_dirty:
                await self._flush_file(index_file)
            if index_file is not self._files[-1] and not index_file.is_dirty and index_file.slots is not None:
                index_file.sum()  # entries may have been added since the snapshot
                index_file.slots = None
                if index_file.file is not None:
                    index_file.file.close()
                    index_file.file = None

    async def _flush_file(self, index_file: _IndexFile) -> None:
        if index_file.file is None:
            index_file.file = await self._disk.create(index_file.path)
        index_file.sum_entries()
        file, tail, header = index_file.file, bytes(index_file.tail), index_file.header.pack()
        pages = index_file.pages_marked(_UNWRITTEN)
        try:
            slots = self._page_bytes(index_file, pages)
            await file.write(index_file.entry_at(index_file.flushed), tail, sync=True)
            for position, data in slots:
                await file.write(position, data)
            await file.write(0, header, sync=True)
        except BaseException:
            for page in pages:
                index_file.marks[page] |= _UNWRITTEN
            raise
        index_file.flushed += len(tail) // _ENTRY.size
        del index_file.tail[: len(tail)]

    @staticmethod
    def _page_bytes(index_file: _IndexFile, pages: Sequence[int]) -> list[tuple[int, bytes]]:
        """The changed slots as contiguous runs of bytes to write, as they are now; `pages` ascend."""
        assert index_file.slots is not None
        runs: list[tuple[int, bytes]] = []
        start = 0
        for at, page in enumerate(pages):
            if at + 1 < len(pages) and pages[at + 1] == page + 1:
                continue
            first = pages[start]
            runs.append((_HEADER.size + 4 * first * _PAGE_SLOTS, _pages(index_file.slots, first, page)))
            start = at + 1
        return runs

    def begin_at(self, physical_offset: int) -> None:
        """The log now begins at `physical_offset`: find nothing before it."""
        self._begin_offset = physical_offset

    async def remove_before(self, physical_offset: int) -> None:
        """Like `begin_at`, and remove the files that have only older entries; the newest file stays. Raises OSError: a
        file that could not be removed is tried again next time."""
        self.begin_at(physical_offset)
        async with self._writing:
            while len(self._files) > 1 and self._files[0].header.end_offset < physical_offset:
                oldest = self._files.pop(0)
                if oldest.file is not None:
                    oldest.file.close()
                    oldest.file = None
                try:
                    await self._disk.remove(oldest.path)
                except OSError:
                    if self._disk.exists(oldest.path):
                        self._files.insert(0, oldest)
                    raise

    def close(self) -> None:
        """Release the files; writes nothing."""
        for index_file in self._files:
            if index_file.file is not None:
                index_file.file.close()
                index_file.file = None
