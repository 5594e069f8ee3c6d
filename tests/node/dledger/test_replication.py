"""Dispatchers and handlers together, over the simulated network, with pushes lost, delayed and refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from node.dledger import DLedgerCode, DLedgerError, DLedgerServer
from node.dledger.entry import parse_entries
from node.dledger.files import LedgerFiles
from node.dledger.messages import PushEntryRequest, PushEntryResponse, VoteResponse
from node.dledger.peers import PeerClient, PeerError, RemotingPeerClient
from node.dledger.rpc import PushType

PushFilter = Callable[[str, PushEntryRequest], Any]


class FilteredPeers:
    """A peer client that calls a filter of the test with every push: None lets the push pass, an answer or exception
    becomes its result."""

    push_filter: PushFilter | None = None

    def __init__(self, inner: PeerClient) -> None:
        self._inner = inner

    async def vote(self, peer: str, request: Any) -> VoteResponse:
        return await self._inner.vote(peer, request)

    def heartbeat(self, peer: str, request: Any, then: Any) -> None:
        self._inner.heartbeat(peer, request, then)

    def push(self, peer: str, request: PushEntryRequest, then: Any) -> None:
        outcome = FilteredPeers.push_filter(peer, request) if FilteredPeers.push_filter is not None else None
        if outcome is not None:
            asyncio.get_running_loop().call_soon(then, outcome)
        else:
            self._inner.push(peer, request, then)

    async def close(self) -> None:
        await self._inner.close()


class FilteredServer(DLedgerServer):
    def make_peers(self) -> PeerClient:
        return FilteredPeers(RemotingPeerClient(self.config, self.member_state.members))


@pytest.fixture
def replicate(simulate: Any) -> Any:
    """Run `scenario(group, watch)`; `watch(filter)` installs a push filter for all members."""

    def run(scenario: Any, **options: Any) -> Any:
        def watch(push_filter: PushFilter | None) -> None:
            FilteredPeers.push_filter = push_filter

        async def main(group: Any) -> Any:
            try:
                return await scenario(group, watch)
            finally:
                FilteredPeers.push_filter = None

        return simulate(main, server=FilteredServer, **options)

    return run


def answer_to(request: PushEntryRequest, code: DLedgerCode, **fields: Any) -> PushEntryResponse:
    return PushEntryResponse(
        group="g", remote_id=request.local_id, local_id=request.remote_id, term=request.term, code=code, **fields
    )


@pytest.mark.mechanism("checkAndFreshState")
def test_the_first_push_of_a_term_to_each_follower_is_compare(replicate: Any) -> None:
    async def scenario(group: Any, watch: Any) -> None:
        seen: list[tuple[str, int, PushType]] = []
        watch(lambda peer, request: seen.append((peer, request.term, request.type)))
        await group.start()
        for _ in range(2):
            leader = await group.leader()
            await group.append_all(leader, b"entry")
            await group.converged(*group.members)
            group.kill(leader)
        first: dict[tuple[str, int], PushType] = {}
        for peer, term, push_type in seen:
            first.setdefault((peer, term), push_type)
        assert len(first) >= 4 and set(first.values()) == {PushType.COMPARE}

    replicate(scenario)


def test_a_leader_pushes_entries_before_it_writes_them_to_its_own_disk(replicate: Any, monkeypatch: Any) -> None:
    async def scenario(group: Any, watch: Any) -> None:
        steps: list[str] = []
        begin_write = LedgerFiles.begin_write

        def noted_write(*words: Any, **named: Any) -> None:
            steps.append("write")
            begin_write(*words, **named)

        def noted_push(peer: str, request: PushEntryRequest) -> None:
            if request.type is PushType.APPEND:
                steps.append("push")

        await group.start()
        leader = await group.leader()
        await group.converged()
        monkeypatch.setattr(LedgerFiles, "begin_write", noted_write)
        watch(noted_push)
        done = group.loop.create_future()
        group.on(leader, lambda: group[leader].append_batch((5,), lambda positions: (b"entry",), done.set_result))
        await done
        assert steps[:3] == ["push", "push", "write"]

    replicate(scenario)


@pytest.mark.mechanism("Resend: ...")
def test_every_entry_commits_although_every_third_push_is_lost(replicate: Any) -> None:
    async def scenario(group: Any, watch: Any) -> None:
        count = 0

        def drop(peer: str, request: PushEntryRequest) -> PeerError | None:
            nonlocal count
            count += request.type is PushType.APPEND
            return PeerError("dropped") if request.type is PushType.APPEND and count % 3 == 0 else None

        await group.start()
        leader = await group.leader()
        watch(drop)
        for number in range(30):
            await group.append_all(leader, b"%d" % number, b"and %d" % number)
        await group.converged()
        assert len(group.log(leader)) == 61
        assert "repeating" in group.lines(leader)

    replicate(scenario)


@pytest.mark.mechanism("pendingMap leak check...")
@pytest.mark.mechanism("pendingMap(index...")
@pytest.mark.mechanism("DLedgerEntryPusher: ...")
def test_unacknowledged_entries_are_bounded_and_the_rest_follows(replicate: Any) -> None:
    async def scenario(group: Any, watch: Any) -> None:
        pushed: list[int] = []

        def swallow(peer: str, request: PushEntryRequest) -> PeerError | None:
            if peer != slow or request.type is not PushType.APPEND:
                return None
            pushed.append(len(request.entries))
            return PeerError("swallowed")

        await group.start()
        leader = await group.leader()
        slow = next(name for name in group.names if name != leader)
        watch(swallow)
        for _ in range(20):
            await group.append_all(leader, *[b"x" * 10] * 200)
        dispatcher = group[leader].pusher.dispatchers[slow]
        other = next(each for peer, each in group[leader].pusher.dispatchers.items() if peer != slow)
        assert 200 < dispatcher.pending_count <= 1000
        assert other.pending_count == 0  # the slow follower holds up no other
        watch(None)
        await group.converged()
        assert dispatcher.pending_count == 0

    replicate(scenario, data_segment_size_bytes=1 << 20, index_segment_size_bytes=32000)


@pytest.mark.mechanism("pendingMap(index...")
def test_a_push_begins_below_the_bound_and_ends_where_a_batch_ends(replicate: Any) -> None:
    async def scenario(group: Any, watch: Any) -> list[int]:
        pushed: list[int] = []

        def swallow(peer: str, request: PushEntryRequest) -> PeerError | None:
            if peer != slow or request.type is not PushType.APPEND or not request.entries:
                return None
            pushed.append(len(parse_entries(request.entries)))
            return PeerError("swallowed")

        await group.start()
        leader = await group.leader()
        await group.converged()
        slow = next(name for name in group.names if name != leader)
        watch(swallow)
        for _ in range(4):
            done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            group[leader].append_batch([10] * 60, lambda positions: [b"x" * 10] * len(positions), done.set_result)
            assert await done is None
        watch(None)
        assert group[leader].pusher.dispatchers[slow].pending_count == 120
        await group.converged()
        return pushed

    pushed = replicate(scenario, max_pending_pushes=100)
    assert pushed[:2] == [60, 60] and set(pushed) == {60}, "the third batch waits, and none is cut"


@pytest.mark.mechanism("Reply SUCCESS...")
def test_an_inconsistent_state_answer_leads_to_compare(replicate: Any) -> None:
    async def scenario(group: Any, watch: Any) -> None:
        seen: list[PushType] = []

        def once(peer: str, request: PushEntryRequest) -> PushEntryResponse | None:
            if peer != victim:
                return None
            seen.append(request.type)
            is_first = request.type is PushType.APPEND and seen.count(PushType.APPEND) == 1
            return answer_to(request, DLedgerCode.INCONSISTENT_STATE) if is_first else None

        await group.start()
        leader = await group.leader()
        await group.converged()
        victim = next(name for name in group.names if name != leader)
        await asyncio.sleep(0.3)
        watch(once)
        await group.append_all(leader, b"entry")
        await group.converged()
        order = [push_type for push_type in seen if push_type is not PushType.COMMIT]
        # refused; compared at the leader's end, which the follower lacks, then at the follower's; sent again
        assert order == [PushType.APPEND, PushType.COMPARE, PushType.COMPARE, PushType.APPEND]

    replicate(scenario)


@pytest.mark.mechanism("doWork: ...")
@pytest.mark.mechanism("Reply SUCCESS...")
@pytest.mark.parametrize("code", [DLedgerCode.DISK_ERROR, DLedgerCode.REPEATED_PUSH, DLedgerCode.FALL_BEHIND_TOO_MUCH])
def test_other_refusals_are_retried_after_the_push_timeout(replicate: Any, code: DLedgerCode) -> None:
    async def scenario(group: Any, watch: Any) -> None:
        seen: list[PushType] = []

        def refuse(peer: str, request: PushEntryRequest) -> PushEntryResponse | None:
            if peer != victim or request.type is not PushType.APPEND:
                return None
            seen.append(request.type)
            return answer_to(request, code) if len(seen) <= 2 else None

        await group.start()
        leader = await group.leader()
        await group.converged()
        victim = next(name for name in group.names if name != leader)
        watch(refuse)
        started_s = group.loop.time()
        await group.append_all(leader, b"entry")
        assert group.loop.time() - started_s < 0.2  # the other follower suffices
        await group.converged()
        assert 0.75 < group.loop.time() - started_s < 2.0  # two repetitions after push_timeout_ms

    replicate(scenario)


def test_retries_back_off_if_a_follower_refuses_what_continues_its_log(replicate: Any) -> None:
    async def scenario(group: Any, watch: Any) -> None:
        seen: list[float] = []

        def refuse(peer: str, request: PushEntryRequest) -> PushEntryResponse | None:
            if peer != victim or request.type is not PushType.APPEND:
                return None
            seen.append(group.loop.time())
            return answer_to(request, DLedgerCode.INCONSISTENT_STATE)

        await group.start()
        leader = await group.leader()
        await group.converged()
        victim = next(name for name in group.names if name != leader)
        watch(refuse)
        await group.append_all(leader, b"entry")
        await asyncio.sleep(5)
        assert 10 < len(seen) < 120  # error_backoff_ms is 50
        watch(None)
        await group.converged()

    replicate(scenario)


@pytest.mark.mechanism("COMMIT push")
def test_committed_index_reaches_followers_when_traffic_stops(simulate: Any, with_timing: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        await group.append_all(leader, b"one", b"two")
        stopped_s = group.loop.time()
        await group.until(lambda: all(member.store.committed_index == 2 for member in group.members.values()))
        assert group.loop.time() - stopped_s < 1.2

    simulate(scenario, timing=with_timing(commit_interval_ms=1000))


@pytest.mark.mechanism("COMMIT push")
@pytest.mark.mechanism("COMPARE start...")
def test_an_idle_group_sends_only_periodic_commits(replicate: Any) -> None:
    async def scenario(group: Any, watch: Any) -> None:
        seen: list[PushType] = []
        await group.start()
        await group.converged()
        await asyncio.sleep(5)
        watch(lambda peer, request: seen.append(request.type))
        await asyncio.sleep(60)
        assert set(seen) == {PushType.COMMIT}
        assert len(seen) == pytest.approx(2 * 60 / 0.5, rel=0.1)  # five commit intervals

    replicate(scenario)


def test_a_wiped_follower_is_refilled_although_nothing_is_appended(simulate: Any) -> None:
    """dledger#61. (Its vote is kept here: losing that as well is more than a quorum tolerates.)"""

    async def scenario(group: Any) -> None:
        await group.start()
        leader = await group.leader()
        await group.append_all(leader, *[b"%d" % number for number in range(50)])
        await group.converged()
        victim = next(name for name in group.names if name != leader)
        group.kill(victim)
        disk = group.hosts[victim].disk
        for path in disk.paths():
            if not path.endswith("member_state"):
                disk.unlink(path)
        await group.start(victim)
        await group.converged()
        assert group.log(victim) == group.log(leader)

    simulate(scenario)


