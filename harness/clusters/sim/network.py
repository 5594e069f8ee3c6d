"""The network: hosts with one address each, a directed link for every pair, connections over them.

It is also the fault interface of the cluster (nemesis.target.Network), and more: links can be made slow, lossy
or narrow, and connections reset. Each link has a random stream of its own.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from harness.clusters.sim.errors import NotSimulated
from harness.clusters.sim.lane import Lane
from harness.clusters.sim.link import LatencyModel, SimLink
from harness.clusters.sim.loop import SimLoop
from harness.clusters.sim.server import SimServer
from harness.clusters.sim.transport import SimTransport
from harness.clusters.sim.wire import Mark, Wire, WireEnd
from nemesis.target import PROBE_ATTEMPTS, Grudge, Link, LinkShape, LinkTraffic, ProbeResult, links_of

__all__ = ["SYN_ATTEMPTS", "Dial", "NetworkHost", "SimNetwork", "TraceEvent"]

LOOPBACK = LatencyModel(minimum_s=10e-6, mean_extra_s=10e-6, slow_ratio=0.0)
"""Latency within one host."""

FIRST_EPHEMERAL_PORT = 32768
LAST_PORT = 65535
DEFAULT_BACKLOG = 100

NO_ROUTE_S = 3.1
"""Time (s) until the kernel gives up on an address that no host has (Linux: three ARP requests)."""

SYN_ATTEMPTS = 7
"""SYNs sent, 1, 2, 4, ... seconds apart, before connecting times out after 127 s (Linux: tcp_syn_retries = 6)."""

_HARMLESS_OPTIONS = frozenset(
    ("family", "proto", "flags", "reuse_address", "keep_alive", "happy_eyeballs_delay", "interleave", "all_errors")
)
"""Options of create_server and create_connection that have no effect here."""


class TraceEvent(NamedTuple):
    """One thing that happened to a segment. `connection` is 0 outside connections. kind: syn, refused, accept, send,
    fin, arrive, lost, again (retransmitted; size is the number of segments), probe. Segments of a connection are
    numbered in each direction; `content` is set when a segment is first sent."""

    time_s: float
    kind: str
    source: str
    destination: str
    connection: int
    size_bytes: int
    number: int = 0
    content: bytes = b""


class NetworkHost:
    """The network state of a host's kernel."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.has_power = True
        self.power_cycles = 0
        self.listeners: dict[int, SimServer] = {}
        self._next_port = FIRST_EPHEMERAL_PORT

    def free_port(self) -> int:
        """The next port, in turn, on which nobody listens."""
        for _ in range(LAST_PORT - FIRST_EPHEMERAL_PORT + 1):
            port = self._next_port
            self._next_port = port + 1 if port < LAST_PORT else FIRST_EPHEMERAL_PORT
            if port not in self.listeners:
                return port
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))


