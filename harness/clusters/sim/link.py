"""Directed links between hosts: how long a segment takes, and whether it gets through at all.

Connections are reliable streams, so faults of segments show only as delays: a lost segment arrives late, when it is
retransmitted, and so does everything behind it; of duplicates the earlier copy counts; a reordered segment escapes
the delay of a bad link, but still waits for its turn within its connection.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import log
from typing import Protocol

from nemesis.target import LinkShape, LinkTraffic

__all__ = ["LatencyModel", "SimLink"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyModel:
    """How long segments take on a healthy link: a minimum plus an exponential tail, and occasionally much longer.

    The defaults model hosts on one switch: 0.1 to 1 ms, one segment in a thousand some tens of ms.
    """

    minimum_s: float = 100e-6
    mean_extra_s: float = 120e-6
    slow_ratio: float = 0.001
    slow_max_s: float = 0.030


class Powered(Protocol):
    """Something that receives nothing while it has no power."""

    has_power: bool


@dataclass(slots=True)
class SimLink:
    """One direction between two hosts. It has its own random stream, so that traffic elsewhere changes nothing here."""

    source: str
    destination: str
    target: Powered
    """The host at the other end."""
    model: LatencyModel
    random: random.Random
    cut_by: dict[str, None] = field(default_factory=dict)
    """Faults that cut it; empty means that it passes."""
    shape: LinkShape | None = None
    """The combined shape of all faults on it; None if there is none."""
    passed_bytes: int = 0
    """Bytes of programs that have arrived; probes are not counted."""
    stopped_bytes: int = 0
    stopped_connections: int = 0
    """Bytes and connection attempts that ran into a cut."""
    _busy_until_s: float = 0.0

    @property
    def traffic(self) -> LinkTraffic:
        """What programs have sent along it so far."""
        return LinkTraffic(
            passed_bytes=self.passed_bytes,
            stopped_bytes=self.stopped_bytes,
            stopped_connections=self.stopped_connections,
        )

    def loses(self) -> bool:
        """Whether the next segment is lost: always on a cut link, by chance on a lossy one."""
        if self.cut_by:
            return True
        shape = self.shape
        return shape is not None and shape.loss_percent > 0 and self.random.random() * 100 < shape.loss_percent

    def arrival_s(self, now_s: float, size_bytes: int) -> float:
        """When a segment that leaves now arrives at the other end."""
        draw = self.random.random
        model = self.model
        when = now_s + model.minimum_s - model.mean_extra_s * log(1.0 - draw())
        if draw() < model.slow_ratio:
            when += model.slow_max_s * draw()
        return when if self.shape is None else min(self._shaped_s(self.shape, now_s, when, size_bytes))

    def packet_arrivals_s(self, now_s: float, size_bytes: int) -> list[float]:
        """When each copy of a single packet that leaves now arrives at the other end; empty if it is lost."""
        if self.loses():
            return []
        shape, self.shape = self.shape, None
        healthy_s = self.arrival_s(now_s, size_bytes)
        self.shape = shape
        return [healthy_s] if shape is None else self._shaped_s(shape, now_s, healthy_s, size_bytes)

    def _shaped_s(self, shape: LinkShape, now_s: float, healthy_s: float, size_bytes: int) -> list[float]:
        """When each copy arrives on a bad link, given when it would arrive on a healthy one."""
        draw = self.random.random
        copies = 2 if shape.duplicate_percent and draw() * 100 < shape.duplicate_percent else 1
        when_s = [healthy_s] * copies
        if not (shape.reorder_percent and draw() * 100 < shape.reorder_percent):
            when_s = [when + (shape.delay_ms + shape.jitter_ms * (2 * draw() - 1)) / 1000 for when in when_s]
        if shape.rate_bytes_per_s:
            self._busy_until_s = max(now_s, self._busy_until_s) + size_bytes * copies / shape.rate_bytes_per_s
            when_s = [when + self._busy_until_s - now_s for when in when_s]
        return [max(when, now_s + self.model.minimum_s) for when in when_s]
