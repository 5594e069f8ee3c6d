"""Random fault schedules with a bias towards danger.

A single fault seldom breaks replication. A mix is a list of overlapping faults: most begin at random moments, and
some are aimed at what an earlier one sets off,

- a second fault within two leases of one that removes the leader, during the election;
- a second fault just after a heal, while followers are compared, truncated and caught up, or a new master promoted;
- short faults beside long ones, so that some fault ends between an fsync and its acknowledgement;
- faults at a trigger (nemesis.triggers): right after an election or a promotion, in the middle of a
  truncation, between a write and its sync;
- in some of the mixes a leader that is lost for several seconds, in addition to the other faults.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from nemesis.impairments import Activity, faults_that_impair
from nemesis.schedule import HEAL, INJECT, FaultEvent, Schedule
from nemesis.triggers import TRIGGER_TIMEOUT_S

__all__ = [
    "AFTER_ELECTION",
    "AFTER_HEAL",
    "ANYWHERE",
    "DELAYS",
    "ELECTION_S",
    "LENGTHS_S",
    "LONGER_THAN_S",
    "ODDS",
    "QUIET_END_S",
    "QUIET_START_S",
    "Choices",
    "Odds",
    "Timed",
    "fits_beside",
    "lost_leader",
    "random_mix",
    "schedule_of",
    "variant_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Odds:
    """Probabilities (0 to 1) of properties of a mix, and its rate of faults. `python -m benchmarks search_seeds`
    compares values by what blind searches find with them."""

    faults_per_s: float = 1.2
    """Upper bound of the faults begun per second: at 1.5 s each on average, about two are then in force at any time."""
    leader: float = 0.5
    """Probability that a fault that can be aimed at the leader is. Most failures begin with the loss of a leader, but
    few variants aim at it: drawn evenly, one of 60 seeds cut its leader off for two seconds."""
    lost: float = 0.7
    """Probability that a leader is lost for LOST_S. Only then do leases, confirmed reads and the step-down of a leader
    without a quorum matter, and drawn like all others such a fault was in one of ten mixes."""
    cut: float = 0.5
    """Probability that such a leader is cut off rather than stopped: only then can it go on leading and answering."""


ODDS = Odds()

LOST_S = (2.0, 5.0)
"""Four to ten leases of the fast timings: the next leader is elected by then, and clients have talked to both."""

LENGTHS_S = ((0.05, 0.6), (0.5, 2.0), (1.0, 5.0))
"""How long a fault lasts: less than a lease; about an election; long enough for whatever waits to time out."""

QUIET_START_S = 1.0
QUIET_END_S = 2.0
"""All faults are healed this long before the load ends, so that a run also tests recovery under load."""
LEAST_SPAN_S = 0.2
"""Least time for faults between the two."""
LONGER_THAN_S = QUIET_START_S + QUIET_END_S + LEAST_SPAN_S
"""A load must be longer than this to have room for a fault."""

ELECTION_S = 1.2
"""Time from the loss of a leader to the promotion of the next one, with fast timings."""

REPAIR_S = 0.4
"""How long the repair of followers takes after a heal."""

OPERATION_S = 2.0
"""Longest time that an operator's request may take, including an election."""

PROOF_S = 0.5
"""Time between the heal of one fault and the beginning of another that would disturb the proof of the heal."""

MAX_TRIES = 20
"""Attempts to find a place in the schedule where a fault does not collide; after that it is left out."""

MAX_DRAWS = 100
"""Attempts to draw a mix with a fault that is sure to begin: a run without faults tests nothing. Half of the faults
wait for no trigger, so a hundred failures mean that none of the requested faults is possible."""

_DOWN = faults_that_impair(Activity.RUN)
_HANDLED = frozenset(("restart", "promote"))
"""Here the operator starts replicas: no other fault may keep them down meanwhile, or hide whether they run."""
_UNFIT = faults_that_impair(Activity.START)
"""These may keep a replica from starting, which is right if, for example, it cannot write or read its disk."""
_ASKED_OF_LEADER = frozenset(("transfer", "members", "promote"))
"""Requests of an operator to the current leader."""
_ASKED = faults_that_impair(Activity.TELL_TIME, Activity.USE_DISK)
"""Their proofs query the host."""

