"""Brokers that register, fall silent and return, at several name servers, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest

from harness.clusters.sim.host import Incarnation, SimHost
from harness.clusters.sim.loop import SimLoop
from harness.clusters.sim.network import SimNetwork
from harness.clusters.sim.simulation import run_simulated
from node.config import parse_broker_config
from node.nameserver import NameServer
from node.serving import serve_broker

CONFIG = """
self_id = "n1"
listen = "10.0.0.1:10911"
data_dir = "/data"
name_servers = ["10.0.1.1:9876", "10.0.1.2:9876"]
[classic]
[limits]
index_slots = 64
index_entries = 1000
[[topics]]
name = "t"
"""


class World:
    """A broker and two name servers, each on a host of its own."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop, network = loop, SimNetwork(loop)
        self.broker = SimHost(loop, network, "broker", "10.0.0.1")
        self.hosts = [SimHost(loop, network, f"ns{number}", f"10.0.1.{number}") for number in (1, 2)]
        self._server_of: dict[str, NameServer] = {}
        for host in self.hosts:
            host.start(self._name_server)

    async def _name_server(self, process: Incarnation) -> None:
        server = NameServer(process.host.address, 9876, process.runtime)
        self._server_of[process.host.name] = server
        await server.start()
        await process.stop_requested.wait()

    async def _broker(self, process: Incarnation) -> None:
        await serve_broker(parse_broker_config(CONFIG), process.runtime, process.stop_requested)

    @property
    def servers(self) -> list[NameServer]:
        return [self._server_of[host.name] for host in self.hosts]

    def start_broker(self) -> None:
        self.broker.start(self._broker)

    def routes(self) -> list[bool]:
        """Whether each name server has a route for the topic."""
        return [server.routes.route("t") is not None for server in self.servers]

    async def wait_for(self, routes: list[bool], *, within_s: float) -> float:
        """Wait until `self.routes()` is `routes`; returns the seconds that took."""
        began_s = self.loop.time()
        while self.routes() != routes:
            assert self.loop.time() - began_s < within_s, self.routes()
            await asyncio.sleep(0.1)
        return self.loop.time() - began_s


def in_world(scenario: Callable[[World], Awaitable[Any]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        world = World(loop)
        await asyncio.sleep(1)
        await scenario(world)

    run_simulated(main(), seed=3)


EXPIRY_MECHANISM = "NS registration at 10 s then every 30 s; 120 s expiry scanned every 10 s (R)"


@pytest.mark.mechanism(EXPIRY_MECHANISM)
def test_a_broker_registers_at_every_name_server_every_30_seconds() -> None:
    async def scenario(world: World) -> None:
        world.start_broker()
        assert await world.wait_for([True, True], within_s=10) < 10
        for server in world.servers:
            (live,) = server.routes._live.values()
            assert live.broker_id == 0
        registrations_ns: list[list[int]] = [[], []]
        for _ in range(200):
            for seen, server in zip(registrations_ns, world.servers, strict=True):
                (live,) = server.routes._live.values()
                if live.updated_ns not in seen:
                    seen.append(live.updated_ns)
            await asyncio.sleep(1)
        for seen in registrations_ns:
            intervals = [(after - before) / 1e9 for before, after in pairwise(seen)]
            assert len(intervals) in (6, 7) and intervals == pytest.approx([30.0] * len(intervals), abs=0.1)

    in_world(scenario)


@pytest.mark.mechanism(EXPIRY_MECHANISM)
def test_a_silent_broker_expires_after_two_minutes_and_returns_when_it_resumes() -> None:
    """SIGSTOP keeps its connections open: only the missing registrations show that it is down."""

    async def scenario(world: World) -> None:
        world.start_broker()
        await world.wait_for([True, True], within_s=10)
        await asyncio.sleep(300)
        assert world.routes() == [True, True], "a live broker does not expire"
        world.broker.pause()
        gone_s = await world.wait_for([False, False], within_s=131)
        assert gone_s > 90, "120 s after the last registration, up to 30 s of which had passed"
        world.broker.resume()
        await world.wait_for([True, True], within_s=31)

    in_world(scenario)


@pytest.mark.mechanism(EXPIRY_MECHANISM)
def test_the_routes_of_a_killed_or_terminated_broker_are_removed_at_once() -> None:
    async def scenario(world: World) -> None:
        for end in (world.broker.kill, world.broker.terminate):
            world.start_broker()
            await world.wait_for([True, True], within_s=10)
            end()
            assert await world.wait_for([False, False], within_s=5) < 5

    in_world(scenario)


def test_a_restarted_name_server_learns_a_route_with_the_next_registration() -> None:
    async def scenario(world: World) -> None:
        world.hosts[0].kill()
        world.start_broker()
        await asyncio.sleep(40)
        assert world.routes() == [False, True]
        world.hosts[0].start(world._name_server)
        await world.wait_for([True, True], within_s=31)

    in_world(scenario)
