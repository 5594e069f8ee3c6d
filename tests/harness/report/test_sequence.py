"""The message sequence diagram: which messages a window has, which are drawn, and how they look."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.report.sequence import Leadership, _Scale, sequence_page, sequence_svg
from harness.report.trace_window import RANKS, Message, TraceError, Window, choose, read_window

SVG = "{http://www.w3.org/2000/svg}"


def line(time_ms: float, kind: str, source: str, to: str, number: int, rpc: str = "") -> dict[str, Any]:
    event = {
        "time": round(time_ms * 1e6), "kind": kind, "from": source, "to": to, "connection": 1, "number": number,
    }  # fmt: skip
    return {**event, "rpcs": [{"rpc": rpc, "detail": "term 2"}]} if rpc else event


EVENTS = [
    line(0, "send", "n1", "n2", 0, "heartbeat"),
    line(1, "arrive", "n1", "n2", 0),
    line(10, "send", "n1", "n2", 1, "vote"),
    line(10, "send", "n1", "n3", 0, "append"),
    line(10.2, "lost", "n1", "n3", 0),
    line(10.5, "arrive", "n1", "n2", 1),
    line(12, "send", "n3", "n1", 0, "send"),
    line(30, "arrive", "n3", "n1", 0),
]


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def window_of(path: Path, from_ms: float, to_ms: float, **options: Any) -> Window:
    return read_window(path, from_ns=round(from_ms * 1e6), to_ns=round(to_ms * 1e6), **options)


def test_a_window_has_the_messages_under_way_in_it(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", EVENTS)
    messages = window_of(path, 5, 20).messages
    assert [(m.kind, m.losses, m.arrived_ns) for m in messages] == [
        ("vote", 0, 10_500_000), ("append", 1, None), ("send", 0, None),
    ]  # fmt: skip
    assert [m.kind for m in window_of(path, 0.5, 5).messages] == ["heartbeat"], "it arrives in the window"
    assert [m.kind for m in window_of(path, 5, 20, hosts=["n1", "n2"]).messages] == ["vote"]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, {}, "--cluster sim --trace"),
        ("", {}, "is empty"),
        ("{}\n", {}, "trace.jsonl:1: not a line of a trace"),
        *(
            (json.dumps(EVENTS[0] | damage) + "\n", {}, "trace.jsonl:1: not a line of a trace")
            for damage in (
                {"time": [1]},
                {"from": [1]},
                {"to": None},
                {"number": "x"},
                {"size": {}},
                {"rpcs": 7},
                {"rpcs": ["vote"]},
                {"rpcs": [{"rpc": []}]},
            )
        ),
        (json.dumps(EVENTS[0]) + "\nbroken", {}, "trace.jsonl:2"),
        (
            "".join(json.dumps(e) + "\n" for e in EVENTS),
            {"hosts": ["n1", "n9"]},
            "n9 sent and received nothing; known: n1, n2, n3",
        ),
        ("".join(json.dumps(e) + "\n" for e in EVENTS), {}, "the trace covers 0.000 s to 0.030 s"),
        (json.dumps(EVENTS[0]) + '\n{"time":5,"kind":"limit","events":1}\n', {}, "reached its limit of events"),
    ],
)
def test_a_window_that_cannot_be_drawn_is_reported_in_one_line(
    content: str | None, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TraceError, match=re.escape(message)) as caught:
        window_of(path, 100, 200, **options)
    assert "\n" not in str(caught.value)


KINDS = [name for _, names in RANKS for name in sorted(names)] + ["register broker", ""]


def message(sent_ns: int, kind: str, losses: int = 0, arrived_ns: int | None = None) -> Message:
    rpcs = [{"rpc": kind, "detail": ""}] if kind else []
    return Message("n1", "n2", 1, sent_ns, 10, rpcs, losses, arrived_ns)


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 1)), max_size=40), st.integers(0, 20))
def test_the_most_telling_messages_are_kept_and_the_rest_is_counted(made: list[tuple[str, int]], most: int) -> None:
    messages = [message(place, kind, losses) for place, (kind, losses) in enumerate(made)]
    chosen = choose(Window(0, 100, messages), most)
    assert len(chosen.messages) == min(most, len(messages))
    assert chosen.messages == sorted(chosen.messages, key=lambda m: m.sent_ns)
    left_out = [m for m in messages if m not in chosen.messages]
    assert chosen.left_out.total() == len(left_out)
    # By the stated rule: nothing left out comes before anything kept, by kind and then by time.
    if left_out and chosen.messages:
        assert max((m.rank, m.sent_ns) for m in chosen.messages) < min((m.rank, m.sent_ns) for m in left_out)


@given(st.lists(st.integers(-(10**12), 10**12), min_size=1, max_size=60))
def test_the_axis_keeps_the_order_of_all_moments(moments: list[int]) -> None:
    scale = _Scale(moments)
    heights = [scale(moment) for moment in sorted(set(moments))]
    assert all(later - earlier > 17.9 for earlier, later in itertools.pairwise(heights))
    assert scale(min(moments) - 5) == heights[0] and scale(max(moments) + 5) == heights[-1] == scale.bottom


FAULTS = [
    {"id": "f1", "nemesis": "partition", "variant": "one", "start_ns": 8_000_000, "end_ns": 15_000_000,
     "grudge": {"n1": ["n2", "n3"], "n2": ["n1"], "n3": ["n1"]}},
    {"id": "f2", "nemesis": "kill", "variant": "leader", "start_ns": 1, "end_ns": None, "hosts": ["n3"]},
    {"id": "f3", "nemesis": "kill", "variant": "later", "start_ns": 10**12, "end_ns": None, "hosts": ["n1"]},
]  # fmt: skip
LEADERS = [Leadership("n2", 1, -5), Leadership("n1", 2, 11_000_000)]
HOSTS = ["n1", "n2", "n3"]


def test_the_drawing_has_every_message_fault_and_leader(tmp_path: Path) -> None:
    window = window_of(write(tmp_path / "trace.jsonl", EVENTS), 5, 20)
    text = sequence_svg(window, title="a <run>", hosts=HOSTS, faults=FAULTS, leaders=LEADERS)
    root = ElementTree.fromstring(text)
    groups = [g.get("class", "") for g in root.iter(f"{SVG}g") if g.find(f"{SVG}title") is not None]
    assert groups == ["arrow vote", "arrow lost", "arrow client"]
    texts = ["".join(one.itertext()) for one in root.iter(f"{SVG}text")]
    assert {"vote term 2", "append term 2", "send term 2", *HOSTS, "leads term 2"} <= set(texts)
    assert "leads term 1" not in texts, "that was before the window"
    assert {"f1 partition one", "n1 | n2 n3", "f2 kill leader"} <= {" ".join(t.split()) for t in texts}
    assert not any("f3" in t for t in texts)
    assert len([p for p in root.iter(f"{SVG}path") if p.get("class") == "cross"]) == 1, "the lost one"
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_arrows_slant_downwards_between_the_right_lines(tmp_path: Path) -> None:
    window = window_of(write(tmp_path / "trace.jsonl", EVENTS), 0, 40)
    root = ElementTree.fromstring(sequence_svg(window, title="t", hosts=HOSTS))
    rows = [line for line in root.iter(f"{SVG}line") if line.get("class") == "life"]
    places = dict(zip(HOSTS, (float(row.get("x1", "")) for row in rows), strict=True))
    drawn = [path.get("d", "") for group in root.iter(f"{SVG}g") for path in group.findall(f"{SVG}path")
             if group.find(f"{SVG}title") is not None and path.get("class") == "line"]  # fmt: skip
    for one, path in zip(window.messages, drawn, strict=True):
        x1, y1, x2, y2 = map(float, re.findall(r"-?[\d.]+", path))
        assert abs(x1 - places[one.source]) < 6 and abs(x2 - places[one.destination]) < 25
        assert y2 > y1


def test_the_texts_of_nodes_are_escaped(tmp_path: Path) -> None:
    events = [line(1, "send", "n1", "n2", 0, "<script>alert(1)</script>"), line(2, "arrive", "n1", "n2", 0)]
    page = sequence_page(
        window_of(write(tmp_path / "trace.jsonl", events), 0, 5), title="<b>", hosts=["n1", "n2"], faults=FAULTS
    )
    assert "<script" not in page and "<b>" not in page
    assert "default-src 'none'" in page and 'lang="en"' in page


def test_the_page_states_which_messages_it_leaves_out() -> None:
    messages = [message(number, "heartbeat", arrived_ns=number + 5) for number in range(10)]
    page = sequence_page(choose(Window(0, 100, messages), 4), title="t", hosts=["n1", "n2"])
    assert "4 messages of 10" in page and "Left out: heartbeats (6)" in page


def test_a_trace_that_reached_its_size_limit_is_noted(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", [*EVENTS, {"time": 31_000_000, "kind": "limit", "events": 8}])
    words = "The trace reached its size limit at 0.031 s; later messages are unknown."
    for most in (100, 2):
        assert words in sequence_page(choose(window_of(path, 0, 40), most), title="t", hosts=HOSTS)
    assert words not in sequence_page(window_of(path, 0, 30.5), title="t", hosts=HOSTS)


def test_a_leader_replaced_by_a_host_outside_the_drawing_leads_no_longer(tmp_path: Path) -> None:
    window = window_of(write(tmp_path / "trace.jsonl", EVENTS), 0, 40, hosts=["n1", "n2"])
    leaders = [Leadership("n1", 1, -5_000_000), Leadership("n3", 2, 20_000_000)]
    bars = []
    for known in (leaders[:1], leaders):
        root = ElementTree.fromstring(sequence_svg(window, title="t", hosts=["n1", "n2"], leaders=known))
        titles = [(rect, rect.find(f"{SVG}title")) for rect in root.iter(f"{SVG}rect") if rect.get("class") == "leads"]
        bars += [float(rect.get("height", "")) for rect, title in titles if title is not None]
        assert "leads term 2" not in "".join(root.itertext())
    whole, until_then = bars
    assert 0 < until_then < whole
