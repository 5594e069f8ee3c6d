"""What a cluster is: hosts, a network between them, and a way to run programs on them.

A cluster gives hosts to the system under test and fault interfaces to the nemesis. It does not know what
the system is; the system does not know how its hosts are made. Life cycle: `start` creates hosts and network
(everything is recorded in the run's state before it is created, so that it can be cleaned up after a killed harness),
`spawn` runs programs, `stop` takes everything down and is idempotent.

Host names: replicas are n1..nN; the system names the other hosts that it needs; the clients' host is `clients`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from harness.clusters.abilities import OwnWorld
from harness.clusters.threads import let_threads_go, renew_threads
from harness.errors import OperatorError
from harness.left_behind import run_loop
from harness.outcome import CheckOutcome
from nemesis.target import Network, ProcessMember

__all__ = [
    "CLIENTS_HOST",
    "Cluster",
    "ClusterUnavailable",
    "EndsInParts",
    "HoldsFiles",
    "HostProcess",
    "KeepsLogs",
    "KnowsItsEnd",
    "ListsMembers",
    "Program",
    "ReadsFiles",
    "RemoteHosts",
    "RunsCommands",
    "SeesReplicas",
    "run_harness",
]

CLIENTS_HOST = "clients"

_T = TypeVar("_T")


class ClusterUnavailable(OperatorError):
    """This machine cannot host such a cluster. The message is one line that names the fix."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run on a host. `argv` is run as is, in `directory`; output goes to the host's log `log_name`.
    `multiprocess`: several of its processes write to the disk."""

    name: str
    argv: Sequence[str]
    log_name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    multiprocess: bool = False
    directory: str = "/"


class HostProcess(Protocol):
    """A program that was started on a host."""

    @property
    def host(self) -> str: ...

    @property
    def pid(self) -> int | None:
        """Process id as the harness's machine sees it; None if it is not visible there."""
        ...

    @property
    def host_pid(self) -> int | None:
        """Process id as its own host sees it; None if its host has no process ids."""
        ...

    def exit_status(self) -> int | None:
        """None while it runs; otherwise its status, negative for a signal."""
        ...

    async def terminate(self, *, grace_s: float = 10.0) -> int:
        """SIGTERM, then SIGKILL after `grace_s` seconds; returns the exit status."""
        ...

    async def kill(self) -> None:
        """SIGKILL and wait until it is gone."""
        ...

    async def pause(self) -> None:
        """SIGSTOP it and what it started; does nothing when it has ended."""
        ...

    async def resume(self) -> None:
        """SIGCONT it and what it started; does nothing when it has ended."""
        ...

    async def state(self) -> str:
        """RUNNING, PAUSED or DOWN of nemesis.target, observed on the process itself."""
        ...


@runtime_checkable
class KnowsItsEnd(Protocol):
    """A process that knows whether the harness has ended it."""

    @property
    def ended_by_harness(self) -> bool: ...


@runtime_checkable
class EndsInParts(Protocol):
    """A process of a host that is several programs, some of which may have ended while others run."""

    @property
    def host_pids(self) -> Sequence[int]:
        """The process ids, as their own host sees them, of the programs that have not ended."""
        ...

    @property
    def ended(self) -> Sequence[str]:
        """The names of the programs that have ended."""
        ...

    def first_problem(self) -> str | None:
        """Which program has ended, and how, in words; None while all run."""
        ...


@runtime_checkable
class ListsMembers(Protocol):
    """A program whose host can list all its processes."""

    async def members(self) -> Sequence[ProcessMember]:
        """Its own process and all that it started, except those that have ended. Raises ShellError."""
        ...


@runtime_checkable
class SeesReplicas(Protocol):
    """A cluster that observes what its replicas do and checks it itself."""

    def checks(self, *, zero_s: float) -> Mapping[str, CheckOutcome]:
        """The outcome of each check; `zero_s` is the event loop's time (s) at which the history begins."""
        ...

    def leading(self) -> Sequence[str] | None:
        """Hosts whose replica leads at this moment, newest term first; None if no replica has a role."""
        ...


