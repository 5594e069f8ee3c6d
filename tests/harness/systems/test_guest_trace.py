"""Traces of a plug-in: what its programs have printed, judged by its own model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from checker.trace import Event, TraceModel
from harness.sdk import System
from harness.sdk.plugin import PluginError, load_file
from harness.systems import guest_trace
from harness.systems.guest_trace import judge_logs


class Counted(TraceModel):
    """Every host counts from 1; the state has how far each is."""

    def init(self, nodes: Sequence[str]) -> Iterable[tuple[int, ...]]:
        return [(0,) * len(nodes)]

    def next(self, state: tuple[int, ...], event: Event) -> Iterable[tuple[int, ...]]:
        at = int(event.node[1:]) - 1
        return [(*state[:at], event["n"], *state[at + 1 :])] if event["n"] == state[at] + 1 else []


class Wrong(Counted):
    def next(self, state: tuple[int, ...], event: Event) -> Iterable[tuple[int, ...]]:
        raise ValueError("no idea")


class Counting(System):
    trace_model = Counted


class Parsing(Counting):
    """Its programs print no JSON."""

    def trace_event(self, line: str) -> Mapping[str, Any] | None:
        word, _, number = line.partition(" ")
        return {"event": "count", "n": int(number)} if word == "count" else None


def counts(*numbers: int) -> str:
    return "".join(json.dumps({"event": "count", "n": number}) + "\n" for number in numbers)


def judged(system: System, tmp_path: Path, **texts: str | None) -> Any:
    logs = {}
    for host, text in texts.items():
        logs[host] = [tmp_path / host / "main.log"]
        logs[host][0].parent.mkdir()
        if text is not None:
            logs[host][0].write_text(text)
    return judge_logs(system, logs, __file__)


def test_events_are_the_json_lines_among_what_the_programs_print(tmp_path: Path) -> None:
    noise = 'starting\n{"level": "info"}\n{"event": "cou\n[1]\n' + counts(1) + "Traceback (most recent call last):\n"
    outcome = judged(Counting(), tmp_path, n1=noise + counts(2), n2=counts(1, 2, 3))
    assert outcome.valid is True and outcome.reason == "5 events of 2 replicas are explained"


def test_a_plug_in_may_find_its_events_in_any_text(tmp_path: Path) -> None:
    outcome = judged(Parsing(), tmp_path, n1="count 1\ncount 3\n", n2="hello\ncount 1\n")
    assert outcome.valid is False and "n1, line 2: count n=3" in outcome.reason


@pytest.mark.parametrize(
    ("system", "texts", "said"),
    [
        (Counting, {"n1": counts(1), "n2": "nothing\n"}, "n2 has logged no event"),
        (Counting, {"n1": counts(1), "n2": None}, "the log main.log of n2 cannot be read (No such file or directory)"),
        (Counting, {"n1": '{"event": "count"}\n', "n2": counts(1)}, "n1, line 1: event 'count' has no field 'n'"),
        (Counting, {"n1": '{"event": 3}\n', "n2": counts(1)}, 'line 1 has no "node" or no "event"'),
        (Parsing, {"n1": "count x\n", "n2": "count 1\n"}, "test_guest_trace.py:44: the validation of traces raised"),
        (type("Bad", (Counting,), {"trace_model": Wrong}), {"n1": counts(1)}, "raised ValueError: no idea"),
    ],
)
def test_what_cannot_be_judged_is_unknown(
    system: type[System], texts: dict[str, str | None], said: str, tmp_path: Path
) -> None:
    outcome = judged(system(), tmp_path, **texts)
    assert outcome.valid == "unknown" and said in outcome.reason


def test_too_many_events_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_trace, "MAX_EVENTS", 3)
    outcome = judged(Counting(), tmp_path, n1=counts(1, 2), n2=counts(1, 2))
    assert outcome.valid == "unknown" and "more than 3 events" in outcome.reason


PLUGIN = """
from harness.sdk import Client, System

class Mine(System):
    {line}

    def command(self, host):
        return ["true"]

class Talk(Client):
    async def read(self, key):
        return None
"""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("trace_model = 3", "trace_model is 3, not a class that is a checker.trace.TraceModel"),
        ("trace_model = System", "not a class that is a checker.trace.TraceModel"),
        ("def trace_event(self): pass", "trace_event"),
    ],
)
def test_mistakes_in_a_plug_in_are_reported_before_it_is_used(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN.format(line=line))
    with pytest.raises(PluginError, match=said):
        load_file(str(path))
