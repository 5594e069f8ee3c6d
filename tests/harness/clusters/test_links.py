"""Shapes of links on real clusters: their effect on packets and streams, and healing."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import statistics
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.clusters.agent_links import AgentLinks
from harness.clusters.base import Program
from harness.clusters.link_relay import Schedule
from harness.clusters.local import LocalCluster
from harness.clusters.netns import NetnsCluster
from harness.clusters.netns_trial import why_no_namespaces
from harness.run_state import RunState
from nemesis.target import Link, LinkMeasure, LinkShape

WHY_NOT = why_no_namespaces(in_user_namespace=False) if os.geteuid() == 0 else "needs root"
needs_netns = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
THERE, BACK, OTHER = Link("n1", "n2"), Link("n2", "n1"), Link("n1", "n3")
Work = Callable[[Any], Awaitable[None]]


def on_cluster(cluster_class: Any, tmp_path: Path, port: int, work: Work) -> None:
    async def main() -> None:
        state = RunState.create(f"links-{os.getpid()}-{port}", state_root=str(tmp_path / "states"))
        cluster = cluster_class(node_count=3, run=state, work_dir=str(tmp_path / "work"), ports=[port])
        cluster.prepare({("links", "delay")})
        await cluster.start()
        try:
            await work(cluster)
        finally:
            await cluster.stop()
            assert state.close()

    asyncio.run(main())


async def measure(cluster: Any, *, count: int = 60, size_bytes: int = 64) -> dict[Link, LinkMeasure]:
    return dict(await cluster.links.measure([THERE, BACK, OTHER], count=count, size_bytes=size_bytes, timeout_s=3.0))


def longest_ms(measured: LinkMeasure) -> float:
    """The median delay, plus the uncertainty of the clocks of two hosts."""
    return statistics.median(measured.delays_ms) + measured.within_ms


@pytest.mark.netns
@needs_netns
def test_shapes_delay_lose_duplicate_reorder_and_throttle_packets(tmp_path: Path) -> None:
    async def work(cluster: NetnsCluster) -> None:
        links = cluster.links
        assert links is not None
        await links.shape("f1", {THERE: LinkShape(delay_ms=80)})
        seen = await measure(cluster)
        assert longest_ms(seen[THERE]) >= 80
        assert statistics.median(seen[BACK].delays_ms) < 40 and statistics.median(seen[OTHER].delays_ms) < 40
        await links.shape("f2", {THERE: LinkShape(delay_ms=80), BACK: LinkShape(loss_percent=50)})
        seen = await measure(cluster)
        assert longest_ms(seen[THERE]) >= 160
        assert 5 < seen[BACK].received < 55 and seen[OTHER].received == 60
        await links.release("f1")
        await links.shape(
            "f2", {THERE: LinkShape(duplicate_percent=50), BACK: LinkShape(delay_ms=30, reorder_percent=40)}
        )
        seen = await measure(cluster)
        assert seen[THERE].duplicates > 5 and seen[THERE].received == 60
        assert seen[BACK].out_of_order > 0 and seen[THERE].out_of_order == 0
        await links.shape("f2", {THERE: LinkShape(rate_bytes_per_s=50_000)})
        seen = await measure(cluster, count=25, size_bytes=1000)
        assert seen[THERE].seconds >= 0.4 and seen[OTHER].seconds < 0.3
        await links.release_all()
        await links.release_all()
        for measured in (await measure(cluster)).values():
            assert (measured.received, measured.duplicates, measured.out_of_order) == (60, 0, 0)
            assert statistics.median(measured.delays_ms) < 40

    on_cluster(NetnsCluster, tmp_path, 4711, work)


@pytest.mark.netns
@needs_netns
def test_streams_of_large_packets_pass_the_relay_intact(tmp_path: Path) -> None:
    """TCP hands the kernel pieces far larger than a packet; the relay must carry them and their checksums."""
    sent = random.Random(5).randbytes(3_000_000)

    async def work(cluster: NetnsCluster) -> None:
        assert cluster.links is not None
        await cluster.links.shape("f", {Link("n1", "n2"): LinkShape(delay_ms=20, duplicate_percent=5)})
        receiver = (
            "import socket, sys\n"
            "server = socket.create_server((sys.argv[1], 4712))\n"
            "print('serving', flush=True)\n"
            "connection, _ = server.accept()\n"
            "data = b''.join(iter(lambda: connection.recv(1 << 16), b''))\n"
            "open(sys.argv[2], 'wb').write(data)\n"
        )
        sender = (
            "import random, socket, sys\n"
            "s = socket.create_connection((sys.argv[1], 4712))\n"
            "s.sendall(random.Random(5).randbytes(3_000_000))\n"
            "s.shutdown(socket.SHUT_WR)\n"
            "s.recv(1)\n"
        )
        address, arrived = cluster.bind_address("n2"), tmp_path / "arrived"
        argv = [sys.executable, "-S", "-c", receiver, address, str(arrived)]
        receives = await cluster.spawn("n2", Program(name="receiver", argv=argv, log_name="receiver"))
        async with asyncio.timeout(40):
            while "serving" not in (tmp_path / "work" / "n2" / "receiver").read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            argv = [sys.executable, "-S", "-c", sender, address]
            await cluster.spawn("n1", Program(name="sender", argv=argv, log_name="sender"))
            assert await receives.wait() == 0
        assert arrived.read_bytes() == sent

    on_cluster(NetnsCluster, tmp_path, 4712, work)


@pytest.mark.netns
@needs_netns
def test_corrupted_packets_are_dropped_by_the_receiving_host(tmp_path: Path) -> None:
    """A stream passes a link that flips bits intact, and the receiver's kernel counts what it has dropped."""
    sent = random.Random(5).randbytes(300_000)

    async def work(cluster: NetnsCluster) -> None:
        links = cluster.links
        assert isinstance(links, AgentLinks)
        await links.shape("f", {THERE: LinkShape(corrupt_percent=20)})
        seen = dict(await links.measure([THERE, BACK, OTHER], count=100, size_bytes=400, timeout_s=3.0))
        assert 2 <= seen[THERE].damaged <= 60 and seen[THERE].received + seen[THERE].damaged <= 100
        assert [(seen[link].received, seen[link].damaged) for link in (BACK, OTHER)] == [(100, 0)] * 2
        before = await links.refused(["n1", "n2", "n3"])
        receiver = (
            "import hashlib, socket, sys\n"
            "server = socket.create_server((sys.argv[1], 4714))\n"
            "print('serving', flush=True)\n"
            "connection, _ = server.accept()\n"
            "data = b''.join(iter(lambda: connection.recv(1 << 16), b''))\n"
            "print(hashlib.sha256(data).hexdigest(), flush=True)\n"
        )
        sender = (
            "import random, socket, sys\n"
            "s = socket.create_connection((sys.argv[1], 4714))\n"
            "s.sendall(random.Random(5).randbytes(300_000))\n"
            "s.shutdown(socket.SHUT_WR)\n"
            "s.recv(1)\n"
        )
        address, log = cluster.bind_address("n2"), tmp_path / "work" / "n2" / "receiver"
        argv = [sys.executable, "-S", "-c", receiver, address]
        receives = await cluster.spawn("n2", Program(name="receiver", argv=argv, log_name="receiver"))
        async with asyncio.timeout(60):
            while "serving" not in log.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            argv = [sys.executable, "-S", "-c", sender, address]
            await cluster.spawn("n1", Program(name="sender", argv=argv, log_name="sender"))
            assert await receives.wait() == 0
        assert hashlib.sha256(sent).hexdigest() in log.read_text()
        after = await links.refused(["n1", "n2", "n3"])
        assert after["n2"] > before["n2"] and (after["n1"], after["n3"]) == (before["n1"], before["n3"])
        await links.release_all()
        seen = dict(await links.measure([THERE, BACK], count=60, size_bytes=400, timeout_s=3.0))
        assert [(measured.received, measured.damaged) for measured in seen.values()] == [(60, 0)] * 2

    on_cluster(NetnsCluster, tmp_path, 4714, work)


