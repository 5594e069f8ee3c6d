"""Copies many small history files into few large ones, which are cheap to list and to store.

    DIR/compacted-events/part-*.parquet       whole runs, one after the other, about `FILE_BYTES` per file
    DIR/compacted-outcomes/part-*.parquet     the contents of their test.json and results.json

`ingest` reads such a folder like any store. Only Parquet histories are copied; the others are listed as left out.
"""

from __future__ import annotations

__all__ = ["FILE_BYTES", "compact"]

import math
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from spark_analysis.errors import AnalysisError
from spark_analysis.files import Content, opened
from spark_analysis.ingest import (
    COMPACTED,
    COMPACTED_OUTCOMES,
    PARQUET,
    Listing,
    RunFiles,
    compacted_run_dir,
    history_files,
    outcomes_of,
)
from spark_analysis.operations import UnreadableRunError
from spark_analysis.reading import read_runs
from spark_analysis.session import one_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILE_BYTES = 64 * 1024 * 1024
"""Approximate size of a compacted file: large enough for a block-based file system, small enough for one task."""

_STRINGS = (
    "run_id", "test_name", "system", "workload", "nemesis", "cluster", "configuration", "started_at", "type", "f",
    "key", "value", "error", "node",
)  # fmt: skip
_SCHEMA = pa.schema(
    [
        *[(name, pa.string()) for name in _STRINGS],
        *[(name, pa.int64()) for name in ("seed", "index", "time_ns", "process")],
        ("is_nemesis", pa.bool_()),
    ]
)

_ID_SCHEMA = pa.schema([("run_dir", pa.string()), ("run_id", pa.string())])


def compact(spark: SparkSession, listing: Listing, place: str, run_dirs: Collection[str] | None = None) -> list[str]:
    """Write the runs of `listing`, or only those at `run_dirs`, to `place` (a path or URI) as few files. Returns a
    text for each of these that was left out.

    Raises AnalysisError if two of them have the same id, or if the place cannot be written.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import from_arrow_schema

    taken, left_out = _taken(listing, run_dirs)
    bins: list[tuple[str, int]] = []
    size = number = 0
    for run in taken:
        if size and size + run.size_bytes > FILE_BYTES:
            number, size = number + 1, 0
        size += run.size_bytes
        bins.append((str(run.history), number))
    chosen = Listing(listing.place, runs=taken)

    def events(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _, content in opened(batches):
            try:
                yield from _whole(content)
            except UnreadableRunError:
                continue  # listed as left out below, where its id is missing

    def identities(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = []
        for path, content in opened(batches):
            try:
                run_id = next(read_runs(PARQUET, content)).identity.run_id
            except UnreadableRunError:
                run_id = None
            rows.append({"run_dir": path.rpartition("/")[0], "run_id": run_id})
        yield pa.RecordBatch.from_pylist(rows, schema=_ID_SCHEMA)

    try:
        keys = _partition_keys(spark, number + 1)
        known = history_files(spark, chosen).mapInArrow(identities, "run_dir string, run_id string").collect()
        ids = [(row.run_dir, compacted_run_dir(row.run_id)) for row in known if row.run_id]
        if len({run_id for _, run_id in ids}) != len(ids):
            raise AnalysisError(
                f"{listing.place} has two runs with the same run_id, which would become one: remove one of them"
            )
        left_out += [f"{row.run_dir}: its history is damaged or has no run_id" for row in known if not row.run_id]
        whole = {run_dir for run_dir, _ in ids}
        rows = [(path, keys[number]) for path, number in bins if path.rpartition("/")[0] in whole]
        placed = spark.createDataFrame(rows, "path string, bin int")
        (
            history_files(spark, chosen)
            .join(F.broadcast(placed), "path")
            .repartition(number + 1, "bin")
            .mapInArrow(events, from_arrow_schema(_SCHEMA))
            .write.mode("overwrite")
            .parquet(f"{place.rstrip('/')}/{COMPACTED}")
        )
        names = spark.createDataFrame(ids, "run_dir string, new_dir string")
        outcomes = outcomes_of(spark, chosen).join(F.broadcast(names), "run_dir")
        (
            outcomes.withColumn("run_dir", F.col("new_dir"))
            .drop("new_dir")
            .coalesce(1)
            .write.mode("overwrite")
            .parquet(f"{place.rstrip('/')}/{COMPACTED_OUTCOMES}")
        )
    except AnalysisError:
        raise
    except Exception as error:
        raise AnalysisError(f"cannot compact to {place}: {one_line(error)}") from None
    return left_out


def _taken(listing: Listing, run_dirs: Collection[str] | None) -> tuple[list[RunFiles], list[str]]:
    """The runs to copy, and a text for each requested one that cannot be copied. Raises AnalysisError if there is
    nothing to copy."""
    asked = [run for run in listing.runs if run_dirs is None or run.run_dir in run_dirs]
    taken = [run for run in asked if (run.history or "").endswith("/" + PARQUET)]
    places = {run.run_dir for run in taken}
    left_out = [f"{run.run_dir}: its history is not Parquet" for run in asked if run.run_dir not in places]
    # It is not known here which run is in which of the compacted files.
    if run_dirs is None or any(run_dir.startswith(compacted_run_dir("")) for run_dir in run_dirs):
        left_out += [f"{path}: already compacted" for path, _ in listing.compacted]
    if not taken:
        raise AnalysisError(f"{listing.place} has no run with a {PARQUET} to compact")
    return taken, left_out


def _partition_keys(spark: SparkSession, partitions: int) -> list[int]:
    """For each of so many partitions an integer that Spark's hash puts there. Consecutive integers share partitions, so
    that a file would hold several bins, and others none."""
    from pyspark.sql import functions as F

    tried = spark.range(int(partitions * (math.log(partitions) + 20)))  # the chance that one is missing is e^-20
    partition = F.expr(f"pmod(hash(cast(id as int)), {partitions})").alias("partition")
    found = tried.groupBy(partition).agg(F.min("id").alias("key")).collect()
    keys = {row.partition: row.key for row in found}
    return [keys[number] for number in range(partitions)]


def _whole(content: Content) -> Iterator[pa.RecordBatch]:
    """The events of one file in the columns of `_SCHEMA`."""
    if isinstance(content, UnreadableRunError):
        raise content
    try:
        table = pq.read_table(pa.BufferReader(content), page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise UnreadableRunError(str(error)) from None
    columns = []
    for column in _SCHEMA:
        if column.name in table.column_names:
            given = table.column(column.name)
            if pa.types.is_timestamp(given.type):
                given = pa.chunked_array([[str(moment.isoformat()) for moment in given.to_pylist()]], pa.string())
            columns.append(given.cast(column.type))
        elif column.name == "index":
            columns.append(pa.chunked_array([range(table.num_rows)], pa.int64()))
        else:
            columns.append(pa.chunked_array([pa.nulls(table.num_rows, column.type)]))
    yield from pa.table(columns, schema=_SCHEMA).combine_chunks().to_batches(max_chunksize=65_536)