Timed = tuple[float, float, str, str, str | None]
"""begin (s), heal (s), nemesis, variant, the trigger that it waits for"""

AFTER_ELECTION = ("voting", "elected", "promoted")
AFTER_HEAL = ("matched", "truncating", "promoted")
ANYWHERE = ("storing",)
"""Triggers that occur soon after the loss of a leader, soon after a heal, and at any time."""

DELAYS = ("", "", "+0.0002", "+0.001", "+0.005", "+0.05")
"""Delays after the trigger (s): none; one message later; during a sync; after it; a little later."""

Choices = Sequence[tuple[str, Sequence[str]]]


def random_mix(
    choices: Choices,
    rng: random.Random,
    *,
    time_limit_s: float,
    nodes: int = 5,
    events: int | None = None,
    elects: bool = True,
    odds: Odds = ODDS,
) -> Schedule:
    """Overlapping faults between a quiet start and a quiet end, decided by `rng`.

    `choices` are pairs of a nemesis and its variants, for `nodes` replicas. `events` asks for that many events (two for
    each fault, as far as there is room) instead of a random number. With `elects` False the replicas elect no leader:
    they have one only while the appointed one runs. A mix in which no fault is sure to begin before the load ends is
    drawn again. The schedule is empty if the time limit leaves no room.
    """
    end_s = time_limit_s - QUIET_END_S
    span_s = end_s - QUIET_START_S
    if span_s <= LEAST_SPAN_S or not choices:
        return Schedule(())
    timed: list[Timed] = []
    for _ in range(MAX_DRAWS):
        count = events // 2 if events is not None else max(1, round(span_s * odds.faults_per_s * rng.random()))
        timed = _draw(choices, rng, count, end_s, nodes=nodes, elects=elects, odds=odds)
        if count == 0 or any(_is_sure(fault, time_limit_s) for fault in timed):
            break
    return schedule_of(timed)


def schedule_of(faults: Sequence[Timed]) -> Schedule:
    """The schedule that injects and heals each fault; they are named f1, f2 and so on in the order of their begins."""
    rounded = [(round(fault[0], 3), round(fault[1], 3), *fault[2:]) for fault in faults]
    timed = sorted(rounded, key=lambda fault: (*fault[:4], fault[4] or ""))
    found: list[FaultEvent] = []
    for number, (begin_s, heal_s, nemesis, variant, trigger) in enumerate(timed, start=1):
        for at_s, action, when in ((begin_s, INJECT, trigger), (heal_s, HEAL, None)):
            found.append(
                FaultEvent(
                    at_s=at_s,
                    action=action,
                    fault_id=f"f{number}",
                    nemesis=nemesis,
                    variant=variant,
                    when=when,
                )
            )
    found.sort(key=lambda event: event.at_s)
    return Schedule(tuple(found))


def _draw(
    choices: Choices, rng: random.Random, count: int, end_s: float, *, nodes: int, elects: bool, odds: Odds
) -> list[Timed]:
    """Up to `count` compatible faults; those for which no place was found are left out."""
    span_s = end_s - QUIET_START_S
    timed: list[Timed] = []
    if count > 0 and rng.random() < odds.lost:
        timed += lost_leader(choices, rng, QUIET_START_S, end_s, odds)
    for _ in range(count - len(timed)):
        for _ in range(MAX_TRIES):
            nemesis, variants = choices[rng.randrange(len(choices))]
            variant = variant_of(rng, variants, odds)
            at_s, when = _begin(rng, timed, span_s)
            length_s = rng.uniform(*rng.choice(LENGTHS_S))
            fault = (at_s, max(at_s + 0.05, min(end_s, at_s + length_s)), nemesis, variant, when)
            if fits_beside(timed, fault, nodes, elects=elects):
                timed.append(fault)
                break
    return timed


