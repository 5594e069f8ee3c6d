"""Live statistics of a run for the console, updated event by event in bounded memory.

Counts, a rate per second over the last minutes, the latency of recent operations and the faults in effect: memory is
O(open operations), however long the run. Times are nanoseconds since the test began.
"""

from __future__ import annotations

__all__ = ["COMPLETIONS", "FaultStatus", "LiveStats", "OpenOperation", "quantile"]

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from checker.faults import is_proven

COMPLETIONS = ("ok", "fail", "info")
"""The types of completions."""

RECENT_LATENCIES = 1_000
"""Latencies kept for the live quantiles: a few seconds of a slow run, enough for a 99th percentile."""

RATE_SECONDS = 120
"""Seconds for which a count of completed operations is kept: two widths of a console sparkline."""

MAX_FAULTS_IN_FORCE = 64
"""Limit of faults shown at once. Schedules overlap a handful; missing heals must not let this grow."""

NS_PER_S = 1_000_000_000


class OpenOperation(NamedTuple):
    """An invocation without its completion; `event` is its index in the history."""

    f: str
    time_ns: int
    event: int


@dataclass(slots=True)
class FaultStatus:
    """A fault in effect, or not proven healed. `state` is injecting, proven, unproven, healing or unhealed."""

    id: str
    nemesis: str
    variant: str
    state: str
    since_ns: int
    hosts: Sequence[str] = ()
    """The hosts that it strikes."""
    grudge: Mapping[str, Any] = field(default_factory=dict)
    """For a partition: host -> the hosts from which it receives nothing."""


def quantile(ordered: Sequence[int], q: float) -> int:
    """The smallest value with at least a share `q` of the sorted, non-empty `ordered` at or below it."""
    rank = -(-q * len(ordered) // 1)
    return ordered[min(len(ordered), max(1, int(rank))) - 1]


@dataclass(slots=True)
class LiveStats:
    """Running totals of one history; the history writer feeds it."""

    events: int = 0
    completed: int = 0
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """f -> type -> number of client events."""
    faults: dict[str, FaultStatus] = field(default_factory=dict)
    """Id -> fault in effect, or whose healing is not proven."""
    open: dict[int, OpenOperation] = field(default_factory=dict)
    """Process -> its open operation."""
    _recent_ns: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT_LATENCIES))
    _per_second: list[int] = field(default_factory=lambda: [0] * RATE_SECONDS)
    _newest_second: int = 0

    @property
    def open_operations(self) -> int:
        """Operations invoked and not yet completed."""
        return len(self.open)

    @property
    def by_type(self) -> dict[str, int]:
        """Number of client events by type, with all four types present."""
        totals = {"invoke": 0, "ok": 0, "fail": 0, "info": 0}
        for by_type in self.counts.values():
            for kind, count in by_type.items():
                totals[kind] += count
        return totals

    def completion(self, kind: str, invoked_ns: int, time_ns: int) -> None:
        """Count one completed operation."""
        self.completed += 1
        if kind == "ok":
            self._recent_ns.append(time_ns - invoked_ns)
        second = time_ns // NS_PER_S
        if second > self._newest_second:
            self._advance(second)
        elif second <= self._newest_second - RATE_SECONDS:
            return
        self._per_second[second % RATE_SECONDS] += 1

    def _advance(self, second: int) -> None:
        for passed in range(max(self._newest_second + 1, second - RATE_SECONDS + 1), second + 1):
            self._per_second[passed % RATE_SECONDS] = 0
        self._newest_second = second

    def nemesis(self, kind: str, f: str, value: Any, time_ns: int) -> None:
        """Process a nemesis event: inject or heal, requested (invoke) or done (info)."""
        if not isinstance(value, Mapping) or "id" not in value:
            return
        ident = str(value["id"])
        if f == "inject":
            status = self.faults.get(ident)
            if status is None:
                if len(self.faults) >= MAX_FAULTS_IN_FORCE:
                    return
                name, variant = str(value.get("nemesis", "fault")), str(value.get("variant") or "")
                status = FaultStatus(ident, name, variant, "injecting", time_ns)
                self.faults[ident] = status
            hosts, grudge = value.get("hosts"), value.get("grudge")
            status.hosts = [str(host) for host in hosts] if isinstance(hosts, list) else status.hosts
            status.grudge = grudge if isinstance(grudge, Mapping) else status.grudge
            if kind != "invoke":
                status.state = "proven" if is_proven(value.get("proof")) else "unproven"
        elif f == "heal" and ident in self.faults:
            if kind == "invoke":
                self.faults[ident].state = "healing"
            else:
                status = self.faults.pop(ident)
                if not is_proven(value.get("proof")):
                    status.state = "unhealed"
                    self.faults[ident] = status

    def faults_now(self) -> list[FaultStatus]:
        """The faults in effect, oldest first, then those whose healing is not proven."""
        return sorted(self.faults.values(), key=lambda fault: fault.state == "unhealed")

    def rates(self, now_ns: int, *, seconds: int = 40) -> list[int]:
        """Operations completed in each of the last `seconds` whole seconds before `now_ns`, oldest first."""
        seconds = min(seconds, RATE_SECONDS - 1)
        this_second = now_ns // NS_PER_S
        oldest_kept = max(0, self._newest_second - RATE_SECONDS + 1)
        return [
            self._per_second[second % RATE_SECONDS] if oldest_kept <= second <= self._newest_second else 0
            for second in range(max(0, this_second - seconds), this_second)
        ]

    def rate_per_s(self, now_ns: int, *, window_s: int = 5) -> float:
        """Completed operations per second over the last `window_s` whole seconds; before the first has passed, since
        the beginning."""
        counts = self.rates(now_ns, seconds=window_s)
        if not counts and 0 < now_ns < NS_PER_S:
            return sum(self.rates(NS_PER_S, seconds=1)) * NS_PER_S / now_ns
        return sum(counts) / len(counts) if counts else 0.0

    def latency_quantiles_ns(self, quantiles: Sequence[float] = (0.5, 0.99)) -> list[int]:
        """Latency quantiles of the most recent ok operations; empty if there are none."""
        if not self._recent_ns:
            return []
        ordered = sorted(self._recent_ns)
        return [quantile(ordered, q) for q in quantiles]
