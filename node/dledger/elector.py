"""Who leads: candidates, votes, heartbeats (R's DLedgerLeaderElector, made safe).

One task sleeps until the next deadline of the current role: the end of the leader's lease (follower), the next round of
votes (candidate), the next heartbeat or the time at which the quorum counts as lost (leader). Messages wake it.

Beyond what DLedger does:

- A member leads a term at most once. In DLedger, the first round after the loss of a leader asks for votes in the same
  term, so a leader that lost entries in a crash may lead its old term again and give their numbers to other entries.
  Here, a round in a term in which this member may have led before is only a pre-vote: winning it leads to a real round
  in the next term.
- A member that heard its leader within the lease, or that has just restarted and cannot know, votes for nobody
  else. So a member that comes back with a greater term deposes nobody by asking for votes; a leader that meets this
  greater term enters it and is elected again (dledger#325). This also makes lease reads safe.
- A vote is judged and recorded under a lock, and requests that would change the log wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from node.dledger.config import DLedgerConfig
from node.dledger.leadership import Leadership
from node.dledger.member_state import MemberState
from node.dledger.messages import HeartBeatRequest, HeartBeatResponse, VoteRequest, VoteResponse
from node.dledger.peers import PeerClient, PeerError
from node.dledger.rpc import DLedgerCode, DLedgerError, VoteResult
from node.dledger.store import DLedgerStore
from node.dledger.votes import VoteOutcome, VoteTally
from node.runtime import Runtime

__all__ = ["LeaderElector"]

logger = logging.getLogger("node.dledger.elector")

ERROR_PAUSE_S = 0.5
"""Pause after an unexpected error in this task, or after the disk has refused a term or vote."""


class LeaderElector:
    """Runs elections for one member. `on_elected(term)` is called when this member has become leader, before this is
    announced; if it raises DLedgerError or OSError, the member steps down."""

    def __init__(
        self,
        config: DLedgerConfig,
        runtime: Runtime,
        state: MemberState,
        store: DLedgerStore,
        peers: PeerClient,
        *,
        on_elected: Callable[[int], None],
    ) -> None:
        self._config = config
        self._timing = config.timing
        self._clock = runtime.clock
        self._random = runtime.random
        self._state = state
        self._store = store
        self._peers = peers
        self._on_elected = on_elected
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._leader_heard_ns = 0
        self._next_vote_ns = 0
        self._votes_from_ns = 0
        self._next_outcome = VoteOutcome.WAIT_TO_REVOTE
        self._electable_term = -1
        self._transferred_term = -1
        self._round_over = asyncio.Event()
        self.leadership: Leadership | None = None
        """The current leadership; None when this member does not lead."""
        state.members.add_listener(self._members_changed)

    def start(self) -> None:
        """Start as a candidate. A restarted member first waits for one lease, during which it may still be bound to a
        leader; one that has always been alone in its group is bound to nobody."""
        now_ns = self._clock.monotonic_ns()
        self._next_vote_ns = now_ns
        if self._state.is_new:
            self._next_outcome = VoteOutcome.WAIT_TO_VOTE_NEXT
        elif self._state.peer_ids or self._state.members.index >= 0:  # a former member may still read by lease
            self._votes_from_ns = now_ns + self._timing.lease_ms * 1_000_000
            self._next_vote_ns = self._votes_from_ns
        if self._state.peer_ids:
            self._next_vote_ns += self._vote_pause_ns()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="dledger-elector")

    async def stop(self) -> None:
        """Give up leadership, if this member leads, and take no further part in elections."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self.leadership is not None:
            self._become_candidate("stopping")

    # Requests of others

    async def handle_vote(self, request: VoteRequest) -> VoteResponse:
        """Judge a request for this member's vote; a granted vote is durable before this returns.
        Raises OSError when the disk refuses the term or the vote."""
        async with self._state.lock:
            result = self.judge_vote(request)
            if result is VoteResult.REJECT_TERM_NOT_READY:
                await self._enter_term(request.term, f"{request.leader_id} asks for votes in a newer term")
            elif result is VoteResult.ACCEPT:
                await self._state.record_vote(request.leader_id)
                self._next_vote_ns = max(self._next_vote_ns, self._clock.monotonic_ns() + self._vote_pause_ns())
        return VoteResponse(
            group=request.group,
            remote_id=request.local_id,
            local_id=self._state.self_id,
            term=self._state.term,
            leader_id=self._state.leader_id or "",
            code=DLedgerCode.SUCCESS,
            vote_result=result,
        )

    def judge_vote(self, request: VoteRequest) -> VoteResult:
        """The answer to a candidate: R's checks in R's order, with `is_bound_to_another` inserted. Changes nothing."""
        state = self._state
        candidate = request.leader_id
        if not state.is_member(candidate):
            return VoteResult.REJECT_UNKNOWN_LEADER
        if candidate == state.self_id:
            return VoteResult.REJECT_UNEXPECTED_LEADER
        log_verdict = self.judge_log(request.ledger_end_term, request.ledger_end_index)
        if log_verdict is not None:
            return log_verdict
        if request.term < state.term:
            return VoteResult.REJECT_EXPIRED_VOTE_TERM
        if request.transferred_term != state.term and self.is_bound_to_another(candidate):
            return VoteResult.REJECT_ALREADY_HAS_LEADER
        if request.term > state.term:
            return VoteResult.REJECT_TERM_NOT_READY
        if not self.may_vote_for(candidate):
            return VoteResult.REJECT_ALREADY_VOTED
        if request.term < self._store.ledger_end_term:
            return VoteResult.REJECT_TERM_SMALL_THAN_LEDGER
        return VoteResult.ACCEPT

    def judge_log(self, ledger_end_term: int, ledger_end_index: int) -> VoteResult | None:
        """The election restriction (Raft 5.4.1): the reason to reject a log with this end; None if it is up to date.

        Compared with the end in memory: an entry that this member is about to acknowledge counts already.
        """
        own_term = self._store.ledger_end_term
        if ledger_end_term < own_term:
            return VoteResult.REJECT_EXPIRED_LEDGER_TERM
        if ledger_end_term == own_term and ledger_end_index < self._store.ledger_end_index:
            return VoteResult.REJECT_SMALL_LEDGER_END_INDEX
        return None

    def may_vote_for(self, candidate: str) -> bool:
        """Whether the one vote of the current term is unused or already given to `candidate`."""
        return self._state.voted_for in (None, candidate)

    def is_bound_to_another(self, candidate: str) -> bool:
        """Whether this member is bound by a lease to a leader other than `candidate`, or has just restarted and may be.

        A leader that asks for votes no longer leads, so its followers need not wait for their lease to end.
        """
        state = self._state
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._votes_from_ns:
            return True
        if state.is_leader:
            return self.leadership is not None and self.leadership.holds_quorum()
        return state.is_follower and state.leader_id != candidate and not self._lease_is_over(now_ns)

    def answer_heartbeat(self, request: HeartBeatRequest) -> HeartBeatResponse | None:
        """The answer of `handle_heartbeat` if it needs no waiting, or None."""
        if not self._state.follows(request.term, request.leader_id):
            return None
        self._leader_heard_ns = self._clock.monotonic_ns()
        return self._heartbeat_answer(request, DLedgerCode.SUCCESS)

    async def handle_heartbeat(self, request: HeartBeatRequest) -> HeartBeatResponse:
        """Judge a leader's heartbeat, and follow it. Raises OSError when the disk refuses a newer term."""
        if self._state.is_settling:
            await self._state.settled()
        code = await self.meet_leader(request.term, request.leader_id)
        if code is DLedgerCode.SUCCESS:
            self._leader_heard_ns = self._clock.monotonic_ns()
        return self._heartbeat_answer(request, code)

    def _heartbeat_answer(self, request: HeartBeatRequest, code: DLedgerCode) -> HeartBeatResponse:
        return HeartBeatResponse(
            group=request.group,
            remote_id=request.local_id,
            local_id=self._state.self_id,
            term=self._state.term,
            leader_id=self._state.leader_id or "",
            code=code,
        )

    async def meet_leader(self, term: int, leader_id: str) -> DLedgerCode:
        """`leader_id` claims to lead `term`. Returns SUCCESS if this member follows it, else the error.

        A newer term is entered, durably, before TERM_NOT_READY is returned. Raises OSError.
        """
        state = self._state
        if not state.is_member(leader_id):
            return DLedgerCode.UNKNOWN_MEMBER
        if leader_id == state.self_id:
            return DLedgerCode.UNEXPECTED_MEMBER
        if term < state.term:
            return DLedgerCode.EXPIRED_TERM
        if term > state.term:
            async with state.lock:
                await self._enter_term(term, f"{leader_id} leads a newer term")
            return DLedgerCode.TERM_NOT_READY
        if state.leader_id == leader_id:
            return DLedgerCode.SUCCESS
        if state.leader_id is not None:
            logger.error("in term %d both %s and %s claim to lead", term, state.leader_id, leader_id)
            return DLedgerCode.INCONSISTENT_LEADER
        if self._config.members_may_change and state.voted_for != leader_id:
            await self._give_vote_to_leader(term, leader_id)
            return await self.meet_leader(term, leader_id)
        self._leader_heard_ns = self._clock.monotonic_ns()
        state.become_follower(term, leader_id)
        self._changed()
        return DLedgerCode.SUCCESS

    async def _give_vote_to_leader(self, term: int, leader_id: str) -> None:
        """Record a follower's vote for its leader, so that it votes for nobody else in this term: members that did not
        elect the leader may be a majority once the group has changed."""
        async with self._state.lock:
            if self._state.term == term and self._state.leader_id is None:
                await self._state.record_vote(leader_id)

    def note_higher_term(self, term: int) -> None:
        """A peer's answer named a greater term: a leader steps down, and the term is entered soon."""
        if term <= self._state.term:
            return
        self._state.known_max_term = max(self._state.known_max_term, term)
        if self._state.is_leader:
            self._become_candidate(f"a peer is in term {term}")
        self._wake.set()

    def step_down(self, term: int, reason: str) -> None:
        """Give up leadership of `term`, if this member still holds it."""
        if self._state.is_leader and self._state.term == term:
            self._become_candidate(reason)

    def give_up(self, term: int, successor: str) -> None:
        """Give up leadership of `term` so that `successor` can take it, and do not stand for election for a lease."""
        self.step_down(term, f"{successor} is to take over")
        self._next_vote_ns = self._clock.monotonic_ns() + self._timing.lease_ms * 1_000_000 + self._vote_pause_ns()

    def take_over(self, term: int) -> None:
        """The leader of `term`, which this member follows, has given up in its favour: stand for election at once."""
        self._transferred_term = term
        self._become_candidate(f"{self._state.leader_id} has given up the lead")
        self._next_outcome = VoteOutcome.WAIT_TO_VOTE_NEXT
        self._next_vote_ns = self._clock.monotonic_ns()

    def _members_changed(self) -> None:
        if self.leadership is not None:
            self.leadership.members_changed()
        self._wake.set()

    # The task

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                if self._state.is_leader:
                    wait_ns = self._lead()
                elif self._state.is_follower:
                    wait_ns = self._follow()
                else:
                    wait_ns = await self._stand()
            except OSError as error:
                logger.error("the disk refuses the term or the vote: %s", error)
                wait_ns = int(ERROR_PAUSE_S * 1e9)
            except Exception:
                logger.exception("the elector met an error of its own")
                wait_ns = int(ERROR_PAUSE_S * 1e9)
            if wait_ns > 0:
                try:
                    async with asyncio.timeout(wait_ns / 1e9):
                        await self._wake.wait()
                except TimeoutError:
                    pass

    def _follow(self) -> int:
        """Wait for the end of the leader's lease; then become a candidate. Returns how long to sleep, in ns."""
        now_ns = self._clock.monotonic_ns()
        if not self._lease_is_over(now_ns):
            return self._leader_heard_ns + self._timing.lease_ms * 1_000_000 - now_ns
        self._next_outcome = VoteOutcome.WAIT_TO_REVOTE
        self._next_vote_ns = now_ns + self._vote_pause_ns()
        self._become_candidate(f"{self._state.leader_id} has been silent for a lease")
        return 0

    def _lead(self) -> int:
        """Send heartbeats; step down if the quorum is lost or the disk stalled. Returns how long to sleep, in ns."""
        leadership = self.leadership
        assert leadership is not None
        now_ns = self._clock.monotonic_ns()
        quorum_lost_ns = leadership.quorum_lost_ns()
        if self.must_step_down(leadership):
            return 0
        interval_ns = self._timing.heartbeat_interval_ms * 1_000_000
        if now_ns >= leadership.last_beat_ns + interval_ns:
            leadership.beat()
        next_ns = leadership.last_beat_ns + interval_ns
        if self._state.peer_ids:
            next_ns = min(next_ns, quorum_lost_ns)
        return max(next_ns - now_ns, 1)

    def must_step_down(self, leadership: Leadership) -> bool:
        """Step down, and return True, if no quorum has answered for a lease or the disk is stalled."""
        if not leadership.holds_quorum():
            self._become_candidate("no quorum has answered for a lease")
            return True
        if self._config.step_down_on_stalled_disk and self._disk_is_stalled():
            self._become_candidate(f"the disk has stored nothing for {self._store.writer.stalled_ms:.0f} ms")
            return True
        return False

    async def _stand(self) -> int:
        """Enter newer terms, and ask for votes when it is time. Returns how long to sleep, in ns."""
        state = self._state
        if state.known_max_term > state.term:
            async with state.lock:
                await self._enter_term(state.known_max_term, "others are there already")
            return 0
        now_ns = self._clock.monotonic_ns()
        if not self._may_stand():
            self._next_vote_ns = now_ns + self._vote_pause_ns()
        if now_ns < self._next_vote_ns:
            return self._next_vote_ns - now_ns
        if self._disk_is_stalled():
            self._next_vote_ns = now_ns + self._vote_pause_ns()
            return 0
        outcome, has_leader, has_longer_ledgers = await self._ask_for_votes()
        now_ns = self._clock.monotonic_ns()
        if outcome is None or not state.is_candidate:
            return 0
        self._next_outcome = outcome
        if outcome is VoteOutcome.REVOTE_IMMEDIATELY:
            self._next_vote_ns = now_ns
        elif outcome is VoteOutcome.PASSED:
            self._next_vote_ns = now_ns  # in a term that may not be led again: the real round follows at once
            self._next_outcome = VoteOutcome.WAIT_TO_VOTE_NEXT
        else:
            self._next_vote_ns = now_ns + self._vote_pause_ns()
            if has_leader:
                self._next_vote_ns += self._timing.lease_ms * 1_000_000
            elif outcome is VoteOutcome.WAIT_TO_REVOTE and has_longer_ledgers:
                self._next_vote_ns += self._timing.max_vote_interval_ms * 1_000_000
        return 0

    def _may_stand(self) -> bool:
        """A member outside the group cannot lead it. But while the entry that puts it outside may be uncommitted, the
        others may need this member, whose log is longer, to get that entry (Ongaro's thesis, 4.2.2)."""
        members = self._state.members
        return members.includes_self or members.index > self._store.committed_index

    async def _ask_for_votes(self) -> tuple[VoteOutcome | None, bool, bool]:
        """Run one round of votes; if it is won, become leader. Returns the outcome, or None if this member now leads or
        the round was overtaken by events, with the tally's `has_leader` and `has_longer_ledgers`."""
        state = self._state
        async with state.lock:
            if not state.is_candidate:
                return None, False, False
            if self._next_outcome is VoteOutcome.WAIT_TO_VOTE_NEXT:
                term = max(state.term + 1, state.known_max_term)
                await state.change_term(term, voted_for=state.self_id)
                self._electable_term = term
                self._next_outcome = VoteOutcome.WAIT_TO_REVOTE
                state.announce()
            own_vote = await self._vote_for_self()
            term = state.term
        tally = VoteTally(term=term, member_count=len(state.member_ids), quorum_size=state.members.quorum_size)
        if state.members.includes_self:
            tally.add(own_vote, term)
        await self._collect_votes(tally, term)
        await state.settled()  # a newer term may be on its way to the disk
        if not state.is_candidate or state.term != term:
            return None, False, False
        outcome = tally.outcome()
        logger.info("votes for %s in term %d: %s", state.self_id, term, outcome.name)
        state.known_max_term = max(state.known_max_term, tally.known_max_term)
        if outcome is VoteOutcome.PASSED and self.may_lead(term):
            self._become_leader(term)
            return None, False, False
        return outcome, tally.has_leader, tally.has_longer_ledgers

    async def _vote_for_self(self) -> VoteResult:
        """This member's own vote; the caller holds the lock."""
        state = self._state
        if not self.may_vote_for(state.self_id):
            return VoteResult.REJECT_ALREADY_VOTED
        if state.voted_for is None:
            await state.record_vote(state.self_id)
            self._electable_term = state.term
        return VoteResult.ACCEPT

    def may_lead(self, term: int) -> bool:
        """Whether this member has voted for itself in `term` since it started and has not led since: then it has not
        written any entry of `term` yet."""
        return self._electable_term == term

    async def _collect_votes(self, tally: VoteTally, term: int) -> None:
        """Ask all peers in parallel, until the answers or other events decide the round, or it times out."""
        decided = self._round_over = asyncio.Event()

        async def ask(peer: str) -> None:
            request = VoteRequest(
                group=self._config.group,
                remote_id=peer,
                local_id=self._config.self_id,
                term=term,
                leader_id=self._config.self_id,
                ledger_end_index=self._store.ledger_end_index,
                ledger_end_term=self._store.ledger_end_term,
                transferred_term=self._transferred_term if term == self._transferred_term + 1 else -1,
            )
            try:
                answer = await self._peers.vote(peer, request)
                tally.add(answer.vote_result, answer.term)
            except PeerError:
                tally.add(VoteResult.UNKNOWN, -1)
            if tally.is_decided:
                decided.set()

        tasks = [asyncio.get_running_loop().create_task(ask(peer)) for peer in self._state.peer_ids]
        wait_ms = self._timing.vote_wait_ms + self._random.randrange(self._timing.max_vote_interval_ms)
        try:
            if not tally.is_decided:
                async with asyncio.timeout(wait_ms / 1000):
                    await decided.wait()
        except TimeoutError:
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # Changes of role

    async def _enter_term(self, term: int, reason: str) -> None:
        """Leave the current role and enter a newer term, durably; the caller holds the lock."""
        state = self._state
        if term <= state.term:
            return
        state.known_max_term = max(state.known_max_term, term)
        if not state.is_candidate:
            self._become_candidate(reason)
        await state.change_term(term)
        self._next_outcome = VoteOutcome.WAIT_TO_REVOTE
        self._next_vote_ns = self._clock.monotonic_ns() + self._vote_pause_ns()
        self._changed()

    def _become_leader(self, term: int) -> None:
        self._electable_term = -1
        self._state.become_leader(term)
        self.leadership = Leadership(
            self._config,
            self._clock,
            self._peers,
            self._state.members,
            term,
            on_higher_term=self.note_higher_term,
            on_rival=lambda peer: self.step_down(term, f"{peer} knows another leader of term {term}"),
        )
        try:
            self._on_elected(term)
        except (DLedgerError, OSError) as error:
            self._become_candidate(f"cannot lead: {error}")
            return
        self._changed()
        self.leadership.beat()

    def _become_candidate(self, reason: str) -> None:
        logger.info("%s leaves %s of term %d: %s", self._state.self_id, self._state.role.name, self._state.term, reason)
        leadership, self.leadership = self.leadership, None
        now_ns = self._clock.monotonic_ns()
        if leadership is not None:
            self._next_outcome = VoteOutcome.WAIT_TO_REVOTE
            self._next_vote_ns = now_ns + self._vote_pause_ns()
        self._state.become_candidate()
        if leadership is not None:
            leadership.end()
        self._changed()

    def _changed(self) -> None:
        self._state.announce()
        self._round_over.set()
        self._wake.set()

    def _lease_is_over(self, now_ns: int) -> bool:
        return now_ns - self._leader_heard_ns >= self._timing.lease_ms * 1_000_000

    def _disk_is_stalled(self) -> bool:
        return self._store.writer.stalled_ms > self._timing.disk_stall_ms

    def _vote_pause_ns(self) -> int:
        pause_ms = self._random.randint(self._timing.min_vote_interval_ms, self._timing.max_vote_interval_ms)
        if not self._state.members.includes_self:
            pause_ms += self._timing.lease_ms  # members of the group go first
        return 1_000_000 * pause_ms
