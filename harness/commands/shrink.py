"""`harness shrink RUN`: the shortest run that still fails as a stored one does."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path

from rich.console import Console

from harness.errors import OperatorError
from harness.exploration.rehearsal import SIMULATED
from harness.exploration.shrinking import shrink
from harness.store import Store
from harness.test import test_from_json
from nemesis.schedule import ScheduleError, load_schedule, save_schedule

__all__ = ["shrink_command"]


def shrink_command(arguments: argparse.Namespace) -> int:
    """Shrink a stored run in simulation. Returns 0 when a shortest run was found."""
    run_dir = Store(arguments.store).find(arguments.run)
    test = dataclasses.replace(test_from_json(run_dir.read_test()), cluster=SIMULATED, cluster_options={})
    try:
        schedule = load_schedule(str(run_dir.path / "schedule.json"))
    except ScheduleError as error:
        raise OperatorError(f"{run_dir.name}: {error}") from None
    console = Console(stderr=True)

    def say(line: str) -> None:
        console.print(f"  {line}", highlight=False)

    console.print(f"shrinking {run_dir.name}: {len(schedule)} events, {test.time_limit_s:g} s", highlight=False)
    jobs = arguments.jobs or os.cpu_count() or 1
    found = shrink(test, schedule, jobs=jobs, budget_s=arguments.budget, say=say)
    path = Path(arguments.out) if arguments.out else run_dir.path / "shrunk.json"
    save_schedule(found.schedule, str(path))
    shrunk = dataclasses.replace(found.test, nemesis=(), nemesis_schedule=str(path))
    word = "no single fault can be left out" if found.is_minimal else "the budget was used up before the end"
    console.print(f"{len(found.schedule)} events left after {found.runs} runs; {word}", highlight=False)
    for event in found.schedule:
        print(f"{event.at_s:8.3f} s  {event.action:6}  {event.fault_id:4} {event.nemesis} {event.variant}")
    console.print(found.rehearsal.reason, markup=False, highlight=False)
    print(shrunk.replay_line())
    return 0
