"""`harness replay`: options come from the test of the run, unless the command line overrides them."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness import cli
from harness.commands import replay, series
from harness.commands.run import enter_namespace
from harness.errors import OperatorError
from harness.store import Store
from harness.test import Test


@pytest.fixture
def replay_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that returns the arguments with which `harness replay` would repeat a run on machines."""
    store = Store(str(tmp_path / "store"))
    options = {"inventory": "hosts.toml", "mechanism": "seccomp"}
    test = Test(
        system="broker", cluster="ssh", cluster_options=options, nodes=3, workload="register", nemesis=(),
        nemesis_interval_s=5.0, time_limit_s=20.0, concurrency=10, rate=20.0, seed=1, checker_memory_mb=77,
        checker_timeout_s=7.0,
    )  # fmt: skip
    run_dir = store.create(test.name)
    run_dir.write_test(test.to_json())
    run_dir.schedule_path.write_text("[]")

    def ask(*words: str) -> Any:
        found: list[Any] = []

        def prepare(arguments: Any) -> Any:
            found.append(arguments)
            raise OperatorError("seen")

        monkeypatch.setattr(replay, "prepare", prepare)
        assert cli.main(["replay", str(run_dir.path), "--store", str(tmp_path / "store"), *words]) == 254
        return found[0]

    return ask


def test_replay_uses_the_cluster_and_the_options_of_the_run(replay_arguments: Any) -> None:
    arguments = replay_arguments()
    assert (arguments.cluster, arguments.inventory, arguments.mechanism) == ("ssh", "hosts.toml", "seccomp")
    assert (arguments.nodes, arguments.checker_memory, arguments.checker_timeout) == (3, 77, 7.0)


def test_options_of_the_command_line_override_those_of_the_run(replay_arguments: Any) -> None:
    arguments = replay_arguments(
        "--cluster", "ssh", "--inventory", "others.toml", "--checker-memory", "99", "--nodes", "5"
    )
    assert (arguments.cluster, arguments.inventory, arguments.mechanism) == ("ssh", "others.toml", "seccomp")
    assert (arguments.nodes, arguments.checker_memory, arguments.checker_timeout) == (5, 99, 7.0)


def test_another_cluster_gets_none_of_the_runs_cluster_options(replay_arguments: Any) -> None:
    arguments = replay_arguments("--cluster", "sim")
    assert (arguments.cluster, arguments.inventory, arguments.mechanism, arguments.nodes) == ("sim", None, None, 3)


@pytest.mark.parametrize(
    "words", [["replay", "pipe", "--times", "2"], ["run", "--nemesis-schedule", "pipe", "--test-count", "2"]]
)
def test_a_schedule_from_a_pipe_is_refused_for_several_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for command in (replay, series):
        monkeypatch.setattr(command, "prepare", lambda arguments: pytest.fail("it was read"))
    assert cli.main([*words, "--cluster", "sim"]) == 254
    assert "schedule pipe can be read only once, but 2 runs read it: save it to a file" in capsys.readouterr().err


def test_a_schedule_from_a_pipe_is_recorded_as_the_runs_stored_copy(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, json.dumps([{"at_s": 0.1, "action": "inject", "id": "f1", "nemesis": "kill",
                                  "variant": "sigkill@minority"}]).encode())  # fmt: skip
    os.close(writer)
    words = ["--cluster", "sim", "--nodes", "3", "--time-limit", "0.5", "--store", str(tmp_path / "store")]
    cli.main(["run", "--nemesis-schedule", f"/dev/fd/{reader}", *words])
    run_dir = Store(tmp_path / "store").find("latest")
    assert run_dir.read_test()["nemesis_schedule"] == str(run_dir.schedule_path)
    assert f"--nemesis-schedule {run_dir.schedule_path} " in run_dir.read_results()["replay"]


def test_a_schedule_from_stdin_is_refused_if_a_user_namespace_is_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.commands.run.reexec", lambda words: pytest.fail("it was read before"))
    parts = SimpleNamespace(test=SimpleNamespace(nemesis_schedule="/dev/stdin", cluster="netns"), system_class=None)
    prepared = cast(Any, SimpleNamespace(parts=parts, in_user_namespace=True))
    with pytest.raises(OperatorError, match=r"/dev/stdin can be read only once, .* save it to a file"):
        enter_namespace(prepared, argparse.Namespace(words=[]))


@pytest.mark.parametrize(
    ("verdicts", "status", "said"),
    [
        ([True, True, True], 0, "invalid in 0 of 3 runs\n"),
        ([True, "unknown", True], 2, "invalid in 0 of 3 runs, unknown in 1\n"),
        (["unknown", True, False], 1, "invalid in 1 of 3 runs, unknown in 1\n"),
        (["stopped", True, True], 2, "invalid in 0 of 1 runs, unknown in 1\n"),
        ([False, OperatorError("the disk is full")], 1, "invalid in 1 of 1 runs\n"),
        ([True, OperatorError("the disk is full")], 254, "invalid in 0 of 1 runs\n"),
    ],
)
def test_the_exit_status_is_that_of_the_worst_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    verdicts: list[Any], status: int, said: str,
) -> None:  # fmt: skip
    (tmp_path / "schedule.json").write_text("[]")
    left = list(verdicts)

    def perform(parts: Any, store: Any, console: Any) -> Any:
        valid = left.pop(0)
        if isinstance(valid, Exception):
            raise valid
        interrupted = "SIGINT after 0.1 s" if valid == "stopped" else None
        run_dir = SimpleNamespace(history_path=tmp_path / "history.jsonl", report_path=tmp_path / "report.html")
        return run_dir, {"valid": "unknown" if interrupted else valid, "interrupted": interrupted}

    monkeypatch.setattr(replay, "perform", perform)
    monkeypatch.setattr(replay, "count_triggers", lambda history: (0, 0))
    words = ["--cluster", "sim", "--nodes", "3", "--times", "3", "--store", str(tmp_path / "store")]
    assert cli.main(["replay", str(tmp_path / "schedule.json"), *words]) == status
    assert said in capsys.readouterr().out
