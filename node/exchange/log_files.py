"""The files of a commit log, read record by record and written again, with one read buffer in memory.

A log is a sequence of files of the same size, each named by the 20-digit position of its first byte; a blank record
fills a file that the next record does not fit into. Apache's files all have the full size, zeros follow the last
record, and one more file may have been created in advance (R: AllocateMappedFileService). Ours end at the last record.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from node.broker.internal_topics import tells_by_body
from node.exchange.staging import ExchangeError, sync_file
from node.store.commit_log import BLANK_HEAD_SIZE_BYTES
from node.store.record import (
    BLANK_MAGIC,
    FIXED_SIZE_BYTES,
    RECORD_MAGIC,
    RecordError,
    RecordSummary,
    decode_record,
    summarize_record,
)
from node.store.record_batch import RecordBatch
from node.store.segments import segment_name

__all__ = ["LogFiles", "LogWriter", "ReadRecord", "Stop"]

READ_BYTES = 4 << 20
"""Bytes read at once."""
MAX_RECORD_BYTES = 128 << 20
"""Larger records count as damage: both brokers take 4 MiB by default, and frames end at 16 MiB."""
RECORD_MAGIC_V2 = RECORD_MAGIC + 4
"""A record of RocketMQ 5, with two bytes for the length of a topic (R: MESSAGE_MAGIC_CODE_V2)."""

_NAME = re.compile(r"[0-9]{20}")


class ReadRecord(NamedTuple):
    """One record of a log; `summary` is None for a blank one."""

    position: int
    data: bytes
    summary: RecordSummary | None


class Stop(NamedTuple):
    """Where no further record begins, and why not."""

    position: int
    reason: str


class LogFiles:
    """The files below `directory`. `segment_size_bytes` is by default the size of the first file.

    Raises ExchangeError if the files cannot be one log; OSError.
    """

    def __init__(self, directory: Path, segment_size_bytes: int | None = None) -> None:
        self.directory = directory
        if not directory.is_dir():
            raise ExchangeError(f"there is no commit log: {directory} is no directory")
        names = sorted(path.name for path in directory.iterdir() if _NAME.fullmatch(path.name))
        self.sizes = {int(name): (directory / name).stat().st_size for name in names}
        """Size of each file, by the position at which it begins."""
        first_bytes = next(iter(self.sizes.values()), 0)
        self.segment_size_bytes = segment_size_bytes or first_bytes
        for base, size_bytes in self.sizes.items():
            if self.segment_size_bytes == 0 or base % self.segment_size_bytes or size_bytes > self.segment_size_bytes:
                raise ExchangeError(
                    f"{self.path_at(base)} has {size_bytes} bytes and is no file of a log whose files have"
                    f" {self.segment_size_bytes}"
                )
        self.begin = min(self.sizes, default=0)
        self.end_of_files = max((base + size_bytes for base, size_bytes in self.sizes.items()), default=0)
        self.stop = Stop(self.begin, "")
        """Where `records` ended, and why."""

    def path_at(self, position: int) -> Path:
        """The file that holds `position`."""
        size_bytes = self.segment_size_bytes
        return self.directory / segment_name(position - position % size_bytes if size_bytes else position)

    def place(self, position: int) -> str:
        """The same as a text, with the byte in that file."""
        return f"{self.path_at(position)}, byte {position % self.segment_size_bytes if self.segment_size_bytes else 0}"

    def first_gap(self, end: int) -> str:
        """What is wrong with the first file below `end` that is missing or short; "" if none is."""
        size_bytes = self.segment_size_bytes
        if self.sizes:
            for base in range(self.begin, end - end % size_bytes, size_bytes):
                if self.sizes.get(base) != size_bytes:
                    return f"{self.path_at(base)} is missing or short"
        return ""

    def records(self, end: int) -> Iterator[ReadRecord]:
        """The whole records from the beginning to `end`, or to the first bytes that are no record; `stop` says why.

        Raises OSError.
        """
        position = self.begin
        self.stop = Stop(position, "")
        while position < end and not self.stop.reason:
            if position not in self.sizes:
                self.stop = Stop(position, "the file is missing")
                return
            with self.path_at(position).open("rb") as file:
                yield from self._records_of(file, position, end)
            position = self.stop.position

    def _records_of(self, file: BinaryIO, base: int, end: int) -> Iterator[ReadRecord]:
        """The records of one file; afterwards `stop` is after the last one."""
        position, data, at = base, b"", 0
        file_end = base + self.segment_size_bytes
        end = min(end, file_end)
        while position < end:
            size_bytes, magic = int.from_bytes(data[at : at + 4], "big"), int.from_bytes(data[at + 4 : at + 8], "big")
            is_head = len(data) - at >= BLANK_HEAD_SIZE_BYTES
            reason = _problem_of_head(size_bytes, magic, file_end - position) if is_head else ""
            if not reason and (not is_head or len(data) - at < size_bytes):
                fresh = file.read(max(READ_BYTES, size_bytes if is_head else 0))
                data, at = data[at:] + fresh, 0
                if not fresh:
                    self.stop = Stop(position, "the file ends there")
                    return
                continue
            record, summary = data[at : at + size_bytes], None
            if not reason and magic == RECORD_MAGIC:
                reason, summary = _looked_at(record, position, file_end)
            if reason or position + size_bytes > end:
                self.stop = Stop(position, reason or "a record crosses the end")
                return
            yield ReadRecord(position, record, summary)
            position += size_bytes
            at += size_bytes
        self.stop = Stop(position, "")

    def last_byte(self, position: int) -> int:
        """Position of the last byte that is not zero, from `position` on; -1 if all are zero. Raises OSError."""
        last = -1
        for base, size_bytes in self.sizes.items():
            if base + size_bytes <= position:
                continue
            at = max(position, base)
            with self.path_at(base).open("rb") as file:
                file.seek(at - base)
                while data := file.read(READ_BYTES):
                    kept = data.rstrip(b"\0")
                    if kept:
                        last = at + len(kept) - 1
                    at += len(data)
        return last


def _problem_of_head(size_bytes: int, magic: int, room_bytes: int) -> str:
    """What is wrong with the size and the magic of a record; "" if nothing is."""
    if magic == RECORD_MAGIC_V2:
        return "a record of RocketMQ 5 begins there"
    if magic not in (RECORD_MAGIC, BLANK_MAGIC):
        return "no record begins there"
    if size_bytes > room_bytes or (magic == BLANK_MAGIC and size_bytes != room_bytes):
        return f"a record of {size_bytes} bytes does not fit there"
    if magic == RECORD_MAGIC and not FIXED_SIZE_BYTES <= size_bytes <= MAX_RECORD_BYTES:
        return f"no record has {size_bytes} bytes"
    return ""


def _looked_at(record: bytes, position: int, file_end: int) -> tuple[str, RecordSummary | None]:
    """What is wrong with a record, and its summary."""
    try:
        summary = summarize_record(record)
        if tells_by_body(summary):
            summary = summary._replace(body=decode_record(record)[0].body)
    except RecordError as error:
        return error.reason, None
    if summary.physical_offset != position:
        return f"the record says that it lies at {summary.physical_offset}", None
    if position + len(record) + BLANK_HEAD_SIZE_BYTES > file_end:
        return "the record leaves no room for a blank one", None
    return "", summary


class LogWriter:
    """Writes a log that begins at `begin`, a multiple of `segment_size_bytes`. Close it with `finish`."""

    def __init__(self, directory: Path, segment_size_bytes: int, begin: int) -> None:
        self._directory = directory
        self._segment_size_bytes = segment_size_bytes
        self._file: BinaryIO | None = None
        self._path = directory
        self.position = begin
        """Where the next record goes."""
        directory.mkdir(parents=True)

    def write(self, record: bytes) -> None:
        """Write a record that another log has at this position. Raises OSError."""
        if self._file is None:
            self._path = self._directory / segment_name(self.position)
            self._file = self._path.open("xb")
        self._file.write(record)
        self.position += len(record)
        if self.position % self._segment_size_bytes == 0:
            self._close()

    def append(self, batch: RecordBatch, queue_offset: int, store_timestamp_ms: int) -> None:
        """Append a new record, after a blank one if the file has no room for it. Raises ExchangeError, OSError."""
        (size_bytes,) = batch.sizes()
        room = self._segment_size_bytes - self.position % self._segment_size_bytes
        if size_bytes + BLANK_HEAD_SIZE_BYTES > self._segment_size_bytes:
            raise ExchangeError(f"a file of {self._segment_size_bytes} bytes has no room for a record of {size_bytes}")
        if size_bytes + BLANK_HEAD_SIZE_BYTES > room:
            head = room.to_bytes(4, "big") + BLANK_MAGIC.to_bytes(4, "big")
            self.write(head + bytes(room - len(head)))
        self.write(batch.record(self.position, queue_offset, store_timestamp_ms))

    def finish(self, *, fill_up: bool) -> None:
        """Complete the log; with `fill_up`, its last file is filled up with zeros. The log is then durable, except for
        the names in the directory. Raises OSError."""
        if self._file is not None:
            if fill_up:
                self._file.truncate(self._segment_size_bytes)
            self._close()

    def _close(self) -> None:
        assert self._file is not None
        file, self._file = self._file, None
        file.close()
        sync_file(self._path)

    def abandon(self) -> None:
        """Close the file; writes nothing. For a command that has failed."""
        if self._file is not None:
            self._file.close()
            self._file = None
