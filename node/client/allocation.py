"""Which member of a consumer group reads which queues: each computes it alone, from the same two sorted lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from node.client.messages import MessageQueue

__all__ = ["AllocationStrategy", "allocate_averagely", "allocate_in_circle"]

AllocationStrategy = Callable[[str, Sequence[MessageQueue], Sequence[str]], list[MessageQueue]]
"""(own id, sorted queues, sorted ids of all members) -> own queues. All members of a group must use the same."""


def allocate_averagely(own_id: str, queues: Sequence[MessageQueue], members: Sequence[str]) -> list[MessageQueue]:
    """A run of adjacent queues; the first members get one more if the queues do not divide evenly (R: AVG)."""
    if own_id not in members:
        return []
    index, count = members.index(own_id), len(members)
    share, extra = divmod(len(queues), count)
    start = index * share + min(index, extra)
    return list(queues[start : start + share + (index < extra)])


def allocate_in_circle(own_id: str, queues: Sequence[MessageQueue], members: Sequence[str]) -> list[MessageQueue]:
    """Every n-th queue, as cards are dealt (R: AVG_BY_CIRCLE)."""
    if own_id not in members:
        return []
    return list(queues[members.index(own_id) :: len(members)])
