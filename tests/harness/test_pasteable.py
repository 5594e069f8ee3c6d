"""Printed paths and commands can be pasted into the user's shell."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import pasteable as module
from harness.cli_parser import build_parser
from harness.commands.report import require_spark
from harness.commands.run import test_from as made_of
from harness.errors import OperatorError
from harness.pasteable import harness_command, pasteable, python_command
from harness.test import NemesisChoice, Test

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..")
)


@given(st.lists(NAMES, min_size=1, max_size=4), st.booleans())
def test_a_shell_parses_a_printed_path_back_to_the_same_path(names: list[str], is_inside: bool) -> None:
    path = os.path.join(os.getcwd() if is_inside else "/nowhere", *names)
    (word,) = shlex.split(pasteable(path))
    assert os.path.normpath(os.path.join(os.getcwd(), word)) == os.path.normpath(path)
    assert "/" in word, "a shell would look a name without a slash up in PATH"


def test_the_harness_command_depends_on_path_and_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = tmp_path / ".venv" / "bin"
    venv.mkdir(parents=True)
    for name in ("python", "harness"):
        (venv / name).write_text("#!/bin/sh\n")
        (venv / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(venv / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert (harness_command(), python_command()) == (".venv/bin/harness", ".venv/bin/python")
    monkeypatch.chdir("/")
    assert harness_command() == str(venv / "harness")
    monkeypatch.setenv("PATH", f"{venv}:/usr/bin:/bin")
    assert (harness_command(), python_command()) == ("harness", "python")
    (venv / "harness").unlink()
    assert harness_command() == "python -m harness"


def test_the_line_that_repeats_a_run_can_be_pasted(tmp_path: Path) -> None:
    """The run was started by the path of a harness that is not in PATH."""
    script = os.path.join(os.path.dirname(sys.executable), "harness")
    assert os.path.exists(script), "the harness is installed where these tests run"
    words = ["run", "--cluster", "sim", "--time-limit", "2", "--seed", "1"]
    environment = {**os.environ, "PATH": "/usr/bin:/bin"}
    done = subprocess.run([script, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("repeat ")]
    command = line.removeprefix("repeat").strip()
    assert command.startswith(f"{script} run ")
    again = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == again.returncode == 0, again.stderr


@given(
    numbers=st.lists(st.floats(1e-9, 604_800, exclude_min=True), min_size=5, max_size=5),
    memory_mb=st.integers(16, 10**9),
    setting=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12).map(str.strip),
)
def test_the_line_that_repeats_a_run_reproduces_every_option(
    numbers: list[float], memory_mb: int, setting: str
) -> None:
    """To the last digit: simulated runs with rates of 33.3333 and 33.3333333 differ."""
    test = Test(
        system="broker", cluster="sim", nodes=3, workload="log", nemesis=(NemesisChoice("partition", "n1+n2|n3"),),
        nemesis_interval_s=numbers[0], time_limit_s=numbers[1], concurrency=3, rate=numbers[2], seed=7,
        settings={"read_mode": setting}, operation_timeout_s=numbers[3], checker_timeout_s=numbers[4],
        checker_memory_mb=memory_mb, fail_fast=True,
    )  # fmt: skip
    assert made_of(build_parser().parse_args(shlex.split(test.replay_line())[1:])) == test


def test_the_hint_for_spark_installs_into_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("pyspark", "pandas") else object())
    with pytest.raises(OperatorError) as caught:
        require_spark()
    command = str(caught.value).partition(": ")[2]
    assert shlex.split(command) == [*shlex.split(module.python_command()), "-m", "pip", "install", "splitbrain[spark]"]
