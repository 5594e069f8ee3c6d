"""What tools ask of consumers through the broker: where they are (223, 221), what they are doing (307), to handle one
message now (309), and to continue from another offset (222, 220).

Consumers keep their own offsets and commit them every few seconds, so an offset that was only changed here would be
overwritten at once: that is why consumers have to be told (R: AdminBrokerProcessor, Broker2Client).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import starmap
from typing import Any

from node.broker.append_errors import read_record
from node.broker.client_manager import Client
from node.broker.query import offset_by_time
from node.broker.query_context import QueryContext
from node.config import TopicConfig
from node.remoting import (
    Command,
    Connection,
    FieldValue,
    LanguageCode,
    RemotingError,
    RequestCode,
    RequestError,
    RequestTimeout,
    ResponseCode,
)
from node.remoting.tool_json import Place, parse_queue_table, queue_row, queue_table, to_json
from node.store.consume_queue import ConsumeQueue
from node.store.record import RecordError

__all__ = ["ClientTools"]

CONSUMER_TIMEOUT_MS = 10_000
"""How long a consumer may take to answer a request that is passed on (R)."""
STATUS_TIMEOUT_MS = 5_000
"""How long a consumer may take to report where it is (R)."""
MAX_ASKED_CONSUMERS = 1000
"""Consumers that are asked at once where they are."""
END_OF_QUEUE = -1
"""The timestamp that stands for the end of a queue."""
_MESSAGE_ID_CHARS = (32, 56)
"""Lengths of message ids with addresses of 4 and of 16 bytes."""
_OFFSET_CHARS = 16


class ClientTools:
    """Passes requests of tools on to consumers."""

    def __init__(self, context: QueryContext) -> None:
        self._context = context

    def processors(self) -> dict[int, Callable[[Command, Connection], Any]]:
        """The processors, by request code."""
        code = RequestCode
        return {
            code.INVOKE_BROKER_TO_RESET_OFFSET: self.reset_offsets,
            code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: self.consumer_status,
            code.GET_CONSUMER_RUNNING_INFO: self.running_info,
            code.CONSUME_MESSAGE_DIRECTLY: self.consume_directly,
        }

    async def reset_offsets(self, command: Command, connection: Connection) -> Command:
        """Code 222: have the consumers of a group continue from the first message stored at `timestamp` (ms; -1: the
        end) or later; without `isForce` only if that is before their offset. The answer has the new offsets."""
        topic, group = self._topic(command), command.get_str("group")
        timestamp_ms, is_forced = command.get_int("timestamp"), command.get_bool("isForce")
        await self._context.gate.enter()
        table: list[str] = []
        rows_for_cpp: list[str] = []
        async for queue_id, queue in self._context.each_queue(topic.name, topic.queues):
            place = Place(topic.name, self._context.broker_name, queue_id)
            offset = self._new_offset(group, place, queue, timestamp_ms, is_forced)
            table.append(queue_row(place, offset))
            rows_for_cpp.append(to_json({**place.document(), "offset": offset}))
        body, body_for_cpp = _offset_table(queue_table(table)), _offset_table(f"[{','.join(rows_for_cpp)}]")
        consumers = self._context.clients.consumer_group(group)
        if consumers is None:
            raise RequestError(
                ResponseCode.CONSUMER_NOT_ONLINE, f"no consumer of group {group!r} is here that could be told"
            )
        fields: dict[str, FieldValue] = {"topic": topic.name, "group": group, "timestamp": timestamp_ms}
        fields["isForce"] = is_forced
        for client in consumers.clients.values():
            offsets = body_for_cpp if client.language == LanguageCode.CPP else body
            notice = Command.request(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, fields, offsets, oneway=True)
            client.connection.send(notice)
        return command.reply(ResponseCode.SUCCESS, body=body_for_cpp if command.language == LanguageCode.CPP else body)

    def _topic(self, command: Command) -> TopicConfig:
        name = command.get_str("topic")
        topic = self._context.topics.get(name)
        if topic is None:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"topic {name[:127]!r} does not exist")
        return topic

    def _new_offset(
        self, group: str, place: Place, queue: ConsumeQueue | None, timestamp_ms: int, is_forced: bool
    ) -> int:
        known = self._context.offsets.find(group, place.topic, place.queue_id)
        if known is None:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR, f"group {group!r} has no offset in {place.topic}/{place.queue_id}"
            )
        if queue is None:
            return 0
        if timestamp_ms == END_OF_QUEUE:
            wanted = queue.max_offset
        else:
            try:
                wanted = offset_by_time(self._context.log, self._context.queues, queue, timestamp_ms)
            except (OSError, RecordError) as error:
                raise RequestError(ResponseCode.SYSTEM_ERROR, f"the queue cannot be searched: {error}") from error
        return wanted if is_forced or wanted < known else known

    async def consumer_status(self, command: Command, connection: Connection) -> Command:
        """Code 223: where the consumers of a group are in the queues of a topic, as each of them reports; with
        `clientAddr` only one of them."""
        topic, group = command.get_str("topic"), command.get_str("group")
        only = command.get_str("clientAddr", "")
        consumers = self._context.clients.consumer_group(group)
        if consumers is None:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"no consumer of group {group!r} is here")
        chosen = [
            client for client in consumers.clients.values()
            if not only or only in (client.client_id, client.connection.remote_address)
        ][:MAX_ASKED_CONSUMERS]  # fmt: skip
        tables = await asyncio.gather(*(self._status_of(client, topic, group) for client in chosen))
        rows = ",".join(
            f"{to_json(client.client_id)}:{table}"
            for client, table in zip(chosen, tables, strict=True)
            if table is not None
        )
        body = f'{{"consumerTable":{{{rows}}},"messageQueueTable":{{}}}}'
        return command.reply(ResponseCode.SUCCESS, body=body.encode())

    async def _status_of(self, client: Client, topic: str, group: str) -> str | None:
        request = Command.request(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, {"topic": topic, "group": group})
        try:
            reply = await client.connection.invoke(request, timeout_ms=STATUS_TIMEOUT_MS)
            if reply.code != ResponseCode.SUCCESS:
                return None
            return queue_table(starmap(queue_row, parse_queue_table(reply.body, "messageQueueTable")))
        except (RemotingError, ValueError):
            return None  # the others' answers are worth having without it

    async def running_info(self, command: Command, connection: Connection) -> Command:
        """Code 307: what one consumer is doing, as it reports."""
        fields = {name: command.get_str(name) for name in ("consumerGroup", "clientId")}
        fields["jstackEnable"] = "true" if command.get_bool("jstackEnable") else "false"
        return await self._pass_on(command, Command.request(command.code, fields))

    async def consume_directly(self, command: Command, connection: Connection) -> Command:
        """Code 309: have one consumer handle one message now, and return the outcome."""
        message_id = command.get_str("msgId")
        await self._context.gate.enter()
        try:
            if len(message_id) not in _MESSAGE_ID_CHARS:
                raise ValueError(f"{message_id[:60]!r} is no id of a stored message")
            _, record = read_record(self._context.log, self._context.queues, int(message_id[-_OFFSET_CHARS:], 16))
        except (ValueError, OSError, RecordError) as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"there is no such message: {error}") from error
        fields = dict(command.ext_fields) | {"brokerName": self._context.broker_name}
        return await self._pass_on(command, Command.request(command.code, fields, record))

    async def _pass_on(self, command: Command, request: Command) -> Command:
        group, client_id = command.get_str("consumerGroup"), command.get_str("clientId")
        consumers = self._context.clients.consumer_group(group)
        client = consumers.clients.get(client_id) if consumers is not None else None
        if client is None:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"consumer {client_id!r} of group {group!r} is not here")
        try:
            reply = await client.connection.invoke(request, timeout_ms=CONSUMER_TIMEOUT_MS)
        except RequestTimeout as error:
            raise RequestError(ResponseCode.CONSUME_MSG_TIMEOUT, f"consumer {client_id!r}: {error}") from error
        except RemotingError as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"consumer {client_id!r}: {error}") from error
        return command.reply(reply.code, remark=reply.remark, fields=reply.ext_fields, body=reply.body)


def _offset_table(table: str) -> bytes:
    """Offsets by queue, as a table or, for a peer in C++, as a list (R: ResetOffsetBody, ResetOffsetBodyForC)."""
    return f'{{"offsetTable":{table}}}'.encode()
