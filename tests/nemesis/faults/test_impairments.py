"""What a fault keeps a host from doing, and that proofs of other faults allow for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nemesis.clock import CLOCK
from nemesis.corruption import BIT_FLIP
from nemesis.disk import DISK_ERROR, DISK_FULL, DISK_SLOW, DISK_STALL
from nemesis.impairments import IMPAIRMENTS, Activity, faults_that_impair, hosts_kept_from
from nemesis.name_service import NAME_SERVICE
from nemesis.partition import PARTITION
from nemesis.power import POWER
from nemesis.process import KILL, PAUSE, Kill
from nemesis.resources import RESOURCES

IMPAIRING = [
    *(KILL, PAUSE, POWER, BIT_FLIP, DISK_STALL, DISK_SLOW, DISK_FULL, DISK_ERROR, CLOCK, PARTITION, RESOURCES),
    NAME_SERVICE,
]


def test_every_key_of_the_impairments_table_is_the_name_of_a_nemesis() -> None:
    assert set(IMPAIRMENTS) == {nemesis.name for nemesis in IMPAIRING}


def test_every_fault_that_keeps_a_host_from_running_keeps_it_from_answering() -> None:
    assert faults_that_impair(Activity.RUN) < faults_that_impair(Activity.ANSWER)
    assert faults_that_impair(Activity.RUN, Activity.TELL_TIME) == faults_that_impair(Activity.RUN) | {"clock"}


async def silenced(nemesis: Any, variant: str, target: Any, plan_fault: Any) -> Any:
    """A fault in force on n4, whose replica does not answer."""
    fault = await plan_fault(nemesis, target, variant, fault_id="f2")
    target.mute.add("n4")
    target.clocks.unreadable.add("n4")
    assert hosts_kept_from(Activity.ANSWER, [fault]) == {"n4"}
    return fault


class NemesisOfAnotherPackage(Kill):
    """Kills replicas, and is not in the impairments table."""

    name = "strike"

    def __init__(self, keeps_from: frozenset[Activity]) -> None:
        self.keeps_from = keeps_from


@pytest.mark.parametrize("says_so", [True, False])
def test_a_nemesis_of_another_package_declares_its_own_impairments(
    says_so: bool, make_fault_target: Any, plan_fault: Any, run_virtual: Callable[[Any], Any]
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        strike = NemesisOfAnotherPackage(frozenset({Activity.ANSWER}) if says_so else frozenset())
        fault = await plan_fault(strike, target, "sigkill@n4", fault_id="f2")
        target.mute.add("n4")
        target.clocks.unreadable.add("n4")
        assert hosts_kept_from(Activity.ANSWER, [fault]) == ({"n4"} if says_so else set())
        assert hosts_kept_from(Activity.RUN, [fault]) == set()
        injection = await plan_fault(CLOCK, target, "bump@n1")
        await CLOCK.inject(target, injection)
        assert (await CLOCK.prove(target, injection, in_force=[fault])).proven == says_so

    run_virtual(main())


@pytest.mark.parametrize(
    ("nemesis", "variant"),
    [(KILL, "sigkill@n4"), (POWER, "cut@n4"), (BIT_FLIP, "log@n4"), (DISK_STALL, f"{next(iter(DISK_STALL.forms))}@n4")],
)
def test_a_clock_fault_is_proved_despite_a_fault_that_silences_a_host(
    nemesis: Any, variant: str, make_fault_target: Any, plan_fault: Any, run_virtual: Callable[[Any], Any]
) -> None:
    """A replica with a flipped bit may refuse to start, and then its clock cannot be read."""

    async def main() -> None:
        target = make_fault_target(5)
        fault = await silenced(nemesis, variant, target, plan_fault)
        injection = await plan_fault(CLOCK, target, "bump@n1")
        await CLOCK.inject(target, injection)
        assert not (await CLOCK.prove(target, injection)).proven, (
            "the clock of n4 cannot be read, and no other fault accounts for that"
        )
        proof = await CLOCK.prove(target, injection, in_force=[fault])
        assert proof.proven and proof.checked == 4, proof

    run_virtual(main())


def test_a_clock_fault_only_on_silent_hosts_is_not_proved(
    make_fault_target: Any, plan_fault: Any, run_virtual: Callable[[Any], Any]
) -> None:
    async def main() -> None:
        target = make_fault_target(5)
        fault = await silenced(KILL, "sigkill@n4", target, plan_fault)
        injection = await plan_fault(CLOCK, target, "bump@n4")
        await CLOCK.inject(target, injection)
        proof = await CLOCK.prove(target, injection, in_force=[fault])
        assert not proof.proven and "disturbed by another fault" in proof.detail

    run_virtual(main())
