"""Table 5: comparison of two sets of runs, suitable for a build that should fail on a regression.

The unit is the run, because operations of one run are not independent. The shares of invalid and of unknown runs are
compared by Fisher's exact test, with the difference and its interval (Newcombe) as the effect; per-run figures (a run's
p99, its unavailability, its longest recovery, its loss) by Mann-Whitney with Cliff's delta. Groups that both sets have
are compared; the p values of all comparisons are adjusted together (Tarone, Holm).
"""

from __future__ import annotations

__all__ = ["BETTER", "SAME", "TOO_FEW", "WORSE", "Comparison", "compare", "compare_groups", "per_run_figures"]

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_analysis.analysis import Options, selection
from spark_analysis.errors import AnalysisError
from spark_analysis.ingest import GROUP
from spark_analysis.session import one_line
from spark_analysis.statistics import (
    difference_interval,
    fisher_exact,
    holm,
    mann_whitney,
    nearest_rank,
    odds_ratio,
    rank_of,
)
from spark_analysis.tables import Table, group_key
from spark_analysis.workers import settle

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WORSE, BETTER, SAME, TOO_FEW = "worse", "better", "no difference shown", "too few runs"

MIN_RUNS = 4
"""Least number of runs of each set in a group: with three against three no rank test can reach 5 %."""

SHARES = ("invalid", "unknown")
FIGURES = (
    "p50_ns", "p99_ns", "ok_share", "unavailable_ns", "longest_recovery_after_start_ns",
    "longest_recovery_after_heal_ns", "lost", "duplicated",
)  # fmt: skip
"""Figures of a run that are compared; for all but `ok_share` smaller is better."""

HIGHER_IS_BETTER = frozenset({"ok_share"})

NEVER_NS = 2**63 - 1
"""Stands for a recovery that never came, longer than any other. Without it only recovered runs would be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The rows of the comparison, and their summary."""

    table: Table
    worse: int
    better: int
    compared: int
    groups: int
    only_in_first: tuple[str, ...]
    only_in_second: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    """Runs of either place that could not be used, each with the reason."""


def compare(
    spark: SparkSession, first: str, second: str, options: Options, *, by: Sequence[str] = GROUP, alpha: float = 0.05,
    min_effect: float = 0.0, progress: Callable[[str], None] = lambda _: None,
) -> Comparison:  # fmt: skip
    """Compare the runs at two places.

    `by` are the group columns that must be equal for runs to be compared: leave one out to compare across it.
    A difference counts if its adjusted p is at most `alpha` and its effect (difference of shares, or Cliff's
    delta) is at least `min_effect`. Raises AnalysisError.
    """
    unknown = [name for name in by if name not in GROUP]
    if unknown:
        raise AnalysisError(f"--by {','.join(by)}: no column {', '.join(unknown)}; known: {', '.join(GROUP)}")
    sides = []
    left_out: list[tuple[str, str]] = []
    for place in (first, second):
        progress(f"reading {place}")
        try:
            runs, problems = selection(spark, place, options)
            left_out += problems
            sides.append(_grouped([row.asDict() for row in per_run_figures(runs).collect()], by))
        except AnalysisError:
            raise
        except Exception as error:
            raise AnalysisError(f"the analysis of {place} failed: {one_line(error)}") from error
        if not sides[-1]:
            raise AnalysisError(f"no usable run in {place}")
    progress("comparing")
    found = compare_groups(sides[0], sides[1], by=by, alpha=alpha, min_effect=min_effect)
    return dataclasses.replace(found, left_out=tuple(left_out))


Groups = dict[tuple[Any, ...], list[dict[str, Any]]]


def _grouped(rows: list[dict[str, Any]], by: Sequence[str]) -> Groups:
    groups: Groups = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return groups


def per_run_figures(runs: DataFrame) -> DataFrame:
    """One row per run: its group, verdict and `FIGURES` (null if a run has none; a longest recovery is `NEVER_NS` if
    the system did not recover from some fault).

    Latencies are of successful operations, exact, by nearest rank.
    """
    import numpy as np
    from pyspark.sql import functions as F

    def ranks(contents: Any) -> list[int] | None:
        settle()
        if not contents:
            return None
        values = np.sort(np.concatenate([np.frombuffer(content, "<i8") for content in contents]))
        return [int(values[rank_of(permille, len(values)) - 1]) for permille in (500, 990)]

    def total(outcomes: str) -> str:
        return f"aggregate(counts, 0L, (sum, c) -> sum + {outcomes})"

    quantiles = F.udf(ranks, "array<long>", useArrow=False)("succeeded")
    everything = total("c.ok + c.fail + c.info")
    return (
        runs.filter("problem is null")
        .withColumn("succeeded", F.expr("transform(filter(latencies, l -> l.outcome = 'ok'), l -> l.latencies_ns)"))
        .withColumn("quantiles", quantiles)
        .select(
            *GROUP,
            "run_id",
            "verdict",
            F.col("quantiles")[0].alias("p50_ns"),
            F.col("quantiles")[1].alias("p99_ns"),
            F.expr(f"case when {everything} > 0 then {total('c.ok')} / {everything} end").alias("ok_share"),
            F.expr("case when timed then aggregate(spans, 0L, (sum, s) -> sum + s.end_ns - s.start_ns) end").alias(
                "unavailable_ns"
            ),
            *[
                F.expr(f"array_max(transform({faults}, f -> coalesce(f.{recovery}, {NEVER_NS})))").alias(
                    f"longest_{recovery}"
                )
                for recovery, faults in (
                    ("recovery_after_start_ns", "faults"),
                    # A fault that was never healed has no recovery from its heal.
                    ("recovery_after_heal_ns", "filter(faults, f -> f.end_ns is not null)"),
                )
            ],
            "lost",
            "duplicated",
        )
    )


