"""Mutants without a schedule: each script drives one mechanism directly. Every script runs twice: with the mutant it
must fail, without it it must pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from node.dledger import DLedgerServer
from node.dledger.entry import CONFIG_MAGIC, encode_entry
from node.dledger.membership import encode_members
from node.dledger.messages import HeartBeatResponse, PushEntryRequest, VoteRequest
from node.dledger.rpc import DLedgerCode, DLedgerError, PushType, ReadMode, VoteResult
from node.mutants import election, group, leases, replication, storage

LEASE_S = 0.5


def mutated(mutate: Callable[[DLedgerServer], None], is_mutated: bool) -> type[DLedgerServer]:
    """Members with the mutant, or without."""

    class Mutated(DLedgerServer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            if is_mutated:
                mutate(self)

    return Mutated


async def started(members: Any) -> tuple[str, str, str]:
    """Start a group of three; returns its leader and the two others."""
    await members.start()
    leader = await members.leader()
    await members.append_all(leader, b"one", b"two")
    await members.converged()
    first, second = (name for name in members.names if name != leader)
    return leader, first, second


def vote_result(members: Any, voter: str, candidate: str) -> VoteResult:
    """The answer of `voter` to a candidate with an equal log, in the next term."""
    store = members[voter].store
    request = VoteRequest(
        group="g", remote_id=voter, local_id=candidate, term=members[voter].member_state.term + 1, leader_id=candidate,
        ledger_end_index=store.ledger_end_index, ledger_end_term=store.ledger_end_term,
    )  # fmt: skip
    result: VoteResult = members[voter].elector.judge_vote(request)
    return result


@pytest.mark.parametrize("is_mutated", [False, True])
def test_a_member_that_hears_its_leader_rejects_other_candidates(simulate: Any, is_mutated: bool) -> None:
    async def scenario(members: Any) -> VoteResult:
        _, voter, candidate = await started(members)
        return vote_result(members, voter, candidate)

    result = simulate(scenario, server=mutated(leases.vote_despite_leader, is_mutated))
    assert (result is VoteResult.REJECT_ALREADY_HAS_LEADER) is not is_mutated


@pytest.mark.parametrize("is_mutated", [False, True])
def test_a_restarted_member_rejects_candidates_while_its_leaders_lease_may_hold(
    simulate: Any, is_mutated: bool
) -> None:
    async def scenario(members: Any) -> VoteResult:
        leader, voter, candidate = await started(members)
        members.kill(voter)
        await members.cut(f"{leader} {candidate}", voter)
        await members.start(voter)
        return vote_result(members, voter, candidate)

    result = simulate(scenario, server=mutated(leases.vote_after_restart, is_mutated))
    assert (result is VoteResult.REJECT_ALREADY_HAS_LEADER) is not is_mutated


@pytest.mark.parametrize("is_mutated", [False, True])
def test_a_lease_expires_while_the_leader_is_paused(simulate: Any, is_mutated: bool) -> None:
    """The clock advances by a lease while the leader does nothing, as in a pause; then the lease is checked."""

    async def scenario(members: Any) -> bool:
        leader, *_ = await started(members)
        leadership = members[leader].elector.leadership
        clock = leadership._clock
        leadership._clock = Later(clock, LEASE_S)
        try:
            return bool(leadership.holds_lease())
        finally:
            leadership._clock = clock

    assert simulate(scenario, server=mutated(leases.lease_by_role, is_mutated)) is is_mutated


class Held:
    """Peers whose answers to heartbeats are held back as callbacks."""

    def __init__(self, answers: list[Callable[[], object]]) -> None:
        self._answers = answers

    def heartbeat(self, peer: str, request: Any, then: Callable[[Any], object]) -> None:
        answer = HeartBeatResponse(
            group="g", remote_id="n1", local_id=peer, term=request.term, code=DLedgerCode.SUCCESS
        )
        self._answers.append(lambda: then(answer))


class Later:
    """A clock that is ahead by `ahead_s`."""

    def __init__(self, clock: Any, ahead_s: float) -> None:
        self._clock = clock
        self._ahead_ns = int(ahead_s * 1e9)

    def monotonic_ns(self) -> int:
        now_ns: int = self._clock.monotonic_ns()
        return now_ns + self._ahead_ns


@pytest.mark.parametrize("is_mutated", [False, True])
def test_a_lease_counts_from_the_sending_of_the_heartbeat(simulate: Any, is_mutated: bool) -> None:
    """Delayed answers arrive when the members are already free to elect another leader."""

    async def scenario(members: Any) -> bool:
        leader, *_ = await started(members)
        leadership = members[leader].elector.leadership
        sent_ns = leadership._clock.monotonic_ns()
        answers: list[Callable[[], object]] = []
        leadership._peers = Held(answers)
        leadership.beat()
        leadership._clock = Later(leadership._clock, LEASE_S)
        for answer in answers:
            answer()
        return bool(leadership.quorum_sent_ns() > sent_ns)

    assert simulate(scenario, server=mutated(leases.lease_from_answer, is_mutated)) is is_mutated


@pytest.mark.parametrize("is_mutated", [False, True])
def test_a_read_is_confirmed_only_by_heartbeats_sent_after_it(simulate: Any, is_mutated: bool) -> None:
    """A round is under way when the read arrives: its answers prove nothing about that moment."""

    async def scenario(members: Any) -> bool:
        leader, *_ = await started(members)
        leadership = members[leader].elector.leadership
        members.on(leader, leadership.beat)
        number = leadership._round
        read = members.on(leader, leadership.confirm)
        while leadership._quorum_round() < number:  # noqa: ASYNC110
            await asyncio.sleep(0.0001)
        is_confirmed: bool = read.done() and leadership._quorum_round() == number
        await read
        return is_confirmed

    assert simulate(scenario, server=mutated(leases.read_confirmed_before, is_mutated)) is is_mutated


@pytest.mark.parametrize("is_mutated", [False, True])
def test_a_member_may_not_lead_a_term_twice(simulate: Any, is_mutated: bool) -> None:
    async def scenario(members: Any) -> bool:
        leader, *_ = await started(members)
        term = members[leader].member_state.term
        members.on(leader, lambda: members[leader].elector.step_down(term, "a test"))
        return bool(members[leader].elector.may_lead(term))

    assert simulate(scenario, server=mutated(election.lead_term_again, is_mutated)) is is_mutated


@pytest.mark.parametrize("is_mutated", [False, True])
def test_the_verified_index_does_not_carry_over_to_the_next_leader(simulate: Any, is_mutated: bool) -> None:
    """Otherwise a follower commits, at the next leader's request, entries that only the previous one had."""

    async def scenario(members: Any) -> bool:
        _, follower, other = await started(members)
        handler, term = members[follower].pusher.handler, members[follower].member_state.term
        request = PushEntryRequest(
            group="g", remote_id=follower, local_id=other, term=term + 1, leader_id=other, type=PushType.COMMIT,
            commit_index=99, entries=b"", previous_term=-1, next_term=-1, next_chain_crc=-1,
        )  # fmt: skip
        return bool(handler.commit_bound(request) >= 0)

    assert simulate(scenario, server=mutated(replication.verified_forever, is_mutated)) is is_mutated


