"""The follower's side of replication: order, repetition, gaps, and the pushes that are refused."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from node.dledger import DLedgerCode, Entry
from node.dledger.entry import encode_entry
from node.dledger.handler import EntryHandler
from node.dledger.messages import HeartBeatRequest, PushEntryRequest
from node.dledger.rpc import PushType

SUCCESS = DLedgerCode.SUCCESS
INCONSISTENT = DLedgerCode.INCONSISTENT_STATE


def leader_log(*terms: int, body: bytes = b"body", after: Entry | None = None) -> list[Entry]:
    """A log with one entry for each term."""
    entries = [after] if after is not None else []
    for term in terms:
        before = entries[-1] if entries else None
        entries.append(
            encode_entry(
                magic=1,
                index=before.index + 1 if before else 0,
                term=term,
                pos=before.end_pos if before else 0,
                previous_chain_crc=before.chain_crc if before else 0,
                body=body,
            )
        )
    return entries if after is None else entries[1:]


class Follower:
    """n1 alone, following n2 in a term; the test is n2."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.term = 0

    async def follow(self, term: int, leader: str = "n2") -> None:
        self.term, self.leader = term, leader
        request = HeartBeatRequest(group="g", remote_id="n1", local_id=leader, term=term, leader_id=leader)
        for _ in range(2):
            await self.group.run("n1", lambda: self.group["n1"].elector.handle_heartbeat(request))
        assert self.group["n1"].member_state.leader_id == leader

    @property
    def store(self) -> Any:
        return self.group["n1"].store

    @property
    def handler(self) -> EntryHandler:
        handler: EntryHandler = self.group["n1"].pusher.handler
        return handler

    def send(
        self,
        push_type: PushType,
        entries: list[Entry],
        *,
        commit: int = -1,
        log: list[Entry] | None = None,
        following: Entry | None = None,
        term: int | None = None,
        raw: bytes | None = None,
    ) -> asyncio.Future[Any]:
        previous = -1
        if log is not None and entries and entries[0].index > 0:
            previous = log[entries[0].index - 1].term
        request = PushEntryRequest(
            group="g", remote_id="n1", local_id=self.leader, term=self.term if term is None else term,
            leader_id=self.leader, type=push_type, commit_index=commit,
            entries=b"".join(entry.raw for entry in entries) if raw is None else raw,
            previous_term=previous,
            next_term=following.term if following else -1,
            next_chain_crc=following.chain_crc if following else -1,
        )  # fmt: skip
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.group.on("n1", lambda: self.handler.handle_push(request, answer.set_result))
        return answer

    async def code(self, *args: Any, **kwargs: Any) -> DLedgerCode:
        answer = await self.send(*args, **kwargs)
        code: DLedgerCode = answer.code
        return code

    async def take(self, log: list[Entry]) -> None:
        """Bring the follower to hold exactly this log."""
        assert await self.code(PushType.TRUNCATE, log[:1]) is SUCCESS
        if log[1:]:
            assert await self.code(PushType.APPEND, log[1:], log=log) is SUCCESS


@pytest.fixture
def follower(simulate: Any) -> Any:
    """Run `scenario(follower)`: n1 follows the test in term 5 and has an empty log."""

    def run(scenario: Any, **options: Any) -> None:
        async def main(group: Any) -> None:
            await group.start("n1")
            player = Follower(group)
            await player.follow(5)
            await scenario(player)

        simulate(main, **options)

    return run


@pytest.mark.mechanism("Ordered follower append")
def test_entries_are_appended_in_index_order_whatever_their_arrival_order(follower: Any) -> None:
    async def scenario(player: Follower) -> None:
        log = leader_log(5, 5, 5, 5, 5, 5)
        await player.take(log[:2])
        answers = [player.send(PushType.APPEND, [log[index]], log=log) for index in (5, 4, 3)]
        await asyncio.sleep(0.05)
        assert not any(answer.done() for answer in answers)
        assert player.store.ledger_end_index == 1
        assert await player.code(PushType.APPEND, [log[2]], log=log) is SUCCESS
        assert [(await answer).code for answer in answers] == [SUCCESS] * 3
        assert [player.store.get(index) for index in range(6)] == log

    follower(scenario)


