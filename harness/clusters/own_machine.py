"""Hosts on the harness's own machine: same kernel, same files, same process ids.

Each agent is a process of its own, all forked by one process that the harness starts.
So only one interpreter is started, however many hosts there are. The whole tree ends with the harness, whatever ends
it: each process in the tree gets a signal when its parent dies (PR_SET_PDEATHSIG), and the first one is the harness's
child. An agent kills everything below it before it ends. If a host has mounts of its own, they are in its agent's mount
namespace, and are gone with the last process in it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Unpack

from harness.clusters import host_agent
from harness.clusters.agent_access import AgentAccess
from harness.clusters.agent_cluster import AgentCluster, ClusterArguments
from harness.clusters.agent_file_systems import FileSystemPlace
from harness.clusters.agent_link import AgentLink, ConnectFailure
from harness.clusters.agent_processes import AgentProcess, AgentProcesses
from harness.clusters.agent_shim import UNDO_INSIDE, AgentShim
from harness.clusters.base import Program
from harness.clusters.host_agent import CONTROL_FILE
from harness.clusters.host_names import why_no_names
from harness.clusters.own_resources import GROUP_KINDS, OwnResources
from harness.clusters.threads import all_of, in_thread
from harness.errors import HarnessError, OperatorError
from harness.run_state import KIND_DIRECTORY, TEMP_PREFIX, RunState
from nemesis.mechanisms.launcher_archive import launcher_archive
from nemesis.mechanisms.shim import library_directory, place_library, why_no_shim
from nemesis.mechanisms.shim_controls import ShimPlace
from nemesis.target import Resources

__all__ = ["LocalAgents", "OwnMachineCluster", "SocketStream", "import_path", "short_socket_path"]

_END_TIMEOUT_S = 15.0
"""Time for all agents to end once they are asked to; one that waits for a disk in the kernel may never end."""

_BACKLOG = 4
"""Listen backlog of one agent: the harness has one connection at a time."""


@contextlib.contextmanager
def short_socket_path(directory: str, name: str) -> Iterator[str]:
    """A path for a socket that fits into an address (107 bytes), however deep the directory is. Raises OSError."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


_START = """
import sys
sys.path.append(sys.argv.pop(1))
from harness.clusters.host_agent import main
sys.exit(main(sys.argv[1:]))
"""


