"""Messages that POP consumers were given and have not acknowledged, as derived from the log.

Whatever a POP request returns is written into the log first, as a checkpoint: a message in the topic
rmq_sys_REVIVE_LOG_CLUSTER with tag `ck` whose body tells which messages of which queue, for whom, until when (R:
PopCheckPoint). An acknowledgement is a message with tag `ack` (R: AckMsg), or `bAck` for several. A message that is
redelivered because nobody acknowledged it in time is a copy that names its checkpoint and place, where clients cannot
write (`requeue.py`), and so closes it. Therefore every member of a group, and a restart, derive the same: what is open,
and the next offset of each queue for a group. Nothing is lost by a crash or a change of masters.

A client keeps a handle of each message (R: ExtraInfoUtil): start and time of its checkpoint and its own place, as text.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, NamedTuple

from node.broker.dispatch_batch import DispatchBatch, Queue
from node.broker.internal_topics import RETRY_PREFIX, REVIVE_PREFIX
from node.broker.requeue import POP_SOURCE, source_of
from node.remoting import RequestError, ResponseCode
from node.store.consume_queue import ConsumeQueue
from node.store.properties import TAGS, UNIQUE_KEY, join_properties
from node.store.record import RecordSummary
from node.store.record_batch import RecordBatch, batch_of_one

__all__ = [
    "MAX_OPEN_MESSAGES",
    "MAX_QUEUES_OF_GROUPS",
    "ORDERED_REVIVE_QUEUE",
    "PLACES",
    "Checkpoint",
    "CheckpointKey",
    "Handle",
    "OpenCheckpoints",
    "QueueOfGroup",
    "ReviveLog",
    "pop_retry_topic",
]

logger = logging.getLogger("node.broker")

MAX_OPEN_MESSAGES = 100_000
"""Messages that are popped and not acknowledged; beyond it nothing more is popped. Each costs up to 400 bytes of
memory and 100 in every checkpoint of the queues."""
MAX_QUEUES_OF_GROUPS = 100_000
"""Queues of groups whose next offset is derived from the log, about 500 bytes each. When there are more, those popped
longest ago are forgotten, unless they have open messages: their groups have consumer offsets."""
FORGET_LOOKS = 100
"""Queues of groups that are checked for one to forget, for each new checkpoint: nearly all may have open messages."""
PLACES = 32
"""Messages of one checkpoint (R: the most that a POP request may ask for)."""
ORDERED_REVIVE_QUEUE = 999
"""In a handle: popped in order, which needs no checkpoint (R: POP_ORDER_REVIVE_QUEUE)."""

STALE_FACTOR = 2
"""Entries of a heap for each open checkpoint at which those of closed ones are dropped."""

_CHECKPOINT, _ACK, _BATCH_ACK = "ck", "ack", "bAck"

QueueOfGroup = tuple[str, str, int]
"""Group, topic and queue id."""


class CheckpointKey(NamedTuple):
    """Identifies a checkpoint; a handle contains it."""

    topic: str
    queue_id: int
    start_offset: int
    group: str
    pop_time_ms: int


@dataclass(slots=True)
class Checkpoint:
    """Messages that were popped together. `open` has a bit for each that is not acknowledged."""

    number: int
    key: CheckpointKey
    invisible_ms: int
    offsets: Sequence[int]
    open: int

    @property
    def queue(self) -> QueueOfGroup:
        return self.key.group, self.key.topic, self.key.queue_id

    def is_open(self, place: int) -> bool:
        return bool(self.open >> place & 1)

    def place_of(self, offset: int) -> int | None:
        """The place of an unacknowledged message; None if the offset is not one of these."""
        try:
            place = self.offsets.index(offset)
        except ValueError:
            return None
        return place if self.is_open(place) else None

    def first_open_offset(self) -> int:
        """The oldest unacknowledged message; one must exist."""
        return self.offsets[(self.open & -self.open).bit_length() - 1]


class Handle(NamedTuple):
    """What a client sends with an acknowledgement (R: ExtraInfoUtil)."""

    start_offset: int
    pop_time_ms: int
    invisible_ms: int
    revive_queue: int

    @classmethod
    def of(cls, text: str) -> Handle:
        """Raises RequestError."""
        try:
            start, popped, invisible, revive = map(int, text.split(" ")[:4])
        except ValueError as error:
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, f"extraInfo {text[:80]!r} is no handle") from error
        return cls(start, popped, invisible, revive)


class _InHand:
    """The open checkpoints of a queue of a group, by number, and their oldest open message in logarithmic time.

    A heap has an entry for each, with its oldest open message, which may be outdated: that only moves on, and an entry
    is updated when it is at the top. Entries of closed checkpoints are dropped there, or when the heap is rebuilt."""

    def __init__(self) -> None:
        self._checkpoints: dict[int, Checkpoint] = {}
        self._heap: list[tuple[int, int]] = []

    def add(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint, which has open messages."""
        self._checkpoints[checkpoint.number] = checkpoint
        heappush(self._heap, (checkpoint.first_open_offset(), checkpoint.number))

    def remove(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint that has no open message any more."""
        del self._checkpoints[checkpoint.number]
        if len(self._heap) > STALE_FACTOR * len(self._checkpoints):
            self._heap = [(each.first_open_offset(), each.number) for each in self._checkpoints.values()]
            heapify(self._heap)

    def first_open_offset(self) -> int | None:
        """The oldest unacknowledged message; None if there is none."""
        heap = self._heap
        while heap:
            offset, number = heap[0]
            checkpoint = self._checkpoints.get(number)
            if checkpoint is None:
                heappop(heap)
            elif checkpoint.first_open_offset() == offset:
                return offset
            else:
                heapreplace(heap, (checkpoint.first_open_offset(), number))
        return None


class OpenCheckpoints:
    """The open checkpoints, derived from the log, message by message."""

    def __init__(self) -> None:
        self.by_key: dict[CheckpointKey, Checkpoint] = {}
        self.by_number: dict[int, Checkpoint] = {}
        self.next_offsets: OrderedDict[QueueOfGroup, int] = OrderedDict()
        """The next offset of a queue for a group; the one that was popped last comes last."""
        self.last_number = -1
        """Number of the last message in the log of checkpoints and acknowledgements; -1: none since the start."""
        self.open_messages = 0
        self._of_queue: dict[QueueOfGroup, _InHand] = {}
        self.on_opened: Callable[[Checkpoint], None] = lambda checkpoint: None
        self.on_consumed: Callable[[QueueOfGroup, int], None] = lambda queue, offset: None
        """Called with the offset below which a group is done with everything in a queue, when it has moved."""

    @property
    def is_full(self) -> bool:
        """Whether there is no room to record more popped messages."""
        return self.open_messages >= MAX_OPEN_MESSAGES

    def dispatch(self, record: RecordSummary) -> None:
        """Note a checkpoint, an acknowledgement, or a redelivered message."""
        if record.topic.startswith(REVIVE_PREFIX):
            self.last_number = record.queue_offset
            try:
                body = json.loads(record.body)
                if record.tags == _CHECKPOINT:
                    self._open(record.queue_offset, body)
                elif record.tags in (_ACK, _BATCH_ACK):
                    key = CheckpointKey(body["t"], int(body["q"]), int(body["so"]), body["c"], int(body["pt"]))
                    self._acknowledged(key, body["aol"] if record.tags == _BATCH_ACK else (body["ao"],))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                logger.error("a message in %s that is no checkpoint: %r", record.topic, error)
        elif record.prepared_transaction_offset < 0:
            kind, number = source_of(record.prepared_transaction_offset)
            checkpoint = self.by_number.get(number // PLACES) if kind == POP_SOURCE else None
            if checkpoint is not None:
                self._close(checkpoint, (number % PLACES,))

    def _open(self, number: int, body: dict[str, Any]) -> None:
        start = int(body["so"])
        key = CheckpointKey(body["t"], int(body["q"]), start, body["c"], int(body["pt"]))
        offsets = tuple(start + int(each) for each in body["d"])[:PLACES]
        if not offsets:
            raise ValueError("a checkpoint of no message")
        self._add(Checkpoint(number, key, int(body["it"]), offsets, (1 << len(offsets)) - 1))

    def _add(self, checkpoint: Checkpoint) -> None:
        self.by_number[checkpoint.number] = self.by_key[checkpoint.key] = checkpoint
        self._of_queue.setdefault(checkpoint.queue, _InHand()).add(checkpoint)
        self.open_messages += checkpoint.open.bit_count()
        end = max(checkpoint.offsets) + 1
        self.next_offsets[checkpoint.queue] = max(self.next_offsets.get(checkpoint.queue, 0), end)
        self.next_offsets.move_to_end(checkpoint.queue)
        self._forget_some()
        self.on_opened(checkpoint)

    def _forget_some(self) -> None:
        """Forget queues of groups that were popped longest ago and have no open messages, if there are too many."""
        for _ in range(FORGET_LOOKS):
            if len(self.next_offsets) <= MAX_QUEUES_OF_GROUPS:
                return
            queue = next(iter(self.next_offsets))
            in_hand = self._of_queue.get(queue)
            if in_hand is None or in_hand.first_open_offset() is None:
                self._of_queue.pop(queue, None)
                del self.next_offsets[queue]
            else:
                self.next_offsets.move_to_end(queue)  # others are checked before it is checked again

    def _acknowledged(self, key: CheckpointKey, offsets: Iterable[int]) -> None:
        checkpoint = self.by_key.get(key)
        if checkpoint is not None:
            places = (checkpoint.place_of(offset) for offset in offsets)
            self._close(checkpoint, (place for place in places if place is not None))

    def _close(self, checkpoint: Checkpoint, places: Iterable[int]) -> None:
        queue = checkpoint.queue
        consumed = self._consumed(queue)
        for place in places:
            if checkpoint.is_open(place):
                checkpoint.open &= ~(1 << place)
                self.open_messages -= 1
        if not checkpoint.open:
            self._of_queue[queue].remove(checkpoint)
            self.by_number.pop(checkpoint.number, None)
            if self.by_key.get(checkpoint.key) is checkpoint:
                del self.by_key[checkpoint.key]
        if self._consumed(queue) != consumed:
            self.on_consumed(queue, self._consumed(queue))

    def _consumed(self, queue: QueueOfGroup) -> int:
        in_hand = self._of_queue.get(queue)
        first = in_hand.first_open_offset() if in_hand is not None else None
        return self.next_offsets[queue] if first is None else first

    def consumed(self) -> Iterable[tuple[QueueOfGroup, int]]:
        """The offset below which each group is done with everything in a queue."""
        return [(queue, self._consumed(queue)) for queue in self.next_offsets]

    def dispatch_batch(self, batch: DispatchBatch) -> None:
        """Nothing is derived from messages that are not special."""

    def snapshot(self) -> Any:
        """The whole state."""
        return {
            "open": [
                [each.number, list(each.key), each.invisible_ms, list(each.offsets), each.open]
                for each in self.by_number.values()
            ],
            "next": [[*queue, offset] for queue, offset in self.next_offsets.items()],
        }

    def restore(self, state: Any) -> None:
        """Continue from a snapshot; None: from nothing."""
        self.by_key, self.by_number, self._of_queue, self.next_offsets = {}, {}, {}, OrderedDict()
        self.open_messages, self.last_number = 0, -1
        for number, key, invisible_ms, offsets, opened in (state or {}).get("open", ()):
            if opened:
                self._add(Checkpoint(number, CheckpointKey(*key), invisible_ms, tuple(offsets), opened))
        ends = (state or {}).get("next", ())
        self.next_offsets = OrderedDict(((group, topic, queue_id), offset) for group, topic, queue_id, offset in ends)

    async def flush(self) -> None:
        """Nothing to do: the snapshot is the whole state."""


class ReviveLog:
    """Makes the messages that record checkpoints and acknowledgements in the log."""

    def __init__(self, topic: str, broker_name: str, store_host: Callable[[], str]) -> None:
        self.topic = topic
        self._broker_name = broker_name
        self._store_host = store_host

    def go_on(self, queues: Iterable[tuple[Queue, ConsumeQueue]]) -> None:
        """Keep writing into the topic that the log already has, even if the cluster had another name then: checkpoints
        are identified by their numbers in it."""
        ends = {topic: queue.max_offset for (topic, _), queue in queues if topic.startswith(REVIVE_PREFIX)}
        self.topic = max(ends, key=ends.__getitem__, default=self.topic)

    def checkpoint(self, key: CheckpointKey, invisible_ms: int, offsets: Sequence[int]) -> RecordBatch:
        """The checkpoint of messages that are popped."""
        content = {
            **{"so": key.start_offset, "pt": key.pop_time_ms, "it": invisible_ms, "bm": 0, "n": len(offsets)},
            **{"q": key.queue_id, "t": key.topic, "c": key.group, "ro": 0, "bn": self._broker_name},
            "d": [offset - key.start_offset for offset in offsets],
        }
        return self._message(_CHECKPOINT, key, content, key.start_offset)

    def acknowledgement(self, key: CheckpointKey, offsets: Sequence[int]) -> RecordBatch:
        """The acknowledgement of some messages of a checkpoint."""
        content: dict[str, Any] = {
            **{"so": key.start_offset, "c": key.group, "t": key.topic, "q": key.queue_id, "pt": key.pop_time_ms},
            **{"bn": self._broker_name, "ao": offsets[0]},
        }
        if len(offsets) == 1:
            return self._message(_ACK, key, content, offsets[0])
        return self._message(_BATCH_ACK, key, {**content, "ao": -1, "aol": list(offsets)}, offsets[0])

    def _message(self, tag: str, key: CheckpointKey, content: dict[str, Any], offset: int) -> RecordBatch:
        parts = (key.topic, key.queue_id, offset, key.group, key.pop_time_ms, self._broker_name, tag)
        return batch_of_one(
            topic=self.topic,
            queue_id=0,
            body=json.dumps(content, separators=(",", ":")).encode(),
            properties_text=join_properties({TAGS: tag, UNIQUE_KEY: "@".join(map(str, parts))}),
            born_timestamp_ms=key.pop_time_ms,
            store_host=self._store_host(),
        )


def pop_retry_topic(group: str, topic: str) -> str:
    """Where messages of `topic` are redelivered that `group` did not acknowledge in time; a redelivered one stays there
    (R: KeyBuilder.buildPopRetryTopic, the first form)."""
    return topic if topic.startswith(RETRY_PREFIX) else f"{RETRY_PREFIX}{group}_{topic}"