def test_a_late_follower_catches_up_across_files(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start("n1", "n2")
        leader = await group.leader()
        for number in range(40):
            await group.append_all(leader, *[b"%d" % number * 20] * 10)
        await group.start("n3")
        await group.converged()
        assert len(group.log("n3")) == 401

    simulate(scenario, max_cached_bytes=3000)


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_follower_that_is_far_behind_gets_several_pushes_at_once(simulate: Any, is_busy: bool) -> None:
    """Also during live appends, with which it catches up."""

    async def scenario(group: Any) -> int:
        await group.start("n1", "n2")
        leader = await group.leader()
        for _ in range(40):
            await group.append_all(leader, *[bytes(1000)] * 50)
        dispatcher, store = group[leader].pusher.dispatchers["n3"], group[leader].store
        ends, most = asyncio.Event(), 0

        async def send() -> None:
            while not ends.is_set():
                await group.append_all(leader, *[bytes(100)] * 3)

        busy = [asyncio.create_task(send()) for _ in range(4 if is_busy else 0)]
        await asyncio.sleep(0.1)
        await group.start("n3")
        follower = group["n3"].store
        while store.committed_index - follower.ledger_end_index > 200:
            if follower.ledger_end_index > 100:
                most = max(most, len(dispatcher._pending))
            await asyncio.sleep(0.0005)
        ends.set()
        await asyncio.gather(*busy)
        await group.converged()
        return most

    options = {"data_segment_size_bytes": 1 << 20, "index_segment_size_bytes": 32000, "max_push_bytes": 10_000}
    most = simulate(scenario, **options, max_pending_pushes=100)
    assert most > 1


@pytest.mark.mechanism("doWork: ...")
def test_pushes_of_a_deposed_leader_stop(replicate: Any) -> None:
    async def scenario(group: Any, watch: Any) -> None:
        await group.start()
        old = await group.leader()
        others = [name for name in group.names if name != old]
        await group.cut(old, " ".join(others))
        doubtful = group.append(old, b"never committed")
        new = await group.leader(*others)
        await group.append_all(new, b"committed")
        with pytest.raises(DLedgerError) as caught:
            await doubtful
        assert caught.value.code is DLedgerCode.TERM_CHANGED
        await group.until(lambda: group.leaders() == [new])
        seen: list[str] = []
        watch(lambda peer, request: seen.append(request.local_id))
        await group.heal()
        await group.converged()
        await asyncio.sleep(3)
        assert set(seen) == {new}
        assert b"never committed" not in [body for _, body in group.log(old)]

    replicate(scenario)


DIVERGENT: dict[str, tuple[list[int], ...]] = {
    "equal": ([1, 1, 2], [1, 1, 2], [1, 1, 2]),
    "one is empty": ([1, 1, 2], [], [1, 1, 2]),
    "one is shorter": ([1, 1, 2, 2], [1], [1, 1, 2, 2]),
    "one is longer in an old term": ([1, 1, 3], [1, 1, 2, 2, 2], [1, 1, 3]),
    "all differ": ([1, 2, 2, 2], [1, 3, 3], [1, 4]),
    "nothing in common": ([1, 1, 1], [2, 2], [3]),
    "figure 7 of the Raft paper": (
        [1, 1, 1, 4, 4, 5, 5, 6, 6, 6],
        [1, 1, 1, 4, 4, 5, 5, 6, 6],
        [1, 1, 1, 4],
        [1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 6],
        [1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 7, 7],
        [1, 1, 1, 4, 4, 4, 4],
        [1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3],
    ),
    "far apart": ([1] * 40 + [9] * 60, [1] * 40 + [2] * 90, [1] * 70),
}


@pytest.mark.mechanism("TRUNCATE")
@pytest.mark.mechanism("COMPARE decisions...")
@pytest.mark.parametrize("case", DIVERGENT)
def test_divergent_logs_converge_byte_for_byte(simulate: Any, case: str) -> None:
    logs = DIVERGENT[case]

    async def scenario(group: Any) -> None:
        for name, terms in zip(group.names, logs, strict=True):
            await group.put_log(name, terms)
        await group.start()
        leader = await group.leader()
        await group.append_all(leader, b"after")
        await group.converged()
        kept = logs[group.names.index(leader)]
        assert [term for term, _ in group.log(leader)][: len(kept)] == kept
        for index, (term, body) in enumerate(group.log(leader)[: len(kept)]):
            assert body == b"%d in %d" % (index, term)

    for seed in range(3):
        simulate(scenario, size=len(logs), seed=seed)


@pytest.mark.mechanism("APPEND changeState")
def test_after_comparing_appends_continue_after_the_last_common_entry(replicate: Any) -> None:
    async def scenario(group: Any, watch: Any) -> None:
        await group.start()
        leader = await group.leader()
        await group.append_all(leader, *[b"x"] * 9)
        await group.converged()
        behind = next(name for name in group.names if name != leader)
        group.kill(behind)
        await group.append_all(leader, *[b"y"] * 5)
        pushed: list[tuple[PushType, int]] = []

        def note(peer: str, request: PushEntryRequest) -> None:
            if peer == behind and request.type is not PushType.COMMIT:
                first = parse_entries(request.entries)[0].index
                pushed.append((request.type, first))

        watch(note)
        agreed = max(index for index, _ in enumerate(group.log(leader))) - 5
        await group.start(behind)
        await group.converged()
        compared = [index for push_type, index in pushed if push_type is PushType.COMPARE]
        first_append = next(index for push_type, index in pushed if push_type is PushType.APPEND)
        assert compared[-1] == agreed and first_append == agreed + 1
        marks = group[leader].pusher.checker.watermarks()
        assert marks[behind] == marks[leader] == agreed + 5

    replicate(scenario)
