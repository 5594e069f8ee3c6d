"""Simpler forms of a known run: all candidates are valid, and the simplest that fails is found deterministically."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.exploration import simplifying
from harness.exploration.shrinking import shrink
from harness.exploration.simplifying import simpler_runs, simplest_that_fails
from harness.test import Test
from nemesis.schedule import HEAL, INJECT, FaultEvent, Schedule

TEST = Test(
    system="broker", cluster="sim", nodes=5, workload="log", nemesis=(), nemesis_interval_s=5.0, time_limit_s=7.0,
    concurrency=24, rate=300.0, seed=1,
)  # fmt: skip


def fault(
    fault_id: str, inject_s: float, heal_s: float | None, *, when: str | None = None, what: str = "partition=leader"
) -> list[FaultEvent]:
    nemesis, _, variant = what.partition("=")
    times = [(inject_s, INJECT, when)] + ([] if heal_s is None else [(heal_s, HEAL, None)])
    return [
        FaultEvent(at_s=at_s, action=action, fault_id=fault_id, nemesis=nemesis, variant=variant, when=when)
        for at_s, action, when in times
    ]


def schedule_of(*faults: list[FaultEvent]) -> Schedule:
    return Schedule(tuple(sorted(itertools.chain(*faults), key=lambda event: event.at_s)))


KNOWN = schedule_of(
    fault("a", 2.317, 4.061), fault("b", 2.5, 3.017, when="elected@n1+0.02"), fault("c", 4.061, None)
)  # fmt: skip

some_times = st.floats(0, 20).map(lambda seconds: round(seconds, 3))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    faults = []
    for number in range(draw(st.integers(0, 5))):
        first = draw(some_times)
        second = round(first + draw(st.sampled_from((0.0, 0.04, 0.3, 2.718))), 3)
        when = draw(st.sampled_from((None, "elected", "matched@n2", "storing+0.001")))
        faults.append(fault(f"f{number}", first, draw(st.sampled_from((second, None))), when=when))
    return schedule_of(*faults)


@settings(max_examples=300, deadline=None)
@given(schedule=schedules(), data=st.data())
def test_every_candidate_is_a_valid_part_of_the_known_run(schedule: Schedule, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simplifying, "KNOWN", 1)  # otherwise nearly all candidates would be the known run
        test, simpler = data.draw(simpler_runs(TEST, schedule))
    assert Schedule.from_json(simpler.to_json()) == simpler, "it is in order, and no fault is healed before it begins"
    known = {(event.fault_id, event.action): event for event in schedule}
    for event in simpler:
        origin = known[event.fault_id, event.action]
        assert (event.nemesis, event.variant) == (origin.nemesis, origin.variant)
        assert event.at_s <= origin.at_s + 0.5
        assert event.when is None or (origin.when or "").startswith(event.when)
    assert test.problems() == [] and test.seed == TEST.seed
    assert (test.nodes, test.concurrency) <= (TEST.nodes, TEST.concurrency)
    assert test.rate <= TEST.rate and test.time_limit_s <= TEST.time_limit_s


def test_if_everything_fails_the_smallest_run_without_faults_is_found() -> None:
    test, schedule = simplest_that_fails(TEST, KNOWN, lambda test, schedule: True, seed="1") or (TEST, KNOWN)
    assert (test.nodes, test.concurrency, test.rate, test.time_limit_s, len(schedule)) == (3, 1, 10.0, 1.0, 0)


def test_the_known_run_is_tried_and_kept_when_nothing_simpler_fails() -> None:
    found = simplest_that_fails(TEST, KNOWN, lambda *candidate: candidate == (TEST, KNOWN), seed="1")
    assert found == (TEST, KNOWN)


def test_faults_that_are_only_needed_together_are_kept() -> None:
    def fails(test: Test, schedule: Schedule) -> bool:
        """Needs b at its trigger, a for at least a second, and three clients."""
        b = [event for event in schedule if event.fault_id == "b"]
        a = [event.at_s for event in schedule if event.fault_id == "a"]
        lasts_s = (a[1] if len(a) > 1 else test.time_limit_s) - a[0] if a else 0.0
        return bool(b) and (b[0].when or "").startswith("elected@n1") and lasts_s >= 1 and test.concurrency >= 3

    test, schedule = simplest_that_fails(TEST, KNOWN, fails, seed="1") or (TEST, KNOWN)
    assert [(event.fault_id, event.action, event.when) for event in schedule] == [
        ("a", INJECT, None),
        ("b", INJECT, "elected@n1"),
    ]
    assert [event.at_s for event in schedule] == [0.0, 0.0], "rounded, and two seconds earlier"
    assert (test.nodes, test.concurrency, test.rate, test.time_limit_s) == (3, 3, 10.0, 1.0)


@pytest.mark.parametrize("needed", ["", "a", "b", "ac", "abc"])
@pytest.mark.parametrize(("clients", "seed"), [(1, "1"), (4, "2"), (24, "2")])
def test_the_same_answers_give_the_same_candidates_and_result(needed: str, clients: int, seed: str) -> None:
    asked: list[list[tuple[Test, Schedule]]] = [[], []]
    found = []
    for calls in asked:

        def fails(test: Test, schedule: Schedule, calls: list[tuple[Test, Schedule]] = calls) -> bool:
            calls.append((test, schedule))
            return set(needed) <= {event.fault_id for event in schedule} and test.concurrency >= clients

        found.append(simplest_that_fails(TEST, KNOWN, fails, seed=seed))
    assert found[0] == found[1] and asked[0] == asked[1]
    assert found[0] is not None and {event.fault_id for event in found[0][1]} == set(needed)
    assert all(event.action == INJECT for event in found[0][1])


def test_nothing_is_found_if_nothing_fails() -> None:
    assert simplest_that_fails(TEST, KNOWN, lambda test, schedule: False, seed="1") is None


def test_a_run_that_failed_is_found_even_if_no_later_one_fails() -> None:
    failed: list[tuple[Test, Schedule]] = []

    def fails(test: Test, schedule: Schedule) -> bool:
        if (test, schedule) in failed:
            return True
        if len(failed) == 3 or "b" not in {event.fault_id for event in schedule}:
            return False
        failed.append((test, schedule))
        return True

    assert simplest_that_fails(TEST, KNOWN, fails, seed="1") in failed


def test_an_error_ends_the_search_and_is_no_failure() -> None:
    calls = []

    def fails(test: Test, schedule: Schedule) -> bool:
        calls.append(schedule)
        raise RuntimeError("a worker was killed")

    with pytest.raises(RuntimeError, match="a worker was killed"):
        simplest_that_fails(TEST, KNOWN, fails, seed="1")
    assert len(calls) == 1


def test_a_search_leaves_no_files_behind(tmp_path: Path) -> None:
    code = (
        "import dataclasses, tempfile, harness.exploration.shrinking\n"
        "from harness.exploration.simplifying import simplest_that_fails\n"
        "from tests.harness.exploration import test_simplifying as t\n"
        "print(simplest_that_fails(t.TEST, t.KNOWN, lambda test, schedule: len(schedule) > 2, seed='1') is not None)\n"
    )
    root = str(Path(__file__).parents[3])
    (tmp_path / "tmp").mkdir()
    (tmp_path / "here").mkdir()
    environment = {**os.environ, "PYTHONPATH": root, "TMPDIR": str(tmp_path / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "here", env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "True"
    assert [*(tmp_path / "here").iterdir(), *(tmp_path / "tmp").iterdir()] == []


@pytest.mark.long
def test_needless_heals_are_dropped_and_times_are_rounded() -> None:
    """If members forget their votes, one kill of all suffices, at any time and of any length."""
    test = Test(
        system="broker", cluster="sim", nodes=3, workload="log", nemesis=(), nemesis_interval_s=5.0, time_limit_s=5.0,
        concurrency=4, rate=50.0, seed=0, settings={"mutant": "vote-not-persisted"},
    )  # fmt: skip
    schedule = schedule_of(
        fault("f1", 1.234, 1.517, what="kill=sigkill@all"), fault("f2", 1.7, 2.6, what="pause=sigstop@one")
    )
    found = [shrink(test, schedule, jobs=jobs, budget_s=120, say=lambda line: None) for jobs in (1, 2)]
    assert [(event.fault_id, event.action) for event in found[0].schedule] == [("f1", INJECT)]
    assert found[0].schedule.events[0].at_s in (0.0, 1.0) and found[0].is_minimal
    assert found[0].test.concurrency == 1 and found[0].test.time_limit_s <= 2
    assert (found[0].test, found[0].schedule) == (found[1].test, found[1].schedule)
