"""What happened to the messages of an append-only log: lost, duplicated, phantom, reordered, and so on.

Linearizability of a log is one yes or no; this checker counts every kind of anomaly by itself, with examples.

    lost        acknowledged, and later shown to be absent
    duplicated  one value at more offsets than appends of it can have put it
    phantom     a value that nobody appended, all of whose appends failed, or that was read before it was appended; a
                place before the first
    reordered   an append given an offset below what was already there when it was invoked
    divergent   two values seen at one offset
    gap         a read at an offset below the tail that came back empty
    stale       a tail below what had been acknowledged or shown before the operation began

An append that was acknowledged without its offset is lost where every place below the end is known to hold another
message.  ``unread`` (acknowledged and not shown to be absent, but never read) and ``recovered`` (outcome unknown, but
there) are counted without being wrong.  ``unlooked`` are those of the unread that nobody looked for: no read or tail
that tells where the queue ends began after their acknowledgement, and none counted them.  They leave the verdict open.
One pass in event order; linear time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

from checker.history import FAIL, INFO, OK, History, HistoryError, Operation
from checker.linearizability.budget import Budget, LimitReached
from checker.values import exact, holds_boolean
from checker.verdict import Result, Verdict, Witness
from checker.words import named_row, short

__all__ = ["ANOMALIES", "check_log"]

#: Kinds of anomaly, gravest first: the first one found is the one the verdict's sentence is about.
ANOMALIES = ("lost", "divergent", "duplicated", "phantom", "reordered", "stale", "gap")

#: What is counted of every queue without being wrong.
COUNTED = ("acknowledged", "observed", "unread", "unlooked", "recovered", "reads")
#: Examples kept of each kind; counts are exact.
MAX_EXAMPLES = 5
#: Memory this checker takes per operation at most, beside the messages read; 70 to 180 were measured.  What is really
#: taken is watched where this would be too much.
BYTES_PER_OPERATION = 500


#: Stands for an offset that nobody has shown anything at.
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
        """What there is now, whatever is added to this one later."""
        other = _Anomalies()
        other.counts, other.first = dict(self.counts), dict(self.first)
        other.examples = {kind: list(examples) for kind, examples in self.examples.items()}
        return other

    def wants(self, kind: str) -> bool:
        """Whether another example of this kind would be kept (its words are only made then)."""
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
    or when acknowledged messages were never looked for: nothing showed them, and no read or tail that tells where
    their queue ends counts them, or began after their acknowledgement.  A test ends with a read of every queue.  Raises
    :class:`HistoryError` for results of another form.
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
            # Offsets like 0.0, and messages that are lists or maps: rare enough to be looked for only now.
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
    reason += f", {totals['unlooked']} of them not looked for since they were acknowledged{where}"
    return Result(verdict=Verdict.UNKNOWN, stats=stats, reason=reason)


@dataclass
class _Counted:
    """What was counted in all queues, and the first keys of those in which nobody looked for some."""

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
    """What is wrong, what was counted in the queues that were checked, and the limit that ended it, if one did."""
    anomalies, counted = _Anomalies(), _Counted()
    for key, rows in groups.items():
        stopped = budget.exhausted()
        if stopped:
            return anomalies, counted, stopped
        before = anomalies.copy()
        try:
            with budget.watched(len(rows) * BYTES_PER_OPERATION):
                counts = _Queue(history, recorded, key, rows, anomalies).check()
        except LimitReached as limit:  # anywhere: this queue's anomalies may be half written down
            return before, counted, str(limit)
        counted.add(key, counts)
    return anomalies, counted, None


def _uniform(history: History) -> History:
    """The history with whole numbers for offsets and the tails of reads, and messages that can be hashed."""
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
    """An offset, which JSON may have as 3.0."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


