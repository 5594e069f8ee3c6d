"""The `local` cluster: every host an address of the loopback network, every link a proxy. No root needed.

A run takes one of the 254 networks 127.R.0.0/16 for itself. In it

    127.R.0.d    is host d: what runs there listens on this address and nobody connects to it directly
    127.R.s.d    is the link from host s to host d: the link proxy listens here, on every port of d

A program is told the link's address in place of the host's (`address_from`), so everything that it sends goes
through the proxy, which knows by the address which link it is. Nodes must therefore be given their peers'
addresses one by one, as each of them sees them; nobody may hand an address on to another host.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from harness.clusters.base import CLIENTS_HOST, NAME_SERVER_HOST, ClusterUnavailable, HostProcess, Program
from harness.clusters.link_control import LinkProxyHandle, LinkProxyRefused
from harness.clusters.link_probe import LinkProbe
from harness.clusters.local_links import LINKS_MISSING, LocalLinks
from harness.clusters.processes import Processes, raise_descriptor_limit
from harness.errors import HarnessError
from harness.faults.equipment import Equipped
from harness.faults.file_system_disks import FILE_SYSTEM_KINDS
from harness.faults.shim_hosts import ShimHosts, shim_missing
from harness.run_state import RunState
from nemesis.mechanisms.shim import ShimError
from nemesis.target import Grudge, Link, LinkShape, ProbeResult, links_of

__all__ = ["MAX_HOSTS", "LinkShape", "LocalCluster", "LocalNetwork"]

MAX_HOSTS = 30
"""Replicas of one cluster. Each pair of them takes two listeners for each port, all in one proxy."""

RESERVATION_PORT = 2127
"""A run holds 127.R.255.254 on this port to say that 127.R is taken. Below the ports that kernels give out."""

_NAME_SERVER_NUMBER = 250
_CLIENTS_NUMBER = 251


class LocalNetwork:
    """The network of a `local` cluster: the gates of its link proxy. See nemesis.target.Network.

    The state of all faults is kept here and sent to the proxy as a whole whenever it changes, so that
    nothing depends on what was sent before.
    """

    def __init__(self, proxy: LinkProxyHandle, probe: LinkProbe, pairs: Collection[Link]) -> None:
        self._proxy = proxy
        self._probe = probe
        self._links = frozenset(pairs) | {Link(b, a) for a, b in pairs}
        self._cuts: dict[str, frozenset[Link]] = {}
        self._shapes: dict[str, dict[Link, LinkShape]] = {}

    async def cut(self, fault_id: str, grudge: Grudge) -> None:
        """Drop packets as `grudge` says; in force on return. Raises ValueError for a link that there is not,
        HarnessError when the proxy has ended."""
        links = links_of(grudge)
        self._require_known(links)
        await self._probe.keep(sorted(links | {Link(b, a) for a, b in links}))
        self._cuts[fault_id] = links
        await self._apply()

    async def heal(self, fault_id: str) -> None:
        """Undo one fault's cut; what others cut stays cut. Idempotent. Raises HarnessError."""
        self._cuts.pop(fault_id, None)
        await self._apply()

    async def heal_all(self) -> None:
        """Undo every cut and every shaping, in any state. Idempotent. Raises HarnessError."""
        self._cuts.clear()
        self._shapes.clear()
        await self._apply()

    async def shape_links(self, fault_id: str, shapes: Mapping[Link, LinkShape]) -> None:
        """Make directed links slow until `unshape_links(fault_id)`; several faults on one link add up.

        Raises ValueError for a link that there is not, HarnessError when the proxy has ended.
        """
        self._require_known(shapes)
        self._shapes[fault_id] = dict(shapes)
        await self._apply()

    async def unshape_links(self, fault_id: str) -> None:
        """Undo one fault's shaping. Idempotent. Raises HarnessError."""
        self._shapes.pop(fault_id, None)
        await self._apply()

    async def probe(self, links: Collection[Link], *, timeout_s: float) -> Sequence[ProbeResult]:
        """Send bytes over each link, on kept and on new connections, and see what arrives (LinkProbe.probe)."""
        return await self._probe.probe(links, timeout_s=timeout_s)

    def _require_known(self, links: Collection[Link]) -> None:
        unknown = sorted(set(links) - self._links)
        if unknown:
            raise ValueError(f"this cluster has no link {unknown[0].source}->{unknown[0].destination}")

    async def _apply(self) -> None:
        cut = sorted(frozenset[Link]().union(*self._cuts.values()))
        shaped: dict[Link, LinkShape] = {}
        for shapes in self._shapes.values():
            for link, shape in shapes.items():
                shaped[link] = shape.on_top_of(shaped.get(link, LinkShape()))
        await self._proxy.request(
            "gates",
            cut=cut,
            shaped=[[*link, shape.delay_ms, shape.jitter_ms, shape.rate_bytes_per_s] for link, shape in shaped.items()],
        )


