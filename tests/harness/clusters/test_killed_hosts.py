"""A harness that is killed (SIGKILL) at random moments under every nemesis on docker and ssh hosts, then `clean`.

Nothing of the run may be left on any host, and what belongs to others must be as it was. One kill per cluster by
default; the environment sets more kills and another seed:

    SPLITBRAIN_KILLS=10 SPLITBRAIN_KILLS_SEED=7 pytest -s tests/harness/clusters/test_killed_hosts.py
"""

from __future__ import annotations

import os
import random
import runpy
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.process_table import find_processes, marked_with
from harness.run_state import RUN_VARIABLE, STATE_DIR_VARIABLE
from nemesis.mechanisms.shim import why_no_shim

LAB = runpy.run_path(str(Path(__file__).resolve().parents[3] / "scripts" / "lab.py"))
NO_MACHINES = LAB["missing_for"]("ssh") or why_no_shim()
NO_ENGINE = LAB["missing_for"]("docker") or why_no_shim()

pytestmark = [pytest.mark.root, pytest.mark.cluster, pytest.mark.serial, pytest.mark.xdist_group("clean")]

KILLS = int(os.environ.get("SPLITBRAIN_KILLS", "1"))
SEED = int(os.environ.get("SPLITBRAIN_KILLS_SEED", "10"))
EARLIEST_S, LATEST_S = 0.5, 25.0
"""When a harness is killed, after its start: from before it has taken a host to after some faults."""

TIMEOUT_S = 120.0


def harness(namespace: str, directory: Path, *words: str) -> tuple[list[str], Mapping[str, str]]:
    """A command line of the harness in a network, and its environment."""
    argv = ["nsenter", f"--net={namespace}", sys.executable, "-m", "harness", *words]
    return argv, {**os.environ, STATE_DIR_VARIABLE: str(directory / "state")}


def killed_run(namespace: str, directory: Path, after_s: float, *words: str) -> None:
    """Start a run, kill its harness, and have `clean` say that nothing is left."""
    directory.mkdir()
    run = ("run", "--nodes", "3", "--nemesis", "all", "--nemesis-interval", "1", "--time-limit", "60", "--rate", "50")
    argv, environment = harness(namespace, directory, *run, "--store", str(directory / "store"), *words)
    with open(directory / "output", "wb") as output:
        child = subprocess.Popen(argv, env=environment, stdout=output, stderr=output, start_new_session=True)
    time.sleep(after_s)
    assert child.poll() is None, (directory / "output").read_text()
    child.kill()
    child.wait()
    states = directory / "state"
    runs = [name.removesuffix(".jsonl") for name in os.listdir(states)] if states.exists() else []
    print((directory / "output").read_text().splitlines()[-1:], f"killed after {after_s:.1f} s, runs {runs}")
    argv, environment = harness(namespace, directory, "clean")
    cleaned = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert cleaned.returncode == 0 and "left" not in cleaned.stdout, cleaned.stdout + cleaned.stderr
    assert [name for name in runs if (states / f"{name}.jsonl").exists()] == []
    assert [found for name in runs for found in find_processes(marked_with(RUN_VARIABLE, name))] == []


def kill_times() -> list[float]:
    rng = random.Random(SEED)
    return [rng.uniform(EARLIEST_S, LATEST_S) for _ in range(KILLS)]


@pytest.mark.ssh
@pytest.mark.skipif(NO_MACHINES is not None, reason=f"no sshd in namespaces: {NO_MACHINES}")
def test_clean_leaves_nothing_of_runs_killed_on_ssh_machines(tmp_path: Path, ssh_machines: Any) -> None:
    inside = f"--net={ssh_machines.namespace.removesuffix('-net')}-n1"
    rule = "table inet other { chain input { type filter hook input priority 0; ip saddr 10.99.0.9 drop; }; }"
    subprocess.run(["nsenter", inside, "nft", rule], check=True)
    try:
        foreign = ssh_machines.rules("n1")
        for number, after_s in enumerate(kill_times()):
            inventory = str(ssh_machines.inventory)
            killed_run(
                ssh_machines.namespace, tmp_path / str(number), after_s, "--cluster", "ssh", "--inventory", inventory
            )
            for host in ("n1", "n2", "n3", "n4"):
                assert ssh_machines.files(host) == []
                assert "sb-aside" not in ssh_machines.devices(host)
                assert "splitbrain" not in ssh_machines.rules(host)
            assert ssh_machines.rules("n1") == foreign
    finally:
        subprocess.run(["nsenter", inside, "nft", "delete", "table", "inet", "other"], check=True)


@pytest.mark.docker
@pytest.mark.skipif(NO_ENGINE is not None, reason=f"no Docker engine can be started: {NO_ENGINE}")
def test_clean_leaves_nothing_of_runs_killed_in_containers(tmp_path: Path, docker_engine: Any) -> None:
    foreign = ["docker", "-H", docker_engine.url, "network", "create", "--label", "splitbrain.run=other", "foreign"]
    subprocess.run(foreign, check=True, capture_output=True)
    for number, after_s in enumerate(kill_times()):
        killed_run(docker_engine.namespace, tmp_path / str(number), after_s, "--cluster", "docker")
        listed = [
            subprocess.run(["docker", "-H", docker_engine.url, *words], check=True, capture_output=True, text=True)
            for words in (["ps", "-a", "--format", "{{.Names}}"], ["network", "ls", "--format", "{{.Name}}"])
        ]
        assert listed[0].stdout.split() == []
        assert sorted(listed[1].stdout.split()) == ["bridge", "foreign", "host", "none"]
    subprocess.run(["docker", "-H", docker_engine.url, "network", "rm", "foreign"], check=True, capture_output=True)
