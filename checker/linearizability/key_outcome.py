"""What was found for one key: its verdict, and what an explanation of a violation goes on from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from checker.history import History
from checker.linearizability.general import Search
from checker.linearizability.outcome import Violation
from checker.verdict import Verdict

__all__ = ["KeyOutcome", "Special"]

Special = Callable[[History, Sequence[int], Any], Violation | None]
"""A near-linear engine of one model."""


@dataclass(kw_only=True, slots=True)
class KeyOutcome:
    """What was found for one key."""

    key: Any
    rows: Sequence[int]
    verdict: Verdict
    engine: str
    skipped: dict[str, str] = field(default_factory=dict)
    violation: Violation | None = None
    search: Search | None = None
    expected_bytes: int = 0
    """What preparing all of the search would take at most."""
    special: Special | None = None
    reached: int | None = None
    """The row that the search could not pass when it was looked at last."""
    tried: int | None = None
    """The same, when it was asked whether what led up to it contradicts itself."""
    reason: str = ""
    steps: int = 0
