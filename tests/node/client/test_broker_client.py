"""The client against a scripted broker and real name servers, over real sockets."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from node.client import (
    BadReply,
    BrokerClient,
    BrokerRefused,
    ClientError,
    NoRoute,
    NotLeader,
    NotSent,
    OutcomeUnknown,
    PullStatus,
    SendStatus,
)
from node.nameserver import NameServer
from node.remoting import Command, Connection, RemotingClient, RemotingServer
from node.runtime import Runtime
from node.store.record import Message
from node.store.record_batch import encode_record
from tests.ports import free_port


@dataclass
class HandClock:
    now_ns: int = 5_000_000_000

    def wall_ms(self) -> int:
        return 1_700_000_000_000

    def monotonic_ns(self) -> int:
        return self.now_ns


@dataclass
class Stage:
    """A scripted broker, name servers that know it, and a client of them."""

    broker: RemotingServer
    name_servers: list[NameServer]
    client: BrokerClient
    clock: HandClock
    requests: list[Command] = field(default_factory=list)
    registrars: list[RemotingClient] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.broker.port}"

    def answer(self, code: int, *replies: dict[str, Any]) -> None:
        """Answer requests of `code` with these replies, one after the other, the last one repeatedly."""
        left = list(replies)

        def processor(command: Command, connection: Connection) -> Command:
            self.requests.append(command)
            reply = left.pop(0) if len(left) > 1 else left[0]
            return command.reply(**reply)

        self.broker.register(code, processor)

    async def connect(self) -> None:
        """Open the client's connection to the broker, so that later requests spend none of their time on dialling."""
        reply = await self.client.invoke(self.address, Command.request(34), 10_000)
        assert reply.code == 3  # no processor for it

    async def register(self, name_server: NameServer, address: str, **fields: Any) -> None:
        """Register `address` as a master with topic T, over a connection of its own."""
        body = {"topicConfigSerializeWrapper": {"topicConfigTable": {"T": {"writeQueueNums": 4, "perm": 6}}}}
        values = {"brokerName": "b", "brokerAddr": address, "clusterName": "c", "brokerId": 0} | fields
        registrar = RemotingClient()
        self.registrars.append(registrar)
        request = Command.request(103, values, json.dumps(body).encode())
        reply = await registrar.invoke(f"127.0.0.1:{name_server.port}", request, timeout_ms=5000)
        assert reply.code == 0


def make_runtime(clock: HandClock) -> Runtime:
    return Runtime(clock=clock, disk=None, random=random.Random(0))  # type: ignore[arg-type]


@asynccontextmanager
async def staged(*, name_servers: int = 0, dead_name_server: bool = False, **options: Any) -> AsyncIterator[Stage]:
    clock = HandClock()
    runtime = make_runtime(clock)
    broker = RemotingServer("127.0.0.1", 0)
    servers = [NameServer("127.0.0.1", 0, runtime) for _ in range(name_servers)]
    async with AsyncExitStack() as stack:
        await broker.start()
        stack.push_async_callback(broker.stop)
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        known = [f"127.0.0.1:{server.port}" for server in servers]
        if dead_name_server:
            known.insert(0, f"127.0.0.1:{free_port()}")
        client = await stack.enter_async_context(BrokerClient(name_servers=known, runtime=runtime, **options))
        stage = Stage(broker, servers, client, clock)
        yield stage
        for registrar in stage.registrars:
            await registrar.close()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), 60)

    asyncio.run(bounded())


SENT = {"code": 0, "fields": {"msgId": "0A000001", "queueId": 3, "queueOffset": 17, "transactionId": "tx"}}


@pytest.mark.parametrize("serializer", ["json", "binary"])
def test_send_with_the_short_field_names(serializer: Any) -> None:
    async def scenario() -> None:
        async with staged(client_id="me", serializer=serializer) as s:
            s.answer(310, SENT)
            result = await s.client.send("T", 3, b"body", properties={"TAGS": "a", "KEYS": "k"}, address=s.address)
            assert (result.status, result.is_local, result.address) == (SendStatus.OK, False, s.address)
            assert (result.msg_id, result.queue_id, result.queue_offset) == ("0A000001", 3, 17)
            assert result.transaction_id == "tx"
            (request,) = s.requests
            assert request.body == b"body" and request.serializer == serializer
            assert request.ext_fields == {
                "a": "me", "b": "T", "c": "TBW102", "d": "4", "e": "3", "f": "0", "g": "1700000000000", "h": "0",
                "i": "TAGS\x01a\x02KEYS\x01k\x02", "j": "0", "k": "false", "l": "0", "m": "false",
            }  # fmt: skip

    run(scenario)


