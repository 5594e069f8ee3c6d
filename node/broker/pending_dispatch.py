"""Batches that this node has appended and that are not yet committed: the dispatcher need not read them again.

The dispatcher adds committed entries to the queues. For entries that this node itself has appended, everything that the
queues need is known already, and is packed while the message is at hand. It is used once the log has committed exactly
these entries, by index and term; everything else is read from the log.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from node.broker.dispatch_batch import DispatchBatch

__all__ = ["PendingBatch", "PendingDispatch"]

MAX_BATCHES = 20_000
"""Batches that wait to be committed; what is beyond them is read from the log."""
PORTION_MESSAGES = 1024
"""Messages after which no more batches are taken at once: a millisecond or two of work."""


class PendingBatch(NamedTuple):
    """A batch, and the range of log entries that holds it and nothing else."""

    first_index: int
    last_index: int
    term: int
    batch: DispatchBatch


class PendingDispatch:
    """Batches in the order of the log."""

    def __init__(self) -> None:
        self._batches: deque[PendingBatch] = deque()

    def __bool__(self) -> bool:
        return bool(self._batches)

    def add(self, batch: PendingBatch) -> None:
        """A batch was appended here."""
        if len(self._batches) < MAX_BATCHES:
            self._batches.append(batch)

    def clear(self) -> None:
        """The log was truncated or replaced."""
        self._batches.clear()

    def ends_before(self, index: int, last: int) -> int:
        """The last entry, up to `last`, to read from the log together with entry `index`: the batches after it are
        known here and need not be read."""
        batches = self._batches
        return min(last, batches[0].first_index - 1) if batches and batches[0].first_index > index else last

    def take(self, after: int, last: int) -> list[PendingBatch]:
        """The batches of one term that follow the entry `after` without a gap and end no later than entry `last`."""
        batches = self._batches
        while batches and batches[0].first_index <= after:
            batches.popleft()
        taken: list[PendingBatch] = []
        index, count = after, 0
        while batches and count < PORTION_MESSAGES:
            each = batches[0]
            if each.first_index != index + 1 or each.last_index > last or (taken and each.term != taken[0].term):
                break
            taken.append(batches.popleft())
            index = each.last_index
            count += each.batch.count
        return taken
