"""Putting messages: which ones a master accepts, and the number each gets in its queue.

A message gets its queue offset at the moment of its append, inside the log's own critical section: the log calls
back with the position, the callback reads the next number of the queue, and the table advances only when the
append has succeeded. So numbers are dense and follow the order of the log (seed S1, topicQueueTable).

The table is only right while this node is the master of the term for which it was rebuilt: another master may
have appended since. So a put is refused unless the log's term is still that term.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple
from zlib import crc32

from node.broker.dispatch_batch import DispatchBatch, KeyRuns, Queue, QueueColumns, text_tag_hash
from node.broker.internal_topics import is_internal
from node.broker.ledger import DLedgerCode, DLedgerError, Ledger
from node.broker.metrics import SLOW_PUT_S, Histogram
from node.broker.pending_dispatch import PendingBatch, PendingDispatch
from node.logs import LogLimiter
from node.runtime import Clock
from node.store.checksummed import ChecksummedBodies
from node.store.flushing import settle
from node.store.queue_store import QueueStore
from node.store.record import SYS_FLAG_TRANSACTION_MASK, RecordError
from node.store.record_batch import RecordBatch

__all__ = ["MessageStore", "NotTogether", "NotWritable", "PendingPut", "Placed"]


logger = logging.getLogger("node.broker")


class NotWritable(Exception):
    """This node does not accept messages: it is not master (yet), or it is shutting down. Nothing was stored."""


class NotTogether(Exception):
    """These messages may have different outcomes, so they cannot be put together. Nothing was stored."""


class PendingPut(NamedTuple):
    """A message that is in the log and not yet known to be committed."""

    queue_offset: int
    physical_offset: int
    committed: asyncio.Future[None]
    """Done when the message is committed; fails with DLedgerError, and then its fate is unknown."""


Placed = tuple[int, Sequence[int]]
"""A batch that is in the log: the queue offset of its first message, and the position of each."""


class MessageStore:
    """Assigns queue offsets and appends records to the replicated log while this node is master. `least_ends` returns
    lower bounds for the ends of queues of which this node knows nothing, or only what may be outdated."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        queues: QueueStore,
        clock: Clock,
        is_disk_full: Callable[[], bool] = lambda: False,
        pending: PendingDispatch | None = None,
        least_ends: Callable[[], Mapping[Queue, int]] = dict,
    ) -> None:
        self._least_ends = least_ends
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
        """From a put to its answer."""
        self.put_total = 0
        """Messages appended since the start."""
        self.committed_total = 0
        """Messages whose commit was seen here."""

    def note_put(self, duration_s: float, count: int = 1) -> None:
        """Record that `count` puts were answered after `duration_s`; slow ones are logged (S1: above 500 ms)."""
        self.put_times.observe(duration_s, count)
        if duration_s > SLOW_PUT_S:
            self._complaints.warning(logger, "slow", "a message took %.0f ms to be stored", duration_s * 1000)

    @property
    def queues(self) -> QueueStore:
        """The consume queues of the messages put here."""
        return self._queues

    def wall_ms(self) -> int:
        """This node's wall clock, in ms."""
        return self._clock.wall_ms()

    @property
    def last_store_timestamp_ms(self) -> int:
        """That of the last message that was put here; ahead of `wall_ms` if the clock has been set back."""
        return self._last_store_timestamp_ms

    @property
    def is_master(self) -> bool:
        """Whether puts are accepted now."""
        state = self._ledger.member_state
        return self._master_term is not None and state.is_leader and state.term == self._master_term

    def promote(self, term: int, *, last_store_timestamp_ms: int) -> None:
        """Accept puts as master of `term`. Every message of the log must be in the queues by now.

        `last_store_timestamp_ms` is the newest store timestamp of the log: timestamps continue from there, even
        if this node's clock is behind the former master's.
        """
        self._earlier_puts = self.topic_puts()
        self._next_offsets = dict(self._queues.ends())
        for queue, end in self._least_ends().items():
            known = self._next_offsets.setdefault(queue, end)
            if end > known and self._queues.may_begin_later(*queue):  # `known` is of a former log, or outdated
                self._next_offsets[queue] = end
        self._first_offsets = dict(self._next_offsets)
        self._last_store_timestamp_ms = max(self._last_store_timestamp_ms, last_store_timestamp_ms)
        self._master_term = term

    def topic_puts(self) -> dict[str, int]:
        """Messages put since the start, by topic. Costs nothing per put: it follows from the queue offsets."""
        puts = dict(self._earlier_puts)
        for key, following in self._next_offsets.items():
            count = following - self._first_offsets.get(key, 0)
            if count:
                puts[key[0]] = puts.get(key[0], 0) + count
        return puts

    def demote(self) -> None:
        """Refuse puts from this moment on."""
        self._master_term = None

    def put(
        self, batches: Sequence[RecordBatch], on_done: Callable[[Exception | None], object], *, requests: int = 1
    ) -> list[Placed]:
        """Append batches of `requests` requests, one after another, all or none. `on_done`: see `Ledger.append_batch`.

        Raises NotWritable, DLedgerError (NOT_LEADER, LEADER_PENDING_FULL, DISK_FULL, ...), RecordError if a number
        does not fit the record, NotTogether if the requests have to be put one by one: nothing was stored.
        """
        if not self.is_master:
            raise NotWritable("not the master")
        if self._is_disk_full():
            raise DLedgerError(DLedgerCode.DISK_FULL, "the disk is full")
        sizes: list[int] = []
        for batch in batches:
            if batch.count == 1:
                sizes.append(batch.record_bytes)
            else:
                sizes += batch.sizes()
        if requests > 1 and not self._ledger.takes_together(len(sizes), sum(sizes)):
            raise NotTogether
        store_timestamp_ms = max(self._last_store_timestamp_ms, self._clock.wall_ms())
        made = _Records(batches, self._next_offsets, store_timestamp_ms)
        try:
            first_index, last_index, term = self._ledger.append_batch(sizes, made.encode, on_done)
        except struct.error as error:
            raise RecordError(f"a field is out of range: {error}") from error
        for columns in made.columns.values():
            self._next_offsets[columns.queue] = columns.first + len(columns.positions)
        self._last_store_timestamp_ms = store_timestamp_ms
        self.put_total += len(sizes)
        if first_index >= 0 and not made.is_special:
            parts = [columns.part() for columns in made.columns.values()]
            dispatch = DispatchBatch(len(sizes), parts, store_timestamp_ms, made.keys.runs)
            self._pending.add(PendingBatch(first_index, last_index, term, dispatch))
        return made.placed

    def put_one(self, batch: RecordBatch) -> PendingPut:
        """`put` for a single message, with a future of its outcome."""
        committed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ((queue_offset, (position,)),) = self.put((batch,), partial(settle, committed))
        return PendingPut(queue_offset, position, committed)


