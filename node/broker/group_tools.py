"""Queries of tools about groups: their clients (203, 204, 328), the consumers of a topic (300), progress (208, 303,
317), and starting one group where another is (314). Clients have expressions checked before they use them (46).

Answers are in the format that R's own tools read. Codes and fields: R (AdminBrokerProcessor, ClientManageProcessor).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from node.broker.append_errors import stored_at
from node.broker.client_manager import Client
from node.broker.consumer_offsets import TooManyOffsets
from node.broker.group_rates import GroupRates
from node.broker.heartbeat import Subscription
from node.broker.pull import PropertyFilter, TagFilter
from node.broker.query_context import QueryContext
from node.config import TopicConfig
from node.remoting import Command, Connection, LanguageCode, RequestCode, RequestError, ResponseCode
from node.remoting.tool_json import Place, queue_row, queue_table, to_json
from node.runtime import Clock
from node.store.record import java_string_hash

__all__ = ["GroupTools", "subscription_document"]


class GroupTools:
    """Answers tools about groups. `address` returns this broker's address."""

    def __init__(
        self,
        context: QueryContext,
        *,
        rates: GroupRates,
        clock: Clock,
        address: Callable[[], str],
    ) -> None:
        self._context = context
        self._rates = rates
        self._clock = clock
        self._address = address

    def processors(self) -> dict[int, Callable[[Command, Connection], Any]]:
        """The processors, by request code."""
        code = RequestCode
        return {
            code.CHECK_CLIENT_CONFIG: self.check_expression,
            code.GET_CONSUMER_CONNECTION_LIST: self.consumers,
            code.GET_PRODUCER_CONNECTION_LIST: self.producers,
            code.GET_ALL_PRODUCER_INFO: self.all_producers,
            code.QUERY_TOPIC_CONSUME_BY_WHO: self.groups_of_topic,
            code.GET_CONSUME_STATS: self.progress,
            code.GET_BROKER_CONSUME_STATS: self.all_progress,
            code.QUERY_CONSUME_TIME_SPAN: self.time_spans,
            code.CLONE_GROUP_OFFSET: self.clone_offsets,
        }

    def check_expression(self, command: Command, connection: Connection) -> Command:
        """Code 46: a consumer that filters by something other than tags asks first whether its expression is usable:
        SUBSCRIPTION_PARSE_FAILED if it is not."""
        try:
            wanted = json.loads(command.body)["subscriptionData"]
            kind, text = str(wanted.get("expressionType") or "TAG").upper(), str(wanted.get("subString") or "")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"the body cannot be used: {error!r}") from error
        check_filter(text, kind)
        return command.reply(ResponseCode.SUCCESS)

    def consumers(self, command: Command, connection: Connection) -> Command:
        """Code 203: a group's consumers and what they subscribe to; CONSUMER_NOT_ONLINE without any."""
        name = command.get_str("consumerGroup")
        group = self._context.clients.consumer_group(name)
        if group is None:
            raise RequestError(ResponseCode.CONSUMER_NOT_ONLINE, f"no consumer of group {name[:255]!r} is here")
        body = {
            "connectionSet": [_connection(client) for client in group.clients.values()],
            "subscriptionTable": {each.topic: subscription_document(each) for each in group.subscriptions.values()},
            "consumeType": group.consume_type,
            "messageModel": group.message_model,
            "consumeFromWhere": group.consume_from,
        }
        return command.reply(ResponseCode.SUCCESS, body=to_json(body).encode())

    def producers(self, command: Command, connection: Connection) -> Command:
        """Code 204: a group's producers; SYSTEM_ERROR without any (R)."""
        name = command.get_str("producerGroup")
        clients = dict(self._context.clients.producer_groups()).get(name)
        if not clients:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"no producer of group {name[:255]!r} is here")
        body = {"connectionSet": [_connection(client) for client in clients.values()]}
        return command.reply(ResponseCode.SUCCESS, body=to_json(body).encode())

    def all_producers(self, command: Command, connection: Connection) -> Command:
        """Code 328: the producers of every group."""
        now_s = connection.loop.time()
        data = {
            name: [
                {
                    "clientId": client.client_id,
                    "remoteIP": client.connection.remote_address,
                    "language": _language(client),
                    "version": client.version,
                    "lastUpdateTimestamp": self._clock.wall_ms() - round((now_s - client.seen_s) * 1000),
                }
                for client in clients.values()
            ]
            for name, clients in self._context.clients.producer_groups()
        }
        return command.reply(ResponseCode.SUCCESS, body=to_json({"data": data}).encode())

    def groups_of_topic(self, command: Command, connection: Connection) -> Command:
        """Code 300: the groups that consume a topic, now or formerly."""
        topic = command.get_str("topic")
        here = [name for name, group in self._context.clients.consumer_groups() if topic in group.subscriptions]
        names = sorted({*here, *self._context.offsets.groups_of(topic)})
        return command.reply(ResponseCode.SUCCESS, body=to_json({"groupList": names}).encode())

    async def progress(self, command: Command, connection: Connection) -> Command:
        """Code 208: how far a group is in the queues of one topic, or of all that it consumes."""
        name, only = command.get_str("consumerGroup"), command.get_str("topic", "")
        await self._context.gate.enter()
        topics = [only] if only else self._context.offsets.topics_of(name)
        body, _ = await self._stats(name, self._consumed(name, topics))
        return command.reply(ResponseCode.SUCCESS, body=body.encode())

    async def all_progress(self, command: Command, connection: Connection) -> Command:
        """Code 317: the same for every group, for ordered topics only or for all."""
        ordered_only = command.get_bool("isOrder")
        await self._context.gate.enter()
        groups: dict[str, list[str]] = {}
        for topic_name, name in self._context.offsets.pairs():
            known = self._context.topics.get(topic_name)
            if known is not None and (known.order or not ordered_only):
                groups.setdefault(name, []).append(topic_name)
        total = 0
        rows = []
        for name, topics in sorted(groups.items()):
            stats = []
            for topic in self._consumed(name, topics):
                text, behind = await self._stats(name, [topic])
                stats.append(text)
                total += behind
            rows.append(f"{{{to_json(name)}:[{','.join(stats)}]}}")
        text = f'{{"brokerAddr":{to_json(self._address())},"consumeStatsList":[{",".join(rows)}],"totalDiff":{total}}}'
        return command.reply(ResponseCode.SUCCESS, body=text.encode())

    def _consumed(self, group: str, names: Iterable[str]) -> Iterator[TopicConfig]:
        """Those of the topics that exist and to which the group, if it has consumers here, still subscribes (R)."""
        here = self._context.clients.consumer_group(group)
        for name in names:
            topic = self._context.topics.get(name)
            if topic is not None and (here is None or not here.subscriptions or name in here.subscriptions):
                yield topic

    async def _stats(self, group: str, topics: Iterable[TopicConfig]) -> tuple[str, int]:
        """The table of R's ConsumeStats, and how many messages the group is behind."""
        rows: list[str] = []
        behind = 0
        for topic in topics:
            async for queue_id, queue in self._context.each_queue(topic.name, topic.read_queues):
                high = queue.max_offset if queue is not None else 0
                offset = max(self._context.offsets.find(group, topic.name, queue_id) or 0, 0)
                behind += max(high - offset, 0)
                row = {
                    "brokerOffset": high,
                    "consumerOffset": offset,
                    "lastTimestamp": stored_at(self._context.log, self._context.queues, queue, offset - 1) or 0,
                }
                rows.append(queue_row(Place(topic.name, self._context.broker_name, queue_id), row))
        rate = self._rates.per_second(group)
        return f'{{"consumeTps":{rate:.3f},"offsetTable":{queue_table(rows)}}}', behind

    async def time_spans(self, command: Command, connection: Connection) -> Command:
        """Code 303: the store times of the messages in the queues of a topic, and where a group is among them."""
        group, topic = command.get_str("group"), self._topic(command)
        await self._context.gate.enter()
        spans = []
        async for queue_id, queue in self._context.each_queue(topic.name, topic.queues):
            low, high = (queue.min_offset, queue.max_offset) if queue is not None else (0, 0)
            oldest_ms = stored_at(self._context.log, self._context.queues, queue, low) or 0
            offset = self._context.offsets.find(group, topic.name, queue_id) or 0
            read_ms = stored_at(self._context.log, self._context.queues, queue, offset - 1) if offset > 0 else oldest_ms
            waiting_ms = stored_at(self._context.log, self._context.queues, queue, offset) if offset < high else None
            span = {
                "messageQueue": Place(topic.name, self._context.broker_name, queue_id).document(),
                "minTimeStamp": oldest_ms,
                "maxTimeStamp": stored_at(self._context.log, self._context.queues, queue, high - 1) or 0,
                "consumeTimeStamp": read_ms or 0,
                "delayTime": self._clock.wall_ms() - waiting_ms if waiting_ms is not None else 0,
            }
            spans.append(to_json(span))
        return command.reply(ResponseCode.SUCCESS, body=f'{{"consumeTimeSpanSet":[{",".join(spans)}]}}'.encode())

    def _topic(self, command: Command) -> TopicConfig:
        name = command.get_str("topic")
        topic = self._context.topics.get(name)
        if topic is None:
            raise RequestError(ResponseCode.TOPIC_NOT_EXIST, f"topic {name[:127]!r} does not exist")
        return topic

    def clone_offsets(self, command: Command, connection: Connection) -> Command:
        """Code 314: let one group continue where another one is, in one topic or in all that the other consumes."""
        source, target = command.get_str("srcGroup"), command.get_str("destGroup")
        if self._context.gate.needs_leader and not self._context.gate.leads:
            raise self._context.gate.not_leader()
        only = command.get_str("topic", "")
        for topic in self._consumed(source, [only] if only else self._context.offsets.topics_of(source)):
            here = self._context.clients.consumer_group(target)
            if here is not None and topic.name in here.subscriptions:
                raise RequestError(  # they would continue from the offsets in their memory and commit those instead
                    ResponseCode.SYSTEM_ERROR, f"group {target!r} has consumers here, stop them first"
                )
            for queue_id, offset in self._context.offsets.of(source, topic.name).items():
                try:
                    self._context.offsets.commit(target, topic.name, queue_id, offset)
                except TooManyOffsets as error:
                    raise RequestError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        return command.reply(ResponseCode.SUCCESS)


def check_filter(expression: str, kind: str) -> None:
    """Return if messages can be filtered by this expression. Raises RequestError (SUBSCRIPTION_PARSE_FAILED)."""
    if kind == "SQL92":
        PropertyFilter(expression)
    elif kind != "TAG":
        raise RequestError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, f"{kind[:40]!r} is neither TAG nor SQL92")


def subscription_document(subscription: Subscription) -> dict[str, Any]:
    """A group's subscription to a topic, in RocketMQ's JSON (R: SubscriptionData)."""
    tags = sorted(TagFilter(subscription.expression).tags) if subscription.expression_type == "TAG" else []
    return {
        "classFilterMode": False,
        "codeSet": list(map(java_string_hash, tags)),
        "expressionType": subscription.expression_type,
        "subString": subscription.expression,
        "subVersion": subscription.version,
        "tagsSet": tags,
        "topic": subscription.topic,
    }


def _language(client: Client) -> str:
    known = LanguageCode._value2member_map_
    return known[client.language].name if client.language in known else LanguageCode.OTHER.name


def _connection(client: Client) -> Mapping[str, object]:
    return {
        "clientId": client.client_id,
        "clientAddr": client.connection.remote_address,
        "language": _language(client),
        "version": client.version,
    }
