"""A network of hosts with addresses of their own: cuts by nftables on the receiving host, probes by datagrams."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from nemesis.mechanisms.nft import NftCuts
from nemesis.target import Grudge, Link, ProbeResult

__all__ = ["PacketNetwork", "Prober"]


class Prober(Protocol):
    """Whatever sends a nonce along links."""

    async def probe(self, links: Collection[Link], *, timeout_s: float) -> Sequence[ProbeResult]: ...


class PacketNetwork:
    """See nemesis.target.Network."""

    def __init__(self, cuts: NftCuts, prober: Prober) -> None:
        self._cuts = cuts
        self._prober = prober

    async def cut(self, fault_id: str, grudge: Grudge) -> None:
        """Drop packets as `grudge` says. Raises ValueError for an unknown host, ShellError."""
        await self._cuts.cut(fault_id, grudge)

    async def heal(self, fault_id: str) -> None:
        """Undo one fault's cut; what others cut stays cut. Idempotent. Raises ShellError."""
        await self._cuts.heal(fault_id)

    async def heal_all(self) -> None:
        """Undo every cut, in any state. Idempotent. Raises ShellError."""
        await self._cuts.heal_all()

    async def probe(self, links: Collection[Link], *, timeout_s: float) -> Sequence[ProbeResult]:
        """Send a nonce along each link and see whether it arrives within `timeout_s` seconds. Raises ShellError."""
        return await self._prober.probe(links, timeout_s=timeout_s)
