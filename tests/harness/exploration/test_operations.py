"""Operator actions, in simulation: they lose nothing, and mixes contain them only where they are possible."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import registry
from harness.clusters.sim.cluster import SimCluster
from harness.execution import left_out, plan_faults
from harness.exploration.mixes import random_mix
from harness.exploration.rehearsal import SIMULATED, rehearse_test, usable_choices
from harness.systems.broker import BrokerSystem
from harness.test import NemesisChoice, Test
from nemesis.schedule import HEAL, INJECT, FaultEvent, Schedule


def make_test(*nemeses: str, nodes: int = 3, settings: Mapping[str, str] | None = None) -> Test:
    return Test(
        system="broker", cluster=SIMULATED, nodes=nodes, workload="log",
        nemesis=tuple(NemesisChoice.parse(name) for name in nemeses), nemesis_interval_s=2.0, time_limit_s=9.0,
        concurrency=6, rate=60.0, seed=4, settings=settings or {},
    )  # fmt: skip


def one_after_the_other(*faults: str) -> Schedule:
    events: list[FaultEvent] = []
    for number, fault in enumerate(faults):
        nemesis, _, variant = fault.partition("=")
        for at_s, action in ((1.0 + 2 * number, INJECT), (2.5 + 2 * number, HEAL)):
            events.append(FaultEvent(at_s=at_s, action=action, fault_id=f"f{number}", nemesis=nemesis, variant=variant))
    return Schedule(tuple(events))


@pytest.mark.parametrize("nodes", [3, pytest.param(5, marks=pytest.mark.long)])
def test_changes_of_leader_and_members_and_restarts_lose_nothing(nodes: int) -> None:
    schedule = one_after_the_other("transfer=to@followers", "members=remove@leader", "members=remove@followers")
    run = rehearse_test(make_test(nodes=nodes), schedule)
    assert run.valid is True, run.reason
    run = rehearse_test(make_test(nodes=nodes), one_after_the_other("restart=rolling@all", "transfer=to@followers"))
    assert run.valid is True, run.reason


@pytest.mark.parametrize("first_healed", ["a", "b"])
def test_a_member_that_two_faults_removed_is_added_back_by_the_last_of_them(first_healed: str) -> None:
    last_healed = "b" if first_healed == "a" else "a"
    events = [
        {"at_s": 1.0, "action": "inject", "id": "a", "nemesis": "members", "variant": "remove@n2"},
        {"at_s": 2.0, "action": "inject", "id": "b", "nemesis": "members", "variant": "remove@n2"},
        {"at_s": 3.0, "action": "heal", "id": first_healed},
        {"at_s": 4.0, "action": "inject", "id": "c", "nemesis": "members", "variant": "remove@n2"},
        {"at_s": 5.0, "action": "heal", "id": "c"},
        {"at_s": 6.0, "action": "heal", "id": last_healed},
    ]
    run = rehearse_test(make_test(nodes=5), Schedule.from_json(events))
    assert run.valid is True and run.faults == 3, run.reason


def test_overlapping_removals_with_a_crash_of_all_in_between_lose_nothing() -> None:
    events = [
        {"at_s": 1.0, "action": "inject", "id": "a", "nemesis": "members", "variant": "remove@leader"},
        {"at_s": 2.0, "action": "inject", "id": "b", "nemesis": "members", "variant": "remove@leader"},
        {"at_s": 3.0, "action": "inject", "id": "c", "nemesis": "kill", "variant": "sigkill@all"},
        {"at_s": 3.5, "action": "heal", "id": "c"},
        {"at_s": 5.0, "action": "heal", "id": "a"},
        {"at_s": 6.0, "action": "heal", "id": "b"},
    ]
    run = rehearse_test(make_test(nodes=5), Schedule.from_json(events))
    assert run.valid is True, run.reason


@pytest.mark.parametrize("variant", ["failover@leader", "switch@leader"])
def test_what_a_sync_master_acknowledged_survives_its_replacement(variant: str) -> None:
    schedule = one_after_the_other(f"promote={variant}", f"promote={variant}")
    run = rehearse_test(make_test(settings={"replication": "sync"}), schedule)
    assert run.valid is True, run.reason


def test_all_includes_only_nemeses_that_the_system_supports() -> None:
    nemeses = registry.load_all("nemeses")
    dledger, classic = make_test("all"), make_test("all", settings={"replication": "sync"})
    found = {name for name, _ in usable_choices(dledger)}
    assert {"transfer", "members", "restart"} <= found and "promote" not in found
    assert {name for name, _ in usable_choices(classic)} & {"transfer", "members", "restart", "promote"} == {"restart"}
    said = "; ".join(left_out(classic, nemeses, SimCluster, BrokerSystem))
    assert "transfer: classic HA has no lead" in said and "promote: only if requested by name" in said
    assert said.count("nemesis bit-flip: ") == 1 and "disk-full=fill, " in said and "nemesis disk-full" not in said
    assert not any(line.startswith(("bit-flip:", "disk-full:")) for line in said.split("; "))
    planned = plan_faults(make_test("promote", settings={"replication": "async"}), nemeses, SimCluster, BrokerSystem)
    assert {event.nemesis for event in planned} == {"promote"}


CHOICES = [
    ("members", ["remove@leader", "remove@followers"]),
    ("transfer", ["to@followers"]),
    ("restart", ["rolling@all"]),
    ("kill", ["sigkill@one", "sigkill@all", "sigkill@minority"]),
    ("partition", ["one", "random-halves", "majority-minority"]),
    ("pause", ["sigstop@leader"]),
]
GRAVE = {"sigkill@all": 9, "sigkill@minority": 2, "random-halves": 2, "majority-minority": 2}


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_mixes_contain_operator_actions_only_where_they_are_possible(seed: int) -> None:
    """With five replicas: at most one other is hit when a change of members begins or is undone; no replica is killed
    or paused during a rolling restart."""
    schedule = random_mix(CHOICES, random.Random(seed), time_limit_s=20.0, nodes=5, events=24)
    spans: dict[str, list[FaultEvent]] = {}
    for event in schedule:
        spans.setdefault(event.fault_id, []).append(event)
    for begin, end in spans.values():
        others = [span for span in spans.values() if span[0] is not begin]
        if begin.nemesis == "members":
            for at_s in (begin.at_s, end.at_s):
                met = [span[0] for span in others if span[0].at_s <= at_s < span[1].at_s]
                hit = sum(GRAVE.get(each.variant, each.nemesis not in ("transfer", "restart")) for each in met)
                assert hit <= 1, (schedule.to_json(), at_s)
        if begin.nemesis == "restart":
            assert not [
                span for span in others
                if span[0].nemesis in ("kill", "pause") and span[0].at_s < end.at_s and begin.at_s < span[1].at_s
            ]  # fmt: skip
