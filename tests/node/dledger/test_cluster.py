"""Whole groups in simulation: elections, reads, and their behaviour under faults."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from node.dledger import DEFAULT_TIMING, DLedgerCode, DLedgerError, ReadMode, Role

SAFE_MODES = [ReadMode.READ_INDEX, ReadMode.LEASE, ReadMode.LOG]
BARRIERS = ("barrier", "ask_barrier")


async def error_code(awaitable: Any) -> DLedgerCode:
    with pytest.raises(DLedgerError) as caught:
        await awaitable
    return caught.value.code


def others(group: Any, *names: str) -> list[str]:
    return [name for name in group.names if name not in names]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_a_group_elects_one_leader_and_replicates(simulate: Any, size: int) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        indices = await group.append_all(leader, *[b"%d" % number for number in range(30)])
        assert indices == list(range(indices[0], indices[0] + 30))
        await group.converged()
        assert group.leaders() == [leader]
        status = group[leader].status()
        assert status["role"] == "LEADER" and status["watermarks"] == dict.fromkeys(group.names, indices[-1])

    for seed in range(3):
        simulate(scenario, size=size, seed=seed)


@pytest.mark.parametrize("timing", ["fast", "default"])
def test_the_median_failover_time_after_a_leader_kill_is_bounded(simulate: Any, timing: str) -> None:
    async def scenario(group: Any) -> float:
        await group.start()
        leader = await group.leader()
        await group.append_all(leader, b"before")
        await group.converged()
        group.kill(leader)
        killed_s = group.loop.time()
        await group.append_all(await group.leader(), b"after")
        return float(group.loop.time() - killed_s)

    options = {"timing": DEFAULT_TIMING} if timing == "default" else {}
    times = sorted(simulate(scenario, seed=seed, **options) for seed in range(11))
    limit_s = 10.0 if timing == "default" else 1.5
    assert times[5] < limit_s, times


@pytest.mark.parametrize("timing", ["fast", "default"])
def test_failover_time_is_bounded_when_the_leader_is_cut_off(simulate: Any, timing: str) -> None:
    async def scenario(group: Any) -> float:
        await group.start()
        leader = await group.leader()
        rest = others(group, leader)
        await group.append_all(leader, b"before")
        await group.converged()
        await group.cut(" ".join(rest))
        cut_s = group.loop.time()
        await group.append_all(await group.leader(*rest), b"after")
        return float(group.loop.time() - cut_s)

    options = {"timing": DEFAULT_TIMING} if timing == "default" else {}
    times = sorted(simulate(scenario, seed=seed, **options) for seed in range(21))
    limits_s = (10.0, 15.0) if timing == "default" else (1.5, 2.5)
    assert times[10] < limits_s[0] and times[-1] < limits_s[1], times


@pytest.mark.mechanism("Append vs commit...")
def test_a_leader_in_a_minority_cannot_commit_and_steps_down(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        old = await group.leader()
        mate, *rest = others(group, old)
        await group.cut(f"{old} {mate}", " ".join(rest))
        doubtful = group.append(old, b"minority")
        new = await group.leader(*rest)
        assert await error_code(doubtful) in (DLedgerCode.TERM_CHANGED, DLedgerCode.WAIT_QUORUM_ACK_TIMEOUT)
        await group.append_all(new, b"majority")
        await group.until(lambda: group.leaders() == [new])
        with pytest.raises(DLedgerError) as caught:
            group.append(old, b"refused")
        assert (caught.value.code, caught.value.is_definite) == (DLedgerCode.NOT_LEADER, True)
        await group.heal()
        await group.converged()
        assert [body for _, body in group.log(old) if body] == [b"majority"]

    for seed in range(5):
        simulate(scenario, size=5, seed=seed)


@pytest.mark.mechanism("LEADER_PENDING_FULL...")
def test_without_a_quorum_pending_appends_fill_up_and_then_time_out(simulate: Any, with_timing: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        for name in others(group, leader):
            group.hosts[name].disk.stall()  # heartbeats are answered, entries are not
        futures = [group.append(leader, b"%d" % number) for number in range(50)]
        with pytest.raises(DLedgerError) as caught:
            group.append(leader, b"one too many")
        assert (caught.value.code, caught.value.is_definite) == (DLedgerCode.LEADER_PENDING_FULL, True)
        assert {await error_code(future) for future in futures} == {DLedgerCode.WAIT_QUORUM_ACK_TIMEOUT}
        for name in others(group, leader):
            group.hosts[name].disk.heal()
        await group.converged()
        assert len(group.log(leader)) >= 51  # in doubt at first, committed in the end

    simulate(scenario, max_pending_appends=50)


def test_appends_beyond_max_pending_bytes_are_refused_while_the_disk_stalls(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        group.hosts[leader].disk.stall()
        with pytest.raises(DLedgerError) as caught:
            for _ in range(100):
                group.append(leader, bytes(3000))
        assert caught.value.code is DLedgerCode.LEADER_PENDING_FULL
        assert 100_000 < group[leader].store.writer.pending_bytes < 110_000

    simulate(scenario, max_pending_bytes=100_000)


@pytest.mark.parametrize("kind", ["stall", "full", "error"])
def test_a_leader_whose_disk_fails_is_replaced(simulate: Any, kind: str) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        old = await group.leader()
        disk = group.hosts[old].disk
        {"stall": disk.stall, "full": disk.fill_up, "error": lambda: disk.fail("sync")}[kind]()
        group.append(old, b"not on the disk of its leader")
        new = await group.leader(*others(group, old))
        await group.append_all(new, b"goes on")
        assert "the disk has stored nothing" in group.lines(old)
        await asyncio.sleep(5)
        assert group.leaders() == [new]  # a member that cannot write does not stand for election
        disk.heal()
        await group.converged()

    simulate(scenario)


def test_a_follower_with_a_stalled_disk_blocks_no_commits_and_keeps_following(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        follower = others(group, leader)[0]
        group.hosts[follower].disk.stall()
        await group.append_all(leader, b"a", b"b")
        await asyncio.sleep(10)
        assert group.leaders() == [leader]
        assert group[follower].member_state.is_follower  # it still answers heartbeats
        assert group[leader].pusher.checker.watermarks()[follower] < group[leader].store.ledger_end_index
        group.hosts[follower].disk.heal()
        await group.converged()

    simulate(scenario)


def test_a_leader_stays_during_a_disk_stall_if_step_down_is_disabled(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        group.hosts[leader].disk.stall()
        await group.append_all(leader, b"two followers are a quorum")
        await asyncio.sleep(5)
        assert group.leaders() == [leader]

    simulate(scenario, step_down_on_stalled_disk=False)


@pytest.mark.mechanism("Leader-only reads/writes")
@pytest.mark.parametrize("way", BARRIERS)
@pytest.mark.parametrize("mode", SAFE_MODES)
def test_reads_see_every_acknowledged_write(simulate: Any, mode: ReadMode, way: str) -> None:
    async def scenario(group: Any) -> None:
        barrier = getattr(group, way)
        await group.start()
        for _ in range(3):
            leader = await group.leader()
            for number in range(5):
                (index,) = await group.append_all(leader, b"%d" % number)
                assert await barrier(leader, mode) >= index
            for follower in others(group, leader):
                if follower in group.members:
                    assert await error_code(barrier(follower, mode)) is DLedgerCode.NOT_LEADER
                    assert await barrier(follower, ReadMode.UNSAFE) <= index
            group.kill(leader)
            await group.leader()
            await group.start(leader)

    simulate(scenario)


@pytest.mark.parametrize("way", BARRIERS)
@pytest.mark.parametrize("mode", SAFE_MODES)
def test_a_cut_off_leader_serves_no_stale_read(simulate: Any, mode: ReadMode, way: str) -> None:
    async def scenario(group: Any) -> None:
        barrier = getattr(group, way)
        await group.start()
        old = await group.leader()
        await group.append_all(old, b"first")
        await group.cut(old, " ".join(others(group, old)))
        stale = group[old].store.committed_index
        answers: list[tuple[float, int]] = []

        async def read() -> None:
            while True:
                try:
                    index = await barrier(old, mode)
                    answers.append((group.loop.time(), index))
                except DLedgerError:
                    pass
                await asyncio.sleep(0.01)

        reading = group.loop.create_task(read())
        new = await group.leader(*others(group, old))
        await group.append_all(new, b"second")
        written_s = group.loop.time()
        await asyncio.sleep(3)
        assert [answer for answer in answers if answer[0] > written_s] == []
        assert await barrier(old, ReadMode.UNSAFE) == stale  # an unsafe read is stale
        reading.cancel()

    for seed in range(5):
        simulate(scenario, seed=seed)


def test_concurrent_reads_share_a_heartbeat_round_or_a_log_entry(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        leadership = group[leader].elector.leadership
        before = leadership._round
        await asyncio.gather(*(group.barrier(leader, ReadMode.READ_INDEX) for _ in range(500)))
        assert leadership._round - before <= 3
        end = group[leader].store.ledger_end_index
        await asyncio.gather(*(group.barrier(leader, ReadMode.LOG) for _ in range(500)))
        assert group[leader].store.ledger_end_index - end <= 3

    simulate(scenario)


def test_lease_reads_need_no_heartbeat_round_while_the_lease_holds(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        await group.until(lambda: group[leader].elector.leadership.holds_lease())
        before = group[leader].elector.leadership._round
        started_s = group.loop.time()
        for _ in range(100):
            await group.barrier(leader, ReadMode.LEASE)
        assert group.loop.time() == started_s
        assert group[leader].elector.leadership._round == before

    simulate(scenario)


def test_a_new_leader_serves_no_read_before_its_own_entry_is_committed(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        old = await group.leader()
        await group.converged()
        at_election: list[tuple[int, Any]] = []

        def elected(term: int, role: Role) -> None:
            if role is Role.LEADER:
                (new,) = group.leaders()
                barrier = asyncio.get_running_loop().create_task(group[new].read_barrier(ReadMode.READ_INDEX))
                at_election.append((group[new].store.committed_index, barrier))

        index = (await group.append_all(old, b"acknowledged"))[-1]
        group.kill(old)  # before the followers learn that the entry is committed
        for member in group.members.values():
            member.add_role_listener(elected)
        await group.until(lambda: bool(at_election))
        committed_index, barrier = at_election[0]
        assert committed_index < index
        assert await barrier > index

    simulate(scenario)


def test_an_isolated_member_with_a_greater_term_rejoins_and_catches_up(simulate: Any) -> None:
    """dledger#325, and the disruption by members that rejoin with a greater term."""

    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        victim = others(group, leader)[0]
        await group.cut(" ".join(others(group, victim)))
        await group.append_all(leader, b"without it")
        group.kill(victim)
        member = group.on(victim, lambda: group.server(group.configs[victim], group.process(victim).runtime))

        async def raise_term() -> None:
            member.member_state.load()
            async with member.member_state.lock:
                await member.member_state.change_term(50)

        await group.run(victim, raise_term)
        group.kill(victim)
        await group.start(victim)
        await asyncio.sleep(3)
        await group.heal()
        healed_s = group.loop.time()
        await group.converged()
        assert group.loop.time() - healed_s < 5
        (new,) = group.leaders()
        assert group[new].member_state.term >= 50
        await group.append_all(new, b"with it")
        await group.converged()
        assert [body for _, body in group.log(victim) if body] == [b"without it", b"with it"]

    for seed in range(5):
        simulate(scenario, seed=seed)


