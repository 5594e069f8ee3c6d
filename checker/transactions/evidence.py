"""Which transactions besides those of a cycle show that its edges exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from checker.reducing import smallest
from checker.transactions.anomalies import Transactions

__all__ = ["evidence_for"]

#: Most readers considered for each key of a cycle.
MAX_PER_KEY = 100


def evidence_for(
    transactions: Transactions, rows: Sequence[int], is_wrong: Callable[[Sequence[int]], bool]
) -> tuple[int, ...] | None:
    """A few further rows with which ``rows`` are wrong on their own: none if they already are, ``None`` if not found.

    An order of versions may be known only from another transaction's read, and so may an outcome.
    """
    if is_wrong(rows):
        return ()
    kept = _candidates(transactions, rows)
    if not kept or not is_wrong([*rows, *kept]):
        return None
    return tuple(smallest(kept, lambda fewer: is_wrong([*rows, *fewer])))


def _candidates(transactions: Transactions, rows: Sequence[int]) -> list[int]:
    """For every key, a reader of the longest list, and readers of what ``rows`` wrote."""
    wrote = {(key, value) for row in rows for f, key, value in transactions.steps[row] if f == "w"}
    keys = {key for row in rows for _, key, _ in transactions.steps[row]}
    longest: dict[Any, tuple[int, int]] = {}
    readers: dict[Any, list[int]] = {}
    for row in transactions.committed:
        for f, key, value in transactions.steps[row]:
            if f != "r" or key not in keys:
                continue
            if isinstance(value, (list, tuple)):
                if len(value) > longest.get(key, (0, -1))[0]:
                    longest[key] = len(value), row
            elif (key, value) in wrote:
                readers.setdefault(key, []).append(row)
    found = [row for _, row in longest.values()]
    for some in readers.values():
        found += islice(some, MAX_PER_KEY)
    return [row for row in dict.fromkeys(found) if row not in set(rows)]
