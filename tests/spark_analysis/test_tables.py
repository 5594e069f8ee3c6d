"""Every figure of tables 1 to 3 against a recount in plain Python over the same runs."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")
pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.timeout(900)]

GROUP = ("system", "configuration", "workload", "nemesis", "cluster")


def group_of(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row[name] for name in GROUP)


@pytest.fixture(scope="module")
def analysis(spark: Any, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from spark_analysis.analysis import Options, analyse

    out = tmp_path_factory.mktemp("out")
    return analyse(spark, str(store), Options(), out=str(out), csv=True)


@pytest.fixture(scope="module")
def runs(store: Path, recounting: ModuleType) -> Any:
    return recounting.recount(store)


def test_the_made_up_runs_cover_every_case(runs: Any) -> None:
    assert {run.verdict for run in runs} == {"valid", "invalid", "unknown"}
    assert sum(len(run.spans) for run in runs) > 10
    assert {kind for run in runs for _, kind in run.anomalies()} >= {"linearizable", "lost"}
    assert {op["outcome"] for run in runs for op in run.operations} == {"ok", "fail", "info"}
    assert {op["phase"] for run in runs for op in run.operations} == {"before", "during", "after"}


def test_rates_agree_with_a_recount(analysis: Any, runs: Any, recounting: ModuleType) -> None:
    groups = recounting.grouped(runs)
    rows = {group_of(row): row for row in analysis.table("rates").rows}
    assert rows.keys() == groups.keys()
    for group, members in groups.items():
        row = rows[group]
        tally = [sum(run.verdict == verdict for run in members) for verdict in ("valid", "invalid", "unknown")]
        assert [row["valid"], row["invalid"], row["unknown"]] == tally
        assert row["runs"] == len(members)
        assert row["operations"] == sum(len(run.operations) for run in members)
        decided = tally[0] + tally[1]
        assert row["rate"] == (tally[1] / decided if decided else None)
        low, high = recounting.wilson_by_search(tally[1], decided)
        assert row["rate_low"] == pytest.approx(low, abs=1e-12)
        assert row["rate_high"] == pytest.approx(high, abs=1e-12)
        firsts = [run.earliest_witness() for run in members if run.earliest_witness()]
        for at, name in ((0, "earliest_witness_ns"), (1, "earliest_witness_operations")):
            expected = recounting.quantiles([first[at] for first in firsts])
            assert {key: row[f"{name}_{key}"] for key in ("min", "p50", "max")} == {
                key: expected[key] for key in ("min", "p50", "max")
            }


def test_anomalies_by_kind_agree_with_a_recount(analysis: Any, runs: Any, recounting: ModuleType) -> None:
    expected: dict[tuple[str, ...], tuple[int, int, float]] = {}
    for group, members in recounting.grouped(runs).items():
        judged = [run for run in members if run.results is not None]
        operations = sum(len(run.operations) for run in judged)
        kinds: dict[tuple[str, str], list[int]] = defaultdict(list)
        for run in judged:
            for kind, number in run.anomalies().items():
                kinds[kind].append(number)
        for kind, numbers in kinds.items():
            expected[(*group, *kind)] = (len(numbers), sum(numbers), 1e6 * sum(numbers) / operations)
    found = {
        (*group_of(row), row["check"], row["kind"]): (row["runs"], row["count"], row["per_million_operations"])
        for row in analysis.table("anomalies").rows
    }
    assert found == expected


def test_outcomes_in_and_out_of_faults_agree_with_a_recount(analysis: Any, runs: Any, recounting: ModuleType) -> None:
    found = {(*group_of(row), row["f"], row["in_fault"]): row for row in analysis.table("outcomes").rows}
    wanted: set[tuple[Any, ...]] = set()
    for group, members in recounting.grouped(runs).items():
        inside = sum(run.during_ns() for run in members)
        outside = sum(run.end_ns for run in members) - inside
        for f in {op["f"] for run in members for op in run.operations}:
            for in_fault in (False, True):
                mine = [o for run in members for o in run.operations if o["f"] == f and o["in_fault"] == in_fault]
                if not mine:
                    continue
                row = found[(*group, f, in_fault)]
                wanted.add((*group, f, in_fault))
                counts = {kind: sum(op["outcome"] == kind for op in mine) for kind in ("ok", "fail", "info")}
                phase_ns = inside if in_fault else outside
                assert {kind: row[kind] for kind in counts} == counts
                assert row["phase_ns"] == phase_ns
                assert row["ok_share"] == counts["ok"] / len(mine)
                assert row["ok_per_s"] == pytest.approx(counts["ok"] / (phase_ns / 1e9), rel=1e-12)
    assert found.keys() == wanted


def test_every_kind_of_fault_agrees_with_a_recount(analysis: Any, runs: Any, recounting: ModuleType) -> None:
    expected: dict[tuple[str, ...], dict[str, Any]] = {}
    for group, members in recounting.grouped(runs).items():
        kinds: dict[tuple[str, str], list[Any]] = defaultdict(list)
        for run in members:
            for at, fault in enumerate(run.faults):
                recovery = [run.recoveries()[0][at], run.recoveries()[1][at]]
                kinds[fault["nemesis"], fault["variant"]].append((run, fault, recovery))
        for kind, found in kinds.items():
            row = expected[(*group, *kind)] = {"faults": len(found)}
            row["unmet"] = sum(fault["unmet"] for _, fault, _ in found)
            for outcome in ("ok", "fail", "info"):
                row[outcome] = sum(
                    op["outcome"] == outcome and run.affects(fault, op)
                    for run, fault, _ in found
                    for op in run.operations
                )
            row["in_force_ns"] = sum(
                max(0, min(run._end_of(fault), run.end_ns) - fault["start"]) for run, fault, _ in found
            )
            row["ok_share"] = row["ok"] / sum(row[outcome] for outcome in ("ok", "fail", "info"))
            for at, name in enumerate(("recovery_after_start_ns", "recovery_after_heal_ns")):
                known = [recovery[at] for _, _, recovery in found if recovery[at] is not None]
                quantiles = recounting.quantiles(known)
                row |= {f"{name}_{part}": quantiles[part] for part in ("p50", "p90", "max")}
                of = len(found) if at == 0 else sum(fault["end"] is not None for _, fault, _ in found)
                row[f"{name}_missing"] = of - len(known)
    rows = {(*group_of(row), row["fault_nemesis"], row["variant"]): row for row in analysis.table("fault_kinds").rows}
    assert rows.keys() == expected.keys() != set()
    for key, row in expected.items():
        assert {name: rows[key][name] for name in row} == row
        assert rows[key]["ok_per_s"] == pytest.approx(row["ok"] / (row["in_force_ns"] / 1e9), rel=1e-12)


def test_exercised_is_null_for_histories_that_do_not_record_it(spark: Any, selected: Any) -> None:
    from spark_analysis.availability import faults_table

    rows = faults_table(selected).to_frame(spark).collect()
    assert {row.exercised for row in rows} == {None, False}
    assert all(row.proven for row in rows)


def test_availability_agrees_with_a_recount(analysis: Any, runs: Any, recounting: ModuleType) -> None:
    found = {(*group_of(row), row["measure"]): row for row in analysis.table("availability").rows}
    for group, members in recounting.grouped(runs).items():
        lengths = [[b - a for a, b, _ in run.spans] for run in members]
        starts = [value for run in members for value in run.recoveries()[0]]
        heals = [
            value
            for run in members
            for fault, value in zip(run.faults, run.recoveries()[1], strict=True)
            if fault["end"] is not None
        ]
        expected: dict[str, list[int | None]] = {
            "unavailable_ns": [sum(of_run) for of_run in lengths],
            "longest_unavailable_ns": [max(of_run, default=0) for of_run in lengths],
            "unavailabilities": [len(of_run) for of_run in lengths],
            "lost": [run.count_of("lost") for run in members],
            "duplicated": [run.count_of("duplicated") for run in members],
        }
        if starts:
            expected |= {"recovery_after_start_ns": starts}
        if heals:
            expected |= {"recovery_after_heal_ns": heals}
        for measure, every in expected.items():
            row = found.pop((*group, measure))
            values = [value for value in every if value is not None]
            assert (row["n"], row["missing"]) == (len(values), len(every) - len(values)), measure
            assert {name: row[name] for name in recounting.quantiles([])} == recounting.quantiles(values), measure
            assert row["mean"] == (sum(values) / len(values) if values else None)
    assert found == {}


def test_an_unhealed_fault_has_no_missing_recovery_after_heal(
    spark: Any, synthetic: ModuleType, tmp_path: Path
) -> None:
    """Of two runs with a fault each, one was killed before its heal."""
    from spark_analysis.analysis import Options, analyse

    synthetic.make_run(tmp_path, 1, faults=1)
    killed = synthetic.make_run(tmp_path, 2, faults=1, finished=False)
    events = killed.history_path.read_text().splitlines(keepends=True)
    healed_at = next(at for at, line in enumerate(events) if '"heal"' in line)
    killed.history_path.write_text("".join(events[:healed_at]))
    found = analyse(spark, str(tmp_path), Options())
    rows = {row["measure"]: (row["n"], row["missing"]) for row in found.table("availability").rows}
    assert rows["recovery_after_heal_ns"] == (1, 0)
    assert sum(rows["recovery_after_start_ns"]) == 2
    (kind,) = found.table("fault_kinds").rows
    assert (kind["faults"], kind["recovery_after_heal_ns_missing"]) == (2, 0)


def test_latency_agrees_with_a_recount(analysis: Any, runs: Any, recounting: ModuleType) -> None:
    expected: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for run in runs:
        for op in run.operations:
            if op["end"] is not None:
                for node in {op["node"], "all"}:
                    for phase in (op["phase"], "all"):
                        expected[(*run.group, op["f"], op["outcome"], node, phase)].append(op["end"] - op["start"])
    rows = analysis.table("latency").rows
    found = {(*group_of(row), row["f"], row["outcome"], row["node"], row["phase"]): row for row in rows}
    assert len(found) == len(rows)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        row = found[key]
        assert row["operations"] == len(values)
        assert {name: row[f"{name}_ns"] for name in recounting.quantiles([])} == recounting.quantiles(values)
        assert row["mean_ns"] == sum(values) / len(values)
        assert row["relative_error"] == 0


def test_large_groups_keep_their_error_bound(analysis: Any, selected: Any) -> None:
    from spark_analysis.latency import RELATIVE_ERROR, latency_quantiles

    exact = analysis.table("latency").rows
    approximate = latency_quantiles(selected, exact_operations=0).rows
    assert len(approximate) == len(exact)
    for mine, true in zip(approximate, exact, strict=True):
        for name in ("operations", "min_ns", "max_ns", "node", "phase"):
            assert mine[name] == true[name]
        assert mine["mean_ns"] == pytest.approx(true["mean_ns"], rel=1e-12)
        assert mine["relative_error"] == RELATIVE_ERROR
        for name in ("p50_ns", "p90_ns", "p99_ns", "p999_ns"):
            assert abs(mine[name] - true[name]) <= RELATIVE_ERROR * true[name] + 1


def test_a_run_that_died_is_read_and_reported(analysis: Any) -> None:
    notes = [row for row in analysis.table("problems").rows if not row["left_out"]]
    assert sorted(row["problem"].split(":")[0] for row in notes) == [
        "no results",
        "read from history.jsonl",
        "the last line was cut short and is ignored (22 bytes)",
    ]


def test_written_tables_hold_the_same_rows(analysis: Any, spark: Any, store: Path, tmp_path: Path) -> None:
    from spark_analysis.tables import write_tables

    table = analysis.table("rates")
    paths = write_tables(spark, [table], str(tmp_path / "o"), csv=True)
    back = [row.asDict() for row in spark.read.parquet(paths[0]).collect()]
    assert sorted(back, key=str) == sorted(table.rows, key=str)
    lines = [line for path in Path(paths[1]).glob("*.csv") for line in path.read_text().splitlines()]
    assert len(lines) == 1 + len(table.rows)


def test_older_tables_and_pages_stay_until_all_new_ones_are_written(spark: Any, tmp_path: Path) -> None:
    from spark_analysis.errors import AnalysisError
    from spark_analysis.tables import Table, write_tables, write_text

    def table(name: str, value: object) -> Table:
        return Table(name=name, columns={"n": "int"}, rows=[{"n": value}])

    def written() -> list[int]:
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["a.csv", "a.parquet", "b.csv", "b.parquet"], "nothing else stays there"
        return [spark.read.parquet(str(tmp_path / name)).first().n for name in ("a.parquet", "b.parquet")]

    write_tables(spark, [table("a", 1), table("b", 2)], str(tmp_path), csv=True)
    assert written() == [1, 2]
    with pytest.raises(AnalysisError, match=r"cannot write .*/b\.parquet: "):
        write_tables(spark, [table("a", 3), table("b", "no number")], str(tmp_path), csv=True)
    assert written() == [1, 2]
    write_tables(spark, [table("a", 3), table("b", 4)], str(tmp_path), csv=True)
    assert written() == [3, 4]
    page = tmp_path / "report.html"
    for text in ("one", "another"):
        write_text(spark, str(page), text)
        assert page.read_text() == text
    with pytest.raises(AnalysisError, match=r"cannot write .*/report\.html: "):
        write_text(spark, str(page), "no text: \udc80")
    assert page.read_text() == "another"
    assert sorted(path.name for path in tmp_path.glob("*report*")) == [".report.html.crc", "report.html"]


def test_runs_that_are_not_valid_are_listed_with_the_invalid_and_the_newest_first(analysis: Any, runs: Any) -> None:
    def listed(verdict: str) -> list[int]:
        return sorted((run.test["seed"] for run in runs if run.verdict == verdict), reverse=True)

    rows = analysis.table("notable_runs").rows
    assert [row["seed"] for row in rows] == listed("invalid") + listed("unknown")
    assert [row["verdict"] for row in rows] == ["invalid"] * len(listed("invalid")) + ["unknown"] * len(
        listed("unknown")
    )
    assert any(run.results is None for run in runs), "a killed run, which does not say when it began, is among them"


def test_an_analysis_says_what_it_is_about(analysis: Any, runs: Any) -> None:
    started = [run.results["started_at"] for run in runs if run.results is not None]
    assert (analysis.first_started_at, analysis.last_started_at) == (min(started), max(started))
    assert (analysis.runs, analysis.operations) == (len(runs), sum(len(run.operations) for run in runs))


def test_the_age_of_a_run_is_that_of_its_folder_if_it_says_none(spark: Any) -> None:
    """A killed run has no results, which say it. A history that has neither is never left out."""
    from spark_analysis.analysis import Options, _selected

    runs = spark.createDataFrame(
        [
            ("said late", "file:/s/t/20260101T000000Z", "2026-03-01T12:30:00+00:00"),
            ("said early", "file:/s/t/20270101T000000Z", "2026-03-01T12:29:59+00:00"),
            ("said in another zone", "file:/s/t/1", "2026-03-01T08:30:00-04:00"),
            ("killed late", "file:/s/t/20260301T123000Z", None),
            ("killed early", "file:/s/t/20260301T122959Z", None),
            ("killed late, second of its second", "file:/s/t/20260301T123000Z-2", ""),
            ("of another tool", "file:/s/history.edn", None),
            ("nonsense", "file:/s/t/2", "last Tuesday"),
        ],
        "name string, run_dir string, started_at string",
    )
    left = {row.name for row in _selected(runs, Options(since="2026-03-01T12:30")).collect()}
    assert {row.name for row in runs.collect()} - left == {"said early", "killed early"}


def test_histories_without_times_count_in_no_figure_of_time(spark: Any, tmp_path: Path) -> None:
    """Of two histories of another tool one has times: two writes in a second, of which one failed."""
    from spark_analysis.analysis import Options, analyse, selected_runs
    from spark_analysis.comparison import per_run_figures

    def write(name: str, *times_ns: int | None) -> None:
        kinds = ("invoke", "ok", "invoke", "fail")
        (tmp_path / name).write_text(
            "".join(
                f"{{:process 0, :type :{kind}, :f :write, :value 1{'' if at is None else f', :time {at}'}}}\n"
                for kind, at in zip(kinds, times_ns, strict=True)
            )
        )

    write("timed.edn", 0, 10**8, 10**8, 10**9)
    write("untimed.edn", None, None, None, None)
    options = Options(unavailable_after_ms=500)
    found = analyse(spark, str(tmp_path), options)
    (row,) = found.table("outcomes").rows
    assert (row["ok"], row["fail"], row["info"], row["ok_share"]) == (2, 2, 0, 0.5)
    assert (row["phase_ns"], row["ok_per_s"], row["fail_per_s"]) == (10**9, 1.0, 1.0)
    away = {row["measure"]: (row["n"], row["missing"], row["max"]) for row in found.table("availability").rows}
    assert away["unavailable_ns"] == away["longest_unavailable_ns"] == (1, 1, 9 * 10**8)
    assert away["unavailabilities"] == (1, 1, 1)
    assert {row["operations"] for row in found.table("latency").rows} == {1}
    (note,) = found.table("problems").rows
    assert note["problem"] == "without times: no latency, no availability", "and none has results to miss"
    figures = per_run_figures(selected_runs(spark, str(tmp_path), options)).collect()
    assert {(row.ok_share, row.p50_ns, row.unavailable_ns) for row in figures} == {
        (0.5, 10**8, 9 * 10**8), (0.5, None, None),
    }  # fmt: skip


def test_of_copies_the_one_in_a_store_counts_not_a_compacted_one_or_one_behind_a_link() -> None:
    from types import SimpleNamespace

    from spark_analysis.analysis import _copies

    def row(run_id: str, run_dir: str, source: str = "store", fingerprint: str | None = None) -> Any:
        return SimpleNamespace(
            run_id=run_id, run_dir=run_dir, source=source, fingerprint=fingerprint, file=f"{run_dir}/history"
        )

    rows = [
        row("r1", "compacted:r1", "compacted"), row("r1", "s/latest"), row("r1", "s/t/1"), row("r2", "s/latest/2"),
        row("s/t/3", "s/t/3", fingerprint="f3"), row("s/a/3", "s/a/3", fingerprint="f3"),
        row("s/t/4", "s/t/4", fingerprint="f4"), row("s/x.edn", "s/x.edn", "foreign"),
        row("r5", "s/t/5", fingerprint="f3"),
    ]  # fmt: skip
    assert [(copy.run_dir, original.run_dir) for copy, original in _copies(rows)] == [
        ("s/t/3", "s/a/3"), ("s/latest", "s/t/1"), ("compacted:r1", "s/t/1"),
    ]  # fmt: skip


def test_since_and_where_select_runs(selected: Any, runs: Any) -> None:
    from spark_analysis.analysis import Options, _selected

    late = _selected(selected, Options(since="2026-03-01T12:30"))
    assert {row.seed for row in late.select("seed").collect()} == set(range(30, 45))
    some = _selected(selected, Options(where="workload = 'log' and verdict = 'invalid'"))
    expected = {run.test["seed"] for run in runs if run.test["workload"] == "log" and run.verdict == "invalid"}
    assert {row.seed for row in some.select("seed").collect()} == expected != set()
