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

    Each is a folder of one file, as Spark writes; older ones are replaced. Lists go into CSV as JSON. Returns the
    paths written. Raises AnalysisError.
    """
    from pyspark.sql import functions as F

    written = []
    for table in tables:
        frame = table.to_frame(spark).coalesce(1)
        path = f"{place.rstrip('/')}/{table.name}.parquet"
        try:
            frame.write.mode("overwrite").parquet(path)
            written.append(path)
            if csv:
                flat = [
                    F.to_json(name).alias(name) if kind.startswith(("array", "struct")) else F.col(name)
                    for name, kind in table.columns.items()
                ]
                path = f"{place.rstrip('/')}/{table.name}.csv"
                frame.select(*flat).write.mode("overwrite").option("header", "true").option("escape", '"').csv(path)
                written.append(path)
        except Exception as error:
            raise AnalysisError(f"cannot write {path}: {one_line(error)}") from None
    return written


def write_text(spark: SparkSession, path: str, text: str) -> None:
    """Write one text file to a path or URI, through Hadoop, replacing an older one. Raises AnalysisError."""
    context: Any = spark.sparkContext
    try:
        target = context._jvm.org.apache.hadoop.fs.Path(path)
        system = target.getFileSystem(context._jsc.hadoopConfiguration())
        stream = system.create(target, True)
        try:
            stream.write(bytearray(text.encode("utf-8")))
        finally:
            stream.close()
    except Exception as error:
        raise AnalysisError(f"cannot write {path}: {one_line(error)}") from None


def as_json(tables: Iterable[Table]) -> str:
    """Tables with rows as one JSON object by name."""
    return json.dumps({table.name: table.rows for table in tables}, indent=1, default=str)
