"""Trace validation by brute force: every order of the events, and every hidden step.  Exponential; for small traces."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from checker.trace.events import Event, Trace
from checker.trace.model import TraceModel

__all__ = ["explained_by_force"]


def explained_by_force(model: TraceModel, traces: Sequence[Trace]) -> bool:
    """Whether some order of all events, which keeps that of each trace and the order that they name by ``after``, is
    one that ``model`` explains.

    Goes breadth-first, one event at a time, from all states that the events before can have led to.  It uses ``init``,
    ``next`` and ``hidden`` of the model alone.
    """
    sources = [list(trace.events) for trace in traces]
    places = {event.ident: (of, at) for of, events in enumerate(sources) for at, event in enumerate(events)}
    nodes = sorted({event.node for events in sources for event in events})
    reached: set[tuple[tuple[int, ...], Hashable]] = {
        (tuple(0 for _ in sources), state) for start in model.init(nodes) for state in _with_hidden(model, start)
    }
    for _ in range(sum(map(len, sources))):
        reached = {
            (after, state)
            for positions, before in reached
            for after, event in _possible(sources, places, positions)
            for left in model.next(before, event)
            for state in _with_hidden(model, left)
        }
    return bool(reached)


def _possible(
    sources: Sequence[Sequence[Event]], places: dict[Any, tuple[int, int]], positions: tuple[int, ...]
) -> list[tuple[tuple[int, ...], Event]]:
    """The events that may come next, each with the positions behind it."""
    found = []
    for of, events in enumerate(sources):
        if positions[of] == len(events):
            continue
        event = events[positions[of]]
        earlier = [places[ident] for ident in event.after if ident in places]
        if all(at < positions[other] for other, at in earlier):
            found.append(((*positions[:of], positions[of] + 1, *positions[of + 1 :]), event))
    return found


def _with_hidden(model: TraceModel, state: Hashable) -> set[Hashable]:
    """A state, and all that hidden steps lead to from it."""
    known, new = {state}, [state]
    while new:
        for after in model.hidden(new.pop()):
            if after not in known:
                known.add(after)
                new.append(after)
    return known
