"""`make demo`: a valid run, an invalid one, links to both reports, and commands to try next."""

from __future__ import annotations

import runpy
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest

from harness.cli import build_parser
from harness.pasteable import harness_command

ROOT = Path(__file__).resolve().parents[2]
DEMO: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "demo.py"))


class FakeHarness:
    """Stands in for the harness: each call leaves a run and returns the next of the given statuses."""

    def __init__(self, store: Path, statuses: Sequence[int]) -> None:
        self.store = store
        self.statuses = list(statuses)
        self.asked: list[Sequence[str]] = []

    def __call__(self, arguments: Sequence[str]) -> int:
        self.asked.append(arguments)
        run_dir = self.store / f"run {len(self.asked)}"
        run_dir.mkdir(parents=True)
        (run_dir / "report.html").write_text("a report")
        (self.store / "latest").unlink(missing_ok=True)
        (self.store / "latest").symlink_to(run_dir.name)
        return self.statuses[len(self.asked) - 1]


def test_both_reports_can_be_opened_and_the_next_commands_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harness = FakeHarness(tmp_path / "store", [0, 1])
    assert DEMO["main"](harness, tmp_path / "store") == 0
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    links = [line.split()[0] for line in printed if line.startswith("file://")]
    assert [Path(unquote(urlparse(link).path)).read_text() for link in links] == ["a report"] * 2
    assert len(set(links)) == 2
    commands = [line for line in printed if line.startswith(f"{harness_command()} ")]
    assert len(commands) == 3
    for command in commands:
        words = shlex.split(command, comments=True)[len(shlex.split(harness_command())) :]
        assert build_parser().parse_args(words).command == words[0]


@pytest.mark.parametrize(("statuses", "status"), [([1], 1), ([2], 2), ([255], 255), ([0, 0], 2), ([0, 2], 2)])
def test_an_unexpected_status_ends_the_demo_with_an_explanation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], statuses: list[int], status: int
) -> None:
    harness = FakeHarness(tmp_path / "store", statuses)
    assert DEMO["main"](harness, tmp_path / "store") == status
    printed = capsys.readouterr().out
    assert len(harness.asked) == len(statuses)
    assert "file://" not in printed and "Both verdicts" not in printed
    said = "The run could not be made" if status == 255 else "act was to be"
    assert said in printed


def test_each_act_is_a_valid_run_command() -> None:
    for act in DEMO["ACTS"]:
        assert build_parser().parse_args(list(act.arguments)).command == "run"


@pytest.mark.cluster
@pytest.mark.serial
def test_the_second_act_is_found_invalid(tmp_path: Path) -> None:
    act = DEMO["ACTS"][1]
    done = subprocess.run(
        [sys.executable, "-m", "harness", *act.arguments], cwd=tmp_path, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == act.status == 1, done.stderr
    assert (tmp_path / "store" / "latest" / "report.html").stat().st_size > 0
