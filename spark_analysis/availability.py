"""Table 2: what faults cost, how long the system is unavailable, how fast it recovers, and what it loses.

The definitions of phase, unavailability and recovery are in `digest`. Distributions are over runs, or over faults for
measures of faults, and use nearest rank, so that every figure is an observed value.
"""

from __future__ import annotations

__all__ = ["MEASURES", "fault_kinds", "faults_table", "measures", "outcome_rates", "spans_table"]

from typing import TYPE_CHECKING

from spark_analysis.ingest import GROUP
from spark_analysis.tables import Table, distribution, group_key, quantile_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MEASURES = {
    "unavailable_ns": "total ns for which a run was unavailable",
    "longest_unavailable_ns": "ns of the longest unavailability of a run",
    "unavailabilities": "unavailabilities of a run",
    "recovery_after_start_ns": "ns from a fault's start until service is restored",
    "recovery_after_heal_ns": "ns from a fault's heal until service is restored",
    "lost": "acknowledged messages that a run lost",
    "duplicated": "messages duplicated in a run whose workload forbids it",
}
"""Measures and their meanings; those of recovery are per fault, the others per run."""

_FAULT_COLUMNS = {
    "fault_id": "string", "nemesis": "string", "variant": "string", "start_ns": "long", "end_ns": "long",
    "proven": "boolean", "exercised": "boolean", "healed": "boolean", "in_force_ns": "long",
    "ok": "long", "fail": "long", "info": "long",
    "away_after_start": "boolean", "recovery_after_start_ns": "long",
    "away_after_heal": "boolean", "recovery_after_heal_ns": "long",
}  # fmt: skip

_OF_KIND = ("variant", "end_ns", "proven", "exercised", "in_force_ns", "ok", "fail", "info")
"""The fields of a fault that `fault_kinds` uses, besides its recoveries."""


def outcome_rates(runs: DataFrame) -> Table:
    """ok, fail and info by group, operation and phase: counts, shares, and per second of the phase."""
    from pyspark.sql import functions as F

    outcomes = ("ok", "fail", "info")
    times = {
        tuple(row[name] for name in GROUP): (row.during_ns, row.total_ns - row.during_ns)
        for row in runs.filter("timed")
        .groupBy(*GROUP)
        .agg(F.sum("during_ns").alias("during_ns"), F.sum("end_ns").alias("total_ns"))
        .collect()
    }
    rows = (
        runs.select(*GROUP, "timed", F.explode("counts").alias("count"))
        .withColumn("in_fault", F.col("count.phase") == "during")
        .groupBy(*GROUP, F.col("count.f").alias("f"), "in_fault")
        .agg(
            *[F.sum(f"count.{outcome}").alias(outcome) for outcome in outcomes],
            # Operations of runs without times do not count in rates per second.
            *[F.expr(f"sum(if(timed, count.{outcome}, 0))").alias(f"timed_{outcome}") for outcome in outcomes],
        )
        .collect()
    )
    table = Table(
        name="outcomes",
        columns={
            **dict.fromkeys((*GROUP, "f"), "string"),
            "in_fault": "boolean",
            **dict.fromkeys(("ok", "fail", "info", "phase_ns"), "long"),
            **dict.fromkeys(("ok_share", "ok_per_s", "fail_per_s", "info_per_s"), "double"),
        },
    )
    for row in rows:
        in_fault_ns, outside_ns = times.get(tuple(row[name] for name in GROUP), (0, 0))
        phase_ns = in_fault_ns if row.in_fault else outside_ns
        total = row.ok + row.fail + row.info
        table.rows.append(
            {
                **{name: row[name] for name in (*GROUP, "f", "in_fault", "ok", "fail", "info")},
                "phase_ns": phase_ns,
                "ok_share": row.ok / total if total else None,
                **{f"{name}_per_s": _per_s(row[f"timed_{name}"], phase_ns) for name in outcomes},
            }
        )
    table.rows.sort(key=lambda row: group_key(row, (*GROUP, "f", "in_fault")))
    return table


def _per_s(number: int, time_ns: int) -> float | None:
    return number * 1e9 / time_ns if time_ns else None


