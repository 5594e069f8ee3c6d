"""Random fault schedules with a bias towards danger.

What breaks replication is seldom one fault alone. A mix is a list of faults that overlap: most begin at random
moments, and some are aimed at what an earlier one sets off,

- a second fault within two leases of one that takes the leader away: an election is under way;
- a second fault just after a heal: followers are compared, truncated and filled, a new master is promoted;
- short faults beside long ones, so that a fault ends between an fsync and its acknowledgement as well;
- faults at a trigger (nemesis.triggers): right after an election or a promotion, in the middle of a
  truncation, between a write and its sync;
- in a part of the mixes a leader that is lost for several seconds, beside whatever else there is.
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
    """How likely a mix has what; each but the first from 0 to 1. `python -m benchmarks search_seeds` compares them by
    what blind searches find."""

    faults_per_s: float = 1.2
    """Faults begun per second, at most: with 1.5 s each on average, about two are in force at any time."""
    leader: float = 0.5
    """Of the faults that can be aimed at a leader, those that are. Most of what goes wrong begins with the loss of one,
    and few of the variants that there are are aimed at it: drawn evenly, one of 60 seeds cut its leader off for two
    seconds."""
    lost: float = 0.7
    """Of the mixes, those in which a leader is lost for LOST_S. Whatever leases, confirmed reads and the step-down of a
    leader without a quorum are for shows only then, and drawn like all others such a fault was in one of ten mixes."""
    cut: float = 0.5
    """Of these, those in which it is cut off, and lives: only such a leader can go on leading and answering."""


ODDS = Odds()

LOST_S = (2.0, 5.0)
"""Four to ten leases of the fast timings: the next leader is there, and clients have met both."""

LENGTHS_S = ((0.05, 0.6), (0.5, 2.0), (1.0, 5.0))
"""How long a fault lasts: shorter than a lease, about an election, long enough for whatever waits to give up."""

QUIET_START_S = 1.0
QUIET_END_S = 2.0
"""Before the load ends all is healed for this long, so that a run also sees recovery under load."""
LEAST_SPAN_S = 0.2
"""Between the two, for faults."""
LONGER_THAN_S = QUIET_START_S + QUIET_END_S + LEAST_SPAN_S
"""A load has to be, for a fault to find room in it."""

ELECTION_S = 1.2
"""How long after a leader is lost the next one is being elected and promoted, with fast timings."""

REPAIR_S = 0.4
"""How long after a heal followers are being repaired."""

OPERATION_S = 2.0
"""How long what an operator asks for may take, an election included."""

PROOF_S = 0.5
"""Between the heal of one fault and the beginning of another that would disturb the proof of the heal."""

MAX_TRIES = 20
"""For a place in the schedule where a fault does not collide; after that it is left out."""

MAX_DRAWS = 100
"""Of a whole mix, until one has a fault that is sure to begin: a run without faults tries nothing. Half of the faults
wait for no trigger, so a hundred in vain mean that nothing of what is asked for can be had."""

_DOWN = faults_that_impair(Activity.RUN)
_HANDLED = frozenset(("restart", "promote"))
"""An operator starts replicas himself: nobody else may keep them down meanwhile, nor hide from him whether they run."""
_UNFIT = faults_that_impair(Activity.START)
"""On a disk that it cannot write or read a replica rightly refuses to start."""
_ASKED_OF_LEADER = frozenset(("transfer", "members", "promote"))
"""What an operator asks of whoever leads."""
_ASKED = faults_that_impair(Activity.TELL_TIME, Activity.USE_DISK)
"""Whose proof asks the host."""

Timed = tuple[float, float, str, str, str | None]
"""begin, heal, nemesis, variant, the trigger it waits for"""

AFTER_ELECTION = ("voting", "elected", "promoted")
AFTER_HEAL = ("matched", "truncating", "promoted")
ANYWHERE = ("storing",)
"""Moments that soon come after a leader is lost, after a heal, and at any time."""

DELAYS = ("", "", "+0.0002", "+0.001", "+0.005", "+0.05")
"""After the trigger: at once; a message later; when a sync is under way; when it is done; a little later."""

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

    `choices` are pairs of a nemesis and its variants, for `nodes` replicas; `events` asks for that many events (two for
    each fault, as far as they find room) instead of a random number. Replicas that elect nobody (`elects` False) have a
    leader while that one runs. A mix of which no fault is sure to begin before the load ends is drawn again. Empty for
    a time limit that leaves no room.
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
    """The schedule of faults that are each injected and healed; they are called f1, f2 and so on as they begin."""
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
    """`count` faults that can be had together, less those for which no place was found."""
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
    """A fault that takes a leader away for LOST_S between two moments; none where nothing does or the time is short."""
    aimed = {name: [variant for variant in variants if "leader" in variant] for name, variants in choices}
    kinds = [name for name in aimed if name in _LOSES and aimed[name]]
    if not kinds or end_s - from_s <= LOST_S[0]:
        return []
    nemesis = "partition" if "partition" in kinds and rng.random() < odds.cut else rng.choice(kinds)
    length_s = rng.uniform(LOST_S[0], min(LOST_S[1], end_s - from_s))
    at_s = from_s + rng.uniform(0.0, end_s - from_s - length_s)
    return [(at_s, at_s + length_s, nemesis, rng.choice(aimed[nemesis]), None)]


def fits_beside(timed: Sequence[Timed], fault: Timed, nodes: int, *, elects: bool) -> bool:
    """Whether a fault can be had beside others that can be had together, and they beside it."""
    if any(_collide(fault, other, nodes) for other in timed):
        return False
    together = [*timed, fault]
    return not _hides_links(together) and _finds_leaders(together, nodes, elects=elects)


def variant_of(rng: random.Random, variants: Sequence[str], odds: Odds = ODDS) -> str:
    """Any variant; so often as `odds` say one aimed at the leader, where there is one."""
    aimed = [variant for variant in variants if "leader" in variant]
    if aimed and rng.random() < odds.leader:
        variants = aimed
    return variants[rng.randrange(len(variants))]


def _is_sure(fault: Timed, time_limit_s: float) -> bool:
    """Whether a fault begins before the load ends, also when the trigger that it waits for does not occur, and whatever
    the system does, so that it does not need a read of a disk, which a system with a cache seldom makes."""
    needs_read = fault[2] == "disk-error" and fault[3].startswith("read")
    return not needs_read and (fault[4] is None or fault[0] + TRIGGER_TIMEOUT_S + PROOF_S <= time_limit_s)


def _collide(one: Timed, other: Timed, nodes: int) -> bool:
    """Whether one of two faults could not be proven beside the other: a host that is down cannot be asked for its
    clock or its disk, nor be seen to crash again and again; of two faults of one disk the graver one hides the
    other; and on links that are cut nothing can be seen of what else is wrong with them."""
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
    """Whether two faults are in force at a time, or being proven: by their times in the schedule, which are rounded, so
    that the answer is the same before and after it was written."""
    return _in_ms(one[0]) <= _proven_s(other) and _in_ms(other[0]) <= _proven_s(one)


def _proven_s(fault: Timed) -> float:
    """When the heal of a fault is proven."""
    return _in_ms(_in_ms(fault[1]) + PROOF_S)


def _hides_links(timed: Sequence[Timed]) -> bool:
    """Whether some links are disturbed while two partitions are in force at a time: together they may cut them all."""
    partitions = [fault for fault in timed if fault[2] == "partition"]
    for fault in timed:
        if fault[2] == "link" and not fault[3].endswith("@all"):
            beside = [other for other in partitions if _overlap(fault, other)]
            if any(_overlap(one, other) for one, other in combinations(beside, 2)):
                return True
    return False


def _finds_leaders(timed: Sequence[Timed], nodes: int, *, elects: bool) -> bool:
    """Whether each fault that is aimed at the leader begins while enough replicas are left alone for one to lead; and
    whatever an operator asks of a leader has to be done while that is so, and taken back while it is."""
    for fault in timed:
        moments = [_in_ms(fault[0])] if "leader" in fault[3] or "followers" in fault[3] else []
        if fault[2] in _ASKED_OF_LEADER:
            moments.append(_in_ms(fault[1]))
        spare_s = OPERATION_S if fault[2] in _ASKED_OF_LEADER else 0.0
        for at_s in moments:
            others = [
                other for other in timed if other is not fault and _in_ms(other[0]) - spare_s <= at_s < _in_ms(other[1])
            ]
            if not elects:
                if any(other[2] in _DOWN and not other[3].endswith("@followers") for other in others):
                    return False
                continue
            own = 1 if fault[2] == "members" else 0  # whoever is left has to agree on the smaller group
            if own + sum(_hit(other, nodes) for other in others) > (nodes - 1) // 2:
                return False
    return True


@functools.lru_cache(maxsize=1024)  # the same few moments are compared with one another again and again
def _in_ms(at_s: float) -> float:
    """As a schedule has it: what begins at one millisecond begins at once."""
    return round(at_s, 3)


def _hit(fault: Timed, nodes: int) -> int:
    """How many replicas a fault keeps from leading or voting, at most."""
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
"""What takes a leader away from all others at once, for as long as it lasts."""

_STOPS = _DOWN | _ASKED
_CUT = faults_that_impair(Activity.BE_REACHED)
"""What may keep a replica from leading or voting: by itself, and by what lies between it and the others."""

_SIZES: Mapping[str, str] = {
    "one": "one",
    "leader": "one",
    "minority": "minority",
    "majority": "majority",
    "followers": "all but one",
}
"""Target -> how many replicas it names; any other may be all."""

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
"""Shape -> how many replicas are outside the largest group; any other may leave nobody connected."""


def _begin(rng: random.Random, timed: Sequence[Timed], span_s: float) -> tuple[float, str | None]:
    """When the next fault begins, anywhere or close behind what an earlier one sets off; the trigger it waits for."""
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
