"""What a log holds, gathered while its records are read: the numbers in its queues, and the messages of each kind.

The memory that this takes grows with the number of queues, not of messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from node.broker.internal_topics import DLQ_PREFIX, HALF_TOPIC, OP_TOPIC, RETRY_PREFIX, SCHEDULE_TOPIC
from node.broker.requeue import delayed_source_of
from node.exchange.staging import ExchangeError
from node.store.properties import KEYS
from node.store.record import (
    SYS_FLAG_COMPRESSED,
    SYS_FLAG_TRANSACTION_COMMIT,
    SYS_FLAG_TRANSACTION_MASK,
    RecordSummary,
)

__all__ = ["Inventory", "Queue"]

Queue = tuple[str, int]

MAX_QUEUES_OF_A_LOG = 1_000_000
"""Some 200 bytes of memory each."""

KINDS = (
    "plain", "for another try", "dead letters", "delayed", "delivered after a delay", "halves of transactions",
    "committed", "ends of transactions",
)  # fmt: skip
"""The kinds of messages in queues; each message is of one."""


class Inventory:
    """Takes every message of a log, in order."""

    def __init__(self, *, begins_later: bool) -> None:
        self._begins_later = begins_later
        self._queues: dict[Queue, list[int]] = {}
        self.counts = Counter[str]()
        self.records = 0
        self.newest_ms = 0
        """The newest store timestamp, in milliseconds of the epoch."""

    def take(self, summary: RecordSummary) -> None:
        """Count the next message. Raises ExchangeError if its number does not follow that of the previous message in
        its queue: neither broker could build its queues from this log."""
        self.records += 1
        self.newest_ms = max(self.newest_ms, summary.store_timestamp_ms)
        transaction = summary.sys_flag & SYS_FLAG_TRANSACTION_MASK
        if transaction not in (0, SYS_FLAG_TRANSACTION_COMMIT):
            self.counts["of no queue"] += 1
            return
        queue = (summary.topic, summary.queue_id)
        span = self._queues.get(queue)
        if span is None:
            span = self._begin(queue, summary.queue_offset)
        if span[1] != summary.queue_offset:
            raise ExchangeError(
                f"the message at {summary.physical_offset} is number {summary.queue_offset} of queue"
                f" {queue[0]}/{queue[1]}, where {span[1]} is next (a topic that was deleted and made again?)"
            )
        span[1] += 1
        counts = self.counts
        counts[_kind(summary, transaction)] += 1
        if summary.tags:
            counts["with tags"] += 1
        if KEYS in summary.properties_text:
            counts["with keys"] += 1
        if summary.sys_flag & SYS_FLAG_COMPRESSED:
            counts["compressed"] += 1

    def _begin(self, queue: Queue, first: int) -> list[int]:
        if len(self._queues) >= MAX_QUEUES_OF_A_LOG:
            raise ExchangeError(f"the log has more than {MAX_QUEUES_OF_A_LOG} queues")
        span = self._queues[queue] = [first, first] if self._begins_later else [0, 0]
        return span

    def next_number(self, queue: Queue) -> int:
        """The number that the queue's next message gets; 0 if the log has no message of the queue."""
        span = self._queues.get(queue)
        return span[1] if span is not None else 0

    @property
    def queues(self) -> Iterable[Queue]:
        """Every queue of which the log holds a message."""
        return self._queues.keys()

    def text(self) -> str:
        """The counts of messages of each kind, as a text."""
        counts = self.counts
        kinds = [f"{counts[name]} {name}" for name in (*KINDS, "of no queue") if counts[name]]
        marks = [f"{counts[name]} {name}" for name in ("with tags", "with keys", "compressed") if counts[name]]
        among = f"; of these {', '.join(marks)}" if marks else ""
        return f"{self.records} messages in {len(self._queues)} queues ({', '.join(kinds)}{among})"


def _kind(summary: RecordSummary, transaction: int) -> str:
    topic = summary.topic
    if topic == SCHEDULE_TOPIC:
        return "delayed"
    if topic == HALF_TOPIC:
        return "halves of transactions"
    if topic == OP_TOPIC:
        return "ends of transactions"
    if topic.startswith(RETRY_PREFIX):
        return "for another try"
    if topic.startswith(DLQ_PREFIX):
        return "dead letters"
    if transaction == SYS_FLAG_TRANSACTION_COMMIT:
        return "committed"
    is_delivered = delayed_source_of(summary.prepared_transaction_offset) is not None
    return "delivered after a delay" if is_delivered else "plain"
