"""The newest part of the log in memory: for followers that are nearly up to date, and for readers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from node.dledger.entry import HEADER_SIZE_BYTES
from node.dledger.entry_batch import EntryBatch, join_batches

__all__ = ["TailCache"]


class TailCache:
    """Batches that follow each other, up to the end of the log. `size_bytes` is that of their entries."""

    def __init__(self) -> None:
        self._batches: list[EntryBatch] = []
        self._indices: list[int] = []
        self._positions: list[int] = []
        self.size_bytes = 0

    @property
    def begin_index(self) -> int | None:
        """Index of the first entry; None if the cache is empty."""
        return self._indices[0] if self._indices else None

    @property
    def begin_pos(self) -> int | None:
        """Position of the first entry; None if the cache is empty."""
        return self._positions[0] if self._positions else None

    def add(self, batch: EntryBatch) -> None:
        """Add `batch`, which continues the log."""
        self._batches.append(batch)
        self._indices.append(batch.first_index)
        self._positions.append(batch.pos)
        self.size_bytes += len(batch.raw)

    def find(self, index: int) -> EntryBatch | None:
        """The batch that holds an entry of the log; None if the entry is older than all of them."""
        indices = self._indices
        if not indices or index < indices[0]:
            return None
        return self._batches[-1] if index >= indices[-1] else self._batches[bisect_right(indices, index) - 1]

    def collect(self, first_index: int, last_index: int, max_bytes: int) -> list[EntryBatch]:
        """The entries from `first_index`, which is cached, to `last_index`: at least one, and as many batches as fit.
        Only the first and the last one may be incomplete: entries that were appended together are committed together
        then, and the leader knows what it has to dispatch without reading them again."""
        number = bisect_right(self._indices, first_index) - 1
        found: list[EntryBatch] = []
        left_bytes = max_bytes
        while number < len(self._batches) and self._indices[number] <= last_index:
            batch = self._batches[number]
            number += 1
            if not found:
                batch = batch.tail(first_index)
            if batch.last_index > last_index:
                batch = batch.head(last_index)
            if len(batch.raw) > left_bytes:
                if not found:
                    count = bisect_right(batch.ends, left_bytes)
                    found.append(batch.head(batch.first_index + max(count, 1) - 1))
                break
            left_bytes -= len(batch.raw)
            found.append(batch)
        return found

    def join(self, first_index: int, last_index: int, max_bytes: int) -> None:
        """Join the batches between two entries into one, as far as they are in the same file and have at most
        `max_bytes`: what several readers want is joined only once, and small batches do not accumulate."""
        batches = self._batches
        first = number = bisect_left(self._indices, first_index)
        left_bytes = max_bytes
        while number < len(batches):
            batch = batches[number]
            left_bytes -= len(batch.raw)
            if left_bytes < 0 or batch.last_index > last_index:
                break
            if number > first and batch.pos != batches[number - 1].end_pos:
                break
            number += 1
        if number - first > 1:
            batches[first:number] = [join_batches(batches[first:number])]
            del self._indices[first + 1 : number]
            del self._positions[first + 1 : number]

    def body_at(self, pos: int, size_bytes: int) -> bytes | None:
        """The first bytes of the body of the entry at `pos`, which is cached; None if no entry begins there."""
        batch = self._batches[bisect_right(self._positions, pos) - 1]
        offset, ends = pos - batch.pos, batch.ends
        number = bisect_left(ends, offset) if offset else -1
        if offset and (number >= len(ends) - 1 or ends[number] != offset):
            return None
        return batch.raw[offset + HEADER_SIZE_BYTES : min(offset + HEADER_SIZE_BYTES + size_bytes, ends[number + 1])]

    def cut(self, end_index: int) -> None:
        """Forget the entries from `end_index` on."""
        while self._batches and self._batches[-1].last_index >= end_index:
            batch = self._batches.pop()
            self._indices.pop()
            self._positions.pop()
            self.size_bytes -= len(batch.raw)
            if batch.first_index < end_index:
                self.add(batch.head(end_index - 1))

    def clear(self) -> None:
        """Forget everything."""
        self.cut(-1)

    def trim(self, max_bytes: int, written_index: int) -> None:
        """Forget the oldest batches that are written, until the others have at most `max_bytes`."""
        count = 0
        for batch in self._batches:
            if self.size_bytes <= max_bytes or batch.last_index > written_index:
                break
            self.size_bytes -= len(batch.raw)
            count += 1
        del self._batches[:count]
        del self._indices[:count]
        del self._positions[:count]
