"""Hostile and broken peers: the server closes or answers them, keeps serving others, and bounds what it holds."""

from __future__ import annotations

import asyncio
import logging
import random
import resource
import socket
from typing import Any

import pytest

from node.remoting import Command, Connection, ServerLimits, encode

JSON_ARRAY = b"[1,2,3]"


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
        bytes.fromhex("ffffffff"),
        bytes.fromhex("80000000"),
        bytes.fromhex("00000000"),
        bytes.fromhex("01000001"),
        bytes.fromhex("00000010" "00000100"),
        bytes.fromhex("00000010" "05000004"),
        (4 + len(JSON_ARRAY)).to_bytes(4, "big") + len(JSON_ARRAY).to_bytes(4, "big") + JSON_ARRAY,
        bytes.fromhex("00000008" "00000004") + b"nope",
        bytes.fromhex("00000008" "01000004") + b"nope",
    ],
    ids=[
        "http", "tls", "minus-one", "most-negative", "zero", "too-long", "header-beyond-frame", "serializer-5",
        "array-header", "no-json", "no-binary",
    ],
)  # fmt: skip
def test_garbage_closes_its_connection_after_earlier_requests_are_answered(stage: Any, garbage: bytes) -> None:
    async def scenario() -> None:
        async with stage() as s:
            bystander = await s.raw()
            for prefix in (b"", encode(Command(1, opaque=5))):
                peer = await s.raw()
                peer.writer.write(prefix + garbage)
                assert (await peer.closed_by_server() != b"") == (prefix != b"")
            assert (await bystander.ask(Command(1, body=b"x"))).body == b"x"
            await s.still_serves()

    asyncio.run(scenario())


