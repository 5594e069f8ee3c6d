"""The flow of every value through a container, if all puts put different values: when it went in and came out.

Shared by the near-linear engines of queues, stacks and bags: the flows themselves, violations that a single value
shows, and takes that found nothing while at every instant some value was certainly inside.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from checker.history import FAIL, INFO, NEVER, History, columns
from checker.linearizability.outcome import NotApplicable, Violation
from checker.models.base import Model
from checker.models.collections import PUT_NOTHING, FIFOQueue
from checker.words import named_row, short

__all__ = ["Flows", "covered_empty", "covering", "found_nothing", "gather"]


class Flows:
    """When every value went into a container and came out, and the takes that found nothing.

    ``into`` maps each value to (row, invoked, returned) of its put, ``out`` to those of its take.  ``crashed_takes``
    holds the invocations of takes of unknown outcome.  A value that no take is known to have taken is certainly inside
    until ``surely_until``.
    """

    __slots__ = ("crashed_takes", "empties", "into", "out", "surely_until")

    def __init__(self) -> None:
        self.into: dict[Any, tuple[int, int, int]] = {}
        self.out: dict[Any, tuple[int, int, int]] = {}
        self.empties: list[tuple[int, int, int]] = []
        self.crashed_takes: list[int] = []
        self.surely_until = NEVER

    def surely_inside(self) -> dict[Any, tuple[int, int]]:
        """Value -> the span in which it is inside whatever the order; values without such a span are left out."""
        out, until = self.out, self.surely_until
        inside = {}
        for value, (_, _, returned) in self.into.items():
            taken = out.get(value)
            leaves = until if taken is None else taken[1]
            if returned < leaves:
                inside[value] = (returned, leaves)
        return inside


def gather(history: History, rows: Sequence[int], model: Model) -> Flows | Violation:
    """The flows of a history, or a violation that a single value shows.

    Raises :class:`NotApplicable` when two puts put the same value, or values are not hashable, and ValueError when a
    put has no value.
    """
    try:
        return _gather(history, rows, model)
    except TypeError as error:
        raise NotApplicable(f"a value is not hashable ({error})") from error


def _gather(history: History, rows: Sequence[int], model: Model) -> Flows | Violation:
    puts = FIFOQueue.puts
    flows = Flows()
    into, out = flows.into, flows.out
    puts_seen = 0
    for row, f, value, result, status, invoked, returned in zip(
        rows, *columns(history, rows, "f", "value", "result", "status", "invoked", "returned"), strict=True
    ):
        if status == FAIL:
            continue
        if f in puts:
            if value is None:
                raise ValueError(PUT_NOTHING)
            puts_seen += 1
            into[value] = (row, invoked, returned)
        elif status == INFO:
            flows.crashed_takes.append(invoked)
        elif result is None:
            flows.empties.append((row, invoked, returned))
        else:
            if result in out:
                return _twice(history, rows, model, out[result][0], row, result)
            out[result] = (row, invoked, returned)
    if len(into) != puts_seen:
        raise NotApplicable("two operations put the same value")
    for value, (row, _, returned) in out.items():
        source = into.get(value)
        if source is None:
            failed = [r for r in rows if history.f[r] in puts and history.value[r] == value]
            why = "whose put failed" if failed else "which nobody had put in"
            text = f"{named_row(history, row, model)} returned {short(value)}, {why}."
            return Violation(rows=(*failed, row), text=text)
        if returned < source[1]:
            put = named_row(history, source[0], model)
            text = f"{named_row(history, row, model)} returned before {put} was invoked."
            return Violation(rows=(row, source[0]), text=text)
    return flows


def _twice(history: History, rows: Sequence[int], model: Model, first: int, second: int, value: Any) -> Violation:
    puts = [
        r for r in rows if history.f[r] in FIFOQueue.puts and history.value[r] == value and history.status[r] != FAIL
    ]
    if len(puts) > 1:
        raise NotApplicable("two operations put the same value")
    both = f"{named_row(history, first, model)} and {named_row(history, second, model)}"
    text = f"{short(value)} came out twice: {both}."
    return Violation(rows=(*puts, first, second), text=text)


class _Reach:
    """How long from an instant on some value is certainly inside, with spans of values that overlap."""

    def __init__(self, inside: dict[Any, tuple[int, int]]) -> None:
        ordered = sorted(inside.items(), key=lambda item: item[1])
        self._starts = [start for _, (start, _) in ordered]
        self._values = [value for value, _ in ordered]
        self._furthest: list[int] = []
        self._by: list[int] = []
        best, by = -1, -1
        for index, (_, (_, leaves)) in enumerate(ordered):
            if leaves > best:
                best, by = leaves, index
            self._furthest.append(best)
            self._by.append(by)

    def chain(self, start: int, end: int) -> list[Any] | None:
        """Values of which at least one is inside at any time from ``start`` to ``end``, or ``None``."""
        out: list[Any] = []
        while start < end:
            index = bisect_right(self._starts, start) - 1
            if index < 0 or self._furthest[index] <= start:
                return None
            out.append(self._values[self._by[index]])
            start = self._furthest[index]
        return out


def covering(flows: Flows, window: tuple[int, int], values: Iterable[Any]) -> list[Any]:
    """A few ``values`` of which at least one is certainly inside at any time of ``window``; empty if there is a gap."""
    inside = flows.surely_inside()
    return _Reach({value: inside[value] for value in values if value in inside}).chain(*window) or []


def covered_empty(history: History, flows: Flows, model: Model) -> Violation | None:
    """A take that found nothing although at every instant of it some value was certainly inside, or ``None``."""
    if not flows.empties:
        return None
    reach = _Reach(flows.surely_inside())
    for row, invoked, returned in flows.empties:
        chain = reach.chain(invoked, returned)
        if chain is not None:
            return found_nothing(history, flows, model, row, chain)
    return None


def found_nothing(history: History, flows: Flows, model: Model, row: int, chain: Sequence[Any]) -> Violation:
    """The violation of a take that found nothing while the values of ``chain`` were inside."""
    involved = [flows.into[value][0] for value in chain]
    involved += [flows.out[value][0] for value in chain if value in flows.out]
    text = (
        f"{named_row(history, row, model)} found nothing, although at every moment at least one of these was inside: "
        f"{', '.join(map(short, chain[:10]))}."
    )
    return Violation(rows=tuple(sorted({*involved, row})), text=text)
