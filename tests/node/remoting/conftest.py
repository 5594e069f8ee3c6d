"""A server on a free port, and ways to talk to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import pytest

from node.remoting import (
    ClientLimits,
    Command,
    Connection,
    FrameParser,
    RemotingClient,
    RemotingServer,
    ServerLimits,
    encode,
)

DEADLINE_S = 10.0


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition` holds; fail with `what` after the deadline."""
    deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline_s, f"never happened: {what}"
        await asyncio.sleep(0.005)


@dataclass
class RawPeer:
    """A plain socket to a server: bytes in, bytes or commands out."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def replies(self, count: int) -> list[Command]:
        """The next `count` commands from the server."""
        parser = FrameParser()
        commands: list[Command] = []
        while len(commands) < count:
            data = await asyncio.wait_for(self.reader.read(65536), DEADLINE_S)
            assert data, f"closed after {len(commands)} of {count} replies"
            commands += parser.feed(data)
        return commands

    async def ask(self, command: Command) -> Command:
        self.writer.write(encode(command))
        return (await self.replies(1))[0]

    async def closed_by_server(self) -> bytes:
        """Wait for the end of the stream; returns what came before it."""
        received = b""
        try:
            while data := await asyncio.wait_for(self.reader.read(65536), DEADLINE_S):
                received += data
        except ConnectionError:
            pass
        return received


@dataclass
class Stage:
    """One server, one client, and raw sockets."""

    server: RemotingServer
    client: RemotingClient

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    async def raw(self) -> RawPeer:
        return RawPeer(*await asyncio.open_connection("127.0.0.1", self.server.port))

    async def invoke(self, command: Command, timeout_ms: float = 5000) -> Command:
        return await self.client.invoke(self.address, command, timeout_ms=timeout_ms)

    async def still_serves(self) -> None:
        """Check that a new connection is answered."""
        peer = await self.raw()
        assert (await peer.ask(Command.request(1, body=b"hello"))).body == b"hello"
        peer.writer.close()


def echo(command: Command, connection: Connection) -> Command:
    return command.reply(0, fields=command.ext_fields, body=command.body)


StageFactory = Callable[..., AbstractAsyncContextManager[Stage]]


@pytest.fixture
def stage() -> StageFactory:
    @asynccontextmanager
    async def make(
        limits: ServerLimits | None = None, client_limits: ClientLimits | None = None
    ) -> AsyncIterator[Stage]:
        server = RemotingServer("127.0.0.1", 0, limits=limits, name="test")
        server.register(1, echo)
        await server.start()
        client = RemotingClient(client_limits)
        try:
            yield Stage(server, client)
        finally:
            await client.close()
            await asyncio.wait_for(server.stop(), DEADLINE_S)
            assert server.connection_count == 0

    return make


@pytest.fixture
def until() -> Callable[[Callable[[], bool], str], Awaitable[None]]:
    return eventually
