"""Table 3: latency quantiles per operation, outcome, node and fault phase, with their error.

For up to `EXACT_OPERATIONS` in a group (system ... cluster, operation, outcome) the quantiles are exact, by nearest
rank over all latencies. Above that, latencies are counted over all runs in buckets whose bounds grow by 1 %, and a
bucket's middle stands for all values in it: the relative error of a quantile is at most `RELATIVE_ERROR`, whatever the
distribution, at a fixed cost in memory (the idea of DDSketch, Masson et al. 2019).
"""

from __future__ import annotations

__all__ = ["EXACT_OPERATIONS", "RELATIVE_ERROR", "latency_quantiles"]

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from spark_analysis.ingest import GROUP
from spark_analysis.statistics import QUANTILES, rank_of
from spark_analysis.tables import Table, group_key
from spark_analysis.workers import settle

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

EXACT_OPERATIONS = 5_000_000
"""Largest group whose latencies one worker holds: 40 MB of numbers, and a few times that while they are partitioned."""

GAMMA = 1.01
RELATIVE_ERROR = (GAMMA - 1) / (GAMMA + 1)
"""Half the width of a bucket: 0.5 %."""

ALL = "all"
"""Value of the node or phase column in a row that covers all nodes or phases."""

_BY = (*GROUP, "f", "outcome")
_COLUMNS: dict[str, str] = {
    **dict.fromkeys((*_BY, "node", "phase"), "string"),
    "operations": "long",
    "mean_ns": "double",
    "min_ns": "long",
    **{f"{name}_ns": "long" for name in QUANTILES},
    "max_ns": "long",
    "relative_error": "double",
}


def latency_quantiles(runs: DataFrame, *, exact_operations: int = EXACT_OPERATIONS) -> Table:
    """One row per group, operation, outcome, node and phase; node and phase also as "all".

    `relative_error` is 0 for exact rows; mean, min and max are always exact.
    """
    from pyspark.sql import functions as F

    pieces = runs.select(*GROUP, F.explode("latencies").alias("piece")).select(*GROUP, "piece.*")
    sizes = pieces.groupBy(*_BY).agg(F.sum("operations").alias("size"))
    large = [row for row in sizes.collect() if row["size"] > exact_operations]
    table = Table(name="latency", columns=_COLUMNS)
    exact = pieces
    if large:
        spark = runs.sparkSession
        names = spark.createDataFrame(
            [tuple(row[name] for name in _BY) for row in large], ", ".join(f"{name} string" for name in _BY)
        )
        exact = pieces.join(F.broadcast(names), list(_BY), "left_anti")
        table.rows += _approximate(pieces.join(F.broadcast(names), list(_BY), "left_semi"))
    schema = ", ".join(f"{name} {kind}" for name, kind in _COLUMNS.items())
    table.rows += [row.asDict() for row in exact.groupBy(*_BY).applyInPandas(_exact, schema).collect()]
    table.rows.sort(key=lambda row: group_key(row, (*_BY, "node", "phase")))
    return table


def _exact(pieces: pd.DataFrame) -> pd.DataFrame:
    """The quantiles of one group from all of its latencies."""
    settle()
    arrays = [np.frombuffer(content, "<i8") for content in pieces["latencies_ns"]]
    rows = []
    for node, phase, places in _combinations(pieces):
        values = np.concatenate([arrays[place] for place in places])
        ranks = [rank_of(permille, len(values)) - 1 for permille in QUANTILES.values()]
        values.partition([0, *ranks, len(values) - 1])
        rows.append(
            {
                **{name: pieces[name].iloc[0] for name in _BY},
                "node": node,
                "phase": phase,
                "operations": len(values),
                "mean_ns": int(values.sum()) / len(values),
                "min_ns": int(values[0]),
                **{f"{name}_ns": int(values[rank]) for name, rank in zip(QUANTILES, ranks, strict=True)},
                "max_ns": int(values[-1]),
                "relative_error": 0.0,
            }
        )
    return pd.DataFrame(rows, columns=list(_COLUMNS))


