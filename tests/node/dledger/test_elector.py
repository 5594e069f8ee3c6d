"""Votes and heartbeats: every result, and the promises that a member may make."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from node.dledger import DLedgerCode, LedgerCorrupt
from node.dledger.messages import HeartBeatRequest, VoteRequest, VoteResponse
from node.dledger.rpc import VoteResult


async def vote(
    group: Any, voter: str, candidate: str, term: int, *, end_term: int = 99, end_index: int = 99
) -> VoteResult:
    """Ask `voter` for its vote."""
    request = VoteRequest(
        group="g", remote_id=voter, local_id=candidate, term=term, leader_id=candidate,
        ledger_end_index=end_index, ledger_end_term=end_term,
    )  # fmt: skip
    answer = await group.run(voter, lambda: group[voter].elector.handle_vote(request))
    result: VoteResult = answer.vote_result
    return result


async def beat(group: Any, member: str, leader: str, term: int) -> DLedgerCode:
    request = HeartBeatRequest(group="g", remote_id=member, local_id=leader, term=term, leader_id=leader)
    answer = await group.run(member, lambda: group[member].elector.handle_heartbeat(request))
    code: DLedgerCode = answer.code
    return code


async def start_alone(group: Any) -> Any:
    """n1 of a group whose other members do not run, so that only the test talks to it; in term 5, no vote given."""
    await group.start("n1")
    assert await beat(group, "n1", "n2", 5) is DLedgerCode.TERM_NOT_READY
    return group["n1"]


def test_vote_requests_are_checked_in_a_fixed_order(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        member = await start_alone(group)
        group.on("n1", lambda: member.store.append_as_leader(4, 0, lambda _: b""))
        group.on("n1", lambda: member.store.append_as_leader(4, 0, lambda _: b""))
        elector = member.elector
        assert await vote(group, "n1", "stranger", 1, end_term=0) is VoteResult.REJECT_UNKNOWN_LEADER
        assert await vote(group, "n1", "n1", 1, end_term=0) is VoteResult.REJECT_UNEXPECTED_LEADER
        assert await vote(group, "n1", "n2", 4, end_term=3) is VoteResult.REJECT_EXPIRED_LEDGER_TERM
        assert await vote(group, "n1", "n2", 4, end_term=4, end_index=0) is VoteResult.REJECT_SMALL_LEDGER_END_INDEX
        assert await vote(group, "n1", "n2", 4, end_term=4, end_index=1) is VoteResult.REJECT_EXPIRED_VOTE_TERM
        assert await vote(group, "n1", "n2", 6) is VoteResult.REJECT_TERM_NOT_READY
        assert member.member_state.term == 6
        assert await vote(group, "n1", "n2", 6, end_term=4, end_index=1) is VoteResult.ACCEPT
        assert await vote(group, "n1", "n2", 6) is VoteResult.ACCEPT  # the answer was lost; it asks again
        assert await vote(group, "n1", "n3", 6) is VoteResult.REJECT_ALREADY_VOTED
        assert await beat(group, "n1", "n2", 6) is DLedgerCode.SUCCESS
        assert await vote(group, "n1", "n3", 6) is VoteResult.REJECT_ALREADY_HAS_LEADER
        assert elector.judge_log(4, 1) is None and elector.judge_log(5, -1) is None

    simulate(scenario)


def test_a_vote_is_durable_before_it_is_granted(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await start_alone(group)
        assert await vote(group, "n1", "n2", 5) is VoteResult.ACCEPT
        group.power_fail("n1")
        await group.start("n1")
        state = group["n1"].member_state
        assert (state.term, state.voted_for) == (5, "n2")
        await asyncio.sleep(0.6)  # a restarted member rejects all candidates for a lease
        assert await vote(group, "n1", "n3", 5) is VoteResult.REJECT_ALREADY_VOTED

    simulate(scenario)


def test_no_vote_is_granted_if_the_disk_refuses_to_store_it(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await start_alone(group)
        group.hosts["n1"].disk.fail("sync")
        with pytest.raises(OSError, match="Input/output"):
            await vote(group, "n1", "n2", 5)
        group.hosts["n1"].disk.heal()
        assert group["n1"].member_state.voted_for is None
        assert await vote(group, "n1", "n3", 5) is VoteResult.ACCEPT

    simulate(scenario)


def test_only_one_of_two_concurrent_candidates_gets_the_vote(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await start_alone(group)
        group.hosts["n1"].disk.delay_s = 0.05
        results = await asyncio.gather(*(vote(group, "n1", name, 5) for name in ("n2", "n3", "n2")))
        assert results == [VoteResult.ACCEPT, VoteResult.REJECT_ALREADY_VOTED, VoteResult.ACCEPT]

    simulate(scenario)


def test_heartbeats_wait_while_a_vote_is_being_written(simulate: Any) -> None:
    """Entries wait likewise: otherwise a follower could accept one after judging a candidate's log, before voting."""

    async def scenario(group: Any) -> None:
        member = await start_alone(group)
        group.hosts["n1"].disk.stall()
        voting = group.loop.create_task(vote(group, "n1", "n2", 5))
        await asyncio.sleep(0.1)
        assert member.member_state.is_settling
        beating = group.loop.create_task(beat(group, "n1", "n3", 5))
        await asyncio.sleep(0.1)
        assert not beating.done()
        group.hosts["n1"].disk.unstall()
        assert await voting is VoteResult.ACCEPT
        assert await beating is DLedgerCode.SUCCESS

    simulate(scenario)


