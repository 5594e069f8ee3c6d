"""Other file systems than the machine's own, and files that cannot be read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyspark", reason="the spark extra is not installed")
pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.timeout(900)]

MOUNTS = "fs.viewfs.mounttable.{}.link./{}"


@pytest.fixture
def depot(spark: Any, tmp_path: Path) -> Iterator[str]:
    """A place on another file system than the machine's own: Hadoop's viewfs, over `tmp_path`."""
    configuration = spark.sparkContext._jsc.hadoopConfiguration()
    name = f"depot{os.getpid()}x{abs(hash(str(tmp_path)))}"
    for folder in ("store", "out", "few"):
        (tmp_path / folder).mkdir()
        configuration.set(MOUNTS.format(name, folder), f"file://{tmp_path / folder}")
    yield f"viewfs://{name}"


@pytest.mark.long
def test_another_file_system_gives_the_same_tables(
    spark: Any, synthetic: ModuleType, tmp_path: Path, depot: str
) -> None:
    from spark_analysis.analysis import Options, analyse
    from spark_analysis.checking import CheckPlan
    from spark_analysis.compaction import compact
    from spark_analysis.ingest import list_runs
    from spark_analysis.tables import write_text

    for number in range(3):
        synthetic.make_run(tmp_path / "store", number, operations=120, wrong=0.05)
    torn = synthetic.make_run(tmp_path / "store", 3, operations=40)
    torn.parquet_path.write_bytes(b"PAR1")
    options = Options(check=CheckPlan())
    here = analyse(spark, f"file://{tmp_path / 'store'}", options)
    there = analyse(spark, f"{depot}/store", options, out=f"{depot}/out", csv=True)
    write_text(spark, f"{depot}/out/report.html", "a page")
    for name in ("rates", "anomalies", "outcomes", "availability", "latency"):
        assert here.table(name).rows == there.table(name).rows
    verdicts = [[(row["verdict"], row["witness"]) for row in found.table("checks").rows] for found in (here, there)]
    assert verdicts[0] == verdicts[1]
    assert [row["problem"] for row in here.table("problems").rows] == [
        row["problem"] for row in there.table("problems").rows
    ]
    assert (tmp_path / "out" / "rates.csv").is_dir() and (tmp_path / "out" / "report.html").read_text() == "a page"
    assert len(compact(spark, list_runs(spark, f"{depot}/store"), f"{depot}/few")) == 1
    assert analyse(spark, f"{depot}/few", Options()).table("rates").rows == here.table("rates").rows


def test_files_too_large_for_java_are_left_out(
    spark: Any, synthetic: ModuleType, tmp_path: Path, depot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spark_analysis import files
    from spark_analysis.analysis import Options, analyse

    sizes = {}
    for number, operations in enumerate((50, 3_000)):
        run = synthetic.make_run(tmp_path / "store", number, operations=operations)
        sizes[run.parquet_path.stat().st_size] = run.path.name
    room = (min(sizes) + max(sizes)) // 2 * files.COPIES_IN_JAVA * spark.sparkContext.defaultParallelism
    monkeypatch.setattr(files, "heap_bytes", lambda spark: room)
    found = analyse(spark, f"{depot}/store", Options())
    assert found.runs == 1
    (problem,) = found.table("problems").rows
    assert sizes[max(sizes)] in problem["run"] and "raise --memory" in problem["problem"]
    assert analyse(spark, str(tmp_path / "store"), Options()).runs == 2


@pytest.mark.parametrize("where", ["here", "there"])
def test_files_that_vanish_after_the_listing_are_reported(
    spark: Any, synthetic: ModuleType, tmp_path: Path, depot: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spark_analysis import analysis
    from spark_analysis.ingest import ingest, list_runs

    gone, stays = (synthetic.make_run(tmp_path / "store", number, operations=50).path for number in (1, 2))
    listing = list_runs(spark, str(tmp_path / "store") if where == "here" else f"{depot}/store")

    def too_late(*arguments: Any, **options: Any) -> Any:
        planned = ingest(*arguments, **options)
        shutil.rmtree(gone)
        return planned

    monkeypatch.setattr(analysis, "ingest", too_late)
    runs = analysis._kept(spark, listing, analysis.Options())
    found = {Path(row.run_dir).name: row.problem for row in runs.select("run_dir", "problem").collect()}
    problems = {Path(path).parent.name: problem for path, problem in listing.problems}
    assert found.pop(stays.name) is None
    assert "cannot be read" in {**found, **problems}[gone.name]


@given(st.lists(st.integers(0, 40_000_000), max_size=40), st.integers(1, 8))
def test_every_file_is_in_one_task_and_tasks_are_of_bounded_size(sizes: list[int], cores: int) -> None:
    from spark_analysis.files import _packed
    from spark_analysis.session import PARTITION_BYTES

    given_sizes = {f"file:/{at}": size for at, size in enumerate(sizes)}
    bins = _packed(given_sizes, cores)
    assert sorted(path for paths in bins for path in paths) == sorted(given_sizes)
    assert all(bins)
    room = min(PARTITION_BYTES, max(1, sum(sizes) // cores))
    for paths in bins:
        assert len(paths) == 1 or sum(given_sizes[path] for path in paths) <= room
