"""Putting messages: what a master may take, and the number each gets in its queue.

A message gets its queue offset at the moment of its append, inside the log's own critical section: the log calls
back with the position, the callback reads the next number of the queue, and the table advances only when the
append succeeded. So numbers are dense and follow the order of the log (seed S1, topicQueueTable).

The table is only right while this node is the master of the term for which it was rebuilt: another master may
have appended since. So a put is refused unless the log's term is that very term.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple
from zlib import crc32

from node.broker.dispatch_batch import DispatchBatch, KeyRuns, Queue, QueueColumns
from node.broker.internal_topics import is_internal
from node.broker.ledger import DLedgerCode, DLedgerError, Ledger
from node.broker.metrics import SLOW_PUT_S, Histogram
from node.broker.pending_dispatch import PendingBatch, PendingDispatch
from node.logs import LogLimiter
from node.runtime import Clock
from node.store.checksummed import ChecksummedBodies
from node.store.flushing import settle
from node.store.properties import TAGS, property_value
from node.store.queue_store import QueueStore
from node.store.record import SYS_FLAG_TRANSACTION_MASK, RecordError, tag_hash
from node.store.record_batch import RecordBatch

__all__ = ["MessageStore", "NotTogether", "NotWritable", "PendingPut", "Placed"]


logger = logging.getLogger("node.broker")


class NotWritable(Exception):
    """This node does not take messages: it is no master (yet), or it is shutting down. Nothing was stored."""


class NotTogether(Exception):
    """What becomes of these messages may differ from one to the next. Nothing was stored."""


class PendingPut(NamedTuple):
    """A message that is in the log and not yet known to be committed."""

    queue_offset: int
    physical_offset: int
    committed: asyncio.Future[None]
    """Done when the message is committed; fails with DLedgerError, and then its fate is unknown."""


class Placed(NamedTuple):
    """A batch that is in the log: the number of its first message in its queue, and where each lies."""

    queue_offset: int
    positions: Sequence[int]


class MessageStore:
    """Assigns queue offsets and appends records to the replicated log while this node is master."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        queues: QueueStore,
        clock: Clock,
        is_disk_full: Callable[[], bool] = lambda: False,
        pending: PendingDispatch | None = None,
    ) -> None:
        self._pending = pending if pending is not None else PendingDispatch()
        self._ledger = ledger
        self._queues = queues
        self._clock = clock
        self._is_disk_full = is_disk_full
        self._next_offsets: dict[Queue, int] = {}
        self._master_term: int | None = None
        self._last_store_timestamp_ms = 0
        self._first_offsets: dict[Queue, int] = {}
        self._earlier_puts: dict[str, int] = {}
        self._complaints = LogLimiter(lambda: asyncio.get_running_loop().time())
        self.put_times = Histogram()
        """From a put to the answer."""
        self.put_total = 0
        """Messages appended since the start."""
        self.committed_total = 0
        """Messages whose commit was seen here."""

    def note_put(self, duration_s: float, count: int = 1) -> None:
        """Puts, so many, were answered after so long; slow ones are logged (S1: above 500 ms)."""
        self.put_times.observe(duration_s, count)
        if duration_s > SLOW_PUT_S:
            self._complaints.warning(logger, "slow", "a message took %.0f ms to be stored", duration_s * 1000)

    @property
    def queues(self) -> QueueStore:
        """The consume queues of what is put here."""
        return self._queues

    @property
    def is_master(self) -> bool:
        """Whether puts are taken now."""
        state = self._ledger.member_state
        return self._master_term is not None and state.is_leader and state.term == self._master_term

    def promote(self, term: int, *, last_store_timestamp_ms: int) -> None:
        """Take puts as master of `term`. Every message of the log must be in the queues by now.

        `last_store_timestamp_ms` is the newest store timestamp of the log: timestamps go on from there, also
        when this node's clock is behind the former master's.
        """
        self._earlier_puts = self.topic_puts()
        self._next_offsets = {key: queue.max_offset for key, queue in self._queues.items()}
        self._first_offsets = dict(self._next_offsets)
        self._last_store_timestamp_ms = max(self._last_store_timestamp_ms, last_store_timestamp_ms)
        self._master_term = term

    def topic_puts(self) -> dict[str, int]:
        """Messages put since the start, by topic. Costs nothing per put: the queue offsets say it."""
        puts = dict(self._earlier_puts)
        for key, following in self._next_offsets.items():
            count = following - self._first_offsets.get(key, 0)
            if count:
                puts[key[0]] = puts.get(key[0], 0) + count
        return puts

    def demote(self) -> None:
        """Take no more puts, from this moment on."""
        self._master_term = None

    def put(
        self, batches: Sequence[RecordBatch], on_done: Callable[[Exception | None], object]
    ) -> list[Placed]:
        """Append batches, one behind the other, all or none. `on_done`: see `Ledger.append_batch`.

        Raises NotWritable, DLedgerError (NOT_LEADER, LEADER_PENDING_FULL, DISK_FULL, ...), RecordError where a number
        does not fit the record, NotTogether where the batches have to be put one by one: nothing was stored.
        """
        if not self.is_master:
            raise NotWritable("not the master")
        if self._is_disk_full():
            raise DLedgerError(DLedgerCode.DISK_FULL, "the disk is full")
        sizes = batches[0].sizes() if len(batches) == 1 else [size for batch in batches for size in batch.sizes()]
        if len(batches) > 1 and not self._ledger.takes_together(len(sizes), sum(sizes)):
            raise NotTogether
        store_timestamp_ms = max(self._last_store_timestamp_ms, self._clock.wall_ms())
        next_offsets = self._next_offsets
        following: dict[Queue, int] = {}
        placed: list[Placed] = []
        crcs: list[int] = []

        def encode(positions: Sequence[int]) -> Sequence[bytes]:
            records: list[bytes] = []
            for batch in batches:
                queue, at = batch.maker.queue, len(records)
                offset = following[queue] if queue in following else next_offsets.get(queue, 0)
                following[queue] = offset + batch.count
                if batch.count == 1:
                    record = batch.record(positions[at], offset, store_timestamp_ms)
                    placed.append(Placed(offset, (positions[at],)))
                    records.append(record)
                    crcs.append(crc32(record))
                    continue
                own = positions[at : at + batch.count]
                made = batch.records(own, queue_offset=offset, store_timestamp_ms=store_timestamp_ms)
                placed.append(Placed(offset, own))
                records += made
                crcs.extend(made.crcs)
            return ChecksummedBodies(records, crcs)

        try:
            first_index, last_index, term = self._ledger.append_batch(sizes, encode, on_done)
        except struct.error as error:
            raise RecordError(f"a field is out of range: {error}") from error
        next_offsets.update(following)
        self._last_store_timestamp_ms = store_timestamp_ms
        self.put_total += len(sizes)
        if first_index >= 0:
            dispatch = _dispatch_batch(batches, placed, sizes, crcs, store_timestamp_ms)
            if dispatch is not None:
                self._pending.add(PendingBatch(first_index, last_index, term, dispatch))
        return placed

    def put_one(self, batch: RecordBatch) -> PendingPut:
        """Put a message alone; as `put`, with a future of what becomes of it."""
        committed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ((queue_offset, (position,)),) = self.put((batch,), partial(settle, committed))
        return PendingPut(queue_offset, position, committed)


