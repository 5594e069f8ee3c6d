"""The command line: what it refuses, in one line, with exit status 254 and without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.clusters.ssh_connection import require_paramiko
from harness.commands.report import require_spark
from harness.errors import OperatorError, how_to_get

ROOT = Path(__file__).resolve().parents[2]


def harness(*words: str, cwd: Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "harness", *words],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "--workload", "registr"], "unknown workload 'registr' (did you mean register?)"),
        (["run", "--system", "brokr"], "unknown system 'brokr' (did you mean broker?)"),
        (["run", "--cluster", "lokal"], "unknown cluster 'lokal' (did you mean local?)"),
        (["run", "--nemesis", "partitoin"], "unknown nemesis 'partitoin' (did you mean partition?)"),
        (["run", "--nemesis", "partition=halfs"], "has no variant 'halfs' (did you mean halves?)"),
        (["run", "--nemesis", "partition,partition"], "given twice"),
        (["run", "--nodes", "0"], "--nodes must be 1 to"),
        (["run", "--nodes", "many"], "--nodes"),
        (["run", "--nodes", "2", "--cluster", "local", "--nemesis", "partition=majorities-ring"], "majorities-ring"),
        (["run", "--time-limit", "0"], "--time-limit must be above 0"),
        (["run", "--time-limit", "nan"], "--time-limit must be above 0"),
        (["run", "--concurrency", "-3"], "--concurrency must be 1 to"),
        (["run", "--rate", "-1"], "--rate must be 0"),
        (["run", "--seed", "x"], "--seed"),
        (["run", "--seed", "-1"], "--seed"),
        (["run", "--set", "read_mode"], "KEY=VALUE"),
        (["run", "--set", "read_mod=lease"], "unknown setting 'read_mod' (did you mean read_mode?)"),
        (["run", "--set", "read_mode=fast"], "read_mode must be one of"),
        (["run", "--set", "flush_interval_ms=0"], "flush_interval_ms must be a whole number from 1 to 3600000"),
        (["run", "--set", "flush_least_pages=few"], "flush_least_pages must be a whole number from 0"),
        (["run", "--set", "timing=fast", "--set", "timing=default"], "given twice"),
        (["run", "--cluster", "local", "--nemesis", "partition", "--nemesis-interval", "90"], "--nemesis-interval"),
        (["run", "--frobnicate"], "--frobnicate"),
        (["frobnicate"], "frobnicate"),
        ([], "COMMAND"),
        (["analyze", "nowhere/at-all"], "no store"),
        (["analyze", "latest"], "store"),
        (["clean", "--run", "../../etc"], "run id"),
    ],
)
def test_bad_arguments(words: list[str], expected: str, tmp_path: Path) -> None:
    done = harness(*words, cwd=tmp_path)
    assert done.returncode == 254, done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == [], "a refused command leaves nothing behind"


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file stands in the way")
    done = harness("run", "--cluster", "local", "--time-limit", "1", cwd=tmp_path)
    assert done.returncode == 254
    assert "store" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["--version"]])
def test_help_goes_to_standard_output(words: list[str], tmp_path: Path) -> None:
    done = harness(*words, cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout and not done.stderr


def test_list_names_what_can_be_chosen(tmp_path: Path) -> None:
    done = harness("list", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("register", "log", "partition", "broker", "local", "netns"):
        assert name in done.stdout


def test_cleaning_a_run_that_left_nothing_says_so(tmp_path: Path) -> None:
    result = harness("clean", "--run", "20200101T000000-nobody", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "nothing of run 20200101T000000-nobody is on this machine" in result.stdout


def test_what_pypy_has_not_says_which_python_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert how_to_get("pyarrow") in ("pip install pyarrow", "use CPython, for pypy there are no wheels")
    monkeypatch.setattr(sys.implementation, "name", "pypy")
    for package in ("pyarrow", "paramiko"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(OperatorError, match="this command needs pyarrow: use CPython, for pypy there are no wheels"):
        require_spark()
    with pytest.raises(OperatorError, match="package paramiko is missing: use CPython, for pypy there are no wheels"):
        require_paramiko()
