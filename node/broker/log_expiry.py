"""Removes the oldest files of a DLedger log; every member does so on its own.

What is removed must be committed, durable and dispatched, and covered by the dispatch checkpoint and by a snapshot:
nothing that a restart would need is removed. A follower that is further behind than the leader's log reaches gets the
leader's snapshot and begins again where that log begins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from node.broker.dispatcher import Dispatcher
from node.broker.ledger import DLedgerError, Ledger
from node.config import BrokerConfig
from node.dledger import DLedgerServer, DLedgerStore
from node.dledger.snapshot_manager import SnapshotManager
from node.retention import EXPIRY_CHECK_S, RetentionConfig
from node.runtime import Clock
from node.store.record import RecordError, summarize_record

__all__ = ["LogExpiry", "new_log_expiry"]

logger = logging.getLogger("node.broker")

SEARCHED_ENTRIES = 64
"""Entries searched at the beginning of a file for a message: terms begin with entries that are none."""


class LogExpiry:
    """Checks from time to time for files to remove. `on_removed` gets the log's new first position when files are about
    to be removed; `restate` writes the members of the group to the log once more, if this member leads."""

    def __init__(
        self,
        *,
        store: DLedgerStore,
        snapshots: SnapshotManager,
        dispatcher: Dispatcher,
        retention: RetentionConfig,
        clock: Clock,
        on_removed: Callable[[int], None],
        restate: Callable[[], Awaitable[None]],
    ) -> None:
        self._restate = restate
        self._store = store
        self._snapshots = snapshots
        self._dispatcher = dispatcher
        self._retention = retention
        self._clock = clock
        self._on_removed = on_removed
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; first drop what points before the log, in case the previous process ended before it could."""
        if self._store.begin_pos > 0:
            self._on_removed(self._store.begin_pos)
        self._task = asyncio.get_running_loop().create_task(self._expire_forever(), name="log-expiry")

    async def stop(self) -> None:
        """Stop checking."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_CHECK_S)
            try:
                await self.expire()
            except (OSError, ValueError, DLedgerError) as error:
                logger.error("old files of the log could not be removed: %s", error)
            except Exception:  # without this task the disk would fill up, and nobody would know why
                logger.exception("the removal of old files met an error of its own")

    async def expire(self) -> None:
        """Check once. Raises OSError, DLedgerError; ValueError if no snapshot can be taken."""
        store = self._store
        before = store.begin_pos
        try:
            await self._remove_what_may_go()
        finally:  # some may be gone even if the next could not be removed
            if store.begin_pos != before:
                logger.info("removed the log up to %d, entry %d", store.begin_pos, store.ledger_begin_index)

    async def _remove_what_may_go(self) -> None:
        store = self._store
        while True:
            first = store.first_of_next_file()
            if first is None or first.index > min(store.committed_index, self._dispatcher.checkpointed_index):
                break
            holds_members = 0 <= store.members.index < first.index
            is_due = self._retention.lets_go(
                now_ms=self._clock.wall_ms(),
                next_stored_ms=self._stored_ms(first.index),
                log_bytes=store.end_pos - store.begin_pos,
            )
            if is_due and holds_members:
                await self._restate()  # and the next check finds that the file may be removed
                break
            if not is_due or not await self._has_snapshot(first.index - 1):
                break
            if not await store.remove_before(first, on_begin=self._on_removed):
                break

    async def _has_snapshot(self, index: int) -> bool:
        """Whether what is to be removed is in a snapshot; takes one if it is not yet."""
        return self._snapshots.covers(index) or (await self._snapshots.save() and self._snapshots.covers(index))

    def _stored_ms(self, index: int) -> int | None:
        """When the first readable message from `index` on was stored (one after a damaged message is no older); None if
        none of the next entries tells."""
        for at in range(index, index + SEARCHED_ENTRIES):
            try:
                entry = self._store.get(at)
                if entry is None:
                    return None
                if entry.is_message:
                    return summarize_record(entry.body).store_timestamp_ms
            except (OSError, RecordError):
                continue  # whoever dispatches or reads the entry reports it
        return None


def new_log_expiry(
    ledger: Ledger,
    dispatcher: Dispatcher,
    config: BrokerConfig,
    clock: Clock,
    on_removed: Callable[[int], None],
) -> LogExpiry | None:
    """The expiry of a DLedger log; None for others, which do this themselves."""
    if not isinstance(ledger, DLedgerServer):
        return None
    return LogExpiry(
        store=ledger.store,
        snapshots=ledger.snapshots,
        dispatcher=dispatcher,
        retention=config.retention,
        clock=clock,
        on_removed=on_removed,
        restate=ledger.members.restate,
    )
