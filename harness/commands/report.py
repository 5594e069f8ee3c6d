"""`harness report`: computes anomaly rates, availability and latency over all runs of a store with Spark.

Writes the tables as Parquet (CSV with --csv), one HTML file and a summary on the console. PySpark is imported only
here, in `compare` and in `explore_cluster`, inside functions, so that no other command needs it or Java.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from harness.errors import EXIT_HARNESS_FAILED, OperatorError, how_to_get, one_line
from harness.report import OutputConsole
from harness.report.fleet import FleetData, check_tallies, headline, labels_of, render_fleet, share_text
from harness.signals import ended_by_signals
from harness.standard_streams import say
from harness.units import count, duration, plural

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_analysis.analysis import Analysis, Options
    from spark_analysis.session import Session

__all__ = [
    "absolute",
    "analysis_options",
    "report_command",
    "require_spark",
    "spark_progress",
    "spark_session",
]

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
"""Polling interval of Spark's task progress."""

GROUP = ("system", "configuration", "workload", "nemesis", "cluster")


def report_command(arguments: argparse.Namespace) -> int:
    """Analyse a store. Returns 0 even if runs misbehaved, as they are the report's subject; 255 if memory ran out
    before the report was complete and only a part of it was written."""
    _require_sense(arguments)
    require_spark()
    from spark_analysis.analysis import analyse
    from spark_analysis.errors import AnalysisError
    from spark_analysis.tables import as_json, write_tables

    place = absolute(arguments.place)
    out = absolute(arguments.out if arguments.out is not None else "report")
    console = OutputConsole(stderr=True)
    began_s = time.monotonic()
    try:
        options = analysis_options(arguments)
        with (
            contextlib.ExitStack() as written_to,
            ended_by_signals(),
            spark_progress(console, arguments.verbose) as progress,
        ):
            for folder in dict.fromkeys((out, out if arguments.compact is None else absolute(arguments.compact))):
                written_to.enter_context(_locked_folder(folder))
            with spark_session(arguments) as session:
                progress.watch(session.spark)
                result = analyse(session.spark, place, options, progress.phase, out=out, csv=arguments.csv)
                if not result.missing:
                    page_path = _write_page(session.spark, out, _page(result, out, began_s))
                    if arguments.compact is not None:  # last, so that a failure there does not affect the report
                        progress.phase("compacting")
                        _compact(session.spark, result, absolute(arguments.compact), console)
            if result.missing:
                progress.phase("writing partial results")
                with spark_session(arguments) as session:  # the old session has ended, or has no memory left
                    tables = [table for table in result.tables if table.frame is None]
                    write_tables(session.spark, tables, out, csv=arguments.csv)
                    page_path = _write_page(session.spark, out, _page(result, out, began_s))
    except AnalysisError as error:
        raise OperatorError(str(error)) from None
    _summary(result, console)
    console.print_line(f"report {page_path}")
    if arguments.json:
        print(as_json(result.tables))
    for line in result.missing:
        what = f"[bold red]incomplete[/]: a step failed, and those after it were skipped: {escape(line)}"
        console.print(what, highlight=False, soft_wrap=True)
    return EXIT_HARNESS_FAILED if result.missing else 0


@contextlib.contextmanager
def _locked_folder(place: str) -> Iterator[None]:
    """Lock a local folder against other reports and compactions on this machine, which would remove each other's
    unfinished files. No effect on file systems without locks. Raises OperatorError."""
    path = place.removeprefix("file://").removeprefix("file:")
    if "://" in path:
        yield
        return
    is_new = not os.path.isdir(path)
    try:
        os.makedirs(path, exist_ok=True)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise OperatorError(f"cannot write {path}: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise OperatorError(
            f"another report is being written to {path}: wait for it, or write this one to another directory"
        ) from None
    except OSError as error:
        logger.debug("no lock on %s: %s", path, error)
    try:
        yield
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # leave no empty folder of a failed report
                os.rmdir(path)
        os.close(folder)


def _require_sense(arguments: argparse.Namespace) -> None:
    """Raise OperatorError for checking options that make no sense."""
    if arguments.model is not None and not arguments.check:
        raise OperatorError(f"--model {arguments.model} needs --check: add it")
    for option, limit in (("timeout", arguments.checker_timeout), ("memory", arguments.checker_memory)):
        if not 0 < limit < math.inf:
            raise OperatorError(f"--checker-{option} must be positive and finite, not {limit:g}")


