"""Writes down what a member does to its group's state, one JSON object a line, for a model to judge afterwards.

`checker.trace.models.raft` lists the events. A line is written at the moment of its event, before anybody else can
notice its effect: an entry before it is on the disk, a vote or an acknowledgement before it is sent. So a member that
is killed leaves no effect without its line, except a term or vote that became durable in its last moment; its next
start tells that one.

The parts of a member are observed from outside, by wrapping a few of their methods and by listening to them. They
know nothing of it, so a member that writes no trace does nothing for it; and a mutant, which replaces methods of the
same parts, is observed like the original.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from node.dledger.entry import CHAIN, HEAD, Entry
from node.dledger.entry_batch import EntryBatch
from node.dledger.handler import EntryHandler
from node.dledger.membership import decode_members
from node.dledger.messages import PushEntryResponse, VoteRequest, VoteResponse
from node.dledger.quorum import AppendCallback, AppendResult
from node.dledger.rpc import DLedgerCode, DLedgerError, PushType, VoteResult
from node.dledger.server import DLedgerServer
from node.dledger.snapshot import Snapshot
from node.runtime import LineFile

__all__ = ["INCOMPLETE", "MAX_TRACE_BYTES", "MemberTrace", "trace_member"]

logger = logging.getLogger("node.dledger.trace")

MAX_TRACE_BYTES = 60 << 20
"""Size at which a trace ends: some half a million events, which is what can be judged at once."""

INCOMPLETE = "the trace is incomplete"
"""Begins the line in the member's log that tells so."""


def trace_member(ledger: DLedgerServer, lines: LineFile) -> MemberTrace:
    """Write what `ledger`, which has not started, does from now on to `lines`."""
    trace = MemberTrace(ledger, lines)
    _observe_elections(ledger, trace)
    _observe_log(ledger, trace)
    _observe_quorum(ledger, trace)
    _around(ledger.remoting, "start", before=trace.started)
    _around(ledger, "stop", after=trace.ended)
    return trace