def _combinations(pieces: pd.DataFrame) -> Iterator[tuple[str | None, str, list[int]]]:
    """Every combination of node and phase, each also "all", with the positions of its pieces; empty ones left out."""
    nodes = [None if pd.isna(node) else str(node) for node in pieces["node"]]
    phases = [str(phase) for phase in pieces["phase"]]
    for node, phase in itertools.product([ALL, *dict.fromkeys(nodes)], [ALL, *dict.fromkeys(phases)]):
        places = [
            place
            for place in range(len(nodes))
            if (node == ALL or nodes[place] == node) and (phase == ALL or phases[place] == phase)
        ]
        if places:
            yield node, phase, places


def _approximate(pieces: DataFrame) -> list[dict[str, Any]]:
    """The quantiles of large groups from counts by bucket."""
    from pyspark.sql import functions as F

    def buckets(batches: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        settle()
        for batch in batches:
            for piece in batch.itertuples(index=False):
                values = np.frombuffer(piece.latencies_ns, "<i8")
                index, counts = np.unique(bucket_of(values), return_counts=True)
                yield pd.DataFrame(
                    {
                        **{name: getattr(piece, name) for name in (*_BY, "node", "phase")},
                        "bucket": index,
                        "count": counts,
                        # The piece's total is on its first bucket only, so that totals add up.
                        "total": [int(values.sum()), *[0] * (len(index) - 1)],
                        "low": int(values.min()),
                        "high": int(values.max()),
                    }
                )

    schema = ", ".join(f"{name} string" for name in (*_BY, "node", "phase"))
    counted = pieces.mapInPandas(buckets, f"{schema}, bucket long, count long, total long, low long, high long")
    expanded = counted.select(
        *_BY,
        F.explode(F.array("node", F.lit(ALL))).alias("node"),
        "phase", "bucket", "count", "total", "low", "high",
    ).select(
        *_BY, "node", F.explode(F.array("phase", F.lit(ALL))).alias("phase"), "bucket", "count", "total", "low", "high"
    )  # fmt: skip
    rows = (
        expanded.groupBy(*_BY, "node", "phase", "bucket")
        .agg(F.sum("count").alias("count"), F.sum("total").alias("total"), F.min("low").alias("low"),
             F.max("high").alias("high"))
        .collect()
    )  # fmt: skip
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in (*_BY, "node", "phase")), []).append(row)
    return [_from_buckets(key, members) for key, members in groups.items()]


def bucket_of(values: Any) -> Any:
    """The buckets of latencies: bucket i holds (GAMMA^(i-1), GAMMA^i]; everything up to 1 ns is in bucket 0."""
    return np.ceil(np.log(np.maximum(values, 1)) / np.log(GAMMA) - 1e-9).astype(np.int64)


def _from_buckets(key: tuple[Any, ...], rows: list[Any]) -> dict[str, Any]:
    rows.sort(key=lambda row: int(row["bucket"]))
    counts = np.array([row["count"] for row in rows])
    reached = np.cumsum(counts)
    total = int(reached[-1])
    low, high = min(row["low"] for row in rows), max(row["high"] for row in rows)
    quantiles = {}
    for name, permille in QUANTILES.items():
        bucket = rows[int(np.searchsorted(reached, rank_of(permille, total)))]["bucket"]
        middle = 2 * GAMMA**bucket / (GAMMA + 1)
        quantiles[f"{name}_ns"] = round(min(max(middle, low), high))
    return {
        **dict(zip((*_BY, "node", "phase"), key, strict=True)),
        "operations": total,
        "mean_ns": sum(row["total"] for row in rows) / total,
        "min_ns": low,
        **quantiles,
        "max_ns": high,
        "relative_error": RELATIVE_ERROR,
    }