def _compact(spark: SparkSession, result: Analysis, out: str, console: OutputConsole) -> None:
    """Compact exactly the runs that the report counts: each once, after --where and --since."""
    from spark_analysis.compaction import compact
    from spark_analysis.ingest import list_runs

    listing = list_runs(spark, result.place, include=result.options.include)
    for line in compact(spark, listing, out, result.run_dirs):
        console.print_line(f"not compacted: {line}")


def require_spark() -> None:
    """Raise OperatorError if the packages of the `spark` extra are not installed."""
    import importlib.util

    if importlib.util.find_spec("pyarrow") is None:
        raise OperatorError(f"this command needs pyarrow: {how_to_get('pyarrow')}")
    extra = how_to_get("'splitbrain[spark]'")
    for module in ("pyspark", "pandas"):
        if importlib.util.find_spec(module) is None:
            raise OperatorError(f"this command needs {module}: {extra}")


def analysis_options(arguments: argparse.Namespace) -> Options:
    """The analysis options of the command line. Raises AnalysisError, OperatorError."""
    from spark_analysis.analysis import Options, since_text
    from spark_analysis.checking import CheckPlan

    if arguments.unavailable_after <= 0:
        raise OperatorError(f"--unavailable-after must be above 0 ms, not {arguments.unavailable_after}")
    if arguments.since is not None:
        since_text(arguments.since)
    plan = None
    if getattr(arguments, "check", False):
        plan = CheckPlan(
            model=arguments.model, timeout_s=arguments.checker_timeout, memory_mb=float(arguments.checker_memory)
        )
    return Options(
        since=arguments.since,
        where=arguments.where,
        include=tuple(arguments.include),
        unavailable_after_ms=arguments.unavailable_after,
        check=plan,
    )


def absolute(place: str) -> str:
    """A path made absolute; a URI unchanged."""
    return place if "://" in place or place.startswith("file:") else os.path.abspath(place)


def spark_session(
    arguments: argparse.Namespace, *, packages: Sequence[str] = (), distribution: str | None = None
) -> contextlib.AbstractContextManager[Session]:
    """The Spark session that the command line asks for; `packages` and `distribution` are shipped to the executors as
    in `spark_analysis.session.ship`. Raises OperatorError for invalid settings."""
    from spark_analysis.session import DEFAULT_MEMORY, open_session

    settings: dict[str, str] = {}
    for text in arguments.conf:
        key, equals, value = text.partition("=")
        if not equals or not key.startswith("spark."):
            raise OperatorError(f"--conf takes KEY=VALUE with a key that starts with spark., not {text!r}")
        settings[key] = value
    memory = DEFAULT_MEMORY if arguments.memory is None else arguments.memory
    return open_session(
        master=arguments.master, memory=memory, verbose=arguments.verbose, settings=settings,
        packages=packages, distribution=distribution, say=say,
    )  # fmt: skip


class _SparkProgress:
    """Shows Spark's progress on the console: the phase, and how many of its tasks are done."""

    def __init__(self, progress: Progress | None, console: OutputConsole) -> None:
        self._progress = progress
        self._console = console
        self._task = None if progress is None else progress.add_task("starting Spark", total=None)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def phase(self, text: str) -> None:
        """Begin a new phase of the analysis."""
        if self._progress is None or self._task is None:
            self._console.print_line(text)
        else:
            self._progress.update(self._task, description=text, total=None, completed=0)

    def watch(self, spark: SparkSession) -> None:
        """Follow the tasks of a session's jobs in a separate thread, since Spark's calls block this one."""
        if self._progress is not None:
            self._thread = threading.Thread(target=self._follow, args=(spark,), daemon=True)
            self._thread.start()

    def _follow(self, spark: SparkSession) -> None:
        tracker: Any = spark.sparkContext.statusTracker()
        while not self._stop.wait(POLL_INTERVAL_S):
            try:
                stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            except Exception:  # the session is ending: there is nothing left to follow
                return
            tasks = sum(stage.numTasks for stage in stages if stage is not None)
            done = sum(stage.numCompletedTasks for stage in stages if stage is not None)
            if self._progress is not None and self._task is not None:
                self._progress.update(self._task, total=tasks or None, completed=done)

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)


