"""Every request code of a broker, as section 3 of the specification lists them: fields, reply fields, effect, errors.

In a row's `fields` a star marks required fields, a hash numbers. Each row is requested over the wire in both
serializers: with every field set, with one missing, with a number that is invalid or takes more than 64 bits, and with
unknown names. The codes that the broker registers must be those listed here.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from node.remoting import Command
from node.store.record import decode_records

_spec = importlib.util.spec_from_file_location("request_effects", Path(__file__).with_name("request_effects.py"))
assert _spec is not None and _spec.loader is not None
do = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(do)

VALUES: dict[str, Any] = {
    "producerGroup": "p", "consumerGroup": "g", "group": "g", "topic": "t", "defaultTopic": "TBW102",
    "defaultTopicQueueNums": 4, "queueId": 1, "sysFlag": 0, "bornTimestamp": 5, "flag": 7, "properties": do.PROPERTIES,
    "reconsumeTimes": 0, "unitMode": False, "batch": False, "maxReconsumeTimes": 16, "queueOffset": 0, "maxMsgNums": 32,
    "commitOffset": 1, "suspendTimeoutMillis": 0, "subscription": "a || b", "subVersion": 1, "expressionType": "TAG",
    "clientID": "c@1", "clientId": "c@1", "delayLevel": 3, "originMsgId": "U1", "originTopic": "t",
    "commitOrRollback": 8, "fromTransactionCheck": False, "transactionId": "U1", "timestamp": 0, "key": "k",
    "maxNum": 32, "beginTimestamp": 0, "endTimestamp": 1 << 62, "_UNIQUE_KEY_QUERY": False, "readQueueNums": 3,
    "writeQueueNums": 2, "perm": 6, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": False,
    "groupName": "g", "removeOffset": True, "isForce": True, "srcGroup": "g", "destGroup": "h", "offline": True,
    "invisibleTime": 60_000, "pollTime": 0, "bornTime": 5, "initMode": 0, "exp": "a", "expType": "TAG", "attemptId": "",
    "extraInfo": "0 1700000000000 60000 0 0 broker-a 1 0",
    "index": 0, "count": 10, "isOrder": False, "jstackEnable": False, "clientAddr": "", "brokerName": "broker-a",
}  # fmt: skip
SHORT = {
    "producerGroup": "a", "topic": "b", "defaultTopic": "c", "defaultTopicQueueNums": "d", "queueId": "e",
    "sysFlag": "f", "bornTimestamp": "g", "flag": "h", "properties": "i", "reconsumeTimes": "j", "unitMode": "k",
    "maxReconsumeTimes": "l", "batch": "m", "brokerName": "n",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the specification's table."""

    code: int
    fields: str
    reply: str = ""
    effect: Callable[[Any, Command], Awaitable[None]]
    given: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""
    answer: int = 0
    unknown: dict[str, tuple[Any, int]] = field(default_factory=dict)
    """Field -> a value that is unknown or too large, and the code of the reply."""
    is_short: bool = False
    transactional: bool = False
    online: bool = False
    """Whether a consumer and a producer are connected."""
    popped: bool = False
    """Whether a POP consumer has popped the message."""

    @property
    def names(self) -> list[str]:
        return [word.rstrip("*#") for word in self.fields.split()]

    def marked(self, mark: str) -> list[str]:
        return [word.rstrip("*#") for word in self.fields.split() if mark in word]

    def wire(self, name: str) -> str:
        return SHORT[name] if self.is_short else name

    def request(self, world: Any) -> dict[str, Any]:
        values = VALUES | world.known | self.given
        return {self.wire(name): values[name] for name in self.names} | {"unheardOf": "x"}


