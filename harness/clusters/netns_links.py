"""Bad links in a `netns` cluster: the relay that shapes packets, and probe packets that measure it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
import zlib
from collections.abc import Collection, Mapping
from dataclasses import asdict

from harness.clusters.link_control import LinkProxyHandle
from harness.clusters.link_meter import arrival_ns, stamp_arrivals
from harness.clusters.netns_calls import entered
from harness.clusters.netns_shell import NamespaceShell
from harness.clusters.processes import Processes
from nemesis.target import Link, LinkMeasure, LinkShape

__all__ = ["NetnsLinks", "combined"]

TABLE = "bridge splitbrain"
_SPACING_S = 0.004
"""Between two probe packets of a link: they must not queue behind each other on a link that is merely late."""

_HEADER = struct.Struct("!II")
"""Number of the packet, and of the measurement."""

_BURST_BYTES = 512
"""Packets of this size or more are sent without spacing: they measure a rate."""


def combined(shapes: Collection[Mapping[Link, LinkShape]]) -> dict[Link, LinkShape]:
    """What several faults together make of each link."""
    result: dict[Link, LinkShape] = {}
    for shaped in shapes:
        for link, shape in shaped.items():
            result[link] = shape.on_top_of(result.get(link, LinkShape()))
    return result


class NetnsLinks:
    """See nemesis.target.Links.

    `namespaces` and `addresses` are those of the hosts; the bridge is in the namespace of `bridge_host` of the shell
    and its ports are named after the hosts. The relay is started when the first link is shaped.
    """

    def __init__(
        self,
        *,
        shell: NamespaceShell,
        bridge_host: str,
        nft: str,
        namespaces: Mapping[str, str],
        addresses: Mapping[str, str],
        processes: Processes,
        seed: str,
    ) -> None:
        self._shell = shell
        self._bridge_host = bridge_host
        self._nft = (nft, "-f", "-")
        self._namespaces = dict(namespaces)
        self._addresses = dict(addresses)
        self._processes = processes
        self._seed = zlib.crc32(seed.encode())
        self._shapes: dict[str, dict[Link, LinkShape]] = {}
        self._relay: LinkProxyHandle | None = None
        self._lock = asyncio.Lock()
        self._measurements = 0

    async def shape(self, fault_id: str, shapes: Mapping[Link, LinkShape]) -> None:
        """Make links bad. Raises ValueError for an unknown host, ShellError, HarnessError when the relay has ended."""
        self._require_known(shapes)
        self._shapes[fault_id] = dict(shapes)
        await self._apply()

    async def release(self, fault_id: str) -> None:
        """Undo one fault's shaping."""
        if self._shapes.pop(fault_id, None) is not None:
            await self._apply()

    async def release_all(self) -> None:
        """Undo all shaping."""
        self._shapes.clear()
        if self._relay is not None:
            await self._apply()

    async def close(self) -> None:
        """End the relay. Idempotent."""
        if self._relay is not None:
            await self._relay.stop()
            self._relay = None

    async def _apply(self) -> None:
        """The relay first: for a moment a packet may come twice, which is better than not at all. When healing the
        bridge first, for the same reason."""
        async with self._lock:
            relay = await self._started()
            shaped = combined(self._shapes.values())
            pairs = [(self._addresses[link.source], self._addresses[link.destination]) for link in shaped]
            request = [[*pair, asdict(shape)] for pair, shape in zip(pairs, shaped.values(), strict=True)]
            if not pairs:
                await self._set_pairs(pairs)
            await relay.request("shape", pairs=request)
            if pairs:
                await self._set_pairs(pairs)

    async def _set_pairs(self, pairs: Collection[tuple[str, str]]) -> None:
        script = f"flush set {TABLE} pairs\n"
        if pairs:
            elements = ", ".join(f"{source} . {destination}" for source, destination in sorted(pairs))
            script += f"add element {TABLE} pairs {{ {elements} }}\n"
        await self._shell.run(self._bridge_host, self._nft, stdin=script)

    async def _started(self) -> LinkProxyHandle:
        if self._relay is None or not self._relay.is_running:
            await self._shell.run(self._bridge_host, self._nft, stdin=install_script())
            relay = await LinkProxyHandle.start(
                self._processes,
                module="harness.clusters.link_relay",
                name="link relay",
                argv_prefix=self._shell.prefix(self._bridge_host),
            )
            self._relay = relay
            ports = {address: host for host, address in self._addresses.items()}
            await relay.request("open", seed=self._seed, ports=ports)
        return self._relay

    def _require_known(self, links: Collection[Link]) -> None:
        unknown = {host for link in links for host in link} - self._addresses.keys()
        if unknown:
            raise ValueError(f"no such hosts in this cluster: {', '.join(sorted(unknown))}")

    async def measure(
        self, links: Collection[Link], *, count: int, size_bytes: int, timeout_s: float
    ) -> Mapping[Link, LinkMeasure]:
        """Datagrams along each link, timed by the kernel where they arrive."""
        self._require_known(links)
        self._measurements += 1
        probes = [_LinkTiming(link, self._measurements, self._addresses) for link in dict.fromkeys(links)]
        try:
            for probe in probes:
                probe.open(self._namespaces)
            for number in range(count):
                for probe in probes:
                    probe.send(number, size_bytes)
                if size_bytes < _BURST_BYTES:
                    await asyncio.sleep(_SPACING_S)
            loop = asyncio.get_running_loop()
            deadline_s = loop.time() + timeout_s
            # What is lost never comes, so there is nothing to be woken by: look now and then.
            while loop.time() < deadline_s and any(probe.received < count for probe in probes):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            return {probe.link: probe.result(count) for probe in probes}
        finally:
            for probe in probes:
                probe.close()