def test_a_one_way_cut_leaves_exactly_one_leader(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        deaf = others(group, leader)[0]
        await group.network.cut("deaf", {deaf: frozenset(others(group, deaf))})
        await group.append_all(leader, b"entry")
        await asyncio.sleep(5)
        assert len(group.leaders()) == 1
        await group.network.heal("deaf")
        await group.converged()

    for seed in range(3):
        simulate(scenario, size=5, seed=seed)


def test_no_acknowledged_entry_is_lost_when_all_members_lose_power(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        acknowledged: list[tuple[int, bytes]] = []
        await group.start()
        for cycle in range(4):
            leader = await group.leader()
            for number in range(10):
                body = b"%d/%d" % (cycle, number)
                acknowledged.append(((await group.append_all(leader, body))[0], body))
            for number in range(5):
                group.append(leader, b"in flight %d" % number)
            await asyncio.sleep(0.0005 * cycle)
            group.power_fail(*group.names)
            await group.start()
            assert group.ended == {}
        await group.leader()
        await group.converged()
        log = group.log("n1")
        assert all(log[index][1] == body for index, body in acknowledged)

    for seed in range(5):
        simulate(scenario, seed=seed)


@pytest.mark.mechanism("Vote refuses shorter logs...")
@pytest.mark.parametrize("winner", ["n2", "n3"])
def test_the_elected_log_decides_which_uncommitted_entries_survive(simulate: Any, winner: str) -> None:
    """The question at the end of seed S3. n1 is gone; n2 has 100 entries, n3 120, n4 and n5 90. At most 100 can be
    committed. Only n2 and n3 can win; entries 101 to 120 survive only if n3 does."""

    async def scenario(group: Any) -> None:
        for name, count in {"n2": 100, "n3": 120, "n4": 90, "n5": 90}.items():
            await group.put_log(name, [1] * count, term=2)
        rest = others(group, "n1", "n2", "n3") if winner == "n3" else ["n4", "n5"]
        await group.cut(" ".join([winner, *rest]))
        await group.start("n2", "n3", "n4", "n5")
        assert await group.leader() == winner
        await group.heal()
        await group.converged("n2", "n3", "n4", "n5")
        kept = 120 if winner == "n3" else 100
        assert [term for term, _ in group.log("n4")][:kept] == [1] * kept
        assert all(term >= 2 for term, _ in group.log("n4")[kept:])

    for seed in range(3):
        simulate(scenario, size=5, seed=seed)


@pytest.mark.mechanism("Vote refuses shorter logs...")
def test_members_with_short_logs_cannot_win(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        for name, count in {"n2": 100, "n3": 120, "n4": 90, "n5": 90}.items():
            await group.put_log(name, [1] * count, term=2)
        await group.start("n2", "n3", "n4", "n5")
        assert await group.leader() in ("n2", "n3")
        assert {name for _, name, _, role in group.roles if role == "LEADER"} <= {"n2", "n3"}

    for seed in range(10):
        simulate(scenario, size=5, seed=seed)


def test_a_follower_warns_if_its_leader_has_another_timing(simulate: Any, with_timing: Any) -> None:
    """Nothing else shows that the leader's lease may outlast that of its followers."""

    async def scenario(group: Any) -> None:
        other = with_timing(heartbeat_interval_ms=200)
        group.configs["n2"] = dataclasses.replace(group.configs["n2"], timing=other)
        await group.start()
        leader = await group.leader()
        await group.append_all(leader, b"x")
        await group.converged()
        warned = {name: "has another timing, a lease of" in group.lines(name) for name in group.names}
        assert warned == {name: name != leader and "n2" in (name, leader) for name in group.names}

    simulate(scenario)
