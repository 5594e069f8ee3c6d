"""Table 4: checking histories inside executors, key by key.

A run that is small compared with a core's share of all operations is checked by the task that reads it, key after
key, without sending data elsewhere. A larger run is cut into keys, and each key becomes a row that goes to another
task: large keys are assigned to tasks first, the largest foremost, so that one hot key does not delay those behind
it. Checkers of properties that span keys (transactions, sequential consistency, banks) get whole runs.

The checkers are the same code as on one machine (shipped as a zip), a key's operations keep their positions in the
whole run, and the results of the keys are combined as in the local checker, so verdicts and witnesses are the same.
Budgets are per key; if one is exhausted, its run is unknown.
"""

from __future__ import annotations

__all__ = ["CHECKS_BY_WORKLOAD", "CheckPlan", "check_runs", "checks_table", "run_verdicts"]

import json
import pickle
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from checker import Log, Register, Result, check, check_log, check_sequential, parse_model
from checker.cli import PROPERTIES, named_property
from checker.history import History, HistoryError
from checker.last_reads import (
    answered_since_changed,
    last_final_reads,
    without_earlier_tails,
    without_full_polls,
)
from checker.log import ANOMALIES
from checker.models import ModelError
from checker.verdict import Verdict
from spark_analysis.cutting import Cut, cut_by_key, whole
from spark_analysis.errors import AnalysisError
from spark_analysis.files import Content, opened
from spark_analysis.ingest import GROUP, Listing, history_files, run_dir_of
from spark_analysis.operations import UnreadableRunError
from spark_analysis.reading import read_runs
from spark_analysis.session import one_line
from spark_analysis.tables import Table
from spark_analysis.workers import settle

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHECKS_BY_WORKLOAD: Mapping[str, tuple[str, ...]] = {
    "register": ("register",),
    "log": ("log", "log contents"),
}
"""The checks for each workload of the harness: names of models, and "log contents" for the log checker."""

LOG_CONTENTS = "log contents"
EVENTUAL_CONTENTS = "log contents (polls=eventual)"
"""For logs whose polls may lag behind: only the final poll of each key must return everything."""
SEQUENTIAL = "sequential:"

TASKS_PER_CORE = 4
"""Tasks per core over which keys are distributed: enough to even out a slow one, few enough to start cheaply."""

WHOLE_SHARE = 0.5
"""Share of one core's work up to which a file is checked by a single task: smaller files even each other out."""

MAX_BATCH_ROWS = 512
MAX_BATCH_BYTES = 8 * 1024 * 1024
"""Rows, and bytes of histories in them, that a Python worker collects before it passes them to Spark."""