def test_send_with_the_long_field_names() -> None:
    async def scenario() -> None:
        async with staged() as s:
            s.answer(10, SENT)
            assert (await s.client.send("T", 3, b"body", address=s.address, code=10)).queue_offset == 17  # type: ignore[arg-type]
            fields = s.requests[0].ext_fields
            assert (fields["topic"], fields["queueId"], fields["bornTimestamp"]) == ("T", "3", "1700000000000")
            with pytest.raises(ValueError, match="code 11"):
                await s.client.send("T", 3, b"", address=s.address, code=11)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="separator"):
                await s.client.send("T", 3, b"", address=s.address, properties={"a": "\x01"})

    run(scenario)


@pytest.mark.parametrize(
    ("code", "status"),
    [(10, SendStatus.FLUSH_DISK_TIMEOUT), (11, SendStatus.SLAVE_NOT_AVAILABLE), (12, SendStatus.FLUSH_SLAVE_TIMEOUT)],
)
def test_a_message_stored_on_the_master_only_is_a_result_with_that_status(code: int, status: SendStatus) -> None:
    async def scenario() -> None:
        async with staged() as s:
            s.answer(310, SENT | {"code": code})
            result = await s.client.send("T", 3, b"", address=s.address)
            assert (result.status, result.is_local, result.queue_offset) == (status, True, 17)

    run(scenario)


@pytest.mark.parametrize(
    ("code", "definite"),
    [(1, False), (2, True), (3, True), (13, True), (14, True), (16, True), (17, True), (19, False), (999, False)],
)
def test_a_failure_code_says_whether_the_failure_is_definite(code: int, definite: bool) -> None:
    async def scenario() -> None:
        async with staged() as s:
            s.answer(310, {"code": code, "remark": "because"})
            with pytest.raises(BrokerRefused) as caught:
                await s.client.send("T", 3, b"", address=s.address)
            error = caught.value
            assert (error.code, error.remark, error.is_definite) == (code, "because", definite)
            assert str(error) == f"{s.address}: code {code}: because"

    run(scenario)


@pytest.mark.parametrize(
    ("remark", "leader", "address"),
    [
        ("NOT_LEADER leader=n2 addr=10.0.0.2:1", "n2", "dial-10.0.0.2:1"),
        ("NOT_LEADER leader=n2 addr=-", "n2", None),
        ("NOT_LEADER leader=- addr=-", None, None),
        ("NOT_LEADER", None, None),
    ],
)
def test_a_not_leader_error_has_the_hint_to_the_leader(remark: str, leader: str | None, address: str | None) -> None:
    async def scenario() -> None:
        async with staged(translate=lambda advertised: f"dial-{advertised}") as s:
            s.answer(310, {"code": 14, "remark": remark})
            with pytest.raises(NotLeader) as caught:
                await s.client.send("T", 3, b"", address=s.address)
            assert caught.value.is_definite and caught.value.remark == remark
            assert (caught.value.leader_id, caught.value.leader_address) == (leader, address)

    run(scenario)


def test_an_unsent_request_fails_definitely_and_an_unanswered_one_does_not() -> None:
    async def scenario() -> None:
        async with staged(request_timeout_ms=50) as s:
            with pytest.raises(NotSent) as refused:
                await s.client.send("T", 0, b"", address=f"127.0.0.1:{free_port()}")
            assert refused.value.is_definite and refused.value.code is None
            with pytest.raises(NotSent):
                await s.client.send("T", 0, bytes(17 * 2**20), address=s.address)

            async def silent(command: Command, connection: Connection) -> Command | None:
                await asyncio.sleep(3600)
                return None

            s.broker.register(310, silent)
            await s.connect()
            with pytest.raises(OutcomeUnknown, match="no answer") as late:
                await s.client.send("T", 0, b"", address=s.address)
            assert not late.value.is_definite and late.value.address == s.address

            def hang_up(command: Command, connection: Connection) -> None:
                connection.abort("test")

            s.broker.register(310, hang_up)
            with pytest.raises(OutcomeUnknown, match="lost") as lost:
                await s.client.send("T", 0, b"", address=s.address, timeout_ms=10_000)
            assert not lost.value.is_definite

    run(scenario)


