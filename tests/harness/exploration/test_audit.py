"""`harness audit`: the simulation gives the same run twice, and anything that prevents this is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.cli import main
from harness.exploration.audit import Audited, Parting, first_difference
from harness.test import Test

SMALL = ("--nodes", "3", "--time-limit", "4", "--rate", "40", "--jobs", "1")

DEPENDS_ON_THE_HASH_SEED = """
import random
import harness.seeded

def seeded(name, really=harness.seeded.seeded):
    return random.Random(hash(name)) if name.endswith("/link/n1/n2") else really(name)

harness.seeded.seeded = seeded
"""
"""What a careless change would do: the latencies of one link follow Python's hashes."""


def test_a_few_seeds_give_the_same_run_in_both_processes(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["audit", "--seeds", "2", "--seed", "77", *SMALL, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert status == 0 and found["partings"] == [] and found["seeds"] == 2
    assert found["events"] > 2_000  # or nothing was compared


def test_a_dependence_on_the_hash_seed_is_found_with_its_stack(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(DEPENDS_ON_THE_HASH_SEED)
    done = subprocess.run(
        [sys.executable, "-m", "harness", "audit", "--seeds", "1", "--seed", "77", *SMALL],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert "seed 77: the two runs diverge at event" in lines[0] and lines[0].endswith("of the network")
    assert lines[1].strip().startswith("first") and lines[2].strip().startswith("second")
    assert lines[1].split(maxsplit=1)[1] != lines[2].split(maxsplit=1)[1]
    assert "network.py" in done.stdout and "1 not reproducible" in lines[-1]


TERMINATES_ITSELF = """
import asyncio, os, signal
if os.environ.get("PYTHONHASHSEED") == "4711":
    from harness import execution
    async def observe(*words, really=execution._observe):
        asyncio.get_running_loop().call_later(3.0, signal.raise_signal, signal.SIGTERM)
        return await really(*words)
    execution._observe = observe
"""


def test_a_run_that_a_signal_cut_short_is_not_reported_as_diverging(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(TERMINATES_ITSELF)
    done = subprocess.run(
        [sys.executable, "-m", "harness", "audit", "--seeds", "1", "--seed", "77", *SMALL, "--time-limit", "6"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 255, done.stdout
    assert "interrupted by SIGTERM" in done.stderr and "diverge at event" not in done.stdout


def test_the_runs_of_an_audit_end_when_it_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", "audit", "--seeds", "1", *SMALL, "--time-limit", "600"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    )
    children = Path(f"/proc/{process.pid}/task")

    def simulating() -> list[int]:
        if not any(tmp_path.glob("*/first/network")):
            return []
        return [int(pid) for task in children.glob("*/children") for pid in task.read_text().split()]

    try:
        end_s = time.monotonic() + 120  # two harnesses are started, perhaps on a busy machine
        while not (pids := simulating()) and time.monotonic() < end_s:
            time.sleep(0.05)
        assert pids
    finally:
        process.kill()
        process.wait()
    end_s = time.monotonic() + 20
    while any(_runs(pid) for pid in pids) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    """Whether this process exists and is no zombie: its new parent may be slow to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("differs", "status"), [(False, 2), (True, 1)])
def test_an_interrupted_audit_reports_what_it_has_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, differs: bool, status: int
) -> None:
    def audited(test: Test, seed: int, pythons: tuple[str, str]) -> Audited:
        if seed == 3:
            raise KeyboardInterrupt
        parting = Parting(seed=seed, what="history", number=4, events=("a", "b")) if differs and seed == 1 else None
        return Audited(seed=seed, events=10, parting=parting)

    monkeypatch.setattr("harness.commands.audit.audit_seed", audited)
    assert main(["audit", *SMALL, "--seeds", "5", "--seed", "1", "--jobs", "1", "--json"]) == status
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["seeds"], found["events"], found["interrupted"]) == (2, 20, True)
    assert len(found["partings"]) == differs
    assert "interrupted; 2 of 5 seeds compared" in captured.err


def test_the_first_difference_of_two_files_is_found() -> None:
    assert first_difference(["a\n", "b\n"], ["a\n", "b\n"]) is None
    assert first_difference(["a\n", "b\n"], ["a\n", "c\n"]) == (2, ("b", "c"))
    assert first_difference(["a\n"], ["a\n", "c\n"]) == (2, ("(ended)", "c"))


def test_a_missing_interpreter_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *SMALL, "--python", "/nowhere/python"]) == 254
    assert capsys.readouterr().err == "harness: --python /nowhere/python: there is no such interpreter\n"


@pytest.mark.parametrize("program", ["/bin/false", "/bin/true"])
def test_an_interpreter_that_cannot_run_the_harness_is_reported_in_one_line(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", *SMALL, "--seeds", "1", "--python", program]) == 254
    assert capsys.readouterr().err == (
        f"harness: --python {program} cannot run the harness: name an interpreter that has splitbrain installed\n"
    )


def test_an_interpreter_without_the_harness_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    assert main(["audit", *SMALL, "--seeds", "1", "--python", str(bare)]) == 254
    assert "ModuleNotFoundError: No module named 'harness'" in " ".join(capsys.readouterr().err.split())


def test_a_divergence_by_chance_is_reported_without_the_stacks_of_other_events(tmp_path: Path) -> None:
    by_chance = DEPENDS_ON_THE_HASH_SEED.replace("random.Random(hash(name))", "random.SystemRandom()")
    (tmp_path / "sitecustomize.py").write_text(by_chance)
    done = subprocess.run(
        [sys.executable, "-m", "harness", "audit", "--seeds", "1", "--seed", "77", *SMALL],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    assert "no stacks: repeated, the two runs do not diverge at these events" in done.stdout
    assert "stack of both runs" not in done.stdout and "stack of the first run" not in done.stdout
