"""A network of hosts with addresses of their own: nftables on the receiving host makes cuts, and probes prove them.

From the start, nftables also counts what the hosts' own programs send each other.

To prove a cut, a datagram with a nonce is sent along every link and looked for at the other end. Each agent holds one
UDP socket on its host's address. The source's agent sends a fresh nonce to the destination's socket, through the same
devices and rules as the nodes' own packets; the destination's agent reports every nonce that arrives and its source
address. All links are probed at once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.clusters.agent_link import AgentLink
from harness.clusters.host_agent import NONCE_BYTES
from nemesis.mechanisms.nft import NftCounters, NftCuts
from nemesis.mechanisms.shell import ShellError
from nemesis.target import PROBE_ATTEMPTS, Grudge, Link, LinkTraffic, ProbeResult

__all__ = ["AgentNetwork"]

_REQUEST_TIMEOUT_S = 10.0
"""Time for an agent to confirm that it has sent. Not part of a probe's own timeout, which starts after sending."""

_MAX_NAMED = 3
"""Addresses listed in one message."""


@dataclass(slots=True)
class _Nonce:
    """One nonce in flight."""

    link: Link
    sent_s: float
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    took_s: float = 0.0
    was_sent: bool = False
    error: str = ""

    def result(self, timeout_s: float) -> ProbeResult:
        """What became of it."""
        if self.arrived.is_set():
            return ProbeResult(self.link, True, f"arrived after {self.took_s * 1000:.1f} ms")
        if not self.was_sent:
            return ProbeResult(self.link, False, f"the source could not send: {self.error}", was_sent=False)
        return ProbeResult(self.link, False, f"nothing arrived within {timeout_s * 1000:.0f} ms")


def _uncut(source: str, addresses: Collection[str]) -> str:
    gained = f"{source} has gained addresses since the run began ({', '.join(sorted(addresses)[:_MAX_NAMED])})"
    fix = "run the test again, and keep addresses stable (net.ipv6.conf.all.use_tempaddr=0)"
    return f"{gained}, which no cut covers: {fix}"


