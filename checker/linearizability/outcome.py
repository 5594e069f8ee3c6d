"""What a special-case engine answers: nothing wrong, a violation with its rows, or "not my kind of history"."""

from __future__ import annotations

from dataclasses import dataclass

from checker.verdict import Edge

__all__ = ["NotApplicable", "Violation"]


class NotApplicable(Exception):
    """The engine does not apply to this history; the text says why, for ``stats``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """Rows that contradict each other, the sentence that says how, and the reasons as edges between those rows.

    ``minimal`` is false where the rows are only an upper bound that the explanation should still cut down; ``named``
    are those that the sentence is about, where they are not all of them.
    """

    rows: tuple[int, ...]
    text: str
    edges: tuple[Edge, ...] = ()
    minimal: bool = True
    note: str = ""
    named: tuple[int, ...] = ()
