"""Each proof fails for the sabotage that it is there to notice, and gives exactly that as its reason.

That a proof fails is not enough: it may fail for another reason, and a weaker proof would go unnoticed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from nemesis.clock import CLOCK
from nemesis.corruption import BIT_FLIP
from nemesis.disk import DISK_ERROR, DISK_FULL, DISK_SLOW, DISK_STALL
from nemesis.leadership import TRANSFER
from nemesis.link import LINK
from nemesis.name_service import NAME_SERVICE
from nemesis.power import POWER
from nemesis.process import KILL, PAUSE
from nemesis.protocol import Injection
from nemesis.resources import RESOURCES
from nemesis.slow_client import FILL_TIMEOUT_S, SLOW_CLIENT, STUCK_LOOKS
from nemesis.target import (
    ClockReading,
    DiskProbe,
    DiskStep,
    FaultMet,
    Link,
    LinkShape,
    LinkTraffic,
    NameFault,
    ResourceLimit,
    UnreadAnswers,
)

Run = Callable[[Any], Any]

RIGHT_NAME = r"n1 resolves n[2-5] to 10\.0\.0\.[2-5] after 0 ms"
REASONS: Mapping[Any, Mapping[str, str]] = {
    KILL: {"sigkill": "n1 is running, not down", "terminate": "n1 is running, not down",
           "crash-loop": "n1 was started 0 times"},
    PAUSE: {"sigstop": "n1 is running, not paused"},
    CLOCK: {
        **dict.fromkeys(("bump", "hour", "reset"), r"the clock of n1 is off by 0 ms, not -\d+ ms"),
        "strobe": r"the clock of n1 swings by 0 ms, not \d+ ms",
        **dict.fromkeys(("drift", "slew"), r"the clock of n1 drifted by 0\.0 ms while watched, not -\d+\.\d ms"),
        "step": r"the clock of n1 was not stepped: it moved by 0\.0 ms in total",
        "slow-monotonic": r"the monotonic clock of n1 advanced 1\.00\d s in 1\.00\d s, not 0\.\d+ s",
        "fast-monotonic": r"the monotonic clock of n1 advanced 1\.00\d s in 1\.00\d s, not [12]\.\d+ s",
    },
    DISK_STALL: {
        form: f"{kind} on n1: write ok, sync ok, read ok"
        for form, kind in (("fsync", "stall-fsync"), ("all", "stall"), ("freeze", "freeze"))
    },
    DISK_SLOW: dict.fromkeys(("mild", "severe"), r"a sync on n1 took 1 ms \(ok\)"),
    DISK_FULL: {kind: f"{kind} on n1: write ok, sync ok, read ok" for kind in ("full", "fill")},
    DISK_ERROR: {
        form: f"{kind} on n1: write ok, sync ok, read ok"
        for form, kind in (
            ("write", "error-write"), ("fsync", "error-fsync"), ("read", "error-read"), ("shutdown", "shutdown"),
        )
    },
    POWER: dict.fromkeys(POWER.forms, "n1 is running, not down|n1 did not lose power"),
    LINK: {
        **dict.fromkeys(("delay", "delay-out", "delay-in"), r"n1->n2: 0\.1 ms late"),
        **dict.fromkeys(("loss", "loss-out", "loss-in"), "n1->n2: 0 of 100 lost"),
        "duplicate": "n1->n2: 0 of 100 arrived twice",
        "reorder": "n1->n2: 0 of 50 out of order",
        "rate": r"n1->n2: 50 packets of 1000 bytes in 0\.010 s, 0\.1 ms late",
        "corrupt": "n1->n2: 0 of 100 arrived damaged",
    },
    BIT_FLIP: dict.fromkeys(BIT_FLIP.forms, "no bit was flipped on n1"),
    RESOURCES: dict.fromkeys(RESOURCES.forms, "n1 is not limited: plenty"),
    SLOW_CLIENT: dict.fromkeys(
        SLOW_CLIENT.forms, r"n1: 0 bytes in the send queues of 0 of \d connections, .*; expected \d connections with .*"
    ),
    NAME_SERVICE: {
        **dict.fromkeys(NAME_SERVICE.forms, RIGHT_NAME), "cold": f"{RIGHT_NAME}|n1 was not restarted",
    },
}  # fmt: skip
"""Nemesis -> form -> the pattern of every reason that its proof gives if the fault does nothing to n1."""
FORMS = [(nemesis, form) for nemesis, reasons in REASONS.items() for form in reasons]


@pytest.mark.parametrize("nemesis", REASONS, ids=lambda nemesis: nemesis.name)
def test_every_form_has_a_reason(nemesis: Any) -> None:
    assert set(REASONS[nemesis]) == set(nemesis.forms)


@pytest.mark.parametrize(("nemesis", "form"), FORMS, ids=[f"{n.name}={f}" for n, f in FORMS])
def test_a_proof_says_what_an_unaffected_victim_does_instead(
    nemesis: Any, form: str, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        for immune in ("processes", "clocks", "disks", "resources", "clients", "names"):
            getattr(target, immune).immune.add("n1")
        target.links.immune.add(Link("n1", "n2"))
        injection = await plan_fault(nemesis, target, f"{form}@n1+n2")
        await nemesis.inject(target, injection)
        proof = await nemesis.prove(target, injection)
        reason = re.compile(REASONS[nemesis][form])
        assert not proof.proven and proof.failed and all(map(reason.fullmatch, proof.failed)), proof.failed
        for part in REASONS[nemesis][form].split("|"):
            assert any(re.fullmatch(part, problem) for problem in proof.failed), (
                "each part of a proof has its own reason"
            )

    run_virtual(main())


# Processes.


@pytest.mark.parametrize(
    ("nemesis", "variant", "other", "reason"),
    [
        (KILL, "sigkill@n1", (PAUSE, "sigstop@n1"), "n1 is running, not down"),
        (PAUSE, "sigstop@n1", (KILL, "sigkill@n1"), "n1 is running, not paused"),
    ],
)
def test_a_victim_that_runs_fails_the_proof_even_if_another_fault_should_hold_it(
    nemesis: Any, variant: str, other: Any, reason: str, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        target.processes.immune.add("n1")
        beside = await plan_fault(*(other[0], target, other[1]), fault_id="f2")
        injection = await plan_fault(nemesis, target, variant)
        for each, planned in ((other[0], beside), (nemesis, injection)):
            await each.inject(target, planned)
        proof = await nemesis.prove(target, injection, in_force=[beside])
        assert proof.failed == [reason]

    run_virtual(main())


def test_a_victim_that_is_only_paused_was_not_killed(make_fault_target: Any, plan_fault: Any, run_virtual: Run) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(KILL, target, "sigkill@n1")
        await target.processes.pause("a stray signal", ["n1"])
        assert (await KILL.prove(target, injection)).failed == ["n1 is paused, not down"]

    run_virtual(main())


def test_a_stopped_process_of_a_killed_replica_still_exists(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(KILL, target, "sigkill@n1")
        await KILL.inject(target, injection)
        target.processes.waiting = {"n1": ("T", False)}
        for proof in (await KILL.prove(target, injection), await KILL.prove_met(target, injection)):
            assert proof.failed == ["process 2 (io) of n1 still runs (state T)"]

    run_virtual(main())


@pytest.mark.parametrize(("nemesis", "variant"), [(KILL, "sigkill@n1"), (PAUSE, "sigstop@n1")])
def test_a_victim_that_was_started_or_continued_fails_the_final_check(
    nemesis: Any, variant: str, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(nemesis, target, variant)
        await nemesis.inject(target, injection)
        assert (await nemesis.prove(target, injection)).proven
        target.processes.immune.add("n1")
        proof = await nemesis.prove_met(target, injection)
        assert not proof.proven and proof.failed == ["n1 was running again before it was healed"]

    run_virtual(main())


@pytest.mark.parametrize("form", ["bump", "hour", "reset"])
def test_a_clock_that_somebody_corrected_before_it_was_healed_fails_the_final_check(
    form: str, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(CLOCK, target, f"{form}@n1")
        await CLOCK.inject(target, injection)
        assert (await CLOCK.prove(target, injection)).proven
        assert (await CLOCK.prove_met(target, injection)).proven
        offset_ms = injection.value["skews"]["n1"]["offset_ms"]
        target.clocks.wrong_by_ms["n1"] = -offset_ms
        proof = await CLOCK.prove_met(target, injection)
        assert not proof.proven and proof.failed == [f"the clock of n1 is off by 0 ms, not {offset_ms} ms"]

    run_virtual(main())


def test_the_final_check_reads_no_clock_of_a_victim_that_is_down(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(CLOCK, target, "bump@n1")
        await CLOCK.inject(target, injection)
        await target.processes.end("a stray signal", ["n1"])
        target.clocks.unreadable.add("n1")
        assert (await CLOCK.prove_met(target, injection)).proven

    run_virtual(main())


def test_a_kill_of_a_replica_that_another_fault_holds_is_not_known_to_be_exercised(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        other = await plan_fault(KILL, target, "sigkill@n1", fault_id="f2")
        injection = await plan_fault(KILL, target, "sigkill@n1")
        await KILL.inject(target, other)
        await KILL.inject(target, injection)
        proof = await KILL.prove(target, injection, in_force=[other])
        assert proof.proven and proof.exercised is None

    run_virtual(main())


def test_a_replica_that_is_restarted_only_once_is_in_no_crash_loop(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    """Another event, such as an operator's, restarts a replica once."""

    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(KILL, target, "crash-loop@n1")
        asyncio.get_running_loop().call_later(1.0, target.processes.starts.update, {"n1": 2})
        proof = await KILL.prove(target, injection)
        assert not proof.proven and proof.failed == ["n1 was started 1 times"]

    run_virtual(main())