def test_shapes_on_local_delay_and_throttle_streams_only(tmp_path: Path) -> None:
    async def work(cluster: LocalCluster) -> None:
        links = cluster.links
        assert links is not None
        await links.shape("f1", {THERE: LinkShape(delay_ms=80), BACK: LinkShape(rate_bytes_per_s=50_000)})
        seen = await measure(cluster)
        assert longest_ms(seen[THERE]) >= 80 and statistics.median(seen[OTHER].delays_ms) < 40
        seen = await measure(cluster, count=25, size_bytes=1000)
        assert seen[BACK].seconds >= 0.4 and seen[OTHER].seconds < 0.4
        for shape in (LinkShape(loss_percent=5), LinkShape(corrupt_percent=5)):
            with pytest.raises(ValueError, match="netns"):
                await links.shape("f2", {THERE: shape})
        await links.release_all()
        assert all(statistics.median(m.delays_ms) < 40 for m in (await measure(cluster)).values())

    on_cluster(LocalCluster, tmp_path, 4713, work)


SHAPES = st.fixed_dictionaries(
    {
        "delay_ms": st.floats(0, 500),
        "jitter_ms": st.floats(0, 100),
        "loss_percent": st.floats(0, 100),
        "duplicate_percent": st.floats(0, 100),
        "reorder_percent": st.just(0.0),
        "rate_bytes_per_s": st.sampled_from([0.0, 1000.0, 1e6]),
    }
)


@given(SHAPES, st.lists(st.tuples(st.floats(0, 0.2), st.integers(60, 1500)), max_size=40), st.integers(0, 99))
def test_schedules_keep_order_rate_and_delay(
    shape: dict[str, float], packets: list[tuple[float, int]], seed: int
) -> None:
    schedule = Schedule(shape, random.Random(seed))
    now_s, last_s, sent_bytes, first_s = 100.0, 0.0, 0, None
    for gap_s, size_bytes in packets:
        now_s += gap_s
        due = schedule.due(now_s, size_bytes)
        assert len(due) <= (2 if shape["duplicate_percent"] else 1)
        for due_s in due:
            assert due_s >= now_s + max(0.0, shape["delay_ms"] - shape["jitter_ms"]) / 1000 - 1e-9
            assert due_s >= last_s, "a packet overtook another one"
            last_s = due_s
        if due and shape["rate_bytes_per_s"]:
            first_s = now_s if first_s is None else first_s
            sent_bytes += size_bytes
            assert due[0] >= first_s + sent_bytes / shape["rate_bytes_per_s"] - 1e-6


@given(st.floats(5, 95), st.integers(0, 99))
def test_schedules_lose_and_reorder_the_configured_share(percent: float, seed: int) -> None:
    plain = {"delay_ms": 10.0, "jitter_ms": 0.0, "duplicate_percent": 0.0, "rate_bytes_per_s": 0.0}
    losing = Schedule({**plain, "loss_percent": percent, "reorder_percent": 0.0}, random.Random(seed))
    lost = sum(not losing.due(float(number), 100) for number in range(1000))
    mixing = Schedule({**plain, "loss_percent": 0.0, "reorder_percent": percent}, random.Random(seed))
    early = sum(mixing.due(float(number), 100)[0] < number + 0.01 for number in range(1000))
    for count in (lost, early):
        assert abs(count - 10 * percent) < 6 * (1000 * percent / 100 * (1 - percent / 100)) ** 0.5 + 1