_COLUMNS = {
    "figure": "string", "n_first": "long", "n_second": "long", "first": "double", "second": "double",
    "effect": "double", "effect_kind": "string", "effect_low": "double", "effect_high": "double",
    "odds_ratio": "double", "p": "double", "p_adjusted": "double", "exact": "boolean", "outcome": "string",
}  # fmt: skip


def compare_groups(first: Groups, second: Groups, *, by: Sequence[str], alpha: float, min_effect: float) -> Comparison:
    """Compare runs that are already grouped; see `compare`."""
    table = Table(name="comparison", columns={**dict.fromkeys(by, "string"), **_COLUMNS})
    common = sorted(first.keys() & second.keys(), key=repr)
    for group in common:
        place = dict(zip(by, group, strict=True))
        table.rows += [{**place, **row} for row in _share_rows(first[group], second[group])]
        table.rows += [{**place, **row} for row in _figure_rows(first[group], second[group])]
    tested = [row for row in table.rows if row["p"] is not None]
    _decide(tested, alpha=alpha, min_effect=min_effect)
    order = (*SHARES, *FIGURES)
    table.rows.sort(key=lambda row: (*group_key(row, by), order.index(row["figure"])))
    return Comparison(
        table=table,
        worse=sum(row["outcome"] == WORSE for row in table.rows),
        better=sum(row["outcome"] == BETTER for row in table.rows),
        compared=sum(row["outcome"] != TOO_FEW for row in tested),
        groups=len(common),
        only_in_first=tuple(" ".join(map(str, group)) for group in sorted(first.keys() - second.keys(), key=repr)),
        only_in_second=tuple(" ".join(map(str, group)) for group in sorted(second.keys() - first.keys(), key=repr)),
    )


def _decide(tested: list[dict[str, Any]], *, alpha: float, min_effect: float) -> None:
    """Adjust the p values and set the outcome of each comparison.

    With a limited number of runs a p value cannot be arbitrarily small. A comparison that could not reach the adjusted
    `alpha` whatever its figures were is not counted among the comparisons (Tarone 1990); the others are adjusted by
    Holm's method.
    """
    least = [_least_p(row) for row in tested]
    family = next(n for n in range(1, len(tested) + 2) if sum(p <= alpha / n for p, _ in least) <= n)
    could = [row for row, (p, _) in zip(tested, least, strict=True) if p <= alpha / family]
    for row, (_, p) in zip(tested, least, strict=True):
        row["outcome"] = SAME if p <= alpha / family else TOO_FEW
    for row, adjusted in zip(could, holm([row["p"] for row in could]), strict=True):
        row["p_adjusted"] = adjusted
        if adjusted <= alpha and abs(row["effect"]) >= min_effect:
            worse = (row["effect"] > 0) != (row["figure"] in HIGHER_IS_BETTER)
            row["outcome"] = WORSE if worse else BETTER


def _least_p(row: dict[str, Any]) -> tuple[float, float]:
    """The least p that a comparison could have: with the actual total of invalid (or unknown) runs, and with any total.
    For figures the two are the same."""
    n, m = row["n_first"], row["n_second"]
    if row["figure"] not in SHARES:
        least = min(1.0, 2 / math.comb(n + m, n))
        return least, least
    hits = round(row["first"] * n + row["second"] * m)
    extremes = ((min(n, hits), hits - min(n, hits)), (hits - min(m, hits), min(m, hits)))
    return min(fisher_exact(a, n, b, m) for a, b in extremes), fisher_exact(0, n, m, m)


def _share_rows(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The shares of invalid runs among the decided ones, and of unknown runs among all."""
    rows = []
    for verdict in SHARES:
        counts = []
        for runs in (first, second):
            among = [run for run in runs if verdict == "unknown" or run["verdict"] != "unknown"]
            counts.append((sum(run["verdict"] == verdict for run in among), len(among)))
        (a, of_a), (b, of_b) = counts
        row = _row(verdict, of_a, of_b, a / of_a if of_a else None, b / of_b if of_b else None)
        if min(of_a, of_b) >= MIN_RUNS:
            interval = difference_interval(a, of_a, b, of_b)
            row |= {
                "effect": b / of_b - a / of_a,
                "effect_kind": "difference of shares",
                "effect_low": interval.low,
                "effect_high": interval.high,
                "odds_ratio": odds_ratio(a, of_a, b, of_b),
                "p": fisher_exact(a, of_a, b, of_b),
                "exact": True,
            }
        rows.append(row)
    return rows


def _figure_rows(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Comparisons of the per-run figures that both sets have."""
    rows = []
    for figure in FIGURES:
        samples = [sorted(run[figure] for run in runs if run[figure] is not None) for runs in (first, second)]
        if not samples[0] or not samples[1]:
            continue
        middles = [nearest_rank(sample, 500) for sample in samples]
        medians = [None if middle == NEVER_NS else float(middle) for middle in middles]
        row = _row(figure, len(samples[0]), len(samples[1]), *medians)
        if min(map(len, samples)) >= MIN_RUNS:
            test = mann_whitney(samples[0], samples[1])
            row |= {"effect": test.effect, "effect_kind": "Cliff's delta", "p": test.p, "exact": test.exact}
        rows.append(row)
    return rows


def _row(figure: str, n_first: int, n_second: int, first: float | None, second: float | None) -> dict[str, Any]:
    return {
        **dict.fromkeys(_COLUMNS),
        "figure": figure, "n_first": n_first, "n_second": n_second, "first": first, "second": second,
        "outcome": TOO_FEW,
    }  # fmt: skip
