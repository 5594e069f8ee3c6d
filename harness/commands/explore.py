"""`harness explore`: many simulated seeds with random mixes of faults; failures become files."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import textwrap
import time
from collections.abc import Callable

from harness import registry
from harness.commands.run import prepare_test, test_from
from harness.errors import EXIT_INVALID, NO_ROOM, HarnessError, OperatorError, SystemUnderTestError
from harness.execution import ONLY_BY_NAME, left_out
from harness.exploration.guide import Guide
from harness.exploration.keeping import keep_run
from harness.exploration.rehearsal import (
    SIMULATED,
    Rehearsal,
    require_faults,
    require_simulated,
    usable_choices,
)
from harness.exploration.search import Tally, elects_leaders, explore, mix_for, require_room, summary_of
from harness.pasteable import as_typed_here, harness_command, pasteable
from harness.report import OutputConsole
from harness.report.checks import verdict_word
from harness.signals import ignore_repeated_signals, interrupted_by_signals
from harness.store import Store, require_writable
from harness.test import Test
from harness.units import plural

__all__ = ["explore_command"]

PROGRESS_INTERVAL_S = 5.0
REASON_CHARACTERS = 300
"""Limit of the reason in a seed's line."""

MAX_KEPT_RUNS = 10
"""Failing seeds that are run again to be stored with history and report; the others are only listed."""


def explore_command(arguments: argparse.Namespace) -> int:
    """Explore seeds. Returns 1 if any run was invalid, else 2 if any was unknown or it was interrupted, else 0."""
    test = _test_of(arguments)
    store = Store(arguments.store)
    require_writable(store.root)
    console = OutputConsole(stderr=True)
    first = 0 if arguments.seed is None else arguments.seed
    guide = _guide(test, arguments) if arguments.guide else None
    where = f"on {arguments.master}" if arguments.master else f"{_jobs(arguments)} at a time"
    console.print_line(
        f"exploring{', guided,' if guide is not None else ''} from seed {first}: {test.nodes} nodes, "
        f"workload {test.workload}, {test.time_limit_s:g} s each, {where}"
    )
    for line in _left_out(test):
        console.print_line(f"left out: {line}")
    last_said_s = began_s = time.monotonic()
    tally = Tally()

    def on_result(so_far: Tally, rehearsal: Rehearsal) -> None:
        nonlocal last_said_s, tally
        tally = so_far
        if rehearsal.valid is not True:
            word = "INVALID" if rehearsal.valid is False else "UNKNOWN"
            console.print_line(f"seed {rehearsal.seed}: {word}: {_short(rehearsal.reason)}")
        now_s = time.monotonic()
        if now_s - last_said_s >= PROGRESS_INTERVAL_S:
            last_said_s = now_s
            console.print_line(_line(tally, now_s - began_s))

    is_interrupted = False
    failure: OperatorError | HarnessError | None = None
    try:
        with interrupted_by_signals():
            tally = _explore(test, arguments, first, on_result, console, guide)
    except (KeyboardInterrupt, BrokenPipeError) as error:
        if not tally.runs:
            raise
        if isinstance(error, KeyboardInterrupt):
            ignore_repeated_signals()
        is_interrupted = True
    except (OperatorError, HarnessError) as error:  # findings survive the loss of a process or a cluster
        if not tally.runs:
            raise
        is_interrupted, failure = True, error
    show = console if arguments.json else OutputConsole()
    with console.without_reader(), show.without_reader():
        if is_interrupted:
            why = "interrupted" if failure is None else "the search cannot continue"
            console.print_line(f"{why}; results so far are kept")
        show.print_line(_line(tally, time.monotonic() - began_s))
        for what, count in sorted(tally.by_reason.items(), key=lambda each: -each[1]):
            show.print_line(f"{count:6}    {what}")
        kept, was_cut_short = _keep_gravest(test, tally, store, console)
        is_interrupted = is_interrupted or was_cut_short
    if console.reader_is_gone or show.reader_is_gone:
        raise BrokenPipeError
    if arguments.json:
        learned = {} if guide is None else {"guide": guide.summary()}
        summary = {**summary_of(tally), **learned, "interrupted": is_interrupted, "kept": kept}
        print(json.dumps(summary, indent=2))
    if failure is not None:
        if tally.invalid:
            failure.exit_status = EXIT_INVALID
        raise failure
    if tally.runs == 0:
        raise OperatorError("--budget ran out before the first seed started: give more")
    return 1 if tally.invalid else 2 if tally.unknown or is_interrupted else 0


def _short(reason: str) -> str:
    """A verdict's reason, shortened to one line; the stored run has all of it."""
    return textwrap.shorten(reason, REASON_CHARACTERS, placeholder=" ...")


def _test_of(arguments: argparse.Namespace) -> Test:
    """The test that each seed runs. Raises OperatorError for what cannot be explored."""
    many = f"harness run --system {arguments.system} --test-count 10 makes many runs with different seeds"
    require_simulated(arguments.system, many)
    test = test_from(arguments)
    require_faults(test)
    require_room(test)
    usable_choices(test)
    prepare_test(dataclasses.replace(test, nemesis=()))  # else each seed's run would refuse it later
    if arguments.master is None:
        of_cluster = {
            "--executor-python": arguments.executor_python, "--memory": arguments.memory, "--conf": arguments.conf,
            "--verbose": arguments.verbose,
        }  # fmt: skip
        for option, value in of_cluster.items():
            if value not in (None, False, []):
                raise OperatorError(f"{option} is for a cluster: add --master URL")
    return test


