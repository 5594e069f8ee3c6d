"""Link faults: combines the faults on each link, and shapes the links by netem or a relay.

`ShapedLinks` keeps track of what each fault does to each link, heals one fault without the others, and rejects unknown
hosts. A `LinkShaper` then shapes the links: the kernel's netem on each host (`NetemShaper`), or a relay of ours if the
kernel has none. `FirstChoice` uses netem whenever it can do what is wanted.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping
from typing import Protocol

from harness.clusters.threads import all_of
from nemesis.mechanisms.netem import Netem, Pair, netem_can
from nemesis.mechanisms.shell import HostShell, ShellError
from nemesis.target import Link, LinkShape

__all__ = [
    "BURST_BYTES",
    "NETEM",
    "RELAY",
    "SPACING_S",
    "FirstChoice",
    "LinkShaper",
    "NetemShaper",
    "ShapedLinks",
    "combined",
    "devices_to_peers",
]

NETEM, RELAY = "netem", "the relay"
"""What shapes packets, as named in proofs and by `harness doctor`."""

SPACING_S = 0.004
"""Interval between two probe packets of a link: they must not queue behind each other on a link that is merely late."""

BURST_BYTES = 512
"""Packets of this size or more are sent without spacing: they measure a rate."""


def combined(shapes: Collection[Mapping[Link, LinkShape]]) -> dict[Link, LinkShape]:
    """The combined shape of each link under several faults."""
    result: dict[Link, LinkShape] = {}
    for shaped in shapes:
        for link, shape in shaped.items():
            result[link] = shape.on_top_of(result.get(link, LinkShape()))
    return result


class LinkShaper(Protocol):
    """Shapes all links of a cluster at once."""

    @property
    def mechanism(self) -> str:
        """What shapes the links now, or would: NETEM or RELAY."""
        ...

    async def apply(self, wanted: Mapping[Link, LinkShape]) -> None:
        """Shape exactly these links; in force on return. Raises ShellError, HarnessError, and can then be retried."""
        ...

    def forget(self) -> None:
        """Forget the known state, so that the next `apply` makes everything anew."""
        ...


class ShapedLinks:
    """The part of nemesis.target.Links that shapes. `hosts` are the hosts that have links."""

    def __init__(self, hosts: Collection[str], shaper: LinkShaper) -> None:
        self._known = frozenset(hosts)
        self._shaper = shaper
        self._shapes: dict[str, dict[Link, LinkShape]] = {}
        self._lock = asyncio.Lock()

    @property
    def mechanism(self) -> str:
        """What shapes the links, in a word or two."""
        return self._shaper.mechanism

    async def shape(self, fault_id: str, shapes: Mapping[Link, LinkShape]) -> None:
        """Shape links. Raises ValueError for an unknown host, ShellError, HarnessError when the relay has ended."""
        self._require_known(shapes)
        self._shapes[fault_id] = dict(shapes)
        await self._apply()

    async def release(self, fault_id: str) -> None:
        """Undo one fault's shaping. Idempotent: repeated, it undoes what failed the first time. Raises the same errors
        as `shape`."""
        self._shapes.pop(fault_id, None)
        await self._apply()

    async def release_all(self) -> None:
        """Undo all shaping, even if none is known. Everything is tried before an error is raised."""
        self._shapes.clear()
        self._shaper.forget()
        await self._apply()

    async def _apply(self) -> None:
        async with self._lock:
            await self._shaper.apply(combined(self._shapes.values()))

    def _require_known(self, links: Collection[Link]) -> None:
        unknown = {host for link in links for host in link} - self._known
        if unknown:
            raise ValueError(f"no such hosts in this cluster: {', '.join(sorted(unknown))}")


class NetemShaper:
    """Shapes links by each host's own netem. `netems` has one per host; `addresses` are the hosts' IPv4 addresses."""

    mechanism = NETEM

    def __init__(self, netems: Mapping[str, Netem], addresses: Mapping[str, str]) -> None:
        self._netems = dict(netems)
        self._addresses = dict(addresses)

    def can(self, wanted: Mapping[Link, LinkShape]) -> bool:
        """Whether netem can apply these shapes on every host."""
        return all(netem_can(self._here(host, wanted).values()) for host in self._netems)

    async def apply(self, wanted: Mapping[Link, LinkShape]) -> None:
        """See LinkShaper. Every host is tried before the first error is raised."""
        await all_of(netem.apply(self._here(host, wanted)) for host, netem in self._netems.items())

    def forget(self) -> None:
        """See LinkShaper."""
        for netem in self._netems.values():
            netem.forget()

    def _here(self, host: str, wanted: Mapping[Link, LinkShape]) -> dict[Pair, LinkShape]:
        return {
            (self._addresses[link.source], self._addresses[link.destination]): shape
            for link, shape in wanted.items()
            if link.source == host
        }


class FirstChoice:
    """Uses netem for what it can do, and the relay, which can do everything, for the rest: overlapping faults for which
    one host would need a netem that duplicates next to another netem. Only one of the two shapes at a time."""

    def __init__(self, netem: NetemShaper, relay: LinkShaper) -> None:
        self._netem = netem
        self._relay = relay
        self._now: LinkShaper = netem
        self._relay_was_used = False

    @property
    def mechanism(self) -> str:
        """See LinkShaper."""
        return self._now.mechanism

    async def apply(self, wanted: Mapping[Link, LinkShape]) -> None:
        """See LinkShaper."""
        chosen: LinkShaper = self._netem if self._netem.can(wanted) else self._relay
        if chosen is not self._now:
            await self._now.apply({})
            self._now = chosen
            self._relay_was_used = self._relay_was_used or chosen is self._relay
        await chosen.apply(wanted)

    def forget(self) -> None:
        """See LinkShaper."""
        self._netem.forget()
        if self._relay_was_used:
            self._relay.forget()
            self._now = self._relay  # so that the next `apply` resets the relay too


async def devices_to_peers(shell: HostShell, host: str, peers: Collection[str], *, ip: str = "ip") -> dict[str, str]:
    """The device through which a host sends to each of these IPv4 addresses. Raises ShellError."""
    if not peers:
        return {}
    argv = [ip, "-o", "-batch", "-"]
    output = await shell.run(host, argv, stdin="".join(f"route get {address}\n" for address in peers))
    found = [re.search(r"\bdev (\S+)", line) for line in output.splitlines()]
    if len(found) != len(peers) or None in found:
        raise ShellError(host, argv, 0, f"no device for some of {', '.join(peers)}: {output}")
    return {address: match[1] for address, match in zip(peers, found, strict=True) if match is not None}
