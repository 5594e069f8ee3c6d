"""Running many seeds across cores, and tallying the results."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Protocol

from checker.workers import worker_pool
from harness.errors import HarnessError, OperatorError
from harness.exploration.mixes import LONGER_THAN_S, ODDS, QUIET_END_S, QUIET_START_S, Odds, random_mix
from harness.exploration.rehearsal import Rehearsal, rehearse_test, usable_choices
from harness.test import Test
from nemesis.schedule import Schedule

__all__ = [
    "MAX_KEPT_FAILURES",
    "Candidate",
    "Guidance",
    "Tally",
    "elects_leaders",
    "explore",
    "mix_for",
    "require_room",
    "summary_of",
]

MAX_KEPT_FAILURES = 100
"""Most failures listed by one exploration; a hundred are enough to begin with."""


def elects_leaders(test: Test) -> bool:
    """Whether the replicas of a test elect their leader themselves."""
    return test.settings.get("replication", "dledger") == "dledger"


def require_room(test: Test) -> None:
    """Raise OperatorError if the load is too short for a random mix to have faults."""
    if test.time_limit_s <= LONGER_THAN_S:
        raise OperatorError(
            f"--time-limit {test.time_limit_s:g} leaves no room for random faults: the first {QUIET_START_S:g} s and "
            f"the last {QUIET_END_S:g} s of the load have none; give more than {LONGER_THAN_S:g}"
        )


def mix_for(
    test: Test, seed: int, choices: Sequence[tuple[str, Sequence[str]]], *, odds: Odds = ODDS
) -> tuple[Test, Schedule]:
    """The run of one seed: the test with that seed, and the faults that follow from the seed."""
    seeded = dataclasses.replace(test, seed=seed)
    return seeded, random_mix(
        choices,
        random.Random(f"{seed}/mix"),
        time_limit_s=test.time_limit_s,
        nodes=test.nodes,
        elects=elects_leaders(test),
        odds=odds,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A proposed run. `test` has its seed."""

    number: int
    """From 0, in the order in which runs are proposed."""
    test: Test
    schedule: Schedule
    operators: tuple[str, ...] = ()
    """The operators that made it from earlier runs (harness.exploration.mutating); empty for a random mix."""
    kinds: tuple[int, ...] = ()
    """The kinds of faults that were drawn for it, as positions in the choices."""


class Guidance(Protocol):
    """Decides what is run next from the results of earlier runs. See harness.exploration.guide."""

    def may_propose(self) -> bool:
        """Whether enough results are known to propose the next run."""

    def propose(self, seed: int) -> Candidate:
        """The next run; its seed is `seed`, unless it repeats the beginning of an earlier run."""

    def note(self, candidate: Candidate, rehearsal: Rehearsal) -> None:
        """Take the result of a run; runs may end in any order."""


@dataclass(slots=True)
class Tally:
    """The results of the seeds so far."""

    runs: int = 0
    valid: int = 0
    operations: int = 0
    faults: int = 0
    simulated_s: float = 0.0
    failures: list[Rehearsal] = field(default_factory=list)
    """Invalid and unknown runs, in the order in which they ended, MAX_KEPT_FAILURES at most."""
    by_reason: dict[str, int] = field(default_factory=dict)

    def add(self, rehearsal: Rehearsal, *, time_limit_s: float) -> None:
        """Count one run."""
        self.runs += 1
        self.operations += rehearsal.operations
        self.faults += rehearsal.faults
        self.simulated_s += time_limit_s
        if rehearsal.valid is True:
            self.valid += 1
            return
        word = "invalid" if rehearsal.valid is False else "unknown"
        what = f"{word}: {', '.join(rehearsal.failed_checks) or rehearsal.reason[:80]}"
        self.by_reason[what] = self.by_reason.get(what, 0) + 1
        if len(self.failures) < MAX_KEPT_FAILURES:
            self.failures.append(rehearsal)
        elif rehearsal.valid is False:  # a violation replaces the last unknown run
            unknown = [place for place, other in enumerate(self.failures) if other.valid is not False]
            if unknown:
                self.failures[unknown[-1]] = rehearsal

    @property
    def invalid(self) -> int:
        return sum(count for what, count in self.by_reason.items() if what.startswith("invalid"))

    @property
    def unknown(self) -> int:
        return self.runs - self.valid - self.invalid


