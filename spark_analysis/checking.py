"""Table 4: checking histories inside executors, key by key.

Histories are read once and cut into keys; every key of every run becomes one row, and the rows are dealt to
tasks by size: a key that is large by itself gets a task of its own, the largest first, so that one hot key does
not hold up the rest behind it. The checkers are the same code as on one machine (shipped as a zip), a key's
operations keep their places in the whole run, and what the keys say is put together as the local checker does,
so verdicts and witnesses are the same. Budgets are per key; one that runs out makes its run unknown.
"""

from __future__ import annotations

__all__ = ["CHECKS_BY_WORKLOAD", "CheckPlan", "check_runs", "checks_table", "run_verdicts"]

import itertools
import json
import pickle
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from checker import Log, Register, Result, check, check_log, parse_model
from checker.history import NEVER as CHECKER_NEVER
from checker.history import History, HistoryError
from checker.log import ANOMALIES
from checker.models import ModelError
from spark_analysis.ingest import GROUP, Listing, history_files, run_dir_of
from spark_analysis.operations import STATUS_NAMES, RunData, UnreadableRunError
from spark_analysis.reading import read_runs
from spark_analysis.session import one_line
from spark_analysis.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHECKS_BY_WORKLOAD: Mapping[str, tuple[str, ...]] = {
    "register": ("register",),
    "log": ("log", "log contents"),
}
"""Which checks a workload of the harness gets: names of models, and "log contents" for the log checker."""

LOG_CONTENTS = "log contents"

TASKS_PER_CORE = 4
"""Tasks over which keys are dealt: enough that a slow one is levelled out, few enough to start cheaply."""

_SPLIT_SCHEMA = pa.schema(
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
    """How to check. `model` (as `checker.parse_model` takes it) replaces what the workload implies; budgets are
    per key: seconds, and MiB beyond what a worker holds already."""

    model: str | None = None
    timeout_s: float | None = 60.0
    memory_mb: float | None = 1024.0
    by_workload: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: dict(CHECKS_BY_WORKLOAD))

    def checks_for(self, workload: str | None) -> tuple[str, ...]:
        """The checks of a workload; none when nobody said what would be right there."""
        if self.model is not None:
            return (self.model,)
        return tuple(self.by_workload.get(workload or "", ()))


def check_runs(spark: SparkSession, listing: Listing, runs: DataFrame, plan: CheckPlan) -> DataFrame:
    """One row per run, key and check: verdict, reason, counts of anomalies (JSON), witness (JSON) and time.

    `runs` is `ingest`'s table: it says which workload a run had, and only its runs are checked.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.storagelevel import StorageLevel

    def split(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for path, content in zip(batch.column(0), batch.column(1), strict=True):
                for rows in _split_file(path.as_py(), content.as_buffer()):
                    yield pa.RecordBatch.from_pylist(rows, schema=_SPLIT_SCHEMA)

    def judge(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            found = []
            columns = [batch.column(name) for name in ("run_dir", "place", "key", "operations", "payload", "workload")]
            for values in zip(*columns, strict=True):
                run_dir, place, key, operations = (value.as_py() for value in values[:4])
                for name in plan.checks_for(values[5].as_py()):
                    row = _check_key(values[4].as_buffer(), name, plan)
                    found.append({"run_dir": run_dir, "place": place, "key": key, "operations": operations, **row})
            yield pa.RecordBatch.from_pylist(found, schema=_CHECK_SCHEMA)

    keys = history_files(spark, listing).mapInArrow(split, from_arrow_schema(_SPLIT_SCHEMA))
    keys = keys.persist(StorageLevel.DISK_ONLY)
    wanted = runs.filter("problem is null").select("run_dir", "workload")
    dealt = _dealt(spark, keys.join(F.broadcast(wanted), "run_dir"))
    return dealt.mapInArrow(judge, from_arrow_schema(_CHECK_SCHEMA))


def _dealt(spark: SparkSession, keys: DataFrame) -> DataFrame:
    """The keys over tasks of about equal work, large ones first and by themselves."""
    from pyspark.sql import functions as F

    tasks = max(1, spark.sparkContext.defaultParallelism * TASKS_PER_CORE)
    total = keys.agg(F.sum("operations")).first()
    per_task = max(1, ((total[0] if total else None) or 0) // tasks)
    large = (
        keys.filter(F.col("operations") > per_task // 2)
        .select("run_dir", "place", "operations")
        .orderBy(F.desc("operations"), "run_dir", "place")
        .collect()
    )  # at most twice as many as tasks, by their size
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
    """An expression of `task` whose hash puts it into the partition of that number, so that the first partitions
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


def _split_file(path: str, content: Any) -> Iterator[list[dict[str, Any]]]:
    name = path.rpartition("/")[2]
    try:
        data = content if name.endswith(".parquet") else content.to_pybytes()
        for run in read_runs(name, data, with_values=True):
            yield list(_keys_of(run, run_dir_of(path, run.identity.run_id)))
    except UnreadableRunError:
        return  # `ingest` reads the same file and reports it
    except Exception as error:  # of a library, on bytes that nobody foresaw: the run is unknown, not the job lost
        reason = f"{type(error).__name__}: {one_line(error)}"
        yield [{"run_dir": run_dir_of(path), "place": 0, "key": None, "operations": 0, "payload": pickle.dumps(reason)}]


