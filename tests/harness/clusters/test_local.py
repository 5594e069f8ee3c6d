"""The local cluster: addresses, programs, proofs of cuts, and errors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.clusters.base import CLIENTS_HOST, ClusterUnavailable, Program
from harness.clusters.host_agent import LISTENING, sockets_here
from harness.clusters.local import LocalCluster, LocalNetwork
from harness.run_state import RunState, process_start_ticks
from harness.sdk import Host
from nemesis.driver import run_schedule
from nemesis.link import LINK
from nemesis.mechanisms.shell import ShellError
from nemesis.partition import PARTITION
from nemesis.protocol import Injection
from nemesis.schedule import periodic
from nemesis.target import Link, LinkShape, LinkTraffic
from tests.mounts import MAY_MOUNT
from tests.ports import free_port

Eventually = Callable[..., Any]
PORT, OTHER_PORT = 21911, 21912
EXTRA_HOST = "ns1"
ROOT = Path(__file__).resolve().parents[3]

NODE = """
import asyncio, sys

async def serve(reader, writer):
    while data := await reader.read(65536):
        writer.write(sys.argv[1].encode() + b":" + data)
    writer.close()

async def main():
    server = await asyncio.start_server(serve, sys.argv[2], int(sys.argv[3]))
    print("up", flush=True)
    await server.serve_forever()

asyncio.run(main())
"""
"""Answers everything with its own name and the bytes received."""


@contextlib.asynccontextmanager
async def cluster_of(run: RunState, tmp_path: Path, count: int = 3, **more: Any) -> AsyncIterator[LocalCluster]:
    cluster = LocalCluster(
        node_count=count, run=run, work_dir=str(tmp_path), ports=[PORT, OTHER_PORT], extra_hosts=[EXTRA_HOST], **more
    )
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.stop()


def all_links(cluster: LocalCluster) -> list[Link]:
    return [Link(a, b) for a, b in permutations(cluster.hosts, 2)]


async def passing(cluster: LocalCluster, links: Sequence[Link], timeout_s: float = 5.0) -> set[Link]:
    results = await cluster.network.probe(links, timeout_s=timeout_s)
    assert [result.link for result in results] == list(links)
    assert not any(result.partial for result in results), results
    return {result.link for result in results if result.passed}


async def ask(address: str, text: bytes) -> bytes:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(text)
        return await asyncio.wait_for(reader.read(1000), 10)
    finally:
        writer.close()


class Target:
    """What the nemesis sees of a cluster in these tests."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.hosts = cluster.hosts
        self.network: Any = cluster.network

    async def leaders(self) -> Sequence[str]:
        return ["n2"]


def test_programs_reach_each_other_through_their_links(
    tmp_path: Path, run_state: RunState, eventually: Eventually
) -> None:
    async def main() -> None:
        async with cluster_of(run_state, tmp_path) as cluster:
            for host in (*cluster.hosts, EXTRA_HOST):
                argv = [sys.executable, "-c", NODE, host, cluster.bind_address(host), str(PORT)]
                await cluster.spawn(host, Program(name="node", argv=argv, log_name="node.log"))
            logs = [tmp_path / host / "node.log" for host in (*cluster.hosts, EXTRA_HOST)]
            await eventually(lambda: all("up" in log.read_text() for log in logs))
            for source, destination in (
                ("n1", "n2"),
                ("n3", "n1"),
                ("n2", "n2"),
                ("n1", EXTRA_HOST),
                (CLIENTS_HOST, "n3"),
                (CLIENTS_HOST, EXTRA_HOST),
            ):
                address = cluster.address_from(source, destination, PORT)
                assert await ask(address, b"hi") == destination.encode() + b":hi"
            host, _, port = cluster.address_from("n1", "n2", PORT).rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"a")
            assert await asyncio.wait_for(reader.readexactly(4), 10) == b"n2:a"
            await cluster.network.cut("f1", {"n1": frozenset({"n2"})})
            writer.write(b"b")
            answer = asyncio.create_task(reader.readexactly(4))
            assert not (await asyncio.wait([answer], timeout=0.2))[0]
            assert await ask(cluster.address_from("n1", "n3", PORT), b"c") == b"n3:c"
            await cluster.network.heal("f1")
            assert await asyncio.wait_for(answer, 10) == b"n2:b"
            writer.close()

    asyncio.run(main())
    assert not run_state.claims


