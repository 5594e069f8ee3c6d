"""FIFO queues whose enqueues all carry different values: near-linear.

After Henzinger, Sezgin & Vafeiadis, "Aspect-oriented linearizability proofs" (CONCUR 2013) and Bouajjani et al., "On
reducing linearizability to state reachability" (ICALP 2015): the history is linearizable iff none of these occurs: a
value dequeued that was not in the queue, or twice; two values enqueued one after the other and dequeued in the opposite
order (a value never dequeued counts as dequeued last); a dequeue that found the queue empty while at every instant some
value was certainly in it.  Dequeues of unknown outcome can have taken overtaken values, and values that were inside
before the queue was empty (:mod:`checker.linearizability.crashed_takes`).  O(n log n) time, O(n) memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, compress, count, repeat
from operator import gt, lt, not_
from typing import Any

from checker.history import NEVER, OK, History, columns
from checker.linearizability.crashed_takes import never_empty
from checker.linearizability.flows import Flows, covered_empty, gather
from checker.linearizability.outcome import Violation
from checker.models.collections import FIFOQueue
from checker.verdict import Edge
from checker.words import named_row, short

__all__ = ["check_fifo"]

_MODEL = FIFOQueue()
#: Pairs of puts, per put of the history, that the fast path compares before it leaves a history to the slow path.
LOOKS_PER_PUT = 8


def check_fifo(history: History, rows: Sequence[int], model: FIFOQueue) -> Violation | None:
    """A violation, or ``None`` for a linearizable history of a :class:`FIFOQueue`.

    Raises :class:`NotApplicable` for equal values.
    """
    try:
        if _surely_fine(history, rows):
            return None
    except (TypeError, KeyError):
        pass  # reported below, if it matters
    flows = gather(history, rows, model)
    if isinstance(flows, Violation):
        return flows
    violation = _order(history, flows)
    if violation is not None or not flows.empties:
        return violation
    if flows.crashed_takes:
        return never_empty(history, rows, flows, model)
    return covered_empty(history, flows, model)


def _surely_fine(history: History, rows: Sequence[int]) -> bool:
    """The fast path for histories without anything wrong, failed or crashed: the same rules, vectorised.

    ``False`` only means that the slow path has to decide.
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
    # A value that never came out gets index -1: a fictitious take that never returns, appended at the end.
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
    """Whether no value overtook another; the arguments are columns of puts in order of invocation.

    Only values that left before one put earlier are examined, and only up to a limit; past it the answer is False.
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
    """Whether every span of ``empties`` has an instant at which no value is certainly inside."""
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
        named = (put, put_other, take_other)
        involved = {*named, *(flows.into[v][0] for v in earlier), *_crashed_rows(history, flows, deadline)}
        text = f"{first}, but {second}."
        return Violation(rows=tuple(sorted(involved)), text=text, minimal=not earlier, named=named)
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
