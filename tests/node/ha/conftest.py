"""Brokers in classic HA on simulated hosts, with a name server, a client, and peers with bare sockets."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import copy_context
from typing import Any, TypeVar

import pytest

from harness.clusters.sim.host import Incarnation, SimHost
from harness.clusters.sim.lane import LANE
from harness.clusters.sim.loop import SimLoop
from harness.clusters.sim.network import SimNetwork
from harness.clusters.sim.simulation import run_simulated
from node.broker.controller import BrokerController
from node.config import parse_broker_config
from node.nameserver import NameServer, NameServerOptions
from node.remoting import Command, RemotingClient
from node.store.record import decode_records

T = TypeVar("T")
PORT, HA_PORT, NAME_SERVER_PORT = 10911, 10912, 9876

CONFIG = """
self_id = "{name}"
listen = "{address}:10911"
data_dir = "/data"
name_servers = ["{name_server}:9876"]
{replication}
[limits]
segment_size_bytes = 65536
max_message_size_bytes = 16384
queue_file_units = 50
index_slots = 31
[[topics]]
name = "t"
queues = 2
"""


class HaGroup:
    """Hosts n1, n2, ...: n1 is the master unless a test says otherwise. Times are virtual."""

    def __init__(self, size: int, overrides: tuple[str, ...]) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self.loop = loop
        self.names = tuple(f"n{number}" for number in range(1, size + 1))
        self.network = SimNetwork(loop)
        everybody = (*self.names, "ns1", "clients")
        self.hosts = {
            name: SimHost(loop, self.network, name, f"10.0.0.{number}") for number, name in enumerate(everybody, 1)
        }
        self.overrides = overrides
        self.brokers: dict[str, BrokerController] = {}
        self.failed: dict[str, BaseException] = {}
        self._client: RemotingClient | None = None

    def __getitem__(self, name: str) -> BrokerController:
        return self.brokers[name]

    def ledger(self, name: str) -> Any:
        return self.brokers[name].ledger

    # Processes

    async def start_name_server(self) -> None:
        host = self.hosts["ns1"]

        async def program(process: Incarnation) -> None:
            server = NameServer(host.address, NAME_SERVER_PORT, process.runtime, options=NameServerOptions())
            await server.start()
            await process.stop_requested.wait()
            await server.stop()

        host.start(program)

    async def start(self, name: str, role: str, *overrides: str) -> None:
        """Start a broker; "SLAVE" gets the broker id of its number minus 1, "DLEDGER" a group of all hosts."""
        text = CONFIG.format(
            name=name,
            address=self.hosts[name].address,
            name_server=self.hosts["ns1"].address,
            replication=self._replication(name, role),
        )
        config = parse_broker_config(text, [*self.overrides, *overrides])

        async def program(process: Incarnation) -> None:
            broker = BrokerController(config, process.runtime)
            try:
                await broker.start()
            except (OSError, ValueError) as error:
                self.failed[name] = error
                raise
            self.brokers[name] = broker
            await process.stop_requested.wait()
            await broker.stop()
            self.brokers.pop(name, None)

        self.hosts[name].boot()
        self.hosts[name].start(program)
        await self.until(lambda: name in self.brokers or name in self.failed)
        if role.endswith("MASTER"):
            await self.until(lambda: self.brokers[name].store.is_master)

    def _replication(self, name: str, role: str) -> str:
        if role == "DLEDGER":
            peers = {other: f"{self.hosts[other].address}:40911" for other in self.names}
            lines = [f'listen = "{peers[name]}"', "[dledger.peers]", *(f'{n} = "{a}"' for n, a in peers.items())]
            return "\n".join(["[dledger]", *lines])
        broker_id = (int(name[1:]) - 1 or 9) if role == "SLAVE" else 0
        return f'[classic]\nbroker_role = "{role}"\nbroker_id = {broker_id}'

    async def stop(self, name: str) -> None:
        """Stop a broker in an orderly way."""
        process = self.hosts[name].process
        assert process is not None
        self.hosts[name].terminate()
        await process.wait()

    def kill(self, name: str) -> None:
        self.hosts[name].kill()
        self._forget(name)

    def power_fail(self, name: str) -> None:
        self.hosts[name].power_fail()
        self._forget(name)

    def _forget(self, name: str) -> None:
        """Drop the client too: its connections are dead, and no test is about how it notices that."""
        self.brokers.pop(name, None)
        self._client = None

    async def cut(self, *names: str) -> None:
        """Cut each of these hosts off from all the others."""
        others = set(self.hosts) - {"clients"}
        await self.network.cut(
            "test",
            {name: frozenset(other for other in others - {name} if name in names or other in names) for name in others},
        )

    async def heal(self) -> None:
        await self.network.heal("test")

    # Acting from a host

    def _process(self, name: str) -> Incarnation:
        host = self.hosts[name]

        async def idle(process: Incarnation) -> None:
            await process.stop_requested.wait()

        if not host.is_running:
            host.start(idle)
        assert host.process is not None
        return host.process

    def on(self, name: str, call: Callable[[], T]) -> T:
        """Call `call` inside the process on a host."""
        context = copy_context()
        context.run(LANE.set, self._process(name))
        return context.run(call)

    async def run(self, name: str, coroutine: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine as the process on a host."""
        return await self.on(name, lambda: asyncio.get_running_loop().create_task(coroutine()))

    async def ask(
        self, name: str, code: int, fields: dict[str, Any] | None = None, body: bytes = b"", timeout_ms: int = 10_000
    ) -> Command:
        """One request to a broker, from the host `clients`."""
        if self._client is None:
            self._client = self.on("clients", RemotingClient)
        client, address = self._client, f"{self.hosts[name].address}:{PORT}"
        return await self.run(
            "clients", lambda: client.invoke(address, Command.request(code, fields or {}, body), timeout_ms=timeout_ms)
        )

    async def send(self, body: bytes = b"x", *, at: str = "n1", queue_id: int = 0, **fields: Any) -> Command:
        return await self.ask(at, 310, {"b": "t", "e": queue_id, **fields}, body)

    async def fill(self, count: int, *, at: str = "n1", size: int = 700, mark: bytes = b"") -> list[bytes]:
        """Send messages one after the other; returns their bodies."""
        bodies = [b"%s%d " % (mark, number) + b"x" * (size * (number % 7) // 6) for number in range(count)]
        for body in bodies:
            assert (await self.send(body, at=at)).code in (0, 11, 12)
        return bodies

    async def bodies(self, at: str, queue_id: int = 0, topic: str = "t") -> list[bytes]:
        """Everything in a queue, read from one broker."""
        found: list[bytes] = []
        while True:
            fields = {"topic": topic, "queueId": queue_id, "queueOffset": len(found)}
            reply = await self.ask(at, 11, fields)
            assert reply.code in (0, 19, 21), reply.remark
            if not reply.body:
                return found
            found += [message.body for message in decode_records(reply.body)]

    async def table(self, name: str) -> dict[str, str]:
        return dict(json.loads((await self.ask(name, 28)).body)["table"])

    async def whole_route(self) -> dict[str, Any]:
        """The topic's route, as the name server has it; empty if it has none."""
        reply = await self.run(
            "clients",
            lambda: RemotingClient().invoke(
                f"{self.hosts['ns1'].address}:{NAME_SERVER_PORT}", Command.request(105, {"topic": "t"}), timeout_ms=1000
            ),
        )
        return dict(json.loads(reply.body)) if reply.code == 0 else {}

    async def route(self) -> dict[str, str]:
        """Broker ids and addresses of the topic, as the name server has them."""
        route = await self.whole_route()
        return dict(route["brokerDatas"][0]["brokerAddrs"]) if route else {}

    async def raw_peer(self, name: str = "n1", at: str = "clients") -> RawPeer:
        """A raw connection to a master's port for slaves."""
        address = self.hosts[name].address
        reader, writer = await self.run(at, lambda: asyncio.open_connection(address, HA_PORT))
        return RawPeer(self, at, reader, writer)

    async def play_master(self, name: str = "n1") -> PlayedMaster:
        """A master that a test plays by hand, at the address that slaves dial."""
        played = PlayedMaster(self, name)
        address = self.hosts[name].address
        await self.run(name, lambda: asyncio.start_server(played.accepted, address, HA_PORT))
        return played

    async def remove_files(self, name: str, *words: str) -> None:
        """Remove those files of a stopped broker whose path contains one of these words."""
        process = self._process(name)
        for path in self.hosts[name].disk.paths():
            if any(word in path for word in words):
                await self.run(name, lambda path=path: process.runtime.disk.remove(path))  # type: ignore[misc]
        self.hosts[name].kill()

    # Conditions

    async def master(self, *among: str) -> str:
        """Wait for a broker (among some) that accepts messages; its name."""

        def masters() -> list[str]:
            return [name for name in among or self.names if name in self.brokers and self[name].store.is_master]

        await self.until(lambda: len(masters()) == 1)
        return masters()[0]

    async def until(self, condition: Callable[[], bool], *, within_s: float = 120.0, every_s: float = 0.002) -> None:
        """Wait until a condition holds, polling every `every_s`; fails after `within_s` virtual seconds."""
        deadline_s = self.loop.time() + within_s
        while not condition():
            assert self.loop.time() < deadline_s, "the condition never held"
            await asyncio.sleep(every_s)

    async def following(self, *names: str) -> None:
        """Wait until slaves have copied and dispatched the master's whole log."""
        master = next(name for name in self.brokers if self.brokers[name].store.is_master)

        def same() -> bool:
            end = self.ledger(master).log.committed_position
            return all(
                self.ledger(name).client.state == "FOLLOWING"
                and self.ledger(name).log.committed_position == end
                and self[name].dispatcher.dispatched_index == end - 1
                for name in names
            )

        await self.until(same)

    def content(self, name: str) -> dict[str, bytes]:
        """A broker's files of the log."""
        disk = self.hosts[name].disk
        return {path: bytes(disk.inode(path).cache) for path in disk.paths() if path.startswith("/data/commitlog/")}

    def lines(self, name: str) -> str:
        """The log lines of a broker."""
        return self.hosts[name].log.text()


class RawPeer:
    """A peer that speaks the protocol of slaves, correctly or not."""

    def __init__(self, group: HaGroup, at: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._group, self._at, self._reader, self._writer = group, at, reader, writer

    async def send_bytes(self, data: bytes) -> None:
        async def write() -> None:
            self._writer.write(data)

        await self._group.run(self._at, write)

    async def report(self, position: int) -> None:
        await self.send_bytes(struct.pack(">q", position))

    async def frame(self) -> tuple[int, bytes] | None:
        """The next frame; None when the master has closed the connection."""

        async def read() -> tuple[int, bytes] | None:
            try:
                position, size = struct.unpack(">qi", await self._reader.readexactly(12))
                return position, await self._reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError):
                return None

        return await self._group.run(self._at, read)

    async def close(self) -> None:
        async def close() -> None:
            self._writer.close()

        await self._group.run(self._at, close)


class PlayedMaster:
    """A slave's newest connection to a played master, and its reports with their arrival times."""

    def __init__(self, group: HaGroup, name: str) -> None:
        self._group, self._name = group, name
        self.writer: asyncio.StreamWriter | None = None
        self.connected_s: list[float] = []
        self.closed_s: list[float] = []
        self.reports: list[tuple[float, int]] = []

    async def accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.connected_s.append(self._group.loop.time())
        try:
            while True:
                (position,) = struct.unpack(">q", await reader.readexactly(8))
                self.reports.append((self._group.loop.time(), position))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed_s.append(self._group.loop.time())
            writer.close()

    async def send(self, position: int, body: bytes = b"") -> None:
        """One frame."""

        async def write() -> None:
            assert self.writer is not None
            self.writer.write(struct.pack(">qi", position, len(body)) + body)

        await self._group.run(self._name, write)


@pytest.fixture
def ha() -> Callable[..., Any]:
    """Run `scenario(group)` in simulation, with a broker for each role; slaves are waited for."""

    def run(
        scenario: Callable[[HaGroup], Awaitable[Any]],
        *overrides: str,
        roles: tuple[str, ...] = ("ASYNC_MASTER", "SLAVE"),
        seed: int = 1,
        size: int = 2,
    ) -> Any:
        async def main() -> Any:
            group = HaGroup(max(len(roles), size), overrides)
            await group.start_name_server()
            for number, role in enumerate(roles, 1):
                await group.start(f"n{number}", role)
            slaves = [f"n{number}" for number, role in enumerate(roles, 1) if role == "SLAVE"]
            if slaves and len(slaves) < len(roles):
                await group.following(*slaves)
            return await scenario(group)

        return run_simulated(main(), seed=seed)

    return run
