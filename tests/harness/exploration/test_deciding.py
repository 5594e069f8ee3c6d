"""When a violation was decided: the search on made-up curves, and on runs whose deciding step is known."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import OperatorError
from harness.execution import Parts, perform
from harness.exploration.continuations import INVARIANTS, Course, Fate, Intervention, Passage, Symptom, follow
from harness.exploration.deciding import (
    FEWEST_FIRST,
    FIRST_SHARE,
    MIN_WIDTH_S,
    MOST,
    NOISE,
    PARTS,
    Deciding,
    Point,
    Search,
    Violation,
    best_jump,
    coarse_moments,
    decide,
    next_moments,
    violations_of,
)
from harness.exploration.mutants import SCENARIOS
from harness.exploration.rehearsal import parts_of
from harness.exploration.symptoms import STUCK
from harness.report import OutputConsole
from harness.store import RunDir, Store

NONE, HEAL, END_LOAD = Intervention
ZERO_S = 1000.1
LOST = {"valid": False, "reason": "message 3 is lost"}
VIOLATION = Violation(check=INVARIANTS, rule="votes", text="votes: n1 voted twice", at_s=8.0)


def quiet(_: str) -> None:
    """Discards the message."""


def made_up(chance: Callable[[float, Intervention], float], asked: list[int]) -> Callable[[Parts, Passage], Course]:
    """Passages whose continuations fail with that chance; `asked` gets the number of moments of each passage."""

    def passed(_: Parts, passage: Passage) -> Course:
        asked.append(len(passage.branches))
        course = Course(zero_s=ZERO_S, end_s=9.0, fails=True)
        for number, branch in enumerate(passage.branches):
            for seed in branch.seeds:
                drawn = random.Random(f"{branch.at_s}/{seed}").random()
                fails = drawn < chance(branch.at_s, branch.intervention)
                course.fates.append(Fate(branch=number, seed=seed, fails=fails))
        return course

    return passed


def searched(
    chance: Callable[[float, Intervention], float],
    *,
    points: int = 40,
    runs: int = 30,
    seed: int = 1,
    violation: Violation = VIOLATION,
) -> tuple[Deciding, int]:
    """The result, and how many moments were examined."""
    asked: list[int] = []
    search = Search(seed=seed, points=points, runs=runs, jobs=1, say=quiet, perform=made_up(chance, asked))
    parts = parts_of(*SCENARIOS["no-step-down"].run_of("no-step-down", 1))
    found = decide(parts, [violation], Path("none"), search)
    return found, len(found.points)


def stepped(step_s: float, *, before: float, after: float) -> Deciding:
    """The result if these shares fail before a moment, and from it on."""
    return searched(lambda at_s, _: after if at_s >= step_s else before)[0]


@settings(max_examples=60, deadline=None)
@given(step_s=st.floats(0.1, 7.9), width_s=st.floats(0.0, 2.0), runs=st.integers(2, 40))
def test_moments_whose_continuations_agree_get_no_more_of_them(step_s: float, width_s: float, runs: int) -> None:
    def rising(at_s: float, _: Intervention) -> float:
        return min(1.0, max(0.0, (at_s - step_s) / width_s if width_s else float(at_s >= step_s)))

    found, _ = searched(rising, runs=runs)
    first = max(-(-runs // FIRST_SHARE), min(FEWEST_FIRST, runs))
    ends = [] if found.jump is None else [found.jump.before, found.jump.after]
    for point in found.points:
        assert point.runs <= first or point.runs == runs
        assert point.runs == runs or point not in ends
    firsts = coarse_moments(found.begin_s, found.end_s, load_s=None)
    for intervention in Intervention:
        for one, other in pairwise(found.curve(intervention)):
            for point in (one, other) if other.share - one.share > NOISE else ():
                assert point.runs == runs or point.fails in (0, point.runs) or point.at_s in firsts


def test_flat_parts_of_a_curve_get_few_continuations() -> None:
    """A third fail even before the step: at nearly every moment some fail and some do not."""
    rng = random.Random(11)
    performed = 0
    for _ in range(20):
        step_s = rng.uniform(0.5, 7.5)
        performed += sum(point.runs for point in stepped(step_s, before=0.3, after=1.0).points)
    assert performed <= 20 * 480, "it would be 507 each if all moments had all of theirs, of six parts 680"


@settings(max_examples=100, deadline=None)
@given(step_s=st.floats(0.001, 7.9))
def test_a_step_is_found_to_within_a_few_minimum_widths(step_s: float) -> None:
    found, points = searched(lambda at_s, intervention: float(intervention is NONE and at_s >= step_s))
    assert found.jump is not None
    assert found.jump.before.intervention is NONE
    assert found.jump.before.at_s < step_s <= found.jump.after.at_s
    assert found.jump.after.at_s - found.jump.before.at_s < 20 * MIN_WIDTH_S
    assert points <= 40
    assert found.jump.before.runs == found.jump.after.runs == 30, "the ends of the jump have all their continuations"


@settings(max_examples=100, deadline=None)
@given(step_s=st.floats(0.001, 7.9))
def test_a_violation_that_shows_only_at_the_end_is_found_by_bisection(step_s: float) -> None:
    """Each continuation is performed to the end, and six cuts at a time would take more than 400 of them."""
    at_the_end = dataclasses.replace(VIOLATION, at_s=None)
    found, points = searched(
        lambda at_s, intervention: float(intervention is NONE and at_s >= step_s), violation=at_the_end
    )
    assert found.jump is not None
    assert found.jump.before.at_s < step_s <= found.jump.after.at_s
    assert found.jump.after.at_s - found.jump.before.at_s < 4 * MIN_WIDTH_S
    assert points <= 24 and sum(point.runs for point in found.points) <= 200


@pytest.mark.parametrize(("lucky", "confirming"), [(0.0, 10), (0.2, 30)])
def test_a_jump_is_confirmed_by_other_seeds_and_by_all_of_them_if_it_is_unclear(lucky: float, confirming: int) -> None:
    seen: list[tuple[float, int | None]] = []
    perform = made_up(lambda at_s, _: 1.0 - lucky if at_s >= 3.0 else lucky, [])

    def noted(parts: Parts, passage: Passage) -> Course:
        seen.extend((branch.at_s, seed) for branch in passage.branches for seed in branch.seeds)
        return perform(parts, passage)

    search = Search(seed=1, points=40, runs=30, jobs=1, say=quiet, perform=noted)
    parts = parts_of(*SCENARIOS["no-step-down"].run_of("no-step-down", 1))
    jump = decide(parts, [VIOLATION], Path("none"), search).jump
    assert jump is not None
    for end in (jump.before, jump.after):
        assert len({seed for at_s, seed in seen if at_s == end.at_s}) == end.runs + confirming


def test_a_step_among_noise_is_usually_found() -> None:
    """One in ten fails before it, and one in ten does not fail after it."""
    rng = random.Random(7)
    near = 0
    for _ in range(40):
        step_s = rng.uniform(0.1, 7.9)
        found = stepped(step_s, before=0.1, after=0.9)
        near += found.jump is not None and abs(found.jump.after.at_s - step_s) < 0.05
    assert near >= 36


def test_a_jump_found_in_noise_has_all_continuations_and_is_sure() -> None:
    """Half of all fail, wherever they fork: a few runs of two moments may differ by much, all runs of them do not."""
    for runs in range(6, 40):
        found, points = searched(lambda at_s, intervention: 0.5, runs=runs)
        assert points <= 40
        if found.jump is not None:
            assert found.jump.before.runs == found.jump.after.runs == runs
            assert found.jump.is_sure


def test_the_steepest_rise_in_noise_is_rarely_taken_for_a_step() -> None:
    """With five continuations each, of which half fail, some two of forty moments differ by four."""
    found = [searched(lambda at_s, intervention: 0.5, runs=5, seed=seed)[0].jump for seed in range(60)]
    assert sum(jump is not None for jump in found) <= 6


@settings(max_examples=50, deadline=None)
@given(step_s=st.floats(0.0, 7.9))
def test_if_the_faults_decide_the_step_is_found_on_the_healed_curve(step_s: float) -> None:
    found, points = searched(lambda at_s, intervention: 1.0 if intervention is NONE or at_s >= step_s else 0.0)
    assert found.jump is not None
    assert found.jump.before.intervention is HEAL
    assert found.jump.before.at_s < step_s <= found.jump.after.at_s
    assert points <= 40


def test_a_curve_that_begins_high_gets_no_more_moments() -> None:
    found, _ = searched(lambda at_s, intervention: 1.0 if intervention is NONE or at_s >= 5.0 else 0.0, points=18)
    assert len(found.curve(NONE)) == 1
    assert found.jump is not None
    assert found.jump.before.at_s < 5.0 <= found.jump.after.at_s
    assert not found.is_cut_short


def test_a_rise_before_the_load_is_named_only_if_there_is_no_other() -> None:
    """With the faults, the leader at the start of the load decides; without them it is decided later, or never."""

    def share(at_s: float, intervention: Intervention, *, step_s: float) -> float:
        return float(at_s >= (-0.05 if intervention is NONE else step_s))

    found, points = searched(lambda at_s, intervention: share(at_s, intervention, step_s=6.4))
    assert found.jump is not None and points <= 40
    assert found.jump.before.intervention is HEAL
    assert found.jump.before.at_s < 6.4 <= found.jump.after.at_s
    assert len(found.curve(NONE)) == 2, "no more moments than needed to know it"

    found, points = searched(lambda at_s, intervention: share(at_s, intervention, step_s=9.0))
    assert found.jump is not None and points <= 40
    assert found.jump.before.intervention is NONE
    assert found.jump.before.at_s < -0.05 <= found.jump.after.at_s


@pytest.mark.parametrize("step_s", [2.6, 5.0, 7.3])
def test_the_healed_curve_is_examined_first_if_many_runs_fail_from_the_start(step_s: float) -> None:
    """With the planned faults there are three steps, none of which is most of the rise."""

    def share(at_s: float, intervention: Intervention) -> float:
        return (
            float(at_s >= step_s)
            if intervention is not NONE
            else 0.35 + 0.2 * sum(at_s >= at for at in (1.5, 3.5, 6.5))
        )

    found, points = searched(share)
    assert found.jump is not None and points <= 40
    assert found.jump.before.intervention is HEAL
    assert found.jump.before.at_s < step_s <= found.jump.after.at_s
    assert len(found.curve(NONE)) <= 2, "no more moments than needed to know it"


def test_a_search_with_too_few_moments_is_distinguished_from_one_without_a_jump() -> None:
    few, points = searched(lambda at_s, intervention: 1.0 if intervention is NONE or at_s >= 5.0 else 0.0, points=2)
    assert (points, few.jump, few.is_cut_short) == (2, None, True)
    assert few.to_json()["is_cut_short"] is True
    none, points = searched(lambda at_s, intervention: 0.5, points=60)
    assert (none.jump, none.is_cut_short) == (None, False)


def never(_: Parts, passage: Passage) -> Course:
    """Performs the run itself; the first moment is interrupted."""
    if passage.branches:
        raise KeyboardInterrupt
    return Course(zero_s=ZERO_S, end_s=9.0, fails=True)


@pytest.mark.parametrize("passages", range(2, 7))
def test_an_interrupted_search_returns_the_moments_that_it_has_examined(passages: int) -> None:
    asked: list[int] = []
    whole = made_up(lambda at_s, _: float(at_s >= 3.0), asked)

    def some(given: Parts, passage: Passage) -> Course:
        if len(asked) == passages:
            raise KeyboardInterrupt
        return whole(given, passage)

    parts = parts_of(*SCENARIOS["no-step-down"].run_of("no-step-down", 1))
    search = Search(seed=1, points=40, runs=30, jobs=1, say=quiet, perform=some)
    found = decide(parts, [VIOLATION], Path("none"), search)
    assert found.is_interrupted and found.jump is None and not found.is_cut_short
    assert len(found.points) == sum(asked)
    assert all(point.runs for point in found.points)


def test_a_search_interrupted_before_its_first_moment_raises() -> None:
    parts = parts_of(*SCENARIOS["no-step-down"].run_of("no-step-down", 1))
    search = Search(seed=1, points=40, runs=30, jobs=1, say=quiet, perform=never)
    with pytest.raises(KeyboardInterrupt):
        decide(parts, [VIOLATION], Path("none"), search)


@pytest.mark.parametrize("points", [1, 2, 10, 40])
def test_other_violations_are_not_examined_if_one_takes_all_moments(points: int) -> None:
    said: list[str] = []
    search = Search(
        seed=1, points=points, runs=30, jobs=1, say=said.append,
        perform=made_up(lambda at_s, _: random.Random(at_s).choice((0.1, 0.45)), []),
    )  # fmt: skip
    other = dataclasses.replace(VIOLATION, rule="election", text="election: term 2 has two leaders")
    parts = parts_of(*SCENARIOS["no-step-down"].run_of("no-step-down", 1))
    found = decide(parts, [VIOLATION, other], Path("none"), search)
    assert found.jump is None
    assert found.violation is VIOLATION
    assert (len(found.points), found.is_cut_short) == (points, True)
    assert said[-1] == "1 other violation not examined: no moments are left, raise --points"


def test_the_healed_curve_gets_moments_if_the_first_curve_is_doubtful() -> None:
    """Most fail with the faults, all once it is decided; the step is clear only where the faults are healed."""
    found, points = searched(
        lambda at_s, intervention: 1.0 if at_s >= 5.0 else 0.7 if intervention is NONE else 0.0, points=34, runs=30
    )
    assert points <= 34
    assert found.jump is not None
    assert found.jump.before.at_s < 5.0 <= found.jump.after.at_s


@pytest.mark.parametrize("step_s", [2.6, 5.0, 7.3])
def test_the_first_curve_gets_the_remaining_moments_if_it_has_the_step_after_all(step_s: float) -> None:
    """Some fail even before it, a fifth at the start and more later, so that the rise is doubtful at first."""

    def share(at_s: float, intervention: Intervention) -> float:
        return 1.0 if at_s >= step_s else 0.0 if intervention is not NONE else 0.3 if at_s > 0.0 else 0.2

    found, points = searched(share)
    assert found.jump is not None and points <= 40
    assert found.jump.before.intervention is NONE
    assert found.jump.before.at_s < step_s <= found.jump.after.at_s
    assert found.jump.after.at_s - found.jump.before.at_s < 0.05


def test_a_violation_preventable_until_it_shows_is_decided_when_it_shows() -> None:
    """Healing the faults at the violation's own moment still prevents it."""
    seen_s = VIOLATION.at_s
    assert seen_s is not None
    found, points = searched(lambda at_s, intervention: 0.5 if intervention is NONE else float(at_s > seen_s))
    assert found.jump is not None
    assert found.jump.before.intervention is HEAL
    assert seen_s - 2 * MIN_WIDTH_S < found.jump.before.at_s <= seen_s < found.jump.after.at_s
    assert found.jump.before.runs == found.jump.after.runs == 30
    assert points <= 40


