"""Anomalies of the messages of an append-only log: lost, duplicated, phantom, reordered, and so on.

Linearizability of a log is a single yes or no; this checker counts every kind of anomaly separately, with examples.

    lost        acknowledged, and later shown to be absent
    duplicated  a value at more offsets than it may have been appended to
    phantom     a value that nobody appended, all of whose appends failed, or that was read before its append was
                invoked; a negative offset
    reordered   an append that got an offset below what the log already held when it was invoked
    divergent   two values seen at one offset
    gap         an empty read at an offset below the tail
    stale       a tail below what had been acknowledged or shown before the operation began

An append acknowledged without an offset is lost if every offset below the end is known to hold another message.
``unread`` (acknowledged and not shown to be absent, but never read) and ``recovered`` (outcome unknown, but present)
are counted without being wrong.  ``unlooked`` are unread messages that nobody looked for: no read or tail that shows
where the queue ends began after their acknowledgement, and none shows an end beyond them.  They leave the verdict open.
One pass in event order; linear time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import index
from typing import Any, TypeVar

from checker.history import FAIL, INFO, OK, History, HistoryError, Operation
from checker.linearizability.budget import Budget, LimitReached
from checker.values import exact, holds_boolean
from checker.verdict import Result, Verdict, Witness
from checker.words import named_row, short

__all__ = ["ANOMALIES", "check_log"]

#: Kinds of anomaly, gravest first: the verdict's sentence is about the first kind that occurs.
ANOMALIES = ("lost", "divergent", "duplicated", "phantom", "reordered", "stale", "gap")

#: What is counted for every queue without being wrong.
COUNTED = ("acknowledged", "observed", "unread", "unlooked", "recovered", "reads")
#: Examples kept of each kind; counts are exact.
MAX_EXAMPLES = 5
#: Upper bound on this checker's memory per operation, without the messages read; 70 to 180 were measured.  Actual use
#: is watched if this bound exceeds the limit.
BYTES_PER_OPERATION = 500
#: Operations and read messages between two looks at the time limit: some milliseconds of work.
STEPS_PER_LOOK = 4096

_T = TypeVar("_T")

#: Stands for an offset at which nothing has been seen.
_ABSENT = object()


class _Anomalies:
    """Counts and the first few examples of every kind."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(ANOMALIES, 0)
        self.examples: dict[str, list[dict[str, Any]]] = {}
        self.first: dict[str, tuple[Any, tuple[int, ...], str]] = {}

    def add(self, kind: str, key: Any, rows: tuple[int, ...], text: str, **details: Any) -> None:
        self.counts[kind] += 1
        examples = self.examples.setdefault(kind, [])
        if len(examples) < MAX_EXAMPLES:
            where = {} if key is None else {"key": key}
            examples.append({**where, **details, "text": text})
            self.first.setdefault(kind, (key, rows, text))

    def copy(self) -> _Anomalies:
        """An independent copy of the current state."""
        other = _Anomalies()
        other.counts, other.first = dict(self.counts), dict(self.first)
        other.examples = {kind: list(examples) for kind, examples in self.examples.items()}
        return other

    def wants(self, kind: str) -> bool:
        """Whether another example of this kind would be kept (its text is built only then)."""
        return len(self.examples.get(kind, ())) < MAX_EXAMPLES


