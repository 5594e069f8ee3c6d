"""Mutants under scripted schedules: situations that random faults rarely cause are produced step by step.

Every script runs twice: with the mutant it must fail, without it it must pass.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from node.dledger import DLedgerServer
from node.dledger.messages import VoteRequest
from node.dledger.rpc import VoteResult
from node.mutants.election import no_step_down, vote_not_persisted


def mutated(base: type[DLedgerServer], mutate: Any, is_mutated: bool) -> type[DLedgerServer]:
    """Members with the mutant, or `base` itself."""
    if not is_mutated:
        return base

    class Mutated(base):  # type: ignore[valid-type,misc]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            mutate(self)

    return Mutated


def others(group: Any, name: str) -> list[str]:
    return [other for other in group.names if other != name]


@pytest.mark.parametrize("is_mutated", [False, True])
def test_a_leader_that_is_cut_off_steps_down(simulate: Any, is_mutated: bool) -> None:
    async def scenario(group: Any) -> bool:
        await group.start()
        leader = await group.leader()
        await group.cut(" ".join(others(group, leader)))
        assert await group.leader(*others(group, leader)) != leader
        await asyncio.sleep(1)
        return leader in group.leaders()

    assert simulate(scenario, server=mutated(DLedgerServer, no_step_down, is_mutated)) is is_mutated


@pytest.mark.parametrize("is_mutated", [False, True])
def test_a_vote_survives_a_restart_of_the_voter(simulate: Any, is_mutated: bool) -> None:
    """n1 and n2 elect one of them; the voter restarts, and n3 asks it for its vote in the same term."""

    async def scenario(group: Any) -> VoteResult:
        await group.start("n1", "n2")
        leader = await group.leader()
        voter = "n2" if leader == "n1" else "n1"
        term = group[leader].member_state.term
        await group.converged("n1", "n2")
        end = group[voter].store.ledger_end_index, group[voter].store.ledger_end_term
        group.kill("n1", "n2")
        await group.start(voter)
        await asyncio.sleep(0.51)
        assert group[voter].member_state.term == term
        request = VoteRequest(
            group="g", remote_id=voter, local_id="n3", term=term, leader_id="n3",
            ledger_end_index=end[0], ledger_end_term=end[1],
        )  # fmt: skip
        result: VoteResult = group[voter].elector.judge_vote(request)
        return result

    result = simulate(scenario, server=mutated(DLedgerServer, vote_not_persisted, is_mutated))
    assert result is (VoteResult.ACCEPT if is_mutated else VoteResult.REJECT_ALREADY_VOTED)
