"""The newest records of a log in memory, for dispatch and for consumers that keep up."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

__all__ = ["RecentRecords"]

KEPT_SHARE = 0.75
"""Of the bytes allowed, what is kept when there are more: so the oldest go many at a time."""


class RecentRecords:
    """Records in batches, as they were appended; at most `max_bytes`, and the newest batch in any case."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._firsts: list[int] = []
        self._batches: list[tuple[Sequence[int], Sequence[bytes], int]] = []
        self._size_bytes = 0

    def add(self, positions: Sequence[int], records: Sequence[bytes], size_bytes: int) -> None:
        """Records at these positions, behind all others."""
        self._firsts.append(positions[0])
        self._batches.append((positions, records, size_bytes))
        self._size_bytes += size_bytes
        if self._size_bytes > self._max_bytes:
            self._trim()

    def get(self, position: int) -> bytes | None:
        """The record that begins at a position; None where none is known to."""
        number = bisect_right(self._firsts, position) - 1
        if number < 0:
            return None
        positions, records, _ = self._batches[number]
        at = bisect_left(positions, position)
        return records[at] if at < len(positions) and positions[at] == position else None

    def clear(self) -> None:
        """Forget everything."""
        self._firsts.clear()
        self._batches.clear()
        self._size_bytes = 0

    def _trim(self) -> None:
        count = 0
        for _, _, size_bytes in self._batches[:-1]:
            if self._size_bytes <= KEPT_SHARE * self._max_bytes:
                break
            self._size_bytes -= size_bytes
            count += 1
        del self._firsts[:count], self._batches[:count]
