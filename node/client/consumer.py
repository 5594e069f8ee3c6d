"""A member of a consumer group: the queues assigned to it, where it continues reading, what it commits."""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final

from node.client.allocation import AllocationStrategy, allocate_averagely
from node.client.errors import ClientError, NoRoute, error_from_reply
from node.client.messages import MessageQueue, ReceivedMessage, retry_topic
from node.client.offsets import BrokerOffsets, OffsetStore
from node.client.reader import QueueReader
from node.client.requests import read_consumer_ids
from node.client.routes import RouteBook
from node.client.running_info import consumer_status, running_info
from node.client.session import Session
from node.client.subscriptions import MessageModel, SqlFilter, StartFrom, Subscription, consumer_data
from node.config import check_topic_name
from node.remoting import Command, FieldValue, RequestCode, RequestError, ResponseCode

__all__ = ["GroupConsumer"]

logger = logging.getLogger("node.client")

MAX_SUBSCRIPTIONS: Final = 1000
"""Limit on topics of one consumer: each is in every heartbeat."""
SAVE_ANYWAY_S: Final = 30.0
"""Within this time a queue's offset is saved again even if it has not changed: a broker that was killed, or that took
over before it had copied the offsets, has an older one, and only the consumer can correct it. R saves all of them every
5 s; this is a sixth of those requests."""


