"""FIFO queues whose enqueues all carry different values: near-linear.

After Henzinger, Sezgin & Vafeiadis, "Aspect-oriented linearizability proofs" (CONCUR 2013) and Bouajjani et al., "On
reducing linearizability to state reachability" (ICALP 2015): the history is linearizable iff none of these occurs: a
value dequeued that was not there to dequeue, or twice; two values enqueued one after the other and dequeued the other
way round (a value never dequeued counts as dequeued last); a dequeue that found the queue empty while at every instant
some value was surely in it.  O(n log n) time, O(n) memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, compress, count, repeat
from operator import gt, lt, not_
from typing import Any

from checker.history import FAIL, INFO, NEVER, OK, History, columns
from checker.linearizability.outcome import NotApplicable, Violation
from checker.models.base import Model
from checker.models.collections import PUT_NOTHING, FIFOQueue
from checker.verdict import Edge
from checker.words import named_row, short

__all__ = ["Flows", "check_fifo", "covered_empty", "covering", "found_nothing", "gather", "with_crashed_takes"]

_MODEL = FIFOQueue()
#: Pairs of puts that the quick way compares, for each put there is, before it leaves a history to the long one.
LOOKS_PER_PUT = 8


class Flows:
    """Every value's way through a container: when it went in and out; plus the takes that found nothing.

    ``into`` maps each value to (row, invoked, returned) of its put; ``out`` to those of its take.  ``crashed_takes``
    holds the invocations of takes of unknown outcome.  What no take is known to have taken is surely inside until
    ``surely_until``.
    """

    __slots__ = ("crashed_takes", "empties", "into", "out", "surely_until")

    def __init__(self) -> None:
        self.into: dict[Any, tuple[int, int, int]] = {}
        self.out: dict[Any, tuple[int, int, int]] = {}
        self.empties: list[tuple[int, int, int]] = []
        self.crashed_takes: list[int] = []
        self.surely_until = NEVER

    def surely_inside(self) -> dict[Any, tuple[int, int]]:
        """From when to when every value is inside, whatever the order; values for which that is never are left out."""
        out, until = self.out, self.surely_until
        inside = {}
        for value, (_, _, returned) in self.into.items():
            taken = out.get(value)
            leaves = until if taken is None else taken[1]
            if returned < leaves:
                inside[value] = (returned, leaves)
        return inside


def with_crashed_takes(flows: Flows, test: Callable[[Flows], Violation | None]) -> Violation | None:
    """What ``test`` says of flows some takes of which have no known outcome.

    Such takes may not have happened: without them, no violation means none at all.  If one remains although everything
    that never came out may have gone as soon as the first of them began, there is one.  Raises :class:`NotApplicable`
    where it is in between.
    """
    violation = test(flows)
    if violation is None or not flows.crashed_takes:
        return violation
    flows.surely_until = min(flows.crashed_takes)
    violation = test(flows)
    if violation is None:
        raise NotApplicable("it matters what takes of unknown outcome have taken")
    return violation


def gather(history: History, rows: Sequence[int], model: Model) -> Flows | Violation:
    """The flows of a history, or the violation that one value alone shows.

    Raises :class:`NotApplicable` when two puts put the same value, or values are not hashable, and ValueError when one
    puts nothing.
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
            text = f"{named_row(history, row, model)} gave {short(value)}, {why}."
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


def check_fifo(history: History, rows: Sequence[int], model: FIFOQueue) -> Violation | None:
    """A violation, or ``None`` for a linearizable history of a :class:`FIFOQueue`.

    Raises :class:`NotApplicable` for equal values, or where it matters whether crashed dequeues had emptied the queue.
    """
    try:
        if _surely_fine(history, rows):
            return None
    except (TypeError, KeyError):
        pass  # said below, where it matters
    flows = gather(history, rows, model)
    if isinstance(flows, Violation):
        return flows
    violation = _order(history, flows, flows.crashed_takes)
    if violation is None and flows.empties:
        if flows.crashed_takes:
            # Where order alone needs crashed dequeues, so that without them nothing can be said, the rest still may.
            return with_crashed_takes(
                flows,
                lambda some: (
                    (_order(history, some, ()) if some.surely_until == NEVER else None)
                    or covered_empty(history, some, model)
                ),
            )
        violation = covered_empty(history, flows, model)
    return violation


