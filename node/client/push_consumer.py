"""Consumers that call the program's handler: concurrently and in any order, or queue by queue in order.

If the handler returns None or ConsumeResult.DONE, the messages are processed; if it raises an exception or returns
ConsumeResult.LATER, they are delivered again. Every message is delivered at least once, and more than once after a
crash, a rebalance or a lost answer: handlers must tolerate that (`message_id` is the same for every copy).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final

from node.client.consumer import GroupConsumer
from node.client.errors import ClientError, error_from_reply
from node.client.giving_back import GivingBack
from node.client.messages import MessageQueue, ReceivedMessage
from node.client.reader import QueueReader
from node.client.requests import lock_request, read_locked
from node.client.session import Session
from node.client.subscriptions import MessageModel, SqlFilter
from node.remoting import RequestCode, ResponseCode
from node.remoting.tool_json import to_json

__all__ = ["ConsumeResult", "Handler", "PushConsumer"]

logger = logging.getLogger("node.client")

MAX_CONCURRENCY: Final = 1000
MAX_RECONSUME_TIMES: Final = 16
"""Deliveries after the first one before a message goes to the dead letters (R)."""
RETRY_HERE_PAUSE_S: Final = 5.0
"""Pause before messages that could not be sent back are handled again (R)."""


class ConsumeResult(Enum):
    """A handler's result for its messages."""

    DONE = "done"
    LATER = "later"
    """Deliver them again."""


_RESULTS: Final = {ConsumeResult.DONE: "CR_SUCCESS", ConsumeResult.LATER: "CR_LATER"}
"""R: CMResult."""

Handler = Callable[[Sequence[ReceivedMessage]], Awaitable[ConsumeResult | None]]