def lost_leader(choices: Choices, rng: random.Random, from_s: float, end_s: float, odds: Odds = ODDS) -> list[Timed]:
    """A fault that removes a leader for LOST_S between two moments; [] if no fault can, or if there is no time."""
    aimed = {name: [variant for variant in variants if "leader" in variant] for name, variants in choices}
    kinds = [name for name in aimed if name in _LOSES and aimed[name]]
    if not kinds or end_s - from_s <= LOST_S[0]:
        return []
    nemesis = "partition" if "partition" in kinds and rng.random() < odds.cut else rng.choice(kinds)
    length_s = rng.uniform(LOST_S[0], min(LOST_S[1], end_s - from_s))
    at_s = from_s + rng.uniform(0.0, end_s - from_s - length_s)
    return [(at_s, at_s + length_s, nemesis, rng.choice(aimed[nemesis]), None)]


def fits_beside(timed: Sequence[Timed], fault: Timed, nodes: int, *, elects: bool) -> bool:
    """Whether a fault is compatible with others, which are compatible among themselves."""
    if any(_collide(fault, other, nodes) for other in timed):
        return False
    together = [*timed, fault]
    return not _hides_links(together) and _finds_leaders(together, nodes, elects=elects)


def variant_of(rng: random.Random, variants: Sequence[str], odds: Odds = ODDS) -> str:
    """A random variant; with probability `odds.leader` one aimed at the leader, if there is one."""
    aimed = [variant for variant in variants if "leader" in variant]
    if aimed and rng.random() < odds.leader:
        variants = aimed
    return variants[rng.randrange(len(variants))]


def _is_sure(fault: Timed, time_limit_s: float) -> bool:
    """Whether a fault takes effect before the load ends whatever the system does: even if its trigger does not occur,
    and without needing a disk read, which a system with a cache seldom makes."""
    needs_read = fault[2] == "disk-error" and fault[3].startswith("read")
    return not needs_read and (fault[4] is None or fault[0] + TRIGGER_TIMEOUT_S + PROOF_S <= time_limit_s)


def _collide(one: Timed, other: Timed, nodes: int) -> bool:
    """Whether one of two faults could not be proven beside the other. A host that is down cannot be asked for its
    clock or its disk, nor be seen to crash repeatedly; of two faults of one disk the more severe hides the other;
    and cut links hide every other disturbance of them."""
    if not _overlap(one, other):
        return False
    kinds = {one[2], other[2]}
    if kinds <= _ASKED or (kinds & _DOWN and kinds & _ASKED):
        return True
    if kinds & _HANDLED and (kinds & (_DOWN | _UNFIT) or kinds <= _HANDLED or "transfer" in kinds):
        return True
    if kinds <= _DOWN and any("crash-loop" in fault[3] for fault in (one, other)):
        return True
    by_kind = {one[2]: one[3], other[2]: other[3]}
    lone = by_kind.get("link", "").rpartition("@")[2] in ("one", "leader")
    shape = by_kind.get("partition", "")
    alone = shape in ("one", "leader", "majority-minority") or (nodes <= 3 and shape in _CUT_OFF)
    return lone and alone


def _overlap(one: Timed, other: Timed) -> bool:
    """Whether two faults are in force, or being proven, at the same time. Uses rounded times, as in a written schedule,
    so that the answer is the same before and after writing it."""
    return _in_ms(one[0]) <= _proven_s(other) and _in_ms(other[0]) <= _proven_s(one)


def _proven_s(fault: Timed) -> float:
    """When the proof of a fault's heal ends."""
    return _in_ms(_in_ms(fault[1]) + PROOF_S)


def _hides_links(timed: Sequence[Timed]) -> bool:
    """Whether single links are disturbed while two partitions overlap, which together may cut all of these links."""
    partitions = [fault for fault in timed if fault[2] == "partition"]
    for fault in timed:
        if fault[2] == "link" and not fault[3].endswith("@all"):
            beside = [other for other in partitions if _overlap(fault, other)]
            if any(_overlap(one, other) for one, other in combinations(beside, 2)):
                return True
    return False