def test_a_run_that_fails_without_faults_and_load_has_no_deciding_moment_and_costs_two_points() -> None:
    found, points = searched(lambda at_s, intervention: 1.0)
    assert found.jump is None
    assert points == 2


@settings(max_examples=30, deadline=None)
@given(step_s=st.floats(0.001, 7.9))
def test_a_run_that_always_fails_under_load_is_decided_when_the_load_has_gone_on_too_long(step_s: float) -> None:
    found, points = searched(lambda at_s, intervention: float(intervention is not END_LOAD or at_s >= step_s))
    assert found.jump is not None
    assert found.jump.before.intervention is END_LOAD
    assert found.jump.before.at_s < step_s <= found.jump.after.at_s
    assert found.jump.after.at_s - found.jump.before.at_s < 20 * MIN_WIDTH_S
    assert found.jump.before.runs == found.jump.after.runs == 30
    assert len(found.curve(HEAL)) == 1 and not found.curve(NONE), "no more moments than needed to know it"
    assert points <= 40


def test_the_load_is_ended_last_if_the_other_curves_have_no_rise() -> None:
    found, _ = searched(lambda at_s, intervention: 0.6 if intervention is not END_LOAD else float(at_s >= 3.3))
    assert found.jump is not None
    assert found.jump.before.intervention is END_LOAD
    assert found.jump.before.at_s < 3.3 <= found.jump.after.at_s


