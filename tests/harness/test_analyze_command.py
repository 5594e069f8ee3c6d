"""`harness analyze` of runs whose files are damaged: what is reported about each, and that none is judged valid."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from harness import cli
from harness import store as stores
from harness.clusters.sim.cluster import SimCluster
from harness.commands import analyze as analyze_module
from harness.commands.analyze import FACTS
from harness.errors import OperatorError
from harness.history_writer import HistoryWriteError
from harness.runner import Run
from harness.store import RunDir, RunStatus, Store, StoreError
from harness.systems.base import CheckOutcome
from harness.test import Test
from harness.test import test_from_json as read_test
from harness.workloads.register import RegisterWorkload

Damage = Callable[[Any], None]


@pytest.fixture(scope="module")
def valid_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a short, valid run."""
    store = tmp_path_factory.mktemp("valid") / "store"
    words = ["run", "--cluster", "sim", "--nodes", "3", "--time-limit", "0.5", "--seed", "1", "--store", str(store)]
    assert cli.main(words) == 0
    return store


@pytest.fixture
def run_dir(valid_store: Path, tmp_path: Path) -> RunDir:
    shutil.copytree(valid_store, tmp_path / "store", symlinks=True)
    return Store(tmp_path / "store").find("latest")


def analyze(run_dir: RunDir) -> int:
    return cli.main(["analyze", str(run_dir.path), "--store", str(run_dir.path.parent.parent)])


def change(path: Path, damage: Damage) -> None:
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))


def lines_of(run_dir: RunDir) -> list[str]:
    return run_dir.history_path.read_text().splitlines(keepends=True)


def test_an_undamaged_run_is_judged_valid_again(run_dir: RunDir) -> None:
    assert analyze(run_dir) == 0


def test_a_truncated_history_is_unknown_each_time_it_is_analyzed(run_dir: RunDir) -> None:
    lines = lines_of(run_dir)
    run_dir.history_path.write_text("".join(lines[:50]))
    for _ in range(2):
        assert analyze(run_dir) == 2
        words = f"the history has lost its end: only 50 of {len(lines)} client events are left"
        assert words in run_dir.read_results()["reason"]


