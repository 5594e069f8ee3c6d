"""Removing the oldest files of a DLedger log, each member for itself.

What goes must be committed, durable and dispatched, and covered by the dispatch checkpoint and by a snapshot: nothing
that a restart would need is removed. A follower that is further behind than the leader's log reaches gets the leader's
snapshot and begins again where that log begins.
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
"""At the beginning of a file, for one that is a message: terms begin with entries that are none."""


class LogExpiry:
    """Looks for files to remove from time to time. `on_removed` gets the log's new first position when files are about
    to go; `restate` has the log say once more who belongs to the group, if this member leads."""

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
        """Begin; what points before the log goes now, in case the former process ended before it could see to it."""
        if self._store.begin_pos > 0:
            self._on_removed(self._store.begin_pos)
        self._task = asyncio.get_running_loop().create_task(self._expire_forever(), name="log-expiry")

    async def stop(self) -> None:
        """End."""
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
        """Look once. Raises OSError, DLedgerError; ValueError where no snapshot can be taken."""
        store = self._store
        before = store.begin_pos
        try:
            await self._remove_what_may_go()
        finally:  # some may be gone where the next could not be removed
            if store.begin_pos != before:
                logger.info("removed the log up to %d, entry %d", store.begin_pos, store.ledger_begin_index)

    async def _remove_what_may_go(self) -> None:
        store = self._store
        while True:
            first = store.first_of_next_file()
            if first is None or first.index > min(store.committed_index, self._dispatcher.checkpointed_index):
                break
            says_who_belongs = 0 <= store.members.index < first.index
            is_due = self._retention.lets_go(
                now_ms=self._clock.wall_ms(),
                next_stored_ms=self._stored_ms(first.index),
                log_bytes=store.end_pos - store.begin_pos,
            )
            if is_due and says_who_belongs:
                await self._restate()  # and the next look finds that it may go
                break
            if not is_due or not await self._has_snapshot(first.index - 1):
                break
            if not await store.remove_before(first, on_begin=self._on_removed):
                break

    async def _has_snapshot(self, index: int) -> bool:
        """Whether what goes is in a snapshot; one is taken where that is not so yet."""
        return self._snapshots.covers(index) or (await self._snapshots.save() and self._snapshots.covers(index))

    def _stored_ms(self, index: int) -> int | None:
        """When the first message from `index` on that can be read was stored, as one behind a damaged one is no older;
        None where none of the next entries tells."""
        for at in range(index, index + SEARCHED_ENTRIES):
            try:
                entry = self._store.get(at)
                if entry is None:
                    return None
                if entry.is_message:
                    return summarize_record(entry.body).store_timestamp_ms
            except (OSError, RecordError):
                continue  # whoever dispatches or reads it says so
        return None


def new_log_expiry(
    ledger: Ledger,
    dispatcher: Dispatcher,
    config: BrokerConfig,
    clock: Clock,
    on_removed: Callable[[int], None],
) -> LogExpiry | None:
    """For a DLedger log; None for others, which see to it themselves."""
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
