"""The interfaces that faults act on.

A nemesis knows nothing of namespaces, containers or simulated links. It asks a `Target` for its hosts and
acts through small interfaces; each cluster implements those it can. An interface that a cluster lacks is
`None` on its target, and the harness says so by name before the test starts.

Vocabulary: a *link* is a directed pair (source host, destination host). A *grudge* maps a host to the hosts
whose packets it drops, so {b: {a}} cuts only the direction a -> b and one-way cuts are ordinary values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = ["Grudge", "Link", "Network", "ProbeResult", "Target", "links_of"]

Grudge = Mapping[str, frozenset[str]]
"""destination host -> source hosts whose packets the destination drops"""


class Link(NamedTuple):
    """One direction between two hosts: packets from `source` to `destination`."""

    source: str
    destination: str


def links_of(grudge: Grudge) -> frozenset[Link]:
    """The directed links that a grudge cuts."""
    return frozenset(Link(source, destination) for destination, sources in grudge.items() for source in sources)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe of one link saw. `passed` is True when the probe's bytes arrived at the destination.

    `partial` says that a link was probed in several ways (existing and new connections, say) that did not
    agree. Then `passed` is True, since something arrived, but the link is neither cut nor whole.
    """

    link: Link
    passed: bool
    detail: str = ""
    partial: bool = False


class Network(Protocol):
    """The network between the hosts of a cluster."""

    async def cut(self, fault_id: str, grudge: Grudge) -> None:
        """Drop packets as `grudge` says until `heal(fault_id)`. Cuts of several faults add up."""
        ...

    async def heal(self, fault_id: str) -> None:
        """Undo one fault's cut; links that another fault also cuts stay cut. Idempotent."""
        ...

    async def heal_all(self) -> None:
        """Undo every cut. Idempotent; safe in any state, also half-way through a failed `cut`."""
        ...

    async def probe(self, links: Collection[Link], *, timeout_s: float) -> Sequence[ProbeResult]:
        """Send real bytes along each link and see whether they arrive within `timeout_s` seconds.

        The bytes take the path that the nodes' own packets take. One result per link, in the given order.
        """
        ...


class Target(Protocol):
    """What a nemesis may act on during one run."""

    @property
    def hosts(self) -> Sequence[str]:
        """Names of the hosts that run replicas, in a fixed order (n1, n2, ...)."""
        ...

    @property
    def network(self) -> Network | None: ...

    async def leaders(self) -> Sequence[str]:
        """Hosts that call themselves leader right now, by asking the system under test; the highest term
        first. Empty when nobody answers as leader."""
        ...