@runtime_checkable
class RemoteHosts(Protocol):
    """A cluster whose hosts have files and a Python of their own."""

    def python(self, host: str) -> str:
        """The Python interpreter on a host."""
        ...

    async def fetch(self, hosts: Collection[str] | None = None) -> Sequence[Exception]:
        """Copy the files of these hosts (None: of all) to the run's directory; returns what went wrong."""
        ...


@runtime_checkable
class RunsCommands(Protocol):
    """A cluster on whose hosts short commands can be run."""

    async def run(
        self, host: str, argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = ...
    ) -> tuple[int, str, str]:
        """(status, standard output, standard error); status -9 when it timed out. Raises ShellError."""
        ...


@runtime_checkable
class ReadsFiles(Protocol):
    """A cluster whose hosts' files can be read while they run."""

    async def get_file(self, host: str, path: str) -> bytes:
        """The content of a file on a host. Raises ShellError, also if the file is too large."""
        ...


@runtime_checkable
class KeepsLogs(Protocol):
    """A cluster whose hosts keep programs' output in log files."""

    def log_path(self, host: str, name: str) -> str:
        """Where a host keeps the log of that name (`Program.log_name`), as a path on that host."""
        ...


@runtime_checkable
class HoldsFiles(Protocol):
    """A cluster whose hosts' files are put into the run's directory only on request."""

    def leave_files(self) -> None:
        """Put them there, once the cluster has stopped. Raises OSError."""
        ...


class Cluster(Protocol):
    """Hosts and the network between them, for one run."""

    name: str

    @property
    def hosts(self) -> Sequence[str]:
        """The replicas' hosts: n1..nN."""
        ...

    @property
    def network(self) -> Network: ...

    @classmethod
    def missing(cls, interface: str, ability: str) -> str | None:
        """Why such a cluster cannot have an ability of a fault interface (nemesis.target.ABILITIES) on this machine,
        as one line that names the fix; None when it can. Called before a cluster is made."""
        ...

    @property
    def extra_hosts(self) -> Sequence[str]:
        """The hosts that the system has besides its replicas', by the system's own names."""
        ...

    def prepare(self, capabilities: Collection[tuple[str, str]]) -> None:
        """Be ready for the (interface, ability) pairs that the run will use. Called before `start`; the interfaces
        themselves are attributes such as `clocks`, `disks` and `links`, if the cluster has them (see abilities)."""
        ...

    async def start(self) -> None:
        """Create the hosts and their network. Raises ClusterUnavailable."""
        ...

    async def stop(self) -> None:
        """Heal, end every process, remove what was created. Idempotent."""
        ...

    def bind_address(self, host: str) -> str:
        """The IP address that a program on `host` listens on and that other hosts know it by."""
        ...

    def address_from(self, source: str, destination: str, port: int) -> str:
        """The "ip:port" under which `source` reaches `port` of `destination`.

        On most clusters this is the bind address; if every link goes through a proxy, it is the proxy's.
        Ports that will be asked for are passed to the cluster when it is made.
        """
        ...

    def data_dir(self, host: str) -> str:
        """Directory of `host` for its data, as a path that programs on the host can use."""
        ...

    def local_path(self, host: str, path: str) -> str:
        """Where the harness itself can read `path` of `host` (the same path if they share a file system)."""
        ...

    async def put_file(self, host: str, path: str, content: bytes) -> None:
        """Write a file on a host, creating parent directories."""
        ...

    async def spawn(self, host: str, program: Program) -> HostProcess:
        """Start a program on a host; returns once it has started, not once it is ready."""
        ...


def run_harness(cluster_class: Any, main: Coroutine[Any, Any, _T], *, seed: int) -> _T:
    """Run the coroutine that makes and uses a cluster: on an ordinary event loop, unless the class brings its own, as
    the simulator does (OwnWorld)."""
    if isinstance(cluster_class, OwnWorld):
        result: _T = cluster_class.run_harness(main, seed=seed)
        return result
    return run_loop(_with_threads(main))


async def _with_threads(main: Coroutine[Any, Any, _T]) -> _T:
    renew_threads()
    try:
        return await main
    finally:
        let_threads_go(asyncio.get_running_loop())
