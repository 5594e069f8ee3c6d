"""The name server over real sockets, and its key-value configuration."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from node.nameserver import NameServer, NameServerOptions, kv_config
from node.nameserver.kv_config import KvConfig, KvConfigFull
from node.remoting import Command, RemotingClient
from node.runtime import Runtime

BODY = json.dumps(
    {
        "topicConfigSerializeWrapper": {
            "topicConfigTable": {"T": {"readQueueNums": 4, "writeQueueNums": 4, "perm": 6}},
            "dataVersion": {"counter": 1},
        }
    }
).encode()


class NameServerClient:
    """A client of one name server, with a connection of its own."""

    def __init__(self, server: NameServer) -> None:
        self.address = f"127.0.0.1:{server.port}"
        self.client = RemotingClient()

    async def ask(self, code: int, body: bytes = b"", **fields: Any) -> Command:
        return await self.client.invoke(self.address, Command.request(code, fields, body), timeout_ms=5000)

    async def register(self, address: str, broker_id: int = 0, **fields: Any) -> Command:
        values = {"brokerName": "b", "brokerAddr": address, "clusterName": "c", "brokerId": broker_id}
        return await self.ask(103, BODY, **(values | fields))

    async def addresses(self, topic: str = "T") -> dict[str, str] | None:
        reply = await self.ask(105, topic=topic)
        if reply.code == 17:
            return None
        assert reply.code == 0
        found: dict[str, str] = json.loads(reply.body)["brokerDatas"][0]["brokerAddrs"]
        return found


@asynccontextmanager
async def serving(
    runtime: Runtime, clients: int, **options: Any
) -> AsyncIterator[tuple[NameServer, list[NameServerClient]]]:
    server = NameServer("127.0.0.1", 0, runtime, options=NameServerOptions(**options))
    await server.start()
    opened = [NameServerClient(server) for _ in range(clients)]
    try:
        yield server, opened
    finally:
        for client in opened:
            await client.client.close()
        await server.stop()


async def eventually(condition: Callable[[], Any], what: str) -> None:
    for _ in range(1000):
        result = condition()
        if asyncio.iscoroutine(result):
            result = await result
        if result:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"never happened: {what}")


def test_a_broker_is_routed_from_its_registration_until_its_connection_closes(runtime: Runtime) -> None:
    async def scenario() -> None:
        async with serving(runtime, 3, scan_interval_s=3600) as (_, (n1, n2, user)):
            assert await user.addresses() is None
            reply = await user.ask(105, topic="T")
            assert reply.code == 17 and "T" in (reply.remark or "")
            reply = await n1.register("10.0.0.1:1", haServerAddr="10.0.0.1:2")
            assert (reply.code, reply.ext_fields) == (0, {})
            reply = await n2.register("10.0.0.2:1", broker_id=2)
            assert reply.ext_fields == {"haServerAddr": "10.0.0.1:2", "masterAddr": "10.0.0.1:1"}
            assert await user.addresses() == {"0": "10.0.0.1:1", "2": "10.0.0.2:1"}
            await n1.client.close()
            await eventually(lambda: is_gone(user), "the broker whose connection closed is removed")

    async def is_gone(user: NameServerClient) -> bool:
        return await user.addresses() == {"2": "10.0.0.2:1"}

    asyncio.run(scenario())


def test_route_bodies_quote_their_keys(runtime: Runtime) -> None:
    async def scenario() -> None:
        async with serving(runtime, 1) as (_, (n1,)):
            await n1.register("10.0.0.1:1")
            body = (await n1.ask(105, topic="T")).body
            assert b'"brokerAddrs":{"0":"10.0.0.1:1"}' in body

    asyncio.run(scenario())


def test_a_deposed_master_cannot_replace_one_of_a_higher_term(runtime: Runtime) -> None:
    async def scenario() -> None:
        async with serving(runtime, 2) as (_, (n1, n2)):
            await n1.register("10.0.0.1:1", dledgerTerm=4)
            await n2.register("10.0.0.2:1", broker_id=2, dledgerTerm=4)
            await n2.register("10.0.0.2:1", dledgerTerm=5)
            assert await n1.addresses() == {"0": "10.0.0.2:1"}
            reply = await n1.register("10.0.0.1:1", dledgerTerm=4)
            assert (reply.code, reply.ext_fields["masterAddr"]) == (0, "10.0.0.2:1")
            assert await n1.addresses() == {"0": "10.0.0.2:1"}

    asyncio.run(scenario())


def test_a_silent_broker_expires_and_its_connection_is_closed(runtime: Runtime, clock: Any) -> None:
    async def scenario() -> None:
        async with serving(runtime, 2, scan_interval_s=0.02) as (server, (n1, user)):
            await n1.register("10.0.0.1:1")
            clock.advance_s(119)
            await asyncio.sleep(0.1)
            assert await user.addresses() == {"0": "10.0.0.1:1"}
            clock.advance_s(2)
            await eventually(lambda: server.connection_count == 1, "the broker's connection is closed")
            assert await user.addresses() is None
            await n1.register("10.0.0.1:1")
            assert await user.addresses() == {"0": "10.0.0.1:1"}

    asyncio.run(scenario())


def test_expiry_continues_after_an_unexpected_error(
    runtime: Runtime, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with serving(runtime, 1, scan_interval_s=0.02) as (server, (n1,)):
            real, failures = server.routes.expire, iter([RuntimeError("an unexpected error")])

            def expire() -> Any:
                for failure in failures:
                    raise failure
                return real()

            monkeypatch.setattr(server.routes, "expire", expire)
            reported: list[Any] = []
            asyncio.get_running_loop().set_exception_handler(
                lambda loop, context: reported.append(context["exception"])
            )
            await n1.register("10.0.0.1:1")
            clock.advance_s(121)
            await eventually(lambda: server.connection_count == 0, "the broker's connection is closed")
            assert [str(error) for error in reported] == ["an unexpected error"]

    asyncio.run(scenario())


def test_admin_requests_read_and_change_the_table(runtime: Runtime) -> None:
    async def scenario() -> None:
        async with serving(runtime, 1) as (_, (n1,)):
            await n1.register("10.0.0.1:1")
            info = json.loads((await n1.ask(106)).body)
            assert info == {
                "brokerAddrTable": {"b": {"cluster": "c", "brokerName": "b", "brokerAddrs": {"0": "10.0.0.1:1"}}},
                "clusterAddrTable": {"c": ["b"]},
            }
            assert json.loads((await n1.ask(206)).body) == {"topicList": ["T"]}
            assert json.loads((await n1.ask(224, cluster="c")).body) == {"topicList": ["T"]}
            assert json.loads((await n1.ask(224, cluster="d")).body) == {"topicList": []}
            same = await n1.ask(322, b'{"counter":1}', brokerAddr="10.0.0.1:1")
            other = await n1.ask(322, b'{"counter":2}', brokerAddr="10.0.0.1:1")
            assert (same.ext_fields["changed"], other.ext_fields["changed"]) == ("false", "true")
            assert (await n1.ask(205, brokerName="b")).ext_fields == {"wipeTopicCount": "1"}
            assert (await n1.ask(327, brokerName="b")).ext_fields == {"addTopicCount": "1"}
            assert (await n1.ask(216, topic="T")).code == 0
            assert await n1.addresses() is None
            fields = {"brokerName": "b", "brokerAddr": "10.0.0.1:1", "clusterName": "c", "brokerId": 0}
            assert (await n1.ask(104, **fields)).code == 0
            assert json.loads((await n1.ask(106)).body)["brokerAddrTable"] == {}

    asyncio.run(scenario())


def test_invalid_requests_get_an_error_and_the_server_keeps_serving(runtime: Runtime) -> None:
    async def scenario() -> None:
        async with serving(runtime, 1) as (_, (n1,)):
            for code in (103, 104, 105, 100, 101, 102, 216, 219, 224, 205, 322):
                reply = await n1.ask(code)
                assert reply.code == 1 and "missing" in (reply.remark or "")
            assert (await n1.ask(103, b"x", brokerName="b")).code == 1
            assert (await n1.ask(322, b"x", brokerAddr="a")).code == 1
            assert (await n1.ask(999)).code == 3
            assert (await n1.register("10.0.0.1:1")).code == 0

    asyncio.run(scenario())


def test_name_servers_share_no_registrations(runtime: Runtime) -> None:
    async def scenario() -> None:
        async with serving(runtime, 1) as (_, (a,)), serving(runtime, 1) as (_, (b,)):
            await a.register("10.0.0.1:1")
            assert await a.addresses() == {"0": "10.0.0.1:1"}
            assert await b.addresses() is None

    asyncio.run(scenario())


def test_key_value_configuration_survives_a_restart(runtime: Runtime, disk: Any) -> None:
    async def scenario() -> None:
        async with serving(runtime, 1, kv_config_path="/kv.json") as (_, (user,)):
            assert (await user.ask(100, namespace="ORDER_TOPIC_CONFIG", key="T", value="b:4")).code == 0
            assert (await user.ask(100, namespace="n", key="k", value="v")).code == 0
        async with serving(runtime, 1, kv_config_path="/kv.json") as (_, (user,)):
            assert (await user.ask(101, namespace="n", key="k")).ext_fields == {"value": "v"}
            assert json.loads((await user.ask(219, namespace="n")).body) == {"table": {"k": "v"}}
            reply = await user.register("10.0.0.1:1")
            assert json.loads(reply.body) == {"table": {"T": "b:4"}}
            assert json.loads((await user.ask(105, topic="T")).body)["orderTopicConf"] == "b:4"
            assert (await user.ask(102, namespace="n", key="k")).code == 0
            assert (await user.ask(102, namespace="n", key="k")).code == 0
            assert (await user.ask(101, namespace="n", key="k")).code == 22
            assert (await user.ask(219, namespace="n")).code == 22
            assert (await user.ask(100, namespace="n", key="k", value="v" * 70_000)).code == 1
        assert list(disk.files) == ["/kv.json", "/kv.json.bak"]

    asyncio.run(scenario())


def test_key_value_entries_are_bounded_and_a_corrupt_file_is_refused(
    disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(kv_config, "MAX_ENTRIES", 2)
        kv = KvConfig(disk, None)
        await asyncio.gather(kv.put("n", "a", "1"), kv.put("n", "b", "1"))
        with pytest.raises(KvConfigFull, match="2 entries"):
            await kv.put("m", "c", "1")
        await kv.put("n", "a", "2")
        assert kv.namespace("n") == {"a": "2", "b": "1"}
        for content in (b"", b"[]", b"{}", b'{"configTable":[]}', b'{"configTable":{"n":3}}'):
            disk.files["/kv.json"] = content
            with pytest.raises(ValueError, match=r"/kv\.json is (damaged|no key-value configuration)"):
                await KvConfig(disk, "/kv.json").load()

    asyncio.run(scenario())


@pytest.mark.parametrize(("path", "directory"), [("/data/kv.json", "/data"), ("kv.json", "."), ("/kv.json", "/")])
def test_loading_the_key_value_file_syncs_its_directory(disk: Any, path: str, directory: str) -> None:
    """A process killed between rename and sync may have written it: a power cut would undo the rename."""

    async def scenario() -> None:
        await KvConfig(disk, path).load()
        assert disk.synced == []
        await KvConfig(disk, path).put("n", "k", "v")
        kv = KvConfig(disk, path)
        await kv.load()
        assert disk.synced == [directory] and kv.get("n", "k") == "v"

    asyncio.run(scenario())


def test_a_port_in_use_is_an_os_error(runtime: Runtime) -> None:
    async def scenario() -> None:
        async with serving(runtime, 1) as (server, (user,)):
            second = NameServer("127.0.0.1", server.port, runtime)
            with pytest.raises(OSError):
                await second.start()
            await second.stop()
            assert (await user.ask(106)).code == 0

    asyncio.run(scenario())
