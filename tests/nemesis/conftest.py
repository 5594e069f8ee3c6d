"""A target whose network is a set of cut links, and a loop on virtual time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from nemesis.target import Grudge, Link, LinkTraffic, ProbeResult, links_of


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__(_JumpingSelector(self))
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("deadlock: nothing to wait for")
        if not ready and timeout:
            self._loop.now_s += timeout
        return ready


class FakeNetwork:
    """Knows which links are cut; `ineffective` links pass even when cut, `broken` ones never do.

    A probe of a link that does not pass takes the whole timeout, as with real ones.
    """

    def __init__(self) -> None:
        self.cuts: dict[str, Grudge] = {}
        self.ineffective: set[Link] = set()
        self.broken: set[Link] = set()
        self.partial: set[Link] = set()
        self.mute: set[str] = set()
        """Hosts that can send nothing."""
        self.answer_s = 0.001
        self.probed: list[tuple[list[Link], float]] = []

    async def cut(self, fault_id: str, grudge: Grudge) -> None:
        self.cuts[fault_id] = grudge

    async def heal(self, fault_id: str) -> None:
        self.cuts.pop(fault_id, None)

    async def heal_all(self) -> None:
        self.cuts.clear()

    def passes(self, link: Link) -> bool:
        is_cut = any(link in links_of(grudge) for grudge in self.cuts.values())
        return link not in self.broken and link.source not in self.mute and (not is_cut or link in self.ineffective)

    async def probe(self, links: Collection[Link], *, timeout_s: float) -> Sequence[ProbeResult]:
        self.probed.append((list(links), timeout_s))
        silent = [link for link in links if not self.passes(link)]
        await asyncio.sleep(timeout_s if silent or self.answer_s > timeout_s else self.answer_s)
        in_time = self.answer_s <= timeout_s
        return [
            ProbeResult(
                link,
                in_time and self.passes(link),
                "no route" if link.source in self.mute else "",
                partial=link in self.partial,
                was_sent=link.source not in self.mute,
            )
            for link in links
        ]


class CountingNetwork(FakeNetwork):
    """A network that counts what the system sends, as decided by the test. `leaks` pass in spite of a cut, unnoticed by
    probes."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: dict[Link, LinkTraffic] = {}
        self.leaks: set[Link] = set()
        self.bypassing_connections: list[str] = []

    def send(self, *links: Link, size_bytes: int = 100) -> None:
        """Send as the system would."""
        for link in links:
            had = self.counted.get(link, LinkTraffic())
            if self.passes(link) or link in self.leaks:
                now = replace(had, passed_bytes=had.passed_bytes + size_bytes)
            else:
                now = replace(had, stopped_bytes=had.stopped_bytes + size_bytes)
            self.counted[link] = now

    async def traffic(self, links: Collection[Link]) -> Mapping[Link, LinkTraffic]:
        return {link: self.counted.get(link, LinkTraffic()) for link in links}

    async def bypasses(self, links: Collection[Link]) -> Sequence[str]:
        return self.bypassing_connections


class FakeTarget:
    """Hosts n1..nN; `leader` is what they answer, or None."""

    def __init__(self, count: int = 5, leader: str | None = "n1", *, is_counting: bool = False) -> None:
        self.hosts: Sequence[str] = [f"n{number}" for number in range(1, count + 1)]
        self.fake_network: FakeNetwork = CountingNetwork() if is_counting else FakeNetwork()
        self.network: Any = self.fake_network
        self.triggers: Any = None
        self.leader = leader
        self.asked = 0

    async def leaders(self) -> Sequence[str]:
        self.asked += 1
        return [] if self.leader is None else [self.leader]


@pytest.fixture
def make_target() -> type[FakeTarget]:
    return FakeTarget


@pytest.fixture
def run_virtual() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine on a loop of virtual time and returns its result."""

    def run(main: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(main)

    return run
