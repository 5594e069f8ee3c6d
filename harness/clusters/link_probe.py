"""Probes for the links of a `local` cluster: real bytes through the real proxy.

For every pair of hosts that may open connections, the harness keeps one connection of its own through the
pair's listener. It announces the address that it connects from, so that the proxy joins the connection to an
endpoint of the harness instead of a node. Everything in between is the same as for the nodes' own
connections: the listener, the gates, the pumps.

A probe of a link sends a nonce over each such connection between the two hosts, in the direction of the link:
one on the connection that its source opened, and one on the connection that its destination opened. It also
opens new connections between the two hosts, which must not be established while either direction is cut. A
probe reports only what arrived.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from typing import cast

from nemesis.target import Link, LinkMeasure, ProbeResult

__all__ = ["LinkProbe"]

NONCE_BYTES = 8
"""A nonce is a counter: it has to be unique only within one harness, as its connections reach no other."""

_BLOCK_BYTES = 32 * NONCE_BYTES
"""Bytes that are checked together, so that filler is skipped quickly."""

OPEN_TIMEOUT_S = 10.0
"""How long it may take to open all kept connections together, on a very busy machine."""

_HOME = "127.0.0.1"
"""The address of the harness's own endpoints."""

Address = tuple[str, int]
Announce = Callable[[Sequence[tuple[str, int, str, int]]], Awaitable[None]]
Arrived = Callable[[int], None]