_TAGS = TAGS.encode()


def _dispatch_batch(
    batches: Sequence[RecordBatch],
    placed: Sequence[Placed],
    sizes: Sequence[int],
    crcs: Sequence[int],
    store_timestamp_ms: int,
) -> DispatchBatch | None:
    """What the dispatcher is to do with batches that were appended just now; None where one of them is special, and the
    dispatcher has to look at it."""
    of_queues: dict[Queue, QueueColumns] = {}
    keys = KeyRuns()
    at = 0
    for batch, (offset, positions) in zip(batches, placed, strict=True):
        maker, texts, end = batch.maker, batch.texts, at + batch.count
        if maker.sys_flag & SYS_FLAG_TRANSACTION_MASK or batch.prepared_transaction_offset or is_internal(maker.topic):
            return None
        columns = of_queues.get(maker.queue)
        if columns is None:
            columns = of_queues[maker.queue] = QueueColumns(maker.queue, offset)
        common = batch.common_text
        if batch.count == 1:
            columns.add(positions[0], sizes[at], _tag_hash(texts[0]), crcs[at])
            keys.add(maker.topic, texts[0], positions[0], store_timestamp_ms)
            at = end
            continue
        if common is None:
            columns.tags += [_tag_hash(text) for text in texts]
            for text, position in zip(texts, positions, strict=True):
                keys.add(maker.topic, text, position, store_timestamp_ms)
        else:
            columns.tags += [_tag_hash(common.text)] * batch.count
            if common.keys is not None:
                keys.add_run(maker.topic, common.keys, positions, store_timestamp_ms)
        columns.positions += positions
        columns.sizes += sizes[at:end]
        columns.crcs += crcs[at:end]
        at = end
    return DispatchBatch(at, [columns.part() for columns in of_queues.values()], store_timestamp_ms, keys.runs)


def _tag_hash(text: bytes) -> int:
    return tag_hash(property_value(text.decode(), TAGS)) if _TAGS in text else 0
