"""The `sim` cluster: harness.clusters.base.Cluster on simulated hosts.

Programs are the node's own classes, started from the same command lines and configuration files as on any other
cluster. The harness itself runs outside the hosts; its clients' connections start at the host `clients`. A host's
files are on its simulated disk; when the cluster stops, logs and the files that were asked for are written to the
run's directory, where checks and reports find them as for any other cluster.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from harness.clusters.base import CLIENTS_HOST, Program
from harness.clusters.sim.errors import SimulationError
from harness.clusters.sim.faults import DISK_ABILITIES, SimClocks, SimDisks, SimLinks
from harness.clusters.sim.host import Incarnation, SimHost
from harness.clusters.sim.invariants import Invariants
from harness.clusters.sim.loop import SimLoop
from harness.clusters.sim.network import SimNetwork
from harness.clusters.sim.programs import program_of
from harness.clusters.sim.simulation import run_simulated
from harness.clusters.sim.trace import TraceWriter
from harness.clusters.sim.triggers import SimTriggers
from harness.clusters.sim.watch import ReplicaWatch
from harness.run_state import RunState
from harness.seeded import Streams
from harness.systems.base import CheckOutcome
from nemesis.target import ABILITIES, DOWN, PAUSED, RUNNING
from nemesis.triggers import KINDS
from node.dledger.rpc import Role
from node.runtime import Runtime

__all__ = ["MAX_HOSTS", "SimCluster", "SimProcess"]

MAX_HOSTS = 200
"""Largest number of replicas that fits the addresses of one network."""

_SUBNET = "10.77.0"

_T = TypeVar("_T")


class SimProcess:
    """A program on a simulated host. See harness.clusters.base.HostProcess."""

    pid = host_pid = None
    """Simulated processes have no process ids."""

    def __init__(self, process: Incarnation) -> None:
        self._process = process

    @property
    def host(self) -> str:
        return self._process.host.name

    def exit_status(self) -> int | None:
        """None while it runs; otherwise its status, negative for a signal."""
        return self._process.exit_status()

    async def terminate(self, *, grace_s: float = 10.0) -> int:
        """SIGTERM, then SIGKILL after `grace_s` virtual seconds; returns the exit status."""
        if self._is_current():
            self._process.host.terminate()
        try:
            return await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            await self.kill()
            return await self._process.wait()

    async def kill(self) -> None:
        """SIGKILL."""
        self._process.end(-signal.SIGKILL)

    async def pause(self) -> None:
        """SIGSTOP."""
        self._process.pause()

    async def resume(self) -> None:
        """SIGCONT."""
        self._process.resume()

    async def state(self) -> str:
        """RUNNING, PAUSED or DOWN."""
        return DOWN if self._process.is_dead else PAUSED if self._process.is_paused else RUNNING

    def _is_current(self) -> bool:
        return self._process.host.process is self._process


class SimCluster:
    """Simulated hosts, for one run, on the running SimLoop. See harness.clusters.base.Cluster."""

    name = "sim"
    description = "hosts, network, disks and clocks in one process on virtual time; reproducible by seed"
    trigger_kinds = frozenset(KINDS)
    """Every trigger that a schedule can wait for is available here."""
    hosts: Sequence[str]
    """The replicas' hosts: n1..nN."""
    extra_hosts: Sequence[str]
    """The hosts that the system has besides its replicas'."""
    network: SimNetwork

    def __init__(
        self,
        *,
        node_count: int,
        run: RunState | None,
        work_dir: str,
        ports: Collection[int],
        extra_hosts: Sequence[str] = (),
    ) -> None:
        if not 1 <= node_count <= MAX_HOSTS:
            raise ValueError(f"a sim cluster has 1 to {MAX_HOSTS} replicas, not {node_count}")
        loop = asyncio.get_running_loop()
        if not isinstance(loop, SimLoop):
            raise SimulationError("a sim cluster runs on a simulated loop: start it through SimCluster.run_harness")
        self._loop = loop
        self.hosts = tuple(f"n{number}" for number in range(1, node_count + 1))
        self._addresses = {host: f"{_SUBNET}.{number}" for number, host in enumerate(self.hosts, 1)}
        self.extra_hosts = tuple(extra_hosts)
        for number, host in enumerate((*extra_hosts, CLIENTS_HOST), MAX_HOSTS + 1):
            self._addresses[host] = f"{_SUBNET}.{number}"
        self._work_dir = os.path.abspath(work_dir)
        self._ports = frozenset(ports)
        self.network = SimNetwork(loop)
        self._machines: dict[str, SimHost] = {}
        self._log_names: dict[str, str] = {}
        self._is_stopped = False
        self._asked_for: dict[tuple[str, str], None] = {}
        """(host, path) of files to be written to the run's directory once the cluster has stopped."""
        self._trace: TraceWriter | None = None
        self._unwritten: OSError | None = None
        """The first error in writing the hosts' logs."""
        for host, address in self._addresses.items():
            machine = self._machines[host] = SimHost(loop, self.network, host, address)
            machine.disk.make_dirs(self.data_dir(host))
            machine.on_end = self._write_log
        loop.root.address = self._addresses[CLIENTS_HOST]
        replicas = {host: self._machines[host] for host in self.hosts}
        self.clocks = SimClocks(replicas)
        self.disks = SimDisks(loop, replicas, {host: self.data_dir(host) for host in self.hosts})
        self.links = SimLinks(loop, self.network)
        watch = self.watch = ReplicaWatch()
        """Reports everything that replicas do."""
        for machine in replicas.values():
            machine.watch = watch
        self._roles: dict[str, tuple[int, Role]] = {}
        watch.tell.role.append(self._role_changed)
        watch.tell.starting.append(self._starting)
        self.triggers = SimTriggers(watch, now_s=loop.time)
        self.invariants = Invariants(watch, now_s=loop.time, is_running=self._runs)

    @staticmethod
    def run_harness(main: Coroutine[Any, Any, _T], *, seed: int) -> _T:
        """Run the coroutine that makes and uses such a cluster. See run_simulated."""
        return run_simulated(main, seed=seed)

    @classmethod
    def missing(cls, interface: str, ability: str) -> str | None:
        """Why such a cluster lacks an ability; None when it has it. Raises KeyError for an unknown ability."""
        if ability not in ABILITIES[interface]:
            raise KeyError(ability)
        if interface == "resources":
            return f"simulated hosts cannot limit {ability}: use --cluster netns"
        if interface == "clients":
            return "simulated connections have no kernel send queues: use --cluster netns or local"
        if interface == "names":
            return "simulated hosts have addresses but no names: use --cluster netns, or local as root"
        if (interface, ability) == ("links", "corrupt"):
            return "the simulated network drops corrupted data: use --nemesis link=loss, which has the same effect"
        if interface == "disks" and ability not in DISK_ABILITIES:
            return "simulated hosts have disks but no file systems of their own: use --cluster netns"
        return None

    def prepare(self, capabilities: Collection[tuple[str, str]]) -> None:
        """Nothing to prepare: faults of every kind are available from the beginning."""

    def runtime(self) -> Runtime:
        """Clock, disk and randomness of the host `clients`, where the harness's own clients are."""
        return self._machines[CLIENTS_HOST].runtime_for(self._loop.root)

    @property
    def streams(self) -> Streams:
        """The random streams of the simulation."""
        return self._loop.streams

    def trace_to(self, path: str, zero_s: Callable[[], float | None]) -> None:
        """Write the network's trace, and the growth of the replicas' logs, to a file until the cluster stops; for
        `zero_s` see TraceWriter. Raises OSError."""
        self._trace = trace = TraceWriter(path, zero_s)
        self.network.trace = trace.note
        self.watch.watch_logs(
            lambda host, store: trace.note_log(self._loop.time(), host, store.committed_index, store.ledger_end_index)
        )

    def machine(self, host: str) -> SimHost:
        """A simulated host, for tests and faults that go beyond the interfaces."""
        return self._machines[host]

    async def start(self) -> None:
        """Start checking invariants; the hosts exist from the beginning."""
        self.invariants.start()

    def checks(self, *, zero_s: float) -> Mapping[str, CheckOutcome]:
        """What the cluster itself has seen of its replicas; see SeesReplicas. Empty if none ran DLedger."""
        return {"invariants": self.invariants.outcome(zero_s)} if self.invariants.has_members else {}

    def leading(self) -> Sequence[str] | None:
        """Hosts whose replica leads now; see SeesReplicas."""
        if not self._roles:
            return None
        leading = [(term, host) for host, (term, role) in self._roles.items() if role is Role.LEADER]
        return [host for _, host in sorted(leading, reverse=True) if self._runs(host)]

    def _role_changed(self, host: str, term: int, role: Role) -> None:
        self._roles[host] = term, role

    def _starting(self, host: str) -> None:
        self._roles.pop(host, None)

    def _runs(self, host: str) -> bool:
        process = self._machines[host].process
        return process is not None and process.is_running

    async def stop(self) -> None:
        """End every process; write the hosts' logs, and the files that were asked for, to the run's directory.
        Idempotent. Raises OSError if one of them could not be written."""
        self.invariants.stop()
        await self.network.heal_all()
        for machine in self._machines.values():
            machine.kill()
        self._is_stopped = True
        for host, path in self._asked_for:
            self._write_files(host, path)
        for machine in self._machines.values():
            for path, lines in machine.line_files.items():
                _write(self._work_dir + path, "".join(f"{line}\n" for line in lines).encode())
        if self._trace is not None:
            self.network.trace = None
            self._trace.close()
        if self._unwritten is not None:
            raise self._unwritten

    def bind_address(self, host: str) -> str:
        """The address of a host, the same for every host in the run."""
        return self._addresses[host]

    def address_from(self, source: str, destination: str, port: int) -> str:
        """The "ip:port" of `port` on `destination`. Raises ValueError for a port that was not announced."""
        if port not in self._ports:
            raise ValueError(f"port {port} is not one of this cluster's ports: {sorted(self._ports)}")
        return f"{self._addresses[destination]}:{port}"

    def data_dir(self, host: str) -> str:
        """`/<host>/data` on the host's simulated disk."""
        if host not in self._addresses:
            raise KeyError(host)
        return f"/{host}/data"

    def local_path(self, host: str, path: str) -> str:
        """Where a file or directory of a host is once the cluster has stopped: the same path below the run's directory.
        Only paths that were asked for by this method are written there."""
        self._asked_for[host, path] = None
        if self._is_stopped:
            self._write_files(host, path)
        return self._work_dir + path

    def log_path(self, host: str, name: str) -> str:
        """Where a host keeps a log, as a path on that host; the same below the run's directory once the cluster has
        stopped."""
        return f"/{host}/{name}"

    def leave_files(self) -> None:
        """Write every file of the replicas' disks to the run's directory. Raises OSError."""
        for host in self.hosts:
            self._write_files(host, "/")

    def _write_files(self, host: str, root: str) -> None:
        disk = self._machines[host].disk
        inside = root.rstrip("/") + "/"
        paths = [path for path in disk.paths() if path == root or path.startswith(inside)]
        for directory in sorted({os.path.dirname(path) for path in paths}):
            os.makedirs(self._work_dir + directory, exist_ok=True)
        for path in paths:
            with open(self._work_dir + path, "wb") as file:
                file.write(disk.inode(path).cache)

    async def put_file(self, host: str, path: str, content: bytes) -> None:
        """Write a file on a host, durably, creating parent directories."""
        self._machines[host].disk.put(path, content)

    async def spawn(self, host: str, program: Program) -> SimProcess:
        """Start a program. Raises NotSimulated when it is not the node."""
        self._log_names[host] = program.log_name
        return SimProcess(self._machines[host].start(program_of(program.argv)))

    def _write_log(self, process: Incarnation) -> None:
        """Write a host's log. Errors are kept for `stop`: a full disk here must not affect the simulated programs."""
        host = process.host
        try:
            _write(os.path.join(self._work_dir, host.name, self._log_names[host.name]), host.log.text().encode())
        except OSError as error:
            self._unwritten = self._unwritten or error


def _write(path: str, content: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)
