"""The invariants: each detects what it names, and a correct group of replicas violates none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from harness.clusters.sim.invariants import MAX_VIOLATIONS, Invariants
from harness.clusters.sim.watch import ReplicaWatch
from harness.exploration.rehearsal import rehearse_test
from harness.test import Test
from nemesis.schedule import HEAL, INJECT, FaultEvent, Schedule
from node.dledger.rpc import Role


@dataclass
class Store:
    """A log as a list of (term, chain CRC); everything in it is durable unless stated otherwise."""

    entries: list[tuple[int, int]] = field(default_factory=list)
    committed_index: int = -1
    durable_index: int = -1
    ledger_begin_index: int = 0

    @property
    def ledger_end_index(self) -> int:
        return len(self.entries) - 1

    def get(self, index: int) -> Any:
        if not self.ledger_begin_index <= index < len(self.entries):
            return None
        term, crc = self.entries[index]
        return SimpleNamespace(term=term, chain_crc=crc, raw=b"%d/%d" % (term, crc))


class Ledger:
    def __init__(self, *entries: tuple[int, int]) -> None:
        self.store = Store(list(entries), durable_index=len(entries) - 1)
        members = SimpleNamespace(ids=("n1", "n2", "n3"), quorum_size=2)
        self.member_state = SimpleNamespace(is_leader=False, members=members, term=0)
        timing = SimpleNamespace(lease_ms=500)
        self.config = SimpleNamespace(flush_mode="sync", timing=timing, members_may_change=False)
        self.elector = SimpleNamespace(leadership=None)
        self.runtime = SimpleNamespace(disk=None)

    def append(self, *entries: tuple[int, int], durable: bool = True) -> None:
        self.store.entries += entries
        if durable:
            self.store.durable_index = self.store.ledger_end_index


class Group:
    """A group whose members a test drives by hand."""

    def __init__(self, count: int = 3) -> None:
        self.watch = ReplicaWatch()
        hosts = [f"n{number}" for number in range(1, count + 1)]
        self.invariants = Invariants(self.watch, now_s=lambda: 7.0, is_running=lambda host: True)
        self.ledgers: dict[str, Any] = {}
        for host in hosts:
            self.start(host, Ledger())

    def start(self, host: str, ledger: Ledger) -> None:
        self.ledgers[host] = ledger
        for listener in self.watch.tell.recovered:
            listener(host, ledger)  # type: ignore[arg-type]

    def append(self, *entries: tuple[int, int], on: str = "n1 n2 n3", durable: bool = True) -> None:
        for host in on.split():
            self.ledgers[host].append(*entries, durable=durable)
            for listener in self.watch.tell.progressed:
                listener(host)

    def commit(self, host: str, index: int) -> None:
        self.ledgers[host].store.committed_index = index
        for listener in self.watch.tell.committed:
            listener(host)

    def acknowledge(self, host: str, index: int) -> None:
        for listener in self.watch.tell.acknowledged:
            listener(host, index)

    def lead(self, host: str, term: int) -> None:
        for name, ledger in self.ledgers.items():
            ledger.member_state.is_leader = name == host
        self.ledgers[host].member_state.term = term
        for listener in self.watch.tell.role:
            listener(host, term, Role.LEADER)

    def vote(self, host: str, term: int, candidate: str) -> None:
        for listener in self.watch.tell.vote:
            listener(host, term, candidate)

    def truncate(self, host: str, stays: int, *, is_done: bool = True) -> None:
        store = self.ledgers[host].store
        before = store.ledger_end_index
        del store.entries[stays + 1 :]
        store.durable_index = min(store.durable_index, stays)
        for listener in self.watch.tell.truncated:
            listener(host, stays, before, SimpleNamespace(done=lambda: is_done))  # type: ignore[arg-type]

    def reset(self, host: str, first: int, *entries: tuple[int, int]) -> None:
        """Replace a member's log by one that begins at `first`."""
        store = self.ledgers[host].store
        before = store.ledger_end_index
        store.entries, store.ledger_begin_index = [(0, 0)] * first + list(entries), first
        store.durable_index = min(store.durable_index, first - 1)
        for listener in self.watch.tell.truncated:
            listener(host, -1, before, SimpleNamespace(done=lambda: True))  # type: ignore[arg-type]

    @property
    def rules(self) -> list[str]:
        return [violation.rule for violation in self.invariants.violations]


