"""`harness runs`: prints the runs of a store as a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from harness import registry
from harness.errors import OperatorError, nearest
from harness.report import OutputConsole
from harness.report.store_page import fault_words, operation_words
from harness.run_index import STATES, RunIndex, RunSummary, read_index, select, unreadable_words
from harness.store import Store
from harness.units import duration, plural

__all__ = ["runs_command"]

MAX_WIDTH = 10_000
"""Characters of a line, far beyond any terminal, for measuring how wide the table would be."""

NO_PARTS = ("none", "all")
"""What `--nemesis` of a run may be, beside the names of nemeses."""

COLOURS = {"valid": "green", "invalid": "red", "unknown": "magenta", "running": "cyan", "unfinished": "yellow"}


def runs_command(arguments: argparse.Namespace) -> int:
    """Print the selected runs. Returns 0 even if none match; raises OperatorError if there is no store, or for a name
    that nothing has."""
    verdicts = [word.strip() for word in arguments.verdict.split(",") if word.strip()]
    for word in verdicts:
        if word not in STATES:
            raise OperatorError(f"unknown verdict {word!r}{nearest(word, STATES)}; known: {', '.join(STATES)}")
    store = Store(arguments.store)
    store.require()
    index = read_index(store)
    _require_known(arguments, index)
    found = select(
        index.runs,
        verdicts=verdicts,
        test=arguments.test,
        system=arguments.system,
        workload=arguments.workload,
        nemesis=arguments.nemesis,
        cluster=arguments.cluster,
    )
    shown = found[: arguments.limit]
    others = {"older_not_shown": len(found) - len(shown), "other_runs": len(index.runs) - len(found)}
    if arguments.json:
        data = {"runs": [run.to_json() for run in shown], **others, "not_read": index.left_out}
        data["unreadable"] = list(index.unreadable)
        print(json.dumps(data, indent=2, sort_keys=True))
        return 0
    console = OutputConsole()
    if shown:
        table = _table(shown, is_wide=True)
        needed = Measurement.get(console, console.options.update(width=MAX_WIDTH), table).maximum
        console.print(table if needed <= console.width else _table(shown, is_wide=False))
    for line in _rest(len(shown), others["older_not_shown"], others["other_runs"], index):
        console.print_line(line)
    return 0


def _require_known(arguments: argparse.Namespace, index: RunIndex) -> None:
    """Raise OperatorError for a name that neither an installed part nor a run of the store has. A store may have runs
    of plug-ins that are not installed here."""
    if index.left_out or index.unreadable:
        return
    for kind, singular in registry.KINDS.items():
        wanted = vars(arguments)[singular]
        if kind == "nemeses":
            wanted = wanted.partition("=")[0]
        installed = registry.names(kind)
        if not wanted or not installed or wanted in (*installed, *NO_PARTS) or select(index.runs, **{singular: wanted}):
            continue
        if kind == "systems" and registry.is_file(wanted):
            continue
        raise OperatorError(
            f"unknown {singular} {wanted!r}{nearest(wanted, installed)}: none of that name is installed, and no run of "
            f"the store has it; installed: {', '.join(installed)}"
        )


def _rest(shown: int, older: int, other: int, index: RunIndex) -> list[str]:
    """What the table leaves out, and how to see it."""
    lines = []
    if not shown:
        lines.append("no matching runs" if other or index.unreadable else "the store has no runs yet")
    if older:
        lines.append(f"{plural(older, 'older run')} not shown: --limit {shown + older} shows all")
    if other and shown:
        lines.append(f"{plural(other, 'non-matching run')} not shown")
    elif other:
        lines.append(f"the store has {plural(other, 'run')}")
    if index.left_out:
        lines.append(f"{plural(index.left_out, 'run')} older than these not read")
    if index.unreadable:
        lines.append(unreadable_words(index))
    return lines


def _table(runs: Sequence[RunSummary], *, is_wide: bool) -> Table:
    """One line for each run, or two if the terminal is too narrow for the longest, so that names can be copied."""
    now = datetime.now(UTC)
    if not is_wide:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for run in runs:
            table.add_row(_verdict(run), Text(run.name))
            found = (
                ("", operation_words(run)),
                ("faults: ", fault_words(run)),
                ("", _took(run)),
                ("seed ", _seed(run)),
            )
            details = [_what(run), *(f"{name}{value}" for name, value in found if value != "–")]
            table.add_row(Text(_age(run, now), style="dim"), Text("; ".join(details), style="dim"))
        return table
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("verdict", "age", "run", "what", "operations", "faults"):
        table.add_column(name, no_wrap=True)
    for name in ("took", "seed"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        words = (_what(run), operation_words(run), fault_words(run), _took(run), _seed(run))
        table.add_row(_verdict(run), Text(_age(run, now)), Text(run.name), *map(Text, words))
    return table


def _verdict(run: RunSummary) -> Text:
    return Text(run.verdict.upper(), style=f"bold {COLOURS[run.verdict]}")


def _what(run: RunSummary) -> str:
    settings = f", {run.settings}" if run.settings else ""
    return f"{run.system or '?'} {run.workload or '?'} {run.nemesis or '?'} on {run.cluster or '?'}{settings}"


def _took(run: RunSummary) -> str:
    return "–" if run.duration_s is None else duration(run.duration_s * 1e9)


def _seed(run: RunSummary) -> str:
    return "–" if run.seed is None else str(run.seed)


def _age(run: RunSummary, now: datetime) -> str:
    age_s = run.age_s(now)
    if age_s is None:
        return "–"
    for limit_s, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if age_s < limit_s:
            return f"{age_s // unit_s:.0f} {unit}"
    return f"{age_s // 86400:.0f} d"
