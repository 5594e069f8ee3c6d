"""The outcome of a check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CheckOutcome"]


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The outcome of a check: `valid` is True, False or "unknown"."""

    valid: bool | str
    reason: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"valid": self.valid, "reason": self.reason, **self.details}