SEND = (
    "producerGroup topic* defaultTopic defaultTopicQueueNums queueId*# sysFlag# bornTimestamp# flag# properties"
    " reconsumeTimes# unitMode batch maxReconsumeTimes"
)
SENT = "msgId queueId queueOffset transactionId MSG_REGION TRACE_ON"
REPLIED = "msgId queueId# queueOffset# MSG_REGION TRACE_ON"
REPLY = {
    "topic": "splitbrain_REPLY_TOPIC", "queueId": 0,
    "properties": "REPLY_TO_CLIENT\x01c@1\x02CORRELATION_ID\x017\x02MSG_TYPE\x01reply\x02",
}  # fmt: skip
SEND_LIMITS: dict[str, tuple[Any, int]] = {
    "topic": ("t" * 128, 13), "properties": ("k\x01" + "v" * 32768, 13), "queueId": (2, 1), "flag": (1 << 40, 13),
}  # fmt: skip
BATCH = b"".join(
    (22 + len(body)).to_bytes(4, "big") + bytes(12) + len(body).to_bytes(4, "big") + body + bytes(2)
    for body in (b"one", b"two")
)
OFFSETS = "consumerGroup* topic* queueId*#"
PLACE = "topic* queueId*#"
END = (
    "producerGroup* tranStateTableOffset*# commitLogOffset*# commitOrRollback# fromTransactionCheck msgId transactionId"
)
BACK = "offset*# group* delayLevel# originMsgId originTopic maxReconsumeTimes#"
QUERY = "topic* key* maxNum# beginTimestamp# endTimestamp# _UNIQUE_KEY_QUERY"
TOPIC = "topic* defaultTopic readQueueNums# writeQueueNums# perm# topicFilterType topicSysFlag# order"
PULL = (
    "consumerGroup topic* queueId*# queueOffset*# maxMsgNums# sysFlag# commitOffset# suspendTimeoutMillis#"
    " subscription subVersion expressionType"
)
POP = (
    "consumerGroup* topic* queueId# maxMsgNums*# invisibleTime*# pollTime# bornTime initMode# expType exp order"
    " attemptId"
)
HANDLE = "consumerGroup* topic* queueId*# extraInfo* offset*#"
NO_TOPIC = {"topic": ("nobody", 17)}
EMPTY = {"topic": ("nobody", 0)}
HEARTBEAT_BODY = json.dumps(do.HEARTBEAT).encode()
LOCK = json.dumps(do.LOCKS).encode()

