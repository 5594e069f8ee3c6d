"""Directed links between hosts: how long a segment takes, and whether it gets through at all."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

__all__ = ["LatencyModel", "LinkFault", "SimLink"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyModel:
    """How long segments take on a healthy link: a minimum plus an exponential tail, and now and then much longer.

    The defaults are those of hosts on one switch: 0.1 to 1 ms, one segment in a thousand some tens of ms.
    """

    minimum_s: float = 100e-6
    mean_extra_s: float = 120e-6
    slow_ratio: float = 0.001
    slow_max_s: float = 0.030


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFault:
    """What is wrong with one direction of a link beside being cut. Ratios are of segments.

    Connections are reliable streams: a lost segment arrives late, when it is sent again, and so does everything
    behind it; a duplicate changes nothing that a program could see; a reordered segment waits, or makes others
    wait, within its connection, and overtakes between connections.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    rate_bytes_per_s: float = 0.0
    loss_ratio: float = 0.0
    duplicate_ratio: float = 0.0
    reorder_ratio: float = 0.0

    def __post_init__(self) -> None:
        for name in ("delay_ms", "jitter_ms", "rate_bytes_per_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        for name in ("loss_ratio", "duplicate_ratio", "reorder_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, not {getattr(self, name)}")

    def on_top_of(self, other: LinkFault) -> LinkFault:
        """Two faults on one link: delays add up, the lower rate counts, each loses its share of what is left."""
        rates = [rate for rate in (self.rate_bytes_per_s, other.rate_bytes_per_s) if rate]

        def either(one: float, two: float) -> float:
            return 1 - (1 - one) * (1 - two)

        return LinkFault(
            delay_ms=self.delay_ms + other.delay_ms,
            jitter_ms=self.jitter_ms + other.jitter_ms,
            rate_bytes_per_s=min(rates, default=0.0),
            loss_ratio=either(self.loss_ratio, other.loss_ratio),
            duplicate_ratio=either(self.duplicate_ratio, other.duplicate_ratio),
            reorder_ratio=either(self.reorder_ratio, other.reorder_ratio),
        )


@dataclass(slots=True)
class SimLink:
    """One direction between two hosts. Its randomness is its own, so that traffic elsewhere changes nothing here."""

    source: str
    destination: str
    model: LatencyModel
    random: random.Random
    cut_by: dict[str, None] = field(default_factory=dict)
    """Faults that cut it; empty means that it passes."""
    fault: LinkFault | None = None
    _busy_until_s: float = 0.0

    def loses(self) -> bool:
        """Whether the next segment is lost: always on a cut link, by chance on a lossy one."""
        if self.cut_by:
            return True
        fault = self.fault
        return fault is not None and fault.loss_ratio > 0 and self.random.random() < fault.loss_ratio

    def arrival_s(self, now_s: float, size_bytes: int) -> float:
        """When a segment that leaves now is at the other end."""
        draw = self.random.random
        model = self.model
        when = now_s + model.minimum_s - model.mean_extra_s * math.log(1.0 - draw())
        if draw() < model.slow_ratio:
            when += model.slow_max_s * draw()
        return when if self.fault is None else self._disturbed_s(self.fault, now_s, when, size_bytes)

    def _disturbed_s(self, fault: LinkFault, now_s: float, when_s: float, size_bytes: int) -> float:
        draw = self.random.random
        when_s += (fault.delay_ms + fault.jitter_ms * (2 * draw() - 1)) / 1000
        if fault.duplicate_ratio and draw() < fault.duplicate_ratio:
            when_s -= min(when_s - now_s, self.model.mean_extra_s) * draw()  # the earlier of two copies counts
        if fault.reorder_ratio and draw() < fault.reorder_ratio:
            when_s += 3 * draw() * (when_s - now_s)  # late enough for those behind it to overtake
        if fault.rate_bytes_per_s:
            self._busy_until_s = max(now_s, self._busy_until_s) + size_bytes / fault.rate_bytes_per_s
            when_s += self._busy_until_s - now_s
        return max(when_s, now_s + self.model.minimum_s)
