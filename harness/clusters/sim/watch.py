"""Seeing what simulated replicas do at the moment they do it, without a part in it.

A `ReplicaWatch` puts itself around a few methods of a broker that is about to start and passes on what happens:
to the invariants, which judge it, and to the moments, which a schedule of faults may wait for. Nothing here
awaits, draws a random number or changes anything of the replica, so a run is the same with it.
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

__all__ = ["ReplicaWatch"]

ELECTED, MATCHED, PROMOTED, RECOVERED = "elected", "matched", "promoted", "recovered"
STORING, TRUNCATING, VOTED, VOTING = "storing", "truncating", "voted", "voting"
"""What a schedule can wait for: see nemesis.moments.KINDS."""


@dataclass(slots=True)
class Listeners:
    """Who hears of what. `host` is the replica's."""

    moment: list[Callable[[str, str], None]]
    """(kind, host)"""
    recovered: list[Callable[[str, DLedgerServer], None]]
    role: list[Callable[[str, int, Role], None]]
    vote: list[Callable[[str, int, str], None]]
    """(host, term, candidate), once the vote counts"""
    committed: list[Callable[[str], None]]
    acknowledged: list[Callable[[str, int], None]]
    """(host, the last index up to which whoever appended is told that it is committed)"""
    progressed: list[Callable[[str], None]]
    truncated: list[Callable[[str, int, int, asyncio.Future[None]], None]]
    """(host, last index that stays, last index before, done when that is on the disk)"""


class ReplicaWatch:
    """Hears of every replica of one simulation."""

    def __init__(self) -> None:
        self.tell = Listeners([], [], [], [], [], [], [], [])

    def attach(self, host: str, broker: BrokerController) -> None:
        """Hear of a broker that has not started yet. One without DLedger's log is left alone."""
        ledger = broker.ledger
        if not isinstance(ledger, DLedgerServer):
            return
        tell, state, store, checker = self.tell, ledger.member_state, ledger.store, ledger.pusher.checker

        def moment(kind: str) -> None:
            for listener in tell.moment:
                listener(kind, host)

        def role_changed(term: int, role: Role) -> None:
            for listener in tell.role:
                listener(host, term, role)
            if role is Role.LEADER:
                moment(ELECTED)

        def committed() -> None:
            for listener in tell.committed:
                listener(host)

        def progressed() -> None:
            for listener in tell.progressed:
                listener(host)

        def recovered() -> None:
            for listener in tell.recovered:
                listener(host, ledger)
            moment(RECOVERED)

        def voted() -> None:
            candidate = state.voted_for
            if candidate is not None:
                for listener in tell.vote:
                    listener(host, state.term, candidate)
                moment(VOTED)

        def truncates(cut: Callable[[], asyncio.Future[None]]) -> asyncio.Future[None]:
            before = store.ledger_end_index
            moment(TRUNCATING)
            done = cut()
            for listener in tell.truncated:
                listener(host, min(before, store.ledger_end_index), before, done)
            return done

        def acknowledges(index: int) -> None:
            for listener in tell.acknowledged:
                listener(host, index)

        register, register_batch = checker.register, checker.register_batch

        def registers(entry: Entry) -> asyncio.Future[AppendResult]:
            future = register(entry)
            if future.done() and not future.cancelled() and future.exception() is None:
                acknowledges(future.result().index)
            return future

        def registers_row(last: AppendResult, entries: int, then: AppendCallback) -> None:
            def heard(outcome: AppendResult | DLedgerError) -> None:
                if isinstance(outcome, AppendResult):
                    acknowledges(outcome.index)
                then(outcome)

            register_batch(last, entries, heard)

        def compares(same: Callable[[], bool]) -> bool:
            is_same = same()
            if is_same:
                moment(MATCHED)
            return is_same

        state.add_role_listener(role_changed)
        store.add_commit_listener(committed)
        store.add_progress_listener(progressed)
        for name in ("record_vote", "change_term"):
            _around(state, name, before=lambda: moment(VOTING), after=voted)
        _around(store, "open", after=recovered)
        _around(store._files, "begin_write", before=lambda: moment(STORING), after=None)
        _around(broker.store, "promote", after=lambda: moment(PROMOTED))
        _inside(ledger.pusher.handler, "is_same", compares)
        setattr(checker, "register", registers)  # noqa: B010 - an attribute in the place of a method
        setattr(checker, "register_batch", registers_row)  # noqa: B010
        for name in ("truncate", "reset"):
            _inside(store, name, truncates)


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
    """Let `wrapper` make the call of one method of one object."""
    original = getattr(part, name)

    def watched(*arguments: Any, **options: Any) -> Any:
        return wrapper(lambda: original(*arguments, **options))

    setattr(part, name, watched)
