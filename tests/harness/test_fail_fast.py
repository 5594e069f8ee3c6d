"""Ending the load at the first violation: early if there is one, never if there is none."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape
from rich.console import Console

from harness.fail_fast import WatchedRecorder
from harness.history_writer import read_history
from harness.judge import judge
from harness.report import print_summary
from harness.runner import Observed
from harness.systems.base import CheckOutcome
from harness.test import test_from_json as read_test
from harness.workloads.log import LogWorkload
from harness.workloads.register import RegisterWorkload


def stale(system: Any) -> None:
    system.stale_reads = True


def test_stale_reads_end_the_load_at_once(memory_run: Any) -> None:
    run_dir, results, console = memory_run(system=stale, time_limit_s=30.0, fail_fast=True)
    assert results["valid"] is False
    stopped = results["stopped_at_first_violation"]
    assert stopped is not None and "first violation: key" in console
    summary = io.StringIO()
    print_summary(results, Console(file=summary, width=400))
    assert f"stopped at  {stopped}" in summary.getvalue()
    events = list(read_history(run_dir.history_path))
    assert events[-1]["time"] < 10e9, "the time limit is 30 s"
    assert all(fault["healed"] for fault in results["faults"])
    assert results["interrupted"] is None
    heal = max(place for place, event in enumerate(events) if event["process"] == "nemesis")
    assert any(event["f"] == "read" and event["type"] == "ok" for event in events[heal:]), "final reads happen"
    assert "first violation" in results["reason"]
    assert results["checks"]["linearizable"]["valid"] is False, "the full checker decides"
    assert str(escape(stopped)) in Path(run_dir.report_path).read_text()
    stored = json.loads(Path(run_dir.test_path).read_text())
    assert stored["fail_fast"] is True and "--fail-fast" in read_test(stored).replay_line()


def test_without_fail_fast_the_load_continues_after_a_violation(memory_run: Any) -> None:
    run_dir, results, _ = memory_run(system=stale)
    assert results["valid"] is False and results["stopped_at_first_violation"] is None
    assert [*read_history(run_dir.history_path)][-1]["time"] >= 1.1e9
    assert "--fail-fast" not in results["replay"]


def test_the_live_panel_shows_a_violation_and_the_load_continues(memory_run: Any) -> None:
    run_dir, results, console = memory_run(system=stale, terminal=True)
    assert "VIOLATION: key" in console
    assert "leader" in console
    assert results["stopped_at_first_violation"] is None
    assert [*read_history(run_dir.history_path)][-1]["time"] >= 1.1e9


def test_the_live_panel_shows_no_violation_for_a_correct_system(memory_run: Any) -> None:
    _, results, console = memory_run(terminal=True)
    assert results["valid"] is True, results["reason"]
    assert "no violation" in console and "VIOLATION" not in console


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_fail_fast_never_stops_a_correct_system(memory_run: Any, seed: int) -> None:
    run_dir, results, _ = memory_run(seed=seed, fail_fast=True, rate=600.0)
    assert results["valid"] is True, results["reason"]
    assert results["stopped_at_first_violation"] is None
    assert [*read_history(run_dir.history_path)][-1]["time"] >= 1.1e9


class Recorded:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def append(self, event: dict[str, Any]) -> dict[str, Any]:
        self.events.append({"index": len(self.events), "time": len(self.events) * 1000, **event})
        return self.events[-1]


def steps(*steps: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"process": 0, "key": 0, **step} for step in steps]


def test_every_event_is_recorded_and_only_the_first_violation_is_reported() -> None:
    recorder, told = Recorded(), list[tuple[str, int]]()
    watched = WatchedRecorder(recorder, RegisterWorkload().online(), lambda words, at: told.append((words, at)))
    invented = ({"type": "invoke", "f": "read", "value": None}, {"type": "ok", "f": "read", "value": 7})
    for event in steps(*invented, *invented):
        assert watched.append(event) == recorder.events[-1]
    assert len(recorder.events) == 4
    assert [at for _, at in told] == [1000]
    assert "nobody had written" in told[0][0]


def test_a_tail_below_the_acknowledged_messages_is_reported() -> None:
    told = list[str]()
    watched = WatchedRecorder(Recorded(), LogWorkload().online(), lambda words, at: told.append(words))
    for event in steps(
        {"type": "invoke", "f": "append", "value": 5},
        {"type": "ok", "f": "append", "value": [0, 5]},
        {"type": "invoke", "f": "tail", "value": None},
        {"type": "ok", "f": "tail", "value": 0},
    ):
        watched.append(event)
    assert len(told) == 1 and "below the 1 messages" in told[0]


class AlwaysValid:
    """A workload whose full check finds nothing."""

    name = "holding"

    def check(self, history: Any, context: Any) -> Mapping[str, CheckOutcome]:
        return {"linearizable": CheckOutcome(True, "holds")}


def test_a_violation_that_no_check_confirms_leaves_the_verdict_unknown() -> None:
    events = [
        {"index": 0, "time": 0, "process": 0, "type": "invoke", "f": "read", "key": 0, "value": None},
        {"index": 1, "time": 9, "process": 0, "type": "ok", "f": "read", "key": 0, "value": None},
    ]
    test = read_test(
        {
            "system": "memory", "cluster": "memory", "nodes": 1, "workload": "register", "nemesis": [],
            "nemesis_interval_s": 1, "time_limit_s": 1, "concurrency": 1, "rate": 1, "seed": 1, "fail_fast": True,
        }
    )  # fmt: skip
    workload: Any = AlwaysValid()
    results = judge(test, workload, events, Observed(stopped_at_first_violation="key 0 went back (after 0.1 s)"))
    assert results["valid"] == "unknown"
    assert "no check confirms: key 0 went back" in results["reason"]