@pytest.mark.parametrize("is_mutated", [False, True])
def test_a_truncate_request_may_not_remove_an_acknowledged_entry(simulate: Any, is_mutated: bool) -> None:
    async def scenario(members: Any) -> bool:
        leader, follower, _ = await started(members)
        handler, state = members[follower].pusher.handler, members[follower].member_state
        index = members[follower].store.committed_index
        handler.verify(state.term, index + 3)  # acknowledged, and not yet known to be committed
        request = PushEntryRequest(
            group="g", remote_id=follower, local_id=leader, term=state.term, leader_id=leader,
            type=PushType.TRUNCATE, commit_index=index, entries=b"", previous_term=-1, next_term=-1, next_chain_crc=-1,
        )  # fmt: skip
        return bool(handler.may_truncate(request, index + 1))

    assert simulate(scenario, server=mutated(replication.late_truncate, is_mutated)) is is_mutated


@pytest.mark.parametrize("is_mutated", [False, True])
def test_a_term_begins_without_watermarks_of_the_others(simulate: Any, is_mutated: bool) -> None:
    async def scenario(members: Any) -> bool:
        leader, follower, _ = await started(members)
        checker, term = members[leader].pusher.checker, members[leader].member_state.term

        def leads_again() -> int:
            checker.end_term()
            checker.begin_term(term + 2)
            mark: int = checker.watermark(term + 2, follower)
            return mark

        return bool(members.on(leader, leads_again) >= 0)

    assert simulate(scenario, server=mutated(replication.watermark_outlives_term, is_mutated)) is is_mutated


@pytest.mark.parametrize("is_mutated", [False, True])
def test_a_member_whose_vote_is_lost_does_not_start(simulate: Any, is_mutated: bool) -> None:
    async def scenario(members: Any) -> bool:
        _, voter, _ = await started(members)
        members.kill(voter)
        members.hosts[voter].disk.flip_bit("/data/dledger/member_state", 20, 3)
        await members.start(voter)
        return voter not in members.ended

    assert simulate(scenario, server=mutated(storage.vote_lost_with_its_file, is_mutated)) is is_mutated


