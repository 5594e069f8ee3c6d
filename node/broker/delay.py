"""Delayed delivery: messages of a level wait in that level's queue and are put into their own when they are due.

A message with a delay level is stored in queue level - 1 of SCHEDULE_TOPIC_XXXX (R: ScheduleMessageService). Its unit
in that queue carries the time at which it is due: its store timestamp plus the level's delay. All messages of a level
wait equally long, so only the head of each queue needs a timer. RocketMQ polls every 100 ms; here one timer per
level fires when the head is due, and an empty level has none.

How far each level is delivered is derived from the log (see `requeue.py`), so it is exact after a restart, a
crash and a change of masters, and nothing has to be repeated. Only the master delivers.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from node.broker.append_errors import forget, read_message
from node.broker.dispatch_batch import DispatchBatch
from node.broker.internal_topics import DELAY_LEVELS_MS, SCHEDULE_TOPIC
from node.broker.ledger import DLedgerError, LedgerStore
from node.broker.message_store import MessageStore, NotWritable
from node.broker.requeue import copy_of, delay_source, delayed_source_of, real_place
from node.logs import LogLimiter
from node.runtime import Clock
from node.store.consume_queue import Unit
from node.store.properties import DELAY_LEVEL
from node.store.queue_store import QueueStore
from node.store.record import RecordError, RecordSummary

__all__ = ["DelayProgress", "DelayService"]

logger = logging.getLogger("node.broker")

LEVELS = len(DELAY_LEVELS_MS)
RECHECK_S = 1.0
"""Longest sleep while a message waits: a wall clock that was set forward is noticed within this time."""
RETRY_S = 10.0
"""Delay after a message could not be read or put (R: 10 s)."""
BUSY_RETRY_S = 0.5
"""Delay when the log accepts no more for the moment."""
DAMAGED_TRIES = 6
"""Tries of a damaged message before those after it are delivered without it: most of a minute."""
PORTION_MESSAGES = 64
"""Messages delivered in one turn of the loop."""
MAX_IN_FLIGHT = 512
"""Messages of one level that are put and not yet dispatched."""
MAX_ARRIVALS = 1000
"""Arrivals noted for each level; beyond it, further messages are due when the last of them is."""


class DelayProgress:
    """How far each level is delivered, derived from the log: `delivered[level]` is the next offset to deliver."""

    def __init__(self) -> None:
        self.delivered = [0] * (LEVELS + 1)
        self.on_progress: Callable[[int], None] = lambda level: None

    def dispatch(self, record: RecordSummary) -> None:
        """Note the progress if `record` is a delivered message."""
        if record.prepared_transaction_offset < 0:
            source = delayed_source_of(record.prepared_transaction_offset)
            if source is not None:
                level, offset = source
                self.delivered[level] = max(self.delivered[level], offset + 1)
                self.on_progress(level)

    def dispatch_batch(self, batch: DispatchBatch) -> None:
        """Nothing is derived from messages that are not special."""

    def snapshot(self) -> Any:
        """The next offsets, by level."""
        return self.delivered[1:]

    def restore(self, state: Any) -> None:
        """Continue from a snapshot; None: from nothing."""
        self.delivered = [0, *state] if state is not None else [0] * (LEVELS + 1)

    async def flush(self) -> None:
        """Nothing to do: the snapshot is the whole state."""

    def document(self) -> dict[str, Any]:
        """RocketMQ's JSON, the answer to code 45: {"offsetTable": {level: offset}}."""
        return {"offsetTable": {str(level): self.delivered[level] for level in range(1, LEVELS + 1)}}


