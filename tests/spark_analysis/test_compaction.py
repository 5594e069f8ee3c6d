"""A compacted store gives the same results as the store."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")
pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.timeout(900)]


def bins_of(sizes: list[int], room: int) -> list[list[int]]:
    """The sizes of runs, in order, in files that exceed the room only if a run does."""
    bins: list[list[int]] = [[]]
    for size in sizes:
        if bins[-1] and sum(bins[-1]) + size > room:
            bins.append([])
        bins[-1].append(size)
    return bins


@pytest.mark.parametrize("partitions", [1, 2, 3, 40])
def test_every_file_gets_what_was_meant_for_it(spark: Any, partitions: int) -> None:
    from pyspark.sql import functions as F

    from spark_analysis.compaction import _partition_keys

    keys = spark.createDataFrame([(key,) for key in _partition_keys(spark, partitions)], "bin int")
    placed = keys.repartition(partitions, "bin").select(F.spark_partition_id().alias("partition")).collect()
    assert sorted(row.partition for row in placed) == list(range(partitions))


@pytest.mark.long
def test_a_compacted_store_gives_the_same_tables_and_verdicts(
    spark: Any, synthetic: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spark_analysis import compaction
    from spark_analysis.analysis import Options, analyse
    from spark_analysis.checking import CheckPlan
    from spark_analysis.ingest import list_runs

    place = tmp_path / "store"
    for number in range(6):
        synthetic.make_run(place, number, settings={"read_mode": "ab"[number % 2]}, operations=150, wrong=0.05)
    synthetic.make_run(place, 8, workload="log", operations=150, wrong=0.05)
    died = synthetic.make_run(place, 9, operations=40, finished=False)
    torn = synthetic.make_run(place, 10, operations=40)
    torn.parquet_path.write_bytes(b"PAR1")
    monkeypatch.setattr(compaction, "FILE_BYTES", 20_000)
    left_out = compaction.compact(spark, list_runs(spark, str(place)), str(tmp_path / "few"))
    assert sorted(Path(line.split(": ")[0]).name for line in left_out) == sorted((died.path.name, torn.path.name))
    files = list((tmp_path / "few" / "compacted-events").glob("*.parquet"))
    sizes = [run.size_bytes for run in compaction._taken(list_runs(spark, str(place)), None)[0]]
    assert len(files) == len(bins_of(sizes, 20_000)) > 2
    for path in (died.path, torn.path):
        path.rename(tmp_path / f"away-{path.name}")
    options = Options(check=CheckPlan())
    before, after = (analyse(spark, str(tmp_path / name), options) for name in ("store", "few"))
    assert after.runs == before.runs == 7
    assert after.table("problems").rows == []
    for name in ("rates", "anomalies", "outcomes", "availability", "latency"):
        assert after.table(name).rows == before.table(name).rows, name
    verdicts = [
        sorted((row["run_id"], row["check"], row["verdict"], row["witness"]) for row in analysis.table("checks").rows)
        for analysis in (before, after)
    ]
    assert verdicts[0] == verdicts[1]


def test_two_runs_with_the_same_id_are_refused(spark: Any, synthetic: ModuleType, tmp_path: Path) -> None:
    from spark_analysis.compaction import compact
    from spark_analysis.errors import AnalysisError
    from spark_analysis.ingest import list_runs

    synthetic.make_run(tmp_path / "a", 1, operations=40)
    synthetic.make_run(tmp_path / "b", 1, operations=40)
    with pytest.raises(AnalysisError, match="two runs with the same run_id"):
        compact(spark, list_runs(spark, str(tmp_path)), str(tmp_path / "few"))


@pytest.fixture
def report(spark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """`harness report` with these arguments, in the tests' own Spark."""
    from harness.cli import main
    from harness.commands import report as module

    @contextlib.contextmanager
    def session(_: Any) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(spark=spark)

    monkeypatch.setattr(module, "spark_session", session)
    return lambda *words: main(["report", *map(str, words), "--out", str(tmp_path / "report")])


def test_exactly_the_runs_that_the_report_counts_are_compacted(
    report: Callable[..., int], spark: Any, synthetic: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from spark_analysis.analysis import Options, analyse

    place = tmp_path / "store"
    runs = [synthetic.make_run(place, number, operations=40, faults=0).path for number in range(6)]
    died = synthetic.make_run(place, 7, operations=40, faults=0, finished=False).path
    shutil.copytree(runs[4], place / "backup" / runs[4].name)
    # They start one minute apart.
    assert report(place, "--where", "seed != 5", "--since", "2026-03-01T12:02", "--compact", tmp_path / "few") == 0
    said = capsys.readouterr().err
    assert [line for line in said.splitlines() if line.startswith("not compacted: ")] == [
        f"not compacted: file:{died}: its history is not Parquet"
    ]
    counted = analyse(spark, str(tmp_path / "few"), Options(), out=str(tmp_path / "tables"))
    assert counted.run_dirs == {"compacted:run-2", "compacted:run-3", "compacted:run-4"}
    assert counted.table("problems").rows == []


@pytest.mark.long
def test_a_store_can_be_compacted_into_itself(
    report: Callable[..., int], spark: Any, synthetic: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The compacted files are copies of the other runs; those of a run that is gone are reported."""
    from spark_analysis.analysis import Options, analyse

    place = tmp_path / "store"
    runs = [synthetic.make_run(place, number, operations=40, faults=0).path for number in range(3)]
    assert report(place, "--compact", place / "few") == 0
    assert "not compacted" not in capsys.readouterr().err
    shutil.rmtree(runs[0])
    assert report(place, "--compact", tmp_path / "others") == 0
    said = capsys.readouterr().err
    assert f"not compacted: file:{place}/few/compacted-events/part-" in said and "already compacted" in said
    assert analyse(spark, str(tmp_path / "others"), Options()).run_dirs == {"compacted:run-1", "compacted:run-2"}