def _jobs(arguments: argparse.Namespace) -> int:
    return arguments.jobs or os.cpu_count() or 1


def _explore(
    test: Test,
    arguments: argparse.Namespace,
    first: int,
    on_result: Callable[[Tally, Rehearsal], None],
    console: OutputConsole,
    guide: Guide | None,
) -> Tally:
    """Explore the seeds, in processes of this machine or on a cluster."""
    if arguments.master is not None:
        from harness.commands.explore_cluster import explore_on_cluster

        return explore_on_cluster(test, arguments, first=first, on_result=on_result, say=console.print_line)
    count = arguments.seeds
    return explore(
        test,
        seeds=itertools.count(first) if count is None else iter(range(first, first + count)),
        jobs=_jobs(arguments),
        budget_s=arguments.budget,
        stop_at_first=arguments.stop_at_first,
        on_result=on_result,
        guidance=guide,
    )


def _left_out(test: Test) -> list[str]:
    """The nemeses that `all` leaves out in the simulation, by name; `doctor` prints the reasons, which are many."""
    cluster_class, system_class = registry.load("clusters", SIMULATED), registry.load("systems", test.system)
    lines = left_out(test, registry.load_all("nemeses"), cluster_class, system_class)
    asked_for = [line for line in lines if line.endswith(ONLY_BY_NAME)]
    rest = [line.partition(": ")[0].removeprefix("nemesis ") for line in lines if line not in asked_for]
    if not rest:
        return asked_for
    return [*asked_for, f"{', '.join(dict.fromkeys(rest))} (why: harness doctor --cluster {SIMULATED})"]


def _guide(test: Test, arguments: argparse.Namespace) -> Guide:
    if arguments.master is not None:
        raise OperatorError(
            "--guide learns from finished runs, but on a cluster new runs start before earlier ones have finished: "
            "omit --guide or --master"
        )
    if not elects_leaders(test):
        raise OperatorError(
            "--guide relies on elections and what follows them, which classic replication does not have: omit it"
        )
    return Guide(test, choices=usable_choices(test), lag=_jobs(arguments))


def _line(tally: Tally, elapsed_s: float) -> str:
    return (
        f"{elapsed_s:6.0f} s  {plural(tally.runs, 'seed')}: "
        f"{tally.valid} valid, {tally.invalid} invalid, {tally.unknown} unknown; "
        f"{plural(tally.operations, 'operation')}, {plural(tally.faults, 'fault')}, "
        f"{tally.simulated_s / 60:.1f} simulated minutes"
    )


def _keep_gravest(test: Test, tally: Tally, store: Store, console: OutputConsole) -> tuple[list[str], bool]:
    """Store the gravest failures as runs; returns their directories, and whether an interrupt cut this short. Findings
    are printed and determine the exit status even if no run can be stored, as on a full disk."""
    kept: list[str] = []
    gravest = sorted(tally.failures, key=lambda failure: failure.valid is not False)  # a stable sort
    for failure in gravest[:MAX_KEPT_RUNS]:
        why, is_interrupted = "interrupted", False
        try:
            with interrupted_by_signals():
                kept.append(_keep(test, failure, store, console))
            continue
        except (KeyboardInterrupt, _CutShortError) as error:
            why, is_interrupted = str(error) or why, True
        except (OperatorError, SystemUnderTestError, HarnessError) as error:
            why = str(error)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            why = error.strerror or str(error)
        left = len(gravest[:MAX_KEPT_RUNS]) - len(kept)
        others = f", nor can {plural(left - 1, 'other failure')}" if left > 1 else ""
        console.print_line(f"seed {failure.seed} cannot be stored{others}: {why}")
        return kept, is_interrupted
    return kept, False


class _CutShortError(Exception):
    """An interrupt ended the load of a run that was to be stored, so it does not show the failure that was found."""


def _keep(test: Test, failure: Rehearsal, store: Store, console: OutputConsole) -> str:
    """Run a failing seed again, this time for the store; in simulation it is the same run."""
    seed = failure.seed
    seeded, schedule = mix_for(test, seed, usable_choices(test))
    if failure.schedule is not None:  # from a guided search, which makes several per seed
        schedule = failure.schedule
    run_dir, repeat, results = keep_run(seeded, schedule, store, name=f"{test.workload}-{seed}")
    if results.get("interrupted") is not None:
        raise _CutShortError(f"interrupted by {results['interrupted']}; the partial run is {run_dir.path}")
    console.print_line(f"seed {seed} kept: {run_dir.report_path}")
    if results.get("valid") != failure.valid:
        console.print_line(
            f"  repeated, it was {verdict_word(results.get('valid'))}, not {verdict_word(failure.valid)}: "
            "something in it does not depend on the seed alone; harness audit shows where two runs diverge"
        )
    lines = [("repeat", as_typed_here(repeat))]
    if failure.symptoms:  # else it is unknown, and `shrink` could not recognise the same failure
        lines.append(("shrink", f"{harness_command()} shrink {pasteable(str(run_dir.path))}"))
    for what, line in lines:
        console.print_line(f"  {what}  {line}")
    return str(run_dir.path)
