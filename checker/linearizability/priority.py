"""Priority queues whose inserts all insert different values: near-linear.

After Lee & Mathur, "Efficient decrease-and-conquer linearizability monitoring" (OOPSLA 2025).  A value is certainly
inside from the return of its insert to the invocation of its extract.  The value with the lowest priority affects no
other, and can be extracted only while nothing else is inside; the same holds value by value.  So an extract needs an
instant, after the invocation of the insert, at which no value of higher priority is certainly inside.  That suffices,
since at such an instant each of these values can be outside: its insert takes effect later, or its extract earlier,
which never conflicts with others.  An extract that found nothing needs an instant at which nothing is certainly inside.

O(n log n) time for sorting, then almost linear; O(n) memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from checker.history import History
from checker.linearizability.crashed_takes import with_crashed_takes
from checker.linearizability.flows import Flows, covered_empty, covering, gather
from checker.linearizability.outcome import NotApplicable, Violation
from checker.models.collections import PriorityQueue
from checker.words import named_row, short

__all__ = ["check_priority"]


def check_priority(history: History, rows: Sequence[int], model: PriorityQueue) -> Violation | None:
    """A violation, or ``None`` for a linearizable history of a :class:`PriorityQueue`.

    Raises :class:`NotApplicable` for equal values, for values that do not compare, or if finding out what crashed
    extracts have taken needs too many tests.
    """
    try:
        flows = gather(history, rows, model)
        if isinstance(flows, Violation):
            return flows
        return with_crashed_takes(
            history, flows, lambda some: _precedence(history, some, model) or covered_empty(history, some, model)
        )
    except TypeError as error:
        raise NotApplicable(f"values are not hashable or do not compare ({error})") from error


def _precedence(history: History, flows: Flows, model: PriorityQueue) -> Violation | None:
    inside = flows.surely_inside()
    wanted = {value: (max(taken[1], flows.into[value][1]), taken[2]) for value, taken in flows.out.items()}
    times = sorted({time for start, end in inside.values() for time in (start, end)})
    rank = {time: place for place, time in enumerate(times)}
    #: For every interval between neighbouring times, the next one not known to be covered (union-find, path halving).
    bare = list(range(len(times) + 1))

    def next_bare(piece: int) -> int:
        while bare[piece] != piece:
            bare[piece] = bare[bare[piece]]
            piece = bare[piece]
        return piece

    starts = _ranks_before(times, [window[0] for window in wanted.values()])
    values: list[Any] = sorted(flows.into, reverse=model.largest_first)
    for value in values:
        window = wanted.get(value)
        if window is not None:
            start, end = window
            piece = starts[start]
            if piece >= 0:
                piece = next_bare(piece)
                if piece < len(times) and times[piece] >= end:
                    return _overlooked(history, flows, model, value, window)
        if value in inside:
            start, end = inside[value]
            piece, stop = next_bare(rank[start]), rank[end]
            while piece < stop:
                bare[piece] = piece + 1
                piece = next_bare(piece + 1)
    return None


def _ranks_before(times: list[int], wanted: list[int]) -> dict[int, int]:
    """For each wanted time, the index of the last of ``times`` not after it, or -1."""
    out: dict[int, int] = {}
    place = -1
    for time in sorted(wanted):
        while place + 1 < len(times) and times[place + 1] <= time:
            place += 1
        out[time] = place
    return out


def _overlooked(history: History, flows: Flows, model: PriorityQueue, value: Any, window: tuple[int, int]) -> Violation:
    """The violation: a value was extracted although some value with a higher priority was inside all the while."""
    before = [v for v in flows.into if (v > value if model.largest_first else v < value)]
    chain = covering(flows, window, before)
    row = flows.out[value][0]
    involved = [flows.into[v][0] for v in chain] + [flows.out[v][0] for v in chain if v in flows.out]
    text = (
        f"{named_row(history, row, model)}, although at every moment at least one of these, which come first, was "
        "inside: "
        f"{', '.join(map(short, chain[:10]))}."
    )
    return Violation(rows=tuple(sorted({*involved, row, flows.into[value][0]})), text=text)
