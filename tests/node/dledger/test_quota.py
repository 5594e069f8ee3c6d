"""The limit on bytes per second to a follower that is far behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.dledger.quota import Quota


async def leader_with_two_megabytes(group: Any) -> str:
    """The leader of two members with 2 MB of log; the third member has nothing."""
    await group.start("n1", "n2")
    leader: str = await group.leader()
    for _ in range(40):
        await group.append_all(leader, *[bytes(1000)] * 50)
    return leader


@pytest.mark.mechanism("Quota: ...")
def test_the_quota_throttles_a_follower_far_behind_but_not_live_appends(simulate: Any) -> None:
    async def scenario(group: Any) -> float:
        leader = await leader_with_two_megabytes(group)
        await group.start("n3")
        started_s: float = group.loop.time()
        behind = group["n3"].store
        await group.until(lambda: behind.end_pos > 1_000_000)
        taken_s = group.loop.time() - started_s
        appended_s = group.loop.time()
        await group.append_all(leader, b"live")
        assert group.loop.time() - appended_s < 0.1
        await group.converged()
        return float(taken_s)

    big = {"data_segment_size_bytes": 1 << 20, "index_segment_size_bytes": 32000}
    throttled_s = simulate(
        scenario, **big, peer_push_throttle_point_bytes=500_000, peer_push_quota_bytes=200_000, max_push_bytes=50_000
    )
    free_s = simulate(scenario, **big, peer_push_throttle_point_bytes=5_000_000, max_push_bytes=50_000)
    assert free_s < 1.0 and 2.0 < throttled_s < 6.0


@pytest.mark.mechanism("Quota: ...")
def test_small_entries_count_for_more_than_their_bytes(simulate: Any) -> None:
    async def scenario(group: Any, body_bytes: int) -> float:
        await group.start("n1", "n2")
        leader = await group.leader()
        while group[leader].store.end_pos < 1_000_000:
            await group.append_all(leader, *[bytes(body_bytes)] * 50)
        await group.start("n3")
        started_s, behind = float(group.loop.time()), group["n3"].store
        await group.until(lambda: behind.end_pos > 600_000)
        return float(group.loop.time()) - started_s

    options = {
        "data_segment_size_bytes": 1 << 20, "index_segment_size_bytes": 320_000, "max_push_bytes": 20_000,
        "peer_push_throttle_point_bytes": 100_000, "peer_push_quota_bytes": 200_000, "max_pending_pushes": 100,
    }  # fmt: skip
    large_s, small_s = (simulate(lambda group, size=size: scenario(group, size), **options) for size in (4000, 80))
    assert small_s > 3 * large_s


@pytest.mark.mechanism("Quota: ...")
def test_quota_counts_by_the_second() -> None:
    now_ns = 5_300_000_000
    quota = Quota(1000, lambda: now_ns)
    assert quota.wait_ns() == 0
    quota.use(699)
    assert quota.wait_ns() == 0
    quota.use(1)
    assert quota.wait_ns() == 700_000_000
    now_ns = 6_000_000_000
    quota.use(999)
    assert quota.wait_ns() == 0
    quota.use(1)
    assert quota.wait_ns() == 1_000_000_000
    now_ns = 8_900_000_000
    quota.use(100)
    assert quota.wait_ns() == 100_000_000


@pytest.mark.mechanism("Quota: ...")
def test_the_quota_doubles_while_a_peer_does_not_catch_up() -> None:
    now_ns = 0
    quota = Quota(1000, lambda: now_ns)
    got = []
    for second, behind in enumerate((5000, 4000, 4000, 4100, 3000, 3000, None, 2000, 2000)):
        now_ns = second * 1_000_000_000
        used = 0
        while quota.wait_ns() == 0:
            quota.use(100)
            used += 100
        if behind is not None:
            assert quota.wait_ns(behind) == quota.wait_ns(10 * behind) == 1_000_000_000
        got.append(used)
    assert got == [1000, 1000, 1000, 2000, 4000, 4000, 8000, 8000, 1000]


@pytest.mark.mechanism("Quota: ...")
def test_a_follower_far_behind_catches_up_although_appends_exceed_its_quota(simulate: Any) -> None:
    async def scenario(group: Any) -> None:
        leader = await leader_with_two_megabytes(group)
        store, ends = group[leader].store, asyncio.Event()

        async def send() -> None:
            while not ends.is_set():
                await group.append_all(leader, *[bytes(1000)] * 10)
                await asyncio.sleep(0.02)

        sending = asyncio.create_task(send())
        await group.start("n3")
        began_s = group.loop.time()
        async with asyncio.timeout(60):
            await group.until(lambda: store.end_pos - group["n3"].store.end_pos < 500_000)
        grown_bytes = store.end_pos - 2_000_000
        ends.set()
        await sending
        assert grown_bytes > 200_000 * (group.loop.time() - began_s), "the senders must append more than the quota"
        await group.converged()

    big = {"data_segment_size_bytes": 1 << 20, "index_segment_size_bytes": 32000}
    simulate(
        scenario, **big, peer_push_throttle_point_bytes=500_000, peer_push_quota_bytes=200_000, max_push_bytes=50_000
    )


@pytest.mark.mechanism("Quota: ...")
@given(st.integers(0, 999_999_999), st.integers(1, 10))
def test_sending_five_quotas_takes_at_least_four_seconds(since_ns: int, portion: int) -> None:
    """Wherever in a second the sending begins."""
    now_ns = 7 * 1_000_000_000 + since_ns
    quota, began_ns, sent = Quota(100, lambda: now_ns), now_ns, 0
    while sent < 500:
        wait_ns = quota.wait_ns()
        assert 0 <= wait_ns <= 1_000_000_000
        if wait_ns:
            now_ns += wait_ns
            continue
        quota.use(portion)
        sent += portion
    # A portion begun while some quota is left is sent whole: up to a portion more per second.
    assert now_ns - began_ns >= 3_990_000_000 - 50_000_000 * (portion - 1)
