"""The whole analysis of one place: listing, reading, and computing every table.

with open_session() as session:
    result = analyse(session.spark, "store", Options())
for row in result.table("rates").rows: ...
"""

from __future__ import annotations

__all__ = ["Analysis", "Options", "analyse", "selected_runs", "selection", "since_text"]

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from spark_analysis.availability import fault_kinds, faults_table, measures, outcome_rates, spans_table
from spark_analysis.checking import CheckPlan, check_runs, checks_table
from spark_analysis.errors import AnalysisError
from spark_analysis.ingest import GROUP, LATEST, Listing, ingest, list_runs
from spark_analysis.latency import EXACT_OPERATIONS, latency_quantiles
from spark_analysis.rates import anomaly_kinds, anomaly_rates
from spark_analysis.session import one_line
from spark_analysis.tables import Table, write_tables

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

DEFAULT_UNAVAILABLE_AFTER_MS = 1_000
"""A system counts as unavailable if clients try and none succeeds for this long: longer than a brief delay, and
shorter than any election with the reference system's default timings."""

MAX_LISTED_RUNS = 200
"""Most invalid and unknown runs listed for the report; the table `runs` has all of them."""

NOTABLE = "notable_runs"

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to analyse and how. `since` is an ISO time or an age such as "36h" or "7d"; `where` is an SQL condition
    on the columns of the table `runs`; `include` are patterns of file names to take as foreign histories."""

    since: str | None = None
    where: str | None = None
    include: Sequence[str] = ()
    unavailable_after_ms: int = DEFAULT_UNAVAILABLE_AFTER_MS
    exact_operations: int = EXACT_OPERATIONS
    check: CheckPlan | None = None


@dataclass(slots=True, kw_only=True)
class Analysis:
    """The tables of an analysis, in the order of a report."""

    place: str
    options: Options
    tables: list[Table] = field(default_factory=list)
    runs: int = 0
    operations: int = 0
    first_started_at: str | None = None
    last_started_at: str | None = None
    missing: list[str] = field(default_factory=list)
    """A line for each step that failed, with the reason; earlier tables are present, but nothing has been written."""
    run_dirs: frozenset[str] = frozenset()
    """The places of the runs that are counted: those selected by the options, without copies and damaged ones."""

    def table(self, name: str) -> Table:
        """A table by its name. Raises KeyError."""
        for table in self.tables:
            if table.name == name:
                return table
        raise KeyError(name)


_RUN_COLUMNS = {
    "run_id": "string", "run_dir": "string", "source": "string", "test_name": "string",
    **dict.fromkeys(GROUP, "string"), "seed": "long", "started_at": "string", "version": "string",
    "verdict": "string", "reason": "string", "operations": "long", "end_ns": "long", "during_ns": "long",
    "earliest_witness_ns": "long", "earliest_witness_operations": "long", "acknowledged": "long", "lost": "long",
    "duplicated": "long",
}  # fmt: skip


def analyse(
    spark: SparkSession, place: str, options: Options, progress: Progress = lambda _: None, *, out: str | None = None,
    csv: bool = False,
) -> Analysis:  # fmt: skip
    """All tables of the runs at `place`, written to `out` (a path or URI) if given.

    `progress` is called with a text for each step. Raises AnalysisError for what the operator can fix: nothing to
    read, a condition that does not parse, too little memory. If memory runs out after the first tables, these are
    returned, and `missing` says so.
    """
    progress("looking for runs")
    listing = list_runs(spark, place, include=options.include)
    try:
        files = len(listing.runs) + len(listing.compacted)
        progress("reading 1 history" if files == 1 else f"reading {files:,} histories")
        kept = _kept(spark, listing, options)
        try:
            return _tables(spark, listing, _selected(kept, options), options, progress, out, csv)
        finally:
            with contextlib.suppress(Exception):  # Java may have ended, and its data with it
                kept.unpersist()
    except AnalysisError:
        raise
    except Exception as error:
        raise AnalysisError(f"the analysis of {place} failed: {one_line(error)}") from error


def selected_runs(spark: SparkSession, place: str, options: Options) -> DataFrame:
    """`ingest`'s table of the runs at `place` that the options select. Raises AnalysisError."""
    return selection(spark, place, options)[0]


