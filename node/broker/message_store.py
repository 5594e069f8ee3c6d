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
import zlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from node.broker.foretold import Foretold, ForetoldPart, ForetoldRow, Queue
from node.broker.ledger import AppendResult, DLedgerCode, DLedgerError, Ledger
from node.broker.metrics import SLOW_PUT_S, Histogram
from node.logs import LogLimiter
from node.runtime import Clock
from node.store.consume_queue import CRC_SIZE_BYTES, UNIT_SIZE_BYTES, pack_unit, pack_units
from node.store.properties import KEYS, TAGS, UNIQUE_KEY, property_value
from node.store.queue_store import QueueStore
from node.store.record import PreparedRecord, RecordSummary, tag_hash
from node.store.record_row import RecordMaker, RowMessage
from node.store.summed import SummedBodies

__all__ = ["GroupMessage", "MessageRow", "MessageStore", "NotTogether", "NotWritable", "PendingPut", "PutRow"]


logger = logging.getLogger("node.broker")


class NotWritable(Exception):
    """This node does not take messages: it is no master (yet), or it is shutting down. Nothing was stored."""


class NotTogether(Exception):
    """What becomes of these messages may differ from one to the next. Nothing was stored."""


class PendingPut(NamedTuple):
    """A message that is in the log and not yet known to be committed."""

    queue_offset: int
    physical_offset: int
    committed: asyncio.Future[AppendResult]
    """Done when the message is committed; fails with DLedgerError, and then its fate is unknown."""


class PutRow(NamedTuple):
    """Messages that are in the log: the number of the first in its queue, and where each lies."""

    queue_offset: int
    positions: Sequence[int]


class MessageRow(NamedTuple):
    """Messages of one queue, to be put together."""

    maker: RecordMaker
    messages: Sequence[RowMessage]
    texts: Sequence[str]
    """Their properties."""
    born_timestamp_ms: int
    reconsume_times: int


GroupMessage = tuple[RecordMaker, int, bytes, bytes, int, int]
"""Maker, flag, body, properties (UTF-8), born timestamp and reconsumptions of one message of a group."""


