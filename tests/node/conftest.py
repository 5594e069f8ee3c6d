"""A whole broker with a name server, in this process and on real sockets and files."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from node.broker.controller import BrokerController
from node.client import BrokerClient, ClientError, ClientTimings
from node.config import parse_broker_config
from node.nameserver import NameServer, NameServerOptions
from node.real_runtime import RealDisk, real_runtime
from tests.ports import free_ports

FAST = ClientTimings(
    route_interval_s=0.5, heartbeat_interval_s=1.0, rebalance_interval_s=0.5, persist_interval_s=0.3,
    lock_interval_s=1.0, lock_lease_s=3.0, pull_suspend_ms=1000, retry_pause_s=0.1, drain_timeout_s=5.0,
)  # fmt: skip


@dataclass
class Served:
    """A running broker, its name server, and what a test needs to talk to them."""

    broker: BrokerController
    name_server: str
    runtime: Any
    timings: ClientTimings = FAST

    @property
    def address(self) -> str:
        return self.broker.address

    async def committed(self, client: BrokerClient, group: str, topic: str, queue_id: int) -> int:
        """The offset that the broker stores for a group, or -1."""
        from node.remoting import Command

        fields = {"consumerGroup": group, "topic": topic, "queueId": queue_id}
        reply = await client.invoke(self.address, Command.request(14, fields))
        return reply.get_int("offset") if reply.code == 0 else -1


async def until(condition: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
    """Let the loop run until `condition` holds; fails after `timeout_s`."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while not condition():
        assert loop.time() < deadline_s, "the condition never held"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serve(
    directory: Path,
    topics: Mapping[str, int],
    *,
    extra: str = "",
    overrides: tuple[str, ...] = (),
    name_server_tls: Any = None,
    client_options: Any = None,
) -> AsyncIterator[Served]:
    """A broker that is master and registered at a name server, with these topics (name -> queues)."""
    runtime = real_runtime()
    name_server = NameServer("127.0.0.1", 0, runtime, options=NameServerOptions(tls=name_server_tls))
    await name_server.start()
    own_port, ledger_port = free_ports(2)
    text = f"""
        self_id = "n1"
        listen = "127.0.0.1:{own_port}"
        data_dir = "{directory / "data"}"
        name_servers = ["127.0.0.1:{name_server.port}"]
        timing = "fast"
        [dledger]
        listen = "127.0.0.1:{ledger_port}"
        """
    text += "".join(f'[[topics]]\nname = "{name}"\nqueues = {queues}\n' for name, queues in topics.items())
    broker = BrokerController(parse_broker_config(text + extra, overrides), runtime)
    await broker.start()
    served = Served(broker, f"127.0.0.1:{name_server.port}", runtime)
    try:
        await until(lambda: broker.store.is_master)
        async with BrokerClient(name_servers=[served.name_server], runtime=runtime, **(client_options or {})) as client:
            for topic in topics:
                await _wait_for_route(client, topic)
        yield served
    finally:
        await broker.stop()
        await name_server.stop()
        if isinstance(runtime.disk, RealDisk):
            runtime.disk.close()


async def _wait_for_route(client: BrokerClient, topic: str) -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + 20
    while True:
        try:
            if (await client.route(topic)).master_address is not None:
                return
        except ClientError:
            assert loop.time() < deadline_s, f"topic {topic} never had a route"
        await asyncio.sleep(0.02)


@pytest.fixture
def serving(tmp_path: Path) -> Callable[..., Any]:
    """`async with serving({"topic": queues}) as served`."""
    return lambda topics, **options: serve(tmp_path, topics, **options)


@pytest.fixture
def wait_until() -> Callable[..., Any]:
    return until
