"""The `local` cluster: every host is an address of the loopback network, every link a proxy. No root needed.

A run takes one of the 254 networks 127.R.0.0/16 for itself. In it

    127.R.0.d    is host d: its programs listen on this address, and nobody connects to it directly
    127.R.s.d    is the link from host s to host d: the link proxy listens here, on every port of d

A program gets the link's address instead of the host's (`address_from`), so everything that it sends goes
through the proxy, which knows the link by the address. Each node must therefore be given its own addresses of
its peers, and no host may pass an address on to another. If one does, or programs of two hosts meet at 127.0.0.1
or ::1, their connections bypass the link: they are found among the connections of the hosts' programs, by which
program has the other end, and disprove a cut. So does a connection to a host's own address that was closed since
the cut, unless it may have been the host's own: the kernel does not tell whose it was.

Names may be passed on if the harness may make mount namespaces (as root, or in user namespaces): every host's
programs have an /etc/hosts of their own, in which the name of another host stands for their own link to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import socket
import time
import zlib
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import NamedTuple, Unpack

from harness.clusters.abilities import SendQueue
from harness.clusters.agent_access import put_file
from harness.clusters.agent_cluster import ClusterArguments
from harness.clusters.agent_helper import START_TIMEOUT_S, AgentHelper, HelperRefused
from harness.clusters.agent_link import DEFAULT_TIMEOUT_S, AgentLink
from harness.clusters.agent_processes import AgentProcess
from harness.clusters.base import CLIENTS_HOST, ClusterUnavailable, Program
from harness.clusters.host_agent import LISTENING, TIME_WAIT, TIME_WAIT_S, sockets_here, sockets_of
from harness.clusters.host_names import HOSTS_FILE, NamedHost, hosts_file
from harness.clusters.link_probe import LinkProbe
from harness.clusters.link_proxy import raise_descriptor_limit
from harness.clusters.own_machine import OwnMachineCluster, import_path
from harness.clusters.shaped_links import BURST_BYTES, SPACING_S, ShapedLinks
from nemesis.mechanisms.shell import ShellError
from nemesis.target import Grudge, Link, LinkMeasure, LinkShape, LinkTraffic, ProbeResult, ProcessMember, links_of

__all__ = ["LINKS_MISSING", "MAX_HOSTS", "LinkShape", "LocalCluster", "LocalLinks", "LocalNetwork"]

MAX_HOSTS = 30
"""Largest number of replicas. Each pair of them takes two listeners for each port, all in one proxy."""

_LISTEN_ALL_TIMEOUT_S = 20.0
"""Time for the proxy to listen on all links: a second or so for a thousand listeners on a busy machine."""

RESERVATION_PORT = 2127
"""A run binds 127.R.255.254 on this port to mark 127.R as taken. It is below the kernel's ephemeral ports."""

_CLIENTS_NUMBER = 251
_FIRST_EXTRA_NUMBER = 240
_NOBODY = 253

_MACHINE = "here"
"""The one agent serves all hosts."""

_STREAMS = "the proxies of the local cluster carry byte streams, whose packets cannot be {}: use --cluster netns"
LINKS_MISSING: Mapping[str, str] = {
    "loss": _STREAMS.format("lost"),
    "duplicate": _STREAMS.format("duplicated"),
    "reorder": _STREAMS.format("reordered"),
    "corrupt": "the proxies of the local cluster carry byte streams: a flipped bit would reach the program, since no "
    "checksum would reject it: use --cluster netns",
}
"""Link faults that a local cluster cannot inject, and why."""


MAX_SHOWN = 3
"""Most bypasses that one message lists: one would do, and a connection pool may be large."""


class Bypass(NamedTuple):
    """A connection of a process of `source` to `destination` that does not go over the link between them. If both are
    the same host, a process there receives UDP at `address` from anybody. If `source` is empty, the connection is
    closed and its process unknown."""

    source: str
    destination: str
    pid: int
    address: str


