"""Where `harness report` writes: one at a time, and one line if it cannot. No Java is started."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")
pytestmark = [pytest.mark.spark]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """`harness report` with these arguments, whose Spark does not start."""
    from harness.cli import main
    from harness.commands import report as module
    from spark_analysis.errors import AnalysisError

    def session(_: Any) -> Any:
        raise AnalysisError("Spark did not start")

    monkeypatch.setattr(module, "spark_session", session)
    return lambda *words: main(["report", str(tmp_path), *map(str, words)])


@contextlib.contextmanager
def being_written(folder: Path) -> Iterator[None]:
    """Locked as by another report."""
    folder.mkdir(parents=True)
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
    os.close(descriptor)


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("busy", ["out", "few"])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_two_reports_do_not_write_to_one_directory(
    report: Callable[..., int], tmp_path: Path, busy: str, scheme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--out", f"{scheme}{tmp_path / 'out'}", "--compact", f"{scheme}{tmp_path / 'few'}")
    with being_written(tmp_path / busy):
        assert report(*words) == 254
        said = (
            f"another report is being written to {tmp_path / busy}: wait for it, or write this one to another directory"
        )
        assert last_line(capsys) == f"harness: {said}"
    assert report(*words) == 254
    assert last_line(capsys) == "harness: Spark did not start"


def test_out_and_compact_may_be_the_same_directory(
    report: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report("--out", tmp_path / "out", "--compact", tmp_path / "out") == 254
    assert last_line(capsys) == "harness: Spark did not start"


def test_an_empty_directory_that_the_report_created_is_removed(report: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "older").mkdir()
    for name in ("older", "newer"):
        assert report("--out", tmp_path / name) == 254
    assert [path.name for path in tmp_path.iterdir()] == ["older"]


def test_an_output_path_that_is_a_file_is_reported_in_one_line(
    report: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert report("--out", tmp_path / "file") == 254
    assert last_line(capsys) == f"harness: cannot write {tmp_path / 'file'}: File exists"


def test_other_file_systems_are_not_locked(
    report: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert report("--out", "hdfs://nobody/out") == 254
    assert last_line(capsys) == "harness: Spark did not start"
    assert list(tmp_path.iterdir()) == []
