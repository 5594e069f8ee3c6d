"""Tables, the results of an analysis: how they are written, and SQL expressions that they share."""

from __future__ import annotations

__all__ = ["Table", "as_json", "distribution", "group_key", "quantile_columns", "write_tables", "write_text"]

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spark_analysis.errors import AnalysisError
from spark_analysis.session import one_line
from spark_analysis.statistics import QUANTILES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

UNFINISHED = ".unfinished"
"""Name of the folder that holds tables until all are written, which Spark ignores, and suffix of an unfinished file."""


@dataclass(slots=True, kw_only=True)
class Table:
    """A table with its columns' Spark types. `rows` are plain values; `frame` replaces them, without being collected,
    for tables with a row per fault or run of a possibly very large store."""

    name: str
    columns: Mapping[str, str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    frame: DataFrame | None = None

    def to_frame(self, spark: SparkSession) -> DataFrame:
        """The table as a DataFrame."""
        if self.frame is not None:
            return self.frame.select(*self.columns)
        schema = ", ".join(f"`{name}` {kind}" for name, kind in self.columns.items())
        return spark.createDataFrame([tuple(row[name] for name in self.columns) for row in self.rows], schema)


def group_key(row: Mapping[str, Any], columns: Sequence[str]) -> tuple[Any, ...]:
    """The sort key of a row: its group columns, null first."""
    return tuple((row[name] is not None, row[name] if row[name] is not None else "") for name in columns)


def distribution(values: str) -> Column:
    """SQL for count, total, extremes and quantiles (nearest rank) of a column's non-null values.

    It collects all values of a group, so it is for values per fault or run, never per operation.
    """
    from pyspark.sql import functions as F

    ordered = f"array_sort(collect_list({values}))"
    return F.expr(
        f"transform(array({ordered}), x -> named_struct('n', size(x), 'total', "
        "aggregate(x, 0L, (sum, y) -> sum + y), 'min', try_element_at(x, 1), "
        + "".join(
            f"'{name}', try_element_at(x, greatest(1, cast(({permille} * size(x) + 999) div 1000 as int))), "
            for name, permille in QUANTILES.items()
        )
        + "'max', try_element_at(x, greatest(1, size(x)))))[0]"
    )


def quantile_columns(kind: str) -> dict[str, str]:
    """The columns of a distribution: min, quantiles, max."""
    return {"min": kind, **dict.fromkeys(QUANTILES, kind), "max": kind}


def write_tables(spark: SparkSession, tables: Iterable[Table], place: str, *, csv: bool) -> list[str]:
    """Write every table to `place` (a path or URI) as Parquet, `NAME.parquet`, and with `csv` also as `NAME.csv`.

    Each is a folder with one file, as written by Spark. Older tables are replaced after all have been written, and stay
    as they were if one cannot be written, for instance on a full disk. Lists become JSON in CSV. Returns the paths
    written. Raises AnalysisError.
    """
    from pyspark.sql import functions as F

    folder = place.rstrip("/")
    path = unfinished = f"{folder}/{UNFINISHED}"
    written = []
    try:
        files = _Files(spark, folder)
        try:
            for table in tables:
                path = f"{folder}/{table.name}.parquet"
                frame = table.to_frame(spark).coalesce(1)
                frame.write.mode("overwrite").parquet(f"{unfinished}/{table.name}.parquet")
                written.append(path)
                if csv:
                    flat = [
                        F.to_json(name).alias(name) if kind.startswith(("array", "struct")) else F.col(name)
                        for name, kind in table.columns.items()
                    ]
                    path = f"{folder}/{table.name}.csv"
                    writer = frame.select(*flat).write.mode("overwrite").option("header", "true").option("escape", '"')
                    writer.csv(f"{unfinished}/{table.name}.csv")
                    written.append(path)
            for path in written:
                files.replace(f"{unfinished}/{path.rpartition('/')[2]}", path)
        finally:
            files.delete(unfinished)
    except Exception as error:
        raise AnalysisError(f"cannot write {path}: {one_line(error)}") from None
    return written


def write_text(spark: SparkSession, path: str, text: str) -> None:
    """Write one text file to a path or URI, through Hadoop. An older file is replaced after the new one is complete.
    Raises AnalysisError."""
    unfinished = f"{path}{UNFINISHED}"
    try:
        files = _Files(spark, path)
        try:
            files.write(unfinished, text)
            files.replace(unfinished, path)
        finally:
            files.delete(unfinished)
    except Exception as error:
        raise AnalysisError(f"cannot write {path}: {one_line(error)}") from None


class _Files:
    """File operations through Hadoop on the file system of `path`. Every method raises what Hadoop raises."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        context: Any = spark.sparkContext
        self._path = context._jvm.org.apache.hadoop.fs.Path
        self._system = self._path(path).getFileSystem(context._jsc.hadoopConfiguration())

    def write(self, path: str, text: str) -> None:
        stream = self._system.create(self._path(path), True)
        try:
            stream.write(bytearray(text.encode("utf-8")))
        finally:
            stream.close()

    def replace(self, path: str, target: str) -> None:
        """Move `path` to `target`, which is deleted first: Hadoop would move a folder into an existing one."""
        self.delete(target)
        if not self._system.rename(self._path(path), self._path(target)):
            raise OSError(f"{path} could not be moved there")

    def delete(self, path: str) -> None:
        """Delete a file or folder, if it exists."""
        self._system.delete(self._path(path), True)


def as_json(tables: Iterable[Table]) -> str:
    """The rows of tables as one JSON object, by table name."""
    return json.dumps({table.name: table.rows for table in tables}, indent=1, default=str)
