"""Histories: the requests of clients to a system, its responses, and the order of both.

A :class:`History` holds its operations in columns (one list per attribute, one row per operation, in order of
invocation), because a million small objects cost more time and memory than a dozen lists.  :class:`Operation` is
one row as an object, for callers, witnesses and tests.

``invoked`` and ``returned`` are positions in the total order of client events.  An operation with an unknown outcome
(``info``) never returned: its ``returned`` is :data:`NEVER` in the columns and ``None`` in an :class:`Operation`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter, lt
from typing import Any

from checker.values import ExactDecimal, exact, truth

__all__ = [
    "FAIL",
    "INFO",
    "NEMESIS_NAMES",
    "NEVER",
    "OK",
    "UNNAMED_FUNCTION",
    "History",
    "HistoryBuilder",
    "HistoryError",
    "Operation",
    "columns",
    "freeze",
    "key_of_text",
    "key_text",
    "plain",
]

OK = "ok"
FAIL = "fail"
INFO = "info"

#: Return position of an operation that never returned: later than every event of any history.
NEVER = 1 << 62

#: Types whose values Python compares as JSON does, and that contain no other values.
_PLAIN_TYPES = frozenset({int, str, float, type(None)})

#: The columns with an operation's fields as recorded; the others are positions.
_RECORDED = ("process", "f", "key", "value", "result", "status", "invoked_ns", "returned_ns", "node")

_INDEX = itemgetter("index")
_COMPLETIONS = {OK: OK, FAIL: FAIL, INFO: INFO}

#: Processes that inject faults: their events are counted, but are not operations of a client.
NEMESIS_NAMES = frozenset({"nemesis", ":nemesis"})

#: The name of an operation whose events name none; Elle's histories of transactions do so.
UNNAMED_FUNCTION = "txn"

#: Operations that return a value.  If one of them ended ``ok`` and its event has no value, null is meant, or the
#: recorder used another name for it.
READS = frozenset({"read", "get"})

#: Problems kept as examples; the count of problems is exact.
MAX_PROBLEMS = 10


_BEGINS_JSON = frozenset('"[{-0123456789tf')


class HistoryError(ValueError):
    """A history that cannot be read.  ``event`` is the number of the offending event, from 0, if known."""

    def __init__(self, reason: str, *, event: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.event = event


def freeze(value: Any) -> Any:
    """A hashable form of ``value``: lists become tuples, sets frozensets, maps sorted tuples of pairs."""
    if isinstance(value, (list, tuple)):
        return tuple(freeze(item) for item in value)
    if isinstance(value, (set, frozenset)):
        return frozenset(freeze(item) for item in value)
    if isinstance(value, Mapping):
        pairs = [(freeze(k), freeze(v)) for k, v in value.items()]
        return tuple(sorted(pairs, key=repr))
    return value


def key_text(key: Any) -> str | None:
    """A key as text: a string as it is, anything else as JSON. A string that could be mistaken for JSON ("1" for 1,
    "true" for true) is quoted, as in JSON. Two keys have the same text if and only if they are the same key to a
    checker, as 1 and 1.0 are.
    """
    if key is None or type(key) is int:
        return None if key is None else str(key)
    key = plain(exact(key))
    if not isinstance(key, str):
        return json.dumps(key, separators=(",", ":"))
    if key[:1] in _BEGINS_JSON:
        try:
            json.loads(key)
        except (ValueError, RecursionError):
            return key
        return json.dumps(key)
    return key


def key_of_text(text: str) -> Any:
    """The inverse of `key_text`. Files of earlier versions have every string unquoted."""
    if text[:1] not in _BEGINS_JSON:
        return text
    try:
        return freeze(json.loads(text))
    except (ValueError, RecursionError):
        return text


def plain(value: Any) -> Any:
    """``value`` in a form that JSON supports: tuples and sets become lists, keys and unknown objects strings."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, ExactDecimal):
        return float(value) if float(value) == value else str(value)
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

    ``value`` is the argument (a write's value, a compare-and-set's pair), ``result`` the value of the completion.
    ``invoked`` and ``returned`` order events: any comparable numbers; an invocation and a return with the same number
    count as concurrent.  ``invoked_ns`` and ``returned_ns`` are times since the start of the test, for people.
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
        """A JSON-serialisable form with the names of the history format; ``result`` only if the operation is ok."""
        out: dict[str, Any] = {"index": self.index, "process": plain(self.process), "f": self.f, "type": self.status}
        if self.key is not None:
            out["key"] = plain(self.key)
        out["value"] = plain(self.value)
        if self.status == OK:
            out["result"] = plain(self.result)
        out.update(invoked=self.invoked, returned=self.returned)
        for name in ("invoked_ns", "returned_ns", "node", "error"):
            if getattr(self, name) is not None:
                out[name] = plain(getattr(self, name))
        return out


