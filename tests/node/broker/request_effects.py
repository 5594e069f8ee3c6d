"""A broker with one message and one client, for the table of request codes; and a check of each code's effect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from node.remoting import Command
from node.remoting.tool_json import Place, parse_queue_table
from node.store.record import decode_records

PROPERTIES = "KEYS\x01k\x02TAGS\x01a\x02UNIQ_KEY\x01U1\x02PGROUP\x01p\x02"
SUBSCRIPTION = {
    "topic": "t", "subString": "a || b", "tagsSet": ["a", "b"], "codeSet": [97, 98], "subVersion": 1,
    "classFilterMode": False, "expressionType": "TAG",
}  # fmt: skip
HEARTBEAT = {
    "clientID": "c@1",
    "producerDataSet": [{"groupName": "p"}],
    "consumerDataSet": [
        {
            "groupName": "g", "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING", "unitMode": False,
            "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "subscriptionDataSet": [SUBSCRIPTION],
        }
    ],
}  # fmt: skip
QUEUE = {"topic": "t", "brokerName": "broker-a", "queueId": 1}
LOCKS = {"consumerGroup": "g", "clientId": "c@1", "mqSet": [QUEUE]}
GROUP = {"groupName": "g", "retryQueueNums": 1, "retryMaxTimes": 3, "consumeEnable": True}
ASSIGNMENT = {
    "topic": "t", "consumerGroup": "g", "clientId": "c@1", "strategyName": "AVG", "messageModel": "CLUSTERING",
}  # fmt: skip
POP_MODE = {"topic": "t", "consumerGroup": "g", "mode": "POP", "popShareQueueNum": 0}
ACK = {"c": "g", "t": "t", "r": "0", "so": 0, "q": 1, "rq": 0, "pt": 1_700_000_000_000, "it": 60_000, "b": "AQ=="}
ACKS = {"brokerName": "broker-a", "acks": [ACK]}
CHECKED = {"clientId": "c@1", "group": "g", "subscriptionData": SUBSCRIPTION}


class World:
    """A broker that holds one message in queue 1 of topic "t", and one client of it."""

    def __init__(self, case: Any, serializer: Any) -> None:
        self.case, self.serializer = case, serializer
        self.received: list[Command] = []
        self.known: dict[str, Any] = {}

    async def ask(self, code: int, fields: dict[str, Any], body: bytes = b"") -> Command:
        request = replace(Command.request(code, fields, body), serializer=self.serializer)
        address = f"127.0.0.1:{self.case.broker.port}"
        reply: Command = await self.case.client.invoke(address, request, timeout_ms=5000)
        assert reply.serializer == self.serializer and reply.is_response
        return reply

    def _receive(self, command: Command, connection: Any) -> Command | None:
        self.received.append(command)
        if command.code == 221:
            return command.reply(0, body=b'{"messageQueueTable":{' + json.dumps(QUEUE).encode() + b":1}}")
        if command.code == 326:
            return command.reply(0)
        if command.code in (307, 309):
            return command.reply(0, body=b'{"said":"by the consumer"}')
        return None

    async def prepare(self, *, transactional: bool = False, online: bool = False, popped: bool = False) -> None:
        for code in (39, 40, 220, 221, 307, 309, 326):
            self.case.client.register(code, self._receive)
        properties = PROPERTIES + ("TRAN_MSG\x01true\x02" if transactional else "")
        sent = await self.ask(310, {"a": "p", "b": "t", "e": 1, "i": properties}, b"body")
        assert sent.code == 0, sent.remark
        self.known["offset"] = self.known["commitLogOffset"] = int(sent.ext_fields["msgId"][16:], 16)
        self.known["tranStateTableOffset"] = int(sent.ext_fields["queueOffset"])
        self.known["msgId"] = sent.ext_fields["msgId"]
        if popped:
            fields = {"consumerGroup": "g", "topic": "t", "maxMsgNums": 1, "invisibleTime": 60_000}
            assert (await self.ask(200050, fields)).body
        if online:
            assert (await self.ask(34, {}, json.dumps(HEARTBEAT).encode())).code == 0
            assert (await self.ask(15, {"consumerGroup": "g", **QUEUE, "commitOffset": 1})).code == 0
            assert (await self.ask(15, {"consumerGroup": "g", **QUEUE, "queueId": 0, "commitOffset": 0})).code == 0

    async def bodies(self, topic: str = "t", queue_id: int = 1) -> list[bytes]:
        pulled = await self.case.pull(0, topic, queue_id)
        return [message.body for message in decode_records(pulled.body)]

    async def command_received(self, code: int) -> Command:
        for _ in range(2000):
            for command in self.received:
                if command.code == code:
                    return command
            await asyncio.sleep(0.001)
        raise AssertionError(f"the client never received code {code}")


Effect = Callable[[World, Command], Awaitable[None]]


def parse_table(body: bytes, name: str) -> dict[int, Any]:
    return {place.queue_id: value for place, value in parse_queue_table(body, name)}


async def stored(world: World, reply: Command) -> None:
    assert (await world.bodies())[1:] == [b"sent"]
    assert reply.ext_fields["queueOffset"] == "1" and reply.ext_fields["queueId"] == "1"
    assert reply.ext_fields["transactionId"] == "U1" and reply.ext_fields["MSG_REGION"] == "DefaultRegion"
    (message,) = decode_records((await world.case.pull(1, "t", 1)).body)
    assert (message.flag, message.born_timestamp_ms, message.reconsume_times) == (7, 5, 0)
    assert dict(message.properties) == {"KEYS": "k", "TAGS": "a", "UNIQ_KEY": "U1", "PGROUP": "p"}


async def batch_stored(world: World, reply: Command) -> None:
    assert (await world.bodies())[1:] == [b"one", b"two"]
    assert len(reply.ext_fields["msgId"].split(",")) == 2 and reply.ext_fields["queueOffset"] == "1"


async def pulled(world: World, reply: Command) -> None:
    (message,) = decode_records(reply.body)
    assert message.body == b"body"
    bounds = {"nextBeginOffset": "1", "minOffset": "0", "maxOffset": "1", "suggestWhichBrokerId": "0"}
    assert reply.ext_fields == bounds
    await offset_is(world, 1)  # committed by the pull


async def offset_is(world: World, expected: int) -> None:
    found = await world.ask(14, {"consumerGroup": "g", "topic": "t", "queueId": 1})
    assert (found.code, found.ext_fields) == (0, {"offset": str(expected)})


async def offset_zero_returned(world: World, reply: Command) -> None:
    assert reply.ext_fields["offset"] == "0"  # unknown, and the queue still has its first message


async def client_registered(world: World, reply: Command) -> None:
    assert world.case.broker.clients.consumer_ids("g") == ["c@1"]
    assert world.case.broker.clients.next_producer("p") is not None
    assert world.case.broker.topics.get("%RETRY%g") is not None
    assert (await world.command_received(40)).ext_fields == {"consumerGroup": "g"}


async def client_unregistered(world: World, reply: Command) -> None:
    assert world.case.broker.clients.consumer_ids("g") == []
    assert world.case.broker.clients.next_producer("p") is None


async def one_consumer(world: World, reply: Command) -> None:
    assert json.loads(reply.body) == {"consumerIdList": ["c@1"]}


async def locked(world: World, reply: Command) -> None:
    assert json.loads(reply.body) == {"lockOKMQSet": [QUEUE]}
    other = await world.ask(41, {}, json.dumps(LOCKS | {"clientId": "c@2"}).encode())
    assert json.loads(other.body) == {"lockOKMQSet": []}


async def unlocked(world: World, reply: Command) -> None:
    other = await world.ask(41, {}, json.dumps(LOCKS | {"clientId": "c@2"}).encode())
    assert json.loads(other.body) == {"lockOKMQSet": [QUEUE]}


async def retry_scheduled(world: World, reply: Command) -> None:
    """Delay level 3 is the third queue of the schedule's topic, as is "3 + reconsumed" for level 0."""
    (message,) = decode_records((await world.case.pull(0, "SCHEDULE_TOPIC_XXXX", 2)).body)
    assert message.body == b"body" and message.reconsume_times == 1
    assert message.properties["REAL_TOPIC"] == "%RETRY%g" and message.properties["RETRY_TOPIC"] == "t"
    assert message.properties["ORIGIN_MESSAGE_ID"] == world.known["msgId"]


