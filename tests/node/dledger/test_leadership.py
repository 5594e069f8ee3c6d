"""Rounds of heartbeats: their recipients, what they prove, and what happens if recipients do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from harness.clusters.sim.clock import SimClock
from harness.clusters.sim.loop import SimLoop
from harness.clusters.sim.simulation import run_simulated
from node.dledger import FAST_TIMING, DLedgerCode, DLedgerConfig, DLedgerError
from node.dledger.leadership import Leadership
from node.dledger.membership import Membership
from node.dledger.messages import HeartBeatResponse
from node.dledger.peers import PeerError

HEDGE_S = FAST_TIMING.read_hedge_ms / 1000
ROUND_TRIP_S = 0.001


class Peers:
    """Answers heartbeats after a round trip; those to `silent` members fail."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.silent: set[str] = set()

    def heartbeat(self, peer: str, request: Any, then: Callable[[Any], object]) -> None:
        self.asked.append(peer)
        answer = HeartBeatResponse(
            group="g", remote_id="n1", local_id=peer, term=request.term, code=DLedgerCode.SUCCESS
        )
        loop = asyncio.get_running_loop()
        if peer in self.silent:
            loop.call_later(0.4, then, PeerError("silent"))
        else:
            loop.call_later(ROUND_TRIP_S, then, answer)

    def take_asked(self) -> list[str]:
        """The members asked since the last call."""
        asked, self.asked = self.asked, []
        return asked


Scenario = Callable[[Leadership, Peers], Coroutine[Any, Any, None]]


@pytest.fixture
def leading() -> Callable[..., None]:
    """Run `scenario(leadership, peers)` with n1 leading a group of some size."""

    def run(scenario: Scenario, *, size: int = 5) -> None:
        async def main() -> None:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, SimLoop)
            members = {f"n{number}": f"10.0.0.{number}:1" for number in range(1, size + 1)}
            config = DLedgerConfig(
                group="g", self_id="n1", peers=members, listen="10.0.0.1:1", data_dir="/data", timing=FAST_TIMING
            )
            peers: Any = Peers()
            leadership = Leadership(
                config,
                SimClock(loop),
                peers,
                Membership("n1", members),
                7,
                on_higher_term=lambda term: None,
                on_rival=lambda peer: None,
            )
            await scenario(leadership, peers)

        run_simulated(main(), seed=3)

    return run


def test_beat_sends_a_heartbeat_to_every_other_member(leading: Callable[..., None]) -> None:
    async def scenario(leadership: Leadership, peers: Peers) -> None:
        leadership.beat()
        assert peers.take_asked() == ["n2", "n3", "n4", "n5"]

    leading(scenario)


def test_a_read_asks_only_a_quorum(leading: Callable[..., None]) -> None:
    async def scenario(leadership: Leadership, peers: Peers) -> None:
        for _ in range(3):
            await leadership.confirm()
            await asyncio.sleep(2 * HEDGE_S)
            assert len(peers.take_asked()) == 2
        assert leadership.holds_lease()

    leading(scenario)


def test_a_read_in_a_group_of_two_asks_the_other_member(leading: Callable[..., None]) -> None:
    async def scenario(leadership: Leadership, peers: Peers) -> None:
        await leadership.confirm()
        assert len(peers.take_asked()) == 1

    leading(scenario, size=2)


def test_waiting_reads_share_the_next_round(leading: Callable[..., None]) -> None:
    async def scenario(leadership: Leadership, peers: Peers) -> None:
        first = leadership.confirm()
        later = [leadership.confirm() for _ in range(20)]
        await first
        assert not any(future.done() for future in later)  # they came after the start of the first round
        await asyncio.gather(*later)
        assert len(peers.take_asked()) == 4

    leading(scenario)


def test_a_read_asks_the_remaining_members_if_the_first_do_not_answer(leading: Callable[..., None]) -> None:
    async def scenario(leadership: Leadership, peers: Peers) -> None:
        peers.silent = {"n2", "n3"}  # the first in order, as long as no member has answered
        began_s = asyncio.get_running_loop().time()
        await leadership.confirm()
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(HEDGE_S + ROUND_TRIP_S)
        assert peers.take_asked() == ["n2", "n3", "n4", "n5"]
        await leadership.confirm()  # members that answered are now preferred
        assert peers.take_asked() == ["n4", "n5"]
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(HEDGE_S + 2 * ROUND_TRIP_S)

    leading(scenario)


def test_a_read_is_confirmed_by_a_later_heartbeat_once_a_quorum_answers(leading: Callable[..., None]) -> None:
    async def scenario(leadership: Leadership, peers: Peers) -> None:
        peers.silent = {"n2", "n3", "n4"}
        read = leadership.confirm()
        await asyncio.sleep(1.0)
        assert not read.done()
        peers.silent.clear()
        leadership.beat()
        await read

    leading(scenario)


def test_the_end_of_a_leadership_fails_its_reads_and_stops_its_heartbeats(leading: Callable[..., None]) -> None:
    async def scenario(leadership: Leadership, peers: Peers) -> None:
        peers.silent = {"n2", "n3"}
        read = leadership.confirm()
        leadership.end()
        with pytest.raises(DLedgerError) as raised:
            await read
        assert raised.value.code is DLedgerCode.NOT_LEADER
        peers.take_asked()
        await asyncio.sleep(1.0)
        assert peers.take_asked() == []

    leading(scenario)


@pytest.mark.parametrize("answers", [True, False])
def test_a_member_added_while_another_is_down_has_one_lease_to_answer(
    leading: Callable[..., None], answers: bool
) -> None:
    """The leader stays for that long, but lease reads wait for a quorum of the new group."""
    lease_s, beat_s = FAST_TIMING.lease_ms / 1000, FAST_TIMING.heartbeat_interval_ms / 1000

    async def beats(leadership: Leadership, until_s: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < until_s:
            leadership.beat()
            await asyncio.sleep(beat_s)

    async def scenario(leadership: Leadership, peers: Peers) -> None:
        loop = asyncio.get_running_loop()
        peers.silent = {"n3"} if answers else {"n3", "n4"}
        await beats(leadership, loop.time() + 2 * lease_s)
        assert leadership.holds_quorum() and leadership.holds_lease()
        group = {f"n{number}": f"10.0.0.{number}:1" for number in range(1, 5)}
        leadership._members.adopt(5, group)
        leadership.members_changed()
        added_s = loop.time()
        assert leadership.holds_quorum() and not leadership.holds_lease()
        await beats(leadership, added_s + lease_s / 2)
        assert leadership.holds_quorum() and leadership.holds_lease() == answers
        await beats(leadership, added_s + 2 * lease_s)
        assert leadership.holds_quorum() == leadership.holds_lease() == answers

    leading(scenario, size=3)