def _first_of(shown: Sequence[str]) -> str:
    more = f" and {len(shown) - MAX_SHOWN} more" if len(shown) > MAX_SHOWN else ""
    return f"{', '.join(shown[:MAX_SHOWN])}{more}"


def _shown_connections(found: Sequence[Bypass]) -> list[str]:
    """One line that lists connections which bypass the proxies; no line if there are none."""
    shown = _first_of([f"{one.source} (process {one.pid}) reaches {one.destination} at {one.address}" for one in found])
    proxies = "the proxy of their link" if len(found) == 1 else "the proxies"
    line = (
        f"{shown}, bypassing {proxies}, by an address that another host passed on or that belongs to the whole "
        "machine: use --cluster netns, which cannot be bypassed"
    )
    return [line] if found else []


def _shown_closed(found: Sequence[Bypass]) -> list[str]:
    """The same for closed connections."""
    shown = _first_of([f"{one.destination} was reached at {one.address}" for one in found])
    line = (
        f"{shown}, bypassing the proxies, by another host, itself or a client (the kernel does not say who owned a "
        "closed connection): use --cluster netns, which cannot be bypassed"
    )
    return [line] if found else []


def _shown_udp(heard: Sequence[Bypass]) -> list[str]:
    """The same for addresses at which UDP is received."""
    shown = _first_of([f"{one.destination} (process {one.pid}) at {one.address}" for one in heard])
    line = (
        f"{shown} can be sent UDP that bypasses the proxies, which carry only TCP: use --cluster netns, which cannot "
        "be bypassed"
    )
    return [line] if heard else []


class LocalNetwork:
    """The network of a `local` cluster: the gates of its link proxy. See nemesis.target.Network, CountsTraffic,
    FindsBypasses and LinkShaper.

    The state of all faults is kept here and sent to the proxy as a whole whenever it changes, so that
    nothing depends on earlier messages.
    """

    mechanism = "proxies"

    def __init__(
        self,
        proxy: AgentHelper,
        probe: LinkProbe,
        pairs: Collection[Link],
        *,
        bypasses: Callable[[float], Awaitable[Collection[Bypass]]],
    ) -> None:
        """`bypasses` finds connections of the hosts' programs that bypass the proxy, or have since a given time."""
        self._proxy = proxy
        self._find_bypasses = bypasses
        self._probe = probe
        self._links = frozenset(pairs) | {Link(b, a) for a, b in pairs}
        self._cuts: dict[str, frozenset[Link]] = {}
        self._shaped: dict[Link, LinkShape] = {}
        self._disturbed_s: dict[Link, float] = {}
        """When each link that is now cut, late or slow became so, by time.monotonic."""

    async def cut(self, fault_id: str, grudge: Grudge) -> None:
        """Drop packets according to `grudge`; in force on return. Raises ValueError for an unknown link,
        ShellError when the proxy has ended."""
        links = links_of(grudge)
        self._require_known(links)
        await self._probe.keep(sorted(links | {Link(b, a) for a, b in links}))
        self._cuts[fault_id] = links
        await self._apply()

    async def heal(self, fault_id: str) -> None:
        """Undo one fault's cut; links that other faults cut stay cut. Idempotent. Raises ShellError."""
        self._cuts.pop(fault_id, None)
        await self._apply()

    async def heal_all(self) -> None:
        """Undo every cut, in any state. Idempotent. Raises ShellError."""
        self._cuts.clear()
        await self._apply()

    async def apply(self, wanted: Mapping[Link, LinkShape]) -> None:
        """See LinkShaper. Raises ValueError for an unknown link, ShellError when the proxy has ended."""
        self._require_known(wanted)
        self._shaped = dict(wanted)
        await self._apply()

    def forget(self) -> None:
        """Nothing to forget: every `apply` sends the whole state."""

    async def probe(self, links: Collection[Link], *, timeout_s: float) -> Sequence[ProbeResult]:
        """Send bytes over each link, on kept and on new connections, and see what arrives (LinkProbe.probe)."""
        return await self._probe.probe(links, timeout_s=timeout_s)

    async def traffic(self, links: Collection[Link]) -> Mapping[Link, LinkTraffic]:
        """What the hosts' programs sent over each link, counted by the proxy. Raises ShellError."""
        self._require_known(links)
        answer = await self._proxy.request("traffic")
        found = {
            Link(source, destination): LinkTraffic(
                passed_bytes=passed_bytes, stopped_bytes=stopped_bytes, stopped_connections=stopped_connections
            )
            for source, destination, passed_bytes, stopped_bytes, stopped_connections in answer["links"]
        }
        return {link: found.get(link, LinkTraffic()) for link in links}

    async def bypasses(self, links: Collection[Link]) -> Sequence[str]:
        """Connections between the ends of these links that bypass the proxy, or have since the links were disturbed,
        and addresses at which the ends receive UDP, which no proxy carries. Raises ShellError."""
        ends, hosts = {frozenset(link) for link in links}, {host for link in links for host in link}
        since_s = min((self._disturbed_s[link] for link in links if link in self._disturbed_s), default=math.inf)
        every = sorted(await self._find_bypasses(since_s))
        closed = [one for one in every if not one.source and one.destination in hosts]
        heard = [one for one in every if one.source == one.destination in hosts]
        found = [one for one in every if frozenset((one.source, one.destination)) in ends]
        return [*_shown_connections(found), *_shown_closed(closed), *_shown_udp(heard)]

    def _require_known(self, links: Collection[Link]) -> None:
        unknown = sorted(set(links) - self._links)
        if unknown:
            raise ValueError(f"this cluster has no link {unknown[0].source}->{unknown[0].destination}")

    async def _apply(self) -> None:
        cut = sorted(frozenset[Link]().union(*self._cuts.values()))
        shaped = [[*link, s.delay_ms, s.jitter_ms, s.rate_bytes_per_s] for link, s in self._shaped.items()]
        await self._proxy.request("gates", cut=cut, shaped=shaped)
        now_s = time.monotonic()
        self._disturbed_s = {link: self._disturbed_s.get(link, now_s) for link in {*cut, *self._shaped}}


