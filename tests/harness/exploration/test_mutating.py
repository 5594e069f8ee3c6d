"""Mutated schedules obey the rules of drawn mixes, whatever operators were applied."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.exploration.mixes import QUIET_END_S, QUIET_START_S, Timed, fits_beside, random_mix
from harness.exploration.mutating import OPERATORS, Ground, Idea, assemble, faults_of_schedule, mutate
from nemesis.schedule import HEAL, INJECT, Schedule

CHOICES = [
    ("partition", ["halves", "leader", "one"]), ("kill", ["sigkill@one", "sigkill@leader", "crash-loop@one"]),
    ("pause", ["sigstop@one"]), ("clock", ["bump@leader"]), ("transfer", ["to@followers"]),
    ("restart", ["rolling@all"]),
]  # fmt: skip

NAMES = st.lists(st.sampled_from(sorted(OPERATORS)), min_size=1, max_size=4)


def drawn(seed: int, limit_s: float, nodes: int) -> Schedule:
    return random_mix(CHOICES, random.Random(seed), time_limit_s=limit_s, nodes=nodes)


def idea_of(seed: int, ground: Ground, from_s: float) -> Idea:
    rng = random.Random(seed)
    return Idea(
        rng=rng, ground=ground, from_s=from_s, moments_s=[from_s + 0.1 * step for step in range(seed % 3)],
        kind=lambda rng: rng.randrange(len(CHOICES)),
        other=faults_of_schedule(drawn(seed + 1, ground.time_limit_s, ground.nodes)),
        fresh=faults_of_schedule(drawn(seed + 2, ground.time_limit_s, ground.nodes)),
    )  # fmt: skip


def timed() -> st.SearchStrategy[Timed]:
    """Faults that end about as long before others begin as a proof takes, at or between whole milliseconds."""
    begins = st.floats(1.0, 1.002) | st.floats(2.0, 2.002)
    lengths = st.floats(0.4985, 0.5015) | st.floats(0.05, 1.0)
    kinds = st.sampled_from([(nemesis, variant) for nemesis, variants in CHOICES for variant in variants])
    return st.builds(lambda at_s, length_s, kind: (at_s, at_s + length_s, *kind, None), begins, lengths, kinds)


@settings(max_examples=1000, deadline=None)
@given(one=timed(), two=timed())
@example(one=(7.738, 7.9609, "restart", "rolling@all", None), two=(8.461, 9.701, "kill", "sigkill@leader", None))
def test_rounding_times_does_not_change_whether_two_faults_fit(one: Timed, two: Timed) -> None:
    written = [(round(begin_s, 3), round(heal_s, 3), *kind) for begin_s, heal_s, *kind in (one, two)]
    assert fits_beside([one], two, 5, elects=True) == fits_beside(written[:1], written[1], 5, elects=True)  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**40), limit_s=st.floats(5.0, 30.0), nodes=st.sampled_from((3, 5)), names=NAMES,
    from_ratio=st.floats(0.0, 1.0),
)  # fmt: skip
@example(seed=206423334, limit_s=16.40625, nodes=3, names=["wait", "add"], from_ratio=0.203125)
def test_a_mutated_schedule_is_valid_within_bounds_and_healed(
    seed: int, limit_s: float, nodes: int, names: list[str], from_ratio: float
) -> None:
    ground = Ground(choices=CHOICES, time_limit_s=limit_s, nodes=nodes, elects=True)
    before = drawn(seed, limit_s, nodes)
    from_s = round(QUIET_START_S + from_ratio * (limit_s - QUIET_END_S - 0.5 - QUIET_START_S), 1)
    after = mutate(before, idea_of(seed, ground, from_s), names)
    assert Schedule.from_json(after.to_json(), known=dict(CHOICES)) == after
    assert all(one.at_s <= two.at_s for one, two in pairwise(after))
    begun = {event.fault_id: event.at_s for event in after if event.action == INJECT}
    healed = {event.fault_id: event.at_s for event in after if event.action == HEAL}
    assert begun.keys() == healed.keys()
    bound_s = limit_s - QUIET_END_S + 0.001
    assert all(QUIET_START_S <= begun[fault] < healed[fault] <= bound_s for fault in begun)
    for place, fault in enumerate(faults := faults_of_schedule(after)):
        others = [*faults[:place], *faults[place + 1 :]]
        assert fits_beside(others, fault, nodes, elects=True), f"{fault} among {others}"
    assert after == mutate(before, idea_of(seed, ground, from_s), names), "the seed determines it"


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**40), names=NAMES, from_s=st.floats(2.0, 12.0))
def test_faults_that_begin_before_the_mutated_part_are_kept(seed: int, names: list[str], from_s: float) -> None:
    ground = Ground(choices=CHOICES, time_limit_s=15.0, nodes=5, elects=True)
    before = drawn(seed, 15.0, 5)
    after = mutate(before, idea_of(seed, ground, round(from_s, 1)), names)
    first = [event for event in before if event.action == INJECT and event.at_s < round(from_s, 1)]
    assert [event for event in after if event.action == INJECT and event.at_s < round(from_s, 1)] == first
    kept = {event.fault_id for event in first}
    heals = [{e.fault_id: e.at_s for e in each if e.action == HEAL and e.fault_id in kept} for each in (before, after)]
    assert heals[0] == heals[1]


def test_each_operator_changes_something() -> None:
    ground = Ground(choices=CHOICES, time_limit_s=15.0, nodes=5, elects=True)
    for name in OPERATORS:
        changed = [
            mutate(drawn(seed, 15.0, 5), idea_of(seed, ground, QUIET_START_S), [name]) != drawn(seed, 15.0, 5)
            for seed in range(40)
        ]
        assert sum(changed) > 5, name  # three kinds of faults here have no second variant


def test_a_fault_that_finds_no_room_is_left_out() -> None:
    ground = Ground(choices=CHOICES, time_limit_s=15.0, nodes=3, elects=True)
    kill = (2.0, 6.0, "kill", "sigkill@one", None)
    schedule = assemble(
        [kill], [(3.0, 4.0, "clock", "bump@leader", None), (8.0, 99.0, "pause", "sigstop@one", None)], ground
    )
    assert [(event.at_s, event.nemesis) for event in schedule] == [
        (2.0, "kill"), (6.0, "kill"), (8.0, "pause"), (13.0, "pause")
    ]  # fmt: skip
