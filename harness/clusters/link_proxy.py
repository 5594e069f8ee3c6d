"""The link proxy: a process through which every connection between the hosts of a `local` cluster goes.

Each directed pair of hosts that may open connections has its own listeners, one for each port; a client that
connects there is joined to that port of the destination host. The listener identifies the link of a
connection, so the proxy can cut, delay and throttle each direction between two hosts separately (see
`link_pump`).

What a cut does: existing connections stall in that direction; nothing passes, not even their end. A new
connection is not established to the far host while either direction of its link is cut, since TCP needs both.
It looks accepted (the kernel has done that by then), but nothing answers and what is sent waits. When both
directions are open again it proceeds, as after a repeated SYN; if the opener has hung up meanwhile, none of it
ever reaches the far host.

It takes requests on the Unix socket that its argument names, in the format of control_server:

    open    {"seed", "links": [{"source", "destination", "from": ip, "ports": [[listen ip, port, to ip, port], ...]}]}
    gates   {"cut": [[source, destination], ...], "shaped": [[source, destination, delay_ms, jitter_ms, bytes/s], ...]}
            the state of all links; a link that is not named is open and unshaped
    route   {"routes": [[ip, port, to ip, to port], ...]}   where connections *from* these addresses go, once each
    stats   -> {"connections", "pending", "held_bytes"}
    traffic -> {"links": [[source, destination, bytes passed, bytes stopped, connections stopped], ...]}
            since `open`, excluding connections for which a route was announced, which are the harness's
    far_ports  {"ports": [...]} -> {"ports": [[opener's port, port from which the proxy connected on], ...]}
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import socket
from collections.abc import Iterable
from typing import Any, cast

from harness.clusters.control_server import run_helper
from harness.clusters.link_pump import Gate, Pump, Side, reset

__all__ = ["LinkProxy", "main", "raise_descriptor_limit"]

MAX_CONNECTIONS = 20_000
"""Connections at a time; each takes two descriptors and, when cut, up to MAX_HELD_BYTES. Further ones are reset."""

MAX_PENDING_PER_LINK = 64
"""Connections that wait on one cut link. A peer that keeps giving up and retrying leaves many behind; the oldest
is reset to make room."""

MAX_ROUTES = 4096
"""Announced probe connections that have not been opened yet; beyond this the oldest is forgotten."""

CONNECT_TIMEOUT_S = 5.0
"""How long the destination host's kernel may take to accept; on one machine only a full backlog takes long."""

LISTEN_BACKLOG = 512
"""Connections that may wait for the proxy to accept them."""

_TCP_ESTABLISHED = 1
"""From linux/tcp_states.h."""

Address = tuple[str, int]


class _Link:
    """A directed pair of hosts over which connections are opened."""

    def __init__(self, *, source_ip: str, forward: Gate, backward: Gate) -> None:
        self.source_ip = source_ip
        self.forward = forward
        self.backward = backward
        self.pending: dict[_Opener, None] = {}

    @property
    def is_open(self) -> bool:
        return not (self.forward.is_cut or self.backward.is_cut)


