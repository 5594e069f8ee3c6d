"""A known finding as data: the run that shows it, the control that must be valid, and how runs are classified.

Runs are stored as options of `harness run`, which anybody can type to repeat them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["FOUND", "LEAST_FOUND", "SIDES", "Finding", "is_met", "outcome_of"]

SIDES = ("finding", "control")
"""The two runs of a finding."""

FOUND = "found"
"""Outcome of a run that shows the known finding; the others are "valid", "invalid" (another reason) and "unknown"."""

LEAST_FOUND = 0.8
"""Share of the runs that must show a finding, since nobody controls at which moment a fault hits a program. A control
must be valid in all runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One known bug or documented weakness of one version of a system."""

    name: str
    title: str
    """What goes wrong, as one sentence without a full stop."""
    version: str
    """The system's usual name and its version."""
    options: str
    """Options of `harness run` for both runs: system, workload, nemesis, nodes, time limit, settings."""
    finding: str = ""
    """Further options for the run that must be invalid."""
    control: str = ""
    """Further options for the run that must be valid."""
    control_says: str
    """Why the control must be valid: the setting that makes the difference, as text."""
    check: str
    """The check that finds it."""
    names: tuple[str, ...]
    """At least one of these must occur in the check's results: kinds of anomalies, or parts of its reason (also as it
    was worded when the kept results were made)."""
    promised: str
    """What the system's documentation promises or says about this."""
    reported: str
    """Who reported it first, and when."""
    link: str

    def words(self, side: str) -> list[str]:
        """Options of `harness run` for the finding's or the control's run, as a list of arguments."""
        return shlex.split(f"{self.options} {self.finding if side == 'finding' else self.control}")

    def line(self, side: str) -> str:
        """The command that repeats a run, without its seed."""
        return shlex.join(["harness", "run", *self.words(side)])


def outcome_of(finding: Finding, results: Mapping[str, Any]) -> str:
    """The outcome of a run by its results.json: `FOUND`, "valid", "invalid" or "unknown"."""
    if results["valid"] is not False:
        return "valid" if results["valid"] is True else "unknown"
    check = results["checks"].get(finding.check)
    is_found = check is not None and check["valid"] is False and any(_names(check, name) for name in finding.names)
    return FOUND if is_found else "invalid"


def _names(check: Mapping[str, Any], what: str) -> bool:
    counts = check.get("stats", {}).get("counts")
    if isinstance(counts, Mapping) and what in counts:
        return bool(counts[what])
    return what in str(check.get("reason", ""))


def is_met(side: str, outcomes: Mapping[str, int]) -> bool:
    """Whether the runs of a side are as expected, from the number of runs by outcome. False without runs."""
    runs = sum(outcomes.values())
    if side == "control":
        return runs > 0 and outcomes.get("valid", 0) == runs
    return runs > 0 and outcomes.get(FOUND, 0) >= LEAST_FOUND * runs
