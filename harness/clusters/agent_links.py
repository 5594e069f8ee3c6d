"""Bad links between hosts with agents: shaped where packets leave their source, and measured by helpers there.

What shapes is each host's own netem, or, when a kernel among them has none or a device's queue is somebody else's, a
relay of ours on every host (see shaped_links, agent_relay).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from harness.clusters.agent_helper import START_TIMEOUT_S, AgentHelper
from harness.clusters.agent_link import AgentLink
from harness.clusters.agent_relay import AgentRelays
from harness.clusters.base import ClusterUnavailable
from harness.clusters.shaped_links import (
    BURST_BYTES,
    NETEM,
    SPACING_S,
    FirstChoice,
    NetemShaper,
    ShapedLinks,
    devices_to_peers,
)
from harness.clusters.threads import all_of
from nemesis.mechanisms.netem import Netem, remove_argv, remove_trial_argv, trial_argv
from nemesis.mechanisms.shell import HostShell, ShellError
from nemesis.target import Link, LinkMeasure

__all__ = ["AgentLinks", "ClockDifference", "measure_of"]

logger = logging.getLogger(__name__)

_CLOCK_READINGS = 5
_GRACE_S = 20.0
"""For a meter to answer, beyond what it was told to wait."""


@dataclass(frozen=True, slots=True)
class ClockDifference:
    """A host's wall clock less the harness's monotonic one, in nanoseconds, right to half of `round_trip_ns`."""

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
        self._ports: dict[str, int] = {}
        self._measurements = 0
        self.why_no_netem = why_no_netem
        """What a host lacks for netem; None when all have it."""

    @classmethod
    async def prepared(
        cls,
        links: Mapping[str, AgentLink],
        addresses: Mapping[str, str],
        *,
        shell: HostShell,
        directories: Mapping[str, str],
        pythons: Mapping[str, str],
        seed: str,
    ) -> AgentLinks:
        """Find out what can shape, and make it and the meters ready on every host; nothing is shaped yet.

        `links` are the agents of the replicas' hosts and `addresses` what these hosts are known by; `directories` are
        the agents' and `pythons` the interpreters there. Raises ClusterUnavailable when a host's kernel can shape in no
        way, ShellError when one cannot be asked.
        """
        relays, meters = (
            {
                host: AgentHelper(link, module=module, directory=directories[host], python=pythons[host])
                for host, link in links.items()
            }
            for module in ("harness.clusters.link_relay", "harness.clusters.link_meter")
        )
        devices: dict[str, dict[str, str]] = {}

        async def learn(host: str) -> None:
            peers = [address for peer, address in addresses.items() if peer != host]
            try:
                devices[host] = await devices_to_peers(shell, host, peers)
            except ShellError as error:
                raise ClusterUnavailable(f"{host} does not say how it reaches the other hosts: {error}") from None

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
        await all_of([AgentHelper.bring(link, directories[host]) for host, link in links.items()])
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
        opened = await self._meters[host].request("open", address=self._addresses[host], patience_s=START_TIMEOUT_S)
        self._ports[host] = int(opened["port"])

    async def measure(
        self, links: Collection[Link], *, count: int, size_bytes: int, timeout_s: float
    ) -> Mapping[Link, LinkMeasure]:
        """Datagrams along each link, stamped where they are sent and by the kernel where they arrive; the difference of
        the two clocks is known to half a round trip of the agents' connections."""
        self._require_known(links)
        self._measurements += 1
        number = self._measurements
        wanted = list(dict.fromkeys(links))
        sources, destinations = sorted({link.source for link in wanted}), sorted({link.destination for link in wanted})
        hosts = sorted({*sources, *destinations})
        differences = dict(zip(hosts, await asyncio.gather(*(self._difference(host) for host in hosts)), strict=True))

        async def send(source: str) -> Mapping[str, Sequence[int]]:
            to = [[self._addresses[link.destination], self._ports[link.destination]]
                  for link in wanted if link.source == source]  # fmt: skip
            spacing_s = 0.0 if size_bytes >= BURST_BYTES else SPACING_S
            answer = await self._meters[source].request(
                "send", measurement=number, to=to, count=count, size_bytes=size_bytes, spacing_s=spacing_s,
                timeout_s=2 * count * spacing_s + _GRACE_S,
            )  # fmt: skip
            return dict(answer["sent_ns"])

        async def take(destination: str) -> Mapping[str, Sequence[Sequence[int]]]:
            expected = [self._addresses[link.source] for link in wanted if link.destination == destination]
            answer = await self._meters[destination].request(
                "arrivals", measurement=number, sources=expected, count=count, wait_s=timeout_s,
                timeout_s=timeout_s + _GRACE_S,
            )  # fmt: skip
            return dict(answer["arrivals"])

        sent = dict(zip(sources, await asyncio.gather(*map(send, sources)), strict=True))
        taken = dict(zip(destinations, await asyncio.gather(*map(take, destinations)), strict=True))
        return {
            link: measure_of(
                link,
                sent_ns=sent[link.source][self._addresses[link.destination]],
                arrivals=taken[link.destination][self._addresses[link.source]],
                ahead_ns=differences[link.destination].difference_ns - differences[link.source].difference_ns,
            )
            for link in wanted
        }

    async def _difference(self, host: str) -> ClockDifference:
        """Of a few readings the one that took least time."""
        loop = asyncio.get_running_loop()
        readings = []
        for _ in range(_CLOCK_READINGS):
            before_ns = round(loop.time() * 1e9)
            wall_ns = int((await self._links[host].request("hello"))["wall_ns"])
            after_ns = round(loop.time() * 1e9)
            readings.append(ClockDifference(wall_ns - (before_ns + after_ns) // 2, after_ns - before_ns))
        return min(readings, key=lambda reading: reading.round_trip_ns)


def measure_of(link: Link, *, sent_ns: Sequence[int], arrivals: Sequence[Sequence[int]], ahead_ns: int) -> LinkMeasure:
    """What packets met on a link. `sent_ns` is when each was sent, 0 if not, by the source's clock; `arrivals` are
    [number, time] in order by the destination's clock, which is ahead of the source's by `ahead_ns`."""
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
        sent=len(sent_ns),
        received=len(first_ns),
        duplicates=duplicates,
        out_of_order=out_of_order,
        # Nothing arrives before it is sent; only the clocks are known no better than that.
        delays_ms=[max(0.0, (at_ns - sent_ns[number]) / 1e6) for number, at_ns in sorted(first_ns.items())],
        seconds=max(0.0, (max(first_ns.values()) - begin_ns) / 1e9) if first_ns else 0.0,
    )


async def _why_no_netem(link: AgentLink, netem: Netem) -> str | None:
    """Why links that begin on this host cannot be shaped by netem; None when they can.

    What undoes it is written down on the host before anything is tried there.
    """
    await link.request("undo", {"key": "netem trial", "argv": remove_trial_argv()})
    await link.request("undo", {"key": NETEM, "argv": remove_argv(netem.devices)})
    status, _, errors = await link.run(trial_argv())
    if status != 0:
        said = (errors.strip().splitlines() or [f"status {status}"])[0]
        return f"this kernel has no netem ({said})"
    return await netem.foreign_root()