class LocalLinks(ShapedLinks):
    """Late and slow links, by the link proxy. See nemesis.target.Links and FindsBypasses; `probe` keeps connections
    through the proxy."""

    def __init__(self, hosts: Collection[str], network: LocalNetwork, probe: LinkProbe) -> None:
        super().__init__(hosts, network)
        self._probe = probe
        self._network = network

    async def bypasses(self, links: Collection[Link]) -> Sequence[str]:
        """See nemesis.target.FindsBypasses. Raises ShellError."""
        return await self._network.bypasses(links)

    async def shape(self, fault_id: str, shapes: Mapping[Link, LinkShape]) -> None:
        """Make links late or slow. Raises ValueError for what a stream does not support, ShellError."""
        for shape in shapes.values():
            if shape.loss_percent or shape.duplicate_percent or shape.reorder_percent or shape.corrupt_percent:
                raise ValueError(LINKS_MISSING["loss"])
        await self._probe.keep(shapes)  # while the links are still fast
        await super().shape(fault_id, shapes)

    async def measure(
        self, links: Collection[Link], *, count: int, size_bytes: int, timeout_s: float
    ) -> Mapping[Link, LinkMeasure]:
        """Time bytes over kept connections of each link."""
        wanted = list(dict.fromkeys(links))
        await self._probe.keep(wanted)
        spacing_s = SPACING_S if size_bytes < BURST_BYTES else 0.0
        measures = await asyncio.gather(
            *(
                self._probe.time_link(
                    link, count=count, size_bytes=size_bytes, spacing_s=spacing_s, timeout_s=timeout_s
                )
                for link in wanted
            )
        )
        return dict(zip(wanted, measures, strict=True))