def _surely_fine(history: History, rows: Sequence[int]) -> bool:
    """The quick way for a history without anything wrong, failed or crashed: the same rules, column by column.

    ``False`` only means "look closer".
    """
    fs, values, results, statuses, invoked, returned = columns(
        history, rows, "f", "value", "result", "status", "invoked", "returned"
    )
    if statuses.count(OK) != len(statuses):
        return False
    is_put = list(map(FIFOQueue.puts.__contains__, fs))
    put, starts, put_by = (list(compress(column, is_put)) for column in (values, invoked, returned))
    is_take = list(map(not_, is_put))
    came, took_at, gone_by = (list(compress(column, is_take)) for column in (results, invoked, returned))
    if None in put:
        return False
    take_of = dict(zip(came, count()))
    # What was put in by some operation and came out by none leaves by the one that never was, at the end.
    takes = list(map(take_of.get, put, repeat(-1)))
    found_nothing = came.count(None)
    values_out = len(came) - found_nothing
    if len(take_of) < values_out + bool(found_nothing) or len(set(put)) < len(put):
        return False
    if takes.count(-1) != len(put) - values_out:
        return False
    took_at.append(NEVER)
    gone_by.append(NEVER)
    leaves_from = list(map(took_at.__getitem__, takes))
    leaves_by = list(map(gone_by.__getitem__, takes))
    if any(map(gt, starts, leaves_by)) or not _in_order(starts, put_by, leaves_from, leaves_by):
        return False
    empties = [(took_at[at], gone_by[at]) for at, value in enumerate(came) if value is None] if found_nothing else []
    return not empties or _all_free(empties, put_by, leaves_from)


def _in_order(
    starts: Sequence[int], put_by: Sequence[int], leaves_from: Sequence[int], leaves_by: Sequence[int]
) -> bool:
    """Whether no value overtook another: columns of puts in order of invocation.

    Only what left before the end of something put in earlier is looked at, and not for long.
    """
    latest = list(accumulate(leaves_from, max))
    suspects = compress(range(len(starts)), map(lt, leaves_by, latest))
    looks = LOOKS_PER_PUT * len(starts)
    for later in suspects:
        began, left = starts[later], leaves_by[later]
        earlier = later - 1
        while earlier >= 0 and latest[earlier] > left:
            if put_by[earlier] < began and leaves_from[earlier] > left:
                return False
            earlier -= 1
            looks -= 1
        if looks < 0:
            return False
    return True


def _all_free(empties: Sequence[tuple[int, int]], entered_by: Sequence[int], leaves_from: Sequence[int]) -> bool:
    """Whether in every span of ``empties`` there is an instant at which no value is surely inside."""
    is_inside = list(map(lt, entered_by, leaves_from))
    enter = sorted(compress(entered_by, is_inside))
    leave = sorted(compress(leaves_from, is_inside))
    for start, end in empties:
        left = bisect_right(leave, start)
        while bisect_right(enter, start) > left:
            if left == len(leave) or leave[left] >= end:
                return False
            start = leave[left]
            left = bisect_right(leave, start)
    return True


def _order(history: History, flows: Flows, crashed_takes: Sequence[int]) -> Violation | None:
    into, out = flows.into, flows.out
    starts: list[int] = []
    leaves: list[int] = []
    get_out = out.get
    for value, (_, invoked, _) in into.items():
        starts.append(invoked)
        taken = get_out(value)
        leaves.append(NEVER if taken is None else taken[2])
    leaves.append(NEVER)
    leaves.reverse()
    soonest = list(accumulate(leaves, min))
    soonest.reverse()
    due: list[tuple[int, Any]] = []
    for value, (_, _, returned) in into.items():
        deadline = soonest[bisect_right(starts, returned)]
        if deadline == NEVER:
            continue
        taken = get_out(value)
        if taken is None:
            due.append((deadline, value))
        elif deadline < taken[1]:
            return _overtaken(history, flows, value, deadline)
    spare = sorted(crashed_takes)
    due.sort(key=lambda pair: pair[0])
    for index, (deadline, value) in enumerate(due):
        if index >= len(spare) or spare[index] > deadline:
            return _overtaken(history, flows, value, deadline, crashed=len(spare), earlier=[v for _, v in due[:index]])
    return None


