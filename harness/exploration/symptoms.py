"""Symptoms of a failure in a simulated run: failed checks, by the rules that were broken, and stuck replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["STUCK", "failures_of", "is_stuck", "stuck_reason"]

STUCK = "stuck"
"""The symptom of replicas that do not come back, or do not converge, after everything was healed."""


def failures_of(results: Mapping[str, Any]) -> tuple[str, ...]:
    """The checks that found a violation; a check with rules, such as `invariants`, once for each broken rule. Results
    may come from a damaged file: malformed entries are ignored."""
    failures: dict[str, None] = {}
    checks = results.get("checks")
    for name, check in checks.items() if isinstance(checks, Mapping) else ():
        if isinstance(check, Mapping) and check.get("valid") is False:
            violations = check.get("violations")
            rules = [
                f"{name}: {violation['rule']}"
                for violation in (violations if isinstance(violations, Sequence) else ())
                if isinstance(violation, Mapping) and "rule" in violation
            ]
            failures |= dict.fromkeys(rules or [name])
    return tuple(failures)


def is_stuck(results: Mapping[str, Any]) -> bool:
    """Whether a run has the symptom `STUCK`: its replicas could not be compared."""
    return stuck_reason(results) is not None


def stuck_reason(results: Mapping[str, Any]) -> str | None:
    """Why the replicas could not be compared; None if they could."""
    checks = results.get("checks")
    check = checks.get("replicas") if isinstance(checks, Mapping) else None
    if not isinstance(check, Mapping) or check.get("valid") != "unknown":
        return None
    return str(check.get("reason", ""))
