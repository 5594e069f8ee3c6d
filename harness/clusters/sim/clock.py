"""The clocks of one host, which may be wrong.

The wall clock has an offset, a rate and a strobe, the monotonic clock only a rate: it never goes back, but may run
fast or slow compared with other hosts' (which leases must survive). Timers follow the loop's time and are not
affected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.clusters.sim.loop import START_S
from nemesis.target import MONOTONIC_PPM, ClockSkew

if TYPE_CHECKING:
    from harness.clusters.sim.loop import SimLoop

__all__ = ["EPOCH_MS", "WALL_PPM", "SimClock"]

EPOCH_MS = 1_767_225_600_000
"""2026-01-01T00:00:00Z, when every simulation begins."""

WALL_PPM = (-500_000, 500_000)
"""Bounds for all skews of a clock together: 50 % slow or fast. Real clocks stay within some hundreds of ppm."""


class SimClock:
    """A host's clocks: `node.runtime.Clock`, and what faults do to them. Skews of several faults add up."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._skews: dict[str, tuple[ClockSkew, float]] = {}
        self._monotonic_ppm = 0.0
        self._monotonic_base_ns = 0.0
        self._monotonic_since_s = 0.0
        self.skewed_reads = 0
        """How often a process of the host has read its wall clock while any of its clocks was skewed."""
        self.skewed_monotonic_reads = 0
        """How often one has read its monotonic clock while that was skewed."""

    def wall_ms(self) -> int:
        if self._skews:
            self.skewed_reads += 1
        return self.shown_ms()

    def shown_ms(self) -> int:
        """The wall clock, read by the simulation itself rather than a process of the host, so it is not counted."""
        now_ms = EPOCH_MS + (self._loop.now - START_S) * 1000
        return int(now_ms + self.offset_ms) if self._skews else int(now_ms)

    def monotonic_ns(self) -> int:
        if self._monotonic_ppm:
            self.skewed_monotonic_reads += 1
        return self.shown_monotonic_ns()

    def shown_monotonic_ns(self) -> int:
        """The monotonic clock, read by the simulation itself, so it is not counted."""
        elapsed_s = self._loop.now - self._monotonic_since_s
        return int(self._monotonic_base_ns + elapsed_s * (1e9 + self._monotonic_ppm * 1e3))

    @property
    def offset_ms(self) -> float:
        """How far the wall clock is ahead of the true time."""
        now_s = self._loop.now
        return sum(_wall_offset_ms(skew, now_s - since_s) for skew, since_s in self._skews.values())

    def skew(self, fault_id: str, skew: ClockSkew) -> None:
        """Add a skew from now on, replacing an earlier one of that id. Raises ValueError beyond WALL_PPM or
        MONOTONIC_PPM."""
        others = [other for name, (other, _) in self._skews.items() if name != fault_id]
        rate_ppm = sum(each.rate_ppm for each in (*others, skew) if each.affects_monotonic == skew.affects_monotonic)
        kind, (least, most) = ("monotonic", MONOTONIC_PPM) if skew.affects_monotonic else ("wall", WALL_PPM)
        if not least <= rate_ppm <= most:
            raise ValueError(f"the rate error of a {kind} clock must be {least} to {most:+} ppm, not {rate_ppm:+}")
        self._skews[fault_id] = (skew, self._loop.now)
        self._set_monotonic_rate()

    def release(self, fault_id: str) -> None:
        """Undo one skew: the wall clock steps, the monotonic clock continues from where it is. Idempotent."""
        self._skews.pop(fault_id, None)
        self._set_monotonic_rate()

    def release_all(self) -> None:
        """Undo every skew. Idempotent."""
        self._skews.clear()
        self._set_monotonic_rate()

    def _set_monotonic_rate(self) -> None:
        ppm = sum(skew.rate_ppm for skew, _ in self._skews.values() if skew.affects_monotonic)
        if ppm != self._monotonic_ppm:
            now_s = self._loop.now
            elapsed_s = now_s - self._monotonic_since_s
            self._monotonic_base_ns += elapsed_s * (1e9 + self._monotonic_ppm * 1e3)
            self._monotonic_since_s = now_s
            self._monotonic_ppm = ppm


def _wall_offset_ms(skew: ClockSkew, elapsed_s: float) -> float:
    if skew.affects_monotonic:
        return 0.0
    offset_ms = skew.offset_ms + skew.gained_ms(elapsed_s)
    if skew.strobe_period_ms > 0 and int(elapsed_s * 1000 // skew.strobe_period_ms) % 2 == 0:
        offset_ms += skew.strobe_ms
    return offset_ms