async def dead_lettered(world: World, reply: Command) -> None:
    assert await world.bodies("%DLQ%g", 0) == [b"body"]


async def committed(world: World, reply: Command) -> None:
    assert await world.bodies() == [b"body"]


async def rolled_back(world: World, reply: Command) -> None:
    assert await world.bodies() == [] and not world.case.broker.transactions.halves


def offset_returned(expected: int) -> Effect:
    async def check(world: World, reply: Command) -> None:
        assert reply.ext_fields == {"offset": str(expected)}

    return check


async def record_returned(world: World, reply: Command) -> None:
    (message,) = decode_records(reply.body)
    assert (message.body, message.physical_offset) == (b"body", world.known["offset"])


async def found_by_key(world: World, reply: Command) -> None:
    await record_returned(world, reply)
    assert int(reply.ext_fields["indexLastUpdatePhyoffset"]) == world.known["offset"]
    assert int(reply.ext_fields["indexLastUpdateTimestamp"]) > 0


async def topic_created(world: World, reply: Command) -> None:
    topic = world.case.broker.topics.get("new")
    assert (topic.read_queues, topic.queues, topic.perm, topic.sys_flag, topic.order) == (3, 2, 6, 0, False)


async def topic_deleted(world: World, reply: Command) -> None:
    assert world.case.broker.topics.get("made") is None