def selection(spark: SparkSession, place: str, options: Options) -> tuple[DataFrame, list[tuple[str, str]]]:
    """The same, and the place of each run that is not used with the reason. Raises AnalysisError."""
    listing = list_runs(spark, place, include=options.include)
    runs = _selected(_kept(spark, listing, options), options)
    unusable = runs.filter("problem is not null").select("run_dir", "problem").orderBy("run_dir").collect()
    return runs, [*listing.problems, *listing.at_work, *((row.run_dir, row.problem) for row in unusable)]


def _kept(spark: SparkSession, listing: Listing, options: Options) -> DataFrame:
    """Every run once, persisted. A history that another file system did not deliver becomes a problem; copies of runs,
    such as those in a compacted store beside the runs themselves, are left out with a remark."""
    from pyspark.sql import functions as F
    from pyspark.storagelevel import StorageLevel

    runs = ingest(spark, listing, unavailable_after_ns=options.unavailable_after_ms * 1_000_000)
    runs = runs.persist(StorageLevel.MEMORY_AND_DISK)
    asked = {run.history for run in listing.runs if run.history is not None}  # compacted files may have no rows
    known = ("file", "run_dir", "run_id", "source", "fingerprint")
    rows = runs.select(*known, F.col("problem").isNull().alias("is_usable")).collect()
    missing = asked - {row.file for row in rows}
    listing.problems += [(path, "its history cannot be read") for path in sorted(missing)]
    copies = _copies([row for row in rows if row.is_usable])
    if not copies:
        return runs
    for copy, original in copies:
        # In two compacted stores both have the same name.
        where = original.file if copy.run_dir == original.run_dir else original.run_dir
        listing.remarks.append((copy.run_dir, f"a copy of {where}, which is counted instead"))
    places = spark.createDataFrame([(copy.file, copy.run_dir) for copy, _ in copies], "file string, run_dir string")
    return runs.join(F.broadcast(places), ["file", "run_dir"], "left_anti")


