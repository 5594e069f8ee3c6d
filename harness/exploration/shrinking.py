"""Shrinking a failing run to what is needed for it to fail.

A run is determined by its schedule of faults, its time limit, its clients, their rate and the number of replicas. Each
candidate leaves something out and is run again in simulation; it counts as failing if it shows one of the original
symptoms: a check that fails (an invariant by its rule), or replicas that are stuck. Faults are removed by delta
debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input"): large parts first, then single
ones, until no single fault can be left out. The rest goes to Hypothesis (harness.exploration.simplifying), which also
leaves out heals, rounds times and reduces all other quantities, several at once if necessary. Finally, delta debugging
verifies again that no single fault can be left out.

The random choices of a fault depend only on the seed and its own id, so leaving one out does not change the others.
The interleaving of messages does change, which is why every candidate has to be run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from checker.workers import worker_pool
from harness.errors import HarnessError, OperatorError
from harness.exploration.rehearsal import STUCK, Rehearsal, rehearse_test
from harness.exploration.simplifying import CLIENTS, FEW_NODES, RATES, simplest_that_fails
from harness.report.checks import verdict_word
from harness.test import Test
from harness.units import plural
from nemesis.schedule import INJECT, Schedule

__all__ = ["Shrunk", "shrink"]

Listener = Callable[[str], None]

KILLED = "a process that ran a simulation was killed, perhaps because memory ran out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """A failing run that could not be cut down further, or not within the budget."""

    test: Test
    schedule: Schedule
    rehearsal: Rehearsal
    runs: int
    is_minimal: bool
    """Whether no single fault can be left out; False if the time was used up before that was known."""


Key = tuple[int, int, float, float, Schedule]


class _Shrinker:
    def __init__(self, test: Test, schedule: Schedule, *, jobs: int, deadline_s: float, say: Listener) -> None:
        self.test = test
        self.schedule = schedule
        self.runs = 0
        self.rehearsal = rehearse_test(test, schedule)
        self.symptoms = _symptoms(self.rehearsal)
        self._known: dict[Key, Rehearsal] = {_key(test, schedule): self.rehearsal}
        self._jobs = jobs
        self._deadline_s = deadline_s
        self._say = say
        self._pool = worker_pool(jobs)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() >= self._deadline_s

    @property
    def fails(self) -> bool:
        return bool(self.symptoms)

    def first_that_fails(self, candidates: Sequence[tuple[Test, Schedule]]) -> bool:
        """Adopt the first candidate that still fails; returns whether one was found before the time was used up."""
        for start in range(0, len(candidates), self._jobs):
            batch = candidates[start : start + self._jobs]
            new = [candidate for candidate in batch if _key(*candidate) not in self._known]
            if new and self.out_of_time:
                return False
            if new:
                results = self._pool.map(rehearse_test, *zip(*new, strict=True))
                self._known.update(zip((_key(*candidate) for candidate in new), results, strict=True))
                self.runs += len(new)
            for test, schedule in batch:
                result = self._known[_key(test, schedule)]
                if not self.symptoms.isdisjoint(_symptoms(result)):
                    self.test, self.schedule, self.rehearsal = test, schedule, result
                    return True
        return False

    def search(self) -> None:
        """Adopt the simplest failing run that Hypothesis finds."""
        before, runs = (self.test, self.schedule), self.runs
        simplest = simplest_that_fails(
            *before, lambda *candidate: self.first_that_fails([candidate]), seed=f"{self.test.seed}/shrink"
        )
        self.first_that_fails([before if simplest is None else simplest])
        if (self.test, self.schedule) != before:
            left = self.test
            self._say(
                f"Hypothesis, {plural(self.runs - runs, 'run')}: {plural(len(self.schedule), 'event')}, "
                f"{plural(left.nodes, 'replica')}, "
                f"{plural(left.concurrency, 'client')}, {left.rate:g} operations per second for {left.time_limit_s:g} s"
            )

    def cut_time(self) -> None:
        """End the load soon after the violation, and leave out the faults that had not begun by then."""
        while self.rehearsal.violation_s is not None:
            limit_s = float(math.ceil(self.rehearsal.violation_s + 0.5))
            if limit_s >= self.test.time_limit_s:
                return
            late = frozenset(e.fault_id for e in self.schedule if e.action == INJECT and e.at_s >= limit_s)
            shorter = dataclasses.replace(self.test, time_limit_s=limit_s)
            if not self.first_that_fails([(shorter, self.schedule.without(late))]):
                return
            self._say(f"the load ends at {limit_s:g} s, {plural(self._count(), 'fault')}")

    def drop_faults(self) -> bool:
        """Delta debugging over the faults. Returns whether it completed."""
        parts = 2
        while True:
            faults = [event.fault_id for event in self.schedule if event.action == INJECT]
            if not faults:
                return True
            parts = min(parts, len(faults))
            size = math.ceil(len(faults) / parts)
            chunks = [frozenset(faults[i : i + size]) for i in range(0, len(faults), size)]
            candidates = [(self.test, self.schedule.without(frozenset(faults) - chunk)) for chunk in chunks]
            if parts <= 2 or len(chunks) == 1:
                candidates = candidates if len(chunks) > 1 else []
            candidates += [(self.test, self.schedule.without(chunk)) for chunk in chunks]
            found = self.first_that_fails(candidates)
            if self.out_of_time:
                return False
            if found:
                left = self._count()
                self._say(f"{plural(left, 'fault')} left")
                parts = 2 if left <= len(faults) // 2 else max(2, parts - 1)
            elif parts >= len(faults):
                return True
            else:
                parts *= 2

    def simplify(self) -> None:
        """Try fewer replicas, clients and operations."""
        test = self.test
        replace = dataclasses.replace
        if test.nodes > FEW_NODES and self._takes([replace(self.test, nodes=FEW_NODES)]):
            self._say(f"{FEW_NODES} replicas")
        if self._takes([replace(self.test, concurrency=n) for n in CLIENTS if n < test.concurrency]):
            self._say(plural(self.test.concurrency, "client"))
        if self._takes([replace(self.test, rate=rate) for rate in RATES if rate < test.rate]):
            self._say(f"{self.test.rate:g} operations per second")

    def _takes(self, tests: Sequence[Test]) -> bool:
        return self.first_that_fails([(test, self.schedule) for test in tests])

    def _count(self) -> int:
        return sum(event.action == INJECT for event in self.schedule)


def _symptoms(rehearsal: Rehearsal) -> frozenset[str]:
    return frozenset((*rehearsal.failures, STUCK) if rehearsal.is_stuck else rehearsal.failures)


def _key(test: Test, schedule: Schedule) -> Key:
    """The parts in which candidates may differ."""
    return test.nodes, test.concurrency, test.rate, test.time_limit_s, schedule


def shrink(
    test: Test, schedule: Schedule, *, jobs: int, budget_s: float, say: Listener, stored: Collection[str] = ()
) -> Shrunk:
    """The shortest run found within `budget_s` seconds that fails as `test` under `schedule` does.

    `say` is called at every step, and if the run in simulation shows none of the failures in `stored`, those of its
    stored results. Once something has been removed, an interrupt or a killed process ends the search as the end of the
    budget does; before, the interrupt or HarnessError is raised. Raises OperatorError if the run does not fail in
    simulation.
    """
    deadline_s = time.monotonic() + budget_s
    shrinker = _Shrinker(test, schedule, jobs=jobs, deadline_s=deadline_s, say=say)
    is_minimal = False
    try:
        if not shrinker.fails:
            raise OperatorError(
                f"the run does not fail in simulation (it is {verdict_word(shrinker.rehearsal.valid)}: "
                f"{shrinker.rehearsal.reason[:200]}); there is nothing to shrink"
            )
        if stored and shrinker.symptoms.isdisjoint(stored):
            shows = ", ".join(sorted(shrinker.symptoms))
            say(f"in simulation the run shows {shows}, not {', '.join(stored)} as stored: shrinking what it shows")
        shrinker.cut_time()
        is_minimal = shrinker.drop_faults()
        if is_minimal:
            shrinker.simplify()
            shrinker.cut_time()
            shrinker.search()
            is_minimal = shrinker.drop_faults()
    except KeyboardInterrupt:
        if shrinker.schedule == schedule and shrinker.test == test:
            raise
        say("interrupted; the shortest run so far is kept")
        is_minimal = False
    except BrokenProcessPool:
        if shrinker.schedule == schedule and shrinker.test == test:
            raise HarnessError(KILLED + (f": try --jobs {jobs - 1}" if jobs > 1 else "")) from None
        say(f"{KILLED}; the shortest run so far is kept")
        is_minimal = False
    finally:
        with contextlib.suppress(KeyboardInterrupt):  # even after a second one, what was found is kept
            shrinker.close()
    return Shrunk(
        test=shrinker.test,
        schedule=shrinker.schedule,
        rehearsal=shrinker.rehearsal,
        runs=shrinker.runs,
        is_minimal=is_minimal,
    )
