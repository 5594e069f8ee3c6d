"""Runs in Markdown, as the summary of a step in a GitHub workflow."""

from __future__ import annotations

from collections.abc import Sequence

from harness.errors import OperatorError
from harness.report.junit import Case

__all__ = ["append_summary", "require_summary_path", "summary"]

_MARKS = {"valid": "✅", "invalid": "❌", "unknown": "❔", "did-not-run": "⚠️"}
MAX_REASON_CHARS = 500


def summary(cases: Sequence[Case]) -> str:
    """A table of runs, followed by the command that repeats each one that is not valid."""
    lines = ["| run | verdict | why | seed |", "|---|---|---|---|"]
    for case in cases:
        words = (case.name, f"{_MARKS[case.verdict]} {case.verdict}", case.reason, case.properties.get("seed", ""))
        lines.append(f"| {' | '.join(map(_cell, words))} |")
    for case in cases:
        if case.verdict != "valid" and "repeat" in case.properties:
            lines += ["", f"Repeat {_cell(case.name)}:", "", f"    {case.properties['repeat']}"]
    return "\n".join(lines) + "\n"


def require_summary_path(path: str) -> None:
    """Raise OperatorError if the file cannot be appended to; creates it if it does not exist."""
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise OperatorError(f"--step-summary {path!r}: {error.strerror}") from None


def append_summary(path: str, cases: Sequence[Case]) -> None:
    """Append to the file that `GITHUB_STEP_SUMMARY` names. Raises OperatorError."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(summary(cases))
    except OSError as error:
        raise OperatorError(f"--step-summary {path}: {error.strerror}") from None


def _cell(text: str) -> str:
    flat = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return flat if len(flat) <= MAX_REASON_CHARS else f"{flat[:MAX_REASON_CHARS]}..."
