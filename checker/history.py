"""Histories: what clients asked of a system, what they were told, and in which order it happened.

A :class:`History` holds its operations in columns (one list per attribute, one row per operation, in order of
invocation), because a million small objects cost more time and memory than a dozen lists.  :class:`Operation` is
one row as an object, for callers, witnesses and tests.

``invoked`` and ``returned`` are positions in the one total order of client events.  An operation whose outcome is
not certain (``info``) never returned: its ``returned`` is :data:`NEVER` in the columns and ``None`` in an
:class:`Operation`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import lt
from typing import Any

from checker.values import truth

__all__ = [
    "FAIL",
    "INFO",
    "NEVER",
    "OK",
    "History",
    "HistoryBuilder",
    "HistoryError",
    "Operation",
    "columns",
    "freeze",
    "plain",
]

OK = "ok"
FAIL = "fail"
INFO = "info"

#: Return position of an operation that never returned: later than every event of any history.
NEVER = 1 << 62

_COMPLETIONS = {OK: OK, FAIL: FAIL, INFO: INFO}


class HistoryError(ValueError):
    """A history that cannot be read.  ``event`` is the number of the offending event, from 0, where known."""

    def __init__(self, reason: str, *, event: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.event = event


def freeze(value: Any) -> Any:
    """A hashable equal of ``value``: lists become tuples, sets frozensets, maps sorted tuples of pairs."""
    if isinstance(value, (list, tuple)):
        return tuple(freeze(item) for item in value)
    if isinstance(value, (set, frozenset)):
        return frozenset(freeze(item) for item in value)
    if isinstance(value, Mapping):
        pairs = [(freeze(k), freeze(v)) for k, v in value.items()]
        return tuple(sorted(pairs, key=repr))
    return value


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it: tuples and sets become lists, keys and unknown objects strings."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=repr)
    known = truth(value)
    return str(value) if known is None else known


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation of one process, from invocation to return.

    ``value`` is what was asked (a write's value, a compare-and-set's pair), ``result`` what the completion carried.
    ``invoked`` and ``returned`` order events: any comparable numbers; an invocation and a return with the same number
    are taken as concurrent.  ``invoked_ns`` and ``returned_ns`` are times since the start of the test, for people.
    """

    process: Any
    f: str
    value: Any = None
    result: Any = None
    status: str = OK
    invoked: float
    returned: float | None = None
    invoked_ns: int | None = None
    returned_ns: int | None = None
    key: Any = None
    node: str | None = None
    error: str | None = None
    index: int = -1

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable form with the names of the history format; ``result`` only where there is one."""
        out: dict[str, Any] = {"index": self.index, "process": plain(self.process), "f": self.f, "type": self.status}
        if self.key is not None:
            out["key"] = plain(self.key)
        out["value"] = plain(self.value)
        if self.status == OK:
            out["result"] = plain(self.result)
        out.update(invoked=self.invoked, returned=self.returned)
        for name in ("invoked_ns", "returned_ns", "node", "error"):
            if getattr(self, name) is not None:
                out[name] = getattr(self, name)
        return out


@dataclass(slots=True, eq=False)
class History:
    """Operations in columns, one row each, in order of invocation.

    ``problems`` lists what a reader of the source should know (a truncated last line, skipped events); it never
    changes the meaning of the rows.  ``booleans`` says whether a boolean occurs among keys, values and results, for
    those who compare them (see ``values``); ``None`` where nobody has looked.
    """

    process: list[Any] = field(default_factory=list)
    f: list[str] = field(default_factory=list)
    key: list[Any] = field(default_factory=list)
    value: list[Any] = field(default_factory=list)
    result: list[Any] = field(default_factory=list)
    status: list[str] = field(default_factory=list)
    invoked: list[int] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    invoked_ns: list[int | None] = field(default_factory=list)
    returned_ns: list[int | None] = field(default_factory=list)
    node: list[str | None] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    keyed: bool = False
    skipped_events: int = 0
    problems: list[str] = field(default_factory=list)
    booleans: bool | None = None

    def __len__(self) -> int:
        return len(self.f)

    def __iter__(self) -> Iterator[Operation]:
        return map(self.operation, range(len(self.f)))

    def operation(self, row: int) -> Operation:
        """Row ``row`` as an object."""
        returned = self.returned[row]
        return Operation(
            process=self.process[row],
            f=self.f[row],
            value=self.value[row],
            result=self.result[row],
            status=self.status[row],
            invoked=self.invoked[row],
            returned=None if returned == NEVER else returned,
            invoked_ns=self.invoked_ns[row],
            returned_ns=self.returned_ns[row],
            key=self.key[row],
            node=self.node[row],
            error=self.errors.get(row),
            index=row,
        )

    def operations(self, rows: Iterable[int]) -> tuple[Operation, ...]:
        """Those rows as objects, in the order given."""
        return tuple(map(self.operation, rows))

    def rows_by_key(self) -> dict[Any, Sequence[int]]:
        """Rows of every key, in order of first use; one entry ``None`` when no operation has a key."""
        if not self.keyed:
            return {None: range(len(self.f))}
        groups: dict[Any, list[int]] = {}
        try:
            for row, key in enumerate(self.key):
                try:
                    groups[key].append(row)
                except KeyError:
                    groups[key] = [row]
        except TypeError:
            groups = {}
            for row, key in enumerate(self.key):
                groups.setdefault(freeze(key), []).append(row)
        return dict(groups)

    @classmethod
    def of(cls, source: Any) -> History:
        """A history from a :class:`History`, event mappings, or :class:`Operation` objects.

        Raises :class:`HistoryError` for events that cannot be paired and :class:`TypeError` for anything else.
        """
        if isinstance(source, History):
            return source
        items = source if isinstance(source, (list, tuple)) else list(source)
        if items and isinstance(items[0], Operation):
            return cls.from_operations(items)
        if not items or isinstance(items[0], Mapping):
            return cls.from_events(items)
        raise TypeError(f"a history is made of event mappings or Operations, not of {type(items[0]).__name__}")

    @classmethod
    def from_events(cls, events: Iterable[Mapping[str, Any]]) -> History:
        """Pair events (``invoke`` with ``ok``, ``fail`` or ``info``) of the history format into operations."""
        builder = HistoryBuilder()
        builder.feed(events if isinstance(events, list) else list(events))
        return builder.finish()

    @classmethod
    def from_operations(cls, operations: Iterable[Operation]) -> History:
        """Columns from objects; their ``invoked`` and ``returned`` are replaced by positions in one order."""
        rows = sorted(operations, key=lambda operation: operation.invoked)
        events: list[tuple[float, int, int]] = []
        for row, operation in enumerate(rows):
            events.append((operation.invoked, 0, row))
            if operation.returned is not None and operation.status != INFO:
                if operation.returned < operation.invoked:
                    raise HistoryError(f"operation {operation} returned before it was invoked")
                events.append((operation.returned, 1, row))
            elif operation.status == OK:
                raise HistoryError(f"operation {operation} is ok but has no return")
        events.sort()
        history = cls()
        count = len(rows)
        history.invoked = [0] * count
        history.returned = [NEVER] * count
        for position, (_, is_return, row) in enumerate(events):
            (history.returned if is_return else history.invoked)[row] = position
        for row, operation in enumerate(rows):
            history.process.append(operation.process)
            history.f.append(operation.f)
            history.key.append(operation.key)
            history.value.append(operation.value)
            history.result.append(operation.result)
            history.status.append(operation.status)
            history.invoked_ns.append(operation.invoked_ns)
            history.returned_ns.append(operation.returned_ns)
            history.node.append(operation.node)
            if operation.error is not None:
                history.errors[row] = operation.error
            if operation.key is not None:
                history.keyed = True
        return history


def columns(history: History, rows: Sequence[int], *names: str) -> list[Sequence[Any]]:
    """Those columns at those rows, without copying where the rows are all there are."""
    if isinstance(rows, range) and len(rows) == len(history):
        return [getattr(history, name) for name in names]
    return [[column[row] for row in rows] for column in (getattr(history, name) for name in names)]


class HistoryBuilder:
    """Pairs events into a :class:`History`, in batches of any size, so that no event outlives its batch.

    A process has one operation open at most.  An operation that is open when the history ends counts as ``info``.
    Events of processes that are not numbers (the nemesis) are skipped and counted.
    """

    def __init__(self) -> None:
        self._history = History()
        self._open: dict[int, int] = {}
        self._rows = 0
        self._position = 0
        self._last_index: Any = -math.inf
        self.events = 0
        self._names: dict[str, str] = {}

    def feed(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Take the next events.  Raises :class:`HistoryError` naming the event that does not fit."""
        history, open_rows, names = self._history, self._open, self._names
        self._check_order(events)
        room = self._rows + len(events)
        missing = room - len(history.returned)
        if missing > 0:
            history.returned.extend([NEVER] * missing)
            history.result.extend([None] * missing)
            history.returned_ns.extend([None] * missing)
            history.node.extend([None] * missing)
            history.status.extend([INFO] * missing)
        returned, result, returned_ns = history.returned, history.result, history.returned_ns
        node, status = history.node, history.status
        add_process, add_f, add_key = history.process.append, history.f.append, history.key.append
        add_value, add_invoked, add_ns = history.value.append, history.invoked.append, history.invoked_ns.append
        rows, position, number, completions = self._rows, self._position, self.events, _COMPLETIONS
        keyed = history.keyed
        try:
            for event in events:
                number += 1
                process = event["process"]
                if process.__class__ is not int:
                    history.skipped_events += 1
                    continue
                kind = event["type"]
                get = event.get
                if kind == "invoke":
                    if process in open_rows:
                        still_open = history.f[open_rows[process]]
                        raise HistoryError(f"process {process} invokes {get('f')!r} while its {still_open!r} is open")
                    open_rows[process] = rows
                    rows += 1
                    add_process(process)
                    name = get("f") or "txn"
                    add_f(names.setdefault(name, name))
                    add_value(get("value"))
                    add_invoked(position)
                    add_ns(get("time"))
                    key = get("key")
                    add_key(key)
                    if key is not None:
                        keyed = True
                else:
                    outcome = completions[kind]
                    row = open_rows.pop(process, -1)
                    if row < 0:
                        raise HistoryError(f"process {process} completes {get('f')!r}, but has no operation open")
                    if outcome is OK:
                        status[row] = OK
                        returned[row] = position
                        result[row] = get("value")
                        returned_ns[row] = get("time")
                        host = get("node")
                        if host is not None:
                            node[row] = names.setdefault(host, host)
                    else:
                        status[row] = outcome
                        result[row] = get("value")
                        returned_ns[row] = get("time")
                        if outcome is FAIL:
                            returned[row] = position
                        error = get("error")
                        if error is not None:
                            history.errors[row] = error if isinstance(error, str) else repr(error)
                        host = get("node")
                        if host is not None:
                            node[row] = host
                position += 1
        except HistoryError as error:
            error.event = number - 1
            raise
        except (KeyError, TypeError, AttributeError) as error:
            raise HistoryError(_what_is_wrong(event, error), event=number - 1) from error
        finally:
            self._rows, self._position, self.events = rows, position, number
            history.keyed = keyed

    def _check_order(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Events that carry an ``index`` must come in its order, or their order means nothing."""
        try:
            numbers: list[Any] = [event.get("index") for event in events]
            if not numbers or numbers[0] is None:
                return
            numbers.insert(0, self._last_index)
            if not all(map(lt, numbers, islice(numbers, 1, None))):
                at = next(at for at in range(1, len(numbers)) if not numbers[at - 1] < numbers[at])
                what = f"index {numbers[at]} comes after index {numbers[at - 1]}: events must be in order, none twice"
                raise HistoryError(what, event=self.events + at - 1)
            self._last_index = numbers[-1]
        except (AttributeError, TypeError):
            return  # no map, or no number: said below where it matters

    def finish(self) -> History:
        """The history; operations still open stay ``info``."""
        history, rows = self._history, self._rows
        for column in (history.returned, history.result, history.returned_ns, history.node, history.status):
            del column[rows:]
        return history


def _what_is_wrong(event: Any, error: Exception) -> str:
    """Why ``event`` is not an event of the history format."""
    if not isinstance(event, Mapping):
        return f"an event must be a map, not {type(event).__name__}"
    for name in ("process", "type"):
        if name not in event:
            return f"the event has no {name!r}"
    if event["type"] not in ("invoke", *_COMPLETIONS):
        return f"type must be invoke, ok, fail or info, not {event['type']!r}"
    return f"the event does not fit the history format: {error}"
