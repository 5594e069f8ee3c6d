"""A harness whose hosts have their own file systems, killed (SIGKILL) at every single step of its life.

Four steps, evenly spread, by default; all of them, some ninety, by the environment:

    SPLITBRAIN_KILL_STEPS=all pytest -s tests/harness/test_kill_steps.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.cleanup import clean
from harness.clusters.agent_file_systems import why_no_file_systems
from harness.clusters.netns import IMAGE, MEMORY
from harness.clusters.netns_trial import why_no_namespaces

PARENT = Path(__file__).with_name("kill_steps_parent.py")
WHY_NOT = why_no_file_systems() or why_no_namespaces(in_user_namespace=False)
SAMPLE = 4
TIMEOUT_S = 900.0

pytestmark = [
    pytest.mark.root,
    pytest.mark.netns,
    pytest.mark.serial,
    pytest.mark.xdist_group("clean"),
    pytest.mark.timeout(TIMEOUT_S + 60),
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no file systems for hosts: {WHY_NOT}"),
]


def killed_at(tmp_path: Path, storage: str, steps: list[int]) -> list[dict[str, Any]]:
    argv = [sys.executable, str(PARENT), f"ks{os.getpid()}", str(tmp_path), storage, *map(str, steps)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    except BaseException:  # Ctrl-C or the time limit: the harness of some step is under way, or killed and not cleaned
        for state in tmp_path.glob("*/state"):
            clean(state_root=str(state), include_live=True, report=print)
        raise
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("storage", [IMAGE, MEMORY])
def test_clean_leaves_nothing_after_a_kill_at_any_step(tmp_path: Path, storage: str) -> None:
    [whole] = killed_at(tmp_path, storage, [0])
    assert (whole["status"], whole["removed"], whole["left"]) == (0, 0, [])
    names = whole["steps"]
    every = list(range(1, len(names) + 1))
    if os.environ.get("SPLITBRAIN_KILL_STEPS") != "all":
        every = every[:: max(1, len(every) // SAMPLE)]
    told = killed_at(tmp_path, storage, every)
    removed = sum(one["removed"] for one in told)
    print(f"{storage}: killed at {len(told)} of {len(names)} steps; clean removed {removed} things")
    # The order of steps may differ a little from run to run, so that a late step may not be reached.
    assert [t["step"] for t in told if t["status"] != -9 and t["step"] < len(names) - 5] == []
    bad = [(t["step"], names[t["step"] - 1], t["said"], t["left"]) for t in told if t["said"] or t["left"]]
    assert bad == []
