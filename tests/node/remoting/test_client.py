"""The dialling side: definite and indefinite errors, reconnecting, and replacing silent connections."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import pytest

from node.remoting import (
    ClientLimits,
    Command,
    ConnectFailed,
    Connection,
    ConnectionLost,
    PeerOverloaded,
    RemotingClient,
    RequestTimeout,
    ServerLimits,
    encode,
)
from tests.ports import free_port


async def silent(command: Command, connection: Connection) -> Command | None:
    await asyncio.sleep(3600)
    return None


def test_connect_fails_for_a_refused_dial_a_bad_address_or_a_closed_client() -> None:
    async def scenario() -> None:
        client = RemotingClient()
        with pytest.raises(ConnectFailed) as caught:
            await client.invoke(f"127.0.0.1:{free_port()}", Command.request(1), timeout_ms=1000)
        assert caught.value.is_definite
        for address in ("", "127.0.0.1", ":1", "h:0", "h:65536", "h:x", "h:-1", "h:1٣"):
            with pytest.raises(ConnectFailed, match="no address"):
                await client.invoke(address, Command.request(1), timeout_ms=1000)
        await client.close()
        with pytest.raises(ConnectFailed, match="closed"):
            await client.invoke("127.0.0.1:1", Command.request(1), timeout_ms=1000)

    asyncio.run(scenario())


def test_a_host_name_that_cannot_be_encoded_fails_to_connect() -> None:
    async def scenario() -> None:
        client = RemotingClient()
        for address in ("a..b:80", f"{70 * 'x'}.example:80"):
            with pytest.raises(ConnectFailed, match="no connection to"):
                await client.invoke(address, Command.request(1), timeout_ms=1000)
            outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            client.ask(address, Command.request(1), outcome.set_result, timeout_ms=1000)
            assert isinstance(await asyncio.wait_for(outcome, 5), ConnectFailed)
        await client.close()

    asyncio.run(scenario())


def test_the_error_of_a_connection_reset_at_once_names_the_dialled_address() -> None:
    """By then the kernel no longer knows the peer's address."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            connect = loop.sock_connect

            async def connect_and_be_reset(sock: socket.socket, to: Any) -> None:
                await connect(sock, to)
                accepted, _ = listener.accept()
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                accepted.close()

            loop.sock_connect = connect_and_be_reset  # type: ignore[method-assign]
            client = RemotingClient()
            with pytest.raises(ConnectionLost, match=address):
                await client.invoke(address, Command.request(1), timeout_ms=1000)
            await client.close()

    asyncio.run(scenario())


def test_a_hanging_dial_times_out_with_a_definite_failure() -> None:
    """A listener whose accept queue is full lets further handshakes hang."""

    async def scenario() -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            address = listener.getsockname()
            fillers = []
            for _ in range(4):
                filler = socket.socket()
                filler.setblocking(False)
                filler.connect_ex(address)
                fillers.append(filler)
            await asyncio.sleep(0.05)
            client = RemotingClient(ClientLimits(connect_timeout_ms=100))
            target = f"127.0.0.1:{address[1]}"
            with pytest.raises(ConnectFailed) as caught:
                await client.invoke(target, Command.request(1), timeout_ms=5000)
            assert caught.value.is_definite and "100 ms" in str(caught.value)
            with pytest.raises(ConnectFailed, match="30 ms"):
                await client.invoke(target, Command.request(1), timeout_ms=30)
            await client.close()
            for filler in fillers:
                filler.close()

    asyncio.run(scenario())


def test_timeouts_are_indefinite_and_late_replies_are_ignored(stage: Any, until: Any) -> None:
    async def scenario() -> None:
        async with stage() as s:
            gate = asyncio.Event()

            async def late(command: Command, connection: Connection) -> Command:
                await gate.wait()
                return command.reply(0, remark="late")

            s.server.register(2, late)
            assert (await s.invoke(Command.request(1))).code == 0  # connected: later requests do not dial
            with pytest.raises(RequestTimeout) as caught:
                await s.invoke(Command.request(2), timeout_ms=20)
            assert not caught.value.is_definite
            gate.set()
            assert (await s.invoke(Command.request(1, body=b"x"))).body == b"x"
            assert s.client.connection_count == 1

    asyncio.run(scenario())


def test_a_connection_silent_through_two_timeouts_is_replaced(stage: Any, until: Any) -> None:
    async def scenario() -> None:
        async with stage() as s:
            s.server.register(2, silent)
            seen: list[str] = []
            s.server.register(3, lambda command, connection: seen.append(connection.remote_address) or command.reply(0))
            await s.invoke(Command.request(3))
            for _ in range(3):  # bytes arrive between these timeouts: the connection lives
                with pytest.raises(RequestTimeout):
                    await s.invoke(Command.request(2), timeout_ms=20)
                await s.invoke(Command.request(3))
            assert len(set(seen)) == 1
            bystander = asyncio.create_task(s.invoke(Command.request(2), timeout_ms=60_000))
            for _ in range(2):
                with pytest.raises(RequestTimeout):
                    await s.invoke(Command.request(2), timeout_ms=20)
            with pytest.raises(ConnectionLost, match="silent through 2 timeouts"):
                await bystander
            await s.invoke(Command.request(3))
            assert len(set(seen)) == 2

    asyncio.run(scenario())


