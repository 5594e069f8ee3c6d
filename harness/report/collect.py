"""One pass over a history that gathers what the report shows, in memory that does not grow with the run.

No content of a history makes this raise: a damaged history needs its report most. The damage is kept in
`RunData.damage` and shown.
"""

from __future__ import annotations

__all__ = ["OUTCOMES", "ErrorCount", "RunData", "collect", "error_kind"]

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from checker.faults import NEMESIS
from harness.history_writer import HistoryError, read_history
from harness.report.grid import LatencyGrid
from harness.report.lanes import MAX_ROWS, ClientLanes, ClientSlots
from harness.report.witness import Neighbours, Witness

OUTCOMES = ("ok", "fail", "info")
"""How operations end, in the order of every legend and table."""

MAX_FUNCTIONS = 6
"""Series of functions (write, read, ...) in the plots; workloads have two to four functions, the rest share one."""

OTHER = "other"

MAX_ERRORS = 1_000
"""Kinds of errors counted separately; a node with random text in its errors must not fill memory."""

_NUMBERS = re.compile(
    r"(?P<kept>\b(?:code|errno|status)\b[ :=#]*-?\d+\b)"  # identifies the kind of error
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"
    r"|\b(?=[0-9a-f-]*\d)(?=[0-9a-f-]*[a-f])[0-9a-f][0-9a-f-]{7,}\b"
    r"|(?<![A-Za-z0-9_])\d[\d_,.:]*(?<![,.:])",
    re.IGNORECASE,
)


def error_kind(text: str) -> str:
    """An error with "#" in place of numbers, addresses and identifiers, which differ between errors of one kind.

    Numbers that name an error ("code 1", "errno 5") and those within names (n1, S0) stay.
    """
    return _NUMBERS.sub(lambda found: found["kept"] or "#", text)


@dataclass(slots=True)
class ErrorCount:
    """How often a kind of error occurred, and its first text."""

    first: str
    events: int = 0


@dataclass(slots=True)
class RunData:
    """Summary of one history. Times are nanoseconds since the test began."""

    events: int = 0
    end_ns: int = 0
    functions: list[str] = field(default_factory=list)
    """In order of appearance; series of `grid` number 3 * function + outcome"""
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)
    """f -> invoke, ok, fail, info -> events"""
    still_open: int = 0
    """Operations without a completion when the history ended"""
    errors: dict[tuple[str, str, str], ErrorCount] = field(default_factory=dict)
    """(f, outcome, kind of error) -> how often"""
    errors_not_told_apart: int = 0
    silence_ns: tuple[int, int] = (0, 0)
    """The longest time without an ok completion: from, to"""
    grid: LatencyGrid = field(default_factory=lambda: LatencyGrid(len(OUTCOMES) * MAX_FUNCTIONS))
    lanes: ClientLanes = field(default_factory=lambda: ClientLanes(MAX_ROWS))
    neighbours: list[list[dict[str, Any]]] = field(default_factory=list)
    """For each requested witness, the operations of the history around it"""
    truncated: bool = False
    damage: str | None = None
    """Why the history could be read only in part or not at all"""

    def total(self, kind: str) -> int:
        """Events of one type over all functions."""
        return sum(by_type.get(kind, 0) for by_type in self.outcomes.values())

    def series(self, functions: Collection[str], outcomes: Collection[str]) -> list[int]:
        """The grid's series numbers of these functions and outcomes."""
        return [
            len(OUTCOMES) * number + OUTCOMES.index(outcome)
            for number, f in enumerate(self.functions)
            if f in functions
            for outcome in outcomes
        ]


def collect(
    history_path: str | os.PathLike[str],
    witnesses: Sequence[Witness] = (),
    *,
    clients: int = MAX_ROWS,
    final_reads_from: int | None = None,
) -> RunData:
    """Read a history once and summarise it, with the neighbours of each witness's operations. Clients pause before the
    event of index `final_reads_from`, while the system is healed and recovers; that time is no silence."""
    data = RunData(lanes=ClientLanes(clients))
    collector = _Collector(data, [Neighbours(witness) for witness in witnesses])
    reader = read_history(history_path)
    try:
        for index, event in enumerate(reader):
            if index == final_reads_from:
                collector.pause()
            collector.add(event)
    except HistoryError as error:
        data.damage = str(error)
    data.events = reader.events
    data.truncated = reader.truncated
    collector.finish()
    return data


