"""Fixtures: a run state of the test's own, waiting for conditions, and hosts behind SSH and Docker."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.clusters.netns_calls import entered
from harness.run_state import RunState


@pytest.fixture
def run_state(tmp_path: Path) -> Iterator[RunState]:
    # Concurrent tests may have directories of the same name, as it is truncated and numbered per process.
    run = RunState.create(f"test-{tmp_path.name}-{os.getpid()}", state_root=str(tmp_path / "states"))
    yield run
    run.close()


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Waits until a condition holds; fails after a deadline that no healthy machine needs."""

    async def wait_until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + deadline_s
        while not condition():
            assert loop.time() < end_s, "the condition did not come true"
            await asyncio.sleep(0.01)

    return wait_until


LAB_PATH = Path(__file__).resolve().parents[3] / "scripts" / "lab.py"


def _load_lab() -> Any:
    spec = importlib.util.spec_from_file_location("splitbrain_lab", LAB_PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lab = _load_lab()


@dataclass(frozen=True)
class SshMachines:
    """Machines n1..n4 behind SSH; `namespace` is the network from which they are reached."""

    directory: Path
    inventory: Path
    namespace: str

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on a loop whose thread, and the threads it starts, are in the network of the machines."""
        with entered(self.namespace):
            asyncio.run(main)

    def files(self, host: str) -> list[str]:
        """The names in a machine's directory for runs."""
        return sorted(os.listdir(self.directory / host))

    def rules(self, host: str) -> str:
        """The nftables rules of a machine."""
        return self._inside(host, "nft", "list", "ruleset")

    def devices(self, host: str) -> str:
        """The network devices of a machine."""
        return self._inside(host, "ip", "-o", "link")

    def ip(self, host: str, *argv: str) -> None:
        """Run `ip` in a machine's network namespace."""
        self._inside(host, "ip", *argv)

    def _inside(self, host: str, *argv: str) -> str:
        prefix = ["nsenter", f"--net={self.namespace.removesuffix('-net')}-{host}"]
        return subprocess.run([*prefix, *argv], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="session")
def ssh_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshMachines]:
    directory = tmp_path_factory.mktemp("ssh-lab")
    with lab.ssh_lab(directory, 4) as (prefix, inventory):
        yield SshMachines(directory, inventory, prefix[1].removeprefix("--net="))


@dataclass(frozen=True)
class Engine:
    """A Docker engine of the tests' own, with the hosts' image built on a local root file system."""

    url: str
    namespace: str
    image_log: str

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the network of the engine's containers."""
        with entered(self.namespace):
            asyncio.run(main)


@pytest.fixture(scope="session")
def docker_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("docker-lab")
    lab.machine_rootfs(directory / "rootfs")
    with lab.docker_lab(directory) as (prefix, environment):
        before = os.environ.get("DOCKER_HOST")
        os.environ.update(environment)
        try:
            build = [*prefix, str(LAB_PATH.parent / "build-image.sh"), "--rootfs", str(directory / "rootfs")]
            built = subprocess.run(build, capture_output=True, text=True)
            assert built.returncode == 0, built.stderr
            yield Engine(environment["DOCKER_HOST"], prefix[1].removeprefix("--net="), built.stdout)
        finally:
            if before is None:
                del os.environ["DOCKER_HOST"]
            else:
                os.environ["DOCKER_HOST"] = before
