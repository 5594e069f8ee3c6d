"""What a model of a protocol is: plain Python with ``init`` and ``next``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from checker.models.base import shortened
from checker.trace.events import Event

__all__ = ["TraceModel"]


class TraceModel:
    """A protocol as a state machine over the events that its replicas log.

    A subclass defines ``init`` and ``next``.  States are values: hashable, and never changed in place.  What the
    replicas do without logging it goes into ``hidden``.  The other methods make the search smaller or its explanation
    better; without them both are right.
    """

    name = "model"

    def init(self, nodes: Sequence[str]) -> Iterable[Hashable]:
        """The states before the first event; ``nodes`` are the replicas of the traces, sorted."""
        raise TypeError(f"model {self.name} has no init")

    def next(self, state: Any, event: Event) -> Iterable[Hashable]:
        """The states in which ``event`` may have left the system if it happened in ``state``.  None at all: it cannot
        have happened there."""
        raise TypeError(f"model {self.name} has no next")

    def hidden(self, state: Any) -> Iterable[Hashable]:
        """The states that one step which nobody logs leads to."""
        return ()

    def commutes(self, event: Event) -> bool:
        """Whether it does no harm to take this event as soon as it is possible: whatever explains the rest of the
        traces without it explains them after it too.  The search then does not try anything else first.  True for
        events that only add to what is known."""
        return False

    def never(self, state: Any, event: Event) -> bool:
        """Whether ``event``, which is impossible in ``state``, stays so whatever other replicas do next."""
        return False

    def why(self, state: Any, event: Event) -> str:
        """Why ``event`` is impossible in ``state``, as a clause."""
        return "the model allows no such step here"

    def describe(self, state: Any) -> str:
        """A state in words, in one line or several."""
        return shortened(state, 400)