def install_script() -> str:
    """The nft script by which the bridge forwards no packets of the pairs in a set, which is empty at first."""
    return (
        f"add table {TABLE}\n"
        f"delete table {TABLE}\n"
        f"add table {TABLE}\n"
        f"add set {TABLE} pairs {{ type ipv4_addr . ipv4_addr; }}\n"
        f"add chain {TABLE} forward {{ type filter hook forward priority 0; policy accept; }}\n"
        f"add rule {TABLE} forward ip saddr . ip daddr @pairs drop\n"
    )


class _LinkTiming:
    """The probe packets of one link: a socket at each end."""

    def __init__(self, link: Link, measurement: int, addresses: Mapping[str, str]) -> None:
        self.link = link
        self._measurement = measurement
        self._addresses = addresses
        self._sent_ns: dict[int, int] = {}
        self._arrived_ns: dict[int, int] = {}
        self._duplicates = self._out_of_order = 0
        self._highest = -1
        self._sender: socket.socket | None = None
        self._receiver: socket.socket | None = None

    @property
    def received(self) -> int:
        return len(self._arrived_ns)

    def open(self, namespaces: Mapping[str, str]) -> None:
        self._sender = self._bound(namespaces, self.link.source)
        self._receiver = self._bound(namespaces, self.link.destination)
        stamp_arrivals(self._receiver)
        asyncio.get_running_loop().add_reader(self._receiver, self._read, self._receiver)

    def _bound(self, namespaces: Mapping[str, str], host: str) -> socket.socket:
        with entered(namespaces[host]):
            made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.setblocking(False)
        made.bind((self._addresses[host], 0))
        return made

    def send(self, number: int, size_bytes: int) -> None:
        if self._sender is None or self._receiver is None:
            return
        self._sent_ns[number] = time.time_ns()
        data = _HEADER.pack(number, self._measurement).ljust(size_bytes, b"\0")
        with contextlib.suppress(OSError):  # counts as lost
            self._sender.sendto(data, (self._addresses[self.link.destination], self._receiver.getsockname()[1]))

    def _read(self, receiver: socket.socket) -> None:
        while True:
            try:
                data, ancillary, _, _ = receiver.recvmsg(65536, 128)
            except OSError:
                return
            if len(data) < _HEADER.size:
                continue
            number, measurement = _HEADER.unpack_from(data)
            if measurement != self._measurement or number not in self._sent_ns:
                continue
            if number in self._arrived_ns:
                self._duplicates += 1
                continue
            self._arrived_ns[number] = arrival_ns(ancillary)
            if number < self._highest:
                self._out_of_order += 1
            self._highest = max(self._highest, number)

    def result(self, sent: int) -> LinkMeasure:
        delays_ms = [(at - self._sent_ns[number]) / 1e6 for number, at in sorted(self._arrived_ns.items())]
        last_ns = max(self._arrived_ns.values(), default=0)
        return LinkMeasure(
            link=self.link,
            sent=sent,
            received=len(self._arrived_ns),
            duplicates=self._duplicates,
            out_of_order=self._out_of_order,
            delays_ms=delays_ms,
            seconds=max(0.0, (last_ns - min(self._sent_ns.values(), default=0)) / 1e9) if last_ns else 0.0,
        )

    def close(self) -> None:
        if self._receiver is not None:
            asyncio.get_running_loop().remove_reader(self._receiver)
            self._receiver.close()
        if self._sender is not None:
            self._sender.close()
