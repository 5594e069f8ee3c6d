"""The netns cluster on real namespaces: hosts, cuts, probes and cleanup."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import programs
from harness.clusters.base import CLIENTS_HOST, ClusterUnavailable, Program
from harness.clusters.netns import MAX_HOSTS, NetnsCluster
from harness.clusters.netns_calls import entered, identity, namespace_path
from harness.clusters.netns_trial import why_no_namespaces
from harness.run_state import RUN_VARIABLE, RunState, process_start_ticks
from nemesis.mechanisms.shell import ShellError
from nemesis.partition import PARTITION
from nemesis.protocol import Proof
from nemesis.target import Link
from tests.harness.clusters.ipv6 import expect_ipv6_is_closed

WHY_NOT = "needs root" if os.geteuid() != 0 else why_no_namespaces(in_user_namespace=False)

pytestmark = [
    pytest.mark.root,
    pytest.mark.netns,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no network namespaces: {WHY_NOT}"),
]

PORT = 7000
EXTRA_HOST = "ns1"
RUN = f"tn{os.getpid()}"
"""Prefix of every run id: names of namespaces are shared with concurrent tests."""


SERVER = f"""
import os, socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("serving", flush=True)
while True:
    connection, peer = server.accept()
    connection.sendall((peer[0] + " " + os.environ["{RUN_VARIABLE}"] + "\\n" + open(sys.argv[3]).read()).encode())
    connection.close()
