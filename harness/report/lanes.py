"""What every client did over the whole run, in bounded memory: a row for each client, a cell for each piece of time.

A row is a client's slot: a process that replaces one whose operation ended `info` takes over its row (`ClientSlots`). A
cell holds the worst outcome among the operations open in it: info ranks above fail, and fail above ok.
As in `grid`, columns are merged in pairs when the run outgrows them, so that a history of any length takes one pass.
"""

from __future__ import annotations

__all__ = ["MAX_COLUMNS", "MAX_ROWS", "ClientLanes", "ClientSlots"]

from collections import deque
from collections.abc import Iterator

MAX_COLUMNS = 512
"""Columns of time: each two pixels of a wide screen."""

MAX_ROWS = 40
"""Rows: as many as fit on a screen. With more clients, several share a row, which the caption states."""

FIRST_COLUMN_NS = 1_000_000

RANK = {"ok": 1, "fail": 2, "info": 3}
OUTCOME = {rank: outcome for outcome, rank in RANK.items()}


class ClientSlots:
    """Assigns each process of a history to a slot, one process at a time; memory is bounded by the number of slots.

    A history does not say which process a new one replaces. Processes are numbered as they begin, so a new one gets
    the slot that has been free longest because its process ended `info`; if none is free, as when a phase begins with
    new processes, the slot whose process has been idle longest.
    """

    __slots__ = ("_free", "_idle", "_slot_of", "_slots", "_unused")

    def __init__(self, slots: int) -> None:
        self._slots = max(1, slots)
        self._slot_of: dict[int, int] = {}
        self._unused = dict.fromkeys(range(self._slots))
        self._free: deque[int] = deque()
        self._idle: dict[int, int] = {}  # slot -> its process, the one idle for longest first

    def begin(self, process: int) -> int:
        """The slot of a process that begins an operation."""
        slot = self._slot_of.get(process)
        if slot is None:
            slot = self._slot_of[process] = self._take(process)
        self._idle.pop(slot, None)
        return slot

    def end(self, process: int, outcome: str) -> int:
        """The slot of a process whose operation has ended."""
        if process not in self._slot_of:  # another process took the slot: more are active than there are slots
            return process % self._slots
        slot = self._slot_of[process]
        if outcome == "info":
            del self._slot_of[process]
            self._free.append(slot)
        else:
            self._idle[slot] = process
        return slot

    def _take(self, process: int) -> int:
        if process in self._unused:
            del self._unused[process]
            return process
        if self._free:
            return self._free.popleft()
        if self._unused:
            return self._unused.popitem()[0]
        if self._idle:
            slot = next(iter(self._idle))
            self._slot_of.pop(self._idle[slot], None)
            return slot
        return process % self._slots


class ClientLanes:
    """The cells of a run with the given number of client slots."""

    __slots__ = ("_cells", "column_ns", "rows", "slots")

    def __init__(self, slots: int) -> None:
        self.slots = max(1, slots)
        self.rows = min(self.slots, MAX_ROWS)
        self.column_ns = FIRST_COLUMN_NS
        self._cells: list[bytearray] = [bytearray(MAX_COLUMNS) for _ in range(self.rows)]

    def add(self, slot: int, start_ns: int, end_ns: int, outcome: str) -> None:
        """Add an operation of a slot's client, from its invocation to its completion or the history's end."""
        first, last = max(0, start_ns) // self.column_ns, max(0, end_ns) // self.column_ns
        while last >= MAX_COLUMNS:
            self._widen()
            first, last = max(0, start_ns) // self.column_ns, max(0, end_ns) // self.column_ns
        cells, rank = self._cells[slot * self.rows // self.slots], RANK[outcome]
        for column in range(first, last + 1):
            if cells[column] < rank:
                cells[column] = rank

    def _widen(self) -> None:
        self.column_ns *= 2
        for row, cells in enumerate(self._cells):
            self._cells[row] = _merged(cells) + bytearray(MAX_COLUMNS // 2)

    def runs(self, max_strokes: int) -> tuple[int, list[tuple[str, int, int, int]]]:
        """The width of a column (ns), and runs of equal cells: outcome, row, first column, columns. Pairs of columns
        are merged until there are at most `max_strokes` runs."""
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
