"""The driver records, proves and heals every fault, whatever goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from checker.faults import faults_of
from nemesis.driver import CANCEL_GRACE_S, STEP_TIMEOUT_S, run_schedule
from nemesis.operator import insist
from nemesis.partition import PARTITION, Partition
from nemesis.protocol import Injection, Proof
from nemesis.schedule import HEAL, INJECT, Schedule, ScheduleError, periodic
from nemesis.triggers import TRIGGER_TIMEOUT_S, Occurrence, Trigger, trigger_problem

Run = Callable[[Any], Any]
Event = dict[str, Any]


def schedule_of(*events: tuple[float, str, str, str]) -> Schedule:
    """From (time, action, fault, variant)."""
    return Schedule.from_json(
        [
            {"at_s": at_s, "action": action, "id": fault_id, "nemesis": "partition", "variant": variant}
            for at_s, action, fault_id, variant in events
        ]
    )


ONE_FAULT = schedule_of((5, INJECT, "f1", "halves"), (10, HEAL, "f1", "halves"))


class Recorder(list[tuple[float, Event]]):
    def __call__(self, event: Event) -> None:
        self.append((asyncio.get_running_loop().time(), event))

    @property
    def steps(self) -> list[tuple[str, str, str]]:
        return [(event["type"], event["f"], event["value"]["id"]) for _, event in self]

    def proofs(self, f: str) -> list[dict[str, Any]]:
        return [event["value"]["proof"] for _, event in self if event["type"] == "info" and event["f"] == f]


def drive(
    schedule: Schedule,
    target: Any,
    recorder: Callable[[Event], None],
    nemesis: Any = PARTITION,
    seed: int = 0,
) -> Any:
    return run_schedule(
        schedule, target=target, nemeses={"partition": nemesis}, rng=random.Random(seed), record=recorder
    )


def test_a_fault_is_recorded_as_four_events_with_proofs(make_target: Any, run_virtual: Run) -> None:
    target, recorder = make_target(5), Recorder()
    run_virtual(drive(ONE_FAULT, target, recorder))
    assert recorder.steps == [
        ("invoke", INJECT, "f1"),
        ("info", INJECT, "f1"),
        ("invoke", HEAL, "f1"),
        ("info", HEAL, "f1"),
    ]
    assert [at_s for at_s, event in recorder if event["type"] == "invoke"] == [5, 10]
    first = recorder[0][1]
    assert first == {
        "process": "nemesis",
        "type": "invoke",
        "f": INJECT,
        "value": {
            "id": "f1",
            "nemesis": "partition",
            "variant": "halves",
            "grudge": {
                "n1": ["n3", "n4", "n5"],
                "n2": ["n3", "n4", "n5"],
                "n3": ["n1", "n2"],
                "n4": ["n1", "n2"],
                "n5": ["n1", "n2"],
            },
        },
    }
    assert recorder.proofs(INJECT) == [
        {"proven": True, "links": 20, "failed": [], "detail": "12 links cut, 8 others pass"}
    ]
    assert recorder.proofs(HEAL) == [{"proven": True, "links": 20, "failed": [], "detail": "20 links pass"}]
    assert not target.fake_network.cuts


def test_a_seeded_run_is_reproducible_and_proves_every_fault(make_target: Any, run_virtual: Run) -> None:
    def once() -> list[Event]:
        schedule = periodic([("partition", PARTITION.variants)], random.Random(7), time_limit_s=95)
        recorder = Recorder()
        run_virtual(drive(schedule, make_target(5), recorder, seed=7))
        return [event for _, event in recorder]

    first = once()
    assert first == once()
    assert {event["value"]["variant"] for event in first} == set(PARTITION.variants)
    assert all(event["value"]["proof"]["proven"] for event in first if event["type"] == "info")


def test_dropping_a_fault_changes_no_other(make_target: Any, run_virtual: Run) -> None:
    schedule = periodic([("partition", ["random-halves", "one-way"])], random.Random(1), time_limit_s=60)

    def grudges(part: Schedule) -> dict[str, Any]:
        recorder = Recorder()
        run_virtual(drive(part, make_target(5), recorder, seed=3))
        return {event["value"]["id"]: event["value"]["grudge"] for _, event in recorder}

    everything = grudges(schedule)
    some = grudges(schedule.without(frozenset({"f1", "f4"})))
    assert some and some == {fault_id: everything[fault_id] for fault_id in some}


def test_overlapping_faults_heal_independently(make_target: Any, run_virtual: Run) -> None:
    target, recorder = make_target(5), Recorder()
    schedule = schedule_of(
        (1, INJECT, "f1", "halves"),
        (2, INJECT, "f2", "leader"),
        (3, HEAL, "f1", "halves"),
        (5, HEAL, "f2", "leader"),
    )
    run_virtual(drive(schedule, target, recorder))
    assert [(f, fault_id) for kind, f, fault_id in recorder.steps if kind == "invoke"] == [
        (INJECT, "f1"),
        (INJECT, "f2"),
        (HEAL, "f1"),
        (HEAL, "f2"),
    ]
    assert all(proof["proven"] for proof in recorder.proofs(INJECT) + recorder.proofs(HEAL))


def test_a_fault_that_is_never_healed_is_healed_at_the_end(make_target: Any, run_virtual: Run) -> None:
    target, recorder = make_target(5), Recorder()
    run_virtual(drive(schedule_of((1, INJECT, "f1", "one"), (2, INJECT, "f2", "one")), target, recorder))
    assert [fault_id for kind, f, fault_id in recorder.steps if (kind, f) == ("info", HEAL)] == ["f2", "f1"]
    assert not target.fake_network.cuts


@pytest.mark.parametrize("cancel_at_s", [0.0, 4.0, 5.0, 5.0005, 5.1, 5.2, 7.0, 10.0, 10.0005])
def test_a_run_cancelled_at_any_moment_heals_and_records_its_fault(
    cancel_at_s: float, make_target: Any, run_virtual: Run
) -> None:
    target, recorder = make_target(5), Recorder()

    async def main() -> None:
        task = asyncio.create_task(drive(ONE_FAULT, target, recorder))
        await asyncio.sleep(cancel_at_s)
        task.cancel()
        asyncio.get_running_loop().call_later(0.0001, task.cancel)  # an impatient second Ctrl-C
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())
    assert not target.fake_network.cuts
    steps = recorder.steps
    assert len(steps) in (0, 4) and steps.count(("info", HEAL, "f1")) == len(steps) // 4
    assert all(proof["proven"] for proof in recorder.proofs(INJECT) + recorder.proofs(HEAL))


class Asked(Partition):
    """A request that the system grants, and takes back, only while nothing is cut."""

    name = "asked"
    is_request = True

    async def inject(self, target: Any, injection: Injection) -> None:
        await insist(functools.partial(self._ask, target))

    async def _ask(self, target: Any) -> None:
        if target.fake_network.cuts:
            raise RuntimeError("something is cut")

    async def prove(self, target: Any, injection: Injection, *, in_force: Any = ()) -> Proof:
        return Proof(proven=not target.fake_network.cuts, detail="granted", checked=1)

    async def heal(self, target: Any, injection: Injection) -> None:
        await insist(functools.partial(self._ask, target))

    prove_healed = prove


def asked(at_s: float, action: str, fault_id: str) -> dict[str, object]:
    return {"at_s": at_s, "action": action, "id": fault_id, "nemesis": "asked", "variant": "halves"}


WAITING = Schedule.from_json(
    [
        *schedule_of((1, INJECT, "f1", "halves"), (5, HEAL, "f1", "halves"), (6, INJECT, "f3", "one")).to_json(),
        asked(2, INJECT, "f2"),
        asked(3, HEAL, "f2"),
        asked(7, INJECT, "f4"),
    ]
)


@pytest.mark.parametrize("cancel_at_s", [None, 1.5, 2.5, 4.0, 5.5, 6.5])
def test_a_waiting_request_does_not_block_the_schedule(
    cancel_at_s: float | None, make_target: Any, run_virtual: Run
) -> None:
    """It waits for a later event of the schedule, or for the healing at the end."""
    target, recorder = make_target(5), Recorder()

    async def main() -> None:
        work = run_schedule(
            WAITING,
            target=target,
            nemeses={"partition": PARTITION, "asked": Asked()},
            rng=random.Random(0),
            record=recorder,
        )
        task = asyncio.create_task(work)
        if cancel_at_s is None:
            await task
            return
        await asyncio.sleep(cancel_at_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())
    assert not target.fake_network.cuts
    proofs = recorder.proofs(INJECT) + recorder.proofs(HEAL)
    assert proofs and all(proof["proven"] for proof in proofs)
    begun = {fault_id for kind, f, fault_id in recorder.steps if (kind, f) == ("invoke", INJECT)}
    for fault_id in begun:
        assert [step[:2] for step in recorder.steps if step[2] == fault_id] == [
            ("invoke", INJECT), ("info", INJECT), ("invoke", HEAL), ("info", HEAL),
        ]  # fmt: skip
    if cancel_at_s is None:
        assert begun == {"f1", "f2", "f3", "f4"}
        granted_s = {
            event["value"]["id"]: at_s for at_s, event in recorder if (event["type"], event["f"]) == ("info", INJECT)
        }
        assert 5 <= granted_s["f2"] < 6 < 7 <= granted_s["f4"], (
            "f2 is granted once f1 is healed, f4 once f3 is healed at the end"
        )


class Patient(Partition):
    """A partition whose plan waits until nothing is cut."""

    async def plan(self, target: Any, rng: random.Random, *, fault_id: str, variant: str) -> Injection:
        while target.fake_network.cuts:  # noqa: ASYNC110 - nothing notifies
            await asyncio.sleep(0.1)
        return await super().plan(target, rng, fault_id=fault_id, variant=variant)


@pytest.mark.parametrize("begins", [(), ("f3",)])
def test_a_waiting_plan_does_not_delay_the_healing_of_other_faults(
    begins: tuple[str, ...], make_target: Any, run_virtual: Run
) -> None:
    """Nor does a fault that is due meanwhile and is injected late because of it."""
    target, recorder = make_target(5), Recorder()
    later = [schedule_of((3.5, INJECT, fault_id, "one"), (3.6, HEAL, fault_id, "one")).to_json() for fault_id in begins]
    schedule = Schedule.from_json(
        [
            *schedule_of((1, INJECT, "f1", "halves"), (4, HEAL, "f1", "halves")).to_json(),
            asked(2, INJECT, "f2"),
            asked(3, HEAL, "f2"),
            *(event for events in later for event in events),
        ]
    )
    run_virtual(
        run_schedule(
            schedule,
            target=target,
            nemeses={"partition": PARTITION, "asked": Patient()},
            rng=random.Random(0),
            record=recorder,
        )
    )
    assert [step for step in recorder.steps if step[0] == "info"] == [
        ("info", INJECT, "f1"), ("info", HEAL, "f1"), ("info", INJECT, "f2"), ("info", HEAL, "f2"),
        *(("info", action, fault_id) for fault_id in begins for action in (INJECT, HEAL)),
    ]  # fmt: skip
    assert all(proof["proven"] for proof in recorder.proofs(INJECT) + recorder.proofs(HEAL))


class Broken(Partition):
    """A partition in which one step raises or hangs; inject does so after it has cut the links."""

    def __init__(
        self, step: str, *, hang: bool = False, deaf: bool = False, times: int = 1, error: BaseException | None = None
    ) -> None:
        self._step, self._hang, self._deaf, self._times = step, hang, deaf, times
        self._error = OSError("the disk of the harness is on fire") if error is None else error

    async def _maybe_break(self, step: str) -> None:
        if step == self._step and self._times:
            self._times -= 1
            while self._hang:
                try:
                    await asyncio.sleep(10_000)
                except asyncio.CancelledError:
                    if not self._deaf:
                        raise
            raise self._error

    async def plan(self, *args: Any, **named: Any) -> Injection:
        await self._maybe_break("plan")
        return await super().plan(*args, **named)

    async def inject(self, target: Any, injection: Injection) -> None:
        await super().inject(target, injection)
        await self._maybe_break("inject")

    async def prove(self, *args: Any, **named: Any) -> Proof:
        await self._maybe_break("prove")
        return await super().prove(*args, **named)

    async def heal(self, target: Any, injection: Injection) -> None:
        await self._maybe_break("heal")
        await super().heal(target, injection)

    async def prove_healed(self, *args: Any, **named: Any) -> Proof:
        await self._maybe_break("prove_healed")
        return await super().prove_healed(*args, **named)


class Watched(Broken):
    """A partition whose final check compares a count with the one in the evidence of its first proof."""

    looks = 0

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.beside: dict[str, list[str]] = {}

    async def prove(self, target: Any, injection: Injection, *, in_force: Any = ()) -> Proof:
        proof = await super().prove(target, injection, in_force=in_force)
        return replace(proof, evidence={"count": 5})

    async def prove_met(self, target: Any, injection: Injection, *, in_force: Any = ()) -> Proof:
        assert target.fake_network.cuts, "prove_met runs while the fault is in force"
        self.looks += 1
        self.beside[injection.fault_id] = [fault.fault_id for fault in injection.beside]
        await self._maybe_break("prove_met")
        return Proof(proven=True, exercised=injection.evidence["count"] < 7, detail="2 more")


def test_prove_met_runs_before_the_healing_and_is_recorded_with_it(make_target: Any, run_virtual: Run) -> None:
    recorder = Recorder()
    run_virtual(drive(ONE_FAULT, make_target(5), recorder, Watched("none")))
    met = {"proven": True, "exercised": True, "links": 0, "failed": [], "detail": "2 more"}
    assert [event["value"].get("met") for _, event in recorder] == [None, None, met, met]
    assert recorder.proofs(INJECT)[0]["evidence"] == {"count": 5}
    [fault] = faults_of([{**event, "time": 0} for _, event in recorder])
    assert fault["proven"] and fault["exercised"] and fault["healed"]


def test_prove_met_is_given_the_evidence_of_the_plan_too(make_target: Any, run_virtual: Run) -> None:
    """What was counted before a fault must not count as met."""
    given: list[Any] = []

    class Planned(Watched):
        async def plan(self, *args: Any, **named: Any) -> Injection:
            return replace(await super().plan(*args, **named), evidence={"before": 4})

        async def prove_met(self, target: Any, injection: Injection, *, in_force: Any = ()) -> Proof:
            given.append(injection.evidence)
            return await super().prove_met(target, injection, in_force=in_force)

    recorder = Recorder()
    run_virtual(drive(ONE_FAULT, make_target(5), recorder, Planned("none")))
    assert given == [{"before": 4, "count": 5}] == [recorder.proofs(INJECT)[0]["evidence"]]


def test_prove_met_is_given_all_faults_that_overlapped_its_own(make_target: Any, run_virtual: Run) -> None:
    """Including healed ones: a count that two faults share may be due to either."""
    nemesis = Watched("none")
    events = [
        (5, INJECT, "f1"), (8, INJECT, "f2"), (12, HEAL, "f2"), (16, INJECT, "f3"), (20, HEAL, "f1"), (25, HEAL, "f3"),
    ]  # fmt: skip
    schedule = schedule_of(*((at_s, action, fault_id, "one") for at_s, action, fault_id in events))
    run_virtual(drive(schedule, make_target(5), Recorder(), nemesis))
    assert nemesis.beside == {"f1": ["f2", "f3"], "f2": ["f1"], "f3": ["f1"]}


def test_a_failing_prove_met_makes_the_fault_unproven_and_does_not_prevent_healing(
    make_target: Any, run_virtual: Run
) -> None:
    target, recorder = make_target(5), Recorder()
    run_virtual(drive(ONE_FAULT, target, recorder, Watched("prove_met")))
    assert not target.fake_network.cuts
    [fault] = faults_of([{**event, "time": 0} for _, event in recorder])
    assert not fault["proven"] and fault["healed"] and "on fire" in fault["met"]["detail"]


@pytest.mark.parametrize(("step", "looks"), [("heal", 1), ("prove", 0), ("inject", 0)])
def test_prove_met_runs_once_and_only_for_a_proven_fault(
    step: str, looks: int, make_target: Any, run_virtual: Run
) -> None:
    """At a second attempt to heal, half of the fault is gone; an unproven fault has nothing to add."""
    nemesis = Watched(step)
    run_virtual(drive(ONE_FAULT, make_target(5), Recorder(), nemesis))
    assert nemesis.looks == looks


@pytest.mark.parametrize("hang", [False, True])
@pytest.mark.parametrize("step", ["plan", "inject", "prove", "heal", "prove_healed"])
def test_a_failing_step_is_recorded_and_its_fault_healed(
    step: str, hang: bool, make_target: Any, run_virtual: Run
) -> None:
    target, recorder = make_target(5), Recorder()
    run_virtual(drive(ONE_FAULT, target, recorder, Broken(step, hang=hang)))
    assert not target.fake_network.cuts
    f = HEAL if "heal" in step else INJECT
    proof = recorder.proofs(f)[0]
    assert proof["proven"] is False
    assert (f"took longer than {STEP_TIMEOUT_S:g} s" if hang else "on fire") in proof["detail"]
    assert recorder.steps[-1] == ("info", HEAL, "f1")
    if step == "heal":  # a second attempt at the end succeeded
        assert [proof["proven"] for proof in recorder.proofs(HEAL)] == [False, True]
    else:
        assert len(recorder) == 4


@pytest.mark.parametrize("step", ["plan", "inject", "prove", "prove_met", "heal", "prove_healed"])
def test_a_step_that_swallows_its_cancellation_is_ended(step: str, make_target: Any, run_virtual: Run) -> None:
    recorder = Recorder()
    run_virtual(drive(ONE_FAULT, make_target(5), recorder, Watched(step, hang=True, deaf=True)))
    values = [event["value"] for _, event in recorder]
    details = [value[word]["detail"] for value in values for word in ("proof", "met") if word in value]
    assert any(f"took longer than {STEP_TIMEOUT_S:g} s, and {CANCEL_GRACE_S:g} s more" in said for said in details)
    assert recorder.steps[-1] == ("info", HEAL, "f1")


def test_a_timeout_raised_by_a_step_itself_is_reported_unchanged(make_target: Any, run_virtual: Run) -> None:
    recorder = Recorder()
    run_virtual(drive(ONE_FAULT, make_target(5), recorder, Broken("inject", error=TimeoutError("not within 20 s"))))
    assert recorder.proofs(INJECT)[0]["detail"] == "could not be injected: not within 20 s"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("nobody leads"), "nobody leads"),
        (RuntimeError(), "RuntimeError: "),
        (KeyError("n1"), "KeyError: 'n1'"),
        (RecursionError("too deep"), "RecursionError: too deep"),
    ],
)
def test_the_type_of_an_error_is_reported_unless_it_is_only_a_message(
    error: Exception, reason: str, make_target: Any, run_virtual: Run
) -> None:
    recorder = Recorder()
    run_virtual(drive(ONE_FAULT, make_target(5), recorder, Broken("inject", error=error)))
    assert recorder.proofs(INJECT)[0]["detail"] == f"could not be injected: {reason}"


class EndsItsOwnTask(Watched):
    """One step cancels and awaits a task of its own, and lets a timeout of its own expire."""

    async def _maybe_break(self, step: str) -> None:
        if step != self._step:
            return
        probing = asyncio.create_task(asyncio.sleep(10_000))
        await asyncio.sleep(0.1)
        probing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await probing
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await asyncio.sleep(10_000)
        if step != "plan":  # a plan that takes a second no longer holds up other events
            await asyncio.sleep(CANCEL_GRACE_S + 1)


@pytest.mark.parametrize("step", ["plan", "inject", "prove", "prove_met", "heal", "prove_healed"])
def test_a_step_may_cancel_a_task_of_its_own(step: str, make_target: Any, run_virtual: Run) -> None:
    recorder, whole = Recorder(), Recorder()
    run_virtual(drive(ONE_FAULT, make_target(5), whole, Watched("none")))
    run_virtual(drive(ONE_FAULT, make_target(5), recorder, EndsItsOwnTask(step)))
    assert recorder.steps == whole.steps
    assert [proof["proven"] for f in (INJECT, HEAL) for proof in recorder.proofs(f)] == [True, True]


class Panic(BaseException):
    """As a library in Rust raises."""


@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError("of its own"), Panic("no")], ids=repr)
@pytest.mark.parametrize("step", ["plan", "inject", "prove", "heal", "prove_healed"])
def test_a_base_exception_in_a_step_stops_neither_the_schedule_nor_the_harness(
    step: str, error: BaseException, make_target: Any, run_virtual: Run
) -> None:
    schedule = periodic([("partition", ["halves", "one"])], random.Random(0), time_limit_s=30)
    target, recorder = make_target(5), Recorder()
    run_virtual(drive(schedule, target, recorder, Broken(step, error=error)))
    assert not target.fake_network.cuts
    proofs = recorder.proofs(HEAL if "heal" in step else INJECT)
    assert type(error).__name__ in proofs[0]["detail"]
    assert [proof["proven"] for proof in proofs[:3]] == [False, True, True]


def test_a_heal_that_always_fails_does_not_hang_the_driver(make_target: Any, run_virtual: Run) -> None:
    recorder = Recorder()
    run_virtual(drive(ONE_FAULT, make_target(5), recorder, Broken("heal", times=99)))
    assert [proof["proven"] for proof in recorder.proofs(HEAL)] == [False, False]


def test_a_failed_injection_does_not_stop_later_faults(make_target: Any, run_virtual: Run) -> None:
    schedule = periodic([("partition", ["halves", "one"])], random.Random(0), time_limit_s=30)
    recorder = Recorder()
    run_virtual(drive(schedule, make_target(5), recorder, Broken("inject")))
    assert [proof["proven"] for proof in recorder.proofs(INJECT)] == [False, True, True]


def test_a_fault_that_finds_no_leader_is_recorded_as_unproven(make_target: Any, run_virtual: Run) -> None:
    recorder = Recorder()
    schedule = schedule_of((5, INJECT, "f1", "leader"), (8, HEAL, "f1", "leader"))
    run_virtual(drive(schedule, make_target(5, leader=None), recorder))
    assert recorder.proofs(INJECT) == [{"proven": False, "links": 0, "failed": [], "detail": "no leader found"}]
    assert recorder.proofs(HEAL)[0]["proven"] is True


def test_a_recorder_that_fails_does_not_stop_the_healing(make_target: Any, run_virtual: Run) -> None:
    target = make_target(5)
    schedule = periodic([("partition", ["halves"])], random.Random(0), time_limit_s=60)
    seen: list[Event] = []

    def record(event: Event) -> None:
        seen.append(event)
        if len(seen) >= 2:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        run_virtual(drive(schedule, target, record))
    assert not target.fake_network.cuts
    assert len(seen) == 4  # the first fault only, healed at once


def test_an_unknown_nemesis_is_refused_before_anything_is_recorded(make_target: Any, run_virtual: Run) -> None:
    recorder = Recorder()
    with pytest.raises(KeyError, match="partition"):
        run_virtual(run_schedule(ONE_FAULT, target=make_target(5), nemeses={}, rng=random.Random(0), record=recorder))
    assert not recorder


def test_event_times_are_measured_by_the_given_clock(make_target: Any, run_virtual: Run) -> None:
    recorder = Recorder()

    async def main() -> None:
        await asyncio.sleep(100)
        loop = asyncio.get_running_loop()
        await run_schedule(
            ONE_FAULT,
            target=make_target(5),
            nemeses={"partition": PARTITION},
            rng=random.Random(0),
            record=recorder,
            clock=lambda: loop.time() - 97,
        )

    run_virtual(main())
    assert recorder[0][0] == pytest.approx(102)


class Triggers:
    """Triggers at given times of the loop."""

    def __init__(self, *occurrences: Occurrence) -> None:
        self.occurrences = occurrences

    async def wait(self, trigger: Trigger, *, since_s: float, timeout_s: float) -> Occurrence | None:
        now_s = asyncio.get_running_loop().time()
        for occurrence in self.occurrences:
            if trigger.matches(occurrence) and since_s <= occurrence.at_s <= now_s + timeout_s:
                await asyncio.sleep(max(0.0, occurrence.at_s - now_s))
                return occurrence
        await asyncio.sleep(timeout_s)
        return None


@pytest.mark.parametrize(
    ("when", "at_s", "occurrence"),
    [
        ("elected", 6.0, "elected@n2"),
        ("elected+0.5", 6.5, "elected@n2"),
        ("elected@n3", 7.0, "elected@n3"),
        ("voted", 5.0 + TRIGGER_TIMEOUT_S, None),
    ],
)
def test_an_event_waits_for_its_trigger(
    when: str, at_s: float, occurrence: str | None, make_target: Any, run_virtual: Run
) -> None:
    events = [{**event.to_json(), "when": when} if event.action == INJECT else event.to_json() for event in ONE_FAULT]
    schedule = Schedule.from_json(events)
    assert Schedule.from_json(schedule.to_json()) == schedule
    target, recorder = make_target(5), Recorder()
    target.triggers = Triggers(
        Occurrence(kind="elected", host="n2", at_s=6.0), Occurrence(kind="elected", host="n3", at_s=7.0)
    )
    run_virtual(drive(schedule, target, recorder))
    assert recorder[0][0] == pytest.approx(at_s)
    assert [event["value"].get("trigger", "none") for _, event in recorder] == [occurrence, occurrence, "none", "none"]


def test_without_triggers_an_event_happens_at_its_time(make_target: Any, run_virtual: Run) -> None:
    events = [{**event.to_json(), "when": "elected"} for event in ONE_FAULT]
    recorder = Recorder()
    run_virtual(drive(Schedule.from_json(events), make_target(5), recorder))
    assert recorder[0][0] == pytest.approx(5) and recorder[0][1]["value"]["trigger"] is None


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("elected@n1+0.1", None), ("storing", None), ("lunch", "unknown trigger 'lunch'"),
        ("elected@leader", "on a host such as n1"), ("elected+soon", "must be 0 to 60 seconds"), (7, "must be a word"),
    ],
)  # fmt: skip
def test_triggers_are_validated(word: object, problem: str | None) -> None:
    found = trigger_problem(word)
    assert found is None if problem is None else problem in (found or "")
    data = [{"at_s": 1, "action": "inject", "id": "f1", "nemesis": "partition", "variant": "one", "when": word}]
    if problem is None:
        assert next(iter(Schedule.from_json(data))).when == word
    else:
        with pytest.raises(ScheduleError, match="event 1"):
            Schedule.from_json(data)
