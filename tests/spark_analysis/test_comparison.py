"""Two sets of runs against each other: figures by recount, verdicts by construction."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")
pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
BY = ("system",)


def runs_of(verdicts: str, p99_ns: list[int]) -> list[dict[str, Any]]:
    names = {"v": "valid", "i": "invalid", "u": "unknown"}
    blank = dict.fromkeys(("p50_ns", "ok_share", "unavailable_ns", "lost", "duplicated"))
    blank |= dict.fromkeys(("longest_recovery_after_start_ns", "longest_recovery_after_heal_ns"))
    return [{**blank, "verdict": names[v], "p99_ns": p} for v, p in zip(verdicts, p99_ns, strict=True)]


def test_a_figure_is_worse_better_or_the_same_or_has_too_few_runs() -> None:
    from spark_analysis.comparison import BETTER, SAME, TOO_FEW, WORSE, compare_groups
    from spark_analysis.statistics import fisher_exact, mann_whitney

    good = runs_of("v" * 10, list(range(100, 110)))
    bad = runs_of("i" * 9 + "v", list(range(200, 210)))

    def outcomes(first: Any, second: Any, **options: Any) -> dict[str, Any]:
        result = compare_groups({("b",): first}, {("b",): second}, by=BY, **{"alpha": 0.05, "min_effect": 0, **options})
        return {row["figure"]: row for row in result.table.rows}

    found = outcomes(good, bad)
    assert {name: row["outcome"] for name, row in found.items()} == {"invalid": WORSE, "unknown": SAME, "p99_ns": WORSE}
    assert found["invalid"]["p"] == fisher_exact(0, 10, 9, 10)
    assert found["invalid"]["effect"] == 0.9
    assert found["p99_ns"]["p"] == mann_whitney(range(100, 110), range(200, 210)).p
    assert found["p99_ns"]["effect"] == 1
    assert (found["p99_ns"]["first"], found["p99_ns"]["second"]) == (104, 204)
    assert outcomes(bad, good)["invalid"]["outcome"] == BETTER
    assert outcomes(good, bad, min_effect=0.95)["invalid"]["outcome"] == SAME
    assert outcomes(good, bad, alpha=1e-9)["p99_ns"]["outcome"] == TOO_FEW, "no ten runs can show that"
    assert outcomes(good, good[:5] + bad[5:], alpha=1e-4)["p99_ns"]["outcome"] == SAME
    assert {row["outcome"] for row in outcomes(good[:3], bad[:3]).values()} == {TOO_FEW}


def test_a_figure_with_too_few_runs_to_show_a_difference_is_not_compared() -> None:
    """Four runs against four: the least p is 2 in 70, too much for two comparisons. A build whose runs are all
    invalid must not pass for one in which nothing got worse."""
    from spark_analysis.comparison import SAME, TOO_FEW, WORSE, compare_groups
    from spark_analysis.statistics import fisher_exact

    def compared(runs: int) -> Any:
        good, bad = runs_of("v" * runs, list(range(runs))), runs_of("i" * runs, list(range(100, 100 + runs)))
        return compare_groups({("b",): good}, {("b",): bad}, by=BY, alpha=0.05, min_effect=0)

    few = compared(4)
    assert {row["outcome"] for row in few.table.rows} == {TOO_FEW}
    assert (few.compared, few.worse) == (0, 0)
    enough = compared(5)
    assert {row["figure"]: row["outcome"] for row in enough.table.rows} == {
        "invalid": WORSE, "unknown": SAME, "p99_ns": WORSE,
    }  # fmt: skip
    (unknown, invalid) = (
        next(row for row in enough.table.rows if row["figure"] == figure) for figure in ("unknown", "invalid")
    )
    assert unknown["p_adjusted"] is None, "no run is unknown: that is not tested and adjusts no other figure"
    assert invalid["p_adjusted"] == 2 * fisher_exact(0, 5, 5, 5)


def test_a_difference_that_chance_explains_is_not_worse() -> None:
    """None of twenty runs lost anything, and two of four did: one such pair of sets in 23 is chance."""
    from spark_analysis.comparison import SAME, compare_groups

    first = [{**run, "lost": 0, "duplicated": 0} for run in runs_of("v" * 20, list(range(100, 120)))]
    second = [
        {**run, "lost": n, "duplicated": 0}
        for n, run in zip((0, 0, 1, 2), runs_of("vvvv", [101, 112, 107, 115]), strict=True)
    ]
    result = compare_groups({("b",): first}, {("b",): second}, by=BY, alpha=0.05, min_effect=0)
    (row,) = [row for row in result.table.rows if row["figure"] == "lost"]
    assert (row["outcome"], result.worse) == (SAME, 0)


def test_more_successes_are_better_not_worse() -> None:
    from spark_analysis.comparison import BETTER, compare_groups

    first = [{**run, "ok_share": 0.5 + 0.001 * n} for n, run in enumerate(runs_of("v" * 9, [1] * 9))]
    second = [{**run, "ok_share": 0.9 + 0.001 * n} for n, run in enumerate(runs_of("v" * 9, [1] * 9))]
    result = compare_groups({("b",): first}, {("b",): second}, by=BY, alpha=0.05, min_effect=0)
    assert {row["outcome"] for row in result.table.rows if row["figure"] == "ok_share"} == {BETTER}
    alone = compare_groups({("b",): first}, {("c",): second}, by=BY, alpha=0.05, min_effect=0)
    assert (alone.groups, alone.only_in_first, alone.only_in_second) == (0, ("b",), ("c",))


def test_a_run_that_never_recovered_ranks_slower_than_any_that_did() -> None:
    from spark_analysis.comparison import NEVER_NS, WORSE, compare_groups

    figure = "longest_recovery_after_heal_ns"
    first = [{**run, figure: 100 + n} for n, run in enumerate(runs_of("v" * 9, [1] * 9))]
    second = [{**run, figure: NEVER_NS if n < 8 else 100} for n, run in enumerate(runs_of("v" * 9, [1] * 9))]
    result = compare_groups({("b",): first}, {("b",): second}, by=BY, alpha=0.05, min_effect=0)
    (row,) = [row for row in result.table.rows if row["figure"] == figure]
    assert (row["outcome"], row["first"], row["second"]) == (WORSE, 104, None)
    assert (row["n_first"], row["n_second"]) == (9, 9)


def test_the_figures_of_every_run_agree_with_a_recount(selected: Any, store: Path, recounting: ModuleType) -> None:
    from spark_analysis.comparison import NEVER_NS, per_run_figures

    rows = {row.run_id: row for row in per_run_figures(selected).collect()}
    runs = recounting.recount(store)
    assert len(rows) == len(runs)
    for run in runs:
        row = rows[run.results["run_id"] if run.results else f"file:{run.folder}"]
        ok = [op["end"] - op["start"] for op in run.operations if op["outcome"] == "ok"]
        expected = recounting.quantiles(ok)
        assert (row.p50_ns, row.p99_ns) == (expected["p50"], expected["p99"])
        assert row.ok_share == len(ok) / len(run.operations)
        assert row.unavailable_ns == sum(b - a for a, b, _ in run.spans)
        healed = [fault["end"] is not None for fault in run.faults]
        for name, values, counts in zip(
            ("start", "heal"), run.recoveries(), ([True] * len(healed), healed), strict=True
        ):
            longest = [NEVER_NS if value is None else value for value, does in zip(values, counts, strict=True) if does]
            assert row[f"longest_recovery_after_{name}_ns"] == (max(longest) if longest else None)
        assert row.lost == run.count_of("lost")


def test_a_recovery_that_never_came_is_the_longest_and_an_unhealed_fault_has_none_from_its_heal(
    spark: Any, synthetic: ModuleType, tmp_path: Path
) -> None:
    from spark_analysis.analysis import Options, selected_runs
    from spark_analysis.comparison import NEVER_NS, per_run_figures

    def write(number: int, *ends: tuple[int, int, str], healed_ms: int | None) -> None:
        """A run with reads (from, to in ms, how they end) and one fault, from 1 s on."""
        found = [
            (ms, {"process": 0, "type": kind, "f": "read", "key": 1, "value": None})
            for start_ms, end_ms, outcome in ends
            for ms, kind in ((start_ms, "invoke"), (end_ms, outcome))
        ]
        calls = [(1_000, "inject"), *([] if healed_ms is None else [(healed_ms, "heal")])]
        value = {"id": "f0", "nemesis": "kill", "variant": "one"}
        found += [(ms, {"process": "nemesis", "type": kind, "f": f, "value": value})
                  for ms, f in calls for kind in ("invoke", "info")]  # fmt: skip
        found.sort(key=lambda each: each[0])
        events = [{"index": at, "time": ms * 1_000_000, **event} for at, (ms, event) in enumerate(found)]
        synthetic.write_run(tmp_path, number, events, workload="register")

    write(1, (0, 1, "ok"), (1_100, 5_000, "fail"), (5_100, 9_000, "fail"), healed_ms=4_000)
    write(2, (0, 1, "ok"), (1_100, 3_000, "fail"), (3_100, 3_200, "ok"), healed_ms=None)
    write(3, (0, 1, "ok"), (1_100, 3_000, "fail"), (3_100, 3_200, "ok"), healed_ms=3_000)
    runs = per_run_figures(selected_runs(spark, str(tmp_path), Options())).orderBy("run_id").collect()
    found = [(r.longest_recovery_after_start_ns, r.longest_recovery_after_heal_ns, r.unavailable_ns) for r in runs]
    assert found == [
        (NEVER_NS, NEVER_NS, 7_900_000_000), (2_200_000_000, None, 2_100_000_000),
        (2_200_000_000, 200_000_000, 2_100_000_000),
    ]  # fmt: skip


def test_the_command_fails_a_build_that_got_worse(
    spark: Any, synthetic: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """In the tests' own Spark."""
    from harness.cli import main
    from harness.commands import compare

    monkeypatch.setattr(compare, "spark_session", lambda _: contextlib.nullcontext(SimpleNamespace(spark=spark)))
    for number in range(6):
        synthetic.make_run(tmp_path / "a", number, operations=250, wrong=0.0)
        synthetic.make_run(tmp_path / "b", number, operations=250, wrong=0.1)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "1 worse, 0 better" in capsys.readouterr().err


