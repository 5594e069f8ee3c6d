"""`harness shrink RUN`: finds the shortest run that still fails as a stored one does.

It is written as a directory with `schedule.json` and `test.json`, which `harness replay` reads together; the scripted
runs in tests/schedules have the same format.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path

from harness.atomic_files import write_output
from harness.errors import OperatorError
from harness.exploration.rehearsal import SIMULATED, rehearse_test, require_simulated
from harness.exploration.shrinking import Shrunk, shrink
from harness.exploration.symptoms import failures_of
from harness.pasteable import harness_command, pasteable
from harness.report import OutputConsole
from harness.signals import interrupted_by_signals
from harness.store import RunDir, require_writable, store_of
from harness.test import Test, test_from_json
from harness.units import plural
from nemesis.schedule import Schedule, ScheduleError, load_schedule, schedule_text

__all__ = ["replaying", "shrink_command"]


SCHEDULE, TEST = "schedule.json", "test.json"
"""Files of a shrunk run."""


def shrink_command(arguments: argparse.Namespace) -> int:
    """Shrink a stored run in simulation. Returns 0. Raises OperatorError for a run that cannot be shrunk."""
    run_dir = store_of(arguments).find(arguments.run)
    results = run_dir.read_results() if run_dir.results_path.exists() else {}
    if results.get("valid") is True:
        raise OperatorError(f"{run_dir.name} is valid: only a run that failed can be shrunk")
    test = dataclasses.replace(test_from_json(run_dir.read_test()), cluster=SIMULATED, cluster_options={}, metrics=())
    require_simulated(test.system, replaying(run_dir.path))
    try:
        schedule = load_schedule(str(run_dir.schedule_path))
    except ScheduleError as error:
        raise OperatorError(f"{run_dir.name}: {error}") from None
    directory = Path(arguments.out) if arguments.out else run_dir.path / "shrunk"
    require_writable(directory, "choose another place with --out DIR")
    console = OutputConsole(stderr=True)

    def say(line: str) -> None:
        console.print_line(f"  {line}")

    console.print_line(f"shrinking {run_dir.name}: {plural(len(schedule), 'event')}, {test.time_limit_s:g} s")
    jobs = arguments.jobs or os.cpu_count() or 1
    with interrupted_by_signals():
        found = shrink(test, schedule, jobs=jobs, budget_s=arguments.budget, say=say, stored=failures_of(results))
    earlier = None if found.is_minimal else _shorter_earlier_result(found, schedule, directory)
    if earlier is not None:
        say(f"an earlier search got further: {directory} is left unchanged")
        found = earlier
    path = directory / SCHEDULE if earlier is not None else _keep(found, directory)
    word = "the search ended early"
    if found.is_minimal:
        word = "no single fault can be left out" if found.schedule else "it fails without any faults"
    left = found.test
    for line in (
        f"{len(found.schedule)} of {len(schedule)} events left after {plural(found.runs, 'run')}; {word}",
        f"{plural(left.nodes, 'replica')}, {plural(left.concurrency, 'client')}, {left.rate:g} operations/s for "
        f"{left.time_limit_s:g} s",
    ):
        console.print_line(line)
    for event in found.schedule:
        when = f" when {event.when}" if event.when else ""
        print(f"{event.at_s:8.3f} s  {event.action:6}  {event.fault_id:4} {event.nemesis} {event.variant}{when}")
    console.print_line(found.rehearsal.reason)
    print(f"{harness_command()} replay {pasteable(str(path))} --cluster sim")
    return 0


def replaying(run_path: Path) -> str:
    """Hint on what can be done with a run that cannot be simulated."""
    schedule = pasteable(str(run_path / "schedule.json"))
    return f"harness replay {schedule} --times 5 shows how often the same faults make it fail on its own cluster"


def _shorter_earlier_result(found: Shrunk, whole: Schedule, directory: Path) -> Shrunk | None:
    """The result of an earlier search in `directory`, if it is shorter than what this interrupted search `found` and
    still fails in the same way; else None. With --out it may be of another run, even one with the same seed, so it must
    have the same test and only faults of `whole`, the schedule of the run."""
    try:
        schedule = load_schedule(str(directory / SCHEDULE))
        test = test_from_json(RunDir(directory).read_test())
    except (ScheduleError, OperatorError):  # none, or unusable
        return None
    size = {name: getattr(test, name) for name in ("nodes", "concurrency", "rate", "time_limit_s")}
    if test.to_json() != _kept(dataclasses.replace(found.test, **size)).to_json():
        return None
    if not _faults(schedule) <= _faults(whole) or len(schedule) >= len(found.schedule):
        return None
    rehearsal = rehearse_test(test, schedule)
    if set(rehearsal.symptoms).isdisjoint(found.rehearsal.symptoms):
        return None
    return dataclasses.replace(found, test=test, schedule=schedule, rehearsal=rehearsal)


def _faults(schedule: Schedule) -> set[tuple[str, str, str]]:
    """The properties of a schedule's events that shrinking does not change."""
    return {(event.fault_id, event.nemesis, event.variant) for event in schedule}


def _kept(test: Test) -> Test:
    """The test as it is stored next to a schedule."""
    return dataclasses.replace(test, nemesis=(), nemesis_schedule=None)


def _keep(found: Shrunk, directory: Path) -> Path:
    """Write schedule and test; returns the path of the schedule. Raises OperatorError."""
    path = directory / SCHEDULE
    test = _kept(found.test)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_output(path, schedule_text(found.schedule))
        write_output(directory / TEST, json.dumps(test.to_json(), indent=2) + "\n")
    except OSError as error:
        raise OperatorError(f"cannot write {error.filename or directory}: {error.strerror}") from None
    return path
