"""The dispatcher: adds committed log entries to the consume queues, in order and exactly once.

RocketMQ calls this the reput service (seed S1). It never goes beyond the committed index, neither on the leader nor
on a follower, so queues need not be rolled back when an uncommitted tail is truncated. It runs when the
committed index advances, in portions that keep the loop responsive, and wakes whoever waits for an index.

An entry that is not what it should be (a record with a wrong CRC, a number that skips ahead in its queue) stops
it permanently: `failure` then says what was found, and everything that depends on the queues refuses requests.
"""

from __future__ import annotations

import asyncio
import errno
import heapq
import logging
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from node.broker.dispatch_batch import DispatchBatch, Queue, append_parts
from node.broker.internal_topics import DELAY_LEVELS_MS, SCHEDULE_TOPIC, check_stored_topic, tells_by_body
from node.broker.ledger import EntryBatch, LedgerStore
from node.broker.log_batches import RecordRun, read_batch
from node.broker.pending_dispatch import PendingBatch, PendingDispatch
from node.logs import LogLimiter
from node.store.consume_queue import QueueGap
from node.store.queue_store import NOTHING_DISPATCHED, DispatchMark, QueueStore, StoreTimestamps
from node.store.record import (
    SYS_FLAG_TRANSACTION_COMMIT,
    SYS_FLAG_TRANSACTION_MASK,
    RecordError,
    RecordSummary,
    decode_record,
    summarize_record,
    tag_hash,
)

if TYPE_CHECKING:
    from node.broker.ledger import LedgerEntry

__all__ = ["Derivation", "DispatchFailed", "Dispatcher", "Queue"]

logger = logging.getLogger("node.broker")

PORTION_ENTRIES = 256
"""Entries dispatched in one turn of the loop: a few milliseconds of work."""
LEAST_TOGETHER = 3
"""Fewest entries that are dispatched as a batch; fewer cost less one by one."""
CHECKPOINT_INTERVAL_S = 10.0
"""From the first new unit to the checkpoint that covers it. What lies between is dispatched again after a crash:
at tens of thousands of messages a second that takes a second or two."""
RETRY_INTERVAL_S = 1.0
"""Time until a log entry that the disk failed to return is read again."""
CHECKPOINT_SHARE = 0.1
"""Checkpoints of very many queues take at most this part of the time; the interval grows instead."""
URGENT_UNFLUSHED_BYTES = 8 << 20
"""Bytes of units in memory at which a checkpoint begins at once: 350,000 messages. Each checkpoint writes the whole
table of the index, 20 MB, so fewer cost less."""
MAX_UNFLUSHED_BYTES = 64 << 20
"""Bytes of units in memory at which dispatch waits for the disk: three million messages."""

MAX_NOTED_MARKS = 100_000
"""Turns of dispatch whose end is noted until a checkpoint; beyond it the oldest are forgotten, and the reported durable
timestamp of the log lags behind."""

MAX_WAITERS = 20_000
"""Reads that may wait for dispatch to catch up; each costs a few hundred bytes."""


LATER_DERIVATIONS = frozenset(("basis", "pop", "timers"))
"""Derivations that are missing in checkpoints of earlier versions, which are valid without them."""


class DispatchFailed(Exception):
    """Dispatch has stopped at an entry that is damaged or contradicts the queues; the text says which."""


class Derivation(Protocol):
    """Other state that is derived from the log, message by message, and saved with the queues' checkpoint."""

    def dispatch(self, record: RecordSummary) -> None:
        """The next message that entered a queue. Must not raise."""
        ...

    def dispatch_batch(self, batch: DispatchBatch) -> None:
        """The next messages that entered queues, none of them special (see DispatchBatch). Must not raise."""
        ...

    def snapshot(self) -> Any:
        """The state as JSON values."""
        ...

    def restore(self, state: Any) -> None:
        """Continue from a snapshot; None: from the very beginning. Raises ValueError if that is not possible;
        then everything is derived from the beginning."""
        ...

    async def flush(self) -> None:
        """Make durable what the last snapshot refers to, if that is not the snapshot itself. Raises OSError."""
        ...


