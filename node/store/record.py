"""The message record: the layout of one message in the commit log, bit for bit as RocketMQ 4.x stores it.

All integers are big-endian. With IPv4 hosts the fixed fields take 91 bytes:

    offset  size  field                        offset  size  field
         0     4  total size                       48     8  born host: IPv4, port as int32
         4     4  magic (record or blank)          56     8  store timestamp, ms
         8     4  body crc32, top bit cleared      64     8  store host: IPv4, port as int32
        12     4  queue id                         72     4  reconsume times
        16     4  flag (the client's own)          76     8  prepared transaction offset
        20     8  queue offset                     84     4  body length, then the body
        28     8  physical offset                   .     1  topic length, then the topic
        36     4  system flag                       .     2  properties length, then the properties
        40     8  born timestamp, ms

System flag bits 16 and 32 say that the born or the store host is an IPv6 address and takes 20 bytes.
A blank record (magic 0xCBD43194) fills the rest of a file into which the next message would not fit.

Records are read here; they are made in batches (`node.store.record_batch`).

Sources: seed S1 (CommitLog.doAppend, the seventeen fields); RocketMQ 4.9 MessageDecoder (R) for the IPv6
bits, the blank record and the message id.
"""

from __future__ import annotations

import ipaddress
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from node.store.properties import TAGS, decode_properties, property_value

__all__ = [
    "BLANK_MAGIC",
    "FIXED_SIZE_BYTES",
    "MAX_PROPERTIES_SIZE_BYTES",
    "MAX_TOPIC_SIZE_BYTES",
    "RECORD_MAGIC",
    "SYS_FLAG_BORN_HOST_V6",
    "SYS_FLAG_COMPRESSED",
    "SYS_FLAG_STORE_HOST_V6",
    "SYS_FLAG_TRANSACTION_COMMIT",
    "SYS_FLAG_TRANSACTION_MASK",
    "SYS_FLAG_TRANSACTION_PREPARED",
    "SYS_FLAG_TRANSACTION_ROLLBACK",
    "Message",
    "RecordError",
    "RecordSummary",
    "body_crc",
    "decode_record",
    "decode_records",
    "java_string_hash",
    "message_id",
    "record_parts",
    "summarize_record",
    "tag_hash",
]

RECORD_MAGIC = 0xDAA320A7
BLANK_MAGIC = 0xCBD43194
FIXED_SIZE_BYTES = 91
"""Size of a record with IPv4 hosts, an empty body, an empty topic and no properties."""

MAX_TOPIC_SIZE_BYTES = 127
"""The topic's length is a signed byte (R: Byte.MAX_VALUE)."""
MAX_PROPERTIES_SIZE_BYTES = 32767
"""The properties' length is a signed 16-bit integer (R: Short.MAX_VALUE)."""

SYS_FLAG_COMPRESSED = 1
SYS_FLAG_TRANSACTION_PREPARED = 4
SYS_FLAG_TRANSACTION_COMMIT = 8
SYS_FLAG_TRANSACTION_ROLLBACK = 12
SYS_FLAG_TRANSACTION_MASK = 12
SYS_FLAG_BORN_HOST_V6 = 16
SYS_FLAG_STORE_HOST_V6 = 32

HASH_CACHE_ENTRIES = 4096
"""Tags and hosts repeat; a cache this size holds every one in use and stays under a megabyte."""

_HEAD = struct.Struct(">IIIiiqqiq")
_TAIL = struct.Struct(">iqi")
_V4_HEAD = struct.Struct(">IIIi4xqqi16xq8x4xqi")
"""The fields that a summary needs of everything before the body of a record with IPv4 hosts."""
_INT64 = struct.Struct(">q")
_UINT32_PAIR = struct.Struct(">II")
_INT16 = struct.Struct(">h")
_PORT = struct.Struct(">i")

_V4_HOST_SIZE_BYTES = 8
_V6_HOST_SIZE_BYTES = 20


