"""New schedules by mutation of one that showed new behaviour, or by crossing two.

A schedule is split into faults, each with its begin and heal, changed, and reassembled by the rules of every mix
(harness.exploration.mixes): between a quiet start and a quiet end, each fault healed, none beside one that would keep
it from being proven, and those aimed at a leader only while there can be one. A fault that no longer fits is left out.
So the result is a schedule that `explore` could also draw at random.

With `from_s`, faults that begin before that moment stay as they are: with the same seed the run is the same up to that
moment, to the byte, and diverges after it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.exploration.mixes import (
    AFTER_ELECTION,
    AFTER_HEAL,
    ANYWHERE,
    DELAYS,
    ELECTION_S,
    LENGTHS_S,
    QUIET_END_S,
    QUIET_START_S,
    Choices,
    Timed,
    fits_beside,
    lost_leader,
    schedule_of,
    variant_of,
)
from nemesis.schedule import INJECT, Schedule

__all__ = ["OPERATORS", "Ground", "Idea", "assemble", "faults_of_schedule", "mutate"]

LEAST_S = 0.05
"""Least time from the begin of a fault to its heal."""

MAX_SHIFT_S = 1.5
"""Three leases of the fast timings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """The constraints for which schedules are made."""

    choices: Choices
    """Kinds of faults and their variants."""
    time_limit_s: float
    nodes: int
    elects: bool

    @property
    def end_s(self) -> float:
        """When all faults must be healed."""
        return self.time_limit_s - QUIET_END_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Idea:
    """The sources that a mutation may draw from."""

    rng: random.Random
    ground: Ground
    from_s: float
    """Faults that begin before this moment stay."""
    moments_s: Sequence[float]
    """When new behaviour was seen; may be empty."""
    kind: Callable[[random.Random], int]
    """Draws a kind of fault, as a position in `choices`."""
    other: Sequence[Timed]
    """The faults of another schedule; may be empty."""
    fresh: Sequence[Timed]
    """The faults of a random mix."""


def faults_of_schedule(schedule: Schedule) -> list[Timed]:
    """The faults of a schedule in which every fault is healed."""
    heals = {event.fault_id: event.at_s for event in schedule if event.action != INJECT}
    return [
        (event.at_s, heals[event.fault_id], event.nemesis, event.variant, event.when)
        for event in schedule
        if event.action == INJECT
    ]


def assemble(kept: Sequence[Timed], wanted: Sequence[Timed], ground: Ground) -> Schedule:
    """A schedule of the faults in `kept`, which are compatible, and of those in `wanted` that fit, tried in order."""
    taken = list(kept)
    for begin_s, heal_s, nemesis, variant, when in wanted:
        begin_s = min(max(QUIET_START_S, begin_s), ground.end_s - LEAST_S)
        fault = (begin_s, min(max(begin_s + LEAST_S, heal_s), ground.end_s), nemesis, variant, when)
        if fits_beside(taken, fault, ground.nodes, elects=ground.elects):
            taken.append(fault)
    return schedule_of(taken)


def mutate(schedule: Schedule, idea: Idea, names: Sequence[str]) -> Schedule:
    """The schedule changed by the named operators, one after the other."""
    faults = faults_of_schedule(schedule)
    fixed = [fault for fault in faults if fault[0] < idea.from_s]
    free = [fault for fault in faults if fault[0] >= idea.from_s]
    for name in names:
        free = OPERATORS[name](free, idea)
    if idea.from_s <= QUIET_START_S:
        return assemble((), [*free, *fixed], idea.ground)
    return assemble(fixed, free, idea.ground)


def _new(idea: Idea, begin_s: float) -> Timed:
    rng, ground = idea.rng, idea.ground
    nemesis, variants = ground.choices[idea.kind(rng)]
    when = rng.choice((*AFTER_ELECTION, *AFTER_HEAL, *ANYWHERE)) + rng.choice(DELAYS) if rng.random() < 0.3 else None
    return begin_s, begin_s + rng.uniform(*rng.choice(LENGTHS_S)), nemesis, variant_of(rng, variants), when


def _changed(faults: list[Timed], idea: Idea, change: Callable[[Timed], Timed]) -> list[Timed]:
    """Change one of the faults and move it to the front, so that it is placed before the others."""
    if not faults:
        return _add(faults, idea)
    place = idea.rng.randrange(len(faults))
    begin_s, *others = change(faults[place])
    changed: Timed = (max(idea.from_s, begin_s), *others)  # type: ignore[assignment]
    return [changed, *faults[:place], *faults[place + 1 :]]


