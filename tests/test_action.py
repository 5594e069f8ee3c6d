"""The GitHub Action: its step is run as a runner would, and all that its file names exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
ACTION = (ROOT / "action.yml").read_text(encoding="utf-8")


def run_step(folder: Path, arguments: str) -> tuple[int, dict[str, str]]:
    """The exit status of the step and its outputs."""
    environment = {
        **os.environ,
        "ACTION_RUN": arguments,
        "ACTION_STORE": "runs",
        "ACTION_JUNIT": "junit.xml",
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        "GITHUB_OUTPUT": str(folder / "output"),
    }
    step = ROOT / "scripts" / "action_run.py"
    done = subprocess.run([sys.executable, step], cwd=folder, env=environment, timeout=170)
    lines = (folder / "output").read_text().splitlines()
    return done.returncode, dict(line.split("=", 1) for line in lines)


@pytest.mark.cluster
def test_a_valid_run_writes_verdict_summary_junit_file_and_report(tmp_path: Path) -> None:
    arguments = "--system toy --cluster local --nodes 2 --time-limit 1.5 --seed 3 --set 'workload.keys=4'"
    assert run_step(tmp_path, arguments) == (0, {"verdict": "valid"})
    assert "✅ valid" in (tmp_path / "summary.md").read_text()
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().get("tests") == "1"
    assert list((tmp_path / "runs").glob("*/*/report.html"))


def test_an_impossible_run_is_reported_as_did_not_run(tmp_path: Path) -> None:
    assert run_step(tmp_path, "--system toy --workload set") == (254, {"verdict": "did-not-run"})
    assert "did-not-run" in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [("--system toy --set 'a=1", "run: No closing quotation"), ("--sistem toy", "the log of this step has the reason")],
)
def test_unusable_arguments_are_reported_as_did_not_run(tmp_path: Path, arguments: str, reason: str) -> None:
    assert run_step(tmp_path, arguments) == (254, {"verdict": "did-not-run"})
    summary = (tmp_path / "summary.md").read_text()
    assert "did-not-run" in summary and reason in summary
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().get("errors") == "1"


def test_the_action_names_existing_inputs_files_and_variables() -> None:
    inputs = set(re.findall(r"^  ([a-z-]+):$", ACTION.partition("inputs:")[2].partition("\noutputs:")[0], re.MULTILINE))
    assert set(re.findall(r"\$\{\{ inputs\.([a-z-]+) \}\}", ACTION)) == inputs
    for path in re.findall(r"\$GITHUB_ACTION_PATH/([\w./]+)", ACTION):
        assert (ROOT / path).is_file()
    page = (ROOT / "docs" / "continuous-integration.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in inputs)
    step = (ROOT / "scripts" / "action_run.py").read_text(encoding="utf-8")
    for name in re.findall(r"^        (ACTION_\w+):", ACTION, re.MULTILINE):
        assert f'os.environ["{name}"]' in step
