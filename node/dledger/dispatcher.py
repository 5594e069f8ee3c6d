"""The leader's side of replication: one dispatcher for each peer, so that no peer holds up another (S0, S2).

In each term that this member leads, a dispatcher starts with COMPARE and, if it must, makes the peer's log a prefix of
its own with TRUNCATE. Then it pushes entries with APPEND, several requests ahead of the answers; while there is nothing
to append, COMMIT tells the peer what is committed. Comparing is a dialogue and runs as a task; appending is driven by
callbacks: one for each new entry, each answer, and the timer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from node.dledger.comparison import Comparison
from node.dledger.config import DLedgerConfig
from node.dledger.entry import Entry
from node.dledger.entry_batch import EntryBatch
from node.dledger.member_state import MemberState
from node.dledger.messages import PushEntryRequest, PushEntryResponse
from node.dledger.peers import PeerClient, PeerError, settle
from node.dledger.quorum import QuorumAckChecker
from node.dledger.quota import Quota
from node.dledger.rpc import DLedgerCode, PushType
from node.dledger.snapshot_transfer import SnapshotSender
from node.dledger.store import DLedgerStore
from node.remoting.complaints import Complaints
from node.runtime import Clock

__all__ = ["EntryDispatcher"]

logger = logging.getLogger("node.dledger.pusher")

IDLE_COMMIT_FACTOR = 5
"""Once the peer has confirmed everything, COMMIT is repeated this many times less often: then it only serves to detect
a peer that has restarted unnoticed (dledger#61)."""


ENTRY_COST_BYTES = 512
"""What an entry counts for in the quota in addition to its bytes. Small messages cost both sides processor time rather
than bandwidth: 20 MB/s of 128-byte bodies would be 75,000 entries a second, which cost senders on the same machine two
fifths of their throughput."""

MIN_WAIT_NS = 100_000
"""The shortest wait before checking again what is due: the clock that decides may be slightly behind the timer's."""


@dataclass(slots=True)
class _Pending:
    """Entries in flight to the peer, up to `last_index`; last sent at `sent_ns`."""

    last_index: int
    count: int
    sent_ns: int


class EntryDispatcher:
    """Replicates to one peer while this member leads. Calls `on_higher_term(term)` when the peer is in a later term."""

    def __init__(
        self,
        peer_id: str,
        config: DLedgerConfig,
        clock: Clock,
        state: MemberState,
        store: DLedgerStore,
        peers: PeerClient,
        checker: QuorumAckChecker,
        *,
        snapshots: SnapshotSender | None = None,
        on_higher_term: Callable[[int], None],
    ) -> None:
        self.peer_id = peer_id
        self._config = config
        self._timing = config.timing
        self._clock = clock
        self._state = state
        self._store = store
        self._peers = peers
        self._checker = checker
        self._snapshots = snapshots
        self._on_higher_term = on_higher_term
        self._complaints = Complaints(logger, lambda: asyncio.get_running_loop().time())
        self._quota = Quota(config.peer_push_quota_bytes, clock.monotonic_ns)
        self._term = -1
        self._type = PushType.COMPARE
        self._epoch = 0
        self._write_index = -1
        self._pending: dict[int, _Pending] = {}
        self._pending_count = 0
        self._last_leak_check_ns = 0
        self._last_commit_ns = 0
        self._confirmed_commit = -1
        self._is_refused = False
        self._is_running = False
        self._defers_commit = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._comparing: asyncio.Task[None] | None = None
        self._resting: asyncio.Task[None] | None = None
        self.push_total = 0
        self.entry_total = 0

    def start(self) -> None:
        """Start; from now on this replicates whenever this member leads."""
        self._is_running = True
        self.wake()

    async def stop(self) -> None:
        """Stop; later answers are ignored."""
        self._is_running = False
        self._epoch += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        tasks = [task for task in (self._comparing, self._resting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self) -> None:
        """Check for work: there may be a new entry, term or role."""
        if not self._is_running or self._comparing is not None:
            return
        try:
            if not self._check_and_fresh_state():
                return
            if self._type is PushType.APPEND:
                wait_ns = self._do_append()
                if wait_ns is not None:
                    self._wake_in(wait_ns)
            if self._type is not PushType.APPEND:
                self._comparing = asyncio.get_running_loop().create_task(
                    self._compare(), name=f"dledger-compare-{self.peer_id}"
                )
        except OSError as error:
            self._complaints.warn("disk", f"push to {self.peer_id}: cannot read the log: {error}")
            self._wake_in(self._timing.error_backoff_ms * 1_000_000)
        except Exception:
            logger.exception("the dispatcher for %s met an error of its own", self.peer_id)
            self._wake_in(self._timing.error_backoff_ms * 1_000_000)

    def committed(self) -> None:
        """The committed index has advanced: if the next COMMIT was deferred (IDLE_COMMIT_FACTOR), plan it again."""
        if self._defers_commit:
            self._defers_commit = False
            self.wake()

    @property
    def type(self) -> PushType:
        """The kind of push that this dispatcher sends now."""
        return self._type

    @property
    def pending_count(self) -> int:
        """Entries in flight to the peer."""
        return self._pending_count

    # What to do, and when

    def _wake_in(self, wait_ns: int) -> None:
        """Call `wake` after `wait_ns`, or earlier if the timer is already set for an earlier time."""
        loop = asyncio.get_running_loop()
        when_s = loop.time() + max(wait_ns, MIN_WAIT_NS) / 1e9
        if self._timer is not None:
            if self._timer_s <= when_s:
                return  # what is not due by then sets the timer again
            self._timer.cancel()
        self._timer_s = when_s
        self._timer = loop.call_at(when_s, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self.wake()

    async def _compare(self) -> None:
        """Compare, and truncate if needed, until entries can be appended or this member no longer leads."""
        try:
            while self._check_and_fresh_state() and self._type is not PushType.APPEND:
                try:
                    if not await self._do_compare():
                        return
                except PeerError as error:
                    self._complaints.warn("peer", f"push to {self.peer_id}: {error}")
                    await self._back_off()
                except OSError as error:
                    self._complaints.warn("disk", f"push to {self.peer_id}: cannot read the log: {error}")
                    await self._back_off()
                except Exception:
                    logger.exception("the dispatcher for %s met an error of its own", self.peer_id)
                    await self._back_off()
        finally:
            self._comparing = None
        if self._type is PushType.APPEND:
            self.wake()

    async def _back_off(self) -> None:
        """Pause after an error (500 ms, S0); after one in TRUNCATE, go back to COMPARE."""
        await asyncio.sleep(self._timing.error_backoff_ms / 1000)
        if self._type is PushType.TRUNCATE:
            self._change_state(-1, PushType.COMPARE)

    def _check_and_fresh_state(self) -> bool:
        """Whether this member leads. In a new term, start with COMPARE."""
        if not self._state.is_leader:
            return False
        if self._term != self._state.term:
            self._term = self._state.term
            self._confirmed_commit = -1
            self._is_refused = False
            self._change_state(-1, PushType.COMPARE)
        return True

    def _change_state(self, index: int, target: PushType) -> None:
        """Switch to another kind of push; answers to earlier pushes no longer change the state."""
        if self._type is not target:
            logger.info("push to %s: %s -> %s at %d", self.peer_id, self._type.name, target.name, index)
        self._type = target
        self._epoch += 1
        if target is PushType.APPEND:
            self._checker.set_watermark(self._term, self.peer_id, index)
            self._write_index = index + 1
            self._last_commit_ns = 0
        else:
            self._pending.clear()
            self._pending_count = 0

    # COMPARE and TRUNCATE

    async def _do_compare(self) -> bool:
        """Find where the logs diverge, make the peer's a prefix of this one, and switch to APPEND. Returns False if
        there is nothing to compare."""
        store = self._store
        if store.ledger_end_index < 0:
            return False  # an empty cluster
        search = self.new_comparison(store.ledger_begin_index, store.ledger_end_index)
        index = search.first
        while True:
            entry = self._entry(index)
            answer = await self._ask(self._request(PushType.COMPARE, entry.raw))
            if answer is None:
                return True
            if answer.code not in (DLedgerCode.SUCCESS, DLedgerCode.INCONSISTENT_STATE):
                raise PeerError(f"COMPARE at {index} was answered with {answer.code.name}")
            decision = search.decide(
                index,
                is_same=answer.code is DLedgerCode.SUCCESS,
                follower_begin=answer.begin_index,
                follower_end=answer.end_index,
            )
            index = decision.index
            if decision.type is PushType.APPEND:
                self._change_state(index, PushType.APPEND)
                return True
            if decision.type is PushType.TRUNCATE:
                if search.found_nothing and not await self._install_snapshot(index - 1):
                    return True
                self._change_state(index, PushType.TRUNCATE)
                await self._do_truncate(index)
                return True

    def new_comparison(self, begin: int, end: int) -> Comparison:
        """The search that decides what a COMPARE's answer means."""
        return Comparison(begin=begin, end=end)

    async def _install_snapshot(self, index: int) -> bool:
        """The peer's log is to begin where this one does: bring it the state up to entry `index`. Returns False if this
        member's leadership of the term has ended meanwhile."""
        epoch = self._epoch
        if self._snapshots is None or not await self._snapshots.send(self.peer_id, self._term, index, self._quota):
            return self._snapshots is None
        return self._epoch == epoch

    async def _do_truncate(self, index: int) -> None:
        """Make the peer's log end with this log's entry `index`."""
        request = self._request(PushType.TRUNCATE, self._entry(index).raw, following=self._store.get(index + 1))
        answer = await self._ask(request)
        if answer is None:
            return
        if answer.code is not DLedgerCode.SUCCESS:
            raise PeerError(f"TRUNCATE to {index} was answered with {answer.code.name}")
        self._change_state(index, PushType.APPEND)

    async def _ask(self, request: PushEntryRequest) -> PushEntryResponse | None:
        """Push and wait; None if this member's leadership of the term has ended meanwhile."""
        epoch = self._epoch
        future: asyncio.Future[PushEntryResponse] = asyncio.get_running_loop().create_future()
        self._peers.push(self.peer_id, request, partial(settle, future))
        answer = await future
        if self._meets_higher_term(answer) or not self._state.is_leader or self._state.term != request.term:
            return None
        return answer if self._epoch == epoch else None

    # APPEND and COMMIT

    def _do_append(self) -> int | None:
        """Push what can be pushed. Returns after how long to wake again, in ns; None if this is no longer APPEND."""
        now_ns = self._clock.monotonic_ns()
        self._check_leak(now_ns)
        resend_ns = self._check_append_response(now_ns)
        if self._type is not PushType.APPEND:
            return None
        while self._write_index <= self._store.ledger_end_index:
            most = self._config.max_pending_pushes
            if self._pending_count >= most or len(self._pending) >= self._config.push_pipeline_depth:
                return resend_ns
            quota_ns = self._check_quota()
            if quota_ns:
                return quota_ns
            max_bytes = self._config.max_push_bytes
            batches = self._store.read_batches(self._write_index, max_entries=most, max_bytes=max_bytes)
            if not batches:
                self._compare_from_begin()
                return None
            self._push_batches(batches, now_ns)
            self._write_index = batches[-1].last_index + 1
            resend_ns = resend_ns or self._timing.push_timeout_ms * 1_000_000
        commit_ns = self._do_commit(now_ns)
        return commit_ns if resend_ns is None else min(resend_ns, commit_ns)

    def _push_batches(self, batches: list[EntryBatch], now_ns: int) -> None:
        first_index, last_index = batches[0].first_index, batches[-1].last_index
        count = last_index - first_index + 1
        before = self._pending.get(first_index)
        self._pending_count += count - (before.count if before is not None else 0)
        self._pending[first_index] = _Pending(last_index, count, now_ns)
        raw = batches[0].raw if len(batches) == 1 else b"".join([batch.raw for batch in batches])
        request = self._request(PushType.APPEND, raw, previous_term=self._store.term_at(first_index - 1))
        self._quota.use(len(request.entries) + count * ENTRY_COST_BYTES)
        self.push_total += 1
        self.entry_total += count
        self._last_commit_ns = now_ns
        self._peers.push(self.peer_id, request, partial(self._append_answered, request, self._epoch))

    def _append_answered(self, request: PushEntryRequest, epoch: int, answer: PushEntryResponse | PeerError) -> None:
        """Handle the answer to an APPEND."""
        if not self._is_running:
            return
        if isinstance(answer, PeerError):
            self._complaints.warn("peer", f"push to {self.peer_id}: {answer}")
            return
        if self._meets_higher_term(answer) or answer.term != request.term:
            return
        if answer.code is DLedgerCode.SUCCESS:
            self._is_refused = False
            self._checker.update_watermark(request.term, self.peer_id, answer.index)
            if epoch == self._epoch:
                self._confirmed_commit = max(self._confirmed_commit, min(request.commit_index, answer.index))
                self._drop_pending(answer.index)
                if self._write_index <= self._store.ledger_end_index:
                    self.wake()
        elif answer.code is DLedgerCode.INCONSISTENT_STATE:
            self._compare_again(epoch)
        elif answer.code is not DLedgerCode.REPEATED_PUSH:
            self._complaints.warn("answer", f"push to {self.peer_id} was answered with {answer.code.name}")

    def _compare_again(self, epoch: int) -> None:
        """The peer's log is not what this dispatcher assumed: compare again. If this happens twice without a success in
        between, pause first: something is wrong that comparing does not fix."""
        if epoch != self._epoch or self._type is not PushType.APPEND or self._resting is not None:
            return
        if self._is_refused:
            self._complaints.warn("refused", f"{self.peer_id} refuses entries that continue its log")
            self._resting = asyncio.get_running_loop().create_task(self._rest_and_compare(epoch))
            return
        self._is_refused = True
        self._change_state(-1, PushType.COMPARE)
        self.wake()

    async def _rest_and_compare(self, epoch: int) -> None:
        try:
            await asyncio.sleep(self._timing.error_backoff_ms / 1000)
        finally:
            self._resting = None
        if epoch == self._epoch and self._type is PushType.APPEND:
            self._change_state(-1, PushType.COMPARE)
            self.wake()

    def _do_commit(self, now_ns: int) -> int:
        """Send a COMMIT if no push has told the peer the committed index for a while. Returns the wait until the next
        one, in ns."""
        interval_ns = self._timing.commit_interval_ms * 1_000_000
        self._defers_commit = not self._pending and self._confirmed_commit >= self._store.committed_index
        if self._defers_commit:
            interval_ns *= IDLE_COMMIT_FACTOR
        due_ns = self._last_commit_ns + interval_ns
        if now_ns < due_ns:
            return due_ns - now_ns
        self._last_commit_ns = now_ns
        request = self._request(PushType.COMMIT, b"")
        self._peers.push(self.peer_id, request, partial(self._commit_answered, self._epoch))
        return interval_ns

    def _commit_answered(self, epoch: int, answer: PushEntryResponse | PeerError) -> None:
        if not self._is_running:
            return
        if isinstance(answer, PeerError):
            self._complaints.warn("peer", f"push to {self.peer_id}: {answer}")
            return
        if self._meets_higher_term(answer) or epoch != self._epoch:
            return
        if answer.code is DLedgerCode.SUCCESS:
            self._is_refused = False
            self._confirmed_commit = max(self._confirmed_commit, answer.index)
        elif answer.code is DLedgerCode.INCONSISTENT_STATE:
            self._compare_again(epoch)

    def _check_append_response(self, now_ns: int) -> int | None:
        """Push the oldest unanswered entries again after a timeout. Returns how long until that is due, in ns; None if
        nothing is unanswered."""
        if not self._pending:
            return None
        first_index = min(self._pending)
        oldest = self._pending[first_index]
        timeout_ns = self._timing.push_timeout_ms * 1_000_000
        due_ns = oldest.sent_ns + timeout_ns
        if now_ns < due_ns:
            return due_ns - now_ns
        max_bytes = self._config.max_push_bytes
        batches = self._store.read_batches(first_index, max_entries=oldest.count, max_bytes=max_bytes)
        if not batches:
            self._compare_from_begin()
            return None
        last_index = batches[-1].last_index
        self._complaints.warn("resend", f"push to {self.peer_id}: repeating {first_index} to {last_index}")
        self._push_batches(batches, now_ns)
        if last_index < oldest.last_index:
            self._change_state(-1, PushType.COMPARE)
        return timeout_ns

    def _compare_from_begin(self) -> None:
        """The entries that the peer lacks are no longer in this log: the peer's log must begin where this one does."""
        logger.warning("push to %s: entries from %d on are gone", self.peer_id, self._write_index)
        self._change_state(-1, PushType.COMPARE)

    def _check_leak(self, now_ns: int) -> None:
        """Drop pending entries that are acknowledged by now, at intervals (1 s, S0) and whenever there is no room."""
        interval_ns = self._timing.leak_check_interval_ms * 1_000_000
        is_full = self._pending_count >= self._config.max_pending_pushes
        if is_full or now_ns - self._last_leak_check_ns >= interval_ns:
            self._last_leak_check_ns = now_ns
            self._drop_pending(self._checker.watermark(self._term, self.peer_id))

    def _drop_pending(self, index: int) -> None:
        """The peer has everything up to `index`."""
        for first_index in [first for first, push in self._pending.items() if push.last_index <= index]:
            self._pending_count -= self._pending.pop(first_index).count

    def _check_quota(self) -> int:
        """How long to wait before pushing more, in ns: a peer that is far behind must not take all the capacity.

        The quota applies only to a peer that is behind by more than `max_pending_pushes` entries and by at least
        `peer_push_throttle_point_bytes`.
        """
        store = self._store
        if store.ledger_end_index - self._write_index <= self._config.max_pending_pushes:
            return 0
        following = store.get(self._write_index)
        behind_bytes = store.end_pos - following.pos if following is not None else 0
        if behind_bytes < self._config.peer_push_throttle_point_bytes:
            return 0
        return self._quota.wait_ns(behind_bytes)

    # Inside

    def _entry(self, index: int) -> Entry:
        entry = self._store.get(index)
        if entry is None:
            raise PeerError(f"entry {index} is not here any more")
        return entry

    def _request(
        self, push_type: PushType, entries: bytes, *, previous_term: int = -1, following: Entry | None = None
    ) -> PushEntryRequest:
        return PushEntryRequest(
            group=self._config.group,
            remote_id=self.peer_id,
            local_id=self._config.self_id,
            term=self._term,
            leader_id=self._config.self_id,
            type=push_type,
            commit_index=self._store.committed_index,
            entries=entries,
            previous_term=previous_term,
            next_term=following.term if following is not None else -1,
            next_chain_crc=following.chain_crc if following is not None else -1,
        )

    def _meets_higher_term(self, answer: PushEntryResponse) -> bool:
        if answer.term <= self._term:
            return False
        self._on_higher_term(answer.term)
        return True
