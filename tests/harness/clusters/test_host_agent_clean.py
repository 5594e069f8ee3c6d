"""What the agent's `clean` undoes and removes on a host, in which order, and what it reports as left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.clusters import host_agent
from harness.clusters.host_agent import CONTROL_FILE, KEPT, UNDO_FILE

RUN = f"clean{os.getpid()}"
Clean = Callable[..., dict[str, Any]]


@pytest.fixture
def clean(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Clean:
    """Cleans the run in `tmp_path`, whose agent has ended, and returns the answer."""
    (tmp_path / RUN).mkdir()
    (tmp_path / "owner").write_text(RUN)
    monkeypatch.setattr(host_agent, "KILL_TIMEOUT_S", 5.0)

    def work(*kept: str) -> dict[str, Any]:
        assert host_agent._clean_command(str(tmp_path), RUN, *kept) == 0
        return dict(json.loads(capsys.readouterr().out))

    return work


def store(tmp_path: Path, **commands: list[str]) -> None:
    written = {key.replace("_", " "): {"argv": argv, "stdin": ""} for key, argv in commands.items()}
    (tmp_path / RUN / UNDO_FILE).write_text(json.dumps(written))


def test_a_frozen_disk_is_thawed_before_processes_end_and_the_rest_is_undone_newest_first(
    tmp_path: Path, clean: Clean, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = tmp_path / "marks"

    def note(word: str) -> list[str]:
        return ["sh", "-c", f"echo {word} >> {marks}"]

    def end(run_id: str, directory: str) -> None:
        with marks.open("a") as file:
            file.write("processes\n")

    monkeypatch.setattr(host_agent, "_end_agents", end)
    store(tmp_path, rules=note("rules"), thaw_n1=note("thaw"), clock=note("clock"))
    answer = clean()
    assert marks.read_text().split() == ["thaw", "processes", "clock", "rules"]
    assert answer == {"removed": ["thaw n1", "clock", "rules", str(tmp_path / RUN)], "left": []}


def test_what_cannot_be_undone_is_reported_and_the_host_stays_claimed(tmp_path: Path, clean: Clean) -> None:
    store(
        tmp_path, rules=["sh", "-c", "echo busy >&2; exit 1"], clock=["/no/such/program"], names=["true"],
        thaw=["sh", "-c", "echo frozen >&2; exit 1"],
    )  # fmt: skip
    answer = clean()
    assert answer["removed"] == ["names"]
    assert answer["left"] == [
        "thaw: frozen", "clock: [Errno 2] No such file or directory: '/no/such/program'", "rules: busy",
    ]  # fmt: skip
    assert (tmp_path / RUN / UNDO_FILE).exists() and (tmp_path / "owner").read_text() == RUN


def test_a_process_that_does_not_exit_is_reported_and_the_host_stays_claimed(
    tmp_path: Path, clean: Clean, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(host_agent, "_marked", lambda run_id: iter([4_000_000_000]))
    monkeypatch.setattr(host_agent, "_end_agents", lambda *_: None)
    monkeypatch.setattr(host_agent, "KILL_TIMEOUT_S", 0.001)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    assert clean() == {"removed": [], "left": ["process 4000000000 did not exit"]}
    assert set(killed) <= {4_000_000_000} and (tmp_path / RUN).is_dir()


def test_only_the_files_of_kept_hosts_outlive_the_run(tmp_path: Path, clean: Clean) -> None:
    for host in ("n1", "n2"):
        (tmp_path / RUN / host).mkdir()
        (tmp_path / RUN / host / "data").write_text(host)
    assert clean("n2", "n3") == {"removed": [str(tmp_path / RUN)], "left": []}
    kept = tmp_path / f"{RUN}{KEPT}"
    assert sorted(os.listdir(tmp_path)) == [kept.name] and os.listdir(kept) == ["n2"]
    assert (kept / "n2" / "data").read_text() == "n2"


def test_files_that_cannot_be_moved_are_not_removed(tmp_path: Path, clean: Clean) -> None:
    (tmp_path / RUN / "n1").mkdir()
    (tmp_path / RUN / "n1" / "data").touch()
    (tmp_path / f"{RUN}{KEPT}" / "n1" / "earlier").mkdir(parents=True)
    answer = clean("n1")
    assert answer == {"removed": [], "left": ["the files of n1, which could not be moved: Directory not empty"]}
    assert (tmp_path / RUN / "n1" / "data").exists() and (tmp_path / "owner").exists()


@pytest.mark.parametrize(
    ("owner", "stays"), [(RUN, False), ("", False), (f"{RUN}-2", True)], ids=["own", "none", "other"]
)
def test_the_claim_of_another_run_stays(tmp_path: Path, clean: Clean, owner: str, stays: bool) -> None:
    (tmp_path / "owner").write_text(owner)
    for run_id in (RUN, f"{RUN}-2"):
        (tmp_path / f"owner.{run_id}.7").touch()
    assert clean()["left"] == []
    assert sorted(os.listdir(tmp_path)) == [*(["owner"] if stays else []), f"owner.{RUN}-2.7"]


def test_faults_end_in_control_files_before_these_are_removed(tmp_path: Path, clean: Clean) -> None:
    """A process that was not found may still have the file mapped."""
    path = tmp_path / RUN / "n1" / CONTROL_FILE
    path.parent.mkdir()
    path.write_bytes(b"\xff" * 4096)
    with path.open("rb") as mapped:
        assert clean()["left"] == [] and not path.exists()
        content = mapped.read()
    begin, length = host_agent._IN_FORCE_AT, host_agent._IN_FORCE_BYTES
    assert content[begin : begin + length] == bytes(length) and length > 0


def test_what_another_clean_removes_at_the_same_time_is_not_left(
    tmp_path: Path, clean: Clean, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is always a moment earlier."""
    (tmp_path / RUN / "n1").mkdir()
    for name in ("a", "b", CONTROL_FILE):
        (tmp_path / RUN / "n1" / name).write_bytes(bytes(4096))

    def too_late(remove: Callable[..., None]) -> Callable[..., None]:
        def call(path: Any, *, dir_fd: int | None = None) -> None:
            for _ in range(2):
                remove(path, dir_fd=dir_fd)

        return call

    let_go = host_agent.let_go

    def let_go_and_miss(directory: str) -> None:
        let_go(directory)
        raise FileNotFoundError(directory)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", too_late(os.unlink))
        patched.setattr(os, "rmdir", too_late(os.rmdir))
        patched.setattr(host_agent, "let_go", let_go_and_miss)
        assert clean() == {"removed": [str(tmp_path / RUN)], "left": []}
    assert list(tmp_path.iterdir()) == []


def test_clean_spares_itself_and_its_ancestors_if_they_carry_the_mark_of_the_run(tmp_path: Path) -> None:
    """As in a shell that a program of the run has started, or in a container whose processes all have the mark."""
    environment = {**os.environ, host_agent.RUN_VARIABLE: RUN}
    agent = shutil.copy(host_agent.__file__, tmp_path / "agent.py")  # alone in a directory, as on a host
    command = f'"{sys.executable}" "{agent}" clean "{tmp_path}" {RUN}; echo "status $?"'
    with subprocess.Popen(["sleep", "600"], env=environment) as marked:
        try:
            done = subprocess.run(
                ["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=60, check=True
            )
            answer, status = done.stdout.splitlines()
            assert status == "status 0" and marked.wait(timeout=60) == -signal.SIGKILL
        finally:
            marked.kill()
    assert json.loads(answer) == {"removed": [f"process {marked.pid}"], "left": []}
