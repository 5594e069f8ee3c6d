"""Shared by all readers: passes events into a history, and reports or counts everything that does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from checker.history import History, HistoryBuilder, HistoryError
from checker.linearizability.budget import Budget
from checker.values import NUMBERS

__all__ = ["BATCH_LINES", "EVENT_IN_COMMENT", "FileEvents", "FormatError", "MemoryLimitError"]

#: Lines parsed at a time: large enough that the per-batch cost vanishes, small enough that the dicts of a batch
#: (about 0.5 KB each) never weigh more than some tens of megabytes.
BATCH_LINES = 20_000

#: Commented out on purpose, or two lines merged into one: there is no telling.
EVENT_IN_COMMENT = "an event within a comment"


#: Fraction of a history's duration by which times may go back from one event to the next.  Recorders that take the time
#: before reserving the place in the file go back by microseconds; concatenated files of several clients, by nearly all.
MAX_STEP_BACK = 0.1

_TIME = itemgetter("time")


class FormatError(HistoryError):
    """A malformed file; names the file, the line (from 1) and the reason.

    ``can_be_left_out``: a lenient reader would leave out the faulty part and continue.
    """

    def __init__(self, source: str, line: int | None, reason: str, *, can_be_left_out: bool = False) -> None:
        where = source if line is None else f"{source}:{line}"
        super().__init__(f"{where}: {reason}")
        self.source = source
        self.line = line
        self.reason = reason
        self.can_be_left_out = can_be_left_out

    def __reduce__(self) -> tuple[Any, ...]:
        # The reason alone rebuilds the rest; what is passed by keyword goes into the dict.
        return FormatError, (self.source, self.line, self.reason), {"can_be_left_out": self.can_be_left_out}


class MemoryLimitError(Exception):
    """Reading a file took more memory than was allowed; the text says how far it got."""


class FileEvents:
    """The events of one file on their way into a history.

    What does not fit is refused with file and line, or left out and counted if the reader is ``lenient``.
    ``budget`` bounds the memory that reading takes.  ``is_table``: the source is a table, whose lines are rows.
    """

    def __init__(
        self, source: str, *, lenient: bool = False, budget: Budget | None = None, is_table: bool = False
    ) -> None:
        self.source = source
        self.lenient = lenient
        self._unit = "row" if is_table else "line"
        self._budget = budget
        self._builder = HistoryBuilder(lenient=lenient, contiguous=True)
        self._is_without_processes: bool | None = None
        self._earliest: Any = None
        self._latest: Any = None
        self._step_back: tuple[Any, int] | None = None
        """The greatest step back in time, and the line of the earlier time."""

    def feed(self, events: Sequence[Any], lines: Sequence[int]) -> None:
        """Take events with their line numbers.

        Raises :class:`FormatError`, or :class:`MemoryLimitError` once more memory is held than allowed.
        """
        before = self._builder.events
        try:
            self._builder.feed(events, lambda place: f"{self.source}:{lines[place]}")
        except HistoryError as error:
            line = None if error.event is None else lines[error.event - before]
            reason = error.reason
            if line is not None and self._unit == "row":
                line, reason = None, f"row {line}: {reason}"
            raise FormatError(self.source, line, reason, can_be_left_out=True) from error
        if lines:
            self._watch_times(events, lines)
            self.check_memory(f"{self._unit} {lines[-1]:,}")

    def _watch_times(self, events: Sequence[Any], lines: Sequence[int]) -> None:
        """Track how far times go back, because without an ``index`` the order of lines is taken for the order of
        events."""
        if self._builder.is_indexed:
            return
        try:
            times = list(map(_TIME, events))
            in_order = sorted(times)
        except (KeyError, TypeError):
            return  # not every event has one that can be compared
        if any(time.__class__ not in NUMBERS for time in (in_order[0], in_order[-1])):
            return
        latest = self._latest
        if times != in_order or (latest is not None and times[0] < latest):
            for time, line in zip(times, lines, strict=True):
                if latest is not None and time < latest:
                    self._step_back = max(self._step_back or (0, 0), (latest - time, line))
                else:
                    latest = time
        self._earliest = in_order[0] if self._earliest is None else min(self._earliest, in_order[0])
        self._latest = in_order[-1] if self._latest is None else max(self._latest, in_order[-1])

    def _refuse_times_that_go_back(self) -> None:
        """Raise :class:`FormatError` for events that are not in the order of their times: which operation returned
        before which was invoked, and so the verdict, depends on the order of events."""
        if self._step_back is None or self._unit == "row":
            return
        step, line = self._step_back
        if step <= MAX_STEP_BACK * (self._latest - self._earliest):
            return
        reason = (
            f"its time is {step} before that of an event above it: the events of all processes must stand in the order "
            "in which they happened; where every process wrote a file of its own, sort them by time"
        )
        if not self.lenient:
            raise FormatError(self.source, line, reason)
        self._builder.history.note(f"{self.source}:{line}: {reason}")

    def feed_alone(self, events: Sequence[Any], lines: Sequence[int]) -> None:
        """As `feed`, for formats in which all events may lack a process: then all belong to process 0."""
        if self._is_without_processes is None and events:
            self._is_without_processes = all(isinstance(event, dict) and "process" not in event for event in events)
        if self._is_without_processes:
            for event, line in zip(events, lines, strict=True):
                if isinstance(event, dict) and event.setdefault("process", 0) != 0:
                    reason = "the event has a process, and those before it have none"
                    raise FormatError(self.source, line, reason)
        self.feed(events, lines)

    def check_memory(self, reached: str) -> None:
        """Raise :class:`MemoryLimitError` if more memory is held than allowed; ``reached`` says how far reading is."""
        if self._budget is None or self._budget.used_bytes() <= self._budget.memory_bytes:
            return
        limit_mib = self._budget.memory_bytes / (1 << 20)
        raise MemoryLimitError(
            f"the memory limit of {limit_mib:.0f} MiB was reached while {self.source} was read, at {reached}, "
            f"with {len(self._builder.history.f):,} operations"
        )

    def refuse(self, line: int, reason: str, cause: Exception | None = None) -> None:
        """Refuse something that is not an event: raises :class:`FormatError`, or counts it if the reader is lenient."""
        if not self.lenient:
            raise FormatError(self.source, line, reason, can_be_left_out=True) from cause
        self._builder.history.leave_out(f"{self.source}:{line}: {reason}")

    def note(self, problem: str) -> None:
        """Add a remark about the file for the reader of the verdict."""
        self._builder.history.note(f"{self.source}: {problem}")

    def never_completed(self) -> set[int]:
        """The rows of operations that are open now."""
        return self._builder.never_completed()

    def finish(self) -> History:
        """The history of all that was fed."""
        self._refuse_times_that_go_back()
        return self._builder.finish()
