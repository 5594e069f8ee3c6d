"""Link faults between hosts with agents: packets are shaped where they leave their source, and measured by helpers.

Each host's own netem shapes them (see shaped_links). If a kernel has no netem, or a device's queue belongs to somebody
else, a relay of ours does it on every host: the host redirects packets to shaped peers into one end of a veth pair of
ours; the relay takes them from the other end and sends them on, late, twice, out of order, at a rate, or never (see
link_relay). So a link is shaped at its source, one direction at a time, with only nftables and packet sockets.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.clusters.agent_helper import START_TIMEOUT_S, AgentHelper
from harness.clusters.agent_link import AgentLink
from harness.clusters.base import ClusterUnavailable
from harness.clusters.link_relay import RELAYED_MARK
from harness.clusters.shaped_links import (
    BURST_BYTES,
    NETEM,
    RELAY,
    SPACING_S,
    FirstChoice,
    NetemShaper,
    ShapedLinks,
    devices_to_peers,
)
from harness.clusters.threads import all_of
from nemesis.mechanisms.netem import Netem, Pair, remove_argv, remove_trial_argv, trial_argv
from nemesis.mechanisms.shell import HostShell, ShellError
from nemesis.target import Link, LinkMeasure, LinkShape

__all__ = ["AgentLinks", "AgentRelays", "ClockDifference", "measure_of"]

logger = logging.getLogger(__name__)

TABLE = "netdev splitbrain"
"""Family and name of our nftables table that redirects packets to the relay."""

_ASIDE, _TAKEN = "sb-aside", "sb-taken"
"""The two ends of the veth pair: packets are redirected to the first, and the relay takes them from the second."""

_REMOVE_TABLE = f"add table {TABLE}\ndelete table {TABLE}\n"
_REMOVE_DEVICE = f"if ip link show dev {_ASIDE} >/dev/null 2>&1; then ip link delete dev {_ASIDE}; fi"

_MTU = 65535
"""MTU of the veth pair: no packet that fits another device is too long for it."""

Pairs = dict[Pair, LinkShape]

_CLOCK_READINGS = 5
_GRACE_S = 20.0
"""Time for a meter to answer, in addition to the time that it was asked to wait."""


@dataclass(frozen=True, slots=True)
class ClockDifference:
    """A host's wall clock minus the harness's monotonic clock, in nanoseconds, within half of `round_trip_ns`."""

    difference_ns: int
    round_trip_ns: int


class AgentLinks(ShapedLinks):
    """See nemesis.target.Links. Made by `prepared`."""

    def __init__(
        self,
        links: Mapping[str, AgentLink],
        addresses: Mapping[str, str],
        *,
        meters: Mapping[str, AgentHelper],
        shaper: FirstChoice | AgentRelays,
        why_no_netem: str | None,
    ) -> None:
        super().__init__(links, shaper)
        self._links = dict(links)
        self._addresses = dict(addresses)
        self._meters = dict(meters)
        self.meter_ports: dict[str, int] = {}
        """Host -> the UDP port of its meter, on which probe packets arrive."""
        self._measurements = 0
        self.why_no_netem = why_no_netem
        """The first host that cannot use netem, and why; None when all can."""

    @classmethod
    async def prepared(
        cls,
        links: Mapping[str, AgentLink],
        addresses: Mapping[str, str],
        *,
        shell: HostShell,
        seed: str,
    ) -> AgentLinks:
        """Find out which mechanism works, and prepare it and the meters on every host; nothing is shaped yet.

        `links` are the agents of the replicas' hosts and `addresses` the hosts' IPv4 addresses. Raises
        ClusterUnavailable when a host's kernel supports neither mechanism, ShellError when a host does not answer.
        """
        relays, meters = (
            {host: AgentHelper(link, module=module) for host, link in links.items()}
            for module in ("harness.clusters.link_relay", "harness.clusters.link_meter")
        )
        devices: dict[str, dict[str, str]] = {}

        async def learn(host: str) -> None:
            peers = [address for peer, address in addresses.items() if peer != host]
            try:
                devices[host] = await devices_to_peers(shell, host, peers)
            except ShellError as error:
                raise ClusterUnavailable(f"cannot find out how {host} reaches the other hosts: {error}") from None

        await all_of([learn(host) for host in links])
        netems = {host: Netem(shell, host, devices[host]) for host in links}
        problems = dict(
            zip(
                links,
                await asyncio.gather(*(_why_no_netem(link, netems[host]) for host, link in links.items())),
                strict=True,
            )
        )
        why_not = next((f"{host}: {problem}" for host, problem in problems.items() if problem), None)
        by_relay = AgentRelays(links, relays, addresses=addresses, devices=devices, seed=seed)
        await all_of(map(AgentHelper.bring, links.values()))
        shaper: FirstChoice | AgentRelays = by_relay
        if why_not is None:
            shaper = FirstChoice(NetemShaper(netems, addresses), by_relay)
        else:
            logger.info("no netem on %s: links are shaped by a relay", why_not)
            await by_relay.prepare()
        made = cls(links, addresses, meters=meters, shaper=shaper, why_no_netem=why_not)
        await all_of([made._open_meter(host) for host in links])
        return made

    async def _open_meter(self, host: str) -> None:
        await self._meters[host].start()
        opened = await self._meters[host].request(
            "open", address=self._addresses[host], listens_within_s=START_TIMEOUT_S
        )
        self.meter_ports[host] = int(opened["port"])

    async def measure(
        self, links: Collection[Link], *, count: int, size_bytes: int, timeout_s: float
    ) -> Mapping[Link, LinkMeasure]:
        """Send datagrams along each link, stamped by the sender and by the receiver's kernel; the difference between
        two hosts' clocks is known to within half of the agents' round trips, added up."""
        self._require_known(links)
        self._measurements += 1
        number = self._measurements
        wanted = list(dict.fromkeys(links))
        sources, destinations = sorted({link.source for link in wanted}), sorted({link.destination for link in wanted})
        hosts = sorted({*sources, *destinations})
        differences = dict(zip(hosts, await asyncio.gather(*(self._difference(host) for host in hosts)), strict=True))

        async def send(source: str) -> Mapping[str, Sequence[int]]:
            to = [[self._addresses[link.destination], self.meter_ports[link.destination]]
                  for link in wanted if link.source == source]  # fmt: skip
            spacing_s = 0.0 if size_bytes >= BURST_BYTES else SPACING_S
            answer = await self._meters[source].request(
                "send", measurement=number, to=to, count=count, size_bytes=size_bytes, spacing_s=spacing_s,
                timeout_s=2 * count * spacing_s + _GRACE_S,
            )  # fmt: skip
            return dict(answer["sent_ns"])

        async def take(destination: str) -> Mapping[str, Any]:
            expected = [self._addresses[link.source] for link in wanted if link.destination == destination]
            answer = await self._meters[destination].request(
                "arrivals", measurement=number, sources=expected, count=count, wait_s=timeout_s,
                timeout_s=timeout_s + _GRACE_S,
            )  # fmt: skip
            return answer

        sent = dict(zip(sources, await asyncio.gather(*map(send, sources)), strict=True))
        taken = dict(zip(destinations, await asyncio.gather(*map(take, destinations)), strict=True))
        return {
            link: measure_of(
                link,
                sent_ns=sent[link.source][self._addresses[link.destination]],
                arrivals=taken[link.destination]["arrivals"][self._addresses[link.source]],
                damaged=taken[link.destination]["damaged"][self._addresses[link.source]],
                ahead_ns=differences[link.destination].difference_ns - differences[link.source].difference_ns,
                within_ns=sum(differences[host].round_trip_ns for host in link) // 2,
            )
            for link in wanted
        }

    async def refused(self, hosts: Collection[str]) -> Mapping[str, int]:
        """How many TCP segments each host's kernel has dropped for a wrong checksum."""
        answers = await asyncio.gather(*(self._meters[host].request("refused") for host in hosts))
        return {host: int(answer["segments"]) for host, answer in zip(hosts, answers, strict=True)}

    async def _difference(self, host: str) -> ClockDifference:
        """Take a few readings; returns the one with the shortest round trip."""
        loop = asyncio.get_running_loop()
        readings = []
        for _ in range(_CLOCK_READINGS):
            before_ns = round(loop.time() * 1e9)
            wall_ns = int((await self._links[host].request("hello"))["wall_ns"])
            after_ns = round(loop.time() * 1e9)
            readings.append(ClockDifference(wall_ns - (before_ns + after_ns) // 2, after_ns - before_ns))
        return min(readings, key=lambda reading: reading.round_trip_ns)


def measure_of(
    link: Link,
    *,
    sent_ns: Sequence[int],
    arrivals: Sequence[Sequence[int]],
    ahead_ns: int,
    within_ns: int = 0,
    damaged: int = 0,
) -> LinkMeasure:
    """What happened to probe packets on a link. `sent_ns` has the time at which each was sent, by the source's clock,
    or 0 if it was not; `arrivals` are [number, time] in order of arrival, by the destination's clock, which is ahead of
    the source's by `ahead_ns`, give or take `within_ns`."""
    first_ns: dict[int, int] = {}
    duplicates = out_of_order = 0
    highest = -1
    for number, at_ns in arrivals:
        if number in first_ns:
            duplicates += 1
            continue
        out_of_order += number < highest
        highest = max(highest, number)
        first_ns[number] = at_ns - ahead_ns
    begin_ns = min((at_ns for at_ns in sent_ns if at_ns), default=0)
    return LinkMeasure(
        link=link,
        sent=sum(at_ns != 0 for at_ns in sent_ns),
        received=len(first_ns),
        duplicates=duplicates,
        out_of_order=out_of_order,
        # Nothing arrives before it is sent: a negative delay is within the error of the clocks' difference.
        delays_ms=[max(0.0, (at_ns - sent_ns[number]) / 1e6) for number, at_ns in sorted(first_ns.items())],
        seconds=max(0.0, (max(first_ns.values()) - begin_ns) / 1e9) if first_ns else 0.0,
        damaged=damaged,
        within_ms=within_ns / 1e6,
    )


async def _why_no_netem(link: AgentLink, netem: Netem) -> str | None:
    """Why links that begin on this host cannot be shaped by netem; None when they can.

    The commands that undo netem are stored on the host before anything is tried there.
    """
    await link.request("undo", {"key": "netem trial", "argv": remove_trial_argv()})
    await link.request("undo", {"key": NETEM, "argv": remove_argv(netem.devices)})
    status, _, errors = await link.run(trial_argv())
    if status != 0:
        said = (errors.strip().splitlines() or [f"status {status}"])[0]
        return f"this kernel has no netem ({said})"
    return await netem.foreign_root()


class AgentRelays:
    """See harness.clusters.shaped_links.LinkShaper.

    `relays` are the helpers, one per host; `addresses` are the hosts' IPv4 addresses; `devices` maps host and peer
    address to the device that leads there. Veth pairs, rules and relays are made by `prepare`, or on first use.
    """

    mechanism = RELAY

    def __init__(
        self,
        links: Mapping[str, AgentLink],
        relays: Mapping[str, AgentHelper],
        *,
        addresses: Mapping[str, str],
        devices: Mapping[str, Mapping[str, str]],
        seed: str,
    ) -> None:
        self._links = dict(links)
        self._relays = dict(relays)
        self._addresses = dict(addresses)
        self._devices = {host: dict(found) for host, found in devices.items()}
        self._seed = zlib.crc32(seed.encode())
        self._is_prepared = False
        self._lock = asyncio.Lock()
        # What each host is shaping now; None if unknown.
        self._applied: dict[str, Pairs | None] = {host: {} for host in links}

    async def prepare(self) -> None:
        """Make devices and rules and start the relay on every host; nothing is redirected yet. Idempotent.

        Raises ClusterUnavailable when a host's kernel does not support it, ShellError when a host does not answer.
        """
        async with self._lock:
            if not self._is_prepared:
                await all_of(self._prepare(host) for host in self._links)
                self._is_prepared = True

    async def _prepare(self, host: str) -> None:
        link, devices = self._links[host], self._devices[host]
        for key, argv, stdin in (
            ("device pair", ["sh", "-c", _REMOVE_DEVICE], ""),
            ("netdev table", ["nft", "-f", "-"], _REMOVE_TABLE),
        ):
            await link.request("undo", {"key": key, "argv": argv, "stdin": stdin})
        lines = [
            f"link add {_ASIDE} mtu {_MTU} type veth peer name {_TAKEN} mtu {_MTU}",
            *(f"link set {device} addrgenmode none up" for device in (_ASIDE, _TAKEN)),
        ]
        await self._run_or_unavailable(host, ["ip", "-batch", "-"], "\n".join(lines) + "\n")
        await self._run_or_unavailable(host, ["nft", "-f", "-"], _install_script(set(devices.values())))
        await self._relays[host].start()
        await self._relays[host].request(
            "open", seed=self._seed, ports=devices, aside=_TAKEN, into=_ASIDE, listens_within_s=START_TIMEOUT_S
        )

    async def _run_or_unavailable(self, host: str, argv: Sequence[str], stdin: str) -> None:
        status, _, errors = await self._links[host].run(argv, stdin=stdin)
        if status != 0:
            said = (errors.strip().splitlines() or [f"status {status}"])[0]
            raise ClusterUnavailable(
                f"{host} cannot hold packets back for link faults ({argv[0]}: {said}): it needs a kernel with netem, "
                "or with veth and nf_tables' netdev egress hook (5.16 or newer); otherwise, leave out the link nemesis"
            )

    async def apply(self, wanted: Mapping[Link, LinkShape]) -> None:
        """See LinkShaper. Raises ShellError; ClusterUnavailable when relays are first needed and cannot be prepared."""
        if wanted:
            await self.prepare()
        by_host: dict[str, Pairs] = {host: {} for host in self._links}
        for link, shape in wanted.items():
            by_host[link.source][self._addresses[link.source], self._addresses[link.destination]] = shape
        if self._is_prepared:
            await all_of(self._apply_on(host, pairs) for host, pairs in by_host.items() if self._applied[host] != pairs)

    def forget(self) -> None:
        """See LinkShaper."""
        self._applied = dict.fromkeys(self._applied)

    async def _apply_on(self, host: str, wanted: Pairs) -> None:
        """Stop redirecting old pairs first and start redirecting new ones last: the relay must know every pair whose
        packets reach it."""
        before = self._applied[host]
        self._applied[host] = None  # unknown until it is done; if this fails, the next change repairs it
        staying = wanted.keys() & before.keys() if before is not None else set[Pair]()
        if before is None or staying != before.keys():
            await self._redirect(host, staying)
        pairs = [[*pair, asdict(shape)] for pair, shape in wanted.items()]
        try:
            await self._relays[host].request("shape", pairs=pairs)
        except ShellError as error:
            if wanted:
                raise
            # Nothing is redirected to the relay any more, so it does no harm that it has ended.
            logger.warning("healing links of %s: %s", host, error)
            return
        if staying != wanted.keys():
            await self._redirect(host, wanted)
        self._applied[host] = wanted

    async def _redirect(self, host: str, pairs: Collection[Pair]) -> None:
        script = f"flush set {TABLE} pairs\n"
        if pairs:
            elements = ", ".join(f"{source} . {destination}" for source, destination in sorted(pairs))
            script += f"add element {TABLE} pairs {{ {elements} }}\n"
        argv = ["nft", "-f", "-"]
        status, _, errors = await self._links[host].run(argv, stdin=script)
        if status != 0:
            raise ShellError(host, argv, status, errors)


def _install_script(devices: Collection[str]) -> str:
    """The nft script that redirects, on every device, packets between the pairs of a set, which is empty at first."""
    script = f"{_REMOVE_TABLE}add table {TABLE}\nadd set {TABLE} pairs {{ type ipv4_addr . ipv4_addr; }}\n"
    for number, device in enumerate(sorted(devices)):
        hook = f'type filter hook egress device "{device}" priority 0; policy accept;'
        script += f"add chain {TABLE} egress{number} {{ {hook} }}\n"
        pairs = f"meta mark != {RELAYED_MARK} ip saddr . ip daddr @pairs"
        script += f'add rule {TABLE} egress{number} {pairs} counter fwd to "{_ASIDE}"\n'
    return script
