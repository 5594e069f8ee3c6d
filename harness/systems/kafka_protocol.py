"""The part of Kafka's protocol that a client of the harness needs: metadata, topics, single-record produce, fetch.

Nothing is retried and nothing is cached, so each operation is one request and has its outcome. Request versions are old
ones that Kafka 3.9 still accepts; their fields are in Kafka's protocol guide.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.sdk import Refused, Streams
from harness.systems.answer_fields import FieldReader

__all__ = ["KafkaError", "Partition", "create_topic", "fetch", "metadata", "produce"]

MAX_ANSWER_BYTES = 16 << 20
"""Limit of one answer; fetches ask for at most a megabyte."""

FETCH_BYTES = 1 << 20
CLIENT_ID = "splitbrain"

_PRODUCE, _FETCH, _METADATA, _CREATE_TOPICS = (0, 3), (1, 4), (3, 1), (19, 2)
"""API key and version of each request."""

_DEFINITE = frozenset({3, 5, 19})
"""Errors after which nothing was appended: unknown partition, no leader, too few replicas in sync. NOT_LEADER (6) is
not definite: the broker may have appended and lost leadership while it waited for the others."""

TOPIC_EXISTS = 36


class KafkaError(Exception):
    """A broker answered with an error code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"error code {code}")
        self.code = code
        self.is_definite = code in _DEFINITE


@dataclass(frozen=True, slots=True)
class Partition:
    """Leader and in-sync replicas of a partition, as one broker knows them; the leader is -1 if there is none."""

    leader: int
    in_sync: tuple[int, ...]


class _Reader(FieldReader):
    """Strings and counts as Kafka encodes them."""

    def text(self) -> str:
        size = self.number("h")
        return "" if size < 0 else self.take(size).decode()

    def data(self) -> bytes:
        size = self.number("i")
        return b"" if size < 0 else self.take(size)

    def count(self) -> range:
        return range(max(0, self.number("i")))

    def varint(self) -> int:
        shift = value = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (value >> 1) ^ -(value & 1)
            shift += 7
            if shift > 63:
                raise ValueError("a number of too many bytes")


@dataclass(slots=True)
class _Writer:
    data: bytearray = field(default_factory=bytearray)

    def number(self, form: str, *values: int) -> _Writer:
        self.data += struct.pack(f">{form}", *values)
        return self

    def text(self, value: str | None) -> _Writer:
        encoded = b"" if value is None else value.encode()
        self.number("h", -1 if value is None else len(encoded))
        self.data += encoded
        return self

    def bytes(self, value: bytes) -> _Writer:
        self.number("i", len(value))
        self.data += value
        return self


async def _ask(streams: Streams, api: tuple[int, int], body: _Writer) -> _Reader:
    """Send a request and return its answer. Raises ValueError, EOFError or OSError if no valid answer arrives."""
    head = _Writer().number("hhi", *api, 1).text(CLIENT_ID)
    streams[1].write(bytes(_Writer().bytes(bytes(head.data + body.data)).data))
    size = struct.unpack(">i", await streams[0].readexactly(4))[0]
    if not 4 <= size <= MAX_ANSWER_BYTES:
        raise ValueError(f"an answer of {size} bytes")
    reader = _Reader(await streams[0].readexactly(size))
    reader.number("i")
    return reader


async def metadata(streams: Streams, topic: str) -> tuple[Mapping[int, str], Mapping[int, Partition]]:
    """(broker -> "ip:port", number -> partition), as the broker knows them. Raises KafkaError."""
    reader = await _ask(streams, _METADATA, _Writer().number("i", 1).text(topic))
    brokers = {}
    for _ in reader.count():
        number, host, port = reader.number("i"), reader.text(), reader.number("i")
        reader.text()
        brokers[number] = f"{host}:{port}"
    reader.number("i")
    partitions = {}
    for _ in reader.count():
        if code := reader.number("h"):
            raise KafkaError(code)
        reader.text()
        reader.number("b")
        for _ in reader.count():
            reader.number("h")
            number, leader = reader.number("i"), reader.number("i")
            for _ in reader.count():
                reader.number("i")
            partitions[number] = Partition(leader, tuple(reader.number("i") for _ in reader.count()))
    return brokers, partitions


