"""Carrying many messages of the log into their queues at once: those that need no second look.

A message whose record has IPv4 hosts, that belongs to no transaction, was not put by the broker for a delayed one, and
whose queue exists and has its number next, only adds a unit to its queue, and its keys to the index. Such messages,
which are nearly all that a follower gets, are gathered by queue, in the order of the log, and every queue takes its
own at once. Whatever else comes is left to the dispatcher, which looks at it alone: so nothing is decided here that it
would decide otherwise, which the tests hold against each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from struct import Struct

from node.broker.foretold import Queue
from node.broker.internal_topics import is_internal
from node.broker.ledger import LogMessage
from node.store.consume_queue import pack_units
from node.store.properties import KEYS, TAGS, UNIQUE_KEY, property_value
from node.store.queue_store import QueueStore
from node.store.record import (
    FIXED_SIZE_BYTES,
    MAX_TOPIC_SIZE_BYTES,
    RECORD_MAGIC,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_STORE_HOST_V6,
    SYS_FLAG_TRANSACTION_MASK,
    RecordSummary,
    tag_hash,
)

__all__ = ["Gathered", "gather"]

_HEAD = Struct(">IIIi4xqqi16xq8x4xqi")
"""What is wanted of everything before the body of a record with IPv4 hosts; see `node.store.record`."""
_SECOND_LOOK = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6 | SYS_FLAG_TRANSACTION_MASK

MAX_TOPICS = 4096
"""Names of topics held decoded."""
_topics: dict[bytes, str] = {}


class _OfQueue:
    """What one queue gets: a position, size, hash of tags and CRC for each message."""

    __slots__ = ("crcs", "first", "positions", "queue", "sizes", "tags")

    def __init__(self, queue: Queue, first: int) -> None:
        self.queue = queue
        self.first = first
        self.positions: list[int] = []
        self.sizes: list[int] = []
        self.tags: list[int] = []
        self.crcs: list[int] = []


class Gathered:
    """Messages that may enter their queues now: `count` of those that were looked at, and what is made of them."""

    __slots__ = ("count", "of_queues", "store_timestamp_ms", "summaries")

    def __init__(self) -> None:
        self.count = 0
        self.of_queues: dict[tuple[bytes, int], _OfQueue] = {}
        self.store_timestamp_ms = 0
        self.summaries: list[RecordSummary] = []
        """Of the messages from which more than their unit is derived, as in ForetoldRow."""

    def append_to(self, queues: QueueStore) -> list[Queue]:
        """Let the queues have their messages; returns which queues that were."""
        for each in self.of_queues.values():
            units, crcs = pack_units(each.positions, each.sizes, each.tags, each.crcs)
            if not queues.append_row(*each.queue, each.first, units, crcs):
                raise ValueError(f"number {each.first} of queue {each.queue} was the next one, and is not")
        return [each.queue for each in self.of_queues.values()]


def gather(messages: Sequence[LogMessage], start: int, queues: QueueStore) -> Gathered:
    """The messages from number `start` on, up to the first one that needs a second look. Changes nothing."""
    found = Gathered()
    of_queues, unpack, crc32, head_size = found.of_queues, _HEAD.unpack_from, zlib.crc32, _HEAD.size
    newest_ms = 0
    number = start - 1
    for number in range(start, len(messages)):
        _, _, is_message, place, body, crc = messages[number]
        if not is_message:
            continue
        size = len(body)
        if size < FIXED_SIZE_BYTES:
            break
        total, magic, body_crc, queue_id, offset, position, sys_flag, stored_ms, prepared, body_size = unpack(body)
        size_at = head_size + body_size
        if (
            total != size or magic != RECORD_MAGIC or sys_flag & _SECOND_LOOK or prepared or position != place
            or body_size < 0 or size_at + 3 > size
        ):  # fmt: skip
            break
        end = size_at + 1 + body[size_at]
        text_at = end + 2
        if (
            text_at > size or end - size_at > MAX_TOPIC_SIZE_BYTES + 1
            or int.from_bytes(body[end:text_at], "big") != size - text_at
            or crc32(body[head_size:size_at]) & 0x7FFFFFFF != body_crc
        ):  # fmt: skip
            break
        topic = body[size_at + 1 : end]
        key = (topic, queue_id)
        row = of_queues.get(key)
        if row is None:
            row = _of_queue(topic, queue_id, queues)
            if row is None:
                break
            if row.first == offset:
                of_queues[key] = row
        if offset != row.first + len(row.sizes):
            break
        tag = 0
        if text_at < size:
            try:
                text = body[text_at:].decode()
            except UnicodeDecodeError:
                break
            tags = property_value(text, TAGS) if TAGS in text else None
            tag = tag_hash(tags)
            if KEYS in text or UNIQUE_KEY in text:
                found.summaries.append(
                    RecordSummary(*row.queue, offset, position, sys_flag, stored_ms, tags, text, prepared)
                )
        row.positions.append(position)
        row.sizes.append(size)
        row.tags.append(tag)
        row.crcs.append(crc)
        if stored_ms > newest_ms:
            newest_ms = stored_ms
    else:
        number += 1
    found.count = number - start
    found.store_timestamp_ms = newest_ms
    return found


def _of_queue(name: bytes, queue_id: int, queues: QueueStore) -> _OfQueue | None:
    """The place for a queue's messages; None where the queue does not exist yet or has a meaning of its own."""
    topic = _topics.get(name)
    if topic is None:
        try:
            topic = name.decode()
        except UnicodeDecodeError:
            return None
        if len(_topics) >= MAX_TOPICS:
            _topics.clear()
        _topics[name] = topic
    queue = queues.find(topic, queue_id)
    if queue is None or is_internal(topic):
        return None
    return _OfQueue((topic, queue_id), queue.max_offset)
