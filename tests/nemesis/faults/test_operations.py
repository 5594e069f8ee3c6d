"""Operator actions: requested until granted, proved by what the replicas report, and undone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from nemesis.forms import expand_variant, is_of_all
from nemesis.leadership import TRANSFER
from nemesis.link import LINK
from nemesis.membership import MEMBERS
from nemesis.promotion import PROMOTE
from nemesis.restart import RESTART
from nemesis.target import RUNNING, ReplicaView

Run = Callable[[Any], Any]


class FakeOperator:
    """A group as values. `refusals` are raised by the first requests; `ignores` makes requests do nothing."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.term = 3
        self.members = set(target.hosts)
        self.removed: dict[str, str] = {}
        self.refusals: list[str] = []
        self.cannot: set[str] = set()
        self.asked: list[str] = []
        self.done: dict[str, tuple[str, int]] = {}
        self.ends: Mapping[str, int] = {}
        self.promoted: list[str] = []
        self.ignores = False
        self.is_committed = True
        self.ignorant: set[str] = set()

    async def view(self, host: str, *, timeout_s: float) -> ReplicaView | None:
        if self.target.processes.state(host) != RUNNING:
            return None
        leads = host == self.target.leader
        members = self.members - ({host} if host in self.ignorant else set())
        return ReplicaView(
            host=host,
            leads=leads,
            takes_writes=leads,
            follows=not leads,
            term=self.term,
            members=frozenset(members),
            members_committed=self.is_committed,
            end=self.ends.get(host, 0),
        )

    def _refuse(self) -> None:
        if self.refusals:
            raise RuntimeError(self.refusals.pop(0))

    async def transfer(self, fault_id: str, host: str) -> None:
        self.asked.append(host)
        self._refuse()
        if host in self.cannot:
            raise RuntimeError(f"{host} lacks 2000 entries")
        if not self.ignores:
            self.target.leader, self.term = host, self.term + 1
        self.done[fault_id] = self.target.leader, self.term

    def transferred(self, fault_id: str) -> tuple[str, int] | None:
        return self.done.get(fault_id)

    async def remove(self, fault_id: str, host: str) -> None:
        self._refuse()
        self.removed[fault_id] = host
        if self.ignores:
            return
        self.members.discard(host)
        if self.target.leader == host:
            self.target.leader = next(other for other in self.target.hosts if other != host)

    async def let_in(self, fault_id: str) -> None:
        self._refuse()
        if not self.ignores:
            self.members |= {self.removed.pop(fault_id)} if fault_id in self.removed else set()

    async def promote(self, fault_id: str, host: str) -> None:
        self.promoted.append(host)
        if not self.ignores:
            self.target.leader = host

    async def release_all(self) -> None:
        for fault_id in list(self.removed):
            await self.let_in(fault_id)


@pytest.fixture
def make_operated(make_fault_target: Any) -> Callable[..., Any]:
    def make(count: int = 5, **options: Any) -> Any:
        target = make_fault_target(count, **options)
        target.operator = FakeOperator(target)
        return target

    return make


