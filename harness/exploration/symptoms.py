"""What shows beside failed checks that something is wrong in a simulated run: replicas that are stuck."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["STUCK", "is_stuck", "stuck_reason"]

STUCK = "stuck"
"""The symptom of replicas that do not come back, or do not become equal, after everything was healed."""


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
