"""Makes reads current: the barrier of the configured read mode, then dispatch up to its index.

    read_index   a majority confirms after the read arrived that this node still leads (Raft, section 6.4)
    lease        the leader trusts the answers of the last heartbeats for a bounded time
    log          the read waits for an entry of its own to be committed
    unsafe       whatever this node has, also on a follower: stale reads are possible

After the barrier the read waits until the entries that it must not miss are dispatched, and then answers in one
synchronous step, so that messages and bounds are of the same moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from node.broker.classic import ClassicLedger
from node.broker.dispatcher import Dispatcher, DispatchFailed
from node.broker.ledger import DLedgerCode, DLedgerError, Ledger, ReadMode
from node.remoting import RequestError, ResponseCode

__all__ = ["ReadGate"]

DISPATCH_TIMEOUT_S = 5.0
"""Longest wait for dispatch to catch up. After a start it may have far to go; clients should rather ask again."""


class ReadGate:
    """Lets reads through once they may be answered. `not_leader_remark` names whom to ask instead."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        dispatcher: Dispatcher,
        mode: ReadMode,
        not_leader_remark: Callable[[], str],
    ) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._mode = mode
        self._not_leader_remark = not_leader_remark

    @property
    def needs_leader(self) -> bool:
        """Whether only the leader may answer reads."""
        return self._mode is not ReadMode.UNSAFE

    @property
    def leads(self) -> bool:
        """Whether this node believes it is the leader."""
        return self._ledger.member_state.is_leader

    def not_leader(self) -> RequestError:
        """The refusal of a read on a node that must not answer it."""
        return RequestError(ResponseCode.SERVICE_NOT_AVAILABLE, self._not_leader_remark())

    @property
    def is_open(self) -> bool:
        """Whether `enter` would return without waiting for anybody."""
        if not isinstance(self._ledger, ClassicLedger) or self._dispatcher.failure is not None:
            return False
        index = self._ledger.read_barrier_now()
        return index is not None and index <= self._dispatcher.dispatched_index

    async def enter(self) -> None:
        """Return when the queues hold everything that a read starting now must see.

        Raises RequestError: SERVICE_NOT_AVAILABLE if this node does not lead, SYSTEM_ERROR if it could not find
        that out in time or dispatch is stuck. A refused read has no effect, so either is harmless.
        """
        try:
            index = await self._ledger.read_barrier(self._mode)
            dispatched = self._dispatcher.wait_for(index)
            if dispatched is not None:
                await asyncio.wait_for(dispatched, DISPATCH_TIMEOUT_S)
        except (DLedgerError, DispatchFailed, TimeoutError) as error:
            raise self._refusal(error) from error

    def ask(self, on_done: Callable[[RequestError | None], object]) -> bool:
        """`enter` without a task: `on_done` is called once, with None or with what `enter` would raise, possibly before
        this returns. Returns False, without calling it, if only `enter` can tell. Raises RequestError."""
        try:
            return self._ledger.ask_barrier(self._mode, partial(self._passed, on_done))
        except DLedgerError as error:
            raise self._refusal(error) from error

    def _passed(self, on_done: Callable[[RequestError | None], object], outcome: int | DLedgerError) -> None:
        if isinstance(outcome, DLedgerError):
            on_done(self._refusal(outcome))
            return
        try:
            dispatched = self._dispatcher.wait_for(outcome)
        except DispatchFailed as error:
            on_done(self._refusal(error))
            return
        if dispatched is None:
            on_done(None)
            return
        timer = asyncio.get_running_loop().call_later(DISPATCH_TIMEOUT_S, dispatched.cancel)

        def done(future: asyncio.Future[None]) -> None:
            timer.cancel()
            error = TimeoutError() if future.cancelled() else future.exception()
            on_done(None if error is None else self._refusal(error))

        dispatched.add_done_callback(done)

    def _refusal(self, error: BaseException) -> RequestError:
        if isinstance(error, DLedgerError):
            if error.code == DLedgerCode.NOT_LEADER:
                return self.not_leader()
            return RequestError(ResponseCode.SYSTEM_ERROR, f"the read could not be made safe: {error}")
        if isinstance(error, TimeoutError):
            return RequestError(ResponseCode.SYSTEM_ERROR, "dispatch is behind, ask again later")
        return RequestError(ResponseCode.SYSTEM_ERROR, f"the queues are not served: {error}")
