"""Reduction of a set of items to a small subset with the same property (delta debugging)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

__all__ = ["smallest"]

T = TypeVar("T")


def smallest(
    items: Sequence[T], is_enough: Callable[[list[T]], bool], is_over: Callable[[], Any] = lambda: None
) -> list[T]:
    """A small subset of ``items`` that ``is_enough``, as all items together are; no single item of it can be left out.

    Tries to leave out large chunks first, then single items, until ``is_over``.
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