def test_a_curve_that_rises_slowly_has_no_short_jump() -> None:
    found, points = searched(lambda at_s, intervention: min(1.0, max(0.0, at_s / 8)) if intervention is NONE else 0.5)
    assert found.jump is not None
    assert found.jump.after.at_s - found.jump.before.at_s > 3, "the jump is as wide as the rise"
    slow, _ = searched(lambda at_s, intervention: 0.5)
    assert slow.jump is None
    assert points <= 40


@given(
    shares=st.lists(st.integers(0, 10), min_size=2, max_size=12),
    gaps=st.lists(st.floats(0.0001, 3.0), min_size=12, max_size=12),
    most=st.integers(0, 12),
)
def test_the_next_moments_are_new_and_lie_in_rises(shares: list[int], gaps: list[float], most: int) -> None:
    at_s = 0.0
    curve = []
    for fails, gap_s in zip(shares, gaps, strict=False):
        at_s += gap_s
        curve.append(Point(at_s=at_s, intervention=NONE, fails=fails, holds=10 - fails))
    moments = next_moments(curve, most)
    assert len(moments) <= most
    assert len(set(moments)) == len(moments)
    for moment_s in moments:
        place = max(number for number, point in enumerate(curve) if point.at_s <= moment_s)
        assert curve[place].at_s <= moment_s <= curve[place + 1].at_s
        assert curve[place + 1].share > curve[place].share