ROWS = (
    Row(code=10, fields=SEND, reply=SENT, effect=do.stored, body=b"sent", unknown=SEND_LIMITS),
    Row(code=310, fields=SEND + " brokerName", reply=SENT, effect=do.stored, body=b"sent", is_short=True,
        unknown=SEND_LIMITS),
    Row(code=320, fields=SEND, reply=SENT, effect=do.batch_stored, body=BATCH, is_short=True,
        given={"batch": True, "properties": ""}, unknown={name: SEND_LIMITS[name] for name in ("topic", "queueId")}),
    Row(code=11, fields=PULL, reply="suggestWhichBrokerId# nextBeginOffset# minOffset# maxOffset#", effect=do.pulled,
        given={"sysFlag": 7}, unknown={**NO_TOPIC, "queueOffset": (9, 21), "expressionType": ("XPATH", 23)}),
    Row(code=361, fields=PULL, reply="suggestWhichBrokerId# nextBeginOffset# minOffset# maxOffset#", effect=do.pulled,
        given={"sysFlag": 7 | 16}),
    Row(code=14, fields=OFFSETS, reply="offset#", effect=do.offset_zero_returned, unknown=EMPTY),
    Row(code=15, fields=OFFSETS + " commitOffset*#", effect=lambda world, _: do.offset_is(world, 1),
        unknown={**NO_TOPIC, "queueId": (99, 1)}),
    Row(code=34, fields="", effect=do.client_registered, body=HEARTBEAT_BODY),
    Row(code=35, fields="clientID* producerGroup consumerGroup", effect=do.client_unregistered, online=True),
    Row(code=38, fields="consumerGroup*", effect=do.one_consumer, online=True, unknown={"consumerGroup": ("x", 1)}),
    Row(code=41, fields="", effect=do.locked, body=LOCK),
    Row(code=42, fields="", effect=do.unlocked, body=LOCK),
    Row(code=36, fields=BACK, effect=do.retry_scheduled, unknown={"offset": (1 << 40, 1)}),
    Row(code=36, fields=BACK, effect=do.retry_scheduled, given={"delayLevel": 0}),
    Row(code=36, fields=BACK, effect=do.dead_lettered, given={"delayLevel": -1}),
    Row(code=36, fields=BACK, effect=do.dead_lettered, given={"maxReconsumeTimes": 0}),
    Row(code=37, fields=END, effect=do.committed, transactional=True,
        unknown={"producerGroup": ("q", 1), "tranStateTableOffset": (5, 1), "commitLogOffset": (1 << 40, 1)}),
    Row(code=37, fields=END, effect=do.rolled_back, transactional=True, given={"commitOrRollback": 12}),
    Row(code=30, fields=PLACE, reply="offset#", effect=do.offset_returned(1), unknown=EMPTY),
    Row(code=31, fields=PLACE, reply="offset#", effect=do.offset_returned(0), unknown=EMPTY),
    Row(code=29, fields=PLACE + " timestamp*#", reply="offset#", effect=do.offset_returned(0), unknown=EMPTY),
    Row(code=33, fields="offset*#", effect=do.record_returned, unknown={"offset": (1 << 40, 1)}),
    Row(code=12, fields=QUERY, reply="indexLastUpdateTimestamp# indexLastUpdatePhyoffset#", effect=do.found_by_key,
        unknown={"topic": ("nobody", 22), "key": ("nothing", 22), "beginTimestamp": (1 << 61, 22)}),
    Row(code=12, fields=QUERY, reply="indexLastUpdateTimestamp# indexLastUpdatePhyoffset#", effect=do.found_by_key,
        given={"_UNIQUE_KEY_QUERY": True, "key": "U1"}),
    Row(code=17, fields=TOPIC, effect=do.topic_created, given={"topic": "new"},
        unknown={"topic": ("t" * 128, 1), "perm": (8, 1), "writeQueueNums": (1 << 20, 1)}),
    Row(code=21, fields="", effect=do.topic_table),
    Row(code=43, fields="", effect=do.offset_table, online=True),
    Row(code=45, fields="", effect=do.delay_table),
    Row(code=201, fields="", effect=do.group_table, online=True),
    Row(code=200, fields="", effect=do.group_changed, body=json.dumps(do.GROUP).encode()),
    Row(code=207, fields="groupName* removeOffset", effect=do.group_deleted, online=True),
    Row(code=202, fields="topic*", effect=do.topic_bounds, unknown=NO_TOPIC),
    Row(code=215, fields="topic*", effect=do.topic_deleted, given={"topic": "made"}, unknown={"topic": ("t", 1)}),
    Row(code=28, fields="", effect=do.status),
    # Other requests of RocketMQ's tools.
    Row(code=26, fields="", reply="version", effect=do.settings),
    Row(code=25, fields="", effect=do.setting_changed, body=b"transactionCheckMax=7\n"),
    Row(code=32, fields=PLACE, reply="timestamp#", effect=do.time_returned, unknown=EMPTY),
    Row(code=46, fields="", effect=do.empty_reply, body=json.dumps(do.CHECKED).encode()),
    Row(code=203, fields="consumerGroup*", effect=do.consumer_returned, online=True,
        unknown={"consumerGroup": ("x", 206)}),
    Row(code=204, fields="producerGroup*", effect=do.producer_returned, online=True,
        unknown={"producerGroup": ("x", 1)}),
    Row(code=208, fields="consumerGroup* topic", effect=do.progress_returned, online=True, unknown=EMPTY),
    Row(code=222, fields="topic* group* timestamp*# isForce", effect=do.consumer_reset, online=True,
        unknown={"topic": ("nobody", 1), "group": ("nobody", 1)}),
    Row(code=223, fields="topic* group* clientAddr", effect=do.consumer_status_returned, online=True,
        unknown={"group": ("nobody", 1)}),
    Row(code=300, fields="topic*", effect=do.groups_returned, online=True, unknown=EMPTY),
    Row(code=303, fields="topic* group*", effect=do.spans_returned, online=True, unknown=NO_TOPIC),
    Row(code=305, fields="", effect=do.system_topics_returned),
    Row(code=307, fields="consumerGroup* clientId* jstackEnable", effect=do.consumer_reply_returned, online=True,
        unknown={"clientId": ("nobody", 1)}),
    Row(code=309, fields="consumerGroup* clientId* msgId*", effect=do.message_consumed_directly, online=True,
        unknown={"clientId": ("nobody", 1), "msgId": ("AB", 1)}),
    Row(code=324, fields=SEND, reply=REPLIED, effect=do.reply_forwarded, online=True, body=b"the answer", given=REPLY,
        unknown={"topic": ("t" * 128, 13), "properties": ("KEYS\x01k\x02", 1), "queueId": (1, 1)}),
    Row(code=325, fields=SEND, reply=REPLIED, effect=do.reply_forwarded, online=True, body=b"the answer", given=REPLY,
        is_short=True, unknown={"properties": ("REPLY_TO_CLIENT\x01c@2\x02", 1)}),
    Row(code=314, fields="srcGroup* destGroup* topic offline", effect=do.offsets_copied, online=True),
    Row(code=317, fields="isOrder", effect=do.all_progress_returned, online=True),
    Row(code=321, fields=PLACE + " index*# count*# consumerGroup", effect=do.units_returned, online=True,
        unknown={"topic": ("nobody", 1)}),
    Row(code=328, fields="", effect=do.producers_returned, online=True),
    Row(code=351, fields="topic*", effect=do.topic_returned, unknown=NO_TOPIC),
    # Requests of RocketMQ 5's consumers and its proxy.
    Row(code=352, fields="group*", effect=do.group_returned, online=True, unknown={"group": ("nobody", 26)}),
    Row(code=400, fields="", effect=do.queues_assigned, online=True, body=json.dumps(do.ASSIGNMENT).encode()),
    Row(code=401, fields="", effect=do.empty_reply, body=json.dumps(do.POP_MODE).encode()),
    Row(code=200050, fields=POP, reply="popTime# invisibleTime# reviveQid# restNum# startOffsetInfo msgOffsetInfo",
        effect=do.popped, unknown={**NO_TOPIC, "queueId": (99, 29), "maxMsgNums": (33, 29), "expType": ("XPATH", 23)}),
    Row(code=200051, fields=HANDLE, effect=do.no_popped_message_open, popped=True, given={"offset": 0},
        unknown={**NO_TOPIC, "queueId": (99, 13), "offset": (9, 208), "extraInfo": ("0 0", 13)}),
    Row(code=200053, fields=HANDLE + " invisibleTime*#", reply="popTime# invisibleTime# reviveQid#",
        effect=do.popped_message_open, popped=True, given={"offset": 0},
        unknown={**NO_TOPIC, "queueId": (99, 13), "offset": (9, 208), "extraInfo": ("0 5 0 0", 208)}),
    Row(code=200151, fields="", effect=do.no_popped_message_open, popped=True, body=json.dumps(do.ACKS).encode()),
)  # fmt: skip


