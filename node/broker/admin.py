"""Questions about queues and the broker itself: offsets (30, 31), runtime information (28), topics (17)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from node.broker.reads import ReadGate
from node.broker.topics import TopicTable, TopicTableFull
from node.config import MAX_QUEUES, TopicConfig, check_topic_name
from node.remoting import Command, Connection, RequestError, ResponseCode
from node.store.consume_queue import ConsumeQueue
from node.store.queue_store import QueueStore

__all__ = ["AdminProcessor"]


class AdminProcessor:
    """Answers what tools ask. `describe` gives the runtime table, `on_topics_changed` tells the name servers."""

    def __init__(
        self,
        *,
        gate: ReadGate,
        queues: QueueStore,
        topics: TopicTable,
        describe: Callable[[], Mapping[str, object]],
        on_topics_changed: Callable[[], None],
    ) -> None:
        self._gate = gate
        self._queues = queues
        self._topics = topics
        self._describe = describe
        self._on_topics_changed = on_topics_changed

    async def max_offset(self, command: Command, connection: Connection) -> Command:
        """Code 30: the next free offset of a queue, 0 for one that never held a message."""
        queue = await self._queue(command)
        return command.reply(ResponseCode.SUCCESS, fields={"offset": queue.max_offset if queue else 0})

    async def min_offset(self, command: Command, connection: Connection) -> Command:
        """Code 31: the first offset that a queue still holds."""
        queue = await self._queue(command)
        return command.reply(ResponseCode.SUCCESS, fields={"offset": queue.min_offset if queue else 0})

    async def _queue(self, command: Command) -> ConsumeQueue | None:
        topic, queue_id = command.get_str("topic"), command.get_int("queueId")
        await self._gate.enter()
        return self._queues.find(topic, queue_id)

    def runtime_info(self, command: Command, connection: Connection) -> Command:
        """Code 28: {"table": {name: text}}, about this node alone and without any barrier."""
        table = {name: _text(value) for name, value in self._describe().items()}
        return command.reply(ResponseCode.SUCCESS, body=json.dumps({"table": table}).encode())

    async def update_topic(self, command: Command, connection: Connection) -> Command:
        """Code 17: create a topic or change its queues and permission; durable before the answer.

        It concerns this broker alone, as in RocketMQ: an administrator sends it to every node of the group.
        """
        try:
            name = check_topic_name(command.get_str("topic"))
        except ValueError as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        queues = max(command.get_int("readQueueNums", 4), command.get_int("writeQueueNums", 4))
        perm = command.get_int("perm", 6)
        if not (1 <= queues <= MAX_QUEUES and 0 <= perm <= 7):
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"{queues} queues with permission {perm} are impossible")
        try:
            await self._topics.put(TopicConfig(name=name, queues=queues, perm=perm))
        except (OSError, TopicTableFull) as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"the topic was not created: {error}") from error
        self._on_topics_changed()
        return command.reply(ResponseCode.SUCCESS)

    async def delete_topic(self, command: Command, connection: Connection) -> Command:
        """Code 215: forget a topic. What its queues hold goes with the log."""
        try:
            await self._topics.remove(command.get_str("topic"))
        except (OSError, ValueError) as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"the topic was not removed: {error}") from error
        self._on_topics_changed()
        return command.reply(ResponseCode.SUCCESS)

    async def topic_stats(self, command: Command, connection: Connection) -> Command:
        """Code 202: the bounds of every queue of a topic (R: TopicStatsTable, as a list that JSON can hold)."""
        name = command.get_str("topic")
        topic = self._topics.get(name)
        if topic is None:
            raise RequestError(ResponseCode.TOPIC_NOT_EXIST, f"topic {name!r} does not exist")
        await self._gate.enter()
        rows = []
        for queue_id in range(topic.queues):
            queue = self._queues.find(name, queue_id)
            rows.append(
                {
                    "queueId": queue_id,
                    "minOffset": queue.min_offset if queue else 0,
                    "maxOffset": queue.max_offset if queue else 0,
                }
            )
        return command.reply(ResponseCode.SUCCESS, body=json.dumps({"topic": name, "offsetTable": rows}).encode())


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
