"""A run as a trace for Perfetto's viewer (ui.perfetto.dev, or its own copy): JSON in the Trace Event Format.

Clients are a process with a thread for each logical client, whose slices are operations; faults are asynchronous
slices; every host is a process, with the messages of a traced run as slices and flows, and with the metrics of the
system under test as counters. Times are microseconds since the
load began, or since the first message before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from checker.faults import NEMESIS, faults_of
from harness.metrics.samples import Samples
from harness.report.sequence import Leadership
from harness.report.trace_window import Message
from harness.units import clip

__all__ = ["MAX_MESSAGES", "trace_events"]

MAX_MESSAGES = 200_000
"""Limit of messages, each of which takes four events: some 150 MB, about as much as the viewer opens."""

CLIENTS, FAULTS, FIRST_HOST = 1, 2, 10
"""Process ids. Those of hosts follow."""

MESSAGE_NS = 20_000
"""Longest slice of a message that is sent or received. The viewer draws flows between slices only, and drops slices of
one track that overlap: a shorter gap to the next one makes it shorter."""


def trace_events(
    events: Iterable[Mapping[str, Any]],
    *,
    hosts: Sequence[str],
    leaders: Sequence[Leadership] = (),
    messages: Sequence[Message] = (),
    samples: Samples | None = None,
) -> Iterator[str]:
    """The events of the trace, each as JSON. `hosts` names those with tracks of their own."""
    pids = {host: FIRST_HOST + number for number, host in enumerate(hosts)}
    for pid, name in ((CLIENTS, "clients"), (FAULTS, "faults"), *((pid, host) for host, pid in pids.items())):
        yield _event("M", "process_name", pid, args={"name": name})
        yield _event("M", "process_sort_index", pid, args={"sort_index": pid})
    origin_ns = min((0, *(leader.start_ns for leader in leaders), *(message.sent_ns for message in messages)))
    yield from _history(events, origin_ns)
    for leader in leaders:
        if leader.host in pids:
            moment_us = (leader.start_ns - origin_ns) / 1000
            yield _event("i", f"leads term {leader.term}", pids[leader.host], ts=moment_us, s="p")
    yield from _messages(messages, pids, origin_ns)
    if samples is not None:
        yield from _counters(samples, pids, origin_ns)


def _event(phase: str, name: str, pid: int, *, tid: int = 0, **more: Any) -> str:
    return json.dumps({"ph": phase, "name": name, "pid": pid, "tid": tid, **more}, separators=(",", ":"))


def _history(events: Iterable[Mapping[str, Any]], origin_ns: int) -> Iterator[str]:
    """Operations, then faults. An operation that did not return ends with the history, as one of unknown outcome."""
    threads: dict[Any, int] = {}
    under_way: dict[Any, tuple[int, Mapping[str, Any]]] = {}
    of_nemesis: list[Mapping[str, Any]] = []
    last_ns = 0
    for event in events:
        last_ns = event["time"] - origin_ns
        process = event["process"]
        if process == NEMESIS:
            of_nemesis.append(event)
            continue
        if process not in threads:
            threads[process] = len(threads)
            yield _event("M", "thread_name", CLIENTS, tid=threads[process], args={"name": f"client {process}"})
        if event["type"] == "invoke":
            under_way[process] = last_ns, event
        elif process in under_way:
            yield _operation(*under_way.pop(process), event, last_ns, threads[process])
    for process, (begin_ns, invoked) in under_way.items():
        yield _operation(begin_ns, invoked, None, last_ns, threads[process])
    for number, fault in enumerate(faults_of(of_nemesis)):
        yield from _fault(number, fault, last_ns, origin_ns)


def _operation(
    begin_ns: int, invoked: Mapping[str, Any], completed: Mapping[str, Any] | None, end_ns: int, thread: int
) -> str:
    kind = "info" if completed is None else completed["type"]
    key = "" if invoked.get("key") is None else f" {_words(invoked['key'])}"
    value = invoked.get("value")
    name = f"{invoked['f']}{key}" + ("" if value is None else f" {_words(value)}")
    if completed is not None and kind == "ok" and completed.get("value") not in (None, value):
        name += f" = {_words(completed['value'])}"
    arguments = {"type": kind, "index": invoked.get("index")}
    for field in ("node", "error"):
        if completed is not None and completed.get(field) is not None:
            arguments[field] = completed[field]
    return _event(
        "X", name if kind == "ok" else f"{kind}: {name}", CLIENTS, tid=thread, cat=kind,
        ts=begin_ns / 1000, dur=max(0, end_ns - begin_ns) / 1000, args=arguments,
    )  # fmt: skip


def _words(value: Any) -> str:
    return clip(json.dumps(value), 60)


def _fault(number: int, fault: Mapping[str, Any], last_ns: int, origin_ns: int) -> Iterator[str]:
    if fault.get("start_ns") is None:
        return
    begin_ns = fault["start_ns"] - origin_ns
    end_ns = last_ns if fault.get("end_ns") is None else fault["end_ns"] - origin_ns
    name = " ".join(str(fault[field]) for field in ("nemesis", "variant") if fault.get(field))
    shown = {field: fault.get(field) for field in ("id", "target", "proven", "exercised", "healed")}
    arguments = {field: value for field, value in shown.items() if value is not None}
    for phase, moment_ns in (("b", begin_ns), ("e", end_ns)):
        yield _event(phase, name, FAULTS, cat="fault", id=number, ts=moment_ns / 1000, args=arguments)


def _counters(samples: Samples, pids: Mapping[str, int], origin_ns: int) -> Iterator[str]:
    """A counter for each metric of each host. The viewer holds a counter's value until its next one, so a host that
    does not answer has an instant at its first gap."""
    for host, line in samples.answers.items():
        for time_ns, value in line.points() if host in pids else ():
            if value is None:
                yield _event("i", "no answer with metrics", pids[host], ts=_us(time_ns, origin_ns), s="p")
    for lane in samples.lanes:
        name = clip(lane.title, 80)
        for host, line in lane.lines.items():
            for time_ns, value in line.points() if host in pids else ():
                if value is not None:
                    yield _event("C", name, pids[host], ts=_us(time_ns, origin_ns), args={"value": value})


def _us(time_ns: int, origin_ns: int) -> float:
    return (time_ns - origin_ns) / 1000


def _messages(messages: Sequence[Message], pids: Mapping[str, int], origin_ns: int) -> Iterator[str]:
    """A slice where a message is sent and one where it arrives, on tracks of their own, and a flow between the two.

    What clients send and receive has a slice at the host only: the clients' own operations are shown already.
    """
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, message in enumerate(messages):
        if message.source in pids:
            tracks.setdefault((pids[message.source], 0), []).append((message.sent_ns, number))
        if message.destination in pids and message.arrived_ns is not None:
            tracks.setdefault((pids[message.destination], 1), []).append((message.arrived_ns, number))
    for (pid, tid), ends in sorted(tracks.items()):
        yield _event("M", "thread_name", pid, tid=tid, args={"name": "received" if tid else "sent"})
        ends.sort()
        for at, (moment_ns, number) in enumerate(ends):
            gap_ns = ends[at + 1][0] - moment_ns if at + 1 < len(ends) else MESSAGE_NS
            message = messages[number]
            name = clip(message.label, 80) or "segment"
            arguments = {"from": message.source, "to": message.destination, "bytes": message.size_bytes}
            if message.losses:
                arguments["lost"] = message.losses
            moment_us = (moment_ns - origin_ns) / 1000
            yield _event(
                "X", name, pid, tid=tid, cat="message", ts=moment_us, dur=min(gap_ns, MESSAGE_NS) / 1000, args=arguments
            )
            if message.arrived_ns is not None and message.source in pids and message.destination in pids:
                bind = {"bp": "e"} if tid else {}
                yield _event("f" if tid else "s", name, pid, tid=tid, cat="message", ts=moment_us, id=number, **bind)
