"""Simulated connections, as programs see them and under faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from harness.clusters.sim.errors import NotSimulated
from harness.clusters.sim.faults import SimLinks
from harness.clusters.sim.host import Incarnation
from harness.clusters.sim.network import TraceEvent
from harness.clusters.sim.wire import RETRANSMIT_S
from nemesis.target import Link, LinkShape, LinkTraffic

Simulate = Callable[..., Any]
PORT = 80


class Recorder(asyncio.Protocol):
    """Keeps what happens to a connection; echoes when asked to."""

    def __init__(self, *, echo: bool = False) -> None:
        self.echo = echo
        self.data = b""
        self.events: list[str] = []
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.events.append("made")

    def data_received(self, data: bytes) -> None:
        self.data += data
        if self.echo:
            self.transport.write(data)

    def eof_received(self) -> bool:
        self.events.append("eof")
        return False

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append("lost")
        self.lost.set_result(exc)


def listener(accepted: list[Recorder], *, echo: bool = True) -> Callable[[Incarnation], Any]:
    """A program that listens and keeps the protocols of its connections."""

    def factory() -> Recorder:
        accepted.append(Recorder(echo=echo))
        return accepted[-1]

    async def program(process: Incarnation) -> None:
        await asyncio.get_running_loop().create_server(factory, process.address, PORT)
        await process.stop_requested.wait()

    return program


async def dial(world: Any, source: str, destination: str, protocol: Callable[[], Any] = Recorder) -> Any:
    """Connect from one host to another; returns the protocol. Raises what connecting raised."""

    async def program(process: Incarnation) -> None:
        try:
            result.set_result((await world.loop.create_connection(protocol, world[destination].address, PORT))[1])
        except Exception as error:
            result.set_exception(error)
        await process.stop_requested.wait()

    result = world.loop.create_future()
    world.on(source, program)
    return await result


def test_asyncio_streams_exchange_data_and_close(simulate: Simulate) -> None:
    async def scenario(world: Any) -> list[bytes]:
        answers: list[bytes] = []
        done = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async for line in reader:
                writer.write(line.upper())
                await writer.drain()
            writer.close()
            await writer.wait_closed()

        async def server(process: Incarnation) -> None:
            started = await asyncio.start_server(serve, process.address, 0)
            port.set_result(started.sockets[0].getsockname()[1])
            async with started:
                await started.serve_forever()

        async def client(process: Incarnation) -> None:
            reader, writer = await asyncio.open_connection("10.0.0.2", await port)
            assert writer.get_extra_info("peername") == ("10.0.0.2", await port)
            assert writer.get_extra_info("sockname")[0] == "10.0.0.1"
            for word in (b"one\n", b"two\n"):
                writer.write(word)
                answers.append(await reader.readline())
            writer.write_eof()
            answers.append(await reader.read())
            writer.close()
            await writer.wait_closed()
            done.set()

        port = world.loop.create_future()
        world.on("b", server)
        world.on("a", client)
        await done.wait()
        return answers

    assert simulate(scenario) == [b"ONE\n", b"TWO\n", b""]


def test_a_connection_to_a_closed_port_is_refused_after_a_round_trip(simulate: Simulate) -> None:
    async def scenario(world: Any) -> float:
        began_s = world.loop.time()
        with pytest.raises(ConnectionRefusedError, match=r"10\.0\.0\.2"):
            await dial(world, "a", "b")
        return world.loop.time() - began_s

    assert 0.0002 < simulate(scenario) < 0.1


def test_connecting_to_a_host_without_power_times_out(simulate: Simulate) -> None:
    async def scenario(world: Any) -> float:
        world["b"].power_fail()
        began_s = world.loop.time()
        with pytest.raises(TimeoutError):
            await dial(world, "a", "b")
        return world.loop.time() - began_s

    assert simulate(scenario) == pytest.approx(127.0)


def test_unknown_addresses_and_names_and_used_ports_are_refused(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        async def program(process: Incarnation) -> None:
            with pytest.raises(OSError, match="no route to host"):
                await world.loop.create_connection(Recorder, "10.9.9.9", PORT)
            with pytest.raises(OSError, match="no name service"):
                await world.loop.create_connection(Recorder, "broker.example", PORT)
            with pytest.raises(OSError, match="cannot assign"):
                await world.loop.create_server(Recorder, "10.9.9.9", PORT)
            await world.loop.create_server(Recorder, process.address, PORT)
            with pytest.raises(OSError, match="in use"):
                await world.loop.create_server(Recorder, process.address, PORT)
            with pytest.raises(NotSimulated, match="ssl"):
                await world.loop.create_connection(Recorder, "10.0.0.2", PORT, ssl=True)

        assert await world.on("a", program).wait() == 0, world["a"].log.text()

    simulate(scenario)


def test_a_cut_handshake_completes_at_a_retry_after_the_heal(simulate: Simulate) -> None:
    async def scenario(world: Any) -> float:
        world.on("b", listener([]))
        await world.network.cut("f1", {"b": frozenset({"a"})})
        began_s = world.loop.time()
        dialling = asyncio.create_task(dial(world, "a", "b"))
        await asyncio.sleep(4)
        assert not dialling.done()
        await world.network.heal("f1")
        await dialling
        return world.loop.time() - began_s

    assert simulate(scenario) == pytest.approx(7, abs=0.1)  # SYNs go out at 0, 1, 3 and 7 s


@pytest.mark.parametrize("grudge", [{"b": frozenset({"a"})}, {"a": frozenset({"b"})}])
def test_bytes_sent_into_a_cut_arrive_after_the_heal_in_order(simulate: Simulate, grudge: Any) -> None:
    async def scenario(world: Any) -> bytes:
        accepted: list[Recorder] = []
        world.on("b", listener(accepted))
        client = await dial(world, "a", "b")
        client.transport.write(b"1")
        await world.until(lambda: client.data == b"1")
        await world.network.cut("f1", grudge)
        for digit in (b"2", b"3", b"4"):
            client.transport.write(digit)
            await asyncio.sleep(1)
        assert client.data == b"1"
        await world.network.heal_all()
        client.transport.write(b"5")
        await world.until(lambda: len(client.data) == 5, within_s=30)
        assert accepted[0].data == client.data
        return bytes(client.data)

    assert simulate(scenario) == b"12345"


def test_traffic_of_programs_is_counted_and_probes_are_not(simulate: Simulate) -> None:
    async def scenario(world: Any) -> Any:
        world.on("b", listener([]))
        client = await dial(world, "a", "b")
        links = Link("a", "b"), Link("b", "a")
        client.transport.write(b"12345")
        await world.until(lambda: len(client.data) == 5)
        await world.network.probe(links, timeout_s=1)
        healthy = await world.network.traffic(links)
        await world.network.cut("f1", {"b": frozenset({"a", "c"})})
        client.transport.write(b"678")
        attempt = asyncio.ensure_future(dial(world, "c", "b"))
        await asyncio.sleep(0.5)
        await world.network.probe(links, timeout_s=1)
        cut = await world.network.traffic((*links, Link("c", "b")))
        await world.network.heal_all()
        await world.until(lambda: len(client.data) == 8, within_s=30)
        await attempt
        return [list(of.values()) for of in (healthy, cut, await world.network.traffic(links))]

    healthy, cut, healed = simulate(scenario)
    assert healthy == [LinkTraffic(passed_bytes=5), LinkTraffic(passed_bytes=5)]
    assert cut == [
        LinkTraffic(passed_bytes=5, stopped_bytes=3), LinkTraffic(passed_bytes=5), LinkTraffic(stopped_connections=2)
    ]  # fmt: skip
    assert [counted.passed_bytes for counted in healed] == [8, 8]


def test_a_one_way_cut_passes_the_other_way(simulate: Simulate) -> None:
    async def scenario(world: Any) -> list[bool]:
        await world.network.cut("f1", {"b": frozenset({"a"})})
        await world.network.cut("f2", {"b": frozenset({"a", "c"})})
        links = [Link("a", "b"), Link("b", "a"), Link("c", "b")]
        first = await world.network.probe(links, timeout_s=0.5)
        await world.network.heal("f2")
        second = await world.network.probe(links, timeout_s=0.5)
        await world.network.heal("f1")
        third = await world.network.probe(links, timeout_s=0.5)
        with pytest.raises(ValueError, match="no link a->nowhere"):
            await world.network.cut("f3", {"nowhere": frozenset({"a"})})
        return [result.passed for result in (*first, *second, *third)]

    assert simulate(scenario) == [False, True, False, False, True, True, True, True, True]


def test_a_connection_without_acknowledgements_times_out_after_15_minutes(simulate: Simulate) -> None:
    async def scenario(world: Any) -> float:
        world.on("b", listener([]))
        client = await dial(world, "a", "b")
        await world.network.cut("f1", {"b": frozenset({"a"})})
        client.transport.write(b"x")
        began_s = world.loop.time()
        assert isinstance(await client.lost, TimeoutError)
        return world.loop.time() - began_s

    assert 900 < simulate(scenario) < 1100


def test_a_killed_peer_closes_its_connections(simulate: Simulate) -> None:
    async def scenario(world: Any) -> list[str]:
        world.on("b", listener([]))
        client = await dial(world, "a", "b")
        world["b"].kill()
        assert await client.lost is None
        with pytest.raises(ConnectionRefusedError):
            await dial(world, "c", "b")
        return client.events

    assert simulate(scenario) == ["made", "eof", "lost"]


def test_a_peer_without_power_is_silent_until_its_boot_resets_the_connection(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        world.on("b", listener([]))
        client = await dial(world, "a", "b")
        world["b"].power_fail()
        client.transport.write(b"into the void")
        await asyncio.sleep(10)
        assert client.events == ["made"]
        world["b"].boot()
        assert isinstance(await client.lost, ConnectionResetError)

    simulate(scenario)


def test_a_connection_without_traffic_stays_half_open(simulate: Simulate) -> None:
    async def scenario(world: Any) -> list[str]:
        world.on("b", listener([]))
        client = await dial(world, "a", "b")
        world["b"].power_fail()
        await asyncio.sleep(1)
        world["b"].restart()
        await asyncio.sleep(3600)
        assert client.events == ["made"]
        client.transport.write(b"anybody there?")
        await client.lost
        return client.events

    assert simulate(scenario) == ["made", "lost"]


def test_the_kernel_accepts_connections_for_a_paused_process(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        accepted: list[Recorder] = []
        world.on("b", listener(accepted))
        await asyncio.sleep(1)
        world["b"].pause()
        client = await dial(world, "a", "b")  # its kernel answers
        client.transport.write(b"hello")
        await asyncio.sleep(60)
        assert accepted == [] and client.data == b""
        world["b"].resume()
        await world.until(lambda: client.data == b"hello", within_s=1)

    simulate(scenario)


def test_a_slow_reader_makes_the_writer_pause(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        accepted: list[Recorder] = []
        world.on("b", listener(accepted, echo=False))
        client = await dial(world, "a", "b")
        await world.until(lambda: len(accepted) == 1)
        accepted[0].transport.pause_reading()
        assert not accepted[0].transport.is_reading()
        sent = bytes(range(256)) * 8192
        client.transport.writelines([sent[:1000], sent[1000:]])
        assert client.events == ["made", "pause"]
        assert 0 < client.transport.get_write_buffer_size() < len(sent)
        await asyncio.sleep(5)
        assert accepted[0].data == b""
        accepted[0].transport.resume_reading()
        await world.until(lambda: accepted[0].data == sent, within_s=5)
        assert client.events == ["made", "pause", "resume"]
        assert client.transport.get_write_buffer_size() == 0

    simulate(scenario)


def test_closing_sends_buffered_bytes_and_aborting_does_not(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        accepted: list[Recorder] = []
        world.on("b", listener(accepted, echo=False))
        sent = b"x" * 2_000_000
        client = await dial(world, "a", "b")
        client.transport.write(sent)
        client.transport.close()
        assert client.transport.is_closing()
        assert await client.lost is None
        await accepted[0].lost
        assert accepted[0].data == sent
        client.transport.write(b"ignored")
        other = await dial(world, "c", "b")
        other.transport.write(sent)
        other.transport.abort()
        await other.lost
        await world.until(lambda: len(accepted) == 2)
        await accepted[1].lost
        assert len(accepted[1].data) < len(sent)
        assert sent.startswith(accepted[1].data)

    simulate(scenario)


def test_data_for_a_closed_socket_is_discarded(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        accepted: list[Recorder] = []
        world.on("b", listener(accepted, echo=False))
        client = await dial(world, "a", "b")
        await world.until(lambda: len(accepted) == 1)
        accepted[0].transport.close()
        client.transport.write(b"too late")  # before the end of file of the peer arrives
        assert isinstance(await client.lost, ConnectionResetError | None)
        assert accepted[0].data == b""

    simulate(scenario)


@pytest.mark.parametrize("end", ["abort", "kill", "reset"])
def test_a_closing_transport_with_unsent_data_learns_of_a_reset(simulate: Simulate, end: str) -> None:
    """A closing transport still writes its buffer, so it learns of a reset like any writer."""

    async def scenario(world: Any) -> None:
        accepted: list[Recorder] = []
        world.on("b", listener(accepted, echo=False))
        client = await dial(world, "a", "b")
        await world.until(lambda: len(accepted) == 1)
        accepted[0].transport.pause_reading()
        client.transport.write(b"x" * 2_000_000)
        client.transport.close()
        await asyncio.sleep(1)
        assert client.events == ["made", "pause"]
        if end == "abort":
            accepted[0].transport.abort()
        elif end == "kill":
            world["b"].kill()
        else:
            await world.network.reset_connections([Link("a", "b")])
        await asyncio.sleep(10)
        assert client.lost.done()
        assert isinstance(client.lost.result(), ConnectionResetError)

    simulate(scenario)


@pytest.mark.parametrize("notices", ["reading", "writing"])
def test_an_end_that_neither_reads_nor_writes_does_not_notice_a_reset(simulate: Simulate, notices: str) -> None:
    async def scenario(world: Any) -> None:
        accepted: list[Recorder] = []
        world.on("b", listener(accepted, echo=False))
        client = await dial(world, "a", "b")
        await world.until(lambda: len(accepted) == 1)
        accepted[0].transport.pause_reading()
        client.transport.write(b"not read")
        client.transport.pause_reading()
        await asyncio.sleep(1)
        await world.network.reset_connections([Link("a", "b")])
        await asyncio.sleep(1)
        assert client.events == accepted[0].events == ["made"]
        for end in (client, accepted[0]):
            if notices == "reading":
                end.transport.resume_reading()
            else:
                end.transport.write(b"more")
        await asyncio.sleep(1)
        assert isinstance(client.lost.result(), ConnectionResetError)
        assert isinstance(accepted[0].lost.result(), ConnectionResetError)

    simulate(scenario)


def test_resetting_a_link_resets_only_its_connections(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        accepted: list[Recorder] = []
        world.on("b", listener(accepted))
        client, other = await dial(world, "a", "b"), await dial(world, "c", "b")
        await world.until(lambda: len(accepted) == 2)
        assert await world.network.reset_connections([Link("b", "a")]) == 1
        assert isinstance(await client.lost, ConnectionResetError)
        assert isinstance(await accepted[0].lost, ConnectionResetError)
        assert other.events == ["made"]

    simulate(scenario)


def test_a_lossy_link_delays_bytes_and_loses_none(simulate: Simulate) -> None:
    async def scenario(world: Any) -> float:
        world.on("b", listener([]))
        client = await dial(world, "a", "b")
        fault = LinkShape(loss_percent=30, duplicate_percent=30, reorder_percent=30, delay_ms=1)
        world.network.shape("f1", {Link("a", "b"): fault, Link("b", "a"): fault})
        began_s = world.loop.time()
        text = b"".join(b"%d " % number for number in range(300))
        for number in range(300):
            client.transport.write(b"%d " % number)
            await asyncio.sleep(0.001)
        await world.until(lambda: client.data == text)
        return world.loop.time() - began_s

    assert simulate(scenario) > RETRANSMIT_S


def test_a_probe_passes_on_a_lossy_link(simulate: Simulate) -> None:
    async def scenario(world: Any) -> list[bool]:
        link = Link("a", "b")
        world.network.shape("f1", {link: LinkShape(loss_percent=40)})
        return [(await world.network.probe([link], timeout_s=2.0))[0].passed for _ in range(500)]

    assert all(simulate(scenario))


def test_shapes_add_up_until_they_are_released(simulate: Simulate) -> None:
    async def scenario(world: Any) -> tuple[float, float, float]:
        world.on("b", listener([]))
        client = await dial(world, "a", "b")

        async def round_trip_s(size: int) -> float:
            before = len(client.data)
            began_s = world.loop.time()
            client.transport.write(b"x" * size)
            await world.until(lambda: len(client.data) == before + size)
            return world.loop.time() - began_s

        link = Link("a", "b")
        world.network.shape("slow", {link: LinkShape(delay_ms=50, jitter_ms=5)})
        slow_s = await round_trip_s(1)
        world.network.shape("narrow", {link: LinkShape(delay_ms=50, rate_bytes_per_s=10_000)})
        both_s = await round_trip_s(5_000)
        world.network.unshape("slow")
        world.network.unshape("narrow")
        return slow_s, both_s, await round_trip_s(5_000)

    slow_s, both_s, healthy_s = simulate(scenario)
    assert 0.045 < slow_s < 0.1
    assert 0.55 < both_s < 0.7
    assert healthy_s < 0.05


def test_cancelled_dials_leave_the_same_connections_in_every_run(simulate: Simulate) -> None:
    async def scenario(world: Any) -> int:
        accepted: list[Recorder] = []
        world.on("b", listener(accepted))

        async def program(process: Incarnation) -> None:
            for attempt in range(40):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(attempt * 20e-6):
                        await world.loop.create_connection(Recorder, "10.0.0.2", PORT)
                        raise TimeoutError

        assert await world.on("a", program).wait() == 0, world["a"].log.text()
        await asyncio.sleep(1)
        return len([one for one in accepted if not one.lost.done()])

    assert simulate(scenario) == simulate(scenario)


def test_wait_closed_of_a_server_waits_for_its_connections(simulate: Simulate) -> None:
    async def scenario(world: Any) -> list[str]:
        order: list[str] = []

        async def program(process: Incarnation) -> None:
            server = await world.loop.create_server(Recorder, process.address, PORT)
            assert server.is_serving()
            await ready.wait()
            server.close()
            assert not server.is_serving()
            closing = asyncio.create_task(server.wait_closed())
            await asyncio.sleep(1)
            order.append("open" if not closing.done() else "closed too early")
            closed.set()
            await closing
            order.append("closed")

        ready, closed = asyncio.Event(), asyncio.Event()
        process = world.on("b", program)
        client = await dial(world, "a", "b")
        await asyncio.sleep(0.1)
        ready.set()
        await closed.wait()
        client.transport.close()
        assert await process.wait() == 0, world["b"].log.text()
        return order

    assert simulate(scenario) == ["open", "closed"]


def test_the_trace_records_handshakes_sends_arrivals_and_losses(simulate: Simulate) -> None:
    async def scenario(world: Any) -> list[TraceEvent]:
        events: list[TraceEvent] = []
        world.network.trace = events.append
        world.on("b", listener([], echo=False))
        client = await dial(world, "a", "b")
        client.transport.write(b"hello")
        await asyncio.sleep(1)
        await world.network.cut("f", {"b": frozenset({"a"})})
        client.transport.write(b"lost")
        await asyncio.sleep(0.1)
        await world.network.heal_all()
        await asyncio.sleep(1)
        return events

    events = simulate(scenario)
    kinds = [event.kind for event in events]
    for kind in ("syn", "accept", "send", "arrive", "lost", "again"):
        assert kind in kinds, kinds
    sent = [event for event in events if event.kind == "send"]
    assert sum(event.size_bytes for event in sent) == 9
    assert {(event.source, event.destination, event.connection) for event in sent} == {("a", "b", 1)}
    assert [event.time_s for event in events] == sorted(event.time_s for event in events)


@pytest.mark.parametrize("state", ["whole", "cut", "without power at its end", "without power at its beginning"])
def test_nothing_is_received_over_a_cut_link_or_without_power(simulate: Simulate, state: str) -> None:
    async def scenario(world: Any) -> None:
        links, link = SimLinks(world.loop, world.network), Link("a", "b")
        if state == "cut":
            await world.network.cut("f1", {"b": frozenset({"a"})})
        elif state != "whole":
            world["b" if state.endswith("end") else "a"].power_fail()
        measured = (await links.measure([link], count=10, size_bytes=64, timeout_s=1.0))[link]
        assert measured.received == (10 if state == "whole" else 0)

    simulate(scenario)
