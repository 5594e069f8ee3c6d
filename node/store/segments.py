"""A long sequence of bytes in files of one size: the storage below the log and its index.

The sequence is addressed by position, counted from the very first byte that was ever written. Segment n holds the
positions from n*S up to (n+1)*S, in a file whose name is its first position in 20 digits (seed S1, MappedFile and
MappedFileQueue; S4). Files grow as they are written; every file but the last is full. What the bytes mean, where a
record may begin and how to tell an unfinished one from a whole one is the caller's business: after a crash it
scans, and truncates the sequence to what it trusts.

Old segments can be removed from the front, and the sequence can be truncated at the end; positions never change.

A failed sync says nothing about which bytes are on the disk, and on Linux a second sync may succeed without
having written them. So everything that was written since the last successful sync is kept until the next
one, and after a failure it is written again first. A failed write may have left a part of itself after the end.
That part is truncated, durably, before the next one: a scan after a crash may rely on finding nothing but zeros after
what was written last.
"""

from __future__ import annotations

import asyncio
import errno
import re
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial

from node.runtime import Disk, Ended, File

__all__ = ["MAX_OPEN_SEGMENTS", "SegmentError", "SegmentedFile", "segment_name"]

MAX_OPEN_SEGMENTS = 64
"""Files held open at once by one sequence. Reads far back open others; a process usually gets 1024 descriptors."""

_NAME = re.compile(r"\d{20}")


class SegmentError(Exception):
    """The files in a directory cannot be segments of the configured size; the text says why."""


def segment_name(position: int) -> str:
    """The name of the file whose first byte is `position`."""
    return f"{position:020d}"


