"""One simulated run of which only the results are kept."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness import registry
from harness.clusters.sim.simulation import rare_collections
from harness.clusters.sim.steps import StepObserver
from harness.errors import HarnessError, OperatorError, SystemUnderTestError
from harness.execution import Parts, TestClock, rehearse
from harness.exploration.behaviour import Fact, facts_of
from harness.exploration.symptoms import STUCK, failures_of, is_stuck
from harness.report import OutputConsole
from harness.scratch import scratch_directory
from harness.systems.base import LimitsClusters
from harness.test import ALL, Test
from harness.workloads.choice import make_workload
from nemesis.forms import is_of_all
from nemesis.protocol import Nemesis
from nemesis.schedule import Schedule

__all__ = ["SIMULATED", "STUCK", "Rehearsal", "parts_of", "rehearse_test", "require_simulated", "usable_choices"]

SIMULATED = "sim"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The result of one simulated run. `valid` is True, False or "unknown"."""

    seed: int
    valid: bool | str
    reason: str
    failed_checks: tuple[str, ...]
    """Names of the checks that found a violation."""
    failures: tuple[str, ...] = ()
    """The same, by broken rules for checks that have rules (harness.exploration.symptoms)."""
    is_stuck: bool = False
    """Whether the replicas did not all come back and converge although all faults were healed."""
    faults: int
    operations: int
    took_s: float
    violation_s: float | None = None
    """When the earliest reported violation became visible (s of the test's time): that of an invariant, or the return
    of the last operation of a check's witness."""
    facts: tuple[Fact, ...] = ()
    """Its behaviour, if requested (harness.exploration.behaviour)."""
    checks: Mapping[str, bool | str] = field(default_factory=dict)
    """The verdict of each check, by its name."""
    checks_of_the_run: tuple[str, ...] = ()
    """Names of those checks that do not judge the clients' history: the system's, the cluster's and the run's."""
    schedule: Schedule | None = None
    """Its faults, if they do not follow from the seed alone."""

    @property
    def symptoms(self) -> tuple[str, ...]:
        """The signs of a failure: failed checks, and STUCK. Empty for a run without any."""
        return (*self.failed_checks, STUCK) if self.is_stuck else self.failed_checks


def require_simulated(system: str, instead: str) -> None:
    """Raise OperatorError for a system that cannot be simulated; `instead` tells what to do instead."""
    system_class = registry.load("systems", system)
    if isinstance(system_class, LimitsClusters):
        reason = system_class.cannot_run_on(registry.load("clusters", SIMULATED))
        if reason is not None:
            raise OperatorError(f"{reason}; {instead}")


def require_faults(test: Test) -> None:
    """Raise OperatorError for a search of seeds without faults, since seeds differ mainly in their mix of faults."""
    if not test.nemesis:
        raise OperatorError("--nemesis none leaves no faults to mix: omit it for all nemeses, or name some")


def parts_of(test: Test, schedule: Schedule) -> Parts:
    """The parts of a simulated run of `test` under `schedule`. Raises OperatorError for unknown names."""
    nemeses: dict[str, Nemesis] = {
        name: registry.load("nemeses", name) for name in dict.fromkeys(event.nemesis for event in schedule)
    }
    system_class = registry.load("systems", test.system)
    return Parts(
        test=dataclasses.replace(test, cluster=SIMULATED),
        cluster_class=registry.load("clusters", SIMULATED),
        cluster_reason="simulated",
        system_class=system_class,
        workload=make_workload(test.workload, system_class=system_class, system=test.system, settings=test.settings),
        nemeses=nemeses,
        schedule=schedule,
    )


