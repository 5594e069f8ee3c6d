"""Records made many at a time: those of messages that share topic, queue, flags, hosts and time.

What they share is packed once and remembered, so that a message costs one struct, one CRC of its body and one join. The
bytes are those that `prepare_record` and `seal` make of the same message, which the tests hold against each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from struct import Struct

from node.store.record import RECORD_MAGIC, record_parts
from node.store.summed import SummedBodies

__all__ = ["RecordMaker", "RowMessage", "record_maker"]

RowMessage = tuple[int, bytes, bytes]
"""Flag, body and property text (UTF-8) of one message of a row."""

MAKER_CACHE_ENTRIES = 4096
"""One for each queue and connection that sends; a few hundred bytes each."""

_INT16 = Struct(">h")
WHOLE_STRUCTS = 256
"""Sizes of records remembered that batches consist of."""


@lru_cache(maxsize=4)
def _head(born_size: int, store_size: int) -> Struct:
    """Everything before the body. There are four of them: hosts have four or sixteen bytes and a port."""
    return Struct(f">IIIiiqq{_same(born_size, store_size).format[1:]}")


@lru_cache(maxsize=4)
def _same(born_size: int, store_size: int) -> Struct:
    """What comes between position and body: the same in all records of a batch whose bodies are of one size."""
    return Struct(f">iq{born_size}sq{store_size}siqi")


@lru_cache(maxsize=WHOLE_STRUCTS)
def _whole(same_size: int, size: int, tail_size: int) -> Struct:
    """A record of a batch of many alike: what they have in common goes in as it is."""
    return Struct(f">8sI8sqq{same_size}s{size}s{tail_size}s")


_BEFORE_CRC = Struct(">II")
"""Size and magic."""
_AFTER_CRC = Struct(">ii")
"""Queue id and flag."""
LEAST_ALIKE = 6
"""Messages of the same sizes; below these a loop is as quick."""


class RecordMaker:
    """Makes the records of one queue and sender. Made by `record_maker`."""

    __slots__ = (
        "_born", "_fixed_bytes", "_pack", "_same", "_store", "_topic", "queue", "queue_id", "sys_flag", "topic",
    )  # fmt: skip

    def __init__(self, topic: str, queue_id: int, sys_flag: int, born_host: str, store_host: str) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.queue = topic, queue_id
        topic_bytes, self._born, self._store, self.sys_flag = record_parts(topic, sys_flag, born_host, store_host)
        head = _head(len(self._born), len(self._store))
        self._pack = head.pack
        self._same = _same(len(self._born), len(self._store))
        self._topic = bytes((len(topic_bytes),)) + topic_bytes
        self._fixed_bytes = head.size + len(self._topic) + _INT16.size

    def size_of(self, body: bytes, properties: bytes) -> int:
        """Size of a record with this body and these properties."""
        return self._fixed_bytes + len(body) + len(properties)

    def sizes(self, messages: Sequence[RowMessage]) -> list[int]:
        """Sizes of the records of these messages."""
        fixed = self._fixed_bytes
        return [fixed + len(body) + len(properties) for _, body, properties in messages]

    def make_one(
        self,
        message: RowMessage,
        position: int,
        queue_offset: int,
        born_timestamp_ms: int,
        store_timestamp_ms: int,
        reconsume_times: int,
    ) -> bytes:
        """The record of one message. Raises as `make`."""
        flag, body, properties = message
        size = len(body)
        head = self._pack(
            self._fixed_bytes + size + len(properties), RECORD_MAGIC, zlib.crc32(body) & 0x7FFFFFFF, self.queue_id,
            flag, queue_offset, position, self.sys_flag, born_timestamp_ms, self._born, store_timestamp_ms,
            self._store, reconsume_times, 0, size,
        )  # fmt: skip
        return b"".join((head, body, self._topic, _INT16.pack(len(properties)), properties))

    def make(
        self,
        messages: Sequence[RowMessage],
        positions: Sequence[int],
        *,
        queue_offset: int,
        born_timestamp_ms: int,
        store_timestamp_ms: int,
        reconsume_times: int = 0,
    ) -> SummedBodies:
        """The records of messages that get consecutive numbers from `queue_offset` on and lie at `positions`.

        Raises struct.error when a number does not fit its field.
        """
        alike = self._make_alike(
            messages, positions, queue_offset, born_timestamp_ms, store_timestamp_ms, reconsume_times
        )
        if alike is not None:
            return alike
        numbered = enumerate(zip(messages, positions, strict=True), queue_offset)
        return SummedBodies(
            self.make_one(message, position, number, born_timestamp_ms, store_timestamp_ms, reconsume_times)
            for number, (message, position) in numbered
        )

    def _make_alike(
        self,
        messages: Sequence[RowMessage],
        positions: Sequence[int],
        queue_offset: int,
        born_timestamp_ms: int,
        store_timestamp_ms: int,
        reconsume_times: int,
    ) -> SummedBodies | None:
        """The same for messages that have one flag and are of the same sizes; None where they are not."""
        count = len(messages)
        if count < LEAST_ALIKE or len(positions) != count:
            return None
        flags, bodies, texts = zip(*messages, strict=True)
        flag, size, text_size = flags[0], len(bodies[0]), len(texts[0])
        if flags.count(flag) != count or len(set(map(len, bodies))) != 1 or len(set(map(len, texts))) != 1:
            return None
        same = self._same.pack(
            self.sys_flag, born_timestamp_ms, self._born, store_timestamp_ms, self._store, reconsume_times, 0, size
        )
        tail = self._topic + _INT16.pack(text_size)
        tails = [tail + text for text in texts] if text_size else repeat(tail)
        crcs = [crc & 0x7FFFFFFF for crc in map(zlib.crc32, bodies)]
        numbers = range(queue_offset, queue_offset + count)
        before = repeat(_BEFORE_CRC.pack(self._fixed_bytes + size + text_size, RECORD_MAGIC))
        after = repeat(_AFTER_CRC.pack(self.queue_id, flag))
        whole = _whole(len(same), size, len(tail) + text_size).pack
        return SummedBodies(map(whole, before, crcs, after, numbers, positions, repeat(same), bodies, tails))


record_maker = lru_cache(maxsize=MAKER_CACHE_ENTRIES)(RecordMaker)
"""The maker for a topic, queue id, system flag, born host and store host. Raises RecordError where `prepare_record`
does."""
