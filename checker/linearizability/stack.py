"""Stacks whose pushes all push different values: near-linear.

In the spirit of Lee & Mathur, "Efficient decrease-and-conquer linearizability monitoring" (OOPSLA 2025): remove one
value after another that can be removed without changing the answer, until nothing is left or nothing can be removed.

A value is certainly inside from the return of its push to the invocation of its pop.  If that span is empty, push and
pop can be adjacent and affect no other value.  While no value is certainly inside, the stack may as well be empty, so
that the rest splits into stretches that are covered throughout.  In such a stretch the stack is never empty, hence some
value is at its bottom all the time: it was pushed before any push of the stretch had to be done, and popped after every
pop could begin.  Any value that fits will do; without it the stretch splits again.  A stretch in which none fits is a
violation.  A pop that found nothing needs an instant at which nothing is certainly inside.

O(n log n) time, O(n) memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from checker.history import NEVER, History
from checker.linearizability.crashed_takes import with_crashed_takes
from checker.linearizability.flows import Flows, covered_empty, gather
from checker.linearizability.outcome import Violation
from checker.linearizability.trees import Cover, MaxTree
from checker.models.collections import Stack

__all__ = ["check_stack"]

#: Invocation of the pop of a value that never came out: after everything, in any order.
_END = NEVER - 1

#: Invoked and returned of the push, invoked and returned of the pop, row of the push, row of the pop or -1.
_Value = tuple[int, int, int, int, int, int]


def check_stack(history: History, rows: Sequence[int], model: Stack) -> Violation | None:
    """A violation, or ``None`` for a linearizable history of a :class:`Stack`.

    Raises :class:`NotApplicable` for equal values, or if finding out what crashed pops have taken needs too many tests.
    """
    flows = gather(history, rows, model)
    if isinstance(flows, Violation):
        return flows
    return with_crashed_takes(history, flows, lambda some: _nesting(some) or covered_empty(history, some, model))


def _nesting(flows: Flows) -> Violation | None:
    """A violation if pushes and pops cannot be properly nested, else ``None``."""
    values: list[_Value] = []
    for value, (row, invoked, returned) in flows.into.items():
        taken = flows.out.get(value)
        if taken is None:
            if returned < flows.surely_until:
                values.append((invoked, returned, min(flows.surely_until, _END), NEVER, row, -1))
        elif returned < taken[1]:
            values.append((invoked, returned, taken[1], taken[2], row, taken[0]))
    if not values:
        return None
    values.sort(key=lambda value: value[1])
    stretch = _stuck_stretch(values)
    if stretch is None:
        return None
    involved = [row for value in stretch for row in value[4:] if row >= 0]
    return Violation(rows=tuple(sorted(involved)), text="", minimal=False)


def _stuck_stretch(values: list[_Value]) -> list[_Value] | None:
    """The values of a stretch in which none of them can be at the bottom, or ``None``.

    Times are numbered by rank among the ends of the certain intervals, so that interval i covers pieces of time from
    ``starts[i]`` up to, not including, ``ends[i]``; a stretch is a range of pieces, and of values by their starts.
    """
    times = sorted({time for value in values for time in (value[1], value[2])})
    rank = {time: place for place, time in enumerate(times)}
    starts = [rank[value[1]] for value in values]
    ends = [rank[value[2]] for value in values]
    cover = Cover(len(times) - 1, zip(starts, ends, strict=True))
    at_piece: list[int] = [-1] * len(times)
    for index, start in enumerate(starts):
        at_piece[start] = index
    left = [True] * len(values)
    early = MaxTree([-value[0] for value in values], least=-NEVER)
    late = MaxTree([-1] * len(values), least=-2)
    count = len(values)
    # First value that starts at or after each piece: turns a range of pieces into a range of values.
    following = [count] * (len(times) + 1)
    for place in range(len(times) - 1, -1, -1):
        following[place] = at_piece[place] if at_piece[place] >= 0 else following[place + 1]
    work = cover.stretches(0, len(times) - 1)
    while work:
        first_piece, last_piece = work.pop()
        low, high = following[first_piece], following[last_piece]
        begins, finishes = times[first_piece], times[last_piece]
        while True:
            index = early.argmax(low, high)
            if -early.value(index) >= begins:
                break
            late.set(index, values[index][3])
            early.set(index, -NEVER)
        bottom = late.argmax(low, high)
        if late.value(bottom) <= finishes:
            return [values[index] for index in range(low, high) if left[index]]
        late.set(bottom, -1)
        left[bottom] = False
        cover.remove(starts[bottom], ends[bottom])
        work.extend(cover.stretches(first_piece, last_piece))
    return None