TOPIC = {
    "topicName": "t", "readQueueNums": 2, "writeQueueNums": 2, "perm": 6, "topicFilterType": "SINGLE_TAG",
    "topicSysFlag": 0, "order": False,
}  # fmt: skip


async def topic_table(world: World, reply: Command) -> None:
    body = json.loads(reply.body)
    assert body.keys() == {"topicConfigTable", "dataVersion"}
    assert body["topicConfigTable"]["t"] == TOPIC


async def topic_returned(world: World, reply: Command) -> None:
    assert json.loads(reply.body) == TOPIC


async def offset_table(world: World, reply: Command) -> None:
    assert json.loads(reply.body) == {"offsetTable": {"t@g": {"0": 0, "1": 1}}}


async def delay_table(world: World, reply: Command) -> None:
    assert json.loads(reply.body) == {"offsetTable": {str(level): 0 for level in range(1, 19)}}


async def group_table(world: World, reply: Command) -> None:
    body = json.loads(reply.body)
    assert body["subscriptionGroupTable"]["g"]["retryMaxTimes"] == 16 and "dataVersion" in body


async def group_changed(world: World, reply: Command) -> None:
    assert world.case.broker.groups.get("g").retry_max_times == 3


async def group_deleted(world: World, reply: Command) -> None:
    assert world.case.broker.groups.get("g") is None
    await offset_is(world, 0)


async def topic_bounds(world: World, reply: Command) -> None:
    table = parse_table(reply.body, "offsetTable")
    assert table[0] == {"lastUpdateTimestamp": 0, "maxOffset": 0, "minOffset": 0}
    assert (table[1]["minOffset"], table[1]["maxOffset"]) == (0, 1) and table[1]["lastUpdateTimestamp"] > 0


async def status(world: World, reply: Command) -> None:
    table = json.loads(reply.body)["table"]
    assert table["putTotal"] == "1" and table["brokerName"] == "broker-a" and "putTps" in table


async def settings(world: World, reply: Command) -> None:
    lines = dict(line.split("=", 1) for line in reply.body.decode().splitlines())
    assert lines["brokerName"] == "broker-a" and lines["maxMessageSize"] == str(4 << 20)
    assert reply.ext_fields.keys() == {"version"}


async def setting_changed(world: World, reply: Command) -> None:
    assert b"\ntransactionCheckMax=7\n" in (await world.ask(26, {})).body


async def time_returned(world: World, reply: Command) -> None:
    assert int(reply.ext_fields["timestamp"]) == world.case.clock.now_ms


async def empty_reply(world: World, reply: Command) -> None:
    assert reply.body == b"" and reply.ext_fields == {}


async def consumer_returned(world: World, reply: Command) -> None:
    body = json.loads(reply.body)
    assert (body["consumeType"], body["messageModel"]) == ("CONSUME_PASSIVELY", "CLUSTERING")
    assert body["consumeFromWhere"] == "CONSUME_FROM_FIRST_OFFSET" and body["subscriptionTable"] == {"t": SUBSCRIPTION}
    (client,) = body["connectionSet"]
    assert (client["clientId"], client["language"], client["version"]) == ("c@1", "PYTHON", 409)


async def producer_returned(world: World, reply: Command) -> None:
    (client,) = json.loads(reply.body)["connectionSet"]
    assert client["clientId"] == "c@1" and client["clientAddr"].startswith("127.0.0.1:")


async def producers_returned(world: World, reply: Command) -> None:
    (client,) = json.loads(reply.body)["data"]["p"]
    assert client["clientId"] == "c@1" and 0 <= world.case.clock.now_ms - client["lastUpdateTimestamp"] < 10_000


async def progress_returned(world: World, reply: Command) -> None:
    table = parse_table(reply.body, "offsetTable")
    assert table[1] == {"brokerOffset": 1, "consumerOffset": 1, "lastTimestamp": world.case.clock.now_ms}
    assert table[0] == {"brokerOffset": 0, "consumerOffset": 0, "lastTimestamp": 0}


async def all_progress_returned(world: World, reply: Command) -> None:
    assert reply.body.endswith(b'"totalDiff":0}') and parse_table(reply.body, "offsetTable")[1]["brokerOffset"] == 1


