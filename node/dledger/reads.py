"""Makes a read safe: the index up to which a member must apply the log so that it lacks no acknowledged write.

`read_barrier` returns this index. A reader that has applied the log up to there sees every write that was
acknowledged before it asked (linearizable), unless the mode is UNSAFE:

    READ_INDEX  the leader notes its committed index and has a quorum confirm that it leads (Raft 6.4)
    LEASE       the same without asking, while a quorum is bound to it by a lease, with a margin for clock drift
    LOG         the leader commits an empty entry first
    UNSAFE      this member's committed index, at once; from any member, however stale

A leader may use its committed index only once an entry of its own term is committed: before that, it may not know
what its predecessor had committed. DLedger offers only the last two (R).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from node.dledger.config import DLedgerConfig
from node.dledger.elector import LeaderElector
from node.dledger.leadership import ConfirmationCallback, Leadership, settle
from node.dledger.member_state import MemberState
from node.dledger.pusher import DLedgerEntryPusher
from node.dledger.quorum import AppendResult
from node.dledger.rpc import DLedgerCode, DLedgerError, ReadMode
from node.dledger.store import DLedgerStore

__all__ = ["IndexCallback", "ReadBarrier"]

IndexCallback = Callable[[int | DLedgerError], object]
"""Called once, with the index of a barrier or the reason why there is none. Must not raise."""


class ReadBarrier:
    """Determines how far the log must be applied before a read may be served."""

    def __init__(
        self,
        config: DLedgerConfig,
        state: MemberState,
        store: DLedgerStore,
        elector: LeaderElector,
        pusher: DLedgerEntryPusher,
    ) -> None:
        self._timeout_s = config.timing.barrier_timeout_ms / 1000
        self._state = state
        self._store = store
        self._elector = elector
        self._pusher = pusher
        self._own_commit: asyncio.Future[None] | None = None
        self._next_noop: asyncio.Future[AppendResult] | None = None
        store.add_commit_listener(self._committed)
        state.add_role_listener(lambda term, role: self._role_changed())

    async def barrier(self, mode: ReadMode) -> int:
        """The index; see the module. Raises DLedgerError NOT_LEADER, TIMEOUT, or what an append raises."""
        if mode is ReadMode.UNSAFE:
            return self._store.committed_index
        leadership = self.require_leadership()
        if mode is ReadMode.LOG or not self.has_committed_in_term(leadership.term):
            try:
                async with asyncio.timeout(self._timeout_s):
                    if mode is ReadMode.LOG:
                        return (await self._commit_noop()).index
                    await self._wait_for_own_commit()
            except TimeoutError:
                raise DLedgerError(
                    DLedgerCode.TIMEOUT, f"no quorum has confirmed the leader within {self._timeout_s:g} s"
                ) from None
        index = self._store.committed_index
        if mode is ReadMode.READ_INDEX or not leadership.holds_lease():
            confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.confirm_leadership(leadership, partial(settle, confirmed))
            await confirmed
        if self._elector.leadership is not leadership:
            raise self._not_leader()
        return index

    def ask(self, mode: ReadMode, on_done: IndexCallback) -> bool:
        """As `barrier` without a task, if the read waits for no more than a quorum: `on_done` is called once, maybe
        before this returns. Returns False, and calls nothing, if it may have to wait for more. Raises as `barrier`."""
        if mode is ReadMode.UNSAFE:
            on_done(self._store.committed_index)
            return True
        leadership = self.require_leadership()
        if mode is ReadMode.LOG or not self.has_committed_in_term(leadership.term):
            return False
        index = self._store.committed_index
        if mode is ReadMode.LEASE and leadership.holds_lease():
            on_done(index)
        else:
            self.confirm_leadership(leadership, partial(self._confirmed, leadership, index, on_done))
        return True

    def _confirmed(
        self, leadership: Leadership, index: int, on_done: IndexCallback, error: DLedgerError | None
    ) -> None:
        if error is None and self._elector.leadership is not leadership:
            error = self._not_leader()
        on_done(index if error is None else error)

    def require_leadership(self) -> Leadership:
        """The current leadership. Raises DLedgerError NOT_LEADER."""
        leadership = self._elector.leadership
        if leadership is None or not self._state.is_leader:
            raise self._not_leader()
        return leadership

    def has_committed_in_term(self, term: int) -> bool:
        """Whether the last committed entry is of `term`."""
        return self._store.term_at(self._store.committed_index) == term

    def confirm_leadership(self, leadership: Leadership, on_done: ConfirmationCallback) -> None:
        """Call `on_done` when a quorum has answered heartbeats sent from now on; see Leadership.confirm_then."""
        leadership.confirm_then(on_done)

    def _not_leader(self) -> DLedgerError:
        return DLedgerError(
            DLedgerCode.NOT_LEADER, f"{self._state.self_id} does not lead", leader_id=self._state.leader_id
        )

    async def _wait_for_own_commit(self) -> None:
        if self._own_commit is None:
            self._own_commit = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._own_commit)

    def _committed(self) -> None:
        waiting = self._own_commit
        if waiting is not None and self.has_committed_in_term(self._state.term):
            self._own_commit = None
            if not waiting.done():
                waiting.set_result(None)

    def _role_changed(self) -> None:
        waiting, self._own_commit = self._own_commit, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(self._not_leader())
            waiting.exception()  # whoever has waited may have given up

    async def _commit_noop(self) -> AppendResult:
        """Commit an empty entry that is appended after this call; calls in one turn of the event loop share it."""
        if self._next_noop is None:
            self._next_noop = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(self._append_noop, self._next_noop)
        return await asyncio.shield(self._next_noop)

    def _append_noop(self, waiting: asyncio.Future[AppendResult]) -> None:
        self._next_noop = None

        def pass_on(committed: asyncio.Future[AppendResult]) -> None:
            error = committed.exception()
            if error is None:
                waiting.set_result(committed.result())
            else:
                waiting.set_exception(error)
                waiting.exception()

        try:
            self._pusher.append_noop_and_wait().add_done_callback(pass_on)
        except DLedgerError as error:
            waiting.set_exception(error)
            waiting.exception()
