"""Results of a special-case engine: no violation, a violation with its rows, or that the engine does not apply."""

from __future__ import annotations

from dataclasses import dataclass

from checker.verdict import Edge

__all__ = ["NotApplicable", "Violation"]


class NotApplicable(Exception):
    """The engine does not apply to this history; the text says why, for ``stats``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """Rows that contradict each other, a sentence about how, and the reasons as edges between those rows.

    ``minimal`` is false if the rows may include unnecessary ones, which the explanation should still remove; ``named``
    are the rows that the sentence is about, if not all of them.
    """

    rows: tuple[int, ...]
    text: str
    edges: tuple[Edge, ...] = ()
    minimal: bool = True
    note: str = ""
    named: tuple[int, ...] = ()
