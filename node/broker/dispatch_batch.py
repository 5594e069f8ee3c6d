"""Batches that the dispatcher adds to the queues: one format for messages that a master has just appended and for
those that were read from the log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from node.store.consume_queue import pack_units
from node.store.index_file import KeyRun, keys_of
from node.store.properties import TAGS, property_value
from node.store.queue_store import QueueStore
from node.store.record import tag_hash
from node.store.unique_keys import unique_key

__all__ = ["DispatchBatch", "KeyRuns", "Queue", "QueueColumns", "QueuePart", "append_parts", "text_tag_hash"]

Queue = tuple[str, int]
"""Topic and queue id."""


class QueuePart(NamedTuple):
    """The messages of a batch that are in one queue; they have consecutive offsets there."""

    queue: Queue
    queue_offset: int
    units: bytes
    """One packed unit for each message."""
    crcs: bytes


class QueueColumns:
    """The messages for one queue, as columns: position, size, tag hash and CRC of each."""

    __slots__ = ("crcs", "first", "positions", "queue", "sizes", "tags")

    def __init__(self, queue: Queue, first: int) -> None:
        self.queue = queue
        self.first = first
        self.positions: list[int] = []
        self.sizes: list[int] = []
        self.tags: list[int] = []
        self.crcs: list[int] = []

    def part(self) -> QueuePart:
        """The columns, packed."""
        return QueuePart(self.queue, self.first, *pack_units(self.positions, self.sizes, self.tags, self.crcs))


class DispatchBatch(NamedTuple):
    """Consecutive messages of the log, none of them special: no part of a transaction, not delivered after a delay, not
    in an internal topic. They only yield a unit in their queue, and an entry in the index for each key."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls here
    """Number of messages."""
    parts: Sequence[QueuePart]
    store_timestamp_ms: int
    """The newest one."""
    key_runs: Sequence[KeyRun]
    """In the order of the log."""


class KeyRuns:
    """Collects the keys of messages in the order of the log."""

    __slots__ = ("runs",)

    def __init__(self) -> None:
        self.runs: list[KeyRun] = []

    def run(self, topic: str, store_timestamp_ms: int) -> KeyRun:
        """The run to which the next keys belong; add them to it."""
        last = self.runs[-1] if self.runs else None
        if last is None or last.topic != topic or last.store_timestamp_ms != store_timestamp_ms:
            last = KeyRun(topic, [], [], store_timestamp_ms)
            self.runs.append(last)
        return last

    def add(self, topic: str, text: bytes, physical_offset: int, store_timestamp_ms: int) -> None:
        """Add the keys of the next message, read from its property text."""
        key = unique_key(text)
        keys = [key] if key is not None else [each.encode() for each in keys_of(text.decode())]
        if keys:
            run = self.run(topic, store_timestamp_ms)
            run.keys.extend(keys)
            run.physical_offsets.extend([physical_offset] * len(keys))


_TAGS = TAGS.encode()


def text_tag_hash(text: bytes) -> int:
    """The tag hash for a unit, of the TAGS in a property text."""
    return tag_hash(property_value(text.decode(), TAGS)) if _TAGS in text else 0


def append_parts(queues: QueueStore, batches: Iterable[DispatchBatch]) -> dict[Queue, None] | None:
    """Append the messages of batches to their queues, and return these queues; append nothing, and return None, if one
    part does not follow the end of its queue."""
    by_queue: dict[Queue, list[QueuePart]] = {}
    for batch in batches:
        for part in batch.parts:
            known = by_queue.get(part[0])
            if known is None:
                held = queues.find(*part[0])
                if held is None or held.max_offset != part[1]:
                    return None
                by_queue[part[0]] = [part]
            else:
                known.append(part)
    for queue, parts in by_queue.items():
        units, crcs = b"".join([part[2] for part in parts]), b"".join([part[3] for part in parts])
        queues.append_units(*queue, parts[0][1], units, crcs)
    return dict.fromkeys(by_queue)
