"""FIFO queues whose enqueues all carry different values: near-linear.

After Henzinger, Sezgin & Vafeiadis, "Aspect-oriented linearizability proofs" (CONCUR 2013) and Bouajjani et al., "On
reducing linearizability to state reachability" (ICALP 2015): the history is linearizable iff none of these occurs: a
value dequeued that was not there to dequeue, or twice; two values enqueued one after the other and dequeued the other
way round (a value never dequeued counts as dequeued last); a dequeue that found the queue empty while at every instant
some value was surely in it.  O(n log n) time, O(n) memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from checker.history import FAIL, INFO, NEVER, History
from checker.linearizability.outcome import NotApplicable, Violation
from checker.linearizability.register import columns
from checker.models.collections import FIFOQueue
from checker.verdict import Edge
from checker.words import named_row, short

__all__ = ["Flows", "check_fifo", "covered_empty", "gather"]


class Flows:
    """Every value's way through a container: when it went in and out; plus the takes that found nothing.

    ``into`` maps each value to (row, invoked, returned) of its put; ``out`` to those of its take.
    """

    __slots__ = ("crashed_takes", "empties", "into", "out")

    def __init__(self) -> None:
        self.into: dict[Any, tuple[int, int, int]] = {}
        self.out: dict[Any, tuple[int, int, int]] = {}
        self.empties: list[tuple[int, int, int]] = []
        self.crashed_takes: list[int] = []


def gather(history: History, rows: Sequence[int]) -> Flows | Violation:
    """The flows of a history, or the violation that one value alone shows.

    Raises :class:`NotApplicable` when two puts put the same value.
    """
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
            puts_seen += 1
            into[value] = (row, invoked, returned)
        elif status == INFO:
            flows.crashed_takes.append(invoked)
        elif result is None:
            flows.empties.append((row, invoked, returned))
        else:
            if result in out:
                return _twice(history, rows, out[result][0], row, result)
            out[result] = (row, invoked, returned)
    if len(into) != puts_seen:
        raise NotApplicable("two operations put the same value")
    for value, (row, _, returned) in out.items():
        source = into.get(value)
        if source is None:
            failed = [r for r in rows if history.f[r] in puts and history.value[r] == value]
            why = "whose put failed" if failed else "which nobody had put in"
            text = f"{named_row(history, row, _MODEL)} gave {short(value)}, {why}."
            return Violation(rows=(*failed, row), text=text)
        if returned < source[1]:
            put = named_row(history, source[0], _MODEL)
            text = f"{named_row(history, row, _MODEL)} returned before {put} was invoked."
            return Violation(rows=(row, source[0]), text=text)
    return flows


_MODEL = FIFOQueue()


def _twice(history: History, rows: Sequence[int], first: int, second: int, value: Any) -> Violation:
    puts = [
        r for r in rows if history.f[r] in FIFOQueue.puts and history.value[r] == value and history.status[r] != FAIL
    ]
    if len(puts) > 1:
        raise NotApplicable("two operations put the same value")
    both = f"{named_row(history, first, _MODEL)} and {named_row(history, second, _MODEL)}"
    text = f"{short(value)} came out twice: {both}."
    return Violation(rows=(*puts, first, second), text=text)


def check_fifo(history: History, rows: Sequence[int], model: FIFOQueue) -> Violation | None:
    """A violation, or ``None`` for a linearizable history of a :class:`FIFOQueue`.

    Raises :class:`NotApplicable` for equal values, or crashed dequeues together with dequeues that found it empty.
    """
    try:
        flows = gather(history, rows)
    except TypeError as error:
        raise NotApplicable(f"a value is not hashable ({error})") from error
    if isinstance(flows, Violation):
        return flows
    if flows.crashed_takes and flows.empties:
        raise NotApplicable("crashed dequeues together with dequeues that found the queue empty")
    violation = _order(history, flows)
    if violation is None and flows.empties:
        violation = covered_empty(history, flows)
    return violation


def _order(history: History, flows: Flows) -> Violation | None:
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
    spare = sorted(flows.crashed_takes)
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


def covered_empty(history: History, flows: Flows) -> Violation | None:
    """A take that found nothing although at every instant of it some value was surely inside, or ``None``."""
    inside: list[tuple[int, int, Any]] = []
    for value, (_, _, returned) in flows.into.items():
        taken = flows.out.get(value)
        leaves = NEVER if taken is None else taken[1]
        if returned < leaves:
            inside.append((returned, leaves, value))
    inside.sort(key=lambda interval: interval[0])
    starts = [interval[0] for interval in inside]
    furthest: list[int] = []
    by: list[int] = []
    for index, (_, leaves, _) in enumerate(inside):
        if not furthest or leaves > furthest[-1]:
            furthest.append(leaves)
            by.append(index)
        else:
            furthest.append(furthest[-1])
            by.append(by[-1])
    for row, invoked, returned in flows.empties:
        reach = invoked
        chain: list[Any] = []
        while reach < returned:
            index = bisect_right(starts, reach) - 1
            if index < 0 or furthest[index] <= reach:
                break
            chain.append(inside[by[index]][2])
            reach = furthest[index]
        else:
            involved = [flows.into[value][0] for value in chain]
            involved += [flows.out[value][0] for value in chain if value in flows.out]
            text = (
                f"{named_row(history, row, _MODEL)} found nothing, although all the while something was inside: "
                f"{', '.join(map(short, chain[:10]))}."
            )
            return Violation(rows=tuple(sorted({*involved, row})), text=text)
    return None