def test_an_unreadable_reply_with_code_success_is_indefinite() -> None:
    async def scenario() -> None:
        async with staged() as s:
            s.answer(310, {"code": 0})
            s.answer(30, {"code": 0, "fields": {"offset": "many"}})
            s.answer(28, {"code": 0, "body": b"[]"})
            s.answer(11, PULLED | {"body": b"damaged record"})
            for call in (
                s.client.send("T", 0, b"", address=s.address),
                s.client.max_offset("T", 0, address=s.address),
                s.client.runtime_info(s.address),
                s.client.pull("T", 0, 0, 1, address=s.address),
            ):
                with pytest.raises(BadReply) as caught:
                    await call
                assert not caught.value.is_definite and caught.value.code == 0

    run(scenario)


PULLED = {
    "code": 0,
    "fields": {"suggestWhichBrokerId": 1, "nextBeginOffset": 7, "minOffset": 2, "maxOffset": 9},
}


def test_pull_returns_messages_offsets_and_a_status() -> None:
    messages = [
        Message(topic="T", queue_id=3, queue_offset=5 + n, body=b"m%d" % n, properties={"TAGS": "a"}) for n in range(2)
    ]

    async def scenario() -> None:
        async with staged(client_id="me") as s:
            s.answer(11, PULLED | {"body": b"".join(map(encode_record, messages))})
            result = await s.client.pull("T", 3, 5, 32, address=s.address)
            assert [message.body for message in result.messages] == [b"m0", b"m1"]
            assert [message.queue_offset for message in result.messages] == [5, 6]
            assert result.messages[0].tags == "a"
            assert (result.status, result.next_offset, result.min_offset, result.max_offset) == (
                PullStatus.FOUND, 7, 2, 9
            )  # fmt: skip
            assert (result.suggested_broker_id, result.address) == (1, s.address)
            assert s.requests[0].ext_fields == {
                "consumerGroup": "me", "topic": "T", "queueId": "3", "queueOffset": "5", "maxMsgNums": "32",
                "sysFlag": "4", "commitOffset": "0", "suspendTimeoutMillis": "0", "subscription": "*",
                "subVersion": "0", "expressionType": "TAG",
            }  # fmt: skip
            for code, status in (
                (19, PullStatus.NO_NEW), (20, PullStatus.NO_MATCH), (21, PullStatus.OFFSET_ILLEGAL)
            ):  # fmt: skip
                s.answer(11, PULLED | {"code": code, "body": b"ignored"})
                result = await s.client.pull("T", 3, 5, 32, address=s.address)
                assert (result.status, result.messages, result.next_offset) == (status, (), 7)
            s.answer(11, {"code": 14, "remark": "NOT_LEADER leader=- addr=-"})
            with pytest.raises(NotLeader):
                await s.client.pull("T", 3, 5, 32, address=s.address)

    run(scenario)


def test_a_suspended_pull_waits_longer_than_other_requests() -> None:
    async def scenario() -> None:
        async with staged(request_timeout_ms=100) as s:

            async def held(command: Command, connection: Connection) -> Command:
                s.requests.append(command)
                await asyncio.sleep(0.2)
                return command.reply(**(PULLED | {"code": 19}))  # type: ignore[arg-type]

            s.broker.register(11, held)
            result = await s.client.pull("T", 0, 5, 1, suspend_ms=5000, subscription="a || b", address=s.address)
            assert result.status is PullStatus.NO_NEW
            fields = s.requests[0].ext_fields
            assert (fields["sysFlag"], fields["suspendTimeoutMillis"]) == ("6", "5000")
            assert fields["subscription"] == "a || b"
            with pytest.raises(OutcomeUnknown):
                await s.client.pull("T", 0, 5, 1, suspend_ms=5000, address=s.address, timeout_ms=50)

    run(scenario)


