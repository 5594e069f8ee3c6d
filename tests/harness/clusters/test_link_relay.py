"""The link relay on fake packet sockets: which packets it holds back, and that it holds none after the last fault."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from harness.clusters import link_relay
from harness.clusters.link_relay import LinkRelay, Schedule

N1, N2, N3 = (socket.inet_aton(f"10.0.0.{number}") for number in (1, 2, 3))
PORTS = {"10.0.0.1": "eth0", "10.0.0.2": "eth0", "10.0.0.3": "eth1"}
NOTHING = {
    "delay_ms": 0.0, "jitter_ms": 0.0, "loss_percent": 0.0, "duplicate_percent": 0.0, "reorder_percent": 0.0,
    "rate_bytes_per_s": 0.0, "corrupt_percent": 0.0,
}  # fmt: skip
LATE = {**NOTHING, "delay_ms": 3_600_000.0}
VNET, ETHERNET = bytes(10), bytes(12) + b"\x08\x00"


def packet(source: bytes, destination: bytes, content: bytes = b"x" * 20, *, padding: bytes = b"") -> bytes:
    """A frame with an IPv4 packet as a packet socket delivers it."""
    head = b"\x45\x00" + (20 + len(content)).to_bytes(2, "big") + bytes(8)
    return VNET + ETHERNET + head + source + destination + content + padding


class Port:
    """A packet socket. What the test puts in `arriving` is received, and what the relay sends is in `sent`."""

    def __init__(self, device: str) -> None:
        self.device, self.arriving, self.sent, self.is_open = device, list[bytes](), list[bytes](), True
        self._bell, self._ringer = socket.socketpair()

    def ring(self) -> None:
        self._ringer.send(b"!")

    def fileno(self) -> int:
        return self._bell.fileno()

    def recvfrom(self, size_bytes: int) -> tuple[bytes, tuple[str, int, int]]:
        if not self.arriving:
            self._bell.recv(1)
            raise BlockingIOError
        return self.arriving.pop(0), (self.device, 0, 0)

    def send(self, frame: bytes) -> None:
        assert self.is_open
        self.sent.append(frame)

    def close(self) -> None:
        self.is_open = False
        self._bell.close()
        self._ringer.close()


class Bench:
    """A relay, the sockets it has made, and the offloads it has set."""

    def __init__(self) -> None:
        self.relay = LinkRelay()
        self.ports: list[Port] = []
        self.offloads: list[bool] = []

    def make_port(self, device: str, protocol: int) -> Port:
        self.ports.append(Port(device))
        return self.ports[-1]

    def set_offload(self, device: str, command: int, is_on: bool) -> None:
        assert device == "into"
        self.offloads.append(is_on)

    def port(self, device: str) -> Port:
        [port] = [port for port in self.ports if port.device == device and port.is_open]
        return port

    async def shape(self, *pairs: tuple[str, str, dict[str, float]]) -> None:
        await self.relay.shape({"pairs": pairs})

    async def take(self, *frames: bytes) -> dict[str, Any]:
        """Have the relay read frames, and return its counts."""
        port = self.port("aside")
        port.arriving += frames
        port.ring()
        while port.arriving:  # noqa: ASYNC110 - the loop itself reads
            await asyncio.sleep(0)
        return await self.relay.stats({})


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench()
    monkeypatch.setattr(link_relay, "_packet_socket", made.make_port)
    monkeypatch.setattr(link_relay, "_set_offload", made.set_offload)
    yield made
    for port in made.ports:
        port.close()


def run(bench: Bench, work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await bench.relay.open({"seed": 1, "ports": PORTS, "aside": "aside", "into": "into"})
        try:
            await work()
        finally:
            bench.relay.close()

    asyncio.run(main())


def test_only_packets_of_the_shaped_direction_are_relayed(bench: Bench) -> None:
    async def work() -> None:
        await bench.shape(("10.0.0.1", "10.0.0.2", NOTHING))
        there, back, other = packet(N1, N2), packet(N2, N1), packet(N1, N3)
        assert await bench.take(back, other, there) == {"relayed": 1, "lost": 0, "queued": 0}
        assert bench.port("eth0").sent == [there]

    run(bench, work)


def test_queued_packets_go_out_in_order_when_the_last_link_is_healed(bench: Bench) -> None:
    async def work() -> None:
        await bench.shape(("10.0.0.1", "10.0.0.2", LATE), ("10.0.0.1", "10.0.0.3", LATE))
        frames = [packet(N1, N2, bytes([number]) * 20) for number in range(3)]
        assert (await bench.take(*frames))["queued"] == 3
        first = bench.port("eth0")
        await bench.shape(("10.0.0.1", "10.0.0.3", LATE))
        assert first.sent == [], "another link is still shaped"
        await bench.shape()
        assert first.sent == frames and await bench.relay.stats({}) == {"relayed": 3, "lost": 0, "queued": 0}
        assert not any(port.is_open for port in bench.ports), "without a fault the relay listens to nothing"

    run(bench, work)


def test_packets_beyond_the_longest_queue_are_lost_and_counted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_relay, "MAX_QUEUED_PACKETS", 2)

    async def work() -> None:
        await bench.shape(("10.0.0.1", "10.0.0.2", LATE), ("10.0.0.1", "10.0.0.3", {**NOTHING, "loss_percent": 100.0}))
        counts = await bench.take(packet(N1, N3), *[packet(N1, N2)] * 5)
        assert counts == {"relayed": 0, "lost": 4, "queued": 2}

    run(bench, work)


def test_a_link_whose_shape_stays_keeps_what_it_has_queued_for_its_rate(bench: Bench) -> None:
    slow = {**NOTHING, "rate_bytes_per_s": 10.0}  # one packet takes longer than the longest backlog

    async def work() -> None:
        await bench.shape(("10.0.0.1", "10.0.0.2", slow))
        assert (await bench.take(packet(N1, N2)))["queued"] == 1
        await bench.shape(("10.0.0.1", "10.0.0.2", slow), ("10.0.0.1", "10.0.0.3", LATE))
        assert await bench.take(packet(N1, N2)) == {"relayed": 0, "lost": 1, "queued": 1}

    run(bench, work)


def test_a_rate_counts_the_frame_without_the_header_of_the_packet_socket(bench: Bench) -> None:
    async def work() -> None:
        await bench.shape(("10.0.0.1", "10.0.0.2", {**NOTHING, "rate_bytes_per_s": 1000.0}))
        nearly_a_second = packet(N1, N2, b"x" * (995 - 34))
        assert len(nearly_a_second) == 1005
        assert (await bench.take(nearly_a_second, nearly_a_second))["lost"] == 0

    run(bench, work)


def test_packets_are_segmented_only_while_a_link_damages_them(bench: Bench) -> None:
    async def work() -> None:
        damaging = {**NOTHING, "corrupt_percent": 5.0}
        await bench.shape(("10.0.0.1", "10.0.0.2", LATE))
        assert bench.offloads == []
        await bench.shape(("10.0.0.1", "10.0.0.2", damaging))
        await bench.shape(("10.0.0.1", "10.0.0.2", damaging), ("10.0.0.1", "10.0.0.3", LATE))
        assert bench.offloads == [False, False]
        await bench.shape()
        assert bench.offloads == [False, False, True, True]

    run(bench, work)


def test_a_packet_that_cannot_be_sent_is_lost_and_does_not_hold_up_others(bench: Bench) -> None:
    async def work() -> None:
        await bench.shape(("10.0.0.1", "10.0.0.2", NOTHING), ("10.0.0.1", "10.0.0.3", NOTHING))

        def refuse(frame: bytes) -> None:
            raise OSError("no buffer space")

        bench.port("eth0").send = refuse  # type: ignore[method-assign]
        assert await bench.take(packet(N1, N2), packet(N1, N3)) == {"relayed": 1, "lost": 1, "queued": 0}

    run(bench, work)


# Schedules.


def schedule(**shape: float) -> Schedule:
    return Schedule({**NOTHING, **shape}, random.Random(3))


def test_a_rate_loses_what_would_wait_longer_than_the_backlog() -> None:
    limited = schedule(rate_bytes_per_s=1000.0)
    assert [limited.due(50.0, 600) for _ in range(4)] == [[pytest.approx(50.6)], [pytest.approx(51.2)], [], []]
    assert limited.due(51.0, 600) == [pytest.approx(51.8)], "what was lost does not take up the link"


def test_jitter_makes_a_packet_earlier_or_later_than_the_delay() -> None:
    shaped = schedule(delay_ms=100.0, jitter_ms=40.0)
    waits_ms = [(shaped.due(float(second), 100)[0] - second) * 1000 for second in range(300)]
    assert 60 <= min(waits_ms) < 70 and 130 < max(waits_ms) <= 140


def test_the_configured_share_is_duplicated() -> None:
    shaped = schedule(duplicate_percent=30.0)
    copies = [len(shaped.due(float(second), 100)) for second in range(1000)]
    assert set(copies) == {1, 2} and 230 < copies.count(2) < 370


def test_the_configured_share_has_one_flipped_bit_after_the_ip_header() -> None:
    shaped, sent = schedule(corrupt_percent=30.0), packet(N1, N2, bytes(8), padding=bytes(400))
    damaged = [seen for _ in range(1000) if (seen := shaped.damaged(sent)) != sent]
    assert 230 < len(damaged) < 370
    flipped = set()
    for seen in damaged:
        [(at, bits)] = [
            (at, before ^ after) for at, (before, after) in enumerate(zip(sent, seen, strict=True)) if before ^ after
        ]
        assert bits.bit_count() == 1
        flipped.add(at)
    assert flipped == set(range(44, 52)), "every byte of the content, no byte of the headers or of the padding"
    assert schedule().damaged(sent) is sent
