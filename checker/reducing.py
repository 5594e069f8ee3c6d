"""Few of many that still show what all of them show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

__all__ = ["smallest"]

T = TypeVar("T")


def smallest(
    items: Sequence[T], is_enough: Callable[[list[T]], bool], is_over: Callable[[], Any] = lambda: None
) -> list[T]:
    """Few of ``items``, all of which are enough, that are enough as well: of what is left none can be left out alone.

    Large chunks are left out first, then one by one, until ``is_over``.
    """
    kept = list(items)
    chunk = max(1, len(kept) // 2)
    while chunk:
        at = 0
        while at < len(kept) and not is_over():
            fewer = kept[:at] + kept[at + chunk :]
            if is_enough(fewer):
                kept = fewer
            else:
                at += chunk
        chunk //= 2
    return kept
