"""Bad links in a `netns` cluster: netem on the hosts' own devices, or a relay at the bridge where the kernel has none,
and probe packets that measure the links."""

from __future__ import annotations

import asyncio
import contextlib
import functools
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
from harness.clusters.shaped_links import BURST_BYTES, RELAY, SPACING_S, FirstChoice, NetemShaper, ShapedLinks
from harness.clusters.trials import TrialFailed, TrialUnfinished, run_trial
from harness.programs import find_program
from nemesis.mechanisms.netem import Netem, trial_argv
from nemesis.target import Link, LinkMeasure, LinkShape

__all__ = ["BridgeRelay", "NetnsLinks", "links_shaper", "why_no_netem"]

TABLE = "bridge splitbrain"

DEVICE = "eth0"
"""A host's one device, by which it reaches every other."""

_HEADER = struct.Struct("!II")
"""Number of the packet, and of the measurement."""


@functools.cache
def why_no_netem() -> str | None:
    """None when this machine's kernel has the netem that hosts' namespaces need; otherwise why not, in one line.

    Found out by shaping a device in a network namespace that vanishes with the trial.
    """
    if find_program("tc") is None:
        return "tc is missing (apt-get install iproute2)"
    try:
        run_trial("netem", ["--net"], trial_argv())
        return None
    except TrialUnfinished as error:
        return str(error)
    except TrialFailed as error:
        said = str(error).rstrip(".")
    return f"this kernel has no netem ({said})"


class BridgeRelay:
    """See harness.clusters.shaped_links.LinkShaper. One relay in the namespace of the bridge shapes all links; it is
    started when the first one is.

    The bridge is in the namespace of `bridge_host` of the shell and its ports are named after the hosts.
    """

    mechanism = RELAY

    def __init__(
        self,
        *,
        shell: NamespaceShell,
        bridge_host: str,
        nft: str,
        addresses: Mapping[str, str],
        processes: Processes,
        seed: str,
    ) -> None:
        self._shell = shell
        self._bridge_host = bridge_host
        self._nft = (nft, "-f", "-")
        self._addresses = dict(addresses)
        self._processes = processes
        self._seed = zlib.crc32(seed.encode())
        self._relay: LinkProxyHandle | None = None

    async def close(self) -> None:
        """End the relay. Idempotent."""
        if self._relay is not None:
            await self._relay.stop()
            self._relay = None

    def forget(self) -> None:
        """Nothing to forget: every `apply` says everything anew."""

    async def apply(self, wanted: Mapping[Link, LinkShape]) -> None:
        """The relay first: for a moment a packet may come twice, which is better than not at all. When healing the
        bridge first, for the same reason."""
        if self._relay is None and not wanted:
            return
        relay = await self._started()
        pairs = [(self._addresses[link.source], self._addresses[link.destination]) for link in wanted]
        request = [[*pair, asdict(shape)] for pair, shape in zip(pairs, wanted.values(), strict=True)]
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


def links_shaper(relay: BridgeRelay, shell: NamespaceShell, addresses: Mapping[str, str]) -> BridgeRelay | FirstChoice:
    """What shapes the links of these hosts on this machine."""
    if why_no_netem() is not None:
        return relay
    tc = find_program("tc") or "tc"
    netems = {
        host: Netem(shell, host, {address: DEVICE for peer, address in addresses.items() if peer != host}, tc=tc)
        for host in addresses
    }
    return FirstChoice(NetemShaper(netems, addresses), relay)


class NetnsLinks(ShapedLinks):
    """See nemesis.target.Links. `namespaces` and `addresses` are those of the hosts."""

    def __init__(
        self,
        shaper: BridgeRelay | FirstChoice,
        *,
        relay: BridgeRelay,
        namespaces: Mapping[str, str],
        addresses: Mapping[str, str],
    ) -> None:
        super().__init__(addresses, shaper)
        self._relay = relay
        self._namespaces = dict(namespaces)
        self._addresses = dict(addresses)
        self._measurements = 0

    async def close(self) -> None:
        """End the relay, if there is one. Idempotent."""
        await self._relay.close()

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
                if size_bytes < BURST_BYTES:
                    await asyncio.sleep(SPACING_S)
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
