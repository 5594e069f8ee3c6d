"""Every request code of a name server, as section 3 of the specification lists them: fields, replies, effect, errors.

In a row's `fields` a star marks required fields, a hash numbers. Each row is requested over the wire in both
serializers. The codes that the name server registers must be those listed here.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from node.nameserver import NameServer
from node.remoting import Command, RemotingClient
from node.runtime import Runtime

VERSION = {"timestamp": 1, "counter": 7}
TABLE = {"T": {"readQueueNums": 4, "writeQueueNums": 3, "perm": 6, "topicSysFlag": 0}}
BODY = json.dumps(
    {"topicConfigSerializeWrapper": {"topicConfigTable": TABLE, "dataVersion": VERSION}, "filterServerList": []}
).encode()
MASTER = "10.0.0.1:10911"
VALUES: dict[str, Any] = {
    "brokerName": "b", "brokerAddr": MASTER, "clusterName": "c", "haServerAddr": "10.0.0.1:10912", "brokerId": 0,
    "compressed": False, "bodyCrc32": zlib.crc32(BODY) & 0x7FFFFFFF, "topic": "T", "cluster": "c", "namespace": "space",
    "key": "k", "value": "v",
}  # fmt: skip
BROKER = {name: VALUES[name] for name in ("brokerName", "brokerAddr", "clusterName", "haServerAddr", "brokerId")}


class World:
    """A name server that knows one broker, and a client of it."""

    def __init__(self, server: NameServer, client: RemotingClient, serializer: Any) -> None:
        self.server, self._client, self._serializer = server, client, serializer

    async def ask(self, code: int, fields: dict[str, Any], body: bytes = b"") -> Command:
        request = replace(Command.request(code, fields, body), serializer=self._serializer)
        reply: Command = await self._client.invoke(f"127.0.0.1:{self.server.port}", request, timeout_ms=5000)
        assert reply.serializer == self._serializer
        return reply

    async def route(self) -> dict[str, Any] | None:
        reply = await self.ask(105, {"topic": "T"})
        return json.loads(reply.body) if reply.code == 0 else None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the specification's table."""

    code: int
    fields: str
    reply: str = ""
    effect: Callable[[World, Command], Awaitable[None]]
    given: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""
    unknown: dict[str, tuple[Any, int]] = field(default_factory=dict)
    """Field -> a value that is unknown or too large, and the code of the reply."""

    def marked(self, mark: str) -> list[str]:
        return [word.rstrip("*#") for word in self.fields.split() if mark in word]

    @property
    def request(self) -> dict[str, Any]:
        return {name: (VALUES | self.given)[name] for name in self.marked("")} | {"unheardOf": "x"}


async def slave_listed(world: World, reply: Command) -> None:
    assert reply.ext_fields == {"haServerAddr": VALUES["haServerAddr"], "masterAddr": MASTER}
    route = await world.route()
    assert route is not None and route["brokerDatas"][0]["brokerAddrs"] == {"0": MASTER, "1": "10.0.0.2:1"}


async def master_listed(world: World, reply: Command) -> None:
    route = await world.route()
    assert route is not None and route["brokerDatas"][0]["brokerAddrs"] == {"0": MASTER}


async def master_removed(world: World, reply: Command) -> None:
    assert await world.route() is None


async def route_returned(world: World, reply: Command) -> None:
    assert json.loads(reply.body) == {
        "queueDatas": [{"brokerName": "b", **TABLE["T"], "topicSynFlag": 0}],
        "brokerDatas": [{"cluster": "c", "brokerName": "b", "brokerAddrs": {"0": MASTER}}],
        "filterServerTable": {},
    }


async def cluster_returned(world: World, reply: Command) -> None:
    assert json.loads(reply.body) == {
        "brokerAddrTable": {"b": {"cluster": "c", "brokerName": "b", "brokerAddrs": {"0": MASTER}}},
        "clusterAddrTable": {"c": ["b"]},
    }


async def topics_returned(world: World, reply: Command) -> None:
    assert json.loads(reply.body) == {"topicList": ["T"]}


async def names_returned(world: World, reply: Command) -> None:
    assert json.loads(reply.body) == {"topicList": ["c", "b"], "brokerAddr": MASTER}


async def topic_deleted(world: World, reply: Command) -> None:
    assert await world.route() is None


async def unchanged(world: World, reply: Command) -> None:
    assert reply.ext_fields == {"changed": "false"} and json.loads(reply.body) == VERSION


async def changed(world: World, reply: Command) -> None:
    assert reply.ext_fields == {"changed": "true"} and json.loads(reply.body) == VERSION


def permission_is(perm: int) -> Callable[[World, Command], Awaitable[None]]:
    async def check(world: World, reply: Command) -> None:
        route = await world.route()
        assert route is not None and route["queueDatas"][0]["perm"] == perm
        assert next(iter(reply.ext_fields.values())) == "1"

    return check


async def value_stored(world: World, reply: Command) -> None:
    assert (await world.ask(101, {"namespace": "space", "key": "k"})).ext_fields == {"value": "v"}


async def value_returned(world: World, reply: Command) -> None:
    assert reply.ext_fields == {"value": "there"}


async def value_deleted(world: World, reply: Command) -> None:
    assert (await world.ask(101, {"namespace": "space", "key": "there"})).code == 22


async def values_returned(world: World, reply: Command) -> None:
    assert json.loads(reply.body) == {"table": {"there": "there"}}


