"""Segment trees for the engines that decompose a history: the maximum of a range, and how often pieces are covered.

Both are stored in flat lists, with the children of node n at 2n and 2n+1.  Every operation takes logarithmic time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Cover", "MaxTree"]


class MaxTree:
    """Mutable numbers, and the index of the maximum of a range.

    If no number in the range exceeds ``least``, :meth:`argmax` returns a special index, whose value is ``least``.
    """

    def __init__(self, numbers: Sequence[int], *, least: int) -> None:
        size = 1
        while size < len(numbers):
            size *= 2
        self._size = size
        self._numbers = list(numbers)
        self._numbers.append(least)
        outside = len(numbers)
        best = [outside] * (2 * size)
        best[size : size + outside] = range(outside)
        held = self._numbers
        for node in range(size - 1, 0, -1):
            a, b = best[2 * node], best[2 * node + 1]
            best[node] = a if held[a] >= held[b] else b
        self._best = best

    def value(self, index: int) -> int:
        """The number at ``index``."""
        return self._numbers[index]

    def set(self, index: int, number: int) -> None:
        """Change the number at ``index``."""
        held, best = self._numbers, self._best
        held[index] = number
        node = (self._size + index) // 2
        while node:
            a, b = best[2 * node], best[2 * node + 1]
            best[node] = a if held[a] >= held[b] else b
            node //= 2

    def argmax(self, low: int, high: int) -> int:
        """The index of the greatest number from ``low`` to ``high - 1``."""
        held, best = self._numbers, self._best
        found = len(held) - 1
        low += self._size
        high += self._size
        while low < high:
            if low & 1:
                if held[best[low]] > held[found]:
                    found = best[low]
                low += 1
            if high & 1:
                high -= 1
                if held[best[high]] > held[found]:
                    found = best[high]
            low //= 2
            high //= 2
        return found


class Cover:
    """A row of pieces and how many intervals cover each; intervals are removed, and each uncovered piece is found once.

    ``least[n]`` is the least count below node n, without the ``extra`` of its ancestors.
    """

    def __init__(self, pieces: int, intervals: Iterable[tuple[int, int]]) -> None:
        size = 1
        while size < pieces:
            size *= 2
        self._size = size
        change = [0] * (size + 1)
        for start, end in intervals:
            change[start] += 1
            change[end] -= 1
        least = [0] * (2 * size)
        count = 0
        for piece in range(size):
            count += change[piece]
            least[size + piece] = count if piece < pieces else 1 << 60
        for node in range(size - 1, 0, -1):
            least[node] = min(least[2 * node], least[2 * node + 1])
        self._least = least
        self._extra = [0] * (2 * size)

    def remove(self, start: int, end: int) -> None:
        """Remove an interval over pieces ``start`` to ``end - 1``."""
        least, extra = self._least, self._extra
        low, high = start + self._size, end + self._size
        first, last = low, high - 1
        while low < high:
            if low & 1:
                least[low] -= 1
                extra[low] -= 1
                low += 1
            if high & 1:
                high -= 1
                least[high] -= 1
                extra[high] -= 1
            low //= 2
            high //= 2
        for node in (first // 2, last // 2):
            while node:
                least[node] = min(least[2 * node], least[2 * node + 1]) + extra[node]
                node //= 2

    def stretches(self, start: int, end: int) -> list[tuple[int, int]]:
        """Ranges of covered pieces between uncovered ones in ``start`` to ``end - 1``, as (first, one past the last).

        The tree then marks the uncovered pieces as covered, so that each is found once; the ranges exclude them.
        """
        bare = self._take_bare(start, end)
        out = []
        at = start
        for piece in bare:
            if at < piece:
                out.append((at, piece))
            at = piece + 1
        if at < end:
            out.append((at, end))
        return out

    def _take_bare(self, start: int, end: int) -> list[int]:
        least, extra, size = self._least, self._extra, self._size
        found: list[int] = []
        stack = [(1, 0, size, 0)]
        while stack:
            node, low, high, above = stack.pop()
            if high <= start or end <= low or least[node] + above > 0:
                continue
            if node >= size:
                found.append(low)
                continue
            middle = (low + high) // 2
            above += extra[node]
            stack.append((2 * node + 1, middle, high, above))
            stack.append((2 * node, low, middle, above))
        for piece in found:
            node = piece + size
            least[node] = 1 << 60
            node //= 2
            while node:
                least[node] = min(least[2 * node], least[2 * node + 1]) + extra[node]
                node //= 2
        return found