def test_offsets_and_runtime_info_are_read() -> None:
    async def scenario() -> None:
        async with staged() as s:
            s.answer(30, {"code": 0, "fields": {"offset": 12}})
            s.answer(31, {"code": 0, "fields": {"offset": 4}})
            s.answer(28, {"code": 0, "body": b'{"table":{"role":"LEADER","term":7}}'})
            assert await s.client.max_offset("T", 1, address=s.address) == 12
            assert await s.client.min_offset("T", 1, address=s.address) == 4
            assert await s.client.runtime_info(s.address) == {"role": "LEADER", "term": "7"}
            assert s.requests[0].ext_fields == {"topic": "T", "queueId": "1"}
            s.answer(28, {"code": 1, "remark": "x"})
            with pytest.raises(BrokerRefused):
                await s.client.runtime_info(s.address)

    run(scenario)


def test_routes_are_translated_cached_and_forgotten_on_failure() -> None:
    async def scenario() -> None:
        proxies: dict[str, str] = {}
        async with staged(name_servers=1, translate=lambda address: proxies.get(address, address)) as s:
            proxies["10.9.9.9:1"] = s.address
            s.answer(310, SENT)
            await s.register(s.name_servers[0], "10.9.9.9:1")
            route = await s.client.route("T")
            assert route.master_address == s.address
            (group,) = route.groups
            assert (group.name, group.cluster, group.write_queues, group.perm) == ("b", "c", 4, 6)
            await s.client.send("T", 0, b"")
            await s.register(s.name_servers[0], f"127.0.0.1:{free_port()}")
            await s.client.send("T", 0, b"")  # the cached route
            s.clock.now_ns += 31 * 10**9
            with pytest.raises(NotSent):
                await s.client.send("T", 0, b"")
            await s.register(s.name_servers[0], "10.9.9.9:1")
            await s.client.send("T", 0, b"")  # after the failure the client asks for the route again
            s.answer(310, {"code": 14, "remark": "NOT_LEADER leader=- addr=-"}, SENT)
            with pytest.raises(NotLeader):
                await s.client.send("T", 0, b"")
            await s.register(s.name_servers[0], f"127.0.0.1:{free_port()}")
            with pytest.raises(NotSent):
                await s.client.send("T", 0, b"")

    run(scenario)


def test_name_servers_are_asked_in_turn() -> None:
    async def scenario() -> None:
        async with staged(name_servers=2, dead_name_server=True) as s:
            with pytest.raises(NoRoute) as caught:
                await s.client.route("T")
            assert caught.value.is_definite and caught.value.code == 17
            await s.register(s.name_servers[1], s.address)  # the last of three knows
            assert (await s.client.route("T")).master_address == s.address
            await s.name_servers[0].stop()
            await s.name_servers[1].stop()
            with pytest.raises(NoRoute) as caught:
                await s.client.send("T", 0, b"", timeout_ms=500)
            assert caught.value.is_definite and caught.value.code is None
        async with staged() as s:
            with pytest.raises(NoRoute, match="no name server is configured"):
                await s.client.send("T", 0, b"")

    run(scenario)


def test_sending_to_a_topic_without_a_master_raises_no_route() -> None:
    async def scenario() -> None:
        async with staged(name_servers=1) as s:
            await s.register(s.name_servers[0], "10.0.0.1:1")
            await s.register(s.name_servers[0], "10.0.0.1:1", brokerId=2)
            with pytest.raises(NoRoute, match="no master"):
                await s.client.send("T", 0, b"")
            with pytest.raises(NoRoute, match="no name server knows a master"):
                await s.client.create_topic("U")

    run(scenario)


def test_create_topic_reaches_every_master() -> None:
    async def scenario() -> None:
        async with staged(name_servers=1) as s, staged() as other:
            await s.register(s.name_servers[0], s.address)
            await s.register(s.name_servers[0], other.address, brokerName="b2")
            for each in (s, other):
                each.answer(17, {"code": 0})
            await s.client.create_topic("U", queues=8)
            for each in (s, other):
                fields = each.requests[0].ext_fields
                assert (fields["topic"], fields["readQueueNums"], fields["perm"]) == ("U", "8", "6")
            other.answer(17, {"code": 16, "remark": "no"})
            with pytest.raises(BrokerRefused) as caught:
                await s.client.create_topic("U", address=other.address)
            assert caught.value.code == 16

    run(scenario)


