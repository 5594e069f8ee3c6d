"""Performing the runs of findings as `harness run` would: one after the other, alternating finding and control."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from harness.cli_parser import build_parser
from harness.commands.run import Prepared, prepare
from harness.commands.series import derived_seed
from harness.errors import InterruptedStartError, OperatorError, SystemUnderTestError
from harness.execution import perform
from harness.gallery.finding import FOUND, SIDES, Finding
from harness.gallery.recording import record_of, run_of
from harness.report import OutputConsole
from harness.store import Store
from harness.systems.base import Fetched
from harness.units import clip

__all__ = ["Performed", "perform_finding", "prepared_runs"]


@dataclass(slots=True)
class Performed:
    """The result of a finding's runs. `record` is None if they could not be completed, and `problem` says why."""

    record: dict[str, Any] | None = None
    problem: str | None = None
    was_interrupted: bool = False


def prepared_runs(
    finding: Finding, *, times: int, seed: int, cluster: str | None, say: Callable[[str], None]
) -> list[tuple[str, Prepared]]:
    """(side, run) in the order of execution. Checks that the runs are possible here and fetches the system's packages,
    which `say` reports. The two runs of one turn share a seed. Raises OperatorError."""
    parser = build_parser()
    chosen = [] if cluster is None else ["--cluster", cluster]
    runs = []
    for turn in range(times):
        for side in SIDES:
            words = ["run", *finding.words(side), "--seed", str(derived_seed(seed, turn)), *chosen]
            runs.append((side, prepare(parser.parse_args(words))))
    for _, prepared in runs[: len(SIDES)]:
        system_class = prepared.parts.system_class
        if isinstance(system_class, Fetched):
            system_class.fetch(say, prepared.parts.test.system_settings)
    return runs


def perform_finding(
    finding: Finding, runs: Sequence[tuple[str, Prepared]], store: Store, console: OutputConsole
) -> Performed:
    """Perform every run. A run that does not start is counted as such; a problem for the operator ends the finding."""
    kept: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    performed = Performed()
    shown = None
    for number, (side, prepared) in enumerate(runs, 1):
        head = f"{finding.name}: run {number} of {len(runs)}, {side}"
        try:
            run_dir, results = perform(prepared.parts, store, console)
        except OperatorError as error:
            performed.problem = str(error)
            return performed
        except InterruptedStartError as error:
            performed.was_interrupted = True
            performed.problem = str(error)
            return performed
        except SystemUnderTestError as error:
            seed = prepared.parts.test.seed
            kept[side].append({"seed": seed, "outcome": "not started", "reason": clip(str(error), 300)})
            console.print_line(f"{head}: did not start: {error}")
            continue
        if results.get("interrupted") is not None:
            performed.was_interrupted = True
            performed.problem = f"interrupted by {results['interrupted']}"
            return performed
        run = run_of(finding, results)
        kept[side].append(run)
        if run["outcome"] == FOUND and side == "finding":
            shown = results
        words = f"{head}: {run['outcome']}  {run_dir.name}"
        console.print_line(words)
    day, cluster = f"{datetime.now(UTC):%Y-%m-%d}", runs[0][1].parts.test.cluster
    performed.record = record_of(finding, kept, day=day, cluster=cluster, shown=shown)
    return performed