def usable_choices(test: Test) -> list[tuple[str, list[str]]]:
    """The nemeses that a test asks for (all if it names none), with the variants that simulation supports.

    Raises OperatorError for a choice of which simulation supports nothing.
    """
    from harness.faults.target import PlannedTarget

    target = PlannedTarget(
        registry.load("clusters", SIMULATED),
        [f"n{i}" for i in range(1, test.nodes + 1)],
        system_class=registry.load("systems", test.system),
        settings=test.system_settings,
    )
    asked: dict[str, list[str | None]] = {}
    for choice in test.nemesis:  # a nemesis that is named twice gets both variants
        asked.setdefault(choice.name, []).append(choice.variant)
    if asked.pop(ALL, None) is not None or not asked:
        nemeses = registry.load_all("nemeses")
        if problems := test.nemesis_problems(nemeses):
            raise OperatorError("; ".join(problems))
        nemeses = {name: nemesis for name, nemesis in nemeses.items() if name in asked or is_of_all(nemesis)}
    else:
        nemeses = {name: registry.load("nemeses", name) for name in asked}
    found = []
    for name, nemesis in nemeses.items():
        usable: list[str] = []
        for variant in asked.get(name, [None]):
            try:
                fitting, problems = target.usable(nemesis, variant)
            except ValueError as error:
                raise OperatorError(str(error)) from None
            if not fitting and name in asked:
                raise OperatorError(f"--nemesis {name}: {'; '.join(problems)}")
            usable += [one for one in fitting if one not in usable]
        if usable:
            found.append((name, usable))
    return found


def rehearse_test(test: Test, schedule: Schedule, *, with_facts: bool = False) -> Rehearsal:
    """Run a test in simulation and judge it. A run that could not even start counts as `unknown`. `with_facts` collects
    the facts of its behaviour, which adds a few per cent to its time. Raises KeyboardInterrupt if a signal ended its
    load, since that is not the requested run."""
    with rare_collections(), _without_last_resort():
        return _rehearse(test, schedule, with_facts=with_facts)


@contextlib.contextmanager
def _without_last_resort() -> Iterator[None]:
    """Log nothing if logging is not configured: Python would write the warnings of thousands of runs to standard error
    without naming the run. A run that is kept is performed again, and logs them to its own file."""
    nowhere = logging.NullHandler()
    logging.getLogger().addHandler(nowhere)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(nowhere)


def _rehearse(test: Test, schedule: Schedule, *, with_facts: bool) -> Rehearsal:
    began_s = time.perf_counter()
    seen: list[tuple[StepObserver, TestClock]] = []
    parts = parts_of(test, schedule)
    if with_facts:
        parts = dataclasses.replace(parts, on_made=lambda cluster, clock: seen.append((StepObserver(cluster), clock)))
    try:
        with scratch_directory("rehearsal") as directory:
            results = rehearse(parts, directory, OutputConsole(file=io.StringIO(), quiet=True))
    except (SystemUnderTestError, HarnessError) as error:
        results = {"valid": "unknown", "reason": str(error), "checks": {}, "faults": [], "ops": {}}
    if results.get("interrupted") is not None:
        raise KeyboardInterrupt
    return Rehearsal(
        seed=test.seed,
        valid=results["valid"],
        reason=results["reason"],
        failed_checks=tuple(name for name, check in results["checks"].items() if check["valid"] is False),
        failures=failures_of(results),
        checks={name: check["valid"] for name, check in results["checks"].items()},
        checks_of_the_run=tuple(results.get("checks_of_the_run", ())),
        is_stuck=is_stuck(results),
        faults=len(results["faults"]),
        operations=results["ops"].get("ok", 0),
        took_s=time.perf_counter() - began_s,
        violation_s=_violation_s(results),
        facts=_facts(*seen[0], results["faults"]) if seen else (),
    )


def _facts(observer: StepObserver, clock: TestClock, faults: Sequence[Mapping[str, Any]]) -> tuple[Fact, ...]:
    """The facts of the run; if the load never began, their times are the loop's."""
    return facts_of(observer.steps, faults, zero_s=clock.zero_s or 0.0)


def _violation_s(results: dict[str, Any]) -> float | None:
    seen: list[float] = []
    for check in results["checks"].values():
        if check["valid"] is not False:
            continue
        operations = (check.get("witness") or {}).get("operations")
        times = [op["returned_ns"] or op["invoked_ns"] for op in operations or () if op.get("invoked_ns") is not None]
        if times:
            seen.append(float(max(times)) / 1e9)
        seen += [violation["time_s"] for violation in check.get("violations", ())[:1]]
    return min(seen, default=None)