def test_heartbeat_codes(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        member = await start_alone(group)
        assert await beat(group, "n1", "stranger", 5) is DLedgerCode.UNKNOWN_MEMBER
        assert await beat(group, "n1", "n1", 5) is DLedgerCode.UNEXPECTED_MEMBER
        assert await beat(group, "n1", "n2", 4) is DLedgerCode.EXPIRED_TERM
        assert await beat(group, "n1", "n2", 5) is DLedgerCode.SUCCESS
        assert (member.member_state.is_follower, member.member_state.leader_id) == (True, "n2")
        assert await beat(group, "n1", "n2", 5) is DLedgerCode.SUCCESS
        assert await beat(group, "n1", "n3", 5) is DLedgerCode.INCONSISTENT_LEADER
        assert await beat(group, "n1", "n3", 6) is DLedgerCode.TERM_NOT_READY
        assert (member.member_state.is_candidate, member.member_state.term) == (True, 6)
        assert await beat(group, "n1", "n3", 6) is DLedgerCode.SUCCESS

    simulate(scenario)


def test_a_follower_rejects_other_candidates_for_a_lease_after_a_heartbeat(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await start_alone(group)
        assert await beat(group, "n1", "n2", 5) is DLedgerCode.SUCCESS
        assert await vote(group, "n1", "n3", 50) is VoteResult.REJECT_ALREADY_HAS_LEADER
        assert group["n1"].member_state.term == 5
        await asyncio.sleep(0.49)
        assert await vote(group, "n1", "n3", 50) is VoteResult.REJECT_ALREADY_HAS_LEADER
        await asyncio.sleep(0.02)
        assert await vote(group, "n1", "n3", 50) is VoteResult.REJECT_TERM_NOT_READY

    simulate(scenario)


def test_a_follower_may_vote_for_its_own_leader_during_the_lease(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await start_alone(group)
        assert await beat(group, "n1", "n2", 5) is DLedgerCode.SUCCESS
        assert await vote(group, "n1", "n2", 6) is VoteResult.REJECT_TERM_NOT_READY
        assert await vote(group, "n1", "n2", 6) is VoteResult.ACCEPT

    simulate(scenario)


def test_a_restarted_member_rejects_all_candidates_for_a_lease(simulate: Any) -> None:
    """It may have promised so to a leader whose lease reads rely on it, and cannot know."""

    async def scenario(group: Any) -> None:
        await start_alone(group)
        group.kill("n1")
        await group.start("n1")
        assert await vote(group, "n1", "n3", 9) is VoteResult.REJECT_ALREADY_HAS_LEADER
        await asyncio.sleep(0.51)
        assert await vote(group, "n1", "n3", 9) is VoteResult.REJECT_TERM_NOT_READY

    simulate(scenario)


def test_a_leader_with_a_quorum_is_not_deposed_by_a_candidate(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        term = group[leader].member_state.term
        other = next(name for name in group.names if name != leader)
        assert await vote(group, leader, other, term + 50) is VoteResult.REJECT_ALREADY_HAS_LEADER
        assert (group.leaders(), group[leader].member_state.term) == ([leader], term)

    simulate(scenario)


def test_a_member_leads_a_term_at_most_once(simulate: Any) -> None:
    """DLedger's first round stays in the old term: a leader that lost entries could reuse their indices."""

    async def scenario(group: Any) -> None:
        await group.start()
        for _ in range(6):
            leader = await group.leader()
            await group.append_all(leader, b"entry")
            group.kill(leader)
            await group.start(leader)
        led = [term for _, _, term, role in group.roles if role == "LEADER"]
        assert len(led) == len(set(led)) >= 6

    simulate(scenario)


def test_a_lone_member_elects_itself_in_a_new_term_after_a_restart(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        assert await group.leader() == "n1"
        assert await group.append_all("n1", b"one") == [1]
        group.kill("n1")
        await group.start()
        await group.leader()
        assert group["n1"].member_state.term == 2
        assert group.log("n1") == [(1, b""), (1, b"one"), (2, b"")]

    simulate(scenario, size=1)


def test_a_member_without_its_member_state_file_does_not_start(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        await group.append_all(await group.leader(), b"entry")
        await group.converged()
        group.kill("n2")
        group.hosts["n2"].disk.unlink("/data/dledger/member_state")
        await group.start("n2")
        assert isinstance(group.ended["n2"], LedgerCorrupt)
        assert "member_state" in str(group.ended["n2"])

    simulate(scenario)


def test_an_isolated_member_with_a_short_log_does_not_disrupt_the_group_on_rejoining(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        behind, *_ = (name for name in group.names if name != leader)
        rest = " ".join(name for name in group.names if name != behind)
        await group.cut(rest)
        await group.append_all(leader, b"not for everybody")
        await asyncio.sleep(30)
        term = group[behind].member_state.term
        await group.heal()
        await group.converged()
        assert group[behind].member_state.term == term  # it asked for votes in its old term throughout
        assert group.leaders() == [leader]

    simulate(scenario)


def test_a_candidate_does_not_become_leader_while_it_enters_a_newer_term(simulate: Any) -> None:
    """The last vote of a round arrives while a newer term is being written to disk."""

    async def scenario(group: Any) -> None:
        await group.start("n1")
        member = group["n1"]
        asked: list[tuple[VoteRequest, asyncio.Future[VoteResponse]]] = []

        async def ask(peer: str, request: VoteRequest) -> VoteResponse:
            asked.append((request, asyncio.get_running_loop().create_future()))
            return await asked[-1][1]

        member.peers.vote = ask
        assert await beat(group, "n1", "n2", 5) is DLedgerCode.TERM_NOT_READY
        await group.until(lambda: bool(asked) and asked[-1][0].term == 5)
        roles: list[tuple[int, str]] = []
        member.add_role_listener(lambda term, role: roles.append((term, role.name)))
        group.hosts["n1"].disk.stall()
        voting = group.loop.create_task(vote(group, "n1", "n2", 6))
        await asyncio.sleep(0.001)
        assert member.member_state.is_settling and member.member_state.is_candidate
        request, answer = asked[-1]
        answer.set_result(
            VoteResponse(
                group="g", remote_id="n1", local_id=request.remote_id, term=5, leader_id="",
                code=DLedgerCode.SUCCESS, vote_result=VoteResult.ACCEPT,
            )
        )  # fmt: skip
        await asyncio.sleep(0.001)
        group.hosts["n1"].disk.unstall()
        assert await voting is VoteResult.REJECT_TERM_NOT_READY
        await asyncio.sleep(0.001)
        assert (6, "LEADER") not in roles and not member.member_state.is_leader
        assert await vote(group, "n1", "n2", 6) is VoteResult.ACCEPT

    simulate(scenario)
