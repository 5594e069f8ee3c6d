"""Which brokers a client asks, and when, while there is no leader."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from harness.clusters.sim.simulation import run_simulated
from harness.systems.broker_connection import HOP_PAUSE_S, ROUTE_PAUSE_S, BrokerConnection
from node.client import BrokerClient, NotLeader
from node.client.results import BrokerGroup, Route

HOSTS = ("n1", "n2", "n3", "n4", "n5")
TIMEOUT_S = 1.0
HOP_S = 0.001
"""Duration of a request to a broker."""

Namer = Callable[[str, float], str | None]


class _Brokers:
    """Stands in for a client and all brokers. `named_by(host, time_s)` is the leader that a host names, itself if it
    leads; `master` is that of the route."""

    def __init__(self, named_by: Namer, master: str | None) -> None:
        self._named_by = named_by
        self._master = master
        self.asked: list[tuple[float, str]] = []
        self.routes_s: list[float] = []
        self.began_s = asyncio.get_running_loop().time()

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() - self.began_s

    async def max_offset(self, topic: str, queue_id: int, *, address: str, timeout_ms: int) -> int:
        self.asked.append((self._now_s(), address))
        await asyncio.sleep(HOP_S)
        leader = self._named_by(address, self._now_s())
        if leader == address:
            return 7
        raise NotLeader("NOT_LEADER", address=address, code=14, leader_id=leader, leader_address=None)

    async def route(self, topic: str, *, timeout_ms: int) -> Route:
        self.routes_s.append(self._now_s())
        addresses: Mapping[int, str] = {} if self._master is None else {0: self._master}
        group = BrokerGroup(name="b", cluster="c", addresses=dict(addresses), read_queues=1, write_queues=1, perm=6)
        return Route(topic=topic, groups=(group,))


def _ask(named_by: Namer, *, master: str | None = None) -> tuple[int | None, _Brokers, float]:
    """One request of a client whose home is n1: the answer (None if all refused), the requests, and the duration."""

    async def main() -> tuple[int | None, _Brokers, float]:
        brokers = _Brokers(named_by, master)
        connection = BrokerConnection(
            client=cast(BrokerClient, cast(Any, brokers)), topic="t", addresses={host: host for host in HOSTS},
            home="n1", timeout_s=TIMEOUT_S,
        )  # fmt: skip
        began_s = asyncio.get_running_loop().time()
        try:
            answer = await connection.tail(3)
        except NotLeader:
            answer = None
        return answer, brokers, asyncio.get_running_loop().time() - began_s

    return run_simulated(main(), seed=1)


def test_after_a_round_without_a_leader_one_broker_is_asked_per_pause() -> None:
    answer, brokers, took_s = _ask(lambda host, time_s: None)
    assert answer is None
    assert TIMEOUT_S * 0.95 - HOP_PAUSE_S - HOP_S <= took_s <= TIMEOUT_S * 0.95
    hosts = [host for _, host in brokers.asked]
    assert hosts == [HOSTS[place % 5] for place in range(len(hosts))]
    times = [time_s for time_s, _ in brokers.asked]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps[:4] == pytest.approx([HOP_S] * 4)
    assert gaps[4:] == pytest.approx([HOP_S + HOP_PAUSE_S] * len(gaps[4:]))
    assert len(gaps) > 15


def test_the_name_server_is_asked_at_most_once_per_pause() -> None:
    _, brokers, _ = _ask(lambda host, time_s: None)
    gaps = [later - earlier for earlier, later in itertools.pairwise(brokers.routes_s)]
    assert gaps
    assert min(gaps) >= ROUTE_PAUSE_S - 1e-9


@pytest.mark.parametrize("leader", HOSTS)
def test_a_new_leader_is_found_within_a_pause_of_its_election(leader: str) -> None:
    answer, brokers, took_s = _ask(lambda host, time_s: leader if time_s > 0.4 else None)
    assert answer == 7
    assert brokers.asked[-1][1] == leader
    assert 0.4 < took_s <= 0.4 + HOP_PAUSE_S + 3 * HOP_S


def test_brokers_that_name_each_other_are_asked_at_most_once_per_pause() -> None:
    _, brokers, _ = _ask(lambda host, time_s: {"n1": "n2", "n2": "n1"}.get(host))
    for began_s, _ in brokers.asked:
        burst = [host for time_s, host in brokers.asked if began_s <= time_s < began_s + HOP_PAUSE_S]
        assert len(burst) == len(set(burst))


def test_the_route_names_a_master_that_no_broker_names() -> None:
    answer, brokers, _ = _ask(lambda host, time_s: "n4" if host == "n4" else None, master="n4")
    assert answer == 7
    assert [host for _, host in brokers.asked] == ["n1", "n4"]
