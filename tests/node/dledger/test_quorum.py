"""Counting acknowledgements, and which entries that commits."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from node.dledger import DLedgerCode, DLedgerError
from node.dledger.quorum import QuorumAckChecker


class Leader:
    """n1 with a real store and checker, made leader by hand; the test gives the acknowledgements."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.member = group["n1"]
        self.store = self.member.store
        self.state = self.member.member_state
        self.checker: QuorumAckChecker = self.member.pusher.checker

    async def lead(self, term: int) -> None:
        async def change() -> None:
            if self.state.is_leader:
                self.state.become_candidate()
                self.state.announce()
            async with self.state.lock:
                await self.state.change_term(term)

        await self.group.run("n1", change)
        self.state.become_leader(term)
        self.group.on("n1", lambda: self.checker.begin_term(term))

    def append(self, *bodies: bytes, term: int | None = None) -> list[asyncio.Future[Any]]:
        term = self.state.term if term is None else term
        futures = []
        for body in bodies:
            entry = self.group.on("n1", lambda body=body: self.store.append_as_leader(term, len(body), lambda _: body))
            if term == self.state.term:
                futures.append(self.group.on("n1", lambda entry=entry: self.checker.register(entry)))
        return futures

    async def acked(self, term: int | None = None, **indices: int) -> None:
        """Peers acknowledge; the leader's own disk is waited for."""
        await self.group.until(lambda: self.store.durable_index == self.store.ledger_end_index)
        for peer, index in indices.items():
            self.group.on(
                "n1",
                lambda peer=peer, index=index: self.checker.update_watermark(
                    self.state.term if term is None else term, peer, index
                ),
            )
        await asyncio.sleep(0.001)


@pytest.fixture
def lead(simulate: Any) -> Any:
    """Run `scenario(leader)` with n1 of a group of `size` whose other members do not run."""

    def run(scenario: Any, *, size: int = 3, **options: Any) -> None:
        async def main(group: Any) -> None:
            await group.start("n1")
            await group.run("n1", group["n1"].elector.stop)  # the roles are the test's
            await scenario(Leader(group))

        simulate(main, size=size, **options)

    return run


@pytest.mark.mechanism("Quorum index...")
def test_the_quorum_index_counts_the_leader_too(lead: Any) -> None:
    async def scenario(leader: Leader) -> None:
        await leader.lead(1)
        leader.append(*[b"x"] * 102)
        await leader.acked(n2=101, n3=100)
        assert leader.checker.watermarks() == {"n1": 101, "n2": 101, "n3": 100}
        assert leader.checker.quorum_index() == 101

    lead(scenario)


@pytest.mark.mechanism("Quorum index...")
@pytest.mark.parametrize(("size", "quorum"), [(2, 2), (3, 2), (4, 3), (5, 3), (7, 4)])
def test_the_quorum_index_is_the_highest_index_on_a_majority(lead: Any, size: int, quorum: int) -> None:
    async def scenario(leader: Leader) -> None:
        await leader.lead(1)
        leader.append(*[b"x"] * 5)
        peers = [f"n{number}" for number in range(2, size + 1)]
        await leader.acked()
        for marks in itertools.islice(itertools.product((-1, 1, 3, 4), repeat=len(peers)), 0, 4096, 17):
            for peer, mark in zip(peers, marks, strict=True):
                leader.group.on("n1", lambda peer=peer, mark=mark: leader.checker.set_watermark(1, peer, mark))
            reached = [index for index in range(-1, 5) if sum(mark >= index for mark in (4, *marks)) >= quorum]
            assert leader.checker.quorum_index() == max(reached)

    lead(scenario, size=size)


@pytest.mark.mechanism("Ack walk-down...")
def test_appends_complete_in_order_when_a_quorum_has_them(lead: Any) -> None:
    async def scenario(leader: Leader) -> None:
        await leader.lead(1)
        futures = leader.append(b"a", b"b", b"c", b"d")
        order: list[int] = []
        for future in futures:
            future.add_done_callback(lambda future: order.append(future.result().index))
        await leader.acked()
        assert not any(future.done() for future in futures)  # the leader alone is no quorum
        await leader.acked(n2=1)
        assert [future.done() for future in futures] == [True, True, False, False]
        await leader.acked(n3=3)
        assert order == [0, 1, 2, 3]
        result = futures[2].result()
        assert (result.index, result.term, result.pos) == (2, 1, leader.store.get(2).pos)
        assert leader.checker.pending_count == 0

    lead(scenario)


def test_a_quorum_of_followers_commits_before_the_leaders_own_disk(lead: Any) -> None:
    async def scenario(leader: Leader) -> None:
        await leader.lead(1)
        leader.group.hosts["n1"].disk.stall()
        (future,) = leader.append(b"a")
        for peer in ("n2", "n3"):
            leader.group.on("n1", lambda peer=peer: leader.checker.update_watermark(1, peer, 0))
        await asyncio.sleep(0.01)
        assert future.done() and leader.store.durable_index == -1

    lead(scenario)


def test_the_leaders_unsynced_entry_does_not_count(lead: Any) -> None:
    async def scenario(leader: Leader) -> None:
        await leader.lead(1)
        leader.group.hosts["n1"].disk.stall(("sync",))
        (future,) = leader.append(b"a")
        leader.group.on("n1", lambda: leader.checker.update_watermark(1, "n2", 0))
        await asyncio.sleep(0.05)
        assert not future.done()
        leader.group.hosts["n1"].disk.unstall()
        assert (await future).index == 0

    lead(scenario)


