"""Bad links between hosts with agents by a relay of ours, for kernels without netem.

A host turns what it sends to shaped peers aside, to one end of a pair of devices of ours; the relay takes it from the
other end and sends it on, late, twice, out of order, at a rate, or never (see link_relay). So a link is shaped where
its packets begin, one direction at a time, with nothing but nftables and packet sockets.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict

from harness.clusters.agent_helper import START_TIMEOUT_S, AgentHelper
from harness.clusters.agent_link import AgentLink
from harness.clusters.base import ClusterUnavailable
from harness.clusters.link_relay import RELAYED_MARK
from harness.clusters.shaped_links import RELAY
from harness.clusters.threads import all_of
from nemesis.mechanisms.netem import Pair
from nemesis.mechanisms.shell import ShellError
from nemesis.target import Link, LinkShape

__all__ = ["AgentRelays"]

logger = logging.getLogger(__name__)

TABLE = "netdev splitbrain"
"""Family and name of the table of ours that turns packets aside."""

_ASIDE, _TAKEN = "sb-aside", "sb-taken"
"""The two ends of the pair of devices: where packets go in, and where the relay takes them."""

_REMOVE_TABLE = f"add table {TABLE}\ndelete table {TABLE}\n"
_REMOVE_DEVICE = f"if ip link show dev {_ASIDE} >/dev/null 2>&1; then ip link delete dev {_ASIDE}; fi"

_MTU = 65535
"""Of our devices: no packet that any other device takes is too long for them."""

Pairs = dict[Pair, LinkShape]


class AgentRelays:
    """See harness.clusters.shaped_links.LinkShaper.

    `relays` are the helpers, one a host; `addresses` is what hosts are known by, `devices` by which device each host
    reaches each peer's address. Devices, rules and relays are made by `prepare`, or when they are first needed.
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
        # What each host is known to shape; None where that is not known.
        self._applied: dict[str, Pairs | None] = {host: {} for host in links}

    async def prepare(self) -> None:
        """Make devices and rules and start the relay on every host; nothing is turned aside yet. Idempotent.

        Raises ClusterUnavailable when a host's kernel cannot, ShellError when one cannot be asked.
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
            "open", seed=self._seed, ports=devices, aside=_TAKEN, patience_s=START_TIMEOUT_S
        )

    async def _run_or_unavailable(self, host: str, argv: Sequence[str], stdin: str) -> None:
        status, _, errors = await self._links[host].run(argv, stdin=stdin)
        if status != 0:
            said = (errors.strip().splitlines() or [f"status {status}"])[0]
            raise ClusterUnavailable(
                f"{host} cannot hold packets back for link faults ({argv[0]}: {said}): it takes a kernel with netem, "
                "or with veth and nf_tables' netdev egress hook (5.16 or newer); without, leave the nemesis link out"
            )

    async def apply(self, wanted: Mapping[Link, LinkShape]) -> None:
        """See LinkShaper. Raises ShellError; ClusterUnavailable when it is needed for the first time and cannot be."""
        if wanted:
            await self.prepare()
        by_host: dict[str, Pairs] = {host: {} for host in self._links}
        for link, shape in wanted.items():
            by_host[link.source][self._addresses[link.source], self._addresses[link.destination]] = shape
        if self._is_prepared:
            await all_of(
                self._apply_on(host, pairs) for host, pairs in by_host.items() if self._applied[host] != pairs
            )

    def forget(self) -> None:
        """See LinkShaper."""
        self._applied = dict.fromkeys(self._applied)

    async def _apply_on(self, host: str, wanted: Pairs) -> None:
        """What is no longer turned aside goes first, what is newly turned aside comes last: the relay must know every
        pair that comes to it."""
        before = self._applied[host]
        self._applied[host] = None  # not known until it is done; the next change repairs it
        staying = wanted.keys() & before.keys() if before is not None else set[Pair]()
        if before is None or staying != before.keys():
            await self._turn_aside(host, staying)
        pairs = [[*pair, asdict(shape)] for pair, shape in wanted.items()]
        try:
            await self._relays[host].request("shape", pairs=pairs)
        except ShellError as error:
            if wanted:
                raise
            # Nothing comes to the relay any more, so that one which has ended is in nobody's way.
            logger.warning("healing links of %s: %s", host, error)
            return
        if staying != wanted.keys():
            await self._turn_aside(host, wanted)
        self._applied[host] = wanted

    async def _turn_aside(self, host: str, pairs: Collection[Pair]) -> None:
        script = f"flush set {TABLE} pairs\n"
        if pairs:
            elements = ", ".join(f"{source} . {destination}" for source, destination in sorted(pairs))
            script += f"add element {TABLE} pairs {{ {elements} }}\n"
        argv = ["nft", "-f", "-"]
        status, _, errors = await self._links[host].run(argv, stdin=script)
        if status != 0:
            raise ShellError(host, argv, status, errors)


def _install_script(devices: Collection[str]) -> str:
    """The nft script that turns packets of the pairs in a set, which is empty at first, aside on every device."""
    script = f"{_REMOVE_TABLE}add table {TABLE}\nadd set {TABLE} pairs {{ type ipv4_addr . ipv4_addr; }}\n"
    for number, device in enumerate(sorted(devices)):
        hook = f'type filter hook egress device "{device}" priority 0; policy accept;'
        script += f"add chain {TABLE} egress{number} {{ {hook} }}\n"
        pairs = f"meta mark != {RELAYED_MARK} ip saddr . ip daddr @pairs"
        script += f'add rule {TABLE} egress{number} {pairs} counter fwd to "{_ASIDE}"\n'
    return script