class _Records:
    """The records of batches that are appended together, and what the dispatcher needs of them."""

    __slots__ = ("_batches", "_next_offsets", "_stored_ms", "columns", "is_special", "keys", "placed")

    def __init__(
        self, batches: Sequence[RecordBatch], next_offsets: Mapping[Queue, int], store_timestamp_ms: int
    ) -> None:
        self._batches = batches
        self._next_offsets = next_offsets
        self._stored_ms = store_timestamp_ms
        self.columns: dict[Queue, QueueColumns] = {}
        self.keys = KeyRuns()
        self.placed: list[Placed] = []
        self.is_special = False
        """Whether the dispatcher has to read the messages itself."""

    def encode(self, positions: Sequence[int]) -> ChecksummedBodies:
        """The records, which begin at these positions."""
        records: list[bytes] = []
        crcs: list[int] = []
        stored_ms, all_columns, placed, at = self._stored_ms, self.columns, self.placed, 0
        for batch in self._batches:
            maker, count = batch.maker, batch.count
            columns = all_columns.get(maker.queue)
            if columns is None:
                columns = QueueColumns(maker.queue, self._next_offsets.get(maker.queue, 0))
                all_columns[maker.queue] = columns
                self.is_special |= is_internal(maker.topic)
            if maker.sys_flag & SYS_FLAG_TRANSACTION_MASK or batch.prepared_transaction_offset:
                self.is_special = True
            offset = columns.first + len(columns.positions)
            if count == 1:
                position = positions[at]
                record = batch.record(position, offset, stored_ms)
                crc = crc32(record)
                records.append(record)
                crcs.append(crc)
                placed.append((offset, (position,)))
                self._note(batch, columns, (position,), (len(record),), (crc,))
            else:
                own = positions[at : at + count]
                made = batch.records(own, queue_offset=offset, store_timestamp_ms=stored_ms)
                records += made
                crcs += made.crcs
                placed.append((offset, own))
                self._note(batch, columns, own, batch.sizes(), made.crcs)
            at += count
        return ChecksummedBodies(records, crcs)

    def _note(
        self,
        batch: RecordBatch,
        columns: QueueColumns,
        positions: Sequence[int],
        sizes: Sequence[int],
        crcs: Sequence[int],
    ) -> None:
        """Collect what the dispatcher needs of a batch."""
        columns.positions += positions
        columns.sizes += sizes
        columns.crcs += crcs
        topic, common = batch.maker.topic, batch.common
        if common is None:
            columns.tags += [text_tag_hash(text) for text in batch.texts]
            for text, position in zip(batch.texts, positions, strict=True):
                self.keys.add(topic, text, position, self._stored_ms)
            return
        columns.tags += (text_tag_hash(common),) * batch.count
        if batch.keys is not None:
            run = self.keys.run(topic, self._stored_ms)
            run.keys.extend(batch.keys)
            run.physical_offsets.extend(positions)
