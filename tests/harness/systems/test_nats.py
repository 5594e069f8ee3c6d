"""Where a poll of JetStream ends, against a fake server with one stream in memory."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import pytest

from harness.systems.nats import NatsClient
from tests.harness.systems.served import over_a_connection

NO_MESSAGE = {"code": 404, "err_code": 10037, "description": "no message found"}
NO_STREAM = {"code": 404, "err_code": 10059, "description": "stream not found"}
"""As nats-server 2.15.1 answers them."""


def answer_to(asked: Mapping[str, Any], kept: Mapping[int, Any] | None) -> dict[str, Any]:
    """What STREAM.MSG.GET answers where the stream has these values by sequence, or where there is no stream."""
    if kept is None:
        return {"error": NO_STREAM}
    least = asked["seq"]
    found = [each for each in sorted(kept) if each == least or (each > least and "next_by_subj" in asked)]
    if not found:
        return {"error": NO_MESSAGE}
    data = b64encode(json.dumps(kept[found[0]]).encode()).decode()
    return {"message": {"subject": "log0", "seq": found[0], "data": data}}


def polled(kept: Mapping[int, Any] | None, offset: int, most: int) -> Any:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while words := (await reader.readline()).split():
            if words[0] == b"PUB":
                assert words[1] == b"$JS.API.STREAM.MSG.GET.log0"
                content = await reader.readexactly(int(words[3]) + 2)
                said = json.dumps(answer_to(json.loads(content), kept)).encode()
                writer.write(b"PING\r\nMSG %s 1 %d\r\n%s\r\n" % (words[2], len(said), said))
        writer.close()

    async def opened(streams: Any) -> NatsClient:
        client = NatsClient()
        client.streams = streams
        return client

    return over_a_connection(serve, opened, lambda client: client.poll(0, offset, most))


def test_a_poll_ends_at_the_end_of_the_log_or_at_its_limit() -> None:
    assert polled({1: 7, 2: 8, 3: 9}, 1, 32) == [8, 9]
    assert polled({1: 7, 2: 8, 3: 9}, 0, 2) == [7, 8]
    assert polled({}, 0, 32) == []


def test_a_gap_and_a_missing_stream_are_errors_and_not_the_end_of_a_log() -> None:
    with pytest.raises(OSError, match="nothing at sequence 2, though at 3"):
        polled({1: 7, 3: 9}, 0, 32)
    with pytest.raises(OSError, match="stream not found"):
        polled(None, 0, 32)
