"""How far a quorum has the log: water marks, commitment, and the appends that wait for it (QuorumAckChecker, S0, S2).

Each member has a water mark for the leader's term: the index up to which it has confirmed that its log is the leader's.
The leader's own is what its disk has (`acked_index` of the store). The largest index that a quorum's marks reach is the
quorum index; it becomes the committed index only if its entry is of the leader's own term. Entries of earlier
terms are committed with it, never on their own: a quorum may hold one and still lose it to another leader (Raft
5.4.2, Figure 8). DLedger counts those as well (dledger#4).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from node.dledger.config import DLedgerConfig
from node.dledger.entry import Entry
from node.dledger.member_state import MemberState
from node.dledger.rpc import DLedgerCode, DLedgerError
from node.dledger.store import DLedgerStore

__all__ = ["AppendCallback", "AppendResult", "QuorumAckChecker"]

logger = logging.getLogger("node.dledger.pusher")


class AppendResult(NamedTuple):
    """A committed entry: its index, the position of its first byte, its term. The body lies at `pos` + 48."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls
    pos: int
    term: int


AppendCallback = Callable[[AppendResult | DLedgerError], object]
"""Called once, with the outcome of an append. Must not raise."""


class _Pending(NamedTuple):
    """Entries that were appended together: how many, and the result to report when the last is committed."""

    result: AppendResult
    entries: int
    deadline_s: float
    on_done: AppendCallback