class SegmentedFile:
    """A sequence of bytes in `directory`. Positions and sizes are bytes.

    Reads are synchronous and may run at any time. The operations that change the sequence are awaited one after
    the other by their caller; if one raises OSError the length is as before, and the operation may be repeated.
    """

    def __init__(
        self, disk: Disk, directory: str, *, segment_size_bytes: int, max_open: int = MAX_OPEN_SEGMENTS
    ) -> None:
        if segment_size_bytes < 1:
            raise ValueError(f"a segment of {segment_size_bytes} bytes")
        self._disk = disk
        self._directory = directory
        self._segment_size_bytes = segment_size_bytes
        self._max_open = max_open
        self._bases: list[int] = []
        self._open: OrderedDict[int, File] = OrderedDict()
        self._busy: int | None = None
        self._unsynced: list[tuple[int, bytes]] = []
        self._dirty: dict[int, None] = {}
        self._rewrite = False
        self._has_remains = False
        """Whether a failed write may have left bytes after the end."""
        self._may_come_back = False
        """Whether a power cut may bring back a removed file, because its directory could not be synced."""
        self._begin = 0
        self._end = 0
        self._synced = 0
        self._appending: asyncio.Task[None] | None = None

    @property
    def segment_size_bytes(self) -> int:
        """Size of every file but the last."""
        return self._segment_size_bytes

    @property
    def begin_position(self) -> int:
        """The first position held; equal to `end_position` if the sequence is empty."""
        return self._begin

    @property
    def end_position(self) -> int:
        """Where the next byte goes."""
        return self._end

    @property
    def synced_position(self) -> int:
        """Everything below survives a power cut. After `open` it is the end only once `sync` has run."""
        return self._synced

    def open(self) -> None:
        """Find the files that exist. Creates the directory if it does not exist.

        The end is that of the last file; gaps and short files before it stay: `read` stops there and the caller
        decides. Raises SegmentError for files that must have been made with another segment size, and OSError, also
        for a directory in the place of any file: now, and not when a reader gets there.
        """
        self._disk.make_dirs(self._directory)
        self._bases = [int(name) for name in self._disk.list(self._directory) if _NAME.fullmatch(name)]
        for base in self._bases:
            if base % self._segment_size_bytes:
                raise SegmentError(
                    f"{self._directory}/{segment_name(base)} does not begin at a multiple of"
                    f" {self._segment_size_bytes}: the store was written with another segment size"
                )
            if self._disk.exists(f"{self.path_at(base)}/."):  # true only for a directory
                raise OSError(errno.EISDIR, "Is a directory", self.path_at(base))
        if not self._bases:
            self._begin = self._end = self._synced = 0
            return
        self._begin = self._bases[0]
        last_size_bytes = self._file(self._bases[-1]).size_bytes()
        if last_size_bytes > self._segment_size_bytes:
            raise SegmentError(
                f"{self.path_at(self._bases[-1])} is {last_size_bytes} bytes long, segments have"
                f" {self._segment_size_bytes}: the store was written with another segment size"
            )
        self._end = self._bases[-1] + last_size_bytes
        self._synced = self._begin
        self._dirty = dict.fromkeys(self._bases[-2:])

    def first_gap(self, end: int) -> str:
        """Names the first file below `end` that is missing or has the wrong size; "" if all are whole."""
        for base in range(self._base_of(self._begin), self._base_of(end), self._segment_size_bytes):
            if base not in self._bases:
                return f"{self.path_at(base)} is missing"
            size_bytes = self._file(base).size_bytes()
            if size_bytes != self._segment_size_bytes:
                return f"{self.path_at(base)} is {size_bytes} bytes long, not {self._segment_size_bytes}"
        return ""

    def path_at(self, position: int) -> str:
        """The file that holds `position`, whether it exists or not."""
        return f"{self._directory}/{segment_name(self._base_of(position))}"

    def room_at(self, position: int) -> int:
        """Bytes from `position` to the end of its segment."""
        return self._segment_size_bytes - position % self._segment_size_bytes

    def read(self, position: int, size_bytes: int) -> bytes:
        """Up to `size_bytes` bytes from `position`: fewer at the end, and if a file is short or missing.

        Raises OSError.
        """
        size_bytes = min(size_bytes, self._end - position)
        if size_bytes <= 0 or position < self._begin:
            return b""
        if size_bytes <= self.room_at(position):
            return self._read_one(position, size_bytes)
        pieces = []
        for start, end in self._split(position, position + size_bytes):
            pieces.append(self._read_one(start, end - start))
            if len(pieces[-1]) < end - start:
                break
        return b"".join(pieces)

    async def append(self, data: bytes, *, sync: bool = False, trailer: bytes = b"") -> None:
        """Write `data` at the end; with `sync`, it and all before it survive a power cut on return.

        `trailer` is written right after it in the same operation, if it fits into the segment; it does not belong
        to the sequence and is overwritten by the next append. Raises OSError; the sequence is then unchanged, as
        far as this object is concerned.
        """
        start = self._end
        if self._has_remains:
            await self.truncate(start)
        ranges = [(start, start + len(data))]
        if len(data) > self.room_at(start):
            ranges = list(self._split(start, start + len(data)))
        try:
            if self._rewrite:
                await self._write_again()
            for begin, end in ranges:
                piece = data[begin - start : end - start] if len(ranges) > 1 else data
                if end - start == len(data) and len(trailer) <= self._segment_size_bytes - (end - self._base_of(begin)):
                    piece += trailer
                if piece:
                    await self._write(begin, piece, sync=sync)
            if data:
                self._end += len(data)
                if not sync:
                    self._unsynced.append((start, data))
            if sync:
                await self._sync_dirty()
        except OSError:
            self._rewrite = bool(self._unsynced)
            self._has_remains = True
            self._end = start
            raise

    def begin_append(self, data: bytes, on_done: Ended, *, sync: bool = False, trailer: bytes = b"") -> None:
        """`append` with a callback: `on_done(error)` is called in a later turn of the loop. Raises OSError if it cannot
        even begin; `on_done` is then not called."""
        start, segment = self._end, self._segment_size_bytes
        base = start - start % segment
        size_bytes = len(data) + len(trailer)
        if (
            not data or self._rewrite or self._has_remains or not self._bases or self._bases[-1] != base
            or size_bytes > base + segment - start
            or (sync and self._dirty and (len(self._dirty) > 1 or base not in self._dirty))
        ):  # fmt: skip
            task = asyncio.get_running_loop().create_task(self.append(data, sync=sync, trailer=trailer))
            self._appending = task
            task.add_done_callback(partial(_tell, on_done))
            return
        file = self._file(base)
        self._dirty[base] = None
        self._busy = base
        try:
            appended = partial(self._appended, start, data, sync, on_done)
            file.begin_write(start - base, data + trailer, appended, sync=sync)
        except BaseException:
            self._busy = None
            self._rewrite = bool(self._unsynced)
            self._has_remains = True
            raise

    def _appended(self, start: int, data: bytes, sync: bool, on_done: Ended, error: BaseException | None) -> None:
        """An append that took a single write is over."""
        self._busy = None
        if error is not None:
            self._rewrite = bool(self._unsynced)
            self._has_remains = True
        else:
            self._end = start + len(data)
            if sync:
                self._dirty.clear()  # there was no other file
                self._unsynced.clear()
                self._synced = self._end
            else:
                self._unsynced.append((start, data))
        on_done(error)

    async def sync(self) -> None:
        """Everything appended so far survives a power cut on return. Raises OSError."""
        try:
            if self._rewrite:
                await self._write_again()
            await self._sync_dirty()
        except OSError:
            self._rewrite = bool(self._unsynced)
            raise

    async def write_again(self, position: int) -> None:
        """Write everything from `position` to the end once more, and sync it and the names of the files.

        For recovery: if a sync of the previous process had failed, data that reads back after a crash may not be on
        the disk, and syncing alone may never write it. Raises OSError.
        """
        await self._disk.sync_dir(self._directory)
        position = max(position, self._begin)
        for begin, end in list(self._split(position, self._end)):
            await self._write(begin, self._read_one(begin, end - begin), sync=False)
        await self.sync()

    async def truncate(self, position: int) -> None:
        """Truncate the sequence to end at `position`, durably. Files beyond are removed, the last one first,
        so that a crash in between leaves no gap. Raises OSError, and ValueError outside the sequence.
        """
        if not self._begin <= position <= self._end:
            raise ValueError(f"cannot cut at {position}: {self._directory} holds {self._begin} to {self._end}")
        while self._bases and self._bases[-1] >= position:
            await self._remove(self._bases[-1])
        await self._sync_removals()
        self._end = position
        self._unsynced = [(at, data[: position - at]) for at, data in self._unsynced if at < position]
        if self._bases and self._base_of(position) == self._bases[-1]:
            base = self._bases[-1]
            self._dirty[base] = None
            await self._file(base).truncate(position - base)
        await self.sync()
        self._has_remains = False

    async def reset(self, position: int) -> None:
        """Drop everything, durably; the sequence is then empty and begins at `position`. Raises OSError."""
        while self._bases:
            await self._remove(self._bases[-1])
        await self._sync_removals()
        self._unsynced.clear()
        self._rewrite = self._has_remains = False
        self._begin = self._end = self._synced = position

    async def remove_before(self, position: int) -> None:
        """Remove, from the front, the files that hold nothing at or after `position`; the last file stays.

        As soon as the removal of a file begins, the sequence begins after it. Raises OSError.
        """
        while len(self._bases) > 1 and self._bases[1] <= position:
            base, self._begin = self._bases[:2]
            try:
                await self._remove(base)
            finally:
                self._begin = self._bases[0]  # the file's own again, if it could not be removed

    def close(self) -> None:
        """Release the files; writes nothing."""
        while self._open:
            self._open.popitem()[1].close()

    def _base_of(self, position: int) -> int:
        return position - position % self._segment_size_bytes

    def _split(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts of a range that lie in one segment each."""
        while start < end:
            stop = min(end, self._base_of(start) + self._segment_size_bytes)
            yield start, stop
            start = stop

    def _read_one(self, position: int, size_bytes: int) -> bytes:
        base = self._base_of(position)
        file = self._open.get(base)
        if file is None:
            if base not in self._bases:
                return b""
            file = self._file(base)
        return file.read(position - base, size_bytes)

    async def _write(self, position: int, data: bytes, *, sync: bool) -> None:
        base = self._base_of(position)
        if not self._bases or base > self._bases[-1]:
            self._keep_open(base, await self._disk.create(f"{self._directory}/{segment_name(base)}"))
            self._bases.append(base)
        self._dirty[base] = None
        self._busy = base
        try:
            await self._file(base).write(position - base, data, sync=sync)
        finally:
            self._busy = None
        if sync:
            self._dirty.pop(base, None)

    async def _write_again(self) -> None:
        """Repeat what was written since the last successful sync and not removed, because the failed sync may have
        dropped it."""
        for position, data in self._unsynced:
            for begin, end in self._split(max(position, self._begin), position + len(data)):
                await self._write(begin, data[begin - position : end - position], sync=False)
        self._rewrite = False

    async def _sync_dirty(self) -> None:
        """Sync the files that were changed since their last sync."""
        for base in list(self._dirty):
            if base in self._bases:
                await self._file(base).sync()
            self._dirty.pop(base, None)
        self._unsynced.clear()
        self._synced = self._end

    async def _remove(self, base: int) -> None:
        file = self._open.pop(base, None)
        if file is not None:
            file.close()
        self._bases.remove(base)  # before the file: a reader opening it meanwhile would create it again, empty
        try:
            await self._disk.remove(self.path_at(base))
        except OSError:
            if self._disk.exists(self.path_at(base)):
                insort(self._bases, base)
            else:
                self._may_come_back = True
            raise
        self._dirty.pop(base, None)

    async def _sync_removals(self) -> None:
        """Make removals durable whose sync failed in an earlier try."""
        if self._may_come_back:
            await self._disk.sync_dir(self._directory)
            self._may_come_back = False

    def _file(self, base: int) -> File:
        file = self._open.get(base)
        if file is None:
            file = self._disk.open(f"{self._directory}/{segment_name(base)}")
            self._keep_open(base, file)
        else:
            self._open.move_to_end(base)
        return file

    def _keep_open(self, base: int, file: File) -> None:
        self._open[base] = file
        if len(self._open) > self._max_open:
            idle = [other for other in self._open if other not in self._dirty and other not in (base, self._busy)]
            for other in idle[: len(self._open) - self._max_open]:
                self._open.pop(other).close()


def _tell(on_done: Ended, task: asyncio.Task[None]) -> None:
    on_done(asyncio.CancelledError() if task.cancelled() else task.exception())
