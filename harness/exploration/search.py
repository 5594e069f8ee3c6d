"""Running many seeds across cores, and keeping the tally."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

from checker.workers import worker_pool
from harness.errors import HarnessError
from harness.exploration.mixes import random_mix
from harness.exploration.rehearsal import Rehearsal, rehearse_test, usable_choices
from harness.test import Test
from nemesis.schedule import Schedule

__all__ = ["MAX_KEPT_FAILURES", "Tally", "explore", "mix_for", "summary_of"]

MAX_KEPT_FAILURES = 100
"""Failures listed by one exploration. Whoever has a hundred needs no further one to begin with."""


def mix_for(test: Test, seed: int, choices: Sequence[tuple[str, Sequence[str]]]) -> tuple[Test, Schedule]:
    """The run of one seed: the test with that seed, and the faults that the seed decides."""
    seeded = dataclasses.replace(test, seed=seed)
    return seeded, random_mix(
        choices,
        random.Random(f"{seed}/mix"),
        time_limit_s=test.time_limit_s,
        nodes=test.nodes,
        elects=test.settings.get("replication", "dledger") == "dledger",
    )


@dataclass(slots=True)
class Tally:
    """What came of the seeds so far."""

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
) -> Tally:
    """Run seeds until they or the time are used up; `on_result` hears of each run.

    `jobs` processes at a time, those of `pool` or else new ones; `budget_s` seconds, after which no further run is
    begun. With `stop_at_first` the first run that is not valid ends it. Raises OperatorError when the test names what
    simulation does not have.
    """
    choices = usable_choices(test)
    tally = Tally()
    deadline_s = time.monotonic() + budget_s
    with worker_pool(jobs) if pool is None else contextlib.nullcontext(pool) as workers:
        running: dict[concurrent.futures.Future[Rehearsal], int] = {}

        def begin() -> None:
            while len(running) < jobs and time.monotonic() < deadline_s:
                seed = next(seeds, None)
                if seed is None:
                    return
                running[workers.submit(_rehearse_seed, test, seed, choices)] = seed

        begin()
        while running:
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                seed = running.pop(future)
                try:
                    rehearsal = future.result()
                except BrokenProcessPool:
                    raise HarnessError(
                        f"a process that ran a simulation was killed, maybe for want of memory: "
                        f"--jobs {max(1, jobs - 1)} --seed {seed} goes on from here"
                    ) from None
                tally.add(rehearsal, time_limit_s=test.time_limit_s)
                on_result(tally, rehearsal)
                if stop_at_first and rehearsal.valid is not True:
                    for waiting in running:
                        waiting.cancel()
                    return tally
            begin()
    return tally


def _rehearse_seed(test: Test, seed: int, choices: Sequence[tuple[str, Sequence[str]]]) -> Rehearsal:
    return rehearse_test(*mix_for(test, seed, choices))


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
