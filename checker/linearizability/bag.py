"""Unordered queues whose puts all carry different values: near-linear.

Values do not order each other, so only three things can be wrong: a value came out that was not there, or twice, or a
take found nothing while at every instant some value was surely inside.  A crashed take may have taken any value:
that can only matter beside a take that found nothing, and is then settled only where every possibility agrees.
"""

from __future__ import annotations

from collections.abc import Sequence

from checker.history import History
from checker.linearizability.fifo import Flows, covered_empty, gather
from checker.linearizability.outcome import NotApplicable, Undecidable, Violation
from checker.models.collections import UnorderedQueue

__all__ = ["check_bag"]


def check_bag(history: History, rows: Sequence[int], model: UnorderedQueue) -> Violation | None:
    """A violation, or ``None`` for a linearizable history of an :class:`UnorderedQueue`.

    Raises :class:`NotApplicable` for equal values, :class:`Undecidable` where crashed takes leave it open.
    """
    try:
        flows = gather(history, rows)
    except TypeError as error:
        raise NotApplicable(f"a value is not hashable ({error})") from error
    if isinstance(flows, Violation):
        return flows
    if not flows.empties:
        return None
    if flows.crashed_takes:
        certain = Flows()
        certain.out, certain.empties = flows.out, flows.empties
        certain.into = {value: put for value, put in flows.into.items() if value in flows.out}
        violation = covered_empty(history, certain)
        if violation is None and covered_empty(history, flows) is not None:
            raise Undecidable("takes of unknown outcome may or may not have emptied the queue")
        return violation
    return covered_empty(history, flows)