class SimNetwork:
    """All hosts and links of a simulation. Attaches itself to the loop."""

    def __init__(self, loop: SimLoop, *, latency: LatencyModel | None = None) -> None:
        self.loop = loop
        self.trace: Callable[[TraceEvent], None] | None = None
        """Called with every event, if set."""
        self._latency = latency or LatencyModel()
        self._hosts: dict[str, NetworkHost] = {}
        self._by_address: dict[str, NetworkHost] = {}
        self._links: dict[tuple[str, str], SimLink] = {}
        self._cuts: dict[str, frozenset[Link]] = {}
        self._shapes: dict[str, dict[Link, LinkShape]] = {}
        self._connections = 0
        self._transports: dict[SimTransport, None] = {}
        loop.network = self

    # Hosts and links

    def add_host(self, name: str, address: str) -> NetworkHost:
        """Add a host. Raises ValueError when the name or address is taken."""
        if name in self._hosts or address in self._by_address:
            raise ValueError(f"there is a host {name} or an address {address} already")
        host = self._hosts[name] = self._by_address[address] = NetworkHost(name, address)
        return host

    def host(self, name: str) -> NetworkHost:
        """A host by name."""
        return self._hosts[name]

    def has_power(self, name: str) -> bool:
        """Whether a host's kernel runs."""
        return self._hosts[name].has_power

    def link(self, source: str, destination: str) -> SimLink:
        """The link from one host to another; created on first use."""
        link = self._links.get((source, destination))
        if link is None:
            if source not in self._hosts or destination not in self._hosts:
                raise ValueError(f"this cluster has no link {source}->{destination}")
            stream = self.loop.streams.get(f"link/{source}/{destination}")
            model = LOOPBACK if source == destination else self._latency
            link = self._links[source, destination] = SimLink(
                source, destination, self._hosts[destination], model, stream
            )
        return link

    def note(
        self,
        kind: str,
        link: SimLink,
        end: WireEnd | None,
        size_bytes: int,
        number: int = 0,
        content: bytes = b"",
    ) -> None:
        """Report an event to the trace, if there is one. `number` and `content` are those of a connection's segment."""
        if self.trace is not None:
            connection = end.number if end is not None else 0
            self.trace(
                TraceEvent(
                    self.loop.time(), kind, link.source, link.destination, connection, size_bytes, number, content
                )
            )

    def process_died(self, lane: Lane) -> None:
        """Close what a process that has ended held open, as its kernel does."""
        for held in list(lane.__dict__.get("sockets", ())):
            held.close_socket()

    def power_lost(self, name: str, lanes: Collection[Lane]) -> None:
        """Take down a host with everything on it. Its peers receive nothing."""
        host = self._hosts[name]
        host.has_power = False
        host.power_cycles += 1
        for lane in lanes:
            for held in list(lane.__dict__.get("sockets", ())):
                held.vanish()

    def power_restored(self, name: str) -> None:
        """Bring a host's kernel up again; it answers segments of connections that it does not know with resets."""
        self._hosts[name].has_power = True

    # What programs do

    def _host_of(self, lane: Lane) -> NetworkHost:
        host = self._by_address.get(lane.address)
        if host is None:
            raise NotSimulated(f"{lane.name} uses the network in simulation, but runs on no host")
        return host

    def listen(
        self,
        factory: Callable[[], asyncio.BaseProtocol],
        address: Any,
        port: Any,
        *,
        backlog: int = DEFAULT_BACKLOG,
        start_serving: bool = True,
        **options: Any,
    ) -> SimServer:
        """Listen for the current process. Raises OSError: address in use or not this host's."""
        self._refuse_options(options)
        lane = self.loop.current_lane()
        host = self._host_of(lane)
        if lane.is_dead:
            raise OSError(errno.ENETDOWN, f"{lane.name} is dead")
        if address not in (None, "", "0.0.0.0", "127.0.0.1", "localhost", host.address):
            raise OSError(
                errno.EADDRNOTAVAIL,
                f"error while attempting to bind on address ({address!r}, {port}): cannot assign requested address",
            )
        number = int(port or 0) or host.free_port()
        if number in host.listeners:
            raise OSError(
                errno.EADDRINUSE,
                f"error while attempting to bind on address ({address!r}, {port}): address already in use",
            )
        server = SimServer(self, lane, factory, (host.address, number), backlog)
        host.listeners[number] = server
        if start_serving:
            server.listen()
        return server

    def unlisten(self, server: SimServer) -> None:
        """Free a server's port."""
        listeners = self._by_address[server.address[0]].listeners
        if listeners.get(server.address[1]) is server:
            del listeners[server.address[1]]

    async def connect(
        self, factory: Callable[[], asyncio.BaseProtocol], address: Any, port: Any, **options: Any
    ) -> tuple[SimTransport, asyncio.BaseProtocol]:
        """Connect the current process to `address`:`port`. Raises OSError: refused, timed out, no such host."""
        self._refuse_options(options)
        lane = self.loop.current_lane()
        source = self._host_of(lane)
        if address in ("localhost", "127.0.0.1"):
            address = source.address
        await self.loop.getaddrinfo(address, port)
        destination = self._by_address.get(str(address))
        if destination is None:
            await asyncio.sleep(NO_ROUTE_S)
            raise OSError(errno.EHOSTUNREACH, f"Connect call failed ({address!r}, {port}): no route to host")
        dial = Dial(self, lane, source, destination, int(port))
        try:
            transport = await dial.established
        except OSError as error:
            raise type(error)(error.errno, f"Connect call failed ({address!r}, {port}): {error.strerror}") from None
        except asyncio.CancelledError:
            dial.cancel()
            raise
        protocol = factory()
        transport.start(protocol)
        return transport, protocol

    def establish(self, lane: Lane, source: NetworkHost, destination: NetworkHost, server: SimServer) -> SimTransport:
        """Make both ends of a connection whose handshake has succeeded; returns the dialling one."""
        self._connections += 1
        number = self._connections
        there, back = self.link(source.name, destination.name), self.link(destination.name, source.name)
        to_server, to_client = Wire(self, there, back), Wire(self, back, there)
        local = (source.address, source.free_port())
        client = SimTransport(self, lane, number, local, server.address, to_server, to_client)
        accepted = SimTransport(self, server.lane, number, server.address, local, to_client, to_server)
        accepted.server = server
        self._transports[client] = self._transports[accepted] = None
        to_server.put(Mark.ACCEPT)
        return client

    def forget(self, transport: SimTransport) -> None:
        """Forget an end of a connection that is gone."""
        self._transports.pop(transport, None)

    @staticmethod
    def _refuse_options(options: Mapping[str, Any]) -> None:
        unknown = [name for name, value in options.items() if value and name not in _HARMLESS_OPTIONS]
        if unknown:
            raise NotSimulated(
                f"{', '.join(sorted(unknown))} is not available in simulation: connections are unencrypted and made by "
                "address"
            )

    # Faults (nemesis.target.Network and more)

    async def cut(self, fault_id: str, grudge: Grudge) -> None:
        """Drop segments according to `grudge` until `heal(fault_id)`. Raises ValueError for an unknown link."""
        self._remove_cut(fault_id)
        links = links_of(grudge)
        for link in sorted(links):
            self.link(*link).cut_by[fault_id] = None
        self._cuts[fault_id] = links

    async def heal(self, fault_id: str) -> None:
        """Undo one fault's cut; links that other faults cut stay cut. Idempotent."""
        self._remove_cut(fault_id)

    def _remove_cut(self, fault_id: str) -> None:
        for link in sorted(self._cuts.pop(fault_id, ())):
            self.link(*link).cut_by.pop(fault_id, None)

    async def heal_all(self) -> None:
        """Undo every cut. Idempotent."""
        for fault_id in list(self._cuts):
            self._remove_cut(fault_id)

    def shape(self, fault_id: str, shapes: Mapping[Link, LinkShape]) -> None:
        """Shape directed links until `unshape(fault_id)`; several faults on one link add up."""
        for link in shapes:
            self.link(*link)
        self._shapes[fault_id] = dict(shapes)
        self._apply_shapes()

    def unshape(self, fault_id: str) -> None:
        """Undo one fault's shaping. Idempotent."""
        self._shapes.pop(fault_id, None)
        self._apply_shapes()

    def unshape_all(self) -> None:
        """Undo all shaping. Idempotent."""
        self._shapes.clear()
        self._apply_shapes()

    def _apply_shapes(self) -> None:
        for (source, destination), link in self._links.items():
            key = Link(source, destination)
            combined: LinkShape | None = None
            for shapes in self._shapes.values():
                if key in shapes:
                    combined = shapes[key] if combined is None else shapes[key].on_top_of(combined)
            link.shape = combined

    async def reset_connections(self, links: Collection[Link]) -> int:
        """Reset every connection between the hosts of each link, at both ends. Returns how many were reset."""
        pairs = {frozenset((self.link(*link).source, link.destination)) for link in links}
        broken = dict.fromkeys(
            transport.number for transport in self._transports if frozenset(transport.host_names) in pairs
        )
        for transport in list(self._transports):
            if transport.number in broken:
                transport.broken(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))
        return len(broken)

    async def traffic(self, links: Collection[Link]) -> Mapping[Link, LinkTraffic]:
        """What programs have sent along each link, and how much of it ran into a cut."""
        return {link: self.link(*link).traffic for link in links}

    async def probe(self, links: Collection[Link], *, timeout_s: float) -> Sequence[ProbeResult]:
        """Send probe segments along each link and see whether one arrives within `timeout_s` seconds."""
        started_s = self.loop.time()
        order = list(dict.fromkeys(links))
        arrived_s: dict[Link, float] = {}
        all_arrived = self.loop.create_future()

        def arrive(key: Link, link: SimLink) -> None:
            if link.cut_by or not self.has_power(link.destination):
                return
            arrived_s.setdefault(key, self.loop.time())
            if len(arrived_s) == len(order) and not all_arrived.done():
                all_arrived.set_result(None)

        def send(key: Link, link: SimLink) -> None:
            if key in arrived_s or all_arrived.done():
                return
            self.note("probe", link, None, 0)
            if self.has_power(link.source) and not link.loses():
                self.loop.event_at(link.arrival_s(self.loop.time(), 0), arrive, key, link)

        for key in order:
            link = self.link(*key)
            for attempt in range(PROBE_ATTEMPTS):
                self.loop.event_at(started_s + attempt * timeout_s / PROBE_ATTEMPTS, send, key, link)
        if order:
            try:
                async with asyncio.timeout(timeout_s):
                    await all_arrived
            except TimeoutError:
                pass
        return [_probe_result(link, started_s, arrived_s.get(link), timeout_s) for link in links]


