"""The `netns` cluster: every host a network namespace, joined by a bridge in a namespace of its own.

    sb-<run>-n1 eth0 ----+
    sb-<run>-n2 eth0 ----+-- br0 in sb-<run>-net
    ...                  |
    sb-<run>-clients  ---+   (the harness itself is in here while the run lasts)

Each host has one address in 10.77.0.0/24, seen only by the hosts of its run, so any number of runs go side by
side and nothing appears in the machine's own network. Packets between hosts are the kernel's, with its TCP; cuts
are nftables sets in the namespace of the host that drops (see nemesis.mechanisms.nft).

Needs root, or a user namespace in which the harness is root (see harness.clusters.user_namespace).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence

from harness.clusters.base import CLIENTS_HOST, NAME_SERVER_HOST, ClusterUnavailable, HostProcess, Program
from harness.clusters.netns_calls import (
    enter_namespace,
    namespace_path,
    open_current_namespace,
    remove_namespace,
)
from harness.clusters.netns_links import BridgeRelay, NetnsLinks, links_shaper, why_no_netem
from harness.clusters.netns_probe import LinkProbe
from harness.clusters.netns_shell import NamespaceShell, run_command
from harness.clusters.netns_trial import PROGRAMS
from harness.clusters.node_disks import MEMORY, SHARED, NodeDisks, storage_for, why_no_file_systems
from harness.clusters.packet_network import PacketNetwork
from harness.clusters.processes import Processes
from harness.clusters.shaped_links import NETEM, RELAY
from harness.faults.equipment import Equipped
from harness.faults.file_system_disks import FILE_SYSTEM_KINDS, FileSystemDisks
from harness.faults.local_access import LocalAccess
from harness.faults.shim_hosts import ShimHosts, shim_missing
from harness.programs import require_programs
from harness.run_state import KIND_NETNS, Claim, RunState
from nemesis.mechanisms.nft import NftCuts
from nemesis.mechanisms.shell import ShellError
from nemesis.mechanisms.shim import ShimError

__all__ = ["MAX_HOSTS", "NetnsCluster"]

MAX_HOSTS = 200
"""Replicas that the /24 has room for beside the name servers' and the clients' host."""

_SUBNET = "10.77.0"
_PREFIX_BITS = 24
_BRIDGE_HOST = "net"
"""The namespace of the bridge; no program runs there."""


class NetnsCluster(Equipped[ShimHosts]):
    """Hosts as network namespaces, for one run. See harness.clusters.base.Cluster.

    `ports` are those that hosts will be reached on; data and logs of each host lie under `work_dir/<host>`.
    Start and stop it on the same thread: that thread is in the clients' namespace in between.
    """

    name = "netns"
    description = "a network namespace per host on a bridge, cuts by nftables; root or a user namespace"
    logs_are_live = True
    """Programs log straight into files of the harness's machine."""
    options: Sequence[str] = ("storage",)
    storage: str | None = None
    """The choice of the operator, on a class made by `configured`."""

    def __init__(
        self,
        *,
        node_count: int,
        run: RunState,
        work_dir: str,
        ports: Collection[int],
        storage: str | None = None,
    ) -> None:
        if not 1 <= node_count <= MAX_HOSTS:
            raise ValueError(f"a netns cluster has 1 to {MAX_HOSTS} replicas, not {node_count}")
        self._hosts = tuple(f"n{number}" for number in range(1, node_count + 1))
        self._addresses = {host: f"{_SUBNET}.{number}" for number, host in enumerate(self._hosts, 1)}
        self._addresses[NAME_SERVER_HOST] = f"{_SUBNET}.{MAX_HOSTS + 1}"
        self._addresses[CLIENTS_HOST] = f"{_SUBNET}.{MAX_HOSTS + 2}"
        self._names = {host: f"sb-{run.run_id}-{host}" for host in (_BRIDGE_HOST, *self._addresses)}
        self._run = run
        self._work_dir = os.path.abspath(work_dir)
        self._ports = frozenset(ports)
        self._processes = Processes(run=run, log_dir=self._work_dir)
        self._probe = LinkProbe({host: namespace_path(self._names[host]) for host in self._addresses}, self._addresses)
        self._shell: NamespaceShell | None = None
        self._network: PacketNetwork | None = None
        self._home = -1
        self._links: NetnsLinks | None = None
        self._storage = storage_for(storage or self.storage)
        self._node_disks: NodeDisks | None = None

    @classmethod
    def configured(cls, *, storage: str | None = None) -> type[NetnsCluster]:
        """Such clusters with these options, to be asked what they miss. Raises ClusterUnavailable."""
        return type(cls.__name__, (cls,), {"storage": storage_for(storage)})

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

    @classmethod
    def missing(cls, interface: str, ability: str) -> str | None:
        """Why this cluster cannot have an ability (see nemesis.target.ABILITIES) here; None when it can."""
        if interface == "disks" and ability in FILE_SYSTEM_KINDS:
            if cls.storage == SHARED and why_no_file_systems() is None:
                return "--storage shared: hosts have no file systems of their own"
            return why_no_file_systems()
        if interface in ("clocks", "disks"):
            return shim_missing(interface, ability)
        return None

    @staticmethod
    def link_mechanism() -> str:
        """What shapes links on this machine, for `harness doctor`."""
        why_not = why_no_netem()
        return NETEM if why_not is None else f"{RELAY}, as {why_not}"

    @property
    def links(self) -> NetnsLinks | None:
        """The quality of the links between hosts, from `start` on."""
        return self._links

    async def start(self) -> None:
        """Create namespaces, bridge and rules, and enter the clients' namespace.

        Raises ClusterUnavailable when this machine or user cannot; what was created by then is removed.
        """
        programs = require_programs(PROGRAMS)
        try:
            await self._create(programs)
        except ShimError as error:
            await self.stop()
            raise ClusterUnavailable(f"netns: {error}") from None
        except (ShellError, OSError) as error:
            await self.stop()
            raise ClusterUnavailable(f"netns: {error}; needs root or unprivileged user namespaces") from None
        except BaseException:
            await self.stop()
            raise

    async def _create(self, programs: Mapping[str, str]) -> None:
        ip = programs["ip"]
        self._shell = NamespaceShell(self._names, nsenter=programs["nsenter"], environment=self._run.environment)
        for host in self._addresses:
            os.makedirs(self.data_dir(host), exist_ok=True)
        if self._storage != SHARED:
            self._node_disks = NodeDisks(
                self._hosts,
                run=self._run,
                work_dir=self._work_dir,
                in_memory=self._storage == MEMORY,
                end_programs=self._end_programs,
            )
            await self._node_disks.create()
        by_shim = {need for need in self._needs if need[1] not in FILE_SYSTEM_KINDS}
        if ShimHosts.wanted(by_shim):
            self._shim = ShimHosts(
                self._hosts,
                work_dir=self._work_dir,
                data_dir=self.data_dir,
                run=self._run,
                tracks_writes=("disks", "power") in self._needs,
                undo_inside=self._node_disks is not None,
                enter=None if self._node_disks is None else self._node_disks.enter,
            )
        if self._node_disks is not None and any(interface == "disks" for interface, _ in self._needs):
            self._disks = FileSystemDisks(
                self._hosts,
                file_systems=self._node_disks,
                shim=None if self._shim is None else self._shim.disks,
                access=LocalAccess(self._run.environment, enter=self._node_disks.enter),
            )
        self._run.claim_all(Claim(KIND_NETNS, name, {}) for name in self._names.values())
        await self._batch([ip], [f"netns add {name}" for name in self._names.values()])
        bridge = ["link add br0 type bridge", "link set br0 up"]
        for host in self._addresses:
            bridge.append(f"link add {host} type veth peer name eth0 netns {self._names[host]}")
            bridge.append(f"link set {host} master br0 up")
        await self._batch([ip, "-netns", self._names[_BRIDGE_HOST]], bridge)
        cuts = NftCuts(self._shell, self._addresses, nft=programs["nft"])
        work = [cuts.install()]
        for host, address in self._addresses.items():
            lines = ["link set lo up", f"addr add {address}/{_PREFIX_BITS} dev eth0", "link set eth0 up"]
            work.append(self._batch([ip, "-netns", self._names[host]], lines))
        # Every one is waited for before the first error is raised: nothing goes on behind `stop`.
        for outcome in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        self._probe.open()
        self._network = PacketNetwork(cuts, self._probe)
        relay = BridgeRelay(
            shell=self._shell,
            bridge_host=_BRIDGE_HOST,
            nft=programs["nft"],
            addresses=self._addresses,
            processes=self._processes,
            seed=self._run.run_id,
        )
        self._links = NetnsLinks(
            await asyncio.to_thread(links_shaper, relay, self._shell, self._addresses),
            relay=relay,
            namespaces={host: namespace_path(self._names[host]) for host in self._addresses},
            addresses=self._addresses,
        )
        self._enter_clients()

    async def _batch(self, ip: Sequence[str], lines: Sequence[str]) -> None:
        """Many `ip` commands in one process."""
        script = "\n".join(lines) + "\n"
        await run_command("netns", [*ip, "-batch", "-"], stdin=script, environment=self._run.environment)

    def _enter_clients(self) -> None:
        self._home = open_current_namespace()
        clients = os.open(namespace_path(self._names[CLIENTS_HOST]), os.O_RDONLY | os.O_CLOEXEC)
        try:
            enter_namespace(clients)
        finally:
            os.close(clients)

    def _leave_clients(self) -> None:
        if self._home >= 0:
            try:
                enter_namespace(self._home)
            finally:
                os.close(self._home)
                self._home = -1

    async def stop(self) -> None:
        """End every process, go back to where `start` was called, remove the namespaces.

        Their rules and devices go with them. Idempotent; safe after half a start. Raises OSError when a
        namespace cannot be removed, after everything was tried: the run's state still names it then.
        """
        try:
            # First, because a replica that waits for its disk does not end in order.
            if self._disks is not None:
                await self._disks.close()
                self._disks = None
            shim, self._shim = self._shim, None
            if shim is not None:
                await shim.close()
            if self._links is not None:
                await self._links.close()
                self._links = None
            await self._processes.stop_all()
            if shim is not None:
                shim.remove()
        finally:
            self._probe.close()
            self._leave_clients()
            self._network = None
            self._shell = None
            try:
                self._remove_namespaces()
            finally:
                if self._node_disks is not None:
                    await self._node_disks.remove()
                    self._node_disks = None

    def _remove_namespaces(self) -> None:
        claimed = {claim.ident for claim in self._run.claims if claim.kind == KIND_NETNS}
        failures = []
        for name in self._names.values():
            if name in claimed:
                try:
                    remove_namespace(name)
                except OSError as error:
                    failures.append(error)
                else:
                    self._run.release(KIND_NETNS, name)
        if failures:
            raise failures[0]

    def bind_address(self, host: str) -> str:
        """The address of a host, the same for everyone in the run."""
        return self._addresses[host]

    def address_from(self, source: str, destination: str, port: int) -> str:
        """The "ip:port" of `port` on `destination`: packets go straight there, whatever `source` is.

        Raises ValueError for a port that was not announced when the cluster was made: what works here must
        also work on clusters that have to prepare for it.
        """
        if port not in self._ports:
            raise ValueError(f"port {port} was not announced to the cluster: {sorted(self._ports)}")
        return f"{self._addresses[destination]}:{port}"

    def data_dir(self, host: str) -> str:
        """`work_dir/<host>/data`, the same path inside and outside."""
        if host not in self._addresses:
            raise KeyError(host)
        return os.path.join(self._work_dir, host, "data")

    def local_path(self, host: str, path: str) -> str:
        """The path itself where hosts share the harness's file system, and after the end; else by way of the host."""
        disks, data_dir = self._node_disks, self.data_dir(host)
        if disks is None or host not in self._hosts or os.path.commonpath([path, data_dir]) != data_dir:
            return path
        return disks.path(host, os.path.join(disks.mount_point(host), os.path.relpath(path, data_dir)))

    async def put_file(self, host: str, path: str, content: bytes) -> None:
        """Write a file on a host, creating parent directories; it survives a loss of power. Raises OSError."""
        path = self.local_path(host, path)
        directory = os.path.dirname(path)
        os.makedirs(directory, exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        parent = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)

    async def spawn(self, host: str, program: Program) -> HostProcess:
        """Start a program in a host's namespace; returns once it is started, not once it is ready."""
        if self._shell is None:
            raise RuntimeError("cannot start programs: the cluster was not started")
        prefix = self._shell.prefix(host)
        if self._node_disks is not None and host in self._hosts:
            prefix += self._node_disks.prefix(host)
        if self._shim is not None:
            # Not for what the prefix runs: outside its host the shim finds no disk to keep an account of.
            prefix += ["env", *(f"{name}={value}" for name, value in self._shim.environment(host).items())]
        return await self._processes.spawn(host, program, argv_prefix=prefix)

    async def _end_programs(self, host: str) -> None:
        await asyncio.gather(*(child.kill() for child in self._processes.running if child.host == host))
