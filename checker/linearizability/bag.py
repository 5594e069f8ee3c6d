"""Unordered queues whose puts all put different values: near-linear.

Values do not order each other, so only three violations exist: a value came out that was not inside, or came out twice,
or a take found nothing while at every instant some value was certainly inside.  A take of unknown outcome may have
taken any value.  A take can have found nothing at an instant iff no value known to have come out is certainly inside
then, and at least as many takes of unknown outcome had been invoked as values had been put that never came out: by
Hall's theorem those takes can then be assigned so that every such instant is free.  O(n log n) time, O(n) memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from checker.history import History
from checker.linearizability.crashed_takes import never_empty
from checker.linearizability.flows import covered_empty, gather
from checker.linearizability.outcome import Violation
from checker.models.collections import UnorderedQueue

__all__ = ["check_bag"]


def check_bag(history: History, rows: Sequence[int], model: UnorderedQueue) -> Violation | None:
    """A violation, or ``None`` for a linearizable history of an :class:`UnorderedQueue`.

    Raises :class:`NotApplicable` for equal values.
    """
    flows = gather(history, rows, model)
    if isinstance(flows, Violation):
        return flows
    if not flows.crashed_takes or not flows.empties:
        return covered_empty(history, flows, model)
    return never_empty(history, rows, flows, model)
