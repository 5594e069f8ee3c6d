"""How full the disk is, and how many messages per second go in and out: sampled every ten seconds.

A broker whose disk is nearly full accepts no more messages (R: diskSpaceWarningLevelRatio, 90 %), while there is still
room for what else it has to write: consume queues, tables, an election. It resumes on its own once there is room.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from node.runtime import Disk

__all__ = ["DiskWatch", "Sample"]

logger = logging.getLogger("node.broker")

CHECK_INTERVAL_S = 10.0
"""R: cleanResourceInterval."""
FULL_CHECK_INTERVAL_S = 1.0
"""The same while the disk is full: senders wait for it."""
SPANS_S = (10, 60, 600)
"""Spans over which rates are reported (R)."""
SAMPLES = 1 + SPANS_S[-1] // 10


class Sample(NamedTuple):
    """Counters at one moment of the loop's clock."""

    at_s: float
    put_total: int
    get_total: int


class DiskWatch:
    """Watches the disk below `path`. `counters` returns the messages put and delivered since the start."""

    def __init__(self, disk: Disk, path: str, *, full_percent: int, counters: Callable[[], tuple[int, int]]) -> None:
        self._disk = disk
        self._path = path
        self._full_percent = full_percent
        self._counters = counters
        self._timer: asyncio.TimerHandle | None = None
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self.used_ratio = 0.0
        """Share of the disk that is in use, by anyone."""
        self.is_full = False

    def start(self) -> None:
        """Check now, and regularly from then on."""
        self._look()

    def stop(self) -> None:
        """Stop checking."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self.used_ratio = self._disk.usage(self._path).used_ratio
        except OSError as error:
            logger.warning("the free space on the disk of %s is unknown: %s", self._path, error)
        was_full, self.is_full = self.is_full, self.used_ratio * 100 >= self._full_percent
        if self.is_full != was_full:
            logger.warning(
                "the disk of %s is %.1f %% full: %s", self._path, 100 * self.used_ratio,
                "taking no more messages" if self.is_full else "taking messages again",
            )  # fmt: skip
        if not self._samples or loop.time() - self._samples[-1].at_s >= CHECK_INTERVAL_S:
            self._samples.append(Sample(loop.time(), *self._counters()))
        interval_s = FULL_CHECK_INTERVAL_S if self.is_full else CHECK_INTERVAL_S
        self._timer = loop.call_later(interval_s, self._look)

    def document(self) -> dict[str, int | float]:
        """The watch's part of the status; rates over the last ten seconds."""
        puts, gets = self.rates()
        return {
            "commitLogDiskRatio": round(self.used_ratio, 4),
            "diskFull": int(self.is_full),
            "putsPerSecond": round(puts[0], 3),
            "getsPerSecond": round(gets[0], 3),
        }

    def rates(self) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
        """Messages put and delivered per second, each over the last 10, 60 and 600 s, or since the start if that is
        less long ago."""
        now = Sample(asyncio.get_running_loop().time(), *self._counters())
        puts, gets = [], []
        for span_s in SPANS_S:
            before = next((sample for sample in self._samples if now.at_s - sample.at_s <= span_s + 5), now)
            past_s = now.at_s - before.at_s
            puts.append((now.put_total - before.put_total) / past_s if past_s > 0 else 0.0)
            gets.append((now.get_total - before.get_total) / past_s if past_s > 0 else 0.0)
        return (puts[0], puts[1], puts[2]), (gets[0], gets[1], gets[2])