"""


def own_namespace() -> tuple[int, int]:
    return identity("/proc/thread-self/ns/net")


def with_cluster(
    tmp_path: Path, scenario: Callable[[NetnsCluster], Awaitable[None]], *, node_count: int = 3, run_id: str = RUN
) -> None:
    """Run `scenario` on a started cluster, stop it, and check that nothing is left."""

    async def body() -> None:
        run = RunState.create(run_id, state_root=str(tmp_path / "state"))
        cluster = NetnsCluster(
            node_count=node_count, run=run, work_dir=str(tmp_path / run_id), ports=[PORT], extra_hosts=[EXTRA_HOST]
        )
        home = own_namespace()
        await cluster.start()
        try:
            assert own_namespace() == identity(namespace_path(f"sb-{run_id}-{CLIENTS_HOST}"))
            await scenario(cluster)
        finally:
            await cluster.stop()
        assert own_namespace() == home
        await cluster.stop()
        assert left_of(run_id) == []
        assert run.claims == ()
        assert run.close()

    asyncio.run(body())


def left_of(run_id: str) -> list[str]:
    try:
        return [name for name in os.listdir("/run/netns") if name.startswith(f"sb-{run_id}-")]
    except FileNotFoundError:
        return []


async def passing(cluster: NetnsCluster, links: list[Link], *, timeout_s: float = 1.0) -> set[Link]:
    results = await cluster.network.probe(links, timeout_s=timeout_s)
    assert [result.link for result in results] == links
    assert all(result.detail and not result.partial for result in results)
    return {result.link for result in results if result.passed}


def all_links(hosts: list[str]) -> list[Link]:
    return [Link(a, b) for a in hosts for b in hosts if a != b]


def nft(cluster_run: str, host: str, *arguments: str) -> str:
    argv = ["nsenter", f"--net=/run/netns/sb-{cluster_run}-{host}", "nft", *arguments]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def test_every_link_of_a_new_cluster_passes(tmp_path: Path) -> None:
    async def scenario(cluster: NetnsCluster) -> None:
        assert cluster.hosts == ("n1", "n2", "n3", "n4", "n5")
        links = all_links([*cluster.hosts, EXTRA_HOST, CLIENTS_HOST])
        assert len(links) == 42
        assert await passing(cluster, links, timeout_s=5.0) == set(links)

    with_cluster(tmp_path, scenario, node_count=5)


def test_a_cut_is_one_way_and_silent_and_ends_with_its_heal(tmp_path: Path) -> None:
    async def scenario(cluster: NetnsCluster) -> None:
        links = all_links([*cluster.hosts, CLIENTS_HOST])
        await cluster.network.cut("f1", {"n2": frozenset({"n1"})})
        assert await passing(cluster, links) == set(links) - {Link("n1", "n2")}
        with entered(namespace_path(f"sb-{RUN}-n1")):
            sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        with sender, connection:
            # There is no listener: without the cut both would fail at once.
            for _ in range(3):
                sender.sendto(b"x", (cluster.bind_address("n2"), PORT))
            connection.settimeout(0.3)
            with pytest.raises(TimeoutError):
                connection.connect((cluster.bind_address("n2"), PORT))
        await cluster.network.heal("f1")
        await cluster.network.heal("f1")
        assert await passing(cluster, links, timeout_s=5.0) == set(links)

    with_cluster(tmp_path, scenario)


def test_overlapping_cuts_heal_one_by_one(tmp_path: Path) -> None:
    async def scenario(cluster: NetnsCluster) -> None:
        network, links = cluster.network, all_links([*cluster.hosts, CLIENTS_HOST])
        one = {"n1": frozenset({"n2", "n3"}), "n2": frozenset({"n1"})}
        two = {"n1": frozenset({"n3", CLIENTS_HOST}), CLIENTS_HOST: frozenset({"n1"})}
        cut_by_one = {Link("n2", "n1"), Link("n3", "n1"), Link("n1", "n2")}
        cut_by_two = {Link("n3", "n1"), Link(CLIENTS_HOST, "n1"), Link("n1", CLIENTS_HOST)}
        await asyncio.gather(network.cut("f1", one), network.cut("f2", two))
        assert await passing(cluster, links) == set(links) - cut_by_one - cut_by_two
        await network.heal("f1")
        assert await passing(cluster, links) == set(links) - cut_by_two
        await network.cut("f1", one)
        await network.heal("f2")
        assert await passing(cluster, links) == set(links) - cut_by_one
        await network.heal_all()
        await network.heal_all()
        assert await passing(cluster, links, timeout_s=5.0) == set(links)

    with_cluster(tmp_path, scenario)


def test_a_probe_passes_a_cut_whose_rules_were_removed(tmp_path: Path) -> None:
    async def scenario(cluster: NetnsCluster) -> None:
        await cluster.network.cut("f1", {"n2": frozenset({"n1"}), "n3": frozenset({"n1"})})
        nft(RUN, "n2", "flush", "chain", "inet", "splitbrain", "input")
        links = [Link("n1", "n2"), Link("n1", "n3")]
        results = await cluster.network.probe(links, timeout_s=1.0)
        assert [result.passed for result in results] == [True, False]
        assert "arrived after" in results[0].detail
        assert "nothing arrived within 1000 ms" in results[1].detail
        nft(RUN, "n2", "delete", "table", "inet", "splitbrain")
        with pytest.raises(ShellError, match="n2: "):
            await cluster.network.cut("f2", {"n2": frozenset({"n3"})})
        await cluster.network.heal_all()
        assert await passing(cluster, all_links(["n1", "n2", "n3"]), timeout_s=5.0) == set(
            all_links(["n1", "n2", "n3"])
        )
        await cluster.network.cut("f3", {"n2": frozenset({"n1"})})
        assert await passing(cluster, links) == {Link("n1", "n3")}

    with_cluster(tmp_path, scenario)


SEND_UDP = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    sender.sendto(b"x" * 72, (sys.argv[1], int(sys.argv[2])))
"""


INNER = "10.99.0.2"
MAKE_INNER = f"""
ip link add outside type veth peer name inside
ip addr add 10.99.0.1/30 dev outside
ip link set outside up
ip link set inside up
ip neigh add {INNER} lladdr 02:00:00:00:00:01 dev outside
echo 1 > /proc/sys/net/ipv4/ip_forward
"""
"""A network within a host, like that of a container, to which the host forwards packets."""