def _finds_leaders(timed: Sequence[Timed], nodes: int, *, elects: bool) -> bool:
    """Whether each fault aimed at the leader begins while enough replicas are undisturbed for one to lead. Requests of
    an operator to the leader must also be completed, and undone, under that condition."""
    for fault in timed:
        moments = [_in_ms(fault[0])] if "leader" in fault[3] or "follower" in fault[3] else []
        if fault[2] in _ASKED_OF_LEADER:
            moments.append(_in_ms(fault[1]))
        spare_s = OPERATION_S if fault[2] in _ASKED_OF_LEADER else 0.0
        for at_s in moments:
            others = [
                other for other in timed if other is not fault and _in_ms(other[0]) - spare_s <= at_s < _in_ms(other[1])
            ]
            if not elects:
                if any(other[2] in _DOWN and not other[3].endswith(("@follower", "@followers")) for other in others):
                    return False
                continue
            own = 1 if fault[2] == "members" else 0  # the remaining members have to agree on the smaller group
            if own + sum(_hit(other, nodes) for other in others) > (nodes - 1) // 2:
                return False
    return True


@functools.lru_cache(maxsize=1024)  # the same few moments are compared again and again
def _in_ms(at_s: float) -> float:
    """A time (s) rounded to milliseconds, as in a schedule: faults of one millisecond begin simultaneously."""
    return round(at_s, 3)


def _hit(fault: Timed, nodes: int) -> int:
    """The most replicas that a fault may keep from leading or voting."""
    _, _, nemesis, variant, _ = fault
    if nemesis == "members":
        size = "one"
    elif nemesis in _CUT:
        size = _CUT_OFF.get(variant, "all")
    elif nemesis in _STOPS:
        size = _SIZES.get(variant.rpartition("@")[2], "all")
    else:
        return 0
    counts = {
        "one": 1,
        "minority": (nodes - 1) // 2,
        "half": nodes // 2,
        "majority": nodes // 2 + 1,
        "all but one": nodes - 1,
        "all": nodes,
    }
    return counts[size]


_LOSES = frozenset(("partition", "pause", "kill", "power"))
"""Faults that separate a leader from all others at once, for as long as they last."""

_STOPS = _DOWN | _ASKED
_CUT = faults_that_impair(Activity.BE_REACHED)
"""Faults that may keep a replica from leading or voting: by stopping it, and by cutting it off from the others."""

_SIZES: Mapping[str, str] = {
    "one": "one",
    "leader": "one",
    "follower": "one",
    "minority": "minority",
    "majority": "majority",
    "followers": "all but one",
}
"""Target -> how many replicas it covers; any other may cover all."""

_CUT_OFF: Mapping[str, str] = {
    "one": "one",
    "leader": "one",
    "halves": "half",
    "random-halves": "half",
    "majority-minority": "minority",
    "leader-minority": "minority",
    "majorities-ring": "one",
    "bridge": "half",
}
"""Shape -> how many replicas are outside the largest group; any other shape may leave no two connected."""


def _begin(rng: random.Random, timed: Sequence[Timed], span_s: float) -> tuple[float, str | None]:
    """When the next fault begins (anywhere, or close to what an earlier one sets off), and the trigger it waits for."""
    latest_s = QUIET_START_S + span_s - 0.1
    aim, waits = rng.random(), rng.random() < 0.5
    if timed and aim < 0.3:
        begun = [fault[0] for fault in timed if "leader" in fault[3]] or [timed[-1][0]]
        at_s = min(latest_s, rng.choice(begun) + rng.uniform(0.0, ELECTION_S))
        return at_s, _trigger(rng, AFTER_ELECTION) if waits else None
    if timed and aim < 0.5:
        at_s = min(latest_s, rng.choice(timed)[1] + rng.uniform(0.0, REPAIR_S))
        return at_s, _trigger(rng, AFTER_HEAL) if waits else None
    at_s = QUIET_START_S + rng.uniform(0.0, span_s - 0.1)
    return at_s, _trigger(rng, ANYWHERE) if waits else None


def _trigger(rng: random.Random, kinds: Sequence[str]) -> str:
    return rng.choice(kinds) + rng.choice(DELAYS)
