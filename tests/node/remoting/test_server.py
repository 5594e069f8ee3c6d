"""Requests and replies over real sockets: dispatch, order, errors, one-way, flow control."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from node.remoting import Command, Connection, DeferredReply, RequestError, ServerLimits, encode


def test_a_reply_uses_the_serializer_of_its_request(stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as s:
            for serializer in ("json", "binary"):
                request = Command.request(1, {"k": "v"}, b"body")
                request.serializer = serializer  # type: ignore[assignment]
                reply = await s.invoke(request)
                assert (reply.code, reply.ext_fields, reply.body) == (0, {"k": "v"}, b"body")
                assert (reply.serializer, reply.is_response, reply.opaque) == (serializer, True, request.opaque)

    asyncio.run(scenario())


def test_an_unknown_code_is_answered_with_3_or_by_the_default_processor(stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as s:
            reply = await s.invoke(Command.request(4711))
            assert reply.code == 3 and "4711" in (reply.remark or "")
            s.server.register_default(lambda command, connection: command.reply(0, remark="default"))
            assert (await s.invoke(Command.request(4711))).remark == "default"

    asyncio.run(scenario())


def test_an_exception_in_a_processor_becomes_an_error_reply_without_traceback(
    stage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(command: Command, connection: Connection) -> Command:
        raise ZeroDivisionError("x" * 1000)

    async def raises_later(command: Command, connection: Connection) -> Command:
        await asyncio.sleep(0)
        raise KeyError("gone")

    def refuses(command: Command, connection: Connection) -> Command:
        raise RequestError(16, "not yours")

    def too_large(command: Command, connection: Connection) -> Command:
        return command.reply(0, body=bytes(17 * 2**20))

    async def scenario() -> None:
        async with stage() as s:
            for code, processor in enumerate((raises, raises_later, refuses, too_large), 100):
                s.server.register(code, processor)
            first, second, third, fourth = [await s.invoke(Command.request(code)) for code in range(100, 104)]
            assert first.code == second.code == fourth.code == 1
            assert (first.remark or "").startswith("ZeroDivisionError: xxx") and len(first.remark or "") <= 256
            assert second.remark == "KeyError: 'gone'"
            assert (third.code, third.remark) == (16, "not yours")
            assert "frame limit" in (fourth.remark or "")
            assert all("Traceback" not in (reply.remark or "") for reply in (first, second, third, fourth))
            await s.still_serves()

    with caplog.at_level(logging.WARNING, "node.remoting"):
        asyncio.run(scenario())
    assert "request 100 from 127.0.0.1" in caplog.text
    assert caplog.text.count("failed:") == 1  # one line of a kind within a second


def test_a_deferred_reply_may_be_sent_at_once_or_later(stage: Any) -> None:
    def at_once(command: Command, connection: Connection) -> DeferredReply:
        late = DeferredReply((command,))
        late.send(command.reply(0, body=b"at once"))
        return late

    def later(command: Command, connection: Connection) -> DeferredReply:
        late = DeferredReply((command,))
        asyncio.get_running_loop().call_later(0.01, late.send, command.reply(0, body=b"later"))
        return late

    async def scenario() -> None:
        async with stage() as s:
            s.server.register(100, at_once)
            s.server.register(101, later)
            replies = await asyncio.gather(*(s.invoke(Command.request(100 + number % 2)) for number in range(20)))
            assert [reply.body for reply in replies] == [b"at once", b"later"] * 10
            assert s.server.running_bytes == 0
            await s.still_serves()

    asyncio.run(scenario())


@pytest.mark.mechanism("Multiplexing by opaque")
def test_replies_come_out_of_order_over_one_socket(stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as s:
            gates: dict[str, asyncio.Future[Command | None]] = {}

            def held(command: Command, connection: Connection) -> asyncio.Future[Command | None]:
                gates[command.get_str("n")] = gate = asyncio.get_running_loop().create_future()
                gate.add_done_callback(lambda _: None)
                return gate

            s.server.register(2, held)
            peer = await s.raw()
            requests = [Command(2, {"n": str(n)}, opaque=n) for n in range(3)]
            peer.writer.write(b"".join(map(encode, requests)) + encode(Command(1, opaque=9)))
            assert [reply.opaque for reply in await peer.replies(1)] == [9]
            for n in (2, 0, 1):
                gates[str(n)].set_result(requests[n].reply(0))
                assert [reply.opaque for reply in await peer.replies(1)] == [n]

    asyncio.run(scenario())


def test_many_invocations_share_one_connection_and_each_gets_its_own_reply(stage: Any) -> None:
    async def shuffled(command: Command, connection: Connection) -> Command:
        await asyncio.sleep(command.get_int("n") * 7 % 5 / 1000)
        return command.reply(0, body=command.body)

    async def scenario() -> None:
        async with stage() as s:
            s.server.register(2, shuffled)
            replies = await asyncio.gather(*(s.invoke(Command.request(2, {"n": n}, b"%d" % n)) for n in range(300)))
            assert [reply.body for reply in replies] == [b"%d" % n for n in range(300)]
            assert s.server.connection_count == s.client.connection_count == 1

    asyncio.run(scenario())


def test_oneway_requests_are_executed_and_never_answered(stage: Any, until: Any) -> None:
    async def scenario() -> None:
        async with stage() as s:
            seen: list[bytes] = []

            def count(command: Command, connection: Connection) -> Command:
                seen.append(command.body)
                if command.body == b"bad":
                    raise ValueError
                return command.reply(0)

            s.server.register(2, count)
            await s.client.send_oneway(s.address, Command.request(2, body=b"a"))
            await s.client.send_oneway(s.address, Command.request(2, body=b"bad"))
            await until(lambda: len(seen) == 2, "both one-way requests arrive")
            peer = await s.raw()
            peer.writer.write(encode(Command(2, flag=2, opaque=5)) + encode(Command(1, opaque=6)))
            assert [reply.opaque for reply in await peer.replies(1)] == [6]
            assert seen == [b"a", b"bad", b""]

    asyncio.run(scenario())


def test_a_processor_may_answer_later_and_push_requests_to_its_peer(stage: Any, until: Any) -> None:
    async def scenario() -> None:
        async with stage() as s:
            parked: list[tuple[Command, Connection]] = []
            s.server.register(2, lambda command, connection: parked.append((command, connection)))
            notified: list[str] = []
            s.client.register(40, lambda command, connection: notified.append(command.get_str("group")))
            s.client.register(41, lambda command, connection: command.reply(0, body=b"client speaking"))
            pending = asyncio.create_task(s.invoke(Command.request(2)))
            await until(lambda: bool(parked), "the request arrives")
            command, connection = parked[0]
            connection.send(Command.request(40, {"group": "g"}, oneway=True))
            answer = await connection.invoke(Command.request(41), timeout_ms=5000)
            assert answer.body == b"client speaking"
            connection.send(command.reply(0, remark="late"))
            assert (await pending).remark == "late"
            await until(lambda: notified == ["g"], "the pushed request arrives")

    asyncio.run(scenario())


def test_close_callbacks_run_once_even_if_registered_after_the_close(stage: Any, until: Any) -> None:
    async def scenario() -> None:
        async with stage() as s:
            connections: list[Connection] = []
            closed: list[str] = []

            def remember(command: Command, connection: Connection) -> Command:
                connections.append(connection)
                connection.on_close(lambda c: 1 // 0)
                connection.on_close(lambda c: closed.append(c.remote_address))
                connection.state["seen"] = True
                return command.reply(0)

            s.server.register(2, remember)
            peer = await s.raw()
            await peer.ask(Command(2))
            host, port = peer.writer.get_extra_info("sockname")
            peer.writer.close()
            await until(lambda: closed == [f"{host}:{port}"], "the close callback runs")
            connections[0].on_close(lambda c: closed.append("late"))
            await until(lambda: closed[1:] == ["late"], "the late callback runs")
            assert connections[0].state == {"seen": True}
            assert connections[0].is_closing
            connections[0].send(Command(1))  # no error, no effect

    asyncio.run(scenario())


def test_reading_stops_while_too_many_requests_are_under_way(stage: Any, until: Any) -> None:
    async def scenario(limits: ServerLimits, body: bytes, most: int) -> None:
        async with stage(limits) as s:
            gates: list[asyncio.Future[None]] = []

            async def held(command: Command, connection: Connection) -> Command:
                gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                gates.append(gate)
                await gate
                return command.reply(0)

            s.server.register(2, held)
            peer, other = await s.raw(), await s.raw()
            for n in range(50):
                peer.writer.write(encode(Command(2, opaque=n, body=body)))
            await until(lambda: len(gates) == most, "requests up to the limit are started")
            assert (await other.ask(Command(1, body=b"x"))).body == b"x"
            assert len(gates) == most
            for n in range(50):
                await until(lambda n=n: len(gates) > n, "the next one is started")
                assert sum(not gate.done() for gate in gates) <= most
                gates[n].set_result(None)
            assert sorted(reply.opaque for reply in await peer.replies(50)) == list(range(50))
            assert s.server.running_bytes == s.server.held.total_bytes == 0

    asyncio.run(scenario(ServerLimits(max_running_requests=3), b"", 3))
    asyncio.run(scenario(ServerLimits(max_running_bytes=4 * 1500), bytes(1000), 4))
    asyncio.run(scenario(ServerLimits(max_total_running_bytes=4 * 1500), bytes(1000), 4))


def test_connections_waiting_for_the_shared_limit_all_get_their_turn(stage: Any) -> None:
    async def slow(command: Command, connection: Connection) -> Command:
        await asyncio.sleep(0.001)
        return command.reply(0)

    async def scenario() -> None:
        async with stage(ServerLimits(max_total_running_bytes=3000)) as s:
            s.server.register(2, slow)
            peers = [await s.raw() for _ in range(10)]
            for peer in peers:
                peer.writer.write(b"".join(encode(Command(2, opaque=n, body=bytes(1000))) for n in range(20)))
            for peer in peers:
                assert sorted(reply.opaque for reply in await peer.replies(20)) == list(range(20))

    asyncio.run(scenario())


def test_room_freed_by_one_connection_admits_the_waiting_request_of_another(stage: Any, until: Any) -> None:
    async def scenario() -> None:
        async with stage(ServerLimits(max_total_running_bytes=10_000)) as s:
            gates: dict[int, asyncio.Future[None]] = {}

            async def held(command: Command, connection: Connection) -> Command:
                gates[command.opaque] = asyncio.get_running_loop().create_future()
                await gates[command.opaque]
                return command.reply(0)

            s.server.register(2, held)
            poller, sender = await s.raw(), await s.raw()
            poller.writer.write(encode(Command(2, opaque=1)))
            await until(lambda: 1 in gates, "the first request is held")
            sender.writer.write(encode(Command(2, opaque=2, body=bytes(20_000))))
            await until(lambda: 2 in gates, "the large request is held")
            poller.writer.write(encode(Command(2, opaque=3)))
            await until(lambda: s.server.held.total_bytes > s.server.running_bytes, "the next one waits")
            assert 3 not in gates
            gates[2].set_result(None)
            await until(lambda: 3 in gates, "the waiting request uses the room")
            assert not gates[1].done()

    asyncio.run(scenario())


def test_stop_cancels_running_requests_and_closes_every_connection(stage: Any, until: Any) -> None:
    async def scenario() -> None:
        async with stage() as s:
            ended: list[str] = []

            async def endless(command: Command, connection: Connection) -> Command:
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    ended.append("cancelled")
                return command.reply(0)

            s.server.register(2, endless)
            peer = await s.raw()
            peer.writer.write(encode(Command(2)))
            await until(lambda: s.server.running_bytes > 0, "the request is started")
            await s.server.stop()
            assert ended == ["cancelled"]
            await peer.closed_by_server()
            await s.server.stop()
            with pytest.raises(ConnectionRefusedError):
                await s.raw()

    asyncio.run(scenario())


def test_a_port_in_use_is_an_os_error(stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as s:
            second = type(s.server)("127.0.0.1", s.server.port)
            with pytest.raises(OSError):
                await second.start()

    asyncio.run(scenario())


def test_a_connection_with_many_requests_yields_after_max_turn_requests(stage: Any) -> None:
    async def scenario() -> None:
        async with stage(ServerLimits(max_turn_requests=10)) as s:
            begun: list[int] = []
            when_others_came: list[int] = []

            def process(command: Command, connection: Connection) -> Command:
                if not begun:
                    asyncio.get_running_loop().call_soon(lambda: when_others_came.append(len(begun)))
                begun.append(command.opaque)
                return command.reply(0)

            s.server.register(7, process)
            peer = await s.raw()
            peer.writer.write(b"".join(encode(Command(7, opaque=n)) for n in range(100)))
            assert [reply.opaque for reply in await peer.replies(100)] == begun == list(range(100))
            assert when_others_came == [10]

    asyncio.run(scenario())