@contextlib.contextmanager
def spark_progress(console: OutputConsole, verbose: bool) -> Iterator[_SparkProgress]:
    """A live line on a terminal; elsewhere, or with Spark's own logs (`verbose`), one line per phase."""
    if verbose or not console.is_terminal:
        yield _SparkProgress(None, console)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        shown = _SparkProgress(progress, console)
        try:
            yield shown
        finally:
            shown.close()


def _page(result: Analysis, out: str, began_s: float) -> str:
    data = FleetData(
        place=result.place,
        out=out,
        runs=result.runs,
        operations=result.operations,
        first_started_at=result.first_started_at,
        last_started_at=result.last_started_at,
        unavailable_after_ms=result.options.unavailable_after_ms,
        took_s=time.monotonic() - began_s,
        tables={table.name: table.rows for table in result.tables},
        missing=tuple(result.missing),
    )
    return render_fleet(data)


def _write_page(spark: SparkSession, out: str, page: str) -> str:
    """Write the page next to the tables; through Hadoop if that is not a local folder."""
    from spark_analysis.tables import write_text

    path = f"{out.rstrip('/')}/report.html"
    write_text(spark, path, page)
    return path


def _figures(row: Mapping[str, Any], measures: Mapping[tuple[str, ...], Mapping[str, Any]]) -> list[str]:
    """The results of one configuration as cells of text."""
    interval = f"{share_text(row['rate_low'])} to {share_text(row['rate_high'])}"
    return [
        plural(row["runs"], "run"),
        f"{count(row['invalid'])} invalid",
        f"{count(row['unknown'])} unknown",
        f"{share_text(row['rate'])} ({interval})",
        _recovery_text(measures.get((*(str(row[name]) for name in GROUP), "recovery_after_heal_ns"))),
    ]


def _recovery_text(heal: Mapping[str, Any] | None) -> str:
    """How soon after a heal the system recovered (median and worst), and after how many heals it never did."""
    if heal is None:
        return ""
    faults = heal["n"] + heal["missing"]
    never = f"never recovered after {count(heal['missing'])} of {plural(faults, 'heal')}" if heal["missing"] else ""
    if not heal["n"]:
        return never
    back = f"recovered {duration(heal['p50']) if heal['p50'] else 'at once'} after heal"
    if heal["max"] > heal["p50"]:
        back += f", at most {duration(heal['max'])}"
    return f"{back}, {never}" if never else back


def _summary(result: Analysis, console: OutputConsole) -> None:
    rates = result.table("rates").rows
    labels, common = labels_of(tuple(str(row[name]) for name in GROUP) for row in rates)
    measures = {(*(str(row[name]) for name in GROUP), row["measure"]): row for row in result.table("availability").rows}
    console.print_line(f"{plural(result.runs, 'run')}, {plural(result.operations, 'operation')}")
    if common:
        console.print(f"[dim]{escape(one_line(common))}[/]", highlight=False, soft_wrap=True)
    figures = [_figures(row, measures) for row in rates]
    widths = [max(map(len, column)) for column in zip(*figures, strict=True)]
    # One line for the configuration, which may be long, and one for its figures, aligned across configurations.
    for row, cells in zip(rates, figures, strict=True):
        label = one_line(labels[tuple(str(row[name]) for name in GROUP)])
        console.print_line(label)
        style = "red" if row["invalid"] else "magenta" if row["unknown"] else ""
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        console.print_line(f"  {line.rstrip()}", style=style)
    problems = result.table("problems").rows
    checks = next((table.rows for table in result.tables if table.name == "checks"), [])
    for name, tally in check_tallies(checks).items():
        words = ", ".join(f"{count(tally[verdict])} {verdict}" for verdict in ("valid", "invalid", "unknown"))
        console.print_line(f"checked again as {name}: {words}")
    verdict, sentence, below = headline(rates, checks, left_out=sum(row["left_out"] for row in problems))
    style = {"valid": "green", "invalid": "red", "unknown": "magenta"}[verdict]
    console.print(f"[bold {style}]{escape(sentence)}[/] {escape(below)}", highlight=False, soft_wrap=True)
    for row in problems:
        kind = "left out" if row["left_out"] else "note"
        said = one_line(f"{kind}: {row['run']}: {row['problem']}")
        console.print_line(said)