async def consumer_reset(world: World, reply: Command) -> None:
    assert parse_table(reply.body, "offsetTable") == {0: 0, 1: 0}
    notice = await world.command_received(220)
    assert notice.ext_fields == {"topic": "t", "group": "g", "timestamp": "0", "isForce": "true"}
    assert parse_queue_table(notice.body, "offsetTable") == [(Place("t", "broker-a", at), 0) for at in (0, 1)]


async def consumer_status_returned(world: World, reply: Command) -> None:
    head = b'{"consumerTable":{"c@1":'
    assert reply.body.startswith(head)
    assert parse_table(b'{"x":' + reply.body[len(head) :], "x") == {1: 1}


async def groups_returned(world: World, reply: Command) -> None:
    assert json.loads(reply.body) == {"groupList": ["g"]}


async def spans_returned(world: World, reply: Command) -> None:
    spans = {span["messageQueue"]["queueId"]: span for span in json.loads(reply.body)["consumeTimeSpanSet"]}
    now = world.case.clock.now_ms
    assert spans[1] == {
        "messageQueue": QUEUE, "minTimeStamp": now, "maxTimeStamp": now, "consumeTimeStamp": now, "delayTime": 0
    }  # fmt: skip


async def system_topics_returned(world: World, reply: Command) -> None:
    names = json.loads(reply.body)["topicList"]
    assert "SCHEDULE_TOPIC_XXXX" in names and "RMQ_SYS_TRANS_HALF_TOPIC" in names and "t" not in names


async def consumer_reply_returned(world: World, reply: Command) -> None:
    assert json.loads(reply.body) == {"said": "by the consumer"}


async def message_consumed_directly(world: World, reply: Command) -> None:
    await consumer_reply_returned(world, reply)
    (message,) = decode_records((await world.command_received(309)).body)
    assert message.body == b"body"


async def reply_forwarded(world: World, reply: Command) -> None:
    pushed = await world.command_received(326)
    assert pushed.body == b"the answer"
    fields = dict(pushed.ext_fields)
    properties = dict(pair.split("\x01") for pair in fields.pop("properties").split("\x02") if pair)
    assert int(properties.pop("PUSH_REPLY_TIME")) == int(fields.pop("storeTimestamp")) > 0
    assert properties == {"REPLY_TO_CLIENT": "c@1", "CORRELATION_ID": "7", "MSG_TYPE": "reply"}
    host, _, port = fields.pop("bornHost").rpartition(":")
    assert host == "127.0.0.1" and port.isdigit()
    assert fields.pop("storeHost") == world.case.broker.address
    assert fields == {
        "producerGroup": "p", "topic": "splitbrain_REPLY_TOPIC", "defaultTopic": "TBW102", "defaultTopicQueueNums": "4",
        "queueId": "0", "sysFlag": "0", "bornTimestamp": "5", "flag": "7", "reconsumeTimes": "0", "unitMode": "false",
    }  # fmt: skip
    bodies = await world.bodies("splitbrain_REPLY_TOPIC", 0)
    assert bodies[-1] == b"the answer"
    assert int(reply.ext_fields["queueOffset"]) == len(bodies) - 1 and len(reply.ext_fields["msgId"]) == 32


async def offsets_copied(world: World, reply: Command) -> None:
    assert world.case.broker.offsets.of("h", "t") == {0: 0, 1: 1}


async def units_returned(world: World, reply: Command) -> None:
    body = json.loads(reply.body)
    assert (body["minQueueIndex"], body["maxQueueIndex"], body["subscriptionData"]) == (0, 1, SUBSCRIPTION)
    (unit,) = body["queueData"]
    assert (unit["physicOffset"], unit["tagsCode"], unit["eval"]) == (world.known["offset"], 97, True)


async def group_returned(world: World, reply: Command) -> None:
    group = json.loads(reply.body)
    assert (group["groupName"], group["retryMaxTimes"], group["consumeMessageOrderly"]) == ("g", 16, False)


async def queues_assigned(world: World, reply: Command) -> None:
    assigned = json.loads(reply.body)["messageQueueAssignments"]
    assert assigned == [{"messageQueue": {**QUEUE, "queueId": number}, "mode": "PULL"} for number in (0, 1)]


async def popped(world: World, reply: Command) -> None:
    (message,) = decode_records(reply.body)
    assert (message.body, reply.ext_fields["popTime"]) == (b"body", "1700000000000")
    assert (reply.ext_fields["startOffsetInfo"], reply.ext_fields["msgOffsetInfo"]) == ("0 1 0", "0 1 0")
    await popped_message_open(world, reply)


async def popped_message_open(world: World, reply: Command) -> None:
    assert (await world.case.table())["openPopMessages"] == "1"


async def no_popped_message_open(world: World, reply: Command) -> None:
    assert (await world.case.table())["openPopMessages"] == "0"
