"""Which hosts a fault hits and how: targets by role, the parts of a variant, and abilities that a cluster lacks."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemesis.clock import CLOCK
from nemesis.disk import DISK_ERROR, DISK_FULL, DISK_SLOW, DISK_STALL
from nemesis.forms import VariantNames, expand_variant, needs_of, split_variant
from nemesis.link import LINK
from nemesis.partition import PARTITION
from nemesis.power import POWER
from nemesis.process import KILL, PAUSE
from nemesis.schedule import Schedule, ScheduleError
from nemesis.target import ABILITIES
from nemesis.victims import TARGETS, choose_victims, target_problem

ALL = [KILL, PAUSE, CLOCK, DISK_STALL, DISK_SLOW, DISK_FULL, DISK_ERROR, POWER, LINK]
Run = Callable[[Any], Any]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        *(("one", 1), ("minority", 2), ("majority", 3), ("leader", 1), ("follower", 1), ("followers", 4), ("all", 5)),
        ("n1+n4", 2),
    ],
)
def test_a_target_selects_its_number_of_hosts(
    word: str, expected: int, make_fault_target: Any, run_virtual: Run
) -> None:
    target = make_fault_target(5, leader="n2")
    seen: set[str] = set()
    for seed in range(20):
        victims = run_virtual(choose_victims(target, word, random.Random(seed)))
        seen.update(victims.hosts)
        assert len(victims.hosts) == expected
        assert list(victims.hosts) == sorted(victims.hosts)
        if word == "leader":
            assert victims.hosts == ("n2",)
    if word in ("follower", "followers"):
        assert seen == {"n1", "n3", "n4", "n5"}


@given(count=st.integers(1, 9), seed=st.integers(0, 1000), word=st.sampled_from(sorted(TARGETS)))
def test_a_target_has_its_size_in_clusters_of_any_size(count: int, seed: int, word: str) -> None:
    class Target:
        hosts = tuple(f"n{number}" for number in range(1, count + 1))

        async def leaders(self) -> list[str]:
            return [self.hosts[-1]]

    if target_problem(word, Target.hosts) is not None:
        return
    chosen = asyncio.run(choose_victims(Target(), word, random.Random(seed))).hosts  # type: ignore[arg-type]
    again = asyncio.run(choose_victims(Target(), word, random.Random(seed))).hosts  # type: ignore[arg-type]
    assert chosen == again and chosen and set(chosen) <= set(Target.hosts)
    if word == "minority":
        assert 2 * len(chosen) < count <= 2 * len(chosen) + 2
    if word == "majority":
        assert 2 * len(chosen) > count >= 2 * len(chosen) - 2


def test_a_missing_leader_is_a_problem_of_the_plan(make_fault_target: Any, plan_fault: Any, run_virtual: Run) -> None:
    injection = run_virtual(plan_fault(KILL, make_fault_target(5, leader=None), "sigkill@leader"))
    assert injection.problem == "no leader found" and injection.value["hosts"] == []


@pytest.mark.parametrize(
    ("word", "hosts", "part"),
    [
        ("n9", ["n1"], "unknown target 'n9'"),
        ("n1+n1", ["n1"], "is not a list of hosts"),
        ("n1+", ["n1"], "is not a list of hosts"),
        ("minority", ["n1", "n2"], "at least 3 hosts"),
        ("everyone", None, "unknown target 'everyone'"),
    ],
)
def test_an_invalid_target_is_refused_with_the_reason(word: str, hosts: list[str] | None, part: str) -> None:
    assert part in str(target_problem(word, hosts))


@pytest.mark.parametrize("nemesis", ALL, ids=lambda nemesis: nemesis.name)
def test_every_nemesis_has_a_description_and_valid_variants(nemesis: Any, make_fault_target: Any) -> None:
    assert nemesis.description and nemesis.variants
    target = make_fault_target(5)
    for variant in nemesis.variants:
        assert nemesis.requires(target, variant) == []
        assert nemesis.variant_problem(variant) is None
        for interface, ability in nemesis.needs(variant):
            assert ability in ABILITIES[interface]
    assert nemesis.requires(target) == []


def test_a_choice_expands_to_variants() -> None:
    assert expand_variant(KILL, None) == list(KILL.variants)
    assert expand_variant(KILL, "terminate") == ["terminate@leader", "terminate@one"]
    assert expand_variant(KILL, "@leader") == ["sigkill@leader", "terminate@leader", "crash-loop@leader"]
    assert expand_variant(KILL, "sigkill@n1+n2") == ["sigkill@n1+n2"]
    assert expand_variant(PARTITION, "halves") == ["halves"]
    # The monotonic clock is left alone unless it is requested.
    assert not any("monotonic" in variant for variant in expand_variant(CLOCK, None))
    assert not any("monotonic" in variant for variant in expand_variant(CLOCK, "@leader"))
    assert expand_variant(CLOCK, "slow-monotonic") == ["slow-monotonic@leader", "slow-monotonic@one"]


@pytest.mark.parametrize(
    ("nemesis", "asked", "part"),
    [
        (KILL, "sigkil@one", "no form 'sigkil'"),
        (KILL, "sigkill@nobody", "unknown target 'nobody'"),
        (KILL, "@nobody", "unknown target 'nobody'"),
        (PARTITION, "halfs", "did you mean halves?"),
        (PARTITION, "@leader", "has no variant"),
    ],
)
def test_a_choice_that_matches_no_variant_is_refused(nemesis: Any, asked: str, part: str) -> None:
    with pytest.raises(ValueError, match=re.escape(part)) as refusal:
        expand_variant(nemesis, asked)
    assert "\n" not in str(refusal.value)


def test_abilities_that_a_cluster_lacks_are_named(make_fault_target: Any) -> None:
    target = make_fault_target(5)
    target.lacks = {("disks", "power"): "no room to keep track", ("links", "loss"): "streams lose nothing"}
    assert POWER.requires(target) == [], "another form of it is available"
    assert POWER.requires(target, "cut@one") == ["power: no room to keep track"]
    target.lacks[("disks", "crash")] = "no file system"
    assert POWER.requires(target) == ["power: no room to keep track", "power: no file system"]
    assert LINK.requires(target, "loss@all") == ["link: streams lose nothing"]
    assert LINK.requires(target) == []  # other forms are available
    assert KILL.requires(make_fault_target(2), "sigkill@minority") == [
        "kill: target minority needs at least 3 hosts, not 2"
    ]


def test_the_needs_of_several_variants_are_combined() -> None:
    assert needs_of(POWER, ["cut@one"]) == {("processes", "kill"), ("disks", "power")}
    assert needs_of(DISK_STALL, ["fsync@one", "all@one"]) == {("disks", "stall-fsync"), ("disks", "stall")}
    assert needs_of(PARTITION, ["halves"]) == {("network", "cut")}
    assert split_variant("fsync@n1+n2") == ("fsync", "n1+n2")


def test_a_schedule_may_name_variants_that_runs_do_not_cycle_through() -> None:
    known = {"kill": VariantNames(KILL), "partition": VariantNames(PARTITION)}
    event = {"at_s": 1, "action": "inject", "id": "f1", "nemesis": "kill", "variant": "sigkill@n2+n3"}
    assert len(Schedule.from_json([event], known=known)) == 1
    with pytest.raises(ScheduleError, match="kill has no variant"):
        Schedule.from_json([{**event, "variant": "sigkill@nobody"}], known=known)
    assert len(known["partition"]) == len(list(known["partition"])) == len(PARTITION.variants)
