"""`harness explain RUN`: where the violation of a simulated run was decided.

Writes explain.json to the run's directory and rewrites its report with the curve. An interrupted search stores the
moments that it has examined, unless that would replace a decisive moment found by an earlier search.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import time

from harness.commands.shrink import replaying
from harness.errors import OperatorError
from harness.exploration.deciding import Deciding, Search, Violation, decide, violations_of
from harness.exploration.rehearsal import SIMULATED, parts_of
from harness.pasteable import harness_command, pasteable
from harness.report import OutputConsole
from harness.report.deciding import jump_of, sentences_of
from harness.report.page import write_report
from harness.signals import ignore_repeated_signals, interrupted_by_signals
from harness.store import A_COPY, RunDir, RunStatus, StoreError, require_writable, store_of
from harness.test import Test, test_from_json
from nemesis.schedule import ScheduleError, load_schedule

__all__ = ["MAX_CONTINUATIONS", "explain_command"]

MAX_CONTINUATIONS = 100_000
"""Limit of one command. Those of a short run take a twentieth of a second each, so this is an hour or two."""

MIN_RUNS = 2
"""Minimum continuations per moment: with a single one no moment could ever be found decisive."""

UNDECIDED = 2
"""Exit status if no decisive moment was found."""


def explain_command(arguments: argparse.Namespace) -> int:
    """Explain a stored run. Returns 0 if a moment was found, else 2, also if interrupted before. Raises OperatorError
    for a run that is valid, was not simulated, or is not reproduced by this version."""
    if arguments.points * arguments.runs > MAX_CONTINUATIONS:
        raise OperatorError(f"--points times --runs must be at most {MAX_CONTINUATIONS:,} continuations")
    if arguments.runs < MIN_RUNS:
        raise OperatorError(
            f"--runs {arguments.runs} is too few to tell a deciding moment from chance: give at least {MIN_RUNS}"
        )
    run_dir = store_of(arguments).find(arguments.run)
    if run_dir.status is RunStatus.RUNNING:
        raise OperatorError(f"{run_dir.name} is still running: wait until it has ended")
    test = test_from_json(run_dir.read_test())
    if test.cluster != SIMULATED:
        raise OperatorError(
            f"{run_dir.name} ran on cluster {test.cluster}, where a seed does not reproduce a run: only runs of "
            f"--cluster sim can be explained; {replaying(run_dir.path)}"
        )
    results = run_dir.read_results()
    require_writable(run_dir.path, A_COPY)
    try:
        parts = parts_of(test, load_schedule(str(run_dir.schedule_path)))
    except ScheduleError as error:
        raise OperatorError(f"{run_dir.name}: {error}") from None
    violations = _chosen(violations_of(parts, results, run_dir.history_path), arguments.check)
    console = OutputConsole(stderr=True)
    began_s = time.monotonic()

    def say(line: str) -> None:
        console.print_line(f"  {time.monotonic() - began_s:5.0f} s  {line}")

    seed = test.seed if arguments.seed is None else arguments.seed
    search = Search(
        seed=seed, points=arguments.points, runs=arguments.runs, jobs=arguments.jobs or os.cpu_count() or 1, say=say
    )
    with interrupted_by_signals():  # plain SIGTERM would leave the continuations' temporary files behind
        found = decide(parts, violations, run_dir.history_path, search)
        if found.is_interrupted:
            ignore_repeated_signals()
    again = f"{harness_command()} explain {pasteable(str(run_dir.path))} --points {search.points} --runs {search.runs}"
    again += f" --seed {seed}" + (f" --check {shlex.quote(arguments.check)}" if arguments.check else "")
    explanation = {**found.to_json(), "repeat": again}
    is_kept = found.jump is not None or not found.is_interrupted or _jump_before(run_dir) is None
    unwritten: StoreError | None = None
    try:
        if is_kept:
            run_dir.write_explanation(explanation)
            write_report(run_dir.path, test.to_json(), results, run_dir.history_path)
    except StoreError as error:
        unwritten = error  # reported after the findings, which took minutes
    if arguments.json:
        print(json.dumps(explanation, indent=2, sort_keys=True))
    else:
        _show(found, run_dir, test, again)
    if not is_kept:
        console.print_line("the report keeps the moment found earlier")
    if unwritten is not None:
        raise unwritten
    return 0 if found.jump is not None else UNDECIDED


def _jump_before(run_dir: RunDir) -> tuple[float, float] | None:
    """The moment that an earlier search found; None if there is none, or it cannot be read."""
    try:
        return jump_of(run_dir.read_explanation() or {})
    except StoreError:
        return None


def _chosen(violations: list[Violation], check: str) -> list[Violation]:
    chosen = [one for one in violations if check in ("", one.check)]
    if not chosen:
        known = ", ".join(dict.fromkeys(one.check for one in violations))
        raise OperatorError(
            f"--check {check}: the run has no violation of it to explain; checks with violations: {known}"
        )
    return chosen


def _show(found: Deciding, run_dir: RunDir, test: Test, again: str) -> None:
    for sentence in sentences_of(found.to_json()):
        print(sentence)
    for one in found.account:
        print(f"  {one.at_s:10.6f} s  {one.text}")
    undecided = sum(point.undecided for point in found.points)
    if undecided:
        print(f"{undecided} continuations are not counted: their checks ran out of time or memory")
    print(f"seed    {found.seed}")
    print(f"report  {run_dir.report_path}")
    print(f"repeat  {again}")