async def settings_returned(world: World, reply: Command) -> None:
    assert f"listenPort={world.server.port}\n" in reply.body.decode()


REGISTER = "brokerName* brokerAddr* clusterName* haServerAddr brokerId*# compressed bodyCrc32#"
LONG = "x" * 256
KNOWN = {"namespace": "space", "key": "there"}
ROWS = (
    Row(code=103, fields=REGISTER, effect=master_listed, body=BODY, unknown={
        "brokerName": (LONG, 1), "clusterName": (LONG, 1), "brokerAddr": (LONG, 1), "bodyCrc32": (5, 1),
        "brokerId": (-1, 1)}),
    Row(code=103, fields=REGISTER, reply="haServerAddr masterAddr", effect=slave_listed, body=BODY,
        given={"brokerId": 1, "brokerAddr": "10.0.0.2:1"}),
    Row(code=104, fields="brokerName* brokerAddr* clusterName brokerId*#", effect=master_removed),
    Row(code=105, fields="topic*", effect=route_returned, unknown={"topic": ("nobody", 17)}),
    Row(code=106, fields="", effect=cluster_returned),
    Row(code=206, fields="", effect=topics_returned),
    Row(code=224, fields="cluster*", effect=topics_returned),
    Row(code=304, fields="", effect=names_returned),
    Row(code=216, fields="topic*", effect=topic_deleted),
    Row(code=322, fields="brokerName brokerAddr* clusterName brokerId", reply="changed", effect=unchanged,
        body=json.dumps(VERSION).encode()),
    Row(code=322, fields="brokerName brokerAddr* clusterName brokerId", reply="changed", effect=changed,
        body=b'{"timestamp":1,"counter":8}'),
    Row(code=205, fields="brokerName*", reply="wipeTopicCount#", effect=permission_is(4)),
    Row(code=327, fields="brokerName*", reply="addTopicCount#", effect=permission_is(6)),
    Row(code=100, fields="namespace* key* value*", effect=value_stored, unknown={"value": ("v" * 70_000, 1)}),
    Row(code=101, fields="namespace* key*", reply="value", effect=value_returned, given=KNOWN,
        unknown={"namespace": ("nobody", 22), "key": ("nobody", 22)}),
    Row(code=102, fields="namespace* key*", effect=value_deleted, given=KNOWN),
    Row(code=219, fields="namespace*", effect=values_returned, unknown={"namespace": ("nobody", 22)}),
    Row(code=319, fields="", effect=settings_returned),
)  # fmt: skip


def assert_refused(reply: Command, code: int, names: str) -> None:
    assert reply.code == code, (names, reply.code, reply.remark)
    assert reply.remark and "\n" not in reply.remark and len(reply.remark) < 300, names


def run(runtime: Runtime, serializer: Any, scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        server, client = NameServer("127.0.0.1", 0, runtime), RemotingClient()
        await server.start()
        try:
            await scenario(World(server, client, serializer))
        finally:
            await client.close()
            await server.stop()

    asyncio.run(main())


@pytest.mark.parametrize("serializer", ["json", "binary"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.code}-{row.effect.__name__}")
def test_each_code_does_what_the_specification_says(runtime: Runtime, row: Row, serializer: Any) -> None:
    async def scenario(world: World) -> None:
        assert (await world.ask(103, BROKER, BODY)).code == 0
        assert (await world.ask(100, KNOWN | {"value": "there"})).code == 0
        for name in row.marked("*"):
            without = {key: value for key, value in row.request.items() if key != name}
            reply = await world.ask(row.code, without, row.body)
            assert_refused(reply, 1, name)
            assert f"field {name} is missing" in str(reply.remark)
        for name in row.marked("#"):
            for value in ("many", "1_0", str(1 << 63), "9" * 5000):
                reply = await world.ask(row.code, row.request | {name: value}, row.body)
                assert_refused(reply, 1, f"{name}={value[:30]}")
                assert f"the field {name} " in str(reply.remark)
        for name, (value, code) in row.unknown.items():
            assert_refused(await world.ask(row.code, row.request | {name: value}, row.body), code, name)
        reply = await world.ask(row.code, row.request, row.body)
        assert reply.code == 0, reply.remark
        assert reply.ext_fields.keys() == {word.rstrip("#") for word in row.reply.split()}
        await row.effect(world, reply)

    run(runtime, serializer, scenario)


@pytest.mark.parametrize("serializer", ["json", "binary"])
def test_every_code_is_in_the_table_and_others_are_not_supported(runtime: Runtime, serializer: Any) -> None:
    async def scenario(world: World) -> None:
        named = {row.code for row in ROWS}
        assert named == set(world.server._server.processors)
        for code in (0, 10, 11, 34, 107, 318, 999, -1):
            assert_refused(await world.ask(code, {"topic": "T"}), 3, str(code))

    run(runtime, serializer, scenario)


@pytest.mark.parametrize("code", [103, 322])
def test_malformed_bodies_are_refused(runtime: Runtime, code: int) -> None:
    async def scenario(world: World) -> None:
        for body in (b"{", b"[]", b"null", b"\xff" * 8, b"[" * 5000, b'{"topicConfigTable": {"T": 3}}'):
            reply = await world.ask(code, BROKER, body)
            if code == 322 and body.endswith(b"}}"):
                continue  # any object is a valid version
            assert_refused(reply, 1, repr(body[:20]))

    run(runtime, "json", scenario)
