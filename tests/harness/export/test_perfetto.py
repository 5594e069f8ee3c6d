"""Runs as traces for Perfetto's viewer."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from harness.export.perfetto import CLIENTS, FAULTS, FIRST_HOST, MESSAGE_NS, trace_events
from harness.metrics.samples import Lane, Line, Samples
from harness.report.sequence import Leadership
from harness.report.trace_window import Message

HOSTS = ("n1", "n2")


def traced(events: list[dict[str, Any]] | tuple[()] = (), **more: Any) -> list[dict[str, Any]]:
    return [json.loads(event) for event in trace_events(events, hosts=HOSTS, **more)]


def event(time: int, process: Any, kind: str, f: str, value: Any = None, **more: Any) -> dict[str, Any]:
    return {"index": time, "time": time, "process": process, "type": kind, "f": f, "value": value, **more}


def test_every_host_and_client_has_a_named_track() -> None:
    found = traced([event(0, 7, "invoke", "read"), event(9_000, 7, "ok", "read", 3)])
    names = {(each["pid"], each["name"], each["args"].get("name")) for each in found if each["ph"] == "M"}
    assert names >= {
        (CLIENTS, "process_name", "clients"), (FAULTS, "process_name", "faults"), (FIRST_HOST, "process_name", "n1"),
        (FIRST_HOST + 1, "process_name", "n2"), (CLIENTS, "thread_name", "client 7"),
    }  # fmt: skip


def test_an_operation_is_a_slice_from_its_invocation_to_its_return() -> None:
    found = traced(
        [
            event(1_000, 0, "invoke", "write", 5, key="x"), event(2_000, 1, "invoke", "read", key="x"),
            event(4_000, 0, "ok", "write", 5, key="x", node="n2"), event(5_000, 1, "ok", "read", 5, key="x"),
            event(6_000, 0, "invoke", "write", 6), event(7_000, 0, "fail", "write", error="refused"),
            event(8_000, 0, "invoke", "write", 7), event(9_000, 1, "invoke", "read"),
        ]
    )  # fmt: skip
    slices = [(each["name"], each["tid"], each["ts"], each["dur"]) for each in found if each["ph"] == "X"]
    assert slices == [
        ('write "x" 5', 0, 1.0, 3.0), ('read "x" = 5', 1, 2.0, 3.0), ("fail: write 6", 0, 6.0, 1.0),
        ("info: write 7", 0, 8.0, 1.0), ("info: read", 1, 9.0, 0.0),
    ]  # fmt: skip
    arguments = [each["args"] for each in found if each["ph"] == "X"]
    assert arguments[0] == {"type": "ok", "index": 1_000, "node": "n2"}
    assert arguments[2]["error"] == "refused"


def test_a_fault_lasts_until_it_is_healed_or_until_the_end() -> None:
    def step(time: int, kind: str, f: str, fault: str, **more: Any) -> dict[str, Any]:
        return event(time, "nemesis", kind, f, {"id": fault, "nemesis": "kill", "variant": "sigkill", **more})

    found = traced(
        [
            step(1_000, "invoke", "inject", "f1"), step(2_000, "info", "inject", "f1", proof={"proven": True}),
            step(5_000, "invoke", "heal", "f1"), step(6_000, "info", "heal", "f1", proof={"proven": True}),
            step(7_000, "invoke", "inject", "f2"), step(8_000, "info", "inject", "f2", proof={"proven": True}),
            event(20_000, 0, "invoke", "read"),
        ]
    )  # fmt: skip
    faults = [(each["ph"], each["id"], each["name"], each["ts"]) for each in found if each.get("cat") == "fault"]
    begun, ended = faults[0][3], faults[1][3]
    assert [each[:3] for each in faults] == [
        ("b", 0, "kill sigkill"), ("e", 0, "kill sigkill"), ("b", 1, "kill sigkill"), ("e", 1, "kill sigkill")
    ]  # fmt: skip
    assert 1 <= begun <= 2 and 5 <= ended <= 6 and faults[3][3] == 20.0


def test_metrics_are_counters_of_their_host_and_a_gap_an_instant() -> None:
    line, answers = Line(), Line()
    for time_ns, value in ((1_000, 2.5), (2_000, None), (3_000, 4.0)):
        line.add(time_ns, value)
        answers.add(time_ns, None if value is None else 1.0)
    lane = Lane("Pending", "pending", "", 0, "value", {"n2": line, "n9": line})
    found = traced(samples=Samples(1_000, ["n2", "n9"], [lane], {"n2": answers, "n9": answers}))
    counters = [(each["name"], each["pid"], each["ts"], each["args"]) for each in found if each["ph"] == "C"]
    assert counters == [
        ("Pending", FIRST_HOST + 1, 1.0, {"value": 2.5}), ("Pending", FIRST_HOST + 1, 3.0, {"value": 4.0}),
    ]  # fmt: skip
    gaps = [(each["name"], each["pid"], each["ts"]) for each in found if each["ph"] == "i"]
    assert gaps == [("no answer with metrics", FIRST_HOST + 1, 2.0)]


def message(source: str, destination: str, sent_ns: int, arrived_ns: int | None) -> Message:
    return Message(source, destination, 1, sent_ns, 10, [{"rpc": "vote"}], arrived_ns=arrived_ns)


def test_a_message_is_two_slices_and_a_flow_unless_it_is_lost_or_a_client_s() -> None:
    messages = [message("n1", "n2", 0, 90_000), message("n2", "n1", 10, None), message("clients", "n1", 20, 95_000)]
    found = traced(messages=messages)
    ends = [(each["ph"], each["pid"], each["ts"]) for each in found if each.get("cat") == "message"]
    assert sorted(ends) == sorted(
        [
            ("X", FIRST_HOST, 0.0), ("s", FIRST_HOST, 0.0), ("X", FIRST_HOST + 1, 90.0), ("f", FIRST_HOST + 1, 90.0),
            ("X", FIRST_HOST + 1, 0.01), ("X", FIRST_HOST, 95.0),
        ]
    )  # fmt: skip
    assert len({each["id"] for each in found if each["ph"] in ("s", "f")}) == 1


def test_times_before_the_load_move_everything() -> None:
    leaders = [Leadership("n2", 3, -50_000), Leadership("gone", 4, 0)]
    found = traced([event(1_000, 0, "invoke", "read"), event(3_000, 0, "ok", "read")], leaders=leaders)
    [leads] = [each for each in found if each["ph"] == "i"]
    assert (leads["name"], leads["pid"], leads["ts"]) == ("leads term 3", FIRST_HOST + 1, 0.0)
    [read] = [each for each in found if each["ph"] == "X"]
    assert (read["ts"], read["dur"]) == (51.0, 2.0)


@given(
    st.lists(st.tuples(st.sampled_from(HOSTS), st.integers(-100_000, 100_000), st.integers(0, 100_000)), max_size=30)
)
def test_slices_of_one_track_never_overlap_and_no_time_is_negative(sent: list[tuple[str, int, int]]) -> None:
    messages = [message(host, HOSTS[host == "n1"], at_ns, at_ns + after_ns) for host, at_ns, after_ns in sent]
    tracks = defaultdict[tuple[int, int], list[tuple[float, float]]](list)
    for each in traced(messages=messages):
        if each["ph"] == "X":
            tracks[each["pid"], each["tid"]].append((each["ts"], each["dur"]))
    assert sum(map(len, tracks.values())) == 2 * len(messages)
    for slices in tracks.values():
        assert all(ts >= 0 and 0 <= dur <= MESSAGE_NS / 1000 for ts, dur in slices)
        assert all(ts + dur <= after + 1e-6 for (ts, dur), (after, _) in pairwise(slices))