def assert_refused(reply: Command, code: int, names: str) -> None:
    assert reply.code == code, (names, reply.code, reply.remark)
    assert reply.remark and "\n" not in reply.remark and len(reply.remark) < 300, names


BINARY_CODES = range(1 << 15)
"""Codes that fit into the binary header's two bytes; RocketMQ has its POP consumers use JSON."""


@pytest.mark.parametrize(
    ("row", "serializer"),
    [(row, name) for row in ROWS for name in ("json", "binary") if name == "json" or row.code in BINARY_CODES],
    ids=lambda each: each if isinstance(each, str) else f"{each.code}-{each.effect.__name__}",
)
def test_each_code_does_what_the_specification_says(run_case: Any, row: Row, serializer: Any) -> None:
    async def scenario(case: Any) -> None:
        world = do.World(case, serializer)
        assert (await world.ask(17, {"topic": "made"})).code == 0
        await world.prepare(transactional=row.transactional, online=row.online, popped=row.popped)
        request = row.request(world)
        for name in row.marked("*"):
            without = {key: value for key, value in request.items() if key != row.wire(name)}
            reply = await world.ask(row.code, without, row.body)
            assert_refused(reply, 1, name)
            assert f"field {row.wire(name)} is missing" in str(reply.remark)
        for name in row.marked("#"):
            for value in ("many", "1_0", str(1 << 63), str(-(1 << 63) - 1), "9" * 5000):
                reply = await world.ask(row.code, request | {row.wire(name): value}, row.body)
                assert_refused(reply, 1, f"{name}={value[:30]}")
                assert f"the field {row.wire(name)} " in str(reply.remark)
        for name, (value, code) in row.unknown.items():
            reply = await world.ask(row.code, request | {row.wire(name): value}, row.body)
            if code == 0:
                assert reply.code == 0, (name, reply.remark)
            elif code not in (21, 22):
                assert_refused(reply, code, name)
            else:
                assert reply.code == code, name
        reply = await world.ask(row.code, request, row.body)
        assert reply.code == 0, reply.remark
        assert reply.ext_fields.keys() == {word.rstrip("#") for word in row.reply.split()}
        for word in row.reply.split():
            assert not word.endswith("#") or int(reply.ext_fields[word.rstrip("#")]) >= 0
        await row.effect(world, reply)

    run_case(scenario)


