"""Cuts, delays and throttles of connections through the proxy, on real sockets in one loop."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from harness.clusters.link_proxy import MAX_PENDING_PER_LINK, LinkProxy
from harness.clusters.link_pump import MAX_HELD_BYTES, reset
from tests.ports import free_port

Eventually = Callable[..., Any]
SILENCE_S = 0.15
"""How long nothing must arrive to count as silence; bytes on loopback take well under a millisecond."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class World:
    """One link n1 -> n2 and its far host, whose accepted connections can be awaited."""

    def __init__(self) -> None:
        self.proxy = LinkProxy()
        self.port = free_port()
        self.accepted: asyncio.Queue[Streams] = asyncio.Queue()
        self.streams: list[Streams] = []

    async def start(self) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.accepted.put_nowait((reader, writer))
            self.streams.append((reader, writer))

        self.server = await asyncio.start_server(accept, "127.0.0.1", 0)
        far_port = self.server.sockets[0].getsockname()[1]
        ports = [["127.0.0.1", self.port, "127.0.0.1", far_port]]
        link = {"source": "n1", "destination": "n2", "from": "127.0.0.9", "ports": ports}
        assert await self.proxy.open({"links": [link]}) == {"ok": True}

    async def gates(self, *cut: str, **shaped: list[float]) -> None:
        """Cut and shape by "12" and "21" for the directions."""
        ends = {"12": ("n1", "n2"), "21": ("n2", "n1")}
        reply = await self.proxy.gates(
            {
                "cut": [ends[name] for name in cut],
                "shaped": [[*ends[name.lstrip("_")], *shape] for name, shape in shaped.items()],
            }
        )
        assert reply == {"ok": True}

    async def connect(self) -> Streams:
        streams = await asyncio.open_connection("127.0.0.1", self.port)
        self.streams.append(streams)
        return streams

    async def pair(self) -> tuple[Streams, Streams]:
        """A connection through the proxy: the opener's end and the far host's."""
        near = await self.connect()
        return near, await asyncio.wait_for(self.accepted.get(), 10)

    async def stats(self, name: str) -> int:
        return int((await self.proxy.stats({}))[name])

    async def stop(self) -> None:
        for _, writer in self.streams:
            writer.transport.abort()
        await self.proxy.close()
        self.server.close()
        await asyncio.sleep(0.01)  # aborted transports close in the loop's next rounds


@contextlib.asynccontextmanager
async def world() -> AsyncIterator[World]:
    made = World()
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def transfer(sender: Streams, receiver: Streams, text: bytes) -> None:
    """Send `text` and require that it arrives."""
    sender[1].write(text)
    assert await asyncio.wait_for(receiver[0].readexactly(len(text)), 10) == text


async def is_quiet(receiver: Streams) -> bool:
    """Nothing arrives, and the reader stays usable."""
    before = len(receiver[0]._buffer)  # type: ignore[attr-defined]
    await asyncio.sleep(SILENCE_S)
    return len(receiver[0]._buffer) == before and not receiver[0].at_eof()  # type: ignore[attr-defined]


def test_bytes_and_ends_of_streams_pass_both_ways() -> None:
    async def main() -> None:
        async with world() as w:
            near, far = await w.pair()
            await transfer(near, far, b"ping")
            await transfer(far, near, b"pong" * 100_000)
            assert far[1].get_extra_info("peername")[0] == "127.0.0.9"  # as if from the opening host
            near[1].write_eof()
            assert await asyncio.wait_for(far[0].read(), 10) == b""
            await transfer(far, near, b"still open this way")
            far[1].close()
            assert await asyncio.wait_for(near[0].read(), 10) == b""

    asyncio.run(main())


def test_closed_connections_leave_nothing_behind(eventually: Eventually) -> None:
    async def main() -> None:
        async with world() as w:
            for order in ((0, 1), (1, 0)):
                both = await w.pair()
                await transfer(both[0], both[1], b"x")
                both[order[0]][1].close()
                assert await asyncio.wait_for(both[order[1]][0].read(), 10) == b""
                both[order[1]][1].close()
            near, far = await w.pair()
            near[1].transport.abort()
            far[1].write(b"to nobody")
            while await w.stats("connections"):
                far[1].write(b"x")
                await asyncio.sleep(0.01)
            assert not any(gate.pumps for gate in w.proxy._gates.values())

    asyncio.run(main())


