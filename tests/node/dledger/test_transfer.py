"""Transfers of leadership to a chosen member, and to preferred ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from node.dledger import DLedgerCode, DLedgerConfig, DLedgerError
from node.dledger.messages import LeadershipTransferRequest, VoteRequest
from node.dledger.rpc import ReadMode, VoteResult


async def give(group: Any, leader: str, member: str) -> DLedgerCode | None:
    """Ask `leader` to transfer leadership to `member`; returns the code if that is refused."""
    try:
        await group.run(leader, lambda: group[leader].transfer_leadership(member))
    except DLedgerError as error:
        return error.code
    return None


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_chosen_member_leads_the_next_term_at_once(simulate: Any, size: int) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        await group.append_all(leader, b"one", b"two")
        term = group[leader].member_state.term
        chosen = next(name for name in group.names if name != leader)
        started_s = group.loop.time()
        assert await give(group, leader, chosen) is None
        assert group.loop.time() - started_s < 0.1  # far below a lease
        assert group.leaders() == [chosen] and group[chosen].member_state.term == term + 1
        await group.append_all(chosen, b"three")
        await group.converged()

    simulate(scenario, size=size)


def test_no_acknowledged_entry_is_lost_or_duplicated_during_transfers(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        acked: list[bytes] = []
        refused: set[DLedgerCode] = set()
        is_over = False

        async def produce(worker: int) -> None:
            number = 0
            while not is_over:
                body = b"%d-%d" % (worker, number)
                number += 1
                for name in group.leaders():
                    try:
                        await group.append(name, body)
                        acked.append(body)
                    except DLedgerError as error:
                        refused.add(error.code)
                await asyncio.sleep(0.001)

        workers = [asyncio.get_running_loop().create_task(produce(worker)) for worker in range(3)]
        for turn in range(9):
            chosen = group.names[turn % 3]
            if chosen != leader:
                assert await give(group, leader, chosen) is None
                leader = chosen
            await asyncio.sleep(0.05)
        is_over = True
        await asyncio.gather(*workers)
        await group.converged()
        bodies = [body for _, body in group.log(leader) if body]
        assert len(acked) > 300 and set(acked) <= set(bodies)
        assert len(bodies) == len(set(bodies))
        assert refused <= {DLedgerCode.LEADER_TRANSFERRING, DLedgerCode.NOT_LEADER}

    simulate(scenario)


def test_a_transfer_by_or_to_the_wrong_member_is_refused(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        one, other = (name for name in group.names if name != leader)
        assert await give(group, one, other) is DLedgerCode.NOT_LEADER
        assert await give(group, leader, "n9") is DLedgerCode.UNKNOWN_MEMBER
        assert await give(group, leader, leader) is DLedgerCode.UNEXPECTED_ARGUMENT
        group.kill(one)  # PR39: no transfer to a dead member
        await asyncio.sleep(1)
        assert await give(group, leader, one) is DLedgerCode.NETWORK_ERROR
        assert group.leaders() == [leader]

    simulate(scenario)


def test_a_transfer_to_a_member_far_behind_is_refused(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        slow = next(name for name in group.names if name != leader)
        group.hosts[slow].disk.stall(["sync"])
        await group.append_all(leader, *[b"x"] * 20)
        assert await give(group, leader, slow) is DLedgerCode.FALL_BEHIND_TOO_MUCH
        await group.append_all(leader, b"goes on")

    simulate(scenario, max_transfer_lag=10)


def test_a_transfer_times_out_if_the_successor_does_not_catch_up(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        slow = next(name for name in group.names if name != leader)
        group.hosts[slow].disk.stall(["sync"])
        await group.append_all(leader, b"x")
        transfer = asyncio.ensure_future(give(group, leader, slow))
        await asyncio.sleep(0.1)
        with pytest.raises(DLedgerError) as caught:
            group.append(leader, b"y")
        assert (caught.value.code, caught.value.is_definite) == (DLedgerCode.LEADER_TRANSFERRING, True)
        assert await give(group, leader, slow) is DLedgerCode.LEADER_TRANSFERRING
        assert await transfer is DLedgerCode.TIMEOUT
        assert group.leaders() == [leader]
        await group.append_all(leader, b"goes on")

    simulate(scenario)


def test_another_leader_is_elected_if_the_successor_is_cut_off(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        chosen, other = (name for name in group.names if name != leader)
        await group.append_all(leader, b"x")
        await group.cut(f"{leader} {other}", chosen)
        assert await give(group, leader, chosen) is DLedgerCode.TAKE_LEADERSHIP_FAILED
        stopped_s = group.loop.time()
        successor = await group.leader(leader, other)
        assert group.loop.time() - stopped_s < 3
        await group.append_all(successor, b"y")
        await group.heal()
        await group.converged()

    simulate(scenario)


def test_within_the_lease_a_vote_for_another_member_needs_a_transfer_by_the_leader(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        voter, candidate = (name for name in group.names if name != leader)
        term = group[leader].member_state.term

        async def ask(transferred_term: int) -> VoteResult:
            request = VoteRequest(
                group="g", remote_id=voter, local_id=candidate, term=term + 1, leader_id=candidate,
                ledger_end_index=99, ledger_end_term=99, transferred_term=transferred_term,
            )  # fmt: skip
            answer = await group.run(voter, lambda: group[voter].elector.handle_vote(request))
            result: VoteResult = answer.vote_result
            return result

        for transferred_term in (-1, term - 1, term + 1):
            assert await ask(transferred_term) is VoteResult.REJECT_ALREADY_HAS_LEADER
        assert await ask(term) is VoteResult.REJECT_TERM_NOT_READY

    simulate(scenario)


def test_the_old_leader_serves_no_lease_reads_after_a_transfer(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        chosen = next(name for name in group.names if name != leader)
        await group.append_all(leader, b"x")
        await group.barrier(leader, ReadMode.LEASE)
        await group.run(leader, lambda: group[leader].transfer_leadership(chosen))
        with pytest.raises(DLedgerError) as caught:
            await group.barrier(leader, ReadMode.LEASE)
        assert caught.value.code is DLedgerCode.NOT_LEADER

    simulate(scenario)


@pytest.mark.parametrize(
    ("to_leader", "changes", "code"),
    [
        (True, {"transfer_id": "n8", "transferee_id": "n9"}, DLedgerCode.UNEXPECTED_ARGUMENT),
        (True, {"term": 99}, DLedgerCode.EXPIRED_TERM),
        (False, {"transfer_id": "n8"}, DLedgerCode.NOT_FOLLOWER),
        (False, {"term": 0}, DLedgerCode.NOT_FOLLOWER),
        (False, {"take_index": 99}, DLedgerCode.TAKE_LEADERSHIP_FAILED),
    ],
)
def test_a_transfer_request_with_wrong_fields_is_refused(
    simulate: Any, to_leader: bool, changes: dict[str, Any], code: DLedgerCode
) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        chosen = next(name for name in group.names if name != leader)
        asked = leader if to_leader else chosen
        fields = {
            "group": "g", "remote_id": asked, "local_id": leader, "term": group[leader].member_state.term,
            "leader_id": leader, "transfer_id": leader, "transferee_id": chosen, **changes,
        }  # fmt: skip
        with pytest.raises(DLedgerError) as caught:
            await group.run(asked, lambda: group[asked].transfer.handle(LeadershipTransferRequest(**fields)))
        assert caught.value.code is code
        assert group.leaders() == [leader]

    simulate(scenario)


def test_the_preferred_member_leads_whenever_it_can(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        await group.until(lambda: group.leaders() == ["n3"])
        await group.append_all(await group.leader("n3"), b"x")
        group.kill("n3")
        await group.until(lambda: group.leaders() == ["n2"])  # the second choice
        await group.start("n3")
        await group.until(lambda: group.leaders() == ["n3"])
        settled = len(group.roles)
        await asyncio.sleep(10)
        assert len(group.roles) == settled  # no further elections

    simulate(scenario, preferred_leaders=("n3", "n2"))


def test_transfers_to_preferred_leaders_continue_after_an_unexpected_error(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        await group.until(lambda: group.leaders() == ["n3"])
        group.kill("n3")
        await group.until(lambda: bool(group.leaders()) and group.leaders() != ["n3"])
        leader = group.leaders()[0]
        transfer = group[leader].transfer
        real, failures = transfer.give, iter([RuntimeError("an error of its own")])

        async def give(member: str) -> None:
            for failure in failures:
                raise failure
            await real(member)

        transfer.give = give
        await group.start("n3")
        await group.until(lambda: group.leaders() == ["n3"])
        assert "met an error of its own" in group.lines(leader)

    simulate(scenario, preferred_leaders=("n3",))


def test_a_preferred_member_that_cannot_lead_hardly_disrupts_appends(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        await group.until(lambda: group.leaders() == ["n3"])
        group.hosts["n3"].disk.stall(["sync"])
        group.append("n3", b"stuck").add_done_callback(lambda future: future.exception())
        await group.until(lambda: bool(group.leaders()) and group.leaders() != ["n3"])
        leader = await group.leader("n1", "n2")
        acked = 0
        deadline_s = group.loop.time() + 60
        while group.loop.time() < deadline_s:
            try:
                await group.append(leader, b"x")
                acked += 1
            except DLedgerError as error:
                assert error.code is DLedgerCode.LEADER_TRANSFERRING
            await asyncio.sleep(0.1)
        assert acked > 400

    simulate(scenario, preferred_leaders=("n3",), max_transfer_lag=1_000_000)


def test_preferred_leaders_must_be_members() -> None:
    with pytest.raises(ValueError, match="preferred_leaders names n9"):
        DLedgerConfig(
            group="g", self_id="n1", peers={"n1": "127.0.0.1:1"}, listen="127.0.0.1:1", data_dir="/d",
            preferred_leaders=("n9",),
        )  # fmt: skip