class RecordError(Exception):
    """Bytes that are not an intact record, or a message that cannot be written as one.

    `position` is the offset in the given buffer at which the bad record begins (0 when encoding).
    """

    def __init__(self, reason: str, *, position: int = 0) -> None:
        super().__init__(f"record at offset {position}: {reason}")
        self.reason = reason
        self.position = position


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One stored message. Hosts are "ip:port" ("[ip6]:port"); `body` is as stored (maybe compressed)."""

    topic: str
    queue_id: int
    body: bytes
    properties: Mapping[str, str]
    queue_offset: int = 0
    physical_offset: int = 0
    sys_flag: int = 0
    flag: int = 0
    born_timestamp_ms: int = 0
    born_host: str = "0.0.0.0:0"
    store_timestamp_ms: int = 0
    store_host: str = "0.0.0.0:0"
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    body_crc: int = 0

    @property
    def message_id(self) -> str:
        """The broker's id of the message: store host and physical offset in upper-case hex."""
        return message_id(self.store_host, self.physical_offset)

    @property
    def tags(self) -> str | None:
        """The TAGS property."""
        return self.properties.get(TAGS)


class RecordSummary(NamedTuple):
    """Where a record belongs, and its tags: what is needed of it to build and read queues and indexes."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    store_timestamp_ms: int
    tags: str | None
    properties_text: str
    prepared_transaction_offset: int
    body: bytes = b""
    """Given for topics whose messages tell the broker something; empty for all others."""


def body_crc(body: bytes) -> int:
    """CRC-32 of a body with the sign bit cleared, as stored in the record (R: UtilAll.crc32)."""
    return zlib.crc32(body) & 0x7FFFFFFF


def record_parts(topic: str, sys_flag: int, born_host: str, store_host: str) -> tuple[bytes, bytes, bytes, int]:
    """Topic, born host and store host as stored in a record, and the system flag with the IPv6 bits for these hosts.
    Raises RecordError for a topic that is too long, empty or not valid text, and for a host that is not "ip:port"."""
    try:
        topic_bytes = topic.encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"topic or properties cannot be written as UTF-8: {error.reason}") from error
    if not 0 < len(topic_bytes) <= MAX_TOPIC_SIZE_BYTES:
        raise RecordError(f"topic of {len(topic_bytes)} bytes, allowed are 1 to {MAX_TOPIC_SIZE_BYTES}")
    born, store = _host_bytes(born_host), _host_bytes(store_host)
    sys_flag &= ~(SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6)
    if len(born) == _V6_HOST_SIZE_BYTES:
        sys_flag |= SYS_FLAG_BORN_HOST_V6
    if len(store) == _V6_HOST_SIZE_BYTES:
        sys_flag |= SYS_FLAG_STORE_HOST_V6
    return topic_bytes, born, store, sys_flag


class _Layout(NamedTuple):
    """Offsets and sizes of the parts of one record; offsets are relative to the buffer."""

    start: int
    end: int
    sys_flag: int
    born_at: int
    store_timestamp_at: int
    store_at: int
    body_at: int
    body_size: int
    topic_at: int
    topic_size: int
    properties_at: int
    properties_size: int


def _layout(data: bytes | memoryview, position: int) -> _Layout:
    """Check one record's structure (sizes, magic) and find its parts. Raises RecordError."""
    available = len(data) - position
    if available < 8:
        raise RecordError(f"{available} bytes left, too few for a record", position=position)
    total, magic = _UINT32_PAIR.unpack_from(data, position)
    if magic != RECORD_MAGIC:
        raise RecordError(f"magic {magic:#010x} is not that of a record", position=position)
    if not FIXED_SIZE_BYTES <= total <= available:
        raise RecordError(f"total size {total} with {available} bytes left", position=position)
    sys_flag = int.from_bytes(data[position + 36 : position + 40], "big", signed=True)
    born_size = _V6_HOST_SIZE_BYTES if sys_flag & SYS_FLAG_BORN_HOST_V6 else _V4_HOST_SIZE_BYTES
    store_size = _V6_HOST_SIZE_BYTES if sys_flag & SYS_FLAG_STORE_HOST_V6 else _V4_HOST_SIZE_BYTES
    end = position + total
    born_at = position + _HEAD.size
    store_timestamp_at = born_at + born_size
    store_at = store_timestamp_at + 8
    body_at = store_at + store_size + _TAIL.size
    if body_at + 3 > end:
        raise RecordError("too short for its hosts", position=position)
    body_size = int.from_bytes(data[body_at - 4 : body_at], "big", signed=True)
    topic_at = body_at + body_size + 1
    if body_size < 0 or topic_at + 2 > end:
        raise RecordError(f"body length {body_size} does not fit", position=position)
    topic_size = data[topic_at - 1]
    properties_at = topic_at + topic_size + 2
    if topic_size > MAX_TOPIC_SIZE_BYTES or properties_at > end:
        raise RecordError(f"topic length {topic_size} does not fit", position=position)
    properties_size = int.from_bytes(data[properties_at - 2 : properties_at], "big", signed=True)
    if properties_size < 0 or properties_at + properties_size != end:
        raise RecordError(f"properties length {properties_size} does not end the record", position=position)
    return _Layout(
        position,
        end,
        sys_flag,
        born_at,
        store_timestamp_at,
        store_at,
        body_at,
        body_size,
        topic_at,
        topic_size,
        properties_at,
        properties_size,
    )


