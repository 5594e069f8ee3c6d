"""A whole run without processes: a cluster of host names, a network that is a set of links, a system in memory."""

from __future__ import annotations

import asyncio
import contextlib
import io
import subprocess
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.clusters.agent_link import AgentLink
from harness.clusters.agent_processes import AgentProcess, AgentProcesses
from harness.clusters.base import Program
from harness.clusters.own_machine import LocalAgents
from harness.execution import Parts, plan_faults
from harness.report import OutputConsole
from harness.run_state import RunState
from harness.store import Store
from harness.systems.base import CheckOutcome, Setting
from harness.test import NemesisChoice, Test
from harness.workloads.register import RegisterWorkload
from nemesis.partition import PARTITION
from nemesis.target import Grudge, Link, ProbeResult, links_of


class MemoryNetwork:
    """Cut links, by fault. With `ignores_cuts` cuts have no effect, with `ignores_heals` heals have none."""

    def __init__(self) -> None:
        self.cuts: dict[str, frozenset[Link]] = {}
        self.ignores_cuts = False
        self.ignores_heals = False

    def is_cut(self, link: Link) -> bool:
        return any(link in links for links in self.cuts.values())

    async def cut(self, fault_id: str, grudge: Grudge) -> None:
        if not self.ignores_cuts:
            self.cuts[fault_id] = links_of(grudge)

    async def heal(self, fault_id: str) -> None:
        if not self.ignores_heals:
            self.cuts.pop(fault_id, None)

    async def heal_all(self) -> None:
        self.cuts.clear()

    async def probe(self, links: Collection[Link], *, timeout_s: float) -> Sequence[ProbeResult]:
        await asyncio.sleep(0)
        return [ProbeResult(link=link, passed=not self.is_cut(link)) for link in links]


class MemoryCluster:
    name = "memory"
    description = "hosts that are only names"

    def __init__(
        self, *, node_count: int, run: Any, work_dir: str, ports: Sequence[int], extra_hosts: Sequence[str]
    ) -> None:
        self.hosts = [f"n{i}" for i in range(1, node_count + 1)]
        self.network = MemoryNetwork()
        self.started = self.stopped = False

    async def start(self) -> None:
        self.started = True

    async def stop(self) -> None:
        self.stopped = True


class MemorySystem:
    """One set of queues for all hosts; with `stale_reads`, reads during cuts see them as at the first such read."""

    name = "memory"
    description = "queues in memory"
    offers = frozenset({"queue"})
    settings: Sequence[Setting] = ()
    ports: Sequence[int] = ()
    extra_hosts: Sequence[str] = ()
    recovery_timeout_s = 1.0
    made: list[MemorySystem] = []  # noqa: RUF012

    def __init__(
        self,
        *,
        cluster: MemoryCluster,
        settings: Mapping[str, str],
        keys: int,
        log_dir: str,
        operation_timeout_s: float,
    ) -> None:
        self.cluster = cluster
        self.queues: list[list[Any]] = [[] for _ in range(keys)]
        self.frozen: list[list[Any]] | None = None
        self.stale_reads = False
        self.checks: dict[str, CheckOutcome] = {"replicas": CheckOutcome(True, "one copy")}
        self.fail_to_start: Exception | None = None
        self.delay_s = 0.0005
        self.recovery = CheckOutcome(True, "back at once")
        MemorySystem.made.append(self)
        prepare = PREPARE.get("system")
        if prepare is not None:
            prepare(self)

    async def start(self) -> None:
        if self.fail_to_start is not None:
            raise self.fail_to_start

    async def stop(self) -> None:
        pass

    async def leaders(self) -> Sequence[str]:
        return ["n1"]

    def process(self, host: str) -> None:
        return None

    async def restart(self, host: str) -> None:
        pass

    async def status(self, host: str, *, timeout_s: float) -> Mapping[str, str] | None:
        return {}

    async def recover(self, *, timeout_s: float) -> CheckOutcome:
        return self.recovery

    def last_words(self, host: str) -> Sequence[str]:
        return ["panic: out of luck"]

    def facts(self) -> Mapping[str, Any]:
        return {}

    async def check(self, *, started_wall_ms: int) -> Mapping[str, CheckOutcome]:
        return self.checks

    def connection(self, kind: str, *, process: int, thread: int) -> MemoryQueueConnection:
        return MemoryQueueConnection(self)