class _Collector:
    __slots__ = ("_data", "_is_idle", "_last_end_ns", "_last_ok_ns", "_neighbours", "_numbers", "_open", "_slots")

    def __init__(self, data: RunData, neighbours: list[Neighbours]) -> None:
        self._data = data
        self._neighbours = neighbours
        self._open: dict[Any, dict[str, Any]] = {}
        self._numbers: dict[str, int] = {}
        self._slots = ClientSlots(data.lanes.slots)
        self._last_ok_ns = 0
        self._is_idle = True  # no operation was invoked since the last ok, and none was open then
        self._last_end_ns = 0

    def add(self, event: dict[str, Any]) -> None:
        data = self._data
        kind, time_ns, process = event["type"], event["time"], event["process"]
        if time_ns > data.end_ns:
            data.end_ns = time_ns
        if process == NEMESIS:
            return
        f = event["f"]
        number = self._numbers.get(f)
        if number is None:
            number, f = self._number(f)
        elif number == MAX_FUNCTIONS - 1:
            f = data.functions[-1]
        data.outcomes[f][kind] += 1
        if kind == "invoke":
            if self._is_idle:
                self._last_ok_ns, self._is_idle = time_ns, False
            self._open[process] = event
            self._slots.begin(process)
            return
        invocation = self._open.pop(process, None)
        self._last_end_ns = time_ns
        if "error" in event:
            self._count_error(f, kind, event["error"])
        if kind == "ok":
            self._end_silence(time_ns)
            self._last_ok_ns, self._is_idle = time_ns, not self._open
        if invocation is None:
            return
        latency_ns = time_ns - invocation["time"]
        data.lanes.add(self._slots.end(process, kind), invocation["time"], time_ns, kind)
        data.grid.add(len(OUTCOMES) * number + OUTCOMES.index(kind), max(0, time_ns), latency_ns)
        for neighbours in self._neighbours:
            neighbours.consider(invocation, event)

    def pause(self) -> None:
        """Count no silence from here to the next invocation, unless an operation is still open."""
        if not self._is_idle and not self._open:
            self._end_silence(self._last_end_ns)
            self._is_idle = True

    def _end_silence(self, at_ns: int) -> None:
        data = self._data
        if at_ns - self._last_ok_ns > data.silence_ns[1] - data.silence_ns[0]:
            data.silence_ns = (self._last_ok_ns, at_ns)

    def _number(self, f: str) -> tuple[int, str]:
        data = self._data
        if len(data.functions) < MAX_FUNCTIONS - 1:
            number = len(data.functions)
        else:
            number, f = MAX_FUNCTIONS - 1, OTHER
            if len(data.functions) == MAX_FUNCTIONS:
                return number, f
        self._numbers[f] = number
        data.functions.append(f)
        data.outcomes[f] = dict.fromkeys(("invoke", *OUTCOMES), 0)
        return number, f

    def _count_error(self, f: str, kind: str, error: Any) -> None:
        errors = self._data.errors
        text = error[:500] if isinstance(error, str) else str(error)[:500]
        key = (f, kind, error_kind(text))
        if key not in errors:
            if len(errors) >= MAX_ERRORS:
                self._data.errors_not_told_apart += 1
                return
            errors[key] = ErrorCount(text)
        errors[key].events += 1

    def finish(self) -> None:
        data = self._data
        data.still_open = len(self._open)
        if not self._is_idle:
            self._end_silence(data.end_ns)
        for invocation in self._open.values():
            slot = self._slots.end(invocation["process"], "info")
            data.lanes.add(slot, invocation["time"], data.end_ns, "info")
            for neighbours in self._neighbours:
                neighbours.consider(invocation, None)
        data.neighbours = [neighbours.chosen() for neighbours in self._neighbours]