def _text(data: bytes | memoryview, start: int, size: int, record_at: int) -> str:
    try:
        return bytes(data[start : start + size]).decode()
    except UnicodeDecodeError as error:
        raise RecordError("topic or properties are not UTF-8", position=record_at) from error


def _check_crc(data: bytes | memoryview, layout: _Layout, stored: int) -> None:
    computed = zlib.crc32(data[layout.body_at : layout.body_at + layout.body_size]) & 0x7FFFFFFF
    if stored != computed:
        raise RecordError(f"body CRC is {computed:#010x}, the record says {stored:#010x}", position=layout.start)


def decode_record(data: bytes | memoryview, position: int = 0) -> tuple[Message, int]:
    """The record at `position` and the offset just after it.

    Raises RecordError if the structure or the body's CRC is wrong.
    """
    layout = _layout(data, position)
    _, _, crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born_timestamp_ms = _HEAD.unpack_from(
        data, position
    )
    _check_crc(data, layout, crc)
    reconsume_times, prepared_offset, _ = _TAIL.unpack_from(data, layout.body_at - _TAIL.size)
    message = Message(
        topic=_text(data, layout.topic_at, layout.topic_size, position),
        queue_id=queue_id,
        body=bytes(data[layout.body_at : layout.body_at + layout.body_size]),
        properties=decode_properties(_text(data, layout.properties_at, layout.properties_size, position)),
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        sys_flag=sys_flag,
        flag=flag,
        born_timestamp_ms=born_timestamp_ms,
        born_host=_host_text(bytes(data[layout.born_at : layout.store_timestamp_at])),
        store_timestamp_ms=_INT64.unpack_from(data, layout.store_timestamp_at)[0],
        store_host=_host_text(bytes(data[layout.store_at : layout.body_at - _TAIL.size])),
        reconsume_times=reconsume_times,
        prepared_transaction_offset=prepared_offset,
        body_crc=crc,
    )
    return message, layout.end


def decode_records(data: bytes) -> list[Message]:
    """Every record in `data`, which holds whole records one after another (the body of a pull reply).

    Raises RecordError for anything that is not an intact record, so a short or damaged reply is never
    taken for a shorter one.
    """
    messages: list[Message] = []
    position = 0
    while position < len(data):
        message, position = decode_record(data, position)
        messages.append(message)
    return messages


