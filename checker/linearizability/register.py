"""Registers whose writes all write different values: near-linear.

After Gibbons & Korach, "Testing shared memories" (SIAM J. Comput. 26(4), 1997).  Take each value with its write and
its reads.  F is the first return among them, S the last invocation.  A value with F < S must be the register's value
all the time from F to S (a forward zone); one with S < F only at some point in between (a backward zone).  The history
is linearizable iff every read returns after its write's invocation, forward zones are pairwise disjoint, and no
backward zone lies inside a forward one.  O(n log n) time, O(n) memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Any

from checker.history import FAIL, NEVER, OK, History, columns
from checker.linearizability.outcome import NotApplicable, Violation
from checker.models.registers import Register, is_refused
from checker.values import FALSE
from checker.verdict import Edge
from checker.words import named_row, short

__all__ = ["check_register", "impossible_read", "zone_conflict"]

#: Position of the write that gave the register its initial value: before every event.
BEFORE_ALL = -1


def check_register(history: History, rows: Sequence[int], model: Register) -> Violation | None:
    """A violation, or ``None`` for a linearizable history of a :class:`Register`.

    Raises :class:`NotApplicable` when two writes write one value, a write writes the initial value, or values are not
    hashable.
    """
    try:
        return _check(history, rows, model.initial, model.reads_of_none_count())
    except TypeError as error:
        raise NotApplicable(f"a value is not hashable ({error})") from error


def _check(history: History, rows: Sequence[int], initial: Hashable, none_counts: bool) -> Violation | None:
    first_return: dict[Any, int] = {}
    last_invoke: dict[Any, int] = {}
    written: dict[Any, int] = {}
    crashed: dict[Any, int] = {}
    failed: set[Any] = set()
    writes = 0
    get = first_return.get
    for f, value, result, status, invoked, returned in zip(
        *columns(history, rows, "f", "value", "result", "status", "invoked", "returned"), strict=True
    ):
        if status is OK or status == OK:
            if f == "read":
                value = result
            elif f == "write":
                written[value] = invoked
                writes += 1
            else:
                raise NotApplicable(f"operation {f!r} is neither read nor write")
            last_invoke[value] = invoked
            if returned < get(value, NEVER):
                first_return[value] = returned
        elif f == "write":
            if status == FAIL:
                failed.add(value)
            else:
                crashed[value] = invoked
                writes += 1
    if not none_counts and None in first_return:
        if None in written or None in crashed:
            # Reads of None say nothing, but its write does.
            telling = [row for row in rows if history.f[row] != "read" or history.result[row] is not None]
            return _check(history, telling, initial, True)
        del first_return[None], last_invoke[None]
    if len(written) + len(crashed) != writes or not crashed.keys().isdisjoint(written):
        raise NotApplicable("two writes write the same value")
    if initial in written or initial in crashed:
        raise NotApplicable(f"a write writes the initial value {initial!r}")

    for value, invoked in crashed.items():
        if value in first_return:
            written[value] = invoked
            if invoked > last_invoke[value]:
                last_invoke[value] = invoked
    if initial in first_return:
        first_return[initial] = BEFORE_ALL
        written[initial] = BEFORE_ALL
    if len(first_return) != len(written):
        value = next(v for v in first_return if v not in written)
        return _phantom(history, rows, value, value in failed)
    for value, invoked in written.items():
        if first_return[value] < invoked:
            return _from_future(history, rows, value)
    conflict = zone_conflict(first_return, last_invoke)
    return None if conflict is None else _conflict(history, rows, initial, *conflict)


def impossible_read(history: History, rows: Sequence[int], model: Register) -> Violation | None:
    """A read of a value that nothing invoked before its return could have written, whatever else happened.

    Values may be written any number of times, by writes or compare-and-sets.  Linear time.
    """
    fs, values, results, statuses, invoked, returned = columns(
        history, rows, "f", "value", "result", "status", "invoked", "returned"
    )
    none_counts = model.reads_of_none_count()
    earliest: dict[Any, int] = {model.initial: BEFORE_ALL}
    try:
        for f, value, result, status, begun in zip(fs, values, results, statuses, invoked, strict=True):
            if f == "read" or status == FAIL:
                continue
            if f != "cas":
                earliest.setdefault(value, begun)
            elif result is not False and result is not FALSE:
                earliest.setdefault(value[1], begun)
        begins = earliest.get
        for row, f, seen, status, done in zip(rows, fs, results, statuses, returned, strict=True):
            if f == "read" and status == OK and begins(seen, NEVER) > done and (none_counts or seen is not None):
                text = (
                    f"{named_row(history, row)} returned {short(seen)}, but no write of that value had been invoked "
                    "by then."
                )
                later = [r for r in rows if history.status[r] != FAIL and _writes(history, r, seen)]
                return Violation(rows=(row, *later[:1]), text=text)
    except TypeError:
        return None
    return None


def _writes(history: History, row: int, value: Any) -> bool:
    asked = history.value[row]
    if history.f[row] == "read" or is_refused(history.f[row], history.result[row]):
        return False
    return bool((asked[1] if history.f[row] == "cas" else asked) == value)


def zone_conflict(first_return: dict[Any, int], last_invoke: dict[Any, int]) -> tuple[Any, Any] | None:
    """Two clusters, each of which must come before the other, or ``None``.

    A cluster must precede another iff its first return comes before the other's last invocation.
    """
    forward_starts: list[int] = []
    owner: dict[int, Any] = {}
    backward: list[tuple[int, int]] = []
    add_forward, add_backward = forward_starts.append, backward.append
    for value, first in first_return.items():
        last = last_invoke[value]
        if first < last:
            owner[first] = value
            add_forward(first)
        else:
            add_backward((last, first))
    forward_starts.sort()
    ends = [last_invoke[owner[start]] for start in forward_starts]
    for index, start in enumerate(islice(forward_starts, 1, None)):
        if start < ends[index]:
            return owner[forward_starts[index]], owner[start]
    if not ends:
        return None
    for low, high in backward:
        index = bisect_left(forward_starts, low) - 1
        if index >= 0 and high < ends[index]:
            inside = next(v for v, first in first_return.items() if first == high)
            return owner[forward_starts[index]], inside
    return None


def _reads_of(history: History, rows: Sequence[int], value: Any) -> list[int]:
    return [
        row for row in rows if history.f[row] == "read" and history.status[row] == OK and history.result[row] == value
    ]


def _write_of(history: History, rows: Sequence[int], value: Any) -> int | None:
    for row in rows:
        if history.f[row] == "write" and history.value[row] == value and history.status[row] != FAIL:
            return row
    return None


def _phantom(history: History, rows: Sequence[int], value: Any, failed: bool) -> Violation:
    read = _reads_of(history, rows, value)[0]
    evidence = [read]
    text = f"{named_row(history, read)} returned {short(value)}, which nobody had written"
    if failed:
        write = next(r for r in rows if history.f[r] == "write" and history.value[r] == value)
        evidence.insert(0, write)
        text = f"{named_row(history, read)} returned {short(value)}, but {named_row(history, write)} failed"
    return Violation(rows=tuple(evidence), text=text + ".")


def _from_future(history: History, rows: Sequence[int], value: Any) -> Violation:
    read = min(_reads_of(history, rows, value), key=history.returned.__getitem__)
    write = _write_of(history, rows, value)
    assert write is not None
    return Violation(
        rows=(read, write),
        text=f"{named_row(history, read)} returned before {named_row(history, write)} was invoked.",
        edges=(
            Edge(source=0, target=1, kind="realtime", reason="the read returned before the write was invoked"),
            Edge(source=1, target=0, kind="value", reason=f"the read saw {short(value)}, so the write came before it"),
        ),
    )


def _conflict(history: History, rows: Sequence[int], initial: Hashable, a: Any, b: Any) -> Violation:
    """The violation: each of two values must come before the other; names the operations that show it."""
    for old, new in ((a, b), (b, a)):
        stale = _stale(history, rows, old, new)
        if stale is not None:
            return stale
    evidence: list[int] = []
    ends: dict[Any, tuple[int | None, int]] = {}
    for value in (a, b):
        mine = _reads_of(history, rows, value)
        write = _write_of(history, rows, value)
        if write is not None:
            mine.append(write)
        last = max(mine, key=history.invoked.__getitem__)
        first = None if value == initial else min(mine, key=history.returned.__getitem__)
        ends[value] = (first, last)
        evidence.extend(row for row in (write, first, last) if row is not None)
    chosen = tuple(sorted(set(evidence), key=history.invoked.__getitem__))
    edges, sentences = [], []
    for before, after in ((a, b), (b, a)):
        first, last = ends[before][0], ends[after][1]
        if first is None:
            sentences.append(f"{short(before)} is the initial value, so it comes before {short(after)}")
            continue
        reason = f"{named_row(history, first)} returned before {named_row(history, last)} was invoked"
        sentences.append(f"{short(before)} must come before {short(after)}, because {reason}")
        edges.append(Edge(source=chosen.index(first), target=chosen.index(last), kind="realtime", reason=reason))
    text = (
        f"{sentences[0]}; but {sentences[1]}. No value is written twice, so the register cannot return to an earlier "
        "value."
    )
    return Violation(rows=chosen, text=text, edges=tuple(edges))


def _stale(history: History, rows: Sequence[int], old: Any, new: Any) -> Violation | None:
    """The simplest form of a conflict: a read of a value that a completed write had already replaced.

    A value that was read and that nobody wrote is the initial one here; others were reported as phantoms before.
    """
    replaced, replacing = _write_of(history, rows, old), _write_of(history, rows, new)
    if replacing is None or history.returned[replacing] == NEVER:
        return None
    if replaced is not None and history.returned[replaced] > history.invoked[replacing]:
        return None
    late = [read for read in _reads_of(history, rows, old) if history.invoked[read] > history.returned[replacing]]
    if not late:
        return None
    read = min(late, key=history.invoked.__getitem__)
    chosen = (replacing, read) if replaced is None else (replaced, replacing, read)
    at = {row: position for position, row in enumerate(chosen)}
    edges = [
        Edge(source=at[replacing], target=at[read], kind="realtime", reason="the write returned before the read began"),
        Edge(
            source=at[read], target=at[replacing], kind="value",
            reason=f"the read saw {short(old)}, so it came before {short(new)} was written",
        ),
    ]  # fmt: skip
    before = f"; {short(old)} is the initial value"
    if replaced is not None:
        before = f", which itself began after {named_row(history, replaced)} had returned"
        reason = f"{short(old)} was written before the write of {short(new)} began"
        edges.append(Edge(source=at[replaced], target=at[replacing], kind="realtime", reason=reason))
    text = f"{named_row(history, read)} was stale: it began after {named_row(history, replacing)} had returned{before}."
    return Violation(rows=chosen, text=text, edges=tuple(edges))
