"""Suggests the word that a mistyped one may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint: "; did you mean 'x'?", or "" if no known word is near."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.55)
    return f"; did you mean {matches[0]!r}?" if matches else ""