def test_starts_of_a_victim_that_another_fault_keeps_down_prove_no_crash_loop(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        other = await plan_fault(KILL, target, "crash-loop@n1", fault_id="f2")
        await KILL.inject(target, other)
        injection = await plan_fault(KILL, target, "crash-loop@n1")
        proof = await KILL.prove(target, injection, in_force=[other])
        assert not proof.proven and proof.detail == "every victim is kept down by another fault"

    run_virtual(main())


# Clocks.


def distort(target: Any, change: Callable[[ClockReading, float], ClockReading], host: str = "n1") -> None:
    """Change what the clocks of a host show, given the seconds since."""
    now, loop = target.clocks.now, asyncio.get_running_loop()
    began_s = loop.time()

    def changed(asked: str, unsure_ms: float = 1.0) -> ClockReading:
        reading = now(asked, unsure_ms)
        return change(reading, loop.time() - began_s) if asked == host else reading

    target.clocks.now = changed


@pytest.mark.parametrize(
    ("form", "change", "reason"),
    [
        ("bump", lambda seen, _: dataclasses.replace(seen, offset_ms=-seen.offset_ms), "the clock of n1 is off by"),
        ("drift", lambda seen, _: dataclasses.replace(seen, offset_ms=-seen.offset_ms), "the clock of n1 drifted by"),
        (
            "bump",
            lambda seen, since_s: dataclasses.replace(seen, monotonic_s=seen.monotonic_s + 0.1 * since_s),
            "the monotonic clock of n1 advanced",
        ),
        (
            "slew",
            lambda seen, since_s: dataclasses.replace(seen, monotonic_s=seen.monotonic_s + 400e-6 * since_s),
            "it is slewed too",
        ),
        ("step", lambda seen, _: dataclasses.replace(seen, offset_ms=2.5 * seen.offset_ms), "should have drifted by"),
    ],
    ids=["a bump the other way", "a drift the other way", "a monotonic drift", "a monotonic slew", "wrong steps"],
)
def test_a_clock_that_is_wrong_in_another_way_than_planned_fails_the_proof(
    form: str, change: Any, reason: str, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(CLOCK, target, f"{form}@n1")
        await CLOCK.inject(target, injection)
        distort(target, change)
        proof = await CLOCK.prove(target, injection)
        assert not proof.proven and proof.failed and all(reason in problem for problem in proof.failed), proof.failed

    run_virtual(main())


@pytest.mark.parametrize(("silent", "exercised"), [("n1", None), ("n2", True)])
def test_only_a_victim_s_own_report_of_the_time_shows_that_it_met_the_fault(
    silent: str, exercised: bool | None, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        target.clocks.reads = 0
        target.mute.add(silent)
        injection = await plan_fault(CLOCK, target, "bump@n1")
        await CLOCK.inject(target, injection)
        proof = await CLOCK.prove(target, injection)
        assert proof.proven and proof.exercised is exercised, proof
        assert ("reported by n1" in proof.detail) is (exercised is True)

    run_virtual(main())


def test_a_replica_that_still_reports_a_wrong_time_is_not_healed(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(CLOCK, target, "bump@n1")
        await CLOCK.inject(target, injection)
        await CLOCK.heal(target, injection)
        honest = target.read_clock

        async def read_clock(host: str, *, timeout_s: float) -> Any:
            reading = await honest(host, timeout_s=timeout_s)
            return dataclasses.replace(reading, offset_ms=5000.0)

        target.read_clock = read_clock
        proof = await CLOCK.prove_healed(target, injection)
        assert not proof.proven and proof.failed == ["the clock of n1 is off by 5000 ms, not 0 ms"]

    run_virtual(main())


# Disks.


def test_a_disk_that_works_under_two_disk_faults_fails_the_proof(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        target.disks.immune.add("n1")
        other = await plan_fault(DISK_SLOW, target, "mild@n1", fault_id="f2")
        injection = await plan_fault(DISK_FULL, target, "full@n1")
        for nemesis, planned in ((DISK_SLOW, other), (DISK_FULL, injection)):
            await nemesis.inject(target, planned)
        proof = await DISK_FULL.prove(target, injection, in_force=[other])
        assert not proof.proven and proof.failed == ["the disk of n1 works"]

    run_virtual(main())


@pytest.mark.parametrize(
    ("seen", "failed", "exercised"),
    [
        (FaultMet(4, 0), ["n2 made 4 calls that the fault applies to, but none of them was hit"], True),
        (FaultMet(0, 0), [], True),
        (FaultMet(None, None), [], None),
    ],
)
def test_the_calls_of_one_victim_stand_for_no_other(
    seen: FaultMet, failed: list[str], exercised: bool | None, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(DISK_FULL, target, "full@n1+n2")
        await DISK_FULL.inject(target, injection)

        async def met(fault_id: str) -> dict[str, FaultMet]:
            return {"n1": FaultMet(5, 5), "n2": seen}

        target.disks.met = met
        for proof in (await DISK_FULL.prove(target, injection), await DISK_FULL.prove_met(target, injection)):
            assert proof.failed == failed and proof.proven is not bool(failed)
            assert proof.exercised is exercised

    run_virtual(main())


def test_calls_that_are_counted_on_some_victims_only_leave_it_unknown_whether_the_fault_was_met(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(DISK_FULL, target, "full@n1+n2")
        await DISK_FULL.inject(target, injection)

        async def met(fault_id: str) -> dict[str, FaultMet]:
            return {"n1": FaultMet(0, 0), "n2": FaultMet(None, None)}

        target.disks.met = met
        assert (await DISK_FULL.prove_met(target, injection)).exercised is None

    run_virtual(main())


def test_a_disk_on_which_writes_fail_does_not_prove_that_only_syncs_hang(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(DISK_STALL, target, "fsync@n1")
        await DISK_STALL.inject(target, injection)
        honest = target.disks.probe

        async def probe(host: str, *, timeout_s: float) -> DiskProbe:
            seen: DiskProbe = await honest(host, timeout_s=timeout_s)
            return dataclasses.replace(seen, write=DiskStep("EIO")) if host == "n1" else seen

        target.disks.probe = probe
        proof = await DISK_STALL.prove(target, injection)
        assert proof.failed == ["stall-fsync on n1: write EIO, sync no answer, read not tried"]

    run_virtual(main())


@pytest.mark.parametrize(
    ("spared", "reason"), [("processes", "n1 is running, not down"), ("disks", "n1 did not lose power")]
)
def test_a_power_cut_needs_both_the_end_of_the_replica_and_its_losses(
    spared: str, reason: str, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        getattr(target, spared).immune.add("n1")
        injection = await plan_fault(POWER, target, "cut@n1")
        await POWER.inject(target, injection)
        proof = await POWER.prove(target, injection)
        assert not proof.proven and proof.failed == [reason]

    run_virtual(main())


# Limits.


def test_a_limit_on_another_replica_fails_the_proof(make_fault_target: Any, plan_fault: Any, run_virtual: Run) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(RESOURCES, target, "cpu@n1")
        await RESOURCES.inject(target, injection)
        await target.resources.limit("f9", {"n3": ResourceLimit(kind="cpu", percent=5)})
        proof = await RESOURCES.prove(target, injection)
        assert not proof.proven and proof.failed == ["n3 is limited too: little"]

    run_virtual(main())


def test_hits_of_a_limit_before_the_fault_do_not_count(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        target.resources.counts["n1"], target.resources.is_met = 7, False
        injection = await plan_fault(RESOURCES, target, "cpu@n1")
        assert injection.evidence == {"met": {"n1": 7}}
        await RESOURCES.inject(target, injection)
        met = await RESOURCES.prove_met(target, injection)
        assert met.proven and met.exercised is False and met.detail == "limit hit 0 times on 1 replica"

    run_virtual(main())


def test_a_victim_whose_hits_are_not_counted_leaves_it_unknown_whether_the_limit_was_met(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        target.resources.is_met = False
        injection = await plan_fault(RESOURCES, target, "cpu@n1+n2")
        await RESOURCES.inject(target, injection)
        partly = dataclasses.replace(injection, evidence={"met": {"n1": 0, "n2": None}})
        assert (await RESOURCES.prove_met(target, injection)).exercised is False
        assert (await RESOURCES.prove_met(target, partly)).exercised is None

    run_virtual(main())


def test_a_limit_on_a_victim_that_another_fault_keeps_down_is_not_proven(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        other = await plan_fault(KILL, target, "sigkill@n1", fault_id="f2")
        injection = await plan_fault(RESOURCES, target, "cpu@n1")
        for nemesis, planned in ((KILL, other), (RESOURCES, injection)):
            await nemesis.inject(target, planned)
        proof = await RESOURCES.prove(target, injection, in_force=[other])
        assert not proof.proven and proof.detail == "every victim is kept down by another fault"

    run_virtual(main())


@pytest.mark.parametrize(("nemesis", "variant"), [(RESOURCES, "cpu@n1"), (NAME_SERVICE, "gone@n1")])
def test_a_victim_that_stays_down_after_its_fault_is_not_healed(
    nemesis: Any, variant: str, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(nemesis, target, variant)
        await nemesis.inject(target, injection)
        target.processes.stuck.add("n1")
        await nemesis.heal(target, injection)
        proof = await nemesis.prove_healed(target, injection)
        assert not proof.proven and proof.failed == ["n1 is down"]

    run_virtual(main())


# Names.

NAME_FAULTS = {
    "gone": (NameFault(kind="gone"), r"n1 gets no address for n\d \(gone\)"),
    "silent": (NameFault(kind="silent"), r"n1 gets no address for n\d \(silent\)"),
    "slow": (NameFault(kind="slow", delay_ms=3500), r"n1 resolves n\d to 10\.0\.0\.[2-5] after 3500 ms"),
    "wrong": (NameFault(kind="wrong"), r"n1 resolves n\d to 10\.0\.0\.1 after 0 ms"),
    "unused": (NameFault(kind="unused"), r"n1 resolves n\d to 10\.0\.0\.254 after 0 ms"),
    "late and wrong": (NameFault(kind="wrong", delay_ms=3500), r"n1 resolves n\d to 10\.0\.0\.1 after 3500 ms"),
}
"""What a name service does -> the fault that makes it do so, and the reason for which that proves no other fault."""


@pytest.mark.parametrize("done", NAME_FAULTS)
@pytest.mark.parametrize("form", ["gone", "silent", "slow", "wrong", "unused"])
def test_a_name_service_that_fails_in_another_way_proves_no_fault(
    form: str, done: str, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        injection = await plan_fault(NAME_SERVICE, target, f"{form}@n1")
        fault, reason = NAME_FAULTS[done]
        await target.names.disturb("f1", {"n1": fault})
        proof = await NAME_SERVICE.prove(target, injection)
        if form == done or (form, done) == ("wrong", "late and wrong"):
            assert proof.proven, proof
        else:
            assert not proof.proven and len(proof.failed) == 4
            assert all(re.fullmatch(reason, problem) for problem in proof.failed), proof.failed

    run_virtual(main())


def test_a_name_service_that_answers_no_question_proves_nothing(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(NAME_SERVICE, target, "gone@n1")
        await NAME_SERVICE.inject(target, injection)
        honest = target.names.look_up

        async def look_up(host: str, *, timeout_s: float) -> Any:
            return [] if host == "n1" else await honest(host, timeout_s=timeout_s)

        target.names.look_up = look_up
        proof = await NAME_SERVICE.prove(target, injection)
        assert not proof.proven and proof.failed == ["n1 has a name service that knows no hosts"]

    run_virtual(main())


def test_the_names_of_a_victim_that_another_fault_disturbs_prove_nothing(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        other = await plan_fault(NAME_SERVICE, target, "gone@n1", fault_id="f2")
        injection = await plan_fault(NAME_SERVICE, target, "gone@n1")
        await NAME_SERVICE.inject(target, other)
        proof = await NAME_SERVICE.prove(target, injection, in_force=[other])
        assert not proof.proven and proof.detail == "another fault already disturbs the names of every victim"

    run_virtual(main())


def test_lookups_of_one_victim_that_met_the_fault_do_not_excuse_those_of_another_that_did_not(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        injection = await plan_fault(NAME_SERVICE, target, "wrong@n1+n2")
        await NAME_SERVICE.inject(target, injection)

        async def met(fault_id: str) -> dict[str, FaultMet]:
            return {"n1": FaultMet(2, 2), "n2": FaultMet(3, 0)}

        target.names.met = met
        found = await NAME_SERVICE.prove_met(target, injection)
        assert not found.proven and found.failed == ["3 lookups by n2 were answered correctly despite the fault"]

    run_virtual(main())


def test_a_cold_start_needs_a_restart(make_fault_target: Any, plan_fault: Any, run_virtual: Run) -> None:
    """Without one, a replica whose connections stay open looks up nothing."""

    async def main() -> None:
        target = make_fault_target(3)
        target.processes.immune.add("n1")
        injection = await plan_fault(NAME_SERVICE, target, "cold@n1")
        await NAME_SERVICE.inject(target, injection)
        proof = await NAME_SERVICE.prove(target, injection)
        assert not proof.proven and proof.failed == ["n1 was not restarted"]

    run_virtual(main())


# Clients that do not read.


def answers_left(target: Any, **changes: int) -> None:
    """Change what is seen of the slow clients of n1."""
    honest = target.clients.unread

    async def unread(fault_id: str) -> dict[str, UnreadAnswers]:
        seen = await honest(fault_id)
        return {**seen, "n1": dataclasses.replace(seen["n1"], **changes)}

    target.clients.unread = unread


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stuck": 1}, r"n1: .* of 1 of 3 connections, .*; expected 3 connections with unread responses"),
        ({"read_bytes": 101}, "clients of n1 have read 101 bytes, more than the 100 allowed"),
    ],
)
def test_clients_of_which_some_read_prove_nothing(
    changes: dict[str, int], reason: str, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(SLOW_CLIENT, target, "stuck@n1")
        assert injection.value["connections"] == 3
        await SLOW_CLIENT.inject(target, injection)
        answers_left(target, **changes)
        proof = await SLOW_CLIENT.prove(target, injection)
        assert not proof.proven and proof.exercised is None
        assert len(proof.failed) == 1 and re.fullmatch(reason, proof.failed[0]), proof.failed

    run_virtual(main())


def test_responses_that_are_in_the_send_queue_only_for_a_moment_prove_no_slow_client(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(SLOW_CLIENT, target, "stuck@n1")
        await SLOW_CLIENT.inject(target, injection)
        honest, loop = target.clients.unread, asyncio.get_running_loop()
        looks, deadline_s = 0, loop.time() + FILL_TIMEOUT_S

        async def unread(fault_id: str) -> Any:
            nonlocal looks
            looks += 1
            is_stuck = looks < STUCK_LOOKS or loop.time() > deadline_s
            target.clients.immune = set() if is_stuck else {"n1"}
            return await honest(fault_id)

        target.clients.unread = unread
        proof = await SLOW_CLIENT.prove(target, injection)
        assert not proof.proven and proof.exercised is None
        assert proof.failed == ["n1: responses were stuck only for a moment"]

    run_virtual(main())


@pytest.mark.parametrize(("stuck", "closed", "exercised"), [(0, 0, False), (0, 1, True), (1, 0, True)])
def test_slow_clients_are_exercised_if_responses_are_stuck_or_a_connection_was_closed(
    stuck: int, closed: int, exercised: bool, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(SLOW_CLIENT, target, "stuck@n1")
        await SLOW_CLIENT.inject(target, injection)
        answers_left(target, stuck=stuck, closed=closed)
        met = await SLOW_CLIENT.prove_met(target, injection)
        assert met.proven and met.exercised is exercised

    run_virtual(main())


# Links.


@pytest.mark.parametrize(
    ("form", "remains", "reason"),
    [
        ("delay", {"delay_ms": 160.0, "reorder_percent": 90.0}, r"0\.1 ms late"),
        ("loss", {"loss_percent": 1.0}, "1 of 100 lost"),
        ("loss", {"loss_percent": 100.0}, "nothing arrived"),
        ("duplicate", {"duplicate_percent": 1.0}, "1 of 100 arrived twice"),
        ("reorder", {"reorder_percent": 2.0}, "1 of 50 out of order"),
        ("corrupt", {"corrupt_percent": 1.0}, "1 of 100 arrived damaged"),
        ("rate", {"delay_ms": 60.0}, r"50 packets of 1000 bytes in 0\.010 s, 60\.1 ms late"),
    ],
)
@pytest.mark.parametrize("spared", [Link("n1", "n2"), Link("n3", "n1")], ids=str)
def test_a_link_that_shows_a_trace_of_its_fault_fails_the_proof(
    form: str,
    remains: dict[str, float],
    reason: str,
    spared: Link,
    make_fault_target: Any,
    plan_fault: Any,
    run_virtual: Run,
) -> None:
    """Any network loses, reorders or holds up a packet now and then."""

    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(LINK, target, f"{form}@n1")
        target.links.immune.add(spared)
        target.links.always[spared] = LinkShape(**remains)
        injection.value["shape"].update(
            {name: 40.0 for name in ("loss_percent", "reorder_percent", "corrupt_percent") if name.startswith(form)}
        )
        await LINK.inject(target, injection)
        proof = await LINK.prove(target, injection)
        assert not proof.proven and len(proof.failed) == 1
        assert re.fullmatch(f"{spared.source}->{spared.destination}: {reason}", proof.failed[0]), proof.failed

    run_virtual(main())


def test_a_link_over_which_nothing_passes_after_its_fault_is_not_healed(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(LINK, target, "delay@n1")
        await LINK.inject(target, injection)
        await LINK.heal(target, injection)
        target.links.dead.add(Link("n2", "n1"))
        proof = await LINK.prove_healed(target, injection)
        assert not proof.proven and len(proof.failed) == 1 and proof.failed[0].startswith("n2->n1: 0 of 100 arrived")

    run_virtual(main())


class CountingNetwork:
    """Has counted the system's traffic so far."""

    def __init__(self) -> None:
        self.traffic_so_far = LinkTraffic()

    async def traffic(self, links: Any) -> dict[Link, LinkTraffic]:
        return dict.fromkeys(links, self.traffic_so_far)


@pytest.mark.parametrize("when", ["before the proof", "before the end"])
def test_traffic_that_bypasses_bad_links_disproves_their_fault(
    when: str, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        target.network = CountingNetwork()
        found: list[str] = []

        async def bypasses(links: Any) -> list[str]:
            assert set(links) == {Link("n1", "n2"), Link("n2", "n1"), Link("n1", "n3"), Link("n3", "n1")}
            return found

        target.links.bypasses = bypasses
        injection = await plan_fault(LINK, target, "delay@n1")
        await LINK.inject(target, injection)
        if when == "before the proof":
            found.append("n1 reaches n2 by another way")
        proof = await LINK.prove(target, injection)
        if when == "before the end":
            assert proof.proven
            found.append("n1 reaches n2 by another way")
            proof = await LINK.prove_met(target, dataclasses.replace(injection, evidence=proof.evidence))
        assert not proof.proven and proof.failed == ["n1 reaches n2 by another way"]

    run_virtual(main())


def test_traffic_that_a_cut_stops_has_met_the_bad_link_before_it(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        target.network = network = CountingNetwork()
        injection = await plan_fault(LINK, target, "delay@n1")
        await LINK.inject(target, injection)
        proof = await LINK.prove(target, injection)
        network.traffic_so_far = LinkTraffic(stopped_bytes=10)
        met = await LINK.prove_met(target, dataclasses.replace(injection, evidence=proof.evidence))
        assert met.exercised is True and met.detail.startswith("40 bytes")

    run_virtual(main())


# An operator's requests; more are in test_operations.


@pytest.mark.parametrize(
    ("done", "reason"),
    [
        (("n2", 4), "n2 leads term 4, n2 led term 3"),
        (("n3", 3), "n3 leads term 3, n2 led term 3"),
        (None, "no replica took over leadership"),
    ],
)
def test_only_a_candidate_that_leads_a_later_term_proves_a_transfer(
    done: tuple[str, int] | None, reason: str, make_fault_target: Any, run_virtual: Run
) -> None:
    class Transferred:
        def transferred(self, fault_id: str) -> tuple[str, int] | None:
            return done

    target = make_fault_target(3)
    target.operator = Transferred()
    value = {"id": "f1", "candidates": ["n1", "n3"], "leader": "n2", "term": 3}
    injection = Injection(fault_id="f1", nemesis="transfer", variant="to@followers", value=value)
    proof = run_virtual(TRANSFER.prove(target, injection))
    assert not proof.proven and proof.exercised is None and proof.detail == reason
