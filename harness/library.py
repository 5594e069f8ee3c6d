"""Hosts and faults for scripts, notebooks and services: a cluster without command line, workload or verdict.

    async with cluster("netns", hosts=3) as hosts:
        server = await hosts["n1"].start(["python3", "server.py"])
        async with hosts.cut("n1 | n2 n3") as proof:
            print(proof.detail)
        await server.kill()

The cluster has its own thread and event loop, so it can be used from any event loop, and the caller's thread stays in
its network namespace. From there the hosts of `netns` cannot be reached: `hosts.call` runs a function, and
`hosts.perform` a coroutine, on the clients' host, from which they can.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from harness import registry
from harness.clusters.abilities import OwnWorld
from harness.clusters.base import CLIENTS_HOST, Cluster, HostProcess, Program
from harness.clusters.options import require_cluster
from harness.clusters.select import choose
from harness.clusters.threads import let_threads_go
from harness.errors import HarnessError, OperatorError
from harness.faults.target import prepare
from harness.run_state import RunState
from harness.sdk import Output
from harness.sdk.host import DEFAULT_COMMAND_TIMEOUT_S, run_on
from harness.seeded import random_seed, seeded
from nemesis.partition import PARTITION
from nemesis.protocol import Proof
from nemesis.target import Network

__all__ = ["ClusterSession", "Hosts", "LibraryHost", "NotProven", "RunningProgram", "cluster"]

T = TypeVar("T")

DEFAULT_PORTS = (7000,)
"""Ports of hosts if none are given: one, so that links can be probed."""

END_TIMEOUT_S = 10.0
"""For the cluster's thread to end after everything is taken down."""


class NotProven(HarnessError):
    """A fault was not in effect, or not healed; the message names the link and the evidence."""


def cluster(
    name: str = "auto",
    *,
    hosts: int = 3,
    ports: Sequence[int] = DEFAULT_PORTS,
    directory: str | None = None,
    options: Mapping[str, str] | None = None,
) -> ClusterSession:
    """A cluster, to be used with `async with`, or started and stopped explicitly.

    `name` is one of `harness list`, or auto; `ports` are those that the hosts' programs listen on; `directory` is for
    their data and logs (by default a new temporary one, in `directory` of the session); `options` are those of the
    cluster, such as image. Raises OperatorError if such a cluster is not available here.
    """
    return ClusterSession(name, hosts=hosts, ports=ports, directory=directory, options=options or {})


