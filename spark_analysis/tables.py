"""Tables: what an analysis computes, how it is written, and the SQL that they share."""

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
"""Where tables are until all are written, and the end of a file's name until it is. Spark reads no such folder."""


@dataclass(slots=True, kw_only=True)
class Table:
    """A table with its columns' Spark types. `rows` are plain values; `frame` stands for them where there may be
    one per fault or run of a very large store, and is not collected."""

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
    """A row's place in the order of tables: by its group columns, null first."""
    return tuple((row[name] is not None, row[name] if row[name] is not None else "") for name in columns)


def distribution(values: str) -> Column:
    """SQL: count, total, extremes and quantiles (nearest rank) of a column's values that are not null.

    Gathers a group's values; used where there is one per fault or run, never per operation.
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
    """Write every table to `place` (a path or URI) as Parquet, `NAME.parquet`, and as `NAME.csv` when asked.

    Each is a folder of one file, as Spark writes. Older ones are replaced after all have been written: where one
    cannot be, on a full disk for instance, they stay as they were. Lists go into CSV as JSON. Returns the paths
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
    """Write one text file to a path or URI, through Hadoop. An older one is replaced once all is written. Raises
    AnalysisError."""
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
    """The files of one file system, as Hadoop sees them. Every method raises what Hadoop raises."""

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
        """Move what is at `path` to `target`; what was there is gone. Hadoop would move a folder into an older one."""
        self.delete(target)
        if not self._system.rename(self._path(path), self._path(target)):
            raise OSError(f"{path} could not be moved there")

    def delete(self, path: str) -> None:
        """Whatever is there; nothing where there is nothing."""
        self._system.delete(self._path(path), True)


def as_json(tables: Iterable[Table]) -> str:
    """Tables with rows as one JSON object by name."""
    return json.dumps({table.name: table.rows for table in tables}, indent=1, default=str)
