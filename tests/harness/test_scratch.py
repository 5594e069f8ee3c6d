"""Temporary directories that belong to no run: those of killed processes are removed, all others stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from harness import run_state
from harness.cleanup import CleanReport, clean
from harness.clusters.host_agent import remove_tree
from harness.run_state import process_start_ticks
from harness.scratch import PURPOSES, scratch_directory, scratch_prefix

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 4194304999
"""A process id beyond the kernel's largest."""


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def cleaned(temp: Path) -> CleanReport:
    told: list[str] = []
    report = clean(state_root=str(temp / "state"), report=told.append)
    alive = tuple(f"run {run_id}: left alone, its harness is still running (pid " for run_id in report.live)
    assert [line for line in told if not line.startswith(alive)] == [*report.removed, *report.left]
    return report


def names_in(temp: Path) -> set[str]:
    return {path.name for path in temp.iterdir()}


@pytest.mark.parametrize("purpose", PURPOSES)
def test_scratch_directories_of_dead_processes_are_removed(temp: Path, purpose: str) -> None:
    gone = temp / f"splitbrain-{purpose}-{NOBODY}-7-gone"
    gone.mkdir()
    (gone / "history.jsonl").write_text("half a line")
    with scratch_directory(purpose) as mine:
        report = cleaned(temp)
        assert names_in(temp) == {os.path.basename(mine)}
    assert report.removed == [f"{gone}, of a process that is gone"] and report.left == []
    assert names_in(temp) == set()


def test_directories_not_known_to_belong_to_a_dead_process_stay(temp: Path) -> None:
    me = os.getpid()
    stay = [f"splitbrain-spark-{me}-{process_start_ticks(me)}-live", f"splitbrain-shim-{me}-live"]
    stay += ["splitbrain-shim-nobody-x4", "splitbrain-spark-notes", "splitbrain-r1-host", f"splitbrain-keep-{NOBODY}-x"]
    for name in (*stay, f"splitbrain-spark-{me}-1-earlier", f"splitbrain-shim-{NOBODY}-x1"):
        (temp / name).mkdir()
    (temp / f"splitbrain-trial-{NOBODY}-8-file").write_text("a file of names")
    link = temp / f"splitbrain-trial-{NOBODY}-8-link"
    link.symlink_to(temp / stay[0])
    assert len(cleaned(temp).removed) == 3
    assert names_in(temp) == {*stay, link.name}
    assert cleaned(temp).removed == []


def test_scratch_directories_of_another_container_stay_while_their_process_may_live(
    temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scratch_directory("rehearsal") as mine:
        me, own = os.getpid(), run_state.pid_namespace_of("self")
        assert os.path.basename(mine).startswith(f"splitbrain-rehearsal-{me}-{process_start_ticks(me)}-{own}-")
        (temp / f"splitbrain-rehearsal-{NOBODY}-7-{own}-gone").mkdir()
        elsewhere = temp / f"splitbrain-rehearsal-{me}-7-1-there"
        elsewhere.mkdir()
        monkeypatch.setattr(
            run_state, "_FIRST_PID_NAMESPACE", 0
        )  # as in a container, where not every process is visible
        assert len(cleaned(temp).removed) == 1
        assert names_in(temp) == {os.path.basename(mine), elsewhere.name}
        monkeypatch.setattr(run_state, "_FIRST_PID_NAMESPACE", own)
        assert cleaned(temp).removed == [f"{elsewhere}, of a process that is gone"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root can remove everything")
def test_a_directory_that_cannot_be_removed_is_reported(temp: Path) -> None:
    locked = temp / f"splitbrain-audit-{NOBODY}-7-gone" / "locked"
    locked.mkdir(parents=True)
    (locked / "events").write_text("")
    locked.chmod(0o500)
    report = cleaned(temp)
    locked.chmod(0o700)
    assert report.exit_status == 255 and len(report.left) == 1
    assert "Permission denied" in report.left[0]


def test_an_error_other_than_a_missing_file_ends_the_removal_of_a_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tree" / "inner").mkdir(parents=True)

    def refuse(path: object, *, dir_fd: int | None = None) -> None:
        raise PermissionError(13, "no", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", refuse)
        with pytest.raises(PermissionError):
            remove_tree(str(tmp_path / "tree"))
    remove_tree(str(tmp_path / "tree"))
    assert not (tmp_path / "tree").exists()
    remove_tree(str(tmp_path / "tree"))


def test_an_unknown_scratch_purpose_is_refused() -> None:
    with pytest.raises(ValueError, match="diary"):
        scratch_prefix("diary")


def test_clean_removes_the_scratch_directories_of_a_killed_search(temp: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(temp), "SPLITBRAIN_STATE_DIR": str(temp / "state")}
    command = [
        sys.executable,
        "-m",
        "harness",
        "explore",
        "--seeds",
        "1000",
        "--jobs",
        "2",
        "--store",
        str(temp / "store"),
    ]
    search = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not any(temp.glob("splitbrain-rehearsal-*")) and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        os.killpg(search.pid, signal.SIGKILL)
        search.wait()
    left = {path.name for path in temp.glob("splitbrain-rehearsal-*")}
    assert left
    deadline = time.monotonic() + 60
    removed: list[str] = []
    while any(temp.glob("splitbrain-*")) and time.monotonic() < deadline:  # its processes may still be ending
        removed += cleaned(temp).removed
    assert {os.path.basename(line.partition(",")[0]) for line in removed} >= left
    assert not any(temp.glob("splitbrain-*"))
