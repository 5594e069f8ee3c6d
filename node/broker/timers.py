"""Timer messages of RocketMQ 5: delivered at a time that the sender gives, at most three days ahead.

A message with TIMER_DELIVER_MS, TIMER_DELAY_SEC or TIMER_DELAY_MS waits in rmq_sys_wheel_timer, with its time in
TIMER_OUT_MS (R: HookUtils, TimerMessageStore). RocketMQ keeps a wheel of one-second slots beside its log; here the
times of all waiting messages are in memory, which bounds their number, and a message is delivered as soon as the
master's wall clock has reached its millisecond, never before.

As with delay levels (`delay.py`) the log itself tells what was delivered: a delivered message carries the offset
that it had in the queue of waiting messages. So neither a crash nor a change of masters loses one or delivers it twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from node.broker.append_errors import forget, read_message
from node.broker.dispatch_batch import DispatchBatch
from node.broker.due_queue import DueQueue
from node.broker.internal_topics import TIMER_TOPIC
from node.broker.ledger import LedgerStore
from node.broker.message_store import MessageStore
from node.broker.requeue import TIMER_SOURCE, copy_of, real_place, source_number, source_of
from node.runtime import Clock
from node.store.properties import REAL_QUEUE_ID, REAL_TOPIC, TIMER_DELIVERED, property_value, whole_number
from node.store.queue_store import QueueStore
from node.store.record import RecordError, RecordSummary

__all__ = ["MAX_OPEN_TIMERS", "OpenTimers", "TimerService"]

MAX_OPEN_TIMERS = 200_000
"""Timer messages that wait; beyond it further ones are refused. Each costs about 200 bytes of memory and 25 in
every checkpoint."""


class OpenTimers:
    """When each waiting message is due, by its offset in the timer queue, as derived from the log."""

    def __init__(self) -> None:
        self.due_ms: dict[int, int] = {}
        self.on_opened: Callable[[int, int], None] = lambda due_ms, number: None

    @property
    def is_full(self) -> bool:
        return len(self.due_ms) >= MAX_OPEN_TIMERS

    def dispatch(self, record: RecordSummary) -> None:
        """Note a waiting message, or that one was delivered."""
        if record.topic == TIMER_TOPIC:
            due_ms = whole_number(property_value(record.properties_text, TIMER_DELIVERED)) or 0
            self.due_ms[record.queue_offset] = due_ms
            self.on_opened(due_ms, record.queue_offset)
        elif record.prepared_transaction_offset < 0:
            kind, number = source_of(record.prepared_transaction_offset)
            if kind == TIMER_SOURCE:
                self.due_ms.pop(number, None)

    def dispatch_batch(self, batch: DispatchBatch) -> None:
        """Nothing is derived from messages that are not special."""

    def snapshot(self) -> Any:
        """Everything that waits."""
        return list(self.due_ms.items())

    def restore(self, state: Any) -> None:
        """Continue from a snapshot; None: from nothing."""
        self.due_ms = {number: due_ms for number, due_ms in state or ()}

    async def flush(self) -> None:
        """Nothing to do: the snapshot is the whole state."""


class TimerService:
    """Delivers while this node is master. `store_host` returns the address that records carry."""

    def __init__(
        self, *, store: MessageStore, log: LedgerStore, timers: OpenTimers, clock: Clock, store_host: Callable[[], str]
    ) -> None:
        self._store = store
        self._log = log
        self._timers = timers
        self._store_host = store_host
        self._queue = DueQueue("timer messages", now_ms=clock.wall_ms, act=self._deliver)
        self.delivered_total = 0
        """Messages put by this service since the start."""

    def start(self) -> None:
        """This node is master now: the whole log is dispatched, so what waits is exact."""
        self._timers.on_opened = self._queue.add
        self._queue.start((due_ms, number) for number, due_ms in self._timers.due_ms.items())

    def stop(self) -> None:
        """Stop delivering."""
        self._queue.stop()

    def _deliver(self, number: int) -> None:
        queues: QueueStore = self._store.queues
        queue = queues.find(TIMER_TOPIC, 0)
        if queue is None or number < queue.min_offset:
            self._timers.due_ms.pop(number, None)  # it was removed with the oldest files of the log
            return
        units = queue.read(number, 1)
        if not units:
            raise RecordError("is not in its queue")
        message = read_message(self._log, queues, units[0].physical_offset)
        topic, queue_id = real_place(message)
        properties = {
            name: value for name, value in message.properties.items() if name not in (REAL_TOPIC, REAL_QUEUE_ID)
        }
        source = source_number(TIMER_SOURCE, number)
        put = self._store.put_one(
            copy_of(
                message, topic=topic, queue_id=queue_id, properties=properties, store_host=self._store_host(),
                prepared_transaction_offset=source,
            )
        )  # fmt: skip
        forget(put.committed)
        self.delivered_total += 1
