"""Requests by which clients take part: heartbeat (34), unregistering (35), consumer list (38), locks (41, 42), consumer
offsets (14, 15), subscription groups (200, 207), and the tables that slaves copy (21, 43, 45, 201)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from node.broker.consumer_offsets import TooManyOffsets
from node.broker.heartbeat import Heartbeat, LockRequest
from node.broker.internal_topics import retry_topic
from node.broker.memory_window import MemoryWindow
from node.broker.query_context import QueryContext
from node.broker.rebalance_locks import RebalanceLocks
from node.broker.subscription_groups import SubscriptionGroup, SubscriptionGroups, TooManyGroups
from node.broker.topics import TopicTableFull
from node.config import TopicConfig, check_topic_name
from node.logs import LogLimiter
from node.remoting import Command, Connection, RequestCode, RequestError, ResponseCode
from node.store.consume_queue import ConsumeQueue

__all__ = ["ClientProcessor"]

logger = logging.getLogger("node.broker")


class ClientProcessor:
    """Answers clients about their groups. `delay_offsets` returns the table of code 45."""

    def __init__(
        self,
        context: QueryContext,
        *,
        groups: SubscriptionGroups,
        locks: RebalanceLocks,
        memory: MemoryWindow,
        delay_offsets: Callable[[], Mapping[str, Any]],
        on_topics_changed: Callable[[], None],
        auto_create_groups: bool = True,
    ) -> None:
        self._context = context
        self._groups = groups
        self._locks = locks
        self._memory = memory
        self._complaints = LogLimiter(lambda: asyncio.get_running_loop().time())
        self._delay_offsets = delay_offsets
        self._on_topics_changed = on_topics_changed
        self.auto_create_groups = auto_create_groups
        """Whether a heartbeat creates its groups."""

    def processors(self) -> dict[int, Callable[[Command, Connection], Any]]:
        """The processors, by request code."""
        code = RequestCode
        return {
            code.HEART_BEAT: self.heartbeat,
            code.UNREGISTER_CLIENT: self.unregister,
            code.GET_CONSUMER_LIST_BY_GROUP: self.consumer_list,
            code.LOCK_BATCH_MQ: self.lock,
            code.UNLOCK_BATCH_MQ: self.unlock,
            code.QUERY_CONSUMER_OFFSET: self.query_offset,
            code.UPDATE_CONSUMER_OFFSET: self.update_offset,
            code.UPDATE_AND_CREATE_SUBSCRIPTION_GROUP: self.update_group,
            code.DELETE_SUBSCRIPTION_GROUP: self.delete_group,
            code.GET_ALL_TOPIC_CONFIG: self.all_topics,
            code.GET_ALL_CONSUMER_OFFSET: self.all_offsets,
            code.GET_ALL_DELAY_OFFSET: self.all_delay_offsets,
            code.GET_ALL_SUBSCRIPTION_GROUP_CONFIG: self.all_groups,
            code.GET_SUBSCRIPTION_GROUP_CONFIG: self.group,
        }

    async def heartbeat(self, command: Command, connection: Connection) -> Command:
        """Code 34: register the client in its groups; a new consumer group gets its retry topic."""
        beat = Heartbeat.of(command.body)
        for consumer in beat.consumers:
            if not self.auto_create_groups and self._groups.get(consumer.group) is None:
                continue  # its pulls are refused with a reason (R)
            try:
                group = self._groups.find_or_create(consumer.group)
            except (TooManyGroups, ValueError) as error:
                raise RequestError(ResponseCode.SYSTEM_ERROR, str(error)) from error
            if group.retry_queues:
                await self._make_topic(retry_topic(consumer.group), group.retry_queues)
        if not connection.is_closing:
            self._context.clients.heartbeat(beat, connection, language=command.language, version=command.version)
        return command.reply(ResponseCode.SUCCESS)

    async def _make_topic(self, name: str, queues: int) -> None:
        if self._context.topics.get(name) is not None:
            return
        try:
            await self._context.topics.put(TopicConfig(name=check_topic_name(name), queues=queues))
        except (OSError, TopicTableFull, ValueError) as error:
            self._complaints.warning(logger, "topic", "topic %s was not made: %s", name, error)
        else:
            self._on_topics_changed()

    def unregister(self, command: Command, connection: Connection) -> Command:
        """Code 35: the client leaves a producer group, a consumer group, or both."""
        self._context.clients.unregister(
            command.get_str("clientID"), command.get_str("producerGroup", ""), command.get_str("consumerGroup", "")
        )
        return command.reply(ResponseCode.SUCCESS)

    def consumer_list(self, command: Command, connection: Connection) -> Command:
        """Code 38: the client ids of a group."""
        group = command.get_str("consumerGroup")
        ids = self._context.clients.consumer_ids(group)
        if not ids:
            return command.reply(ResponseCode.SYSTEM_ERROR, remark=f"no consumer of group {group!r} is here")
        return command.reply(ResponseCode.SUCCESS, body=_json({"consumerIdList": ids}))

    def lock(self, command: Command, connection: Connection) -> Command:
        """Code 41: lock queues for one client of a group; the reply names those that it now owns."""
        self._require_master()
        request = LockRequest.of(command.body)
        owned = self._locks.lock(request.group, request.client_id, request.queues)
        body = {
            "lockOKMQSet": [
                {"topic": queue.topic, "brokerName": queue.broker_name, "queueId": queue.queue_id} for queue in owned
            ]
        }
        return command.reply(ResponseCode.SUCCESS, body=_json(body))

    def unlock(self, command: Command, connection: Connection) -> Command:
        """Code 42: release locks."""
        self._require_master()
        request = LockRequest.of(command.body)
        self._locks.unlock(request.group, request.client_id, request.queues)
        return command.reply(ResponseCode.SUCCESS)

    def _require_master(self) -> None:
        """Two nodes that both grant locks would contradict each other, whatever reads they may answer."""
        if not self._context.gate.leads:
            raise self._context.gate.not_leader()

    def _require_leader(self) -> None:
        """Two nodes that both accept offsets would contradict each other, unless stale reads are configured."""
        if self._context.gate.needs_leader and not self._context.gate.leads:
            raise self._context.gate.not_leader()

    def query_offset(self, command: Command, connection: Connection) -> Command:
        """Code 14: where a group continues in a queue.

        If unknown: 0 when the queue still holds its first message, so that nothing is skipped, and that message is not
        so old that it has to be read from the disk; else QUERY_NOT_FOUND, and the client chooses an offset itself (R:
        a group that is new on a queue with a long past begins at its end).
        """
        self._require_leader()
        topic, queue_id = command.get_str("topic"), command.get_int("queueId")
        offset = self._context.offsets.find(command.get_str("consumerGroup"), topic, queue_id)
        if offset is None:
            queue = self._context.queues.find(topic, queue_id)
            if queue is not None and (queue.min_offset > 0 or self._is_spilled(queue)):
                return command.reply(ResponseCode.QUERY_NOT_FOUND, remark="the group has no offset for this queue")
            offset = 0
        return command.reply(ResponseCode.SUCCESS, fields={"offset": offset})

    def _is_spilled(self, queue: ConsumeQueue) -> bool:
        try:
            return any(self._memory.is_behind(unit.physical_offset) for unit in queue.read(0, 1))
        except OSError as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"the queue cannot be read: {error}") from error

    def update_offset(self, command: Command, connection: Connection) -> Command:
        """Code 15: a group has consumed a queue up to here. The queue must exist: that bounds what strangers may have
        kept here."""
        self._require_leader()
        name, queue_id = command.get_str("topic"), command.get_int("queueId")
        topic = self._context.topics.get(name)
        if topic is None:
            raise RequestError(ResponseCode.TOPIC_NOT_EXIST, f"topic {name[:127]!r} does not exist")
        if not 0 <= queue_id < topic.all_queues:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR, f"queue {queue_id} of topic {name!r}, which has {topic.all_queues}"
            )
        try:
            self._context.offsets.commit(
                command.get_str("consumerGroup"), name, queue_id, command.get_int("commitOffset")
            )
        except TooManyOffsets as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        return command.reply(ResponseCode.SUCCESS)

    async def update_group(self, command: Command, connection: Connection) -> Command:
        """Code 200: create or change a subscription group; durable before the answer."""
        try:
            await self._groups.put(SubscriptionGroup.of(json.loads(command.body)))
        except OSError as error:
            raise _not_durable("changed", error) from error
        except (TooManyGroups, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"the group was not changed: {error!r}") from error
        return command.reply(ResponseCode.SUCCESS)

    async def delete_group(self, command: Command, connection: Connection) -> Command:
        """Code 207: forget a subscription group, and with `removeOffset` its offsets."""
        name = command.get_str("groupName")
        try:
            await self._groups.remove(name)
        except OSError as error:
            raise _not_durable("removed", error) from error
        if command.get_bool("removeOffset"):
            self._context.offsets.forget_group(name)
        return command.reply(ResponseCode.SUCCESS)

    def all_topics(self, command: Command, connection: Connection) -> Command:
        """Code 21: the topic table."""
        return command.reply(ResponseCode.SUCCESS, body=_json(self._context.topics.document()))

    def all_offsets(self, command: Command, connection: Connection) -> Command:
        """Code 43: every consumer offset."""
        return command.reply(ResponseCode.SUCCESS, body=_json(self._context.offsets.document()))

    def all_delay_offsets(self, command: Command, connection: Connection) -> Command:
        """Code 45: how far each delay level is delivered."""
        return command.reply(ResponseCode.SUCCESS, body=_json(self._delay_offsets()))

    def all_groups(self, command: Command, connection: Connection) -> Command:
        """Code 201: every subscription group."""
        return command.reply(ResponseCode.SUCCESS, body=_json(self._groups.document()))

    def group(self, command: Command, connection: Connection) -> Command:
        """Code 352: one subscription group."""
        name = command.get_str("group")
        group = self._groups.get(name)
        if group is None:
            raise RequestError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"group {name!r} does not exist")
        return command.reply(ResponseCode.SUCCESS, body=_json(group.document()))


def _not_durable(done: str, error: OSError) -> RequestError:
    return RequestError(ResponseCode.SYSTEM_ERROR, f"the group is {done}, and a restart may forget that: {error}")


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