class QuorumAckChecker:
    """Counts acknowledgements for the leader's term; idle while this member does not lead."""

    def __init__(self, config: DLedgerConfig, state: MemberState, store: DLedgerStore) -> None:
        self._config = config
        self._timing = config.timing
        self._state = state
        self._store = store
        self._term = -1
        self._watermarks_by_term: dict[int, dict[str, int]] = {}
        self._pending_by_term: dict[int, deque[_Pending]] = {}
        self._pending_count = 0
        self._scheduled = False
        self._timeout_timer: asyncio.TimerHandle | None = None
        self._report_timer: asyncio.TimerHandle | None = None
        self._reported: dict[str, int] = {}

    def begin_term(self, term: int) -> None:
        """This member leads `term` from now on; nothing is known of its peers."""
        self._term = term
        self._watermarks_by_term[term] = dict.fromkeys(self._state.member_ids, -1)
        self._pending_by_term[term] = deque()
        self._pending_count = 0
        self._reported = {}
        self.clear_other_terms(term)
        self._report()

    def end_term(self) -> None:
        """This member no longer leads: pending appends end with TERM_CHANGED, which does not mean that they failed."""
        self._term = -1
        self.clear_other_terms(-1)
        for timer in (self._timeout_timer, self._report_timer):
            if timer is not None:
                timer.cancel()
        self._timeout_timer = self._report_timer = None

    def clear_other_terms(self, term: int) -> None:
        """Drop the water marks and fail the appends of every term but `term`."""
        for other in [each for each in self._pending_by_term if each != term]:
            pending = self._pending_by_term.pop(other)
            if pending:
                count = sum(item.entries for item in pending)
                logger.info("%d appends of term %d are in doubt: the term has changed", count, other)
            for item in pending:
                _fail(item, DLedgerCode.TERM_CHANGED, f"entry {item.result.index} of term {other}")
        for other in [each for each in self._watermarks_by_term if each != term]:
            del self._watermarks_by_term[other]

    # Appends that wait

    @property
    def pending_count(self) -> int:
        """Appends that wait for a quorum."""
        return self._pending_count if self._term >= 0 else 0

    def register(self, entry: Entry) -> asyncio.Future[AppendResult]:
        """A future for the commitment of an entry that was just appended in the current term.

        It fails with DLedgerError WAIT_QUORUM_ACK_TIMEOUT or TERM_CHANGED; both leave the entry's fate open.
        """
        future: asyncio.Future[AppendResult] = asyncio.get_running_loop().create_future()
        self.register_batch(AppendResult(entry.index, entry.pos, entry.term), 1, partial(_settle, future))
        return future

    def register_batch(self, last: AppendResult, entries: int, on_done: AppendCallback) -> None:
        """The same for this many consecutive entries, with a callback instead of a future: `on_done` gets the outcome
        of the last one."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._timing.ack_timeout_ms / 1000
        self._pending_by_term[self._term].append(_Pending(last, entries, deadline_s, on_done))
        self._pending_count += entries
        if self._timeout_timer is None:
            self._timeout_timer = loop.call_at(deadline_s, self._expire)

    def _expire(self) -> None:
        """Fail the appends that have waited too long, the oldest first."""
        self._timeout_timer = None
        pending = self._pending_by_term.get(self._term)
        loop = asyncio.get_running_loop()
        while pending:
            oldest = pending[0]
            if oldest.deadline_s > loop.time():
                self._timeout_timer = loop.call_at(oldest.deadline_s, self._expire)
                return
            pending.popleft()
            self._pending_count -= oldest.entries
            _fail(
                oldest,
                DLedgerCode.WAIT_QUORUM_ACK_TIMEOUT,
                f"no quorum had entry {oldest.result.index} within {self._timing.ack_timeout_ms} ms",
            )

    def _complete(self, index: int) -> None:
        """Complete the appends up to `index`, in the order in which they were made."""
        pending = self._pending_by_term.get(self._term)
        while pending and pending[0].result.index <= index:
            item = pending.popleft()
            self._pending_count -= item.entries
            item.on_done(item.result)

    # Water marks

    def watermark(self, term: int, member_id: str) -> int:
        """The index up to which `member_id` has the log of the leader of `term`; -1 if not known."""
        return self._watermarks_by_term.get(term, {}).get(member_id, -1)

    def watermarks(self) -> dict[str, int]:
        """All marks of the current term, this member's own as of now; empty if this member does not lead."""
        marks = dict(self._watermarks_by_term.get(self._term, {}))
        if marks and self._state.members.includes_self:
            marks[self._state.self_id] = self._store.acked_index
        return marks

    def members_changed(self) -> None:
        """The group has changed: nothing is known of new members, and former ones do not count."""
        marks = self._watermarks_by_term.get(self._term)
        if marks is not None:
            self._watermarks_by_term[self._term] = {member: marks.get(member, -1) for member in self._state.member_ids}
            self.wakeup()

    def set_watermark(self, term: int, member_id: str, index: int) -> None:
        """Record the result of a comparison: the peer's log is the leader's exactly up to `index`."""
        marks = self._watermarks_by_term.get(term)
        if marks is not None and member_id in marks:
            marks[member_id] = index
            self.count()

    def update_watermark(self, term: int, member_id: str, index: int) -> None:
        """Record an acknowledgement: the peer has the log up to `index`. Never lowers a mark; ignores other terms."""
        marks = self._watermarks_by_term.get(term)
        if marks is not None and index > marks.get(member_id, index):
            marks[member_id] = index
            if index > self._store.committed_index:
                self.count()

    def wakeup(self) -> None:
        """Count in the next turn of the event loop, when the appends of this turn have been registered."""
        if not self._scheduled and self._term >= 0:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._count_soon)

    def quorum_index(self) -> int:
        """The largest index that a quorum's water marks reach, this member's included."""
        marks = sorted(self.watermarks().values(), reverse=True)
        return marks[self._state.members.quorum_size - 1] if marks else -1

    def may_commit(self, index: int) -> bool:
        """Whether counting may commit `index`: only an entry of the leader's own term."""
        return self._store.term_at(index) == self._term

    def _count_soon(self) -> None:
        self._scheduled = False
        self.count()

    def count(self) -> None:
        """Something has been acknowledged: commit what a quorum has, and complete the appends up to there."""
        if self._term < 0 or not self._state.is_leader or self._state.term != self._term:
            return
        try:
            index = self.quorum_index()
            if index > self._store.committed_index and self.may_commit(index):
                self._store.update_committed_index(index)
            self._complete(self._store.committed_index)
        except OSError as error:
            logger.error("cannot read the entry that a quorum has: %s", error)

    def _report(self) -> None:
        """Log the water marks if they have moved, and count again, for appends that were forgotten (a leak)."""
        loop = asyncio.get_running_loop()
        interval_s = self._timing.watermark_log_interval_ms / 1000
        self._report_timer = loop.call_later(interval_s, self._report)
        self.count()
        marks = self.watermarks()
        if marks != self._reported:
            self._reported = marks
            logger.info(
                "watermarks self=%s term=%d begin=%d end=%d committed=%d marks=%s",
                self._state.self_id, self._term, self._store.ledger_begin_index, self._store.ledger_end_index,
                self._store.committed_index, marks,
            )  # fmt: skip


def _fail(item: _Pending, code: DLedgerCode, message: str) -> None:
    item.on_done(DLedgerError(code, message))


def _settle(future: asyncio.Future[AppendResult], outcome: AppendResult | DLedgerError) -> None:
    if future.done():
        return
    if isinstance(outcome, AppendResult):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)
        future.exception()  # its owner may have gone away; asyncio need not warn of that
