"""Mutants of replication, commitment and storage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import FunctionType
from typing import Any

from node.dledger import DLedgerServer
from node.dledger.comparison import Comparison, Decision
from node.dledger.dispatcher import EntryDispatcher
from node.dledger.entry import HEADER_SIZE_BYTES, BadEntry, Entry
from node.dledger.entry_batch import EntryBatch
from node.dledger.files import LedgerFiles
from node.dledger.handler import EntryHandler
from node.dledger.index import pack_unit
from node.dledger.messages import PushEntryRequest, PushEntryResponse
from node.dledger.quorum import AppendCallback, AppendResult, QuorumAckChecker
from node.dledger.rpc import DLedgerCode, PushType
from node.dledger.store import DLedgerStore
from node.mutants.parts import copy_of, replace

__all__ = [
    "accept_gap",
    "ack_before_fsync",
    "ack_before_quorum",
    "checksum_ignored",
    "commit_beyond_end",
    "commit_old_terms",
    "compare_index_only",
    "late_truncate",
    "quorum_off_by_one",
    "truncate_committed",
    "truncate_not_persisted",
    "verified_forever",
    "watermark_outlives_term",
]


def commit_old_terms(ledger: DLedgerServer) -> None:
    def may_commit(self: QuorumAckChecker, index: int) -> bool:
        return True

    replace(ledger.pusher.checker, may_commit=may_commit)


def ack_before_quorum(ledger: DLedgerServer) -> None:
    def register(self: QuorumAckChecker, entry: Entry) -> asyncio.Future[AppendResult]:
        future: asyncio.Future[AppendResult] = asyncio.get_running_loop().create_future()
        future.set_result(AppendResult(entry.index, entry.pos, entry.term))
        return future

    def register_batch(self: QuorumAckChecker, last: AppendResult, entries: int, on_done: AppendCallback) -> None:
        on_done(last)

    replace(ledger.pusher.checker, register=register, register_batch=register_batch)


def ack_before_fsync(ledger: DLedgerServer) -> None:
    def acked_index(self: DLedgerStore) -> int:
        return self.written_index

    replace(ledger.store, acked_index=property(acked_index))
    ledger.store.writer._sync_each_group = False


def quorum_off_by_one(ledger: DLedgerServer) -> None:
    def quorum_index(self: QuorumAckChecker) -> int:
        marks = sorted(self.watermarks().values(), reverse=True)
        return marks[max(self._config.quorum_size - 2, 0)] if marks else -1

    replace(ledger.pusher.checker, quorum_index=quorum_index)


def commit_beyond_end(ledger: DLedgerServer) -> None:
    def update_committed_index(self: DLedgerStore, index: int) -> bool:
        if index <= self.ledger_end_index:
            return DLedgerStore.update_committed_index(self, index)
        if index <= self.committed_index:
            return False
        self.committed_index, self._committed_pos = index, self._end_pos
        self._checkpoints.changed()
        self._tell(self._commit_listeners)
        return True

    def commit_bound(self: EntryHandler, request: PushEntryRequest) -> int:
        return request.commit_index

    replace(ledger.store, update_committed_index=update_committed_index)
    replace(ledger.pusher.handler, commit_bound=commit_bound)


class _HastyComparison(Comparison):
    """Truncates where it first finds agreement, even if more than that agrees."""

    def decide(self, index: int, *, is_same: bool, follower_begin: int, follower_end: int) -> Decision:
        if is_same and index < follower_end:
            return Decision(PushType.TRUNCATE, index)
        return super().decide(index, is_same=is_same, follower_begin=follower_begin, follower_end=follower_end)


def truncate_committed(ledger: DLedgerServer) -> None:
    def may_truncate_to(self: DLedgerStore, index: int) -> bool:
        return True

    def may_truncate(self: EntryHandler, request: PushEntryRequest, index: int) -> bool:
        return True

    def is_needless(self: EntryHandler, request: PushEntryRequest, entry: Entry) -> bool:
        return False

    def new_comparison(self: EntryDispatcher, begin: int, end: int) -> Comparison:
        return _HastyComparison(begin=begin, end=end)

    replace(ledger.store, may_truncate_to=may_truncate_to)
    replace(ledger.pusher.handler, may_truncate=may_truncate, is_needless=is_needless)
    for dispatcher in ledger.pusher.dispatchers.values():
        replace(dispatcher, new_comparison=new_comparison)


def truncate_not_persisted(ledger: DLedgerServer) -> None:
    async def cut(self: LedgerFiles, position: int, end_index: int) -> None:
        data = self.data
        if data._bases and data._base_of(position) == data._bases[-1]:
            data._end = position  # the file keeps what follows
        else:
            await data.truncate(position)

    replace(ledger.store._files, cut=cut)


def compare_index_only(ledger: DLedgerServer) -> None:
    def is_same(self: EntryHandler, entry: Entry, local: Entry | None) -> bool:
        return local is not None and local.index == entry.index

    replace(ledger.pusher.handler, is_same=is_same)


def accept_gap(ledger: DLedgerServer) -> None:
    def handle_push(
        self: EntryHandler, request: PushEntryRequest, on_done: Callable[[PushEntryResponse], object]
    ) -> None:
        EntryHandler.handle_push(self, request, on_done)
        push = next((each for each in self._write_requests.values() if each.on_done is on_done), None)
        if push is not None and push.first_index > self._store.ledger_end_index + 1:
            self._reply(push, DLedgerCode.SUCCESS)

    replace(ledger.pusher.handler, handle_push=handle_push)


def late_truncate(ledger: DLedgerServer) -> None:
    def may_truncate(self: EntryHandler, request: PushEntryRequest, index: int) -> bool:
        return self._store.may_truncate_to(index)

    def is_needless(self: EntryHandler, request: PushEntryRequest, entry: Entry) -> bool:
        return False

    replace(ledger.pusher.handler, may_truncate=may_truncate, is_needless=is_needless)


def verified_forever(ledger: DLedgerServer) -> None:
    def verified_index(self: EntryHandler, term: int) -> int:
        return min(self._verified_index, self._store.ledger_end_index)

    replace(ledger.pusher.handler, verified_index=verified_index)


def watermark_outlives_term(ledger: DLedgerServer) -> None:
    known: dict[str, int] = {}

    def begin_term(self: QuorumAckChecker, term: int) -> None:
        QuorumAckChecker.begin_term(self, term)
        marks = self._watermarks_by_term[term]
        marks.update({member: index for member, index in known.items() if member in marks})

    def end_term(self: QuorumAckChecker) -> None:
        known.update(self._watermarks_by_term.get(self._term, {}))
        QuorumAckChecker.end_term(self)

    replace(ledger.pusher.checker, begin_term=begin_term, end_term=end_term)


def checksum_ignored(ledger: DLedgerServer) -> None:
    """This member's recovery runs from a copy of its module in which parsing verifies nothing."""
    lenient = copy_of("node.dledger.recovery")
    lenient.__dict__["parse_entry"] = _parse_unverified
    unverified = {
        "recover": lenient.__dict__["recover"], "parse_entry": _parse_unverified, "scan_batch": _scan_unverified
    }  # fmt: skip
    store_globals = {**DLedgerStore.open.__globals__, **unverified}

    def with_globals(function: Any) -> FunctionType:
        return FunctionType(function.__code__, store_globals, function.__name__, function.__defaults__)

    replace(ledger.store, **{name: with_globals(vars(DLedgerStore)[name]) for name in ("open", "_read", "_read_batch")})


