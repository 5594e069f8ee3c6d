"""RabbitMQ's configuration, and AMQP as the harness's client speaks it, against answers written out byte by byte."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from harness.sdk import Refused
from harness.systems.amqp import AmqpError, Channel, Message
from harness.systems.rabbitmq import RabbitMQ

END = b"\xce"
GET_OK = struct.pack(">HHQB", 60, 71, 7, 0)
DECLARE_OK = b"\0\x32\0\x0b\1q\0\0\0\0\0\0\0\0"
START = struct.pack(">HH", 10, 10) + b"\0\x09" + struct.pack(">I", 0) * 3
TUNE = struct.pack(">HHHIH", 10, 30, 2047, 131072, 60)
OPEN_OK, CHANNEL_OPEN_OK, CONFIRM_OK = b"\0\x0a\0\x29\0", b"\0\x14\0\x0b\0\0\0\0", b"\0\x55\0\x0b"


def frame(payload: bytes, kind: int = 1, channel: int = 1) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + END


GREETING = [frame(START, channel=0), frame(TUNE, channel=0), frame(OPEN_OK, channel=0),
            frame(CHANNEL_OPEN_OK), frame(CONFIRM_OK)]  # fmt: skip


def acked(tag: int, method: int = 80, is_multiple: bool = False) -> bytes:
    return frame(struct.pack(">HHQB", 60, method, tag, is_multiple))


def content(body: bytes, pieces: int = 1) -> bytes:
    header = frame(struct.pack(">HHQH", 60, 0, len(body), 0), kind=2)
    size = max(1, -(-len(body) // pieces))
    return header + b"".join(frame(body[at : at + size], kind=3) for at in range(0, len(body), size))


def got(tag: int, body: bytes, pieces: int = 1) -> bytes:
    return frame(struct.pack(">HHQB", 60, 71, tag, 0) + b"\0\1q" + struct.pack(">I", 0)) + content(body, pieces)


def returned(body: bytes) -> bytes:
    return frame(struct.pack(">HHH", 60, 50, 312) + b"\x08NO_ROUTE\0\1q") + content(body)


def closed(code: int, text: bytes, class_id: int = 20) -> bytes:
    return frame(struct.pack(">HHHB", class_id, 40 if class_id == 20 else 50, code, len(text)) + text + b"\0\0\0\0")


def ask(answer: bytes, request: Callable[[Channel], Awaitable[Any]], seen: list[bytes] | None = None) -> Any:
    """The result of a request if the broker answers with these bytes after its greeting; `seen` gets all that the
    client sent."""

    async def main() -> Any:
        is_over = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"".join(GREETING) + answer)
            writer.write_eof()
            data = await reader.read(-1)
            if seen is not None:
                seen.append(data)
            writer.close()
            is_over.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            streams = await asyncio.open_connection(*server.sockets[0].getsockname())
            try:
                return await request(await Channel.opened(streams))
            finally:
                streams[1].close()
                await is_over.wait()

    return asyncio.run(main())


def test_a_message_is_published_persistent_and_mandatory_and_confirmed() -> None:
    seen: list[bytes] = []
    ask(acked(1), lambda channel: channel.publish("q", b"body"), seen)
    publish = struct.pack(">HHH", 60, 40, 0) + b"\0\1q\1"
    header = struct.pack(">HHQHB", 60, 0, 4, 0x1000, 2)
    assert seen[0].endswith(frame(publish) + frame(header, kind=2) + frame(b"body", kind=3))
    assert seen[0].startswith(b"AMQP\0\0\x09\x01") and b"\0guest\0guest" in seen[0]


def test_a_multiple_confirmation_counts_and_one_of_an_earlier_message_does_not() -> None:
    async def two(channel: Channel) -> None:
        with pytest.raises(AmqpError, match="not taken"):
            await channel.publish("q", b"1")
        await channel.publish("q", b"2")

    ask(acked(1, method=120) + acked(1) + acked(2, is_multiple=True), two)


def test_an_unroutable_message_is_refused_and_an_unconfirmed_one_is_an_error() -> None:
    with pytest.raises(Refused, match="no queue q"):
        ask(returned(b"body") + acked(1), lambda channel: channel.publish("q", b"body"))
    with pytest.raises(AmqpError, match="not taken"):
        ask(acked(1, method=120), lambda channel: channel.publish("q", b"body"))
    with pytest.raises(EOFError):
        ask(b"", lambda channel: channel.publish("q", b"body"))


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_message_is_assembled_from_frames_and_acknowledged(pieces: int) -> None:
    async def take(channel: Channel) -> Message | None:
        message = await channel.get("q")
        assert message is not None
        await channel.ack(message)
        return message

    seen: list[bytes] = []
    assert ask(frame(b"", kind=8) + got(7, b"a message", pieces), take, seen) == Message(7, b"a message")
    assert seen[0].endswith(frame(struct.pack(">HHQB", 60, 80, 7, 0)))


def test_an_empty_queue_has_no_message() -> None:
    assert ask(frame(b"\0\x3c\0\x48\0"), lambda channel: channel.get("q")) is None


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (closed(404, b"NOT_FOUND - no queue"), "404 NOT_FOUND - no queue"),
        (closed(320, b"CONNECTION_FORCED", class_id=10), "320 CONNECTION_FORCED"),
        (frame(b"\0\x3c\0\x50")[:-1] + b"!", "without its end"),
        (struct.pack(">BHI", 1, 1, 1 << 30), "a frame of 1073741824 bytes"),
        (frame(b"\0\x55\0\x0b"), "came unasked"),
        (frame(b"garbage", kind=3), "came unasked"),
        (frame(GET_OK) + acked(1), "header was due"),
        (frame(GET_OK) + frame(struct.pack(">HHQH", 60, 0, 1 << 40, 0), kind=2), "bytes"),
        (frame(GET_OK) + frame(struct.pack(">HHQH", 60, 0, 4, 0), kind=2) + acked(1), "body"),
    ],
)  # fmt: skip
def test_closed_channels_and_malformed_answers_are_errors(answer: bytes, complaint: str) -> None:
    with pytest.raises(AmqpError, match=complaint):
        ask(answer, lambda channel: channel.get("q"))


def test_a_queue_is_declared_durable_with_its_kind() -> None:
    seen: list[bytes] = []
    ask(frame(DECLARE_OK), lambda channel: channel.declare("q", {"x-queue-type": "quorum"}), seen)
    table = b"\x0cx-queue-typeS\0\0\0\x06quorum"
    assert seen[0].endswith(frame(struct.pack(">HHH", 50, 10, 0) + b"\1q\2" + struct.pack(">I", len(table)) + table))


def system(queue: str) -> RabbitMQ:
    made = RabbitMQ()
    made.settings = {"queue": queue, "partitions": "autoheal"}
    made.hosts = [host(number) for number in (1, 2, 3)]
    return made


def host(number: int) -> Any:
    address = f"10.0.0.{number}"
    return SimpleNamespace(
        number=number, name=f"n{number}", ip=address, data="/data", path=lambda *words: "/".join(("/data", *words)),
        listen=lambda port: f"{address}:5672", advertise=lambda port: f"{address}:25672",
        installed=lambda path: f"/fetched/{path}",
    )  # fmt: skip


@pytest.mark.parametrize(("queue", "policies"), [("quorum", 0), ("mirrored", 1)])
def test_the_configuration_lists_all_nodes_and_a_mirrored_queue_has_a_policy(queue: str, policies: int) -> None:
    rabbit = system(queue)
    files = rabbit.files(rabbit.hosts[1])
    assert all(f"nodes.{number} = rabbit@10.0.0.{number}\n" in files["rabbitmq.conf"] for number in (1, 2, 3))
    assert "cluster_partition_handling = autoheal\n" in files["rabbitmq.conf"]
    assert len(json.loads(files["definitions.json"])["policies"]) == policies


def test_nodes_named_by_address_use_long_names() -> None:
    rabbit = system("quorum")
    environment = rabbit.environment(rabbit.hosts[0])
    assert environment["RABBITMQ_NODENAME"] == "rabbit@10.0.0.1" and environment["RABBITMQ_USE_LONGNAME"] == "true"