class LocalCluster(OwnMachineCluster):
    """Hosts as loopback addresses, for one run. See harness.clusters.base.Cluster."""

    name = "local"
    description = "a loopback address per host and a TCP proxy per link; needs no privileges"
    max_hosts = MAX_HOSTS
    file_systems_missing = "the hosts of the local cluster share one file system: use --cluster netns as root"

    def __init__(self, **given: Unpack[ClusterArguments]) -> None:
        super().__init__(**given)
        if not self._ports:
            raise ClusterUnavailable(
                "local: links are proxies of the system's ports, but the system declares none: declare those that it "
                "listens on (ports = {...} in a plug-in), or use --cluster netns"
            )
        if not all(1 <= port <= 65535 for port in self._ports):
            raise ValueError(f"a local cluster needs ports between 1 and 65535, not {sorted(self._ports)}")
        self._numbers = {host: number for number, host in enumerate(self._hosts, 1)}
        self._numbers |= {host: number for number, host in enumerate(self._extra_hosts, _FIRST_EXTRA_NUMBER)}
        self._numbers[CLIENTS_HOST] = _CLIENTS_NUMBER
        self._pairs = [Link(a, b) for a, b in permutations(self._hosts, 2)]
        self._pairs += [Link(host, extra) for extra in self._extra_hosts for host in self._hosts]
        self._pairs += [Link(CLIENTS_HOST, host) for host in self._all_hosts]
        self._proxy: AgentHelper | None = None
        self._proxy_probe: LinkProbe | None = None
        self._hosts_files: dict[str, str] = {}
        """Host -> path of the /etc/hosts that its programs see."""
        self._names_missing = ""
        """Why programs cannot be given names; empty if they can."""
        self._names_were_asked_for = False
        self._commanded_s: dict[str, float] = {}
        """Host -> when the last command that was run on it ended, by time.monotonic."""
        self._own_ports: set[int] = set()
        """Ports on which programs were seen to reach their own host, or clients to reach a host directly."""
        self._far_ports: dict[int, int] = {}
        """Port from which the proxy has connected on for a client -> the client's own port."""
        self._reservation: socket.socket | None = None
        self._net = 0

    @staticmethod
    def link_mechanism() -> str:
        """The mechanism that shapes links on this machine, for `harness doctor`."""
        return LocalNetwork.mechanism

    @classmethod
    def mechanism_of(cls, interface: str, ability: str) -> str:
        """The same as for other clusters with agents, except that the proxies make cuts."""
        return LocalNetwork.mechanism if interface == "network" else super().mechanism_of(interface, ability)

    @classmethod
    def missing(cls, interface: str, ability: str) -> str | None:
        """Why this cluster cannot have an ability (see nemesis.target.ABILITIES) here; None when it can."""
        if interface == "links":
            return LINKS_MISSING.get(ability)
        return super().missing(interface, ability)

    # Life cycle

    async def _make_hosts(self) -> None:
        raise_descriptor_limit()
        self._start_agents()

    async def _prepare_network(self) -> None:
        """Start the proxy, reserve a loopback network and open the probes' connections. Raises ClusterUnavailable when
        no network has these ports free."""
        proxy = self._proxy = AgentHelper(
            self._links[_MACHINE],
            module="harness.clusters.link_proxy",
            import_path=import_path(),
        )
        await proxy.start()
        await self._take_network(proxy)
        probe = self._proxy_probe = LinkProbe(
            listeners={pair: (self._link_ip(pair), min(self._ports)) for pair in self._pairs},
            announce=self._announce,
        )
        network = self._network = LocalNetwork(proxy, probe, self._pairs, bypasses=self._bypasses)
        self._link_faults = LocalLinks(self._numbers, network, probe)
        await probe.keep(Link(a, b) for a, b in permutations(self._hosts, 2))
        await self._name_hosts()

    async def _name_hosts(self) -> None:
        """Write an /etc/hosts for each host, if its programs can be given one. Raises ShellError."""
        agent = self.agent(self._hosts[0])
        namespaces = ["--mount"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--mount"]
        trial = ["mount", "--bind", HOSTS_FILE, HOSTS_FILE]
        status, _, errors = await agent.run(["unshare", *namespaces, *trial])
        if status != 0:
            self._names_missing = (errors.strip().splitlines() or [f"unshare ended with status {status}"])[-1]
            return
        with contextlib.suppress(OSError):
            own_names = Path(HOSTS_FILE).read_text(encoding="utf-8", errors="replace")
            for host in self._all_hosts:
                path = os.path.join(agent.directory, f"{host}.hosts")
                await put_file(agent, path, hosts_file(own_names, self._known_to(host)).encode())
                self._hosts_files[host] = path

    def _known_to(self, host: str) -> dict[str, str]:
        """The hosts that a host reaches, including itself, with the addresses at which it reaches them."""
        return {peer: self._address_by_name(host, peer) for peer in self._reached_from(host)}

    def _named_host(self, host: str) -> NamedHost:
        own, others = self._address(host), self._known_to(host)
        del others[host]
        # The address of a link that does not exist: nothing listens there.
        unused = f"127.{self._net}.{self._numbers[host]}.{_NOBODY}"
        return NamedHost(self.agent(host), listen=own, own=own, names=others, unused=unused)

    def _reached_from(self, host: str) -> list[str]:
        return [host, *(pair.destination for pair in self._pairs if pair.source == host)]

    def _address_by_name(self, source: str, destination: str) -> str:
        return self._address(source) if source == destination else self._link_ip(Link(source, destination))

    def names_of(self, host: str) -> Sequence[str]:
        """The host's own name if programs have an /etc/hosts of the run's."""
        self._names_were_asked_for = True
        return super().names_of(host) or ((host,) if host in self._hosts_files else ())

    def notes_on_links(self) -> Sequence[str]:
        """Warn that without names the system's hosts pass on addresses, which bypass the links."""
        if not self._names_missing or not self._names_were_asked_for:
            return ()
        return (
            "the hosts of this system pass their addresses on to each other, and connections to these addresses bypass "
            "the links here, so cuts that should affect them will not be proven. Names would not bypass the links, but "
            f"need a mount namespace, which is not available here ({self._names_missing}): run as root, or allow user "
            "namespaces",
        )

    def _mounts(self, host: str) -> Sequence[tuple[str, str]]:
        shown = [(self._hosts_files[host], HOSTS_FILE)] if host in self._hosts_files else []
        return super()._mounts(host) or shown

    async def _prepare_links(self, agents: Mapping[str, AgentLink]) -> None:
        """Nothing to do: links are part of the network."""

    async def stop(self) -> None:
        """Heal, end every process, end the proxy. Idempotent. Raises HarnessError."""
        if isinstance(self._network, LocalNetwork):
            with contextlib.suppress(ShellError):  # the proxy is gone, and all cuts with it
                await self._network.apply({})
                await self._network.heal_all()
        probe, self._proxy_probe = self._proxy_probe, None
        self._proxy = None
        try:
            await super().stop()
        finally:
            if probe is not None:
                await probe.close()

    async def _remove_places(self) -> list[Exception]:
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None
        return []

    def _of_host(self, host: str, strays: Sequence[ProcessMember]) -> Sequence[ProcessMember]:
        # One agent serves all hosts, so strays are distinguished by the address they listen on. None can listen on
        # these ports at all addresses, because the proxies listen on each of them at addresses of their own.
        if not strays:
            return []
        address = self._address(host)
        inodes = {
            each.inode
            for each in sockets_here("tcp", "tcp6")
            if each.state == LISTENING and each.own.address == address and each.own.port in self._ports
        }
        return [stray for stray in strays if not inodes.isdisjoint(sockets_of(stray.pid))]

    # Hosts

    def _machine(self, host: str) -> str:
        return _MACHINE

    def _address(self, host: str) -> str:
        if not self._net:
            raise RuntimeError("the cluster has no addresses: it was not started")
        return f"127.{self._net}.0.{self._numbers[host]}"

    def address_from(self, source: str, destination: str, port: int) -> str:
        """The "ip:port" of the link from `source` to `destination`; a host reaches itself without a link.

        Raises ValueError for a port that the cluster was not made with, and for a pair without a link: replicas
        connect to each other and to extra hosts, clients to all hosts, and no other pair to each other.
        """
        if port not in self._ports:
            raise ValueError(f"port {port} is not one of this cluster's ports: {sorted(self._ports)}")
        if source == destination:
            return f"{self.bind_address(source)}:{port}"
        pair = Link(source, destination)
        if pair not in self._pairs:
            raise ValueError(f"{source} opens no connections to {destination} in a local cluster")
        self.bind_address(destination)
        return f"{self._link_ip(pair)}:{port}"

    async def spawn(self, host: str, program: Program) -> AgentProcess:
        """Start a program for a host. Raises OperatorError when it cannot be run."""
        if host not in self._numbers:
            raise ValueError(f"this cluster has no host {host}")
        return await super().spawn(host, program)

    async def run(
        self, host: str, argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> tuple[int, str, str]:
        """See AgentCluster.run."""
        try:
            return await super().run(host, argv, stdin=stdin, timeout_s=timeout_s)
        finally:
            self._commanded_s[host] = time.monotonic()

    async def _bypasses(self, since_s: float) -> set[Bypass]:
        """The connections that replicas' programs have opened to another replica's host other than over their own link
        to it: to a program there, at whatever address, to the host's own address, or over a third host's link to it.
        The peers of unconnected UDP sockets are not seen, but receiving UDP on one of the system's ports counts, since
        no link carries UDP. Connections that were closed since `since_s` (time.monotonic) come without a process, which
        the kernel has forgotten. Raises ShellError."""
        programs = {process.host_pid: process.host for process in self._processes.running}
        astray = {self.bind_address(host): host for host in self._hosts}
        astray |= {self._link_ip(pair): pair.destination for pair in self._pairs if pair.destination in self._hosts}
        answer = await self.agent(self._hosts[0]).request("connections_of", {"pids": list(programs)})
        found = set()
        for program_pid, pid, ip, port, peer_pid in answer["connections"]:
            source, destination = programs[program_pid], programs.get(peer_pid) or astray.get(ip)
            if source == destination:
                self._own_ports.add(port)
            if not {source, destination} <= {*self._hosts} or destination is None or destination == source:
                continue
            if peer_pid or ip != self._link_ip(Link(source, destination)):
                found.add(Bypass(source, destination, pid, f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"))
        for program_pid, pid, ip, port in answer["heard"]:
            host = programs[program_pid]
            if host in self._hosts and port in self._ports and ip in (self.bind_address(host), "0.0.0.0", "::"):
                found.add(Bypass(host, host, pid, f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"))
        return found | self._reached_directly(since_s)

    def _reached_directly(self, since_s: float) -> set[Bypass]:
        """Connections to hosts' own addresses that were closed since `since_s` (time.monotonic), except the proxies',
        which come from the hosts' addresses. The kernel has forgotten whose they were; so none count on ports on which
        a host was seen to reach itself or a client to reach a host, nor to hosts on which a command has ended since."""
        at_s, hosts = time.monotonic(), {self.bind_address(host): host for host in self._hosts}
        proxies = {self._address(host) for host in self._numbers}
        found, here = set[Bypass](), sockets_here("tcp", "tcp6") if since_s < at_s else []
        clients = sockets_of(os.getpid()) if here else set[int]()
        self._own_ports |= {each.peer.port for each in here if each.inode in clients and each.peer.address in hosts}
        for each in here:
            if each.state != TIME_WAIT or at_s - (TIME_WAIT_S - each.timer_s) < since_s:
                continue
            for end, other in ((each.own, each.peer), (each.peer, each.own)):
                host = hosts.get(end.address)
                if host is None or other.address in proxies or end.port in self._own_ports:
                    continue
                if self._commanded_s.get(host, 0.0) < since_s:
                    found.add(Bypass("", host, 0, f"{end.address}:{end.port}"))
        return found

    async def send_queues(self, host: str, peer_ports: Collection[int]) -> Sequence[SendQueue]:
        """See SeesSendQueues; here the programs' peer is the proxy, which connects on for the clients. Its ports are
        remembered until the end, since a send queue may outlive the client's connection. Raises ShellError."""
        if self._proxy is not None:
            answer = await self._proxy.request("far_ports", ports=list(peer_ports))
            self._far_ports |= {far: near for near, far in answer["ports"]}
        wanted = set(peer_ports)
        near = {far: port for far, port in self._far_ports.items() if port in wanted}
        found = await super().send_queues(host, list(near))
        return [queue._replace(peer_port=near[queue.peer_port]) for queue in found]

    def _link_ip(self, pair: Link) -> str:
        return f"127.{self._net}.{self._numbers[pair.source]}.{self._numbers[pair.destination]}"

    async def _announce(self, routes: Sequence[tuple[str, int, str, int]]) -> None:
        if self._proxy is None:
            raise RuntimeError("a link was probed after the cluster was stopped")
        await self._proxy.request("route", routes=routes)

    async def _take_network(self, proxy: AgentHelper) -> None:
        """Find a free 127.R and listen on all links there. Raises ClusterUnavailable."""
        refusal = ""
        for net in self._candidates():
            self._net = net
            reservation = socket.socket()
            try:
                reservation.bind((f"127.{net}.255.254", RESERVATION_PORT))
                self._require_free_ports()
                await proxy.request(
                    "open",
                    seed=zlib.crc32(self._run.run_id.encode()),
                    links=self._listeners(),
                    timeout_s=_LISTEN_ALL_TIMEOUT_S,
                    listens_within_s=START_TIMEOUT_S,
                )
            except OSError as error:
                reservation.close()
                refusal = self._explain(error.errno, getattr(error, "port", 0))
            except HelperRefused as error:
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
        """All R, starting at one that depends on the run, so that concurrent runs rarely collide."""
        first = zlib.crc32(self._run.run_id.encode())
        for step in range(254):
            yield 1 + (first + step) % 254

    def _require_free_ports(self) -> None:
        """Try the addresses that nodes will listen on. Raises _PortError."""
        for host in self._numbers:
            for port in sorted(self._ports):
                with socket.socket() as trial:
                    trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    try:
                        trial.bind((self.bind_address(host), port))
                    except OSError as error:
                        raise _PortError(error.errno, port) from None

    def _listeners(self) -> list[dict[str, object]]:
        ports = sorted(self._ports)
        return [
            {
                "source": pair.source,
                "destination": pair.destination,
                "from": self.bind_address(pair.source),
                "ports": [[self._link_ip(pair), port, self.bind_address(pair.destination), port] for port in ports],
            }
            for pair in self._pairs
        ]

    def _explain(self, number: int | None, port: int) -> str:
        """What the operator can do about the error on the last network that was tried."""
        if number == errno.EADDRINUSE and port:
            return (
                f"local: port {port} is in use: stop the program that listens on it on all addresses, "
                "or give the nodes another port"
            )
        if number == errno.EADDRINUSE:
            return "local: all 254 loopback networks are in use: stop other runs, or `harness clean` after dead ones"
        if number in (errno.EACCES, errno.EPERM):
            return f"local: no permission to listen on port {port}: give the nodes ports of 1024 or above"
        if number == errno.EADDRNOTAVAIL:
            return "local: this machine's loopback network is not 127.0.0.0/8 (on Linux it is)"
        return f"local: cannot listen on loopback addresses: {os.strerror(number or errno.EIO)}"


class _PortError(OSError):
    """The harness cannot listen on an address of a node."""

    def __init__(self, number: int | None, port: int) -> None:
        super().__init__(number, os.strerror(number or errno.EIO))
        self.port = port