class MemberTrace:
    """One process's lines. `seq` counts them from 0, so that a missing one is noticed."""

    def __init__(self, ledger: DLedgerServer, lines: LineFile) -> None:
        self._ledger = ledger
        self._lines = lines
        self._seq = 0
        self._term_and_vote: tuple[int, str | None] = (-1, None)
        self._synced = -1
        self._has_ended = False
        self._has_complained = False

    def write(self, event: str, **fields: Any) -> None:
        """Write one event. A line that cannot be written leaves a gap in `seq`, and a complaint in the log."""
        if self._has_ended:
            return
        if self._lines.size_bytes() > MAX_TRACE_BYTES:
            self._has_ended = True
            event, fields = "full", {}
        state = self._ledger.member_state
        values = {
            "node": state.self_id, "seq": self._seq, "time": round(asyncio.get_running_loop().time(), 6), "event": event
        }  # fmt: skip
        self._seq += 1
        try:
            self._lines.append(json.dumps(values | fields, separators=(",", ":")))
        except OSError as error:
            if not self._has_complained:
                self._has_complained = True
                logger.error("%s: %s", INCOMPLETE, error.strerror or error)

    def started(self) -> None:
        """The member has recovered and is about to listen."""
        state, store, config = self._ledger.member_state, self._ledger.store, self._ledger.config
        self._term_and_vote = state.term, state.voted_for
        self._synced = store.ledger_end_index
        self.write(
            "start",
            term=state.term,
            vote=state.voted_for,
            first=store.ledger_begin_index,
            last=store.ledger_end_index,
            last_term=store.ledger_end_term,
            last_crc=store.end_chain_crc,
            commit=store.committed_index,
            **self._group(),
            sync=config.flush_mode == "sync",
            may_change=config.members_may_change,
        )

    def _group(self) -> Mapping[str, Any]:
        members = self._ledger.member_state.members
        return {"group": list(members.ids), "group_index": members.index}

    def leads(self) -> None:
        """The member leads, and has not appended anything yet."""
        self.write("lead", term=self._ledger.member_state.term, **self._group())

    def ended(self) -> None:
        """The member has stopped."""
        self._has_ended = True
        self._lines.close()

    def vote_is_durable(self) -> None:
        """Term and vote are what they are, durably."""
        state = self._ledger.member_state
        now = state.term, state.voted_for
        if now != self._term_and_vote:
            self._term_and_vote = now
            self.write("vote", term=now[0], **{"for": now[1]})

    def appended(self, batches: Sequence[EntryBatch]) -> None:
        """Entries are in the log in memory; the disk gets them later."""
        for batch in batches:
            entries = batch.entries()
            runs: list[list[Entry]] = []
            for entry in entries:
                if not runs or runs[-1][0].term != entry.term:
                    runs.append([])
                runs[-1].append(entry)
            for run in runs:
                groups = {each.index: sorted(decode_members(each)) for each in run if each in batch.changes}
                extra: Mapping[str, Any] = {"groups": groups} if groups else {}
                self.write(
                    "append", first=run[0].index, term=run[0].term, crcs=[_chain_crc(each) for each in run], **extra
                )

    def removes(self, cut: Callable[[], asyncio.Future[None]]) -> asyncio.Future[None]:
        """A truncation: what follows the log's new end is gone from memory, and in a while from the disk."""
        store = self._ledger.store
        before = store.ledger_end_index
        done = cut()
        if store.ledger_end_index < before:
            self._synced = min(self._synced, store.ledger_end_index)
            self.write("truncate", last=store.ledger_end_index)
            done.add_done_callback(self._is_cut)
        return done

    def begins_again(self, reset: Callable[[], asyncio.Future[None]]) -> asyncio.Future[None]:
        """A reset: the log holds one entry, the leader's first one, instead of its former ones."""
        store = self._ledger.store
        done = reset()
        self._synced = store.ledger_end_index - 1
        self.write("reset", first=store.ledger_end_index)
        entry = store.get(store.ledger_end_index)
        if entry is not None:
            self.write("append", first=entry.index, term=entry.term, crcs=[entry.chain_crc])
        done.add_done_callback(self._is_cut)
        return done

    def _is_cut(self, done: asyncio.Future[None]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.write("cut")

    def note_synced(self) -> None:
        """Write how far the log is stored as its acknowledgements demand, if that has changed."""
        store = self._ledger.store
        is_sync = self._ledger.config.flush_mode == "sync"
        last = min(store.durable_index if is_sync else store.written_index, store.ledger_end_index)
        if last != self._synced:
            self._synced = last
            self.write("sync", last=last)

    def committed(self) -> None:
        """The committed index has advanced."""
        self.note_synced()
        self.write("commit", last=self._ledger.store.committed_index)

    def answers(self, type_: PushType, index: int) -> None:
        """An acknowledgement is about to be sent to the leader."""
        if type_ is not PushType.COMMIT:
            self.note_synced()
            self.write("ack", term=self._ledger.member_state.term, last=index)

    def hears(self, term: int, member: str, index: int) -> None:
        """A member's acknowledgement has come, and is about to be counted."""
        state = self._ledger.member_state
        if state.is_leader and state.term == term and index > self._ledger.pusher.checker.watermark(term, member):
            self.write("acked", by=member, last=index)


def _observe_elections(ledger: DLedgerServer, trace: MemberTrace) -> None:
    state, elector = ledger.member_state, ledger.elector
    for name in ("record_vote", "change_term"):
        _around(state, name, after=trace.vote_is_durable)
    _around(state, "become_leader", after=trace.leads)
    _around(state, "become_follower", after=lambda: trace.write("follow", term=state.term, leader=state.leader_id))
    _around(state, "become_candidate", after=lambda: trace.write("candidate", term=state.term))
    _around(elector, "_collect_votes", before=lambda: trace.write("stand", term=state.term))
    ask: Any = ledger.peers.vote

    async def vote(peer: str, request: VoteRequest) -> VoteResponse:
        answer: VoteResponse = await ask(peer, request)
        if answer.vote_result is VoteResult.ACCEPT:
            trace.write("granted", term=request.term, by=peer)
        return answer

    setattr(ledger.peers, "vote", vote)  # noqa: B010 - an attribute replaces a method


def _observe_log(ledger: DLedgerServer, trace: MemberTrace) -> None:
    store, snapshots = ledger.store, ledger.snapshots
    lead, follow, truncate, reset = (
        store.append_batch_as_leader, store.append_as_follower, store.truncate, store.reset
    )  # fmt: skip

    def append_batch_as_leader(*arguments: Any, **options: Any) -> list[EntryBatch]:
        batches = lead(*arguments, **options)
        trace.appended(batches)
        return batches

    def append_as_follower(batches: Sequence[EntryBatch]) -> None:
        follow(batches)
        trace.appended(batches)

    keep = snapshots._keep

    async def keep_snapshot(snapshot: Snapshot, data: bytes) -> None:
        await keep(snapshot, data)
        trace.write("snapshot", index=snapshot.index, last_term=snapshot.term)

    replaced: dict[str, Callable[..., Any]] = {
        "append_batch_as_leader": append_batch_as_leader,
        "append_as_follower": append_as_follower,
        "truncate": lambda index: trace.removes(lambda: truncate(index)),
        "reset": lambda first: trace.begins_again(lambda: reset(first)),
    }
    for name, method in replaced.items():
        setattr(store, name, method)
    store.add_commit_listener(trace.committed, is_first=True)
    setattr(snapshots, "_keep", keep_snapshot)  # noqa: B010


def _observe_quorum(ledger: DLedgerServer, trace: MemberTrace) -> None:
    checker, handler = ledger.pusher.checker, ledger.pusher.handler
    _before(checker, "set_watermark", trace.hears)
    _before(checker, "update_watermark", trace.hears)
    _observe_answers(handler, trace)
    register, register_batch = checker.register, checker.register_batch

    def registered(entry: Entry) -> asyncio.Future[AppendResult]:
        future = register(entry)
        if future.done() and not future.cancelled() and future.exception() is None:
            trace.write("answer", last=future.result().index)
        return future

    def batch_registered(last: AppendResult, entries: int, on_done: AppendCallback) -> None:
        def heard(outcome: AppendResult | DLedgerError) -> None:
            if isinstance(outcome, AppendResult):
                trace.write("answer", last=outcome.index)
            on_done(outcome)

        register_batch(last, entries, heard)

    setattr(checker, "register", registered)  # noqa: B010
    setattr(checker, "register_batch", batch_registered)  # noqa: B010


def _observe_answers(handler: EntryHandler, trace: MemberTrace) -> None:
    """Each push is answered by calling what came with it; it is wrapped as the push comes in."""
    handle = handler.handle_push

    def handle_push(request: Any, on_done: Callable[[PushEntryResponse], object]) -> None:
        def answered(answer: PushEntryResponse) -> None:
            if answer.code is DLedgerCode.SUCCESS:
                trace.answers(request.type, answer.index)
            on_done(answer)

        handle(request, answered)

    setattr(handler, "handle_push", handle_push)  # noqa: B010


def _chain_crc(entry: Entry) -> int:
    """The chain CRC in the entry's bytes, which a parser that checks nothing may not have."""
    (crc,) = CHAIN.unpack_from(entry.raw, HEAD.size)
    return int(crc)


def _nothing() -> None:
    return None


def _around(
    part: object, name: str, *, before: Callable[[], None] = _nothing, after: Callable[[], None] = _nothing
) -> None:
    """Call `before` and `after` around one method of one object; `after` only if it did not raise."""
    original = getattr(part, name)

    async def awaited(*arguments: Any, **options: Any) -> Any:
        before()
        result = await original(*arguments, **options)
        after()
        return result

    def called(*arguments: Any, **options: Any) -> Any:
        before()
        result = original(*arguments, **options)
        after()
        return result

    setattr(part, name, awaited if inspect.iscoroutinefunction(original) else called)


def _before(part: object, name: str, listener: Callable[..., None]) -> None:
    """Call `listener` with the arguments of one method of one object, before it is called."""
    original = getattr(part, name)

    def called(*arguments: Any) -> Any:
        listener(*arguments)
        return original(*arguments)

    setattr(part, name, called)