@pytest.fixture
def group() -> Group:
    """Three members, n1 leads term 1, entries 0 and 1 are everywhere, 1 is committed by n1."""
    group = Group()
    group.vote("n2", 1, "n1")
    group.lead("n1", 1)
    group.append((1, 10), (1, 11))
    group.commit("n1", 1)
    return group


@pytest.mark.parametrize("may_change", [True, False])
def test_a_vote_may_move_to_the_leader_only_where_members_may_change(group: Group, may_change: bool) -> None:
    group.ledgers["n3"].config.members_may_change = may_change
    group.vote("n3", 1, "n2")
    group.vote("n3", 1, "n1")  # n1 leads
    assert group.rules == ([] if may_change else ["votes"])
    group.vote("n3", 1, "n2")  # n2 does not lead
    assert group.rules[-1:] == ["votes"]


def test_a_majority_is_counted_among_the_current_members_only(group: Group) -> None:
    for ledger in group.ledgers.values():
        ledger.member_state.members = SimpleNamespace(ids=("n1", "n2"), quorum_size=2)
    group.append((1, 12), on="n1 n3")
    group.commit("n1", 2)
    assert group.rules == ["durability"]


def test_a_correct_group_violates_no_invariant(group: Group) -> None:
    group.commit("n2", 1)
    group.append((1, 12), on="n1")  # a tail that the next leader removes
    group.vote("n3", 2, "n2")
    group.lead("n2", 2)
    group.append((2, 22), on="n2 n3")
    group.commit("n2", 2)
    group.truncate("n1", 1)
    group.append((2, 22), on="n1")
    group.commit("n1", 2)
    group.start("n3", Ledger((1, 10), (1, 11), (2, 22)))
    group.commit("n3", 2)
    assert group.rules == []
    outcome = group.invariants.outcome()
    assert outcome.valid is True and outcome.reason == "held for 3 committed entries"


def test_a_second_vote_or_leader_in_one_term_is_a_violation(group: Group) -> None:
    group.vote("n2", 1, "n1")
    group.vote("n2", 1, "n3")
    group.lead("n3", 1)
    assert group.rules == ["votes", "election"]
    outcome = group.invariants.outcome(zero_s=5.0)
    assert outcome.valid is False
    assert outcome.reason == "votes: n2 voted for n1 and for n3 in term 1 (at 2.000 s)"


def test_a_leader_that_lacks_a_committed_entry_is_a_violation(group: Group) -> None:
    group.start("n3", Ledger((1, 10)))
    group.lead("n3", 2)
    assert group.rules == ["recovery", "completeness"]


def test_a_late_leader_may_lack_entries_committed_in_a_later_term(group: Group) -> None:
    """The votes for n1 in term 2 were on their way while n2 was elected in term 3 and committed an entry."""
    group.lead("n2", 3)
    group.append((3, 32), on="n2 n3")
    group.commit("n2", 2)
    group.lead("n1", 2)
    assert group.rules == []
    group.lead("n1", 4)
    assert group.rules == ["completeness"]
    assert "n1 leads term 4 without entry 2 of term 3, which n2 has committed" in group.invariants.violations[0].text


def test_a_late_leader_must_have_entries_committed_in_earlier_terms(group: Group) -> None:
    group.append((1, 12), on="n2 n3")
    group.commit("n2", 2)  # while n2 still reports term 0
    group.lead("n2", 3)
    group.append((3, 33), on="n2 n3")
    group.commit("n2", 3)
    group.lead("n1", 2)
    assert group.rules == ["completeness"]
    assert "n1 leads term 2 without entry 2 of term 1" in group.invariants.violations[0].text


def test_different_entries_of_one_index_and_term_are_a_violation(group: Group) -> None:
    group.append((1, 12), on="n1")
    group.append((1, 99), on="n2")
    assert group.rules == ["matching"]


