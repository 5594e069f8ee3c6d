"""Role changes: what a broker does when its replicated log becomes leader, follower or candidate.

Changes are handled one at a time, in order, by one task (seed S3, DLedgerRoleChangeHandler). Losing the lead takes
effect at once, before anything is awaited: a broker that was master a moment ago must not number messages from a
table that another master has outdated. Gaining it takes time: promotion waits until everything that the log
held at the election is committed and in the queues, then rebuilds the queue offsets and only then accepts
messages. Where RocketMQ polls every 100 ms, this task is woken by commits and dispatch.

A change that is superseded by a newer one before its turn is skipped: only the newest role counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from node.broker.dispatcher import Dispatcher, DispatchFailed
from node.broker.ledger import Ledger, Role
from node.broker.message_store import MessageStore

__all__ = ["RoleChangeHandler"]

logger = logging.getLogger("node.broker")


class RoleChangeHandler:
    """Follows the log's role. `on_changed` is called after each switch of the broker's own role."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        dispatcher: Dispatcher,
        store: MessageStore,
        on_changed: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._store = store
        self._on_changed = on_changed
        self._newest: tuple[int, Role] | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to handle changes, with the role that the log has now."""
        state = self._ledger.member_state
        self._ledger.add_role_listener(self.handle)
        self.handle(state.term, state.role)
        self._task = asyncio.get_running_loop().create_task(self._handle_forever())

    async def stop(self) -> None:
        """Accept no more messages and handle no more changes."""
        self._store.demote()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def handle(self, term: int, role: Role) -> None:
        """The log has changed its role or term. Synchronous; slow work is left to the task."""
        self._store.demote()
        self._newest = (term, role)
        self._changed.set()

    async def _handle_forever(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            newest, self._newest = self._newest, None
            if newest is None:
                continue
            term, role = newest
            if role is Role.LEADER:
                promotion = asyncio.get_running_loop().create_task(self._change_to_master(term))
                overtaken = asyncio.get_running_loop().create_task(self._changed.wait())
                try:
                    await asyncio.wait((promotion, overtaken), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    promotion.cancel()
                    overtaken.cancel()
                    await asyncio.wait((promotion, overtaken))
                if not promotion.cancelled() and promotion.exception() is not None:
                    logger.error("promotion in term %d failed", term, exc_info=promotion.exception())
            else:
                logger.info("slave in term %d (%s)", term, role.name)
                try:
                    self._on_changed()
                except Exception:  # if this task ended, the broker could never become master again
                    logger.exception("what follows from being slave in term %d failed", term)

    async def _change_to_master(self, term: int) -> None:
        """Wait until what the log holds is committed and dispatched, then accept messages."""
        last_index = self._ledger.store.ledger_end_index
        logger.info("leader of term %d, dispatching up to %d before taking messages", term, last_index)
        try:
            dispatched = self._dispatcher.wait_for(last_index)
            if dispatched is not None:
                await dispatched
        except DispatchFailed as error:
            logger.error("cannot become master of term %d: %s", term, error)
            return
        state = self._ledger.member_state
        if not state.is_leader or state.term != term:
            logger.info("no longer leader of term %d, staying slave", term)
            return
        self._store.promote(term, last_store_timestamp_ms=self._dispatcher.last_store_timestamp_ms)
        logger.info("master in term %d, %d entries dispatched", term, self._dispatcher.dispatched_index + 1)
        self._on_changed()
