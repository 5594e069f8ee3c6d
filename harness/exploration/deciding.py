"""Where was a violation decided? The share of continuations that fail, as a curve over the moment at which they begin.

An invalid simulated run is continued from several moments (`continuations`), many times from each, with the same faults
and other randomness. If nearly no continuation from before a moment fails, and nearly all from after it do, that moment
decided the violation. New moments are chosen where the curve rises: the steepest rise between neighbours is subdivided
repeatedly.

If the same faults make nearly every run fail whatever else happens, that curve shows nothing more. Then a second curve
is made of continuations in which all faults are healed at the moment and none follows. If nearly every run fails
without any fault, or neither curve has a deciding moment, a third one is made of continuations in which the load ends
at that moment too: its rise is the moment from which on it is too late to send no more.

The violation is the first that is visible during the run, to the invariants or to the workload's online checker; else
one that a check finds after the run, or that its replicas are stuck. A violation that nearly every run shows without
any fault and without any load was not decided at any moment; then the next violation is examined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from checker.faults import NEMESIS
from harness.clusters.sim.loop import START_S
from harness.errors import OperatorError
from harness.execution import Parts
from harness.exploration.account import Happening
from harness.exploration.continuations import (
    INVARIANTS,
    ONLINE,
    Branch,
    Course,
    Fate,
    Intervention,
    Passage,
    Symptom,
    follow,
)
from harness.exploration.symptoms import STUCK, stuck_reason
from harness.history_writer import read_history
from harness.report.checks import timed_violations
from harness.seeded import seeded
from harness.units import plural

__all__ = ["Deciding", "Jump", "Point", "Violation", "best_jump", "decide", "next_moments", "violations_of"]

AHEAD_S = 1.0
"""How long after the original violation one of the same kind still counts: with other randomness and fast timings an
election takes at most this much longer."""

JUST_AFTER_S = 1e-6
"""The last moment of a curve is this long after the violation showed, so that every continuation from it fails. At the
violation's own moment it is still to come, and healing the faults may prevent it."""

ACCOUNT_BEFORE_S, ACCOUNT_AFTER_S = 0.002, 0.0005
"""The account of an interval begins this long before it and ends this long after it: a message or two, a sync."""

MIN_WIDTH_S = 0.0005
"""Shorter intervals are not subdivided: a message takes that long, and less would separate related causes."""

COARSE_HALVES = 7
"""How often the first moments halve the way to the violation: down to a hundredth of it. The deciding moment is mostly
shortly before the violation, and continuations from there take the least time."""

COARSE_EVENLY = 4
"""Into how many parts the first moments divide the load if the violation has no time of its own. The phase after the
load (healing, waiting, final reads) may take ten times as long and is one more part."""

PARTS = 2
"""Most moments added to the steepest rises at a time; each time the run is performed once. Adding six needs fewer
passages but half as many moments again, whose continuations take longer than the passages saved."""

PARTS_TO_THE_END = 1
"""The same if the violation has no time of its own. Each continuation is then performed to the run's end, so that
the six of one moment take much longer than the run up to it."""

NOISE = 0.25
"""Smaller rises between neighbours are not subdivided: with 30 continuations each, two shares differ by this much in
one of twenty cases although nothing happened between them."""

MOST = 0.75
"""Share of a curve's whole rise that the chosen interval must contain: at any moment a few runs may fail, or hold, by
chance."""

SURE = 0.5
"""Least rise that counts as a decision."""

ALWAYS = 0.9
"""If this share of the runs fails whatever happens after a curve's first moment, the curve has no deciding moment."""

FIRST_SHARE = 3
"""Each moment first gets one part in this many of the continuations. At most moments these all agree, so that more
would show the same, or the curve does not rise there. The rest goes to the ends of the rises being subdivided and of
the chosen interval. The first moments are furthest from the violation, so their continuations take longest: they get
the rest only as ends of the chosen interval."""

FEWEST_FIRST = 6
"""Least first continuations of a later moment: fewer agree too often by chance (six, if half fail, once in 32 times).
If each goes on to the run's end, no more than these are performed first; errors are corrected when the ends of the
chosen interval get the rest."""

FEWEST_CONFIRMING = 10
"""Least continuations with fresh seeds that confirm the result first: if none of these fails before the interval and
all fail after it, it is no accident, and the rest would not change that."""

TEXTS = {
    Intervention.NONE: "the same faults", Intervention.HEAL: "no faults", Intervention.END_LOAD: "no faults or load"
}  # fmt: skip
"""The interventions in the messages of a search."""

