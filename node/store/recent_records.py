"""The newest records of a log in memory, for dispatch and for consumers that keep up."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

__all__ = ["RecentRecords"]

KEPT_SHARE = 0.75
"""Share of the allowed bytes that is kept when there are more, so that many old records are dropped at a time."""


class RecentRecords:
    """Records in batches, as they were appended: at most `max_bytes`, but always the newest batch."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._firsts: list[int] = []
        self._batches: list[tuple[Sequence[int], bytes]] = []
        self._size_bytes = 0

    def add(self, positions: Sequence[int], data: bytes) -> None:
        """Add a batch of adjacent records that begin at these positions, after all others."""
        self._firsts.append(positions[0])
        self._batches.append((positions, data))
        self._size_bytes += len(data)
        if self._size_bytes > self._max_bytes:
            self._trim()

    def get(self, position: int) -> bytes | None:
        """The record that begins at a position; None if none is known to."""
        number = bisect_right(self._firsts, position) - 1
        if number < 0:
            return None
        positions, data = self._batches[number]
        at = bisect_left(positions, position)
        if at == len(positions) or positions[at] != position:
            return None
        first = positions[0]
        return data[position - first : positions[at + 1] - first if at + 1 < len(positions) else None]

    def clear(self) -> None:
        """Forget everything."""
        self._firsts.clear()
        self._batches.clear()
        self._size_bytes = 0

    def _trim(self) -> None:
        count = 0
        for _, data in self._batches[:-1]:
            if self._size_bytes <= KEPT_SHARE * self._max_bytes:
                break
            self._size_bytes -= len(data)
            count += 1
        del self._firsts[:count], self._batches[:count]
