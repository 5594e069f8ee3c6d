"""Runs as spans of OpenTelemetry: one for each operation, in the encoding that its receivers read."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checker.faults import faults_of
from harness.export import otlp
from harness.export.otlp import RUN_SPAN, otlp_lines
from harness.tracing import ids_of

ZERO_NS = 1_796_061_403_000_000_000
SPAN_FIELDS = {
    "traceId", "spanId", "parentSpanId", "name", "kind", "startTimeUnixNano", "endTimeUnixNano", "attributes", "links",
    "status",
}  # fmt: skip


def event(time: int, process: Any, kind: str, f: str, value: Any = None, **more: Any) -> dict[str, Any]:
    return {"index": time, "time": time, "process": process, "type": kind, "f": f, "value": value, **more}


def step(time: int, kind: str, f: str, **more: Any) -> dict[str, Any]:
    return event(time, "nemesis", kind, f, {"id": "f1", "nemesis": "kill", "variant": "sigkill", **more})


FAULT = [step(100, "invoke", "inject"), step(110, "info", "inject", proof={"proven": True}),
         step(200, "invoke", "heal"), step(210, "info", "heal", proof={"proven": True})]  # fmt: skip


def lines_of(history: list[dict[str, Any]], **resource: Any) -> list[str]:
    faults = faults_of(history)
    return list(
        otlp_lines(history, faults=faults, run_id="r1", zero_ns=ZERO_NS, resource=resource, system="etcd")
    )  # fmt: skip


def spans_of(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    requests = [json.loads(line) for line in lines_of(history)]
    return [
        span
        for request in requests
        for resource in request["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def attributes(of: dict[str, Any]) -> dict[str, Any]:
    """The attributes as plain values; each has exactly one of OTLP's kinds, and integers are strings."""
    found = {}
    for each in of["attributes"]:
        [(kind, value)] = each["value"].items()
        found[each["key"]] = {"intValue": int, "stringValue": str, "boolValue": bool, "doubleValue": float}[kind](value)
        assert kind != "intValue" or isinstance(value, str)
    return found


def test_an_operation_is_a_span_with_the_ids_of_its_traceparent() -> None:
    history = [event(7, 3, "invoke", "write", 5, key="x"), event(19, 3, "ok", "write", 5, key="x", node="n2")]
    span = spans_of(history)[0]
    assert (span["traceId"], span["spanId"]) == ids_of("r1", 7)
    assert (span["name"], span["kind"]) == ("write", 3) and "parentSpanId" not in span
    assert (span["startTimeUnixNano"], span["endTimeUnixNano"]) == (str(ZERO_NS + 7), str(ZERO_NS + 19))
    assert "status" not in span and "links" not in span
    assert attributes(span) == {
        "db.system.name": "etcd", "db.operation.name": "write", "splitbrain.index": 7, "splitbrain.process": 3,
        "splitbrain.key": "x", "splitbrain.value": 5, "splitbrain.result": 5, "splitbrain.outcome": "ok",
        "splitbrain.node": "n2",
    }  # fmt: skip


def test_what_failed_is_unknown_or_has_no_answer_is_an_error() -> None:
    history = [
        event(0, 0, "invoke", "read"), event(1, 1, "invoke", "read"), event(2, 2, "invoke", "add", [1, None]),
        event(3, 0, "fail", "read", error="refused"), event(4, 1, "info", "read", error="timeout"),
        event(9, 7, "invoke", "read"),
    ]  # fmt: skip
    found = {attributes(span).get("splitbrain.process"): span for span in spans_of(history)}
    assert [found[process]["status"] for process in (0, 1, 2)] == [
        {"code": 2, "message": "refused"}, {"code": 2, "message": "timeout"}, {"code": 2, "message": "no answer"},
    ]  # fmt: skip
    assert attributes(found[0])["error.type"] == "fail" and attributes(found[2])["splitbrain.outcome"] == "info"
    assert found[2]["endTimeUnixNano"] == str(ZERO_NS + 9)
    assert attributes(found[2])["splitbrain.value"] == "[1, null]"


