"""Fixtures for tests of the simulation: hosts on a network, and other Python interpreters."""

from __future__ import annotations

import asyncio
import functools
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.clusters.sim.host import Incarnation, SimHost
from harness.clusters.sim.loop import SimLoop
from harness.clusters.sim.network import SimNetwork
from harness.clusters.sim.simulation import run_simulated


@dataclass
class World:
    """Hosts a, b, c on one network, and the loop they run on."""

    loop: SimLoop
    network: SimNetwork
    hosts: dict[str, SimHost]

    def __getitem__(self, name: str) -> SimHost:
        return self.hosts[name]

    def on(self, name: str, program: Callable[[Incarnation], Any]) -> Incarnation:
        """Start a program on a host."""
        return self.hosts[name].start(program)

    async def until(self, condition: Callable[[], bool], *, within_s: float = 1000.0) -> None:
        """Wait until a condition holds; fails after `within_s` virtual seconds."""
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


SUPPORTED = ("3.11", "3.12", "3.13", "3.14")
KINDS = [f"{implementation} {version}" for implementation in ("cpython", "pypy") for version in SUPPORTED]


@pytest.fixture(params=KINDS)
def other_python(request: pytest.FixtureRequest) -> str:
    """An interpreter of a supported version, PyPy's too, other than this one; the test is skipped if there is none.
    They are only searched for on demand: else every process that collects tests would have to start all of them."""
    if request.param not in (found := other_pythons()):
        pytest.skip(f"{request.param} runs these tests, or is neither on the PATH nor in a pyenv that is")
    return found[request.param]


@functools.cache
def other_pythons() -> dict[str, str]:
    """Interpreters by kind: those on the PATH, else those of pyenv, whose shims on the PATH start only the versions
    selected at the moment."""
    root = Path(_output("pyenv", "root").strip() or "nowhere", "versions")
    versions = _output("pyenv", "versions", "--bare", "--skip-aliases").split()
    installed = [str(path) for version in versions if (path := root / version / "bin" / "python").exists()]
    names = [*(f"python{version}" for version in SUPPORTED), "pypy3", *(f"pypy{version}" for version in SUPPORTED)]
    on_path = [found for name in names if (found := shutil.which(name)) is not None]
    by_kind = {_kind(path): path for path in [*installed, *on_path]}
    by_kind.pop(_kind(sys.executable), None)
    return by_kind


def _kind(python: str) -> str:
    """Implementation and version: "pypy 3.11"."""
    return _output(python, "-c", "import sys; print(sys.implementation.name, '%d.%d' % sys.version_info[:2])").strip()


def _output(*argv: str) -> str:
    """The standard output of a program; "" if it fails or does not exist."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
