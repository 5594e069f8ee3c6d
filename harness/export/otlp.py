"""A run as spans of OpenTelemetry: OTLP/JSON, an ExportTraceServiceRequest on each line.

The OpenTelemetry Collector's receiver `otlpjsonfile` reads such a file. An operation is the only span of a trace of its
own here, of kind client; its ids are those of the `traceparent` that its client passed on, so that the spans of the
system under test become its children in the same back end. The faults are the trace of the run, and an operation links
to the faults that were in force during it. Encoding: the "JSON Protobuf Encoding" of the OTLP specification: ids are
hexadecimal, 64-bit integers decimal strings, enumerations numbers. Attributes are those of the semantic conventions for
database clients where there is one, else `splitbrain.*`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from checker.faults import NEMESIS
from harness.tracing import SpanIds, ids_of
from harness.units import clip

__all__ = ["LINE_BYTES", "RUN_SPAN", "SERVICE", "fault_name", "otlp_lines"]

SERVICE = "splitbrain"
"""`service.name` of the spans: the harness, whose clients they are."""

RUN_SPAN = "run"
"""What the ids of the run's own span are derived from."""

LINE_BYTES = 500_000
"""Size of a request's spans from which on it is written: the collector's default limit of a line is a megabyte."""

MAX_LINKS = 32
"""Limit of the faults that an operation links to; more are hardly in force at once."""

MAX_VALUE = 400
"""Limit of the characters of an operation's value, which may be all members of a set."""

INTERNAL, CLIENT = 1, 3
"""Kinds of spans."""

ERROR = 2
"""Status code; an operation that succeeded leaves it unset."""


def otlp_lines(
    history: Iterable[Mapping[str, Any]],
    *,
    faults: Sequence[Mapping[str, Any]],
    run_id: str,
    zero_ns: int,
    resource: Mapping[str, Any],
    system: str,
) -> Iterator[str]:
    """The requests. `zero_ns` is the time since 1970 at which the load began, `resource` the attributes of the run,
    `system` the name of what is tested."""
    described = {"attributes": _attributes({"service.name": SERVICE, **resource})}
    head = (
        f'{{"resourceSpans":[{{"resource":{_json(described)},"scopeSpans":[{{"scope":{{"name":"{SERVICE}"}},"spans":['
    )
    spans: list[str] = []
    size_bytes = 0
    for span in _spans(history, faults, run_id, zero_ns, system):
        spans.append(_json(span))
        size_bytes += len(spans[-1])
        if size_bytes >= LINE_BYTES:
            yield f"{head}{','.join(spans)}]}}]}}]}}"
            spans, size_bytes = [], 0
    if spans:
        yield f"{head}{','.join(spans)}]}}]}}]}}"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _spans(
    history: Iterable[Mapping[str, Any]], faults: Sequence[Mapping[str, Any]], run_id: str, zero_ns: int, system: str
) -> Iterator[Mapping[str, Any]]:
    end_ns = 0
    for time_ns, span in _operations(history, faults, run_id, zero_ns, system):
        end_ns = time_ns
        if span is not None:
            yield span
    yield from _of_the_run(faults, run_id, zero_ns, end_ns)


def _operations(
    history: Iterable[Mapping[str, Any]],
    faults: Sequence[Mapping[str, Any]],
    run_id: str,
    zero_ns: int,
    system: str,
) -> Iterator[tuple[int, Mapping[str, Any] | None]]:
    """The time of each event, and the span of the operation that it completes; then the spans of those without an
    answer, which end with the history."""
    under_way: dict[Any, Mapping[str, Any]] = {}
    last_ns = 0
    links = [(fault["start_ns"], _end_of(fault), _link(fault, run_id)) for fault in faults if _has_begun(fault)]

    def span(invoked: Mapping[str, Any], completed: Mapping[str, Any] | None) -> Mapping[str, Any]:
        end_ns = last_ns if completed is None else completed["time"]
        met = [link for begin, end, link in links if begin <= end_ns and (end is None or invoked["time"] <= end)]
        return _operation(invoked, completed, run_id, zero_ns, end_ns, met[:MAX_LINKS], system)

    for event in history:
        last_ns = max(last_ns, event["time"])
        process = event["process"]
        done = None
        if process != NEMESIS and event["type"] == "invoke":
            under_way[process] = event
        elif process in under_way:
            done = span(under_way.pop(process), event)
        yield last_ns, done
    for invoked in under_way.values():
        yield last_ns, span(invoked, None)