def test_a_reset_is_passed_on_as_a_reset() -> None:
    async def main() -> None:
        async with world() as w:
            near, far = await w.pair()
            await transfer(near, far, b"x")
            linger = struct.pack("ii", 1, 0)
            near[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            near[1].transport.abort()
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(far[0].read(), 10)

    asyncio.run(main())


def test_an_opener_that_dies_after_a_half_close_breaks_the_far_connection() -> None:
    async def main() -> None:
        async with world() as w:
            near, far = await w.pair()
            near[1].write_eof()
            assert await asyncio.wait_for(far[0].read(), 10) == b""
            near[1].transport.abort()
            with pytest.raises(ConnectionError):
                while True:
                    far[1].write(b"x")
                    await asyncio.wait_for(far[1].drain(), 10)
                    await asyncio.sleep(0.01)
            assert await w.stats("connections") == 0

    asyncio.run(main())


@pytest.mark.parametrize("one_way", ["12", "21"])
def test_a_one_way_cut_stalls_one_direction_only(one_way: str) -> None:
    async def main() -> None:
        async with world() as w:
            near, far = await w.pair()
            await transfer(near, far, b"before")
            await w.gates(one_way)
            sender, receiver = (near, far) if one_way == "12" else (far, near)
            sender[1].write(b"held")
            assert await is_quiet(receiver)
            await transfer(receiver, sender, b"the other way")
            await w.gates()
            assert await asyncio.wait_for(receiver[0].readexactly(4), 10) == b"held"

    asyncio.run(main())


def test_a_cut_holds_back_ends_of_streams_and_resets() -> None:
    async def main() -> None:
        async with world() as w:
            ended, reset = await w.pair(), await w.pair()
            for near, far in (ended, reset):
                await transfer(near, far, b"x")
            await w.gates("12", "21")
            ended[0][1].write(b"last words")
            ended[0][1].close()
            reset[0][1].transport.abort()
            assert await is_quiet(ended[1]) and await is_quiet(reset[1])
            await w.gates()
            assert await asyncio.wait_for(ended[1][0].read(), 10) == b"last words"
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reset[1][0].read(), 10) == b""

    asyncio.run(main())


def test_a_cut_hides_the_death_of_the_opener_from_the_far_host() -> None:
    """The opener dies; its death must not cross the link n1 -> n2 while that is cut, whatever n2 sends."""

    async def main() -> None:
        async with world() as w:
            near, far = await w.pair()
            await transfer(near, far, b"x")
            await w.gates("12")
            near[1].transport.abort()
            for _ in range(20):
                far[1].write(b"are you there?" * 100)
                await asyncio.sleep(0.01)
            assert await is_quiet(far) and not far[1].is_closing()
            await w.gates()
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(far[0].read(), 10) == b""

    asyncio.run(main())


@pytest.mark.parametrize("cut", [("12",), ("21",), ("12", "21")])
def test_a_new_connection_over_a_cut_link_is_accepted_only_after_the_heal(cut: tuple[str, ...]) -> None:
    async def main() -> None:
        async with world() as w:
            await w.gates(*cut)
            near = await w.connect()
            near[1].write(b"hello")
            assert await is_quiet(near) and w.accepted.empty()
            assert await w.stats("pending") == 1
            await w.gates()
            far = await asyncio.wait_for(w.accepted.get(), 10)
            assert await asyncio.wait_for(far[0].readexactly(5), 10) == b"hello"
            await transfer(far, near, b"welcome")

    asyncio.run(main())


def test_an_opener_that_closed_during_the_cut_never_reaches_the_far_host(eventually: Eventually) -> None:
    async def main() -> None:
        async with world() as w:
            await w.gates("12")
            gone = await w.connect()
            gone[1].write(b"a request nobody waits for")
            await asyncio.sleep(0.05)
            gone[1].close()
            await gone[1].wait_closed()
            await asyncio.sleep(0.05)
            await w.gates()
            near, far = await w.pair()
            await transfer(near, far, b"only I")
            assert w.accepted.empty() and await w.stats("pending") == 0

    asyncio.run(main())


def test_the_oldest_pending_connections_are_reset_beyond_the_limit() -> None:
    async def main() -> None:
        async with world() as w:
            await w.gates("12")
            openers = [await w.connect() for _ in range(MAX_PENDING_PER_LINK + 5)]
            for oldest in openers[:5]:
                with pytest.raises(ConnectionResetError):
                    await asyncio.wait_for(oldest[0].readexactly(1), 10)
            assert await w.stats("pending") == MAX_PENDING_PER_LINK
            assert await is_quiet(openers[5]) and await is_quiet(openers[-1])

    asyncio.run(main())


