"""Numbers in the sentences that people read."""

from __future__ import annotations

__all__ = ["plural"]


def plural(number: int, noun: str) -> str:
    """(1, "fault") -> "1 fault"; (12345, "operation") -> "12,345 operations"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
