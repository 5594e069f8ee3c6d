"""The check of the brokers' traces, in a run and on files that are not as they should be."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.exploration.mutants import SCENARIOS
from harness.exploration.rehearsal import rehearse_test
from harness.systems.broker_trace import INCOMPLETE, judge_traces
from node.dledger import tracing
from node.mutants.catalogue import NO_MUTANT


def start(node: str, **fields: Any) -> str:
    values = {
        "node": node, "seq": 0, "event": "start", "term": 0, "vote": None, "last": -1, "last_term": -1, "last_crc": 0,
        "commit": -1, "group": ["n1", "n2"], "group_index": -1, **fields,
    }  # fmt: skip
    return json.dumps(values) + "\n"


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., tuple[Mapping[str, Path], Mapping[str, Path]]]:
    """Write traces by host, and logs that say nothing; returns the paths of both."""

    def write(**traces: str | None) -> tuple[Mapping[str, Path], Mapping[str, Path]]:
        paths, logs = {}, {}
        for host, text in traces.items():
            (tmp_path / host).mkdir()
            paths[host], logs[host] = tmp_path / host / "protocol.jsonl", tmp_path / host / "broker.log"
            logs[host].write_text("2026-01-01T00:00:00.000Z INFO node READY broker\n")
            if text is not None:
                paths[host].write_text(text)
        return paths, logs

    return write


def test_traces_that_the_model_explains_are_valid(files: Any) -> None:
    outcome = judge_traces(*files(n1=start("n1"), n2=start("n2")))
    assert outcome.valid is True and outcome.reason == "2 events of 2 replicas are explained"


def test_a_violation_is_told_with_the_events_before_it(files: Any) -> None:
    back = start("n2", term=3) + start("n2", term=2)
    outcome = judge_traces(*files(n1=start("n1"), n2=back))
    assert outcome.valid is False and "n2 starts in term 2, but was in term 3 before" in outcome.reason
    assert outcome.details["then_impossible"][0]["line"] == 2 and len(outcome.details["explained_last"]) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "n2 left no trace (No such file or directory)"),
        ("", "the trace of n2 is empty"),
        ("nonsense\n" * 3, "the trace of n2 is empty"),
        (start("n3"), "the trace of n2 is of n3"),
        (start("n2", seq=4), "n2: before line 1 4 lines are missing"),
        (start("n2") + '{"node": "n2", "seq": 1, "event": "full"}\n', "n2: it has reached its limit"),
        (start("n2") + '{"node": "n2", "seq": 1, "event": "dance"}\n', "'dance' is no event of model raft"),
        (start("n2", term="x"), "term must be a number"),
        (start("n2", group=3), "group must be a list of names"),
        ('{"event": "start"}\n', 'has no "node" or no "event"'),
    ],
)
def test_what_cannot_be_judged_is_unknown(files: Any, text: str | None, said: str) -> None:
    outcome = judge_traces(*files(n1=start("n1"), n2=text))
    assert outcome.valid == "unknown" and said in outcome.reason


def test_a_replica_that_could_not_write_everything_makes_the_outcome_unknown(files: Any) -> None:
    paths, logs = files(n1=start("n1"), n2=start("n2", term=3) + start("n2", term=2))
    logs["n1"].write_text(f"2026-01-01T00:00:00.000Z ERROR node.dledger.trace {INCOMPLETE}: No space left\n")
    outcome = judge_traces(paths, logs)
    assert outcome.valid == "unknown" and outcome.reason == f"n1 says in its log that {INCOMPLETE}"
    assert INCOMPLETE == tracing.INCOMPLETE


def rehearsed(mutant: str, seed: int, *, trace: str, of: str | None = None) -> Any:
    """A run of the scenario of `of`, or of the mutant."""
    test, schedule = SCENARIOS[of or mutant].run_of(mutant, seed)
    return rehearse_test(dataclasses.replace(test, settings={**test.settings, "trace": trace}), schedule)


@pytest.mark.parametrize("mutant", ["late-truncate", "removed-leader-stays"])
def test_a_mutant_that_no_client_notices_is_seen_in_the_trace(mutant: str) -> None:
    run = rehearsed(mutant, 0, trace="on")
    assert set(run.failed_checks) == {"trace", "invariants"}
    assert rehearsed(NO_MUTANT, 0, trace="on", of=mutant).failed_checks == ()


def test_a_run_without_a_trace_has_no_such_check() -> None:
    assert rehearsed("late-truncate", 0, trace="off").failed_checks == ("invariants",)