def fault_kinds(runs: DataFrame) -> Table:
    """The effect of each kind of fault while it is in force, by group, nemesis and variant: outcomes of the operations
    invoked during it (those during several faults count for each), and how fast the system recovers. `unmet` counts
    the faults that the system certainly did not meet."""
    from pyspark.sql import functions as F

    recoveries = ("recovery_after_start_ns", "recovery_after_heal_ns")
    kind = ("fault_nemesis", "variant")
    rows = (
        runs.filter("timed")
        .select(*GROUP, F.explode("faults").alias("fault"))
        .select(
            *GROUP,
            F.col("fault.nemesis").alias("fault_nemesis"),
            *[f"fault.{name}" for name in _OF_KIND],
            *[f"fault.{name}" for name in recoveries],
        )
        .groupBy(*GROUP, *kind)
        .agg(
            F.count(F.lit(1)).alias("faults"),
            F.count("end_ns").alias("healed"),
            F.sum(F.col("proven").cast("long")).alias("proven"),
            F.sum((F.coalesce(F.col("exercised"), F.lit(True)) == F.lit(False)).cast("long")).alias("unmet"),
            *[F.sum(name).alias(name) for name in ("in_force_ns", "ok", "fail", "info")],
            *[distribution(name).alias(name) for name in recoveries],
        )
        .collect()
    )
    quantiles = ("p50", "p90", "max")
    table = Table(
        name="fault_kinds",
        columns={
            **dict.fromkeys((*GROUP, *kind), "string"),
            **dict.fromkeys(("faults", "proven", "unmet", "in_force_ns", "ok", "fail", "info"), "long"),
            **dict.fromkeys(("ok_share", "ok_per_s", "fail_per_s", "info_per_s"), "double"),
            **{f"{name}_{part}": "long" for name in recoveries for part in ("missing", *quantiles)},
        },
    )
    for row in rows:
        total = row.ok + row.fail + row.info
        per_s = 1e9 / row.in_force_ns if row.in_force_ns else None
        # A fault that was never healed has no recovery from its heal, and it does not count as missing.
        recoverable = dict(zip(recoveries, (row.faults, row.healed), strict=True))
        table.rows.append(
            {
                **{name: row[name] for name in (*GROUP, *kind, "faults", "proven", "unmet", "in_force_ns")},
                **{name: row[name] for name in ("ok", "fail", "info")},
                "ok_share": row.ok / total if total else None,
                **{f"{name}_per_s": row[name] * per_s if per_s else None for name in ("ok", "fail", "info")},
                **{f"{name}_missing": recoverable[name] - row[name].n for name in recoveries},
                **{f"{name}_{part}": row[name][part] for name in recoveries for part in quantiles},
            }
        )
    table.rows.sort(key=lambda row: group_key(row, (*GROUP, *kind)))
    return table


def measures(runs: DataFrame) -> Table:
    """Every measure of `MEASURES` by group: the number of values, of missing values (not recovered, not judged), and
    their distribution."""
    from pyspark.sql import functions as F

    per_run = runs.select(
        *GROUP,
        F.when(F.col("timed"), F.expr("aggregate(spans, 0L, (sum, s) -> sum + s.end_ns - s.start_ns)")).alias(
            "unavailable_ns"
        ),
        F.when(F.col("timed"), F.expr("coalesce(array_max(transform(spans, s -> s.end_ns - s.start_ns)), 0L)")).alias(
            "longest_unavailable_ns"
        ),
        F.when(F.col("timed"), F.size("spans").cast("long")).alias("unavailabilities"),
        "lost",
        "duplicated",
    )
    recovery = ("recovery_after_start_ns", "recovery_after_heal_ns")
    per_fault = (
        runs.filter("timed")
        .select(*GROUP, F.explode("faults").alias("fault"))
        .select(*GROUP, *[F.col(f"fault.{name}").alias(name) for name in ("end_ns", *recovery)])
    )
    table = Table(
        name="availability",
        columns={
            **dict.fromkeys((*GROUP, "measure"), "string"),
            **dict.fromkeys(("n", "missing"), "long"),
            **quantile_columns("long"),
            "mean": "double",
        },
    )
    _measure(table, per_run, tuple(name for name in MEASURES if name not in recovery))
    _measure(table, per_fault, recovery[:1])
    _measure(table, per_fault.filter("end_ns is not null"), recovery[1:])
    table.rows.sort(key=lambda row: (*group_key(row, GROUP), list(MEASURES).index(row["measure"])))
    return table


def _measure(table: Table, frame: DataFrame, names: tuple[str, ...]) -> None:
    from pyspark.sql import functions as F

    collected = (
        frame.groupBy(*GROUP)
        .agg(F.count(F.lit(1)).alias("rows"), *[distribution(name).alias(f"of_{name}") for name in names])
        .collect()
    )
    for row in collected:
        for name in names:
            spread = row[f"of_{name}"]
            table.rows.append(
                {
                    **{column: row[column] for column in GROUP},
                    "measure": name,
                    "n": spread.n,
                    "missing": row.rows - spread.n,
                    **{column: spread[column] for column in quantile_columns("")},
                    "mean": spread.total / spread.n if spread.n else None,
                }
            )


def faults_table(runs: DataFrame) -> Table:
    """Every fault of every run, with its recovery."""
    from pyspark.sql import functions as F

    columns = {"run_id": "string", **{f"fault_{n}" if n == "nemesis" else n: k for n, k in _FAULT_COLUMNS.items()}}
    frame = runs.select("run_id", F.explode("faults").alias("fault")).select(
        "run_id", *[F.col(f"fault.{n}").alias(f"fault_{n}" if n == "nemesis" else n) for n in _FAULT_COLUMNS]
    )
    return Table(name="faults", columns=columns, frame=frame)


def spans_table(runs: DataFrame) -> Table:
    """Every unavailability of every run."""
    from pyspark.sql import functions as F

    columns = {"run_id": "string", "start_ns": "long", "end_ns": "long", "recovered": "boolean"}
    frame = runs.select("run_id", F.explode("spans").alias("span")).select("run_id", "span.*")
    return Table(name="unavailabilities", columns=columns, frame=frame)