def test_the_bytes_held_for_a_stalled_connection_are_bounded() -> None:
    async def main() -> None:
        async with world() as w:
            near, far = await w.pair()
            await transfer(near, far, b"x")
            await w.gates("12")
            flood = b"z" * (16 * MAX_HELD_BYTES)
            near[1].write(flood)
            await asyncio.sleep(0.2)
            assert await w.stats("held_bytes") <= MAX_HELD_BYTES
            await w.gates()
            assert await asyncio.wait_for(far[0].readexactly(len(flood)), 30) == flood

    asyncio.run(main())


def test_a_slow_reader_slows_its_writer_down() -> None:
    async def main() -> None:
        async with world() as w:
            near, far = await w.pair()
            far[1].transport.pause_reading()  # type: ignore[attr-defined]
            flood = b"y" * (64 << 20)
            near[1].write(flood)
            await asyncio.sleep(0.3)
            assert near[1].transport.get_write_buffer_size() > 16 << 20
            far[1].transport.resume_reading()  # type: ignore[attr-defined]
            assert len(await asyncio.wait_for(far[0].readexactly(len(flood)), 60)) == len(flood)

    asyncio.run(main())


def test_a_writer_whose_peer_reads_nothing_is_blocked_within_two_megabytes() -> None:
    """The kernel must not buffer megabytes for the proxy."""

    async def main() -> None:
        async with world() as w:
            near, far = await w.pair()
            far[1].transport.pause_reading()  # type: ignore[attr-defined]
            near[1].write(b"z" * (2 << 20))
            await asyncio.sleep(0.3)
            near_socket = near[1].get_extra_info("socket")
            (unsent_bytes,) = struct.unpack("i", fcntl.ioctl(near_socket.fileno(), termios.TIOCOUTQ, bytes(4)))
            assert unsent_bytes > 0

    asyncio.run(main())


def test_a_delay_applies_to_one_direction_and_keeps_the_order() -> None:
    async def main() -> None:
        async with world() as w:
            near, far = await w.pair()
            await transfer(near, far, b"x")
            await w.gates(_12=[200.0, 50.0, 0.0])
            loop = asyncio.get_running_loop()
            begin_s = loop.time()
            for number in range(200):
                near[1].write(b"%03d" % number)
                if number % 20 == 0:
                    await asyncio.sleep(0.002)
            await transfer(far, near, b"at once")
            assert not far[0]._buffer  # type: ignore[attr-defined]
            got = await asyncio.wait_for(far[0].readexactly(600), 10)
            assert loop.time() - begin_s >= 0.150
            assert got == b"".join(b"%03d" % number for number in range(200))
            near[1].write(b"late")
            await asyncio.sleep(0.01)
            await w.gates()
            await transfer(far, near, b"x")
            assert await asyncio.wait_for(far[0].readexactly(4), 10) == b"late"

    asyncio.run(main())


def test_all_connections_of_a_throttled_link_share_its_rate() -> None:
    async def main() -> None:
        async with world() as w:
            pairs = [await w.pair(), await w.pair()]
            await w.gates(_12=[0.0, 0.0, 40_000.0])
            begin_s = asyncio.get_running_loop().time()
            for near, _ in pairs:
                near[1].write(b"d" * 10_000)
            for _, far in pairs:
                await asyncio.wait_for(far[0].readexactly(10_000), 20)
            # 20,000 bytes at 40,000 a second, less the first piece, which goes at once
            assert asyncio.get_running_loop().time() - begin_s >= 0.45
            near, far = pairs[0]
            await transfer(far, near, b"u" * 100_000)
            await w.gates()
            await transfer(near, far, b"v" * 1_000_000)

    asyncio.run(main())


def test_the_end_of_a_throttled_stream_arrives_after_its_bytes() -> None:
    async def main() -> None:
        async with world() as w:
            near, far = await w.pair()
            await w.gates(_12=[20.0, 0.0, 50_000.0])
            near[1].write(b"e" * 5_000)
            near[1].close()
            assert await asyncio.wait_for(far[0].read(), 20) == b"e" * 5_000

    asyncio.run(main())


def test_a_far_host_that_refuses_resets_the_opener() -> None:
    async def main() -> None:
        async with world() as w:
            w.server.close()
            near = await w.connect()
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(near[0].readexactly(1), 10)
            assert await w.stats("connections") == 0

    asyncio.run(main())