@pytest.mark.parametrize("forwards", [False, True])
def test_traffic_of_programs_hits_a_cut_and_disproves_it_if_it_passes(tmp_path: Path, forwards: bool) -> None:
    """Probes alone do not exercise a cut; a rule that is lost after the proof shows in the traffic that passes. The
    same holds for what a host forwards to a network within it."""

    async def scenario(cluster: NetnsCluster) -> None:
        target: Any = SimpleNamespace(hosts=cluster.hosts, network=cluster.network)
        address = cluster.bind_address("n2")
        if forwards:
            assert await cluster.run("n2", ["sh", "-ec", MAKE_INNER]) == (0, "", "")
            assert await cluster.run("n1", ["ip", "route", "add", INNER, "via", address]) == (0, "", "")
            address = INNER

        async def send() -> None:
            argv = [sys.executable, "-c", SEND_UDP, address, str(PORT)]
            assert await cluster.run("n1", argv) == (0, "", "")

        async def met(during: Callable[[], Awaitable[None]]) -> Proof:
            planned = await PARTITION.plan(target, random.Random(0), fault_id="f1", variant="n1>n2")
            await PARTITION.inject(target, planned)
            proof = await PARTITION.prove(target, planned)
            assert proof.proven, proof
            await during()
            lasting = replace(planned, evidence={**planned.evidence, **proof.evidence})
            seen = await PARTITION.prove_met(target, lasting)
            await PARTITION.heal(target, planned)
            return seen

        async def nothing() -> None:
            pass

        async def lose_the_rule() -> None:
            nft(RUN, "n2", "flush", "chain", "inet", "splitbrain", "input")
            await send()

        unmet = await met(nothing)
        assert unmet.proven and unmet.exercised is False
        assert "none has ever used n1->n2" in unmet.detail
        await send()
        unmet = await met(nothing)
        assert unmet.exercised is False and "ever" not in unmet.detail
        run_into = await met(send)
        assert run_into.proven and run_into.exercised is True
        assert run_into.detail == "100 bytes of the system's traffic ran into the cut, on 1 of 1 links"
        leaked = await met(lose_the_rule)
        assert not leaked.proven and leaked.failed == [
            "n1->n2 carried 100 bytes of the system's traffic while it was cut"
        ]

    with_cluster(tmp_path, scenario)


def test_ipv6_between_hosts_is_blocked_and_disproves_a_cut_if_it_is_not(tmp_path: Path) -> None:
    with_cluster(tmp_path, expect_ipv6_is_closed)


def test_a_source_that_cannot_send_is_reported_and_probes_run_concurrently(tmp_path: Path) -> None:
    async def scenario(cluster: NetnsCluster) -> None:
        nft(RUN, "n1", "add chain inet splitbrain out { type filter hook output priority 0; policy drop; }")
        first, second = await asyncio.gather(
            cluster.network.probe([Link("n1", "n2"), Link("n2", "n3")], timeout_s=1.0),
            cluster.network.probe([Link("n2", "n3"), Link("n3", "n2")], timeout_s=1.0),
        )
        assert [result.passed for result in (*first, *second)] == [False, True, True, True]
        assert "could not send" in first[0].detail
        assert await cluster.network.probe([], timeout_s=1.0) == []
        with pytest.raises(ValueError, match="not in this cluster: n9"):
            await cluster.network.probe([Link("n1", "n9")], timeout_s=1.0)

    with_cluster(tmp_path, scenario)


def test_concurrent_clusters_have_the_same_addresses_and_are_isolated(tmp_path: Path) -> None:
    async def scenario(outer: NetnsCluster) -> None:
        run = RunState.create(RUN + "-2", state_root=str(tmp_path / "state"))
        inner = NetnsCluster(node_count=3, run=run, work_dir=str(tmp_path / "inner"), ports=[PORT])
        await inner.start()
        try:
            links = all_links(["n1", "n2", "n3"])
            assert inner.bind_address("n1") == outer.bind_address("n1")
            await outer.network.cut("f1", {"n1": frozenset({"n2"})})
            await inner.network.cut("f1", {"n3": frozenset({"n1"})})
            assert await passing(outer, links) == set(links) - {Link("n2", "n1")}
            assert await passing(inner, links) == set(links) - {Link("n1", "n3")}
        finally:
            await inner.stop()
        assert left_of(RUN + "-2") == []
        assert len(left_of(RUN)) == 6
        assert await passing(outer, links) == set(links) - {Link("n2", "n1")}

    with_cluster(tmp_path, scenario)