class Dispatcher:
    """Dispatches one log into one set of queues. `on_arrival` is called with the queues that got messages.

    `derivations` see every message after it entered its queue. `index_timestamp_ms()` tells how far the key index goes,
    for the checkpoint. `read_batches(first, last)` returns committed entries, as many as it likes; without it they are
    read from the log one by one.
    """

    def __init__(
        self,
        log: LedgerStore,
        queues: QueueStore,
        *,
        on_arrival: Callable[[Iterable[Queue]], None],
        derivations: Mapping[str, Derivation] | None = None,
        index_timestamp_ms: Callable[[], int] = lambda: 0,
        read_batches: Callable[[int, int], Sequence[EntryBatch | RecordRun]] | None = None,
    ) -> None:
        self._index_timestamp_ms = index_timestamp_ms
        self._read_batches = read_batches
        self._dispatched: deque[tuple[int, int]] = deque(maxlen=MAX_NOTED_MARKS)
        self._durable_ms = 0
        self._derivations = dict(derivations or {})
        self._derive = tuple(derivation.dispatch for derivation in self._derivations.values())
        self._derive_batch = tuple(derivation.dispatch_batch for derivation in self._derivations.values())
        self._log = log
        self._queues = queues
        self._on_arrival = on_arrival
        self._mark = NOTHING_DISPATCHED
        self.pending = PendingDispatch()
        """Batches that this node has appended itself."""
        self._checkpointed_index = NOTHING_DISPATCHED.index
        self._scheduled = False
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._waiter_count = 0
        self._work = asyncio.Event()
        self._urgent = asyncio.Event()
        self._checkpoint_task: asyncio.Task[None] | None = None
        self._restored = False
        self._stopped = False
        self._is_paused = False
        self._is_trimmed = False
        """Whether the queues begin later than in the last checkpoint."""
        self._replacing: asyncio.Task[None] | None = None
        self._checkpointing = asyncio.Lock()
        self._complaints = LogLimiter(lambda: asyncio.get_running_loop().time())
        self.failure: DispatchFailed | None = None
        self.failed: asyncio.Event = asyncio.Event()
        self.repeated_total = 0
        """Messages in the log for a queue offset that is already taken; anything but 0 is a bug of the log."""

    @property
    def dispatched_index(self) -> int:
        """The last log index whose message is in the queues; -1 before the first."""
        return self._mark.index

    @property
    def dispatched_term(self) -> int:
        """That entry's term; -1 before the first that was read."""
        return self._mark.term

    @property
    def checkpointed_index(self) -> int:
        """The log index up to which a restart has nothing to repeat."""
        return self._checkpointed_index

    @property
    def last_store_timestamp_ms(self) -> int:
        """The newest store timestamp that was dispatched; 0 before the first."""
        return self._mark.store_timestamp_ms

    async def start(self) -> None:
        """Restore the queues to their checkpoint and continue from there. Raises OSError."""
        self._mark = await self._queues.restore(self._log.holds)
        await self._restore_derivations()
        self._checkpointed_index = self._mark.index
        self._durable_ms = self._queues.timestamps.physic_msg_ms
        if self._mark == NOTHING_DISPATCHED and self._log.ledger_begin_index > 0:
            self._mark = DispatchMark(index=self._log.ledger_begin_index - 1, term=-1, store_timestamp_ms=0)
        self._checkpoint_task = asyncio.get_running_loop().create_task(self._checkpoint_forever())
        self._restored = True
        self.notify()  # finds out if the log was replaced while the queues were read

    async def _restore_derivations(self) -> None:
        try:
            for name, derivation in self._derivations.items():
                known = name in self._queues.derived or name in LATER_DERIVATIONS
                if not known and self._mark != NOTHING_DISPATCHED:
                    raise ValueError(f"the checkpoint says nothing of {name}")
                is_later = name not in self._queues.derived and self._mark != NOTHING_DISPATCHED
                derivation.restore({} if is_later else self._queues.derived.get(name))
        except (ValueError, TypeError, KeyError) as error:
            logger.warning("everything is derived from the log anew: %s", error)
            await self._queues.discard()
            self._mark = NOTHING_DISPATCHED
            for derivation in self._derivations.values():
                derivation.restore(None)

    async def _flush_derivations(self) -> None:
        for derivation in self._derivations.values():
            await derivation.flush()

    def pause(self) -> None:
        """Dispatch nothing until `resume`: the log is being truncated."""
        self._is_paused = True
        self.pending.clear()

    async def resume(self) -> None:
        """The log was truncated. If dispatched entries are gone, everything is derived anew. Raises OSError."""
        async with self._checkpointing:
            self.pending.clear()
            log = self._log
            if not log.ledger_begin_index - 1 <= self._mark.index <= log.ledger_end_index:
                await self._queues.discard()
                for derivation in self._derivations.values():
                    derivation.restore(None)
                self._mark = NOTHING_DISPATCHED
                self._checkpointed_index = self._mark.index
                if log.ledger_begin_index > 0:
                    self._mark = DispatchMark(index=log.ledger_begin_index - 1, term=-1, store_timestamp_ms=0)
            self._is_paused = False
        self.notify()

    async def stop(self) -> None:
        """Stop dispatching and write a last checkpoint, so that the next start has nothing to repeat."""
        self._stopped = True
        self._fail_waiters(DispatchFailed("the broker is shutting down"))
        if self._checkpoint_task is not None:
            self._checkpoint_task.cancel()
            await asyncio.gather(self._checkpoint_task, return_exceptions=True)
            self._checkpoint_task = None
            await self._checkpoint()
        self._queues.close()

    def notify(self) -> None:
        """The committed index has advanced: dispatch soon. Cheap, and idempotent until it has run. Does nothing before
        `start` has restored the queues: the log already reports its progress while it recovers."""
        if self._restored and not self._scheduled and not self._stopped:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def trim(self, physical_offset: int) -> None:
        """The log now begins at `physical_offset`, and so do the queues; the next checkpoint removes their older files.
        Raises OSError."""
        if self._queues.trim(physical_offset):
            self._is_trimmed = True
            self._work.set()

    def wait_for(self, index: int) -> asyncio.Future[None] | None:
        """A future that is done when `index` is dispatched; None if it already is.

        The future fails with DispatchFailed if that will not happen. Raises DispatchFailed at once after dispatch
        has failed or stopped, or if too many wait already.
        """
        if self.failure is not None:
            raise DispatchFailed(str(self.failure))
        if index <= self._mark.index:
            return None
        if self._stopped:
            raise DispatchFailed("the broker is shutting down")
        if len(self._waiters) >= MAX_WAITERS:
            self._waiters = [waiter for waiter in self._waiters if not waiter[2].done()]
            heapq.heapify(self._waiters)
            if len(self._waiters) >= MAX_WAITERS:
                raise DispatchFailed(f"{len(self._waiters)} requests wait for dispatch already")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiter_count += 1
        heapq.heappush(self._waiters, (index, self._waiter_count, future))
        return future

    def _run(self) -> None:
        self._scheduled = False
        if self._stopped or self._is_paused or self.failure is not None:
            return
        if self._queues.unflushed_bytes >= MAX_UNFLUSHED_BYTES:
            self._urgent.set()
            return
        first = self._mark.index + 1
        if first < self._log.ledger_begin_index:
            self._begin_later()
            return
        last = self._log.committed_index
        if last < first:
            return
        arrived: dict[Queue, None] = {}
        try:
            left = PORTION_ENTRIES
            while left > 0 and self._mark.index < last:
                left -= (self.pending and self._dispatch_pending(last, arrived)) or self._dispatch_next(last, arrived)
        except OSError as error:
            self._read_failed(error)
        except (RecordError, QueueGap, ValueError) as error:
            self._fail(DispatchFailed(f"log entry {self._mark.index + 1}: {error}"))
        except Exception as error:  # part of the entry may be derived already: a retry would repeat that
            logger.exception("dispatch met an error of its own")
            self._fail(DispatchFailed(f"log entry {self._mark.index + 1}: {error!r}"))
        if arrived:
            try:
                self._on_arrival(arrived)
            except Exception:  # it must not keep those who wait for dispatch from being woken
                logger.exception("those who wait for messages could not be told of new ones")
        if self.failure is not None or self._mark.index < first:
            return
        self._dispatched.append((self._mark.index, self._mark.store_timestamp_ms))
        self._complete_waiters()
        self._work.set()
        if self._queues.unflushed_bytes >= URGENT_UNFLUSHED_BYTES:
            self._urgent.set()
        if self._mark.index < self._log.committed_index:
            self.notify()

    def _begin_later(self) -> None:
        """The log was replaced by one that begins after what was dispatched: this node had fallen that far behind."""
        logger.warning("the log begins at entry %d now; deriving everything anew", self._log.ledger_begin_index)
        self.pause()

        def done(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self._fail(DispatchFailed(f"what was derived from the former log cannot be removed: {error}"))

        self._replacing = asyncio.get_running_loop().create_task(self.resume())
        self._replacing.add_done_callback(done)

    def _read_failed(self, error: OSError) -> None:
        """Stop if the log is damaged; try again later if the disk only failed to answer."""
        if error.errno == errno.EBADMSG:
            self._fail(DispatchFailed(f"log entry {self._mark.index + 1}: {error}"))
        else:
            self._complaints.warning(logger, "read", "log entry %d: %s", self._mark.index + 1, error)
            self._scheduled = True
            asyncio.get_running_loop().call_later(RETRY_INTERVAL_S, self._run)

    def _dispatch_pending(self, last: int, arrived: dict[Queue, None]) -> int:
        """Dispatch the next batches that were appended here and are committed; returns their number."""
        pending = self.pending.take(self._mark.index, last)
        if not pending or not self._log.holds(pending[-1].last_index, pending[-1].term):
            return 0
        return len(pending) if self._add([each.batch for each in pending], pending[-1], arrived) else 0

    def _dispatch_next(self, last: int, arrived: dict[Queue, None]) -> int:
        """Dispatch the next entries by reading them from the log; returns their number."""
        first = self._mark.index + 1
        if self._read_batches is None or last - first + 1 < LEAST_TOGETHER:
            return self._dispatch(arrived)
        index, total = first, 0
        for entries in self._read_batches(first, self.pending.ends_before(first, last)):
            while index <= entries.last_index:
                count, batch = read_batch(entries, index, self._queues)
                if count:
                    index = entries.index_behind(entries.number_of(index) + count)
                    total += count
                    end = _End(index - 1, entries.term_of(index - 1))
                    if not self._add((batch,), end, arrived):
                        raise ValueError("does not follow the end of its queue")
                if index <= entries.last_index:
                    total += self._dispatch(arrived)
                    index = self._mark.index + 1
        return total or self._dispatch(arrived)

    def _add(self, batches: Sequence[DispatchBatch], end: _End | PendingBatch, arrived: dict[Queue, None]) -> bool:
        """Add batches to the queues and the derivations, up to the entry that they end with; False, and nothing is
        changed, if one does not follow the end of its queue."""
        queues = append_parts(self._queues, batches)
        if queues is None:
            return False
        arrived.update(queues)
        for batch in batches:
            for derive in self._derive_batch:
                derive(batch)
        stored_ms = max(self._mark.store_timestamp_ms, *[batch.store_timestamp_ms for batch in batches])
        self._mark = DispatchMark(end.last_index, end.term, stored_ms)
        return True

    def _dispatch(self, arrived: dict[Queue, None]) -> int:
        """Dispatch the next entry by reading it from the log; returns the number of entries: 1."""
        index = self._mark.index + 1
        entry = self._log.get(index)
        if entry is None:
            raise ValueError("is committed but cannot be read")
        store_timestamp_ms = self._mark.store_timestamp_ms
        if entry.is_message:
            store_timestamp_ms = max(store_timestamp_ms, self._dispatch_message(entry, arrived))
        self._mark = DispatchMark(entry.index, entry.term, store_timestamp_ms)
        return 1

    def _dispatch_message(self, entry: LedgerEntry, arrived: dict[Queue, None]) -> int:
        body = entry.body
        fields = summarize_record(body)
        transaction = fields.sys_flag & SYS_FLAG_TRANSACTION_MASK
        if transaction not in (0, SYS_FLAG_TRANSACTION_COMMIT):
            return fields.store_timestamp_ms
        if fields.physical_offset != entry.body_pos:
            raise ValueError(f"lies at {entry.body_pos} and says {fields.physical_offset}")
        queue = (fields.topic, fields.queue_id)
        if self._queues.find(*queue) is None:
            check_stored_topic(fields.topic)
        added = self._queues.append(
            fields.topic,
            fields.queue_id,
            fields.queue_offset,
            physical_offset=fields.physical_offset,
            size_bytes=len(body),
            tag_hash=tag_hash(fields.tags) if fields.topic != SCHEDULE_TOPIC else _due_ms(fields),
            crc=zlib.crc32(body),
            first_offset=fields.queue_offset if self._log.ledger_begin_index > 0 else 0,
        )
        if added:
            arrived[queue] = None
            if tells_by_body(fields):
                fields = fields._replace(body=decode_record(body)[0].body)
            for derive in self._derive:
                derive(fields)
        else:
            self.repeated_total += 1
            logger.error(
                "log entry %d claims number %d of queue %s/%d, which is taken",
                entry.index, fields.queue_offset, *queue,
            )  # fmt: skip
        return fields.store_timestamp_ms

    def _complete_waiters(self) -> None:
        while self._waiters and self._waiters[0][0] <= self._mark.index:
            future = heapq.heappop(self._waiters)[2]
            if not future.done():
                future.set_result(None)

    def _fail(self, failure: DispatchFailed) -> None:
        logger.error("dispatch stopped: %s", failure)
        self.failure = failure
        self.failed.set()
        self._fail_waiters(failure)

    def _fail_waiters(self, failure: DispatchFailed) -> None:
        waiters, self._waiters = self._waiters, []
        for _, _, future in waiters:
            if not future.done():
                future.set_exception(failure)

    async def _checkpoint_forever(self) -> None:
        loop = asyncio.get_running_loop()
        interval_s = CHECKPOINT_INTERVAL_S
        while True:
            await self._work.wait()
            try:
                await asyncio.wait_for(self._urgent.wait(), interval_s)
            except TimeoutError:
                pass
            self._work.clear()
            self._urgent.clear()
            began_s = loop.time()
            try:
                succeeded = await self._checkpoint()
            except Exception:  # if this task ended, dispatch would stall sooner or later
                logger.exception("a checkpoint of the queues met an error of its own")
                succeeded = False
            interval_s = max(CHECKPOINT_INTERVAL_S, (loop.time() - began_s) / CHECKPOINT_SHARE)
            if not succeeded:
                self._work.set()
                await asyncio.sleep(CHECKPOINT_INTERVAL_S)
            self.notify()

    async def _checkpoint(self) -> bool:
        async with self._checkpointing:
            return await self._write_checkpoint()

    async def _write_checkpoint(self) -> bool:
        mark = self._mark
        if mark.index == self._checkpointed_index and not self._is_trimmed:
            return True
        if self.failure is not None:
            return True  # the queues may hold a part of the entry after the mark
        self._is_trimmed, was_trimmed = False, self._is_trimmed
        try:
            derived = {name: derivation.snapshot() for name, derivation in self._derivations.items()}
            index_ms = self._index_timestamp_ms()
            await self._queues.checkpoint(
                mark, derived, self._flush_derivations, lambda: self._timestamps(mark.store_timestamp_ms, index_ms)
            )
        except OSError as error:
            logger.error("consume queues could not be written: %s", error)
            self._is_trimmed |= was_trimmed
            return False
        self._checkpointed_index = mark.index
        return True

    def _timestamps(self, queues_ms: int, index_ms: int) -> StoreTimestamps:
        durable_index = self._log.durable_index
        while self._dispatched and self._dispatched[0][0] <= durable_index:
            self._durable_ms = max(self._durable_ms, self._dispatched.popleft()[1])
        return StoreTimestamps(physic_msg_ms=self._durable_ms, logics_msg_ms=queues_ms, index_msg_ms=index_ms)


class _End(NamedTuple):
    """The entry that a batch ends with."""

    last_index: int
    term: int


def _due_ms(record: RecordSummary) -> int:
    """When a delayed message may be delivered: its unit carries this instead of a tag hash (R)."""
    level = min(max(record.queue_id, 0), len(DELAY_LEVELS_MS) - 1)
    return record.store_timestamp_ms + DELAY_LEVELS_MS[level]
