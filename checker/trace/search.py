"""Searches an order of the replicas' events that a model explains: depth-first, with steps that nobody logged.

The order of one replica's events is known.  Between replicas only that is known which the traces say themselves
(``after``) and which the model demands: an entry is received after it was sent.  Times are hints, since clocks are
among the things that a test breaks.  So the search tries interleavings, and among the events that come next those with
the earliest time first; in traces of a correct system the first attempt nearly always succeeds.

Three things keep it from trying everything.  A pair of positions and state that was left without success is not entered
again.  An event that commutes with everything else (``TraceModel.commutes``) is taken at once, and nothing is tried in
its place.  An event that can never be explained (``TraceModel.never``) ends a branch before anything else is tried
there.  CCF validates its traces against TLA+ in the same depth-first manner (Howard and others, NSDI 2025).

What ends at a limit is ``unknown``, as is every verdict on a trace of which lines are missing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from checker.models.base import ModelError
from checker.trace.events import Event, Trace
from checker.trace.model import TraceModel
from checker.verdict import Result, Verdict, bounded

__all__ = ["MAX_STATES", "check_traces"]

MAX_STATES = 200_000
"""Default limit of remembered states: with small states some 200 MB."""

SHOWN_EVENTS = 6
"""Explained events that an explanation repeats before the one that fails: the last ones, and the last ones of the same
replica."""

_CLOCK_EVERY = 256

Positions = tuple[int, ...]
Path = tuple[Any, int] | None
"""The sources of the events so far, linked backwards; -1 stands for a hidden step."""


class _LimitReached(Exception):
    """The text says which limit."""


@dataclass(slots=True)
class _Node:
    """A point of the search: how many events of each source are explained, and the state that they lead to."""

    positions: Positions
    state: Any
    path: Path


def check_traces(
    model: TraceModel, traces: Sequence[Trace], *, max_states: int = MAX_STATES, timeout_s: float | None = 60.0
) -> Result:
    """Whether some order of all events, which keeps that of each trace, is one that ``model`` explains.

    The result's ``stats`` has ``events``, ``explained`` (of the longest explained prefix) and ``states`` (remembered).
    Unless the verdict is valid they also have ``explained_last``, the events at the end of that prefix,
    ``then_impossible``, those that could come next and the reason against each, and ``state``, the state there in
    words.

    Raises ModelError if a state is not hashable, and what the model raises.
    """
    search = _Search(model, traces, max_states=max_states, timeout_s=timeout_s)
    problems = [f"{trace.node}: {trace.problem}" for trace in traces if trace.problem] + search.problems
    if not search.total:
        return Result(verdict=Verdict.UNKNOWN, reason="; ".join(["the traces have no events", *problems]))
    try:
        is_explained = search.run()
    except _LimitReached as limit:
        reason = f"undecided: {limit}; {search.best_depth} of {search.total} events are explained"
        return Result(verdict=Verdict.UNKNOWN, reason="; ".join([reason, *problems]), stats=search.stats())
    nodes = len({event.node for trace in traces for event in trace.events})
    if is_explained:
        reason = f"{search.total} events of {nodes} replicas are explained"
        verdict, stats = Verdict.VALID, search.counts()
    else:
        reason, verdict, stats = search.explanation(), Verdict.INVALID, search.stats()
    if problems:
        reason = f"the traces are incomplete ({'; '.join(problems)}); as they are: {reason}"
        verdict = Verdict.UNKNOWN
    return Result(verdict=verdict, reason=reason, stats=stats)


class _Search:
    def __init__(self, model: TraceModel, traces: Sequence[Trace], *, max_states: int, timeout_s: float | None) -> None:
        self._model = model
        self._sources: list[Sequence[Event]] = [trace.events for trace in traces]
        self._hints = [_hints(trace.events) for trace in traces]
        self._ends = tuple(map(len, self._sources))
        self.total = sum(self._ends)
        self.problems: list[str] = []
        self._needs = self._find_needs()
        self._max_states = max_states
        self._deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._left: set[tuple[Positions, Hashable]] = set()
        self._steps = 0
        self.best_depth = -1
        self._best: _Node | None = None

    def _find_needs(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """For each event that names others as earlier: their sources and positions."""
        places = {
            event.ident: (source, position)
            for source, events in enumerate(self._sources)
            for position, event in enumerate(events)
            if event.ident is not None
        }
        needs: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for source, events in enumerate(self._sources):
            for position, event in enumerate(events):
                for ident in event.after:
                    if ident in places:
                        needs.setdefault((source, position), []).append(places[ident])
                    elif not self.problems:
                        self.problems.append(f"{event.place} is after {ident!r}, which no line is")
        return needs

    def run(self) -> bool:
        """Whether there is an explanation.  Raises _LimitReached."""
        nodes = sorted({event.node for events in self._sources for event in events})
        start = tuple(0 for _ in self._sources)
        stack = [_Node(start, state, None) for state in self._states("init", self._model.init(nodes))]
        if not stack:
            raise ModelError(f"model {self._model.name}: init gives no state")
        stack.reverse()
        while stack:
            node = stack.pop()
            self._count(node)
            if node.positions == self._ends:
                return True
            following, is_hidden = self._following(node)
            if len(following) > 1 or is_hidden:
                key = node.positions, node.state
                if self._is_left(key):
                    continue
                self._left.add(key)
                if len(self._left) > self._max_states:
                    raise _LimitReached(f"{self._max_states} states were not enough")
            following.reverse()
            stack += following
        return False

    def _is_left(self, key: tuple[Positions, Hashable]) -> bool:
        try:
            return key in self._left
        except TypeError as error:
            raise ModelError(f"model {self._model.name}: a state is not hashable ({error})") from error

    def _count(self, node: _Node) -> None:
        self._steps += 1
        if self._steps % _CLOCK_EVERY == 0 and time.monotonic() > self._deadline_s:
            raise _LimitReached(f"the time limit of {self._timeout_s:g} s is over")
        depth = sum(node.positions)
        if depth > self.best_depth:
            self.best_depth, self._best = depth, node

    def _following(self, node: _Node) -> tuple[list[_Node], bool]:
        """The points that a node leads to, best first, and whether a hidden step leads to one of them."""
        model, state = self._model, node.state
        found: list[_Node] = []
        for source in self._next_sources(node.positions):
            event = self._sources[source][node.positions[source]]
            states = self._states("next", model.next(state, event))
            if not states:
                if model.never(state, event):
                    return [], False
                continue
            moved = (*node.positions[:source], node.positions[source] + 1, *node.positions[source + 1 :])
            nodes = [_Node(moved, after, (node.path, source)) for after in states]
            if len(nodes) == 1 and model.commutes(event):
                return nodes, False
            found += nodes
        unlogged = self._states("hidden", model.hidden(state))
        hidden = [_Node(node.positions, after, (node.path, -1)) for after in unlogged]
        return found + hidden, bool(hidden)

    def _states(self, method: str, found: Any) -> list[Any]:
        """The states that a method of the model has returned.  A tuple is more likely a state than several."""
        if found.__class__ is list:
            return found
        if found is None or isinstance(found, str) or (isinstance(found, tuple) and found):
            raise ModelError(f"model {self._model.name}: {method} returned {found!r:.60}, not a list of states")
        return list(found)

    def _next_sources(self, positions: Positions) -> list[int]:
        """The sources whose next event may come now, the one with the earliest time first."""
        ready = [
            source
            for source, position in enumerate(positions)
            if position < self._ends[source]
            and all(positions[of] > needed for of, needed in self._needs.get((source, position), ()))
        ]
        if len(ready) > 1:
            ready.sort(key=lambda source: self._hints[source][positions[source]])
        return ready

    # What it says

    def counts(self) -> dict[str, Any]:
        """The figures of the search."""
        return {"events": self.total, "explained": max(self.best_depth, 0), "states": len(self._left)}

    def stats(self) -> dict[str, Any]:
        """The figures, and where the longest explained prefix ends."""
        if self._best is None:
            return self.counts()
        stuck = self._stuck(self._best)
        for_ever = [each for each in stuck if each[2]]
        last = self._last_events(self._best, stuck[0][0].node if stuck else "")
        return {
            **self.counts(),
            "explained_last": [{"node": event.node, "line": event.line, "event": str(event)} for event in last],
            "then_impossible": [
                {"node": event.node, "line": event.line, "event": str(event), "why": bounded(why)}
                for event, why, _ in for_ever or stuck
            ],
            "state": [{"state": bounded(line)} for line in self._model.describe(self._best.state).splitlines()],
        }

    def explanation(self) -> str:
        """Why there is no explanation: the events that nobody could explain after the longest explained prefix."""
        assert self._best is not None
        stuck = self._stuck(self._best)
        first, why, is_final = stuck[0]
        said = f"{why} ({first.place}: {first}; {self.best_depth} of {self.total} events before it are explained"
        if not is_final and len(stuck) > 1:
            others = "; ".join(f"{event.place}: {reason}" for event, reason, _ in stuck[1:])
            return f"{said}; nor can any other replica's next event have come first: {others})"
        return f"{said})"

    def _stuck(self, node: _Node) -> list[tuple[Event, str, bool]]:
        """The next event of every source, why it is impossible, and whether for ever: those first, then the earliest,
        for which others may be waiting."""
        model, found = self._model, []
        hints = [self._hints[source][at] for source, at in enumerate(node.positions) if at < self._ends[source]]
        for source, position in enumerate(node.positions):
            if position == self._ends[source]:
                continue
            event = self._sources[source][position]
            waits = [
                self._sources[of][needed].place
                for of, needed in self._needs.get((source, position), ())
                if node.positions[of] <= needed
            ]
            if waits:
                found.append((event, f"it came after {', '.join(waits)}", False))
            elif any(True for _ in model.next(node.state, event)):
                found.append((event, "it is possible here, but then nothing explains the rest", False))
            else:
                found.append((event, model.why(node.state, event), model.never(node.state, event)))
        order = sorted(range(len(found)), key=lambda at: (not found[at][2], hints[at]))
        return [found[at] for at in order]

    def _last_events(self, node: _Node, of: str) -> list[Event]:
        """The last explained events, oldest first: of any replica, and as many of the replica `of`."""
        positions, path = list(node.positions), node.path
        events: list[Event] = []
        any_left = own_left = SHOWN_EVENTS
        while path is not None and own_left > 0:
            path, source = path
            if source < 0:
                continue
            positions[source] -= 1
            event = self._sources[source][positions[source]]
            if any_left > 0 or event.node == of:
                events.append(event)
            any_left -= 1
            own_left -= event.node == of
        return events[::-1]


def _hints(events: Sequence[Event]) -> list[float]:
    """The time of each event as far as its own trace allows it: never less than that of an earlier one.  Events without
    a time count by their number."""
    hints, newest = [], -math.inf
    for number, event in enumerate(events):
        newest = max(newest, float(number if event.time is None else event.time))
        hints.append(newest)
    return hints