def test_a_flood_of_random_bytes_disturbs_no_other_peer_and_logs_little(
    stage: Any, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(20240501)

    async def scenario() -> None:
        async with stage(ServerLimits(frame_timeout_s=0.2)) as s:
            bystander = await s.raw()
            for _ in range(300):
                peer = await s.raw()
                peer.writer.write(rng.randbytes(rng.choice((1, 3, 5, 9, 100, 5000))))
                peer.writer.close()
            assert (await bystander.ask(Command(1, body=b"x"))).body == b"x"
            await until(lambda: s.server.connection_count == 1, "the garbage connections are gone")
            assert s.server.unfinished.total_bytes == 0

    with caplog.at_level(logging.WARNING, "node.remoting"):
        asyncio.run(scenario())
    assert 1 <= len(caplog.records) <= 20  # 300 bad peers, but one line of each kind per second
    assert not any(record.exc_info for record in caplog.records)


def test_mutated_frames_never_break_the_server(stage: Any) -> None:
    rng = random.Random(7)
    good = [
        encode(Command(1, {"a": "b"}, b"body", opaque=3)),
        encode(Command(1, {"a": "b"}, b"body", opaque=3, serializer="binary")),
        encode(Command(99, {"a": "b" * 50}, remark="r")),
    ]

    async def scenario() -> None:
        async with stage(ServerLimits(frame_timeout_s=0.5)) as s:
            for _ in range(20):
                peers = []
                for _ in range(25):
                    data = bytearray(rng.choice(good) * 2)
                    for _ in range(rng.randrange(1, 4)):
                        data[rng.randrange(len(data))] = rng.randrange(256)
                    peer = await s.raw()
                    peer.writer.write(bytes(data))
                    peer.writer.write_eof()
                    peers.append(peer)
                await asyncio.gather(*(peer.closed_by_server() for peer in peers))
            await s.still_serves()

    asyncio.run(scenario())


def test_a_connection_that_stalls_within_a_frame_is_closed(stage: Any) -> None:
    async def scenario() -> None:
        async with stage(ServerLimits(frame_timeout_s=0.1)) as s:
            frame = encode(Command(1, body=bytes(1000)))
            for size in (1, 4, 7, 9, 100, len(frame) - 1):
                peer = await s.raw()
                peer.writer.write(frame[:size])
                assert await peer.closed_by_server() == b""
            await s.still_serves()
            assert s.server.unfinished.total_bytes == 0

    asyncio.run(scenario())


def test_a_connection_that_trickles_a_frame_is_closed(stage: Any) -> None:
    async def scenario() -> None:
        async with stage(ServerLimits(frame_timeout_s=0.2, frame_min_bytes_per_s=10**6)) as s:
            peer = await s.raw()
            frame = encode(Command(1, body=bytes(10_000)))
            sent = 0
            closed = asyncio.create_task(peer.closed_by_server())
            while not closed.done():
                peer.writer.write(frame[sent : sent + 1])
                sent += 1
                assert sent < len(frame), "the whole frame must not get through"
                await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_many_split_frames_do_not_count_as_one_slow_frame(stage: Any) -> None:
    """The clock of an unfinished frame starts with that frame, not with the connection."""

    async def scenario() -> None:
        async with stage(ServerLimits(frame_timeout_s=0.6)) as s:
            peer = await s.raw()
            frame = encode(Command(1, body=b"x" * 50))
            peer.writer.write(frame[:10])
            for _ in range(40):
                await asyncio.sleep(0.03)
                peer.writer.write(frame[10:] + frame[:10])  # the buffer is never empty
            assert len(await peer.replies(40)) == 40

    asyncio.run(scenario())


def test_unfinished_frames_share_one_limit_and_the_largest_holder_is_closed(stage: Any, until: Any) -> None:
    async def scenario() -> None:
        async with stage(ServerLimits(max_total_unfinished_bytes=100_000)) as s:
            prefix = bytes.fromhex("0010000000000010")
            modest, greedy = await s.raw(), await s.raw()
            modest.writer.write(prefix + bytes(30_000))
            await until(lambda: s.server.unfinished.total_bytes > 30_000, "the modest half frame arrives")
            greedy.writer.write(prefix + bytes(90_000))
            assert await greedy.closed_by_server() == b""
            await until(lambda: s.server.unfinished.total_bytes == 30_008, "the greedy one's bytes are released")
            assert s.server.connection_count == 1
            await s.still_serves()

    asyncio.run(scenario())


def test_held_requests_are_bounded_over_all_connections(stage: Any, until: Any) -> None:
    async def scenario() -> None:
        limits = ServerLimits(max_running_requests=1, max_total_held_bytes=200_000)
        async with stage(limits) as s:

            async def stuck(command: Command, connection: Connection) -> Command:
                await asyncio.sleep(3600)
                return command.reply(0)

            s.server.register(2, stuck)
            peers = [await s.raw() for _ in range(10)]
            for count, peer in enumerate(peers, 1):
                peer.writer.write(encode(Command(2, body=bytes(10_000))) * count)  # 550 kB in all
            await asyncio.gather(*(peer.closed_by_server() for peer in peers[-2:]))
            await until(lambda: 0 < s.server.connection_count < 9, "the greediest are closed")
            assert 0 < s.server.held.total_bytes <= 200_000
            await s.still_serves()

    asyncio.run(scenario())


def test_a_peer_that_reads_no_replies_is_not_read_and_then_closed(stage: Any, until: Any) -> None:
    async def scenario(limits: ServerLimits) -> None:
        async with stage(limits) as s:
            answered = 0

            def large(command: Command, connection: Connection) -> Command:
                nonlocal answered
                answered += 1
                return command.reply(0, body=bytes(100_000))

            s.server.register(2, large)
            raw = socket.create_connection(("127.0.0.1", s.server.port))
            raw.setblocking(False)
            try:
                raw.sendall(encode(Command(2)) * 2000)  # 200 MB of answers
                await until(lambda: answered > 0, "the server begins to answer")
                await until(lambda: s.server.connection_count == 0, "the peer that does not read is closed")
            finally:
                raw.close()
            assert answered < 500  # as many as sockets and high-water mark hold, not 2000
            assert s.server.unsent.total_bytes == 0
            await s.still_serves()

    small = {"write_high_water_bytes": 200_000}
    asyncio.run(scenario(ServerLimits(write_stall_timeout_s=0.2, **small)))
    asyncio.run(scenario(ServerLimits(max_unsent_bytes=250_000, **small)))
    asyncio.run(scenario(ServerLimits(max_total_unsent_bytes=250_000, **small)))


def test_a_slow_reader_gets_every_reply(stage: Any) -> None:
    async def scenario() -> None:
        async with stage(ServerLimits(write_high_water_bytes=50_000)) as s:
            s.server.register(2, lambda command, connection: command.reply(0, body=bytes(20_000)))
            peer = await s.raw()
            peer.writer.write(b"".join(encode(Command(2, opaque=n)) for n in range(1000)))
            await asyncio.sleep(0.2)
            assert [reply.opaque for reply in await peer.replies(1000)] == list(range(1000))

    asyncio.run(scenario())


def test_idle_connections_are_closed_and_busy_ones_are_not(stage: Any) -> None:
    async def scenario() -> None:
        async with stage(ServerLimits(idle_timeout_s=0.6)) as s:
            idle, busy = await s.raw(), await s.raw()
            closed = asyncio.create_task(idle.closed_by_server())
            asked = 0
            while not closed.done() or asked < 10:
                await busy.ask(Command(1))
                asked += 1
                await asyncio.sleep(0.05)
            assert s.server.connection_count == 1

    asyncio.run(scenario())


def _can_open(count: int) -> bool:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return hard == resource.RLIM_INFINITY or hard >= count or soft >= count


@pytest.mark.skipif(not _can_open(2500), reason="this machine allows fewer than 2,500 open files")
def test_a_thousand_idle_connections_are_accepted(stage: Any, until: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2500) if soft != resource.RLIM_INFINITY else soft, hard))

    async def scenario() -> None:
        async with stage() as s:
            sockets = [socket.create_connection(("127.0.0.1", s.server.port)) for _ in range(600)]
            await until(lambda: s.server.connection_count == 600, "the first are accepted")
            sockets += [socket.create_connection(("127.0.0.1", s.server.port)) for _ in range(400)]
            await until(lambda: s.server.connection_count == 1000, "all thousand are accepted")
            await s.still_serves()
            for each in sockets:
                each.close()
            await until(lambda: s.server.connection_count == 0, "all are gone")

    try:
        asyncio.run(scenario())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_at_the_limit_silent_connections_are_closed_and_active_ones_stay(stage: Any, until: Any) -> None:
    async def scenario() -> None:
        async with stage(ServerLimits(max_connections=5)) as s:
            talking = [await s.raw() for _ in range(3)]
            for peer in talking:
                await peer.ask(Command(1))
            silent = [await s.raw() for _ in range(6)]
            await asyncio.gather(*(peer.closed_by_server() for peer in silent[:4]))
            assert s.server.connection_count == 5
            for peer in (*talking, silent[4], silent[5]):
                await peer.ask(Command(1))
            assert await (await s.raw()).closed_by_server() == b""  # all five are active: the newcomer is refused
            for peer in talking:
                assert (await peer.ask(Command(1, body=b"y"))).body == b"y"

    asyncio.run(scenario())
