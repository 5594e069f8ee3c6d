"""Batches read from the log: many messages at once, as long as none of them is special.

A message whose record has IPv4 hosts, that belongs to no transaction, was not put by the broker for a delayed one, and
whose queue exists and has its number next, only adds a unit to its queue, and its keys to the index. Such messages,
which are nearly all that a follower gets, make a batch. Everything else is left to the dispatcher, which handles it
alone: so nothing is decided here that the dispatcher would decide otherwise, and tests compare the two.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from struct import Struct

from node.broker.dispatch_batch import DispatchBatch, KeyRuns, QueueColumns, text_tag_hash
from node.broker.internal_topics import is_internal
from node.dledger.entry import HEADER, HEADER_SIZE_BYTES, NORMAL_MAGIC
from node.dledger.entry_batch import BODY_PREFIX, EntryBatch
from node.interpreter import least_rows
from node.store.properties import KEYS, UNIQUE_KEY
from node.store.queue_store import QueueStore
from node.store.record import (
    FIXED_SIZE_BYTES,
    MAX_TOPIC_SIZE_BYTES,
    RECORD_MAGIC,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_STORE_HOST_V6,
    SYS_FLAG_TRANSACTION_MASK,
)
from node.store.unique_keys import common_text

__all__ = ["RecordRun", "read_batch"]

_RECORD_HEAD = Struct(">IIIi4xqqi16xq8x4xqi")
"""The fields needed of everything before the body of a record with IPv4 hosts; see `node.store.record`."""
_HEAD = Struct(f">{BODY_PREFIX}{_RECORD_HEAD.format[1:]}")
"""The same after an entry's header."""
_SIZE_AND_MAGIC = Struct(">II")
_PREPARED_AND_SIZE = Struct(">qi")
LEAST_UNIFORM = least_rows(6)
"""Fewest entries of one size that are read as columns; for fewer a loop is as quick."""
RUN_LENGTH = 8
"""Average run of messages of one queue; if runs are shorter, sorting the messages first is quicker."""
SIZES_REMEMBERED = 64
_SPECIAL = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6 | SYS_FLAG_TRANSACTION_MASK
_LEAST_BYTES = HEADER_SIZE_BYTES + FIXED_SIZE_BYTES

_KEYS, _UNIQUE_KEY = KEYS.encode(), UNIQUE_KEY.encode()

MAX_TOPICS = 4096
"""Names of topics that are kept decoded."""
_topics: dict[bytes, str] = {}


class RecordRun:
    """Consecutive records of a log without entries, as an `EntryBatch` that has no header before each: the index of a
    record is the position of its last byte, and the next one begins at the index plus 1."""

    __slots__ = ("ends", "first_index", "last_index", "pos", "raw", "term")

    is_uniform = False
    prefix_bytes = 0

    def __init__(self, pos: int, data: bytes, term: int) -> None:
        """The records that are whole in `data`, which begins at position `pos` of the log; there may be none."""
        self.pos = self.first_index = pos
        self.term = term
        self.ends: list[int] = []
        at, size_bytes = 0, len(data)
        while at + _SIZE_AND_MAGIC.size <= size_bytes:
            end = at + int.from_bytes(data[at : at + 4], "big")
            if end < at + _SIZE_AND_MAGIC.size or end > size_bytes:
                break
            self.ends.append(end)
            at = end
        self.raw = data[:at]
        self.last_index = pos + at - 1

    def number_of(self, index: int) -> int:
        """The number of the record that begins at position `index`, 0 for the first."""
        return bisect_right(self.ends, index - self.pos)

    def index_behind(self, count: int) -> int:
        """Where the record after the first `count` begins."""
        return self.pos + (self.ends[count - 1] if count else 0)

    def term_of(self, index: int) -> int:
        """Term of a record."""
        return self.term