def test_every_link_and_host_has_its_own_address(tmp_path: Path, run_state: RunState) -> None:
    async def main() -> None:
        async with cluster_of(run_state, tmp_path) as cluster:
            hosts = [*cluster.hosts, EXTRA_HOST, CLIENTS_HOST]
            assert cluster.hosts == ("n1", "n2", "n3")
            binds = {cluster.bind_address(host) for host in hosts}
            links = {cluster.address_from(a, b, PORT) for a, b in permutations(cluster.hosts, 2)}
            links |= {cluster.address_from(CLIENTS_HOST, host, PORT) for host in hosts[:-1]}
            links |= {cluster.address_from(host, EXTRA_HOST, PORT) for host in cluster.hosts}
            assert len(binds) == 5 and len(links) == 6 + 4 + 3
            assert not {link.rpartition(":")[0] for link in links} & binds
            assert cluster.address_from("n1", "n1", PORT) == f"{cluster.bind_address('n1')}:{PORT}"
            with pytest.raises(ValueError, match="port 99 is not one"):
                cluster.address_from("n1", "n2", 99)
            with pytest.raises(ValueError, match="ns1 opens no connections to n1"):
                cluster.address_from(EXTRA_HOST, "n1", PORT)
            await cluster.put_file("n1", f"{cluster.data_dir('n1')}/conf/a.json", b"{}")
            assert Path(cluster.local_path("n1", f"{cluster.data_dir('n1')}/conf/a.json")).read_bytes() == b"{}"

    asyncio.run(main())


def test_cuts_apply_to_single_links_and_add_up(tmp_path: Path, run_state: RunState) -> None:
    async def main() -> None:
        async with cluster_of(run_state, tmp_path) as cluster:
            links = all_links(cluster)
            network = cluster.network
            assert await passing(cluster, links) == set(links)
            await network.cut("f1", {"n1": frozenset({"n2"})})
            one_way = set(links) - {Link("n2", "n1")}
            assert await passing(cluster, links, 1.0) == one_way
            await network.cut("f2", {"n1": frozenset({"n2", "n3"}), "n3": frozenset({"n1"})})
            cut = {Link("n2", "n1"), Link("n3", "n1"), Link("n1", "n3")}
            assert await passing(cluster, links, 1.0) == set(links) - cut
            await network.heal("f1")
            assert await passing(cluster, links, 1.0) == set(links) - cut
            await network.heal("f2")
            await network.heal("f2")
            assert await passing(cluster, links) == set(links)
            await network.cut("f3", {host: frozenset(set(cluster.hosts) - {host}) for host in cluster.hosts})
            assert await passing(cluster, links, 1.0) == set()
            await network.heal_all()
            assert await passing(cluster, links) == set(links)

    asyncio.run(main())


@pytest.mark.parametrize("probed_before", [True, False])
def test_clients_can_be_cut_from_hosts(tmp_path: Path, run_state: RunState, probed_before: bool) -> None:
    async def main() -> None:
        async with cluster_of(run_state, tmp_path) as cluster:
            there, back = Link(CLIENTS_HOST, "n1"), Link("n1", CLIENTS_HOST)
            name_server = Link("n1", EXTRA_HOST)
            if probed_before:
                assert await passing(cluster, [there, back, name_server]) == {there, back, name_server}
            await cluster.network.cut("f1", {CLIENTS_HOST: frozenset({"n1"})})
            assert await passing(cluster, [there, back, name_server], 0.3) == {there, name_server}

    asyncio.run(main())


def test_every_variant_of_a_partition_is_proven_and_healed(tmp_path: Path, run_state: RunState) -> None:
    events: list[dict[str, Any]] = []

    async def main() -> None:
        async with cluster_of(run_state, tmp_path, 5) as cluster:
            schedule = periodic(
                [("partition", PARTITION.variants)],
                random.Random(1),
                time_limit_s=1.0,
                on_s=0.1,
                off_s=0.01,
                quiet_start_s=0.0,
            )
            await run_schedule(
                schedule,
                target=Target(cluster),
                nemeses={"partition": PARTITION},
                rng=random.Random(1),
                record=events.append,
            )

    asyncio.run(main())
    proofs = [event["value"]["proof"] for event in events if event["type"] == "info"]
    assert len(proofs) == 2 * len(PARTITION.variants)
    assert all(proof["proven"] and proof["links"] == 20 for proof in proofs), proofs


