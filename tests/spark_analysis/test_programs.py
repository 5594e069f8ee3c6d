"""A program that Spark's Python worker starts: its interpreter, and what is reported if it cannot run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from spark_analysis.errors import AnalysisError
from spark_analysis.programs import Program, _interpreter, ask

pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (Program(module="checker", python="/nowhere/python"), "there is no such interpreter on"),
        (Program(module="checker", python="/bin/true"), "is Python 0.0, but 3.11 or later is needed"),
        (Program(module="spark_analysis.no_such_module"), "ended with status 1: .*no_such_module"),
    ],
)
def test_a_program_that_cannot_answer_is_reported_in_one_line(spark: Any, program: Program, words: str) -> None:
    with pytest.raises(AnalysisError, match=words) as found:
        ask(spark, program, [1], budget_s=60.0)
    assert "\n" not in str(found.value) and "Traceback" not in str(found.value)


def stand_in(directory: Path, version: str) -> str:
    """An interpreter that prints that version, and nothing else."""
    path = directory / "pypy3"
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("version", "is_taken"), [("3 11", True), ("3 9", False), ("", False)])
def test_pypy_is_used_if_it_is_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, is_taken: bool
) -> None:
    faster = stand_in(tmp_path, version)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert _interpreter(Program(module="checker")) == (faster if is_taken else sys.executable)
