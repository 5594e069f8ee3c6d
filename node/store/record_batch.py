"""Batches of records: messages of one queue and sender, with topic, hosts and times in common.

What they share is packed once and cached, so that a message costs one struct, one CRC of its body and one join. A
message that comes alone is a batch of one.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from struct import Struct

from node.interpreter import least_rows
from node.store.checksummed import ChecksummedBodies
from node.store.properties import join_properties
from node.store.record import MAX_PROPERTIES_SIZE_BYTES, RECORD_MAGIC, Message, RecordError, record_parts
from node.store.unique_keys import common_text

__all__ = ["RecordBatch", "RecordMaker", "batch_of_one", "encode_record", "record_maker"]

MAKER_CACHE_ENTRIES = 4096
"""One for each sending connection and queue; a few hundred bytes each."""

_INT16 = Struct(">h")
WHOLE_STRUCTS = 256
"""Structs that are cached, one for each combination of sizes in a uniform batch."""


@lru_cache(maxsize=4)
def _head(born_size: int, store_size: int) -> Struct:
    """Struct of everything before the body. There are four: hosts have four or sixteen bytes and a port."""
    return Struct(f">IIIiiqq{_same(born_size, store_size).format[1:]}")


@lru_cache(maxsize=4)
def _same(born_size: int, store_size: int) -> Struct:
    """Struct of what comes between position and body: equal in all records of a batch whose bodies are of one size."""
    return Struct(f">iq{born_size}sq{store_size}siqi")


@lru_cache(maxsize=WHOLE_STRUCTS)
def _whole(same_size: int, size: int, tail_size: int, text_size: int) -> Struct:
    """Struct of a whole record of a uniform batch: what the records have in common goes in as it is."""
    return Struct(f">8sI8sqq{same_size}s{size}s{tail_size}s{text_size}s")


_BEFORE_CRC = Struct(">II")
"""Size and magic."""
_AFTER_CRC = Struct(">ii")
"""Queue id and flag."""
LEAST_UNIFORM = least_rows(6)
"""Fewest messages of the same sizes that are packed together; for fewer a loop is as quick."""


class RecordBatch:
    """Messages for one queue, in columns: flag, body and property text (UTF-8) of each. `common` and `keys` are given
    if each message is known to have exactly one key in its properties; `is_uniform` if that is known."""

    __slots__ = (
        "bodies", "born_timestamp_ms", "common", "count", "flags", "is_uniform", "keys", "maker",
        "prepared_transaction_offset", "reconsume_times", "record_bytes", "texts",
    )  # fmt: skip

    def __init__(
        self,
        maker: RecordMaker,
        flags: Sequence[int],
        bodies: Sequence[bytes],
        texts: Sequence[bytes],
        born_timestamp_ms: int,
        reconsume_times: int = 0,
        prepared_transaction_offset: int = 0,
        common: bytes | None = None,
        keys: Sequence[bytes] | None = None,
        *,
        is_uniform: bool = False,
    ) -> None:
        self.maker = maker
        self.flags = flags
        self.bodies = bodies
        self.texts = texts
        self.born_timestamp_ms = born_timestamp_ms
        self.reconsume_times = reconsume_times
        self.prepared_transaction_offset = prepared_transaction_offset
        self.count = count = len(bodies)
        self.record_bytes = maker.fixed_bytes + len(bodies[0]) + len(texts[0])
        """Size of the first record, and of all if they are uniform."""
        self.is_uniform = is_uniform or count == 1 or (_are_of_one_size(texts) and _are_of_one_size(bodies))
        """Whether all bodies are of one size, and all property texts too."""
        self.common = common
        """What the properties of the messages have in common, without their keys; None if that is not known."""
        self.keys = keys
        """The only key of each message, if `common` is known; None if no message has one."""
        if common is None and self.is_uniform and count > 1:
            known = common_text(texts)
            if known is not None:
                self.common, self.keys = known

    def sizes(self) -> list[int]:
        """Sizes of the records."""
        if self.is_uniform:
            return [self.record_bytes] * self.count
        fixed = self.maker.fixed_bytes
        return [fixed + body + text for body, text in zip(map(len, self.bodies), map(len, self.texts), strict=True)]

    def records(self, positions: Sequence[int], *, queue_offset: int, store_timestamp_ms: int) -> ChecksummedBodies:
        """The records: they get consecutive queue offsets from `queue_offset` on and begin at `positions`.

        Raises struct.error if a number does not fit its field.
        """
        flags = self.flags
        if self.is_uniform and self.count >= LEAST_UNIFORM and flags.count(flags[0]) == self.count:
            return self._uniform(positions, queue_offset, store_timestamp_ms)
        return ChecksummedBodies(
            [self.record(positions[at], queue_offset + at, store_timestamp_ms, at) for at in range(self.count)]
        )

    def record(self, position: int, queue_offset: int, store_timestamp_ms: int, at: int = 0) -> bytes:
        """The record of message number `at` of the batch. Raises like `records`."""
        maker, body, text = self.maker, self.bodies[at], self.texts[at]
        size = len(body)
        head = maker.pack_head(
            maker.fixed_bytes + size + len(text), RECORD_MAGIC, zlib.crc32(body) & 0x7FFFFFFF, maker.queue_id,
            self.flags[at], queue_offset, position, maker.sys_flag, self.born_timestamp_ms, maker.born,
            store_timestamp_ms, maker.store, self.reconsume_times, self.prepared_transaction_offset, size,
        )  # fmt: skip
        return b"".join((head, body, maker.topic_field, _INT16.pack(len(text)), text))

    def _uniform(self, positions: Sequence[int], queue_offset: int, store_timestamp_ms: int) -> ChecksummedBodies:
        """`records` for messages with equal flags and equal sizes."""
        bodies, texts, flag, maker = self.bodies, self.texts, self.flags[0], self.maker
        count, size, text_size = len(bodies), len(bodies[0]), len(texts[0])
        same = maker.same.pack(
            maker.sys_flag, self.born_timestamp_ms, maker.born, store_timestamp_ms, maker.store, self.reconsume_times,
            self.prepared_transaction_offset, size,
        )  # fmt: skip
        tail = maker.topic_field + _INT16.pack(text_size)
        crcs = [crc & 0x7FFFFFFF for crc in map(zlib.crc32, bodies)]
        numbers = range(queue_offset, queue_offset + count)
        before = repeat(_BEFORE_CRC.pack(maker.fixed_bytes + size + text_size, RECORD_MAGIC))
        after = repeat(_AFTER_CRC.pack(maker.queue_id, flag))
        whole = _whole(len(same), size, len(tail), text_size).pack
        return ChecksummedBodies(
            map(whole, before, crcs, after, numbers, positions, repeat(same), bodies, repeat(tail), texts)
        )


def _are_of_one_size(columns: Sequence[bytes]) -> bool:
    return list(map(len, columns)).count(len(columns[0])) == len(columns)


class RecordMaker:
    """What the records of one queue and sender have in common. Create it with `record_maker`."""

    __slots__ = (
        "born", "fixed_bytes", "pack_head", "queue", "queue_id", "same", "store", "sys_flag", "topic", "topic_field",
    )  # fmt: skip

    def __init__(self, topic: str, queue_id: int, sys_flag: int, born_host: str, store_host: str) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.queue = topic, queue_id
        topic_bytes, self.born, self.store, self.sys_flag = record_parts(topic, sys_flag, born_host, store_host)
        head = _head(len(self.born), len(self.store))
        self.pack_head = head.pack
        self.same = _same(len(self.born), len(self.store))
        self.topic_field = bytes((len(topic_bytes),)) + topic_bytes
        self.fixed_bytes = head.size + len(self.topic_field) + _INT16.size


record_maker = lru_cache(maxsize=MAKER_CACHE_ENTRIES)(RecordMaker)
"""The maker for a topic, queue id, system flag, born host and store host. Raises RecordError for a topic that is too
long, empty or not valid text, and for a host that is not "ip:port"."""


def batch_of_one(
    *,
    topic: str,
    queue_id: int,
    body: bytes,
    properties_text: str = "",
    sys_flag: int = 0,
    flag: int = 0,
    born_timestamp_ms: int = 0,
    born_host: str = "0.0.0.0:0",
    store_host: str = "0.0.0.0:0",
    reconsume_times: int = 0,
    prepared_transaction_offset: int = 0,
) -> RecordBatch:
    """A batch of a single message.

    The IPv6 bits of `sys_flag` are set from the hosts, whatever the caller passed. Raises RecordError if the topic or
    the properties are too long or not valid text, the topic is empty, or a host is not "ip:port".
    """
    try:
        text = properties_text.encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"topic or properties cannot be written as UTF-8: {error.reason}") from error
    if len(text) > MAX_PROPERTIES_SIZE_BYTES:
        raise RecordError(f"properties of {len(text)} bytes, allowed are {MAX_PROPERTIES_SIZE_BYTES}")
    maker = record_maker(topic, queue_id, sys_flag, born_host, store_host)
    return RecordBatch(
        maker, (flag,), (body,), (text,), born_timestamp_ms, reconsume_times, prepared_transaction_offset
    )


def encode_record(message: Message) -> bytes:
    """The bytes of `message`; `body_crc` and the IPv6 bits are computed, not copied. Raises RecordError; struct.error
    if a number does not fit its field."""
    batch = batch_of_one(
        topic=message.topic,
        queue_id=message.queue_id,
        body=message.body,
        properties_text=join_properties(message.properties),
        sys_flag=message.sys_flag,
        flag=message.flag,
        born_timestamp_ms=message.born_timestamp_ms,
        born_host=message.born_host,
        store_host=message.store_host,
        reconsume_times=message.reconsume_times,
        prepared_transaction_offset=message.prepared_transaction_offset,
    )
    (record,) = batch.records(
        (message.physical_offset,),
        queue_offset=message.queue_offset,
        store_timestamp_ms=message.store_timestamp_ms,
    )
    return record
