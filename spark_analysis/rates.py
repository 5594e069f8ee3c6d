"""Table 1: how often a configuration misbehaves, and by which anomalies.

The rate is the share of invalid runs among the decided ones (valid or invalid), with Wilson's interval; if there are
none, its upper end is the rate that so few runs cannot exclude. Runs that ended unknown are counted separately and
never as valid. Anomalies by kind are per million operations of the runs that were judged.
"""

from __future__ import annotations

__all__ = ["anomaly_kinds", "anomaly_rates"]

from typing import TYPE_CHECKING

from spark_analysis.ingest import GROUP
from spark_analysis.statistics import wilson
from spark_analysis.tables import Table, distribution, group_key

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_QUANTILES = ("min", "p50", "max")


def anomaly_rates(runs: DataFrame) -> Table:
    """One row per group of `ingest`'s runs, which must have a usable history."""
    from pyspark.sql import functions as F

    def those(verdict: str) -> object:
        return F.sum((F.col("verdict") == verdict).cast("long")).alias(verdict)

    rows = (
        runs.groupBy(*GROUP)
        .agg(
            F.count(F.lit(1)).alias("runs"),
            those("valid"), those("invalid"), those("unknown"),
            F.sum("operations").alias("operations"),
            distribution("earliest_witness_ns").alias("witness_ns"),
            distribution("earliest_witness_operations").alias("witness_operations"),
        )
        .collect()
    )  # fmt: skip
    table = Table(
        name="rates",
        columns={
            **dict.fromkeys(GROUP, "string"),
            **dict.fromkeys(("runs", "valid", "invalid", "unknown", "operations"), "long"),
            **dict.fromkeys(("rate", "rate_low", "rate_high"), "double"),
            **{f"earliest_witness_ns_{name}": "long" for name in _QUANTILES},
            **{f"earliest_witness_operations_{name}": "long" for name in _QUANTILES},
        },
    )
    for row in rows:
        decided = row.valid + row.invalid
        interval = wilson(row.invalid, decided)
        table.rows.append(
            {
                **{name: row[name] for name in (*GROUP, "runs", "valid", "invalid", "unknown", "operations")},
                "rate": row.invalid / decided if decided else None,
                "rate_low": interval.low,
                "rate_high": interval.high,
                **{f"earliest_witness_ns_{name}": row.witness_ns[name] for name in _QUANTILES},
                **{f"earliest_witness_operations_{name}": row.witness_operations[name] for name in _QUANTILES},
            }
        )
    table.rows.sort(key=lambda row: group_key(row, GROUP))
    return table


def anomaly_kinds(runs: DataFrame) -> Table:
    """One row per group, check and kind of anomaly found."""
    from pyspark.sql import functions as F

    judged = runs.filter(F.col("anomalies").isNotNull())
    totals = {
        tuple(row[name] for name in GROUP): row.operations
        for row in judged.groupBy(*GROUP).agg(F.sum("operations").alias("operations")).collect()
    }
    counted = (
        judged.select(*GROUP, "run_id", F.explode("anomalies").alias("anomaly"))
        .groupBy(*GROUP, F.col("anomaly.check").alias("check"), F.col("anomaly.kind").alias("kind"))
        .agg(F.sum("anomaly.count").alias("count"), F.countDistinct("run_id").alias("runs"))
        .collect()
    )
    table = Table(
        name="anomalies",
        columns={
            **dict.fromkeys((*GROUP, "check", "kind"), "string"),
            **dict.fromkeys(("runs", "count", "operations"), "long"),
            "per_million_operations": "double",
        },
    )
    for row in counted:
        operations = totals[tuple(row[name] for name in GROUP)]
        table.rows.append(
            {
                **{name: row[name] for name in (*GROUP, "check", "kind")},
                "runs": row.runs,
                "count": row["count"],
                "operations": operations,
                "per_million_operations": 1e6 * row["count"] / operations if operations else None,
            }
        )
    table.rows.sort(key=lambda row: group_key(row, (*GROUP, "check", "kind")))
    return table