LOAD_BEGINS_S = 0.0
"""When the load begins, in the test's time. Before it the cluster starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A violation to explain: the check (and the invariant's rule) that found it, its text, and when it showed; None if
    it is known only at the run's end."""

    check: str
    rule: str = ""
    text: str
    at_s: float | None

    @property
    def symptom(self) -> Symptom:
        """The symptom that continuations are watched for."""
        return Symptom(check=self.check, rule=self.rule, until_s=None if self.at_s is None else self.at_s + AHEAD_S)


@dataclass(slots=True, kw_only=True)
class Point:
    """A moment of a curve, and the outcomes of the continuations from there."""

    at_s: float
    intervention: Intervention
    fails: int = 0
    holds: int = 0
    undecided: int = 0
    """Continuations whose check ran out of time or memory; they are not counted."""

    @property
    def runs(self) -> int:
        """Continuations that count."""
        return self.fails + self.holds

    @property
    def share(self) -> float:
        """The share that fails; 0 without runs."""
        return self.fails / self.runs if self.runs else 0.0

    def add(self, fate: Fate) -> None:
        """Count one continuation."""
        if fate.fails is None:
            self.undecided += 1
        elif fate.fails:
            self.fails += 1
        else:
            self.holds += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """Two moments of a curve between which it rises."""

    before: Point
    after: Point

    @property
    def rise(self) -> float:
        return self.after.share - self.before.share

    @property
    def is_sure(self) -> bool:
        """Whether the rise is large enough, and no accident."""
        return self.rise >= SURE and self.is_significant

    @property
    def is_significant(self) -> bool:
        """Whether two moments with equal shares are unlikely to differ this much (Newcombe's 95 % interval of the
        difference of two shares). Valid for a pair chosen in advance; the steepest of many pairs may be an accident."""
        from spark_analysis.statistics import difference_interval  # lightweight, but not needed by a run

        difference = difference_interval(self.before.fails, self.before.runs, self.after.fails, self.after.runs)
        return difference.low > 0


@dataclass(slots=True, kw_only=True)
class Deciding:
    """The result of a search."""

    violation: Violation
    seed: int
    runs: int
    """Most continuations from each moment."""
    points: list[Point] = field(default_factory=list)
    begin_s: float = 0.0
    """When the simulation begins, before the load (so at most 0)."""
    end_s: float = 0.0
    jump: Jump | None = None
    is_cut_short: bool = False
    """Whether the limit of moments was reached before a deciding one was found."""
    is_interrupted: bool = False
    """Whether the search was interrupted; `points` are those examined by then."""
    account: list[Happening] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The content of explain.json."""
        jump = None if self.jump is None else {
            "before_s": self.jump.before.at_s, "after_s": self.jump.after.at_s,
            "intervention": self.jump.before.intervention,
        }  # fmt: skip
        return {
            "violation": asdict(self.violation), "seed": self.seed, "runs": self.runs, "begin_s": self.begin_s,
            "end_s": self.end_s, "points": [asdict(point) for point in self.curve_points()], "jump": jump,
            "is_cut_short": self.is_cut_short, "is_interrupted": self.is_interrupted,
            "account": [asdict(one) for one in self.account],
        }  # fmt: skip

    def curve_points(self) -> list[Point]:
        """The points of all curves, curve by curve."""
        return [point for intervention in Intervention for point in self.curve(intervention)]

    def curve(self, intervention: Intervention) -> list[Point]:
        """The points of one curve, in order of time."""
        return sorted((one for one in self.points if one.intervention is intervention), key=lambda one: one.at_s)


def violations_of(parts: Parts, results: Mapping[str, Any], history_path: Path) -> list[Violation]:
    """The violations of a run that can be explained, in order of time; those known only at its end come last, followed
    by stuck replicas. Raises OperatorError if there are none."""
    stuck = stuck_reason(results)
    if results.get("valid") is not False and stuck is None:
        raise OperatorError(
            "the run is not invalid and its replicas are not stuck: there is nothing to explain; choose a run that "
            "failed"
        )
    checks = results.get("checks")
    found = [
        Violation(check=name, rule=text.partition(": ")[0], text=text, at_s=time_ns / 1e9)
        for time_ns, name, text in sorted(timed_violations(checks))
        if name == INVARIANTS
    ][:1]
    found += _seen_online(parts, history_path)
    found.sort(key=lambda one: one.at_s or 0.0)
    found += [
        Violation(check=str(name), text=str(check.get("reason", "")), at_s=None)
        for name, check in (checks.items() if isinstance(checks, Mapping) else ())
        if isinstance(check, Mapping) and check.get("valid") is False and name != INVARIANTS
    ]
    if stuck is not None:
        found.append(Violation(check=STUCK, text=stuck, at_s=None))
    if not found:
        raise OperatorError("the run is invalid, but none of its checks says why: judge it again with harness analyze")
    return found


def _seen_online(parts: Parts, history_path: Path) -> list[Violation]:
    """The first violation that the workload's online checker finds during the load; [] without one, or a checker."""
    online = parts.workload.online()
    if online is None:
        return []
    for event in read_history(history_path):
        if event["process"] != NEMESIS and (words := online.feed(event)) is not None:
            at_s = event["time"] / 1e9
            return [Violation(check=ONLINE, text=words, at_s=at_s)] if at_s <= parts.test.time_limit_s else []
    return []


