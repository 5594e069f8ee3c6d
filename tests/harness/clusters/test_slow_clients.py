"""Clients that leave answers unread, on hosts with a kernel: their effect on a server, and their end."""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.clusters.abilities import SendQueue
from harness.clusters.base import CLIENTS_HOST, Program
from harness.clusters.local import LocalCluster
from harness.clusters.netns import NetnsCluster
from harness.clusters.netns_trial import why_no_namespaces
from harness.faults import slow_clients
from harness.faults.slow_clients import SlowClients
from harness.run_state import RunState
from harness.systems.base import LongRequest
from nemesis import slow_client
from nemesis.slow_client import SLOW_CLIENT
from nemesis.target import SlowClient, UnreadAnswers

Eventually = Callable[..., Any]
WHY_NOT = why_no_namespaces(in_user_namespace=False) if os.geteuid() == 0 else "needs root"
PORT = 21971

SERVER = """
import socketserver, sys
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        while line := self.rfile.readline():
            if line == b"bye\\n":
                return
            self.wfile.write(b"x" * 3000)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
server = Server((sys.argv[1], int(sys.argv[2])), Handler)
print("up", flush=True)
server.serve_forever()
"""


def on_cluster(
    cluster_class: Any, run: RunState, tmp_path: Path, eventually: Eventually, scenario: Any, *, request: bytes = b"?\n"
) -> None:
    """Run `scenario` against a target of two hosts, each with a server."""

    async def main() -> None:
        cluster = cluster_class(node_count=2, run=run, work_dir=str(tmp_path), ports=[PORT])
        cluster.prepare({("clients", "stuck"), ("clients", "slow")})
        await cluster.start()
        try:
            for host in cluster.hosts:
                argv = [sys.executable, "-c", SERVER, cluster.bind_address(host), str(PORT)]
                child = await cluster.spawn(host, Program(name="server", argv=argv, log_name="server.log"))
                await eventually(lambda child=child: "up" in Path(child.log_path).read_text())

            def address(host: str, port: int) -> tuple[str, int]:
                ip, _, number = cluster.address_from(CLIENTS_HOST, host, port).rpartition(":")
                return ip, int(number)

            clients = SlowClients(
                request=lambda _: LongRequest(PORT, request), address=address, queues=cluster.send_queues
            )
            try:
                await scenario(SimpleNamespace(hosts=cluster.hosts, clients=clients))
            finally:
                await clients.release_all()
        finally:
            await cluster.stop()

    asyncio.run(main())
    assert run.claims == ()


CLUSTERS = [
    LocalCluster,
    pytest.param(NetnsCluster, marks=[pytest.mark.netns, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]),
]


@pytest.mark.parametrize("cluster_class", CLUSTERS)
def test_unread_answers_stay_in_the_queue_of_the_server(
    cluster_class: Any, run_state: RunState, tmp_path: Path, eventually: Eventually
) -> None:
    async def scenario(target: Any) -> None:
        for number, variant in enumerate(("stuck@n1", "slow@n1")):
            planned = await SLOW_CLIENT.plan(target, random.Random(1), fault_id=f"f{number}", variant=variant)
            await SLOW_CLIENT.inject(target, planned)
            proof = await SLOW_CLIENT.prove(target, planned)
            assert proof.proven and proof.exercised is True, proof
            assert (await SLOW_CLIENT.prove_met(target, planned)).exercised is True
            await SLOW_CLIENT.heal(target, planned)
            await SLOW_CLIENT.heal(target, planned)
            healed = await SLOW_CLIENT.prove_healed(target, planned)
            assert healed.proven, healed

    on_cluster(cluster_class, run_state, tmp_path, eventually, scenario)