class LinkProbe:
    """Keeps the probe connections of one cluster and answers `Network.probe`."""

    def __init__(self, *, listeners: dict[Link, Address], announce: Announce) -> None:
        """`listeners` maps every pair (opener, far host) to the address that the opener connects to. `announce`
        sends the proxy (source ip, source port, to ip, to port) for connections to come."""
        self._listeners = listeners
        self._announce = announce
        self._kept: dict[Link, _Connection] = {}
        self._nonces = itertools.count(1)
        self._awaited: dict[int, asyncio.Future[None]] = {}

    async def keep(self, pairs: Iterable[Link]) -> None:
        """Ensure a kept connection for each of these pairs that can open connections.

        Call this before a cut, while the links are whole: afterwards none can be made. Pairs that cannot be
        connected are left without one; a probe then relies on new connections only.
        """
        missing = [pair for pair in pairs if pair in self._listeners and not self._is_kept(pair)]
        made = [self._new_connection(pair) for pair in missing]
        try:
            await self._open(made)
            if made:
                await asyncio.wait([connection.established for connection in made], timeout=OPEN_TIMEOUT_S)
        finally:
            for connection in made:
                connection.stop_listening()
                self._keep_or_close(connection)

    async def probe(self, links: Collection[Link], *, timeout_s: float) -> Sequence[ProbeResult]:
        """Test whether bytes pass each link; returns once they have on all, or after `timeout_s` seconds.

        A link is `partial` when some connections over it pass and others do not: nonces arrive on some kept
        connections only, a new connection is established in spite of a cut, or none is although both
        directions pass. Raises ValueError for a link that this cluster does not have.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        wanted = dict.fromkeys(links)
        ways = {link: self._ways(link) for link in wanted}
        new = {pair: self._new_connection(pair) for pair in dict.fromkeys(itertools.chain(*ways.values()))}
        sent: dict[Link, list[asyncio.Future[None]]] = {}
        try:
            for link, pairs in ways.items():
                sent[link] = [self._send(self._kept[pair], link) for pair in pairs if self._is_kept(pair)]
            await self._open(new.values())
            needed = [arrival for arrivals in sent.values() for arrival in arrivals]
            for link, pairs in ways.items():
                if _reverse(link) in wanted:
                    needed += [arrival for pair in pairs for arrival in new[pair].arrivals.values()]
                elif not sent[link]:
                    needed += [new[pair].arrivals[link] for pair in pairs]
            if needed:
                await asyncio.wait(needed, timeout=max(0.0, end_s - loop.time()))
            return [self._result(link, wanted, ways[link], sent, new) for link in links]
        finally:
            for connection in new.values():
                connection.stop_listening()
                self._keep_or_close(connection)
            for arrival in itertools.chain(*sent.values()):
                arrival.cancel()

    async def time_link(
        self, link: Link, *, count: int, size_bytes: int, spacing_s: float, timeout_s: float
    ) -> LinkMeasure:
        """Send `count` batches of about `size_bytes` over the kept connection of a link and time their last bytes.

        Streams neither lose nor duplicate bytes, so only the delays and the total time mean anything. Nothing
        counts as received if there is no kept connection.
        """
        loop = asyncio.get_running_loop()
        kept = [self._kept[pair] for pair in self._ways(link) if self._is_kept(pair)]
        arrived_s: dict[int, float] = {}
        sent_s: list[float] = []
        arrivals: list[asyncio.Future[None]] = []

        def note(number: int, arrival: asyncio.Future[None]) -> None:
            if not arrival.cancelled():
                arrived_s[number] = loop.time()

        try:
            for number in range(count if kept else 0):
                sent_s.append(loop.time())
                kept[0].send_filler(link, size_bytes - NONCE_BYTES)
                arrival = self._send(kept[0], link)
                arrival.add_done_callback(partial(note, number))
                arrivals.append(arrival)
                if spacing_s:
                    await asyncio.sleep(spacing_s)
            if arrivals:
                await asyncio.wait(arrivals, timeout=timeout_s)
        finally:
            for arrival in arrivals:
                arrival.cancel()
        return LinkMeasure(
            link=link,
            sent=count,
            received=len(arrived_s),
            duplicates=0,
            out_of_order=0,
            delays_ms=[(at_s - sent_s[number]) * 1000 for number, at_s in sorted(arrived_s.items())],
            seconds=max(arrived_s.values()) - sent_s[0] if arrived_s else 0.0,
        )

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        for connection in self._kept.values():
            connection.close()
        self._kept.clear()
        await asyncio.sleep(0)  # transports close in the loop's next iteration

    def _ways(self, link: Link) -> list[Link]:
        """The pairs whose connections carry bytes in the direction of `link`: those of its source, which send them
        forward, and those of its destination, which get them back."""
        pairs = [pair for pair in (link, _reverse(link)) if pair in self._listeners]
        if not pairs:
            raise ValueError(f"this cluster has no link {link.source}->{link.destination}")
        return pairs

    def _result(
        self,
        link: Link,
        wanted: Collection[Link],
        pairs: Sequence[Link],
        sent: dict[Link, list[asyncio.Future[None]]],
        new: dict[Link, _Connection],
    ) -> ProbeResult:
        """Judge a link by what arrived."""
        arrived = [arrival.done() for arrival in sent[link]]
        established = [pair for pair in pairs if new[pair].established.done()]
        arrived_new = [new[pair].arrivals[link].done() for pair in established]
        if not any(arrived) and not any(arrived_new):
            if established:
                return ProbeResult(link, True, "a new connection was established, but carried nothing", partial=True)
            return ProbeResult(link, False, "nothing arrived, and no new connection was established")
        if not all(arrived):
            detail = "bytes arrived, but not on every existing connection"
            return ProbeResult(link, True, detail, partial=True)
        back = _reverse(link)
        both_pass = back in wanted and bool(sent[back]) and all(arrival.done() for arrival in sent[back])
        if both_pass and not (len(established) == len(pairs) and all(arrived_new)):
            detail = "bytes arrived both ways, but not on new connections"
            return ProbeResult(link, True, detail, partial=True)
        return ProbeResult(link, True, f"bytes arrived on {len(arrived) + sum(arrived_new)} connections")

    def _is_kept(self, pair: Link) -> bool:
        connection = self._kept.get(pair)
        return connection is not None and connection.is_whole

    def _keep_or_close(self, connection: _Connection) -> None:
        if connection.is_whole and not self._is_kept(connection.pair):
            self._kept[connection.pair] = connection
        else:
            connection.close()

    def _new_connection(self, pair: Link) -> _Connection:
        return _Connection(pair, send=self._send, arrived=self._arrived)

    async def _open(self, connections: Collection[_Connection]) -> None:
        """Announce connections and begin to open them; `established` shows later whether they were."""
        if not connections:
            return
        routes = await asyncio.gather(*(connection.listen() for connection in connections))
        await self._announce(routes)
        await asyncio.gather(*(connection.connect(self._listeners[connection.pair]) for connection in connections))

    def _send(self, connection: _Connection, link: Link) -> asyncio.Future[None]:
        """Send a nonce over a connection in the direction of `link`; the future is done when it arrives."""
        nonce = next(self._nonces)
        arrival = asyncio.get_running_loop().create_future()
        self._awaited[nonce] = arrival
        arrival.add_done_callback(lambda _: self._awaited.pop(nonce, None))
        connection.send(link, nonce)
        return arrival

    def _arrived(self, nonce: int) -> None:
        arrival = self._awaited.get(nonce)
        if arrival is not None and not arrival.done():  # else it is from an earlier probe, delayed by a cut until now
            arrival.set_result(None)


def _reverse(link: Link) -> Link:
    return Link(link.destination, link.source)


class _Connection:
    """One connection of the harness to itself through the proxy, from the opener's side to the far host's.

    `established` is done when both ends are connected; then a nonce is sent each way, and `arrivals` has, for each
    of the two links, a future that is done when it has arrived.
    """

    def __init__(
        self,
        pair: Link,
        *,
        send: Callable[[_Connection, Link], asyncio.Future[None]],
        arrived: Arrived,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.pair = pair
        self.established: asyncio.Future[None] = loop.create_future()
        self.arrivals: dict[Link, asyncio.Future[None]] = {
            pair: loop.create_future(),
            _reverse(pair): loop.create_future(),
        }
        self._in_flight: list[asyncio.Future[None]] = []
        self._send = send
        self._near = _Endpoint(arrived, self._endpoint_ready)
        self._far = _Endpoint(arrived, self._endpoint_ready)
        self._listener: asyncio.Server | None = None
        self._socket: socket.socket | None = None

    @property
    def is_whole(self) -> bool:
        """Whether both ends are connected."""
        return self._near.is_open and self._far.is_open

    async def listen(self) -> tuple[str, int, str, int]:
        """Prepare both ends; returns (source ip, source port, far ip, far port), to be announced to the proxy."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: self._far, _HOME, 0, backlog=1)
        self._socket = socket.socket()
        self._socket.setblocking(False)
        self._socket.bind((_HOME, 0))
        far_port = self._listener.sockets[0].getsockname()[1]
        return (*self._socket.getsockname(), _HOME, far_port)

    async def connect(self, listener: Address) -> None:
        """Connect to the proxy. A refusal leaves the connection unestablished."""
        loop = asyncio.get_running_loop()
        own_socket = cast(socket.socket, self._socket)
        try:
            await asyncio.wait_for(loop.sock_connect(own_socket, listener), OPEN_TIMEOUT_S)
            await loop.create_connection(lambda: self._near, sock=own_socket)
        except (OSError, TimeoutError):
            own_socket.close()

    def send(self, link: Link, nonce: int) -> None:
        """Send a nonce in the direction of `link`."""
        endpoint = self._near if link == self.pair else self._far
        endpoint.send(nonce)

    def send_filler(self, link: Link, size_bytes: int) -> None:
        """Send about `size_bytes` of meaningless bytes in the direction of `link`."""
        endpoint = self._near if link == self.pair else self._far
        endpoint.send_filler(size_bytes)

    def stop_listening(self) -> None:
        """Stop waiting for the far end to be connected."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def close(self) -> None:
        """Close both ends. Idempotent."""
        self.stop_listening()
        for endpoint in (self._near, self._far):
            endpoint.close()
        if self._socket is not None and not self._near.is_open:
            self._socket.close()
        for future in (self.established, *self.arrivals.values(), *self._in_flight):
            future.cancel()

    def _endpoint_ready(self) -> None:
        if self.is_whole and not self.established.done():
            self.established.set_result(None)
            for link, waiting in self.arrivals.items():
                arrival = self._send(self, link)
                arrival.add_done_callback(partial(_pass_on, waiting))
                self._in_flight.append(arrival)


def _pass_on(waiting: asyncio.Future[None], arrival: asyncio.Future[None]) -> None:
    if not arrival.cancelled() and not waiting.done():
        waiting.set_result(None)


class _Endpoint(asyncio.Protocol):
    """One end of a probe connection: splits the stream into nonces and reports them."""

    def __init__(self, arrived: Arrived, ready: Callable[[], None]) -> None:
        self._arrived = arrived
        self._ready = ready
        self._transport: asyncio.Transport | None = None
        self._rest = b""

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ready()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        whole_bytes = len(data) - len(data) % NONCE_BYTES
        for begin in range(0, whole_bytes, _BLOCK_BYTES):
            block = data[begin : min(begin + _BLOCK_BYTES, whole_bytes)]
            if block.count(0) < len(block):  # all zeros are filler, which nobody waits for
                for (nonce,) in struct.iter_unpack(">Q", block):
                    self._arrived(nonce)
        self._rest = data[whole_bytes:]

    def send(self, nonce: int) -> None:
        """Send a nonce, if there is a connection."""
        if self._transport is not None:
            self._transport.write(nonce.to_bytes(NONCE_BYTES, "big"))

    def send_filler(self, size_bytes: int) -> None:
        """Send zeros: nonces that nobody waits for."""
        if self._transport is not None:
            self._transport.write(bytes(size_bytes - size_bytes % NONCE_BYTES))

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._transport is not None:
            self._transport.abort()
