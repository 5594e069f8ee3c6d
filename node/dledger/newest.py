"""The newest part of the log in memory: for followers that are nearly up to date, and for readers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from node.dledger.entry import HEADER_SIZE_BYTES
from node.dledger.entry_batch import EntryBatch, join_rows

__all__ = ["NewestRows"]


class NewestRows:
    """Rows that follow each other, up to the end of the log. `size_bytes` is that of their entries."""

    def __init__(self) -> None:
        self._rows: list[EntryBatch] = []
        self._indices: list[int] = []
        self._positions: list[int] = []
        self.size_bytes = 0

    @property
    def begin_index(self) -> int | None:
        """Index of the first entry; None where there is none."""
        return self._indices[0] if self._indices else None

    @property
    def begin_pos(self) -> int | None:
        """Position of the first entry; None where there is none."""
        return self._positions[0] if self._positions else None

    def add(self, row: EntryBatch) -> None:
        """The log goes on with `row`."""
        self._rows.append(row)
        self._indices.append(row.first_index)
        self._positions.append(row.pos)
        self.size_bytes += len(row.raw)

    def find(self, index: int) -> EntryBatch | None:
        """The row that holds an entry of the log; None where that is older than all of them."""
        indices = self._indices
        if not indices or index < indices[0]:
            return None
        return self._rows[-1] if index >= indices[-1] else self._rows[bisect_right(indices, index) - 1]

    def collect(self, first_index: int, last_index: int, max_bytes: int) -> list[EntryBatch]:
        """The entries from `first_index`, which is here, to `last_index`: at least one, and as many as fit."""
        number = bisect_right(self._indices, first_index) - 1
        found: list[EntryBatch] = []
        left_bytes = max_bytes
        while number < len(self._rows) and self._indices[number] <= last_index:
            row = self._rows[number]
            number += 1
            if not found:
                row = row.tail(first_index)
            if row.last_index > last_index:
                row = row.head(last_index)
            if len(row.raw) > left_bytes:
                count = bisect_right(row.ends, left_bytes)
                if count or not found:
                    found.append(row.head(row.first_index + max(count, 1) - 1))
                break
            left_bytes -= len(row.raw)
            found.append(row)
        return found

    def join(self, first_index: int, last_index: int, max_bytes: int) -> None:
        """Make one row of those that lie between two entries, as far as they follow each other in one file and have no
        more than so many bytes: what several want is put together once, and many small rows are not kept for long."""
        rows = self._rows
        first = number = bisect_left(self._indices, first_index)
        left_bytes = max_bytes
        while number < len(rows):
            row = rows[number]
            left_bytes -= len(row.raw)
            if left_bytes < 0 or row.last_index > last_index:
                break
            if number > first and row.pos != rows[number - 1].end_pos:
                break
            number += 1
        if number - first > 1:
            rows[first:number] = [join_rows(rows[first:number])]
            del self._indices[first + 1 : number]
            del self._positions[first + 1 : number]

    def body_at(self, pos: int, size_bytes: int) -> bytes | None:
        """The first bytes of the body of the entry at `pos`, which is here; None where no entry begins there."""
        row = self._rows[bisect_right(self._positions, pos) - 1]
        offset, ends = pos - row.pos, row.ends
        number = bisect_left(ends, offset) if offset else -1
        if offset and (number >= len(ends) - 1 or ends[number] != offset):
            return None
        return row.raw[offset + HEADER_SIZE_BYTES : min(offset + HEADER_SIZE_BYTES + size_bytes, ends[number + 1])]

    def cut(self, end_index: int) -> None:
        """Forget the entries from `end_index` on."""
        while self._rows and self._rows[-1].last_index >= end_index:
            row = self._rows.pop()
            self._indices.pop()
            self._positions.pop()
            self.size_bytes -= len(row.raw)
            if row.first_index < end_index:
                self.add(row.head(end_index - 1))

    def clear(self) -> None:
        """Forget everything."""
        self.cut(-1)

    def trim(self, max_bytes: int, written_index: int) -> None:
        """Forget the oldest rows that are written, until the others have at most `max_bytes`."""
        count = 0
        for row in self._rows:
            if self.size_bytes <= max_bytes or row.last_index > written_index:
                break
            self.size_bytes -= len(row.raw)
            count += 1
        del self._rows[:count]
        del self._indices[:count]
        del self._positions[:count]