def test_the_workload_s_checks_are_made_again_even_if_it_did_not_declare_them(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for valid, status in ((True, 0), (False, 1), (True, 0)):
        found = {"linearizable": CheckOutcome(True, "holds"), "extra": CheckOutcome(valid, "as seen now")}
        monkeypatch.setattr(RegisterWorkload, "check", lambda *_, found=found: found)
        assert analyze(run_dir) == status
        checks = run_dir.read_results()["checks"]
        assert checks["extra"]["valid"] is valid and "extra (of the run)" not in checks


def test_a_run_that_ended_before_it_was_judged_is_unknown_at_best(run_dir: RunDir) -> None:
    for write in (lambda: run_dir.results_path.write_text("{}"), run_dir.results_path.unlink):
        write()
        assert analyze(run_dir) == 2
        results = run_dir.read_results()
        assert results["checks"]["linearizable"]["valid"] is True
        assert results["reason"].startswith(
            "the run ended before it was judged, so the state of its replicas is unknown"
        )


@pytest.mark.parametrize("place", ["its store", "its store through a link", "another store"])
def test_the_page_of_the_store_shows_the_new_verdict(run_dir: RunDir, tmp_path: Path, place: str) -> None:
    store = run_dir.path.parent.parent
    (tmp_path / "link").symlink_to(store)
    (tmp_path / "other").mkdir()
    given = {"its store": store, "its store through a link": tmp_path / "link"}.get(place, tmp_path / "other")
    (store / "index.html").write_text("as before")
    run_dir.history_path.write_text("".join(lines_of(run_dir)[:50]))
    assert cli.main(["analyze", str(run_dir.path), "--store", str(given)]) == 2
    if place == "another store":
        assert (store / "index.html").read_text() == "as before" and list(given.iterdir()) == []
    else:
        assert "the history has lost its end" in (store / "index.html").read_text()


def test_with_json_nothing_but_the_results_is_on_standard_output(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["analyze", str(run_dir.path), "--json", "--store", str(run_dir.path.parent.parent)]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == run_dir.read_results() and "VALID" in shown.err


def test_a_run_in_progress_is_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its history is not complete, and the run itself will write its results."""
    running = Store(tmp_path / "store").create("broker-register-none")
    assert analyze(RunDir(running.path)) == 254
    assert f"{running.name} is still running: wait until it has ended" in capsys.readouterr().err
    running.release()


def test_everything_observed_is_kept(run_dir: RunDir) -> None:
    seen: dict[str, Any] = {
        "final_reads_from": 100, "timeouts": {"kv.py:12": 2}, "unexpected_exits": {"n1 exited, with status 7": 1},
    }  # fmt: skip
    change(run_dir.results_path, lambda results: results.update(seen))
    before = run_dir.read_results()
    assert {"started_at", "run_id", "cluster_detail", "hosts", "duration_s", "version"} <= before.keys()
    assert analyze(run_dir) == 0
    results = run_dir.read_results()
    for name in (*seen, *FACTS):
        assert results.get(name) == before.get(name), name


def test_the_checker_s_limits_may_be_others_than_the_run_s(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[Test] = []

    def judge(run: RunDir, test: Test, *arguments: Any, **options: Any) -> Any:
        judged.append(test)
        raise OperatorError("that is enough")

    monkeypatch.setattr(analyze_module, "judge_run", judge)
    words = ["analyze", str(run_dir.path), "--store", str(run_dir.path.parent.parent)]
    for more in ([], ["--checker-timeout", "7"], ["--checker-memory", "77"]):
        assert cli.main([*words, *more]) == 254
    assert cli.main([*words, "--checker-memory", "3"]) == 254
    usual, quick, small = judged
    assert quick == dataclasses.replace(usual, checker_timeout_s=7.0)
    assert small == dataclasses.replace(usual, checker_memory_mb=77)


@pytest.mark.parametrize(
    ("damage", "said"),
    [({"rate": -1.0}, "--rate must be 0"), ({"nodes": 0, "checker_memory_mb": 3}, "--nodes must be 1")],
)
def test_a_test_json_with_impossible_values_is_reported_in_one_line(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], damage: dict[str, Any], said: str
) -> None:
    change(run_dir.path / "test.json", lambda test: test.update(damage))
    assert analyze(run_dir) == 254
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.count("must be") == len(damage)


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("name", ["replicas", "leaders", "recovers"])
@pytest.mark.parametrize(("valid", "status"), [(False, 1), ("unknown", 2)])
def test_what_only_the_run_could_observe_still_counts(
    run_dir: RunDir, name: str, valid: bool | str, status: int, is_old: bool
) -> None:
    def observe(results: Any) -> None:
        results["checks"][name] = {"valid": valid, "reason": "n2 differs", "term": 7}
        if is_old:  # an earlier version did not list the checks of the run
            del results["checks_of_the_run"]

    change(run_dir.results_path, observe)
    for _ in range(2):
        assert analyze(run_dir) == status
        results = run_dir.read_results()
        assert results["checks"][name] == {"valid": valid, "reason": "n2 differs", "term": 7}
        assert results["reason"] == f"{name}: n2 differs"
        assert not [each for each in results["checks"] if each.endswith("(of the run)")], "each is made once"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("interrupted", "SIGINT after 0.2 s", "interrupted: SIGINT after 0.2 s; "),
        ("trouble", ["final reads: gone"], "final reads: gone"),
        ("unexpected_errors", {"KeyError: x": 2}, "clients failed with unexpected errors (2 times: KeyError: x)"),
        ("stopped_at_first_violation", "a stale read", "that no check confirms: a stale read"),
        ("final_reads_cut", "the final reads were ended after 150 s", "the final reads were ended after 150 s"),
    ],
)
def test_what_made_the_run_unknown_still_does(run_dir: RunDir, name: str, value: Any, reason: str) -> None:
    change(run_dir.results_path, lambda results: results.update({name: value}))
    for _ in range(2):
        assert analyze(run_dir) == 2
        assert reason in run_dir.read_results()["reason"] and run_dir.read_results()[name] == value


def test_one_lost_operation_at_the_end_is_noticed_and_events_of_faults_do_not_make_up_for_it(run_dir: RunDir) -> None:
    lines = lines_of(run_dir)
    healed = [
        json.dumps({**json.loads(line), "process": "nemesis", "f": "heal", "value": {}}) + "\n" for line in lines[-2:]
    ]
    for left in (lines[:-2], lines[:-2] + healed):
        run_dir.history_path.write_text("".join(left))
        assert analyze(run_dir) == 2
        told = f"the history has lost its end: only {len(lines) - 2} of {len(lines)} client events are left"
        assert run_dir.read_results()["trouble"] == [told]
        change(run_dir.results_path, lambda results: results.update(trouble=[], ops={"ok": len(lines)}))


def test_a_line_that_is_cut_short_is_unknown_even_if_no_count_is_known(run_dir: RunDir) -> None:
    """As a killed harness leaves it, but with results of an earlier version, which did not count."""
    text = run_dir.history_path.read_text()
    run_dir.history_path.write_text(text[:-9])
    change(run_dir.results_path, lambda results: results.pop("ops"))
    assert analyze(run_dir) == 2
    length = len(text.splitlines()[-1]) - 8
    assert f"the history ends in the middle of a line ({length} characters dropped)" in run_dir.read_results()["reason"]


def test_a_history_with_a_gap_is_unknown(run_dir: RunDir) -> None:
    events = [json.loads(line) for line in lines_of(run_dir)]
    first = events[0]["process"]
    lost = [event for event in events if event["process"] == first][:2]  # both events of an operation
    run_dir.history_path.write_text("".join(f"{json.dumps(event)}\n" for event in events if event not in lost))
    assert analyze(run_dir) == 2
    assert "2 events missing from the history" in run_dir.read_results()["reason"]


def test_a_violation_in_a_history_with_a_gap_is_unknown(run_dir: RunDir) -> None:
    """A read returned the value of a write that is missing from the history."""
    events = [json.loads(line) for line in lines_of(run_dir)]
    seen = next(
        event for event in events if (event["f"], event["type"]) == ("read", "ok") and event["value"] is not None
    )
    lost = [event for event in events if event["f"] == "write" and event["value"] == seen["value"]]
    run_dir.history_path.write_text("".join(f"{json.dumps(event)}\n" for event in events if event not in lost))
    assert analyze(run_dir) == 2
    check = run_dir.read_results()["checks"]["linearizable"]
    assert check["valid"] == "unknown" and check["witness"]
    assert check["reason"].endswith("; but this may be due to 2 events missing from the history")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda lines: lines[:9] + lines[5:], "index 5 comes after index 8"),
        (lambda lines: [line.replace('"index":1,', "") for line in lines], "the event has no 'index'"),
        (lambda lines: [*lines[:4], lines[4].replace("}", ',"error":5}'), *lines[5:]], ":5: an event's error is words"),
    ],
)
def test_invalid_events_are_reported_in_one_line(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], damage: Callable[[list[str]], list[str]], said: str
) -> None:
    run_dir.history_path.write_text("".join(damage(lines_of(run_dir))))
    assert analyze(run_dir) == 254
    error = capsys.readouterr().err
    assert said in error and "history.jsonl" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("checks", {}, "it has no checks"),
        ("checks", {"replicas": {"reason": "x"}}, "check replicas has no verdict"),
        ("checks", {"replicas": {"valid": 1, "reason": "x"}}, "check replicas has no verdict"),
        ("checks", {"replicas": None}, "check replicas has no verdict"),
        ("checks", {"replicas": {"valid": True, "reason": 7}}, "check replicas has no verdict"),
        ("trouble", [1], "its trouble is not a list of strings"),
        ("checks_of_the_run", {"replicas": 1}, "its checks_of_the_run is not a list of strings"),
        ("system", [], "its system is not an object"),
        ("ops", {"ok": "many"}, "its ops are not counts"),
        ("unexpected_errors", "x", "its unexpected_errors are not counts"),
        ("interrupted", -1, "interrupted is not a string"),
        ("stopped_at_first_violation", [1], "stopped_at_first_violation is not a string"),
        ("final_reads_cut", 7, "final_reads_cut is not a string"),
        ("final_reads_from", True, "final_reads_from is not an index"),
        ("final_reads_from", "7", "final_reads_from is not an index"),
    ],
)
def test_damaged_results_are_reported_and_the_suggested_fix_works(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], name: str, value: Any, said: str
) -> None:
    change(run_dir.results_path, lambda results: results.update({name: value}))
    before = run_dir.results_path.read_bytes()
    assert analyze(run_dir) == 254
    error = capsys.readouterr().err
    assert f"results.json is damaged: {said}; move it away" in error and error.count("\n") == 1
    assert run_dir.results_path.read_bytes() == before
    run_dir.results_path.unlink()
    assert analyze(run_dir) == 2
    assert "the state of its replicas is unknown" in run_dir.read_results()["reason"]


def test_results_that_are_not_json_get_the_same_suggested_fix(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir.results_path.write_bytes(b"")
    assert analyze(run_dir) == 254
    assert "move it away to judge the run by its history alone" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["analyze", "replay"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("system", None), ("cluster", [1]), ("nodes", "x"), ("nodes", True), ("workload", {}), ("nemesis", "kill"),
        ("nemesis", [1]), ("nemesis_interval_s", "5"), ("time_limit_s", None), ("rate", 10**400), ("seed", 0.5),
        ("settings", {"read_mode": 1}), ("settings", []), ("checker_memory_mb", None), ("fail_fast", "no"),
        ("client", 7), ("nemesis_schedule", 7),
    ],
)  # fmt: skip
def test_a_test_json_with_wrong_types_is_reported_in_one_line(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], command: str, name: str, value: Any
) -> None:
    change(run_dir.test_path, lambda test: test.update({name: value}))
    of_the_run = {"analyze": str(run_dir.path), "replay": str(run_dir.path / "schedule.json")}[command]
    assert cli.main([command, of_the_run, "--store", str(run_dir.path.parent.parent)]) == 254
    error = capsys.readouterr().err
    assert f"test.json does not describe a run: {name} cannot be {json.dumps(value)[:100]}" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("text", ["", "[", "[]", "[" * 100_000])
def test_replay_reports_a_test_json_that_is_not_json_in_one_line(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    run_dir.test_path.write_text(text)
    assert cli.main(["replay", str(run_dir.path / "schedule.json"), "--store", str(run_dir.path.parent.parent)]) == 254
    error = capsys.readouterr().err
    assert "test.json is damaged" in error and error.count("\n") == 1


def test_a_missing_field_of_a_test_is_named_and_unknown_fields_are_ignored(run_dir: RunDir) -> None:
    data = run_dir.read_test()
    assert read_test({**data, "of_a_newer_version": 1}) == read_test(data)
    with pytest.raises(OperatorError, match="it has no workload"):
        read_test({name: value for name, value in data.items() if name != "workload"})
    assert read_test({name: value for name, value in data.items() if name != "client"}).client is None


def test_analyze_prints_the_verdict_if_the_report_cannot_be_written(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir.report_path.unlink()
    run_dir.report_path.mkdir()
    assert analyze(run_dir) == 254
    said = capsys.readouterr()
    assert said.out.strip().startswith("VALID: ") and "report  " not in said.out
    assert said.err == f"harness: cannot write {run_dir.report_path}: Is a directory\n"


def test_analyze_in_a_read_only_store_advises_to_copy_the_run(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its --store says where the run is; another one would not have it."""
    real = stores.replace_file

    def refuse(path: Path, *rest: Any, **options: Any) -> None:
        if path.is_relative_to(run_dir.path):
            raise OSError(errno.EROFS, "Read-only file system")
        real(path, *rest, **options)

    monkeypatch.setattr(stores, "replace_file", refuse)
    assert analyze(run_dir) == 254
    said = capsys.readouterr()
    assert said.out.strip().startswith("VALID: ")
    advice = "copy the run to another place, and give the command the path of the copy"
    assert said.err == f"harness: cannot write {run_dir.results_path}: the file system is read-only; {advice}\n"
    copy = shutil.copytree(run_dir.path, tmp_path / "copy")
    assert cli.main(["analyze", str(copy)]) == 0, "the advice holds"


def test_run_prints_the_verdict_if_the_report_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("cannot write report.html: No space left on device")

    monkeypatch.setattr("harness.report.page.write_report", refuse)
    words = ["run", "--cluster", "sim", "--nodes", "3", "--time-limit", "0.5", "--seed", "1", "--store", str(tmp_path)]
    assert cli.main(words) == 254
    said = capsys.readouterr()
    assert "\nVALID: " in said.err
    assert said.err.splitlines()[-1] == "harness: cannot write report.html: No space left on device"


SHORT = ("run", "--cluster", "sim", "--nodes", "3", "--time-limit", "0.5", "--seed", "1")
FULL = OSError(28, "No space left on device")


def test_the_error_that_ended_the_run_is_reported_not_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the history nor, after it, the replicas' files can be written."""
    problem = "cannot write history.jsonl: No space left on device"
    monkeypatch.setattr(Run, "_phases", AsyncMock(side_effect=HistoryWriteError(problem)))
    monkeypatch.setattr(SimCluster, "leave_files", Mock(side_effect=FULL))
    assert cli.main([*SHORT, "--store", str(tmp_path)]) == 254
    assert capsys.readouterr().err.splitlines()[-1] == f"harness: {problem}"


def test_run_prints_the_verdict_if_the_replicas_files_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(SimCluster, "leave_files", Mock(side_effect=FULL))
    monkeypatch.setattr(RegisterWorkload, "check", lambda *_: {})
    assert cli.main([*SHORT, "--store", str(tmp_path)]) == 254
    run_dir = Store(tmp_path).find("latest")
    said = capsys.readouterr().err
    assert "\nUNKNOWN: " in said
    problem = f"cannot write the replicas' files to {run_dir.nodes_path}: No space left on device"
    assert said.splitlines()[-1] == f"harness: {problem}"
    assert run_dir.status is RunStatus.FINISHED


def test_a_check_that_raises_leaves_no_traceback(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(RegisterWorkload, "check", Mock(side_effect=AttributeError("no attribute 'get'")))
    assert analyze(run_dir) == 2
    assert "raised AttributeError: no attribute 'get'" in " ".join(capsys.readouterr().out.split())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], "warnings go to the terminal"
