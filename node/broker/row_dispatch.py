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
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from struct import Struct

from node.broker.foretold import Queue
from node.broker.internal_topics import is_internal
from node.broker.ledger import EntryRow
from node.dledger.entry import HEADER, HEADER_SIZE_BYTES, NORMAL_MAGIC
from node.dledger.row import BODY_PREFIX
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

_HEAD = Struct(f">{BODY_PREFIX}IIIi4xqqi16xq8x4xqi")
"""An entry's header, and what is wanted of everything before the body of a record with IPv4 hosts; see
`node.store.record`."""
_SIZE_AND_MAGIC = Struct(">II")
_PREPARED_AND_SIZE = Struct(">qi")
LEAST_ALIKE = 6
"""Messages of the same sizes; below these a loop is as quick."""
RUN_LENGTH = 8
"""Of messages of one queue: where runs are shorter, sorting them first is quicker."""
SIZES_REMEMBERED = 64
_SECOND_LOOK = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6 | SYS_FLAG_TRANSACTION_MASK
_LEAST_BYTES = HEADER_SIZE_BYTES + FIXED_SIZE_BYTES

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


def gather(row: EntryRow, first_index: int, queues: QueueStore) -> Gathered:
    """The messages from entry `first_index` on, up to the first one that needs a second look. Changes nothing."""
    if row.is_even and row.last_index - first_index >= LEAST_ALIKE - 1:
        alike = _gather_alike(row, first_index, queues)
        if alike is not None:
            return alike
    found = Gathered()
    of_queues, unpack, crc32, head_size = found.of_queues, _HEAD.unpack_from, zlib.crc32, _HEAD.size
    raw, shift, newest_ms = row.raw, row.pos + HEADER_SIZE_BYTES, 0
    number = first_index - row.first_index
    ends = row.ends[number:] if number else row.ends
    start = row.ends[number - 1] if number else 0
    of_queue, known_topic, known_id, count = None, b"", -1, 0
    for end in ends:
        if end - start < _LEAST_BYTES:
            if HEADER.unpack_from(raw, start)[0] == NORMAL_MAGIC:
                break
            start, count = end, count + 1
            continue
        (
            entry_magic, crc, size, magic, body_crc, queue_id, offset, position, sys_flag, stored_ms, prepared,
            body_size,
        ) = unpack(raw, start)  # fmt: skip
        if entry_magic != NORMAL_MAGIC:
            start, count = end, count + 1
            continue
        body_at = start + head_size
        size_at = body_at + body_size
        if (
            position != start + shift or size != end - start - HEADER_SIZE_BYTES or magic != RECORD_MAGIC
            or sys_flag & _SECOND_LOOK or prepared or body_size < 0 or size_at + 3 > end
        ):  # fmt: skip
            break
        text_at = size_at + raw[size_at] + 3
        if (
            text_at > end or raw[size_at] > MAX_TOPIC_SIZE_BYTES
            or raw[text_at - 2] << 8 | raw[text_at - 1] != end - text_at
            or crc32(raw[body_at:size_at]) & 0x7FFFFFFF != body_crc
        ):  # fmt: skip
            break
        topic = raw[size_at + 1 : text_at - 2]
        if queue_id != known_id or topic != known_topic:
            of_queue = of_queues.get((topic, queue_id))
            if of_queue is None:
                of_queue = _of_queue(topic, queue_id, queues)
                if of_queue is None or of_queue.first != offset:
                    break
                of_queues[topic, queue_id] = of_queue
            known_topic, known_id = topic, queue_id
        assert of_queue is not None
        if offset != of_queue.first + len(of_queue.sizes):
            break
        tag = 0
        if text_at < end:
            try:
                text = raw[text_at:end].decode()
            except UnicodeDecodeError:
                break
            tags = property_value(text, TAGS) if TAGS in text else None
            tag = tag_hash(tags)
            if KEYS in text or UNIQUE_KEY in text:
                found.summaries.append(
                    RecordSummary(*of_queue.queue, offset, position, sys_flag, stored_ms, tags, text, prepared)
                )
        of_queue.positions.append(position)
        of_queue.sizes.append(size)
        of_queue.tags.append(tag)
        of_queue.crcs.append(crc)
        if stored_ms > newest_ms:
            newest_ms = stored_ms
        start, count = end, count + 1
    found.count = count
    found.store_timestamp_ms = newest_ms
    return found


