"""Scripted schedules: what went wrong elsewhere, or nearly, and must not go wrong here.

Each directory holds a `schedule.json` and the options it is run with (`test.json`); README.md says what it is about.
The node must be valid under it. If a mutant represents the mistake, the same schedule must expose it: that
shows that the schedule still reaches what it was written for, whatever the order of events has become.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.execution import rehearse
from harness.exploration.mutants import gives_away
from harness.exploration.rehearsal import parts_of, rehearse_test
from harness.test import Test, test_from_json
from nemesis.schedule import Schedule, load_schedule

pytestmark = pytest.mark.computed

HERE = Path(__file__).parent

MUTANT_OF: Mapping[str, str | None] = {
    "dledger-278-commit-beyond-own-end": "commit-beyond-end",
    "dledger-316-committed-beyond-truncation": "truncate-committed",
    "dledger-325-isolated-follower-returns": None,
    "dledger-331-pushes-repeated": None,
    "dledger-52-poor-log-elected": "end-term-from-current-term",
    "dledger-7-partition-churn": None,
    "figure-8": "commit-old-terms",
    "five-nodes-the-longer-log-wins": None,
    "five-nodes-the-shorter-log-wins": None,
    "rocketmq-10666-stale-tail-revives": "truncate-not-persisted",
    "rocketmq-1934-delayed-messages-after-a-switch": None,
    "rocketmq-3210-messages-repeated": "duplicate-apply",
}

SLOW = {
    "dledger-52-poor-log-elected", "figure-8", "rocketmq-10666-stale-tail-revives",
    "rocketmq-1934-delayed-messages-after-a-switch",
}  # fmt: skip
"""Schedules that cost the node itself four seconds of processor time; their mutants are tested every time."""

SEEDS = range(1, 6)
"""Seeds under which a mutant may be found: an election may go another way than the script has it."""


def load(name: str) -> tuple[Test, Schedule]:
    test = test_from_json(json.loads((HERE / name / "test.json").read_text(encoding="utf-8")))
    return test, load_schedule(str(HERE / name / "schedule.json"))


def run(name: str, tmp_path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The results and the history of the node itself under a schedule."""
    test, schedule = load(name)
    results = rehearse(parts_of(test, schedule), str(tmp_path), Console(file=io.StringIO(), quiet=True))
    (history,) = tmp_path.glob("*/2*/history.jsonl")
    return results, [json.loads(line) for line in history.read_text(encoding="utf-8").splitlines()]


def test_every_schedule_is_listed() -> None:
    assert sorted(path.parent.name for path in HERE.glob("*/schedule.json")) == sorted(MUTANT_OF)
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in readme for name in MUTANT_OF)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in SLOW else [])
        for name in MUTANT_OF
        if not name.startswith("five-nodes")
    ],
)
def test_the_node_is_valid_under_the_schedule(name: str, tmp_path: Path) -> None:
    results, _ = run(name, tmp_path)
    assert results["valid"] is True, results["reason"]


@pytest.mark.parametrize("name", [name for name, mutant in MUTANT_OF.items() if mutant is not None])
def test_the_schedule_exposes_the_mutant(name: str, node_exceptions: list[str]) -> None:
    test, schedule = load(name)
    seen = []
    for seed in SEEDS:
        settings = {**test.settings, "mutant": str(MUTANT_OF[name])}
        mutated = dataclasses.replace(test, seed=seed, settings=settings, fail_fast=True)
        found = rehearse_test(mutated, schedule)
        if gives_away(found):
            assert not node_exceptions, "a mutant is found by what it breaks, not by an exception of its own"
            return
        seen.append(found.reason)
    pytest.fail(f"the mutant was not found: {seen}")


@pytest.mark.parametrize(("which", "winner"), [("shorter", "n2"), ("longer", "n3")])
def test_the_elected_log_decides_whether_an_unacknowledged_tail_is_kept(
    which: str, winner: str, tmp_path: Path
) -> None:
    """The question at the end of S3. Of five members n1 leads and has, like n3, a tail that the others lack; n2 has
    all that is committed, n4 and n5 less. When n1 dies, either n2 is elected and the tail is gone, or n3 is and it is
    committed. Nothing acknowledged is lost, and the tail was never acknowledged."""
    results, history = run(f"five-nodes-the-{which}-log-wins", tmp_path)
    assert results["valid"] is True, results["reason"]
    cut_ns = next(e["time"] for e in history if e["process"] == "nemesis" and e["value"]["id"] == "f3")
    killed_ns = next(e["time"] for e in history if e["process"] == "nemesis" and e["value"]["id"] == "f4")
    terms = sorted(results["checks"]["leaders"]["terms"], key=lambda each: int(each["start_ns"]))
    assert [each["leader"] for each in terms if each["start_ns"] < killed_ns][-1] == "n1"
    assert next(each["leader"] for each in terms if each["start_ns"] > killed_ns) == winner
    open_appends: dict[int, Any] = {}
    doubtful = set()
    for event in history:
        if event.get("f") != "append":
            continue
        if event["type"] == "invoke" and event["time"] < killed_ns:
            open_appends[event["process"]] = event["value"]
        elif event["type"] != "invoke":
            value = open_appends.pop(event["process"], None)
            if event["type"] == "info" and value is not None and event["time"] > cut_ns:
                doubtful.add(value)
    acked = {e["value"][1] for e in history if e["type"] == "ok" and e["f"] == "append"}
    read = {m for e in history if e["type"] == "ok" and e["f"] == "read" for m in e["value"]["messages"]}
    assert doubtful and acked <= read
    if which == "shorter":
        assert not doubtful & read
    else:
        assert doubtful & read
