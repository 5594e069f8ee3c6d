"""`harness analyze`: check a stored run again and rewrite its results and report.

The history is judged again. What only the live run could observe (replica agreement, leaders, trouble in its phases) is
taken from the stored results. A run that died before it had results is judged by its history alone, and is `unknown` at
best, because its replicas were not observed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from checker.history import HistoryError as DisorderedHistory
from harness import registry
from harness.elapsed_line import elapsed_line
from harness.errors import OperatorError
from harness.execution import exit_status_of, judge_run
from harness.report import OutputConsole, print_summary
from harness.report.page import write_report
from harness.report.store_page import update_store_page
from harness.runner import Observed
from harness.store import RunDir, RunStatus, StoreError, store_of
from harness.systems.base import CheckOutcome
from harness.test import test_from_json
from harness.workloads.base import Workload
from harness.workloads.choice import make_workload

__all__ = ["analyze_command"]

FACTS = ("started_at", "run_id", "cluster_detail", "hosts", "duration_s", "version", "git_commit", "git_dirty")


def analyze_command(arguments: argparse.Namespace) -> int:
    """Judge a stored run again. Returns the exit status of the verdict."""
    store = store_of(arguments)
    run_dir = store.find(arguments.run)
    if run_dir.status is RunStatus.RUNNING:
        raise OperatorError(f"{run_dir.name} is still running: wait until it has ended")
    test = test_from_json(run_dir.read_test())
    if arguments.checker_timeout is not None:
        test = dataclasses.replace(test, checker_timeout_s=arguments.checker_timeout)
    if arguments.checker_memory is not None:
        test = dataclasses.replace(test, checker_memory_mb=arguments.checker_memory)
    problems = test.problems()
    if problems:
        raise OperatorError("; ".join(problems))
    workload = make_workload(
        test.workload,
        system_class=registry.load("systems", test.system),
        system=test.system,
        settings=test.settings,
    )
    before = _stored_results(run_dir)
    observed = _observed_from(before, workload)
    facts = {name: before[name] for name in FACTS if name in before}
    try:
        with elapsed_line(f"judging {run_dir.name}"):
            results = judge_run(run_dir, test, workload, observed, facts, judged=sum(before.get("ops", {}).values()))
    except DisorderedHistory as error:
        raise OperatorError(f"{run_dir.history_path} is damaged: {error}") from None
    unwritten: StoreError | None = None
    try:
        run_dir.write_results(results)
        write_report(run_dir.path, test.to_json(), results, run_dir.history_path)
    except StoreError as error:
        unwritten = error  # reported after the verdict, which is known anyway
    if unwritten is None and run_dir.path.parent.parent == store.root.resolve():
        update_store_page(store)
    show = OutputConsole(stderr=arguments.json)
    report_path = run_dir.report_path if unwritten is None else None
    print_summary(results, show, test=test.to_json(), report_path=report_path)
    if arguments.json:
        print(json.dumps(results, indent=2, sort_keys=True))
    if unwritten is not None:
        raise unwritten
    return exit_status_of(results)


def _stored_results(run_dir: RunDir) -> Mapping[str, Any]:
    if not run_dir.results_path.exists():
        return {}
    try:
        results = run_dir.read_results()
        if results and (problem := _problem_of(results)):
            raise StoreError(f"{run_dir.results_path} is damaged: {problem}")
    except StoreError as error:
        raise OperatorError(f"{error}; move it away to judge the run by its history alone") from None
    return results


def _problem_of(results: Mapping[str, Any]) -> str | None:
    """Why stored results cannot be used for a new judgement; None if they can."""
    checks = results.get("checks")
    if not isinstance(checks, dict) or not checks:
        return "it has no checks"
    for name, check in checks.items():
        whole = isinstance(check, dict) and type(check.get("reason")) is str
        if not whole or type(check.get("valid")) not in (bool, str):
            return f"check {name} has no verdict"
    for name in ("trouble", "checks_of_the_run"):
        texts = results.get(name, [])
        if not isinstance(texts, list) or not all(type(each) is str for each in texts):
            return f"its {name} is not a list of strings"
    system = results.get("system", {})
    if not isinstance(system, dict):
        return "its system is not an object"
    for name in ("ops", "unexpected_errors", "timeouts", "unexpected_exits"):
        counts = results.get(name, {})
        if not isinstance(counts, dict) or not all(type(count) is int for count in counts.values()):
            return f"its {name} are not counts"
    for name in ("interrupted", "stopped_at_first_violation", "final_reads_cut"):
        if results.get(name) is not None and type(results[name]) is not str:
            return f"{name} is not a string"
    for name, what in (("final_reads_from", "an index"), ("load_began_wall_ms", "a time")):
        if type(results.get(name)) not in (int, type(None)):
            return f"{name} is not {what}"
    return None


def _observed_from(before: Mapping[str, Any], workload: Workload) -> Observed:
    if not before:
        return Observed(trouble=["the run ended before it was judged, so the state of its replicas is unknown"])
    checks = before.get("checks", {})
    # An older harness did not list them. A workload's check that it did not declare is not one of them.
    of_the_run = before.get("checks_of_the_run", checks.keys() - set(workload.check_names))
    return Observed(
        interrupted=before.get("interrupted"),
        stopped_at_first_violation=before.get("stopped_at_first_violation"),
        load_began_wall_ms=before.get("load_began_wall_ms"),
        final_reads_from=before.get("final_reads_from"),
        final_reads_cut=before.get("final_reads_cut"),
        trouble=list(before.get("trouble", [])),
        unexpected_errors=dict(before.get("unexpected_errors", {})),
        timeouts=dict(before.get("timeouts", {})),
        unexpected_exits=dict(before.get("unexpected_exits", {})),
        system_checks={
            name: CheckOutcome(
                check["valid"],
                check["reason"],
                {key: value for key, value in check.items() if key not in ("valid", "reason")},
            )
            for name, check in checks.items()
            if name in of_the_run
        },
        system_facts=before.get("system", {}),
    )
