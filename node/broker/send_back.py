"""Messages that a consumer could not handle (code 36): another try later, and finally the dead letter topic.

The message is copied into the group's retry topic with a delay that grows with each try; after the last one
allowed it goes to the group's dead letter topic, where nobody tries again (R: AbstractSendMessageProcessor,
consumerSendMsgBack). The same limit holds for clients that send to the retry topic themselves.

The copy has properties that the message may lack: where it comes from, its first id, its delay and, while it waits, its
real topic and queue. If there is no room for these, it is not stored, as in RocketMQ, whose answer is that of any put
that fails: SYSTEM_ERROR with the put's status as the remark. The client then retries the message by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from node.broker.append_errors import PUT_REFUSALS, read_message, refusal, stored
from node.broker.internal_topics import dlq_topic, retry_topic
from node.broker.ledger import LedgerStore
from node.broker.message_store import MessageStore
from node.broker.requeue import copy_of
from node.broker.subscription_groups import (
    DEFAULT_RETRY_MAX_TIMES,
    SubscriptionGroup,
    SubscriptionGroups,
    TooManyGroups,
)
from node.broker.topics import TopicTable, TopicTableFull
from node.config import TopicConfig, check_topic_name
from node.remoting import Command, Connection, RequestError, ResponseCode
from node.runtime import Runtime
from node.store.properties import DELAY_LEVEL, ORIGIN_MESSAGE_ID, RETRY_TOPIC
from node.store.record import SYS_FLAG_TRANSACTION_MASK, RecordError

__all__ = ["FIRST_RETRY_LEVEL", "RetryTopics", "SendBackProcessor"]

logger = logging.getLogger("node.broker")

PROPERTIES_SIZE_EXCEEDED = "PROPERTIES_SIZE_EXCEEDED"
"""R: the status of a put whose properties are too long."""

FIRST_RETRY_LEVEL = 3
"""Delay level of the first retry; each further one waits a level longer (R)."""


class RetryTopics:
    """Creates the topics for retries and dead letters of a group when they are first needed."""

    def __init__(
        self,
        *,
        topics: TopicTable,
        groups: SubscriptionGroups,
        auto_create_groups: bool,
        on_topics_changed: Callable[[], None],
    ) -> None:
        self._topics = topics
        self._groups = groups
        self.auto_create_groups = auto_create_groups
        """Whether a message that is sent back creates its group."""
        self._on_topics_changed = on_topics_changed
        self._making: dict[str, asyncio.Task[TopicConfig]] = {}

    def group(self, name: str) -> SubscriptionGroup:
        """The group's settings. Raises RequestError (SUBSCRIPTION_GROUP_NOT_EXIST)."""
        try:
            group = self._groups.find_or_create(name) if self.auto_create_groups else self._groups.get(name)
        except (TooManyGroups, ValueError) as error:
            raise RequestError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, str(error)) from error
        if group is None:
            raise RequestError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"group {name!r} does not exist")
        return group

    async def target(self, group: SubscriptionGroup, *, is_dead: bool) -> TopicConfig:
        """The retry topic of `group`, or its dead letter topic. Raises RequestError."""
        name = dlq_topic(group.name) if is_dead else retry_topic(group.name)
        topic = self._topics.get(name)
        if topic is None:
            queues = 1 if is_dead else max(1, group.retry_queues)
            topic = await self._make(TopicConfig(name=name, queues=queues))
        return topic

    async def _make(self, topic: TopicConfig) -> TopicConfig:
        try:
            check_topic_name(topic.name)
            await self._topics.put(topic)
        except (OSError, TopicTableFull, ValueError) as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"topic {topic.name!r} was not made: {error}") from error
        self._on_topics_changed()
        return topic

    def max_times(self, name: str) -> int:
        """How often a message is redelivered to a group before it becomes a dead letter."""
        group = self._groups.get(name)
        return group.retry_max_times if group is not None else DEFAULT_RETRY_MAX_TIMES

    def make_soon(self, name: str) -> None:
        """Create a topic of one queue in the background, for clients and tools: messages may be put into it before."""
        if self._topics.get(name) is None and name not in self._making:
            self._making[name] = asyncio.get_running_loop().create_task(self._make(TopicConfig(name=name, queues=1)))
            self._making[name].add_done_callback(lambda task: self._made(name, task))

    def _made(self, name: str, task: asyncio.Task[TopicConfig]) -> None:
        del self._making[name]
        if not task.cancelled() and task.exception() is not None:
            logger.error("%s", task.exception())


class SendBackProcessor:
    """Answers code 36. `check_read(command, connection, topic, group)` raises RequestError if the client may not read
    messages of that topic."""

    def __init__(
        self,
        *,
        store: MessageStore,
        log: LedgerStore,
        retries: RetryTopics,
        runtime: Runtime,
        store_host: str,
        not_leader_remark: Callable[[], str],
        check_read: Callable[[Command, Connection, str, str], None] | None = None,
    ) -> None:
        self._check_read = check_read
        self._store = store
        self._log = log
        self._retries = retries
        self._random = runtime.random
        self._store_host = store_host
        self._not_leader_remark = not_leader_remark

    async def process(self, command: Command, connection: Connection) -> Command:
        """Store the message for another try, or as a dead letter; answered when that is committed."""
        if not self._store.is_master:
            raise RequestError(ResponseCode.SERVICE_NOT_AVAILABLE, self._not_leader_remark())
        group = self._retries.group(command.get_str("group"))
        if group.retry_queues <= 0:
            return command.reply(ResponseCode.SUCCESS)
        offset, level = command.get_int("offset"), command.get_int("delayLevel", 0)
        try:
            message = read_message(self._log, self._store.queues, offset)
        except (OSError, RecordError) as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"no message lies at {offset}: {error}") from error
        if self._check_read is not None:  # otherwise a reader of one topic could have another's messages copied
            self._check_read(command, connection, message.topic, group.name)
        allowed = command.get_int("maxReconsumeTimes", -1)
        if allowed < 0:
            allowed = group.retry_max_times
        is_dead = level < 0 or message.reconsume_times >= allowed
        topic = await self._retries.target(group, is_dead=is_dead)
        if not topic.writable:
            raise RequestError(ResponseCode.NO_PERMISSION, f"topic {topic.name!r} is not writable")
        properties = dict(message.properties)
        properties.setdefault(RETRY_TOPIC, message.topic)
        properties.setdefault(ORIGIN_MESSAGE_ID, message.message_id)
        properties.pop(DELAY_LEVEL, None)
        if not is_dead:
            properties[DELAY_LEVEL] = str(level or FIRST_RETRY_LEVEL + message.reconsume_times)
        try:
            copy = copy_of(
                message,
                topic=topic.name,
                queue_id=self._random.randrange(topic.queues),
                properties=properties,
                store_host=self._store_host,
                sys_flag=message.sys_flag & ~SYS_FLAG_TRANSACTION_MASK,  # the copy ends no transaction
                reconsume_times=message.reconsume_times + 1,
            )
        except RecordError as error:
            remark = f"{PROPERTIES_SIZE_EXCEEDED}: {error.reason}"
            raise RequestError(ResponseCode.SYSTEM_ERROR, remark) from error
        try:
            put = self._store.put_one(copy)
        except PUT_REFUSALS as error:
            raise refusal(error, self._not_leader_remark()) from error
        await stored(put.committed)
        self._store.committed_total += 1
        return command.reply(ResponseCode.SUCCESS)
