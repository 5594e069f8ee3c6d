"""Decides whether bytes that are not an entry can be one that was never completely written.

A disk writes whole sectors. If a crash interrupts the write of an entry, at least one sector lacks its part: the file
ends before it, or it holds what was there before, which is zeros or the tail mark of the previous write (a log is only
appended to, and cuts shorten its files). If every sector has its part, the whole entry was on the disk, and the disk
has changed it since.

A part of an entry that consists only of zeros is ambiguous, and counts as lacking.
"""

from __future__ import annotations

from node.dledger.entry import HEADER, HEADER_SIZE_BYTES, MAGICS, TAIL_MARK_SIZE_BYTES, tail_mark, tail_mark_at
from node.store.segments import SegmentedFile

__all__ = ["SECTOR_SIZE_BYTES", "is_torn_write"]

SECTOR_SIZE_BYTES = 512
"""The smallest unit that disks write as a whole; a larger one is a multiple of it."""

_KNOWN_OF_MARK_BYTES = 16
"""Magic, size and position of a tail mark are known beforehand, the durable position after them is not."""

_ZEROS_OF_MAGIC_BYTES = 3
"""Every entry begins with this many zeros."""


def is_torn_write(data: SegmentedFile, position: int) -> bool:
    """Whether the bytes at `position` of the log, which are no entry, can be an unfinished write. Raises OSError."""
    room_bytes = data.room_at(position)
    header = data.read(position, min(HEADER_SIZE_BYTES, room_bytes))
    if len(header) < min(HEADER_SIZE_BYTES, room_bytes) or tail_mark_at(header, 0, position) is not None:
        return True
    if room_bytes >= HEADER_SIZE_BYTES:  # else only a blank fits
        magic, size_bytes, *_, body_size_bytes = HEADER.unpack(header)
        if magic in MAGICS and HEADER_SIZE_BYTES + body_size_bytes == size_bytes <= room_bytes:
            raw = data.read(position, size_bytes)
            return len(raw) < size_bytes or _lacks_a_part(data, position, raw)
    return _lacks_a_part(data, position, header)


def _lacks_a_part(data: SegmentedFile, position: int, raw: bytes) -> bool:
    """Whether a sector may hold what it held before `raw` was written at `position`."""
    in_file = position % data.segment_size_bytes
    first_bytes = min(SECTOR_SIZE_BYTES - in_file % SECTOR_SIZE_BYTES, len(raw))
    if _is_old_first(raw[:first_bytes], tail_mark(position, 0), position == data.begin_position):
        return True
    for start in range(first_bytes, len(raw), SECTOR_SIZE_BYTES):
        # The rest of a mark may be at the start of the second part.
        stop = start + SECTOR_SIZE_BYTES
        if not any(raw[max(start, TAIL_MARK_SIZE_BYTES) : stop]):
            return True
    return False


def _is_old_first(part: bytes, mark: bytes, is_first_of_log: bool) -> bool:
    """The same for the first part of the entry. What precedes it in its sector was read back, so if the sector is old,
    it holds the previous write's mark; that may be missing only at the start of a sector or of the log."""
    if any(part[TAIL_MARK_SIZE_BYTES:]):
        return False
    known = part[:_KNOWN_OF_MARK_BYTES]
    if known == mark[: len(known)]:
        return True
    return not any(part) and (len(part) > _ZEROS_OF_MAGIC_BYTES or is_first_of_log)
