"""What happened between two moments of a simulated run: faults, elections, changes of logs, messages, operations."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checker.faults import NEMESIS
from harness.clusters.sim.cluster import SimCluster
from harness.clusters.sim.dissector import Dissector
from harness.clusters.sim.network import TraceEvent
from harness.execution import TestClock
from harness.units import clip, operation_text

__all__ = ["MAX_HAPPENINGS", "Account", "Happening", "most_telling"]

MAX_HAPPENINGS = 12
"""Most entries shown for an interval: they fit beside a chart and are few enough to be read."""

FEW = 3
"""If fewer things happened, the last ones before the interval are listed too: the passing of time may be decisive."""

BEFORE_S = 1.0
"""How long before the interval these may have happened."""

MAX_NOTED = 20_000
"""Most entries kept of a run: a second has some thousand messages, and the requested intervals are shorter."""

KINDS = ("invocation", "fault", "role", "vote", "log", "loss", "message", "operation")
"""Kinds of happenings, the most informative first. Invocations are listed only if the load's end is examined."""

OF_CLIENTS = frozenset(("invocation", "operation"))
"""Kinds of which the last ones before an interval say nothing."""

PROTOCOL = frozenset(("vote", "append", "commit", "compare", "truncate"))
"""Messages of the replication protocol that change what a replica holds or whom it follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """An event of the run at a time of the history's clock; `kind` is one of KINDS."""

    at_s: float
    kind: str
    text: str


class Account:
    """Records what happens in a cluster from its construction on."""

    def __init__(self, cluster: SimCluster, clock: TestClock) -> None:
        self._clock = clock
        self._now_s = asyncio.get_running_loop().time
        self._noted: list[tuple[float, str, str]] = []
        self._dissector = Dissector()
        cluster.network.trace = self._message
        tell = cluster.watch.tell
        tell.role.append(self._role)
        tell.vote.append(lambda host, term, name: self._note("vote", f"{host} votes for {name} in term {term}"))
        tell.recovered.append(lambda host, _: self._note("log", f"{host} has recovered its log after starting"))
        tell.truncated.append(
            lambda host, stays, before, _: self._note("log", f"{host} removes entries {stays + 1} to {before}")
        )
        tell.acknowledged.append(lambda host, index: self._note("log", f"{host} acknowledges up to entry {index}"))
        tell.occurrence.append(self._occurred)

    def _note(self, kind: str, text: str) -> None:
        self._noted.append((self._now_s(), kind, clip(text, 160)))
        if len(self._noted) > 2 * MAX_NOTED:
            del self._noted[:MAX_NOTED]

    def _role(self, host: str, term: int, role: enum.Enum) -> None:
        self._note("role", f"{host} becomes {role.name.lower()} of term {term}")

    def _occurred(self, kind: str, host: str) -> None:
        if kind == "promoted":
            self._note("role", f"{host} accepts messages as the leader")

    def _message(self, event: TraceEvent) -> None:
        if event.source == event.destination:
            return
        if event.kind == "fin":
            self._dissector.forget(event.connection, event.source, event.destination)
        if event.kind == "lost":
            self._note("loss", f"lost: a message from {event.source} to {event.destination}")
        if event.kind != "send":
            return
        for rpc in self._dissector.feed(event.connection, event.source, event.destination, event.content):
            if rpc.name in PROTOCOL:
                word = "answers" if rpc.is_reply else "sends"
                self._note("message", f"{event.source} {word} {event.destination} {rpc.name} {rpc.detail}".strip())

    def between(
        self, from_s: float, to_s: float, history: Iterable[Mapping[str, Any]], *, has_invocations: bool
    ) -> list[Happening]:
        """The most informative happenings between two moments, in order of time; if they are few, also the last ones
        before."""
        zero_s = self._clock.zero_s or 0.0
        found = [
            Happening(at_s=round(at_s - zero_s, 6), kind=kind, text=text)
            for at_s, kind, text in self._noted
            if from_s - BEFORE_S <= at_s - zero_s <= to_s
        ]
        opened: dict[Any, Mapping[str, Any]] = {}
        for event in history:
            is_invocation = event["process"] != NEMESIS and event["type"] == "invoke"
            if is_invocation:
                opened[event["process"]] = event
            if is_invocation and not has_invocations:
                continue
            if from_s - BEFORE_S <= event["time"] / 1e9 <= to_s:
                kind, text = _words(event, opened)
                found.append(Happening(at_s=event["time"] / 1e9, kind=kind, text=text))
        inside = [one for one in found if one.at_s >= from_s]
        before = [one for one in found if one.at_s < from_s and one.kind not in OF_CLIENTS]
        missing = max(0, FEW - len(inside))
        return most_telling([*most_telling(before, missing), *inside])


def _words(event: Mapping[str, Any], opened: Mapping[Any, Mapping[str, Any]]) -> tuple[str, str]:
    if event["process"] == NEMESIS:
        value = event["value"] if isinstance(event["value"], dict) else {}
        verb = {
            ("inject", "invoke"): "begins", ("inject", "info"): "is in force",
            ("heal", "invoke"): "is healed", ("heal", "info"): "is over",
        }.get((event["f"], event["type"]), event["f"])  # fmt: skip
        return "fault", clip(f"fault {value.get('id')} {value.get('nemesis')} {value.get('variant') or ''} {verb}", 160)
    before = opened.get(event["process"], {})
    whole = {"f": event["f"], "value": before.get("value"), "type": event["type"], "result": event.get("value")}
    where = f" on {event['node']}" if event.get("node") else ""
    key = f"key {event['key']}: " if event.get("key") is not None else ""
    what = f"{key}{operation_text(whole, 60)}{where}"
    if event["type"] == "invoke":
        return "invocation", clip(f"process {event['process']} invokes {what}", 160)
    return "operation", clip(f"process {event['process']} completes {event['type']}: {what}", 160)


def most_telling(found: Sequence[Happening], most: int = MAX_HAPPENINGS) -> list[Happening]:
    """At most `most` happenings in order of time: the most informative kinds first, and the latest of each kind."""
    ranked = sorted(found, key=lambda one: (KINDS.index(one.kind), -one.at_s))
    return sorted(ranked[:most], key=lambda one: (one.at_s, KINDS.index(one.kind)))