MALFORMED_BODIES = (b"", b"{", b"[]", b"null", b"7", b'{"clientID": [], "mqSet": 3}', b"\xff" * 8, b"[" * 5000)


@pytest.mark.parametrize("serializer", ["json", "binary"])
@pytest.mark.parametrize("code", [25, 34, 41, 42, 46, 200])
def test_malformed_bodies_are_refused(run_case: Any, code: int, serializer: Any) -> None:
    async def scenario(case: Any) -> None:
        world = do.World(case, serializer)
        for body in MALFORMED_BODIES:
            assert_refused(await world.ask(code, {}, body), 1, repr(body[:20]))

    run_case(scenario)


@pytest.mark.parametrize("serializer", ["json", "binary"])
def test_every_code_is_in_the_table_and_others_are_not_supported(run_case: Any, serializer: Any) -> None:
    async def scenario(case: Any) -> None:
        (server,) = case.broker._server._servers
        named = {row.code for row in ROWS}
        assert named == set(server.processors)
        world = do.World(case, serializer)
        for code in (0, 9, 13, 39, 40, 50, 105, 220, 306, 999, 32767, -1):
            assert code not in named
            assert_refused(await world.ask(code, {"topic": "t"}), 3, str(code))

    run_case(scenario)


@pytest.mark.parametrize("serializer", ["json", "binary"])
def test_a_broker_checks_a_transaction_with_code_39(run_case: Any, serializer: Any) -> None:
    """tranStateTableOffset, commitLogOffset, msgId, transactionId, offsetMsgId; the body is the record."""

    async def scenario(case: Any) -> None:
        world = do.World(case, serializer)
        await world.prepare(transactional=True)
        assert (await world.ask(34, {}, HEARTBEAT_BODY)).code == 0
        case.clock.now_ms += 7000
        case.broker._checks._run()
        question = await world.command_received(39)
        assert question.is_oneway and question.ext_fields == {
            "tranStateTableOffset": "0", "commitLogOffset": str(world.known["offset"]), "msgId": "U1",
            "transactionId": "U1", "offsetMsgId": world.known["msgId"],
        }  # fmt: skip
        (message,) = decode_records(question.body)
        assert (message.topic, message.body) == ("t", b"body")

    run_case(scenario)
