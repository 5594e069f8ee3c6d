"""A small world of hosts for tests of the simulation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from harness.clusters.sim.host import Incarnation, SimHost
from harness.clusters.sim.loop import SimLoop
from harness.clusters.sim.network import SimNetwork
from harness.clusters.sim.simulation import run_simulated


@dataclass
class World:
    """Hosts a, b, c on one network, and the loop they live on."""

    loop: SimLoop
    network: SimNetwork
    hosts: dict[str, SimHost]

    def __getitem__(self, name: str) -> SimHost:
        return self.hosts[name]

    def on(self, name: str, program: Callable[[Incarnation], Any]) -> Incarnation:
        """Start a program on a host."""
        return self.hosts[name].start(program)

    async def until(self, condition: Callable[[], bool], *, within_s: float = 1000.0) -> None:
        """Wait until something is so; fails when it is not within some virtual seconds."""
        deadline_s = self.loop.time() + within_s
        while not condition():
            assert self.loop.time() < deadline_s, "the condition never held"
            await asyncio.sleep(0.001)


@pytest.fixture
def simulate() -> Callable[..., Any]:
    """Run `scenario(world)` in simulation and return what it returns."""

    def run(scenario: Callable[[World], Awaitable[Any]], *, seed: int = 1, shuffle: bool = False) -> Any:
        async def main() -> Any:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, SimLoop)
            network = SimNetwork(loop)
            names = ("a", "b", "c")
            hosts = {name: SimHost(loop, network, name, f"10.0.0.{n}") for n, name in enumerate(names, 1)}
            return await scenario(World(loop, network, hosts))

        return run_simulated(main(), seed=seed, shuffle=shuffle)

    return run
