"""Latency over time in bounded memory: a grid of cells instead of points.

A cell is one column of time by one step of latency (6 %) for one series; it counts the operations that fell
into it. When a run outgrows the columns, neighbouring columns are merged and each becomes twice as wide. So one
pass over a history of any length is enough, the picture never has more than `MAX_COLUMNS` columns (about a
pixel each), and quantiles read from the cells are within half a step, 3 %, of the exact ones. The longest latency
of each series is kept exactly.
"""

from __future__ import annotations

__all__ = [
    "BINS",
    "BINS_PER_DECADE",
    "MAX_COLUMNS",
    "Cell",
    "LatencyGrid",
    "bin_of",
    "latency_of",
    "marks_of",
    "quantiles_of",
]

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

BINS_PER_DECADE = 40
"""Steps of latency per factor of ten: 5.9 % each, finer than a dot is tall."""

LOWEST_NS = 1_000
"""Latencies below a microsecond count as a microsecond: no real operation is that fast."""

BINS = 10 * BINS_PER_DECADE
"""Steps from 1 µs to 10,000 s; longer latencies fall into the last step."""

MAX_COLUMNS = 1_024
"""Columns of time: about one per pixel of a wide screen."""

FIRST_COLUMN_NS = 1_000_000
"""Width of a column at the start; it doubles as the run grows."""


def bin_of(latency_ns: int) -> int:
    """The step that a latency falls into."""
    if latency_ns <= LOWEST_NS:
        return 0
    return min(BINS - 1, int(math.log10(latency_ns / LOWEST_NS) * BINS_PER_DECADE))


def latency_of(step: float) -> float:
    """The latency (ns) at a position on the axis of steps; the middle of step n is at n + 0.5."""
    return float(LOWEST_NS * 10 ** (step / BINS_PER_DECADE))


class Cell(NamedTuple):
    """The number of operations of one series in one column and step."""

    column: int
    series: int
    step: int
    operations: int


class LatencyGrid:
    """Cells of a run, for `series_count` series numbered from 0."""

    __slots__ = ("_cells", "_series_count", "column_ns", "longest_ns")

    def __init__(self, series_count: int) -> None:
        self.column_ns = FIRST_COLUMN_NS
        self._series_count = series_count
        self._cells: dict[int, int] = {}
        self.longest_ns = [0] * series_count

    def add(self, series: int, time_ns: int, latency_ns: int) -> None:
        """Count one operation that ended at `time_ns` (from 0) after `latency_ns`."""
        if latency_ns > self.longest_ns[series]:
            self.longest_ns[series] = latency_ns
        column = time_ns // self.column_ns
        while column >= MAX_COLUMNS:
            self._widen()
            column = time_ns // self.column_ns
        cell = (column * self._series_count + series) * BINS + bin_of(latency_ns)
        cells = self._cells
        cells[cell] = cells.get(cell, 0) + 1

    def _widen(self) -> None:
        self.column_ns *= 2
        merged: Counter[int] = Counter()
        for column, series, step, operations in self.cells():
            merged[(column // 2 * self._series_count + series) * BINS + step] += operations
        self._cells = dict(merged)

    def cells(self) -> Iterator[Cell]:
        """Every occupied cell, in no particular order."""
        for cell, count in self._cells.items():
            rest, step = divmod(cell, BINS)
            column, series = divmod(rest, self._series_count)
            yield Cell(column, series, step, count)

    def windows(self, series: Iterable[int], columns_per_window: int) -> dict[int, Counter[int]]:
        """Window number -> step -> operations, summed over the series; empty windows are absent."""
        wanted = frozenset(series)
        found: dict[int, Counter[int]] = {}
        for cell in self.cells():
            if cell.series in wanted:
                found.setdefault(cell.column // columns_per_window, Counter())[cell.step] += cell.operations
        return found


def marks_of(grid: LatencyGrid, series: Sequence[int], quantiles: Sequence[float]) -> tuple[int, list[float]]:
    """The number of operations in the series and their latencies (ns): the quantiles within 3 %, then the exact
    longest; [] without operations."""
    steps = grid.windows(series, 1 << 30).get(0)
    if not steps:
        return 0, []
    longest_ns = max(grid.longest_ns[number] for number in series)
    # The middle of the last step may exceed the latencies in it.
    marks = [min(latency_of(step), longest_ns) for step in quantiles_of(steps, quantiles)]
    return steps.total(), [*marks, longest_ns]


def quantiles_of(steps: Counter[int], wanted: Iterable[float]) -> list[float]:
    """Positions of the given quantiles on the axis of steps (see `latency_of`); [] without operations."""
    total = steps.total()
    if not total:
        return []
    found = []
    for q in wanted:
        rank, seen = max(1, math.ceil(q * total)), 0
        for step in sorted(steps):
            seen += steps[step]
            if seen >= rank:
                found.append(step + 0.5)
                break
    return found
