"""Kafka's protocol as the harness's client speaks it, against answers written out byte by byte."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from harness.sdk import Refused
from harness.systems import kafka_protocol as kafka


def text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


def ask(answer: bytes, request: Callable[[Any], Awaitable[Any]], seen: list[bytes] | None = None) -> Any:
    """The result of a request if the broker answers with these bytes; `seen` gets the request without its size."""

    async def main() -> Any:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            size = struct.unpack(">i", await reader.readexactly(4))[0]
            body = await reader.readexactly(size)
            if seen is not None:
                seen.append(body)
            writer.write(struct.pack(">ii", len(answer) + 4, 1) + answer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            streams = await asyncio.open_connection(*server.sockets[0].getsockname())
            try:
                return await request(streams)
            finally:
                streams[1].close()

    return asyncio.run(main())


def produced(code: int, offset: int) -> bytes:
    return struct.pack(">i", 1) + text("t") + struct.pack(">iihqqi", 1, 0, code, offset, -1, 0)


def fetched(code: int, watermark: int, records: bytes) -> bytes:
    head = struct.pack(">ii", 0, 1) + text("t") + struct.pack(">iihqqi", 1, 0, code, watermark, watermark, -1)
    return head + struct.pack(">i", len(records)) + records


def test_the_checksum_is_crc32c() -> None:
    assert kafka._crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("number", [0, -1, 1, 63, -64, 64, 300, -(2**40), 2**62])
def test_varints_are_read_as_they_are_written(number: int) -> None:
    assert kafka._Reader(kafka._varint(number)).varint() == number


def test_a_record_is_produced_and_its_offset_returned() -> None:
    seen: list[bytes] = []
    answer = produced(0, 41)
    assert ask(answer, lambda s: kafka.produce(s, "t", 3, b"value", acks=-1, timeout_ms=900), seen) == 41
    request = seen[0]
    head = struct.pack(">hhi", 0, 3, 1) + text("splitbrain") + struct.pack(">hhii", -1, -1, 900, 1) + text("t")
    assert request.startswith(head + struct.pack(">ii", 1, 3))
    batch = request[len(head) + 8 + 4 :]
    assert kafka._records(batch) == [(0, b"value")]
    checksum, covered = struct.unpack(">I", batch[17:21])[0], batch[21:]
    assert checksum == kafka._crc32c(covered)


@pytest.mark.parametrize(
    ("code", "is_definite"), [(3, True), (5, True), (19, True), (6, False), (7, False), (20, False)]
)
def test_produce_errors_are_classified_as_definite_or_not(code: int, is_definite: bool) -> None:
    with pytest.raises(kafka.KafkaError) as caught:
        ask(produced(code, -1), lambda s: kafka.produce(s, "t", 0, b"v", acks=1, timeout_ms=900))
    assert (caught.value.code, caught.value.is_definite) == (code, is_definite)


def test_a_fetch_returns_complete_batches_from_its_offset_on() -> None:
    def at(base: int, value: bytes) -> bytes:
        return struct.pack(">q", base) + kafka._batch(value)[8:]

    records = at(6, b"before") + at(7, b"one") + at(8, b"two") + at(9, b"cut off")[:-3]
    found, watermark = ask(fetched(0, 10, records), lambda s: kafka.fetch(s, "t", 0, 7))
    assert (found, watermark) == ([(7, b"one"), (8, b"two")], 10)
    with pytest.raises(Refused, match="offset 7 is out of range"):
        ask(fetched(1, -1, b""), lambda s: kafka.fetch(s, "t", 0, 7))
    with pytest.raises(kafka.KafkaError):
        ask(fetched(6, -1, b""), lambda s: kafka.fetch(s, "t", 0, 7))


def test_metadata_lists_brokers_leaders_and_in_sync_replicas() -> None:
    brokers = struct.pack(">ii", 1, 2) + text("10.0.0.2") + struct.pack(">ih", 9092, -1) + struct.pack(">i", 2)
    topic = struct.pack(">ih", 1, 0) + text("t") + struct.pack(">b", 0)
    partition = struct.pack(">ihii", 1, 0, 5, 2) + struct.pack(">iii", 2, 1, 2) + struct.pack(">ii", 1, 2)
    found = ask(brokers + topic + partition, lambda s: kafka.metadata(s, "t"))
    assert found == ({2: "10.0.0.2:9092"}, {5: kafka.Partition(2, (2,))})


def test_a_truncated_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="ends within a field"):
        ask(produced(0, 41)[:-20], lambda s: kafka.produce(s, "t", 0, b"v", acks=1, timeout_ms=900))
