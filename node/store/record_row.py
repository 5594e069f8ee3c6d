"""Records made many at a time: those of messages that share topic, queue, flags, hosts and time.

What they share is packed once and remembered, so that a message costs one struct, one CRC of its body and one join. The
bytes are those that `prepare_record` and `seal` make of the same message, which the tests hold against each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct

from node.store.record import RECORD_MAGIC, record_parts

__all__ = ["RecordMaker", "RowMessage", "record_maker"]

RowMessage = tuple[int, bytes, bytes]
"""Flag, body and property text (UTF-8) of one message of a row."""

MAKER_CACHE_ENTRIES = 4096
"""One for each queue and connection that sends; a few hundred bytes each."""

_INT16 = Struct(">h")
WHOLE_STRUCTS = 256
"""Sizes of records remembered that batches consist of."""
_structs: dict[tuple[int, int], Struct] = {}


def _head(born_size: int, store_size: int) -> Struct:
    """Everything before the body. There are four of them: hosts have four or sixteen bytes and a port."""
    known = _structs.get((born_size, store_size))
    if known is None:
        known = _structs[born_size, store_size] = Struct(f">IIIiiqqiq{born_size}sq{store_size}siqi")
    return known


@lru_cache(maxsize=WHOLE_STRUCTS)
def _whole(born_size: int, store_size: int, size: int, topic_size: int, properties_size: int) -> Struct:
    """Whole records of these sizes: for a batch of many alike."""
    return Struct(f"{_head(born_size, store_size).format}{size}s{topic_size}sh{properties_size}s")


class RecordMaker:
    """Makes the records of one queue and sender. Made by `record_maker`."""

    __slots__ = ("_born", "_fixed_bytes", "_pack", "_store", "_topic", "queue", "queue_id", "sys_flag", "topic")

    def __init__(self, topic: str, queue_id: int, sys_flag: int, born_host: str, store_host: str) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.queue = topic, queue_id
        topic_bytes, self._born, self._store, self.sys_flag = record_parts(topic, sys_flag, born_host, store_host)
        head = _head(len(self._born), len(self._store))
        self._pack = head.pack
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
    ) -> list[bytes]:
        """The records of messages that get consecutive numbers from `queue_offset` on and lie at `positions`.

        Raises struct.error when a number does not fit its field.
        """
        pack, crc32, queue_id = self._pack, zlib.crc32, self.queue_id
        sys_flag, born, store, topic, fixed = self.sys_flag, self._born, self._store, self._topic, self._fixed_bytes
        records = []
        whole, whole_size, whole_properties = None, -1, -1
        for number, (position, (flag, body, properties)) in enumerate(
            zip(positions, messages, strict=True), queue_offset
        ):
            size = len(body)
            if size == whole_size and len(properties) == whole_properties:  # of the sizes of the one before
                if whole is None:
                    whole = _whole(len(born), len(store), size, len(topic), whole_properties).pack
                    total = fixed + size + whole_properties
                records.append(
                    whole(
                        total, RECORD_MAGIC, crc32(body) & 0x7FFFFFFF, queue_id, flag, number, position, sys_flag,
                        born_timestamp_ms, born, store_timestamp_ms, store, reconsume_times, 0, size, body, topic,
                        whole_properties, properties,
                    )
                )  # fmt: skip
                continue
            whole, whole_size, whole_properties = None, size, len(properties)
            head = pack(
                fixed + size + len(properties), RECORD_MAGIC, crc32(body) & 0x7FFFFFFF, queue_id, flag, number,
                position, sys_flag, born_timestamp_ms, born, store_timestamp_ms, store, reconsume_times, 0, size,
            )  # fmt: skip
            records.append(b"".join((head, body, topic, _INT16.pack(len(properties)), properties)))
        return records


record_maker = lru_cache(maxsize=MAKER_CACHE_ENTRIES)(RecordMaker)
"""The maker for a topic, queue id, system flag, born host and store host. Raises RecordError where `prepare_record`
does."""