def test_leadership_is_transferred_to_a_replica_that_can_take_it(
    make_operated: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def scenario() -> None:
        target = make_operated(3, leader="n2")
        target.operator.cannot = {"n1"}
        target.operator.refusals = ["none of the brokers that answer is the leader"]
        injection = await plan_fault(TRANSFER, target, "to@followers")
        assert sorted(injection.value["candidates"]) == ["n1", "n3"] and injection.value["term"] == 3
        assert "hosts" not in injection.value  # no host is impaired, so no other proof may make allowances
        await TRANSFER.inject(target, injection)
        proof = await TRANSFER.prove(target, injection)
        assert proof.proven and proof.detail == "n3 leads term 4, n2 led term 3"
        await TRANSFER.heal(target, injection)
        assert (await TRANSFER.prove_healed(target, injection)).proven

    run_virtual(scenario())


def test_the_plan_of_a_transfer_waits_for_a_leader(make_operated: Any, plan_fault: Any, run_virtual: Run) -> None:
    async def scenario() -> None:
        target = make_operated(3, leader=None)
        asyncio.get_running_loop().call_later(2.0, setattr, target, "leader", "n3")
        injection = await plan_fault(TRANSFER, target, "to@n1")
        assert injection.problem is None and injection.value["leader"] == "n3"

    run_virtual(scenario())


def test_a_transfer_without_a_new_leader_is_not_proven(make_operated: Any, plan_fault: Any, run_virtual: Run) -> None:
    async def scenario() -> None:
        target = make_operated(3, leader="n2")
        injection = await plan_fault(TRANSFER, target, "to@followers")
        assert (await TRANSFER.prove(target, injection)).detail == "no replica took over leadership"
        target.operator.ignores = True
        await TRANSFER.inject(target, injection)
        assert (await TRANSFER.prove(target, injection)).failed == ["n2 leads term 3, n2 led term 3"]
        own = await plan_fault(TRANSFER, target, "to@n2", fault_id="f2")
        assert own.problem == "n2 is already the leader"
        target.leader = None
        assert (await plan_fault(TRANSFER, target, "to@n1", fault_id="f3")).problem == "no leader found"
        healed = await TRANSFER.prove_healed(target, injection)
        assert not healed.proven and healed.detail == "no replica accepts writes"

    run_virtual(scenario())


@pytest.mark.parametrize("word", ["leader", "followers", "n4"])
def test_a_member_is_removed_and_added_back(word: str, make_operated: Any, plan_fault: Any, run_virtual: Run) -> None:
    async def scenario() -> None:
        target = make_operated(5, leader="n2")
        target.operator.refusals = ["nothing of this term is committed yet"]
        injection = await plan_fault(MEMBERS, target, f"remove@{word}")
        [victim] = injection.value["hosts"]
        assert (victim == "n2") is (word == "leader")
        await MEMBERS.inject(target, injection)
        assert victim not in target.operator.members and len(target.operator.members) == 4
        proof = await MEMBERS.prove(target, injection)
        assert proof.proven and victim not in proof.detail.partition(" leads ")[2]
        healed = await MEMBERS.prove_healed(target, injection)
        assert not healed.proven and healed.detail == f"no leader reports a group with {victim}"
        target.operator.refusals = ["the change before is not committed yet"]
        await MEMBERS.heal(target, injection)
        assert (await MEMBERS.prove_healed(target, injection)).proven
        await MEMBERS.heal(target, injection)  # idempotent
        assert target.operator.members == set(target.hosts)

    run_virtual(scenario())


def test_a_member_removed_by_another_fault_too_need_not_be_back(
    make_operated: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def scenario() -> None:
        target = make_operated(5, leader="n2")
        injection = await plan_fault(MEMBERS, target, "remove@n4")
        other = await plan_fault(MEMBERS, target, "remove@n4", fault_id="f2")
        elsewhere = await plan_fault(MEMBERS, target, "remove@n5", fault_id="f3")
        await MEMBERS.inject(target, injection)
        assert (await MEMBERS.prove_healed(target, injection, in_force=(other,))).proven
        healed = await MEMBERS.prove_healed(target, injection, in_force=(elsewhere,))
        assert not healed.proven and healed.detail == "no leader reports a group with n4"

    run_virtual(scenario())


def test_a_membership_change_is_proven_once_committed_and_known(
    make_operated: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def scenario() -> None:
        target = make_operated(5, leader="n2")
        injection = await plan_fault(MEMBERS, target, "remove@n4")
        target.operator.ignores = True
        await MEMBERS.inject(target, injection)
        assert (await MEMBERS.prove(target, injection)).failed == ["no leader reports a group without n4"]
        target.operator.ignores, target.operator.is_committed = False, False
        await MEMBERS.inject(target, injection)
        assert (await MEMBERS.prove(target, injection)).failed == ["no leader reports a group without n4"]
        target.operator.is_committed = True
        assert (await MEMBERS.prove(target, injection)).proven
        await MEMBERS.heal(target, injection)
        target.operator.ignorant = {"n4"}
        healed = await MEMBERS.prove_healed(target, injection)
        assert not healed.proven and healed.detail == "n4 does not list itself as a member of the group"
        small = make_operated(2, leader="n1")
        assert MEMBERS.requires(small, "remove@n2") == [
            "members: a group of 2 cannot spare a member: it needs at least 3 hosts"
        ]

    run_virtual(scenario())


def test_only_the_leader_s_report_proves_a_removal(make_operated: Any, plan_fault: Any, run_virtual: Run) -> None:
    async def scenario() -> None:
        target = make_operated(5, leader="n2")
        injection = await plan_fault(MEMBERS, target, "remove@n4")
        honest = target.operator.view

        async def view(host: str, *, timeout_s: float) -> ReplicaView | None:
            seen = await honest(host, timeout_s=timeout_s)
            return replace(seen, members=seen.members - {"n4"}) if host == "n3" else seen

        target.operator.view = view
        proof = await MEMBERS.prove(target, injection)
        assert not proof.proven and proof.failed == ["no leader reports a group without n4"]

    run_virtual(scenario())


def test_whether_a_removal_was_exercised_is_unknown_if_another_fault_had_removed_the_replica(
    make_operated: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def scenario() -> None:
        target = make_operated(5, leader="n2")
        faults = {host: await plan_fault(MEMBERS, target, f"remove@{host}", fault_id=host) for host in ("n4", "n5")}
        second = await plan_fault(MEMBERS, target, "remove@n4", fault_id="second")
        for injection in (*faults.values(), second):
            await MEMBERS.inject(target, injection)
        assert (await MEMBERS.prove(target, faults["n5"], in_force=[faults["n4"]])).exercised is True
        proof = await MEMBERS.prove(target, second, in_force=[*faults.values()])
        assert proof.proven and proof.exercised is None

    run_virtual(scenario())


def test_a_request_that_is_always_refused_raises_the_refusal(
    make_operated: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def scenario() -> None:
        target = make_operated(3, leader="n2")
        injection = await plan_fault(MEMBERS, target, "remove@n1")
        target.operator.refusals = ["the configuration does not let this group change"] * 10_000
        with pytest.raises(RuntimeError, match="does not let this group change"):
            await MEMBERS.inject(target, injection)

    run_virtual(scenario())


def test_a_rolling_restart_restarts_replicas_one_by_one(make_operated: Any, plan_fault: Any, run_virtual: Run) -> None:
    async def scenario() -> None:
        target = make_operated(4, leader="n2")
        processes, most_down, ended = target.processes, 0, []
        end = processes.end

        async def count_end(fault_id: str, hosts: Any, *, signal_name: str = "KILL") -> None:
            nonlocal most_down
            await end(fault_id, hosts, signal_name=signal_name)
            ended.extend(hosts)
            most_down = max(most_down, sum(processes.state(host) != RUNNING for host in target.hosts))

        processes.end = count_end
        injection = await plan_fault(RESTART, target, "rolling@all")
        assert (await RESTART.prove(target, injection)).failed == [f"{host} was not restarted" for host in target.hosts]
        await RESTART.inject(target, injection)
        assert sorted(ended) == list(target.hosts) and ended == injection.value["order"]
        assert most_down == 1 and set(processes.signals) == {"TERM"}
        assert (await RESTART.prove(target, injection)).proven
        processes.starts["n3"] -= 1
        assert "n3 was not restarted" in (await RESTART.prove(target, injection)).detail
        processes.starts["n3"] += 1
        processes.stuck.add("n1")
        for proof in (await RESTART.prove(target, injection), await RESTART.prove_healed(target, injection)):
            assert not proof.proven and proof.failed == ["n1 is down"]
        processes.stuck.clear()
        processes.dead.add("n1")  # a replica that exited after its start was restarted all the same
        proof = await RESTART.prove(target, injection)
        assert proof.proven and proof.detail == "4 replicas restarted; n1 was started but exited on its own"
        assert (await RESTART.prove_healed(target, injection)).proven

    run_virtual(scenario())


@pytest.mark.parametrize(("deaf", "exercised"), [((), True), (("n1",), True), (("n1", "n2", "n3"), False)])
def test_a_rolling_restart_is_not_exercised_if_no_replica_ended_after_sigterm(
    deaf: tuple[str, ...], exercised: bool, make_operated: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def scenario() -> None:
        target = make_operated(3, leader="n2")
        target.processes.forced_total["n2"] = 1  # during an earlier fault
        injection = await plan_fault(RESTART, target, "rolling@all")
        target.processes.deaf = set(deaf)
        await RESTART.inject(target, injection)
        proof = await RESTART.prove(target, injection)
        assert proof.proven and proof.exercised is exercised
        told = f"; {', '.join(deaf)} did not end in time after SIGTERM and needed a SIGKILL" if deaf else ""
        assert proof.detail == f"3 replicas restarted; 3 replicas run and answer{told}"

    run_virtual(scenario())


@pytest.mark.parametrize(("form", "exercised"), [("failover", True), ("switch", False)])
def test_a_switch_is_not_exercised_if_the_master_did_not_end_after_sigterm(
    form: str, exercised: bool, make_operated: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def scenario() -> None:
        target = make_operated(3, leader="n1")
        target.processes.deaf = {"n1"} if form == "switch" else set()
        injection = await plan_fault(PROMOTE, target, f"{form}@leader")
        await PROMOTE.inject(target, injection)
        proof = await PROMOTE.prove(target, injection)
        assert proof.proven and proof.exercised is exercised
        told = "n1 did not end in time after SIGTERM and needed a SIGKILL"
        assert proof.detail.endswith(told) is (form == "switch")

    run_virtual(scenario())


@pytest.mark.parametrize(("form", "signal_name"), [("failover", "KILL"), ("switch", "TERM")])
def test_the_slave_with_the_longest_log_is_promoted(
    form: str, signal_name: str, make_operated: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def scenario() -> None:
        target = make_operated(3, leader="n1")
        target.operator.ends = {"n1": 90, "n2": 70, "n3": 80}
        injection = await plan_fault(PROMOTE, target, f"{form}@leader")
        await PROMOTE.inject(target, injection)
        assert target.operator.promoted == ["n3"] and target.processes.signals == [signal_name]
        proof = await PROMOTE.prove(target, injection)
        assert proof.proven and proof.detail == "n3 is the master, which was n1 before"
        await PROMOTE.heal(target, injection)
        assert (await PROMOTE.prove_healed(target, injection)).proven

    run_virtual(scenario())


def test_a_promotion_without_effect_is_not_proven(make_operated: Any, plan_fault: Any, run_virtual: Run) -> None:
    async def scenario() -> None:
        target = make_operated(3, leader="n1")
        target.operator.ignores = True
        injection = await plan_fault(PROMOTE, target, "failover@leader")
        await PROMOTE.inject(target, injection)
        assert (await PROMOTE.prove(target, injection)).detail == "no other replica accepts writes"
        target.processes.immune.add("n1")
        assert "n1 still runs" in (await PROMOTE.prove(target, injection)).detail
        lonely = make_operated(1, leader="n1")
        alone = await plan_fault(PROMOTE, lonely, "failover@leader")
        with pytest.raises(RuntimeError, match="no slave answers"):
            await PROMOTE.inject(lonely, alone)

    run_virtual(scenario())


def test_a_former_master_that_seems_to_take_writes_proves_no_promotion(
    make_operated: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def scenario() -> None:
        target = make_operated(3, leader="n1")
        target.operator.ignores = True
        injection = await plan_fault(PROMOTE, target, "failover@leader")
        await PROMOTE.inject(target, injection)

        async def view(host: str, *, timeout_s: float) -> ReplicaView | None:
            return ReplicaView(host=host, leads=host == "n1", takes_writes=host == "n1", follows=host != "n1")

        target.operator.view = view
        proof = await PROMOTE.prove(target, injection)
        assert not proof.proven and proof.detail == "no other replica accepts writes"

    run_virtual(scenario())


def test_a_former_master_that_leads_beside_its_successor_is_not_healed(
    make_operated: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def scenario() -> None:
        target = make_operated(3, leader="n1")
        injection = await plan_fault(PROMOTE, target, "failover@leader")
        await PROMOTE.inject(target, injection)
        await PROMOTE.heal(target, injection)
        assert (await PROMOTE.prove_healed(target, injection)).proven

        async def view(host: str, *, timeout_s: float) -> ReplicaView | None:
            return ReplicaView(host=host, leads=host != "n2", takes_writes=host != "n2", follows=host == "n2")

        target.operator.view = view
        healed = await PROMOTE.prove_healed(target, injection)
        assert not healed.proven and healed.detail == "n1 and n3 lead at the same time"

    run_virtual(scenario())


def test_no_slave_is_promoted_if_none_reports_the_end_of_its_log(
    make_operated: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def main() -> None:
        target = make_operated(3, leader="n1")
        injection = await plan_fault(PROMOTE, target, "failover@leader")
        target.operator.ends = dict.fromkeys(target.hosts, -1)
        with pytest.raises(RuntimeError, match=r"no slave reports how far its log goes.*Status\(end="):
            await PROMOTE.inject(target, injection)
        assert target.operator.promoted == []
        target.operator.ends["n2"] = 0
        await PROMOTE.inject(target, injection)
        assert target.operator.promoted == ["n2"]

    run_virtual(main())


def test_promote_is_not_part_of_nemesis_all() -> None:
    assert [is_of_all(nemesis) for nemesis in (TRANSFER, MEMBERS, RESTART, PROMOTE)] == [True, True, True, False]
    assert expand_variant(PROMOTE, None) == ["failover@leader", "switch@leader"]


def test_a_fault_that_found_no_leader_has_nothing_to_heal(
    make_operated: Any, plan_fault: Any, run_virtual: Run
) -> None:
    async def scenario() -> None:
        target = make_operated(3, leader=None)
        for nemesis, variant in ((LINK, "rate@leader"), (MEMBERS, "remove@leader"), (PROMOTE, "switch@leader")):
            injection = await plan_fault(nemesis, target, variant)
            assert injection.problem == "no leader found"
            assert not (await nemesis.prove(target, injection)).proven
            await nemesis.heal(target, injection)
            assert (await nemesis.prove_healed(target, injection)).proven

    run_virtual(scenario())
