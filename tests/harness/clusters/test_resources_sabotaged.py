"""A run whose limits are undone by others is unknown: the kernel is asked again before they are released."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.clusters.netns import NetnsCluster
from harness.clusters.own_resources import GROUP_KINDS
from harness.process_table import find_processes, marked_with
from harness.run_state import RUN_VARIABLE, STATE_DIR_VARIABLE

WHY_NOT = "needs root" if os.geteuid() != 0 else next(
    filter(None, (NetnsCluster.missing("resources", kind) for kind in GROUP_KINDS)), None
)  # fmt: skip

pytestmark = [
    pytest.mark.root,
    pytest.mark.netns,
    pytest.mark.cluster,
    pytest.mark.serial,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no limits are available: {WHY_NOT}"),
]

KINDS = ("cpu", "memory", "descriptors")
LAST_S = 3.0
"""Duration of each fault in turn: longer than its proof, after which the limit is undone."""

UNLIMITED = {"cpu.max": "max 100000", "cpu.cfs_quota_us": "-1", "memory.max": "max", "memory.limit_in_bytes": "-1"}
"""File of a control group -> its value without a limit."""

TIMEOUT_S = 150.0


def group_paths(state: Path) -> set[Path]:
    """The control groups of the programs of n1, by the run's own state."""
    found = set()
    for file in filter(Path.is_file, state.rglob("*")):
        text = file.read_text(encoding="utf-8", errors="replace")
        found |= {Path(path) for path in re.findall(r'"(/[^"]*-n1/[^"/]*-n1-programs)"', text)}
    return found


def undo_groups(state: Path) -> None:
    for path in group_paths(state):
        for name, nothing in UNLIMITED.items():
            if (path / name).exists():
                (path / name).write_text(nothing, encoding="ascii")


def undo_descriptors(state: Path) -> None:
    [run_id] = {path.name.split("splitbrain-")[1].removesuffix("-n1-programs") for path in group_paths(state)}
    for process in find_processes(marked_with(RUN_VARIABLE, run_id)):
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (hard, hard))


def perform(tmp_path: Path, undo: Callable[[Path], None]) -> Any:
    """A run with the three faults, each of which is undone as soon as it is proven; its results."""
    schedule, state = tmp_path / "schedule.json", tmp_path / "state"
    events = []
    for number, kind in enumerate(KINDS):
        fault = {"id": kind, "nemesis": "resources", "variant": f"{kind}@n1"}
        at_s = 1.0 + number * (LAST_S + 1)
        events += [{"at_s": at_s, "action": "inject", **fault}, {"at_s": at_s + LAST_S, "action": "heal", "id": kind}]
    schedule.write_text(json.dumps(events), encoding="utf-8")
    argv = [
        *(sys.executable, "-m", "harness", "run", "--cluster", "netns", "--nodes", "3", "--workload", "log"),
        *("--rate", "20", "--time-limit", str(events[-1]["at_s"]), "--nemesis-schedule", str(schedule), "--json"),
        *("--store", str(tmp_path / "store")),
    ]
    environment = {**os.environ, STATE_DIR_VARIABLE: str(state), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as running:
        timer = threading.Timer(TIMEOUT_S, running.kill)
        timer.start()
        assert running.stdout is not None and running.stderr is not None
        found: list[str] = []
        reader = threading.Thread(target=lambda: found.append(running.stdout.read()))  # type: ignore[union-attr]
        reader.start()
        for line in running.stderr:
            if "begins" in line and "proven" in line:
                undo(state)
        running.wait()
        reader.join()
        timer.cancel()
    return json.loads(found[0])


def undo_all(state: Path) -> None:
    undo_groups(state)
    undo_descriptors(state)


def test_a_run_whose_limits_are_undone_by_hand_is_unknown(tmp_path: Path) -> None:
    results = perform(tmp_path, undo_all)
    assert results["valid"] == "unknown", results["reason"]
    faults = {fault["id"]: fault for fault in results["faults"]}
    assert set(faults) == set(KINDS)
    for kind, fault in faults.items():
        assert not fault["proven"], (kind, fault)
        assert "n1 is no longer limited" in json.dumps(fault), (kind, fault)
