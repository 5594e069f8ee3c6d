"""Reads one queue for a consumer: where to start, one pull after the other, and the offset to commit.

A reader is a task for as long as its queue is assigned to the consumer. Messages that were handed out and are not
processed yet hold the committed offset back, so everything below it was processed, in whatever order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Final, Protocol

from node.client.errors import BrokerRefused, ClientError
from node.client.messages import MessageQueue, ReceivedMessage
from node.client.results import MASTER_ID, PullResult, PullStatus
from node.client.session import Session
from node.client.subscriptions import Subscription

__all__ = ["OffsetTracker", "QueueReader", "ReadingConsumer"]

logger = logging.getLogger("node.client")

MAX_OPEN_MESSAGES: Final = 1000
"""Limit on messages of one queue that are held and not processed yet (R: pullThresholdForQueue)."""
MAX_OPEN_BYTES: Final = 64 * 1024 * 1024
"""Limit on their bytes over all queues of a consumer; above it, a queue with such messages is not read further."""
PULL_MESSAGES: Final = 32
"""Messages requested at once (R: pullBatchSize)."""
MASTER_AWAY_S: Final = 5.0
"""How long slaves are read after the master could not be read."""


class OffsetTracker:
    """Which messages of a queue are open (handed out and not processed), and the offset below which none is."""

    def __init__(self, offset: int) -> None:
        self.next_offset = offset
        """The offset to read next."""
        self.open_bytes = 0
        self._open: dict[int, int] = {}

    @property
    def open_count(self) -> int:
        """Number of open messages."""
        return len(self._open)

    @property
    def open_range(self) -> tuple[int, int]:
        """The first and the last offset of the open messages; zeros if there are none."""
        return min(self._open, default=0), max(self._open, default=0)

    @property
    def committed_offset(self) -> int:
        """Every message below was processed."""
        return min(self._open, default=self.next_offset)

    def is_open(self, offset: int) -> bool:
        """Whether the message is open."""
        return offset in self._open

    def opened(self, offset: int, size_bytes: int) -> None:
        """A message was handed out."""
        self.open_bytes += size_bytes - self._open.get(offset, 0)
        self._open[offset] = size_bytes

    def done(self, offset: int) -> None:
        """A message was processed."""
        self.open_bytes -= self._open.pop(offset, 0)


class ReadingConsumer(Protocol):
    """The consumer for which a queue is read."""

    session: Session

    @property
    def group(self) -> str: ...

    @property
    def open_bytes(self) -> int:
        """Bytes of messages that were read and are not processed yet."""
        ...

    async def may_read(self, reader: QueueReader) -> bool:
        """Whether the queue may be read now. Raises ClientError."""
        ...

    async def first_offset(self, queue: MessageQueue) -> int:
        """The offset to start at. Raises ClientError or OSError."""
        ...

    async def take(self, reader: QueueReader, messages: list[ReceivedMessage]) -> None:
        """Messages have arrived."""
        ...


class QueueReader:
    """Reads `queue` for `consumer` until it is stopped."""

    def __init__(self, consumer: ReadingConsumer, queue: MessageQueue, subscription: Subscription) -> None:
        self.queue = queue
        self.subscription = subscription
        self.tracker: OffsetTracker | None = None
        """None until the offset to start at is known."""
        self.dropped = False
        self.has_appeared = False
        """Whether the queue appeared after its consumer had started, as far as the consumer knows."""
        self.handling = 0
        """Running calls of the program's handler with messages of this queue."""
        self.locked_until_s = float("-inf")
        self.pulled_ms = self.handled_ms = consumer.session.runtime.clock.wall_ms()
        """When a pull was last answered, and when messages were last processed (ms of the epoch, for operators);
        initially when this reader was created."""
        self.saved_offset = -1
        self.repeated_at_s = float("-inf")
        """When the offset last had its turn to be saved even if unchanged (loop time)."""
        self._suggested_id = MASTER_ID
        self._master_away_until_s = float("-inf")
        self._consumer = consumer
        self._changed = asyncio.Event()
        self._interruptible = True
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start reading."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Stop reading; returns when no handler has messages of this queue any more."""
        self.dropped = True
        self._changed.set()
        if self._task is not None:
            if self._interruptible:
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        while self.handling:
            self._changed.clear()
            await self._changed.wait()

    def seek(self, offset: int) -> None:
        """Continue at `offset`, at once: this ends a held pull or a wait for room. Messages handed out already are not
        recalled."""
        self.tracker = OffsetTracker(offset)
        if self._task is not None:
            self._task.cancel()
            self.start()

    def forget_position(self) -> None:
        """Load the offset again before reading on: another member may have read the queue meanwhile."""
        self.tracker = None

    def has_open(self, message: ReceivedMessage) -> bool:
        """Whether the message is open; not after a `seek`."""
        return self.tracker is not None and self.tracker.is_open(message.queue_offset)

    async def pause(self, pause_s: float) -> None:
        """Wait, at most until the reader is stopped."""
        self._changed.clear()
        if not self.dropped:
            try:
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def done(self, messages: Iterable[ReceivedMessage]) -> None:
        """These messages were processed."""
        self.handled_ms = self._consumer.session.runtime.clock.wall_ms()
        if self.tracker is not None:
            for message in messages:
                self.tracker.done(message.queue_offset)
        self._changed.set()

    def handler_left(self) -> None:
        """A call of the handler is over."""
        self.handling -= 1
        self._changed.set()

    async def _run(self) -> None:
        consumer = self._consumer
        session = consumer.session
        while not self.dropped:
            try:
                if not await consumer.may_read(self):
                    await asyncio.sleep(session.timings.retry_pause_s)
                    continue
                await session.routes.get(self.queue.topic)
                if self.tracker is None:
                    self.tracker = OffsetTracker(await consumer.first_offset(self.queue))
                await self._wait_for_room(self.tracker)
                tracker = self.tracker
                if tracker is not None:
                    await self._take(tracker, await self._pull(tracker.next_offset))
            except ClientError as error:
                self._look_elsewhere(error)
                session.routes.failed(self.queue.broker_name, self.queue.topic, error)
                session.complaints.warning(logger, f"pull {self.queue}", "reading %s: %s", self.queue, error)
                await asyncio.sleep(session.timings.retry_pause_s)
            except OSError as error:
                session.complaints.warning(logger, f"pull {self.queue}", "reading %s: %s", self.queue, error)
                await asyncio.sleep(session.timings.retry_pause_s)

    async def _pull(self, offset: int) -> PullResult:
        session, subscription = self._consumer.session, self.subscription
        return await session.requests.pull(
            self.queue.topic, self.queue.queue_id, offset, PULL_MESSAGES,
            subscription=subscription.expression, suspend_ms=session.timings.pull_suspend_ms,
            address=self._reading_address(), group=self._consumer.group,
            expression_type=subscription.expression_type, version=subscription.version,
        )  # fmt: skip

    def _reading_address(self) -> str:
        """The master, or the slave that it suggests if the reader is far behind; any slave while it is away (S4)."""
        away = asyncio.get_running_loop().time() < self._master_away_until_s
        return self._consumer.session.routes.reader(self.queue.broker_name, None if away else self._suggested_id)

    def _look_elsewhere(self, error: ClientError) -> None:
        """After a failure of the master, read from a slave; after one of a slave, from the master."""
        routes = self._consumer.session.routes
        if error.address is not None and error.address in routes.slaves(self.queue.broker_name):
            self._master_away_until_s = float("-inf")
        elif not isinstance(error, BrokerRefused):
            self._master_away_until_s = asyncio.get_running_loop().time() + MASTER_AWAY_S
        self._suggested_id = MASTER_ID

    async def _take(self, tracker: OffsetTracker, result: PullResult) -> None:
        if self.dropped or self.tracker is not tracker:
            return
        self.pulled_ms = self._consumer.session.runtime.clock.wall_ms()
        self._suggested_id = result.suggested_broker_id
        if result.status is PullStatus.OFFSET_ILLEGAL and self._is_ahead_of_a_slave(tracker, result):
            # A slave does not have yet what this consumer has read already: going back would only repeat it.
            await self.pause(self._consumer.session.timings.retry_pause_s)
            return
        if self._is_sent_back(tracker, result):
            await self.pause(self._consumer.session.timings.retry_pause_s)
            return
        if result.status is PullStatus.OFFSET_ILLEGAL:
            self._consumer.session.complaints.warning(
                logger, f"offset {self.queue}", "offset %d of %s does not exist; going on at %d", tracker.next_offset,
                self.queue, result.next_offset,
            )  # fmt: skip
        messages: list[ReceivedMessage] = []
        for stored in result.messages:
            if self.subscription.passes(stored):
                tracker.opened(stored.queue_offset, len(stored.body))
                messages.append(ReceivedMessage(stored, self.queue))
        tracker.next_offset = result.next_offset
        if messages:
            self._interruptible = False
            try:
                await self._consumer.take(self, messages)
            finally:
                self._interruptible = True

    def _is_ahead_of_a_slave(self, tracker: OffsetTracker, result: PullResult) -> bool:
        slaves = self._consumer.session.routes.slaves(self.queue.broker_name)
        return result.address in slaves and tracker.next_offset > result.max_offset

    def _is_sent_back(self, tracker: OffsetTracker, result: PullResult) -> bool:
        """Whether a slave lacks the requested messages, and no other broker can be asked now."""
        is_lacking = result.status is PullStatus.NO_MATCH and result.next_offset == tracker.next_offset
        return is_lacking and self._reading_address() == result.address

    async def _wait_for_room(self, tracker: OffsetTracker) -> None:
        while tracker.open_count >= MAX_OPEN_MESSAGES or (
            tracker.open_count and self._consumer.open_bytes >= MAX_OPEN_BYTES
        ):
            self._changed.clear()
            await self._changed.wait()
