"""The follower's side of replication: handles the leader's pushes in order (EntryHandler, S0, S2).

APPEND requests wait in a map until they continue the log; COMPARE, TRUNCATE and COMMIT go first. A repeated entry is
answered from the log; one that leaves a gap waits a while and is then refused, so that the leader compares.

`verified_index` is how far this log is known to be that of the current term's leader. Three rules rest on it, none of
which DLedger has: what the leader has committed is committed here only up to the verified index (after it there may be
entries that the leader never had); entries are appended only to a log that is verified as a whole; and a TRUNCATE
below it is refused (one that was delayed for long must not take back what has been acknowledged since).

SUCCESS for an index is sent when the store's `acked_index` has reached it, whatever kind of request it answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from node.dledger.config import DLedgerConfig
from node.dledger.entry import BadEntry, Entry, parse_entries
from node.dledger.entry_batch import EntryBatch, batch_of, parse_batches
from node.dledger.member_state import MemberState
from node.dledger.messages import PushEntryRequest, PushEntryResponse
from node.dledger.rpc import DLedgerCode, DLedgerError, PushType
from node.dledger.snapshot_manager import SnapshotManager
from node.dledger.store import DLedgerStore
from node.remoting.complaints import Complaints

__all__ = ["EntryHandler"]

logger = logging.getLogger("node.dledger.pusher")

MAX_WAITING_PUSHES = 4096
"""Limit on requests that wait for their turn. A correct leader has far fewer in flight."""

MAX_WAITING_BYTES = 64 * 1024 * 1024
"""The same limit in bytes of entries."""


@dataclass(slots=True, eq=False)
class _Push:
    """A request with its parsed entries, and the callback for its answer."""

    request: PushEntryRequest
    batches: list[EntryBatch]
    arrived_s: float
    on_done: Callable[[PushEntryResponse], object]
    is_answered: bool = False

    @property
    def first_index(self) -> int:
        """Index of the first entry."""
        return self.batches[0].first_index

    @property
    def entry(self) -> Entry:
        """The entry of a request that carries exactly one."""
        return self.batches[0].entry(self.batches[0].first_index)


class EntryHandler:
    """Handles pushes while this member follows. `handle_push` is called with requests of the current leader."""

    def __init__(
        self,
        config: DLedgerConfig,
        state: MemberState,
        store: DLedgerStore,
        snapshots: SnapshotManager | None = None,
    ) -> None:
        self._snapshots = snapshots
        self._config = config
        self._state = state
        self._store = store
        self._complaints = Complaints(logger, lambda: asyncio.get_running_loop().time())
        self._write_requests: dict[int, _Push] = {}
        self._waiting_bytes = 0
        self._compare_requests: deque[_Push] = deque()
        self._acks: deque[tuple[int, int, _Push]] = deque()
        self._settling: asyncio.Task[None] | None = None
        self._gap_timer: asyncio.TimerHandle | None = None
        self._is_handling = False
        self._stopped = False
        self._verified_term = -1
        self._verified_index = -1

    async def stop(self) -> None:
        """Answer all open requests with NOT_FOLLOWER and stop."""
        self._stopped = True
        self._disarm()
        task, self._settling = self._settling, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self.clear(DLedgerCode.NOT_FOLLOWER)

    def handle_push(self, request: PushEntryRequest, on_done: Callable[[PushEntryResponse], object]) -> None:
        """Handle a push of the current term's leader; `on_done` gets the answer, before this returns or later."""
        push = _Push(request, [], asyncio.get_running_loop().time(), on_done)
        try:
            push.batches = parse_batches(request.entries)
        except BadEntry as error:
            self._complaints.warn("entries", f"a push of {request.leader_id} has bad entries: {error}")
            self._reply(push, DLedgerCode.UNEXPECTED_ARGUMENT)
            return
        refusal = self._queue(push)
        if refusal is None:
            self._go_on()
        else:
            self._reply(push, refusal)

    def _queue(self, push: _Push) -> DLedgerCode | None:
        """Queue a push and return None, or return why it is refused."""
        request = push.request
        if not self._has_right_shape(push):
            return DLedgerCode.UNEXPECTED_ARGUMENT
        if len(self._acks) >= MAX_WAITING_PUSHES:
            return DLedgerCode.FALL_BEHIND_TOO_MUCH
        if request.type is PushType.APPEND:
            first_index = push.first_index
            if first_index in self._write_requests:
                return DLedgerCode.REPEATED_PUSH
            if len(self._write_requests) >= MAX_WAITING_PUSHES or self._waiting_bytes > MAX_WAITING_BYTES:
                return DLedgerCode.FALL_BEHIND_TOO_MUCH
            self._write_requests[first_index] = push
            self._waiting_bytes += len(request.entries)
        elif len(self._compare_requests) >= MAX_WAITING_PUSHES:
            return DLedgerCode.FALL_BEHIND_TOO_MUCH
        else:
            if request.type is not PushType.COMMIT:
                self._clear_write_requests(DLedgerCode.INCONSISTENT_STATE)
            self._compare_requests.append(push)
        return None

    def clear(self, code: DLedgerCode) -> None:
        """Refuse all open requests: this member has another leader now, or none."""
        self._clear_write_requests(code)
        while self._compare_requests:
            self._reply(self._compare_requests.popleft(), code)
        while self._acks:
            self._reply(self._acks.popleft()[2], code)

    def progressed(self) -> None:
        """The store has advanced: send the acknowledgements that waited for it."""
        acks = self._acks
        if not acks:
            return
        failure_code = self._store.writer.failure_code
        if failure_code is not None:
            self._fail_acks(failure_code)
            return
        waiting: list[tuple[int, int, _Push]] = []
        acked_index = self._store.acked_index
        while acks:
            index, term, push = acks.popleft()
            if index > acked_index:
                waiting.append((index, term, push))
                continue
            code = DLedgerCode.INCONSISTENT_STATE
            try:
                if self._is_current(push.request) and self._store.term_at(index) == term:
                    code = DLedgerCode.SUCCESS
            except OSError as error:
                self._complaints.warn("disk", f"cannot acknowledge entry {index}: {error}")
                code = DLedgerCode.DISK_ERROR
            self._reply(push, code, index)
        acks.extend(waiting)

    # What is known of the log

    def verified_index(self, term: int) -> int:
        """The index up to which this log is known to be that of the leader of `term`; -1 if nothing is known."""
        return self._verified_index if self._verified_term == term else -1

    def verify(self, term: int, index: int) -> None:
        """Record that the entry at `index` is the same as the leader's; so are all before it (log matching)."""
        if term != self._verified_term:
            self._verified_term, self._verified_index = term, index
        else:
            self._verified_index = max(self._verified_index, index)

    def may_append(self, request: PushEntryRequest, first_index: int) -> bool:
        """Whether entry `first_index` continues this log as it continues the leader's: it is the next one, the previous
        entry has the same term in both, and this log holds nothing that the leader may not have."""
        end_index = self._store.ledger_end_index
        return (
            first_index == end_index + 1
            and request.previous_term == self._store.ledger_end_term
            and (end_index < 0 or self.verified_index(request.term) == end_index)
        )

    def may_truncate(self, request: PushEntryRequest, index: int) -> bool:
        """Whether everything after `index` may be removed: none of it is committed, and none of it is known to be in
        the current leader's log."""
        return self._store.may_truncate_to(index) and index >= self.verified_index(request.term)

    def is_needless(self, request: PushEntryRequest, entry: Entry) -> bool:
        """Whether the entry after `entry` is the leader's too, so that a TRUNCATE there is a mistake or outdated."""
        following = self._store.get(entry.index + 1)
        return following is not None and (following.term, following.chain_crc) == (
            request.next_term,
            request.next_chain_crc,
        )

    def commit_bound(self, request: PushEntryRequest) -> int:
        """How far this member may adopt the leader's committed index: not beyond what is verified."""
        return min(request.commit_index, self.verified_index(request.term))

    # What waits for its turn

    def _go_on(self) -> None:
        """Handle what can be handled: at once, or as soon as a term or vote that is being written is durable."""
        if self._is_handling or self._stopped:
            return  # an answer sent below has re-entered this method: the outer call handles what was queued
        if self._state.is_settling:
            if self._settling is None:
                self._settling = asyncio.get_running_loop().create_task(self._go_on_when_settled())
            return
        self._is_handling = True
        try:
            self._handle_all()
            self._check_abnormal()
        except OSError as error:
            self._complaints.warn("disk", f"cannot read the log: {error}")
            self.clear(DLedgerCode.DISK_ERROR)
        except Exception:
            logger.exception("the entry handler met an error of its own")
            self.clear(DLedgerCode.INTERNAL_ERROR)
        finally:
            self._is_handling = False

    async def _go_on_when_settled(self) -> None:
        await self._state.settled()
        self._settling = None
        self._go_on()

    def _handle_all(self) -> None:
        """Handle everything that can be handled now, without waiting: COMPARE, TRUNCATE and COMMIT first."""
        while True:
            if self._compare_requests:
                push = self._compare_requests.popleft()
                push_type = push.request.type
                if push_type is PushType.COMMIT:
                    self._guarded(push, self._do_commit)
                elif push_type is PushType.COMPARE:
                    self._guarded(push, self._do_compare)
                else:
                    self._guarded(push, self._do_truncate)
                continue
            push_or_none = self._next_write_request()
            if push_or_none is None:
                return
            self._guarded(push_or_none, self._do_append)

    def _guarded(self, push: _Push, handle: Callable[[_Push], None]) -> None:
        """Handle one request, if its sender still leads; an error becomes the answer."""
        if not self._is_current(push.request):
            self._reply(push, DLedgerCode.EXPIRED_TERM)
            return
        failure_code = self._store.writer.failure_code
        if failure_code is not None and push.request.type in (PushType.APPEND, PushType.TRUNCATE):
            self._reply(push, failure_code)
            return
        try:
            handle(push)
        except DLedgerError as error:
            self._complaints.warn("push", f"refused {push.request.type.name} of {push.request.leader_id}: {error}")
            self._reply(push, error.code)
        except OSError as error:
            self._complaints.warn("disk", f"cannot handle {push.request.type.name}: {error}")
            self._reply(push, DLedgerCode.DISK_ERROR)

    def _next_write_request(self) -> _Push | None:
        """The request that continues the log; if there is none, one that repeats what the log holds."""
        if not self._write_requests:
            return None
        end_index = self._store.ledger_end_index
        push = self._take(end_index + 1)
        if push is None:
            behind = next((first for first in self._write_requests if first <= end_index), None)
            push = self._take(behind) if behind is not None else None
        return push

    def _take(self, first_index: int) -> _Push | None:
        push = self._write_requests.pop(first_index, None)
        if push is not None:
            self._waiting_bytes -= len(push.request.entries)
        return push

    def _do_append(self, push: _Push) -> None:
        """Append the entries, or those of them that the log does not hold yet."""
        request, new = push.request, push.batches
        end_index = self._store.ledger_end_index
        last_index, last_term = new[-1].last_index, new[-1].term
        is_held = push.first_index <= end_index
        if is_held:
            held = [entry for batch in new if batch.first_index <= end_index for entry in batch.entries()]
            held = [entry for entry in held if entry.index <= end_index]
            if any(self._store.get(entry.index) != entry for entry in held):
                self._reply(push, DLedgerCode.INCONSISTENT_STATE)
                return
            self.verify(request.term, held[-1].index)
            new = [batch.tail(max(batch.first_index, end_index + 1)) for batch in new if batch.last_index > end_index]
        if new:
            if is_held:
                may = self.verified_index(request.term) == end_index
            else:
                may = self.may_append(request, new[0].first_index)
            if not may:
                self._reply(push, DLedgerCode.INCONSISTENT_STATE)
                return
            self._store.append_as_follower(new)
            self.verify(request.term, last_index)
        self._acknowledge(push, last_index, last_term)
        self._store.update_committed_index(self.commit_bound(request))

    def _do_compare(self, push: _Push) -> None:
        """Answer whether the log holds exactly this entry."""
        entry = push.entry
        if not self.is_same(entry, self._store.get(entry.index)):
            self._reply(push, DLedgerCode.INCONSISTENT_STATE)
            return
        self.verify(push.request.term, entry.index)
        self._acknowledge(push, entry.index, entry.term)

    def is_same(self, entry: Entry, local: Entry | None) -> bool:
        """Equality of index, term and every other byte."""
        return entry == local

    def _do_truncate(self, push: _Push) -> None:
        """Make the log end with the leader's entry: keep the entry if it is the same, else write it again."""
        request, entry = push.request, push.entry
        before = self._store.get(entry.index - 1)
        done: asyncio.Future[None] | None = None
        if self._store.ledger_end_index < 0 and entry.index == 0:
            self._store.append_as_follower([batch_of(entry)])
        elif self.is_same(entry, self._store.get(entry.index)):
            if not self.may_truncate(request, entry.index) or self.is_needless(request, entry):
                self._refuse_truncate(push)
                return
            done = self._store.truncate(entry.index)
        elif before is not None and self._continues(before, entry):
            if not self.may_truncate(request, before.index):
                self._refuse_truncate(push)
                return
            done = self._store.truncate(before.index)
            self._store.append_as_follower([batch_of(entry)])
        elif self.verified_index(request.term) >= 0 and entry.index <= self._store.ledger_end_index + 1:
            self._refuse_truncate(push)
            return
        elif not self.may_begin_at(entry.index):
            self._complaints.warn("snapshot", f"the log is to begin at {entry.index}, no snapshot here goes so far")
            self._reply(push, DLedgerCode.INCONSISTENT_STATE)
            return
        else:
            logger.warning("beginning the log again at %d, where %s begins", entry.index, request.leader_id)
            done = self._store.reset(entry)
            if self._snapshots is not None:
                self._snapshots.adopt_members()
        self.verify(request.term, entry.index)
        self._store.update_committed_index(self.commit_bound(request))
        if done is None:
            self._acknowledge(push, entry.index, entry.term)
        else:
            done.add_done_callback(lambda _: self._acknowledge(push, entry.index, entry.term))

    def may_begin_at(self, index: int) -> bool:
        """Whether the log may begin again at `index`: a snapshot covers what comes before, or no state needs it."""
        return self._snapshots is None or self._snapshots.covers(index - 1)

    def _continues(self, before: Entry, entry: Entry) -> bool:
        try:
            return parse_entries(before.raw + entry.raw)[-1] == entry
        except BadEntry:
            return False

    def _refuse_truncate(self, push: _Push) -> None:
        entry, term = push.entry, push.request.term
        self._complaints.warn(
            "truncate",
            f"refusing to truncate to {entry.index} for {push.request.leader_id}: {self._store.committed_index} is"
            f" committed, {self.verified_index(term)} is known to be the leader's",
        )
        self._reply(push, DLedgerCode.INCONSISTENT_STATE)

    def _do_commit(self, push: _Push) -> None:
        """Adopt the leader's committed index. If this log was not compared in this term, refuse, so that it will be."""
        if self.verified_index(push.request.term) < 0:
            self._reply(push, DLedgerCode.INCONSISTENT_STATE)
            return
        self._store.update_committed_index(self.commit_bound(push.request))
        self._reply(push, DLedgerCode.SUCCESS, self._store.committed_index)

    def _check_abnormal(self) -> None:
        """Refuse the request with the smallest index that has waited too long for its predecessor (fast forward), and
        set a timer while others wait."""
        if not self._write_requests:
            return
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        timeout_s = self._config.timing.push_timeout_ms / 1000
        late = [index for index, push in self._write_requests.items() if push.arrived_s + timeout_s <= now_s]
        if late:
            push = self._take(min(late))
            if push is not None:
                self._complaints.warn(
                    "gap", f"entry {min(late)} was pushed, this log ends at {self._store.ledger_end_index}"
                )
                self._reply(push, DLedgerCode.INCONSISTENT_STATE)
        if self._write_requests and self._gap_timer is None:
            oldest_s = min(push.arrived_s for push in self._write_requests.values())
            self._gap_timer = loop.call_at(max(oldest_s + timeout_s, now_s + 0.001), self._look_again)

    def _look_again(self) -> None:
        self._gap_timer = None
        self._go_on()

    def _disarm(self) -> None:
        if self._gap_timer is not None:
            self._gap_timer.cancel()
            self._gap_timer = None

    # Answers

    def _is_current(self, request: PushEntryRequest) -> bool:
        """Whether the sender is the leader that this member follows."""
        state = self._state
        return state.is_follower and state.term == request.term and state.leader_id == request.leader_id

    def _has_right_shape(self, push: _Push) -> bool:
        batches = push.batches
        if push.request.type is PushType.APPEND:
            return bool(batches) and batches[-1].term <= push.request.term
        if push.request.type is PushType.COMMIT:
            return not batches
        return len(batches) == 1 and len(batches[0].ends) == 1

    def _acknowledge(self, push: _Push, index: int, term: int) -> None:
        """Send SUCCESS once the store's `acked_index` has reached entry `index` of `term`."""
        self._acks.append((index, term, push))
        if index <= self._store.acked_index or self._store.writer.failure is not None:
            self.progressed()

    def _fail_acks(self, code: DLedgerCode) -> None:
        while self._acks:
            self._reply(self._acks.popleft()[2], code)

    def _clear_write_requests(self, code: DLedgerCode) -> None:
        requests, self._write_requests = self._write_requests, {}
        self._waiting_bytes = 0
        for push in requests.values():
            self._reply(push, code)

    def _reply(self, push: _Push, code: DLedgerCode, index: int | None = None) -> None:
        if push.is_answered:
            return
        push.is_answered = True
        if index is None:
            index = push.batches[-1].last_index if push.batches else -1
        push.on_done(
            PushEntryResponse(
                group=push.request.group,
                remote_id=push.request.local_id,
                local_id=self._state.self_id,
                term=self._state.term,
                leader_id=self._state.leader_id or "",
                code=code,
                index=index,
                begin_index=self._store.ledger_begin_index,
                end_index=self._store.ledger_end_index,
            )
        )