def _overtaken(
    history: History, flows: Flows, value: Any, deadline: int, *, crashed: int = 0, earlier: Sequence[Any] = ()
) -> Violation:
    other = next(v for v, (_, _, returned) in flows.out.items() if returned == deadline)
    put, put_other = flows.into[value][0], flows.into[other][0]
    take_other = flows.out[other][0]
    taken = flows.out.get(value)
    first = f"{named_row(history, put, _MODEL)} returned before {named_row(history, put_other, _MODEL)} was invoked"
    if taken is None:
        second = f"{short(other)} came out by {named_row(history, take_other, _MODEL)} and {short(value)} never did"
        if crashed:
            second += " (the dequeues of unknown outcome cannot have taken every value due by then)"
        chosen = [put, put_other, take_other]
        involved = [r for v in earlier for r in (flows.into[v][0],)]
        crashed_rows = _crashed_rows(history, flows, deadline)
        chosen += involved + crashed_rows
        return Violation(rows=tuple(sorted(set(chosen))), text=f"{first}, but {second}.", minimal=not earlier)
    second = (
        f"{named_row(history, take_other, _MODEL)} returned before {named_row(history, taken[0], _MODEL)} was invoked"
    )
    rows = (put, put_other, take_other, taken[0])
    edges = (
        Edge(source=0, target=1, kind="realtime", reason=first),
        Edge(source=2, target=3, kind="realtime", reason=second),
    )
    return Violation(rows=rows, text=f"{first}, but {second}: first in was not first out.", edges=edges)


def _crashed_rows(history: History, flows: Flows, deadline: int) -> list[int]:
    times = {invoked for invoked in flows.crashed_takes if invoked < deadline}
    return [row for row in range(len(history)) if times and history.invoked[row] in times]


class _Reach:
    """How far values that are surely inside, one taking over from another, lead from an instant."""

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
        """Values of which one at least is inside at any time from ``start`` to ``end``, or ``None``."""
        out: list[Any] = []
        while start < end:
            index = bisect_right(self._starts, start) - 1
            if index < 0 or self._furthest[index] <= start:
                return None
            out.append(self._values[self._by[index]])
            start = self._furthest[index]
        return out


def covering(flows: Flows, window: tuple[int, int], values: Iterable[Any]) -> list[Any]:
    """Few of ``values``, one at least of which is surely inside at any time of ``window``; none if there is a gap."""
    inside = flows.surely_inside()
    return _Reach({value: inside[value] for value in values if value in inside}).chain(*window) or []


def covered_empty(history: History, flows: Flows, model: Model) -> Violation | None:
    """A take that found nothing although at every instant of it some value was surely inside, or ``None``."""
    if not flows.empties:
        return None
    reach = _Reach(flows.surely_inside())
    for row, invoked, returned in flows.empties:
        chain = reach.chain(invoked, returned)
        if chain is not None:
            return found_nothing(history, flows, model, row, chain)
    return None


def found_nothing(history: History, flows: Flows, model: Model, row: int, chain: Sequence[Any]) -> Violation:
    """The words for a take that found nothing while the values of ``chain`` were inside."""
    involved = [flows.into[value][0] for value in chain]
    involved += [flows.out[value][0] for value in chain if value in flows.out]
    text = (
        f"{named_row(history, row, model)} found nothing, although all the while something was inside: "
        f"{', '.join(map(short, chain[:10]))}."
    )
    return Violation(rows=tuple(sorted({*involved, row})), text=text)