def test_an_announced_connection_is_routed_once_to_its_destination() -> None:
    async def main() -> None:
        async with world() as w:
            elsewhere: asyncio.Queue[Streams] = asyncio.Queue()
            server = await asyncio.start_server(lambda r, s: elsewhere.put_nowait((r, s)), "127.0.0.1", 0)
            there = server.sockets[0].getsockname()
            source = socket.socket()
            source.bind(("127.0.0.1", 0))
            await w.proxy.route({"routes": [[*source.getsockname(), *there]]})
            source.setblocking(False)
            await asyncio.get_running_loop().sock_connect(source, ("127.0.0.1", w.port))
            near = await asyncio.open_connection(sock=source)
            far = await asyncio.wait_for(elsewhere.get(), 10)
            await transfer(near, far, b"probe")
            await w.gates("12")
            near[1].write(b"held")
            assert await is_quiet(far) and w.accepted.empty()
            for streams in (near, far):
                streams[1].transport.abort()
            assert not w.proxy._routes
            server.close()

    asyncio.run(main())


def test_bytes_and_connections_are_counted_as_passed_or_stopped() -> None:
    """[bytes passed, bytes stopped, connections stopped] of each direction; an announced connection counts nowhere."""

    async def main() -> None:
        async with world() as w:

            async def counted() -> dict[str, list[int]]:
                found = (await w.proxy.traffic({}))["links"]
                return {f"{source[1]}{destination[1]}": counters for source, destination, *counters in found}

            near, far = await w.pair()
            await transfer(near, far, b"seven !")
            await transfer(far, near, b"two")
            assert await counted() == {"12": [7, 0, 0], "21": [3, 0, 0]}
            await w.gates("12")
            near[1].write(b"held!")
            await transfer(far, near, b"one-way")
            await w.connect()
            async with asyncio.timeout(10):
                while await counted() != {"12": [7, 5, 1], "21": [10, 0, 0]}:  # noqa: ASYNC110 - a kernel's buffer
                    await asyncio.sleep(0.01)
            with socket.socket() as source:
                source.bind(("127.0.0.1", 0))
                await w.proxy.route({"routes": [[*source.getsockname(), "127.0.0.1", 1]]})
                source.setblocking(False)
                await asyncio.get_running_loop().sock_connect(source, ("127.0.0.1", w.port))
                await asyncio.get_running_loop().sock_sendall(source, b"a probe")
                assert await counted() == {"12": [7, 5, 1], "21": [10, 0, 0]}
            await w.gates()
            assert await asyncio.wait_for(far[0].readexactly(5), 10) == b"held!"
            assert await counted() == {"12": [12, 5, 1], "21": [10, 0, 0]}

    asyncio.run(main())


@pytest.mark.parametrize("who", ["near", "far"])
def test_stopped_bytes_stay_counted_when_either_end_is_reset(who: str) -> None:
    async def main() -> None:
        async with world() as w:

            async def stopped() -> int:
                return next(
                    int(stopped) for source, _, _, stopped, _ in (await w.proxy.traffic({}))["links"] if source == "n1"
                )

            near, far = await w.pair()
            await w.gates("12")
            near[1].write(b"held!")
            async with asyncio.timeout(10):
                while await stopped() != 5:  # noqa: ASYNC110 - a kernel's buffer
                    await asyncio.sleep(0.01)
                reset((near if who == "near" else far)[1].transport)
                while await w.stats("connections"):
                    if who == "near":
                        far[1].write(b"?")  # nothing from n1 is read meanwhile, not even its end
                    await asyncio.sleep(0.01)
            assert await stopped() == 5
            await w.gates()
            assert await stopped() == 5

    asyncio.run(main())


def test_requests_for_unknown_links_and_ports_in_use_are_refused() -> None:
    async def main() -> None:
        async with world() as w:
            reply = await w.proxy.gates({"cut": [["n1", "n7"]], "shaped": []})
            assert reply == {"ok": False, "error": "no link n1->n7"}
            other = LinkProxy()
            ports = [["127.0.0.1", free_port(), "127.0.0.1", 1], ["127.0.0.1", w.port, "127.0.0.1", 1]]
            link = {"source": "a", "destination": "b", "from": "127.0.0.1", "ports": ports}
            reply = await other.open({"links": [link]})
            assert not reply["ok"] and reply["port"] == w.port
            with socket.socket() as first:  # the port that was opened first is free again
                first.bind(("127.0.0.1", ports[0][1]))

    asyncio.run(main())
