"""How many there are of something, in words."""

from __future__ import annotations

__all__ = ["plural", "plural_with"]


def plural(number: int, noun: str) -> str:
    """(1, "fault") -> "1 fault"; (12345, "operation") -> "12,345 operations"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def plural_with(number: int, noun: str, verbs: tuple[str, str]) -> str:
    """(1, "link", ("passes", "pass")) -> "1 link passes"; (2, ...) -> "2 links pass"."""
    return f"{plural(number, noun)} {verbs[number != 1]}"