def test_figure_8_old_terms_are_not_committed_by_counting(lead: Any) -> None:
    """Raft 5.4.2: an older term's entry on a majority may still be overwritten; one of the current term commits it."""

    async def scenario(leader: Leader) -> None:
        await leader.lead(2)
        leader.append(b"from term 2", b"another")
        await leader.lead(4)
        await leader.acked(n2=1, n3=1, n4=1, n5=1)
        assert leader.checker.quorum_index() == 1
        assert leader.store.committed_index == -1
        leader.append(b"from term 4")
        await leader.acked(n2=2)
        assert leader.store.committed_index == -1
        await leader.acked(n3=2)
        assert leader.store.committed_index == 2

    lead(scenario, size=5)


@pytest.mark.mechanism("TERM_CHANGED clean-up...")
def test_acknowledgements_of_other_terms_are_ignored(lead: Any) -> None:
    async def scenario(leader: Leader) -> None:
        await leader.lead(2)
        leader.append(b"a")
        await leader.acked(term=1, n2=0, n3=0)
        await leader.acked(term=3, n2=0, n3=0)
        assert leader.store.committed_index == -1
        await leader.lead(3)
        assert leader.checker.watermark(2, "n2") == -1
        assert leader.checker.watermarks() == {"n1": 0, "n2": -1, "n3": -1}

    lead(scenario)


def test_an_acknowledgement_never_lowers_a_watermark_but_set_watermark_may(lead: Any) -> None:
    async def scenario(leader: Leader) -> None:
        await leader.lead(1)
        leader.append(*[b"x"] * 10)
        await leader.acked(n2=9)
        await leader.acked(n2=4)
        assert leader.checker.watermark(1, "n2") == 9
        leader.group.on("n1", lambda: leader.checker.set_watermark(1, "n2", 6))
        assert leader.checker.watermark(1, "n2") == 6
        assert leader.store.committed_index == 9  # a committed entry stays committed

    lead(scenario)


@pytest.mark.mechanism("WAIT_QUORUM_ACK_TIMEOUT")
def test_appends_without_a_quorum_time_out_and_stay_in_doubt(lead: Any) -> None:
    async def scenario(leader: Leader) -> None:
        await leader.lead(1)
        (first,) = leader.append(b"a")
        await asyncio.sleep(1.0)
        (second,) = leader.append(b"b")
        started_s = leader.group.loop.time()
        with pytest.raises(DLedgerError) as caught:
            await first
        assert leader.group.loop.time() - started_s == pytest.approx(1.5, abs=0.01)  # 2.5 s after it was made
        assert caught.value.code is DLedgerCode.WAIT_QUORUM_ACK_TIMEOUT and not caught.value.is_definite
        assert not second.done()
        await leader.acked(n2=1)
        assert (await second).index == 1  # which commits the first one after all
        assert leader.store.committed_index == 1

    lead(scenario)


@pytest.mark.mechanism("TERM_CHANGED clean-up...")
def test_pending_appends_fail_in_doubt_when_the_term_changes(lead: Any) -> None:
    async def scenario(leader: Leader) -> None:
        await leader.lead(1)
        futures = leader.append(b"a", b"b")
        await leader.lead(2)
        for future in futures:
            with pytest.raises(DLedgerError) as caught:
                await future
            assert caught.value.code is DLedgerCode.TERM_CHANGED and not caught.value.is_definite

    lead(scenario)


@pytest.mark.mechanism("QuorumAckChecker watermark log...")
def test_watermarks_are_logged_when_they_have_moved(lead: Any) -> None:
    async def scenario(leader: Leader) -> None:
        await leader.lead(1)
        leader.append(b"a")
        await leader.acked(n2=0)
        await asyncio.sleep(20)
        lines = [line for line in leader.group.lines("n1").splitlines() if " watermarks self=n1" in line]
        assert len(lines) == 2
        assert "term=1 begin=0 end=0 committed=0 marks={'n1': 0, 'n2': 0, 'n3': -1}" in lines[1]

    lead(scenario)


def test_codes_that_leave_an_append_in_doubt() -> None:
    doubtful = {code.name for code in DLedgerCode if not DLedgerError(code).is_definite}
    assert doubtful == {
        "UNKNOWN", "TIMEOUT", "NETWORK_ERROR", "INTERNAL_ERROR", "TERM_CHANGED", "WAIT_QUORUM_ACK_TIMEOUT"
    }  # fmt: skip


@pytest.mark.mechanism("needCheck...")
def test_the_periodic_check_completes_an_append_whose_wake_up_was_missed(lead: Any) -> None:
    async def scenario(leader: Leader) -> None:
        await leader.lead(1)
        (future,) = leader.append(b"a")
        await leader.acked()
        leader.checker._watermarks_by_term[1]["n2"] = 0  # an acknowledgement without a wake-up
        await asyncio.sleep(0.1)
        assert not future.done()
        interval_s = leader.member.config.timing.watermark_log_interval_ms / 1000
        await asyncio.sleep(interval_s)
        assert future.done() and leader.checker.watermarks() == {"n1": 0, "n2": 0, "n3": -1}

    lead(scenario)
