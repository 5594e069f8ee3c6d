"""What clusters whose hosts have agents share: everything but how a host is made and reached.

A subclass makes its hosts, says how a connection to an agent is made, and removes them; programs, files, cuts,
faults and probes are done here through the agents (see host_agent, agent_link, agent_shim, agent_links).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.clusters.agent_access import AgentAccess
from harness.clusters.agent_clocks import AgentClocks
from harness.clusters.agent_file_systems import AgentFileSystems
from harness.clusters.agent_files import fetch_directory, put_file
from harness.clusters.agent_link import DEFAULT_TIMEOUT_S, FIRST_WORD_TIMEOUT_S, AgentLink, ByteStream
from harness.clusters.agent_links import AgentLinks
from harness.clusters.agent_probe import AgentProbe
from harness.clusters.agent_processes import AgentProcess, AgentProcesses
from harness.clusters.agent_shim import AgentShim, agent_shim_missing
from harness.clusters.base import NAME_SERVER_HOST, ClusterUnavailable, Program
from harness.clusters.packet_network import PacketNetwork
from harness.clusters.shaped_links import NETEM, RELAY
from harness.clusters.threads import all_of
from harness.errors import HarnessError, OperatorError
from harness.faults.equipment import Equipped
from harness.faults.file_system_disks import FILE_SYSTEM_KINDS, FileSystemDisks
from harness.host_files import PROVISION, host_file
from harness.run_state import RunState
from nemesis.mechanisms.hosts import CheckedShell
from nemesis.mechanisms.nft import NftCuts, remove_script
from nemesis.mechanisms.shell import ShellError
from nemesis.mechanisms.shim import ShimError

__all__ = ["NEEDED_PROGRAMS", "AgentCluster"]

logger = logging.getLogger(__name__)

NEEDED_PROGRAMS: Mapping[str, str] = {"nft": "nftables", "ip": "iproute2"}
"""Programs that every host must have, and the Debian package that brings each."""

_MIN_PYTHON = (3, 11)

_REACH_TIMEOUT_S = 5.0


class AgentCluster(Equipped[AgentShim], ABC):
    """Hosts with agents, for one run. See harness.clusters.base.Cluster.

    Data and logs of each host are fetched to `work_dir/<host>` when the cluster is stopped (`fetch` does it earlier).
    The clients are the harness itself, wherever it is in the network.
    """

    name: str
    file_systems_missing: str | None = None
    """Why such hosts cannot have a file system of the run's own; None when they can, as far as can be told."""

    def __init__(self, *, node_count: int, run: RunState, work_dir: str, ports: Collection[int]) -> None:
        self._hosts = tuple(f"n{number}" for number in range(1, node_count + 1))
        self._run = run
        self._work_dir = os.path.abspath(work_dir)
        self._ports = frozenset(ports)
        self._links: dict[str, AgentLink] = {}
        self._interpreters: dict[str, str] = {}
        self._processes = AgentProcesses(
            log_path=lambda host, name: os.path.join(self._work_dir, host, name),
            remote_log_path=lambda host, name: os.path.join(self._host_dir(host), "logs", name),
        )
        self._probe: AgentProbe | None = None
        self._network: PacketNetwork | None = None
        self._directories: dict[str, str] = {}
        self._link_faults: AgentLinks | None = None

    # What a subclass brings

    @abstractmethod
    async def _make_hosts(self) -> None:
        """Bring up hosts and agents, claimed before they are made. Raises ClusterUnavailable or OperatorError."""

    @abstractmethod
    async def _remove_hosts(self) -> list[Exception]:
        """Remove what `_make_hosts` made and release it; returns what went wrong. Idempotent."""

    @abstractmethod
    def _connect(self, machine: str) -> ByteStream:
        """A connection to the agent of a machine; called in a thread. Raises ConnectFailure."""

    @abstractmethod
    def _machine(self, host: str) -> str:
        """The machine that a host is on: itself, but for a name server that shares one."""

    @abstractmethod
    def _agent_dir(self, machine: str) -> str:
        """The directory of the agent on a machine."""

    @abstractmethod
    def _address(self, host: str) -> str:
        """The IPv4 address of a host among the hosts."""

    @abstractmethod
    def _unreachable_hint(self) -> str:
        """What the operator can do when the clients cannot reach a host's address."""

    def _may_set_clock(self, host: str) -> bool:
        """Whether a host is a machine with a clock of its own that is there to be bent."""
        return False

    async def _learn_addresses(self) -> None:
        """Find out what `_address` says where that takes asking the hosts. Raises ClusterUnavailable."""
        return

    # What it can do

    @classmethod
    def missing(cls, interface: str, ability: str) -> str | None:
        """Why this cluster cannot have an ability (see nemesis.target.ABILITIES) here; None when it can, as far as can
        be told without its hosts: what one of them lacks is named when the cluster is started."""
        if interface == "disks" and ability in FILE_SYSTEM_KINDS:
            return cls.file_systems_missing
        return agent_shim_missing() if interface in ("clocks", "disks") else None

    @staticmethod
    def link_mechanism() -> str:
        """What shapes links on such hosts, for `harness doctor`."""
        return f"{NETEM} where every host's kernel has it, else {RELAY}"

    @property
    def links(self) -> AgentLinks | None:
        """The quality of the links between replicas' hosts; None unless `equip` was told of them."""
        return self._link_faults

    # Life

    @property
    def hosts(self) -> Sequence[str]:
        """The replicas' hosts: n1..nN."""
        return self._hosts

    @property
    def network(self) -> PacketNetwork:
        """The network between the hosts; there is one from `start` on."""
        if self._network is None:
            raise RuntimeError("the cluster has no network: it was not started")
        return self._network

    @property
    def shell(self) -> CheckedShell:
        """Commands as root on the hosts, for mechanisms."""
        return CheckedShell(AgentAccess(self.agent, self.python))

    @property
    def _machine_shell(self) -> CheckedShell:
        """The same, by the machines' names."""
        return CheckedShell(AgentAccess(self._links.__getitem__, self._interpreters.__getitem__))

    @property
    def _machines(self) -> list[str]:
        """Every machine once, the replicas' first."""
        return list(dict.fromkeys(self._machine(host) for host in (*self._hosts, NAME_SERVER_HOST)))

    async def start(self) -> None:
        """Bring up the hosts, see that they have what faults need, and put the rules in place.

        Raises ClusterUnavailable; what was made by then is removed.
        """
        try:
            await self._make_hosts()
            for machine in self._machines:
                link = AgentLink(machine, functools.partial(self._connect, machine), self._listener(machine))
                self._links[machine] = link
                link.open(session=f"{self._run.run_id}-{os.getpid()}")
            await all_of(self._check_machine(machine) for machine in self._machines)
            await self._learn_addresses()
            await all_of(self._check_reachable(machine) for machine in self._machines)
            await self._prepare_network()
            await self._prepare_faults()
        except (ShellError, ShimError) as error:
            await self._stop_after_failure()
            raise ClusterUnavailable(f"{self.name}: {error}") from None
        except BaseException:
            await self._stop_after_failure()
            raise

    async def _stop_after_failure(self) -> None:
        try:
            await self.stop()
        except Exception as error:
            logger.warning("after a start that failed: %s", error)

    async def _check_machine(self, machine: str) -> None:
        link = self._links[machine]
        hello = await link.request("hello", timeout_s=FIRST_WORD_TIMEOUT_S)
        if tuple(hello["python"][:2]) < _MIN_PYTHON:
            version = ".".join(map(str, hello["python"]))
            raise ClusterUnavailable(f"{machine} has Python {version}: 3.11 or newer is needed")
        self._interpreters[machine] = str(hello["interpreter"])
        self._directories[machine] = str(hello["directory"])
        tests = "; ".join(f"command -v {shlex.quote(name)} >/dev/null || echo {name}" for name in NEEDED_PROGRAMS)
        _, missing, _ = await link.run(["sh", "-c", tests])
        packages = [NEEDED_PROGRAMS[name] for name in missing.split()]
        if packages:
            names = " ".join(packages)
            raise ClusterUnavailable(
                f"{machine} lacks {names}: run {host_file(PROVISION)} there (apt-get install {names})"
            )
        paths = [
            os.path.join(self._host_dir(host), name)
            for host in (*self._hosts, NAME_SERVER_HOST)
            if self._machine(host) == machine
            for name in ("data", "logs")
        ]
        await self._machine_shell.run(machine, ["mkdir", "-p", *paths])

    async def _check_reachable(self, machine: str) -> None:
        """The clients are here: a host must answer here on a port of the run, be it with a refusal."""
        if not self._ports:
            return
        address, port = self._address(machine), min(self._ports)
        try:
            async with asyncio.timeout(_REACH_TIMEOUT_S):
                _, writer = await asyncio.open_connection(address, port)
        except ConnectionRefusedError:
            return
        except (OSError, TimeoutError):
            hint = self._unreachable_hint()
            raise ClusterUnavailable(f"{machine} does not answer at {address}:{port} from here: {hint}") from None
        writer.close()
        raise ClusterUnavailable(f"port {port} of {machine} ({address}) is in use: end the program that listens there")

    async def _prepare_network(self) -> None:
        addresses = {machine: self._address(machine) for machine in self._machines}
        cuts = NftCuts(self._machine_shell, addresses)
        undo = {"key": "nftables table", "argv": ["nft", "-f", "-"], "stdin": remove_script()}
        await all_of(link.request("undo", undo) for link in self._links.values())
        try:
            await cuts.install()
        except ShellError as error:
            raise ClusterUnavailable(f"{self.name}: no nftables rules can be made: {error}") from None
        self._probe = AgentProbe(self._links, addresses)
        await self._probe.open()
        self._network = PacketNetwork(cuts, self._probe)

    async def _prepare_faults(self) -> None:
        """What the nemeses of this run need on the replicas' hosts. Raises ClusterUnavailable, ShellError."""
        agents = {host: self.agent(host) for host in self._hosts}
        pythons = {host: self.python(host) for host in self._hosts}
        directories = {host: self._directories[self._machine(host)] for host in self._hosts}
        host_directories = {host: os.path.join(directory, host) for host, directory in directories.items()}
        access = AgentAccess(self.agent, self.python)
        file_systems: AgentFileSystems | None = None
        if any(need == ("disks", kind) for kind in FILE_SYSTEM_KINDS for need in self._needs):
            file_systems = AgentFileSystems(
                agents,
                host_directories,
                pythons,
                end_programs=self._end_programs,
                run_id=self._run.run_id,
                state=self._run.path,
            )
            await file_systems.create()
        if AgentShim.wanted(need for need in self._needs if need[1] not in FILE_SYSTEM_KINDS):
            self._shim = AgentShim(
                access,
                agents,
                host_directories,
                tracks_writes=("disks", "power") in self._needs,
                undo_inside=file_systems is not None,
            )
            await self._shim.install()
        owners = [host for host in self._hosts if self._may_set_clock(host)]
        if owners and self._shim is not None and ("clocks", "wall") in self._needs:
            self._real_clocks = await AgentClocks.prepared(
                {host: agents[host] for host in owners},
                directories=directories,
                pythons=pythons,
                shim=self._shim.clocks,
            )
        if file_systems is not None:
            shim_disks = None if self._shim is None else self._shim.disks
            self._disks = FileSystemDisks(self._hosts, file_systems=file_systems, shim=shim_disks, access=access)
        if any(interface == "links" for interface, _ in self._needs):
            addresses = {host: self._address(host) for host in self._hosts}
            self._link_faults = await AgentLinks.prepared(
                agents,
                addresses,
                shell=self.shell,
                directories=directories,
                pythons=pythons,
                seed=self._run.run_id,
            )

    def _listener(self, machine: str) -> Any:
        def take(event: dict[str, Any]) -> None:
            if event["event"] == "datagram":
                if self._probe is not None:
                    self._probe.take_event(machine, event)
            else:
                self._processes.take_event(machine, self._links[machine], event)

        return take

    async def stop(self) -> None:
        """End every program, fetch data and logs, remove rules and hosts. Idempotent; safe after half a start.

        Raises HarnessError when something could not be fetched or removed, after everything was tried; what is
        not removed stays in the run's state.
        """
        problems: list[Exception] = []
        clocks, self._real_clocks = self._real_clocks, None
        disks, self._disks = self._disks, None
        shim, self._shim = self._shim, None
        for held in (clocks, disks, shim):
            try:
                if held is not None:
                    await held.release_all()
            except (ShellError, RuntimeError, TimeoutError) as error:
                problems.append(error)
        self._link_faults = None  # relays, queues and rules go with the hosts
        if self._network is not None:
            problems += await self._processes.stop_all()
            problems += await self.fetch()
            self._network = None
        links, self._links = self._links, {}
        closed = await asyncio.gather(*(link.close() for link in links.values()), return_exceptions=True)
        problems += [outcome for outcome in closed if isinstance(outcome, Exception)]
        self._probe = None
        problems += await self._remove_hosts()
        if problems:
            raise HarnessError("; ".join(str(problem) for problem in problems[:3]))

    async def fetch(self) -> list[Exception]:
        """Copy every host's data and logs to `work_dir/<host>`; returns what went wrong."""

        async def fetch_one(host: str) -> None:
            local = os.path.join(self._work_dir, host)
            await fetch_directory(self.agent(host), self.data_dir(host), os.path.join(local, "data"))
            await fetch_directory(self.agent(host), os.path.join(self._host_dir(host), "logs"), local)

        outcomes = await asyncio.gather(
            *(fetch_one(host) for host in (*self._hosts, NAME_SERVER_HOST)), return_exceptions=True
        )
        return [outcome for outcome in outcomes if isinstance(outcome, Exception)]

    # Hosts

    def agent(self, host: str) -> AgentLink:
        """The link to the agent that serves a host. Raises RuntimeError before `start`."""
        link = self._links.get(self._machine(host))
        if link is None:
            raise RuntimeError(f"{host} has no agent: the cluster was not started")
        return link

    async def run(
        self, host: str, argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> tuple[int, str, str]:
        """Run a short command as root on a host: (status, standard output, standard error).

        Status -9: it was killed when its time was up. Raises ShellError when the host cannot be asked.
        """
        return await self.agent(host).run(argv, stdin=stdin or "", timeout_s=timeout_s)

    def python(self, host: str) -> str:
        """The Python interpreter on a host. Known from `start` on."""
        return self._interpreters[self._machine(host)]

    def bind_address(self, host: str) -> str:
        """The address of a host, the same for everyone in the run. Known from `start` on."""
        return self._address(host)

    def address_from(self, source: str, destination: str, port: int) -> str:
        """The "ip:port" of `port` on `destination`: packets go straight there, whatever `source` is.

        Raises ValueError for a port that was not announced when the cluster was made: what works here must
        also work on clusters that have to prepare for it.
        """
        if port not in self._ports:
            raise ValueError(f"port {port} was not announced to the cluster: {sorted(self._ports)}")
        return f"{self._address(destination)}:{port}"

    def _host_dir(self, host: str) -> str:
        return os.path.join(self._agent_dir(self._machine(host)), host)

    def data_dir(self, host: str) -> str:
        """The directory of a host for its data, on that host."""
        return os.path.join(self._host_dir(host), "data")

    def local_path(self, host: str, path: str) -> str:
        """Where a path below a host's data directory is once it was fetched: below `work_dir/<host>/data`.

        Raises ValueError for any other path: it is not fetched.
        """
        relative = os.path.relpath(path, self.data_dir(host))
        if relative.split(os.sep)[0] == os.pardir:
            raise ValueError(f"{path} of {host} is not in its data directory, so it is not fetched")
        return os.path.normpath(os.path.join(self._work_dir, host, "data", relative))

    async def put_file(self, host: str, path: str, content: bytes) -> None:
        """Write a file on a host, creating parent directories. Raises OperatorError."""
        try:
            await put_file(self.agent(host), path, content)
        except ShellError as error:
            raise OperatorError(f"cannot write a file on {host}: {error}") from None

    async def _end_programs(self, host: str) -> None:
        await asyncio.gather(*(process.kill() for process in self._processes.running if process.host == host))

    async def spawn(self, host: str, program: Program) -> AgentProcess:
        """Start a program on a host; returns once it is started. Raises OperatorError when it cannot be run."""
        if self._shim is not None:
            added = self._shim.environment(host)
            program = replace(program, environment={**program.environment, **added})
        return await self._processes.spawn(host, self._machine(host), self.agent(host), program)