def test_different_entries_committed_at_one_index_are_a_violation(group: Group) -> None:
    group.append((1, 12), on="n1")
    group.append((2, 22), on="n2 n3")
    group.commit("n3", 2)
    group.commit("n1", 2)
    assert group.rules == ["commitment"]


def test_a_commit_without_a_durable_majority_is_a_violation(group: Group) -> None:
    group.append((1, 12), on="n2", durable=False)
    group.append((1, 12), on="n1")
    group.commit("n1", 2)
    assert group.rules == ["durability"]


def test_durability_is_not_checked_with_asynchronous_flushes(group: Group) -> None:
    group.ledgers["n1"].config.flush_mode = "async"
    group.append((1, 12), on="n1")
    group.commit("n1", 2)
    assert group.rules == []


def test_acknowledging_an_uncommitted_append_is_a_violation(group: Group) -> None:
    group.append((1, 12))
    group.acknowledge("n1", 1)
    assert group.rules == []
    group.acknowledge("n1", 2)
    assert group.rules == ["acknowledgement"]


@pytest.mark.parametrize("committed", [2, 9])
def test_a_commit_beyond_the_end_of_the_log_is_a_violation(group: Group, committed: int) -> None:
    group.commit("n2", committed)
    assert group.rules == ["end"]


def test_removing_a_committed_entry_is_a_violation(group: Group) -> None:
    group.truncate("n1", 0)
    assert group.rules == ["end"]


def test_a_restarted_log_may_have_lost_its_beginning_and_nothing_else(group: Group) -> None:
    expired = Ledger((1, 10), (1, 11))
    expired.store.ledger_begin_index = 1
    group.start("n2", expired)
    assert group.rules == []
    another = Ledger((1, 10), (1, 77))
    another.store.ledger_begin_index = 1
    group.start("n2", another)
    assert group.rules[0] == "recovery"


@pytest.mark.parametrize("is_flushed", [True, False])
def test_a_log_that_was_reset_is_not_compared_with_its_predecessor(group: Group, is_flushed: bool) -> None:
    """Entries from before the reset need not reappear, but committed ones must not be removed."""
    group.append((1, 12), on="n3")
    group.reset("n3", 2, (2, 22), (2, 23))
    restarted = Ledger()
    if is_flushed:
        group.append(on="n3")
        restarted = Ledger((0, 0), (0, 0), (2, 22), (2, 23))
        restarted.store.ledger_begin_index = 2
    group.start("n3", restarted)
    assert group.rules == []
    group.reset("n1", 1, (2, 21))
    assert group.rules == ["end"]


@pytest.mark.parametrize("entries", [((1, 10),), ((1, 10), (1, 11), (1, 12)), ((1, 10), (1, 77))])
def test_a_start_with_a_different_log_is_a_violation(group: Group, entries: tuple[tuple[int, int], ...]) -> None:
    group.start("n2", Ledger(*entries))
    assert group.rules[0] == "recovery"


@pytest.mark.parametrize("is_done", [True, False])
def test_only_a_completed_truncation_must_survive_a_restart(group: Group, is_done: bool) -> None:
    group.append((1, 12), on="n2")
    group.truncate("n2", 1, is_done=is_done)
    group.start("n2", Ledger((1, 10), (1, 11), (1, 12)))
    assert group.rules == (["recovery"] if is_done else [])


def test_entries_that_were_not_durable_may_be_lost(group: Group) -> None:
    group.append((1, 12), on="n2", durable=False)
    group.start("n2", Ledger((1, 10), (1, 11)))
    assert group.rules == []


def test_violations_are_bounded(group: Group) -> None:
    for term in range(2, 2 + 2 * MAX_VIOLATIONS):
        group.vote("n2", term, "n1")
        group.vote("n2", term, "n3")
    assert len(group.invariants.violations) == MAX_VIOLATIONS


def test_a_run_without_a_leader_is_unknown() -> None:
    assert Group().invariants.outcome().valid == "unknown"


LEASE_S = 0.5
"""The lease of the ledgers in these tests."""


class LeaderWithoutAnswers:
    """A leadership whose last quorum answer was sent at time 0 of its clock."""

    term = 1

    def quorum_sent_ns(self) -> int:
        return 0


