"""The clocks of one host, which may be wrong.

The wall clock has an offset and a drift, the monotonic clock only a drift: it starts anywhere and never goes back,
but may run fast or slow against other hosts' (what leases must survive). Timers follow the loop's time and
are not affected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.clusters.sim.loop import START_S

if TYPE_CHECKING:
    from harness.clusters.sim.loop import SimLoop

__all__ = ["EPOCH_MS", "SimClock"]

EPOCH_MS = 1_767_225_600_000
"""2026-01-01T00:00:00Z, when every simulation begins."""

MAX_DRIFT_PPM = 500_000
"""Half the speed too fast or too slow; real clocks stay below some hundreds."""


class SimClock:
    """A host's clocks: `node.runtime.Clock`, and what a nemesis does to them. `is_right` until somebody does."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._offset_ms = 0.0
        self._drift_ppm = 0.0
        self._wall_since_s = START_S
        self._monotonic_ppm = 0.0
        self._monotonic_base_ns = 0.0
        self._monotonic_since_s = 0.0
        self._strobes = 0

    def wall_ms(self) -> int:
        return int(EPOCH_MS + (self._loop.time() - START_S) * 1000 + self.offset_ms)

    def monotonic_ns(self) -> int:
        if not self._monotonic_ppm and not self._monotonic_base_ns:
            return int(self._loop.time() * 1e9)
        return int(self._monotonic_now_ns())

    @property
    def offset_ms(self) -> float:
        """How far the wall clock is ahead of the truth, drift included."""
        if not self._drift_ppm:
            return self._offset_ms
        return self._offset_ms + (self._loop.time() - self._wall_since_s) * self._drift_ppm / 1000

    def bump(self, offset_ms: float) -> None:
        """Let the wall clock jump."""
        self._offset_ms += offset_ms

    def set_offset(self, offset_ms: float) -> None:
        """Set how far the wall clock is ahead of the truth now; an ongoing drift goes on from there."""
        self._offset_ms, self._wall_since_s = offset_ms, self._loop.time()

    def drift(self, ppm: float) -> None:
        """Let the wall clock run fast (or slow, below 0) from now on."""
        _check_drift(ppm)
        self.set_offset(self.offset_ms)
        self._drift_ppm = ppm

    def drift_monotonic(self, ppm: float) -> None:
        """Let the monotonic clock run fast (or slow, below 0) from now on."""
        _check_drift(ppm)
        self._monotonic_base_ns = self._monotonic_now_ns()
        self._monotonic_since_s = self._loop.time()
        self._monotonic_ppm = ppm

    def _monotonic_now_ns(self) -> float:
        return self._monotonic_base_ns + (self._loop.time() - self._monotonic_since_s) * (
            1e9 + self._monotonic_ppm * 1e3
        )

    def strobe(self, delta_ms: float, *, period_s: float, duration_s: float) -> None:
        """Let the wall clock jump ahead by `delta_ms` and back, every `period_s`, for `duration_s`."""
        if period_s <= 0:
            raise ValueError(f"period_s must be above 0, not {period_s}")
        self._strobes += 1
        self._strobe_step(self._strobes, delta_ms, False, period_s, self._loop.time() + duration_s)

    def _strobe_step(self, strobe: int, delta_ms: float, is_ahead: bool, period_s: float, end_s: float) -> None:
        if strobe != self._strobes:
            return  # reset, or replaced by another strobe, which began where this one stood
        is_over = self._loop.time() >= end_s
        if is_over and not is_ahead:
            return
        self.bump(-delta_ms if is_ahead else delta_ms)
        self._loop.event_at(
            self._loop.time() + period_s, self._strobe_step, strobe, delta_ms, not is_ahead, period_s, end_s
        )

    def reset(self) -> None:
        """Set the wall clock right and let it run right, and the monotonic one run right from now on."""
        self._strobes += 1
        self._drift_ppm = 0.0
        self._offset_ms = 0.0
        if self._monotonic_ppm:
            self.drift_monotonic(0.0)


def _check_drift(ppm: float) -> None:
    if not -MAX_DRIFT_PPM <= ppm <= MAX_DRIFT_PPM:
        raise ValueError(f"a drift is between -{MAX_DRIFT_PPM} and {MAX_DRIFT_PPM} ppm, not {ppm}")