class PushConsumer(GroupConsumer):
    """Calls `handler` with up to `batch_size` messages of one queue at a time. Made by `Client.push_consumer`.

    Not ordered: up to `concurrency` calls at once; failed messages are sent back to the broker, which delivers them
    again after a growing delay (10 s, 30 s, 1 min, ...), and to the dead letters after `max_reconsume_times`.

    Ordered: one call per queue at a time, in the order of the queue, by one member of the group at a time (brokers
    lock queues for it); failed messages are retried in place after a pause, and block their queue until they succeed or
    `max_reconsume_times` is exceeded (then they go to the dead letters; None means never).

    If the broker permanently refuses to take a message back, this client sends it to the retry topic; if that fails as
    well, the message is handled again here.

    Broadcasting: failed messages are not delivered again; exceptions of the handler are logged.
    """

    is_push = True

    def __init__(
        self,
        session: Session,
        group: str,
        handler: Handler,
        subscriptions: Mapping[str, str | SqlFilter],
        *,
        ordered: bool = False,
        batch_size: int = 1,
        concurrency: int = 20,
        max_reconsume_times: int | None = MAX_RECONSUME_TIMES,
        **options: Any,
    ) -> None:
        if batch_size < 1 or not 1 <= concurrency <= MAX_CONCURRENCY:
            raise ValueError(f"batch_size must be at least 1 and concurrency from 1 to {MAX_CONCURRENCY}")
        if max_reconsume_times is None and not ordered:
            raise ValueError("only an ordered consumer can try for ever")
        super().__init__(session, group, subscriptions, **options)
        self._handler = handler
        self._ordered = ordered
        self._locks = ordered and self._model is MessageModel.CLUSTERING
        self._batch_size = batch_size
        self._concurrency = concurrency
        self._max_reconsume_times = max_reconsume_times
        self._back = GivingBack(
            session, group, MAX_RECONSUME_TIMES if max_reconsume_times is None else max_reconsume_times
        )
        self._work: asyncio.Queue[tuple[QueueReader, list[ReceivedMessage]]] = asyncio.Queue()
        self._workers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        if not self._running:
            loop = asyncio.get_running_loop()
            if self._locks:
                self._workers.append(loop.create_task(self._keep_locks()))
            if not self._ordered:
                self._workers += [loop.create_task(self._handle_work()) for _ in range(self._concurrency)]
        await super().start()

    def _properties(self) -> dict[str, str]:
        return super()._properties() | {
            "PROP_CONSUMEORDERLY": "true" if self._ordered else "false",
            "PROP_THREADPOOL_CORE_SIZE": str(self._concurrency),
        }

    async def handle_now(self, message: ReceivedMessage) -> bytes:
        """Call the handler with one message, even while it is handling others, and report the result. Nothing else
        follows from the result: no offset changes, and nothing is sent back."""
        begun_s = asyncio.get_running_loop().time()
        outcome = await self._call([message])
        result = _RESULTS[outcome] if isinstance(outcome, ConsumeResult) else "CR_THROW_EXCEPTION"
        reply = {
            "order": self._ordered,
            "autoCommit": True,
            "consumeResult": result,
            "remark": None if isinstance(outcome, ConsumeResult) else f"{type(outcome).__name__}: {outcome}",
            "spentTimeMills": round((asyncio.get_running_loop().time() - begun_s) * 1000),
        }
        return to_json(reply).encode()

    # Messages that have arrived

    async def take(self, reader: QueueReader, messages: list[ReceivedMessage]) -> None:
        batches = [messages[at : at + self._batch_size] for at in range(0, len(messages), self._batch_size)]
        if not self._ordered:
            for batch in batches:
                self._work.put_nowait((reader, batch))  # bounded: a reader waits when it has too many open
            return
        for batch in batches:
            if not await self._handle_in_order(reader, batch):
                return

    async def _handle_work(self) -> None:
        while True:
            reader, messages = await self._work.get()
            if not reader.dropped:
                await self._handle(reader, messages)

    async def _handle(self, reader: QueueReader, messages: list[ReceivedMessage]) -> None:
        reader.handling += 1
        try:
            if await self._call(messages) is ConsumeResult.DONE:
                reader.done(messages)
                return
            if self._model is MessageModel.BROADCASTING:
                reader.done(messages)
                return
            results = await asyncio.gather(*(self._back.give(reader.queue, message) for message in messages))
            reader.done([message for message, given in zip(messages, results, strict=True) if given])
            kept = [message for message, given in zip(messages, results, strict=True) if not given]
        finally:
            reader.handler_left()
        if kept:
            self.session.spawn(self._handle_again(reader, kept))

    async def _handle_again(self, reader: QueueReader, messages: list[ReceivedMessage]) -> None:
        await asyncio.sleep(RETRY_HERE_PAUSE_S)
        for message in messages:
            message.reconsume_times += 1
        self._work.put_nowait((reader, messages))

    async def _handle_in_order(self, reader: QueueReader, messages: list[ReceivedMessage]) -> bool:
        """Handle a batch until it is done; False if the queue is no longer assigned to this member or locked for it."""
        while True:
            if reader.dropped:
                return False
            if self._locks and reader.locked_until_s < asyncio.get_running_loop().time():
                reader.forget_position()
                return False
            reader.handling += 1
            try:
                succeeded = await self._call(messages) is ConsumeResult.DONE
            finally:
                reader.handler_left()
            if succeeded or self._model is MessageModel.BROADCASTING:
                reader.done(messages)
                return True
            for message in messages:
                message.reconsume_times += 1
            limit = self._max_reconsume_times
            if limit is not None and messages[0].reconsume_times > limit:
                given = await asyncio.gather(*(self._back.bury(reader.queue, message) for message in messages))
                if all(given):
                    reader.done(messages)
                    return True
            await reader.pause(self.session.timings.retry_pause_s)

    async def _call(self, messages: list[ReceivedMessage]) -> ConsumeResult | Exception:
        """Call the handler: DONE unless it returned LATER or raised an exception, which is returned then."""
        try:
            is_later = await self._handler(messages) is ConsumeResult.LATER
            return ConsumeResult.LATER if is_later else ConsumeResult.DONE
        except Exception as error:
            self.session.complaints.warning(
                logger, f"handler {self._group}", "the handler of group %s failed with %d messages from %s: %r",
                self._group, len(messages), messages[0].queue, error,
            )  # fmt: skip
            return error

    # Locks of queues

    async def may_read(self, reader: QueueReader) -> bool:
        if self._holds(reader):
            return True
        await self.session.routes.get(reader.queue.topic)
        await self._lock(reader.queue.broker_name, [reader])
        if reader.locked_until_s < asyncio.get_running_loop().time():
            return False
        reader.forget_position()
        return True

    def _holds(self, reader: QueueReader) -> bool:
        return not self._locks or reader.locked_until_s >= asyncio.get_running_loop().time()

    async def _keep_locks(self) -> None:
        while True:
            await asyncio.sleep(self.session.timings.lock_interval_s)
            by_broker: dict[str, list[QueueReader]] = {}
            for reader in self._readers.values():
                if reader.locked_until_s > float("-inf"):
                    by_broker.setdefault(reader.queue.broker_name, []).append(reader)
            for broker_name, readers in by_broker.items():
                try:
                    await self._lock(broker_name, readers)
                except ClientError as error:
                    self.session.complaints.warning(logger, f"lock {broker_name}", "locking queues: %s", error)

    async def _lock(self, broker_name: str, readers: Sequence[QueueReader]) -> None:
        """Lock queues of one broker, or renew their locks. Raises ClientError; existing locks then last until their
        lease is over."""
        asked_s = asyncio.get_running_loop().time()
        address = self.session.routes.require_master(broker_name)
        request = self._lock_request(RequestCode.LOCK_BATCH_MQ, readers)
        reply = await self.session.requests.invoke(address, request)
        if reply.code != ResponseCode.SUCCESS:
            raise error_from_reply(reply.code, reply.remark, address)
        try:
            locked = read_locked(reply)
        except ValueError as error:
            raise error_from_reply(ResponseCode.SYSTEM_ERROR, str(error), address) from None
        for reader in readers:
            lease_s = self.session.timings.lock_lease_s
            reader.locked_until_s = asked_s + lease_s if reader.queue in locked else float("-inf")

    def _lock_request(self, code: RequestCode, readers: Iterable[QueueReader]) -> Any:
        queues: list[MessageQueue] = [reader.queue for reader in readers]
        return lock_request(code, self._group, self.session.client_id, queues)

    async def _released(self, reader: QueueReader) -> None:
        if not self._locks or reader.locked_until_s < asyncio.get_running_loop().time():
            return
        try:
            address = self.session.routes.require_master(reader.queue.broker_name)
            await self.session.requests.invoke(address, self._lock_request(RequestCode.UNLOCK_BATCH_MQ, [reader]))
        except ClientError as error:
            self.session.complaints.warning(logger, f"unlock {self._group}", "unlocking a queue: %s", error)

    async def _stopped(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