class DelayService:
    """Delivers while this node is master. `store_host` returns the address that records carry."""

    def __init__(
        self,
        *,
        store: MessageStore,
        queues: QueueStore,
        log: LedgerStore,
        progress: DelayProgress,
        clock: Clock,
        store_host: Callable[[], str],
    ) -> None:
        self._store = store
        self._queues = queues
        self._log = log
        self._progress = progress
        self._clock = clock
        self._store_host = store_host
        self._running = False
        self._next = [0] * (LEVELS + 1)
        self._in_flight: list[deque[int]] = [deque() for _ in range(LEVELS + 1)]
        """By level, the messages that are put and not yet dispatched. A message that is skipped, because it was removed
        with the oldest files or has no valid destination, is never dispatched and is not among them."""
        self._timers: list[asyncio.TimerHandle | asyncio.Handle | None] = [None] * (LEVELS + 1)
        self._arrivals: list[deque[tuple[int, int]]] = [deque() for _ in range(LEVELS + 1)]
        """By level, for messages with store times ahead of the clock: messages below the first number (an offset)
        arrived early enough to be due at the second, in ms. Both rise."""
        self._damaged = [(-1, 0)] * (LEVELS + 1)
        """By level, the last message that was found damaged, and how many times in a row."""
        self._complaints = LogLimiter(lambda: asyncio.get_running_loop().time())
        self.delivered_total = 0
        """Messages put by this service since the start."""

    def start(self) -> None:
        """This node is master now: the whole log is dispatched, so the progress is exact."""
        self.stop()
        self._running = True
        self._next = list(self._progress.delivered)
        self._in_flight = [deque() for _ in range(LEVELS + 1)]
        self._damaged = [(-1, 0)] * (LEVELS + 1)
        self._progress.on_progress = self._progressed
        for level in range(1, LEVELS + 1):
            self._soon(level)

    def stop(self) -> None:
        """Stop delivering."""
        self._running = False
        for timer in self._timers:
            if timer is not None:
                timer.cancel()
        self._timers = [None] * (LEVELS + 1)

    def arrived(self, queue_id: int) -> None:
        """A message has entered a level's queue."""
        if not self._running or not 0 <= queue_id < LEVELS:
            return
        if self._store.last_store_timestamp_ms > self._clock.wall_ms():
            self._note_arrival(queue_id + 1)
        if self._timers[queue_id + 1] is None:
            self._soon(queue_id + 1)

    def _note_arrival(self, level: int) -> None:
        """Note when a message arrived. Store times never go back: after a clock was ahead, messages get the time of the
        last one before, until the clock has caught up. Only the time of their dispatch tells when they came."""
        queue, arrivals = self._queues.find(SCHEDULE_TOPIC, level - 1), self._arrivals[level]
        if queue is not None:
            due_ms = self._clock.wall_ms() + DELAY_LEVELS_MS[level - 1]
            if arrivals and (len(arrivals) >= MAX_ARRIVALS or arrivals[-1][1] >= due_ms):
                due_ms = max(due_ms, arrivals.pop()[1])
            arrivals.append((queue.max_offset, due_ms))

    def _progressed(self, level: int) -> None:
        if self._running and self._timers[level] is None:
            self._soon(level)

    def _soon(self, level: int) -> None:
        self._timers[level] = asyncio.get_running_loop().call_soon(self._run, level)

    def _later(self, level: int, delay_s: float) -> None:
        self._timers[level] = asyncio.get_running_loop().call_later(delay_s, self._run, level)

    def _run(self, level: int) -> None:
        """Deliver what is due, then wait: for the next head to be due, for a message, or for room in flight."""
        self._timers[level] = None
        queue = self._queues.find(SCHEDULE_TOPIC, level - 1)
        if queue is None or not self._running:
            return
        self._next[level] = max(self._next[level], queue.min_offset)
        in_flight = self._in_flight[level]
        while in_flight and in_flight[0] < self._progress.delivered[level]:
            in_flight.popleft()
        for _ in range(PORTION_MESSAGES):
            offset = self._next[level]
            if len(in_flight) >= MAX_IN_FLIGHT:
                return  # `_progressed` calls this again when one of them is dispatched
            try:
                units = queue.read(offset, 1)
                if not units:
                    return  # `arrived` calls this again when one comes
                wait_ms = self._due_ms(level, offset, units[0].tag_hash, queue.max_offset) - self._clock.wall_ms()
                if wait_ms > 0:
                    return self._later(level, min(wait_ms / 1000, RECHECK_S))
                self._deliver(level, offset, units[0])
            except NotWritable:
                return  # `start` begins anew when this node is master again
            except DLedgerError as error:
                self._complaints.warning(logger, "delay-put", "delay level %d waits: %s", level, error)
                return self._later(level, BUSY_RETRY_S)
            except (OSError, RecordError) as error:
                if not self._is_given_up(level, offset, error):
                    self._complaints.warning(logger, "delay", "delay level %d, message %d: %s", level, offset, error)
                    return self._later(level, RETRY_S)
            except Exception:
                logger.exception("delay level %d, message %d met an error of its own", level, offset)
                return self._later(level, RETRY_S)
            self._next[level] = offset + 1
        self._soon(level)

    def _is_given_up(self, level: int, offset: int, error: OSError | RecordError) -> bool:
        """Whether to skip a message that could not be delivered, because its record was found damaged often enough.
        If the disk only fails to return it, it is tried for ever. Until a later message of the level is delivered, a
        restart or another master tries it again."""
        if isinstance(error, OSError) and error.errno != errno.EBADMSG:
            return False
        before, tries = self._damaged[level]
        tries = tries + 1 if before == offset else 1
        self._damaged[level] = (offset, tries)
        if tries < DAMAGED_TRIES:
            return False
        logger.error("delay level %d, message %d: %s; skipping it after %d tries", level, offset, error, tries)
        return True

    def _due_ms(self, level: int, offset: int, due_ms: int, end_offset: int) -> int:
        """When a message is due. A time further away than the whole delay means that the clock was set back (R:
        correctDeliverTimestamp): the message then waits its delay once more, not the hours that the clock lost, and
        messages that were in the queue by then wait no longer than that."""
        latest_ms = self._clock.wall_ms() + DELAY_LEVELS_MS[level - 1]
        arrivals = self._arrivals[level]
        while arrivals and arrivals[0][0] <= offset:
            arrivals.popleft()
        if arrivals and arrivals[0][1] <= latest_ms:
            return min(due_ms, arrivals[0][1])
        if due_ms <= latest_ms:
            return due_ms
        arrivals.clear()  # the clock was set back once more
        arrivals.append((end_offset, latest_ms))
        return latest_ms

    def _deliver(self, level: int, offset: int, unit: Unit) -> None:
        message = read_message(self._log, self._queues, unit.physical_offset)
        if message.queue_offset != offset or message.topic != SCHEDULE_TOPIC:
            raise RecordError(f"is number {message.queue_offset} of {message.topic}, not of this level")
        properties = dict(message.properties)
        properties.pop(DELAY_LEVEL, None)
        try:
            topic, queue_id = real_place(message)
        except RecordError as error:
            logger.error("delay level %d, message %d: %s; skipping it", level, offset, error)
            return
        put = self._store.put_one(
            copy_of(
                message,
                topic=topic,
                queue_id=queue_id,
                properties=properties,
                store_host=self._store_host(),
                prepared_transaction_offset=delay_source(level, offset),
            )
        )
        forget(put.committed)
        self._in_flight[level].append(offset)
        self.delivered_total += 1