@lru_cache(maxsize=SIZES_REMEMBERED)
def _alike(body_size: int, tail_size: int) -> Struct:
    """The same of entries with bodies of one size, with what lies behind the body; several fields are taken in one
    piece where they are to be the same in all."""
    return Struct(f">{BODY_PREFIX}8sIi4xqqi16xq8x4x12s{body_size}s{tail_size}s")


def _gather_alike(row: EntryRow, first_index: int, queues: QueueStore) -> Gathered | None:
    """The same for a row of entries of one size, where all from `first_index` on are messages of one topic with bodies
    of one size and the same properties, without keys; None where they are not, or any needs a second look."""
    size, at = row.ends[0], (first_index - row.first_index) * row.ends[0]
    if size < _LEAST_BYTES:
        return None
    count, body_size = row.last_index - first_index + 1, _HEAD.unpack_from(row.raw, at)[-1]
    tail_size = size - _HEAD.size - body_size
    if body_size < 0 or tail_size < 3:
        return None
    columns = _alike(body_size, tail_size).iter_unpack(memoryview(row.raw)[at:] if at else row.raw)
    magics, crcs, heads, body_crcs, queue_ids, offsets, positions, flags, stored_ms, ends, bodies, tails = zip(
        *columns, strict=True
    )
    first_position, tail = row.pos + at + HEADER_SIZE_BYTES, tails[0]
    if (
        magics.count(NORMAL_MAGIC) != count or tails.count(tail) != count
        or heads.count(_SIZE_AND_MAGIC.pack(size - HEADER_SIZE_BYTES, RECORD_MAGIC)) != count
        or ends.count(_PREPARED_AND_SIZE.pack(0, body_size)) != count
        or positions != tuple(range(first_position, first_position + count * size, size))
        or any([flag & _SECOND_LOOK for flag in set(flags)])
        or list(body_crcs) != [crc & 0x7FFFFFFF for crc in map(zlib.crc32, bodies)]
        or tail[0] > MAX_TOPIC_SIZE_BYTES or tail[0] + 3 > tail_size
    ):  # fmt: skip
        return None
    text_at = tail[0] + 3
    if int.from_bytes(tail[text_at - 2 : text_at], "big") != tail_size - text_at:
        return None
    try:
        text = tail[text_at:].decode()
    except UnicodeDecodeError:
        return None
    if KEYS in text or UNIQUE_KEY in text:
        return None
    tag = tag_hash(property_value(text, TAGS) if TAGS in text else None)
    found = Gathered()
    name = tail[1 : text_at - 2]
    runs = _runs(queue_ids)
    if len(runs) * RUN_LENGTH > count:  # bring those of a queue together, in their order
        pick = itemgetter(*sorted(range(count), key=queue_ids.__getitem__))
        queue_ids, offsets, positions, crcs = map(pick, (queue_ids, offsets, positions, crcs))
        runs = _runs(queue_ids)
    at = 0
    for queue_id, length in runs:
        of_queue = found.of_queues.get((name, queue_id))
        if of_queue is None:
            of_queue = _of_queue(name, queue_id, queues)
            if of_queue is None:
                return None
            found.of_queues[name, queue_id] = of_queue
        first = of_queue.first + len(of_queue.positions)
        if offsets[at : at + length] != tuple(range(first, first + length)):
            return None
        of_queue.positions += positions[at : at + length]
        of_queue.crcs += crcs[at : at + length]
        at += length
    for of_queue in found.of_queues.values():
        of_queue.sizes = [size - HEADER_SIZE_BYTES] * len(of_queue.positions)
        of_queue.tags = [tag] * len(of_queue.positions)
    found.count = count
    found.store_timestamp_ms = max(0, *stored_ms)
    return found


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Numbers that follow each other and are the same: the number, and how many."""
    return [(number, len(list(run))) for number, run in groupby(numbers)]


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
