"""Whatever happens to the network: bytes arrive in order, exactly once, or the connection breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.clusters.sim.host import Incarnation, SimHost
from harness.clusters.sim.loop import SimLoop
from harness.clusters.sim.network import SimNetwork
from harness.clusters.sim.simulation import run_simulated
from nemesis.target import Link, LinkShape

PORT = 7

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 200_000)),
        st.tuples(st.just("reply"), st.integers(1, 50_000)),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 1e-4, 1e-3, 0.05, 1.0])),
        st.tuples(st.just("cut"), st.sampled_from(["there", "back", "both"])),
        st.tuples(st.just("heal"), st.none()),
        st.tuples(st.just("disturb"), st.sampled_from([0.0, 20.0, 60.0])),
        st.tuples(st.just("pause reading"), st.none()),
        st.tuples(st.just("resume reading"), st.none()),
        st.tuples(st.just("pause process"), st.none()),
        st.tuples(st.just("resume process"), st.none()),
    ),
    min_size=4,
    max_size=30,
)
ENDING = st.sampled_from(["close", "kill", "abort", "reset", "power"])


class End(asyncio.Protocol):
    """One end: what it got, and how it ended."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.eof = False
        self.is_lost = False
        self.error: Exception | None = None
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert not self.eof and not self.is_lost
        self.received += data

    def eof_received(self) -> bool:
        assert not self.eof
        self.eof = True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        assert not self.is_lost
        self.is_lost, self.error = True, exc


def pattern(start: int, size: int) -> bytes:
    """Bytes that depend on their position."""
    return bytes((position * 131 + position // 251) % 256 for position in range(start, start + size))


async def play(steps: list[tuple[str, Any]], ending: str) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    network = SimNetwork(loop)
    a, b = (SimHost(loop, network, name, f"10.0.0.{n}") for n, name in enumerate("ab", 1))
    client, server = End(), End()
    sent, replied = bytearray(), bytearray()

    async def serve(process: Incarnation) -> None:
        await loop.create_server(lambda: server, process.address, PORT)
        await asyncio.Event().wait()

    async def connect(process: Incarnation) -> None:
        await loop.create_connection(lambda: client, b.address, PORT)
        await asyncio.Event().wait()

    b.start(serve)
    await asyncio.sleep(0.1)
    a.start(connect)
    await asyncio.sleep(0.1)
    assert server.transport is not None
    links = {"there": {"b": frozenset("a")}, "back": {"a": frozenset("b")}}
    links["both"] = links["there"] | links["back"]
    acts: dict[str, Callable[[Any], Any]] = {
        "pause reading": lambda _: server.transport.pause_reading(),
        "resume reading": lambda _: server.transport.resume_reading(),
        "pause process": lambda _: b.pause(),
        "resume process": lambda _: b.resume(),
    }
    for action, value in steps:
        if action == "write":
            data = pattern(len(sent), value)
            sent.extend(data)
            client.transport.write(data)
        elif action == "reply" and b.process is not None and b.process.is_running:
            data = pattern(len(replied), value)
            replied.extend(data)
            server.transport.write(data)
        elif action == "wait":
            await asyncio.sleep(value)
        elif action == "cut":
            await network.cut("f", links[value])
        elif action == "heal":
            await network.heal_all()
            network.unshape("s")
        elif action == "disturb":
            fault = LinkShape(
                loss_percent=value, reorder_percent=value, duplicate_percent=value, delay_ms=value, jitter_ms=value
            )
            network.shape("s", {Link("a", "b"): fault, Link("b", "a"): fault})
        elif action in acts:
            acts[action](None)
        assert sent.startswith(server.received) and replied.startswith(client.received)
    await network.heal_all()
    network.unshape_all()
    b.resume()
    server.transport.resume_reading()
    if ending == "close":
        client.transport.close()
    elif ending == "kill":
        a.kill()
    elif ending == "abort":
        server.transport.abort()
    elif ending == "reset":
        await network.reset_connections([Link("a", "b")])
    else:
        a.power_fail()
        await asyncio.sleep(1)
        server.transport.write(b"!")  # makes the survivor notice
        a.boot()
    await asyncio.sleep(1000)
    assert sent.startswith(server.received)
    assert replied.startswith(client.received)
    assert server.is_lost
    if ending == "close":
        assert client.is_lost
        if server.error is None and not replied:
            assert server.received == sent and server.eof  # an orderly end loses nothing
    if ending in ("reset", "power") and not server.eof:
        assert server.error is not None


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS, ending=ENDING, seed=st.integers(0, 1_000))
def test_bytes_arrive_in_order_and_exactly_once_or_the_connection_breaks(
    steps: list[tuple[str, Any]], ending: str, seed: int
) -> None:
    run_simulated(play(steps, ending), seed=seed)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sizes=st.lists(st.integers(1, 300_000), min_size=1, max_size=8), seed=st.integers(0, 1_000))
def test_every_byte_arrives_once_the_faults_have_ended(sizes: list[int], seed: int) -> None:
    """Liveness: as long as neither end closes the connection."""

    async def main() -> tuple[bytes, bytes]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        network = SimNetwork(loop)
        a, b = (SimHost(loop, network, name, f"10.0.0.{n}") for n, name in enumerate("ab", 1))
        client, server = End(), End()

        async def serve(process: Incarnation) -> None:
            await loop.create_server(lambda: server, process.address, PORT)
            await asyncio.Event().wait()

        async def send(process: Incarnation) -> None:
            await loop.create_connection(lambda: client, b.address, PORT)
            for size in sizes:
                client.transport.write(pattern(0, size))
                await asyncio.sleep(0.01)
            await asyncio.Event().wait()

        b.start(serve)
        await asyncio.sleep(0.1)
        a.start(send)
        await asyncio.sleep(0.01)
        lossy = LinkShape(loss_percent=50)
        network.shape("s", {Link("a", "b"): lossy, Link("b", "a"): lossy})
        await network.cut("f", {"a": frozenset("b")} if seed % 2 else {"b": frozenset("a")})
        await asyncio.sleep(5)
        await network.heal_all()
        network.unshape_all()
        await asyncio.sleep(60)
        return bytes(server.received), b"".join(pattern(0, size) for size in sizes)

    received, expected = run_simulated(main(), seed=seed)
    assert received == expected