def test_the_best_jump_is_the_shortest_with_most_of_the_rise() -> None:
    rng = random.Random(5)
    for _ in range(200):
        curve = [Point(at_s=n * n * 0.1, intervention=NONE, fails=rng.randrange(11), holds=4) for n in range(8)]
        jump = best_jump(curve)
        assert jump is not None
        rises = {
            (one.at_s, other.at_s): other.share - one.share for one in curve for other in curve if one.at_s < other.at_s
        }
        assert jump.rise >= MOST * max(rises.values())
        width_s = jump.after.at_s - jump.before.at_s
        assert all(rise < MOST * max(rises.values()) for (a, b), rise in rises.items() if b - a < width_s - 1e-9)
    assert best_jump(curve[:1]) is None


def test_the_first_moments_include_both_ends() -> None:
    for load_s in (None, 6.0, 8.0, 9.0):
        moments = coarse_moments(-0.1, 8.0, load_s=load_s)
        assert (moments[0], moments[1], moments[-1]) == (-0.1, 0.0, 8.0)
    assert PARTS >= 2


def test_a_violation_that_shows_only_at_the_end_is_first_looked_for_in_the_load() -> None:
    moments = coarse_moments(-0.1, 80.0, load_s=6.0)
    assert [at_s for at_s in moments if 0 <= at_s <= 6] == [number * 1.5 for number in range(5)]
    assert moments[-2:] == [6.0, 80.0]


