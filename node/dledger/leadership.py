"""How a leader keeps its leadership and knows that it still has it: rounds of heartbeats.

Every round has a number. A peer that has answered round n was in the leader's term when it did, so once a quorum
has answered a round that began after some moment, nobody else had been elected by that moment. That serves three
ends: the lease (which counts from the start of the newest round that a quorum has answered), stepping down when the
quorum is lost, and reads (`confirm`): all waiting reads share the next round.

The rounds that keep the peers following go to all of them. Rounds that only reads wait for go to just enough peers for
a quorum, the ones that have answered best lately, and to the others only if these keep the reads waiting.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from node.dledger.config import DLedgerConfig
from node.dledger.membership import Membership
from node.dledger.messages import HeartBeatRequest, HeartBeatResponse
from node.dledger.peers import PeerClient, PeerError
from node.dledger.rpc import DLedgerCode, DLedgerError
from node.runtime import Clock

__all__ = ["ConfirmationCallback", "Leadership", "settle"]

ConfirmationCallback = Callable[[DLedgerError | None], object]
"""Called once: with None when leadership is confirmed, or with the reason why not. Must not raise."""

MAX_WAITING_CONFIRMATIONS = 20_000
"""Reads that may wait for a round; each costs a few hundred bytes."""

MAX_UNANSWERED_BEATS = 8
"""Limit on unanswered heartbeats to one peer. A peer that does not answer is not sent a heartbeat for every read."""


class Leadership:
    """One member's leadership of one term, from its election to its end.

    `on_higher_term(term)` and `on_rival(peer)` are called when an answer shows that this leadership is over.
    """

    def __init__(
        self,
        config: DLedgerConfig,
        clock: Clock,
        peers: PeerClient,
        members: Membership,
        term: int,
        *,
        on_higher_term: Callable[[int], None],
        on_rival: Callable[[str], None],
    ) -> None:
        self._config = config
        self._clock = clock
        self._peers = peers
        self.term = term
        self._on_higher_term = on_higher_term
        self._on_rival = on_rival
        self._members = members
        self._others: tuple[str, ...] = ()
        now_ns = clock.monotonic_ns()
        self._round = 0
        self._needed = 0
        self._unasked: tuple[str, ...] = ()
        self._round_began_s = 0.0
        self._hedge_timer: asyncio.TimerHandle | None = None
        self._answered: dict[str, int] = {}
        self._answered_sent_ns: dict[str, int] = {}
        self._added_ns: dict[str, int] = {}
        self._waiting: deque[tuple[int, ConfirmationCallback, float]] = deque()
        """Reads, each with the round that it waits for and its deadline; both only grow."""
        self._expiry: asyncio.TimerHandle | None = None
        self._requests: dict[str, HeartBeatRequest] = {}
        self._unanswered: dict[str, int] = {}
        self._ended = False
        self.members_changed()
        self.last_beat_ns = now_ns - config.timing.heartbeat_interval_ms * 1_000_000

    def members_changed(self) -> None:
        """The group has changed: count quorums among its current members."""
        members, config = self._members, self._config
        self._others = members.others
        self._needed = members.others_needed
        now_ns = self._clock.monotonic_ns()
        self._answered = {peer: self._answered.get(peer, 0) for peer in self._others}
        # Treat a new member as last heard when the longest silent one was, so that it makes no quorum newer.
        oldest_ns = min(self._answered_sent_ns.values(), default=now_ns)
        self._added_ns = {peer: self._added_ns.get(peer, now_ns) for peer in self._others}
        self._answered_sent_ns = {peer: self._answered_sent_ns.get(peer, oldest_ns) for peer in self._others}
        for peer in self._others:
            self._unanswered.setdefault(peer, 0)
            self._requests[peer] = HeartBeatRequest(
                group=config.group, remote_id=peer, local_id=config.self_id, term=self.term, leader_id=config.self_id
            )
        self._unasked = tuple(peer for peer in self._unasked if peer in self._others)

    def beat(self) -> None:
        """Begin a round with all peers."""
        if self._ended:
            return
        self._round += 1
        self.last_beat_ns = self._clock.monotonic_ns()
        self._unasked = ()
        self._ask(self._others, self.last_beat_ns)
        if not self._others:
            self._release()

    def _ask_quorum(self) -> None:
        """Begin a round with a quorum, for reads."""
        if self._needed == len(self._others):
            self.beat()
            return
        self._round += 1
        best = sorted(self._others, key=lambda peer: (self._unanswered[peer], -self._answered[peer]))
        self._unasked = tuple(best[self._needed :])
        self._ask(best[: self._needed], self._clock.monotonic_ns())
        loop = asyncio.get_running_loop()
        self._round_began_s = loop.time()
        if self._hedge_timer is None:
            self._hedge_timer = loop.call_later(self._config.timing.read_hedge_ms / 1000, self._ask_others)

    def _ask_others(self) -> None:
        """Reads have waited for the current round long enough: ask the peers that were left out of it."""
        self._hedge_timer = None
        if self._ended or not self._waiting or self._quorum_round() == self._round:
            return
        loop = asyncio.get_running_loop()
        due_s = self._round_began_s + self._config.timing.read_hedge_ms / 1000
        if loop.time() < due_s:
            self._hedge_timer = loop.call_at(due_s, self._ask_others)
            return
        unasked, self._unasked = self._unasked, ()
        self._ask(unasked, self._clock.monotonic_ns())

    def _ask(self, peers: Sequence[str], now_ns: int) -> None:
        for peer in peers:
            if self._unanswered[peer] < MAX_UNANSWERED_BEATS:
                self._send(peer, self._round, now_ns)

    def quorum_sent_ns(self) -> int:
        """When the newest round that a quorum has answered began; for a lone member, now.

        Before a quorum has answered any round, the time of the election.
        """
        needed = self._needed
        if needed == 0:
            return self._clock.monotonic_ns()
        return sorted(self._answered_sent_ns.values(), reverse=True)[needed - 1]

    def hears(self, peer: str) -> bool:
        """Whether `peer` has answered a heartbeat sent within the last lease."""
        lease_ns = self._config.timing.lease_ms * 1_000_000
        is_heard = self._answered.get(peer, 0) > 0
        return is_heard and self._clock.monotonic_ns() - self._answered_sent_ns[peer] < lease_ns

    def quorum_lost_ns(self) -> int:
        """When leadership ends unless a quorum answers by then: a lease after a quorum was last heard. An added member
        has a lease for its first answer; otherwise adding one that is down would end leadership."""
        lease_ns = self._config.timing.lease_ms * 1_000_000
        if self._needed == 0:
            return self._clock.monotonic_ns() + lease_ns
        heard_ns = [max(sent_ns, self._added_ns[peer]) for peer, sent_ns in self._answered_sent_ns.items()]
        return sorted(heard_ns, reverse=True)[self._needed - 1] + lease_ns

    def holds_quorum(self) -> bool:
        """Whether leadership goes on. Candidates are turned away while it does."""
        return self._clock.monotonic_ns() < self.quorum_lost_ns()

    def holds_lease(self) -> bool:
        """Whether no other leader can have been elected yet, by this member's clock and with a margin for drift.

        Each of a quorum of followers is bound to this leader for a lease after it heard a heartbeat, and it did not
        hear that before it was sent.
        """
        timing = self._config.timing
        lease_ns = timing.lease_ms * (1 - timing.clock_drift_ratio) * 1e6
        is_confirmed = self._quorum_round() > 0 or not self._others
        return is_confirmed and self._clock.monotonic_ns() - self.quorum_sent_ns() < lease_ns

    def confirm(self) -> asyncio.Future[None]:
        """As `confirm_then`; the future fails with the error that `on_done` would get."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.confirm_then(partial(settle, future))
        return future

    def confirm_then(self, on_done: ConfirmationCallback) -> None:
        """Call `on_done(None)` when a quorum has answered a round that begins after this call.

        It gets a DLedgerError instead: NOT_LEADER if leadership ends first, TIMEOUT if no quorum has answered within
        `barrier_timeout_ms`. Raises DLedgerError LEADER_PENDING_FULL.
        """
        if len(self._waiting) >= MAX_WAITING_CONFIRMATIONS:
            raise DLedgerError(DLedgerCode.LEADER_PENDING_FULL, "too many reads wait for a confirmation")
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._config.timing.barrier_timeout_ms / 1000
        self._waiting.append((self._round + 1, on_done, due_s))
        if self._expiry is None:  # one timer for all reads: the read that sets it rarely waits that long
            self._expiry = loop.call_at(due_s, self._expire)
        if self._quorum_round() == self._round:
            self._ask_quorum()

    def _expire(self) -> None:
        """Fail the reads that have waited too long, the oldest first."""
        self._expiry = None
        loop = asyncio.get_running_loop()
        waiting = self._waiting
        while waiting:
            _, on_done, due_s = waiting[0]
            if due_s > loop.time():
                self._expiry = loop.call_at(due_s, self._expire)
                return
            waiting.popleft()
            timeout_s = self._config.timing.barrier_timeout_ms / 1000
            on_done(DLedgerError(DLedgerCode.TIMEOUT, f"no quorum has confirmed the leader within {timeout_s:g} s"))

    def end(self) -> None:
        """This leadership is over: waiting reads fail, and no more heartbeats are sent."""
        self._ended = True
        if self._hedge_timer is not None:
            self._hedge_timer.cancel()
            self._hedge_timer = None
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        waiting, self._waiting = self._waiting, deque()
        for _, on_done, _ in waiting:
            on_done(DLedgerError(DLedgerCode.NOT_LEADER, f"the lead of term {self.term} is over"))

    def _quorum_round(self) -> int:
        """The newest round that a quorum has answered."""
        needed = self._needed
        if needed == 0:
            return self._round
        return sorted(self._answered.values())[-needed]

    def _send(self, peer: str, number: int, sent_ns: int, *, is_repeat: bool = False) -> None:
        self._unanswered[peer] += 1
        self._peers.heartbeat(peer, self._requests[peer], partial(self._heard, peer, number, sent_ns, is_repeat))

    def _heard(
        self, peer: str, number: int, sent_ns: int, is_repeat: bool, answer: HeartBeatResponse | PeerError
    ) -> None:
        self._unanswered[peer] -= 1
        if isinstance(answer, PeerError):
            return
        if self._ended:
            return
        if answer.code is DLedgerCode.SUCCESS and answer.term == self.term:
            if peer not in self._answered:
                return  # it does not belong to the group any more
            self._answered[peer] = max(self._answered[peer], number)
            self._answered_sent_ns[peer] = max(self._answered_sent_ns[peer], sent_ns)
            self._release()
        elif answer.code is DLedgerCode.EXPIRED_TERM and answer.term > self.term:
            self._on_higher_term(answer.term)
        elif answer.code is DLedgerCode.INCONSISTENT_LEADER:
            self._on_rival(peer)
        elif answer.code is DLedgerCode.TERM_NOT_READY and not is_repeat:
            # The peer has entered the term by now and only needs to be told who leads it.
            self._send(peer, number, self._clock.monotonic_ns(), is_repeat=True)

    def _release(self) -> None:
        """Complete the reads whose round a quorum has answered, and begin the round that the others wait for."""
        waiting = self._waiting
        if not waiting:
            return
        answered = self._quorum_round()
        while waiting and waiting[0][0] <= answered:
            waiting.popleft()[1](None)
        if waiting and answered == self._round:
            self._ask_quorum()


def settle(future: asyncio.Future[None], error: DLedgerError | None) -> None:
    """Settle a future with a confirmation or an error. Its owner may have gone away."""
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()