@pytest.mark.mechanism("handlePush: ...")
def test_a_second_push_of_a_waiting_index_is_answered_with_repeated_push(follower: Any) -> None:
    async def scenario(player: Follower) -> None:
        log = leader_log(5, 5, 5, 5)
        await player.take(log[:2])
        waiting = player.send(PushType.APPEND, [log[3]], log=log)
        assert await player.code(PushType.APPEND, [log[3]], log=log) is DLedgerCode.REPEATED_PUSH
        assert await player.code(PushType.APPEND, [log[2]], log=log) is SUCCESS
        assert (await waiting).code is SUCCESS
        assert await player.code(PushType.APPEND, [log[3]], log=log) is SUCCESS  # not repeated for ever

    follower(scenario)


@pytest.mark.mechanism("checkAbnormalFuture...")
def test_an_entry_already_in_the_log_is_acknowledged_and_a_different_one_refused(follower: Any) -> None:
    async def scenario(player: Follower) -> None:
        log = leader_log(5, 5, 5, 5, 5)
        await player.take(log[:4])
        assert await player.code(PushType.APPEND, log[1:3], log=log) is SUCCESS
        answer = await player.send(PushType.APPEND, log[2:], log=log)  # half old, half new
        assert (answer.code, answer.index, player.store.ledger_end_index) == (SUCCESS, 4, 4)
        other = leader_log(5, 5, 5, body=b"BODY")
        assert await player.code(PushType.APPEND, other[2:3], log=other) is INCONSISTENT
        assert [player.store.get(index) for index in range(5)] == log

    follower(scenario)


@pytest.mark.mechanism("checkAbnormalFuture...")
def test_pushes_after_a_gap_are_refused_after_the_push_timeout(follower: Any) -> None:
    async def scenario(player: Follower) -> None:
        log = leader_log(*[5] * 8)
        await player.take(log[:2])
        seven, five = player.send(PushType.APPEND, [log[7]], log=log), player.send(PushType.APPEND, [log[5]], log=log)
        started_s = player.group.loop.time()
        answer = await five
        assert (answer.code, answer.end_index) == (INCONSISTENT, 1)
        assert 0.3 < player.group.loop.time() - started_s < 0.6  # push_timeout_ms is 400
        assert (await seven).code is INCONSISTENT

    follower(scenario)


@pytest.mark.mechanism("compareOrTruncateRequests")
def test_compare_refuses_waiting_appends(follower: Any) -> None:
    async def scenario(player: Follower) -> None:
        log = leader_log(*[5] * 6)
        await player.take(log[:2])
        waiting = player.send(PushType.APPEND, [log[4]], log=log)
        assert await player.code(PushType.COMPARE, [log[1]]) is SUCCESS
        assert waiting.done() and waiting.result().code is INCONSISTENT

    follower(scenario)


@pytest.mark.mechanism("handleDoCompare...")
def test_compare_succeeds_only_for_an_identical_entry(follower: Any) -> None:
    async def scenario(player: Follower) -> None:
        log = leader_log(5, 5, 5)
        await player.take(log)
        await player.follow(6)
        assert await player.code(PushType.COMPARE, [log[2]]) is SUCCESS
        for changed in (leader_log(5, 5, 5, body=b"bodY"), leader_log(5, 5, 6), leader_log(4, 5, 5)):
            answer = await player.send(PushType.COMPARE, [changed[2]])
            assert (answer.code, answer.begin_index, answer.end_index) == (INCONSISTENT, 0, 2)
        beyond = leader_log(5, after=log[2])
        assert await player.code(PushType.COMPARE, beyond) is INCONSISTENT

    follower(scenario)


def test_append_compare_and_truncate_succeed_only_once_the_entry_is_durable(follower: Any) -> None:
    async def scenario(player: Follower) -> None:
        log = leader_log(5, 5, 5, 5)
        await player.take(log[:2])
        disk = player.group.hosts["n1"].disk
        disk.stall(("sync",))
        answers = []
        for push_type in (PushType.APPEND, PushType.COMPARE, PushType.APPEND, PushType.TRUNCATE):
            answers.append(player.send(push_type, [log[2]], log=log))
            await asyncio.sleep(0.1)
        assert player.store.ledger_end_index == 2
        assert not any(answer.done() for answer in answers)
        disk.unstall()
        assert [(await answer).code for answer in answers] == [SUCCESS] * 4

    follower(scenario)


