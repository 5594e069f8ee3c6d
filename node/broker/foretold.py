"""What a master tells its dispatcher of the messages that it has just appended, so that it need not read them again.

The dispatcher carries committed entries into the queues. Of those that this very node has appended everything that the
queues want is known already, and is packed while the message is at hand. It counts once the log has committed these
very entries, by index and term; whatever is not foretold, or not as it was foretold, is read from the log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from node.store.queue_store import QueueStore
from node.store.record import RecordSummary

__all__ = ["Foretold", "ForetoldPart", "ForetoldRow", "Queue", "append_rows"]

MAX_ROWS = 20_000
"""Rows that wait for their commitment; what is beyond them is read from the log."""
PORTION_MESSAGES = 1024
"""Messages after which no more rows are taken at once: a millisecond or two of work."""

Queue = tuple[str, int]
"""Topic and queue id."""


class ForetoldPart(NamedTuple):
    """The messages of a row that are in one queue, where they follow each other."""

    queue: Queue
    queue_offset: int
    units: bytes
    """One packed unit for each message."""
    crcs: bytes


class ForetoldRow(NamedTuple):
    """Messages that follow each other in the log, without anything between them."""

    first_index: int
    last_index: int
    term: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody asks of this
    """Messages."""
    parts: Sequence[ForetoldPart]
    """One for each queue."""
    store_timestamp_ms: int
    summaries: Sequence[RecordSummary]
    """Of the messages from which more than their unit is derived."""


class Foretold:
    """Rows in the order of the log."""

    def __init__(self) -> None:
        self._rows: deque[ForetoldRow] = deque()

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: ForetoldRow) -> None:
        """A row was appended here."""
        if len(self._rows) < MAX_ROWS:
            self._rows.append(row)

    def clear(self) -> None:
        """The log was cut, or is another one now."""
        self._rows.clear()

    def ends_before(self, index: int, last: int) -> int:
        """The last entry, up to `last`, that is to be read from the log where entry `index` is: what is foretold
        behind it need not be."""
        rows = self._rows
        return min(last, rows[0].first_index - 1) if rows and rows[0].first_index > index else last

    def take(self, after: int, last: int) -> list[ForetoldRow]:
        """The rows of one term that follow the entry `after` without a gap and end no later than entry `last`."""
        rows = self._rows
        while rows and rows[0].first_index <= after:
            rows.popleft()
        taken: list[ForetoldRow] = []
        index, count = after, 0
        while rows and count < PORTION_MESSAGES:
            row = rows[0]
            if row.first_index != index + 1 or row.last_index > last or (taken and row.term != taken[0].term):
                break
            taken.append(rows.popleft())
            index = row.last_index
            count += row.count
        return taken


def append_rows(queues: QueueStore, rows: Sequence[ForetoldRow]) -> bool:
    """Append rows to their queues; to none, and False, where one does not follow on what its queue holds."""
    by_queue: dict[Queue, list[ForetoldPart]] = {}
    for row in rows:
        for part in row.parts:
            known = by_queue.get(part.queue)
            if known is None:
                by_queue[part.queue] = [part]
            else:
                known.append(part)
    for queue, of_queue in by_queue.items():
        held = queues.find(*queue)
        if held is None or held.max_offset != of_queue[0].queue_offset:
            return False
    for queue, of_queue in by_queue.items():
        units, crcs = b"".join([part.units for part in of_queue]), b"".join([part.crcs for part in of_queue])
        queues.append_row(*queue, of_queue[0].queue_offset, units, crcs)
    return True
