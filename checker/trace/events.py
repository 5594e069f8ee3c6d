"""What a replica logged: events in its own order, one JSON object a line.

    {"node": "n1", "seq": 7, "time": 1234567, "event": "vote", "term": 3, "for": "n2"}

``node`` and ``event`` are required, every other field belongs to the model.  These have a meaning of their own:

``seq``    numbers the lines of one process from 0; 0 begins another process.  A gap shows that lines are missing.
``time``   a number; only a hint which event to try first, as clocks of different machines cannot be compared.
``id``     names a line so that others can refer to it, such as the number of a message that was sent.
``after``  the ``id`` of a line, or a list of them, that came before: that message was received.

A replica that is killed may leave half a line behind.  That is ignored at the end of the file and before another
process's first line, provided that the program writes an event down before anybody else can notice its effect.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "FULL",
    "MAX_TRACE_BYTES",
    "Event",
    "Trace",
    "TraceError",
    "event_of",
    "merge_by_time",
    "parse_trace",
    "read_trace",
]

MAX_TRACE_BYTES = 64 << 20
"""Largest trace that is read: some 600,000 events, each of which takes half a kilobyte of memory."""

FULL = "full"
"""Name of a program's last event once its trace has reached its limit."""

_MAX_SHOWN = 200


class TraceError(ValueError):
    """A file is no trace, or a trace cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a trace: what ``node`` did.  ``line`` is its number in the file, from 1."""

    node: str
    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    line: int = 0
    time: float | None = None
    ident: str | None = None
    after: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        """A field that the model needs.  Raises TraceError if the line lacks it."""
        try:
            return self.fields[name]
        except KeyError:
            raise TraceError(f"{self.place}: event {self.name!r} has no field {name!r}") from None

    def get(self, name: str, default: Any = None) -> Any:
        """A field, or ``default``."""
        return self.fields.get(name, default)

    @property
    def place(self) -> str:
        """Where it is: ``n1, line 7``."""
        return f"{self.node}, line {self.line}"

    def __str__(self) -> str:
        words = " ".join(f"{name}={json.dumps(value)}" for name, value in self.fields.items())
        text = f"{self.name} {words}".rstrip()
        return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


@dataclass(frozen=True, slots=True)
class Trace:
    """The events of one replica, or of several in a known order.  ``problem`` says what is missing, "" if nothing is
    known to be."""

    node: str
    events: Sequence[Event]
    problem: str = ""


def read_trace(path: str | Path) -> Trace:
    """The trace in a file; named after the file if it is empty.  Raises TraceError, OSError."""
    path = Path(path)
    with path.open("rb") as file:
        data = file.read(MAX_TRACE_BYTES + 1)
    if len(data) > MAX_TRACE_BYTES:
        raise TraceError(f"{path}: more than {MAX_TRACE_BYTES >> 20} MB, which is more than can be judged")
    try:
        return parse_trace(data.split(b"\n"), name=path.stem)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def parse_trace(lines: Iterable[bytes | str], *, name: str = "") -> Trace:
    """The trace in some lines, all of one node; ``name`` is the node's if there are none.  Raises TraceError."""
    events: list[Event] = []
    problem, torn, next_seq, is_full = "", 0, 0, False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        values = _object_of(line)
        if values is None:
            problem = problem or (f"line {torn} is not a JSON object" if torn else "")
            torn = number
            continue
        event = event_of(values, number)
        if events and event.node != events[0].node:
            raise TraceError(f"line {number} is of {event.node}, the lines before of {events[0].node}")
        seq = values.get("seq")
        if torn and seq != 0:
            problem = problem or f"line {torn} is not a JSON object"
        torn = 0
        if seq is not None:
            if seq not in (0, next_seq):
                problem = problem or f"before line {number} {_count(seq, next_seq)} missing"
            next_seq = seq + 1 if isinstance(seq, int) else 0
        if event.name == FULL:
            is_full = True
            continue
        events.append(event)
    if is_full:
        problem = problem or "it has reached its limit"
    return Trace(events[0].node if events else name, events, problem)


def merge_by_time(traces: Sequence[Trace]) -> list[Trace]:
    """The same events as one trace, in the order of their times, for replicas that share one clock, such as those of a
    simulation.  Raises TraceError for an event without a time, or before its predecessor."""
    keyed: list[tuple[float, int, int, Event]] = []
    for number, trace in enumerate(traces):
        before = -math.inf
        for position, event in enumerate(trace.events):
            if event.time is None or event.time < before:
                what = "has no time" if event.time is None else "is earlier than the one before"
                raise TraceError(f"{event.place}: the event {what}, so traces cannot be merged by time")
            before = event.time
            keyed.append((event.time, number, position, event))
    problems = [f"{trace.node}: {trace.problem}" for trace in traces if trace.problem]
    events = [event for *_, event in sorted(keyed, key=lambda each: each[:3])]
    return [Trace(", ".join(trace.node for trace in traces), events, "; ".join(problems))]


def _object_of(line: bytes | str) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def event_of(values: Mapping[str, Any], number: int) -> Event:
    """The event in the JSON object of line ``number``.  Raises TraceError."""
    node, name, time = values.get("node"), values.get("event"), values.get("time")
    if not isinstance(node, str) or not isinstance(name, str):
        raise TraceError(f'line {number} has no "node" or no "event"')
    if time is not None and (not isinstance(time, int | float) or isinstance(time, bool) or not math.isfinite(time)):
        raise TraceError(f"line {number}: the time is not a number")
    after = values.get("after", [])
    return Event(
        node=node,
        name=name,
        fields={key: value for key, value in values.items() if key not in _OWN},
        line=number,
        time=time,
        ident=None if values.get("id") is None else str(values["id"]),
        after=tuple(map(str, after if isinstance(after, list) else [after])),
    )


_OWN = frozenset({"node", "event", "seq", "time", "id", "after"})


def _count(seq: Any, expected: int) -> str:
    if isinstance(seq, int) and not isinstance(seq, bool) and seq > expected:
        return "1 line is" if seq == expected + 1 else f"{seq - expected} lines are"
    return "lines are"