def check_log(
    history: History | Iterable[Mapping[str, Any]] | Iterable[Operation],
    *,
    timeout_s: float | None = None,
    memory_mb: float | None = None,
) -> Result:
    """Check a history of the ``log`` workload: ``append``, ``read`` and ``tail`` (see ``checker.models.Log``).

    Every key is a queue.  ``stats`` holds ``counts`` and ``examples`` by kind, and totals.  The verdict is invalid if
    anything was lost, duplicated, phantom, reordered, divergent, a gap or stale.  It is unknown when a budget ran out,
    or when acknowledged messages were never looked for: nothing showed them, and no read or tail that shows where
    their queue ends began after their acknowledgement, or shows an end beyond them.  A test should therefore end with a
    read of every queue.  Raises :class:`HistoryError` for results of another form.
    """
    budget = Budget(timeout_s=timeout_s, memory_mb=memory_mb)
    history = recorded = History.of(history)
    if history.booleans is not False and (holds_boolean(history.value) or holds_boolean(history.result)):
        values, results = list(map(exact, history.value)), list(map(exact, history.result))
        history = replace(history, value=values, result=results)
    groups = history.rows_by_key()
    try:
        try:
            anomalies, counted, stopped = _check_queues(history, recorded, groups, budget)
        except TypeError:
            # Offsets like 0.0, and messages that are lists or maps, are rare enough to be handled only on failure.
            history = _uniform(history)
            anomalies, counted, stopped = _check_queues(history, recorded, groups, budget)
    except (TypeError, AttributeError, KeyError, IndexError, ValueError) as error:
        raise HistoryError(f"this is not a history of the log workload: {error!r}") from error
    totals = counted.totals
    stats = {
        "model": "log",
        "operations": len(history),
        "keys": len(groups),
        "engines": {"log": counted.queues},
        "counts": anomalies.counts,
        "examples": anomalies.examples,
        **totals,
        "search_s": round(budget.elapsed_s(), 6),
    }
    if history.problems:
        stats["problems"] = history.problems[:MAX_EXAMPLES]
    for kind in ANOMALIES:
        if anomalies.counts[kind]:
            key, rows, text = anomalies.first[kind]
            witness = Witness(operations=recorded.operations(rows), text=text, key=key)
            found = ", ".join(f"{count} {name}" for name, count in anomalies.counts.items() if count)
            return Result(verdict=Verdict.INVALID, witness=witness, stats=stats, reason=f"{text} (In all: {found}.)")
    if stopped:
        reason = f"{stopped}; {counted.queues} of {len(groups)} queues checked"
        return Result(verdict=Verdict.UNKNOWN, stats=stats, reason=reason)
    reason = f"{totals['acknowledged']} acknowledged messages, {totals['observed']} seen, none lost or out of place"
    if totals["unread"]:
        reason += f"; {totals['unread']} were never read"
    if not totals["unlooked"]:
        return Result(verdict=Verdict.VALID, stats=stats, reason=reason)
    keys = list(map(short, counted.unlooked_keys))
    where = f" (of key {', '.join(keys[:MAX_EXAMPLES])}{', ...' if len(keys) > MAX_EXAMPLES else ''})" if keys else ""
    reason += f", {totals['unlooked']} of them not covered by any read since they were acknowledged{where}"
    return Result(verdict=Verdict.UNKNOWN, stats=stats, reason=reason)


@dataclass
class _Counted:
    """Totals over all queues, and the first keys of queues with ``unlooked`` messages."""

    queues: int = 0
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    unlooked_keys: list[Any] = field(default_factory=list)

    def add(self, key: Any, counts: Mapping[str, int]) -> None:
        self.queues += 1
        for name in COUNTED:
            self.totals[name] += counts[name]
        if counts["unlooked"] and key is not None and len(self.unlooked_keys) <= MAX_EXAMPLES:
            self.unlooked_keys.append(key)


def _check_queues(
    history: History, recorded: History, groups: Mapping[Any, Sequence[int]], budget: Budget
) -> tuple[_Anomalies, _Counted, str | None]:
    """Anomalies and counts of the queues that were checked, and the limit that ended the check, if one did."""
    anomalies, counted = _Anomalies(), _Counted()
    for key, rows in groups.items():
        stopped = budget.exhausted()
        if stopped:
            return anomalies, counted, stopped
        before = anomalies.copy()
        try:
            with budget.watched(len(rows) * BYTES_PER_OPERATION):
                counts = _Queue(history, recorded, key, rows, anomalies, budget).check()
        except LimitReached as limit:  # this queue's anomalies may be incomplete
            return before, counted, str(limit)
        counted.add(key, counts)
    return anomalies, counted, None


def _uniform(history: History) -> History:
    """The history with integers as offsets and tails of reads, and with hashable messages."""
    values, results = list(history.value), list(history.result)
    for row, f in enumerate(history.f):
        result = results[row]
        if f == "append":
            values[row] = exact(values[row])
            if history.status[row] == OK and result is not None:
                results[row] = [_whole(result[0]), *result[1:]]
        elif f == "read" and history.status[row] == OK:
            offsets = {name: _whole(result[name]) for name in ("offset", "tail") if name in result}
            results[row] = {**result, **offsets, "messages": list(map(exact, result["messages"]))}
    return replace(history, value=values, result=results)


