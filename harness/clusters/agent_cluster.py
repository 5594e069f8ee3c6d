"""What every cluster has in common whose hosts are real: everything but how a host is made and reached.

Each host is reached through an agent that runs on it. A subclass makes its hosts, says how a connection to an agent is
made, and removes them; programs, files, cuts, faults and probes are done here through the agents (see host_agent,
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
"""Between two looks for processes that were left behind: what is just ending is gone at the second."""


class ClusterArguments(TypedDict):
    """What every cluster is made from: the number of replicas, the run that owns everything, the directory that the
    hosts' files are in on the harness's side, the ports that hosts will be reached on, the hosts that the system
    needs beside its replicas', and the mechanism that programs are to meet faults by (nemesis.mechanisms.reach)."""

    node_count: int
    run: RunState
    work_dir: str
    ports: Collection[int]
    extra_hosts: NotRequired[Sequence[str]]
    mechanism: NotRequired[str | None]


class AgentCluster(ABC):
    """Hosts with agents, for one run. See harness.clusters.base.Cluster.

    Replicas' hosts are n1..nN; `extra_hosts` are what the system needs beside them. What the hosts have written is in
    `work_dir/<host>` once the cluster was stopped. The clients are the harness itself, wherever it is in the network.
    """

    name: str
    file_systems_missing: str | None = None
    """Why such hosts cannot have a file system of the run's own; None when they can, as far as is known."""
    names_missing: str | None = None
    """Why the programs of such hosts cannot be shown names of the run's own; None when they can, as far as is known."""
    max_hosts: int
    """Replicas that such a cluster has at most."""
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
        """Interface and ability of everything that the run will use."""
        self._shim: AgentShim | None = None
        """What bends clocks and disks."""
        self._file_system_disks: FileSystemDisks | None = None
        """Disks with faults of a whole file system, where hosts have one each; they pass the others on to the shim."""
        self._real_clocks: Clocks | None = None
        """Clocks that are really set, where hosts have one each; they pass the rest on to the shim."""
        self._link_faults: Links | None = None
        self._name_service: HostNames | None = None

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
    async def _check_machines(self) -> None:
        """Hear from every agent; see that its machine has what a run needs. Raises ClusterUnavailable, ShellError."""

    @abstractmethod
    async def _collect(self) -> list[Exception]:
        """Bring what the hosts have written to where it outlives them; returns what went wrong."""

    @abstractmethod
    def data_dir(self, host: str) -> str:
        """The directory of a host for its data, on that host. Raises KeyError for a host that there is not."""

    @abstractmethod
    def local_path(self, host: str, path: str) -> str:
        """Where the harness finds `path` of a host."""

    @abstractmethod
    def _log_dir(self, host: str) -> str:
        """The directory of a host for its programs' logs, on that host."""

    @abstractmethod
    def _file_system_place(self, host: str) -> FileSystemPlace:
        """Where the image of a host's file system is to be, and its mount point, as the host itself resolves them."""

    @abstractmethod
    def _shim_place(self, host: str, *, undo_inside: bool) -> ShimPlace:
        """Where the shim's files are on a host; `undo_inside` the data's directory, a file system of its own."""

    @abstractmethod
    def _address(self, host: str) -> str:
        """The IPv4 address of a host among the hosts."""

    async def _ipv6_of_others(self) -> Mapping[str, str]:
        """By machine the nft match of what comes to it over IPv6 from the others; none where nothing can. Raises
        ShellError."""
        return {}

    async def _further_of_others(self) -> Mapping[str, Collection[str]]:
        """By machine the IPv4 addresses of the others other than those of `_address`. Raises ShellError."""
        return {}

    async def _addresses_gained(self) -> Mapping[str, Collection[str]]:
        """By machine the addresses that it has got since its network was prepared. Raises ShellError."""
        return {}

    def _machine(self, host: str) -> str:
        """The machine that a host is on: itself, but for hosts that share one."""
        return host

    @abstractmethod
    def _named_host(self, host: str) -> NamedHost:
        """Where the name service of a host listens, and what it tells when nothing is wrong."""

    def _helpers_path(self) -> str | None:
        """Where a Python on the hosts finds the harness's modules; None where they have to be brought."""
        return None

    def _may_set_clock(self, host: str) -> bool:
        """Whether a host is a machine with a clock of its own that is there to be bent."""
        return False

    def _new_processes(self) -> AgentProcesses:
        return AgentProcesses(
            log_path=lambda host, name: os.path.join(self._work_dir, host, name),
            remote_log_path=lambda host, name: os.path.join(self._log_dir(host), name),
        )

    # What it can do

    @classmethod
    def missing(cls, interface: str, ability: str) -> str | None:
        """Why this cluster cannot have an ability (see nemesis.target.ABILITIES) here; None when it can, as far as can
        be known without its hosts: what one of them lacks is named when the cluster is started."""
        if interface == "disks" and ability in FILE_SYSTEM_KINDS:
            return cls.file_systems_missing
        if interface == "resources":
            return f"what programs use is not limited on {cls.name}: use --cluster netns as root"
        if interface == "names":
            return cls.names_missing
        return agent_shim_missing() if interface in ("clocks", "disks") else None

    @staticmethod
    def link_mechanism() -> str:
        """What shapes links on such hosts, for `harness doctor`."""
        return f"{NETEM} where every host's kernel has it, else {RELAY}"

    @classmethod
    def mechanism_of(cls, interface: str, ability: str) -> str:
        """What carries out an ability here, in a few words."""
        if interface == "disks" and ability in FILE_SYSTEM_KINDS:
            return "a file system of the host's own"
        names = {
            "network": "nftables on every host",
            "processes": "signals to all programs of a host",
            "links": cls.link_mechanism(),
            "disks": "the program's own calls",
            "clocks": "the program's own calls",
            "clients": "connections of the harness's own",
            "names": "a name service of each host's own",
            "resources": "prlimit on every process" if ability == "descriptors" else "a control group of a host",
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
        """Whether the shim is to keep an account of what is written and not synced."""
        return not self._capabilities.isdisjoint({("disks", "power"), ("disks", "crash")})

    @property
    def links(self) -> Links | None:
        """The quality of the links between replicas' hosts; None unless `prepare` was asked for them."""
        return self._link_faults

    @property
    def names(self) -> Names | None:
        """By what the hosts' programs find the other hosts; None unless `prepare` was asked for it."""
        return self._name_service

    def names_of(self, host: str) -> Sequence[str]:
        """Its own name, where the programs of the other hosts can look it up."""
        return () if self._name_service is None else (host,)

    # Life

    @property
    def hosts(self) -> Sequence[str]:
        """The replicas' hosts: n1..nN."""
        return self._hosts

    @property
    def extra_hosts(self) -> Sequence[str]:
        """The hosts that the system has beside its replicas'."""
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
        """Every machine with an agent once, the replicas' first."""
        return list(dict.fromkeys(self._machine(host) for host in self._all_hosts))

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
            logger.warning("after a start that failed: %s", error)

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
            raise ClusterUnavailable(f"{self.name}: no nftables rules can be made: {error}") from None
        self._network = network

    async def _undo_at_clean(self, key: str, argv: Sequence[str], stdin: str) -> None:
        """Have a command run on every machine when it is cleaned, with or without the harness."""
        undo = {"key": key, "argv": list(argv), "stdin": stdin}
        await all_of(link.request("undo", undo) for link in self._links.values())

    # Faults

    async def _prepare_faults(self) -> None:
        """What the nemeses of this run need on the replicas' hosts. Raises ClusterUnavailable, ShellError."""
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
        """A file system for each host, where the run needs one; None where it needs none."""
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
        """End every program, fetch data and logs, remove rules and hosts. Idempotent; safe after half a start.

        Raises HarnessError when something could not be fetched or removed, after everything was tried; what is
        not removed stays in the run's state.
        """
        problems: list[Exception] = []
        clocks, self._real_clocks = self._real_clocks, None
        disks, self._file_system_disks = self._file_system_disks, None
        shim, self._shim = self._shim, None
        # First, because a replica that waits for its disk does not end in order.
        for held in (clocks, disks, shim):
            try:
                if held is not None:
                    await held.release_all()
            except (ShellError, RuntimeError, TimeoutError, OSError) as error:
                problems.append(error)
        self._link_faults = None  # relays, queues and rules go with the hosts
        self._name_service = None  # and the services with the agents, what programs were shown with the programs
        if self._network is not None:
            problems += await self._processes.stop_all()
            problems += await self._end_strays()
            problems += await self._collect()
            self._network = None
        links, self._links = self._links, {}
        closed = await asyncio.gather(*(link.close() for link in links.values()), return_exceptions=True)
        problems += [outcome for outcome in closed if isinstance(outcome, Exception)]
        # First, because it says where the files are that could not be fetched.
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
        if strays:  # which of several programs has started them makes no difference: they are struck together
            members = [[stray.pid, stray.start_ticks] for stray in strays]
            await self.agent(host).request("adopt", {"pid": programs[0], "strays": members})

    async def _find_strays(self, host: str) -> Sequence[ProcessMember]:
        answer = await self.agent(host).request("strays")
        return self._of_host(host, [ProcessMember(*stray) for stray in answer["strays"]])

    def _of_host(self, host: str, strays: Sequence[ProcessMember]) -> Sequence[ProcessMember]:
        """Which of the strays of its machine are a host's."""
        return strays

    async def _end_strays(self) -> list[Exception]:
        """End what the programs have left behind; returns what does not end."""

        async def end_on(machine: str, link: AgentLink) -> list[Exception]:
            try:
                found = await link.request("end_strays")
            except ShellError as error:  # whoever does not answer is a problem of others
                logger.info("processes that were left behind on %s: %s", machine, error)
                return []
            for pid, command in found["ended"]:
                logger.warning("%s: process %d (%s) was left behind and is ended", machine, pid, command)
            for pid, _ in found["left"]:
                self._note_left(machine, pid)
            return [
                HarnessError(f"{machine}: process {pid} ({command}) was left behind and does not end")
                for pid, command in found["left"]
            ]

        each = await asyncio.gather(*(end_on(machine, link) for machine, link in self._links.items()))
        return [problem for problems in each for problem in problems]

    def _note_left(self, machine: str, pid: int) -> None:
        """Note a process that does not end, for whoever cleans up later."""
        logger.warning("%s: process %d was left behind and does not end", machine, pid)

    async def run(
        self, host: str, argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> tuple[int, str, str]:
        """Run a short command on a host, as root where the agent is: (status, standard output, standard error).

        Status -9: it was killed when its time was up. Raises ShellError when the host cannot be asked.
        """
        return await self.agent(host).run(argv, stdin=stdin or "", timeout_s=timeout_s)

    def log_path(self, host: str, name: str) -> str:
        """Where a host keeps a program's log, as a path on that host."""
        return os.path.join(self._log_dir(host), name)

    def python(self, host: str) -> str:
        """The Python interpreter on a host. Known from `start` on."""
        return self.agent(host).python

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

    async def put_file(self, host: str, path: str, content: bytes) -> None:
        """Write a file on a host, creating parent directories; it survives a loss of power. Raises OperatorError."""
        try:
            await put_file(self.agent(host), path, content)
        except ShellError as error:
            raise OperatorError(f"cannot write a file on {host}: {error}") from None

    async def get_file(self, host: str, path: str) -> bytes:
        """The content of a file on a host. Raises ShellError, also for one of more than MAX_FILE_BYTES."""
        return await get_file(self.agent(host), path)

    async def begin_account(self, host: str) -> None:
        """Whatever a host's programs had not synced is none of its data any more. Raises ShellError."""
        if self._shim is not None:
            await self._shim.begin_account(host)

    async def _end_programs(self, host: str) -> None:
        await asyncio.gather(*(process.kill() for process in self._processes.running if process.host == host))

    async def spawn(self, host: str, program: Program) -> AgentProcess:
        """Start a program on a host; returns once it is started. Raises OperatorError when it cannot be run."""
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
        """What the programs of a host have sent to clients on these ports and nobody has taken. Raises ShellError."""
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
        """(file, place): what the programs of a host alone see of it in that place."""
        return () if self._name_service is None else self._name_service.mounts(host)