class ClusterSession:
    """One cluster and its thread. It must be stopped with `stop`; `harness clean` removes what a process leaves behind
    that exits without."""

    def __init__(
        self, name: str, *, hosts: int, ports: Sequence[int], directory: str | None, options: Mapping[str, str]
    ) -> None:
        choice = choose(name)
        if choice.in_user_namespace:
            if name != "auto":
                raise OperatorError("cluster netns needs root here: run as root, or use cluster('local')")
            choice = choose("local")
        self.name = choice.name
        self._class = require_cluster(registry.load("clusters", choice.name), options)
        if isinstance(self._class, OwnWorld):
            raise OperatorError("cluster sim lasts only as long as its run: use local or netns")
        self.directory = directory or tempfile.mkdtemp(prefix="splitbrain-cluster-")
        self._given = {"node_count": hosts, "ports": tuple(ports), "extra_hosts": (), **options}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._state: RunState | None = None
        self._cluster: Any = None
        self._stopping = asyncio.Event()

    async def __aenter__(self) -> Hosts:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> Hosts:
        """Create the hosts. Raises ClusterUnavailable, OperatorError, leaving nothing behind."""
        if self._thread is not None:
            raise OperatorError("the cluster is already started")
        self._start_thread()
        try:
            return await self.on_loop(self._bring_up())
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Heal, end every program, remove the hosts. Idempotent. Raises HarnessError if something is left behind."""
        if self._thread is None:
            return
        try:
            # Shielded, so that a cancellation meanwhile leaves nothing behind.
            await asyncio.shield(asyncio.ensure_future(self.on_loop(self._take_down())))
        finally:
            self._end_thread()

    async def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine on the cluster's own event loop. Raises what the coroutine raises."""
        if self._loop is None:
            work.close()
            raise OperatorError("the cluster is not up")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _bring_up(self) -> Hosts:
        self._state = RunState.create(f"library-{secrets.token_hex(4)}")
        self._cluster = self._class(run=self._state, work_dir=self.directory, **self._given)
        prepare(self._cluster, frozenset())
        await self._cluster.start()
        return Hosts(self, self._cluster)

    async def _take_down(self) -> None:
        found, self._cluster = self._cluster, None
        state, self._state = self._state, None
        try:
            if found is not None:
                await found.stop()
        finally:
            if state is not None:
                state.close()

    def _start_thread(self) -> None:
        is_ready = threading.Event()
        self._stopping = asyncio.Event()

        def serve() -> None:
            with asyncio.Runner() as runner:
                loop = self._loop = runner.get_loop()
                is_ready.set()
                runner.run(self._serve())
            let_threads_go(loop)

        self._thread = threading.Thread(target=serve, name="splitbrain-cluster", daemon=True)
        self._thread.start()
        is_ready.wait()

    async def _serve(self) -> None:
        await self._stopping.wait()

    def _end_thread(self) -> None:
        thread, self._thread = self._thread, None
        loop, self._loop = self._loop, None
        if thread is not None and loop is not None:
            loop.call_soon_threadsafe(self._stopping.set)
            thread.join(END_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class RunningProgram:
    """A program on a host."""

    _session: ClusterSession
    _process: HostProcess
    log_path: str
    """The file of its output, which is on this machine at the latest when the cluster has stopped."""

    @property
    def pid(self) -> int | None:
        """The process id on this machine; None if it has none."""
        return self._process.pid

    def exit_status(self) -> int | None:
        """None while it runs; then its exit status, negative for a signal."""
        return self._process.exit_status()

    async def kill(self) -> None:
        """Send SIGKILL and wait until it is gone."""
        await self._session.on_loop(_called(self._process.kill))

    async def pause(self) -> None:
        """Send SIGSTOP to it and its child processes."""
        await self._session.on_loop(_called(self._process.pause))

    async def resume(self) -> None:
        """Send SIGCONT to it and its child processes."""
        await self._session.on_loop(_called(self._process.resume))

    async def terminate(self, *, grace_s: float = 10.0) -> int:
        """SIGTERM, then SIGKILL after `grace_s` seconds; returns the exit status."""
        return await self._session.on_loop(_called(lambda: self._process.terminate(grace_s=grace_s)))

    async def state(self) -> str:
        """ "running", "paused" or "down", as observed on the process itself."""
        return await self._session.on_loop(_called(self._process.state))


@dataclass(frozen=True, slots=True)
class LibraryHost:
    """One host."""

    name: str
    _session: ClusterSession
    _cluster: Cluster

    @property
    def ip(self) -> str:
        """The address that programs on this host listen on."""
        return self._cluster.bind_address(self.name)

    @property
    def data(self) -> str:
        """The host's data directory."""
        return self._cluster.data_dir(self.name)

    def address(self, port: int, *, source: str = CLIENTS_HOST) -> str:
        """ "ip:port" at which another host, by default the clients', reaches a port of this one. Raises ValueError."""
        return self._cluster.address_from(source, self.name, port)

    async def start(
        self, argv: Sequence[str], *, name: str | None = None, environment: Mapping[str, str] | None = None
    ) -> RunningProgram:
        """Start a program; returns once it runs, not once it serves. Raises OperatorError if it cannot be run."""
        if isinstance(argv, str) or not argv:
            raise OperatorError(f'{self.name}: give the program to start as a list of words: ["python3", "server.py"]')
        title = name or os.path.basename(argv[0])
        program = Program(title, list(argv), f"{title}.log", environment or {})
        process = await self._session.on_loop(_called(lambda: self._cluster.spawn(self.name, program)))
        return RunningProgram(self._session, process, os.path.join(self._session.directory, self.name, f"{title}.log"))

    async def run(
        self, *argv: str, stdin: str = "", timeout_s: float = DEFAULT_COMMAND_TIMEOUT_S, check: bool = True
    ) -> Output:
        """Run a command and return its output. Raises CommandFailed for a nonzero status, unless `check` is off."""
        return await self._session.on_loop(run_on(self._cluster, self.name, argv, stdin, timeout_s, check=check))

    async def put(self, path: str, content: str | bytes) -> None:
        """Write a file, below the data directory unless the path is absolute. Raises OperatorError."""
        data = content.encode() if isinstance(content, str) else content
        target = os.path.join(self.data, path)
        await self._session.on_loop(_called(lambda: self._cluster.put_file(self.name, target, data)))


@dataclass(frozen=True, slots=True)
class _Hosts:
    """The part of nemesis.target.Target that a partition needs."""

    hosts: Sequence[str]
    network: Network


class Hosts(Mapping[str, LibraryHost]):
    """The hosts of a cluster by name, n1 and so on, and the network between them."""

    def __init__(self, session: ClusterSession, found: Cluster) -> None:
        self._session = session
        self._cluster = found
        self._hosts = {name: LibraryHost(name, session, found) for name in found.hosts}
        self._faults = 0
        self._random = seeded(str(random_seed()))

    def __getitem__(self, name: str) -> LibraryHost:
        return self._hosts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    @contextlib.asynccontextmanager
    async def cut(self, groups: str) -> AsyncIterator[Proof]:
        """Cut the network between groups of hosts ("n1 | n2 n3"), or in one direction ("n1 > n2"), while inside.

        Yields the proof: every link that should be cut was probed and does not pass traffic, every other does. Raises
        OperatorError for unknown hosts, NotProven if the cut, or afterwards its healing, is not proven.
        """
        variant = "".join(
            separator if separator in ("|", ">") else "+".join(separator.replace(",", " ").replace("+", " ").split())
            for separator in _split(groups)
        )
        target: Any = _Hosts(list(self._hosts), self._cluster.network)
        problems = PARTITION.requires(target, variant)
        if problems:
            raise OperatorError(f"cut({groups!r}): {'; '.join(problems)}")
        self._faults += 1
        fault_id = f"cut{self._faults}"
        on_loop = self._session.on_loop
        injection = await on_loop(PARTITION.plan(target, self._random, fault_id=fault_id, variant=variant))
        is_through = False
        try:
            await on_loop(PARTITION.inject(target, injection))
            proof = await on_loop(PARTITION.prove(target, injection))
            if not proof.proven:
                raise NotProven(f"cut({groups!r}): {proof.detail}")
            yield proof
            is_through = True
        finally:
            await asyncio.shield(asyncio.ensure_future(on_loop(PARTITION.heal(target, injection))))
            if is_through:
                healed = await on_loop(PARTITION.prove_healed(target, injection))
                if not healed.proven:
                    raise NotProven(f"cut({groups!r}) is not healed: {healed.detail}")

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a thread on the clients' host and return its result. Raises what it raises."""
        return await self._session.on_loop(asyncio.to_thread(function, *arguments))

    async def perform(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine on the clients' host and return its result. Raises what it raises."""
        return await self._session.on_loop(work)


def _split(groups: str) -> list[str]:
    """The groups and the separators between them."""
    return groups.replace("|", "\n|\n").replace(">", "\n>\n").split("\n")


async def _called(function: Callable[[], Awaitable[T]]) -> T:
    """Call a method of the cluster on its event loop."""
    return await function()
