"""Which requests a topic without read or write permission refuses, on Apache's broker and on ours."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks._apache_broker import apache_classpath, serve_apache
from benchmarks.store_exchange import serve_ours, write_configuration
from harness.errors import OperatorError
from node.remoting import Command, RemotingClient

pytestmark = [
    pytest.mark.java,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        shutil.which("javac") is None or shutil.which("mvn") is None, reason="needs a Java compiler and Maven"
    ),
]

PERMISSIONS = (0, 1, 2, 4, 6, 7)
ONE = (23).to_bytes(4, "big") + bytes(12) + (1).to_bytes(4, "big") + b"x" + bytes(2)
"""A batch of one message."""
NOTHING_FOUND = (19, 22)
"""Replies to an allowed request; messages sent a moment ago may not be dispatched yet."""


class _TopicClient:
    def __init__(self, client: RemotingClient, address: str, permission: int) -> None:
        self.client, self.address, self.permission = client, address, permission
        self.topic = f"permission{permission}"
        self.answers: dict[str, int] = {}

    async def ask(self, name: str, code: int, fields: dict[str, Any], body: bytes = b"") -> Command:
        reply = await self.client.invoke(self.address, Command.request(code, fields, body), timeout_ms=20_000)
        self.answers[name] = 0 if reply.code in NOTHING_FOUND else reply.code
        return reply

    async def send(self, name: str, text: str = "", *, topic: str = "", code: int = 310, **fields: Any) -> Command:
        known = {"a": "producers", "b": topic or self.topic, "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 1, "h": 0}
        known |= {"i": text, "j": 0, "k": "false", "l": 16, "m": "false"}
        return await self.ask(name, code, known | fields, ONE if code == 320 else b"x")

    async def make(self, name: str, topic: str, permission: int) -> None:
        fields = {"topic": topic, "defaultTopic": "TBW102", "readQueueNums": 1, "writeQueueNums": 1}
        fields |= {"perm": permission, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": "false"}
        await self.ask(name, 17, fields)

    async def send_back(self, name: str, group: str, position: int) -> None:
        fields = {"offset": position, "group": group, "delayLevel": 0, "originTopic": self.topic, "originMsgId": "x"}
        await self.ask(name, 36, fields | {"maxReconsumeTimes": 16})

    async def run(self) -> dict[str, int]:
        """Make every kind of request to the topic, and to a retry topic with the same permission."""
        await self.make("make", self.topic, 6)
        position = int((await self.send("before")).ext_fields["msgId"][16:], 16)
        await self.make("change", self.topic, self.permission)
        await self.send("send")
        await self.send("batch", code=320, m="true")
        await self.send("delayed", "DELAY\x0118\x02")
        half = await self.send("half", "TRAN_MSG\x01true\x02PGROUP\x01producers\x02", f=4)
        fields: dict[str, Any] = {"producerGroup": "producers", "commitOrRollback": 8, "fromTransactionCheck": "false"}
        fields["tranStateTableOffset"] = half.ext_fields.get("queueOffset", 0)
        fields["commitLogOffset"] = int(half.ext_fields.get("msgId", "")[16:] or "0", 16)
        await self.ask("commit", 37, fields)
        place = {"topic": self.topic, "queueId": 0}
        pull = {"consumerGroup": "g", "queueOffset": 0, "maxMsgNums": 32, "sysFlag": 4, "commitOffset": 0}
        await self.ask("pull", 11, place | pull | {"suspendTimeoutMillis": 0, "subscription": "*", "subVersion": 0})
        await self.ask("end", 30, place)
        await self.ask("statistics", 202, {"topic": self.topic})
        times = {"maxNum": 3, "beginTimestamp": 0, "endTimestamp": 1 << 60}
        await self.ask("key", 12, {"topic": self.topic, "key": "x", **times})
        await self.ask("offset", 15, {"consumerGroup": "g", **place, "commitOffset": 0})
        await self.send_back("back", f"own{self.permission}", position)
        group = f"retried{self.permission}"
        settings = {"groupName": group, "consumeEnable": True, "consumeFromMinEnable": True, "retryQueueNums": 1}
        settings |= {"consumeBroadcastEnable": True, "retryMaxTimes": 16, "brokerId": 0}
        settings |= {"whichBrokerWhenConsumeSlowly": 1, "notifyConsumerIdsChangedEnable": True}
        await self.ask("group", 200, {}, json.dumps(settings).encode())
        await self.make("retry topic", f"%RETRY%{group}", self.permission)
        await self.send_back("back to retry topic", group, position)
        await self.send("send to retry topic", topic=f"%RETRY%{group}", j=1)
        return self.answers


async def _answers(address: str) -> dict[int, dict[str, int]]:
    client = RemotingClient()
    try:
        return {permission: await _TopicClient(client, address, permission).run() for permission in PERMISSIONS}
    finally:
        await client.close()


def test_topic_permissions_refuse_the_same_requests_as_on_apaches_broker(tmp_path: Path) -> None:
    try:
        apache_classpath()
    except OperatorError as error:
        pytest.skip(f"Maven cannot fetch Apache's broker: {error}")
    with serve_ours(write_configuration(tmp_path / "ours.toml", tmp_path / "ours")) as address:
        ours = asyncio.run(_answers(address))
    with serve_apache(tmp_path / "apache", tmp_path / "work") as broker:
        theirs = asyncio.run(_answers(broker.address))
        broker.process.kill()  # an orderly shutdown takes six seconds, and the store is not needed
    assert ours == theirs
    refused = {permission: {name for name, code in codes.items() if code} for permission, codes in ours.items()}
    no_reading, no_writing = {"pull"}, {"back to retry topic"}
    assert refused == {
        0: no_reading | no_writing, 1: no_reading | no_writing, 2: no_reading, 4: no_writing, 6: set(), 7: set()
    }  # fmt: skip
    assert {code for codes in ours.values() for code in codes.values()} == {0, 16}
