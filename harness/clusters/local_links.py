"""Bad links in a `local` cluster: late and slow ones, by the link proxy. See nemesis.target.Links."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping

from harness.clusters.link_probe import LinkProbe
from harness.clusters.shaped_links import BURST_BYTES, SPACING_S
from nemesis.target import Link, LinkMeasure, LinkShape

__all__ = ["LINKS_MISSING", "LocalLinks"]

_STREAMS = "the proxies of the local cluster carry streams, in which no packet can be {}: use --cluster netns"
LINKS_MISSING: Mapping[str, str] = {
    "loss": _STREAMS.format("lost"),
    "duplicate": _STREAMS.format("sent twice"),
    "reorder": _STREAMS.format("out of order"),
}
"""What the links of a local cluster cannot be, and why."""

SendShapes = Callable[[str, Mapping[Link, LinkShape]], Awaitable[None]]


class LocalLinks:
    """`shape` and `unshape` are those of the cluster's network; `probe` has connections through the same proxy."""

    mechanism = "proxies"

    def __init__(self, *, shape: SendShapes, unshape: Callable[[str], Awaitable[None]], probe: LinkProbe) -> None:
        self._shape = shape
        self._unshape = unshape
        self._probe = probe
        self._fault_ids: set[str] = set()

    async def shape(self, fault_id: str, shapes: Mapping[Link, LinkShape]) -> None:
        """Make links late or slow. Raises ValueError for what a stream cannot be, HarnessError."""
        for shape in shapes.values():
            if shape.loss_percent or shape.duplicate_percent or shape.reorder_percent:
                raise ValueError(LINKS_MISSING["loss"])
        await self._probe.keep(shapes)  # while the links are still quick
        self._fault_ids.add(fault_id)
        await self._shape(fault_id, shapes)

    async def release(self, fault_id: str) -> None:
        """Undo one fault's shaping."""
        await self._unshape(fault_id)
        self._fault_ids.discard(fault_id)

    async def release_all(self) -> None:
        """Undo all shaping."""
        for fault_id in sorted(self._fault_ids):
            await self.release(fault_id)

    async def measure(
        self, links: Collection[Link], *, count: int, size_bytes: int, timeout_s: float
    ) -> Mapping[Link, LinkMeasure]:
        """Time bytes over kept connections of each link."""
        wanted = list(dict.fromkeys(links))
        await self._probe.keep(wanted)
        spacing_s = SPACING_S if size_bytes < BURST_BYTES else 0.0
        measures = await asyncio.gather(
            *(
                self._probe.time_link(
                    link, count=count, size_bytes=size_bytes, spacing_s=spacing_s, timeout_s=timeout_s
                )
                for link in wanted
            )
        )
        return dict(zip(wanted, measures, strict=True))