@dataclass(slots=True, eq=False)
class History:
    """Operations in columns, one row each, in order of invocation.

    ``nemesis_events`` counts the events of processes named in :data:`NEMESIS_NAMES`.  ``skipped_events`` counts the
    events and lines that a lenient reader left out, and ``missing_events`` those that are missing according to the
    indices of the others; ``problems`` describes the first of them, with position and reason.  ``booleans`` tells
    whether a boolean occurs among keys, values and results, which matters for comparisons (see ``values``); ``None``:
    not known.  Code that changes the columns afterwards must set it to ``None``.
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
    nemesis_events: int = 0
    skipped_events: int = 0
    missing_events: int = 0
    problems: list[str] = field(default_factory=list)
    booleans: bool | None = None

    def leave_out(self, problem: str) -> None:
        """Count an event or line that is not part of the history, and remember why if there is room."""
        self.skipped_events += 1
        self.note(problem)

    def note(self, problem: str) -> None:
        """Remember a remark about the source, if there is room."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)

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
        """The given rows as objects, in the order given."""
        return tuple(map(self.operation, rows))

    def rows_by_key(self) -> dict[Any, Sequence[int]]:
        """Rows of every key, in order of first use; one entry ``None`` when no operation has a key.

        Keys that are or contain booleans, lists or maps are converted by :func:`checker.values.exact`.
        """
        if not self.keyed:
            return {None: range(len(self.f))}
        keys = self.key
        if not _PLAIN_TYPES.issuperset(map(type, keys)):
            keys = list(map(exact, keys))
        groups: dict[Any, list[int]] = {}
        for row, key in enumerate(keys):
            try:
                groups[key].append(row)
            except KeyError:
                groups[key] = [row]
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
        return builder.finish()._marked()

    @classmethod
    def from_operations(cls, operations: Iterable[Operation]) -> History:
        """A history from objects; their ``invoked`` and ``returned`` are replaced by positions in one order."""
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
        for name in _RECORDED:
            setattr(history, name, [getattr(operation, name) for operation in rows])
        history.errors = {row: operation.error for row, operation in enumerate(rows) if operation.error is not None}
        history.keyed = any(operation.key is not None for operation in rows)
        return history._marked()

    def part(self, rows: Sequence[int]) -> History:
        """A history of only these rows, in the order given and with their positions in the whole history."""
        part = History(booleans=self.booleans)
        part.errors = {at: self.errors[row] for at, row in enumerate(rows) if row in self.errors}
        for name in (*_RECORDED, "invoked", "returned"):
            column = getattr(self, name)
            setattr(part, name, [column[row] for row in rows])
        return part

    def _marked(self) -> History:
        """This history, with ``booleans`` set to False if the types of all values already rule booleans out."""
        if all(_PLAIN_TYPES.issuperset(map(type, column)) for column in (self.key, self.value, self.result)):
            self.booleans = False
        return self


def columns(history: History, rows: Sequence[int], *names: str) -> list[Sequence[Any]]:
    """The named columns at these rows, without copying if these are all rows."""
    if isinstance(rows, range) and len(rows) == len(history):
        return [getattr(history, name) for name in names]
    return [[column[row] for row in rows] for column in (getattr(history, name) for name in names)]


