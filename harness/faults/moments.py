"""Which moments a schedule can wait for on a cluster, and what came of the waiting."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from harness.clusters.abilities import LiveLogs
from nemesis.moments import MomentWord
from nemesis.schedule import Schedule
from nemesis.target import Moments

__all__ = ["KnowsMoments", "TellsMoments", "WatchedMoments", "count_moments", "kinds_seen", "not_waited_for"]


@runtime_checkable
class KnowsMoments(Protocol):
    """A class of clusters that see themselves what their replicas do, or of systems whose replicas log it."""

    moment_kinds: Collection[str]
    """Kinds of nemesis.moments."""


@runtime_checkable
class TellsMoments(Protocol):
    """A cluster or a system that tells a nemesis of what replicas do."""

    moments: Moments | None
    """None where nothing can be told in this run."""


@runtime_checkable
class WatchedMoments(Moments, Protocol):
    """Moments that are heard of only while somebody listens."""

    def watch(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Listen while the block runs."""
        ...


def kinds_seen(cluster_class: Any, system_class: Any) -> frozenset[str]:
    """The kinds of nemesis.moments that can be waited for: what the cluster sees itself, or else what the system logs,
    where logs can be read while the run goes on."""
    seen = frozenset(cluster_class.moment_kinds) if isinstance(cluster_class, KnowsMoments) else frozenset()
    if isinstance(cluster_class, LiveLogs) and cluster_class.logs_are_live and isinstance(system_class, KnowsMoments):
        seen |= frozenset(system_class.moment_kinds)
    return seen


def not_waited_for(schedule: Schedule, cluster_class: Any, system_class: Any) -> str | None:
    """One line about the events whose moments cannot be had on a cluster; None when there are none."""
    seen = kinds_seen(cluster_class, system_class)
    lost = [
        (event, kind) for event in schedule if event.when and (kind := MomentWord.parse(event.when).kind) not in seen
    ]
    if not lost:
        return None
    kinds = ", ".join(sorted({kind for _, kind in lost}))
    events = ", ".join(f"{event.action} {event.fault_id}" for event, _ in lost)
    known = f"it sees {', '.join(sorted(seen))}" if seen else "it sees none"
    return f"cluster {cluster_class.name} cannot see {kinds} ({known}): at their time alone: {events}"


def count_moments(events: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """(moments that came, moments waited for), by the nemesis's events of a history."""
    values = [
        event["value"] for event in events
        if event["process"] == "nemesis" and event["type"] != "invoke" and isinstance(event.get("value"), Mapping)
    ]  # fmt: skip
    waited = [value["moment"] for value in values if "moment" in value]
    return sum(moment is not None for moment in waited), len(waited)
