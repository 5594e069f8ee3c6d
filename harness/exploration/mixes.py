"""Random fault schedules with a bias towards danger.

What breaks replication is seldom one fault alone. A mix is a list of faults that overlap: most begin at random
moments, and some are aimed at what an earlier one sets off,

- a second fault within two leases of one that takes the leader away: an election is under way;
- a second fault just after a heal: followers are compared, truncated and filled, a new master is promoted;
- short faults beside long ones, so that a fault ends between an fsync and its acknowledgement as well.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from nemesis.schedule import HEAL, INJECT, FaultEvent, Schedule

__all__ = ["MAX_FAULTS_PER_S", "QUIET_END_S", "random_mix"]

MAX_FAULTS_PER_S = 0.6
"""Faults begun per second: with a few seconds each, about two are in force at any time."""

QUIET_START_S = 1.0
QUIET_END_S = 2.0
"""Before the load ends all is healed for this long, so that a run also sees recovery under load."""

ELECTION_S = 1.2
"""How long after a leader is lost the next one is being elected and promoted, with fast timings."""

REPAIR_S = 0.4
"""How long after a heal followers are being repaired."""

PROOF_S = 0.5
"""Between the heal of one fault and the beginning of another that would disturb the proof of the heal."""

MAX_TRIES = 20
"""For a place in the schedule where a fault does not collide; after that it is left out."""

_DOWN = frozenset(("kill", "pause", "power", "bit-flip"))
_ASKED = frozenset(("clock", "disk-error", "disk-full", "disk-slow", "disk-stall"))

Timed = tuple[float, float, str, str]
"""begin, heal, nemesis, variant"""

Choices = Sequence[tuple[str, Sequence[str]]]


def random_mix(choices: Choices, rng: random.Random, *, time_limit_s: float, events: int | None = None) -> Schedule:
    """Overlapping faults between a quiet start and a quiet end, decided by `rng`.

    `choices` are pairs of a nemesis and its variants; `events` asks for that many events (two for each fault, as far
    as they find room) instead of a random number. Empty for a time limit that leaves no room.
    """
    end_s = time_limit_s - QUIET_END_S
    span_s = end_s - QUIET_START_S
    if span_s <= 0.2 or not choices:
        return Schedule(())
    count = events // 2 if events is not None else max(1, round(span_s * MAX_FAULTS_PER_S * rng.random()))
    timed: list[Timed] = []
    for _ in range(count):
        for _ in range(MAX_TRIES):
            nemesis, variants = choices[rng.randrange(len(choices))]
            variant = variants[rng.randrange(len(variants))]
            at_s = _begin(rng, timed, span_s)
            length_s = rng.choice((rng.uniform(0.05, 0.6), rng.uniform(0.5, 2.0), rng.uniform(1.0, 5.0)))
            fault = (at_s, max(at_s + 0.05, min(end_s, at_s + length_s)), nemesis, variant)
            if not any(_collide(fault, other) for other in timed):
                timed.append(fault)
                break
    timed.sort()
    found: list[FaultEvent] = []
    for number, (begin_s, heal_s, nemesis, variant) in enumerate(timed, start=1):
        for at_s, action in ((begin_s, INJECT), (heal_s, HEAL)):
            found.append(
                FaultEvent(
                    at_s=round(at_s, 3), action=action, fault_id=f"f{number}", nemesis=nemesis, variant=variant
                )
            )
    found.sort(key=lambda event: event.at_s)
    return Schedule(tuple(found))


def _collide(one: Timed, other: Timed) -> bool:
    """Whether one of two faults could not be proven beside the other: a host that is down cannot be asked for its
    clock or its disk, and of two faults of one disk the graver one hides the other."""
    if one[0] > other[1] + PROOF_S or other[0] > one[1] + PROOF_S:
        return False
    kinds = {one[2], other[2]}
    return kinds <= _ASKED or bool(kinds & _DOWN and kinds & _ASKED)


def _begin(rng: random.Random, timed: Sequence[Timed], span_s: float) -> float:
    """When the next fault begins: anywhere, or close behind what an earlier one sets off."""
    latest_s = QUIET_START_S + span_s - 0.1
    aim = rng.random()
    if timed and aim < 0.3:
        begun = [begin_s for begin_s, _, _, variant in timed if "leader" in variant] or [timed[-1][0]]
        return min(latest_s, rng.choice(begun) + rng.uniform(0.0, ELECTION_S))
    if timed and aim < 0.5:
        return min(latest_s, rng.choice(timed)[1] + rng.uniform(0.0, REPAIR_S))
    return QUIET_START_S + rng.uniform(0.0, span_s - 0.1)