def _operation(
    invoked: Mapping[str, Any],
    completed: Mapping[str, Any] | None,
    run_id: str,
    zero_ns: int,
    end_ns: int,
    links: Sequence[Mapping[str, Any]],
    system: str,
) -> Mapping[str, Any]:
    kind = "info" if completed is None else completed["type"]
    answer = {} if completed is None else completed
    error = "no answer" if completed is None else answer.get("error")
    attributes = {
        "db.system.name": system,
        "db.operation.name": invoked["f"],
        "splitbrain.index": invoked.get("index"),
        "splitbrain.process": invoked["process"],
        "splitbrain.key": _text(invoked.get("key")),
        "splitbrain.value": _text(invoked.get("value")),
        "splitbrain.result": _text(answer.get("value")) if kind == "ok" else None,
        "splitbrain.outcome": kind,
        "splitbrain.node": answer.get("node"),
        "error.type": None if kind == "ok" else kind,
    }
    status = {} if kind == "ok" else {"code": ERROR, "message": clip(error or kind, MAX_VALUE)}
    ids = ids_of(run_id, invoked.get("index", -1))
    times = (zero_ns + invoked["time"], zero_ns + end_ns)
    return _span(ids, str(invoked["f"]), CLIENT, times, attributes, status=status, links=links)


def _span(
    ids: SpanIds,
    name: str,
    kind: int,
    times_ns: tuple[int, int],
    attributes: Mapping[str, Any],
    *,
    parent: str = "",
    status: Mapping[str, Any] | None = None,
    links: Sequence[Mapping[str, Any]] = (),
) -> Mapping[str, Any]:
    begin_ns, end_ns = times_ns
    span = {
        "traceId": ids.trace, "spanId": ids.span, "parentSpanId": parent, "name": clip(name, MAX_VALUE), "kind": kind,
        "startTimeUnixNano": str(max(0, begin_ns)), "endTimeUnixNano": str(max(0, begin_ns, end_ns)),
        "attributes": _attributes(attributes), "links": links, "status": status,
    }  # fmt: skip
    return {field: value for field, value in span.items() if value}


def _of_the_run(
    faults: Sequence[Mapping[str, Any]], run_id: str, zero_ns: int, end_ns: int
) -> Iterator[Mapping[str, Any]]:
    """The span of the run, from the beginning of its load, and one below it for each fault."""
    ids = ids_of(run_id, RUN_SPAN)
    yield _span(ids, RUN_SPAN, INTERNAL, (zero_ns, zero_ns + end_ns), {"splitbrain.faults": len(faults)})
    for fault in filter(_has_begun, faults):
        ended_ns = _end_of(fault)
        attributes = {
            f"splitbrain.fault.{name}": _text(fault.get(name))
            for name in ("id", "nemesis", "variant", "target", "hosts", "proven", "exercised", "healed")
        }
        unproven = {} if fault.get("proven") is True else {"code": ERROR, "message": "not proven"}
        times = (zero_ns + fault["start_ns"], zero_ns + (end_ns if ended_ns is None else ended_ns))
        own = SpanIds(ids.trace, _fault_span(fault, run_id))
        yield _span(own, fault_name(fault), INTERNAL, times, attributes, parent=ids.span, status=unproven)


def fault_name(fault: Mapping[str, Any]) -> str:
    """The nemesis and its variant: "partition halves"."""
    return " ".join(str(fault[name]) for name in ("nemesis", "variant") if fault.get(name)) or "fault"


def _has_begun(fault: Mapping[str, Any]) -> bool:
    return isinstance(fault.get("start_ns"), int)


def _end_of(fault: Mapping[str, Any]) -> int | None:
    end_ns = fault.get("end_ns")
    return end_ns if isinstance(end_ns, int) else None


def _fault_span(fault: Mapping[str, Any], run_id: str) -> str:
    return ids_of(run_id, f"fault {fault.get('id')}").span


def _link(fault: Mapping[str, Any], run_id: str) -> Mapping[str, Any]:
    return {
        "traceId": ids_of(run_id, RUN_SPAN).trace,
        "spanId": _fault_span(fault, run_id),
        "attributes": _attributes({"splitbrain.fault": fault_name(fault)}),
    }


def _text(value: Any) -> Any:
    """A value as an attribute: numbers and texts as they are, others as JSON; None for none."""
    return value if value is None or isinstance(value, (bool, int, float)) else clip(value, MAX_VALUE)


def _attributes(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in values.items() if value is not None]


def _value(value: Any) -> Mapping[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return {"intValue": str(value)}
    if isinstance(value, float) and math.isfinite(value):
        return {"doubleValue": value}
    return {"stringValue": clip(value, MAX_VALUE)}