class LocalCluster(Equipped[ShimHosts]):
    """Hosts as loopback addresses, for one run. See harness.clusters.base.Cluster.

    `ports` are those that hosts will be reached on; data and logs of each host lie under `work_dir/<host>`.
    """

    name = "local"
    description = "a loopback address per host and a TCP proxy per link; needs no privileges"
    logs_are_live = True
    """Programs log straight into files of the harness's machine."""

    def __init__(self, *, node_count: int, run: RunState, work_dir: str, ports: Collection[int]) -> None:
        if not 1 <= node_count <= MAX_HOSTS:
            raise ValueError(f"a local cluster has 1 to {MAX_HOSTS} replicas, not {node_count}")
        if not ports or not all(1 <= port <= 65535 for port in ports):
            raise ValueError(f"a local cluster needs ports between 1 and 65535, not {sorted(ports)}")
        self._hosts = tuple(f"n{number}" for number in range(1, node_count + 1))
        self._numbers = {host: number for number, host in enumerate(self._hosts, 1)}
        self._numbers[NAME_SERVER_HOST] = _NAME_SERVER_NUMBER
        self._numbers[CLIENTS_HOST] = _CLIENTS_NUMBER
        self._pairs = [Link(a, b) for a, b in permutations(self._hosts, 2)]
        self._pairs += [Link(host, NAME_SERVER_HOST) for host in self._hosts]
        self._pairs += [Link(CLIENTS_HOST, host) for host in (*self._hosts, NAME_SERVER_HOST)]
        self._ports = sorted(set(ports))
        self._run = run
        self._work_dir = os.path.abspath(work_dir)
        self._processes = Processes(run, self._work_dir)
        self._proxy_processes = Processes(run, self._work_dir)
        self._proxy: LinkProxyHandle | None = None
        self._probe: LinkProbe | None = None
        self._network: LocalNetwork | None = None
        self._reservation: socket.socket | None = None
        self._net = 0
        self._links: LocalLinks | None = None

    @property
    def hosts(self) -> Sequence[str]:
        """The replicas' hosts: n1..nN."""
        return self._hosts

    @property
    def network(self) -> LocalNetwork:
        """The network between the hosts; there is one from `start` on."""
        if self._network is None:
            raise RuntimeError("the cluster has no network: it was not started")
        return self._network

    @staticmethod
    def link_mechanism() -> str:
        """What shapes links on this machine, for `harness doctor`."""
        return LocalLinks.mechanism

    @classmethod
    def missing(cls, interface: str, ability: str) -> str | None:
        """Why this cluster cannot have an ability (see nemesis.target.ABILITIES) here; None when it can."""
        if interface == "disks" and ability in FILE_SYSTEM_KINDS:
            return "the hosts of the local cluster share one file system: use --cluster netns as root"
        if interface in ("clocks", "disks"):
            return shim_missing(interface, ability)
        if interface == "links":
            return LINKS_MISSING.get(ability)
        return None

    @property
    def links(self) -> LocalLinks | None:
        """The quality of the links between hosts, from `start` on."""
        return self._links

    async def start(self) -> None:
        """Take a loopback network, start the proxy and make the probes' connections.

        Raises ClusterUnavailable when no network has these ports free; what was created by then is removed.
        """
        raise_descriptor_limit()
        try:
            for host in self._numbers:
                os.makedirs(self.data_dir(host), exist_ok=True)
            self._shim = self._make_shim()
            self._proxy = await LinkProxyHandle.start(self._proxy_processes)
            await self._take_network(self._proxy)
            self._probe = LinkProbe(
                listeners={pair: (self._link_ip(pair), self._ports[0]) for pair in self._pairs},
                announce=self._announce,
            )
            self._network = LocalNetwork(self._proxy, self._probe, self._pairs)
            self._links = LocalLinks(
                shape=self._network.shape_links, unshape=self._network.unshape_links, probe=self._probe
            )
            await self._probe.keep(Link(a, b) for a, b in permutations(self._hosts, 2))
        except OSError as error:
            await self.stop()
            raise ClusterUnavailable(f"local: {error.strerror or error}") from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Heal, end every process, end the proxy. Idempotent."""
        if self._network is not None:
            with contextlib.suppress(HarnessError):  # the proxy is gone, and all cuts with it
                await self._network.heal_all()
            self._network = None
        self._links = None
        shim, self._shim = self._shim, None
        if shim is not None:  # first, because a replica that waits for its disk does not end in order
            await shim.close()
        await self._processes.stop_all()
        if shim is not None:
            shim.remove()
        if self._probe is not None:
            await self._probe.close()
            self._probe = None
        if self._proxy is not None:
            await self._proxy.stop()
            self._proxy = None
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None

    def bind_address(self, host: str) -> str:
        """The address of a host. Known from `start` on."""
        if not self._net:
            raise RuntimeError("the cluster has no addresses: it was not started")
        return f"127.{self._net}.0.{self._numbers[host]}"

    def address_from(self, source: str, destination: str, port: int) -> str:
        """The "ip:port" of the link from `source` to `destination`; a host reaches itself without a link.

        Raises ValueError for a port that the cluster was not made with, and for a pair of hosts that opens no
        connections (name servers and clients are never connected to by replicas' initiative and so on).
        """
        if port not in self._ports:
            raise ValueError(f"port {port} is none of this cluster's: {', '.join(map(str, self._ports))}")
        if source == destination:
            return f"{self.bind_address(source)}:{port}"
        pair = Link(source, destination)
        if pair not in self._pairs:
            raise ValueError(f"{source} opens no connections to {destination} in a local cluster")
        self.bind_address(destination)
        return f"{self._link_ip(pair)}:{port}"

    def data_dir(self, host: str) -> str:
        """`work_dir/<host>/data`."""
        return os.path.join(self._work_dir, host, "data")

    def local_path(self, host: str, path: str) -> str:
        """The same path: hosts and harness share one file system."""
        return path

    async def put_file(self, host: str, path: str, content: bytes) -> None:
        """Write a file, creating parent directories. Raises OSError."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)

    async def spawn(self, host: str, program: Program) -> HostProcess:
        """Start a program for a host. Raises OperatorError when it cannot be run."""
        if host not in self._numbers:
            raise ValueError(f"this cluster has no host {host}")
        if self._shim is not None:
            added = self._shim.environment(host)
            program = replace(program, environment={**program.environment, **added})
        return await self._processes.spawn(host, program)

    def _make_shim(self) -> ShimHosts | None:
        """The clock and disk shim, when the run uses it. Raises ClusterUnavailable."""
        if not ShimHosts.wanted(self._needs):
            return None
        try:
            return ShimHosts(
                self._hosts,
                work_dir=self._work_dir,
                data_dir=self.data_dir,
                run=self._run,
                tracks_writes=("disks", "power") in self._needs,
            )
        except ShimError as error:
            raise ClusterUnavailable(f"local: {error}") from None

    def _link_ip(self, pair: Link) -> str:
        return f"127.{self._net}.{self._numbers[pair.source]}.{self._numbers[pair.destination]}"

    async def _announce(self, routes: Sequence[tuple[str, int, str, int]]) -> None:
        if self._proxy is None:
            raise HarnessError("a link was probed after the cluster was stopped")
        await self._proxy.request("route", routes=routes)

    async def _take_network(self, proxy: LinkProxyHandle) -> None:
        """Find a free 127.R and listen on all links there. Raises ClusterUnavailable."""
        refusal = ""
        for net in self._candidates():
            self._net = net
            reservation = socket.socket()
            try:
                reservation.bind((f"127.{net}.255.254", RESERVATION_PORT))
                self._require_free_ports()
                await proxy.request("open", seed=zlib.crc32(self._run.run_id.encode()), links=self._listeners())
            except OSError as error:
                reservation.close()
                refusal = self._explain(error.errno, getattr(error, "port", 0))
            except LinkProxyRefused as error:
                reservation.close()
                refusal = self._explain(error.reply.get("errno"), error.reply.get("port", 0))
            except BaseException:
                reservation.close()
                raise
            else:
                self._reservation = reservation
                return
        self._net = 0
        raise ClusterUnavailable(refusal)

    def _candidates(self) -> Iterator[int]:
        """All R, from one on that depends on the run, so that runs beside each other rarely meet."""
        first = zlib.crc32(self._run.run_id.encode())
        for step in range(254):
            yield 1 + (first + step) % 254

    def _require_free_ports(self) -> None:
        """Try the addresses that nodes will listen on. Raises _PortTaken."""
        for host in self._numbers:
            for port in self._ports:
                with socket.socket() as trial:
                    trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    try:
                        trial.bind((self.bind_address(host), port))
                    except OSError as error:
                        raise _PortError(error.errno, port) from None

    def _listeners(self) -> list[dict[str, object]]:
        return [
            {
                "source": pair.source,
                "destination": pair.destination,
                "from": self.bind_address(pair.source),
                "ports": [
                    [self._link_ip(pair), port, self.bind_address(pair.destination), port] for port in self._ports
                ],
            }
            for pair in self._pairs
        ]

    def _explain(self, number: int | None, port: int) -> str:
        """What the operator can do about an error at the last network that was tried."""
        if number == errno.EADDRINUSE and port:
            return (
                f"local: port {port} is in use: end the program that listens on it on all addresses, "
                "or give the nodes another port"
            )
        if number == errno.EADDRINUSE:
            return "local: all 254 loopback networks are in use: end other runs, or `harness clean` after dead ones"
        if number in (errno.EACCES, errno.EPERM):
            return f"local: no permission to listen on port {port}: give the nodes ports from 1024 on"
        if number == errno.EADDRNOTAVAIL:
            return "local: this machine's loopback network is not 127.0.0.0/8 (on Linux it is)"
        return f"local: cannot listen on loopback addresses: {os.strerror(number or errno.EIO)}"


class _PortError(OSError):
    """An address of a node cannot be listened on."""

    def __init__(self, number: int | None, port: int) -> None:
        super().__init__(number, os.strerror(number or errno.EIO))
        self.port = port