class MemoryQueueConnection:
    node: str | None = "n1"
    durability: str | None = None

    def __init__(self, system: MemorySystem) -> None:
        self.system = system

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def append(self, key: int, value: Any) -> int:
        await asyncio.sleep(self.system.delay_s)
        self.system.queues[key].append(value)
        return len(self.system.queues[key]) - 1

    async def latest(self, key: int) -> Any:
        await asyncio.sleep(self.system.delay_s)
        system = self.system
        queues = system.queues
        if system.stale_reads and system.cluster.network.cuts:
            if system.frozen is None:
                system.frozen = [list(queue) for queue in queues]
            queues = system.frozen
        return queues[key][-1] if queues[key] else None


PREPARE: dict[str, Any] = {}


@pytest.fixture
def memory_run(tmp_path: Path) -> Any:
    """A function that performs a short run in memory and returns (run directory, results, console text).

    `system` is called with the system before it starts.
    """

    def run(
        *, system: Any = None, time_limit_s: float = 1.2, terminal: bool = False, **changes: Any
    ) -> tuple[Any, dict[str, Any], str]:
        from harness.execution import perform

        test = Test(
            **{
                "system": "memory", "cluster": "memory", "nodes": 5, "workload": "register",
                "nemesis": (NemesisChoice("partition", "halves"),), "nemesis_interval_s": 0.3,
                "time_limit_s": time_limit_s, "concurrency": 4, "rate": 300.0, "seed": 5, **changes,
            }
        )  # fmt: skip
        PREPARE["system"] = system
        nemeses = {choice.name: PARTITION for choice in test.nemesis}
        parts = Parts(
            test=test,
            cluster_class=MemoryCluster,
            cluster_reason="a test",
            system_class=MemorySystem,
            workload=RegisterWorkload(keys=2),
            nemeses=nemeses,
            schedule=plan_faults(test, nemeses, MemoryCluster, MemorySystem),
        )
        output = io.StringIO()
        console = OutputConsole(file=output, width=200, force_terminal=terminal, color_system=None)
        try:
            run_dir, results = perform(parts, Store(tmp_path / "store"), console)
        finally:
            PREPARE.clear()
        return run_dir, results, output.getvalue()

    return run


class OwnHost:
    """An agent on this machine, and the programs that it runs for any host."""

    def __init__(self, run: RunState, directory: Path) -> None:
        self.agents = LocalAgents(
            ["here"], run=run, directory=str(directory / "agents"), log_path=str(directory / "agents.log")
        )
        self.link = AgentLink("here", lambda: self.agents.connect("here"), self._take)

        def log_path(host: str, name: str) -> str:
            return str(directory / host / name)

        self.programs = AgentProcesses(log_path=log_path, remote_log_path=log_path, are_here=True)

    def _take(self, event: dict[str, Any]) -> None:
        self.programs.take_event("here", self.link, event)

    async def spawn(self, host: str, program: Program) -> AgentProcess:
        return await self.programs.spawn(host, "here", self.link, program)


@asynccontextmanager
async def _own_host(run: RunState, directory: Path) -> AsyncIterator[OwnHost]:
    host = OwnHost(run, directory)
    host.agents.start()
    try:
        host.link.open("test")
        yield host
        assert await host.programs.stop_all(grace_s=2.0) == []
    finally:
        await host.link.close()
        await host.agents.stop()


@pytest.fixture
def own_host() -> Callable[[RunState, Path], AbstractAsyncContextManager[OwnHost]]:
    """A context manager with an agent on this machine, whose programs end with it; their files are in `directory`."""
    return _own_host


@pytest.fixture(scope="session")
def harness_here() -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function that runs `harness WORDS` in a directory `cwd` and returns its output and status.

    It runs in this process, because a new one takes half a second to start.
    """

    def perform(
        *words: str, cwd: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patched, contextlib.chdir(cwd):
            for name, value in (environment or {}).items():
                patched.setenv(name, value)
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    status = cli.main(words)
                except SystemExit as ended:
                    status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())

    return perform
