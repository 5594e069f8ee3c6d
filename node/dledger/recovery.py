"""Recovers the log after a stop, a crash or a power cut.

The end of the log is found by reading entries forward from a position that is known to be good. Where that stops,
either a write was torn or the disk has damaged something that was durable. A torn write is normal and is cut
off: it was never acknowledged. Damage must never be cut off: an entry that this member has acknowledged may be
committed, and members with silently shortened logs could elect a leader without it. What tells the two apart is
evidence of how far the log was durable:

- the checkpoint,
- tail marks: each write leaves one after its entries that records how far the log was durable before the write,
- units of the index: they reach their files only after the entries they point to are durable.

If the log cannot be read up to the furthest of these, recovery ends in LedgerCorrupt, which names file and byte. So it
does if every sector of the unreadable entry was written (`torn_write.py`): for the last write of a killed process there
is no other evidence. A power cut can lose unsynced bytes in any order, so intact entries of the last write may follow a
torn one: they are cut off with it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from node.dledger.entry import (
    CONFIG_MAGIC,
    HEADER_SIZE_BYTES,
    TAIL_MARK_SIZE_BYTES,
    BadEntry,
    Entry,
    blank_size_at,
    parse_entry,
    tail_mark_at,
)
from node.dledger.files import Checkpoint, LedgerFiles
from node.dledger.index import IndexUnit, pack_unit
from node.dledger.membership import decode_members
from node.dledger.torn_write import is_torn_write
from node.store.segments import SegmentedFile, SegmentError

__all__ = ["SCAN_SIZE_BYTES", "LogScan", "Recovered", "recover"]

logger = logging.getLogger("node.dledger.store")

SCAN_SIZE_BYTES = 64 * 1024 * 1024
"""How much of the newest log is verified at start, in a second or two. Older entries are verified when read."""

_WINDOW_SIZE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a member's files hold. `last` is None for an empty log."""

    begin_index: int = -1
    last: Entry | None = None
    committed_index: int = -1
    members: tuple[tuple[int, dict[str, str]], ...] = ()
    """The groups that entries define, with the entries' indices."""


class LogScan:
    """Reads entries forward from `position` until something is not an entry; `reason` then says what is wrong."""

    def __init__(self, data: SegmentedFile, position: int, *, next_index: int | None, chain_crc: int | None) -> None:
        self._data = data
        self._next_index = next_index
        self._chain_crc = chain_crc
        self._window = b""
        self._window_at = position
        self.position = position
        """Position after the last good entry."""
        self.stopped_at = position
        """Position of what is not an entry: `position`, or after the blank there."""
        self.first: Entry | None = None
        self.last: Entry | None = None
        self.units = bytearray()
        self.members: dict[int, dict[str, str]] = {}
        """The groups that the entries read define, by the entries' indices."""
        self.reason = ""

    def run(self) -> None:
        """Read to the end. Raises OSError."""
        try:
            while True:
                entry = self.next()
                self.units += pack_unit(entry)
                if entry.magic == CONFIG_MAGIC:
                    self.members[entry.index] = decode_members(entry)
                self.first = self.first or entry
                self.last = entry
                self.position = entry.end_pos
        except BadEntry as error:
            self.reason = str(error)

    def next(self) -> Entry:
        """The next entry. Raises BadEntry, OSError."""
        at = self.stopped_at = self.position
        if at % self._data.segment_size_bytes:
            blank_size_bytes = blank_size_at(self._bytes(at, HEADER_SIZE_BYTES), 0)
            if blank_size_bytes is not None:
                if blank_size_bytes != self._data.room_at(at):
                    raise BadEntry(f"a blank claims {blank_size_bytes} bytes")
                at += blank_size_bytes
        self.stopped_at = at
        header = self._bytes(at, HEADER_SIZE_BYTES)
        size_bytes = int.from_bytes(header[4:8], "big", signed=True)
        if not HEADER_SIZE_BYTES <= size_bytes <= self._data.room_at(at):
            raise BadEntry("there is no entry")
        entry = parse_entry(self._bytes(at, size_bytes), 0, self._chain_crc)
        if entry.pos != at or (self._next_index is not None and entry.index != self._next_index):
            raise BadEntry(f"entry {entry.index} of position {entry.pos} does not belong here")
        if self.last is not None and entry.term < self.last.term:
            raise BadEntry(f"entry {entry.index} is of term {entry.term}, the one before of {self.last.term}")
        self._next_index = entry.index + 1
        self._chain_crc = entry.chain_crc
        return entry

    def _bytes(self, position: int, size_bytes: int) -> bytes:
        start = position - self._window_at
        if start < 0 or start + size_bytes > len(self._window):
            self._window = self._data.read(position, max(size_bytes, _WINDOW_SIZE_BYTES))
            self._window_at = position
            start = 0
        return self._window[start : start + size_bytes]