def test_slow_clients_that_read_everything_are_not_proven(
    run_state: RunState, tmp_path: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_client, "FILL_TIMEOUT_S", 1.0)

    async def read_all(_: Any, sock: Any, connection: Any) -> None:
        while data := await asyncio.get_running_loop().sock_recv(sock, 1 << 20):
            connection.read_bytes += len(data)

    monkeypatch.setattr(SlowClients, "_wait", read_all)

    async def scenario(target: Any) -> None:
        planned = await SLOW_CLIENT.plan(target, random.Random(1), fault_id="f1", variant="stuck@n1")
        await SLOW_CLIENT.inject(target, planned)
        proof = await SLOW_CLIENT.prove(target, planned)
        assert not proof.proven and proof.exercised is None
        [problem] = proof.failed
        queued = r"n1: \d+ bytes in the send queues of \d of \d connections, [1-9]\d* bytes read; expected .*"
        assert re.fullmatch(rf"{queued}|clients of n1 have read [1-9]\d* bytes, more than the 0 allowed", problem), (
            problem
        )

    on_cluster(LocalCluster, run_state, tmp_path, eventually, scenario)


def test_a_slow_client_reconnects_when_the_server_closes_its_connection(
    run_state: RunState, tmp_path: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers never fill a queue, so the fault is not proven."""
    monkeypatch.setattr(slow_client, "FILL_TIMEOUT_S", 1.0)
    monkeypatch.setattr(slow_clients, "AGAIN_PAUSE_S", 0.1)

    async def scenario(target: Any) -> None:
        planned = await SLOW_CLIENT.plan(target, random.Random(1), fault_id="f1", variant="stuck@n1")
        await SLOW_CLIENT.inject(target, planned)
        async with asyncio.timeout(20):
            while (await target.clients.unread("f1"))["n1"].closed < 3:  # noqa: ASYNC110 - the kernel sends no event
                await asyncio.sleep(0.05)
        proof = await SLOW_CLIENT.prove(target, planned)
        assert not proof.proven and re.match(r"n1: 0 bytes in the send queues of 0 of \d", proof.failed[0]), proof

    on_cluster(LocalCluster, run_state, tmp_path, eventually, scenario, request=b"bye\n")


async def unread_of_a_reader(queues: Callable[[int], list[SendQueue]]) -> UnreadAnswers:
    """What is seen of one client that may read 200 bytes a second, two seconds after its start and when it has read 100
    bytes, of a server that sends more. `queues` are the server's send queues, given the client's port."""
    ports: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ports.append(writer.get_extra_info("peername")[1])
        writer.write(b"x" * 10_000)
        await reader.read()
        writer.close()

    async def seen(host: str, known: Any) -> list[SendQueue]:
        return queues(ports[0])

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        address = server.sockets[0].getsockname()
        clients = SlowClients(request=lambda _: LongRequest(PORT, b""), address=lambda *_: address, queues=seen)
        await clients.connect("f1", {"n1": SlowClient(connections=1, bytes_per_s=200)})
        fault = clients._faults["f1"]
        try:
            async with asyncio.timeout(20):
                while fault.connections[0].read_bytes < 100:  # noqa: ASYNC110 - the kernel sends no event
                    await asyncio.sleep(0.02)
            fault.ended_s = fault.began_s + 2
            return (await clients.unread("f1"))["n1"]
        finally:
            fault.ended_s = None
            await clients.release_all()


@pytest.mark.parametrize(
    ("peer", "size_bytes", "expected"),
    [
        ("of the fault", 9, (1, 1, 9)),
        ("of the fault", 0, (1, 0, 0)),
        ("of another client", 9, (0, 0, 0)),
    ],
)
def test_only_what_waits_for_a_client_of_the_fault_is_stuck(
    peer: str, size_bytes: int, expected: tuple[int, int, int]
) -> None:
    def queues(port: int) -> list[SendQueue]:
        return [SendQueue("127.0.0.1", port if peer == "of the fault" else port + 1, size_bytes)]

    found = asyncio.run(unread_of_a_reader(queues))
    assert (found.connections, found.stuck, found.queued_bytes) == expected


def test_what_a_client_has_read_is_compared_with_its_rate() -> None:
    found = asyncio.run(unread_of_a_reader(lambda port: []))
    assert found.read_bytes >= 100 and found.may_read_bytes == 2 * 200 + 2 * 50