def read_batch(entries: EntryBatch | RecordRun, first_index: int, queues: QueueStore) -> tuple[int, DispatchBatch]:
    """The messages from entry `first_index` on, up to the first one that is special, and how many entries these are,
    including those without a message. Changes nothing."""
    if isinstance(entries, EntryBatch) and entries.is_uniform and entries.last_index - first_index >= LEAST_UNIFORM - 1:
        uniform = _read_uniform(entries, first_index, queues)
        if uniform is not None:
            return uniform
    return _read_each(entries, first_index, queues)


def _read_each(entries: EntryBatch | RecordRun, first_index: int, queues: QueueStore) -> tuple[int, DispatchBatch]:
    of_queues: dict[tuple[bytes, int], QueueColumns] = {}
    keys = KeyRuns()
    prefix, crc32 = entries.prefix_bytes, zlib.crc32
    unpack, head_size = (_HEAD if prefix else _RECORD_HEAD).unpack_from, prefix + _RECORD_HEAD.size
    raw, shift, newest_ms = entries.raw, entries.pos + prefix, 0
    entry_magic, crc = NORMAL_MAGIC, 0
    number = entries.number_of(first_index)
    start = entries.ends[number - 1] if number else 0
    of_queue, known_topic, known_id, count = None, b"", -1, 0
    for end in entries.ends[number:] if number else entries.ends:
        if end - start < prefix + FIXED_SIZE_BYTES:
            if not prefix or HEADER.unpack_from(raw, start)[0] == NORMAL_MAGIC:
                break
            start, count = end, count + 1
            continue
        values: Sequence[int] = unpack(raw, start)
        if prefix:
            entry_magic, crc, *values = values
        size, magic, body_crc, queue_id, offset, position, sys_flag, stored_ms, prepared, body_size = values
        if entry_magic != NORMAL_MAGIC:
            start, count = end, count + 1
            continue
        body_at = start + head_size
        size_at = body_at + body_size
        if (
            position != start + shift or size != end - start - prefix or magic != RECORD_MAGIC
            or sys_flag & _SPECIAL or prepared or body_size < 0 or size_at + 3 > end
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
            of_queue = of_queues.get((topic, queue_id)) or _of_queue(topic, queue_id, queues)
            if of_queue is None or offset != of_queue.first + len(of_queue.sizes):
                break
            of_queues[topic, queue_id] = of_queue
            known_topic, known_id = topic, queue_id
        assert of_queue is not None
        text = raw[text_at:end]
        if offset != of_queue.first + len(of_queue.sizes) or not _is_text(text):
            break
        of_queue.positions.append(position)
        of_queue.sizes.append(size)
        of_queue.tags.append(text_tag_hash(text))
        of_queue.crcs.append(crc if prefix else crc32(raw[start:end]))
        if _KEYS in text or _UNIQUE_KEY in text:
            keys.add(of_queue.queue[0], text, position, stored_ms)
        if stored_ms > newest_ms:
            newest_ms = stored_ms
        start, count = end, count + 1
    parts = [each.part() for each in of_queues.values()]
    return count, DispatchBatch(count, parts, newest_ms, keys.runs)


def _is_text(data: bytes) -> bool:
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@lru_cache(maxsize=SIZES_REMEMBERED)
def _uniform_layout(body_size: int, topic_size: int, text_size: int) -> Struct:
    """An entry whose body, topic and properties are of these sizes; adjacent fields that have to be equal in all
    entries are read as one piece."""
    return Struct(f">{BODY_PREFIX}8sIi4xqqi16xq8x4x12s{body_size}s{topic_size + 3}s{text_size}s")


def _read_uniform(entries: EntryBatch, first_index: int, queues: QueueStore) -> tuple[int, DispatchBatch] | None:
    """`_read_each` for entries of one size, if all from `first_index` on are messages of one topic with bodies of one
    size and properties that differ in their unique keys only; None if they are not, or one is special."""
    size, at = entries.ends[0], (first_index - entries.first_index) * entries.ends[0]
    if size < _LEAST_BYTES:
        return None
    raw, count, body_size = entries.raw, entries.last_index - first_index + 1, _HEAD.unpack_from(entries.raw, at)[-1]
    topic_at = at + _HEAD.size + body_size
    if body_size < 0 or topic_at + 3 > at + size:
        return None
    topic_size = raw[topic_at]
    text_size = size - _HEAD.size - body_size - topic_size - 3
    if topic_size > MAX_TOPIC_SIZE_BYTES or text_size < 0:
        return None
    columns = _uniform_layout(body_size, topic_size, text_size).iter_unpack(memoryview(raw)[at:] if at else raw)
    magics, crcs, heads, body_crcs, queue_ids, offsets, positions, flags, stored_ms, ends, bodies, topics, texts = zip(
        *columns, strict=True
    )
    first_position, topic = entries.pos + at + HEADER_SIZE_BYTES, topics[0]
    if (
        magics.count(NORMAL_MAGIC) != count or topics.count(topic) != count
        or heads.count(_SIZE_AND_MAGIC.pack(size - HEADER_SIZE_BYTES, RECORD_MAGIC)) != count
        or ends.count(_PREPARED_AND_SIZE.pack(0, body_size)) != count
        or positions != tuple(range(first_position, first_position + count * size, size))
        or any([flag & _SPECIAL for flag in set(flags)])
        or list(body_crcs) != [crc & 0x7FFFFFFF for crc in map(zlib.crc32, bodies)]
        or topic[-2] << 8 | topic[-1] != text_size
    ):  # fmt: skip
        return None
    common = common_text(texts)
    if common is None or not _is_text(common.text):
        return None
    of_queues = _queue_columns(topic[1:-2], queue_ids, offsets, positions, crcs, queues)
    if of_queues is None:
        return None
    tag = text_tag_hash(common.text)
    for of_queue in of_queues:
        of_queue.sizes = [size - HEADER_SIZE_BYTES] * len(of_queue.positions)
        of_queue.tags = [tag] * len(of_queue.positions)
    keys, begin = KeyRuns(), 0
    for stored, length in _runs(stored_ms) if common.keys is not None else ():
        assert common.keys is not None
        end = begin + length
        run = keys.run(of_queues[0].queue[0], stored)
        run.keys.extend(common.keys[begin:end])
        run.physical_offsets.extend(positions[begin:end])
        begin = end
    return count, DispatchBatch(count, [each.part() for each in of_queues], max(0, *stored_ms), keys.runs)


def _queue_columns(
    topic: bytes,
    queue_ids: Sequence[int],
    offsets: Sequence[int],
    positions: Sequence[int],
    crcs: Sequence[int],
    queues: QueueStore,
) -> list[QueueColumns] | None:
    """The columns of each queue for messages of one topic; None if one of them is not the next of its queue."""
    runs = _runs(queue_ids)
    if len(runs) * RUN_LENGTH > len(queue_ids):  # group the messages by queue, in their order
        pick = itemgetter(*sorted(range(len(queue_ids)), key=queue_ids.__getitem__))
        queue_ids, offsets, positions, crcs = map(pick, (queue_ids, offsets, positions, crcs))
        runs = _runs(queue_ids)
    of_queues: dict[int, QueueColumns] = {}
    at = 0
    for queue_id, length in runs:
        of_queue = of_queues.get(queue_id) or _of_queue(topic, queue_id, queues)
        if of_queue is None:
            return None
        of_queues[queue_id] = of_queue
        first = of_queue.first + len(of_queue.positions)
        if tuple(offsets[at : at + length]) != tuple(range(first, first + length)):
            return None
        of_queue.positions += positions[at : at + length]
        of_queue.crcs += crcs[at : at + length]
        at += length
    return list(of_queues.values())


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of equal numbers: the number, and the length of the run."""
    return [(number, len(list(run))) for number, run in groupby(numbers)]


def _of_queue(name: bytes, queue_id: int, queues: QueueStore) -> QueueColumns | None:
    """Empty columns for a queue's messages; None if the queue does not exist yet or is internal."""
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
    return QueueColumns((topic, queue_id), queue.max_offset)