async def recover(files: LedgerFiles, *, scan_size_bytes: int = SCAN_SIZE_BYTES) -> Recovered:
    """Open the files and repair them: a torn tail is cut off, and the index is made to match.

    Afterwards everything that is left is durable. Raises LedgerCorrupt, SegmentError, OSError.
    """
    files.open()
    checkpoint = files.load_checkpoint() or Checkpoint()
    data = files.data
    if checkpoint.is_of_reset and data.begin_position != checkpoint.begin_pos:
        checkpoint = await _forget(files)
    if data.begin_position > checkpoint.begin_pos and checkpoint.durable_index >= 0:
        raise files.error_at(checkpoint.begin_pos, "the file is missing")
    begin, scan = _start(files, scan_size_bytes)
    scan.run()
    durable = _durable_position(files, checkpoint, scan)
    if problem := data.first_gap(durable):  # also among files too old to be read now
        raise SegmentError(f"{problem}, although the log had been durable up to position {durable}")
    if not is_torn_write(data, scan.stopped_at):
        raise files.error_at(scan.stopped_at, f"{scan.reason}, although all of it had been written")
    begin = begin or scan.first
    if begin is None:
        await _make_empty(files, checkpoint)
        return Recovered(members=checkpoint.members)
    _report_cut(files, scan)
    last = scan.last
    assert last is not None
    if data.end_position != scan.position:
        await data.truncate(scan.position)
    await data.write_again(durable)
    # Not before the entries are durable: a unit that outlives them in a power cut would claim that they were.
    first_index = scan.first.index if scan.first is not None else last.index + 1
    await files.index.replace_from(first_index, bytes(scan.units))
    await files.mark_tail()
    members = dict(checkpoint.members) | scan.members
    return Recovered(
        begin_index=begin.index,
        last=last,
        committed_index=checkpoint.committed_index,
        members=tuple(sorted(members.items())),
    )


def _start(files: LedgerFiles, scan_size_bytes: int) -> tuple[Entry | None, LogScan]:
    """Where to begin reading: far enough back, at an entry that index and data agree on."""
    data, index = files.data, files.index
    begin = data.begin_position
    if data.end_position - begin > scan_size_bytes:
        # Never beyond the checkpoint: changes of the group after it are known only from the entries.
        unit = _unit_before(files, min(data.end_position - scan_size_bytes, files.checkpoint.durable_pos))
        if unit is not None and unit.pos > begin:
            try:
                first = _entry_at(data, begin, None)
                before = index.lookup_file(unit.index - 1)
                if before is not None:
                    _entry_at(data, unit.pos, unit)
                    previous = _entry_at(data, before.pos, before)
                    scan = LogScan(data, unit.pos, next_index=unit.index, chain_crc=previous.chain_crc)
                    scan.last = previous
                    return first, scan
            except BadEntry as error:
                logger.warning("the index of the log is not usable (%s), reading the whole log", error)
    whole = begin == 0
    return None, LogScan(data, begin, next_index=0 if whole else None, chain_crc=0 if whole else None)


def _unit_before(files: LedgerFiles, position: int) -> IndexUnit | None:
    """The last unit in the index files whose entry begins at or before `position`, by bisection."""
    low, high = files.index.file_range()
    found = None
    while low < high:
        middle = (low + high) // 2
        unit = files.index.lookup_file(middle)
        if unit is None:
            return None
        if unit.pos <= position:
            found, low = unit, middle + 1
        else:
            high = middle
    return found


