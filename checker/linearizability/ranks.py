"""Histories whose results fix the order: linear time.

If every operation's result determines its place in the order (an append its offset, a read the tail it saw),
operations sorted by that rank are linearizable iff no operation returned before one of strictly lower rank was
invoked.  Operations of equal rank must be valid in any order among themselves (reads of one state).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from operator import lt

__all__ = ["RankConflict", "rank_conflict"]

RankConflict = tuple[int, int]


def rank_conflict(first_return: dict[int, int], last_invoke: dict[int, int]) -> RankConflict | None:
    """Given the first return and the last invocation at every rank, a pair ``(low, high)`` out of order, or ``None``.

    An operation of rank ``high`` returned before one of the strictly lower rank ``low`` was invoked.
    """
    ranks: Iterable[int] = sorted(last_invoke)
    order = list(ranks)
    before = list(accumulate(map(last_invoke.__getitem__, order), max))
    returns = list(map(first_return.__getitem__, order))
    del returns[:1]
    if not any(map(lt, returns, before)):
        return None
    for index, returned in enumerate(returns, 1):
        if returned < before[index - 1]:
            low = next(rank for rank in order if last_invoke[rank] == before[index - 1])
            return low, order[index]
    return None
