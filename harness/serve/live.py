"""Follows a running run by its growing history."""

from __future__ import annotations

__all__ = ["POLL_INTERVAL_S", "HistoryTail", "snapshot"]

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checker.codecs.jsonl import DamagedLine, JsonLines
from checker.faults import NEMESIS
from harness.history_writer import event_problem
from harness.live_stats import LiveStats, OpenOperation
from harness.serve.files import NoFile, NotThere, open_beneath
from harness.units import clip

POLL_INTERVAL_S = 0.2
"""Polling interval of the history. The harness writes at least twice a second, so the view is at most 0.7 s old."""

READ_BYTES = 1024 * 1024
"""Read per poll: about 10,000 events, a tenth of a second of work."""

MAX_LINE_BYTES = 4 * 1024 * 1024
"""A longer line ends the view as damaged."""

MAX_FUNCTIONS = 64
MAX_OPEN = 10_000
"""Limits on distinct functions and open operations, against malformed histories; ours have far fewer."""

MAX_FAULTS = 12
RATE_SECONDS = 60


class HistoryTail:
    """Statistics of a growing history.jsonl. `read_on` is called repeatedly; nothing is read twice."""

    def __init__(self, root: Path, parts: list[str], *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._parts = parts
        self._clock_s = clock_s
        self._fd: int | None = None
        self._lines = JsonLines(max_line_bytes=MAX_LINE_BYTES)
        self._read_at_s = clock_s()
        self.stats = LiveStats()
        self.last_ns = 0
        self.damage: str | None = None

    def read_on(self) -> bool:
        """Read up to `READ_BYTES` more. Returns whether there may be more to read at once."""
        if self.damage is not None:
            return False
        if self._fd is None:
            try:
                self._fd = open_beneath(self._root, self._parts)
            except NoFile as error:
                self.damage = str(error)
                return False
            except NotThere:  # it is created when the load begins
                return False
        try:
            data = os.read(self._fd, READ_BYTES)
        except OSError as error:
            self.damage = error.strerror or str(error)
            return False
        if data:
            self._read_at_s = self._clock_s()
        try:
            for _, event in self._lines.feed(data).whole():
                self.damage = event_problem(event)
                if self.damage is not None:
                    return False
                self._take(event)
        except DamagedLine as line:
            self.damage = f"line {line.number}: {line.reason}"
            return False
        return len(data) == READ_BYTES

    def _take(self, event: dict[str, Any]) -> None:
        stats, time_ns, kind, f = self.stats, event["time"], event["type"], event["f"]
        self.last_ns = max(self.last_ns, min(time_ns, 2**63))
        stats.events += 1
        process = event["process"]
        if process == NEMESIS:
            stats.nemesis(kind, f, event.get("value"), time_ns)
            return
        if f in stats.counts or len(stats.counts) < MAX_FUNCTIONS:
            by_type = stats.counts.setdefault(f, dict.fromkeys(("invoke", "ok", "fail", "info"), 0))
            by_type[kind] += 1
        if kind == "invoke":
            if len(stats.open) < MAX_OPEN:
                stats.open[process] = OpenOperation(f, time_ns, stats.events)
        elif (invoked := stats.open.pop(process, None)) is not None:
            stats.completion(kind, invoked.time_ns, time_ns)

    def now_ns(self, *, is_real_time: bool) -> int:
        """The run's current time: that of the last event, plus, in real time, the time since it was read."""
        passed_s = self._clock_s() - self._read_at_s if is_real_time and self.stats.events else 0.0
        return self.last_ns + int(passed_s * 1e9)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def snapshot(tail: HistoryTail, *, is_real_time: bool) -> dict[str, Any]:
    """The data that a page shows of a running run: numbers, and clipped texts."""
    stats, now_ns = tail.stats, tail.now_ns(is_real_time=is_real_time)
    marks_ns = stats.latency_quantiles_ns((0.5, 0.99))
    return {
        "time_s": round(now_ns / 1e9, 1),
        "events": stats.events,
        "rate_per_s": round(stats.rate_per_s(now_ns), 1),
        "rates": stats.rates(now_ns, seconds=RATE_SECONDS),
        "open": stats.open_operations,
        **{kind: number for kind, number in stats.by_type.items() if kind != "invoke"},
        "median_ms": round(marks_ns[0] / 1e6, 2) if marks_ns else None,
        "p99_ms": round(marks_ns[1] / 1e6, 2) if marks_ns else None,
        "faults": [
            {
                "name": clip(f"{fault.nemesis} {fault.variant}".strip(), 80),
                "state": "not proven healed" if fault.state == "unhealed" else fault.state,
                "for_s": round(max(0, now_ns - fault.since_ns) / 1e9, 1),
            }
            for fault in stats.faults_now()[:MAX_FAULTS]
        ],
        "more_faults": max(0, len(stats.faults) - MAX_FAULTS),
        "damage": tail.damage,
    }
