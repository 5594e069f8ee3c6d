"""Compare-and-set registers whose values are all written once: near-linear.

A successful ``cas(u -> v)`` puts v directly after u, so values form chains, each begun by a write or the initial value.
Two successors of one value, or a cycle, are a violation.  Within a chain the order is known; between chains the zones
of the plain register apply, with chains instead of values (Gibbons & Korach 1997, section on read-modify-write).
A crashed write or ``cas`` counts only if its value was seen, by a read or by a ``cas`` that counts.
O(n log n) time, O(n) memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from checker.history import FAIL, INFO, NEVER, OK, History, columns
from checker.linearizability.outcome import NotApplicable, Violation
from checker.linearizability.register import BEFORE_ALL, zone_conflict
from checker.models.registers import CASRegister, is_refused

__all__ = ["check_cas"]


class _Values:
    """Per value: first return and last invocation of its reads; its writer; the value it replaced, if by ``cas``."""

    def __init__(self) -> None:
        self.read_first: dict[Any, int] = {}
        self.read_last: dict[Any, int] = {}
        self.writer: dict[Any, tuple[int, int]] = {}
        self.parent: dict[Any, Any] = {}
        self.child: dict[Any, Any] = {}


def check_cas(history: History, rows: Sequence[int], model: CASRegister) -> Violation | None:
    """A violation, or ``None`` for a linearizable history of a :class:`CASRegister`.

    Raises :class:`NotApplicable` for values written twice, refused compare-and-sets, or values that are not hashable.
    """
    try:
        return _check(history, rows, model)
    except (TypeError, ValueError) as error:
        raise NotApplicable(f"a value does not fit ({error})") from error


def _check(history: History, rows: Sequence[int], model: CASRegister) -> Violation | None:
    none_counts = model.reads_of_none_count()
    values = _Values()
    writer, parent = values.writer, values.parent
    first, last = values.read_first, values.read_last
    crashed: dict[Any, tuple[int, Any]] = {}
    writes = 0
    for f, value, result, status, invoked, returned in zip(
        *columns(history, rows, "f", "value", "result", "status", "invoked", "returned"), strict=True
    ):
        if status == FAIL:
            continue
        if f == "read":
            if status == OK and (none_counts or result is not None):
                last[result] = invoked
                if returned < first.get(result, NEVER):
                    first[result] = returned
            continue
        old: Any = _WRITE
        if f == "cas":
            if status == OK and is_refused(f, result):
                raise NotApplicable("a compare-and-set that was refused says what the register did not hold")
            old, value = value
        writes += 1
        if status == INFO:
            crashed[value] = (invoked, old)
        else:
            writer[value] = (invoked, returned)
            if old is not _WRITE:
                parent[value] = old
        if writes > len(writer) + len(crashed):
            raise NotApplicable("two operations write the same value")
    if not crashed.keys().isdisjoint(writer):
        raise NotApplicable("two operations write the same value")
    if model.initial in writer or model.initial in crashed:
        raise NotApplicable(f"an operation writes the initial value {model.initial!r}")
    _count_observed(values, crashed)
    unsettled = _chains(values, model.initial)
    return None if unsettled is None else Violation(rows=tuple(rows), text="", minimal=False)


_WRITE = object()


def _count_observed(values: _Values, crashed: dict[Any, tuple[int, Any]]) -> None:
    """Include crashed operations whose value was seen; the values that they replaced were then seen, too."""
    wanted = [value for value in crashed if value in values.read_first]
    wanted += [old for old in values.parent.values() if old in crashed]
    while wanted:
        value = wanted.pop()
        if value in values.writer:
            continue
        invoked, old = crashed[value]
        values.writer[value] = (invoked, NEVER)
        if old is not _WRITE:
            values.parent[value] = old
            if old in crashed:
                wanted.append(old)


def _chains(values: _Values, initial: Hashable) -> str | None:
    """What is wrong, or ``None``: values must form chains in real-time order, which do not cross each other."""
    writer, parent, child = values.writer, values.parent, values.child
    value: Any
    for value, old in parent.items():
        if old in child:
            return "two operations replaced one value"
        child[old] = value
        if old not in writer and old != initial:
            return "a value was replaced that nobody wrote"
    if any(seen not in writer and seen != initial for seen in values.read_first):
        return "a value was read that nobody wrote"
    first_return: dict[Any, int] = {}
    last_invoke: dict[Any, int] = {}
    reached = 0
    heads = [head for head in writer if head not in parent]
    if initial in values.read_first or initial in child:
        heads.append(initial)
        reached -= 1
    for head in heads:
        lowest, highest = NEVER, BEFORE_ALL
        value = head
        while True:
            if value in writer:
                reached += 1
                invoked, returned = writer[value]
                if returned < highest:
                    return "an operation returned before one that must precede it was invoked"
                lowest, highest = min(lowest, returned), max(highest, invoked)
            else:
                reached += 1
                lowest = BEFORE_ALL
            if value in values.read_first:
                if values.read_first[value] < highest:
                    return "a read returned before one that must precede it was invoked"
                lowest = min(lowest, values.read_first[value])
                highest = max(highest, values.read_last[value])
            if value not in child:
                break
            value = child[value]
        first_return[head] = lowest
        last_invoke[head] = highest
    if reached < len(writer):
        return "values replace each other in a cycle"
    if zone_conflict(first_return, last_invoke) is not None:
        return "two chains must each precede the other"
    return None
