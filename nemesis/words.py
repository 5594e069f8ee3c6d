"""Counts and clock offsets as text."""

from __future__ import annotations

__all__ = ["offset", "plural", "plural_with"]

_UNITS_MS = {"days": 86_400_000, "h": 3_600_000, "s": 1000}


def plural(number: int, noun: str) -> str:
    """(1, "fault") -> "1 fault"; (12345, "operation") -> "12,345 operations"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def plural_with(number: int, noun: str, verbs: tuple[str, str]) -> str:
    """(1, "link", ("passes", "pass")) -> "1 link passes"; (2, ...) -> "2 links pass"."""
    return f"{plural(number, noun)} {verbs[number != 1]}"


def offset(ms: int) -> str:
    """4202 -> "4202 ms"; -5032145 -> "-5,032.1 s"; 7_400_000 -> "2.1 h"; -819936000000 -> "-9,490.0 days"."""
    for unit, of_unit_ms in _UNITS_MS.items():
        if abs(ms) >= max(2 * of_unit_ms, 10_000):
            return f"{ms / of_unit_ms:,.1f} {unit}"
    return f"{ms} ms"
