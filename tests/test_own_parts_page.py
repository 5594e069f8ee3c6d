"""docs/your-own-parts.md: its listings are parts that the harness finds, takes and runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "your-own-parts.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

IN_PROCESS = """
from harness import registry
from harness.in_process import run_in_process

class Switch:
    at = False
    async def open(self): pass
    async def close(self): pass
    async def flip(self):
        Switch.at = not Switch.at
        return Switch.at

class Stuck(Switch):
    async def flip(self):
        return True

workload = registry.load("workloads", "toggle")()
for client in (Switch, Stuck):
    print({name: outcome.valid for name, outcome in run_in_process(workload, client, operations=50).outcomes.items()})
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which the page's package is installed."""
    (toml,) = (block for kind, block in BLOCKS if kind == "toml")
    declared = tomllib.loads(toml)["project"]
    (tmp_path / "my_parts.py").write_text("\n".join(block for kind, block in BLOCKS if kind == "python"))
    info = tmp_path / "my_parts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {declared['name']}\nVersion: {declared['version']}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in points.items())
        for group, points in declared["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}


def python(*words: str, environment: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


def test_the_workload_of_the_page_is_found_and_judges_runs(environment: dict[str, str], tmp_path: Path) -> None:
    done = python("-c", IN_PROCESS, environment=environment, cwd=tmp_path)
    right, wrong = "{'linearizable': True, 'both-seen': True}", "{'linearizable': False, 'both-seen': 'unknown'}"
    assert done.stdout.splitlines() == [right, wrong], done.stderr


def test_the_nemesis_of_the_page_is_found_and_its_faults_are_proven(
    environment: dict[str, str], tmp_path: Path
) -> None:
    words = ["--nodes", "3", "--nemesis-interval", "2", "--time-limit", "9", "--seed", "1"]
    run = ["-m", "harness", "run", "--nemesis", "nap", "--cluster", "sim", *words]
    done = python(*run, environment=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"faults  2 faults, 2 proven *\n", done.stdout)
