"""Reading traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checker.trace import Trace, TraceError, merge_by_time, parse_trace, read_trace
from checker.trace.events import MAX_TRACE_BYTES


def line(event: str = "vote", **fields: Any) -> str:
    return json.dumps({"node": "n1", "event": event, **fields})


def test_a_line_is_an_event_with_the_fields_of_its_model() -> None:
    trace = parse_trace([line(term=3, time=1.5, id=7, after=["6", 5]), "", line("lead", after="x")])
    vote, lead = trace.events
    assert (trace.node, trace.problem) == ("n1", "")
    assert (vote.name, vote["term"], vote.time, vote.ident, vote.after) == ("vote", 3, 1.5, "7", ("6", "5"))
    assert (lead.after, lead.line, lead.get("term", 0)) == (("x",), 3, 0)
    assert str(vote) == "vote term=3" and vote.place == "n1, line 1"
    with pytest.raises(TraceError, match="n1, line 3: event 'lead' has no field 'term'"):
        lead["term"]


def test_lines_are_numbered_for_each_process() -> None:
    whole = [line(seq=0), line(seq=1), line(seq=0), line(seq=1), line(seq=2)]
    assert parse_trace(whole).problem == ""
    assert parse_trace([line(seq=1)]).problem == "before line 1 1 line is missing"
    assert "before line 3 2 lines are missing" in parse_trace([line(seq=0), line(seq=1), line(seq=4)]).problem
    assert "before line 3" in parse_trace([line(seq=0), line(seq=1), line(seq=1)]).problem


def test_half_a_line_of_a_killed_process_is_no_gap() -> None:
    assert parse_trace([line(seq=0), '{"node": "n', line(seq=0)]).problem == ""
    assert parse_trace([line(seq=0), '{"node": "n']).problem == ""
    assert parse_trace([line(seq=0), '{"node": "n', line(seq=1)]).problem == "line 2 is not a JSON object"
    assert parse_trace(['{"node": "n', "}", line(seq=0)]).problem == "line 1 is not a JSON object"


def test_a_trace_that_has_reached_its_limit_says_so() -> None:
    trace = parse_trace([line(seq=0), line("full", seq=1)])
    assert trace.problem == "it has reached its limit" and len(trace.events) == 1


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{"node": "n1"}'], 'has no "node" or no "event"'),
        (['{"node": 1, "event": "a"}'], 'has no "node" or no "event"'),
        ([line(), '{"node": "n2", "event": "a"}'], "line 2 is of n2, the lines before of n1"),
        ([line(time="soon")], "the time is not a number"),
        ([line(time=True)], "the time is not a number"),
    ],
)
def test_what_is_no_trace_is_refused(lines: list[str], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        parse_trace(lines)


def test_a_file_is_named_in_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "n3.jsonl"
    path.write_bytes(b'{"node": "n3", "event": "a"}\n\xff\xfe\n{"node": "n3", "event": "b"}\n')
    assert read_trace(path).problem == "line 2 is not a JSON object"
    path.write_text("")
    assert read_trace(path) == Trace("n3", [])
    path.write_text("[1]\n{}\n")
    with pytest.raises(TraceError, match=r"n3\.jsonl: line 2"):
        read_trace(path)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "n1.jsonl"
    with path.open("wb") as file:
        file.truncate(MAX_TRACE_BYTES + 1)
    with pytest.raises(TraceError, match="more than 64 MB"):
        read_trace(path)


def test_replicas_with_one_clock_are_merged_by_it() -> None:
    first = parse_trace([line(time=1), line("b", time=4)])
    second = Trace("n2", parse_trace(['{"node": "n2", "event": "c", "time": 2}']).events, "cut")
    (merged,) = merge_by_time([first, second])
    assert [event.name for event in merged.events] == ["vote", "c", "b"]
    assert (merged.node, merged.problem) == ("n1, n2", "n2: cut")
    with pytest.raises(TraceError, match="n1, line 1: the event has no time"):
        merge_by_time([parse_trace([line()])])
    with pytest.raises(TraceError, match="n1, line 2: the event is earlier"):
        merge_by_time([parse_trace([line(time=2), line(time=1)])])