class _Queue:
    """One queue's history."""

    def __init__(
        self, history: History, recorded: History, key: Any, rows: Sequence[int], anomalies: _Anomalies
    ) -> None:
        self._history = history
        self._recorded = recorded
        self._key = key
        self._rows = rows
        self._anomalies = anomalies
        self._content: list[Any] = []
        #: What lies further than operations can have put it: of a log that was not empty, or of a wrong answer.
        self._beyond: dict[int, Any] = {}
        self._holder: dict[int, int] = {}
        self._place: dict[Any, int] = {}
        self._appended: dict[Any, int] = {}
        #: The appends of each value that several of them append.
        self._repeated: dict[Any, list[int]] = {}
        #: At how many places each of them may be, and at how many it was seen.
        self._allowed: dict[Any, int] = {}
        self._copies: dict[Any, int] = {}
        self._seen: set[Any] = set()
        self._divergent: set[tuple[int, Any]] = set()
        self._duplicated: set[tuple[int, Any]] = set()

    def check(self) -> dict[str, int]:
        history = self._history
        f, status, returned = history.f, history.status, history.returned
        appends = [row for row in self._rows if f[row] == "append"]
        self._appended = {history.value[row]: row for row in appends}
        if len(self._appended) < len(appends):
            self._find_repeated(appends)
        done = sorted((row for row in self._rows if status[row] == OK), key=returned.__getitem__)
        acked = 0
        reads = 0
        for row in done:
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
        recovered = sum(self._is_recovered(value) for value in self._seen)
        return {
            "acknowledged": acked,
            "observed": len(self._seen),
            "unread": unread,
            "unlooked": unlooked,
            "recovered": recovered,
            "reads": reads,
        }

    def _find_repeated(self, appends: list[int]) -> None:
        """A value that is appended again, as by a client that tries again, may be at as many places."""
        by_value: dict[Any, list[int]] = {}
        for row in appends:
            by_value.setdefault(self._history.value[row], []).append(row)
        self._repeated = {value: rows for value, rows in by_value.items() if len(rows) > 1}
        for value, rows in self._repeated.items():
            # Of those that can have put it there the one that began first, for it allows most.
            self._appended[value] = min(rows, key=lambda row: (self._history.status[row] == FAIL, row))
            self._allowed[value] = sum(self._history.status[row] != FAIL for row in rows)

    def _is_recovered(self, value: Any) -> bool:
        """Whether a value is there though none of its appends was acknowledged."""
        row = self._appended.get(value)
        if row is None or self._history.status[row] != INFO:
            return False
        return not any(self._history.status[other] == OK for other in self._repeated.get(value, ()))

    def _put(self, row: int, offset: int, value: Any) -> None:
        """Someone says that ``offset`` holds ``value``."""
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
                    f"offset {offset} holds {short(known)} by {self._named(self._holder[offset])}, "
                    f"but {short(value)} by {self._named(row)}"
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
                    f"{short(value)} is at offset {other} by {self._named(holder)} and at offset "
                    f"{offset} by {self._named(row)}"
                ),
                value=value,
                offsets=[other, offset],
            )

    def _is_once_too_often(self, value: Any) -> bool:
        """Whether a value that is appended several times is at one more place than that."""
        self._copies[value] = self._copies.get(value, 1) + 1
        return self._copies[value] > self._allowed[value]

    def _named(self, row: int) -> str:
        return named_row(self._recorded, row)

    def _say(self, kind: str, rows: tuple[int, ...], text: Any, **details: Any) -> None:
        self._anomalies.add(kind, self._key, rows, text() if self._anomalies.wants(kind) else "", **details)

    def _say_before_first(self, row: int) -> None:
        self._say("phantom", (row,), lambda: f"{self._named(row)} tells of a place before the first")

    def _read(self, row: int, result: Mapping[str, Any]) -> None:
        history = self._history
        start, messages, tail = result["offset"], result["messages"], result.get("tail")
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
        """Whatever began after the log was seen to hold n messages must see, or be placed after, those n."""
        history = self._history
        f, results, invoked, returned = history.f, history.result, history.invoked, history.returned
        reached, by, at, count = 0, -1, 0, len(done)
        for row in sorted(done, key=invoked.__getitem__):
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

        Returns how many of the others nobody has read, and how many of these nobody has looked for.
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
        for row in done:
            if f[row] != "append":
                continue
            value, offset = history.value[row], _offset(results[row])
            # Where its place is not known it is gone if every place is known to hold another.
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
        """Acknowledged appends whose message nobody saw, each with the first later read that has another there."""
        history = self._history
        waiting: dict[int, list[int]] = {}
        for row in reversed(done):  # so that those that returned first are last, and are taken off first
            if history.f[row] == "append" and history.value[row] not in self._seen:
                waiting.setdefault(_offset(history.result[row]), []).append(row)
        found: dict[int, int] = {}
        for reader in self._rows:
            if history.f[reader] != "read" or history.status[reader] != OK:
                continue
            start, messages = history.result[reader]["offset"], history.result[reader]["messages"]
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
                f"{short(value)} was acknowledged {where} to {self._named(row)}, but is absent "
                f"for {self._named(shower)}"
            ),
            value=value,
            offset=offset,
            tail=tail,
        )


def _offset(result: Any) -> Any:
    """The offset that an append was acknowledged with; ``None`` where it was without one."""
    return None if result is None else result[0]


def _shown(f: str, result: Any) -> int | None:
    """How many messages the log held at least, by this result."""
    if f == "append":
        offset = _offset(result)
        return None if offset is None else int(offset) + 1
    if f == "read" and result.get("tail") is None and result["messages"]:
        return int(result["offset"]) + len(result["messages"])
    return _tail(f, result)


def _tail(f: str, result: Any) -> int | None:
    """Where the log ended, by this result of a read or of a tail."""
    if f == "tail":
        return None if result is None else int(result)
    tail = result.get("tail")
    return None if tail is None else int(tail)
