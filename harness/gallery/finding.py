"""A known finding as data: the run that shows it, the run beside it that must be valid, and what a run came to.

A run is written down as the options of `harness run`, so that what is kept here is what anybody types to repeat it.
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
"""What a run came to that shows what is known; else it is "valid", "invalid" (for another reason) or "unknown"."""

LEAST_FOUND = 0.8
"""Part of the runs that must show a finding: faults meet a program at moments that nobody chooses. A control must be
valid in all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One known bug, or weakness that is documented, of one version of a system."""

    name: str
    title: str
    """What goes wrong, as one sentence without its point."""
    version: str
    """The system as people call it, with its version."""
    options: str
    """Options of `harness run` for both runs: system, workload, nemesis, nodes, time limit, settings."""
    finding: str = ""
    """Options beside those, for the run that must be invalid."""
    control: str = ""
    """Options beside those, for the run that must be valid."""
    control_says: str
    """Why the control must be valid: the setting that makes the difference, in words."""
    check: str
    """The check that finds it."""
    names: tuple[str, ...]
    """What that check names, one of these at least: kinds of anomalies that it counts, or words of its reason."""
    promised: str
    """What the system's documentation promises, or says of this."""
    reported: str
    """Who reported it first, and when."""
    link: str

    def words(self, side: str) -> list[str]:
        """Options of `harness run` for the finding's or the control's run, as words."""
        return shlex.split(f"{self.options} {self.finding if side == 'finding' else self.control}")

    def line(self, side: str) -> str:
        """The command that repeats a run of it, but for its seed."""
        return shlex.join(["harness", "run", *self.words(side)])


def outcome_of(finding: Finding, results: Mapping[str, Any]) -> str:
    """What results.json came to, held against what is known: `FOUND`, "valid", "invalid" or "unknown"."""
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
    """Whether runs came to what is expected, from how often each outcome was had. Without any run nothing is met."""
    runs = sum(outcomes.values())
    if side == "control":
        return runs > 0 and outcomes.get("valid", 0) == runs
    return runs > 0 and outcomes.get(FOUND, 0) >= LEAST_FOUND * runs
