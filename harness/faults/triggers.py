"""The triggers that a schedule can wait for on a cluster, and how many of them occurred."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from harness.clusters.abilities import LiveLogs
from nemesis.schedule import Schedule
from nemesis.target import Triggers
from nemesis.triggers import Trigger

__all__ = ["HasTriggers", "KnowsTriggers", "WatchedTriggers", "count_triggers", "kinds_seen", "not_waited_for"]


@runtime_checkable
class KnowsTriggers(Protocol):
    """A cluster class that observes what its replicas do, or a system class whose replicas log it."""

    trigger_kinds: Collection[str]
    """The nemesis.triggers.KINDS that it can report."""


@runtime_checkable
class HasTriggers(Protocol):
    """A cluster or system that reports to a nemesis what replicas do."""

    triggers: Triggers | None
    """None if nothing can be observed in this run."""


@runtime_checkable
class WatchedTriggers(Triggers, Protocol):
    """Triggers that are observed only while `watch` is active."""

    def watch(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Observe while the block runs."""
        ...


def kinds_seen(cluster_class: Any, system_class: Any) -> frozenset[str]:
    """The kinds of nemesis.triggers that can be waited for: those that the cluster observes itself, and those that the
    system logs, if logs can be read during the run."""
    seen = frozenset(cluster_class.trigger_kinds) if isinstance(cluster_class, KnowsTriggers) else frozenset()
    if isinstance(cluster_class, LiveLogs) and cluster_class.logs_are_live and isinstance(system_class, KnowsTriggers):
        seen |= frozenset(system_class.trigger_kinds)
    return seen


def not_waited_for(schedule: Schedule, cluster_class: Any, system_class: Any) -> str | None:
    """One line about the events whose triggers a cluster cannot see; None when there are none."""
    seen = kinds_seen(cluster_class, system_class)
    lost = [(event, kind) for event in schedule if event.when and (kind := Trigger.parse(event.when).kind) not in seen]
    if not lost:
        return None
    kinds = ", ".join(sorted({kind for _, kind in lost}))
    events = ", ".join(f"{event.action} {event.fault_id}" for event, _ in lost)
    known = f"it observes {', '.join(sorted(seen))}" if seen else "it observes none"
    return f"cluster {cluster_class.name} cannot observe {kinds} ({known}): at their scheduled times only: {events}"


def count_triggers(events: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """(triggers that occurred, triggers waited for), from the nemesis's events of a history.

    Histories of earlier versions call them moments."""
    values = [
        event["value"] for event in events
        if event["process"] == "nemesis" and event["type"] != "invoke" and isinstance(event.get("value"), Mapping)
    ]  # fmt: skip
    waited = [value[name] for value in values for name in ("trigger", "moment") if name in value]
    return sum(occurrence is not None for occurrence in waited), len(waited)
