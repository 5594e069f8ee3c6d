"""`harness cluster`: a cluster that stays up between commands, and what is reported if it cannot."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.cluster_daemon import ClusterDaemon
from harness.errors import OperatorError
from harness.process_table import find_processes, marked_with
from harness.run_state import RUN_VARIABLE, process_start_ticks


def harness(tmp_path: Path, *words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "harness", *words]
    environment = {**os.environ, "SPLITBRAIN_STATE_DIR": str(tmp_path / "state")}
    return subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=timeout_s)


def cluster(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return harness(tmp_path, "cluster", *words)


def bring_up(tmp_path: Path) -> dict[str, object]:
    """Bring up a cluster of two bare hosts; returns its description."""
    up = cluster(tmp_path, "up", "--cluster", "local", "--nodes", "2", "--system", "none")
    assert up.returncode == 0, up.stderr
    return dict(json.loads((tmp_path / "clusters" / "main" / "cluster.json").read_text()))


def test_status_exec_and_logs_work_between_up_and_down(tmp_path: Path) -> None:
    described = bring_up(tmp_path)
    try:
        again = cluster(tmp_path, "up", "--cluster", "local")
        assert again.returncode == 254
        assert (
            again.stderr
            == "harness: cluster main is already up: harness cluster down --name main, or choose another --name\n"
        )
        status = cluster(tmp_path, "status")
        assert status.returncode == 0
        assert [line.split()[0] for line in status.stdout.splitlines()[2:]] == ["n1", "n2"]
        executed = cluster(tmp_path, "exec", "n2", "--", "sh", "-c", f"echo ${RUN_VARIABLE}; exit 7")
        assert (executed.returncode, executed.stdout) == (7, f"{described['run_id']}\n")
        assert cluster(tmp_path, "exec", "n2", "--", "sh", "-c", "kill -9 $$").returncode == 128 + 9
        unknown = cluster(tmp_path, "exec", "n7", "true")
        assert (unknown.returncode, unknown.stderr) == (254, "harness: there is no host n7; known: n1, n2\n")
        assert "no command given" in cluster(tmp_path, "exec", "n1").stderr
        log = Path(str(described["work_dir"]), "n1", "some.log")
        log.write_text("said before\n")
        log.with_name("disk.img").write_bytes(bytes(1 << 16))
        log.with_name("faults.json").write_text("{}")
        assert cluster(tmp_path, "logs", "n1").stdout == "said before\n"
    finally:
        down = cluster(tmp_path, "down")
    assert down.returncode == 0, down.stderr
    assert process_start_ticks(int(str(described["pid"]))) is None
    after = cluster(tmp_path, "status")
    assert (after.returncode, after.stderr) == (
        254, "harness: cluster main is not up (harness cluster up --name main)\n",
    )  # fmt: skip
    assert find_processes(marked_with(RUN_VARIABLE, str(described["run_id"]))) == []
    assert not (tmp_path / "state").exists() or os.listdir(tmp_path / "state") == []


def test_status_shows_no_role_if_the_system_does_not_report_its_leader(tmp_path: Path) -> None:
    up = cluster(tmp_path, "up", "--cluster", "local", "--nodes", "1", "--system", "toy")
    try:
        assert up.returncode == 0, up.stderr
        (row,) = cluster(tmp_path, "status").stdout.splitlines()[2:]
        assert row.split()[2:] == ["runs", "-", "-"]
    finally:
        assert cluster(tmp_path, "down").returncode == 0


class _OneUnreachable:
    """Remote hosts, of which n2 is unreachable."""

    hosts = ("n1", "n2")
    extra_hosts = ()

    def python(self, host: str) -> str:
        return "python3"

    async def fetch(self, hosts: Collection[str] | None = None) -> Sequence[Exception]:
        return [OSError("n2 is gone")] if hosts is None or "n2" in hosts else []


def test_logs_of_one_host_need_no_other_host(tmp_path: Path) -> None:
    daemon: Any = ClusterDaemon.__new__(ClusterDaemon)
    daemon._cluster = _OneUnreachable()
    daemon._spec = SimpleNamespace(work_dir=str(tmp_path))
    (tmp_path / "n1").mkdir()
    (tmp_path / "n1" / "broker.log").touch()
    assert asyncio.run(daemon._logs("n1")) == {"paths": [str(tmp_path / "n1" / "broker.log")]}
    with pytest.raises(OperatorError, match="cannot fetch all logs: n2 is gone"):
        asyncio.run(daemon._logs("n2"))


def test_one_of_two_concurrent_ups_succeeds(tmp_path: Path) -> None:
    words = ("up", "--cluster", "local", "--nodes", "1", "--system", "none")
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda _: cluster(tmp_path, *words), range(2)))
    try:
        said = {each.returncode: each.stderr for each in ended}
        assert sorted(said) == [0, 254]
        assert said[254].startswith("harness: cluster main is ") and said[254].count("\n") == 1
        assert cluster(tmp_path, "status").returncode == 0
    finally:
        down = cluster(tmp_path, "down")
    assert down.returncode == 0, down.stderr
    assert cluster(tmp_path, "status").returncode == 254


def test_up_leaves_a_cluster_alone_whose_lock_is_held(tmp_path: Path) -> None:
    directory = tmp_path / "clusters" / "main"
    directory.mkdir(parents=True)
    (directory / "control.sock").write_text("another one's")
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        up = cluster(tmp_path, "up", "--cluster", "local", "--nodes", "1", "--system", "none")
    fix = "wait until it has ended, or choose another --name"
    assert up.stderr == f"harness: cluster main is being brought up or taken down: {fix}\n"
    assert up.returncode == 254
    assert (directory / "control.sock").read_text() == "another one's"


def test_a_killed_daemon_is_reported_and_clean_removes_its_processes(tmp_path: Path) -> None:
    described = bring_up(tmp_path)
    assert "its harness is still running" in harness(tmp_path, "clean").stdout
    assert cluster(tmp_path, "status").returncode == 0
    os.kill(int(str(described["pid"])), signal.SIGKILL)
    dead = cluster(tmp_path, "status")
    assert dead.returncode == 254
    assert "its daemon died: harness clean removes what it left" in dead.stderr
    cleaned = harness(tmp_path, "clean")
    assert cleaned.returncode == 0
    assert find_processes(marked_with(RUN_VARIABLE, str(described["run_id"]))) == []
    assert bring_up(tmp_path)["run_id"] != described["run_id"]
    assert cluster(tmp_path, "down").returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["up", "--cluster", "lokal"], "unknown cluster 'lokal' (did you mean local?)"),
        (["up", "--cluster", "local", "--nodes", "0"], "--nodes must be 1 to 15, not 0"),
        (["up", "--cluster", "local", "--system", "brokre"], "unknown system 'brokre' (did you mean broker?)"),
        (
            ["up", "--cluster", "local", "--inventory", "x"],
            "--inventory: not an option of cluster local, which takes --mechanism",
        ),
        (["up", "--cluster", "ssh"], "the ssh cluster needs --inventory FILE"),
        (["up", "--cluster", "ssh", "--inventory", "none.toml"], "inventory none.toml: No such file"),
        (["up", "--name", "../x"], "--name '../x': letters, digits"),
        (["status", "--name", "other"], "cluster other is not up (harness cluster up --name other)"),
    ],
)
def test_invalid_requests_are_refused_in_one_line(
    tmp_path: Path, words: list[str], said: str, harness_here: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    environment = {"SPLITBRAIN_STATE_DIR": str(tmp_path / "state")}
    refused = harness_here("cluster", *words, cwd=tmp_path, environment=environment)
    assert refused.returncode == 254
    assert said in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "clusters").exists()
