"""The behaviour of a run as facts: what distinguishes them, and that recording them does not change the run."""

from __future__ import annotations

import dataclasses
import random

import pytest

from harness.clusters.sim import steps
from harness.clusters.sim.steps import Step
from harness.exploration.behaviour import FACT_BITS, facts_of
from harness.exploration.rehearsal import rehearse_test
from harness.test import Test
from nemesis.schedule import Schedule

VIEW = (("follower", 0, True), ("follower", 1, True), ("leader", 0, True))


def step(at_s: float, host: str = "n1", kind: str = "voted", role: str = "follower", **changes: object) -> Step:
    values = {"uncommitted": 0, "is_unsynced": False, "view": VIEW, **changes}
    return Step(at_s=at_s, kind=kind, host=host, role=role, **values)  # type: ignore[arg-type]


def numbers(steps: list[Step], faults: list[dict[str, object]] | None = None) -> set[int]:
    return {fact for fact, _ in facts_of(steps, faults or [], zero_s=0.0)}


def test_facts_ignore_the_names_of_members_but_not_their_identity() -> None:
    one = [step(1.0, "n1"), step(1.2, "n2", "elected", "leader"), step(1.3, "n1", "matched")]
    renamed = [step._replace(host={"n1": "n3", "n2": "n1"}[step.host]) for step in one]
    assert numbers(one) == numbers(renamed)
    others = [one[0], one[1], one[2]._replace(host="n3")]
    assert numbers(one) != numbers(others)


def test_each_part_of_a_fact_tells_runs_apart() -> None:
    base = [step(1.0), step(1.0005, "n2")]
    assert numbers(base) == numbers([step(5.0), step(5.0005, "n2")]), "when it happened does not count"
    for other in (
        [step(1.0), step(1.5, "n2")],
        [step(1.0), step(1.0005, "n2", uncommitted=2)],
        [step(1.0), step(1.0005, "n2", is_unsynced=True)],
        [step(1.0), step(1.0005, "n2", view=VIEW[1:])],
        [step(1.0), step(1.0005, "n2", "promoted")],
    ):
        assert numbers(base) != numbers(other)


def test_faults_are_part_of_facts_while_they_are_in_force() -> None:
    fault = {"nemesis": "kill", "start_ns": 2_000_000_000, "end_ns": 3_000_000_000}
    for at_s, counts in ((1.9, False), (2.1, True), (2.9, True), (3.1, False)):
        assert (numbers([step(at_s)], [fault]) != numbers([step(at_s)])) == counts, at_s
    unhealed = {**fault, "end_ns": None}
    assert numbers([step(9.0)], [unhealed]) != numbers([step(9.0)])


def test_a_fact_has_the_moment_at_which_it_first_held() -> None:
    facts = facts_of([step(11.0), step(12.0), step(12.5)], [], zero_s=10.0)
    assert [at_s for _, at_s in facts] == sorted(at_s for _, at_s in facts)
    assert facts[0][1] == 1.0 and len({fact for fact, _ in facts}) == len(facts)


def test_the_numbers_of_facts_are_bounded() -> None:
    rng = random.Random(1)
    kinds = [f"kind {number}" for number in range(50)]
    steps = [step(float(at_s), rng.choice(("n1", "n2", "n3")), rng.choice(kinds)) for at_s in range(500)]
    assert all(0 <= fact < 1 << FACT_BITS for fact in numbers(steps)) and len(numbers(steps)) > 500


def test_recording_facts_does_not_change_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    test = Test(
        system="broker", cluster="sim", nodes=3, workload="log", nemesis=(), nemesis_interval_s=5.0, time_limit_s=4.0,
        concurrency=3, rate=50.0, seed=1, settings={},
    )  # fmt: skip
    events = [{"at_s": at_s, "action": action, "id": "f1", "nemesis": "kill", "variant": "sigkill@leader"}
              for at_s, action in ((1.0, "inject"), (2.0, "heal"))]  # fmt: skip
    schedule = Schedule.from_json(events)
    without, seen = rehearse_test(test, schedule), rehearse_test(test, schedule, with_facts=True)
    assert without.facts == () and len(seen.facts) > 20
    same = dataclasses.replace(seen, facts=(), took_s=without.took_s)
    assert same == without
    monkeypatch.setattr(steps, "MAX_STEPS", 5)
    bounded = rehearse_test(test, schedule, with_facts=True)
    assert 0 < len(bounded.facts) <= 4 * 5
