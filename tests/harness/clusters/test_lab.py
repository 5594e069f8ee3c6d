"""The laboratory of scripts/lab.py: what a killed one leaves is removed by the next."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.clusters.conftest import LAB_PATH, lab

WHY_NOT = lab.missing_for("ssh")
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]


def namespaces(pid: int) -> set[str]:
    names = {path.name for path in Path("/run/netns").iterdir()}
    return {name for name in names if name.startswith(f"sb-lab-{pid}-")}


def processes(pid: int) -> set[int]:
    """Those of a laboratory, by its namespaces."""
    return {each for name in namespaces(pid) for each in lab._processes_in(name)}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_a_killed_laboratory_is_removed_by_the_next_and_one_in_use_is_not(tmp_path: Path) -> None:
    def start(name: str, *command: str) -> subprocess.Popen[bytes]:
        words = ["ssh", str(tmp_path / name), "--hosts", "1", "--", *command]
        return subprocess.Popen([sys.executable, str(LAB_PATH), *words], stdin=subprocess.DEVNULL)

    used, killed = (start(name, "sh", "-c", f"touch {tmp_path / name}.runs; sleep 600") for name in ("used", "killed"))
    try:
        wait_until(lambda: all((tmp_path / f"{name}.runs").exists() for name in ("used", "killed")))
        before, left = namespaces(used.pid), processes(killed.pid)
        assert len(before) == len(namespaces(killed.pid)) == 2 and len(left) >= 3, "sshd, its parent, and the command"
        killed.kill()
        killed.wait()
        assert processes(killed.pid) == left, "nobody else has ended it"
        assert start("next", "true").wait(timeout=120) == 0
        assert namespaces(killed.pid) == set()
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in left))
        assert namespaces(used.pid) == before and processes(used.pid)
    finally:
        for process in (used, killed):
            process.terminate()
        assert (used.wait(timeout=60), killed.wait(timeout=60)) == (128 + 15, -9)
    assert namespaces(used.pid) == set()
    assert not list(Path("/tmp").glob(f"sb-lab-{used.pid}-*")) and not list(Path("/tmp").glob(f"sb-lab-{killed.pid}-*"))
