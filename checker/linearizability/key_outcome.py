"""The outcome for one key: its verdict, and the starting point for an explanation of a violation."""

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
    """The outcome for one key."""

    key: Any
    rows: Sequence[int]
    verdict: Verdict
    engine: str
    skipped: dict[str, str] = field(default_factory=dict)
    violation: Violation | None = None
    search: Search | None = None
    expected_bytes: int = 0
    """Upper bound on the memory for preparing the whole search."""
    special: Special | None = None
    reached: int | None = None
    """The row that the search could not pass after the previous round."""
    tried: int | None = None
    """The row for which a contradiction among the operations before it was last looked for."""
    reason: str = ""
    steps: int = 0
