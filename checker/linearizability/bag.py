"""Unordered queues whose puts all put different values: near-linear.

Values do not order each other, so only three things can be wrong: a value came out that was not there, or twice, or a
take found nothing while at every instant some value was surely inside.  A take of unknown outcome may have taken any
value.  A take can have found nothing at an instant iff nothing that came out for certain is surely inside then, and no
fewer takes of unknown outcome had been invoked than values had been put that never came out: by Hall's theorem those
takes can then be dealt out so that every such instant is free.  O(n log n) time, O(n) memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from checker.history import NEVER, History
from checker.linearizability.fifo import Flows, covered_empty, found_nothing, gather
from checker.linearizability.outcome import Violation
from checker.models.collections import UnorderedQueue

__all__ = ["check_bag"]


def check_bag(history: History, rows: Sequence[int], model: UnorderedQueue) -> Violation | None:
    """A violation, or ``None`` for a linearizable history of an :class:`UnorderedQueue`.

    Raises :class:`NotApplicable` for equal values.
    """
    flows = gather(history, rows, model)
    if isinstance(flows, Violation):
        return flows
    if not flows.crashed_takes or not flows.empties:
        return covered_empty(history, flows, model)
    starts, ends = _free_spans(flows)
    for row, invoked, returned in flows.empties:
        index = bisect_right(starts, returned - 1) - 1
        if index < 0 or ends[index] <= invoked:
            inside = [v for v, put in flows.into.items() if v not in flows.out and put[2] < returned]
            inside += [v for v, took in flows.out.items() if flows.into[v][2] < returned and took[1] > invoked]
            violation = found_nothing(history, flows, model, row, inside)
            crashed = [r for r in rows if history.status[r] == "info" and history.f[r] in model.takes]
            crashed = [r for r in crashed if history.invoked[r] < returned]
            return Violation(rows=tuple(sorted({*violation.rows, *crashed})), text=violation.text, minimal=False)
    return None


def _free_spans(flows: Flows) -> tuple[list[int], list[int]]:
    """Starts and ends of the spans of time, in order, at whose instants the queue can have been empty."""
    changes: list[tuple[int, int, int]] = [(invoked, 0, -1) for invoked in flows.crashed_takes]
    for value, (_, _, returned) in flows.into.items():
        taken = flows.out.get(value)
        if taken is None:
            if returned != NEVER:
                changes.append((returned, 0, 1))
        elif returned < taken[1]:
            changes += [(returned, 1, 0), (taken[1], -1, 0)]
    changes.sort()
    starts: list[int] = [-1]
    ends: list[int] = []
    inside = owed = 0
    free = True
    for position, more_inside, more_owed in changes:
        inside += more_inside
        owed += more_owed
        now = inside == 0 and owed <= 0
        if now != free:
            (starts if now else ends).append(position)
            free = now
    if free:
        ends.append(NEVER)
    return starts, ends