def coarse_moments(begin_s: float, end_s: float, *, load_s: float | None) -> list[float]:
    """The first moments of a curve, including both ends. `load_s` is the length of the load if the violation shows only
    at the end of the run; None if the violation has a time of its own, which is `end_s`."""
    if load_s is None:
        inner = [end_s - end_s / 2**number for number in range(COARSE_HALVES + 1)]
    else:
        inner = [load_s * number / COARSE_EVENLY for number in range(COARSE_EVENLY + 1)]
    return sorted({begin_s, *(at_s for at_s in inner if at_s < end_s), end_s})


def best_jump(curve: Sequence[Point]) -> Jump | None:
    """The shortest interval that contains most (`MOST`) of the curve's whole rise; of equally short ones the last, as
    nothing changed the outcome after it."""
    pairs = [Jump(before=one, after=other) for one, other in combinations(curve, 2)]
    highest = max((pair.rise for pair in pairs), default=0.0)
    steep = [pair for pair in pairs if pair.rise >= MOST * highest]
    return min(steep, key=lambda pair: (pair.after.at_s - pair.before.at_s, -pair.after.at_s), default=None)


def next_moments(curve: Sequence[Point], most: int) -> list[float]:
    """At most `most` moments to examine next. They are apportioned to the intervals by the curve's rise in each
    (D'Hondt), and divide each interval into equal parts."""
    cuts = dict.fromkeys(range(len(curve) - 1), 0)

    def claim(place: int) -> float:
        one, other = curve[place], curve[place + 1]
        parts = cuts[place] + 1
        if (other.at_s - one.at_s) / (parts + 1) < MIN_WIDTH_S / 2 or other.at_s - one.at_s < MIN_WIDTH_S:
            return 0.0
        return max(0.0, other.share - one.share - NOISE) / parts

    for _ in range(most):
        place = max(cuts, key=claim, default=None)
        if place is None or claim(place) <= 0:
            break
        cuts[place] += 1
    found = []
    for place, number in cuts.items():
        begin_s, end_s = curve[place].at_s, curve[place + 1].at_s
        found += [round(begin_s + (end_s - begin_s) * part / (number + 1), 7) for part in range(1, number + 1)]
    return found