def _shift(faults: list[Timed], idea: Idea) -> list[Timed]:
    """Move a fault to an earlier or later time, with the same length."""
    by_s = idea.rng.uniform(-MAX_SHIFT_S, MAX_SHIFT_S)
    return _changed(faults, idea, lambda fault: (fault[0] + by_s, fault[1] + by_s, *fault[2:]))


def _stretch(faults: list[Timed], idea: Idea) -> list[Timed]:
    """Make a fault two or four times longer or shorter."""
    ratio = idea.rng.choice((0.25, 0.5, 2.0, 4.0))
    return _changed(faults, idea, lambda fault: (fault[0], fault[0] + (fault[1] - fault[0]) * ratio, *fault[2:]))


def _retarget(faults: list[Timed], idea: Idea) -> list[Timed]:
    """Give a fault another variant: another target or form."""
    of_kind = dict(idea.ground.choices)

    def change(fault: Timed) -> Timed:
        return (*fault[:3], variant_of(idea.rng, of_kind.get(fault[2], (fault[3],))), fault[4])

    return _changed(faults, idea, change)


def _wait(faults: list[Timed], idea: Idea) -> list[Timed]:
    """Let a fault wait for another trigger, or for none."""
    rng = idea.rng
    when = rng.choice((None, *(each + rng.choice(DELAYS) for each in (*AFTER_ELECTION, *AFTER_HEAL, *ANYWHERE))))
    return _changed(faults, idea, lambda fault: (*fault[:4], when))


def _aim(faults: list[Timed], idea: Idea) -> list[Timed]:
    """Add a fault when new behaviour was seen, or soon after."""
    if not idea.moments_s:
        return _add(faults, idea)
    begin_s = idea.rng.choice(idea.moments_s) + idea.rng.uniform(0.0, ELECTION_S)
    return [_new(idea, max(idea.from_s, begin_s)), *faults]


def _add(faults: list[Timed], idea: Idea) -> list[Timed]:
    """Add a fault at any time."""
    first_s = max(idea.from_s, QUIET_START_S)
    return [_new(idea, idea.rng.uniform(first_s, max(first_s, idea.ground.end_s - LEAST_S))), *faults]


def _drop(faults: list[Timed], idea: Idea) -> list[Timed]:
    """Remove a fault, unless it is the only one."""
    if len(faults) < 2:
        return _add(faults, idea)
    place = idea.rng.randrange(len(faults))
    return [*faults[:place], *faults[place + 1 :]]


def _lose(faults: list[Timed], idea: Idea) -> list[Timed]:
    """Add a fault that removes a leader for seconds, from when new behaviour was seen if there is time for that."""
    loss = lost_leader(idea.ground.choices, idea.rng, max(idea.from_s, QUIET_START_S), idea.ground.end_s)
    if not loss:
        return _aim(faults, idea)
    begin_s, heal_s, *others = loss[0]
    length_s = heal_s - begin_s
    moments_s = [at_s for at_s in idea.moments_s if at_s + length_s <= idea.ground.end_s]
    at_s = idea.rng.choice(moments_s) if moments_s else begin_s
    lost: Timed = (at_s, at_s + length_s, *others)  # type: ignore[assignment]
    return [lost, *faults]


def _renew(faults: list[Timed], idea: Idea) -> list[Timed]:
    """Replace the faults after a moment (`from_s` if it is set, else random) with those of a random mix."""
    first_s = max(idea.from_s, QUIET_START_S)
    at_s = first_s if first_s > QUIET_START_S else idea.rng.uniform(first_s, idea.ground.end_s)
    return [*(fault for fault in faults if fault[0] < at_s), *(fault for fault in idea.fresh if fault[0] >= at_s)]


def _cross(faults: list[Timed], idea: Idea) -> list[Timed]:
    """Replace the faults after a random moment with those of another schedule."""
    if not idea.other:
        return _aim(faults, idea)
    first_s = max(idea.from_s, QUIET_START_S)
    at_s = idea.rng.uniform(first_s, max(first_s, idea.ground.end_s))
    later = [fault for fault in idea.other if fault[0] >= at_s]
    return [*(fault for fault in faults if fault[0] < at_s), *later]


OPERATORS: dict[str, Callable[[list[Timed], Idea], list[Timed]]] = {
    "shift": _shift,
    "stretch": _stretch,
    "retarget": _retarget,
    "wait": _wait,
    "aim": _aim,
    "add": _add,
    "drop": _drop,
    "lose": _lose,
    "renew": _renew,
    "cross": _cross,
}
"""Each operator gets only the faults that may be changed."""