class AgentNetwork:
    """See nemesis.target.Network, CountsTraffic and FindsBypasses. `links` are the agents of the hosts and
    `addresses` their IPv4 addresses; `gained` returns the addresses that hosts have acquired since the start."""

    def __init__(
        self,
        cuts: NftCuts,
        counters: NftCounters,
        links: Mapping[str, AgentLink],
        addresses: Mapping[str, str],
        gained: Callable[[], Awaitable[Mapping[str, Collection[str]]]],
    ) -> None:
        self._cuts = cuts
        self._counters = counters
        self._links = dict(links)
        self._addresses = dict(addresses)
        self._gained = gained
        self._ports: dict[str, int] = {}
        self._expected: dict[str, _Nonce] = {}

    async def open(self) -> None:
        """Prepare cuts and counters on every host and open every agent's socket. Raises ShellError."""
        await self._cuts.install()
        await self._counters.install()

        async def open_one(host: str) -> None:
            answer = await self._links[host].request("udp_open", {"address": self._addresses[host]})
            self._ports[host] = int(answer["port"])

        await asyncio.gather(*(open_one(host) for host in self._links))
        await self.leave_out(self._ports)

    async def leave_out(self, ports: Mapping[str, int]) -> None:
        """Do not count packets to these UDP ports of hosts, where the harness itself receives. Raises ShellError."""
        await self._counters.leave_out(ports)

    async def traffic(self, links: Collection[Link]) -> Mapping[Link, LinkTraffic]:
        """What the hosts' programs sent along each link, and how much of it ran into a cut. Raises ShellError."""
        return await self._counters.read(links)

    async def bypasses(self, links: Collection[Link]) -> Sequence[str]:
        """See nemesis.target.FindsBypasses. Raises ShellError."""
        found = await self._counters.bypasses(sorted({link.destination for link in links}))
        gained, sources = await self._gained(), sorted({link.source for link in links})
        return [*found, *(_uncut(source, gained[source]) for source in sources if gained.get(source))]

    async def cut(self, fault_id: str, grudge: Grudge) -> None:
        """Drop packets according to `grudge`. Raises ValueError for an unknown host, ShellError."""
        await self._cuts.cut(fault_id, grudge)

    async def heal(self, fault_id: str) -> None:
        """Undo one fault's cut; links that other faults cut stay cut. Idempotent. Raises ShellError."""
        await self._cuts.heal(fault_id)

    async def heal_all(self) -> None:
        """Undo every cut, in any state. Idempotent. Raises ShellError."""
        await self._cuts.heal_all()

    def take_event(self, host: str, event: Mapping[str, Any]) -> None:
        """Handle a datagram event. It counts only if nonce, source address and receiving host all match."""
        nonce = self._expected.get(str(event["nonce"]))
        if nonce is not None and nonce.link.destination == host and self._addresses[nonce.link.source] == event["from"]:
            if not nonce.arrived.is_set():
                nonce.took_s = asyncio.get_running_loop().time() - nonce.sent_s
            nonce.arrived.set()

    async def probe(self, links: Collection[Link], *, timeout_s: float) -> Sequence[ProbeResult]:
        """Send a nonce along each link, repeatedly; returns once all have arrived, or after `timeout_s` seconds.

        One result per link, in the given order. Raises ValueError for a host that is not in the cluster and
        ShellError when an agent does not answer: silence from an unreachable host proves nothing.
        """
        unknown = {host for link in links for host in link} - self._ports.keys()
        if unknown:
            raise ValueError(f"cannot probe hosts that are not in this cluster: {', '.join(sorted(unknown))}")
        begin_s = asyncio.get_running_loop().time()
        nonces = {secrets.token_hex(NONCE_BYTES): _Nonce(link, begin_s) for link in links}
        self._expected.update(nonces)
        connections = {host: link.connection_count for host, link in self._links.items()}
        try:
            for _ in range(PROBE_ATTEMPTS):
                missing = {ident: nonce for ident, nonce in nonces.items() if not nonce.arrived.is_set()}
                await self._send(missing)
                if await _all_arrived(missing.values(), timeout_s / PROBE_ATTEMPTS):
                    break
            else:
                await self._require_receivers(nonces.values(), connections)
        finally:
            for ident in nonces:
                del self._expected[ident]
        return [nonce.result(timeout_s) for nonce in nonces.values()]

    async def _send(self, nonces: Mapping[str, _Nonce]) -> None:
        by_source: dict[str, list[list[Any]]] = {}
        for ident, nonce in nonces.items():
            source, destination = nonce.link
            datagram = [ident, self._addresses[destination], self._ports[destination]]
            by_source.setdefault(source, []).append(datagram)
        answers = await asyncio.gather(
            *(
                self._links[source].request("udp_send", {"datagrams": datagrams}, timeout_s=_REQUEST_TIMEOUT_S)
                for source, datagrams in by_source.items()
            )
        )
        errors = {ident: str(error) for answer in answers for ident, error in answer["errors"].items()}
        for ident, nonce in nonces.items():
            nonce.was_sent |= ident not in errors
            nonce.error = errors.get(ident, nonce.error)

    async def _require_receivers(self, nonces: Collection[_Nonce], connections: Mapping[str, int]) -> None:
        """Check that the agents which reported nothing could have reported: an agent's events arrive before its answer
        to a later request, unless the connection broke in between. Raises ShellError."""
        silent = {nonce.link.destination for nonce in nonces if not nonce.arrived.is_set()}
        await asyncio.gather(*(self._links[host].request("hello", timeout_s=_REQUEST_TIMEOUT_S) for host in silent))
        for host in sorted(silent):
            if self._links[host].connection_count != connections[host]:
                raise ShellError(host, ["probe"], 1, "the connection to its agent was lost during the probe")


async def _all_arrived(nonces: Collection[_Nonce], timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            for nonce in nonces:
                await nonce.arrived.wait()
    except TimeoutError:
        return False
    return True