def summarize_record(data: bytes | memoryview) -> RecordSummary:
    """The summary of the one record in `data`, with structure and CRC checked; cheaper than decoding it.

    Raises RecordError, also if bytes follow the record.
    """
    size = len(data)
    if size >= FIXED_SIZE_BYTES:
        (
            total, magic, crc, queue_id, queue_offset, physical_offset, sys_flag, stored_ms, prepared, body_size
        ) = _V4_HEAD.unpack_from(data)  # fmt: skip
        topic_at = _V4_HEAD.size + body_size + 1
        if (
            total == size
            and magic == RECORD_MAGIC
            and not sys_flag & (SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6)
            and body_size >= 0
            and topic_at + 2 <= size
        ):
            properties_at = topic_at + data[topic_at - 1] + 2
            if (
                properties_at <= size
                and data[topic_at - 1] <= MAX_TOPIC_SIZE_BYTES
                and int.from_bytes(data[properties_at - 2 : properties_at], "big") == size - properties_at
                and zlib.crc32(data[_V4_HEAD.size : topic_at - 1]) & 0x7FFFFFFF == crc
            ):
                text = _text(data, properties_at, size - properties_at, 0) if properties_at < size else ""
                topic = _text(data, topic_at, properties_at - 2 - topic_at, 0)
                tags = property_value(text, TAGS) if text else None
                return RecordSummary(
                    topic, queue_id, queue_offset, physical_offset, sys_flag, stored_ms, tags, text, prepared
                )
    return _summarize_any(data)


def _summarize_any(data: bytes | memoryview) -> RecordSummary:
    """`summarize_record` for any record, also with IPv6 hosts; raises RecordError if `data` is not exactly one."""
    layout = _layout(data, 0)
    if layout.end != len(data):
        raise RecordError(f"{len(data) - layout.end} bytes behind the record", position=0)
    _, _, crc, queue_id, _, queue_offset, physical_offset, sys_flag, _ = _HEAD.unpack_from(data, 0)
    _check_crc(data, layout, crc)
    properties = _text(data, layout.properties_at, layout.properties_size, 0)
    return RecordSummary(
        _text(data, layout.topic_at, layout.topic_size, 0),
        queue_id,
        queue_offset,
        physical_offset,
        sys_flag,
        _INT64.unpack_from(data, layout.store_timestamp_at)[0],
        property_value(properties, TAGS),
        properties,
        _INT64.unpack_from(data, layout.body_at - 12)[0],
    )


@lru_cache(maxsize=HASH_CACHE_ENTRIES)
def java_string_hash(text: str) -> int:
    """Java's `String.hashCode`: over UTF-16 code units, as a signed 32-bit number."""
    value = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for at in range(0, len(units), 2):
        value = (31 * value + (units[at] << 8 | units[at + 1])) & 0xFFFFFFFF
    return value - (1 << 32) if value & 0x80000000 else value


def tag_hash(tags: str | None) -> int:
    """The hash in a consume queue unit: that of the TAGS property, 0 without tags (R)."""
    return java_string_hash(tags) if tags else 0


def message_id(store_host: str, physical_offset: int) -> str:
    """Upper-case hex of the store host's address and port and the physical offset (R: createMessageId)."""
    return (_host_bytes(store_host) + _INT64.pack(physical_offset)).hex().upper()


@lru_cache(maxsize=HASH_CACHE_ENTRIES)
def _host_bytes(host: str) -> bytes:
    """Address and int32 port of "ip:port" or "[ip6]:port". Raises RecordError."""
    address, _, port = host.rpartition(":")
    try:
        packed = ipaddress.ip_address(address.removeprefix("[").removesuffix("]").partition("%")[0]).packed
        return packed + _PORT.pack(int(port))
    except (ValueError, struct.error) as error:
        raise RecordError(f"host {host!r} is not ip:port") from error


@lru_cache(maxsize=HASH_CACHE_ENTRIES)
def _host_text(packed: bytes) -> str:
    address = ipaddress.ip_address(packed[:-4])
    port = _PORT.unpack(packed[-4:])[0]
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