class Dial:
    """One attempt of a process to connect: the dialling side of a handshake, SYN and SYN-ACK, with the retries of both.

    `established` becomes the connected transport, or fails with OSError.
    """

    def __init__(
        self, network: SimNetwork, lane: Lane, source: NetworkHost, destination: NetworkHost, port: int
    ) -> None:
        self._network = network
        self._loop = network.loop
        self._lane = lane
        self._source = source
        self._destination = destination
        self._port = port
        self._out = network.link(source.name, destination.name)
        self._back = network.link(destination.name, source.name)
        self._attempts = 0
        self._is_over = False
        self._source_power = source.power_cycles
        self.established: asyncio.Future[SimTransport] = self._loop.create_future()
        self._send_syn()

    def cancel(self) -> None:
        """Give up the attempt: nobody waits for the result any more."""
        self._is_over = True
        future = self.established
        if future.done() and not future.cancelled() and future.exception() is None:
            future.result().close_socket()

    def _is_pointless(self) -> bool:
        return self._is_over or self._lane.is_dead or self._source.power_cycles != self._source_power

    def _fail(self, error: OSError) -> None:
        self._is_over = True
        if not self.established.done():
            self.established.set_exception(error)
            self.established.exception()  # retrieved: the waiting process may be killed before it does that itself

    def _send_syn(self) -> None:
        if self._is_pointless():
            return
        if self._attempts == SYN_ATTEMPTS:
            self._fail(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))
            return
        now = self._loop.time()
        if self._network.trace is not None:
            self._network.note("syn", self._out, None, 0)
        if not self._out.loses():
            self._loop.event_at(self._out.arrival_s(now, 0), self._syn_arrives)
        elif self._out.cut_by:
            self._out.stopped_connections += 1
        self._loop.event_at(now + 2**self._attempts, self._send_syn)
        self._attempts += 1

    def _syn_arrives(self) -> None:
        if self._out.cut_by:
            self._out.stopped_connections += 1
            return
        if not self._destination.has_power or self._is_over:
            return
        server = self._destination.listeners.get(self._port)
        if server is not None and not server.has_room:
            return  # as kernels do: the SYN is dropped and will be retried
        if self._back.loses():
            self._back.stopped_connections += bool(self._back.cut_by)
            return
        answer = self._refused if server is None else self._syn_ack_arrives
        self._loop.event_at(self._back.arrival_s(self._loop.time(), 0), answer)

    def _refused(self) -> None:
        if self._is_pointless() or self._back.cut_by:
            return
        if self._network.trace is not None:
            self._network.note("refused", self._back, None, 0)
        self._fail(ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)))

    def _syn_ack_arrives(self) -> None:
        if self._is_pointless() or self._back.cut_by or self.established.done():
            return
        server = self._destination.listeners.get(self._port)
        if server is None:
            return  # it closed meanwhile; the next SYN is refused
        self._is_over = True
        self.established.set_result(self._network.establish(self._lane, self._source, self._destination, server))


def _probe_result(link: Link, started_s: float, arrived_s: float | None, timeout_s: float) -> ProbeResult:
    if arrived_s is None:
        return ProbeResult(link=link, passed=False, detail=f"nothing arrived within {timeout_s:g} s")
    return ProbeResult(link=link, passed=True, detail=f"arrived after {(arrived_s - started_s) * 1000:.3f} ms")