class _Decider:
    """The search for one violation's moment; `left` is how many more moments may be examined."""

    def __init__(self, parts: Parts, found: Deciding, search: Search, *, zero_s: float, left: int) -> None:
        self._parts, self._found, self._search, self._zero_s = parts, found, search, zero_s
        self.left = left
        self._first = -(-search.runs // FIRST_SHARE)
        self._cuts = PARTS
        self._finer: list[Point] = []
        """Points of all moments except the coarse first ones."""
        if found.violation.at_s is None:
            self._first, self._cuts = min(self._first, FEWEST_FIRST), PARTS_TO_THE_END
        self._seeds, self._fresh_seeds = (
            [seeded(f"{search.seed}/{name}/{number}").getrandbits(32) for number in range(search.runs)]
            for name in ("continuation", "confirmation")
        )

    def add(self, moments: Sequence[float], intervention: Intervention, *, is_coarse: bool = False) -> None:
        """Perform the continuations from these moments, of at most `left` of them."""
        known = {point.at_s for point in self._found.curve(intervention)}
        moments = [at_s for at_s in moments if at_s not in known][: self.left]
        if not moments:
            return
        self.left -= len(moments)
        points = [Point(at_s=at_s, intervention=intervention) for at_s in moments]
        self._found.points += points
        first = self._first
        if is_coarse:
            self._perform(points, self._seeds[:first])
        else:
            first = max(first, FEWEST_FIRST)
            self._finer += points
            self._perform(points, self._seeds[:first])
            while short := self._with_too_few(intervention):
                self._perform(short, self._seeds[first:])
        curve = self._found.curve(intervention)
        jump = best_jump(curve)
        if jump is not None:
            self._search.say(
                f"{TEXTS[intervention]}, {len(curve)} moments: from {jump.before.share:.0%} to {jump.after.share:.0%} "
                f"failing between {jump.before.at_s:.4f} s and {jump.after.at_s:.4f} s"
            )

    def _with_too_few(self, intervention: Intervention) -> list[Point]:
        """Finer moments at the ends of a rise whose first continuations disagree, and which have not had the rest."""
        curve = self._found.curve(intervention)
        rises = [pair for pair in pairwise(curve) if pair[1].share - pair[0].share > NOISE]
        jump = best_jump(curve)
        if jump is not None:
            rises.append((jump.before, jump.after))
        deciding = {point.at_s for rise in rises for point in rise}
        return [
            point
            for point in self._finer
            if point.intervention is intervention and point.at_s in deciding and 0 < point.fails < point.runs
            and point.runs + point.undecided < len(self._seeds)
        ]  # fmt: skip

    def _perform(self, points: Sequence[Point], seeds: Sequence[int]) -> None:
        if not points or not seeds:
            return
        branches = [Branch(at_s=point.at_s, intervention=point.intervention, seeds=seeds) for point in points]
        for fate in self._pass(branches).fates:
            points[fate.branch].add(fate)

    def refine(self, intervention: Intervention, *, reserve: int) -> None:
        """Subdivide the rises of the curve until none is left to subdivide; leaves `reserve` moments unused."""
        while moments := next_moments(self._found.curve(intervention), max(0, min(self._cuts, self.left - reserve))):
            self.add(moments, intervention)

    def search(self) -> Jump | None:
        """The deciding interval; None if there is none."""
        found = self._found
        self.add([found.begin_s], Intervention.HEAL, is_coarse=True)
        if found.points[0].share >= ALWAYS:
            return self._search_load()
        coarse = self._coarse()
        order = self._order([at_s for at_s in coarse if at_s <= LOAD_BEGINS_S])
        for intervention in order:
            self.add(coarse, intervention, is_coarse=True)
            first = best_jump(found.curve(intervention))
            # An unclear rise is not worth the moments that the other curve needs.
            is_doubtful = intervention is not order[-1] and (first is None or first.rise < MOST)
            jump = self._settle(intervention, reserve=len(coarse) + 2 * PARTS if is_doubtful else 0)
            if jump is not None and is_doubtful:  # the other curve does not need them any more
                jump = self._settle(intervention, reserve=0) or jump
            if jump is not None:
                return jump
        return self._search_load()

    def _search_load(self) -> Jump | None:
        """The deciding interval of the curve of continuations without faults whose load ends; None if there is none."""
        self.add([self._found.begin_s], Intervention.END_LOAD, is_coarse=True)
        curve = self._found.curve(Intervention.END_LOAD)
        if not curve or curve[0].share >= ALWAYS:
            return None
        self.add(self._coarse(), Intervention.END_LOAD, is_coarse=True)
        curve = self._found.curve(Intervention.END_LOAD)
        if curve[-1].share - curve[0].share < SURE:  # flat, so that its rises are chance
            return None
        return self._settle(Intervention.END_LOAD, reserve=0)

    def _coarse(self) -> list[float]:
        found = self._found
        load_s = self._parts.test.time_limit_s if found.violation.at_s is None else None
        return coarse_moments(found.begin_s, found.end_s, load_s=load_s)

    def _order(self, start: Sequence[float]) -> Sequence[Intervention]:
        """The order of the curves, by the curve with faults at `start`, the moments until the load begins.

        If the faults make every run fail from there, their curve has no rise to look for. If they make many runs fail
        by the beginning of the load, a rise before it only tells who led by then, and one after it is of the remaining
        runs; the curve without faults, which shows when healing is too late, says more.
        """
        self.add(start[:1], Intervention.NONE, is_coarse=True)
        if any(point.share >= ALWAYS for point in self._found.curve(Intervention.NONE)):
            return (Intervention.HEAL,)
        self.add(start, Intervention.NONE, is_coarse=True)
        if any(point.share > NOISE for point in self._found.curve(Intervention.NONE)):
            return Intervention.HEAL, Intervention.NONE
        return Intervention.NONE, Intervention.HEAL

    def _settle(self, intervention: Intervention, *, reserve: int) -> Jump | None:
        """The deciding interval of one curve; None if there is none. Both its ends have all their continuations, and
        further ones confirm the rise between them."""
        while True:
            self.refine(intervention, reserve=reserve)
            jump = best_jump(self._found.curve(intervention))
            if jump is None or jump.rise < SURE:
                return None
            short = [point for point in (jump.before, jump.after) if point.runs + point.undecided < len(self._seeds)]
            if not short:
                return jump if jump.is_sure and self._shows_again(jump) else None
            for point in short:  # with more continuations the rise may vanish
                self._perform([point], self._seeds[point.runs + point.undecided :])

    def _shows_again(self, jump: Jump) -> bool:
        """Whether continuations with fresh seeds show the rise too; by the others it was the steepest of many pairs."""
        before, after = points = [
            Point(at_s=end.at_s, intervention=end.intervention) for end in (jump.before, jump.after)
        ]
        first = max(-(-len(self._fresh_seeds) // FIRST_SHARE), FEWEST_CONFIRMING)
        self._perform(points, self._fresh_seeds[:first])
        if before.fails or after.holds or before.undecided or after.undecided:  # else the result is already clear
            self._perform(points, self._fresh_seeds[first:])
        return Jump(before=before, after=after).is_significant

    def account(self, jump: Jump) -> list[Happening]:
        """What happened around the interval of a jump."""
        window = jump.before.at_s - ACCOUNT_BEFORE_S, jump.after.at_s + ACCOUNT_AFTER_S
        passage = Passage(
            symptom=self._found.violation.symptom, zero_s=self._zero_s, account_s=window,
            accounts_for_load=jump.before.intervention is Intervention.END_LOAD,
        )  # fmt: skip
        return self._search.perform(self._parts, passage).account

    def _pass(self, branches: Sequence[Branch]) -> Course:
        passage = Passage(
            symptom=self._found.violation.symptom, branches=branches, zero_s=self._zero_s, is_whole=False,
            jobs=self._search.jobs,
        )  # fmt: skip
        return self._search.perform(self._parts, passage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Parameters of a search: at most `points` moments in all, `runs` continuations from each, `jobs` at a time.
    `say` is called at every step; `perform` performs a run."""

    seed: int
    points: int
    runs: int
    jobs: int
    say: Callable[[str], None]
    perform: Callable[[Parts, Passage], Course] = follow


def decide(parts: Parts, violations: Sequence[Violation], history_path: Path, search: Search) -> Deciding:
    """Search for the moment at which a violation of a stored run was decided. Returns the first of `violations` that
    has such a moment, else the first. An interrupted search returns the moments examined so far, or raises
    KeyboardInterrupt if there are none. Raises OperatorError if this version does not repeat the run, or if a violation
    does not show in it.
    """
    tried: list[Deciding] = []
    left = search.points
    for violation in violations:
        first = search.perform(parts, Passage(symptom=violation.symptom, history_path=history_path))
        if first.parts_at is not None:
            raise OperatorError(
                f"this version does not reproduce the run: event {first.parts_at} of its history differs; run it again "
                f"with {parts.test.replay_line()}"
            )
        if first.fails is not True:
            raise OperatorError(f"the violation does not occur when the run is repeated: {violation.text[:200]}")
        end_s = first.end_s if violation.at_s is None else violation.at_s + JUST_AFTER_S
        found = Deciding(
            violation=violation, seed=search.seed, runs=search.runs, begin_s=START_S - first.zero_s, end_s=end_s
        )
        search.say(f"{violation.check}: {violation.text[:160]}")
        decider = _Decider(parts, found, search, zero_s=first.zero_s, left=left)
        tried.append(found)
        try:
            found.jump = decider.search()
            found.account = [] if found.jump is None else decider.account(found.jump)
        except KeyboardInterrupt:
            found.points = [point for point in found.points if point.runs + point.undecided]
            if not found.points:
                raise
            found.is_interrupted = True
        left = decider.left
        found.is_cut_short = found.jump is None and left == 0 and not found.is_interrupted
        if found.jump is not None or found.is_interrupted:
            return found
        if left == 0:
            others = len(violations) - len(tried)
            if others:
                search.say(f"{plural(others, 'other violation')} not examined: no moments are left, raise --points")
            break
    return tried[0]