def test_faults_are_spans_below_that_of_the_run_and_operations_link_to_those_they_met() -> None:
    before = [event(10, 1, "invoke", "read"), event(20, 1, "ok", "read", 1)]
    during = [event(150, 1, "invoke", "read"), event(160, 1, "ok", "read", 1)]
    across = [event(50, 2, "invoke", "read"), event(300, 2, "ok", "read", 1)]
    after = [event(310, 1, "invoke", "read"), event(320, 1, "ok", "read", 1)]
    history = sorted([*FAULT, *before, *during, *across, *after], key=lambda each: int(each["time"]))
    found = spans_of(history)
    run, fault = found[-2:]
    assert (run["name"], run["spanId"]) == ("run", ids_of("r1", RUN_SPAN).span)
    assert (fault["name"], fault["traceId"], fault["parentSpanId"]) == ("kill sigkill", run["traceId"], run["spanId"])
    assert int(run["startTimeUnixNano"]) <= int(fault["startTimeUnixNano"]) < int(fault["endTimeUnixNano"])
    assert int(fault["endTimeUnixNano"]) <= int(run["endTimeUnixNano"])
    assert attributes(fault)["splitbrain.fault.proven"] is True and "status" not in fault
    links = {attributes(span)["splitbrain.index"]: span.get("links", []) for span in found[:-2]}
    assert {index: [link["spanId"] for link in each] for index, each in links.items()} == {
        150: [fault["spanId"]], 50: [fault["spanId"]], 310: [], 10: [],
    }  # fmt: skip


def test_a_fault_that_was_not_proven_is_an_error() -> None:
    fault = spans_of([FAULT[0], step(110, "info", "inject", proof={"proven": False}), *FAULT[2:]])[-1]
    assert fault["status"] == {"code": 2, "message": "not proven"}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 80), 1 << 80) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4), max_leaves=6,
)  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 4), VALUES, VALUES), max_size=12))
def test_any_value_is_written_in_the_encoding(steps: list[tuple[int, Any, Any]]) -> None:
    history = []
    for number, (process, key, value) in enumerate(steps):
        history += [event(2 * number, process, "invoke", "read", value, key=key)]
        history += [event(2 * number + 1, process, "ok", "read", value, key=key)]
    found = spans_of(history)
    assert len(found) == len(steps) + 1
    for span in found:
        assert span.keys() <= SPAN_FIELDS
        assert re.fullmatch(r"[0-9a-f]{32}", span["traceId"]) and re.fullmatch(r"[0-9a-f]{16}", span["spanId"])
        assert all(re.fullmatch(r"\d+", span[name]) for name in ("startTimeUnixNano", "endTimeUnixNano"))
        attributes(span)
    assert len({span["spanId"] for span in found}) == len(found)


def test_lines_are_no_longer_than_a_collector_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    history = [
        event(2 * number + kind, 0, ("invoke", "ok")[kind], "members", ["\U0001f600" * 500] * 9)
        for number in range(900)
        for kind in (0, 1)
    ]
    lines = lines_of(history, **{"splitbrain.run": "r1"})
    assert len(lines) > 1 and max(map(len, lines)) < 1_000_000
    assert sum(line.count('"traceId"') for line in lines) == 901
    resources = {json.dumps(json.loads(line)["resourceSpans"][0]["resource"]) for line in lines}
    assert len(resources) == 1 and '"service.name"' in next(iter(resources))
    monkeypatch.setattr(otlp, "LINE_BYTES", 1)
    assert len(lines_of(history)) == 901


def test_ids_differ_between_runs_and_operations() -> None:
    every = {ids_of(run, what) for run in ("r1", "r2") for what in (0, 1, 10, "run", "fault f1")}
    assert len(every) == 10 and ids_of("r1", 1) == ids_of("r1", 1)