class SocketStream:
    """A connection over a socket. See harness.clusters.agent_link.ByteStream."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def receive(self) -> bytes:
        """The next bytes; empty at the end. Raises OSError."""
        return self._connection.recv(1 << 16)

    def send(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError."""
        self._connection.sendall(data)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class LocalAgents:
    """The agents of one run's hosts on this machine; each has a directory of its own in `directory`."""

    def __init__(self, hosts: Sequence[str], *, run: RunState, directory: str, log_path: str) -> None:
        self._hosts = tuple(hosts)
        self._run = run
        self._directory = directory
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None

    def directory(self, host: str) -> str:
        """The directory of a host's agent."""
        return os.path.join(self._directory, host)

    def start(self) -> None:
        """Start the process that forks the agents; they accept connections at once.

        The process dies with the thread that starts it, so call this on a lasting thread: the main thread's loop.
        Raises OperatorError when it cannot be run, OSError.
        """
        listeners = {host: self._listener(host) for host in self._hosts}
        words = [word for host in self._hosts for word in (str(listeners[host].fileno()), self.directory(host))]
        try:
            with open(self._log_path, "ab") as log:
                process = subprocess.Popen(
                    # Imported, not run as a file, which would be compiled each time.
                    [sys.executable, "-I", "-S", "-c", _START, import_path(), "fork", self._run.run_id, *words],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self._run.environment},
                    pass_fds=[listener.fileno() for listener in listeners.values()],
                    start_new_session=True,
                    preexec_fn=host_agent.death_signal_setter(signal.SIGTERM),
                )
        except OSError as error:
            raise OperatorError(f"cannot start the hosts' agents: {error.filename or ''}: {error.strerror}") from None
        finally:
            for listener in listeners.values():
                listener.close()
        self._process = process
        self._run.claim_process(process.pid)

    def _listener(self, host: str) -> socket.socket:
        os.makedirs(self.directory(host), exist_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        try:
            with short_socket_path(self.directory(host), host_agent.SOCKET) as path:
                listener.bind(path)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener

    def connect(self, host: str) -> SocketStream:
        """A connection to a host's agent; blocks. Raises ConnectFailure."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            with short_socket_path(self.directory(host), host_agent.SOCKET) as path:
                connection.connect(path)
        except OSError as error:
            connection.close()
            # The socket listens as long as its agent lives, so this one is gone.
            raise ConnectFailure(f"{error.strerror}; see {self._log_path}", gone=True) from None
        return SocketStream(connection)

    async def stop(self) -> None:
        """End the agents and wait for them: their mounts are gone on return. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            await in_thread(process.wait, _END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await in_thread(process.wait)
        self._run.release_process(process.pid)
        with contextlib.suppress(OSError):
            if os.path.getsize(self._log_path) == 0:
                os.unlink(self._log_path)


def import_path() -> str:
    """Where an interpreter of this machine finds the harness's modules."""
    return str(Path(host_agent.__file__).resolve().parents[2])


def _require_text(path: str) -> None:
    """Raise OperatorError for a path that is not UTF-8, since it is written into the programs' configuration."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise OperatorError(
            f"the path {path} is not valid UTF-8, so it cannot be written into the programs' configuration files: "
            "choose another place with --store DIR"
        ) from None


class OwnMachineCluster(AgentCluster):
    """Hosts that share the harness's files and process ids. Data and logs of each are under `work_dir/<host>`, where
    its programs write them; the agents' files are in a temporary directory, which is removed with the run."""

    logs_are_live = True
    """Programs log directly into files on the harness's machine."""

    def __init__(self, **given: Unpack[ClusterArguments]) -> None:
        super().__init__(**given)
        _require_text(self._work_dir)
        self._agents: LocalAgents | None = None
        self._temp_dirs: list[str] = []
        """Directories that are removed at the end of the run, unlike the hosts' data and logs."""
        self._library_path = ""
        self._resources: OwnResources | None = None

    @classmethod
    def missing(cls, interface: str, ability: str) -> str | None:
        """Why this cluster cannot have an ability (see nemesis.target.ABILITIES) here; None when it can."""
        if interface == "resources":
            return cls._why_no_limit(ability)
        if interface == "names":
            return why_no_names()
        problem = super().missing(interface, ability)
        return why_no_shim() if problem is None and interface in ("clocks", "disks") else problem

    @classmethod
    def _why_no_limit(cls, kind: str) -> str | None:
        """Why this kind of resource cannot be limited here; None when it can."""
        if kind in GROUP_KINDS:
            return f"hosts of the {cls.name} cluster have no control groups: use --cluster netns as root"
        return None

    @property
    def resources(self) -> Resources | None:
        """Resource limits of the hosts' programs; None unless `prepare` was asked for them."""
        return self._resources

    def _helpers_path(self) -> str | None:
        return import_path()

    def _limit_groups(self) -> Mapping[str, Mapping[str, str]]:
        """The control groups of each host's programs, by controller."""
        return {}

    async def _prepare_faults(self) -> None:
        await super()._prepare_faults()
        if any(interface == "resources" for interface, _ in self._capabilities):
            self._resources = OwnResources(self._limit_groups(), members=self._members_of, address=self.bind_address)

    async def spawn(self, host: str, program: Program) -> AgentProcess:
        """Start a program on a host; returns once it has started. Raises OperatorError when it cannot be run."""
        process = await super().spawn(host, program)
        if self._resources is not None:
            self._resources.adopt(host, process.host_pid)
        return process

    async def stop(self) -> None:
        """Lift every limit and take the cluster down. Idempotent. Raises HarnessError."""
        held, self._resources = self._resources, None
        try:
            if held is not None:
                await held.release_all()
        finally:
            await super().stop()

    def _start_agents(self) -> None:
        """Make the hosts' directories and start their agents. Raises OperatorError, OSError."""
        for host in self._all_hosts:
            os.makedirs(self.data_dir(host), exist_ok=True)
        directory = self._run.make_temp_dir("agents")
        os.chmod(directory, 0o711)  # it contains the control file of a replica that may run as another user
        self._temp_dirs.append(directory)
        log_path = os.path.join(self._work_dir, "agents.log")
        self._agents = LocalAgents(self._machines, run=self._run, directory=directory, log_path=log_path)
        self._agents.start()

    async def _check_machines(self) -> None:
        await all_of(link.greet() for link in self._links.values())

    def _connect(self, machine: str) -> SocketStream:
        if self._agents is None:
            raise ConnectFailure("the agents were not started", gone=True)
        return self._agents.connect(machine)

    def _new_processes(self) -> AgentProcesses:
        def log_path(host: str, name: str) -> str:
            return os.path.join(self._log_dir(host), name)

        return AgentProcesses(log_path=log_path, remote_log_path=log_path, are_here=True)

    async def _collect(self) -> list[Exception]:
        return []

    def _note_left(self, machine: str, pid: int) -> None:
        self._run.claim_process(pid)  # for `harness clean`

    async def _remove_hosts(self) -> list[Exception]:
        agents, self._agents = self._agents, None
        if agents is not None:
            await agents.stop()
        problems = await self._remove_places()
        for path in reversed(self._temp_dirs.copy()):
            shutil.rmtree(path, ignore_errors=True)
            if os.path.lexists(path):  # it stays in the run's state
                problems.append(HarnessError(f"{path} cannot be removed: something is mounted or still written there"))
                continue
            self._temp_dirs.remove(path)
            self._run.release(KIND_DIRECTORY, path)
        return problems

    @abstractmethod
    async def _remove_places(self) -> list[Exception]:
        """Remove the hosts' namespaces, images or addresses, now that nothing runs there; returns what went wrong.
        Idempotent."""

    def _log_dir(self, host: str) -> str:
        return os.path.join(self._work_dir, host)

    def data_dir(self, host: str) -> str:
        """`work_dir/<host>/data`, the same path for the host's programs and for the harness. Raises KeyError."""
        if host not in self._all_hosts:
            raise KeyError(host)
        return os.path.join(self._work_dir, host, "data")

    def local_path(self, host: str, path: str) -> str:
        """The same path: hosts and harness share one file system."""
        return path

    def _file_system_place(self, host: str) -> FileSystemPlace:
        directory = os.path.realpath(self._log_dir(host))
        return FileSystemPlace(os.path.join(directory, "disk.img"), os.path.join(directory, "data"))

    def _shim_place(self, host: str, *, undo_inside: bool) -> ShimPlace:
        directory = os.path.join(self.agent(host).directory, host)
        os.makedirs(directory, exist_ok=True)
        undo_path = os.path.join(self.data_dir(host), UNDO_INSIDE)
        if self._tracks_writes and not undo_inside:  # it must be on the file system of the data
            undo_path = os.path.join(self._log_dir(host), f"{TEMP_PREFIX}{self._run.run_id}-undo")
            self._claim_directory(undo_path)
        return ShimPlace(
            library_path=self._library_path,
            launcher_path=os.path.join(os.path.dirname(self._library_path), "launcher.pyz"),
            control_path=os.path.join(directory, CONTROL_FILE),
            data_path=os.path.realpath(self.data_dir(host)),
            undo_path=undo_path if self._tracks_writes else None,
            preloaded=os.environ.get("LD_PRELOAD"),
        )

    async def _undo_at_clean(self, key: str, argv: Sequence[str], stdin: str) -> None:
        """Nothing to do: only what the run's state names outlives the agents."""

    async def _make_shim(
        self, access: AgentAccess, agents: Mapping[str, AgentLink], *, undo_inside: bool, have_library: bool = False
    ) -> AgentShim:
        """Place one library for all hosts, at a path that LD_PRELOAD can name even if it cannot name the store's."""
        directory = os.path.join(library_directory(), f"{TEMP_PREFIX}{self._run.run_id}-shim")
        self._claim_directory(directory)
        self._library_path = await in_thread(place_library, directory)
        Path(directory, "launcher.pyz").write_bytes(launcher_archive())
        return await super()._make_shim(access, agents, undo_inside=undo_inside, have_library=True)

    def _claim_directory(self, path: str) -> None:
        self._run.claim(KIND_DIRECTORY, path)
        self._temp_dirs.append(path)