def explore(
    test: Test,
    *,
    seeds: Iterator[int],
    jobs: int,
    budget_s: float,
    stop_at_first: bool,
    on_result: Callable[[Tally, Rehearsal], None],
    pool: concurrent.futures.Executor | None = None,
    guidance: Guidance | None = None,
) -> Tally:
    """Run seeds until they or the time are used up; `on_result` is called after each run.

    Runs are performed by `jobs` processes, those of `pool` or else new ones; none is begun after `budget_s` seconds.
    With `stop_at_first` the first run that is not valid ends the exploration. `guidance`, if given, decides what is run
    for a seed. Raises OperatorError if the test asks for something that simulation does not support.
    """
    choices = usable_choices(test)
    tally = Tally()
    deadline_s = time.monotonic() + budget_s
    with worker_pool(jobs) if pool is None else contextlib.nullcontext(pool) as workers:
        running: dict[concurrent.futures.Future[Rehearsal], Candidate] = {}

        def begin() -> None:
            while len(running) < jobs and time.monotonic() < deadline_s:
                if guidance is not None and not guidance.may_propose():
                    return
                seed = next(seeds, None)
                if seed is None:
                    return
                candidate = _mix(test, seed, choices) if guidance is None else guidance.propose(seed)
                work = _rehearse if guidance is None else _rehearse_with_facts
                try:
                    running[workers.submit(work, candidate)] = candidate
                except BrokenProcessPool:  # a worker was killed while idle, or just now
                    raise killed(candidate) from None

        def killed(candidate: Candidate) -> HarnessError:
            return _killed([candidate, *running.values()], jobs, is_guided=guidance is not None)

        begin()
        while running:
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in sorted(done, key=lambda each: each.exception() is not None):  # results before exceptions
                candidate = running.pop(future)
                try:
                    rehearsal = future.result()
                except BrokenProcessPool:  # it ends all running workers
                    raise killed(candidate) from None
                if guidance is not None:
                    guidance.note(candidate, rehearsal)
                    rehearsal = dataclasses.replace(rehearsal, facts=())
                tally.add(rehearsal, time_limit_s=test.time_limit_s)
                on_result(tally, rehearsal)
                if stop_at_first and rehearsal.valid is not True:
                    for waiting in running:
                        waiting.cancel()
                    return tally
            begin()
    return tally


def _mix(test: Test, seed: int, choices: Sequence[tuple[str, Sequence[str]]]) -> Candidate:
    seeded, schedule = mix_for(test, seed, choices)
    return Candidate(number=seed, test=seeded, schedule=schedule)


def _rehearse(candidate: Candidate) -> Rehearsal:
    return rehearse_test(candidate.test, candidate.schedule)


def _rehearse_with_facts(candidate: Candidate) -> Rehearsal:
    found = rehearse_test(candidate.test, candidate.schedule, with_facts=True)
    return dataclasses.replace(found, schedule=candidate.schedule) if found.valid is not True else found


def _killed(unfinished: Sequence[Candidate], jobs: int, *, is_guided: bool) -> HarnessError:
    """The error to raise when one of the processes that ran these candidates was killed."""
    killed = "a process that ran a simulation was killed, perhaps because memory ran out"
    fewer = f"--jobs {jobs - 1}" if jobs > 1 else ""
    if is_guided:  # what the guide has learned is lost, and no seed restores it
        return HarnessError(f"{killed}: {f'try {fewer}' if fewer else 'free some'}; a guided search starts over")
    seed = min(candidate.test.seed for candidate in unfinished)
    return HarnessError(f"{killed}: continue with {fewer}{' ' if fewer else ''}--seed {seed}")


def summary_of(tally: Tally) -> Mapping[str, object]:
    """The tally as JSON data."""
    return {
        "runs": tally.runs,
        "valid": tally.valid,
        "invalid": tally.invalid,
        "unknown": tally.unknown,
        "operations": tally.operations,
        "faults": tally.faults,
        "simulated_s": tally.simulated_s,
        "by_reason": dict(sorted(tally.by_reason.items())),
        "failures": [
            {"seed": f.seed, "valid": f.valid, "reason": f.reason, "checks": list(f.failed_checks)}
            for f in tally.failures
        ],
    }
