"""Every nemesis proves its effect, and its proof fails without one; overlapping faults heal independently."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from checker.faults import exercised_by
from nemesis.clock import CLOCK
from nemesis.corruption import BIT_FLIP
from nemesis.disk import DISK_ERROR, DISK_FULL, DISK_SLOW, DISK_STALL
from nemesis.driver import run_schedule
from nemesis.link import LINK
from nemesis.name_service import NAME_SERVICE
from nemesis.power import POWER
from nemesis.process import BACK_TIMEOUT_S, KILL, PAUSE
from nemesis.protocol import Injection
from nemesis.resources import RESOURCES
from nemesis.schedule import HEAL, INJECT, Schedule
from nemesis.slow_client import SLOW_CLIENT
from nemesis.target import ClockSkew, Link, LinkShape, LinkTraffic, NameFault

ALL = [
    *(KILL, PAUSE, CLOCK, DISK_STALL, DISK_SLOW, DISK_FULL, DISK_ERROR, POWER, LINK, BIT_FLIP, RESOURCES, SLOW_CLIENT),
    NAME_SERVICE,
]
FORMS = [(nemesis, form) for nemesis in ALL for form in nemesis.forms]
CASES = [(nemesis, variant) for nemesis in ALL for variant in nemesis.variants]
Run = Callable[[Any], Any]


@pytest.mark.parametrize(("nemesis", "variant"), CASES, ids=[f"{n.name}={v}" for n, v in CASES])
def test_every_variant_is_proved_and_healed(
    nemesis: Any, variant: str, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        injection = await plan_fault(nemesis, target, variant)
        assert injection.problem is None and injection.value["hosts"]
        before = await nemesis.prove(target, injection)
        assert not before.proven, "a fault that was not injected was proven"
        await nemesis.inject(target, injection)
        proof = await nemesis.prove(target, injection)
        assert proof.proven and proof.checked and not proof.failed, proof
        unhealed = await nemesis.prove_healed(target, injection)
        assert not unhealed.proven, "a fault in force was reported as healed"
        await nemesis.heal(target, injection)
        await nemesis.heal(target, injection)
        healed = await nemesis.prove_healed(target, injection)
        assert healed.proven, healed

    run_virtual(main())


@pytest.mark.parametrize("nemesis", ALL, ids=lambda nemesis: nemesis.name)
def test_a_fault_that_could_not_be_planned_counts_as_healed(
    nemesis: Any, make_fault_target: Any, run_virtual: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*args: Any, **named: Any) -> Any:
        raise OSError("the host is away")

    monkeypatch.setattr(type(nemesis), "plan", fail)
    events: list[dict[str, Any]] = []
    fault = {"id": "f1", "nemesis": nemesis.name, "variant": nemesis.variants[0]}
    schedule = Schedule.from_json([{"at_s": 1, "action": INJECT, **fault}, {"at_s": 2, "action": HEAL, **fault}])
    names, rng = {nemesis.name: nemesis}, random.Random(0)
    run_virtual(run_schedule(schedule, target=make_fault_target(3), nemeses=names, rng=rng, record=events.append))
    began, ended = (event["value"]["proof"] for event in events if event["type"] == "info")
    assert not began["proven"] and began["detail"] == "could not be planned: OSError: the host is away"
    assert ended["proven"], ended


@pytest.mark.parametrize("form", ["slow-monotonic", "fast-monotonic"])
def test_a_drift_of_the_monotonic_clock_is_proved(
    form: str, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        injection = await plan_fault(CLOCK, target, f"{form}@leader")
        assert not (await CLOCK.prove(target, injection)).proven
        await CLOCK.inject(target, injection)
        assert (await CLOCK.prove(target, injection)).proven
        assert (await CLOCK.prove_met(target, injection)).proven
        target.clocks.monotonic_unreached.add("n2")
        for unproven in (await CLOCK.prove(target, injection), await CLOCK.prove_met(target, injection)):
            assert not unproven.proven and "the monotonic clock of n2 is out of reach" in unproven.detail
        assert not (await CLOCK.prove_healed(target, injection)).proven
        await CLOCK.heal(target, injection)
        assert (await CLOCK.prove_healed(target, injection)).proven

    run_virtual(main())


@pytest.mark.parametrize("form", ["slow-monotonic", "fast-monotonic", "slew"])
def test_a_drift_is_proved_while_another_fault_drifts_the_monotonic_clock(
    form: str, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    """A clock shows the sum of all skews."""

    async def main() -> None:
        target = make_fault_target(3)
        other = await plan_fault(CLOCK, target, "fast-monotonic@n2")
        injection = await plan_fault(CLOCK, target, f"{form}@n2", fault_id="f2")
        await CLOCK.inject(target, other)
        assert not (await CLOCK.prove(target, injection, in_force=[other])).proven
        await CLOCK.inject(target, injection)
        proof = await CLOCK.prove(target, injection, in_force=[other])
        assert proof.proven, proof
        await CLOCK.heal(target, injection)
        healed = await CLOCK.prove_healed(target, injection, in_force=[other])
        assert healed.proven, healed

    run_virtual(main())


def test_a_delay_is_proved_on_links_that_another_fault_reorders(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    """Packets that overtake others are not delayed: if most do, the median packet is not late."""

    async def main() -> None:
        target = make_fault_target(5)
        reorder = await plan_fault(LINK, target, "reorder@all")
        reorder.value["shape"].update(reorder_percent=60.0, delay_ms=10.0)
        delay = await plan_fault(LINK, target, "delay@all", fault_id="f2")
        await LINK.inject(target, reorder)
        assert not (await LINK.prove(target, delay, in_force=[reorder])).proven
        await LINK.inject(target, delay)
        proof = await LINK.prove(target, delay, in_force=[reorder])
        assert proof.proven, proof
        await LINK.heal(target, delay)
        await LINK.heal(target, reorder)
        assert (await LINK.prove_healed(target, delay)).proven

    run_virtual(main())


@pytest.mark.parametrize(
    ("form", "is_met", "exercised"),
    [("cpu", True, True), ("memory", False, False), ("processes", True, True), ("descriptors", True, None)],
)
def test_a_limit_is_exercised_if_the_kernel_counted_hits(
    form: str, is_met: bool, exercised: bool | None, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        target.resources.is_met = is_met
        injection = await plan_fault(RESOURCES, target, f"{form}@n2")
        await RESOURCES.inject(target, injection)
        unplanned = Injection(fault_id="f2", nemesis="resources", variant="cpu@n1", value={}, problem="no plan")
        proof = await RESOURCES.prove(target, injection, in_force=[unplanned])
        assert proof.proven, proof
        lasting = dataclasses.replace(injection, evidence={**injection.evidence, **proof.evidence})
        met = await RESOURCES.prove_met(target, lasting)
        assert met.proven and met.exercised is exercised, met
        target.resources.immune = {"n2"}
        lapsed = await RESOURCES.prove_met(target, lasting)
        assert not lapsed.proven and "n2 is no longer limited" in lapsed.detail
        target.processes.starts["n2"] = 2
        assert (await RESOURCES.prove_met(target, lasting)).proven, "another fault has ended the limited processes"

    run_virtual(main())


@pytest.mark.parametrize(
    ("second", "exercised"),
    [("cpu@n2", None), ("memory@n2", True), ("cpu@n3", True), ("cpu@all", None)],
)
def test_whether_a_limit_was_exercised_is_unknown_if_another_fault_limits_the_same(
    second: str, exercised: bool | None, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(RESOURCES, target, "cpu@n2")
        other = await plan_fault(RESOURCES, target, second, fault_id="f2")
        for each in (injection, other):
            await RESOURCES.inject(target, each)
        await RESOURCES.heal(target, other)
        lasting = dataclasses.replace(injection, beside=[other])
        met = await RESOURCES.prove_met(target, lasting)
        assert met.proven and met.exercised is exercised, met
        assert ("those on n2 may all be due to another such fault" in met.detail) is (exercised is None)

    run_virtual(main())


def test_a_process_that_is_not_under_the_limit_fails_the_proof(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(RESOURCES, target, "cpu@n2")
        await RESOURCES.inject(target, injection)
        target.resources.astray = {"n2"}
        proof = await RESOURCES.prove(target, injection)
        assert not proof.proven and proof.failed == ["process 7 (io) of n2 is not under the limit"]

    run_virtual(main())


@pytest.mark.parametrize(
    ("asked", "met", "proven", "exercised"), [(3, 3, True, True), (0, 0, True, False), (3, 0, False, False)]
)
def test_a_name_service_fault_is_exercised_if_the_replica_s_own_lookups_met_it(
    asked: int, met: int, proven: bool, exercised: bool, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        target.names.asked, target.names.met_by_programs = asked, met
        injection = await plan_fault(NAME_SERVICE, target, "wrong@n2")
        await NAME_SERVICE.inject(target, injection)
        assert (await NAME_SERVICE.prove(target, injection)).exercised is None, "only the final check decides this"
        found = await NAME_SERVICE.prove_met(target, injection)
        assert (found.proven, found.exercised) == (proven, exercised), found

    run_virtual(main())


def test_a_cold_name_service_fault_restarts_the_replica_while_no_name_resolves(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(NAME_SERVICE, target, "cold@n2")
        found = []

        async def release(fault_id: str) -> None:
            target.processes.down.pop(fault_id, None)
            found.append([each.found for each in await target.names.look_up("n2", timeout_s=1.0)])

        target.processes.release = release
        await NAME_SERVICE.inject(target, injection)
        assert found == [["gone", "gone"]] and target.processes.signals == ["KILL"]
        assert target.processes.state("n2") == "running"

    run_virtual(main())


def test_a_program_that_sees_a_different_resolv_conf_fails_the_proof(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(NAME_SERVICE, target, "gone@n2")
        await NAME_SERVICE.inject(target, injection)
        unplanned = Injection(fault_id="f2", nemesis="name-service", variant="gone@n1", value={}, problem="no plan")
        assert (await NAME_SERVICE.prove(target, injection, in_force=[unplanned])).proven
        target.names.unreached = {"n2"}
        for proof in (
            await NAME_SERVICE.prove(target, injection),
            await NAME_SERVICE.prove_met(target, injection),
        ):
            assert not proof.proven and proof.failed == ["process 7 (io) of n2 sees a different /etc/resolv.conf"]

    run_virtual(main())


class Counting:
    """A network that counts; `sent` is what the system has sent over every link so far."""

    sent = 0

    async def traffic(self, links: Any) -> dict[Link, LinkTraffic]:
        return {link: LinkTraffic(passed_bytes=self.sent) for link in links}


@pytest.mark.parametrize(("more", "exercised"), [(70, True), (0, False)])
def test_a_link_fault_is_exercised_if_the_system_used_its_links(
    more: int, exercised: bool, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        target.network = network = Counting()
        network.sent = 1000
        injection = await plan_fault(LINK, target, "delay@n1")
        await LINK.inject(target, injection)
        proof = await LINK.prove(target, injection)
        lasting = dataclasses.replace(injection, evidence=proof.evidence)
        network.sent += more
        met = await LINK.prove_met(target, lasting)
        assert met.proven and met.exercised is exercised, met
        assert f"{4 * more} bytes" in met.detail

    run_virtual(main())


def spare(target: Any, injection: Injection) -> None:
    """Exempt one victim from the fault."""
    host = injection.value["hosts"][0]
    held = (target.processes, target.clocks, target.disks, target.resources, target.clients, target.names)
    for interface in held:
        interface.immune.add(host)
    target.links.immune |= {Link(*name.split("->")) for name in injection.value.get("links", ())[:1]}


@pytest.mark.parametrize("variant", ["kill=sigkill@n3", "pause=sigstop@n3"])
def test_a_process_of_the_replica_that_keeps_running_fails_the_proof(
    variant: str, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    """In the first proof, or in the final check."""
    name, _, form = variant.partition("=")
    nemesis: Any = {"kill": KILL, "pause": PAUSE}[name]

    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(nemesis, target, form)
        assert injection.evidence == {"processes": {"n3": [[1, 100, "main"], [2, 101, "io"]]}}
        await nemesis.inject(target, injection)
        proof = await nemesis.prove(target, injection)
        assert proof.proven and proof.exercised is True and "silent (2 processes)" in proof.detail
        assert (await nemesis.prove_met(target, injection)).proven
        target.processes.astray = {"n3"}
        for proof in (await nemesis.prove(target, injection), await nemesis.prove_met(target, injection)):
            assert not proof.proven and proof.failed == ["process 2 (io) of n3 still runs (state S)"]
        target.processes.astray = set()
        for meets_signal in (True, False):
            target.processes.waiting = {"n3": ("D", meets_signal)}
            for proof in (await nemesis.prove(target, injection), await nemesis.prove_met(target, injection)):
                assert proof.proven is meets_signal, proof
        target.processes.waiting = {}
        target.processes.immune = {"n3"}
        assert (await nemesis.prove_met(target, injection)).failed == ["n3 was running again before it was healed"]

    run_virtual(main())


def test_a_replica_that_exited_is_excused_if_another_fault_has_hit_it(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    """A replica that was removed from its group may exit."""

    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(PAUSE, target, "sigstop@n1")
        await PAUSE.inject(target, injection)
        target.processes.dead.add("n3")
        proof = await PAUSE.prove(target, injection)
        assert not proof.proven and proof.failed == ["n3 should run but is down"]
        for struck, is_proven in (("n2", False), ("n3", True)):
            other = Injection(fault_id="f2", nemesis="members", variant="remove@n3", value={"hosts": [struck]})
            assert (await PAUSE.prove(target, injection, in_force=[other])).proven is is_proven

    run_virtual(main())


@pytest.mark.parametrize(("nemesis", "variant"), [(KILL, "sigkill@n1"), (PAUSE, "sigstop@n1")])
def test_a_replica_that_crashed_before_the_fault_is_named_but_fails_no_proof(
    nemesis: Any, variant: str, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    """One that crashes after the plan may have received a stray signal of the fault."""

    async def main() -> None:
        target = make_fault_target(3)
        target.processes.dead.add("n3")
        injection = await plan_fault(nemesis, target, variant)
        await nemesis.inject(target, injection)
        proof = await nemesis.prove(target, injection)
        assert proof.proven and proof.detail.endswith("1 other runs, n3 had already exited on its own"), proof
        target.processes.dead.add("n2")
        proof = await nemesis.prove(target, injection)
        assert not proof.proven and proof.failed == ["n2 should run but is down"]

    run_virtual(main())


@pytest.mark.parametrize(("nemesis", "form"), FORMS, ids=[f"{n.name}={f}" for n, f in FORMS])
def test_one_unaffected_victim_fails_the_proof(
    nemesis: Any, form: str, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        injection = await plan_fault(nemesis, target, f"{form}@minority")
        spare(target, injection)
        await nemesis.inject(target, injection)
        proof = await nemesis.prove(target, injection)
        spared = injection.value["hosts"][0]
        assert not proof.proven and proof.failed
        assert all(spared in problem for problem in proof.failed), proof.failed

    run_virtual(main())


def test_a_few_late_packets_on_other_links_do_not_fail_the_proof_of_reordering(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    """Networks reorder a few packets without any fault."""

    async def main() -> None:
        target = make_fault_target(5)
        injection = await plan_fault(LINK, target, "reorder@n1")
        injection.value["shape"]["reorder_percent"] = 27.6
        await LINK.inject(target, injection)
        for percent, is_well in ((4.0, True), (20.0, False)):
            target.links.always[Link("n3", "n4")] = LinkShape(reorder_percent=percent)
            assert (await LINK.prove(target, injection)).proven is is_well

    run_virtual(main())


def test_an_affected_host_or_link_outside_the_fault_fails_the_proof(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        for nemesis, variant, hurt in (
            (KILL, "sigkill@n1", lambda t: t.processes.ended.add("n3")),
            (PAUSE, "sigstop@n1", lambda t: t.processes.ended.add("n3")),
            (CLOCK, "bump@n1", lambda t: t.clocks.wrong_by_ms.update(n3=5000.0)),
            (DISK_FULL, "full@n1", lambda t: t.disks.broken.add("n3")),
            (LINK, "delay@n1", lambda t: t.links.always.update({Link("n3", "n4"): LinkShape(delay_ms=500)})),
            (LINK, "loss@n1", lambda t: t.links.dead.add(Link("n3", "n4"))),
            (NAME_SERVICE, "gone@n1", lambda t: t.names.faults.update(f9={"n3": NameFault(kind="gone")})),
        ):
            target = make_fault_target(5)
            injection = await plan_fault(nemesis, target, variant)
            await nemesis.inject(target, injection)
            assert (await nemesis.prove(target, injection)).proven
            hurt(target)
            proof = await nemesis.prove(target, injection)
            assert not proof.proven and "n3" in proof.failed[0], (nemesis.name, proof)

    run_virtual(main())


def test_a_killed_replica_that_answers_fails_the_proof(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        injection = await plan_fault(KILL, target, "sigkill@n1")
        await KILL.inject(target, injection)
        target.talkative.add("n1")
        proof = await KILL.prove(target, injection)
        assert proof.failed == [
            "n1 is down, yet something answers for it: check that the plug-in's status() asks n1 itself"
        ]

    run_virtual(main())


def test_terminate_sends_sigterm_and_sigkill_sends_sigkill(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> list[str]:
        target = make_fault_target(5)
        for variant in ("terminate@n1", "sigkill@n1"):
            await KILL.inject(target, await plan_fault(KILL, target, variant))
        return list(target.processes.signals)

    assert run_virtual(main()) == ["TERM", "KILL"]


@pytest.mark.parametrize(("deaf", "exercised"), [((), True), (("n1",), True), (("n1", "n2"), False)])
def test_terminate_is_not_exercised_if_no_victim_ended_after_sigterm(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run, deaf: tuple[str, ...], exercised: bool
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        target.processes.deaf = set(deaf)
        injection = await plan_fault(KILL, target, "terminate@n1+n2")
        await KILL.inject(target, injection)
        proof, met = await KILL.prove(target, injection), await KILL.prove_met(target, injection)
        assert proof.proven and exercised_by(proof.to_json(), met.to_json()) is exercised
        told = f"{', '.join(deaf)} did not end in time after SIGTERM and needed a SIGKILL"
        assert [word.detail.endswith(told) for word in (proof, met)] == [bool(deaf)] * 2

    run_virtual(main())


@pytest.mark.parametrize("is_over", [False, True])
def test_a_replica_ended_during_its_pause_is_not_reported_as_paused_until_the_end(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run, is_over: bool
) -> None:
    """It is resumed to handle its SIGTERM."""

    async def main() -> None:
        target = make_fault_target(5)
        injection = await plan_fault(PAUSE, target, "sigstop@n1+n2")
        await PAUSE.inject(target, injection)
        proof = await PAUSE.prove(target, injection)
        lasting = dataclasses.replace(injection, evidence=proof.evidence)
        assert (await PAUSE.prove_met(target, lasting)).detail == "no process of n1, n2 ran until the end"
        await target.processes.end("kill", ["n1"], signal_name="TERM")
        if is_over:
            await target.processes.release("kill")
            target.processes.starts["n1"] = 2
        met = await PAUSE.prove_met(target, lasting)
        told = "n1 did not stay paused until the end: another fault ended it meanwhile"
        assert met.proven and met.detail == f"no process of n2 ran until the end; {told}"

    run_virtual(main())


@pytest.mark.parametrize("form", ["sigkill", "terminate"])
def test_a_kill_is_not_exercised_if_all_victims_had_exited_on_their_own(
    form: str, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        injection = await plan_fault(KILL, target, f"{form}@n1+n2")
        await KILL.inject(target, injection)

        async def exercised() -> bool | None:
            proof, met = await KILL.prove(target, injection), await KILL.prove_met(target, injection)
            assert proof.proven and met.proven
            return exercised_by(proof.to_json(), met.to_json())

        target.processes.dead = {"n1"}
        assert await exercised() is True
        target.processes.deaf = {"n2"}
        assert await exercised() is (form == "sigkill")  # no victim ended after SIGTERM
        target.processes.dead, target.processes.deaf = {"n1", "n2"}, set()
        assert await exercised() is False

    run_virtual(main())


def test_a_replica_that_stays_down_is_not_healed(make_fault_target: Any, plan_fault: Any, run_virtual: Run) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        injection = await plan_fault(KILL, target, "sigkill@n1")
        await KILL.inject(target, injection)
        target.processes.stuck.add("n1")
        await KILL.heal(target, injection)
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        proof = await KILL.prove_healed(target, injection)
        assert not proof.proven and proof.failed == ["n1 is down"]
        assert loop.time() - begin_s == pytest.approx(BACK_TIMEOUT_S, abs=1)

    run_virtual(main())


@pytest.mark.parametrize("nemesis", [KILL, PAUSE, POWER, BIT_FLIP, DISK_ERROR], ids=lambda nemesis: nemesis.name)
def test_a_fault_is_healed_even_if_the_replica_then_exits_or_does_not_answer(
    nemesis: Any, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        form = next(iter(nemesis.forms))
        injection = await plan_fault(nemesis, target, f"{form}@n1+n2")
        await nemesis.inject(target, injection)
        await nemesis.heal(target, injection)
        target.processes.dead.add("n1")
        target.mute.add("n2")
        proof = await nemesis.prove_healed(target, injection)
        assert proof.proven, proof.detail
        assert "n1 was started but exited on its own" in proof.detail
        assert "n2 runs but does not answer" in proof.detail
        target.processes.dead.clear()
        target.processes.stuck.add("n1")
        assert (await nemesis.prove_healed(target, injection)).failed == ["n1 is down"]

    run_virtual(main())


def test_replicas_that_exited_on_a_disk_error_are_started_again(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        injection = await plan_fault(DISK_ERROR, target, "read@n1")
        await DISK_ERROR.inject(target, injection)
        target.processes.ended.add("n1")
        assert (await DISK_ERROR.prove(target, injection)).proven
        await DISK_ERROR.heal(target, injection)
        assert (await DISK_ERROR.prove_healed(target, injection)).proven

    run_virtual(main())


@pytest.mark.parametrize("nemesis", [DISK_STALL, DISK_SLOW, DISK_FULL, DISK_ERROR], ids=lambda nemesis: nemesis.name)
def test_a_replica_that_its_disk_fault_does_not_reach_fails_the_proof(
    nemesis: Any, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        injection = await plan_fault(nemesis, target, nemesis.variants[0])
        await nemesis.inject(target, injection)
        victim = injection.value["hosts"][0]
        target.disks.unreached.add(victim)
        proof = await nemesis.prove(target, injection)
        assert not proof.proven and proof.failed == [f"{victim} is out of reach"]

    run_virtual(main())


@pytest.mark.parametrize(("nemesis", "variant"), [(DISK_STALL, "fsync@n1"), (CLOCK, "bump@n1"), (CLOCK, "drift@n1")])
def test_a_second_program_that_the_fault_does_not_reach_fails_the_proof(
    nemesis: Any, variant: str, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        target.processes.pids = (1, 2)
        injection = await plan_fault(nemesis, target, variant)
        await nemesis.inject(target, injection)
        assert (await nemesis.prove(target, injection)).proven
        assert (await nemesis.prove_met(target, injection)).proven
        (target.clocks if nemesis is CLOCK else target.disks).unreached.add(2)
        for proof in (await nemesis.prove(target, injection), await nemesis.prove_met(target, injection)):
            assert not proof.proven and proof.failed == ["n1 is out of reach"]

    run_virtual(main())


@pytest.mark.parametrize("nemesis", [DISK_STALL, DISK_SLOW, DISK_FULL, DISK_ERROR], ids=lambda nemesis: nemesis.name)
def test_a_disk_fault_is_exercised_by_the_replica_s_own_calls(
    nemesis: Any, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        injection = await plan_fault(nemesis, target, nemesis.variants[0])
        await nemesis.inject(target, injection)
        for calls, met, proven, in_proof, in_the_end in (
            (5, 5, True, True, True),
            (0, 0, True, None, False),  # no call at all: the replica neither proves nor disproves it
            (5, 0, False, None, False),  # unaffected calls: the mechanism has no effect
            (None, None, True, None, None),
        ):
            target.disks.calls, target.disks.calls_that_met = calls, met
            proof = await nemesis.prove(target, injection)
            assert (proof.proven, proof.exercised) == (proven, in_proof), proof
            proof = await nemesis.prove_met(target, injection)
            assert (proof.proven, proof.exercised) == (proven, in_the_end), proof
        target.disks.calls, target.disks.calls_that_met = 5, 5
        victim = injection.value["hosts"][0]
        target.disks.unreached.add(victim)
        assert (await nemesis.prove_met(target, injection)).failed == [f"{victim} is out of reach"]

    run_virtual(main())


@pytest.mark.parametrize(("recorded", "exercised"), [(7, True), (0, False), (None, None)])
def test_a_power_cut_is_not_exercised_if_the_replica_wrote_nothing(
    recorded: int | None, exercised: bool | None, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        target.disks.recorded = recorded
        injection = await plan_fault(POWER, target, "cut@n1")
        await POWER.inject(target, injection)
        proof = await POWER.prove(target, injection)
        assert proof.proven and proof.exercised is exercised

    run_virtual(main())


def test_a_clock_fault_is_proved_without_an_answer_of_any_replica(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        injection = await plan_fault(CLOCK, target, "bump@n1")
        await CLOCK.inject(target, injection)
        assert (await CLOCK.prove(target, injection)).exercised is True
        target.mute |= {*target.hosts}
        proof = await CLOCK.prove(target, injection)
        assert proof.proven and proof.exercised is True, "no replica has to answer"
        target.clocks.reads = 0
        assert (await CLOCK.prove(target, injection)).exercised is None
        assert (await CLOCK.prove_met(target, injection)).exercised is False
        target.clocks.unreached.add("n1")
        for proof in (await CLOCK.prove(target, injection), await CLOCK.prove_met(target, injection)):
            assert not proof.proven and proof.failed == ["n1 is out of reach"]

    run_virtual(main())


@pytest.mark.parametrize(("form", "which"), [("bump", "wall"), ("slow-monotonic", "monotonic")])
def test_an_unexercised_clock_fault_names_the_clock_that_no_replica_has_read(
    form: str, which: str, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    """Programs that read only the monotonic clock never meet a fault of the wall clock."""

    async def main() -> None:
        target = make_fault_target(5)
        target.clocks.reads = 0
        injection = await plan_fault(CLOCK, target, f"{form}@n1")
        await CLOCK.inject(target, injection)
        met = await CLOCK.prove_met(target, injection)
        assert met.exercised is False
        assert met.detail.startswith(f"no replica has read its {which} clock")

    run_virtual(main())


def test_a_replica_that_reports_an_unskewed_clock_fails_the_proof(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        injection = await plan_fault(CLOCK, target, "bump@n1")
        await CLOCK.inject(target, injection)
        honest = target.read_clock

        async def read_clock(host: str, *, timeout_s: float) -> Any:
            return dataclasses.replace(await honest(host, timeout_s=timeout_s), offset_ms=0.0)

        target.read_clock = read_clock
        proof = await CLOCK.prove(target, injection)
        assert not proof.proven and "the clock of n1 is off by 0 ms" in proof.detail

    run_virtual(main())


@pytest.mark.parametrize("form", ["step", "strobe", "drift"])
def test_a_clock_proof_does_not_wait_for_replicas_that_report_no_time(
    form: str, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    """A proof takes only as long as the clock must be watched: two steps take 5.2 s at most."""

    async def main() -> None:
        target = make_fault_target(5)
        target.tells_time, target.read_clock = False, None
        injection = await plan_fault(CLOCK, target, f"{form}@n1")
        await CLOCK.inject(target, injection)
        began_s = asyncio.get_running_loop().time()
        proof = await CLOCK.prove(target, injection)
        assert proof.proven and "reported by" not in proof.detail, proof
        assert asyncio.get_running_loop().time() - began_s < 5.5
        await CLOCK.heal(target, injection)
        assert (await CLOCK.prove_healed(target, injection)).proven

    run_virtual(main())


@pytest.mark.parametrize("form", ["fsync", "all", "freeze"])
@pytest.mark.parametrize(("starts_s", "proven"), [(2.0, True), (60.0, False)])
def test_a_stall_is_proven_only_by_a_probe_that_reached_the_disk(
    form: str, starts_s: float, proven: bool, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(DISK_STALL, target, f"{form}@n1")
        await DISK_STALL.inject(target, injection)
        target.disks.probes_start_s = starts_s

        async def works(host: str, *, timeout_s: float, probe: Any = target.disks.probe) -> Any:
            return await probe(host, timeout_s=timeout_s if host == "n1" else 100.0)

        target.disks.probe = works
        proof = await DISK_STALL.prove(target, injection)
        assert proof.proven is proven, proof
        assert proven or proof.failed[0].endswith(" on n1: write not tried, sync not tried, read not tried")

    run_virtual(main())


@pytest.mark.parametrize("variant", ["cut@all", "cut-torn@n1", "crash@n1"])
def test_a_power_cut_waits_until_an_account_has_been_kept_for_some_time(
    variant: str, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    """Only what is written in that time can be lost."""

    async def main() -> None:
        target = make_fault_target(3)
        target.disks.account_s = 2.0
        injection = await plan_fault(POWER, target, variant)
        cutting = asyncio.ensure_future(POWER.inject(target, injection))
        await asyncio.sleep(1.9)
        assert target.processes.down == {} and target.disks.expected == {"f1": [*injection.value["hosts"]]}
        await asyncio.sleep(0.2)
        assert target.processes.down == {"f1": {*injection.value["hosts"]}}
        await cutting

    run_virtual(main())


@pytest.mark.parametrize("unreached", ["n1", 2], ids=["the host", "its second program"])
def test_power_is_not_cut_if_a_program_is_out_of_reach(
    unreached: str | int, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        target.processes.pids = (1, 2)
        injection = await plan_fault(POWER, target, "cut@n1")
        target.disks.unreached.add(unreached)
        with pytest.raises(RuntimeError, match="out of reach"):
            await POWER.inject(target, injection)
        assert target.processes.down == {}

    run_virtual(main())


def test_flipping_a_bit_of_a_missing_file_is_an_error(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        injection = await plan_fault(BIT_FLIP, target, "log@n1")
        target.disks.broken.add("n1")
        with pytest.raises(RuntimeError, match="n1 has no log"):
            await BIT_FLIP.inject(target, injection)
        await BIT_FLIP.heal(target, injection)
        assert (await BIT_FLIP.prove_healed(target, injection)).proven

    run_virtual(main())


def test_a_bit_flip_that_left_the_byte_unchanged_fails_the_proof(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        target.disks.flipped_reads = 1
        injection = await plan_fault(BIT_FLIP, target, "log@n1")
        await BIT_FLIP.inject(target, injection)
        assert (await BIT_FLIP.prove(target, injection)).proven
        flipped = target.disks.flips[injection.fault_id]
        flipped["n1"] = dataclasses.replace(flipped["n1"], after=flipped["n1"].before)
        proof = await BIT_FLIP.prove(target, injection)
        assert not proof.proven and "is 0x00, was 0x00" in proof.detail

    run_virtual(main())


def test_bits_are_flipped_only_in_files_that_the_system_declares(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    target = make_fault_target(5)
    injection = run_virtual(plan_fault(BIT_FLIP, target, "vote@n1"))
    run_virtual(BIT_FLIP.inject(target, injection))
    assert target.disks.flipped(injection.fault_id)["n1"].path == "/n1/vote"

    del target.files["vote"]
    assert "no vote file" in BIT_FLIP.requires(target, "vote@one")[0]
    assert BIT_FLIP.requires(target) == BIT_FLIP.requires(target, "log@one") == []
    target.files.clear()
    assert len({*BIT_FLIP.requires(target), *BIT_FLIP.requires(target, "log@one")}) == 1
    assert "declares no stored files" in BIT_FLIP.requires(target)[0]


def test_faults_on_the_same_hosts_heal_independently(make_fault_target: Any, plan_fault: Any, run_virtual: Run) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        plans = [
            (KILL, await plan_fault(KILL, target, "sigkill@n1+n2", fault_id="f1")),
            (KILL, await plan_fault(KILL, target, "sigkill@n2+n3", fault_id="f2")),
            (PAUSE, await plan_fault(PAUSE, target, "sigstop@n3+n4", fault_id="f3")),
            (CLOCK, await plan_fault(CLOCK, target, "bump@n4+n5", fault_id="f4")),
            (CLOCK, await plan_fault(CLOCK, target, "bump@n5", fault_id="f5", seed=2)),
            (DISK_FULL, await plan_fault(DISK_FULL, target, "full@n5", fault_id="f6")),
        ]
        in_force: list[Injection] = []
        for nemesis, injection in plans:
            await nemesis.inject(target, injection)
            proof = await nemesis.prove(target, injection, in_force=tuple(in_force))
            assert proof.proven, (injection.fault_id, proof)
            in_force.append(injection)
        for nemesis, injection in plans:
            await nemesis.heal(target, injection)
            in_force.remove(injection)
            healed = await nemesis.prove_healed(target, injection, in_force=tuple(in_force))
            assert healed.proven, (injection.fault_id, healed)
        assert all(target.processes.state(host) == "running" for host in target.hosts)

    run_virtual(main())


def test_a_fault_of_links_that_a_partition_cuts_is_not_proven(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(LINK, target, "delay@n1")
        await LINK.inject(target, injection)
        isolated = {"n1": ["n2", "n3"], "n2": ["n1"], "n3": ["n1"]}
        cut = Injection(fault_id="p", nemesis="partition", variant="x", value={"id": "p", "grudge": isolated})
        proof = await LINK.prove(target, injection, in_force=(cut,))
        assert not proof.proven and "cannot be observed" in proof.detail
        one_way = Injection(fault_id="p", nemesis="partition", variant="x", value={"id": "p", "grudge": {"n1": ["n2"]}})
        assert (await LINK.prove(target, injection, in_force=(one_way,))).proven

    run_virtual(main())


@pytest.mark.parametrize(("form", "sent", "received"), [("delay-out", 4, 0), ("delay-in", 0, 4), ("delay", 4, 4)])
def test_a_link_fault_affects_the_directions_of_its_form(
    form: str, sent: int, received: int, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    injection = run_virtual(plan_fault(LINK, make_fault_target(5), f"{form}@n2"))
    links = [Link(*name.split("->")) for name in injection.value["links"]]
    assert len([link for link in links if link.source == "n2"]) == sent
    assert len([link for link in links if link.destination == "n2"]) == received


def test_a_slow_sender_is_not_taken_for_a_narrow_link(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    """If a machine sends a burst more slowly than the rate allows, healthy links are still recognised."""

    async def scenario(target: Any) -> None:
        measure = target.links._measure

        def slowly(link: Link, count: int, size_bytes: int) -> Any:
            seen = measure(link, count, size_bytes)
            return seen if len(set(seen.delays_ms)) > 1 else dataclasses.replace(seen, seconds=3.0)

        target.links._measure = slowly
        injection = await plan_fault(LINK, target, "rate@n1")
        await LINK.inject(target, injection)
        assert (await LINK.prove(target, injection)).proven
        await LINK.heal(target, injection)
        assert (await LINK.prove_healed(target, injection)).proven

    run_virtual(scenario(make_fault_target(3)))


def test_a_slew_below_the_uncertainty_of_readings_is_not_proven(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        injection = await plan_fault(CLOCK, target, "slew@n1")
        await CLOCK.inject(target, injection)
        assert (await CLOCK.prove(target, injection)).proven
        target.clocks.unsure_ms = 2.0
        proof = await CLOCK.prove(target, injection)
        assert not proof.proven and "too coarse to see the drift" in proof.detail

    run_virtual(main())


def test_a_clock_that_drifts_and_is_never_stepped_fails_the_proof(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        injection = await plan_fault(CLOCK, target, "step@n1")
        rate_ppm = injection.value["skews"]["n1"]["rate_ppm"]
        await target.clocks.skew("f1", {"n1": ClockSkew(rate_ppm=rate_ppm)})
        proof = await CLOCK.prove(target, injection)
        assert not proof.proven and "n1 was not stepped" in proof.detail
        await target.clocks.skew("f1", {"n1": ClockSkew(rate_ppm=-rate_ppm, step_ms=128)})
        proof = await CLOCK.prove(target, injection)
        assert not proof.proven and "n1 was not stepped" in proof.detail

    run_virtual(main())


def test_damaged_packets_and_lost_packets_are_told_apart(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        planned = {form: await plan_fault(LINK, target, f"{form}@n1", fault_id=form) for form in ("loss", "corrupt")}
        for form, other in (("loss", "corrupt"), ("corrupt", "loss")):
            planned[form].value["shape"].update({f"{form}_percent": 40.0})
            await LINK.inject(target, planned[form])
            assert (await LINK.prove(target, planned[form])).proven
            proof = await LINK.prove(target, planned[other], in_force=[planned[form]])
            unseen = {"corrupt": "0 of 100 arrived damaged", "loss": "0 of 100 lost"}[other]
            assert not proof.proven and all(problem.endswith(unseen) for problem in proof.failed), proof.failed
            await LINK.heal(target, planned[form])

    run_virtual(main())


@pytest.mark.parametrize("refused", [0, 3])
def test_corruption_is_exercised_if_a_kernel_refused_packets(
    refused: int, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        counts = dict.fromkeys(target.hosts, 5)

        async def count(hosts: Any) -> dict[str, int]:
            return {host: counts[host] for host in hosts}

        target.links.refused = count
        injection = await plan_fault(LINK, target, "corrupt@n1")
        await LINK.inject(target, injection)
        proof = await LINK.prove(target, injection)
        counts["n2"] += refused
        lasting = dataclasses.replace(injection, evidence=proof.evidence)
        met = await LINK.prove_met(target, lasting)
        assert met.proven and met.exercised is bool(refused)
        for beside, exercised in (("corrupt@n1", None), ("delay@n1", True)):
            other = await plan_fault(LINK, target, beside, fault_id="f2")
            met = await LINK.prove_met(target, dataclasses.replace(lasting, beside=[other]))
            assert met.exercised is (exercised if refused else False), met

    run_virtual(main())


def test_a_slow_client_that_reads_after_all_fails_the_proof(
    make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    """In the first proof, or in the final check; and one that stays connected is not healed."""

    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(SLOW_CLIENT, target, "slow@n2")
        await SLOW_CLIENT.inject(target, injection)
        assert (await SLOW_CLIENT.prove(target, injection)).exercised is True
        met = await SLOW_CLIENT.prove_met(target, injection)
        assert met.proven and met.exercised is True
        target.clients.immune = {"n2"}
        for proof in (await SLOW_CLIENT.prove(target, injection), await SLOW_CLIENT.prove_met(target, injection)):
            assert not proof.proven and "n2" in proof.failed[0]
        await SLOW_CLIENT.heal(target, injection)
        target.clients.lingering = True
        proof = await SLOW_CLIENT.prove_healed(target, injection)
        assert not proof.proven and "n2 still has" in proof.detail

    run_virtual(main())


@pytest.mark.parametrize(("reads", "exercised"), [(2, True), (None, None)])
def test_a_bit_flip_is_exercised_if_the_byte_was_read(
    reads: int | None, exercised: bool | None, make_fault_target: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_fault_target(3)
        injection = await plan_fault(BIT_FLIP, target, "log@n2")
        await BIT_FLIP.inject(target, injection)
        target.disks.flipped_reads = reads
        proof = await BIT_FLIP.prove(target, injection)
        assert proof.proven and proof.exercised is exercised
        assert (await BIT_FLIP.prove_met(target, injection)).exercised is exercised

    run_virtual(main())
