"""The proof of a cut: a datagram with a nonce on every link, and a look at the other end.

The harness holds one UDP socket in each host's namespace. To probe a link it sends a fresh nonce from the
source's socket to the destination's, through the same devices and the same rules as the nodes' own packets, and
sees whether it comes out of the destination's socket. All links are probed at once.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from harness.clusters.netns_calls import entered
from nemesis.target import PROBE_ATTEMPTS, Link, ProbeResult

__all__ = ["LinkProbe"]

_NONCE_BYTES = 16
_MAX_DATAGRAMS_PER_WAKE = 256
"""Reads in one go from one socket, so that a flood cannot hold up the loop."""


@dataclass(slots=True)
class _Expectation:
    """One nonce on its way."""

    link: Link
    sent_at: float
    news: asyncio.Event
    """Shared by all nonces of one probe; set whenever one of them arrives."""
    arrived_at: float | None = None
    error: str = ""

    def result(self, timeout_s: float) -> ProbeResult:
        """What became of it."""
        if self.arrived_at is not None:
            return ProbeResult(self.link, True, f"arrived after {(self.arrived_at - self.sent_at) * 1000:.1f} ms")
        if self.error:
            return ProbeResult(self.link, False, f"the source could not send: {self.error}")
        return ProbeResult(self.link, False, f"nothing arrived within {timeout_s * 1000:.0f} ms")


class LinkProbe:
    """Probes links between hosts whose namespaces (paths) and IPv4 addresses are given by host name."""

    def __init__(self, namespaces: Mapping[str, str], addresses: Mapping[str, str]) -> None:
        self._namespaces = dict(namespaces)
        self._addresses = dict(addresses)
        self._sockets: dict[str, socket.socket] = {}
        self._expected: dict[bytes, _Expectation] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Make a socket in every namespace. Raises OSError; `close` afterwards in any case."""
        self._loop = asyncio.get_running_loop()
        for host, path in self._namespaces.items():
            with entered(path):
                probe_socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                self._sockets[host] = probe_socket
                probe_socket.bind((self._addresses[host], 0))
            probe_socket.setblocking(False)
            self._loop.add_reader(probe_socket, self._read, host)

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        for probe_socket in self._sockets.values():
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(probe_socket)
            probe_socket.close()
        self._sockets.clear()

    async def probe(self, links: Collection[Link], *, timeout_s: float) -> Sequence[ProbeResult]:
        """Send a nonce along each link; returns as soon as all have arrived, or after `timeout_s` seconds.

        One result per link, in the given order. Raises ValueError for a host that is not in the cluster.
        """
        unknown = {host for link in links for host in link} - self._sockets.keys()
        if unknown:
            raise ValueError(f"cannot probe hosts that are not in this cluster: {', '.join(sorted(unknown))}")
        loop = asyncio.get_running_loop()
        begin = loop.time()
        news = asyncio.Event()
        expectations = {secrets.token_bytes(_NONCE_BYTES): _Expectation(link, begin, news) for link in links}
        self._expected.update(expectations)
        try:
            for attempt in range(PROBE_ATTEMPTS):
                for nonce, expectation in expectations.items():
                    if expectation.arrived_at is None:
                        self._send(nonce, expectation)
                if await _all_arrived(expectations.values(), begin + timeout_s * (attempt + 1) / PROBE_ATTEMPTS):
                    break
        finally:
            for nonce in expectations:
                del self._expected[nonce]
        return [expectation.result(timeout_s) for expectation in expectations.values()]

    def _send(self, nonce: bytes, expectation: _Expectation) -> None:
        source, destination = expectation.link
        port = self._sockets[destination].getsockname()[1]
        try:
            self._sockets[source].sendto(nonce, (self._addresses[destination], port))
        except OSError as error:
            expectation.error = error.strerror or str(error)

    def _read(self, host: str) -> None:
        """Take what has arrived at a host. Only the right bytes from the right address count."""
        now = asyncio.get_running_loop().time()
        for _ in range(_MAX_DATAGRAMS_PER_WAKE):
            try:
                nonce, (address, _) = self._sockets[host].recvfrom(_NONCE_BYTES + 1)
            except OSError:
                return
            expectation = self._expected.get(nonce)
            if (
                expectation is not None
                and expectation.arrived_at is None
                and expectation.link.destination == host
                and self._addresses[expectation.link.source] == address
            ):
                expectation.arrived_at = now
                expectation.news.set()


async def _all_arrived(expectations: Collection[_Expectation], deadline: float) -> bool:
    """Wait until all nonces of one probe have arrived; False when the deadline (loop time) came first."""
    try:
        async with asyncio.timeout_at(deadline):
            while waiting := [e for e in expectations if e.arrived_at is None]:
                waiting[0].news.clear()
                await waiting[0].news.wait()
    except TimeoutError:
        return False
    return True