def test_a_cut_that_does_nothing_is_not_proven(
    tmp_path: Path, run_state: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(self: LocalNetwork, fault_id: str, grudge: Any) -> None:
        return None

    monkeypatch.setattr(LocalNetwork, "cut", nothing)

    async def main() -> None:
        async with cluster_of(run_state, tmp_path) as cluster:
            target: Any = Target(cluster)
            plan = await PARTITION.plan(target, random.Random(0), fault_id="f1", variant="leader")
            await PARTITION.inject(target, plan)
            proof = await PARTITION.prove(target, plan)
            assert not proof.proven
            assert sorted(proof.failed) == [f"{a} still passes" for a in ("n1->n2", "n2->n1", "n2->n3", "n3->n2")]

    asyncio.run(main())


DIALLER = """
import asyncio, socket, sys
connections = [socket.create_connection((sys.argv[1], int(sys.argv[2])))]
print("connected", flush=True)
while True:
    connections[0].sendall(b"x")
    connections[0].recv(100)
    __import__("time").sleep(0.05)
"""


@pytest.mark.parametrize("way", ["its own link", "the address of the host", "the link of a third host"])
def test_a_program_that_bypasses_the_proxy_disproves_a_cut(
    way: str, tmp_path: Path, run_state: RunState, eventually: Eventually
) -> None:
    """The probes find the links cut; whether the cut holds for the program is checked separately."""

    async def main() -> None:
        async with cluster_of(run_state, tmp_path) as cluster:
            serve = [sys.executable, "-c", NODE, "n2", cluster.bind_address("n2"), str(PORT)]
            server = await cluster.spawn("n2", Program(name="node", argv=serve, log_name="node.log"))
            await eventually(lambda: "up" in Path(server.log_path).read_text())
            address = {
                "its own link": cluster.address_from("n1", "n2", PORT),
                "the address of the host": f"{cluster.bind_address('n2')}:{PORT}",
                "the link of a third host": cluster.address_from("n3", "n2", PORT),
            }[way]
            argv = [sys.executable, "-c", DIALLER, *address.split(":")]
            dialler = await cluster.spawn("n1", Program(name="dialler", argv=argv, log_name="dialler.log"))
            await eventually(lambda: "connected" in Path(dialler.log_path).read_text())
            target: Any = SimpleNamespace(hosts=cluster.hosts, network=cluster.network)
            planned = await PARTITION.plan(target, random.Random(0), fault_id="f1", variant="n1|n2+n3")
            await PARTITION.inject(target, planned)
            proof = await PARTITION.prove(target, planned)
            if way == "its own link":
                assert proof.proven, proof
            else:
                assert not proof.proven
                [problem] = proof.failed
                assert f"n1 (process {dialler.pid}) reaches n2 at {address}, bypassing the proxy" in problem
                assert "use --cluster netns" in problem
            # One byte travels back and forth: the cut has stopped it in one of the directions.
            ways = [Link("n1", "n2"), Link("n2", "n1")]
            stopped_bytes = 0
            async with asyncio.timeout(10):
                while way == "its own link" and not stopped_bytes:
                    found: Mapping[Link, LinkTraffic] = await cluster.network.traffic(ways)  # type: ignore[attr-defined]
                    stopped_bytes = sum(traffic.stopped_bytes for traffic in found.values())
            seen = await PARTITION.prove_met(target, replace(planned, evidence={**planned.evidence, **proof.evidence}))
            assert (seen.proven, seen.exercised) == ((True, True) if way == "its own link" else (False, False))

    asyncio.run(main())


@pytest.mark.parametrize("way", ["its own link", "the address of the host"])
def test_a_program_that_bypasses_the_proxy_disproves_a_delay(
    way: str, tmp_path: Path, run_state: RunState, eventually: Eventually
) -> None:
    async def main() -> None:
        async with cluster_of(run_state, tmp_path) as cluster:
            serve = [sys.executable, "-c", NODE, "n2", cluster.bind_address("n2"), str(PORT)]
            server = await cluster.spawn("n2", Program(name="node", argv=serve, log_name="node.log"))
            await eventually(lambda: "up" in Path(server.log_path).read_text())
            direct = f"{cluster.bind_address('n2')}:{PORT}"
            address = cluster.address_from("n1", "n2", PORT) if way == "its own link" else direct
            argv = [sys.executable, "-c", DIALLER, *address.split(":")]
            dialler = await cluster.spawn("n1", Program(name="dialler", argv=argv, log_name="dialler.log"))
            await eventually(lambda: "connected" in Path(dialler.log_path).read_text())
            target: Any = SimpleNamespace(hosts=cluster.hosts, network=cluster.network, links=cluster.links)
            value = {"links": ["n1->n2", "n2->n1"], "shape": {"delay_ms": 50.0, "jitter_ms": 5.0}}
            planned = Injection(fault_id="f1", nemesis="link", variant="delay@one", value=value)
            await LINK.inject(target, planned)
            proof = await LINK.prove(target, planned)
            seen = await LINK.prove_met(target, replace(planned, evidence=proof.evidence))
            for each in (proof, seen):
                if way == "its own link":
                    assert each.proven, each
                else:
                    assert not each.proven
                    assert f"n1 (process {dialler.pid}) reaches n2 at {address}, bypassing the proxy" in each.detail
            await LINK.heal(target, planned)
            assert (await LINK.prove_healed(target, planned)).proven

    asyncio.run(main())


ASKER = """
import socket, sys, time
while True:
    for address in sys.argv[1:]:
        ip, _, port = address.rpartition(":")
        try:
            with socket.create_connection((ip, int(port)), timeout=0.2) as connection:
                connection.sendall(b"x")
                connection.recv(100)
                print("asked", flush=True)
        except OSError:
            pass
    time.sleep(0.05)
"""
"""Opens a connection for each request, as HTTP without keep-alive does."""


@pytest.mark.parametrize(
    "way",
    ["its own link", "the address of the host", "the same, and a command of the host", "the same, and a client"],
)
def test_short_connections_that_bypass_the_proxy_disprove_a_cut(
    way: str, tmp_path: Path, run_state: RunState, eventually: Eventually
) -> None:
    """Each closes before the check, and may have been one of a command on the host or of a client."""

    async def main() -> None:
        async with cluster_of(run_state, tmp_path) as cluster:
            serve = [sys.executable, "-c", NODE, "n2", cluster.bind_address("n2"), str(PORT)]
            server = await cluster.spawn("n2", Program(name="node", argv=serve, log_name="node.log"))
            await eventually(lambda: "up" in Path(server.log_path).read_text())
            own, direct = cluster.address_from("n1", "n2", PORT), f"{cluster.bind_address('n2')}:{PORT}"
            argv = [sys.executable, "-c", ASKER, own if way == "its own link" else direct]
            asker = await cluster.spawn("n1", Program(name="asker", argv=argv, log_name="asker.log"))
            await eventually(lambda: "asked" in Path(asker.log_path).read_text())
            target: Any = SimpleNamespace(hosts=cluster.hosts, network=cluster.network)
            planned = await PARTITION.plan(target, random.Random(0), fault_id="f1", variant="n1|n2+n3")
            await PARTITION.inject(target, planned)
            proof = await PARTITION.prove(target, planned)
            lines = len(Path(asker.log_path).read_text())
            if way != "its own link":
                await eventually(lambda: len(Path(asker.log_path).read_text()) > lines)
            if way == "the same, and a command of the host":
                await cluster.run("n2", ["true"])
            with socket.socket() as client:
                if way == "the same, and a client":
                    client.connect((cluster.bind_address("n2"), PORT))
                evidence = {**planned.evidence, **proof.evidence}
                seen = await PARTITION.prove_met(target, replace(planned, evidence=evidence))
            if way == "the address of the host":
                assert not seen.proven, seen
                assert (
                    f"n2 was reached at {direct}, bypassing the proxies, by another host, itself or a client"
                    in seen.detail
                )
            else:  # a connection that is open during the check is reported directly
                is_met = way != "its own link" and f"reaches n2 at {direct}, bypassing the proxy" in seen.detail
                assert seen.proven or is_met, seen

    asyncio.run(main())


COPYING = """
import socket, sys, time
part, address, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
if part == "sends":
    end, _ = socket.create_server((address, port)).accept()
else:
    end = socket.create_connection((address, port))
    end.shutdown(socket.SHUT_WR)
while True:
    end.sendall(b"x") if part == "sends" else end.recv(100)
    print("up", flush=True)
    time.sleep(0.05)
"""
"""A stream of data to a peer that has shut down its own direction."""


@pytest.mark.parametrize("way", ["its own link", "the address of the host"])
def test_a_one_way_connection_that_bypasses_the_proxy_disproves_a_cut(
    way: str, tmp_path: Path, run_state: RunState, eventually: Eventually
) -> None:
    """Through its link it is like any other, even where the sender no longer listens."""

    async def main() -> None:
        async with cluster_of(run_state, tmp_path) as cluster:
            address = cluster.bind_address("n2")
            argv = [sys.executable, "-c", COPYING]
            sends = [*argv, "sends", address, str(PORT)]
            await cluster.spawn("n2", Program(name="sender", argv=sends, log_name="sender.log"))
            await eventually(
                lambda: any(each.state == LISTENING and each.own == (address, PORT) for each in sockets_here("tcp"))
            )
            dialled = cluster.address_from("n1", "n2", PORT) if way == "its own link" else f"{address}:{PORT}"
            takes = [*argv, "takes", *dialled.split(":")]
            taker = await cluster.spawn("n1", Program(name="taker", argv=takes, log_name="taker.log"))
            await eventually(lambda: "up" in Path(taker.log_path).read_text())
            target: Any = SimpleNamespace(hosts=cluster.hosts, network=cluster.network)
            planned = await PARTITION.plan(target, random.Random(0), fault_id="f1", variant="n1|n2+n3")
            await PARTITION.inject(target, planned)
            proof = await PARTITION.prove(target, planned)
            if way == "its own link":
                assert proof.proven, proof
            else:
                assert not proof.proven, proof
                assert f"n1 (process {taker.pid}) reaches n2 at {address}:{PORT}, bypassing the prox" in proof.detail

    asyncio.run(main())


MEETING = """
import socket, sys, time
part, kind, address, port = sys.argv[1], *sys.argv[2:4], int(sys.argv[4])
family = socket.AF_INET6 if ":" in address else socket.AF_INET
end = socket.socket(family, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
if part == "meets":
    end.connect((address, port))
else:
    end.bind((address, port))
    if kind == "tcp":
        end.listen()
print("up", flush=True)
while True:
    time.sleep(600)
"""


@pytest.mark.parametrize("dialler_is_on", ["n1", "n2"])
@pytest.mark.parametrize(
    ("kind", "listens_at", "met_at", "shown"),
    [
        ("tcp", "127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("tcp", "::1", "::1", "[::1]"),
        ("tcp", "::", "127.0.0.1", "127.0.0.1"),
        ("udp", "127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("udp", "::", "::1", "[::1]"),
    ],
)
def test_a_connection_of_two_hosts_over_an_address_of_the_machine_disproves_a_cut(
    kind: str,
    listens_at: str,
    met_at: str,
    shown: str,
    dialler_is_on: str,
    tmp_path: Path,
    run_state: RunState,
    eventually: Eventually,
) -> None:
    """Found by the owner of the other end; two programs of one host may be connected."""
    port = free_port()

    async def main() -> None:
        async with cluster_of(run_state, tmp_path) as cluster:
            for part, host, address in (("listens", "n2", listens_at), ("meets", dialler_is_on, met_at)):
                argv = [sys.executable, "-c", MEETING, part, kind, address, str(port)]
                program = await cluster.spawn(host, Program(name=part, argv=argv, log_name=f"{part}.log"))
                await eventually(lambda path=program.log_path: "up" in Path(path).read_text())
            target: Any = SimpleNamespace(hosts=cluster.hosts, network=cluster.network)
            planned = await PARTITION.plan(target, random.Random(0), fault_id="f1", variant="n1|n2+n3")
            await PARTITION.inject(target, planned)
            for proof in (await PARTITION.prove(target, planned), await PARTITION.prove_met(target, planned)):
                if dialler_is_on == "n2":
                    assert proof.proven, proof
                else:
                    [problem] = proof.failed
                    assert f"n1 (process {program.pid}) reaches n2 at {shown}:{port}, bypassing the proxy" in problem

    asyncio.run(main())


@pytest.mark.parametrize(
    ("at_any", "on_own_port", "is_cut"),
    [(False, True, True), (True, True, True), (False, False, True), (False, True, False)],
)
def test_a_udp_socket_on_a_port_of_the_system_disproves_a_cut(
    at_any: bool, on_own_port: bool, is_cut: bool, tmp_path: Path, run_state: RunState, eventually: Eventually
) -> None:
    """The destinations of a UDP socket are unknown and the proxies carry no UDP, so what a port of the system
    receives bypasses them. Other ports are for resolvers and the like."""

    async def main() -> None:
        async with cluster_of(run_state, tmp_path) as cluster:
            address, port = "0.0.0.0" if at_any else cluster.bind_address("n2"), PORT if on_own_port else free_port()
            argv = [sys.executable, "-c", MEETING, "listens", "udp", address, str(port)]
            program = await cluster.spawn("n2", Program(name="gossip", argv=argv, log_name="gossip.log"))
            await eventually(lambda: "up" in Path(program.log_path).read_text())
            target: Any = SimpleNamespace(hosts=cluster.hosts, network=cluster.network)
            variant = "n1|n2+n3" if is_cut else "n1>n3"
            planned = await PARTITION.plan(target, random.Random(0), fault_id="f1", variant=variant)
            await PARTITION.inject(target, planned)
            for proof in (await PARTITION.prove(target, planned), await PARTITION.prove_met(target, planned)):
                if on_own_port and is_cut:
                    reason = f"n2 (process {program.pid}) at {address}:{port} can be sent UDP that"
                    assert not proof.proven and len(proof.failed) == 1 and proof.failed[0].startswith(reason), proof
                else:
                    assert proof.proven, proof

    asyncio.run(main())


NAMES = """
import socket, sys, time
print(*(socket.gethostbyname(name) for name in sys.argv[1:3]), flush=True)
connection = socket.create_connection((sys.argv[1], int(sys.argv[3])))
print("connected", flush=True)
while True:
    connection.sendall(b"x")
    connection.recv(100)
    time.sleep(0.05)
"""


@pytest.mark.skipif(not MAY_MOUNT, reason="needs mount namespaces, which this user may not create here")
def test_names_that_hosts_pass_on_lead_through_the_proxies(
    tmp_path: Path, run_state: RunState, eventually: Eventually
) -> None:
    """A name has another address on every host, and the machine's own file is unchanged."""

    async def main() -> None:
        before = Path("/etc/hosts").read_bytes()
        async with cluster_of(run_state, tmp_path) as cluster:
            assert cluster.names_of("n2") == ("n2",)
            serve = [sys.executable, "-c", NODE, "n2", "n2", str(PORT)]
            server = await cluster.spawn("n2", Program(name="node", argv=serve, log_name="node.log"))
            await eventually(lambda: "up" in Path(server.log_path).read_text())
            diallers = {}
            for host in ("n1", "n3"):
                argv = [sys.executable, "-c", NAMES, "n2", host, str(PORT)]
                diallers[host] = await cluster.spawn(host, Program(name="dialler", argv=argv, log_name="dialler.log"))
            for host, dialler in diallers.items():
                await eventually(lambda log=dialler.log_path: "connected" in Path(log).read_text())
                link = cluster.address_from(host, "n2", PORT).partition(":")[0]
                own = cluster.bind_address(host)
                assert Path(dialler.log_path).read_text().splitlines()[0].split() == [link, own]
            assert Path("/etc/hosts").read_bytes() == before
            target: Any = SimpleNamespace(hosts=cluster.hosts, network=cluster.network)
            planned = await PARTITION.plan(target, random.Random(0), fault_id="f1", variant="n1|n2+n3")
            await PARTITION.inject(target, planned)
            proof = await PARTITION.prove(target, planned)
            assert proof.proven, proof

    asyncio.run(main())


@pytest.mark.parametrize("is_handed_on", [True, False])
def test_passing_on_addresses_where_hosts_have_no_names_yields_a_note(
    is_handed_on: bool, tmp_path: Path, run_state: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = tmp_path / "unshare"
    refusing.write_text("#!/bin/sh\necho 'unshare: Operation not permitted' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    async def main() -> None:
        async with cluster_of(run_state, tmp_path) as cluster:
            host = Host("n2", 2, cluster, {"peer": PORT}, find_installed=lambda host, name: "")
            if is_handed_on:
                assert host.advertise("peer") == f"{cluster.bind_address('n2')}:{PORT}"
            else:
                assert host.listen("peer") == f"{cluster.bind_address('n2')}:{PORT}"
            notes = cluster.notes_on_links()
            assert len(notes) == is_handed_on
            assert all("bypass the links" in note and "(unshare: Operation not permitted)" in note for note in notes)

    asyncio.run(main())


@pytest.mark.skipif(not MAY_MOUNT, reason="needs mount namespaces, which this user may not create here")
def test_passing_on_names_yields_no_note(tmp_path: Path, run_state: RunState) -> None:
    async def main() -> None:
        async with cluster_of(run_state, tmp_path) as cluster:
            assert Host("n2", 2, cluster, {"peer": PORT}, find_installed=lambda host, name: "").advertise("peer")
            assert not cluster.notes_on_links()

    asyncio.run(main())


def test_a_cut_that_lets_new_connections_through_is_reported_as_partial(tmp_path: Path, run_state: RunState) -> None:
    """Existing connections stall, but new ones are still established."""

    async def main() -> None:
        async with cluster_of(run_state, tmp_path) as cluster:
            probe = cluster._proxy_probe
            assert probe is not None
            await cluster.network.cut("f1", {"n1": frozenset({"n2"}), "n2": frozenset({"n1"})})
            leak = Link("n1", "n2")
            probe._listeners[leak] = probe._listeners[Link("n1", "n3")]  # new connections bypass the cut
            for result in await cluster.network.probe([leak], timeout_s=1.0):
                assert result.passed and result.partial and "not on every existing connection" in result.detail

    asyncio.run(main())


def test_a_link_without_new_connections_is_reported_as_partial(tmp_path: Path, run_state: RunState) -> None:
    async def main() -> None:
        async with cluster_of(run_state, tmp_path, 2) as cluster:
            probe = cluster._proxy_probe
            assert probe is not None
            probe._listeners[Link("n1", "n2")] = (cluster.bind_address("n2"), OTHER_PORT)  # a port without a listener
            for result in await cluster.network.probe(all_links(cluster), timeout_s=1.0):
                assert result.passed and result.partial and "not on new connections" in result.detail

    asyncio.run(main())


def test_a_new_connection_counts_against_a_cut_even_when_it_carries_nothing(
    tmp_path: Path, run_state: RunState
) -> None:
    async def main() -> None:
        async with cluster_of(run_state, tmp_path, 2) as cluster:
            link = Link("n1", "n2")
            assert cluster.links is not None
            await cluster.links.shape("f1", {link: LinkShape(delay_ms=10_000)})
            (result,) = await cluster.network.probe([link], timeout_s=1.0)
            assert result.passed and result.partial and "established, but carried nothing" in result.detail

    asyncio.run(main())


def test_delays_and_rates_are_set_per_direction_and_add_up(tmp_path: Path, run_state: RunState) -> None:
    async def main() -> None:
        async with cluster_of(run_state, tmp_path, 2) as cluster:
            assert cluster.links is not None
            loop = asyncio.get_running_loop()
            slow, fast = Link("n1", "n2"), Link("n2", "n1")

            async def time_of(link: Link) -> float:
                begin_s = loop.time()
                assert await passing(cluster, [link]) == {link}
                return loop.time() - begin_s

            await cluster.links.shape("f1", {slow: LinkShape(delay_ms=200)})
            await cluster.links.shape("f2", {slow: LinkShape(delay_ms=200, rate_bytes_per_s=1e6)})
            assert await time_of(slow) >= 0.4
            await cluster.links.release("f1")
            assert await time_of(slow) >= 0.2
            assert await passing(cluster, [fast], 0.19) == {fast}  # the other direction is unaffected
            await cluster.links.release_all()
            assert await passing(cluster, [slow], 0.19) == {slow}

    asyncio.run(main())


def test_negative_and_non_finite_shapes_are_refused() -> None:
    for bad in ({"delay_ms": -1}, {"jitter_ms": float("nan")}, {"rate_bytes_per_s": float("inf")}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            LinkShape(**bad)
    assert LinkShape(rate_bytes_per_s=5).on_top_of(LinkShape(rate_bytes_per_s=3, jitter_ms=1)) == LinkShape(
        rate_bytes_per_s=3, jitter_ms=1
    )


def test_an_unknown_host_is_refused(tmp_path: Path, run_state: RunState) -> None:
    async def main() -> None:
        async with cluster_of(run_state, tmp_path) as cluster:
            with pytest.raises(ValueError, match="no link n9->n1"):
                await cluster.network.cut("f1", {"n1": frozenset({"n9"})})
            with pytest.raises(ValueError, match="no link n1->n9"):
                await cluster.network.probe([Link("n1", "n9")], timeout_s=0.1)
            with pytest.raises(ValueError, match="no host n9"):
                await cluster.spawn("n9", Program(name="x", argv=["true"], log_name="x"))

    asyncio.run(main())


def test_concurrent_runs_use_networks_of_their_own(tmp_path: Path) -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            clusters = []
            for number in range(3):
                run = RunState.create(f"r{os.getpid()}-{number}", state_root=str(tmp_path / "states"))
                clusters.append(await stack.enter_async_context(cluster_of(run, tmp_path / str(number), 2 + number)))
            assert len({cluster.bind_address("n1") for cluster in clusters}) == 3
            await clusters[0].network.cut("f1", {"n1": frozenset({"n2"})})
            links = [Link("n2", "n1")]
            assert await passing(clusters[0], links, 0.3) == set()
            assert await passing(clusters[1], links) == set(links)

    asyncio.run(main())


def test_two_runs_that_want_the_same_network_do_not_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            runs = [
                RunState.create(f"r{os.getpid()}-{number}", state_root=str(tmp_path / "states")) for number in range(3)
            ]
            clusters = [await stack.enter_async_context(cluster_of(runs[0], tmp_path / "0", 2))]
            taken = [_network_of(clusters[0])]
            # Which of the others are free depends on what runs beside this test.
            monkeypatch.setattr(LocalCluster, "_candidates", lambda self: iter([*taken, *range(1, 255)]))
            clusters.append(await stack.enter_async_context(cluster_of(runs[1], tmp_path / "1", 2)))
            taken = [_network_of(cluster) for cluster in clusters]
            assert taken[0] != taken[1]
            monkeypatch.setattr(LocalCluster, "_candidates", lambda self: iter(taken))
            third = LocalCluster(node_count=2, run=runs[2], work_dir=str(tmp_path / "2"), ports=[25555])
            with pytest.raises(ClusterUnavailable, match="loopback networks are in use"):
                await third.start()
            assert not runs[2].claims

    asyncio.run(main())


def _network_of(cluster: LocalCluster) -> int:
    return int(cluster.bind_address("n1").split(".")[1])


def test_a_port_in_use_is_reported_in_one_line(tmp_path: Path, run_state: RunState) -> None:
    async def main() -> None:
        with socket.socket() as everywhere:
            everywhere.bind(("0.0.0.0", 0))
            everywhere.listen()
            port = everywhere.getsockname()[1]
            cluster = LocalCluster(node_count=2, run=run_state, work_dir=str(tmp_path), ports=[port])
            with pytest.raises(ClusterUnavailable, match=f"^local: port {port} is in use: [^\n]*$"):
                await cluster.start()
            await cluster.stop()
            assert not run_state.claims

    asyncio.run(main())


@pytest.mark.parametrize(
    ("count", "ports", "reason"),
    [(0, [PORT], "1 to 30 replicas, not 0"), (31, [PORT], "not 31"), (3, [70000], "65535")],
)
def test_bad_numbers_of_replicas_and_bad_ports_are_refused(
    tmp_path: Path, run_state: RunState, count: int, ports: list[int], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        LocalCluster(node_count=count, run=run_state, work_dir=str(tmp_path), ports=ports)


def test_a_system_that_declares_no_ports_is_refused_with_a_remedy(tmp_path: Path, run_state: RunState) -> None:
    with pytest.raises(
        ClusterUnavailable, match=r"the system declares none: .* \(ports = {...} in a plug-in\), or use --cluster net"
    ):
        LocalCluster(node_count=3, run=run_state, work_dir=str(tmp_path), ports=[])


def test_an_unusable_work_directory_is_reported_in_one_line(tmp_path: Path, run_state: RunState) -> None:
    (tmp_path / "file").write_text("")
    cluster = LocalCluster(node_count=2, run=run_state, work_dir=str(tmp_path / "file"), ports=[PORT])
    with pytest.raises(ClusterUnavailable, match=r"^local: Not a directory$"):
        asyncio.run(cluster.start())


def test_a_dead_proxy_is_reported_and_the_cluster_still_stops(
    tmp_path: Path, run_state: RunState, eventually: Eventually
) -> None:
    async def main() -> None:
        async with cluster_of(run_state, tmp_path, 2) as cluster:
            proxy = cluster._proxy
            assert proxy is not None and proxy.pid is not None
            pid = proxy.pid
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: process_start_ticks(pid) is None)
            with pytest.raises(ShellError, match=r"harness\.clusters\.link_proxy \w+.* does not listen"):
                await cluster.network.cut("f1", {"n1": frozenset({"n2"})})

    asyncio.run(main())
    assert not run_state.claims


def test_strays_end_with_the_cluster_even_if_the_agent_was_killed(
    tmp_path: Path, run_state: RunState, eventually: Eventually
) -> None:
    async def main() -> int:
        async with cluster_of(run_state, tmp_path, 2) as cluster:
            daemonising = ["sh", "-c", "(env -i setsid sleep 601 &); exec sleep 600"]
            await cluster.spawn("n1", Program(name="wrapper", argv=daemonising, log_name="log"))
            agent = cluster.agent("n1")
            while not (strays := (await agent.request("strays"))["strays"]):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
            os.kill((await agent.request("hello"))["pid"], signal.SIGKILL)
            await eventually(lambda: not cluster._processes.running)
            assert process_start_ticks(strays[0][0]) == strays[0][1]
        return int(strays[0][0])

    assert process_start_ticks(asyncio.run(main())) is None


def test_killing_the_harness_during_a_partition_leaves_no_process(tmp_path: Path, eventually: Eventually) -> None:
    """Not even a daemon whose environment does not show which run it belongs to."""
    parent = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("local_parent.py")), str(tmp_path / "s"), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    )
    assert parent.stdout is not None
    try:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 6 and all(process_start_ticks(pid) is not None for pid in pids)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    asyncio.run(eventually(lambda: all(process_start_ticks(pid) is None for pid in pids)))


def test_the_local_cluster_lacks_faults_of_whole_file_systems() -> None:
    for ability in ("freeze", "fill", "shutdown", "crash"):
        assert LocalCluster.missing("disks", ability) is not None
