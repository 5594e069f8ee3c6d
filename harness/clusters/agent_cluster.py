"""The base of every cluster with real hosts: everything except how hosts are created and reached.

Each host is reached through an agent that runs on it. A subclass creates its hosts, connects to their agents and
removes the hosts; programs, files, cuts, faults and probes are handled here through the agents (see host_agent,
agent_link, agent_shim, agent_links).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NotRequired, TypedDict, Unpack

from harness.clusters.abilities import SendQueue
from harness.clusters.agent_access import AgentAccess, get_file, put_file
from harness.clusters.agent_clocks import AgentClocks
from harness.clusters.agent_file_systems import AgentFileSystems, FileSystemPlace
from harness.clusters.agent_link import DEFAULT_TIMEOUT_S, AgentLink, ByteStream
from harness.clusters.agent_links import AgentLinks
from harness.clusters.agent_network import AgentNetwork
from harness.clusters.agent_processes import AgentProcess, AgentProcesses
from harness.clusters.agent_shim import AgentShim, agent_shim_missing
from harness.clusters.base import ClusterUnavailable, Program
from harness.clusters.host_names import HostNames, NamedHost
from harness.clusters.options import MECHANISM_OPTION
from harness.clusters.shaped_links import NETEM, RELAY
from harness.clusters.threads import all_of
from harness.errors import HarnessError, OperatorError
from harness.faults.file_system_disks import FILE_SYSTEM_KINDS, FileSystemDisks
from harness.run_state import RunState
from nemesis.mechanisms.hosts import CheckedShell
from nemesis.mechanisms.nft import NftCounters, NftCuts, remove_script
from nemesis.mechanisms.reach import AUTO
from nemesis.mechanisms.shell import ShellError
from nemesis.mechanisms.shim import ShimError
from nemesis.mechanisms.shim_controls import ShimPlace
from nemesis.mechanisms.shim_faults import ShimDisks
from nemesis.target import Clocks, Links, Names, Network, ProcessMember

__all__ = ["AgentCluster", "ClusterArguments"]

logger = logging.getLogger(__name__)


_STRAY_LOOKS_S = 0.1
"""Pause between two looks for processes that were left behind: one that is just ending is gone at the second."""


class ClusterArguments(TypedDict):
    """The constructor arguments of every cluster: the number of replicas, the run that owns everything, the directory
    of the hosts' files on the harness's side, the ports that hosts will be reached on, the hosts that the system needs
    besides its replicas', and the mechanism that applies faults to programs (nemesis.mechanisms.reach)."""

    node_count: int
    run: RunState
    work_dir: str
    ports: Collection[int]
    extra_hosts: NotRequired[Sequence[str]]
    mechanism: NotRequired[str | None]