_CUT_SCHEMA = pa.schema(
    [
        ("run_dir", pa.string()),
        ("place", pa.int64()),
        ("key", pa.string()),
        ("operations", pa.int64()),
        ("payload", pa.binary()),
    ]
)
_CHECK_SCHEMA = pa.schema(
    [
        ("run_dir", pa.string()),
        ("place", pa.int64()),
        ("key", pa.string()),
        ("check", pa.string()),
        ("operations", pa.int64()),
        ("verdict", pa.string()),
        ("reason", pa.string()),
        ("counts", pa.string()),
        ("witness", pa.string()),
        ("search_s", pa.float64()),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPlan:
    """How to check. `model` (as for `harness check --model`) replaces the checks implied by the workload; budgets are
    per key: seconds, and MiB beyond what a worker already uses. Raises AnalysisError for an unknown model."""

    model: str | None = None
    timeout_s: float | None = 60.0
    memory_mb: float | None = 1024.0
    by_workload: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: dict(CHECKS_BY_WORKLOAD))

    def __post_init__(self) -> None:
        if self.model is not None:
            try:
                if named_property(self.model) is None:
                    parse_model(self.model.removeprefix(SEQUENTIAL))
            except (ModelError, ValueError) as error:
                raise AnalysisError(f"--model {self.model}: {error}") from None

    def checks_for(self, workload: str | None, configuration: str | None = None) -> tuple[str, ...]:
        """The checks of a workload with its settings (JSON); () if it is not known what would be correct."""
        if self.model is not None:
            return (self.model,)
        checks = tuple(self.by_workload.get(workload or "", ()))
        if workload == "log" and _has_eventual_polls(configuration):
            return (EVENTUAL_CONTENTS,) if LOG_CONTENTS in checks else ()
        return checks


def _has_eventual_polls(configuration: str | None) -> bool:
    try:
        settings = json.loads(configuration or "{}")
    except ValueError:
        return False
    return isinstance(settings, dict) and settings.get("workload.polls") == "eventual"


def _spans_keys(name: str) -> bool:
    return name.partition(":")[0] in PROPERTIES or name.startswith(SEQUENTIAL)


def check_runs(spark: SparkSession, listing: Listing, runs: DataFrame, plan: CheckPlan) -> list[dict[str, Any]]:
    """One row per run, key and check: verdict, reason, counts of anomalies (JSON), witness (JSON) and time.

    `runs` is `ingest`'s table, which has the workload and size of every run; only the runs in it are checked.
    """
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.storagelevel import StorageLevel

    wanted: dict[str, tuple[str, ...]] = {}
    by_file: dict[str, dict[str, tuple[str, ...]]] = {}  # a compacted file may also hold copies, which do not count
    sizes: dict[str, int] = {}
    usable = runs.filter("problem is null")
    for run in usable.select("run_dir", "file", "workload", "configuration", "operations").collect():
        checks = plan.checks_for(run.workload, run.configuration)
        if checks:
            wanted[run.run_dir] = by_file.setdefault(run.file, {})[run.run_dir] = checks
            sizes[run.file] = sizes.get(run.file, 0) + run.operations
    share = WHOLE_SHARE * sum(sizes.values()) / spark.sparkContext.defaultParallelism
    divisible = any(not _spans_keys(name) for checks in wanted.values() for name in checks)
    large = [path for path, operations in sizes.items() if divisible and operations > share]

    def cut(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _batched(map(_cut_row, _all_parts(batches, by_file)), _CUT_SCHEMA)

    def judge(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _batched((row for part in _sent_parts(batches) for row in _judged(part, wanted, plan)), _CHECK_SCHEMA)

    def read_and_judge(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        parts = _all_parts(batches, by_file)
        return _batched((row for part in parts for row in _judged(part, wanted, plan)), _CHECK_SCHEMA)

    rows: list[Any] = []
    columns = from_arrow_schema(_CHECK_SCHEMA)
    small = [path for path in sizes if path not in set(large)]
    judged = history_files(spark, listing, small).mapInArrow(read_and_judge, columns)
    if large:
        keys = history_files(spark, listing, large).mapInArrow(cut, from_arrow_schema(_CUT_SCHEMA))
        keys = keys.persist(StorageLevel.DISK_ONLY)
        try:
            # Partitions start in order: first those with the largest keys of the large runs, then all small runs.
            rows = _dealt(spark, keys).mapInArrow(judge, columns).unionAll(judged).collect()
        finally:
            keys.unpersist()
    elif small:
        rows = judged.collect()
    found = [row.asDict() for row in rows]
    seen = {(row["run_dir"], row["check"]) for row in found}
    return found + [
        _unread(run_dir, name) for run_dir, names in wanted.items() for name in names if (run_dir, name) not in seen
    ]


def _unread(run_dir: str, name: str) -> dict[str, Any]:
    """The row of a run that `ingest` could read but the check could not."""
    reason = "its history could not be read again"
    return {**dict.fromkeys(_CHECK_SCHEMA.names), "run_dir": run_dir, "place": 0, "check": name, "operations": 0,
            "verdict": "unknown", "reason": reason, "search_s": 0.0}  # fmt: skip


def _dealt(spark: SparkSession, keys: DataFrame) -> DataFrame:
    """Distribute the keys over tasks of about equal work; large keys are placed first, one by one."""
    from pyspark.sql import functions as F

    tasks = max(1, spark.sparkContext.defaultParallelism * TASKS_PER_CORE)
    total = keys.agg(F.sum("operations")).first()
    per_task = max(1, ((total[0] if total else None) or 0) // tasks)
    large = (
        keys.filter(F.col("operations") > per_task // 2)
        .select("run_dir", "place", "operations")
        .orderBy(F.desc("operations"), "run_dir", "place")
        .collect()
    )  # by their size, about twice as many as tasks at most
    loads = [0] * tasks
    dealt = []
    for row in large:
        task = loads.index(min(loads))
        loads[task] += row.operations
        dealt.append((row.run_dir, row.place, task))
    chosen = spark.createDataFrame(dealt, "run_dir string, place long, task int")
    small = sorted(range(tasks), key=loads.__getitem__)[: max(1, tasks // 2)] if dealt else list(range(tasks))
    slots = F.array(*[F.lit(task) for task in small])
    marked = keys.join(F.broadcast(chosen), ["run_dir", "place"], "left").withColumn(
        "task", F.coalesce("task", slots[F.pmod(F.hash("run_dir", "place"), F.lit(len(small)))])
    )
    return marked.withColumn("slot", _slot(spark, tasks)).repartition(tasks, "slot").drop("task", "slot")


def _slot(spark: SparkSession, tasks: int) -> Any:
    """An expression of the column `task` that hashes to the partition of that number, so that the first partitions
    are the fullest and Spark starts them first."""
    from pyspark.sql import functions as F

    found: dict[int, int] = {}
    start = 0
    while len(found) < tasks:
        rows = spark.range(start, start + tasks * 16).select(
            F.col("id").cast("int").alias("id"), F.pmod(F.hash(F.col("id").cast("int")), F.lit(tasks)).alias("at")
        )
        for row in rows.collect():
            found.setdefault(row["at"], row["id"])
        start += tasks * 16
    return F.array(*[F.lit(found[task]) for task in range(tasks)])[F.col("task")]


class _Part(NamedTuple):
    """The input of one check: a key of a run, or the whole run (`place` is `WHOLE`); or why it cannot be read."""

    run_dir: str
    cut: Cut
    failure: str | None = None


WHOLE = -1


def _all_parts(
    batches: Iterator[pa.RecordBatch], by_file: Mapping[str, Mapping[str, tuple[str, ...]]]
) -> Iterator[_Part]:
    """The parts that a check needs of every run in some files. `by_file` has the checks of the runs of each file."""
    for path, content in opened(batches):
        yield from _parts(path, content, by_file.get(path, {}))


def _parts(path: str, content: Content, wanted: Mapping[str, tuple[str, ...]]) -> Iterator[_Part]:
    name = path.rpartition("/")[2]
    run_dir = run_dir_of(path)
    try:
        for run in read_runs(name, content, with_values=True):
            run_dir = run_dir_of(path, run.identity.run_id)
            spans = {_spans_keys(check) for check in wanted.get(run_dir, ())}
            if False in spans:
                yield from (_Part(run_dir, cut) for cut in (cut_by_key(run) if len(run) else [whole(run)]))
            if True in spans:
                yield _Part(run_dir, whole(run)._replace(place=WHOLE))
    except UnreadableRunError:
        return  # `ingest` reads the same file and reports it
    except Exception as error:  # any error of a library on unexpected bytes makes the run unknown, not the job fail
        failure = f"{type(error).__name__}: {one_line(error)}"
        nothing = Cut(0, None, History(), np.empty(0, np.int64))
        for spans_keys in {_spans_keys(check) for check in wanted.get(run_dir, ())}:
            yield _Part(run_dir, nothing._replace(place=WHOLE if spans_keys else 0), failure)


def _cut_row(part: _Part) -> dict[str, Any]:
    """A part as a row to send to another task."""
    cut = part.cut
    payload = pickle.dumps((cut.history, cut.rows.astype(np.int32).tobytes(), part.failure), pickle.HIGHEST_PROTOCOL)
    return {
        "run_dir": part.run_dir, "place": cut.place, "key": cut.key, "operations": len(cut.rows), "payload": payload,
    }  # fmt: skip


def _sent_parts(batches: Iterator[pa.RecordBatch]) -> Iterator[_Part]:
    """The parts from rows of `_cut_row`, in the receiving task."""
    settle()
    for batch in batches:
        columns = [batch.column(name) for name in ("run_dir", "place", "key", "payload")]
        for run_dir, place, key, payload in zip(*columns, strict=True):
            history, rows, failure = pickle.loads(payload.as_buffer())
            cut = Cut(place.as_py(), key.as_py(), history, np.frombuffer(rows, np.int32))
            yield _Part(run_dir.as_py(), cut, failure)


def _batched(rows: Iterator[dict[str, Any]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Rows as record batches that are neither tiny nor, because of payloads, huge."""
    held: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        held.append(row)
        size += len(row.get("payload", b""))
        if len(held) >= MAX_BATCH_ROWS or size >= MAX_BATCH_BYTES:
            yield pa.RecordBatch.from_pylist(held, schema=schema)
            held, size = [], 0
    if held:
        yield pa.RecordBatch.from_pylist(held, schema=schema)


def _judged(part: _Part, wanted: Mapping[str, tuple[str, ...]], plan: CheckPlan) -> Iterator[dict[str, Any]]:
    """The rows of `_CHECK_SCHEMA` of one part."""
    cut = part.cut
    for name in wanted[part.run_dir]:
        if _spans_keys(name) == (cut.place == WHOLE):
            yield {
                "run_dir": part.run_dir, "place": max(cut.place, 0), "key": cut.key, "operations": len(cut.rows),
                **_check(part, name, plan),
            }  # fmt: skip


def _check(part: _Part, name: str, plan: CheckPlan) -> dict[str, Any]:
    began_s = time.perf_counter()
    try:
        if part.failure is not None:
            raise ValueError(part.failure)
        history = part.cut.history if plan.model is not None else _as_judged(part.cut.history, name)
        result = _run_check(history, name, plan)
        data = result.to_json()
        verdict, reason = result.verdict.value, result.reason
        if plan.model is None and result.verdict is Verdict.VALID and (left := _left_unread(history, name)):
            verdict, reason = Verdict.UNKNOWN.value, f"{reason}; but {left}"
        counts = data["stats"].get("counts", data["stats"].get("anomalies"))
        witness = data["witness"]
    except (HistoryError, ModelError, ValueError, TypeError, MemoryError) as error:
        verdict, counts, witness = "unknown", None, None
        reason = f"cannot be checked as {name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    if witness is not None:
        for operation in witness["operations"]:
            operation["index"] = int(part.cut.rows[operation["index"]])
    return {
        "check": name,
        "verdict": verdict,
        "reason": reason,
        "counts": None if counts is None else json.dumps(counts),
        "witness": None if witness is None else json.dumps(witness),
        "search_s": time.perf_counter() - began_s,
    }


def _as_judged(history: History, name: str) -> History:
    """A part of a run, filtered as the workload does before this check."""
    if name == EVENTUAL_CONTENTS:
        return without_earlier_tails(history)
    return without_full_polls(history) if name == "log" else history


def _left_unread(history: History, name: str) -> str:
    """Why a valid verdict is not conclusive, as the harness's workloads see it: a key could not be read at the end."""
    if name == "register":
        left = [key for key, is_answered in answered_since_changed(history).items() if not is_answered]
        return f"of key {left[0]} no read was answered when all was over" if left else ""
    if name in (LOG_CONTENTS, EVENTUAL_CONTENTS):
        left = [key for key, row in last_final_reads(history).items() if row is None]
        return f"key {left[0]} could not be read to its end when all was over" if left else ""
    return ""


def _run_check(history: History, name: str, plan: CheckPlan) -> Result:
    timeout_s, memory_mb = plan.timeout_s, plan.memory_mb
    if name in (LOG_CONTENTS, EVENTUAL_CONTENTS):
        return check_log(history, timeout_s=timeout_s, memory_mb=memory_mb)
    if (other := named_property(name)) is not None:
        return other(history, timeout_s, memory_mb)
    if name.startswith(SEQUENTIAL):
        model = parse_model(name.removeprefix(SEQUENTIAL))
        return check_sequential(history, model, timeout_s=timeout_s, memory_mb=memory_mb)
    known = {"register": Register, "log": Log}.get(name)
    return check(history, parse_model(name) if known is None else known(), timeout_s=timeout_s, memory_mb=memory_mb)


def run_verdicts(rows: list[Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """The verdict of every (run_dir, check) from the rows of its keys: verdict, keys, invalid and unknown keys,
    reason and witness.

    The witness is the one that the local checker would choose: that of the key with the fewest operations for
    linearizability, with the gravest kind of anomaly for the contents of a log; among equals, of the key used first.
    """
    groups: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        groups.setdefault((row["run_dir"], row["check"]), []).append(row)
    return {group: _together(group[1], members) for group, members in groups.items()}


def _together(name: str, members: list[Any]) -> dict[str, Any]:
    members.sort(key=lambda row: int(row["place"]))
    invalid = [row for row in members if row["verdict"] == "invalid"]
    unknown = [row for row in members if row["verdict"] == "unknown"]
    if invalid:
        chosen = min(invalid, key=_gravest if name.startswith(LOG_CONTENTS) else lambda row: int(row["operations"]))
    else:
        chosen = unknown[0] if unknown else members[0]
    reason = chosen["reason"]
    if len(members) > 1 and not invalid and not unknown:
        reason = f"{reason} (key {chosen['key']}, the first of {len(members)}, which are all valid)"
    counts: dict[str, int] = {}
    for row in members:
        for kind, count in json.loads(row["counts"] or "{}").items():
            counts[kind] = counts.get(kind, 0) + count
    return {
        "verdict": "invalid" if invalid else "unknown" if unknown else "valid",
        "keys": len(members),
        "invalid_keys": len(invalid),
        "unknown_keys": len(unknown),
        "operations": sum(row["operations"] for row in members),
        "reason": reason,
        "witness": chosen["witness"],
        "counts": json.dumps(counts) if counts else None,
        "search_s": sum(row["search_s"] for row in members),
    }


def _gravest(row: Any) -> int:
    counts = json.loads(row["counts"] or "{}")
    return next((at for at, kind in enumerate(ANOMALIES) if counts.get(kind)), len(ANOMALIES))


def checks_table(runs: DataFrame, rows: list[Any]) -> Table:
    """One row per run and check, with the run's group, its recorded verdict, and Spark's."""
    known = {row.run_dir: row for row in runs.select("run_dir", "run_id", "verdict", *GROUP).collect()}
    table = Table(
        name="checks",
        columns={
            "run_id": "string", **dict.fromkeys(GROUP, "string"), "check": "string", "verdict": "string",
            "recorded_verdict": "string", "keys": "long", "invalid_keys": "long", "unknown_keys": "long",
            "operations": "long", "counts": "string", "reason": "string", "witness": "string", "search_s": "double",
        },
    )  # fmt: skip
    for (run_dir, name), verdict in sorted(run_verdicts(rows).items()):
        run = known[run_dir]
        table.rows.append(
            {
                "run_id": run.run_id,
                **{column: run[column] for column in GROUP},
                "check": name,
                "recorded_verdict": run.verdict,
                **verdict,
            }
        )
    return table
