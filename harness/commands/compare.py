"""`harness compare A B`: whether the runs of B misbehave more than those of A. Intended for CI.

Exit status: 0 nothing got worse, 1 something did, 2 too few runs to tell.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from rich.table import Table as RichTable

from harness.commands.report import (
    absolute,
    analysis_options,
    require_spark,
    spark_progress,
    spark_session,
)
from harness.errors import OperatorError, one_line
from harness.report import OutputConsole
from harness.report.fleet import labels_of, share_text
from harness.signals import ended_by_signals
from harness.units import count, duration, plural

if TYPE_CHECKING:
    from spark_analysis.comparison import Comparison

__all__ = ["compare_command"]

EXIT_WORSE = 1
EXIT_UNDECIDED = 2

MAX_LEFT_OUT = 20
"""Limit of unusable runs that are named."""

GROUP = ("system", "configuration", "workload", "nemesis", "cluster")


def compare_command(arguments: argparse.Namespace) -> int:
    """Compare the runs of two places. Returns the exit status that the module docstring describes."""
    require_spark()
    from spark_analysis.comparison import compare
    from spark_analysis.errors import AnalysisError

    if not 0 < arguments.alpha < 1:
        raise OperatorError(f"--alpha must be between 0 and 1, not {arguments.alpha:g}")
    if not 0 <= arguments.min_effect <= 1:
        raise OperatorError(f"--min-effect must be 0 to 1, not {arguments.min_effect:g}")
    by = tuple(name.strip() for name in arguments.by.split(",") if name.strip())
    console = OutputConsole(stderr=True)
    places = [absolute(arguments.first), absolute(arguments.second)]
    try:
        options = analysis_options(arguments)
        with (
            ended_by_signals(),
            spark_progress(console, arguments.verbose) as progress,
            spark_session(arguments) as session,
        ):
            progress.watch(session.spark)
            result = compare(
                session.spark, places[0], places[1], options,
                by=by, alpha=arguments.alpha, min_effect=arguments.min_effect, progress=progress.phase,
            )  # fmt: skip
    except AnalysisError as error:
        raise OperatorError(str(error)) from None
    _print(result, by, console)
    if arguments.json:
        left_out = [{"run": run, "problem": problem} for run, problem in result.left_out]
        data = {"worse": result.worse, "better": result.better, "left_out": left_out, "rows": result.table.rows}
        print(json.dumps(data, indent=1))
    if result.worse:
        return EXIT_WORSE
    return 0 if result.compared else EXIT_UNDECIDED


def _print(result: Comparison, by: tuple[str, ...], console: OutputConsole) -> None:
    groups = list(dict.fromkeys(tuple(str(row[name]) for name in by) for row in result.table.rows))
    labels = _labels(groups, by)
    for place in groups:
        # The configuration, which may be long, has its own line, so that the figures have the full width.
        console.print_line(one_line(labels[place]), style="bold")
        console.print(_table([row for row in result.table.rows if tuple(str(row[name]) for name in by) == place]))
    for side, only in (("the first", result.only_in_first), ("the second", result.only_in_second)):
        for group in only:
            said = one_line(f"only in {side} set, not compared: {group}")
            console.print_line(said)
    for run, problem in result.left_out[:MAX_LEFT_OUT]:
        console.print_line(one_line(f"left out: {run}: {problem}"))
    if (more := len(result.left_out) - MAX_LEFT_OUT) > 0:
        console.print_line(f"left out: {plural(more, 'more run')}; --json has all")
    if not result.groups:
        console.print("no configuration is in both sets: omit a column from --by to compare across it")
    words = "no difference could be shown" if result.compared else "too few runs to compare"
    if result.worse or result.better:
        words = f"{result.worse} worse, {result.better} better"
    console.print(f"[bold]{words}[/] of {count(result.compared)} comparisons", highlight=False)


def _table(rows: list[dict[str, Any]]) -> RichTable:
    """The figures of one configuration. Names and outcomes may wrap, numbers never."""
    table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("figure")
    for name in ("A", "B", "effect", "p", "adjusted"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        style = {"worse": "red", "better": "green"}.get(row["outcome"], "dim")
        table.add_row(
            row["figure"].removesuffix("_ns").replace("_", " "),
            _value(row, "first"),
            _value(row, "second"),
            _effect(row),
            _probability(row["p"]),
            _probability(row["p_adjusted"]),
            f"[{style}]{row['outcome']}[/]",
        )
    return table


def _labels(groups: list[tuple[str, ...]], by: tuple[str, ...]) -> dict[tuple[str, ...], str]:
    whole = {group: tuple(dict(zip(by, group, strict=True)).get(name, "") for name in GROUP) for group in groups}
    labels, _ = labels_of(whole.values())
    return {group: labels[place] for group, place in whole.items()}


def _value(row: dict[str, Any], side: str) -> str:
    value = row[side]
    if value is None:  # no median, as the system came back in less than half of the runs
        return "never" if row["figure"].startswith("longest_recovery") and row[f"n_{side}"] else "–"
    if row["figure"].endswith("_ns"):
        return duration(value)
    if row["figure"] in ("lost", "duplicated"):
        return count(round(value))
    return share_text(value)


def _effect(row: dict[str, Any]) -> str:
    if row["effect"] is None:
        return "–"
    if row["effect_low"] is not None:
        return f"{100 * row['effect']:+.0f} ({100 * row['effect_low']:+.0f} to {100 * row['effect_high']:+.0f}) %"
    return f"{row['effect']:+.2f}"


def _probability(p: float | None) -> str:
    if p is None:
        return "–"
    return "<0.001" if p < 0.001 else f"{p:.3f}"