def _whole(number: Any) -> Any:
    """An offset as an integer; JSON may contain it as 3.0."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


class _Queue:
    """One queue's history."""

    def __init__(
        self,
        history: History,
        recorded: History,
        key: Any,
        rows: Sequence[int],
        anomalies: _Anomalies,
        budget: Budget,
    ) -> None:
        self._history = history
        self._recorded = recorded
        self._key = key
        self._rows = rows
        self._anomalies = anomalies
        self._budget = budget
        self._steps = 0
        self._content: list[Any] = []
        #: Values at offsets too large for the number of operations: the log was not empty, or a response is wrong.
        self._beyond: dict[int, Any] = {}
        self._holder: dict[int, int] = {}
        self._place: dict[Any, int] = {}
        self._appended: dict[Any, int] = {}
        #: The appends of each value that was appended more than once.
        self._repeated: dict[Any, list[int]] = {}
        #: At how many offsets each of these values may be, and at how many it was seen.
        self._allowed: dict[Any, int] = {}
        self._copies: dict[Any, int] = {}
        self._seen: set[Any] = set()
        self._divergent: set[tuple[int, Any]] = set()
        self._duplicated: set[tuple[int, Any]] = set()

    def check(self) -> dict[str, int]:
        """The queue's counts.  Raises :class:`LimitReached` once the time limit has passed."""
        history = self._history
        f, status, returned = history.f, history.status, history.returned
        appends = [row for row in self._rows if f[row] == "append"]
        self._appended = {history.value[row]: row for row in appends}
        if len(self._appended) < len(appends):
            self._find_repeated(appends)
        done = sorted((row for row in self._rows if status[row] == OK), key=returned.__getitem__)
        acked = 0
        reads = 0
        for row in self._in_time(done):
            name = f[row]
            if name == "append":
                acked += 1
                offset = _offset(history.result[row])
                if offset is not None:
                    self._put(row, offset, history.value[row])
            elif name == "read":
                reads += 1
                self._read(row, history.result[row])
            elif name == "tail":
                reads += 1
                if (history.result[row] or 0) < 0:
                    self._say_before_first(row)
            else:
                raise ValueError(f"operation {name!r} is none of append, read, tail")
        self._order(done)
        unread, unlooked = self._losses(done)
        recovered = sum(self._is_recovered(value) for value in self._in_time(self._seen))
        return {
            "acknowledged": acked,
            "observed": len(self._seen),
            "unread": unread,
            "unlooked": unlooked,
            "recovered": recovered,
            "reads": reads,
        }

    def _in_time(self, items: Iterable[_T]) -> Iterator[_T]:
        """The items; raises :class:`LimitReached` between two of them once the time limit has passed."""
        remaining = iter(items)
        while chunk := tuple(islice(remaining, STEPS_PER_LOOK)):
            self._spend(len(chunk))
            yield from chunk

    def _spend(self, steps: int) -> None:
        """Count steps of work, and look at the time limit every `STEPS_PER_LOOK` steps."""
        self._steps += steps
        if self._steps >= STEPS_PER_LOOK:
            self._steps = 0
            if late := self._budget.late():
                raise LimitReached(late)

    def _find_repeated(self, appends: list[int]) -> None:
        """Find values that were appended repeatedly, as by client retries; each may be at that many offsets."""
        by_value: dict[Any, list[int]] = {}
        for row in self._in_time(appends):
            by_value.setdefault(self._history.value[row], []).append(row)
        self._repeated = {value: rows for value, rows in by_value.items() if len(rows) > 1}
        for value, rows in self._repeated.items():
            # Of the appends that did not fail, take the one that began first, since it allows most.
            self._appended[value] = min(rows, key=lambda row: (self._history.status[row] == FAIL, row))
            self._allowed[value] = sum(self._history.status[row] != FAIL for row in rows)

    def _is_recovered(self, value: Any) -> bool:
        """Whether a value is present although none of its appends was acknowledged."""
        row = self._appended.get(value)
        if row is None or self._history.status[row] != INFO:
            return False
        return not any(self._history.status[other] == OK for other in self._repeated.get(value, ()))

    def _put(self, row: int, offset: int, value: Any) -> None:
        """Record that an operation shows ``value`` at ``offset``."""
        content: Any = self._content
        if offset >= len(self._rows):
            content, offset = self._beyond, index(offset)
            content.setdefault(offset, _ABSENT)
        elif offset >= len(content):
            content.extend([_ABSENT] * (offset + 1 - len(content)))
        elif offset < 0:
            self._say_before_first(row)
            return
        known = content[offset]
        if known is _ABSENT:
            content[offset] = value
            self._holder[offset] = row
        elif known != value and (offset, value) not in self._divergent:
            self._divergent.add((offset, value))
            self._say(
                "divergent",
                (self._holder[offset], row),
                lambda: (
                    f"offset {offset} holds {short(known)} according to {self._named(self._holder[offset])}, "
                    f"but {short(value)} according to {self._named(row)}"
                ),
                offset=offset,
                values=[known, value],
            )
        other = self._place.setdefault(value, offset)
        if other != offset and (offset, value) not in self._duplicated:
            self._duplicated.add((offset, value))
            if value in self._repeated and not self._is_once_too_often(value):
                return
            holder = self._holder[other]
            self._say(
                "duplicated",
                (holder, row),
                lambda: (
                    f"{short(value)} is at offset {other} according to {self._named(holder)} and at offset "
                    f"{offset} according to {self._named(row)}"
                ),
                value=value,
                offsets=[other, offset],
            )

    def _is_once_too_often(self, value: Any) -> bool:
        """Count one more offset of a value that was appended repeatedly; whether these are too many now."""
        self._copies[value] = self._copies.get(value, 1) + 1
        return self._copies[value] > self._allowed[value]

    def _named(self, row: int) -> str:
        return named_row(self._recorded, row)

    def _say(self, kind: str, rows: tuple[int, ...], text: Any, **details: Any) -> None:
        self._anomalies.add(kind, self._key, rows, text() if self._anomalies.wants(kind) else "", **details)

    def _say_before_first(self, row: int) -> None:
        self._say("phantom", (row,), lambda: f"{self._named(row)} reports an offset or a tail below zero")

    def _read(self, row: int, result: Mapping[str, Any]) -> None:
        history = self._history
        start, messages, tail = result["offset"], result["messages"], result.get("tail")
        self._spend(len(messages))
        if (start < 0 and messages) or (tail is not None and tail < 0):
            self._say_before_first(row)
        if not messages:
            asked = history.value[row]
            wanted = asked.get("max", 1) if isinstance(asked, Mapping) else 1
            if tail is not None and 0 <= start < tail and wanted:
                self._say(
                    "gap",
                    (row,),
                    lambda: f"{self._named(row)} found nothing at offset {start}, below the tail {tail}",
                    offset=start,
                    tail=tail,
                )
            return
        if tail is not None and start + len(messages) > tail:
            self._say(
                "phantom",
                (row,),
                lambda: f"{self._named(row)} returned messages beyond the tail {tail} that it reports",
                tail=tail,
            )
        if start < 0 or self._content[start : start + len(messages)] != messages:
            for offset, value in enumerate(messages, start):
                if offset >= 0 and self._content[offset : offset + 1] != [value]:
                    self._put(row, offset, value)
        for value in messages:
            if value not in self._seen:
                self._seen.add(value)
                self._first_seen(row, value)

    def _first_seen(self, row: int, value: Any) -> None:
        history = self._history
        source = self._appended.get(value)
        if source is None:
            self._say(
                "phantom",
                (row,),
                lambda: f"{self._named(row)} shows {short(value)}, which nobody appended",
                value=value,
            )
        elif history.status[source] == FAIL:
            self._say(
                "phantom",
                (source, row),
                lambda: f"{self._named(row)} shows {short(value)}, but {self._named(source)} failed",
                value=value,
            )
        elif history.invoked[source] > history.returned[row]:
            self._say(
                "phantom",
                (row, source),
                lambda: f"{self._named(row)} returned before {self._named(source)} was invoked",
                value=value,
            )

    def _order(self, done: list[int]) -> None:
        """An operation that began after the log was seen to hold n messages must see these, or be placed after them."""
        history = self._history
        f, results, invoked, returned = history.f, history.result, history.invoked, history.returned
        reached, by, at, count = 0, -1, 0, len(done)
        for row in self._in_time(sorted(done, key=invoked.__getitem__)):
            start = invoked[row]
            while at < count and returned[done[at]] < start:
                earlier = done[at]
                at += 1
                shown = _shown(f[earlier], results[earlier])
                if shown is not None and shown > reached:
                    reached, by = shown, earlier
            if f[row] == "append":
                offset = _offset(results[row])
                if offset is not None and offset < reached:
                    self._say_order("reordered", by, row, f"offset {offset}", reached)
            else:
                tail = _tail(f[row], results[row])
                if tail is not None and tail < reached:
                    self._say_order("stale", by, row, f"a tail of {tail}", reached)

    def _say_order(self, kind: str, by: int, row: int, got: str, reached: int) -> None:
        self._say(
            kind,
            (by, row),
            lambda: (
                f"{self._named(row)} got {got}, although {self._named(by)} had returned before it "
                f"was invoked and showed at least {reached} messages"
            ),
            reached=reached,
        )

    def _losses(self, done: list[int]) -> tuple[int, int]:
        """Find acknowledged messages that the end of the history shows to be gone.

        Returns how many of the others were never read, and how many of these nobody looked for.
        """
        history = self._history
        f, results, invoked, returned = history.f, history.result, history.invoked, history.returned
        views = [row for row in done if f[row] != "append" and _tail(f[row], results[row]) is not None]
        last = max(views, key=invoked.__getitem__, default=-1)
        last_begun, tail = (invoked[last], _tail(f[last], results[last]) or 0) if views else (-1, 0)
        replacers = self._replacers(done) if self._divergent else {}
        holes = (at for at, held in enumerate(self._content) if held is _ABSENT)
        are_all_known = tail <= next(holes, len(self._content))
        unread = 0
        behind = []
        for row in self._in_time(done):
            if f[row] != "append":
                continue
            value, offset = history.value[row], _offset(results[row])
            # A message without a known offset is gone if every offset is known to hold another message.
            gone = returned[row] < last_begun and (
                offset >= tail if offset is not None else are_all_known and value not in self._place
            )
            if gone or row in replacers:
                self._say_lost(row, last if gone else replacers[row], offset, value, tail)
            elif value not in self._seen:
                unread += 1
                if returned[row] > last_begun:
                    behind.append(offset)
        counted = max((_tail(f[row], results[row]) or 0 for row in views), default=0) if behind else 0
        return unread, sum(offset is None or offset >= counted for offset in behind)

    def _replacers(self, done: list[int]) -> dict[int, int]:
        """Acknowledged append whose message was never seen -> the first later read of another one at its offset."""
        history = self._history
        waiting: dict[int, list[int]] = {}
        for row in self._in_time(reversed(done)):  # so that appends that returned first are popped first
            if history.f[row] == "append" and history.value[row] not in self._seen:
                waiting.setdefault(_offset(history.result[row]), []).append(row)
        found: dict[int, int] = {}
        for reader in self._in_time(self._rows):
            if history.f[reader] != "read" or history.status[reader] != OK:
                continue
            start, messages = history.result[reader]["offset"], history.result[reader]["messages"]
            self._spend(len(messages))
            for offset in range(start, start + len(messages)):
                rows = waiting.get(offset, [])
                while rows and history.returned[rows[-1]] < history.invoked[reader]:
                    found[rows.pop()] = reader
        return found

    def _say_lost(self, row: int, shower: int, offset: int | None, value: Any, tail: int) -> None:
        where = "without an offset" if offset is None else f"at offset {offset}"
        self._say(
            "lost",
            (row, shower),
            lambda: (
                f"{short(value)} was acknowledged {where} to {self._named(row)}, but is missing "
                f"from {self._named(shower)}"
            ),
            value=value,
            offset=offset,
            tail=tail,
        )


def _offset(result: Any) -> Any:
    """The offset with which an append was acknowledged; ``None`` if without one."""
    return None if result is None else result[0]


def _shown(f: str, result: Any) -> int | None:
    """The least number of messages that the log held, according to this result; None if it does not tell."""
    if f == "append":
        offset = _offset(result)
        return None if offset is None else int(offset) + 1
    if f == "read" and result.get("tail") is None and result["messages"]:
        return int(result["offset"]) + len(result["messages"])
    return _tail(f, result)


def _tail(f: str, result: Any) -> int | None:
    """Where the log ended, according to this result of a read or a tail; None if it does not tell."""
    if f == "tail":
        return None if result is None else int(result)
    tail = result.get("tail")
    return None if tail is None else int(tail)