def _keys_of(run: RunData, run_dir: str) -> Iterator[dict[str, Any]]:
    """One row per key, in order of first use: its operations as a `History` that knows their rows in the run."""
    order = np.argsort(run.key.codes, kind="stable")
    codes = run.key.codes[order]
    edges = [0, *(np.flatnonzero(codes[1:] != codes[:-1]) + 1).tolist(), len(codes)]
    groups = [order[start:end] for start, end in itertools.pairwise(edges) if end > start]
    groups.sort(key=lambda rows: int(rows[0]))
    columns = _columns(run)
    for place, rows in enumerate(groups):
        history, key_name = _history(columns, run, rows)
        yield {
            "run_dir": run_dir,
            "place": place,
            "key": key_name,
            "operations": len(rows),
            "payload": pickle.dumps((history, rows.astype(np.int32).tobytes()), pickle.HIGHEST_PROTOCOL),
        }


def _columns(run: RunData) -> dict[str, Any]:
    """What every key takes its rows from, decoded once for the whole run."""
    return {
        "status": np.array(STATUS_NAMES, object)[run.status],
        "f": np.array([*run.f.names, ""], object)[run.f.codes],
        "node": np.array([*run.node.names, None], object)[run.node.codes],
        "value": _objects(run.values),
        "result": _objects(run.results),
        "returned": np.where((run.completed < 0) | (run.status == 2), CHECKER_NEVER, run.completed),
        "process": run.process if run.processes is None else _object_array(run.processes),
    }


def _objects(column: Any) -> Any:
    """JSON texts as values, all parsed at once."""
    if isinstance(column, list):
        return _object_array(column)
    texts = column.fill_null("null").to_pylist()
    try:
        values = json.loads(f"[{','.join(texts)}]")
    except ValueError:
        values = []
    return _object_array(values if len(values) == len(texts) else [_value(text) for text in texts])


def _value(text: str) -> Any:
    """One value; text that is no JSON stands for itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _object_array(values: list[Any]) -> Any:
    array: Any = np.empty(len(values), object)
    array[:] = values
    return array


def _history(columns: Mapping[str, Any], run: RunData, rows: Any) -> tuple[History, str | None]:
    code = int(run.key.codes[rows[0]])
    key: Any = None
    if code >= 0:
        key = run.key_objects[code] if run.key_objects is not None else _key(run.key.names[code])
    ended = run.completed_ns[rows].tolist()
    errors = {}
    if run.errors is not None and run.errors.null_count < len(run.errors):
        taken = run.errors.take(pa.array(rows))
        valid = np.flatnonzero(np.asarray(taken.is_valid()))
        errors = dict(zip(valid.tolist(), taken.take(pa.array(valid)).to_pylist(), strict=True))
    count = len(rows)
    history = History(
        process=columns["process"][rows].tolist(),
        f=columns["f"][rows].tolist(),
        key=[key] * count,
        value=columns["value"][rows].tolist(),
        result=columns["result"][rows].tolist(),
        status=columns["status"][rows].tolist(),
        invoked=run.invoked[rows].tolist(),
        returned=columns["returned"][rows].tolist(),
        invoked_ns=run.invoked_ns[rows].tolist() if run.timed else [None] * count,
        returned_ns=[None if time_ns < 0 else time_ns for time_ns in ended],
        node=columns["node"][rows].tolist(),
        errors=errors,
        keyed=code >= 0,
    )
    return history, None if code < 0 else run.key.names[code]


def _key(text: str) -> Any:
    """A key as the harness had it: a whole number where the text is one, as Parquet's column was made from it."""
    return int(text) if text.removeprefix("-").isdigit() and str(int(text)) == text else text


def _check_key(payload: Any, name: str, plan: CheckPlan) -> dict[str, Any]:
    began_s = time.perf_counter()
    content = pickle.loads(payload)
    try:
        if isinstance(content, str):
            raise ValueError(content)
        history, rows = content
        result = _run_check(history, name, plan)
        data = result.to_json()
        verdict, reason = result.verdict.value, result.reason
        counts = data["stats"].get("counts")
        witness = data["witness"]
    except (HistoryError, ModelError, ValueError, TypeError, MemoryError) as error:
        verdict, counts, witness = "unknown", None, None
        reason = f"cannot be checked as {name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    if witness is not None:
        places = np.frombuffer(rows, np.int32)
        for operation in witness["operations"]:
            operation["index"] = int(places[operation["index"]])
    return {
        "check": name,
        "verdict": verdict,
        "reason": reason,
        "counts": None if counts is None else json.dumps(counts),
        "witness": None if witness is None else json.dumps(witness),
        "search_s": time.perf_counter() - began_s,
    }


def _run_check(history: History, name: str, plan: CheckPlan) -> Result:
    if name == LOG_CONTENTS:
        return check_log(history, timeout_s=plan.timeout_s, memory_mb=plan.memory_mb)
    model = {"register": Register, "log": Log}.get(name)
    return check(
        history, parse_model(name) if model is None else model(), timeout_s=plan.timeout_s, memory_mb=plan.memory_mb
    )


def run_verdicts(rows: list[Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """The verdict of every (run_dir, check) from the rows of its keys: verdict, keys, invalid and unknown keys,
    reason and witness.

    The witness is the one that the local checker would choose: the key with the fewest operations for
    linearizability, the gravest kind of harm for the contents of a log, then the key that was used first.
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
        chosen = min(invalid, key=_gravest if name == LOG_CONTENTS else lambda row: int(row["operations"]))
    else:
        chosen = unknown[0] if unknown else members[0]
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
        "reason": chosen["reason"],
        "witness": chosen["witness"],
        "counts": json.dumps(counts) if counts else None,
        "search_s": sum(row["search_s"] for row in members),
    }


def _gravest(row: Any) -> int:
    counts = json.loads(row["counts"] or "{}")
    return next((at for at, kind in enumerate(ANOMALIES) if counts.get(kind)), len(ANOMALIES))


def checks_table(runs: DataFrame, rows: list[Any]) -> Table:
    """One row per run and check, with the run's group, the verdict of its results, and Spark's."""
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