def _copies(rows: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Pairs of the row of a copy and that of its original; a run is counted once. Copies have the same run id, or for
    a run that was killed, which has none, the same history."""
    originals: dict[str, Any] = {}
    copies = []
    ordered = sorted(
        rows, key=lambda row: (row.source == "compacted", LATEST in row.run_dir.split("/"), row.run_dir, row.file)
    )
    for row in ordered:
        name = row.fingerprint if row.run_id == row.run_dir and row.fingerprint else row.run_id
        if name in originals:
            copies.append((row, originals[name]))
        else:
            originals[name] = row
    return copies


def _selected(runs: DataFrame, options: Options) -> DataFrame:
    """The runs that `since` and `where` select."""
    from pyspark.errors import AnalysisException, ParseException
    from pyspark.sql import functions as F

    if options.since is not None:
        began = _began()
        runs = runs.filter((began >= F.to_timestamp(F.lit(since_text(options.since)))) | began.isNull())
    if options.where is not None:
        try:
            runs = runs.filter(options.where)
        except (AnalysisException, ParseException) as error:
            columns = ", ".join(_RUN_COLUMNS)
            reason = re.sub(r"^\[[\w.]+\]\s*", "", one_line(error))
            raise AnalysisError(f"--where {options.where!r}: {reason} (columns: {columns})") from None
    return runs


def _began() -> Column:
    """When a run began: as it says or, for one that was killed and does not, by its folder's name; else null."""
    from pyspark.sql import functions as F

    named = F.regexp_extract("run_dir", r"/(\d{8}T\d{6})Z(-\d+)?$", 1)
    return F.coalesce(F.try_to_timestamp("started_at"), F.try_to_timestamp(named, F.lit("yyyyMMdd'T'HHmmss")))


def _tables(
    spark: SparkSession, listing: Listing, every: DataFrame, options: Options, progress: Progress, out: str | None,
    csv: bool,
) -> Analysis:  # fmt: skip
    runs = every.filter("problem is null")
    problems = _problems(listing, every)
    result = _overview(listing, runs, options, problems)
    progress("anomaly rates")
    result.tables += [anomaly_rates(runs), anomaly_kinds(runs)]
    progress("availability")
    result.tables += [outcome_rates(runs), fault_kinds(runs), measures(runs)]
    steps: list[tuple[str, Callable[[], Any]]] = [
        ("latency", lambda: [latency_quantiles(runs, exact_operations=options.exact_operations)]),
    ]
    if options.check is not None:
        plan = options.check
        steps.append(("checking", lambda: _checked(spark, listing, runs, plan, problems)))
    steps.append(("invalid and unknown runs", lambda: [_notable_runs(runs)]))
    if out is not None:
        steps.append(("writing tables", lambda: _write(spark, [*result.tables, problems], runs, out, csv)))
    for step, compute in steps:
        progress(step)
        try:
            result.tables += compute()
        except AnalysisError:
            raise
        except Exception as error:
            result.missing.append(f"{step}: {one_line(error)}")
            break
    result.tables.append(problems)
    return result


def _problems(listing: Listing, every: DataFrame) -> Table:
    """What was left out, and remarks about the rest."""
    problems = Table(name="problems", columns={"run": "string", "problem": "string", "left_out": "boolean"})
    problems.rows = [{"run": run, "problem": problem, "left_out": True} for run, problem in listing.problems]
    problems.rows += [
        {"run": run, "problem": remark, "left_out": False} for run, remark in listing.at_work + listing.remarks
    ]
    noted = every.filter("problem is not null or size(notes) > 0").select("run_dir", "problem", "notes")
    for row in noted.orderBy("run_dir").collect():
        if row.problem is not None:
            problems.rows.append({"run": row.run_dir, "problem": row.problem, "left_out": True})
        problems.rows += [{"run": row.run_dir, "problem": note, "left_out": False} for note in row.notes]
    return problems


def _overview(listing: Listing, runs: DataFrame, options: Options, problems: Table) -> Analysis:
    """How many runs there are, and which. Raises AnalysisError if none is left."""
    from pyspark.sql import functions as F

    seen = runs.agg(
        F.count(F.lit(1)).alias("runs"), F.sum("operations").alias("operations"), F.min("started_at").alias("first"),
        F.max("started_at").alias("last"), F.collect_list("run_dir").alias("run_dirs"),
    ).first()  # fmt: skip
    if not seen or not seen.runs:
        left = "; ".join(f"{row['run']}: {row['problem']}" for row in problems.rows[:3])
        raise AnalysisError(f"no usable run in {listing.place}" + (f" ({left})" if left else ""))
    return Analysis(
        place=listing.place, options=options, runs=seen.runs, operations=seen.operations or 0,
        first_started_at=seen["first"], last_started_at=seen["last"],
        run_dirs=frozenset(seen.run_dirs),
    )  # fmt: skip


def _write(spark: SparkSession, tables: list[Table], runs: DataFrame, out: str, csv: bool) -> list[Table]:
    bulk = [Table(name="runs", columns=_RUN_COLUMNS, frame=runs), faults_table(runs), spans_table(runs)]
    write_tables(spark, [*(table for table in tables if table.name != NOTABLE), *bulk], out, csv=csv)
    return []


def _checked(
    spark: SparkSession, listing: Listing, runs: DataFrame, plan: CheckPlan, problems: Table
) -> list[Table]:  # fmt: skip
    table = checks_table(runs, check_runs(spark, listing, runs, plan))
    for row in runs.select("run_dir", "workload", "configuration").orderBy("run_dir").collect():
        if not plan.checks_for(row.workload, row.configuration):
            reason = f"not checked: workload {row.workload} has no check; name a model with --model"
            problems.rows.append({"run": row.run_dir, "problem": reason, "left_out": False})
    return [table]


def _notable_runs(runs: DataFrame) -> Table:
    """Runs that were not valid, for people to look at: invalid ones first, and the newest first among equals."""
    table = Table(name=NOTABLE, columns=_RUN_COLUMNS)
    rows = (
        runs.filter("verdict <> 'valid'")
        .orderBy("verdict", _began().desc(), "run_dir")
        .select(*_RUN_COLUMNS)
        .limit(MAX_LISTED_RUNS)
        .collect()
    )
    table.rows = [row.asDict() for row in rows]
    return table


def since_text(text: str, *, now: datetime | None = None) -> str:
    """A point in time as ISO text in UTC: from ISO text (without a zone: UTC) or an age ("90m", "36h", "7d").

    Raises AnalysisError.
    """
    age = re.fullmatch(r"(\d+)\s*([mhdw])", text.strip())
    try:
        if age is not None:
            unit = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}[age.group(2)]
            moment = (now or datetime.now(UTC)) - timedelta(**{unit: int(age.group(1))})
        else:
            moment = datetime.fromisoformat(text.strip())
    except (ValueError, OverflowError):
        raise AnalysisError(
            f"--since must be a time such as 2026-01-31T12:00 or an age such as 36h or 7d, not {text!r}"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC).isoformat()