def test_undecided_continuations_count_for_nothing() -> None:
    point = Point(at_s=1.0, intervention=NONE)
    for fails in (True, None, False, None, True):
        point.add(Fate(branch=0, seed=1, fails=fails))
    assert (point.runs, point.undecided, round(point.share, 3)) == (3, 2, 0.667)
    assert Point(at_s=0.0, intervention=NONE).share == 0.0


def performed(name: str, directory: Path, **changes: object) -> tuple[Parts, RunDir, dict[str, object]]:
    """A stored run of a mutant's scenario."""
    scenario = dataclasses.replace(SCENARIOS[name], rounds=1, **changes)  # type: ignore[arg-type]
    parts = parts_of(*scenario.run_of(name, 1))
    with open("/dev/null", "w", encoding="utf-8") as nowhere:
        run_dir, results = perform(parts, Store(directory), OutputConsole(file=nowhere, quiet=True))
    return parts, run_dir, results


@pytest.mark.long
def test_the_step_that_a_mutant_breaks_is_found(tmp_path: Path) -> None:
    """The leader is removed at 1 to 1.3 s and goes on leading: its removal decides the violation."""
    parts, run_dir, results = performed("removed-leader-stays", tmp_path)
    violations = violations_of(parts, results, run_dir.history_path)
    assert violations[0].rule == "membership"
    at_s = violations[0].at_s
    assert at_s is not None
    found = [
        decide(
            parts, violations[:1], run_dir.history_path,
            Search(seed=3, points=points, runs=runs, jobs=jobs, say=quiet),
        ).to_json()
        for points, runs, jobs in ((24, 5, 2), (5, 2, 2), (5, 2, 1))
    ]  # fmt: skip
    assert found[1] == found[2], "the same, whatever the number of jobs"
    jump = found[0]["jump"]
    assert jump is not None
    assert abs(jump["before_s"] - at_s) <= 1.0
    assert abs(jump["after_s"] - at_s) <= 1.0
    assert 0 < len(found[0]["account"]) <= 12
    ends = [point for point in found[0]["points"] if point["at_s"] == found[0]["end_s"]]
    assert all(point["holds"] == 0 for point in ends), "at the end all fail"
    begin = [
        point
        for point in found[0]["points"]
        if point["at_s"] == found[0]["begin_s"] and point["intervention"] == "heal"
    ]
    assert [point["fails"] for point in begin] == [0], "without any fault none fails"


@pytest.mark.long
def test_a_loss_that_needs_no_fault_is_decided_by_an_operation_which_is_named(tmp_path: Path) -> None:
    """POP consumers are given messages that no checkpoint records: one that does not acknowledge loses them."""
    parts, run_dir, results = performed("pop-without-checkpoint", tmp_path, round_s=1.6, nodes=1)
    (violation,) = violations_of(parts, results, run_dir.history_path)
    assert violation.check == "total-queue"
    search = Search(seed=3, points=20, runs=3, jobs=2, say=quiet)
    found = decide(parts, [violation], run_dir.history_path, search)
    assert found.jump is not None and found.jump.before.intervention is END_LOAD
    assert (found.jump.before.fails, found.jump.after.holds) == (0, 0)
    invoked = [one.at_s for one in found.account if one.kind == "invocation"]
    assert any(found.jump.before.at_s <= at_s <= found.jump.after.at_s for at_s in invoked), found.account


def test_an_error_says_why_a_run_cannot_be_explained(tmp_path: Path) -> None:
    parts, run_dir, results = performed("no-step-down", tmp_path)
    violations = violations_of(parts, results, run_dir.history_path)
    search = Search(seed=1, points=4, runs=2, jobs=1, say=quiet)
    with pytest.raises(OperatorError, match="not invalid"):
        violations_of(parts, {**results, "valid": True}, run_dir.history_path)
    with pytest.raises(OperatorError, match="not invalid and its replicas are not stuck"):
        violations_of(parts, {"valid": "unknown", "checks": {}}, run_dir.history_path)
    with pytest.raises(OperatorError, match="none of its checks"):
        violations_of(parts, {"valid": False, "checks": {}}, run_dir.history_path)
    other = tmp_path / "other.jsonl"
    other.write_text("{}\n")
    with pytest.raises(OperatorError, match=r"does not reproduce the run: event 1 .* harness run"):
        decide(parts, violations, other, search)
    never = dataclasses.replace(violations[0], rule="completeness", text="said by nobody")
    with pytest.raises(OperatorError, match="does not occur when the run is repeated: said by nobody"):
        decide(parts, [never], run_dir.history_path, search)
    assert follow(parts, Passage(symptom=violations[0].symptom)).fails is True


def test_replicas_that_are_stuck_are_explained_although_the_verdict_is_unknown(tmp_path: Path) -> None:
    """The master sent what it had not synced; after the cut the slaves have more than it, and wait for an operator."""
    parts, run_dir, results = performed("ha-send-before-sync", tmp_path)
    assert results["valid"] == "unknown"
    (violation,) = violations_of(parts, results, run_dir.history_path)
    assert violation.check == STUCK
    assert "n2 does not follow" in violation.text
    assert follow(parts, Passage(symptom=violation.symptom, history_path=run_dir.history_path)).fails is True
    (_, *invalid) = violations_of(
        parts, {**results, "valid": False, "checks": {**results["checks"], "log": LOST}}, run_dir.history_path
    )
    assert invalid == [violation], "it comes last, as the least specific one"


@pytest.mark.parametrize(
    ("replicas", "fails"), [({"valid": "unknown", "reason": "n2 is away"}, True), ({"valid": True}, False), ({}, False)]
)
def test_a_continuation_is_stuck_if_its_replicas_cannot_be_compared(replicas: dict[str, object], fails: bool) -> None:
    assert Symptom(check=STUCK).is_in({"checks": {"replicas": replicas}}) is fails
