"""The real clocks of machines that have one of their own, beside the shim for what a real clock cannot be.

Wall clocks are really set, by a helper on each machine (see clock_helper); monotonic clocks, which no kernel lets
anybody set, are still the shim's. What sets a machine's clock right is written down on it before the first setting.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from harness.clusters.agent_helper import START_TIMEOUT_S, AgentHelper
from harness.clusters.agent_link import AgentLink
from harness.clusters.base import ClusterUnavailable
from harness.clusters.clock_helper import RESTORE_SCRIPT
from harness.clusters.threads import all_of
from nemesis.target import Clocks, ClockSkew

__all__ = ["AgentClocks"]

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class AgentClocks:
    """See nemesis.target.Clocks. Made by `prepared`."""

    def __init__(self, helpers: Mapping[str, AgentHelper], shim: Clocks) -> None:
        self._helpers = dict(helpers)
        self._shim = shim
        self._hosts: dict[str, tuple[str, ...]] = {}
        """Fault -> the hosts whose real clocks it bends."""

    @classmethod
    async def prepared(cls, links: Mapping[str, AgentLink], *, shim: Clocks) -> AgentClocks:
        """Start a helper on every host of `links`; the shim has the clocks of the others. No clock is touched yet.

        Raises ClusterUnavailable when two hosts, or a host and this machine, have one clock between them; ShellError.
        """
        await _require_clocks_of_their_own(links)
        helpers = {host: AgentHelper(link, module="harness.clusters.clock_helper") for host, link in links.items()}

        async def prepare(host: str) -> None:
            base = os.path.join(links[host].directory, "clock.base")
            undo = [links[host].python, "-I", "-S", "-c", RESTORE_SCRIPT, base]
            await links[host].request("undo", {"key": "clock", "argv": undo})
            await AgentHelper.bring(links[host])
            await helpers[host].start()
            await helpers[host].request("open", base=base, listens_within_s=START_TIMEOUT_S)

        await all_of([prepare(host) for host in links])
        return cls(helpers, shim)

    async def skew(self, fault_id: str, skews: Mapping[str, ClockSkew]) -> None:
        """Skew clocks. Raises ValueError for an unknown host, ShellError."""
        real = {h: s for h, s in skews.items() if h in self._helpers and not s.affects_monotonic}
        rest = {host: skew for host, skew in skews.items() if host not in real}
        self._hosts[fault_id] = tuple(real)
        if rest:
            await self._shim.skew(fault_id, rest)

        async def bend(host: str, skew: ClockSkew) -> None:
            wanted = {
                "offset_ms": skew.offset_ms,
                "rate_ppm": skew.rate_ppm,
                "strobe_ms": skew.strobe_ms,
                "strobe_period_ms": skew.strobe_period_ms,
            }
            await self._helpers[host].request("skew", fault=fault_id, skew=wanted)

        await all_of([bend(host, skew) for host, skew in real.items()])

    async def release(self, fault_id: str) -> None:
        """Undo one fault. Idempotent. Raises ShellError when a clock is not right afterwards."""
        await self._shim.release(fault_id)
        hosts = self._hosts.get(fault_id, ())
        await all_of([self._helpers[host].request("release", fault=fault_id) for host in hosts])
        self._hosts.pop(fault_id, None)

    async def release_all(self) -> None:
        """Undo every skew; every clock is set right, whatever is thought of it. Idempotent. Raises ShellError."""
        await self._shim.release_all()
        await all_of([helper.request("release_all") for helper in self._helpers.values()])
        self._hosts.clear()


async def _require_clocks_of_their_own(links: Mapping[str, AgentLink]) -> None:
    """Machines are told apart by the boots that they are in: namespaces and containers share this machine's."""
    hosts = list(links)
    boots = await asyncio.gather(*(_boot_id(links[host]) for host in hosts))
    seen = {await asyncio.to_thread(_own_boot_id): "this machine"}
    for host, boot_id in zip(hosts, boots, strict=True):
        other = seen.setdefault(boot_id, host)
        if other != host:
            raise ClusterUnavailable(
                f'{host} has no clock of its own, but that of {other}: set clock = "shim" for it in the inventory'
            )


async def _boot_id(link: AgentLink) -> str:
    _, output, _ = await link.run(["cat", _BOOT_ID])
    return output.strip()


def _own_boot_id() -> str:
    return Path(_BOOT_ID).read_text(encoding="ascii").strip()
