"""What every client did over the whole run, in bounded memory: a row for each, a cell for each piece of time.

A row is a client's slot: the process that follows one whose operation ended `info` has its row. A cell holds the
gravest of what was under way in it: an outcome that nobody knows before a failure, and that before a success. As in
`grid`, columns are merged in pairs when the run outgrows them, so that a history of any length takes one pass.
"""

from __future__ import annotations

__all__ = ["MAX_COLUMNS", "MAX_ROWS", "ClientLanes"]

from collections.abc import Iterator

MAX_COLUMNS = 512
"""Columns of time: two pixels each of a wide screen."""

MAX_ROWS = 40
"""Rows: what fits a screen below each other. Of more clients several share one, which the caption says."""

FIRST_COLUMN_NS = 1_000_000

RANK = {"ok": 1, "fail": 2, "info": 3}
OUTCOME = {rank: outcome for outcome, rank in RANK.items()}


class ClientLanes:
    """Cells of a run with so many client slots."""

    __slots__ = ("_cells", "column_ns", "rows", "slots")

    def __init__(self, slots: int) -> None:
        self.slots = max(1, slots)
        self.rows = min(self.slots, MAX_ROWS)
        self.column_ns = FIRST_COLUMN_NS
        self._cells: list[bytearray] = [bytearray(MAX_COLUMNS) for _ in range(self.rows)]

    def add(self, process: int, start_ns: int, end_ns: int, outcome: str) -> None:
        """Take in an operation from its invocation to its completion, or to the history's end."""
        first, last = max(0, start_ns) // self.column_ns, max(0, end_ns) // self.column_ns
        while last >= MAX_COLUMNS:
            self._widen()
            first, last = max(0, start_ns) // self.column_ns, max(0, end_ns) // self.column_ns
        cells, rank = self._cells[process % self.slots * self.rows // self.slots], RANK[outcome]
        for column in range(first, last + 1):
            if cells[column] < rank:
                cells[column] = rank

    def _widen(self) -> None:
        self.column_ns *= 2
        for row, cells in enumerate(self._cells):
            self._cells[row] = _merged(cells) + bytearray(MAX_COLUMNS // 2)

    def runs(self, max_strokes: int) -> tuple[int, list[tuple[str, int, int, int]]]:
        """The width of a column (ns), and runs of equal cells: outcome, row, first column, columns. Pairs of columns
        are merged until there are at most so many runs."""
        cells, column_ns = self._cells, self.column_ns
        while True:
            found = [
                (OUTCOME[rank], row, first, length)
                for row, each in enumerate(cells)
                for rank, first, length in _runs(each)
            ]
            if len(found) <= max_strokes or len(cells[0]) <= 16:
                return column_ns, found
            cells, column_ns = [_merged(each) for each in cells], column_ns * 2


def _merged(cells: bytearray) -> bytearray:
    return bytearray(map(max, cells[::2], cells[1::2]))


def _runs(cells: bytearray) -> Iterator[tuple[int, int, int]]:
    first = 0
    for column in range(1, len(cells) + 1):
        if column == len(cells) or cells[column] != cells[first]:
            if cells[first]:
                yield cells[first], first, column - first
            first = column