def led(
    simulate: Callable[..., Any], change: Callable[[Group], None], *, answers: bool = False, is_running: bool = True
) -> list[str]:
    """The rules broken while n1 leads for ten leases without a quorum answer; `change` is applied after the first."""

    async def scenario(_: Any) -> list[str]:
        group, loop = Group(), asyncio.get_running_loop()
        group.invariants = Invariants(group.watch, now_s=loop.time, is_running=lambda host: is_running)
        began_s = loop.time()
        for host in group.ledgers:
            group.start(host, Ledger())
        ledger = group.ledgers["n1"]
        clock = SimpleNamespace(monotonic_ns=lambda: 0 if answers else int((loop.time() - began_s) * 1e9))
        ledger.runtime.clock = clock
        ledger.member_state.members = SimpleNamespace(ids=("n1", "n2"), quorum_size=2, includes_self=True, index=-1)
        ledger.elector.leadership = LeaderWithoutAnswers()
        group.invariants.start()
        await asyncio.sleep(LEASE_S)
        change(group)
        await asyncio.sleep(9 * LEASE_S)
        group.invariants.stop()
        return group.rules

    return simulate(scenario)  # type: ignore[no-any-return]


def unchanged(_: Group) -> None:
    return None


def starts_again(group: Group) -> None:
    for listener in group.watch.tell.starting:
        listener("n1")


def has_started(group: Group) -> None:
    starts_again(group)
    former = group.ledgers["n1"]
    group.start("n1", Ledger())
    for name in ("runtime", "member_state", "elector"):
        setattr(group.ledgers["n1"], name, getattr(former, name))


def test_leading_on_without_answers_of_a_quorum_is_a_violation(simulate: Callable[..., Any]) -> None:
    assert led(simulate, unchanged) == ["quorum"]
    assert led(simulate, unchanged, answers=True) == []
    assert led(simulate, unchanged, is_running=False) == []


def test_a_process_that_is_opening_its_log_does_not_count_as_leader(simulate: Callable[..., Any]) -> None:
    assert led(simulate, starts_again) == []
    assert led(simulate, has_started) == ["quorum"]


STALLED = "disk-stall", "fsync@all"
KILLED = "kill", "sigkill@leader"


@pytest.mark.computed
def test_a_killed_leader_may_be_slow_to_reopen_its_log() -> None:
    """A run that once violated the rule: the leader is killed, and restarted while all syncs stall."""
    events = (
        (1.0, INJECT, "f1", KILLED),
        (1.1, INJECT, "f2", STALLED),
        (1.6, HEAL, "f1", KILLED),
        (5.0, HEAL, "f2", STALLED),
    )
    schedule = Schedule(
        tuple(
            FaultEvent(at_s=at_s, action=action, fault_id=ident, nemesis=nemesis, variant=variant)
            for at_s, action, ident, (nemesis, variant) in events
        )
    )
    test = Test(
        system="broker", cluster="sim", nodes=3, workload="register", nemesis=(), nemesis_interval_s=5.0,
        time_limit_s=6.0, concurrency=4, rate=25.0, seed=1,
    )  # fmt: skip
    assert rehearse_test(test, schedule).symptoms == ()


def test_a_leader_whose_disk_fails_reads_still_counts_as_having_its_entries() -> None:
    """Restarted members have no entries in memory, so the invariants read the disks."""
    killed = ("kill", "sigkill@all")
    events = [(2.0, INJECT, "f1", killed), (3.0, HEAL, "f1", killed)]
    for at_s, action in ((3.0, INJECT), (5.0, HEAL)):
        events += [(at_s, action, f"d{n}", ("disk-error", f"read@n{n}")) for n in (1, 2, 3)]
    schedule = Schedule(
        tuple(
            FaultEvent(at_s=at_s, action=action, fault_id=ident, nemesis=nemesis, variant=variant)
            for at_s, action, ident, (nemesis, variant) in events
        )
    )
    test = Test(
        system="broker", cluster="sim", nodes=3, workload="log", nemesis=(), nemesis_interval_s=5.0,
        time_limit_s=6.0, concurrency=5, rate=30.0, seed=1,
    )  # fmt: skip
    assert rehearse_test(test, schedule).symptoms == ()
