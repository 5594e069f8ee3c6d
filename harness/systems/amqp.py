"""The part of AMQP 0-9-1 that a client of the harness needs: one channel, publisher confirms, one message at a time.

Nothing is retried, so each operation is one request and has its outcome. Fields are those of the protocol's
specification (amqp0-9-1.pdf, 1.4 and 4.2) and of RabbitMQ's publisher confirms extension.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from harness.sdk import Refused, Streams

__all__ = ["AmqpError", "Channel", "Message"]

MAX_FRAME_BYTES = 128 << 10
"""RabbitMQ's default. Our messages are far smaller."""

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
"""Frame types."""
FRAME_END = b"\xce"
CHANNEL = 1

START, START_OK, TUNE, TUNE_OK = (10, 10), (10, 11), (10, 30), (10, 31)
OPEN, OPEN_OK, CLOSE, CLOSE_OK = (10, 40), (10, 41), (10, 50), (10, 51)
CHANNEL_OPEN, CHANNEL_OPEN_OK, CHANNEL_CLOSE = (20, 10), (20, 11), (20, 40)
DECLARE, DECLARE_OK = (50, 10), (50, 11)
PUBLISH, RETURN, GET, GET_OK, GET_EMPTY = (60, 40), (60, 50), (60, 70), (60, 71), (60, 72)
ACK, NACK = (60, 80), (60, 120)
CONFIRM, CONFIRM_OK = (85, 10), (85, 11)

DURABLE, MANDATORY = 2, 1
"""Bits of queue.declare and basic.publish."""
DELIVERY_MODE, PERSISTENT = 0x1000, 2


class AmqpError(Exception):
    """The broker closed the channel or the connection, or did not take a message."""


class Message(NamedTuple):
    """A delivered message; `tag` acknowledges it on the channel that delivered it."""

    tag: int
    body: bytes


def _short(text: str) -> bytes:
    data = text.encode()
    return bytes([len(data)]) + data


