"""Queries about queues and the broker itself: offsets (30, 31), the oldest message (32), units (321), runtime
information (28), configuration (25, 26), topics (17, 202, 215, 305, 351)."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from node.broker.append_errors import stored_at
from node.broker.group_tools import subscription_document
from node.broker.internal_topics import is_internal
from node.broker.live_settings import LiveSettings
from node.broker.pull import TagFilter
from node.broker.query_context import QueryContext
from node.broker.topics import TopicTableFull, changed_message_type, check_topic, topic_json
from node.config import TopicConfig, check_topic_name
from node.remoting import Command, Connection, DeferredReply, RequestCode, RequestError, ResponseCode
from node.remoting.tool_json import Place, queue_row, queue_table, to_json
from node.store.consume_queue import ConsumeQueue

__all__ = ["AdminProcessor"]

MAX_UNITS = 1000
"""Units in one answer at most."""


class AdminProcessor:
    """Answers tools. `describe` returns the runtime table, `on_topics_changed` informs the name servers."""

    def __init__(
        self,
        context: QueryContext,
        *,
        describe: Callable[[], Mapping[str, object]],
        settings: Callable[[], Mapping[str, object]],
        live: LiveSettings,
        on_topics_changed: Callable[[], None],
    ) -> None:
        self._context = context
        self._settings = settings
        self._live = live
        self._describe = describe
        self._on_topics_changed = on_topics_changed

    def processors(self) -> dict[int, Callable[[Command, Connection], Any]]:
        """The processors, by request code."""
        code = RequestCode
        return {
            code.GET_MAX_OFFSET: self.max_offset,
            code.GET_MIN_OFFSET: self.min_offset,
            code.GET_EARLIEST_MSG_STORETIME: self.earliest,
            code.QUERY_CONSUME_QUEUE: self.units,
            code.GET_BROKER_RUNTIME_INFO: self.runtime_info,
            code.GET_BROKER_CONFIG: self.configuration,
            code.UPDATE_BROKER_CONFIG: self.update_configuration,
            code.UPDATE_AND_CREATE_TOPIC: self.update_topic,
            code.DELETE_TOPIC_IN_BROKER: self.delete_topic,
            code.GET_TOPIC_STATS_INFO: self.topic_stats,
            code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: self.own_topics,
            code.GET_TOPIC_CONFIG: self.topic_config,
        }

    def max_offset(self, command: Command, connection: Connection) -> DeferredReply | Awaitable[Command]:
        """Code 30: the next free offset of a queue, 0 for one that never held a message."""
        return self._bound(command, lambda queue: queue.max_offset)

    def min_offset(self, command: Command, connection: Connection) -> DeferredReply | Awaitable[Command]:
        """Code 31: the first offset that a queue still holds."""
        return self._bound(command, lambda queue: queue.min_offset)

    def _bound(self, command: Command, bound: Callable[[ConsumeQueue], int]) -> DeferredReply | Awaitable[Command]:
        topic, queue_id = command.get_str("topic"), command.get_int("queueId")
        deferred = DeferredReply((command,))

        def passed(refusal: RequestError | None) -> None:
            if refusal is None:
                queue = self._context.queues.find(topic, queue_id)
                deferred.send(command.reply(ResponseCode.SUCCESS, fields={"offset": bound(queue) if queue else 0}))
            else:
                deferred.send(command.reply(refusal.code, remark=refusal.remark))

        async def later() -> Command:
            queue = await self._queue(command)
            return command.reply(ResponseCode.SUCCESS, fields={"offset": bound(queue) if queue else 0})

        return deferred if self._context.gate.ask(passed) else later()

    async def earliest(self, command: Command, connection: Connection) -> Command:
        """Code 32: when the oldest message of a queue was stored, in ms; -1 when it holds none (R)."""
        queue = await self._queue(command)
        context, stored_ms = self._context, None
        if queue is not None:
            stored_ms = stored_at(context.log, context.queues, queue, queue.min_offset)
        return command.reply(ResponseCode.SUCCESS, fields={"timestamp": -1 if stored_ms is None else stored_ms})

    async def units(self, command: Command, connection: Connection) -> Command:
        """Code 321: `count` units of a queue from `index` on, and whether a group's subscription lets them pass."""
        index, count = command.get_int("index"), command.get_int("count")
        group, topic = command.get_str("consumerGroup", ""), command.get_str("topic")
        queue = await self._queue(command)
        if queue is None:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"topic {topic[:127]!r} has no such queue here")
        consumers = self._context.clients.consumer_group(group)
        wanted = consumers.subscriptions.get(topic) if consumers is not None else None
        body: dict[str, object] = {"minQueueIndex": queue.min_offset, "maxQueueIndex": queue.max_offset}
        if group and wanted is None:
            body["filterData"] = f"group {group} subscribes to nothing of {topic} here"
        by_tag = TagFilter("*")
        if wanted is not None:
            body["subscriptionData"] = subscription_document(wanted)
            if wanted.expression_type == "TAG":
                by_tag = TagFilter(wanted.expression)
        try:
            found = queue.read(max(index, queue.min_offset), min(max(count, 0), MAX_UNITS))
        except OSError as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"the queue cannot be read: {error}") from error
        body["queueData"] = [
            {
                "physicOffset": unit.physical_offset,
                "physicSize": unit.size_bytes,
                "tagsCode": unit.tag_hash,
                "eval": by_tag.may_pass(unit.tag_hash),
            }
            for unit in found
        ]
        return command.reply(ResponseCode.SUCCESS, body=to_json(body).encode())

    async def _queue(self, command: Command) -> ConsumeQueue | None:
        topic, queue_id = command.get_str("topic"), command.get_int("queueId")
        await self._context.gate.enter()
        return self._context.queues.find(topic, queue_id)

    def runtime_info(self, command: Command, connection: Connection) -> Command:
        """Code 28: {"table": {name: text}}, about this node alone and without a read barrier."""
        table = {name: _text(value) for name, value in self._describe().items()}
        return command.reply(ResponseCode.SUCCESS, body=json.dumps({"table": table}).encode())

    def configuration(self, command: Command, connection: Connection) -> Command:
        """Code 26: the settings that RocketMQ's tools know, one NAME=VALUE per line, and how often they changed."""
        lines = "".join(f"{name}={_text(value)}\n" for name, value in self._settings().items())
        version = to_json(self._live.version)
        return command.reply(ResponseCode.SUCCESS, fields={"version": version}, body=lines.encode())

    async def update_configuration(self, command: Command, connection: Connection) -> Command:
        """Code 25: change the settings that the body names, all or none; durable before the answer."""
        await self._live.update(command.body, {name: _text(value) for name, value in self._settings().items()})
        return command.reply(ResponseCode.SUCCESS)

    def own_topics(self, command: Command, connection: Connection) -> Command:
        """Code 305: the broker's own topics."""
        body = to_json({"topicList": self._context.topics.own_names})
        return command.reply(ResponseCode.SUCCESS, body=body.encode())

    async def update_topic(self, command: Command, connection: Connection) -> Command:
        """Code 17: create a topic or change its queues and permission; durable before the answer.

        It concerns only this broker, as in RocketMQ: an administrator sends it to every node of the group.
        """
        try:
            name = check_topic_name(command.get_str("topic"))
        except ValueError as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        queues = command.get_int("writeQueueNums", 4)
        known = self._context.topics.get(name)
        try:
            topic = TopicConfig(
                name=name,
                queues=queues,
                perm=command.get_int("perm", 6),
                read_queues=command.get_int("readQueueNums", queues),
                order=command.get_bool("order"),
                sys_flag=command.get_int("topicSysFlag", 0),
                message_type=changed_message_type(
                    command.get_str("attributes", ""), known.message_type if known is not None else ""
                ),
            )
            if is_internal(name):
                raise ValueError("the broker needs it as it is")
            await self._context.topics.put(check_topic(topic))
        except (OSError, TopicTableFull, ValueError) as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"the topic was not created: {error}") from error
        self._on_topics_changed()
        return command.reply(ResponseCode.SUCCESS)

    async def delete_topic(self, command: Command, connection: Connection) -> Command:
        """Code 215: forget a topic. The messages in its queues are removed with the log."""
        try:
            await self._context.topics.remove(command.get_str("topic"))
        except (OSError, ValueError) as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"the topic was not removed: {error}") from error
        self._on_topics_changed()
        return command.reply(ResponseCode.SUCCESS)

    def topic_config(self, command: Command, connection: Connection) -> Command:
        """Code 351: one topic, as it stands in the table."""
        body = to_json(topic_json(self._topic(command.get_str("topic"))))
        return command.reply(ResponseCode.SUCCESS, body=body.encode())

    def _topic(self, name: str) -> TopicConfig:
        topic = self._context.topics.get(name)
        if topic is None:
            raise RequestError(ResponseCode.TOPIC_NOT_EXIST, f"topic {name!r} does not exist")
        return topic

    async def topic_stats(self, command: Command, connection: Connection) -> Command:
        """Code 202: the bounds of every queue of a topic, and when it last got a message."""
        name = command.get_str("topic")
        topic = self._topic(name)
        await self._context.gate.enter()
        rows = [
            queue_row(Place(name, self._context.broker_name, queue_id), self._bounds(queue))
            async for queue_id, queue in self._context.each_queue(name, topic.all_queues)
        ]
        return command.reply(ResponseCode.SUCCESS, body=f'{{"offsetTable":{queue_table(rows)}}}'.encode())

    def _bounds(self, queue: ConsumeQueue | None) -> dict[str, int]:
        if queue is None:
            return {"lastUpdateTimestamp": 0, "maxOffset": 0, "minOffset": 0}
        last_ms = stored_at(self._context.log, self._context.queues, queue, queue.max_offset - 1) or 0
        return {"lastUpdateTimestamp": last_ms, "maxOffset": queue.max_offset, "minOffset": queue.min_offset}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