class AgentCluster(ABC):
    """Hosts with agents, for one run. See harness.clusters.base.Cluster.

    Replicas' hosts are n1..nN; `extra_hosts` are the others that the system needs. The files of a host are in
    `work_dir/<host>` once the cluster has stopped. The clients are the harness itself, wherever it is in the network.
    """

    name: str
    file_systems_missing: str | None = None
    """Why such hosts cannot have a file system of the run's own; None when they can, as far as is known."""
    names_missing: str | None = None
    """Why programs on such hosts cannot be given names of the run's own; None when they can, as far as is known."""
    max_hosts: int
    """The largest number of replicas in such a cluster."""
    options: Sequence[str] = (MECHANISM_OPTION,)

    def __init__(self, **given: Unpack[ClusterArguments]) -> None:
        """Raises ValueError for a number of replicas out of bounds."""
        if not 1 <= given["node_count"] <= self.max_hosts:
            raise ValueError(f"a {self.name} cluster has 1 to {self.max_hosts} replicas, not {given['node_count']}")
        self._hosts = tuple(f"n{number}" for number in range(1, given["node_count"] + 1))
        self._extra_hosts = tuple(given.get("extra_hosts", ()))
        self._run = given["run"]
        self._work_dir = os.path.abspath(given["work_dir"])
        self._ports = frozenset(given["ports"])
        self._mechanism = given.get("mechanism") or AUTO
        self._links: dict[str, AgentLink] = {}
        self._processes = self._new_processes()
        self._network: Network | None = None
        self._capabilities: frozenset[tuple[str, str]] = frozenset()
        """The (interface, ability) pairs that the run will use."""
        self._shim: AgentShim | None = None
        """Injects clock and disk faults."""
        self._file_system_disks: FileSystemDisks | None = None
        """Faults of whole file systems, if each host has its own; other disk faults are passed on to the shim."""
        self._real_clocks: Clocks | None = None
        """Skews of hosts' own clocks, if any host has one; other skews are passed on to the shim."""
        self._link_faults: Links | None = None
        self._name_service: HostNames | None = None

    # What a subclass implements

    @abstractmethod
    async def _make_hosts(self) -> None:
        """Bring up hosts and agents; claim them before creating them. Raises ClusterUnavailable or OperatorError."""

    @abstractmethod
    async def _remove_hosts(self) -> list[Exception]:
        """Remove what `_make_hosts` made and release it; returns what went wrong. Idempotent."""

    @abstractmethod
    def _connect(self, machine: str) -> ByteStream:
        """A connection to the agent of a machine; called in a thread. Raises ConnectFailure."""

    @abstractmethod
    async def _check_machines(self) -> None:
        """Check that agents answer and machines have what a run needs. Raises ClusterUnavailable, ShellError."""

    @abstractmethod
    async def _collect(self) -> list[Exception]:
        """Copy the hosts' files to where they outlive the hosts; returns what went wrong."""

    @abstractmethod
    def data_dir(self, host: str) -> str:
        """The data directory of a host, on that host. Raises KeyError for an unknown host."""

    @abstractmethod
    def local_path(self, host: str, path: str) -> str:
        """Where the harness finds `path` of a host."""

    @abstractmethod
    def _log_dir(self, host: str) -> str:
        """The directory of a host for its programs' logs, on that host."""

    @abstractmethod
    def _file_system_place(self, host: str) -> FileSystemPlace:
        """Where to put the image of a host's file system and its mount point, as the host itself resolves the paths."""

    @abstractmethod
    def _shim_place(self, host: str, *, undo_inside: bool) -> ShimPlace:
        """Where the shim's files are on a host; `undo_inside` puts the undo directory inside the data directory."""

    @abstractmethod
    def _address(self, host: str) -> str:
        """The IPv4 address by which the other hosts know a host."""

    async def _ipv6_of_others(self) -> Mapping[str, str]:
        """Machine -> nft match of IPv6 packets that it receives from the others; no entry if there can be none. Raises
        ShellError."""
        return {}

    async def _further_of_others(self) -> Mapping[str, Collection[str]]:
        """Machine -> further IPv4 addresses of the others, besides those of `_address`. Raises ShellError."""
        return {}

    async def _addresses_gained(self) -> Mapping[str, Collection[str]]:
        """Machine -> addresses that it has acquired since its network was prepared. Raises ShellError."""
        return {}

    def _machine(self, host: str) -> str:
        """The machine that a host is on: the host itself, unless several hosts share a machine."""
        return host

    @abstractmethod
    def _named_host(self, host: str) -> NamedHost:
        """Where the name service of a host listens, and what it answers when no fault is in force."""

    def _helpers_path(self) -> str | None:
        """Where a Python on the hosts finds the harness's modules; None if they have to be copied there."""
        return None

    def _may_set_clock(self, host: str) -> bool:
        """Whether a host is a machine with a clock of its own that the run may skew."""
        return False

    def _new_processes(self) -> AgentProcesses:
        return AgentProcesses(
            log_path=lambda host, name: os.path.join(self._work_dir, host, name),
            remote_log_path=lambda host, name: os.path.join(self._log_dir(host), name),
        )

    # What it can do

    @classmethod
    def missing(cls, interface: str, ability: str) -> str | None:
        """Why this cluster cannot have an ability (see nemesis.target.ABILITIES) here; None when it can, as far as is
        known without its hosts: what a host lacks is reported when the cluster is started."""
        if interface == "disks" and ability in FILE_SYSTEM_KINDS:
            return cls.file_systems_missing
        if interface == "resources":
            return f"cluster {cls.name} cannot limit the resources of programs: use --cluster netns as root"
        if interface == "names":
            return cls.names_missing
        return agent_shim_missing() if interface in ("clocks", "disks") else None

    @staticmethod
    def link_mechanism() -> str:
        """The mechanism that shapes links on such hosts, for `harness doctor`."""
        return f"{NETEM} if every host's kernel has it, else by {RELAY}"

    @classmethod
    def mechanism_of(cls, interface: str, ability: str) -> str:
        """The mechanism behind an ability here, in a few words."""
        if interface == "disks" and ability in FILE_SYSTEM_KINDS:
            return "a file system per host"
        names = {
            "network": "nftables on every host",
            "processes": "signals to all programs of a host",
            "links": cls.link_mechanism(),
            "disks": "interception of the program's calls",
            "clocks": "interception of the program's calls",
            "clients": "the harness's own connections",
            "names": "a name service per host",
            "resources": "prlimit on every process" if ability == "descriptors" else "a control group per host",
        }
        return names[interface]

    def prepare(self, capabilities: Collection[tuple[str, str]]) -> None:
        """Be ready for the (interface, ability) pairs that the run will use; to be called before `start`."""
        self._capabilities = frozenset(capabilities)

    @property
    def clocks(self) -> Clocks | None:
        """The clocks of the replicas; None unless `prepare` was asked for them."""
        if self._real_clocks is not None:
            return self._real_clocks
        return None if self._shim is None else self._shim.clocks

    @property
    def disks(self) -> ShimDisks | FileSystemDisks | None:
        """The disks of the replicas; None unless `prepare` was asked for them."""
        if self._file_system_disks is not None:
            return self._file_system_disks
        return None if self._shim is None else self._shim.disks

    @property
    def _tracks_writes(self) -> bool:
        """Whether the shim must keep an account of what is written and not synced."""
        return not self._capabilities.isdisjoint({("disks", "power"), ("disks", "crash")})

    @property
    def links(self) -> Links | None:
        """The quality of the links between replicas' hosts; None unless `prepare` was asked for them."""
        return self._link_faults

    @property
    def names(self) -> Names | None:
        """The name service of the hosts' programs; None unless `prepare` was asked for it."""
        return self._name_service

    def names_of(self, host: str) -> Sequence[str]:
        """The host's own name if programs on the other hosts can look it up."""
        return () if self._name_service is None else (host,)

    # Life cycle

    @property
    def hosts(self) -> Sequence[str]:
        """The replicas' hosts: n1..nN."""
        return self._hosts

    @property
    def extra_hosts(self) -> Sequence[str]:
        """The hosts that the system has besides its replicas'."""
        return self._extra_hosts

    @property
    def _all_hosts(self) -> tuple[str, ...]:
        return (*self._hosts, *self._extra_hosts)

    @property
    def network(self) -> Network:
        """The network between the hosts; there is one from `start` on."""
        if self._network is None:
            raise RuntimeError("the cluster has no network: it was not started")
        return self._network

    @property
    def shell(self) -> CheckedShell:
        """Commands as root on the hosts, for mechanisms."""
        return CheckedShell(AgentAccess(self.agent))

    @property
    def _machines(self) -> list[str]:
        """Every machine with an agent, once; the replicas' come first."""
        return list(dict.fromkeys(self._machine(host) for host in self._all_hosts))

    async def start(self) -> None:
        """Bring up the hosts, check that they have what faults need, and install the nftables rules.

        Raises ClusterUnavailable, after removing what was created by then.
        """
        try:
            await self._make_hosts()
            for machine in self._machines:
                link = AgentLink(machine, functools.partial(self._connect, machine), self._listener(machine))
                self._links[machine] = link
                link.open(session=f"{self._run.run_id}-{os.getpid()}")
            await self._check_machines()
            await self._prepare_network()
            await self._prepare_faults()
        except (ShellError, ShimError, OSError) as error:
            await self._stop_after_failure()
            said = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ClusterUnavailable(f"{self.name}: {said}") from None
        except BaseException:
            await self._stop_after_failure()
            raise

    async def _stop_after_failure(self) -> None:
        try:
            await self.stop()
        except Exception as error:
            logger.warning("cleaning up after a failed start: %s", error)

    async def _prepare_network(self) -> None:
        addresses = {machine: self._address(machine) for machine in self._machines}
        await self._undo_at_clean("nftables tables", ["nft", "-f", "-"], remove_script())
        ipv6 = await self._ipv6_of_others()
        cuts = NftCuts(self.shell, addresses, ipv6)
        counters = NftCounters(self.shell, addresses, ipv6, await self._further_of_others())
        network = AgentNetwork(cuts, counters, self._links, addresses, self._addresses_gained)
        try:
            await network.open()
        except ShellError as error:
            raise ClusterUnavailable(f"{self.name}: cannot create nftables rules: {error}") from None
        self._network = network

    async def _undo_at_clean(self, key: str, argv: Sequence[str], stdin: str) -> None:
        """Register a command that every machine runs when it is cleaned up, with or without the harness."""
        undo = {"key": key, "argv": list(argv), "stdin": stdin}
        await all_of(link.request("undo", undo) for link in self._links.values())

    # Faults

    async def _prepare_faults(self) -> None:
        """Prepare what the nemeses of this run need on the replicas' hosts. Raises ClusterUnavailable, ShellError."""
        agents = {host: self.agent(host) for host in self._hosts}
        access = AgentAccess(self.agent)
        file_systems = await self._make_file_systems(agents)
        by_shim = {need for need in self._capabilities if need[1] not in FILE_SYSTEM_KINDS}
        if any(interface in ("clocks", "disks") for interface, _ in by_shim):
            self._shim = await self._make_shim(access, agents, undo_inside=file_systems is not None)
        if file_systems is not None and any(interface == "disks" for interface, _ in self._capabilities):
            shim_disks = None if self._shim is None else self._shim.disks
            self._file_system_disks = FileSystemDisks(
                self._hosts, file_systems=file_systems, shim=shim_disks, access=access, members=self._pids_of
            )
        await self._prepare_clocks(agents)
        if any(interface == "names" for interface, _ in self._capabilities):
            self._name_service = await HostNames.prepared(
                {host: self._named_host(host) for host in self._all_hosts},
                self._hosts,
                import_path=self._helpers_path(),
                members=self._members_of,
            )
        if any(interface == "links" for interface, _ in self._capabilities):
            await self._prepare_links(agents)

    async def _prepare_links(self, agents: Mapping[str, AgentLink]) -> None:
        made = self._link_faults = await AgentLinks.prepared(
            agents,
            {host: self._address(host) for host in self._hosts},
            shell=self.shell,
            seed=self._run.run_id,
        )
        if isinstance(self._network, AgentNetwork):
            await self._network.leave_out(made.meter_ports)

    async def _make_file_systems(self, agents: Mapping[str, AgentLink]) -> AgentFileSystems | None:
        """Create a file system for each host if the run needs them; None otherwise."""
        if not any(("disks", kind) in self._capabilities for kind in FILE_SYSTEM_KINDS):
            return None
        return await self._create_file_systems(agents, {host: self._file_system_place(host) for host in self._hosts})

    async def _create_file_systems(
        self, agents: Mapping[str, AgentLink], places: Mapping[str, FileSystemPlace]
    ) -> AgentFileSystems:
        made = AgentFileSystems(
            agents,
            places,
            end_programs=self._end_programs,
            tracks_writes=self._tracks_writes,
            run_id=self._run.run_id,
            state=self._run.path,
        )
        await made.create()
        return made

    async def _make_shim(
        self, access: AgentAccess, agents: Mapping[str, AgentLink], *, undo_inside: bool, have_library: bool = False
    ) -> AgentShim:
        places = {host: self._shim_place(host, undo_inside=undo_inside) for host in self._hosts}
        shim = AgentShim(
            access, agents, places,
            capabilities=self._capabilities, mechanism=self._mechanism, strays=self.strays,
        )  # fmt: skip
        await shim.install(have_library=have_library)
        return shim

    async def _prepare_clocks(self, agents: Mapping[str, AgentLink]) -> None:
        owners = [host for host in self._hosts if self._may_set_clock(host)]
        if owners and self._shim is not None and ("clocks", "wall") in self._capabilities:
            links = {host: agents[host] for host in owners}
            self._real_clocks = await AgentClocks.prepared(links, shim=self._shim.clocks)

    def _listener(self, machine: str) -> Any:
        def take(event: dict[str, Any]) -> None:
            if event["event"] == "datagram":
                if isinstance(self._network, AgentNetwork):
                    self._network.take_event(machine, event)
            else:
                self._processes.take_event(machine, self._links[machine], event)

        return take

    # The end

    async def stop(self) -> None:
        """End every program, fetch data and logs, remove rules and hosts. Idempotent; safe after a partial start.

        Raises HarnessError when something could not be fetched or removed, after everything was tried; what was
        not removed stays in the run's state.
        """
        problems: list[Exception] = []
        clocks, self._real_clocks = self._real_clocks, None
        disks, self._file_system_disks = self._file_system_disks, None
        shim, self._shim = self._shim, None
        # First, because a replica that waits for its disk does not shut down cleanly.
        for held in (clocks, disks, shim):
            try:
                if held is not None:
                    await held.release_all()
            except (ShellError, RuntimeError, TimeoutError, OSError) as error:
                problems.append(error)
        self._link_faults = None  # relays, queues and rules go with the hosts
        self._name_service = None  # services end with the agents, and programs' private mounts with the programs
        if self._network is not None:
            problems += await self._processes.stop_all()
            problems += await self._end_strays()
            problems += await self._collect()
            self._network = None
        links, self._links = self._links, {}
        closed = await asyncio.gather(*(link.close() for link in links.values()), return_exceptions=True)
        problems += [outcome for outcome in closed if isinstance(outcome, Exception)]
        # First, because it reports where files are that could not be fetched.
        problems = [*await self._remove_hosts(), *problems]
        if problems:
            raise HarnessError("; ".join(str(problem) for problem in problems[:3]))

    # Hosts

    def agent(self, host: str) -> AgentLink:
        """The link to the agent that serves a host. Raises RuntimeError before `start`."""
        link = self._links.get(self._machine(host))
        if link is None:
            raise RuntimeError(f"{host} has no agent: the cluster was not started")
        return link

    async def strays(self, host: str) -> Sequence[ProcessMember]:
        """See harness.clusters.abilities.SeesStrays."""
        first = await self._find_strays(host)
        if not first:
            return []
        await asyncio.sleep(_STRAY_LOOKS_S)
        begun = {(stray.pid, stray.start_ticks) for stray in first}
        return [stray for stray in await self._find_strays(host) if (stray.pid, stray.start_ticks) in begun]

    async def adopt_strays(self, host: str) -> None:
        """See harness.clusters.abilities.SeesStrays."""
        programs = [process.host_pid for process in self._processes.running if process.host == host]
        strays = await self.strays(host) if programs else []
        if strays:  # it does not matter which of several programs started them: faults hit all of them together
            members = [[stray.pid, stray.start_ticks] for stray in strays]
            await self.agent(host).request("adopt", {"pid": programs[0], "strays": members})

    async def _find_strays(self, host: str) -> Sequence[ProcessMember]:
        answer = await self.agent(host).request("strays")
        return self._of_host(host, [ProcessMember(*stray) for stray in answer["strays"]])

    def _of_host(self, host: str, strays: Sequence[ProcessMember]) -> Sequence[ProcessMember]:
        """The strays of a host, among those of its machine."""
        return strays

    async def _end_strays(self) -> list[Exception]:
        """End processes that the programs have left behind; returns a problem for each that does not end."""

        async def end_on(machine: str, link: AgentLink) -> list[Exception]:
            try:
                found = await link.request("end_strays")
            except ShellError as error:  # an agent that does not answer is reported elsewhere
                logger.info("cannot look for leftover processes on %s: %s", machine, error)
                return []
            for pid, command in found["ended"]:
                logger.warning("%s: killed leftover process %d (%s)", machine, pid, command)
            for pid, _ in found["left"]:
                self._note_left(machine, pid)
            return [
                HarnessError(f"{machine}: leftover process {pid} ({command}) cannot be killed")
                for pid, command in found["left"]
            ]

        each = await asyncio.gather(*(end_on(machine, link) for machine, link in self._links.items()))
        return [problem for problems in each for problem in problems]

    def _note_left(self, machine: str, pid: int) -> None:
        """Record a process that does not end, for a later cleanup."""
        logger.warning("%s: leftover process %d cannot be killed", machine, pid)

    async def run(
        self, host: str, argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> tuple[int, str, str]:
        """Run a short command on a host, as root if the agent is: (status, standard output, standard error).

        Status -9: it was killed at its timeout. Raises ShellError when the host does not answer.
        """
        return await self.agent(host).run(argv, stdin=stdin or "", timeout_s=timeout_s)

    def log_path(self, host: str, name: str) -> str:
        """Where a host keeps a program's log, as a path on that host."""
        return os.path.join(self._log_dir(host), name)

    def python(self, host: str) -> str:
        """The Python interpreter on a host. Known from `start` on."""
        return self.agent(host).python

    def bind_address(self, host: str) -> str:
        """The address of a host, the same for every host in the run. Known from `start` on."""
        return self._address(host)

    def address_from(self, source: str, destination: str, port: int) -> str:
        """The "ip:port" of `port` on `destination`: packets go straight there, whatever `source` is.

        Raises ValueError for a port that was not announced when the cluster was made, because other clusters
        have to prepare for each port.
        """
        if port not in self._ports:
            raise ValueError(f"port {port} is not one of this cluster's ports: {sorted(self._ports)}")
        return f"{self._address(destination)}:{port}"

    async def put_file(self, host: str, path: str, content: bytes) -> None:
        """Write a file on a host durably (synced), creating parent directories. Raises OperatorError."""
        try:
            await put_file(self.agent(host), path, content)
        except ShellError as error:
            raise OperatorError(f"cannot write a file on {host}: {error}") from None

    async def get_file(self, host: str, path: str) -> bytes:
        """The content of a file on a host. Raises ShellError, also if it is larger than MAX_FILE_BYTES."""
        return await get_file(self.agent(host), path)

    async def begin_account(self, host: str) -> None:
        """Forget what a host's programs have not synced; see abilities.KeepsAccount. Raises ShellError."""
        if self._shim is not None:
            await self._shim.begin_account(host)

    async def _end_programs(self, host: str) -> None:
        await asyncio.gather(*(process.kill() for process in self._processes.running if process.host == host))

    async def spawn(self, host: str, program: Program) -> AgentProcess:
        """Start a program on a host; returns once it has started. Raises OperatorError when it cannot be run."""
        link = self.agent(host)
        machine, mounts = self._machine(host), self._mounts(host)
        if self._shim is None:
            return await self._processes.spawn(host, machine, link, program, mounts=mounts)
        try:
            program, started = await self._shim.prepared(host, program)
        except (ShellError, ShimError) as error:
            raise OperatorError(f"cannot run {program.name} on {host}: {error}") from None
        process = None
        try:
            process = await self._processes.spawn(host, machine, link, program, mounts=mounts)
        finally:
            if started is not None:
                self._shim.note_started(started, process)
        return process

    async def send_queues(self, host: str, peer_ports: Collection[int]) -> Sequence[SendQueue]:
        """See harness.clusters.abilities.SeesSendQueues."""
        pids = [process.host_pid for process in self._processes.running if process.host == host]
        answer = await self.agent(host).request("send_queues", {"pids": pids, "ports": list(peer_ports)})
        return [SendQueue(*each) for each in answer["queues"]]

    async def _members_of(self, host: str) -> list[ProcessMember]:
        """Every process of the programs of a host. Raises ShellError."""
        running = [process for process in self._processes.running if process.host == host]
        return [member for process in running for member in await process.members()]

    async def _pids_of(self, host: str) -> list[int]:
        return [member.pid for member in await self._members_of(host)]

    def _mounts(self, host: str) -> Sequence[tuple[str, str]]:
        """(file, place) pairs: the host's programs, and nobody else, see the file in that place."""
        return () if self._name_service is None else self._name_service.mounts(host)
