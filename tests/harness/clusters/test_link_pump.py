"""Properties of a pump under any sequence of cuts, shapes and full buffers, on virtual time."""

from __future__ import annotations

import asyncio
import random
import select
import selectors
import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.clusters.link_pump import MAX_HELD_BYTES, PIECES_PER_S, Gate, Pump, Side


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer instead of waiting for it."""

    now_s = 0.0

    def __init__(self) -> None:
        loop = self

        class Jumping(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
            def select(self, timeout: float | None = None) -> list[Any]:
                loop.now_s += timeout or 0.0
                return list(super().select(0))

        super().__init__(Jumping())

    def time(self) -> float:
        return self.now_s


class FakeTransport(asyncio.Transport):
    """Records what is done to it, and when."""

    def __init__(self, gate: Gate, protocol: Side | None = None) -> None:
        super().__init__()
        self.gate = gate
        self.protocol = protocol
        self.reading = False
        self.full = False
        self.closed = False
        self.socket: socket.socket | None = None
        self.written: list[tuple[float, bytes]] = []
        self.wrong: list[str] = []
        self.eof_at_s: float | None = None

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.socket if name == "socket" and self.socket is not None else default

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def get_protocol(self) -> Any:
        return self.protocol

    def write(self, data: Any) -> None:
        self._delivering()
        self.written.append((asyncio.get_running_loop().time(), bytes(data)))

    def write_eof(self) -> None:
        self._delivering()
        self.eof_at_s = asyncio.get_running_loop().time()

    def _delivering(self) -> None:
        if self.gate.is_cut:
            self.wrong.append("passed a cut gate")
        if self.full:
            self.wrong.append("written although full")
        if self.eof_at_s is not None:
            self.wrong.append("written after the end")


class Stage:
    """One pump between two fake transports; the opener sends only while it is read."""

    def __init__(self) -> None:
        self.gate = Gate(random.Random(1))
        self.pump = Pump(self.gate)
        back = Pump(Gate(random.Random(2)))
        self.near = Side(incoming=back, outgoing=self.pump)
        self.source = FakeTransport(self.gate)
        self.destination = FakeTransport(self.gate, Side(incoming=self.pump, outgoing=back))
        self.near.connection_made(self.source)
        self.pump.connect(self.source, self.destination)
        self.sent: list[tuple[float, bytes]] = []

    def send(self, data: bytes) -> None:
        if self.source.reading:
            self.sent.append((asyncio.get_running_loop().time(), data))
            self.near.data_received(data)

    def set(self, *, cut: bool = False, delay_ms: float = 0, jitter_ms: float = 0, rate: float = 0) -> None:
        self.gate.set(is_cut=cut, delay_ms=delay_ms, jitter_ms=jitter_ms, rate_bytes_per_s=rate)

    @property
    def sent_bytes(self) -> bytes:
        return b"".join(data for _, data in self.sent)

    @property
    def delivered(self) -> bytes:
        return b"".join(data for _, data in self.destination.written)


ACTIONS = st.one_of(
    st.tuples(st.just("send"), st.integers(1, 3000)),
    st.tuples(st.just("send"), st.just(MAX_HELD_BYTES // 2)),
    st.tuples(st.just("sleep"), st.floats(0, 2)),
    st.tuples(st.just("full"), st.booleans()),
    st.tuples(
        st.just("set"),
        st.fixed_dictionaries(
            {
                "cut": st.booleans(),
                "delay_ms": st.sampled_from([0, 0, 30, 500]),
                "jitter_ms": st.sampled_from([0, 0, 20, 600]),
                "rate": st.sampled_from([0, 0, 500, 1e6]),
            }
        ),
    ),
)


@settings(deadline=None)
@given(st.lists(ACTIONS, max_size=25))
def test_a_pump_loses_and_reorders_nothing_and_passes_nothing_while_cut(actions: list[tuple[str, Any]]) -> None:
    async def main() -> None:
        stage = Stage()
        fill = random.Random(3)
        for name, value in actions:
            if name == "send":
                stage.send(fill.randbytes(value))
            elif name == "sleep":
                await asyncio.sleep(value)
            elif name == "full":
                stage.destination.full = value
                stage.pump.destination_full(value)
            else:
                stage.set(**value)
            assert stage.pump.held_bytes < 2 * MAX_HELD_BYTES
            assert stage.sent_bytes.startswith(stage.delivered)
            assert len(stage.sent_bytes) - len(stage.delivered) == stage.pump.held_bytes
            if stage.gate.is_cut or stage.destination.full:
                assert not stage.source.reading
        stage.near.eof_received()
        stage.destination.full = False
        stage.pump.destination_full(False)
        stage.set()
        await asyncio.sleep(10)
        assert stage.delivered == stage.sent_bytes
        assert stage.destination.eof_at_s is not None
        assert stage.destination.wrong == []

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 3000), st.floats(0, 0.3)), min_size=1, max_size=20),
    st.sampled_from([0, 50, 400]),
    st.sampled_from([0, 40, 500]),
    st.sampled_from([0, 1000, 20_000]),
)
def test_bytes_keep_to_the_configured_delay_and_rate(
    chunks: list[tuple[int, float]], delay_ms: float, jitter_ms: float, rate: float
) -> None:
    async def main() -> None:
        stage = Stage()
        stage.set(delay_ms=delay_ms, jitter_ms=jitter_ms, rate=rate)
        for size, pause_s in chunks:
            stage.send(bytes(size))
            await asyncio.sleep(pause_s)
        await asyncio.sleep(200)
        assert stage.delivered == stage.sent_bytes
        # A byte arrives no earlier than its delay allows, and without a rate no later.
        low_s, high_s = max(0.0, delay_ms - jitter_ms) / 1000, (delay_ms + jitter_ms) / 1000
        sent_at = [at_s for at_s, data in stage.sent for _ in data]
        got_at = [at_s for at_s, data in stage.destination.written for _ in data]
        for sent_s, got_s in zip(sent_at, got_at, strict=True):
            assert got_s - sent_s >= low_s - 1e-9
            if not rate:
                assert got_s - sent_s <= high_s + 1e-9
        if rate:  # in any stretch of time, no more than the rate allows and one piece
            piece = max(64, rate / PIECES_PER_S)
            for first, (begin_s, _) in enumerate(stage.destination.written):
                total = 0
                for at_s, data in stage.destination.written[first:]:
                    total += len(data)
                    assert total <= rate * (at_s - begin_s) + piece + 1e-6

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


def test_bytes_sent_after_a_delay_ends_do_not_overtake_earlier_ones() -> None:
    async def main() -> None:
        stage = Stage()
        stage.set(delay_ms=500)
        stage.send(b"first")
        stage.set()
        stage.send(b"second")
        await asyncio.sleep(0.4)
        assert stage.delivered == b""
        await asyncio.sleep(0.2)
        assert stage.delivered == b"firstsecond"

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


LOSSES = st.tuples(st.sampled_from(["lose destination", "lose source"]), st.none())
CUTS = st.tuples(st.just("cut"), st.booleans())
SENDS = st.tuples(st.just("send"), st.integers(1, 3000))


@settings(deadline=None)
@given(st.lists(st.one_of(CUTS, SENDS, LOSSES), max_size=12))
def test_the_count_of_stopped_bytes_never_decreases(actions: list[tuple[str, Any]]) -> None:
    """Whatever happens to the connection. Bytes sent while the pump does not read wait in the kernel."""

    async def main() -> None:
        stage, (near, kernel) = Stage(), socket.socketpair()
        stage.source.socket = near
        with near, kernel:
            sent = before = cuts = 0
            for name, value in actions:
                if name == "send" and near.fileno() >= 0:
                    kernel.send(bytes(value))
                    sent += value
                elif name == "cut":
                    cuts += value and not stage.gate.is_cut
                    stage.set(cut=value)
                elif name == "lose destination":
                    stage.pump.destination_lost()
                elif name == "lose source":
                    stage.source.closed = True
                    stage.pump.end(is_reset=True)
                    near.close()
                if stage.source.reading and near.fileno() >= 0 and select.select([near], [], [], 0)[0]:
                    stage.near.data_received(near.recv(1 << 20))
                stopped = stage.gate.stopped_bytes
                assert before <= stopped <= cuts * sent
                before = stopped

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


@pytest.mark.parametrize("cut", [False, True])
def test_a_pump_that_lost_its_destination_stops_reading_and_holds_nothing(cut: bool) -> None:
    async def main() -> None:
        stage = Stage()
        stage.set(cut=cut, delay_ms=50)
        stage.send(b"x" * 100)
        stage.pump.destination_lost()
        assert not stage.source.reading and stage.pump.held_bytes == 0
        assert stage.pump not in stage.gate.pumps
        stage.set()
        await asyncio.sleep(1)
        assert stage.delivered == b""

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