class _Opener(Side):
    """The accepted socket of a connection, and the connection's link and destination."""

    def __init__(self, proxy: LinkProxy, link: _Link, destination: Address) -> None:
        super().__init__(incoming=Pump(link.backward), outgoing=Pump(link.forward))
        self.link = link
        self.destination = destination
        self.local_address: Address | None = (link.source_ip, 0)
        self.far_transport: asyncio.Transport | None = None
        self._proxy = proxy

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._proxy.accepted(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.link.pending.pop(self, None)
        self._proxy.lost(self)
        super().connection_lost(exc)

    def has_hung_up(self) -> bool:
        """Whether the opener has closed its end; the kernel knows, since nothing is read while pending."""
        if self.transport is None or self.transport.is_closing():
            return True
        if not hasattr(socket, "TCP_INFO"):
            return False
        info = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return bool(info[0] != _TCP_ESTABLISHED)

    def drop(self) -> None:
        """Reset the connection at both ends, even if its link is cut."""
        self.link.pending.pop(self, None)
        for transport in (self.transport, self.far_transport):
            if transport is not None:
                reset(transport)


class LinkProxy:
    """All links of one cluster, one instance per process; its methods are the operations of the protocol."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._gates: dict[tuple[str, str], Gate] = {}
        self._links: list[_Link] = []
        self._servers: list[asyncio.Server] = []
        self._openers: dict[_Opener, None] = {}
        self._routes: dict[Address, Address] = {}
        self._connecting: set[asyncio.Task[None]] = set()

    async def open(self, message: dict[str, Any]) -> dict[str, Any]:
        """Listen for all links. If one address is not available, all listeners are closed and the reply names it."""
        self._rng.seed(int(message.get("seed", 0)))
        loop = asyncio.get_running_loop()
        for entry in message["links"]:
            source, destination = entry["source"], entry["destination"]
            link = _Link(
                source_ip=entry["from"],
                forward=self._gate(source, destination),
                backward=self._gate(destination, source),
            )
            self._links.append(link)
            for listen_ip, listen_port, to_ip, to_port in entry["ports"]:

                def accept(link: _Link = link, destination: Address = (to_ip, to_port)) -> _Opener:
                    return _Opener(self, link, destination)

                try:
                    server = await loop.create_server(accept, listen_ip, listen_port, backlog=LISTEN_BACKLOG)
                except OSError as error:
                    await self.close()
                    return {
                        "ok": False,
                        "error": f"cannot listen on {listen_ip}:{listen_port}",
                        "errno": error.errno,
                        "port": listen_port,
                    }
                self._servers.append(server)
        return {"ok": True}

    async def gates(self, message: dict[str, Any]) -> dict[str, Any]:
        """Set every link; in force when the reply is sent."""
        cut = {(source, destination) for source, destination in message["cut"]}
        shaped = {(source, destination): shape for source, destination, *shape in message["shaped"]}
        unknown = sorted((cut | shaped.keys()) - self._gates.keys())
        if unknown:
            return {"ok": False, "error": f"no link {unknown[0][0]}->{unknown[0][1]}"}
        for ends, gate in self._gates.items():
            delay_ms, jitter_ms, rate_bytes_per_s = shaped.get(ends, (0.0, 0.0, 0.0))
            gate.set(
                is_cut=ends in cut,
                delay_ms=delay_ms,
                jitter_ms=jitter_ms,
                rate_bytes_per_s=rate_bytes_per_s,
            )
        for link in self._links:
            if link.pending and link.is_open:
                _drop_hung_up(link.pending)
                waiting = list(link.pending)
                link.pending.clear()
                for opener in waiting:
                    self._establish(opener)
        return {"ok": True}

    async def route(self, message: dict[str, Any]) -> dict[str, Any]:
        """Remember where announced connections go."""
        for ip, port, to_ip, to_port in message["routes"]:
            self._routes[(ip, port)] = (to_ip, to_port)
        while len(self._routes) > MAX_ROUTES:
            del self._routes[next(iter(self._routes))]
        return {"ok": True}

    async def stats(self, message: dict[str, Any]) -> dict[str, Any]:
        """Count connections, pending ones, and bytes held, at this moment."""
        return {
            "ok": True,
            "connections": len(self._openers),
            "pending": sum(len(link.pending) for link in self._links),
            "held_bytes": sum(pump.held_bytes for gate in self._gates.values() for pump in gate.pumps),
        }

    async def traffic(self, message: dict[str, Any]) -> dict[str, Any]:
        """What has passed each link, and what was stopped at it."""
        return {
            "ok": True,
            "links": [
                [*ends, gate.passed_bytes, gate.stopped_bytes, gate.stopped_connections]
                for ends, gate in self._gates.items()
            ],
        }

    async def far_ports(self, message: dict[str, Any]) -> dict[str, Any]:
        """For each opener that has connected from one of these ports, the port from which the proxy connected on."""
        wanted = set(message["ports"])
        found = []
        for opener in self._openers:
            near, far = opener.transport, opener.far_transport
            peer = None if near is None else near.get_extra_info("peername")
            if far is not None and peer is not None and peer[1] in wanted:
                found.append([peer[1], far.get_extra_info("sockname")[1]])
        return {"ok": True, "ports": found}

    async def close(self) -> None:
        """Close every listener and connection. Idempotent."""
        for server in self._servers:
            server.close()
        for task in self._connecting:
            task.cancel()
        for opener in list(self._openers):
            opener.drop()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        self._servers.clear()
        self._links.clear()
        self._gates.clear()

    def accepted(self, opener: _Opener) -> None:
        """Join a new connection to its destination, or let it wait while its link is cut."""
        self._openers[opener] = None
        transport = cast(asyncio.Transport, opener.transport)
        routed = self._routes.pop(transport.get_extra_info("peername"), None)
        if routed is not None:
            opener.destination, opener.local_address = routed, None
            opener.incoming.is_counted = opener.outgoing.is_counted = False
        link = opener.link
        if len(self._openers) > MAX_CONNECTIONS:
            opener.drop()
        elif link.is_open:
            self._establish(opener)
        else:
            _drop_hung_up(link.pending)
            if len(link.pending) >= MAX_PENDING_PER_LINK:
                next(iter(link.pending)).drop()
            link.pending[opener] = None
            if routed is None:  # the SYN goes forward, and the answer to it back
                stopping = link.forward if link.forward.is_cut else link.backward
                stopping.stopped_connections += 1

    def lost(self, opener: _Opener) -> None:
        """Forget a connection that has ended."""
        self._openers.pop(opener, None)

    def _gate(self, source: str, destination: str) -> Gate:
        return self._gates.setdefault((source, destination), Gate(self._rng))

    def _establish(self, opener: _Opener) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(opener))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, opener: _Opener) -> None:
        """Connect to the far host and start the pumps. If it refuses, the opener is reset."""
        far = Side(incoming=opener.outgoing, outgoing=opener.incoming)
        ip, port = opener.destination
        try:
            await asyncio.wait_for(
                asyncio.get_running_loop().create_connection(lambda: far, ip, port, local_addr=opener.local_address),
                CONNECT_TIMEOUT_S,
            )
        except (OSError, TimeoutError):
            opener.drop()
            return
        near_transport = cast(asyncio.Transport, opener.transport)
        far_transport = cast(asyncio.Transport, far.transport)
        if near_transport.is_closing():  # the opener has hung up meanwhile, and nothing was read from it
            reset(far_transport)
            return
        opener.far_transport = far_transport
        opener.outgoing.connect(near_transport, far_transport)
        opener.incoming.connect(far_transport, near_transport)


def _drop_hung_up(openers: Iterable[_Opener]) -> None:
    for opener in list(openers):
        if opener.has_hung_up():
            opener.drop()


def raise_descriptor_limit() -> int:
    """Raise this process's limit on open descriptors as far as the system allows; returns the new limit.

    A cluster of n nodes has some n * n links, each with several sockets, and the usual soft limit is 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems refuse "unlimited"
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft


def main() -> None:
    """Run the proxy on the path that is the first argument."""
    raise_descriptor_limit()
    proxy = LinkProxy()
    run_helper(
        {
            "open": proxy.open,
            "gates": proxy.gates,
            "route": proxy.route,
            "stats": proxy.stats,
            "traffic": proxy.traffic,
            "far_ports": proxy.far_ports,
        }
    )


if __name__ == "__main__":
    main()
