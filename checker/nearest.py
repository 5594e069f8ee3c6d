"""Suggestions for mistyped words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint: `` (did you mean X?)``, or nothing if no known word begins with ``word`` or is similar.

    Leading dashes do not count: any two options would be similar.
    """
    names = {name.lstrip("-"): name for name in known}
    bare = word.lstrip("-")
    begun = [name for name in names if len(bare) > 1 and name.startswith(bare)]
    matches = begun or difflib.get_close_matches(bare, names, n=1, cutoff=0.65)
    return f" (did you mean {names[matches[0]]}?)" if matches else ""
