"""Clock faults on machines with a clock of their own: the real wall clock is set, the shim does the rest.

A helper on each machine sets its wall clock (see clock_helper). Monotonic clocks, which no kernel lets anybody set, are
still skewed by the shim. A command that corrects a machine's clock is stored on it before the clock is first set.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness.clusters.agent_helper import START_TIMEOUT_S, AgentHelper
from harness.clusters.agent_link import AgentLink
from harness.clusters.base import ClusterUnavailable
from harness.clusters.clock_helper import RESTORE_SCRIPT
from harness.clusters.threads import all_of, begin_in_thread
from nemesis.target import ClockReading, Clocks, ClockSkew, FaultMet

__all__ = ["AgentClocks"]

_BASELINE_READINGS = 3

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class AgentClocks:
    """See nemesis.target.Clocks. Made by `prepared`."""

    def __init__(self, helpers: Mapping[str, AgentHelper], links: Mapping[str, AgentLink], shim: Clocks) -> None:
        self._helpers = dict(helpers)
        self._links = dict(links)
        self._shim = shim
        self._baseline_ms: dict[str, float] = {}
        """How far each machine's clock differs from the harness's without any fault."""
        self._hosts: dict[str, tuple[str, ...]] = {}
        """Fault -> the hosts whose real clocks it skews."""

    @classmethod
    async def prepared(cls, links: Mapping[str, AgentLink], *, shim: Clocks) -> AgentClocks:
        """Start a helper on every host of `links`; the shim skews the clocks of the others. No clock is touched yet.

        Raises ClusterUnavailable when two hosts, or a host and this machine, share a clock; ShellError.
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
        made = cls(helpers, links, shim)
        for host in links:
            found = [await made._read(host) for _ in range(_BASELINE_READINGS)]
            made._baseline_ms[host] = min(found, key=lambda reading: reading.uncertainty_ms).offset_ms
        return made

    def mechanism(self, host: str) -> str:
        """What skews the clock of the host's replica."""
        return "the machine's own clock" if host in self._helpers else self._shim.mechanism(host)

    async def reaches(self, host: str, pid: int | None, *, monotonic: bool = False) -> str | None:
        """None for the wall clock of a machine whose own clock is set: every process there reads it."""
        if host in self._helpers and not monotonic:
            return None
        return await self._shim.reaches(host, pid, monotonic=monotonic)

    async def met(self, fault_id: str) -> Mapping[str, FaultMet]:
        """How often replicas have read a clock that the shim skews; reads of a machine's own clock are not counted."""
        return {**dict.fromkeys(self._hosts.get(fault_id, ()), FaultMet(None, None)), **await self._shim.met(fault_id)}

    async def read(
        self, host: str, *, pauses_s: Sequence[float] = (), apart_ms: float = 0.0, timeout_s: float
    ) -> Sequence[ClockReading]:
        """The machine's own wall clock against the harness's, and the monotonic clock as seen under the shim."""
        if host not in self._helpers:
            return await self._shim.read(host, pauses_s=pauses_s, apart_ms=apart_ms, timeout_s=timeout_s)
        readings: list[ClockReading] = []
        for pause_s in (0.0, *pauses_s):
            offsets_ms = [reading.offset_ms for reading in readings]
            if offsets_ms and 0 < apart_ms <= max(offsets_ms) - min(offsets_ms):
                break
            await asyncio.sleep(pause_s)
            [seen] = await self._shim.read(host, timeout_s=timeout_s)
            wall = await self._read(host)
            offset_ms = wall.offset_ms - self._baseline_ms[host]
            readings.append(replace(seen, offset_ms=offset_ms, uncertainty_ms=wall.uncertainty_ms))
        return readings

    async def _read(self, host: str) -> ClockReading:
        before_ns, before_s = time.time_ns(), time.monotonic()
        hello = await self._links[host].request("hello")
        half_s = (time.monotonic() - before_s) / 2
        offset_ms = int(hello["wall_ns"]) / 1e6 - (before_ns / 1e6 + half_s * 1000)
        return ClockReading(offset_ms, half_s * 1000, int(hello["monotonic_ns"]) / 1e9, before_s + half_s)

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
                "step_ms": skew.step_ms,
            }
            await self._helpers[host].request("skew", fault=fault_id, skew=wanted)

        await all_of([bend(host, skew) for host, skew in real.items()])

    async def release(self, fault_id: str) -> None:
        """Undo one fault. Idempotent. Raises ShellError when a clock is still wrong afterwards; the other clocks are
        right even then."""
        hosts = self._hosts.get(fault_id, ())
        own = [self._helpers[host].request("release", fault=fault_id) for host in hosts]
        await all_of([self._shim.release(fault_id), *own])
        self._hosts.pop(fault_id, None)

    async def release_all(self) -> None:
        """Undo every skew and correct every clock, even if no skew is known. Idempotent. Raises ShellError, after every
        clock that can be corrected was."""
        own = [helper.request("release_all") for helper in self._helpers.values()]
        await all_of([self._shim.release_all(), *own])
        self._hosts.clear()


async def _require_clocks_of_their_own(links: Mapping[str, AgentLink]) -> None:
    """Tell machines apart by their boot ids: namespaces and containers share that of this machine."""
    hosts = list(links)
    boots = await asyncio.gather(*(_boot_id(links[host]) for host in hosts))
    seen = {await begin_in_thread(_own_boot_id): "this machine"}
    for host, boot_id in zip(hosts, boots, strict=True):
        other = seen.setdefault(boot_id, host)
        if other != host:
            raise ClusterUnavailable(
                f'{host} shares its clock with {other}: set clock = "shim" for it in the inventory'
            )


async def _boot_id(link: AgentLink) -> str:
    _, output, _ = await link.run(["cat", _BOOT_ID])
    return output.strip()


def _own_boot_id() -> str:
    return Path(_BOOT_ID).read_text(encoding="ascii").strip()
