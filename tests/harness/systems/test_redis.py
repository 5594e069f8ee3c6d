"""What the set-up of Redis waits for, held against watchers that answer from memory."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from harness.sdk import Refused
from harness.systems.redis import Redis


def as_list(count: int) -> bytes:
    """As a watcher of Valkey 9.1.0 answers: each of those that it knows as a list of names and values."""
    one = b"*4\r\n$4\r\nname\r\n$13\r\n10.0.0.2:6379\r\n$5\r\nflags\r\n$5\r\nslave\r\n"
    return b"*%d\r\n" % count + one * count


def set_up(replicas: int, sentinels: int) -> None:
    """What a primary with two replicas does before the load, where a watcher knows so many."""
    known = {b"replicas": replicas, b"sentinels": sentinels}
    served: list[asyncio.Event] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended = asyncio.Event()
        served.append(ended)
        while words := (await reader.readline()).split():
            assert words[::2] == [b"SENTINEL", b"main"]
            writer.write(as_list(known[words[1]]))
        writer.close()
        ended.set()

    async def body() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address = "{}:{}".format(*server.sockets[0].getsockname())
        host: Any = SimpleNamespace(name="n1", address=lambda port: address)
        system = Redis()
        system.hosts = [host] * 3
        async with server:
            try:
                await system.start_together()
            finally:
                await asyncio.gather(*(ended.wait() for ended in served))

    asyncio.run(body())


def test_the_load_begins_once_a_replica_can_be_promoted() -> None:
    set_up(2, 2)
    with pytest.raises(Refused, match="the watcher of n1 does not know all replicas yet"):
        set_up(1, 2)
    with pytest.raises(Refused, match="the watcher of n1 does not know all sentinels yet"):
        set_up(2, 0)