def test_create_topic_accepts_cluster_information_with_integer_keys() -> None:
    async def scenario() -> None:
        async with staged() as s:
            groups = '{"brokerAddrTable":{"b":{"brokerAddrs":{0:"%s",1:"127.0.0.1:1"},"brokerName":"b","cluster":"c"}}}'
            s.answer(106, {"code": 0, "body": (groups % s.address).encode()})
            s.answer(17, {"code": 0})
            client = BrokerClient(name_servers=[s.address], runtime=make_runtime(HandClock()))
            await client.create_topic("U")
            await client.close()
            assert s.requests[-1].ext_fields["topic"] == "U"

    run(scenario)


def test_broker_configuration_and_topic_names_are_read() -> None:
    async def scenario() -> None:
        async with staged() as s:
            s.answer(26, {"code": 0, "body": b"brokerRole=SLAVE\nname=a=b\n\nno property\n"})
            assert await s.client.broker_config(s.address) == {"brokerRole": "SLAVE", "name": "a=b"}
            s.answer(21, {"code": 0, "body": b'{"dataVersion":{},"topicConfigTable":{"T":{},"U":{}}}'})
            assert await s.client.topic_names(s.address) == {"T", "U"}
            s.answer(21, {"code": 0, "body": b'{"topicConfigTable":5}'})
            with pytest.raises(BadReply, match="cannot be read"):
                await s.client.topic_names(s.address)

    run(scenario)


def test_unreadable_routes_raise_no_route() -> None:
    async def scenario() -> None:
        for body in (b"", b"[]", b"{}", b'{"queueDatas":[{}],"brokerDatas":[]}', b'{"queueDatas":[],"brokerDatas":5}'):
            async with staged() as liar:
                liar.answer(105, {"code": 0, "body": body})
                liar.answer(106, {"code": 0, "body": body})
                client = BrokerClient(name_servers=[liar.address], runtime=make_runtime(HandClock()))
                with pytest.raises(NoRoute, match="cannot be read"):
                    await client.route("T")
                with pytest.raises(NoRoute, match="cannot be read"):
                    await client.cluster_groups()
                await client.close()

    run(scenario)


def test_a_blackholed_connection_is_replaced_after_two_timeouts() -> None:
    """A server that stops reading on the old connection, as a partition does, and answers on a new one."""

    async def scenario() -> None:
        connections: list[Connection] = []
        async with staged() as s:

            def only_new(command: Command, connection: Connection) -> Command | None:
                if connection not in connections:
                    connections.append(connection)
                return None if connection is connections[0] else command.reply(**SENT)  # type: ignore[arg-type]

            s.broker.register(310, only_new)
            await s.connect()
            for _ in range(2):
                with pytest.raises(OutcomeUnknown):
                    await s.client.send("T", 0, b"", address=s.address, timeout_ms=30)
            assert (await s.client.send("T", 0, b"", address=s.address)).queue_offset == 17

    run(scenario)


def test_a_closed_client_sends_nothing() -> None:
    async def scenario() -> None:
        async with staged() as s:
            await s.client.close()
            with pytest.raises(ClientError) as caught:
                await s.client.send("T", 0, b"", address=s.address)
            assert caught.value.is_definite

    run(scenario)


def test_every_name_server_is_asked_for_groups_and_masters() -> None:
    """Independent name servers may each know some brokers; topics are created on all of them."""

    async def scenario() -> None:
        async with staged(name_servers=2, dead_name_server=True) as s, staged() as other:
            await s.register(s.name_servers[0], s.address)
            await s.register(s.name_servers[1], other.address, brokerName="b2")
            groups = await s.client.cluster_groups()
            assert {group.name: group.master_address for group in groups} == {"b": s.address, "b2": other.address}
            for each in (s, other):
                each.answer(17, {"code": 0})
            await s.client.create_topic("U")
            assert len(s.requests) == len(other.requests) == 1

    run(scenario)