def _long(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def _table(fields: dict[str, str | bool]) -> bytes:
    pieces = []
    for name, value in fields.items():
        kind = b"t" + bytes([value]) if isinstance(value, bool) else b"S" + _long(value.encode())
        pieces.append(_short(name) + kind)
    return _long(b"".join(pieces))


def _frame(kind: int, channel: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + FRAME_END


def _method(method: tuple[int, int], *fields: bytes, channel: int = CHANNEL) -> bytes:
    return _frame(METHOD, channel, struct.pack(">HH", *method) + b"".join(fields))


class Channel:
    """A connection with one channel in confirm mode."""

    def __init__(self, streams: Streams) -> None:
        self._reader, self._writer = streams
        self._published = 0

    @classmethod
    async def opened(cls, streams: Streams, *, user: str = "guest", password: str = "guest") -> Channel:
        """Raises AmqpError, OSError, EOFError."""
        channel = cls(streams)
        writer = channel._writer
        writer.write(b"AMQP\0\0\x09\x01")
        await channel._expect(START)
        response = _long(f"\0{user}\0{password}".encode())
        writer.write(_method(START_OK, _table({"product": "splitbrain"}), _short("PLAIN"), response, _short("en_US"),
                             channel=0))  # fmt: skip
        await channel._expect(TUNE)
        # No heartbeats: operations have their own timeout, after which the connection is abandoned.
        writer.write(_method(TUNE_OK, struct.pack(">HIH", CHANNEL, MAX_FRAME_BYTES, 0), channel=0))
        writer.write(_method(OPEN, _short("/"), b"\0\0", channel=0))
        await channel._expect(OPEN_OK)
        writer.write(_method(CHANNEL_OPEN, b"\0"))
        await channel._expect(CHANNEL_OPEN_OK)
        writer.write(_method(CONFIRM, b"\0"))
        await channel._expect(CONFIRM_OK)
        return channel

    async def declare(self, queue: str, arguments: dict[str, str | bool]) -> None:
        """Declare a durable queue; does nothing if an equivalent one exists. Raises AmqpError, OSError, EOFError."""
        self._writer.write(_method(DECLARE, b"\0\0", _short(queue), bytes([DURABLE]), _table(arguments)))
        await self._expect(DECLARE_OK)

    async def publish(self, queue: str, body: bytes) -> None:
        """Publish a persistent message to a queue and wait for its confirmation.

        Raises Refused if there is no such queue, AmqpError if the message is not confirmed, OSError, EOFError.
        """
        self._published += 1
        properties = struct.pack(">HHQHB", PUBLISH[0], 0, len(body), DELIVERY_MODE, PERSISTENT)
        self._writer.write(
            _method(PUBLISH, b"\0\0", _short(""), _short(queue), bytes([MANDATORY]))
            + _frame(HEADER, CHANNEL, properties)
            + _frame(BODY, CHANNEL, body)
        )
        is_returned = False
        while True:
            method, fields = await self._expect(ACK, NACK, RETURN)
            if method == RETURN:  # the confirmation still follows
                is_returned = True
                await self._content()
                continue
            tag, is_multiple = struct.unpack(">QB", fields[:9])
            if tag != self._published and not (is_multiple and (tag == 0 or tag > self._published)):
                continue  # for an earlier message whose publish was abandoned
            if is_returned:
                raise Refused(f"there is no queue {queue}")
            if method == NACK:
                raise AmqpError("the message was not taken")
            return

    async def get(self, queue: str) -> Message | None:
        """The message at the head of a queue, hidden from others until it is acknowledged or this connection ends; None
        if the queue is empty. Raises AmqpError, OSError, EOFError."""
        self._writer.write(_method(GET, b"\0\0", _short(queue), b"\0"))
        method, fields = await self._expect(GET_OK, GET_EMPTY)
        if method == GET_EMPTY:
            return None
        (tag,) = struct.unpack_from(">Q", fields)
        return Message(tag, await self._content())

    async def ack(self, message: Message) -> None:
        """Acknowledge a message of this channel. The broker sends no reply."""
        self._writer.write(_method(ACK, struct.pack(">QB", message.tag, 0)))
        await self._writer.drain()

    async def _content(self) -> bytes:
        """The message body that follows a method frame."""
        kind, payload = await self._frame()
        if kind != HEADER:
            raise AmqpError(f"a frame of kind {kind} where a message's header was due")
        (size,) = struct.unpack_from(">Q", payload, 4)
        if size > MAX_FRAME_BYTES:
            raise AmqpError(f"a message of {size} bytes")
        body = b""
        while len(body) < size:
            kind, payload = await self._frame()
            if kind != BODY or not payload:
                raise AmqpError(f"a frame of kind {kind} where a message's body was due")
            body += payload
        return body

    async def _expect(self, *methods: tuple[int, int]) -> tuple[tuple[int, int], bytes]:
        """Read the next method, which must be one of these; returns it and its fields. Raises AmqpError."""
        kind, payload = await self._frame()
        method = struct.unpack_from(">HH", payload) if kind == METHOD else (0, 0)
        found = (method[0], method[1])
        if found in (CLOSE, CHANNEL_CLOSE):
            code, size = struct.unpack_from(">HB", payload, 4)
            raise AmqpError(f"the broker closed it: {code} {payload[7 : 7 + size].decode(errors='replace')}")
        if found not in methods:
            raise AmqpError(f"method {found} of a frame of kind {kind} came unasked")
        return found, payload[4:]

    async def _frame(self) -> tuple[int, bytes]:
        """Type and payload of the next frame that is not a heartbeat."""
        while True:
            kind, _, size = struct.unpack(">BHI", await self._reader.readexactly(7))
            if size > MAX_FRAME_BYTES:
                raise AmqpError(f"a frame of {size} bytes")
            payload = await self._reader.readexactly(size + 1)
            if payload[-1:] != FRAME_END:
                raise AmqpError("a frame without its end")
            if kind != HEARTBEAT:
                return kind, payload[:-1]