def _parse_unverified(data: bytes, offset: int = 0, previous_chain_crc: int | None = None) -> Entry:
    if len(data) - offset < HEADER_SIZE_BYTES:
        raise BadEntry("no header")
    header = data[offset : offset + HEADER_SIZE_BYTES]
    magic, size_bytes = (int.from_bytes(header[at : at + 4], "big", signed=True) for at in (0, 4))
    index, term, pos = (int.from_bytes(header[at : at + 8], "big", signed=True) for at in (8, 16, 24))
    chain_crc = int.from_bytes(header[36:40], "big")
    if magic not in (1, 2, 3) or not HEADER_SIZE_BYTES <= size_bytes <= len(data) - offset:
        raise BadEntry("no entry")
    return Entry(index, term, pos, magic, chain_crc, data[offset : offset + size_bytes])


def _scan_unverified(
    data: bytes, offset: int = 0, previous_chain_crc: int | None = None, *, most: int
) -> tuple[EntryBatch | None, str]:
    entries: list[Entry] = []
    problem = ""
    while offset < len(data) and len(entries) < most and not problem:
        try:
            entries.append(_parse_unverified(data, offset))
            offset += entries[-1].size_bytes
        except BadEntry as error:
            problem = str(error)
    if not entries:
        return None, problem
    first, last = entries[0], entries[-1]
    ends = [entry.end_pos - first.pos for entry in entries]
    units = b"".join(map(pack_unit, entries))
    return EntryBatch(first.index, first.pos, data[:offset], ends, units, last.term, last.chain_crc), problem
