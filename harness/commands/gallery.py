"""`harness gallery`: runs known findings again.

Exit status: 0 if every finding was found and every control valid; 1 if one was not; 2 if that is unknown, because a run
was unknown or something could not be run at all.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from rich.table import Table

from harness import registry
from harness.clusters.select import AUTO
from harness.commands.run import Prepared, enter_namespace
from harness.errors import OperatorError, nearest
from harness.gallery.finding import Finding, is_met
from harness.gallery.findings import FINDINGS
from harness.gallery.page import pages, write_pages
from harness.gallery.performing import Performed, perform_finding, prepared_runs
from harness.gallery.recording import RESULTS_NAME, is_of, load, outcomes_of, save, statistics_of
from harness.report import OutputConsole
from harness.seeded import random_seed
from harness.store import Store

__all__ = ["gallery_command"]

EXIT_UNMET = 1
EXIT_UNDECIDED = 2


def gallery_command(arguments: argparse.Namespace) -> int:
    """List the findings, run some, or write the page. Returns the exit status; raises OperatorError."""
    match arguments.gallery_command:
        case "run":
            return _run(arguments)
        case "page":
            return _page(arguments)
    return _list(arguments)


def _results_path(arguments: argparse.Namespace) -> str:
    given: str | None = arguments.results
    return given or os.path.join(arguments.store, RESULTS_NAME)


def _list(arguments: argparse.Namespace) -> int:
    records = load(_results_path(arguments))
    console = OutputConsole()
    for finding in FINDINGS.values():
        record = records.get(finding.name)
        words = ""
        if record is not None:
            found, clean, _ = statistics_of(record)
            changed = "" if is_of(record, finding) else "; it has been changed since"
            words = f": found in {found}, control valid in {clean}, {record['day']}{changed}"
        console.print(f"[bold]{finding.name}[/]  {finding.version}{words}", highlight=False, soft_wrap=True)
        console.print_line(f"    {finding.title}")
    console.print_line("\nharness gallery run NAME --times 5 runs one, with its control; --all runs all")
    return 0


def _page(arguments: argparse.Namespace) -> int:
    path = _results_path(arguments)
    if not os.path.exists(path):
        raise OperatorError(f"{path} does not exist: create it with harness gallery run NAME --results {path}")
    directory = os.path.dirname(path) or "."
    write_pages(directory, pages(FINDINGS, load(path)))
    print(f"wrote {os.path.join(directory, 'gallery.md')}")
    return 0


def _chosen(arguments: argparse.Namespace) -> list[Finding]:
    if arguments.all == bool(arguments.findings):
        raise OperatorError(f"no findings named: give --all, or some of {', '.join(FINDINGS)}")
    for name in arguments.findings:
        if name not in FINDINGS:
            raise OperatorError(f"there is no finding {name!r}{nearest(name, FINDINGS)}; known: {', '.join(FINDINGS)}")
    return list(FINDINGS.values()) if arguments.all else [FINDINGS[name] for name in arguments.findings]


def _run(arguments: argparse.Namespace) -> int:
    chosen = _chosen(arguments)
    if arguments.cluster not in (None, AUTO):
        registry.load("clusters", arguments.cluster)  # report a mistyped name once, not for each finding
    path = _results_path(arguments)
    records = load(path)
    seed = random_seed() if arguments.seed is None else arguments.seed
    console = OutputConsole(stderr=True)
    came_to: dict[str, Performed] = {}
    planned: dict[str, list[tuple[str, Prepared]]] = {}
    for finding in chosen:
        try:
            planned[finding.name] = prepared_runs(
                finding, times=arguments.times, seed=seed, cluster=arguments.cluster, say=_say
            )
        except OperatorError as error:  # the others are still run
            came_to[finding.name] = Performed(problem=str(error))
    if planned:
        enter_namespace(next(iter(planned.values()))[0][1], arguments)
    for name, runs in planned.items():
        came_to[name] = performed = perform_finding(FINDINGS[name], runs, Store(arguments.store), console)
        if performed.record is not None:
            records[name] = performed.record
            save(path, records)
        if performed.was_interrupted:
            break
    _print_summary(came_to)
    return _exit_status(came_to, [finding.name for finding in chosen])


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print_summary(came_to: Mapping[str, Performed]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("finding", "found", "control valid", ""):
        table.add_column(name, overflow="fold")
    for name, performed in came_to.items():
        if performed.record is None:
            table.add_row(name, "[magenta]not run[/]", "", performed.problem or "")
            continue
        found, clean, is_expected = statistics_of(performed.record)
        table.add_row(name, found, clean, "[green]as expected[/]" if is_expected else "[red]not as expected[/]")
    OutputConsole().print(table)


def _exit_status(came_to: Mapping[str, Performed], asked: Sequence[str]) -> int:
    statuses = [_status(came_to[name]) if name in came_to else EXIT_UNDECIDED for name in asked]
    return EXIT_UNMET if EXIT_UNMET in statuses else max(statuses)


def _status(performed: Performed) -> int:
    if performed.record is None:
        return EXIT_UNDECIDED
    found, clean = outcomes_of(performed.record, "finding"), outcomes_of(performed.record, "control")
    if is_met("finding", found) and is_met("control", clean):
        return 0
    undecided = ("unknown", "not started")
    decided = [{name: n for name, n in each.items() if name not in undecided} for each in (found, clean)]
    if all(is_met(side, each) or not each for side, each in zip(("finding", "control"), decided, strict=True)):
        return EXIT_UNDECIDED
    return EXIT_UNMET