def test_programs_run_on_their_hosts_and_clients_reach_them(tmp_path: Path) -> None:
    async def scenario(cluster: NetnsCluster) -> None:
        await cluster.put_file("n1", os.path.join(cluster.data_dir("n1"), "deep", "x"), b"content of n1\n")
        address = cluster.address_from(CLIENTS_HOST, "n1", PORT)
        ip, port = address.split(":")
        path = os.path.join(cluster.data_dir("n1"), "deep", "x")
        argv = [sys.executable, "-c", SERVER, ip, port, path]
        process = await cluster.spawn("n1", Program(name="server", argv=argv, log_name="server.log"))
        assert process.host == "n1" and process.pid is not None
        log = tmp_path / RUN / "n1" / "server.log"
        async with asyncio.timeout(20):
            while not (log.exists() and "serving" in log.read_text()):  # noqa: ASYNC110 - another process's file
                await asyncio.sleep(0.01)
            assert identity(f"/proc/{process.pid}/ns/net") == identity(namespace_path(f"sb-{RUN}-n1"))
            reader, writer = await asyncio.open_connection(ip, int(port))
            answer = (await reader.read()).decode()
            writer.close()
        assert answer == f"{cluster.bind_address(CLIENTS_HOST)} {RUN}\ncontent of n1\n"
        with pytest.raises(ValueError, match="port 7001 is not one of this cluster's ports"):
            cluster.address_from("n1", "n2", 7001)

    with_cluster(tmp_path, scenario)


DAEMONISE = '(env -i setsid "$@" &); exec sleep 600'
"""Starts a program as a daemon with an empty environment, and keeps running itself."""


def test_a_stray_daemon_is_listed_and_ends_with_the_cluster(tmp_path: Path) -> None:
    """So does the loop device of the host, on which the daemon has its directory."""
    pids = []

    async def scenario(cluster: NetnsCluster) -> None:
        argv = ["sh", "-c", f"cd {cluster.data_dir('n1')}; {DAEMONISE}", "sh", "sleep", "601"]
        wrapper = await cluster.spawn("n1", Program(name="server", argv=argv, log_name="server.log"))
        async with asyncio.timeout(20):
            while not (found := await cluster.strays("n1")):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
        assert [stray.name for stray in found] == ["sleep"] and await cluster.strays("n2") == []
        pids.extend(stray.pid for stray in found)
        await wrapper.kill()
        assert await cluster.strays("n1") == found

    with_cluster(tmp_path, scenario)
    assert [process_start_ticks(pid) for pid in pids] == [None]


def test_a_start_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = tmp_path / "nft"
    refusing.write_text("#!/bin/sh\necho Operation not permitted >&2; exit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    async def body() -> None:
        run = RunState.create(RUN + "-3", state_root=str(tmp_path / "state"))
        cluster = NetnsCluster(node_count=2, run=run, work_dir=str(tmp_path / "work"), ports=[])
        home = own_namespace()
        with pytest.raises(ClusterUnavailable, match="Operation not permitted") as caught:
            await cluster.start()
        assert "\n" not in str(caught.value)
        assert own_namespace() == home
        assert left_of(RUN + "-3") == []
        assert run.claims == ()
        await cluster.stop()
        with pytest.raises(RuntimeError, match="not started"):
            _ = cluster.network

    asyncio.run(body())


def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        for turns in (1, 3, 8, 20):
            run = RunState.create(f"{RUN}-4-{turns}", state_root=str(tmp_path / "state"))
            cluster = NetnsCluster(node_count=2, run=run, work_dir=str(tmp_path / "work"), ports=[])
            home = own_namespace()
            task = asyncio.ensure_future(cluster.start())
            for _ in range(turns):
                await asyncio.sleep(0.002)
            task.cancel()
            await asyncio.wait([task])
            await cluster.stop()
            assert own_namespace() == home
            assert left_of(run.run_id) == []
            assert run.claims == ()

    asyncio.run(body())


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "SYSTEM_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    run = RunState.create(RUN + "-5", state_root=str(tmp_path / "state"))
    cluster = NetnsCluster(node_count=2, run=run, work_dir=str(tmp_path / "work"), ports=[])
    with pytest.raises(ClusterUnavailable, match=r"iproute2 .*nftables"):
        asyncio.run(cluster.start())
    assert run.claims == ()


def test_the_number_of_replicas_is_bounded(tmp_path: Path) -> None:
    run = RunState.create(RUN + "-6", state_root=str(tmp_path / "state"))
    for node_count in (0, MAX_HOSTS + 1):
        with pytest.raises(ValueError, match="1 to 200"):
            NetnsCluster(node_count=node_count, run=run, work_dir=str(tmp_path), ports=[])