@pytest.mark.long
def test_the_command_names_the_runs_that_it_leaves_out(synthetic: ModuleType, tmp_path: Path) -> None:
    for number in range(5):
        synthetic.make_run(tmp_path / "a", number, operations=40)
        damaged = synthetic.make_run(tmp_path / "b", number, operations=40)
    (damaged.path / "history.parquet").write_bytes(b"PAR1 nonsense PAR1")
    done = subprocess.run(
        [sys.executable, "-m", "harness", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "no difference could be shown of 2 comparisons" in done.stderr, (
        "these runs would be enough if all were invalid"
    )
    assert "…" not in done.stderr, "no figure is cut off, even at 80 columns"
    assert f"left out: file:{damaged.path}: history.parquet: not readable as Parquet" in done.stderr
    (left_out,) = json.loads(done.stdout)["left_out"]
    assert left_out["run"] == f"file:{damaged.path}"


def test_unknown_runs_are_no_evidence_for_or_against_a_violation() -> None:
    from spark_analysis.comparison import FIGURES, compare_groups

    def runs(**counts: int) -> dict[tuple[str, ...], list[dict[str, Any]]]:
        every = [verdict for verdict, number in counts.items() for _ in range(number)]
        return {("broker",): [{**dict.fromkeys(FIGURES), "verdict": verdict} for verdict in every]}

    first, second = runs(valid=6, invalid=2, unknown=4), runs(invalid=4, unknown=8)
    found = compare_groups(first, second, by=("system",), alpha=0.05, min_effect=0.0)
    rows = {row["figure"]: (row["first"], row["n_first"], row["second"], row["n_second"]) for row in found.table.rows}
    assert rows == {"invalid": (2 / 8, 8, 1.0, 4), "unknown": (4 / 12, 12, 8 / 12, 12)}
    few = compare_groups(runs(valid=20), runs(unknown=20), by=("system",), alpha=0.05, min_effect=0.0)
    outcomes = {row["figure"]: (row["outcome"], row["p"]) for row in few.table.rows}
    assert outcomes["invalid"] == ("too few runs", None) and outcomes["unknown"][0] == "worse"
