"""`harness replay SCHEDULE`: runs a schedule, or that of a run, again, in simulation or on real hosts, and counts how
often it fails."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from harness.commands.run import announce, enter_namespace, prepare, require_rereadable
from harness.errors import EXIT_INVALID, HarnessError, OperatorError, SystemUnderTestError
from harness.execution import perform
from harness.faults.triggers import count_triggers
from harness.history_writer import read_history
from harness.report import OutputConsole, print_summary
from harness.seeded import MAX_SEED
from harness.store import LATEST, RunDir, Store, StoreError, without_latest
from harness.test import Test, test_from_json
from harness.units import plural

__all__ = ["replay_command"]


def replay_command(arguments: argparse.Namespace) -> int:
    """Run a schedule `--times` times. Returns 1 if any run was invalid, else 2 if any was unknown, else 0.

    A schedule next to a test.json (in a run's directory) is run with that test's options, except for those given on the
    command line. Raises OperatorError if there is no such schedule.
    """
    store = Store(arguments.store)
    path = _schedule_path(arguments.schedule, store)
    require_rereadable(str(path), arguments.times)
    arguments.nemesis, arguments.nemesis_schedule = "none", str(path)
    _take_over(arguments, path.parent, arguments.given)
    console = OutputConsole(stderr=True)
    verdicts: list[bool | str] = []
    came = waited = 0
    failure: OperatorError | SystemUnderTestError | HarnessError | None = None
    try:
        for number in range(arguments.times):
            prepared = prepare(arguments)
            if number == 0:
                enter_namespace(prepared, arguments)
                announce(prepared, console)
            parts = prepared.parts
            if number:
                seed = (parts.test.seed + number) % (MAX_SEED + 1)
                parts = dataclasses.replace(parts, test=dataclasses.replace(parts.test, seed=seed))
            if arguments.times > 1:
                console.print_line(f"run {number + 1} of {arguments.times}, seed {parts.test.seed}")
            run_dir, results = perform(parts, store, console)
            verdicts.append(results["valid"])
            triggers = count_triggers(read_history(run_dir.history_path))
            came, waited = came + triggers[0], waited + triggers[1]
            print_summary(results, OutputConsole(), test=parts.test.to_json(), report_path=run_dir.report_path)
            if results.get("interrupted") is not None and number + 1 < arguments.times:
                left = plural(arguments.times - number - 1, "run")
                console.print_line(f"stopped by {results['interrupted']}; {left} not started")
                break
    except (OperatorError, SystemUnderTestError, HarnessError) as error:  # what earlier runs showed is not lost
        if not verdicts:
            raise
        failure = error
    hits = sum(verdict is False for verdict in verdicts)
    unknown = sum(verdict not in (True, False) for verdict in verdicts)
    print(f"invalid in {hits} of {len(verdicts)} runs" + (f", unknown in {unknown}" if unknown else ""))
    if waited:
        print(f"triggers waited for: {came} of {waited} occurred")
    if console.reader_is_gone:
        raise BrokenPipeError
    if failure is not None:
        if hits:
            failure.exit_status = EXIT_INVALID
        raise failure
    return 1 if hits else 2 if any(verdict is not True for verdict in verdicts) else 0


def _schedule_path(text: str, store: Store) -> Path:
    """The file of a schedule: `text` itself, that of a run of this store, or the one in the directory `text`. Raises
    OperatorError."""
    if text != LATEST and os.path.exists(text) and not os.path.isdir(text):  # includes pipes
        return Path(without_latest(text))
    try:
        path = store.find(text).schedule_path
        problem = f"run {text!r} has no schedule.json"
    except StoreError as error:
        path = RunDir(Path(text)).schedule_path  # a directory without a test.json is not a run
        problem = f"{text!r} is neither a schedule file nor a run: {error}"
        if text == LATEST:
            raise OperatorError(problem) from None
    if not os.path.isfile(path):
        raise OperatorError(problem)
    return path


def _take_over(arguments: argparse.Namespace, directory: Path, given: Sequence[str]) -> None:
    """Take options that are not given from the test in a run's directory. Cluster options, and the metrics to read, are
    taken only for the same cluster."""
    if not (directory / "test.json").exists():
        return
    test: Test = test_from_json(RunDir(directory).read_test())
    names = {
        "system": test.system, "nodes": test.nodes, "workload": test.workload, "time_limit": test.time_limit_s,
        "concurrency": test.concurrency, "rate": test.rate, "seed": test.seed, "settings": list(test.settings.items()),
        "operation_timeout": test.operation_timeout_s, "fail_fast": test.fail_fast,
        "client": test.client, "checker_timeout": test.checker_timeout_s, "checker_memory": test.checker_memory_mb,
        "cluster": test.cluster,
    }  # fmt: skip
    if "cluster" not in given or arguments.cluster == test.cluster:
        names |= {**test.cluster_options, "metrics": list(test.metrics)}
    for name, value in names.items():
        if name not in given:
            setattr(arguments, name, value)
