"""Where queues without messages continue, on a classic log.

Everything else about a queue follows from the log, should its files be lost or contradict it. The offset of the next
message does not, once all messages of a queue were removed with the log's oldest files: it would begin at 0 again, and
a group that had consumed up to 100 would get none of the next hundred messages. So before files are removed, the ends
of all queues are written into a table. A DLedger log has its snapshots for this (`broker_snapshots.py`).
A slave whose log has begun anew, as a copy of a master's log much further on, still has the table of its former log:
then the first message of each queue tells its own offset. For queues without messages in a slave's log, because that
begins with the newest of the master's files, the master reports where they end, before the slave may become master.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from node.broker.dispatch_batch import DispatchBatch, Queue
from node.broker.ledger import LedgerStore
from node.runtime import Disk
from node.store.queue_store import QueueStore
from node.store.record import RecordSummary
from node.store.table_file import TableDamaged, read_table, write_table

__all__ = ["QueueEnds"]

logger = logging.getLogger("node.broker")


class QueueEnds:
    """A derivation of the dispatcher, for the queues in `queues`; the table is the file at `path`."""

    def __init__(self, disk: Disk, path: str, queues: QueueStore, log: LedgerStore) -> None:
        self._disk = disk
        self._path = path
        self._queues = queues
        self._log = log
        self._told: set[Queue] = set()
        """Queues whose ends the master has reported since everything was derived anew."""

    async def save(self) -> None:
        """Store where every queue ends. Raises OSError."""
        ends: dict[str, dict[int, int]] = {}
        for (topic, queue_id), end in self._queues.ends():
            ends.setdefault(topic, {})[queue_id] = end
        await write_table(self._disk, self._path, {"queueEnds": ends})

    def unknown(self, queues: Iterable[Queue]) -> list[Queue]:
        """Those of `queues` whose ends neither this log tells nor the master has reported yet."""
        if self._log.ledger_begin_index <= 0:
            return []
        presumed = set(self._queues.presumed)
        return [
            queue
            for queue in queues
            if queue not in self._told and (self._queues.find(*queue) is None or queue in presumed)
        ]

    async def learn(self, ends: Mapping[Queue, int]) -> None:
        """The master reports where queues end; durable on return. A message that came meanwhile, or one of the master's
        that is still to come, tells its own offset, which wins. Raises OSError."""
        presumed = set(self._queues.presumed)
        for queue, end in ends.items():
            self._told.add(queue)
            if queue in presumed or (end > 0 and self._queues.find(*queue) is None):
                self._queues.presume(*queue, end, may_be_later=True)
        await self.save()

    def dispatch(self, record: RecordSummary) -> None:
        """Nothing is derived from messages here."""

    def dispatch_batch(self, batch: DispatchBatch) -> None:
        """Nothing is derived from messages that are not special."""

    def snapshot(self) -> Any:
        """The queues that no message has entered since their end was taken from the table."""
        return {"presumed": self._queues.presumed}

    def restore(self, state: Any) -> None:
        """Continue from a checkpoint, whose state is {} if an earlier version wrote it; None: everything is derived
        anew. For queues that no message has entered the table may know more than the checkpoint: what came since.
        Raises OSError."""
        self._told.clear()
        presumed = {(topic, queue_id) for topic, queue_id in (state or {}).get("presumed", ())}
        for topic, queue_id in presumed:
            self._queues.presume(topic, queue_id, None, may_be_later=True)
        if self._log.ledger_begin_index > 0:
            which = "queues without messages" + (" that the checkpoint lacks" if state is not None else "")
            for topic, ends in self._read(which).items():
                for queue_id, end in ends.items():
                    queue = self._queues.find(topic, int(queue_id))
                    if queue is None or ((topic, int(queue_id)) in presumed and int(end) > queue.max_offset):
                        self._queues.presume(topic, int(queue_id), int(end), may_be_later=True)

    def _read(self, which: str) -> dict[str, dict[str, int]]:
        try:
            table: dict[str, dict[str, int]] = (read_table(self._disk, self._path) or {}).get("queueEnds", {})
        except TableDamaged as error:  # the existing messages are worth more than these numbers
            logger.error("%s begin at 0 again: %s", which, error)
            return {}
        return table

    async def flush(self) -> None:
        """Nothing to do: the table is independent of the checkpoint."""
