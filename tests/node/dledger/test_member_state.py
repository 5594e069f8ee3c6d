"""Term and vote survive the process; a member that lost them does not start."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from node.dledger import LedgerCorrupt, MemberState, Role

PATH = "/data/dledger/member_state"


def state_of(bench: Any) -> MemberState:
    state: MemberState = bench.on("n1", lambda: MemberState(bench.config, bench.runtime))
    bench.on("n1", state.load)
    return state


async def change(bench: Any, state: MemberState, term: int, vote: str | None) -> None:
    async def both() -> None:
        async with state.lock:
            await state.change_term(term)
            if vote is not None:
                await state.record_vote(vote)

    await bench.run("n1", both)


def test_a_new_member_starts_in_term_0_without_a_vote(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        state = state_of(bench)
        assert (state.term, state.voted_for, state.is_new, state.role) == (0, None, True, Role.CANDIDATE)
        await change(bench, state, 1, None)
        assert not state.is_new

    bench(scenario)


@pytest.mark.parametrize("vote", ["n2", None])
def test_term_and_vote_survive_a_power_cut(bench: Any, vote: str | None) -> None:
    async def scenario(bench: Any) -> None:
        await change(bench, state_of(bench), 7, vote)
        bench.power_fail()
        state = state_of(bench)
        assert (state.term, state.voted_for, state.is_new, state.known_max_term) == (7, vote, False, 7)

    for seed in range(5):
        bench(scenario, seed=seed)


def test_a_newer_term_clears_the_vote_and_the_leader(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        state = state_of(bench)
        await change(bench, state, 3, "n2")
        state.become_follower(3, "n2")
        await change(bench, state, 4, None)
        assert (state.term, state.voted_for, state.leader_id) == (4, None, None)
        await change(bench, state, 2, None)  # an older term is no change
        assert state.term == 4

    bench(scenario)


def test_term_and_vote_change_in_memory_only_once_they_are_durable(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        state = state_of(bench)
        await change(bench, state, 3, "n2")
        bench.disk.stall()
        task = bench.on("n1", lambda: asyncio.get_running_loop().create_task(change(bench, state, 4, "n1")))
        await asyncio.sleep(1)
        assert (state.term, state.voted_for, state.is_settling) == (3, "n2", True)
        bench.disk.unstall()
        await task
        assert (state.term, state.voted_for, state.is_settling) == (4, "n1", False)
        bench.disk.fail("sync")
        with pytest.raises(OSError):
            await change(bench, state, 5, "n2")
        assert (state.term, state.voted_for) == (4, "n1")

    bench(scenario)


def test_confirm_makes_a_vote_durable_whose_file_name_was_not_synced(bench: Any) -> None:
    """Granted again to the same candidate, it would not be rewritten; once lost in a power cut, another candidate of
    the same term could get it."""

    async def scenario(bench: Any) -> None:
        state = state_of(bench)
        await change(bench, state, 3, "n2")
        await bench.killed_before_the_name_is_synced(PATH, lambda: state.persist(4, "n2"))
        state = state_of(bench)
        await bench.run("n1", state.confirm)
        assert (state.term, state.voted_for) == (4, "n2")
        bench.power_fail()
        state = state_of(bench)
        assert (state.term, state.voted_for) == (4, "n2")

    for seed in range(10):
        bench(scenario, seed=seed)


def test_a_flipped_bit_in_the_state_file_is_refused(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        await change(bench, state_of(bench), 3, "n2")
        size = len(bench.disk.inode(PATH).cache)
        for offset in range(size - 1):
            bench.disk.flip_bit(PATH, offset)
            with pytest.raises(LedgerCorrupt, match="member_state is damaged"):
                state_of(bench)
            bench.disk.flip_bit(PATH, offset)
        assert state_of(bench).term == 3

    bench(scenario)


def test_a_log_with_a_newer_term_than_the_state_is_refused(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        state = state_of(bench)
        state.check_against_log(-1)
        state.check_against_log(0)
        with pytest.raises(LedgerCorrupt, match="says term 0, but the log has entries of term 2"):
            state.check_against_log(2)

    bench(scenario)


def test_a_leader_leads_the_current_term_and_steps_down_before_the_next(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        state = state_of(bench)
        await change(bench, state, 3, None)
        with pytest.raises(RuntimeError, match="the current term is 3, not 2"):
            state.become_leader(2)
        state.become_leader(3)
        assert (state.is_leader, state.leader_id) == (True, "n1")
        with pytest.raises(RuntimeError, match="must step down"):
            await change(bench, state, 4, None)
        state.become_candidate()
        assert (state.is_candidate, state.leader_id) == (True, None)

    bench(scenario)


def test_a_failing_role_listener_does_not_stop_the_others(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(bench: Any) -> None:
        caplog.set_level("INFO")
        state = state_of(bench)
        heard: list[tuple[int, Role]] = []

        def fail(term: int, role: Role) -> None:
            raise ValueError("a bug")

        state.add_role_listener(fail)
        state.add_role_listener(lambda term, role: heard.append((term, role)))
        await change(bench, state, 5, None)
        state.become_leader(5)
        state.announce()
        assert heard == [(5, Role.LEADER)]
        lines = [record.getMessage() for record in caplog.records if record.name == "node.dledger.role"]
        assert lines == ["role_change self=n1 role=LEADER term=5", "a role listener failed"]

    bench(scenario)
