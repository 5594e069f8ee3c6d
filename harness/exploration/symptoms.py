"""What shows that something is wrong in a simulated run: failed checks, by the rules that were broken, and replicas
that are stuck."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["STUCK", "failures_of", "is_stuck", "stuck_reason"]

STUCK = "stuck"
"""The symptom of replicas that do not come back, or do not become equal, after everything was healed."""


def failures_of(results: Mapping[str, Any]) -> tuple[str, ...]:
    """The checks that found a violation; one that has rules, as `invariants` has, once for each that was broken. The
    results may be of a file that is damaged: what is no check there is none."""
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
    """Whether a run's results have that symptom: then nobody could compare the replicas."""
    return stuck_reason(results) is not None


def stuck_reason(results: Mapping[str, Any]) -> str | None:
    """What keeps the replicas apart; None where nothing does."""
    checks = results.get("checks")
    check = checks.get("replicas") if isinstance(checks, Mapping) else None
    if not isinstance(check, Mapping) or check.get("valid") != "unknown":
        return None
    return str(check.get("reason", ""))
