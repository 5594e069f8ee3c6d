"""Observes what simulated replicas do at the moment they do it, without affecting them.

A `ReplicaWatch` wraps a few methods of a broker that is about to start and reports what happens: to the
invariants, which check it, and to the triggers, which a schedule of faults may wait for. Nothing here awaits,
draws a random number or changes the state of the replica, so a run is the same with it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from node.broker.controller import BrokerController
from node.dledger import DLedgerServer
from node.dledger.entry import Entry
from node.dledger.quorum import AppendCallback, AppendResult
from node.dledger.rpc import DLedgerError, Role
from node.dledger.store import DLedgerStore

__all__ = ["ReplicaWatch"]

ELECTED, MATCHED, PROMOTED, RECOVERED = "elected", "matched", "promoted", "recovered"
STORING, TRUNCATING, VOTED, VOTING = "storing", "truncating", "voted", "voting"
"""What a schedule can wait for: see nemesis.triggers.KINDS."""


@dataclass(slots=True)
class Listeners:
    """The callbacks for each kind of event. `host` is the replica's."""

    occurrence: list[Callable[[str, str], None]]
    """(kind, host)"""
    starting: list[Callable[[str], None]]
    """(host): a new process there is about to open its log; the previous one is over"""
    recovered: list[Callable[[str, DLedgerServer], None]]
    role: list[Callable[[str, int, Role], None]]
    vote: list[Callable[[str, int, str], None]]
    """(host, term, candidate), once the vote counts"""
    committed: list[Callable[[str], None]]
    acknowledged: list[Callable[[str, int], None]]
    """(host, the last index up to which appends are acknowledged as committed)"""
    progressed: list[Callable[[str], None]]
    truncated: list[Callable[[str, int, int, asyncio.Future[None]], None]]
    """(host, last index that stays, or -1 if the log is reset, last index before, future done once that is on disk)"""


class ReplicaWatch:
    """Observes every replica of one simulation."""

    def __init__(self) -> None:
        self.tell = Listeners([], [], [], [], [], [], [], [], [])

    def watch_logs(self, on_change: Callable[[str, DLedgerStore], None]) -> None:
        """Have `on_change(host, store)` called whenever a log may have a new end or committed index."""
        stores: dict[str, DLedgerStore] = {}

        def recovered(host: str, ledger: DLedgerServer) -> None:
            stores[host] = ledger.store
            changed(host)

        def changed(host: str, *_: object) -> None:
            if host in stores:  # else its log is still being opened
                on_change(host, stores[host])

        self.tell.recovered.append(recovered)
        self.tell.committed.append(changed)
        self.tell.progressed.append(changed)
        self.tell.truncated.append(changed)

    def attach(self, host: str, broker: BrokerController) -> None:
        """Observe a broker that has not started yet. A broker without a DLedger log is ignored."""
        ledger = broker.ledger
        if not isinstance(ledger, DLedgerServer):
            return
        for listener in self.tell.starting:
            listener(host)
        replica = _Replica(self.tell, host, ledger)
        state, store, checker = ledger.member_state, ledger.store, ledger.pusher.checker
        state.add_role_listener(replica.role_changed)
        store.add_commit_listener(replica.committed)
        store.add_progress_listener(replica.progressed)
        for name in ("record_vote", "change_term"):
            _around(state, name, before=lambda: replica.occurred(VOTING), after=replica.voted)
        _around(store, "open", after=replica.recovered)
        _around(store._files, "begin_write", before=lambda: replica.occurred(STORING), after=None)
        _around(broker.store, "promote", after=lambda: replica.occurred(PROMOTED))
        _inside(ledger.pusher.handler, "is_same", replica.compares)
        setattr(checker, "register", replica.registers)  # noqa: B010 - an attribute replaces a method
        setattr(checker, "register_batch", replica.registers_batch)  # noqa: B010
        _inside(store, "truncate", replica.truncates)
        _inside(store, "reset", replica.resets)


class _Replica:
    """Reports what one replica does to the listeners."""

    def __init__(self, tell: Listeners, host: str, ledger: DLedgerServer) -> None:
        self._tell, self._host, self._ledger = tell, host, ledger
        self._register, self._register_batch = ledger.pusher.checker.register, ledger.pusher.checker.register_batch

    def occurred(self, kind: str) -> None:
        for listener in self._tell.occurrence:
            listener(kind, self._host)

    def role_changed(self, term: int, role: Role) -> None:
        for listener in self._tell.role:
            listener(self._host, term, role)
        if role is Role.LEADER:
            self.occurred(ELECTED)

    def committed(self) -> None:
        for listener in self._tell.committed:
            listener(self._host)

    def progressed(self) -> None:
        for listener in self._tell.progressed:
            listener(self._host)

    def recovered(self) -> None:
        for listener in self._tell.recovered:
            listener(self._host, self._ledger)
        self.occurred(RECOVERED)

    def voted(self) -> None:
        state = self._ledger.member_state
        if state.voted_for is not None:
            for listener in self._tell.vote:
                listener(self._host, state.term, state.voted_for)
            self.occurred(VOTED)

    def truncates(self, cut: Callable[[], asyncio.Future[None]], *, is_reset: bool = False) -> asyncio.Future[None]:
        store = self._ledger.store
        before = store.ledger_end_index
        self.occurred(TRUNCATING)
        done = cut()
        for listener in self._tell.truncated:
            listener(self._host, -1 if is_reset else min(before, store.ledger_end_index), before, done)
        return done

    def resets(self, cut: Callable[[], asyncio.Future[None]]) -> asyncio.Future[None]:
        return self.truncates(cut, is_reset=True)

    def compares(self, same: Callable[[], bool]) -> bool:
        is_same = same()
        if is_same:
            self.occurred(MATCHED)
        return is_same

    def registers(self, entry: Entry) -> asyncio.Future[AppendResult]:
        future = self._register(entry)
        if future.done() and not future.cancelled() and future.exception() is None:
            self._acknowledges(future.result().index)
        return future

    def registers_batch(self, last: AppendResult, entries: int, on_done: AppendCallback) -> None:
        def heard(outcome: AppendResult | DLedgerError) -> None:
            if isinstance(outcome, AppendResult):
                self._acknowledges(outcome.index)
            on_done(outcome)

        self._register_batch(last, entries, heard)

    def _acknowledges(self, index: int) -> None:
        for listener in self._tell.acknowledged:
            listener(self._host, index)


def _nothing() -> None:
    return None


def _around(
    part: object, name: str, *, before: Callable[[], None] = _nothing, after: Callable[[], None] | None = _nothing
) -> None:
    """Call `before` and `after` around one method of one object; `after` only when it did not raise."""
    original = getattr(part, name)
    if after is None:

        def announced(*arguments: Any, **options: Any) -> Any:
            before()
            return original(*arguments, **options)

        setattr(part, name, announced)
        return
    if inspect.iscoroutinefunction(original):

        async def watched(*arguments: Any, **options: Any) -> Any:
            before()
            result = await original(*arguments, **options)
            after()
            return result

        setattr(part, name, watched)
        return

    def watched_now(*arguments: Any, **options: Any) -> Any:
        before()
        result = original(*arguments, **options)
        after()
        return result

    setattr(part, name, watched_now)


def _inside(part: object, name: str, wrapper: Callable[[Callable[[], Any]], Any]) -> None:
    """Have `wrapper` make the calls of one method of one object."""
    original = getattr(part, name)

    def watched(*arguments: Any, **options: Any) -> Any:
        return wrapper(lambda: original(*arguments, **options))

    setattr(part, name, watched)