def test_an_acknowledgement_that_meets_a_disk_error_does_not_block_others(
    follower: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(player: Follower) -> None:
        log = leader_log(5, 5, 5, 5)
        await player.take(log[:2])
        disk = player.group.hosts["n1"].disk
        disk.stall(("sync",))
        answers = [player.send(PushType.APPEND, [entry], log=log) for entry in log[2:]]
        await asyncio.sleep(0.1)
        real_term_at = player.store.term_at

        def term_at(index: int) -> int:
            if index == 2:
                raise OSError(5, "Input/output error")
            return real_term_at(index)

        monkeypatch.setattr(player.store, "term_at", term_at)
        disk.unstall()
        async with asyncio.timeout(5):
            assert [(await answer).code for answer in answers] == [DLedgerCode.DISK_ERROR, SUCCESS]

    follower(scenario)


@pytest.mark.mechanism("handleDoAppend")
def test_the_committed_index_advances_at_most_to_the_verified_index(follower: Any) -> None:
    async def scenario(player: Follower) -> None:
        log = leader_log(5, 5, 5, 5)
        await player.take(log)
        await player.follow(7)  # a new leader: nothing is verified yet
        assert await player.code(PushType.COMMIT, [], commit=3) is INCONSISTENT
        assert player.store.committed_index == -1
        assert await player.code(PushType.COMPARE, [log[1]]) is SUCCESS
        assert await player.code(PushType.COMMIT, [], commit=3) is SUCCESS
        assert player.store.committed_index == 1  # 2 and 3 may not be in the leader's log
        other = [*log[:2], *leader_log(6, 7, after=log[1])]
        assert await player.code(PushType.TRUNCATE, [log[1]], following=other[2], commit=3) is SUCCESS
        assert await player.code(PushType.APPEND, other[2:], log=other, commit=9) is SUCCESS
        assert (player.store.committed_index, player.store.get(3)) == (3, other[3])

    follower(scenario)


def test_append_is_refused_until_the_whole_log_is_verified(follower: Any) -> None:
    async def scenario(player: Follower) -> None:
        log = leader_log(5, 5, 5, 5)
        await player.take(log[:3])
        await player.follow(7)
        assert await player.code(PushType.APPEND, [log[3]], log=log) is INCONSISTENT
        assert await player.code(PushType.COMPARE, [log[2]]) is SUCCESS
        wrong = [*log[:2], *leader_log(6, 6, after=log[1])]
        assert await player.code(PushType.APPEND, [wrong[3]], log=wrong) is INCONSISTENT
        assert await player.code(PushType.APPEND, [log[3]], log=log) is SUCCESS

    follower(scenario)


@pytest.mark.mechanism("TRUNCATE")
def test_truncate_never_crosses_the_committed_index(follower: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(player: Follower) -> None:
        log = leader_log(5, 5, 5, 5)
        await player.take(log)
        assert await player.code(PushType.COMMIT, [], commit=2) is SUCCESS
        await player.follow(9)
        other = [*log[:2], *leader_log(8, after=log[1])]
        assert await player.code(PushType.TRUNCATE, [log[1]], following=other[2]) is INCONSISTENT
        assert await player.code(PushType.TRUNCATE, [other[2]]) is INCONSISTENT
        assert await player.code(PushType.TRUNCATE, leader_log(8)) is INCONSISTENT
        assert [player.store.get(index) for index in range(4)] == log
        lines = player.group.lines("n1")  # one line for all requests: endless repeats would fill the disk
        assert "refusing to truncate to 1 for n2: 2 is committed" in lines and lines.count("refusing to truncate") == 1

    follower(scenario)


def test_an_outdated_truncate_removes_nothing(follower: Any) -> None:
    async def scenario(player: Follower) -> None:
        log = leader_log(*[5] * 6)
        await player.take(log[:3])
        late = [log[1]]
        assert await player.code(PushType.APPEND, log[3:], log=log) is SUCCESS  # acknowledged to this leader
        assert await player.code(PushType.TRUNCATE, late) is INCONSISTENT
        assert player.store.ledger_end_index == 5
        await player.follow(6)  # a new term, nothing verified yet, but the next entry is the leader's too
        assert await player.code(PushType.TRUNCATE, late, following=log[2]) is INCONSISTENT
        assert player.store.ledger_end_index == 5

    follower(scenario)


@pytest.mark.mechanism("TRUNCATE")
def test_truncate_writes_the_leaders_entry_where_it_differs(follower: Any) -> None:
    async def scenario(player: Follower) -> None:
        log = leader_log(5, 5, 5, 5)
        await player.take(log)
        await player.follow(8)
        other = [*log[:2], *leader_log(7, after=log[1])]
        answer = await player.send(PushType.TRUNCATE, [other[2]])
        assert (answer.code, answer.index, answer.end_index) == (SUCCESS, 2, 2)
        assert [player.store.get(index) for index in range(4)] == [*other, None]
        player.group.power_fail("n1")
        await player.group.start("n1")
        assert [player.store.get(index) for index in range(4)] == [*other, None]

    follower(scenario)


def test_truncate_at_the_leaders_begin_resets_the_log(follower: Any) -> None:
    async def scenario(player: Follower) -> None:
        await player.take(leader_log(5, 5, 5))
        await player.follow(8)
        first = encode_entry(magic=1, index=40, term=7, pos=8192, previous_chain_crc=9, body=b"first of the leader")
        answer = await player.send(PushType.TRUNCATE, [first])
        assert (answer.code, answer.begin_index, answer.end_index) == (SUCCESS, 40, 40)
        assert await player.code(PushType.APPEND, leader_log(8, after=first), log=None) is INCONSISTENT  # term 7 before
        log = dict(zip(itertools.count(40), [first, *leader_log(8, after=first)], strict=False))
        assert await player.code(PushType.APPEND, [log[41]], log=log) is SUCCESS

    follower(scenario)


@pytest.mark.mechanism("handlePush: ...")
@pytest.mark.parametrize("push_type", list(PushType))
def test_garbage_entries_are_refused(follower: Any, push_type: PushType) -> None:
    async def scenario(player: Follower) -> None:
        log = leader_log(5, 5)
        damaged = bytearray(log[0].raw)
        damaged[50] ^= 1
        wrong = {
            PushType.APPEND: [b"", bytes(damaged), b"garbage", log[0].raw[:-1], log[1].raw + log[0].raw],
            PushType.COMMIT: [log[0].raw],
            PushType.COMPARE: [b"", bytes(damaged), log[0].raw + log[1].raw],
            PushType.TRUNCATE: [b"", bytes(damaged), log[0].raw + log[1].raw],
        }
        for raw in wrong[push_type]:
            assert await player.code(push_type, [], raw=raw) is DLedgerCode.UNEXPECTED_ARGUMENT
        assert player.store.ledger_end_index == -1
        late = leader_log(6)  # an entry of a term that its leader has not reached
        if push_type is PushType.APPEND:
            assert await player.code(push_type, late, log=late) is DLedgerCode.UNEXPECTED_ARGUMENT

    follower(scenario)


def test_clear_answers_all_waiting_pushes(follower: Any) -> None:
    async def scenario(player: Follower) -> None:
        log = leader_log(*[5] * 6)
        await player.take(log[:2])
        waiting = player.send(PushType.APPEND, [log[5]], log=log)
        player.group.hosts["n1"].disk.stall(("sync",))
        acking = player.send(PushType.APPEND, [log[2]], log=log)
        await asyncio.sleep(0.05)
        player.group.on("n1", lambda: player.handler.clear(DLedgerCode.EXPIRED_TERM))
        assert [(await answer).code for answer in (waiting, acking)] == [DLedgerCode.EXPIRED_TERM] * 2

    follower(scenario)


def test_a_push_to_a_full_disk_is_answered_with_disk_full(follower: Any) -> None:
    async def scenario(player: Follower) -> None:
        log = leader_log(*[5] * 4, body=bytes(900))
        await player.take(log[:2])
        disk = player.group.hosts["n1"].disk
        disk.fill_up()
        assert await player.code(PushType.APPEND, [log[2]], log=log) is DLedgerCode.DISK_FULL
        assert await player.code(PushType.APPEND, [log[3]], log=log) is DLedgerCode.DISK_FULL
        disk.heal()
        await player.group.until(lambda: player.store.writer.failure is None)
        assert await player.code(PushType.APPEND, log[2:], log=log) is SUCCESS

    follower(scenario)


def test_the_number_of_waiting_pushes_is_bounded(follower: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.dledger.handler.MAX_WAITING_PUSHES", 10)

    async def scenario(player: Follower) -> None:
        log = leader_log(*[5] * 40)
        await player.take(log[:2])
        answers = [player.send(PushType.APPEND, [entry], log=log) for entry in log[20:35]]
        assert [answer.done() for answer in answers] == [False] * 10 + [True] * 5
        assert answers[-1].result().code is DLedgerCode.FALL_BEHIND_TOO_MUCH

    follower(scenario)
