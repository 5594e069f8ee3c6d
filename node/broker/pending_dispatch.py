"""Batches that this node has appended and that are not yet committed: what the dispatcher need not read again.

The dispatcher carries committed entries into the queues. Of those that this very node has appended everything that the
queues want is known already, and is packed while the message is at hand. It counts once the log has committed these
very entries, by index and term; whatever is not known so is read from the log.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from node.broker.dispatch_batch import DispatchBatch

__all__ = ["PendingBatch", "PendingDispatch"]

MAX_BATCHES = 20_000
"""Batches that wait for their commitment; what is beyond them is read from the log."""
PORTION_MESSAGES = 1024
"""Messages after which no more batches are taken at once: a millisecond or two of work."""


class PendingBatch(NamedTuple):
    """A batch, and the entries of the log that hold it, without anything between them."""

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
        """The log was cut, or is another one now."""
        self._batches.clear()

    def ends_before(self, index: int, last: int) -> int:
        """The last entry, up to `last`, that is to be read from the log where entry `index` is: what is known here
        behind it need not be."""
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
