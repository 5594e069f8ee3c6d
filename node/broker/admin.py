"""Questions about queues and the broker itself: offsets (30, 31), runtime information (28), topics (17)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping

from node.broker.internal_topics import is_internal
from node.broker.ledger import LedgerStore
from node.broker.puts import read_message
from node.broker.reads import ReadGate
from node.broker.topics import TopicTable, TopicTableFull, check_topic
from node.config import TopicConfig, check_topic_name
from node.remoting import Command, Connection, RequestError, ResponseCode
from node.store.consume_queue import ConsumeQueue
from node.store.queue_store import QueueStore
from node.store.record import RecordError

__all__ = ["AdminProcessor"]

logger = logging.getLogger("node.broker")


class AdminProcessor:
    """Answers what tools ask. `describe` gives the runtime table, `on_topics_changed` tells the name servers."""

    def __init__(
        self,
        *,
        gate: ReadGate,
        log: LedgerStore,
        queues: QueueStore,
        topics: TopicTable,
        broker_name: str,
        describe: Callable[[], Mapping[str, object]],
        on_topics_changed: Callable[[], None],
    ) -> None:
        self._gate = gate
        self._log = log
        self._broker_name = broker_name
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
        queues = command.get_int("writeQueueNums", 4)
        topic = TopicConfig(
            name=name,
            queues=queues,
            perm=command.get_int("perm", 6),
            read_queues=command.get_int("readQueueNums", queues),
            order=command.get_bool("order"),
            sys_flag=command.get_int("topicSysFlag", 0),
        )
        try:
            if is_internal(name):
                raise ValueError("the broker needs it as it is")
            await self._topics.put(check_topic(topic))
        except (OSError, TopicTableFull, ValueError) as error:
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
        """Code 202: the bounds of every queue of a topic, and when it last got a message.

        In the form that R's own tools read (TopicStatsTable as fastjson writes it): the keys of the table are objects,
        {"offsetTable":{{"brokerName":..,"queueId":..,"topic":..}:{"lastUpdateTimestamp":..,..}}}. That is no JSON.
        """
        name = command.get_str("topic")
        topic = self._topics.get(name)
        if topic is None:
            raise RequestError(ResponseCode.TOPIC_NOT_EXIST, f"topic {name!r} does not exist")
        await self._gate.enter()
        rows = []
        for queue_id in range(topic.all_queues):
            place = {"brokerName": self._broker_name, "queueId": queue_id, "topic": name}
            rows.append(f"{_json(place)}:{_json(self._bounds(self._queues.find(name, queue_id)))}")
        return command.reply(ResponseCode.SUCCESS, body=f'{{"offsetTable":{{{",".join(rows)}}}}}'.encode())

    def _bounds(self, queue: ConsumeQueue | None) -> dict[str, int]:
        if queue is None:
            return {"lastUpdateTimestamp": 0, "maxOffset": 0, "minOffset": 0}
        last_ms = 0
        try:
            for unit in queue.read(queue.max_offset - 1, 1):
                last_ms = read_message(self._log, self._queues, unit.physical_offset).store_timestamp_ms
        except (OSError, RecordError) as error:
            logger.warning("the newest message of a queue cannot be read: %s", error)
        return {"lastUpdateTimestamp": last_ms, "maxOffset": queue.max_offset, "minOffset": queue.min_offset}


def _json(value: Mapping[str, object]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
