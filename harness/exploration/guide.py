"""A search that learns which schedules cause new behaviour, and derives the next ones from these.

Every run is summarized as facts (harness.exploration.behaviour). Schedules that produced facts that no earlier run had
are kept in a corpus; the next schedules are mutations of these (harness.exploration.mutating), more often of those with
rare facts. The operators and kinds of faults of mutations are learned too: each is drawn with a probability
proportional to its mean gain so far (a bandit with probability matching). RANDOM_RATIO of the runs, and the first ones,
are random mixes, the same that their seeds have without a guide.

Nothing here depends on a clock: proposals follow only from the seeds and the results so far. The n-th run depends on
the results of the runs up to the (n - lag)-th and on no others, whichever of the later ones have ended. So the same
seeds and the same lag, which is `--jobs`, make the same search.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.exploration.behaviour import FACT_BITS
from harness.exploration.mixes import QUIET_END_S, QUIET_START_S, Choices
from harness.exploration.mutating import OPERATORS, Ground, Idea, faults_of_schedule, mutate
from harness.exploration.rehearsal import Rehearsal
from harness.exploration.search import Candidate, elects_leaders, mix_for
from harness.test import Test
from nemesis.schedule import Schedule

__all__ = ["MAX_CORPUS", "Guide"]

MAX_CORPUS = 64
"""Most schedules kept; the one with the most common facts is evicted. With some hundred facts each, choosing among them
takes a hundredth of the time of a run."""

RANDOM_RATIO = 0.25
"""Share of the runs that are still random mixes, to find what the corpus does not lead to."""

FIRST_RUNS = 4
"""The first runs are random, until there is a corpus to choose from."""

SAME_SEED_RATIO = 0.5
"""Share of the mutations that repeat their origin up to a moment at which it showed new behaviour."""

MAX_COUNT = 255
"""A fact is counted in this many runs at most; by then it is not rare."""

MAX_MADE = 50_000
"""How many of the latest runs are remembered, so as not to be repeated: 5 MB. Mutations seldom repeat older ones."""

MAX_OPERATORS = 3
"""Most operators applied to one schedule."""


@dataclass(slots=True)
class _Kept:
    """A schedule that showed new behaviour."""

    number: int
    test: Test
    schedule: Schedule
    facts: tuple[int, ...]
    moments_s: tuple[float, ...]
    """When its new facts first held."""
    chosen: int = 0


@dataclass(slots=True)
class _Arms:
    """Arms of a bandit, drawn in proportion to their mean gain."""

    gained: list[float]
    drawn: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, count: int) -> _Arms:
        return cls([1.0] * count, [1] * count)

    def draw(self, rng: random.Random) -> int:
        weights = [gain / times for gain, times in zip(self.gained, self.drawn, strict=True)]
        return rng.choices(range(len(weights)), weights)[0]

    def learn(self, place: int, gain: float) -> None:
        self.gained[place] += gain
        self.drawn[place] += 1


class Guide:
    """Proposes the runs of one search, of which `lag` may be running at a time. See search.Guidance."""

    def __init__(self, test: Test, *, choices: Choices, lag: int) -> None:
        self._test = test
        self._lag = lag
        self._choices = choices
        self._ground = Ground(
            choices=choices, time_limit_s=test.time_limit_s, nodes=test.nodes, elects=elects_leaders(test)
        )
        self._counts = bytearray(1 << FACT_BITS)
        self._corpus: list[_Kept] = []
        self._operators = _Arms.of(len(OPERATORS))
        self._kinds = _Arms.of(len(choices))
        self._mean_gain = 1.0
        self._proposed = 0
        self._learned = 0
        self._ended: dict[int, tuple[Candidate, Rehearsal]] = {}
        """Ended runs from which it has not learned yet; `lag` at most."""
        self._made: dict[int, None] = {}
        """Hashes of seed and schedule of the last MAX_MADE runs."""

    def summary(self) -> Mapping[str, object]:
        """What the guide has learned, as JSON data."""
        names = [name for name, _ in self._choices]
        return {
            "facts": sum(map(bool, self._counts)),
            "corpus": len(self._corpus),
            "operators": dict(zip(OPERATORS, self._shares(self._operators), strict=True)),
            "kinds": dict(zip(names, self._shares(self._kinds), strict=True)),
        }

    @staticmethod
    def _shares(arms: _Arms) -> list[float]:
        weights = [gain / times for gain, times in zip(arms.gained, arms.drawn, strict=True)]
        return [round(weight / sum(weights), 3) for weight in weights]

    def may_propose(self) -> bool:
        """Whether all runs that the next one depends on have ended."""
        return all(number in self._ended for number in range(self._learned, self._proposed - self._lag + 1))

    def propose(self, seed: int) -> Candidate:
        """The next run. Its seed is `seed`, or that of the run whose beginning it repeats."""
        while self._learned < self._proposed - self._lag + 1:
            self._learn(*self._ended.pop(self._learned))
            self._learned += 1
        candidate = self._next(self._proposed, seed)
        self._proposed += 1
        self._made[hash((candidate.test.seed, candidate.schedule))] = None
        if len(self._made) > MAX_MADE:
            del self._made[next(iter(self._made))]
        return candidate

    def _next(self, number: int, seed: int) -> Candidate:
        rng = random.Random(f"{seed}/guide")
        test, mix = mix_for(self._test, seed, self._choices)
        if number < FIRST_RUNS or not self._corpus or rng.random() < RANDOM_RATIO:
            return Candidate(number=number, test=test, schedule=mix)
        origin, other = self._choose(rng), self._choose(rng)
        origin.chosen += 1
        keeps = bool(origin.moments_s) and rng.random() < SAME_SEED_RATIO
        from_s = rng.choice(origin.moments_s) if keeps else QUIET_START_S
        kinds: list[int] = []

        def draw_kind(rng: random.Random) -> int:
            kinds.append(self._kinds.draw(rng))
            return kinds[-1]

        idea = Idea(
            rng=rng,
            ground=self._ground,
            from_s=from_s,
            moments_s=[at_s for at_s in origin.moments_s if at_s >= from_s],
            kind=draw_kind,
            other=[] if other is origin else faults_of_schedule(other.schedule),
            fresh=faults_of_schedule(mix),
        )
        every = list(OPERATORS)
        names = tuple(every[self._operators.draw(rng)] for _ in range(rng.randint(1, MAX_OPERATORS)))
        schedule = mutate(origin.schedule, idea, names)
        if not schedule.events:
            return Candidate(number=number, test=test, schedule=mix)
        keeps = keeps and hash((origin.test.seed, schedule)) not in self._made  # else it would be the same run
        return Candidate(
            number=number, test=origin.test if keeps else test, schedule=schedule, operators=names, kinds=tuple(kinds)
        )

    def note(self, candidate: Candidate, rehearsal: Rehearsal) -> None:
        """Take the result of a run; it is learned from when it is its turn."""
        self._ended[candidate.number] = candidate, rehearsal

    def _learn(self, candidate: Candidate, rehearsal: Rehearsal) -> None:
        new = [(fact, at_s) for fact, at_s in rehearsal.facts if not self._counts[fact]]
        for fact, _ in rehearsal.facts:
            self._counts[fact] = min(MAX_COUNT, self._counts[fact] + 1)
        if new:
            self._keep(candidate, rehearsal, new)
        if candidate.operators:
            gain = min(4.0, len(new) / self._mean_gain)
            self._mean_gain += 0.2 * (len(new) - self._mean_gain)
            self._mean_gain = max(1.0, self._mean_gain)
            for name in candidate.operators:
                self._operators.learn(list(OPERATORS).index(name), gain)
            for place in candidate.kinds:
                self._kinds.learn(place, gain)

    def _keep(self, candidate: Candidate, rehearsal: Rehearsal, new: Sequence[tuple[int, float]]) -> None:
        latest_s = candidate.test.time_limit_s - QUIET_END_S - 0.5
        moments_s = sorted({round(at_s, 1) for _, at_s in new if QUIET_START_S < at_s < latest_s})
        self._corpus.append(
            _Kept(
                number=candidate.number,
                test=candidate.test,
                schedule=candidate.schedule,
                facts=tuple(fact for fact, _ in rehearsal.facts),
                moments_s=tuple(moments_s),
            )
        )
        if len(self._corpus) > MAX_CORPUS:
            self._corpus.remove(min(self._corpus[:-1], key=lambda kept: (self._rarity(kept), kept.number)))

    def _rarity(self, kept: _Kept) -> float:
        return sum(1.0 / self._counts[fact] for fact in kept.facts) / (1 + kept.chosen)

    def _choose(self, rng: random.Random) -> _Kept:
        return rng.choices(self._corpus, [self._rarity(kept) for kept in self._corpus])[0]
