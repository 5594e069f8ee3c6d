"""Where an entry goes in the log: right after the previous one, or at the start of the next file if it does not fit."""

from __future__ import annotations

from collections.abc import Sequence

from node.dledger.config import DLedgerConfig
from node.dledger.entry import BLANK_HEADER_SIZE_BYTES, HEADER_SIZE_BYTES
from node.dledger.entry_batch import EntryBatch
from node.dledger.rpc import DLedgerCode, DLedgerError

__all__ = ["LogLayout"]


class LogLayout:
    """Assigns positions, by the same rule on a leader and its followers. Positions and sizes are in bytes."""

    def __init__(self, config: DLedgerConfig) -> None:
        self._file_bytes = config.data_segment_size_bytes
        self._max_entry_bytes = config.max_entry_size_bytes

    def of_entry(self, size_bytes: int, end: int) -> int:
        """The position of an entry of `size_bytes` appended to a log that ends at `end`. Raises DLedgerError
        UNEXPECTED_ARGUMENT if it is too large."""
        if size_bytes > self._max_entry_bytes:
            raise DLedgerError(
                DLedgerCode.UNEXPECTED_ARGUMENT,
                f"an entry of {size_bytes} bytes does not fit into a file of {self._file_bytes}",
            )
        room = self._file_bytes - end % self._file_bytes
        return end if size_bytes + BLANK_HEADER_SIZE_BYTES <= room else end + room

    def of_bodies(self, sizes: Sequence[int], end: int) -> tuple[list[int], list[int]]:
        """The positions of the bodies of entries appended at `end`, given the bodies' sizes, and the numbers of those
        entries that begin another file. Raises as `of_entry`."""
        positions: list[int] = []
        if self._fits(sum(sizes) + HEADER_SIZE_BYTES * len(sizes), end):
            if len(set(sizes)) == 1:
                first, step = end + HEADER_SIZE_BYTES, sizes[0] + HEADER_SIZE_BYTES
                return list(range(first, first + step * len(sizes), step)), []
            for size_bytes in sizes:
                end += HEADER_SIZE_BYTES
                positions.append(end)
                end += size_bytes
            return positions, []
        files = []
        for number, size_bytes in enumerate(sizes):
            place = self.of_entry(HEADER_SIZE_BYTES + size_bytes, end)
            if place != end:
                files.append(number)
            positions.append(place + HEADER_SIZE_BYTES)
            end = place + HEADER_SIZE_BYTES + size_bytes
        return positions, files

    def misplaced(self, batch: EntryBatch, end: int) -> tuple[int, int, int] | None:
        """The first entry of a batch with a wrong position, if the batch is appended at `end`: its index, the position
        that it claims, and the right one. None if all are right. Raises as `of_entry`."""
        if batch.pos == end and self._fits(len(batch.raw), end):
            return None
        start = 0
        for index, entry_end in enumerate(batch.ends, batch.first_index):
            place = self.of_entry(entry_end - start, end)
            if place != batch.pos + start:
                return index, batch.pos + start, place
            start, end = entry_end, batch.pos + entry_end
        return None

    def _fits(self, size_bytes: int, end: int) -> bool:
        """Whether `size_bytes`, whatever the number of entries, certainly fit into the file of `end`."""
        room = self._file_bytes - end % self._file_bytes
        return size_bytes + BLANK_HEADER_SIZE_BYTES <= room and size_bytes <= self._max_entry_bytes