class MessageStore:
    """Assigns queue offsets and appends records to the replicated log while this node is master."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        queues: QueueStore,
        clock: Clock,
        is_disk_full: Callable[[], bool] = lambda: False,
        foretold: Foretold | None = None,
    ) -> None:
        self._foretold = foretold if foretold is not None else Foretold()
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

    def put(self, topic: str, queue_id: int, record: PreparedRecord) -> PendingPut:
        """Append one record to the log.

        Raises NotWritable and DLedgerError (NOT_LEADER, LEADER_PENDING_FULL, DISK_FULL, ...): nothing was
        stored. What happens after the append is told by `committed` of the result.
        """
        self._check()
        key = (topic, queue_id)
        queue_offset = self._next_offsets.get(key, 0)
        store_timestamp_ms = max(self._last_store_timestamp_ms, self._clock.wall_ms())
        physical_offset = -1

        def encode(position: int) -> bytes:
            nonlocal physical_offset
            physical_offset = position
            return record.seal(
                queue_offset=queue_offset,
                physical_offset=position,
                store_timestamp_ms=store_timestamp_ms,
            )

        committed = self._ledger.append(record.size_bytes, encode)
        self._next_offsets[key] = queue_offset + 1
        self._last_store_timestamp_ms = store_timestamp_ms
        self.put_total += 1
        return PendingPut(queue_offset, physical_offset, committed)

    def _check(self) -> None:
        if not self.is_master:
            raise NotWritable("not the master")
        if self._is_disk_full():
            raise DLedgerError(DLedgerCode.DISK_FULL, "the disk is full")

    def put_rows(
        self, rows: Sequence[MessageRow], then: Callable[[Exception | None], object]
    ) -> Sequence[PutRow]:
        """Append rows of plain messages, one behind the other, all or none: no delayed ones, none of a transaction.
        `then` is told when all are committed, see `Ledger.append_row`.

        Raises as `put`, struct.error where a number does not fit the record, NotTogether where rows have to be put one
        by one: nothing was stored.
        """
        self._check()
        next_offsets = self._next_offsets
        store_timestamp_ms = max(self._last_store_timestamp_ms, self._clock.wall_ms())
        sizes = [size for row in rows for size in row.maker.sizes(row.messages)]
        if len(rows) > 1 and not self._ledger.takes_together(len(sizes), sum(sizes)):
            raise NotTogether
        positions: Sequence[int] = ()
        offsets: list[int] = []
        crcs: list[int] = []
        following: dict[Queue, int] = {}

        def encode(places: Sequence[int]) -> Sequence[bytes]:
            nonlocal positions
            positions = places
            records: list[bytes] = []
            for row in rows:
                queue, at, end = row.maker.queue, len(records), len(records) + len(row.messages)
                offset = following[queue] if queue in following else next_offsets.get(queue, 0)
                made = row.maker.make(
                    row.messages,
                    places[at:end],
                    queue_offset=offset,
                    born_timestamp_ms=row.born_timestamp_ms,
                    store_timestamp_ms=store_timestamp_ms,
                    reconsume_times=row.reconsume_times,
                )
                following[queue] = offset + len(row.messages)
                offsets.append(offset)
                records += made
                crcs.extend(made.crcs)
            return SummedBodies(records, crcs)

        placed = self._ledger.append_row(sizes, encode, then)
        next_offsets.update(following)
        self._last_store_timestamp_ms = store_timestamp_ms
        self.put_total += len(sizes)
        if placed[0] >= 0:
            self._foretell(rows, placed, offsets, positions, sizes, crcs, store_timestamp_ms)
        if len(rows) == 1:
            return (PutRow(offsets[0], positions),)
        ends = accumulate([len(row.messages) for row in rows])
        return [
            PutRow(offset, positions[end - len(row.messages) : end])
            for row, offset, end in zip(rows, offsets, ends, strict=True)
        ]

    def _foretell(
        self,
        rows: Sequence[MessageRow],
        placed: tuple[int, int, int],
        offsets: Sequence[int],
        positions: Sequence[int],
        sizes: Sequence[int],
        crcs: Sequence[int],
        store_timestamp_ms: int,
    ) -> None:
        """Tell the dispatcher of rows that were just appended: each alone, as a commit may lie between them."""
        hashes: list[int] = []
        for row in rows:
            hashes += [_hash(text) for text in row.texts] if any(row.texts) else [0] * len(row.texts)
        units, packed_crcs = pack_units(positions, sizes, hashes, crcs)
        begin_index, last_index, term = placed
        is_counted = last_index - begin_index + 1 == len(sizes)  # an index is else where a record begins or ends
        at = 0
        for row, offset in zip(rows, offsets, strict=True):
            end = at + len(row.messages)
            if is_counted:
                first, last = begin_index + at, begin_index + end - 1
            else:
                first, last = positions[at], positions[end - 1] + sizes[end - 1] - 1
            own = units[at * UNIT_SIZE_BYTES : end * UNIT_SIZE_BYTES]
            own_crcs = packed_crcs[at * CRC_SIZE_BYTES : end * CRC_SIZE_BYTES]
            part = ForetoldPart(row.maker.queue, offset, own, own_crcs)
            summaries = [] if not any(row.texts) else [
                _summary(row.maker, offset + number, positions[at + number], store_timestamp_ms, text)
                for number, text in enumerate(row.texts)
                if text and (KEYS in text or UNIQUE_KEY in text)
            ]
            self._foretold.add(ForetoldRow(first, last, term, end - at, (part,), store_timestamp_ms, summaries))
            at = end

    def put_group(
        self, messages: Sequence[GroupMessage], then: Callable[[Exception | None], object]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Append plain messages of any queues, one behind the other, all or none. Returns the number of each in its
        queue, and where it lies. `then` and errors: as `put_rows`; NotTogether where they have to be put one by one."""
        self._check()
        next_offsets = self._next_offsets
        store_timestamp_ms = max(self._last_store_timestamp_ms, self._clock.wall_ms())
        sizes = [maker.size_of(body, text) for maker, _, body, text, _, _ in messages]
        if len(sizes) > 1 and not self._ledger.takes_together(len(sizes), sum(sizes)):
            raise NotTogether
        places: Sequence[int] = ()
        offsets: list[int] = []
        parts: dict[Queue, tuple[list[bytes], list[bytes]]] = {}
        following: dict[Queue, int] = {}

        def encode(positions: Sequence[int]) -> Sequence[bytes]:
            nonlocal places
            places = positions
            records = []
            for (maker, flag, body, text, born_ms, again), position in zip(messages, positions, strict=True):
                queue = maker.queue
                if queue in parts:
                    units, crcs = parts[queue]
                    offset = following[queue]
                else:
                    units, crcs = parts[queue] = [], []
                    offset = next_offsets.get(queue, 0)
                following[queue] = offset + 1
                record = maker.make_one((flag, body, text), position, offset, born_ms, store_timestamp_ms, again)
                tags = tag_hash(property_value(text.decode(), TAGS)) if _TAGS in text else 0
                unit, crc = pack_unit(position, len(record), tags, zlib.crc32(record))
                units.append(unit)
                crcs.append(crc)
                offsets.append(offset)
                records.append(record)
            return records

        row = self._ledger.append_row(sizes, encode, then)
        next_offsets.update(following)
        self._last_store_timestamp_ms = store_timestamp_ms
        self.put_total += len(offsets)
        if row[0] >= 0:
            foretold = [
                ForetoldPart(queue, following[queue] - len(units), b"".join(units), b"".join(crcs))
                for queue, (units, crcs) in parts.items()
            ]
            summaries = [
                _summary(maker, offset, position, store_timestamp_ms, text.decode())
                for (maker, _, _, text, _, _), offset, position in zip(messages, offsets, places, strict=True)
                if text and (_KEYS in text or _UNIQUE_KEY in text)
            ]
            self._foretold.add(ForetoldRow(*row, len(offsets), foretold, store_timestamp_ms, summaries))
        return offsets, places


_TAGS, _KEYS, _UNIQUE_KEY = TAGS.encode(), KEYS.encode(), UNIQUE_KEY.encode()


def _summary(maker: RecordMaker, offset: int, position: int, stored_ms: int, text: str) -> RecordSummary:
    return RecordSummary(
        maker.topic, maker.queue_id, offset, position, maker.sys_flag, stored_ms, property_value(text, TAGS), text, 0
    )


def _hash(text: str) -> int:
    return tag_hash(property_value(text, TAGS)) if text else 0