async def create_topic(streams: Streams, topic: str, *, partitions: int, replicas: int, timeout_ms: int) -> None:
    """Create a topic; does nothing if it exists. Raises KafkaError."""
    body = _Writer().number("i", 1).text(topic).number("ihii", partitions, replicas, 0, 0)
    reader = await _ask(streams, _CREATE_TOPICS, body.number("ib", timeout_ms, 0))
    reader.number("i")
    for _ in reader.count():
        reader.text()
        code = reader.number("h")
        reader.text()
        if code not in (0, TOPIC_EXISTS):
            raise KafkaError(code)


async def produce(streams: Streams, topic: str, partition: int, value: bytes, *, acks: int, timeout_ms: int) -> int:
    """Append one record; returns its offset. `acks` is 1, or -1 for all in-sync replicas. Raises KafkaError."""
    body = _Writer().text(None).number("hi", acks, timeout_ms).number("i", 1).text(topic).number("ii", 1, partition)
    reader = await _ask(streams, _PRODUCE, body.bytes(_batch(value)))
    for _ in reader.count():
        reader.text()
        for _ in reader.count():
            reader.number("i")
            code, offset = reader.number("h"), reader.number("q")
            if code:
                raise KafkaError(code)
            return offset
    raise ValueError("the answer names no partition")


async def fetch(streams: Streams, topic: str, partition: int, offset: int) -> tuple[Sequence[tuple[int, bytes]], int]:
    """([(offset, value), ...] from `offset` on, high watermark); the list is empty at the log's end. Raises KafkaError,
    and Refused for an offset beyond the log's end."""
    body = _Writer().number("iiiib", -1, 0, 1, FETCH_BYTES, 0).number("i", 1).text(topic)
    reader = await _ask(streams, _FETCH, body.number("iiqi", 1, partition, offset, FETCH_BYTES))
    reader.number("i")
    for _ in reader.count():
        reader.text()
        for _ in reader.count():
            reader.number("i")
            code, watermark = reader.number("h"), reader.number("q")
            reader.number("q")
            for _ in reader.count():
                reader.take(16)
            if code == 1:
                raise Refused(f"offset {offset} is out of range")
            if code:
                raise KafkaError(code)
            found = [each for each in _records(reader.data()) if each[0] >= offset]
            return found, watermark
    raise ValueError("the answer names no partition")


def _batch(value: bytes) -> bytes:
    """A record batch (magic 2) of one record, without key, headers or producer id."""
    record = b"\0" + _varint(0) + _varint(0) + _varint(-1) + _varint(len(value)) + value + _varint(0)
    now_ms = time.time_ns() // 1_000_000
    rest = struct.pack(">hiqqqhii", 0, 0, now_ms, now_ms, -1, -1, -1, 1) + _varint(len(record)) + record
    tail = struct.pack(">ibI", -1, 2, _crc32c(rest)) + rest
    return struct.pack(">qi", 0, len(tail)) + tail


def _records(data: bytes) -> Sequence[tuple[int, bytes]]:
    """The (offset, value) pairs of complete batches; the size limit of the fetch may truncate the last batch."""
    reader, found = _Reader(data), []
    while reader.left >= 12:
        base, size = reader.number("q"), reader.number("i")
        if reader.left < size:
            break
        batch = _Reader(reader.take(size))
        batch.take(4 + 1 + 4 + 2 + 4 + 8 + 8 + 8 + 2 + 4)
        for _ in batch.count():
            record = _Reader(batch.take(batch.varint()))
            record.take(1)
            record.varint()
            offset = base + record.varint()
            record.take(max(0, record.varint()))
            found.append((offset, record.take(max(0, record.varint()))))
    return found


def _varint(value: int) -> bytes:
    rest, out = (value << 1) ^ (value >> 63), bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def _crc_table() -> Sequence[int]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return table


_CRC_TABLE = _crc_table()


def _crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), which Python's standard library lacks; values here are short."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF
