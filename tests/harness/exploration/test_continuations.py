"""Continuations of a simulated run: the run itself up to the fork, and another one from there on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from checker.faults import NEMESIS
from harness.errors import HarnessError
from harness.execution import Parts
from harness.exploration import continuations
from harness.exploration.continuations import INVARIANTS, ONLINE, Branch, Course, Intervention, Passage, Symptom, follow
from harness.exploration.mutants import SCENARIOS
from harness.exploration.rehearsal import parts_of
from harness.recovery import RECOVERS
from nemesis.schedule import Schedule

NOTHING = Symptom(check=INVARIANTS, rule="a rule that nothing breaks", until_s=2.5)
"""It never shows, so that continuations run to the end of their time."""

EVERYTHING_S = (-1000.0, 1000.0)


def parts() -> Parts:
    """A run in which a leader is cut off at about 1.2 s."""
    return parts_of(*SCENARIOS["stale-leader-reads"].run_of("stale-leader-reads", 1))


class Kept:
    """What a passage and its continuations have recorded: the history, and what the cluster and its network did."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def of(self, branch: int | None = None, seed: int | None = None) -> tuple[str, list[str]]:
        """History and actions; those of the run itself without a branch."""
        name = "course" if branch is None else f"{branch}.{seed}"
        history, deeds = ((self._directory / f"{name}.{what}").read_text() for what in ("history", "deeds"))
        return history, deeds.splitlines()


def keep(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Kept:
    """Have every process of a passage store its records before it ends."""
    leave = continuations._Conductor._leave

    def written(self: continuations._Conductor, *, fails: bool | None) -> None:
        name = "course" if self._self is None else f"{self._self[0]}.{self._self[1]}"
        self._history.flush()
        (directory / f"{name}.history").write_bytes(self._history.data)
        assert self._account is not None
        deeds = [f"{at_s!r} {kind} {text}" for at_s, kind, text in self._account._noted]
        (directory / f"{name}.deeds").write_text("\n".join(deeds))
        leave(self, fails=fails)

    monkeypatch.setattr(continuations._Conductor, "_leave", written)
    return Kept(directory)


def passage(zero_s: float | None = None, *branches: Branch, symptom: Symptom = NOTHING, jobs: int = 2) -> Passage:
    return Passage(symptom=symptom, branches=branches, zero_s=zero_s, account_s=EVERYTHING_S, jobs=jobs)


def until(at_s: float, history: str, deeds: list[str], zero_s: float) -> tuple[list[str], list[str]]:
    """The part before a moment."""
    events = [line for line in history.splitlines() if int(line.split('"time":')[1].split(",")[0]) < at_s * 1e9 - 1]
    return events, [line for line in deeds if float(line.split()[0]) < zero_s + at_s]


@pytest.fixture(scope="module")
def zero_s() -> float:
    return follow(parts(), passage()).zero_s


@settings(  # an example takes seconds, so failing ones are not shrunk
    max_examples=6, deadline=None, phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(at_s=st.floats(-0.1, 2.4), seed=st.integers(0, 2**32 - 1), intervention=st.sampled_from(Intervention))
def test_a_continuation_is_the_run_up_to_its_fork(
    monkeypatch: pytest.MonkeyPatch, zero_s: float, at_s: float, seed: int, intervention: Intervention
) -> None:
    with tempfile.TemporaryDirectory() as directory, monkeypatch.context() as patched:
        kept = keep(patched, Path(directory))
        follow(parts(), passage())
        alone = kept.of()
        follow(parts(), passage(zero_s, Branch(at_s=at_s, intervention=intervention, seeds=(seed,))))
        assert kept.of() == alone, "forks do not disturb the run"
        history, deeds = kept.of(0, seed)
        assert until(at_s, history, deeds, zero_s) == until(at_s, *alone, zero_s)
        if at_s < 1:  # later on all may wait for the cut to end
            assert deeds != alone[1], "from the fork on it is another run"


def test_without_a_seed_a_continuation_is_the_run_to_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, zero_s: float
) -> None:
    kept = keep(monkeypatch, tmp_path)
    follow(parts(), passage(zero_s, *(Branch(at_s=at_s, seeds=(None,)) for at_s in (-0.05, 0.7, 1.9))))
    for number in range(3):
        assert kept.of(number) == kept.of()


def test_a_continuation_from_the_beginning_is_the_run_of_its_seed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, zero_s: float
) -> None:
    kept = keep(monkeypatch, tmp_path)
    follow(parts(), passage(zero_s, Branch(at_s=-zero_s, seeds=(77,))))
    continued = kept.of(0, 77)
    other = parts()
    follow(dataclasses.replace(other, test=dataclasses.replace(other.test, seed=77)), passage(zero_s))
    of_seed = kept.of()
    assert continued[1] == of_seed[1]
    assert continued[0] == of_seed[0]


def test_the_number_of_jobs_does_not_change_continuations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, zero_s: float
) -> None:
    seen = []
    for jobs in (1, 3):
        directory = tmp_path / str(jobs)
        directory.mkdir()
        with monkeypatch.context() as patched:
            kept = keep(patched, directory)
            course = follow(parts(), passage(zero_s, Branch(at_s=1.0, seeds=(1, 2, 3)), jobs=jobs))
        seen.append((sorted(map(repr, course.fates)), [kept.of(0, seed) for seed in (1, 2, 3)]))
        digests = {hashlib.sha256(kept.of(0, seed)[0].encode()).digest() for seed in (1, 2, 3)}
        assert len(digests) == 3, "other seeds are other runs"
    assert seen[0] == seen[1]


def test_a_passage_that_is_not_whole_ends_with_its_last_branch(zero_s: float) -> None:
    branches = [Branch(at_s=2.0, seeds=(1, 2)), Branch(at_s=1.0, intervention=Intervention.HEAL, seeds=(1, 2, 3))]
    whole = passage(zero_s, *branches, symptom=Symptom(check=INVARIANTS, rule="quorum", until_s=4.2))
    course, part = follow(parts(), whole), follow(parts(), dataclasses.replace(whole, is_whole=False))
    assert sorted(map(repr, part.fates)) == sorted(map(repr, course.fates)) and len(part.fates) == 5
    assert (course.fails, course.end_s) == (True, pytest.approx(4.2))
    assert (part.fails, part.end_s) == (None, pytest.approx(2.0))


def test_the_symptom_shows_in_no_healed_continuation_and_in_every_late_one(zero_s: float) -> None:
    """Without faults the quorum is never lost; once the violation is there it stays."""
    symptom = Symptom(check=INVARIANTS, rule="quorum", until_s=4.2)
    branches = [Branch(at_s=0.0, intervention=Intervention.HEAL, seeds=range(4)), Branch(at_s=4.1, seeds=range(4))]
    course = follow(parts(), passage(zero_s, *branches, symptom=symptom))
    assert course.fails is True
    assert {(fate.branch, fate.fails) for fate in course.fates} == {(0, False), (1, True)}
    assert len(course.fates) == 8


def test_a_load_that_is_ended_invokes_nothing_further_and_is_followed_by_the_final_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, zero_s: float
) -> None:
    """The leader is cut off at about 1.0 s, which is proven by 1.26 s. The final reads come at
    once, not after the load's time."""
    kept = keep(monkeypatch, tmp_path)
    moments = (-0.05, 0.7, 1.3)
    branches = [Branch(at_s=at_s, intervention=Intervention.END_LOAD, seeds=(1, 2)) for at_s in moments]
    follow(parts(), passage(zero_s, *branches))
    for number, at_s in enumerate(moments):
        for seed in (1, 2):
            events = [json.loads(line) for line in kept.of(number, seed)[0].splitlines()]
            later = [event for event in events if event["time"] >= at_s * 1e9 - 1]
            faults = {event["f"]: event in later for event in events if event["process"] == NEMESIS}
            assert faults == ({"inject": False, "heal": True} if at_s > 1.0 else {})
            final = [event for event in later if event["type"] == "invoke" and event["process"] != NEMESIS]
            assert 0 < len(final) < 60, "the final reads alone; the load would invoke some 100 per second"
            assert {event["f"] for event in final} == {"read"}
            assert {event["f"] for event in events if event["type"] == "invoke" and event not in later} == (
                set() if at_s < 0 else {"read", "write"} if at_s < 1.0 else {"read", "write", "inject"}
            )


def test_a_symptom_that_shows_only_at_the_end_is_judged_there() -> None:
    scenario = dataclasses.replace(SCENARIOS["ha-ack-when-sent"], round_s=2.5)
    lossy = parts_of(*scenario.run_of("ha-ack-when-sent", 1))
    symptom = Symptom(check="total-queue")
    first = follow(lossy, Passage(symptom=symptom))
    assert first.fails is True
    branches = [
        Branch(at_s=0.0, intervention=Intervention.HEAL, seeds=(1,)), Branch(at_s=first.end_s - 1e-6, seeds=(1, None)),
    ]  # fmt: skip
    course = follow(lossy, Passage(symptom=symptom, branches=branches, zero_s=first.zero_s, jobs=2))
    assert sorted((fate.branch, fate.fails) for fate in course.fates) == [(0, False), (1, True), (1, True)]


def test_a_continuation_has_a_third_of_the_time_to_recover_and_no_final_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a seed it repeats the run, which fails; the run itself has all of its time, and its final reads."""
    leave = continuations._Conductor._leave

    def dated(self: continuations._Conductor, *, fails: bool | None) -> None:
        course = self._run.observed.recovery, self._run.observed.final_reads_from is not None
        name = "course" if self._self is None else "continuation"
        left_s = self._loop.now - (self._clock.zero_s or 0.0)
        (tmp_path / name).write_text(f"{left_s} {course[1]} {course[0].reason if course[0] else ''}")
        leave(self, fails=fails)

    monkeypatch.setattr(continuations._Conductor, "_leave", dated)
    lost = parts_of(*SCENARIOS["vote-without-fsync"].run_of("vote-without-fsync", 1))
    symptom = Symptom(check=RECOVERS)
    zero_s = follow(lost, Passage(symptom=symptom)).zero_s
    branches = [Branch(at_s=0.5, seeds=(None,))]
    course = follow(lost, Passage(symptom=symptom, branches=branches, zero_s=zero_s))
    assert (course.fails, [fate.fails for fate in course.fates]) == (True, [True])
    (whole_s, was_read, said), (part_s, part_was_read, part_said) = (
        (tmp_path / name).read_text().split(" ", 2) for name in ("course", "continuation")
    )
    assert said.startswith("not recovered after 60 s") and part_said.startswith("not recovered after 20 s")
    assert float(part_s) < float(whole_s) - 40.0
    assert (was_read, part_was_read) == ("True", "False")


def test_a_continuation_that_recovers_does_not_fail() -> None:
    lost = parts_of(*SCENARIOS["vote-without-fsync"].run_of("vote-without-fsync", 1))
    symptom = Symptom(check=RECOVERS)
    zero_s = follow(lost, Passage(symptom=symptom)).zero_s
    branches = [Branch(at_s=0.0, intervention=Intervention.HEAL, seeds=(1,))]
    course = follow(lost, Passage(symptom=symptom, branches=branches, zero_s=zero_s))
    assert [fate.fails for fate in course.fates] == [False]


def test_an_act_is_done_in_the_continuation_only(zero_s: float, tmp_path: Path) -> None:
    marker = tmp_path / "acted"
    branch = Branch(at_s=1.0, seeds=(1,), act=lambda: marker.write_text("yes") and None)
    course = follow(parts(), passage(zero_s, branch))
    assert marker.read_text() == "yes"
    assert course.parts_at is None


def test_the_first_event_that_differs_from_the_stored_history_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = keep(monkeypatch, tmp_path)
    follow(parts(), passage())
    lines = kept.of()[0].splitlines(keepends=True)
    path = tmp_path / "stored"

    def compared(stored: list[str]) -> Course:
        path.write_text("".join(stored))
        return follow(parts(), dataclasses.replace(passage(), history_path=path))

    assert compared(lines).parts_at is None
    assert compared([*lines, "{}\n"]).parts_at is None, "the stored run may be longer"
    assert compared([*lines[:7], lines[7].replace('"process"', '"Process"'), *lines[8:]]).parts_at == 8
    assert compared(lines[:9]).parts_at == 10


def test_continuations_work_without_gc_freeze(zero_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuations, "gc", SimpleNamespace())  # as on PyPy, which has no freeze()
    course = follow(parts(), passage(zero_s, Branch(at_s=1.0, seeds=(1,))))
    assert [fate.fails for fate in course.fates] == [False]


def test_an_error_in_a_process_of_a_passage_is_raised(zero_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ZeroDivisionError("of an act")

    with pytest.raises(HarnessError, match="of an act"):
        follow(parts(), passage(zero_s, Branch(at_s=1.0, seeds=(1,), act=fails)))
    with pytest.raises(HarnessError, match="KeyError"):
        broken = parts()
        follow(dataclasses.replace(broken, nemeses={}), passage(zero_s, Branch(at_s=1.0, seeds=(1,))))


def test_the_online_checker_ends_a_continuation(zero_s: float) -> None:
    symptom = Symptom(check=ONLINE, until_s=5.0)
    course = follow(parts(), passage(zero_s, Branch(at_s=2.0, seeds=(1, 2)), symptom=symptom))
    assert course.fails is True
    assert all(fate.fails for fate in course.fates)


def test_a_run_that_fail_fast_ended_counts_as_failed(zero_s: float) -> None:
    whole = parts()
    ended = dataclasses.replace(whole, test=dataclasses.replace(whole.test, fail_fast=True))
    symptom = Symptom(check=ONLINE, until_s=1000.0)
    course = follow(ended, passage(zero_s, Branch(at_s=2.0, seeds=(None,)), symptom=symptom))
    assert course.end_s < 1000.0
    assert course.fails is True
    assert [fate.fails for fate in course.fates] == [True]


def test_a_continuation_that_ends_before_its_time_counts_as_not_failed(zero_s: float) -> None:
    whole = parts()
    sound = dataclasses.replace(whole, schedule=Schedule(()))  # without a cut no client asks a deposed leader
    symptom = Symptom(check=ONLINE, until_s=1000.0)
    course = follow(sound, passage(zero_s, Branch(at_s=2.0, seeds=(1,)), symptom=symptom))
    assert course.end_s < 1000.0
    assert (course.fails, [fate.fails for fate in course.fates]) == (False, [False])