class GroupConsumer(ABC):
    """The common base of push and pull consumers. Subclasses define what happens to messages (`take`)."""

    is_push = False

    def __init__(
        self,
        session: Session,
        group: str,
        subscriptions: Mapping[str, str | SqlFilter],
        *,
        model: MessageModel = MessageModel.CLUSTERING,
        start_from: StartFrom = StartFrom.LAST,
        start_timestamp_ms: int = 0,
        allocate: AllocationStrategy = allocate_averagely,
        offsets: OffsetStore | None = None,
    ) -> None:
        check_topic_name(group)
        if len(subscriptions) > MAX_SUBSCRIPTIONS:
            raise ValueError(f"{len(subscriptions)} subscriptions, at most {MAX_SUBSCRIPTIONS} are possible")
        if offsets is None and model is MessageModel.BROADCASTING:
            raise ValueError("a broadcasting consumer keeps its own offsets; give it a LocalOffsets")
        self.session = session
        self._group = group
        self._model = model
        self._start_from = start_from
        self._start_timestamp_ms = start_timestamp_ms
        self._allocate = allocate
        self.offsets: OffsetStore = offsets or BrokerOffsets(session, group)
        version = session.runtime.clock.wall_ms()
        self._subscriptions: dict[str, Subscription] = {}
        for topic, wanted in subscriptions.items():
            if isinstance(wanted, SqlFilter):
                made = Subscription(topic=topic, expression=wanted.expression, is_sql=True, version=version)
            else:
                made = Subscription(topic=topic, expression=wanted or "*", version=version)
            self._subscriptions[topic] = made
        if self._model is MessageModel.CLUSTERING and self.is_push:
            back = retry_topic(group)
            self._subscriptions[back] = Subscription(topic=back, expression="*", version=version)
        self._readers: dict[MessageQueue, QueueReader] = {}
        self._leaving: dict[MessageQueue, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._rebalance_wanted = asyncio.Event()
        self._running = False
        self._started_ms = 0
        self._queried_topics: set[str] = set()
        """Topics whose queues were requested before, whether there were any or not."""

    async def __aenter__(self) -> Any:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._group

    @property
    def assigned(self) -> list[MessageQueue]:
        """The queues that this member reads now, those of the retry topic included."""
        return sorted(self._readers)

    @property
    def open_bytes(self) -> int:
        """Bytes of messages that were read and are not processed yet."""
        return sum(reader.tracker.open_bytes for reader in self._readers.values() if reader.tracker is not None)

    async def start(self) -> None:
        """Join the group and start. Returns at once; unavailable brokers are waited for in the background. Raises
        ValueError if this client already has a consumer of the group."""
        if self._running:
            return
        self._running = True
        self._started_ms = self.session.runtime.clock.wall_ms()
        self._queried_topics.clear()
        self.session.join(self)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._keep_balanced()), loop.create_task(self._keep_saved())]

    async def stop(self) -> None:
        """Stop reading, wait for running handlers (at most the drain timeout), commit, and leave. Idempotent."""
        if not self._running:
            return
        self._running = False
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for queue in list(self._readers):
            self._revoke(queue)
        if self._leaving:
            await asyncio.wait(list(self._leaving.values()), timeout=self.session.timings.drain_timeout_s)
        await self._stopped()
        await self.session.leave(self)

    async def commit(self) -> None:
        """Save this member's offsets now. Raises ClientError or OSError."""
        await self._save(self._changed_offsets())

    # For the session

    def consumer_data(self) -> Mapping[str, Any] | None:
        return consumer_data(
            self._group, self._model, self._start_from, self._subscriptions.values(), is_push=self.is_push
        )

    def members_changed(self) -> None:
        self._rebalance_wanted.set()

    async def check_transaction(self, command: Command, address: str) -> None:
        """Consumers have no transactions."""
        return None

    def reset_offsets(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Continue from these offsets in the queues that this member reads (R: MQClientInstance.resetOffset). Messages
        read and not handled yet are dropped; running handlers are waited for, and their results ignored."""
        for queue, offset in offsets.items():
            if queue in self._readers:
                logger.info("group %s goes on at offset %d of %s, as an operator asked", self._group, offset, queue)
                self._revoke(queue, offset)

    def running_info(self) -> bytes:
        """The reply to an operator who asks for this consumer's state (R: ConsumerRunningInfo)."""
        return running_info(
            self._properties(), self._subscriptions.values(), self._readers.values(),
            now_s=asyncio.get_running_loop().time(), wall_ms=self.session.runtime.clock.wall_ms(),
            lock_lease_s=self.session.timings.lock_lease_s,
        )  # fmt: skip

    def consumer_status(self, topic: str) -> bytes:
        """The reply to an operator who asks for this consumer's offsets in a topic (R: GetConsumerStatusBody)."""
        return consumer_status(reader for reader in self._readers.values() if reader.queue.topic == topic)

    async def handle_now(self, message: ReceivedMessage) -> bytes:
        """Only consumers with a handler can do so. Raises RequestError."""
        raise RequestError(ResponseCode.SYSTEM_ERROR, f"the consumer of group {self._group!r} has no handler: it polls")

    def _properties(self) -> dict[str, str]:
        """This consumer's properties, by R's names."""
        return {
            "PROP_CLIENT_VERSION": "V4_9_8",  # what PROTOCOL_VERSION says in each request
            "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY" if self.is_push else "CONSUME_ACTIVELY",
            "PROP_CONSUMER_START_TIMESTAMP": str(self._started_ms),
        }

    # For readers

    async def may_read(self, reader: QueueReader) -> bool:
        """Whether the queue may be read now. Raises ClientError."""
        return True

    @abstractmethod
    async def take(self, reader: QueueReader, messages: list[ReceivedMessage]) -> None:
        """Messages have arrived: process them, or keep them until the program does."""

    async def first_offset(self, queue: MessageQueue) -> int:
        """Where to start: at the saved offset, or where `start_from` says. Raises ClientError or OSError.

        LAST means the end of the queue, except for a queue that appeared while a broadcasting member was running:
        messages sent there before the member noticed are new to it too, so it starts with those stored since its own
        start (not with the first one: the queue may be an old one, of a broker that was away). For shared groups the
        broker decides, and answers 0 for a young queue; it keeps no offsets of broadcasting groups.
        """
        kept = await self.offsets.load(queue)
        if kept is not None:
            return kept
        requests = self.session.requests
        address = self.session.routes.require_master(queue.broker_name)
        if queue.topic == retry_topic(self._group):
            return 0
        if self._start_from is StartFrom.FIRST:
            return await requests.min_offset(queue.topic, queue.queue_id, address=address)
        if self._start_from is StartFrom.TIMESTAMP:
            return await self._offset_at(queue, self._start_timestamp_ms, address)
        reader = self._readers.get(queue)
        if self._model is MessageModel.BROADCASTING and reader is not None and reader.has_appeared:
            return await self._offset_at(queue, self._started_ms, address)
        return await requests.max_offset(queue.topic, queue.queue_id, address=address)

    async def _offset_at(self, queue: MessageQueue, timestamp_ms: int, address: str) -> int:
        """Offset of the first message stored at this time (ms of the epoch) or later. Raises ClientError."""
        fields: dict[str, FieldValue] = {"topic": queue.topic, "queueId": queue.queue_id, "timestamp": timestamp_ms}
        request = Command.request(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, fields)
        reply = await self.session.requests.invoke(address, request)
        if reply.code != ResponseCode.SUCCESS:
            raise error_from_reply(reply.code, reply.remark, address)
        try:
            return reply.get_int("offset")
        except RequestError as error:
            raise error_from_reply(ResponseCode.SYSTEM_ERROR, error.remark, address) from None

    # Inside

    async def _stopped(self) -> None:
        """All queues are revoked; subclasses end what they have running."""
        return None

    async def _released(self, reader: QueueReader) -> None:
        """A queue is no longer read and its offset is saved; subclasses release what they hold for it."""
        return None

    async def _keep_balanced(self) -> None:
        while True:
            self._rebalance_wanted.clear()
            settled = await self._rebalance()
            pause_s = self.session.timings.rebalance_interval_s
            if not settled:
                pause_s = min(self.session.timings.retry_pause_s, pause_s)
            try:
                async with asyncio.timeout(pause_s):
                    await self._rebalance_wanted.wait()
            except TimeoutError:
                pass

    async def _rebalance(self) -> bool:
        """Determine which queues are assigned to this member; False if this should be tried again soon."""
        settled = True
        for subscription in list(self._subscriptions.values()):
            was_queried = subscription.topic in self._queried_topics
            self._queried_topics.add(subscription.topic)
            try:
                mine = await self._share_of(subscription.topic)
            except ClientError as error:
                settled = False
                if subscription.topic == retry_topic(self._group) and error.code == ResponseCode.TOPIC_NOT_EXIST:
                    continue  # brokers create it when they have heard of the group
                self.session.complaints.warning(
                    logger, f"rebalance {subscription.topic}", "group %s, topic %s: %s", self._group,
                    subscription.topic, error,
                )  # fmt: skip
                continue
            for queue in [queue for queue in self._readers if queue.topic == subscription.topic]:
                if queue not in mine:
                    self._revoke(queue)
            for queue in mine:
                if queue in self._leaving:
                    settled = False
                elif queue not in self._readers:
                    reader = self._readers[queue] = QueueReader(self, queue, subscription)
                    reader.has_appeared = was_queried
                    reader.start()
        return settled

    async def _share_of(self, topic: str) -> list[MessageQueue]:
        route = await self.session.routes.get(topic)
        queues = RouteBook.read_queues(route)
        if self._model is MessageModel.BROADCASTING or not queues:
            return queues
        own_id = self.session.client_id
        members = await self._member_ids([group.name for group in route.groups])
        if own_id not in members:
            await self.session.heartbeat()
            members = await self._member_ids([group.name for group in route.groups])
        return self._allocate(own_id, queues, members)

    async def _member_ids(self, broker_names: list[str]) -> list[str]:
        """The members as listed by the first broker that answers, masters before slaves: all of them get heartbeats.
        Raises ClientError; no answer does not mean no members."""
        routes = self.session.routes
        failure: ClientError = NoRoute("no broker of the topic is known")
        masters = [(name, master) for name in sorted(broker_names) if (master := routes.master(name)) is not None]
        slaves = [(name, address) for name in sorted(broker_names) for address in routes.slaves(name)]
        for number, (name, address) in enumerate([*masters, *slaves]):
            try:
                request = Command.request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": self._group})
                reply = await self.session.requests.invoke(address, request)
                if reply.code == ResponseCode.SUCCESS:
                    return read_consumer_ids(reply)
                if reply.code == ResponseCode.SYSTEM_ERROR:
                    return []  # it knows no member, not even us
                failure = error_from_reply(reply.code, reply.remark, address)
            except ClientError as error:
                failure = error
            except ValueError as error:
                failure = error_from_reply(ResponseCode.SYSTEM_ERROR, str(error), address)
            if number < len(masters):
                for topic in self._subscriptions:
                    routes.failed(name, topic, failure)
        raise failure

    def _revoke(self, queue: MessageQueue, reset_to: int | None = None) -> None:
        """Stop reading a queue; with `reset_to`, save that offset, so that the queue's next reader starts there."""
        reader = self._readers.pop(queue)
        reader.dropped = True
        task = asyncio.get_running_loop().create_task(self._let_go(reader, reset_to))
        self._leaving[queue] = task
        task.add_done_callback(lambda _: self._left(queue))

    def _left(self, queue: MessageQueue) -> None:
        self._leaving.pop(queue, None)
        self._rebalance_wanted.set()

    async def _let_go(self, reader: QueueReader, reset_to: int | None) -> None:
        if reset_to is not None:
            await self._save_quietly({reader.queue: reset_to})  # at once: a handler may take long
        await reader.stop()
        if reset_to is None and reader.tracker is not None:
            await self._save_quietly({reader.queue: reader.tracker.committed_offset})
        await self._released(reader)

    async def _keep_saved(self) -> None:
        while True:
            await asyncio.sleep(self.session.timings.persist_interval_s)
            await self._save_quietly(self._repeated_offsets() | self._changed_offsets())

    def _changed_offsets(self) -> dict[MessageQueue, int]:
        """Offsets that have changed since they were saved."""
        changed = {}
        for queue, reader in self._readers.items():
            if reader.tracker is not None and reader.tracker.committed_offset != reader.saved_offset:
                changed[queue] = reader.tracker.committed_offset
        return changed

    def _repeated_offsets(self) -> dict[MessageQueue, int]:
        """Offsets whose turn it is to be saved again: enough of them that each has its turn within SAVE_ANYWAY_S."""
        if not isinstance(self.offsets, BrokerOffsets):
            return {}  # a file forgets nothing
        count = math.ceil(len(self._readers) * self.session.timings.persist_interval_s / SAVE_ANYWAY_S)
        now_s = asyncio.get_running_loop().time()
        repeats = {}
        for reader in heapq.nsmallest(count, self._readers.values(), key=lambda reader: reader.repeated_at_s):
            reader.repeated_at_s = now_s  # even if it fails: an unavailable broker must not take the others' turns
            if reader.tracker is not None and self._holds(reader):
                repeats[reader.queue] = reader.tracker.committed_offset
        return repeats

    def _holds(self, reader: QueueReader) -> bool:
        """Whether nobody else reads the queue, as far as this member knows."""
        return True

    async def _save(self, offsets: dict[MessageQueue, int]) -> None:
        if not offsets:
            return
        readers = {queue: self._readers.get(queue) for queue in offsets}  # as of now: a reset replaces a queue's reader
        await self.offsets.save(offsets)
        for queue, reader in readers.items():
            if reader is not None:
                reader.saved_offset = offsets[queue]

    async def _save_quietly(self, offsets: dict[MessageQueue, int]) -> None:
        try:
            await self._save(offsets)
        except (ClientError, OSError) as error:
            self._complain_of_saving(error)

    def _complain_of_saving(self, error: Exception) -> None:
        self.session.complaints.warning(
            logger, f"save {self._group}", "the offsets of group %s were not kept: %s", self._group, error
        )