class HistoryBuilder:
    """Pairs events into a :class:`History`, in batches of any size, so that no event outlives its batch.

    A process is a whole number or a name, and has at most one operation open.  An operation that is open when the
    history ends counts as ``info``.  Events of the nemesis are counted.  Anything else that is not an event, or does
    not fit the events before it, is refused; with ``lenient`` it is left out and counted instead.

    ``contiguous`` means that the events are a whole file: if they carry an ``index``, none may be missing.
    """

    def __init__(self, *, lenient: bool = False, contiguous: bool = False) -> None:
        self.lenient = lenient
        self.history = History()
        self.events = 0
        self._contiguous = contiguous
        self._open: dict[Any, int] = {}
        self._rows = 0
        self._unnamed = 0
        self._without_value = 0
        self._position = 0
        self._indexed: bool | None = None
        self._last_index = -1
        self._functions: dict[Any, str] = {}
        self._hosts: dict[str, str] = {}

    @property
    def is_indexed(self) -> bool:
        """Whether the events so far carry an ``index``."""
        return bool(self._indexed)

    def feed(self, events: Sequence[Mapping[str, Any]], where: Callable[[int], str] = "event {}".format) -> None:
        """Take the next events.

        ``where`` maps an event's position in ``events`` to a description of its position in the source.  Raises
        :class:`HistoryError`, naming the event that does not fit, unless the builder is lenient.
        """
        if not self.lenient:
            try:
                self._check_order(events)
            except HistoryError as error:
                if error.event is not None and error.event > self.events:
                    self._feed(events[: error.event - self.events])  # errors before it are reported first
                raise
            self._feed(events)
            return
        for place, event in enumerate(events):
            self._end_what_lost_its_completion(event, where(place))
            try:
                self._check_order([event])
                self._feed([event])
            except HistoryError as error:
                self.history.leave_out(f"{where(place)}: {error.reason}")

    def _end_what_lost_its_completion(self, event: Any, where: str) -> None:
        """If the event shows that an earlier operation of its process is over, leave that operation open forever.

        Its completion was lost, so that its outcome is unknown, and the next event is not its completion.
        """
        if not isinstance(event, Mapping) or event.get("process").__class__ not in (int, str):
            return
        row = self._open.get(event["process"])
        if row is None:
            return
        f, kind = event.get("f"), event.get("type")
        is_completion = kind.__class__ is str and kind in _COMPLETIONS
        if kind == "invoke" or (is_completion and f is not None and f != self.history.f[row]):
            del self._open[event["process"]]
            self.history.missing_events += 1
            lost = f"{self.history.f[row]!r} of process {event['process']}"
            self.history.note(f"{where}: the completion of {lost} is missing")

    def _feed(self, events: Sequence[Mapping[str, Any]]) -> None:
        history, open_rows, functions, hosts = self.history, self._open, self._functions, self._hosts
        self._make_room(len(events))
        returned, result, returned_ns = history.returned, history.result, history.returned_ns
        node, status, f_of, key_of = history.node, history.status, history.f, history.key
        add_process, add_f, add_key = history.process.append, history.f.append, history.key.append
        add_value, add_invoked, add_ns = history.value.append, history.invoked.append, history.invoked_ns.append
        rows, position, number, completions = self._rows, self._position, self.events, _COMPLETIONS
        keyed = history.keyed
        try:
            for event in events:
                number += 1
                process = event["process"]
                if process.__class__ is not int and not self._is_client(process):
                    history.nemesis_events += 1
                    continue
                kind = event["type"]
                get = event.get
                if kind == "invoke":
                    if process in open_rows:
                        still_open = f_of[open_rows[process]]
                        raise HistoryError(f"process {process} invokes {get('f')!r} while its {still_open!r} is open")
                    name = get("f")
                    f = functions.get(name) or self._function(name)
                    open_rows[process] = rows
                    rows += 1
                    add_process(process)
                    add_f(f)
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
                    name = get("f")
                    if name != f_of[row] and name is not None:
                        open_rows[process] = row
                        raise HistoryError(f"process {process} completes {name!r}, but has {f_of[row]!r} open")
                    if (named := get("key")) is not None and named != key_of[row]:
                        open_rows[process] = row
                        raise _of_another_key(event, f_of[row], key_of[row])
                    status[row] = outcome
                    answer = result[row] = get("value")
                    if answer is None and outcome is OK and "value" not in event and f_of[row] in READS:
                        self._without_value += 1
                    returned_ns[row] = get("time")
                    if outcome is not INFO:
                        returned[row] = position
                    if outcome is not OK and (why := get("error")) is not None:
                        history.errors[row] = why if isinstance(why, str) else repr(why)
                    host = get("node")
                    if host is not None:
                        node[row] = hosts.setdefault(host, host) if host.__class__ is str else str(host)
                position += 1
        except HistoryError as error:
            error.event = number - 1
            raise
        except (KeyError, TypeError, AttributeError) as error:
            raise HistoryError(_what_is_wrong(event, error), event=number - 1) from error
        finally:
            self._rows, self._position, self.events = rows, position, number
            history.keyed = keyed

    def _make_room(self, operations: int) -> None:
        """Extend the columns that completions fill in by rows for this many more operations."""
        history = self.history
        missing = self._rows + operations - len(history.returned)
        if missing > 0:
            history.returned.extend([NEVER] * missing)
            history.result.extend([None] * missing)
            history.returned_ns.extend([None] * missing)
            history.node.extend([None] * missing)
            history.status.extend([INFO] * missing)

    def _is_client(self, process: Any) -> bool:
        """Whether a process that is not a whole number is a client, not the nemesis."""
        if process.__class__ is not str or not process:
            what = "an empty name" if process == "" else f"{process!r} ({type(process).__name__})"
            raise HistoryError(f"process must be a whole number or a name, not {what}")
        return process not in NEMESIS_NAMES

    def _function(self, name: Any) -> str:
        """The name of an operation, seen for the first time; in histories without any names they are transactions."""
        if name is None and len(self.history.f) == self._unnamed:
            self._unnamed += 1
            return UNNAMED_FUNCTION
        if name is None:
            raise HistoryError("the event has no 'f', and others have one")
        if name.__class__ is not str or not name:
            raise HistoryError(f"f must be a name, not {name!r}")
        if self._unnamed:
            raise HistoryError(f"the event has f {name!r}, and those before it have none")
        self._functions[name] = name
        return str(name)

    def _check_order(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Check that events with an ``index`` come in its order, and that either all or no events have one."""
        try:
            numbers: list[Any] = list(map(_INDEX, events))
            if self._indexed and numbers == list(range(self._last_index + 1, self._last_index + 1 + len(numbers))):
                self._last_index += len(numbers)
                return
        except (KeyError, TypeError, IndexError):
            if not all(isinstance(event, Mapping) for event in events):
                return  # not a map: reported when the event is taken
            numbers = [event.get("index") for event in events]
        if not numbers:
            return
        if self._indexed is None:
            self._indexed = numbers[0] is not None
            if numbers[0].__class__ is int and (numbers[0] == 1 or not self._contiguous):
                self._last_index = numbers[0] - 1
        if not self._indexed:
            if numbers.count(None) < len(numbers):
                at = next(at for at, number in enumerate(numbers) if number is not None)
                raise HistoryError("the event has an 'index', and those before it have none", event=self.events + at)
            return
        before = [self._last_index, *numbers]
        try:
            in_order = all(map(lt, before, numbers))
        except TypeError:
            in_order = False
        if not in_order or (self._contiguous and numbers[-1] - before[0] != len(numbers)):
            self._name_what_is_out_of_order(before, numbers)
        self._last_index = numbers[-1]

    def _name_what_is_out_of_order(self, before: list[Any], numbers: list[Any]) -> None:
        for at, (last, number) in enumerate(zip(before, numbers, strict=False)):
            event = self.events + at
            if number is None:
                raise HistoryError("the event has no 'index', and those before it have one", event=event)
            if number.__class__ is not int:
                raise HistoryError(f"index must be a whole number, not {number!r}", event=event)
            if number <= last:
                what = f"index {number} comes after index {last}: events must be in order, none twice"
                raise HistoryError(what, event=event)
            missing = number - last - 1
            if not missing or not self._contiguous:
                continue
            what = f"index {number} comes after index {last}: {_events(missing)} missing"
            if last < 0:
                what = f"the first index is {number}: {_events(missing)} missing"
            if not self.lenient:
                raise HistoryError(what, event=event)
            self.history.missing_events += missing
            self.history.note(what)

    def never_completed(self) -> set[int]:
        """The rows of operations that are open now."""
        return set(self._open.values())

    def finish(self) -> History:
        """The history; operations still open stay ``info``."""
        history, rows = self.history, self._rows
        if self._without_value:
            reads = "1 read" if self._without_value == 1 else f"{self._without_value} reads"
            history.note(f"{reads} ended ok without a 'value', which was taken for null")
        for column in (history.returned, history.result, history.returned_ns, history.node, history.status):
            del column[rows:]
        return history


def _events(count: int) -> str:
    return "1 event is" if count == 1 else f"{count} events are"


def _of_another_key(event: Mapping[str, Any], f: str, asked: Any) -> HistoryError:
    of_key = "without a key" if asked is None else f"of key {asked!r}"
    what = f"process {event['process']} completes {f!r} of key {event['key']!r}, but has one {of_key} open"
    return HistoryError(what)


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