@pytest.mark.parametrize("is_mutated", [False, True])
def test_damage_is_not_taken_for_a_torn_write(simulate: Any, is_mutated: bool) -> None:
    """A member that starts with less than it has acknowledged could elect a leader that lacks it too."""

    async def scenario(members: Any) -> bool:
        _, victim, _ = await started(members)
        pos = members[victim].store.get(1).pos
        await members.run(victim, members[victim].store._checkpoint)
        members.kill(victim)
        members.hosts[victim].disk.flip_bit("/data/dledger/data/" + "0" * 20, pos + 50, 1)
        await members.start(victim)
        return victim not in members.ended

    assert simulate(scenario, server=mutated(storage.damage_cut_off, is_mutated)) is is_mutated


@pytest.mark.parametrize("is_mutated", [False, True])
def test_entries_that_replace_a_truncated_tail_are_not_durable_yet(simulate: Any, is_mutated: bool) -> None:
    async def scenario(members: Any) -> bool:
        await members.start("n1")
        member = members["n1"]
        store = member.store

        def append(body: bytes) -> None:
            store.append_as_leader(1, len(body), lambda _: body)

        for body in (b"one", b"two", b"three"):
            members.on("n1", lambda body=body: append(body))
        await members.until(lambda: store.durable_index == 2)
        members.on("n1", lambda: store.truncate(0))
        members.on("n1", lambda: append(b"another"))
        return bool(store.acked_index >= 1)

    assert simulate(scenario, server=mutated(storage.durable_mark_stays, is_mutated)) is is_mutated


@pytest.mark.parametrize("is_mutated", [False, True])
def test_a_checkpoint_covers_only_durable_entries(simulate: Any, is_mutated: bool) -> None:
    async def scenario(members: Any) -> bool:
        _, victim, _ = await started(members)
        store = members[victim].store
        store.writer.add = lambda batch: None  # nothing more reaches the disk
        members.on(victim, lambda: store.append_as_leader(store.ledger_end_term, 8, lambda _: b"too late"))
        await members.run(victim, store._checkpoint)
        members.power_fail(victim)
        await members.start(victim)
        return victim in members.ended

    assert simulate(scenario, server=mutated(storage.checkpoint_ahead, is_mutated)) is is_mutated


def may_change(members: Any, leader: str, term: int) -> bool:
    """Whether a leader of `term` would change its group now."""
    try:
        members[leader].members.check_may_change(term)
    except DLedgerError:
        return False
    return True


@pytest.mark.parametrize("is_mutated", [False, True])
def test_a_leader_may_change_the_group_only_after_its_own_commit(simulate: Any, is_mutated: bool) -> None:
    async def scenario(members: Any) -> bool:
        leader, *_ = await started(members)
        return may_change(members, leader, members[leader].member_state.term + 1)

    assert simulate(scenario, server=mutated(group.change_before_own_commit, is_mutated)) is is_mutated


@pytest.mark.parametrize("is_mutated", [False, True])
def test_only_one_membership_change_may_be_pending(simulate: Any, is_mutated: bool) -> None:
    async def scenario(members: Any) -> bool:
        leader, *_ = await started(members)
        state, store = members[leader].member_state, members[leader].store
        state.members._history.append((store.committed_index + 1, dict(state.members.peers)))
        return may_change(members, leader, state.term)

    assert simulate(scenario, server=mutated(group.changes_overlap, is_mutated)) is is_mutated


@pytest.mark.parametrize("is_mutated", [False, True])
def test_a_truncated_membership_change_is_undone(simulate: Any, is_mutated: bool) -> None:
    async def scenario(members: Any) -> bool:
        _, follower, _ = await started(members)
        known, index = members[follower].member_state.members, members[follower].store.ledger_end_index + 1
        body = encode_members({follower: "10.0.0.9:1"})
        known.put(encode_entry(magic=CONFIG_MAGIC, index=index, term=9, pos=0, previous_chain_crc=0, body=body))
        assert known.ids == (follower,)
        known.cut(index)
        return bool(known.ids == (follower,))

    assert simulate(scenario, server=mutated(group.truncated_members_stay, is_mutated)) is is_mutated


def test_lease_and_read_index_reads_both_work_without_a_mutant(simulate: Any) -> None:
    """The scripts above inspect internals; these reads go through the public interface."""

    async def scenario(members: Any) -> set[int]:
        leader, *_ = await started(members)
        return {await members.barrier(leader, mode) for mode in (ReadMode.LEASE, ReadMode.READ_INDEX)}

    assert len(simulate(scenario)) == 1