def test_a_lost_connection_fails_open_requests_as_indefinite_and_is_replaced(stage: Any, until: Any) -> None:
    async def scenario() -> None:
        async with stage() as s:
            s.server.register(2, silent)
            s.server.register(3, lambda command, connection: connection.abort("test"))
            pending = asyncio.create_task(s.invoke(Command.request(2)))
            await until(lambda: s.server.running_bytes > 0, "the request arrives")
            with pytest.raises(ConnectionLost) as caught:
                await s.invoke(Command.request(3))
            assert not caught.value.is_definite
            with pytest.raises(ConnectionLost):
                await pending
            assert (await s.invoke(Command.request(1, body=b"again"))).body == b"again"
            s.client.drop(s.address)
            assert (await s.invoke(Command.request(1, body=b"more"))).body == b"more"

    asyncio.run(scenario())


def test_many_callers_share_one_dial(stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as s:
            await asyncio.gather(*(s.invoke(Command.request(1)) for _ in range(50)))
            assert s.client.connection_count == s.server.connection_count == 1

    asyncio.run(scenario())


def test_a_cancelled_dial_waiter_does_not_disturb_the_others(stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as s:
            first = asyncio.create_task(s.invoke(Command.request(1)))
            second = asyncio.create_task(s.invoke(Command.request(1, body=b"2")))
            await asyncio.sleep(0)
            first.cancel()
            assert (await second).body == b"2"

    asyncio.run(scenario())


def test_garbage_from_the_server_ends_open_requests() -> None:
    async def scenario() -> None:
        async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(10)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await writer.drain()

        server = await asyncio.start_server(babble, "127.0.0.1", 0)
        client = RemotingClient()
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(ConnectionLost, match="frame length"):
            await client.invoke(address, Command.request(1), timeout_ms=5000)
        await client.close()
        server.close()
        await server.wait_closed()

    asyncio.run(scenario())


def test_requests_above_the_limits_are_refused_as_definite(stage: Any, until: Any) -> None:
    async def scenario() -> None:
        async with stage(client_limits=ClientLimits(max_outstanding_requests=3)) as s:
            s.server.register(2, silent)
            open_requests = [asyncio.create_task(s.invoke(Command.request(2))) for _ in range(3)]
            await until(lambda: s.server.running_bytes > 0, "requests arrive")
            with pytest.raises(PeerOverloaded) as caught:
                await s.invoke(Command.request(2))
            assert caught.value.is_definite
            for request in open_requests:
                request.cancel()
        async with stage(ServerLimits(max_running_requests=1), ClientLimits(max_unsent_bytes=10_000_000)) as s:
            s.server.register(2, silent)
            results = await asyncio.gather(
                *(s.invoke(Command.request(2, body=bytes(1_000_000)), timeout_ms=300) for _ in range(40)),
                return_exceptions=True,
            )
            refused = [result for result in results if isinstance(result, PeerOverloaded)]
            assert refused and all("unsent" in str(each) for each in refused)
            assert len(refused) < 40

    asyncio.run(scenario())


def test_a_request_is_written_at_once_although_another_is_open(stage: Any, until: Any) -> None:
    async def scenario() -> None:
        async with stage() as s:
            s.server.register(2, silent)
            first = asyncio.create_task(s.invoke(Command.request(2)))
            await until(lambda: s.server.running_bytes > 0, "the first request arrives")
            (connection,) = s.client._connections.values()
            written: list[bytes] = []
            connection._transport.write = written.append
            s.client.ask(s.address, Command.request(2), lambda outcome: None, timeout_ms=1000)
            assert len(written) == 1
            first.cancel()

    asyncio.run(scenario())


def test_large_requests_and_large_replies_do_not_block_each_other(stage: Any) -> None:
    async def scenario() -> None:
        async with stage(ServerLimits(write_high_water_bytes=10_000)) as s:
            s.server.register(2, lambda command, connection: command.reply(0, body=bytes(100_000)))
            replies = await asyncio.gather(
                *(s.invoke(Command.request(2, body=bytes(100_000)), timeout_ms=30_000) for _ in range(400))
            )
            assert sum(len(reply.body) for reply in replies) == 40_000_000

    asyncio.run(scenario())


def test_the_pool_is_bounded_and_keeps_connections_in_use(stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as s, stage() as t, stage() as u:
            client = RemotingClient(ClientLimits(max_connections=2))
            s.server.register(2, silent)
            held = asyncio.create_task(client.invoke(s.address, Command.request(2), timeout_ms=60_000))
            for address in (t.address, u.address, t.address, u.address):
                await client.invoke(address, Command.request(1), timeout_ms=5000)
                assert client.connection_count == 2
                assert not held.done()
            held.cancel()
            await client.close()

    asyncio.run(scenario())


def test_close_ends_open_requests(stage: Any, until: Any) -> None:
    async def scenario() -> None:
        async with stage() as s:
            s.server.register(2, silent)
            request = asyncio.create_task(s.invoke(Command.request(2)))
            await until(lambda: s.server.running_bytes > 0, "the request arrives")
            await s.client.close()
            with pytest.raises(ConnectionLost):
                await request
            await s.client.close()

    asyncio.run(scenario())


def test_unsolicited_replies_are_ignored(stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as s:
            peer = await s.raw()
            peer.writer.write(encode(Command(0, flag=1, opaque=99)))
            assert (await peer.ask(Command(1, body=b"x"))).body == b"x"

    asyncio.run(scenario())