def _entry_at(data: SegmentedFile, position: int, unit: IndexUnit | None) -> Entry:
    """The entry at `position`, which must be the one that `unit` describes, if given. Raises BadEntry."""
    header = data.read(position, HEADER_SIZE_BYTES)
    size_bytes = int.from_bytes(header[4:8], "big", signed=True)
    if not HEADER_SIZE_BYTES <= size_bytes <= data.room_at(position):
        raise BadEntry(f"there is no entry at {position}")
    entry = parse_entry(data.read(position, size_bytes))
    if entry.pos != position or (unit is not None and (entry.index, entry.term) != (unit.index, unit.term)):
        raise BadEntry(f"entry {entry.index} of position {entry.pos} stands at {position}")
    return entry


def _durable_position(files: LedgerFiles, checkpoint: Checkpoint, scan: LogScan) -> int:
    """The position up to which there is evidence that the log was durable. Raises LedgerCorrupt if that is beyond what
    could be read."""
    end = scan.position
    last_index = scan.last.index if scan.last is not None else -1
    durable = max(checkpoint.durable_pos, _marked_durable(files.data, end), _indexed_until(files, last_index, end))
    if durable > end or checkpoint.durable_index > last_index or checkpoint.committed_index > last_index:
        problem = f"{scan.reason}, although the log had been durable up to position {durable} (this is {end})"
        raise files.error_at(scan.stopped_at, problem)
    return durable


def _marked_durable(data: SegmentedFile, end: int) -> int:
    """The durable position in the tail marks: the one where reading stopped, or the one at the end of the last file."""
    at_stop = tail_mark_at(data.read(end, TAIL_MARK_SIZE_BYTES), 0, end)
    mark_at = data.end_position - TAIL_MARK_SIZE_BYTES
    at_end = tail_mark_at(data.read(mark_at, TAIL_MARK_SIZE_BYTES), 0, mark_at)
    return max(at_stop or 0, at_end or 0)


def _indexed_until(files: LedgerFiles, last_index: int, end: int) -> int:
    """The position up to which the index files have units, for the readable entries or continuing beyond them.

    Beyond them, a unit counts only if it continues the previous one, so that a damaged index raises no false alarm.
    """
    _, file_end = files.index.file_range()
    if file_end <= last_index:
        unit = files.index.lookup_file(file_end - 1)
        return unit.end_pos if unit is not None and unit.end_pos <= end else 0
    index, position = last_index + 1, end
    while True:
        unit = files.index.lookup_file(index)
        if unit is None or unit.pos not in (position, position + files.data.room_at(position)):
            return position
        index, position = index + 1, unit.end_pos


def _report_cut(files: LedgerFiles, scan: LogScan) -> None:
    data, end = files.data, scan.position
    cut_bytes = data.end_position - end
    if cut_bytes and not (cut_bytes == TAIL_MARK_SIZE_BYTES and _marked_durable(data, end)):
        logger.warning(
            "cutting an unfinished write of %d bytes off the log, %s at byte %d: %s",
            cut_bytes, data.path_at(end), end % data.segment_size_bytes, scan.reason,
        )  # fmt: skip


async def _forget(files: LedgerFiles) -> Checkpoint:
    """This member stopped in the middle of a reset of the log: finish removing the old log."""
    logger.warning("what is left of a log that was to be forgotten is removed")
    await files.index.reset(0)
    await files.data.reset(0)
    await _write_empty(files)
    return files.checkpoint


async def _make_empty(files: LedgerFiles, checkpoint: Checkpoint) -> None:
    """Nothing was ever durable here: begin at position 0, whatever an interrupted reset has left behind."""
    if checkpoint != Checkpoint(members=checkpoint.members):
        await _write_empty(files)
    await files.index.reset(0)
    files.index.begin_at(0)
    await files.data.reset(0)


async def _write_empty(files: LedgerFiles) -> None:
    """Write the checkpoint of an empty log, which keeps the group's members."""
    members = files.checkpoint.members
    async with files.index_lock:
        await files.write_checkpoint(committed_index=-1, durable_index=-1, durable_pos=0, members=members)
