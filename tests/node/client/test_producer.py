"""Producers against scripted brokers: where messages go, how often, and how a failure is reported."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from node.client import Client, MessageQueue, NewMessage, OutcomeUnknown, Producer, SendFailed
from node.nameserver import NameServer
from node.real_runtime import RealClock
from node.remoting import Command, Connection, RemotingClient, RemotingServer
from node.runtime import Runtime
from node.store.properties import decode_properties
from node.store.record import java_string_hash


@dataclass
class Script:
    """A broker that stores nothing: its answers to sends, and the requests that it received."""

    server: RemotingServer
    answers: list[Any] = field(default_factory=list)
    sent: list[Command] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def process(self, command: Command, connection: Connection) -> Command | None:
        self.sent.append(command)
        answer = self.answers.pop(0) if self.answers else 0
        if answer == "hang up":
            connection.abort("test")
            return None
        if isinstance(answer, tuple):
            return command.reply(answer[0], remark=answer[1])
        fields = {"msgId": "0" * 32, "queueId": command.get_int("e"), "queueOffset": len(self.sent) - 1}
        return command.reply(answer, fields=fields)


@asynccontextmanager
async def stage(brokers: int = 1, *, queues: int = 4) -> AsyncIterator[tuple[list[Script], Client]]:
    runtime = Runtime(clock=RealClock(), disk=None, random=random.Random(0))  # type: ignore[arg-type]
    async with AsyncExitStack() as stack:
        name_server = NameServer("127.0.0.1", 0, runtime)
        await name_server.start()
        stack.push_async_callback(name_server.stop)
        registrar = RemotingClient()
        stack.push_async_callback(registrar.close)
        scripts = []
        for number in range(brokers):
            script = Script(RemotingServer("127.0.0.1", 0))
            await script.server.start()
            stack.push_async_callback(script.server.stop)
            for code in (10, 310, 320):
                script.server.register(code, script.process)
            for code in (34, 35):
                script.server.register(code, lambda command, connection: command.reply(0))
            topic = {"readQueueNums": queues, "writeQueueNums": queues, "perm": 6}
            body = {"topicConfigSerializeWrapper": {"topicConfigTable": {"T": topic}}}
            fields = {"brokerName": f"b{number}", "brokerAddr": script.address, "clusterName": "c", "brokerId": 0}
            request = Command.request(103, fields, json.dumps(body).encode())
            reply = await registrar.invoke(f"127.0.0.1:{name_server.port}", request, timeout_ms=5000)
            assert reply.code == 0
            scripts.append(script)
        client = await stack.enter_async_context(Client([f"127.0.0.1:{name_server.port}"], runtime=runtime))
        yield scripts, client


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), 60)

    asyncio.run(bounded())


def test_messages_are_spread_over_all_queues() -> None:
    async def scenario() -> None:
        async with stage(2, queues=3) as (brokers, client):
            producer = client.producer("g")
            receipts = [await producer.send(NewMessage("T", b"x")) for _ in range(12)]
            where = [receipt.queue for receipt in receipts]
            assert sorted(where) == sorted(2 * [MessageQueue("T", f"b{b}", q) for b in range(2) for q in range(3)])
            assert [len(broker.sent) for broker in brokers] == [6, 6]
            assert brokers[0].sent[0].get_str("a") == "g"
            assert len({receipt.unique_key for receipt in receipts}) == 12

    run(scenario)


def test_messages_with_one_ordering_key_go_to_one_queue() -> None:
    async def scenario() -> None:
        async with stage(2, queues=3) as (_, client):
            producer = client.producer("g")
            queues = await producer.queues("T")
            for key in ("order-1", "order-2", "order-3"):
                for _ in range(3):
                    receipt = await producer.send(NewMessage("T", b"x"), ordering_key=key)
                    assert receipt.queue == queues[java_string_hash(key) % 6]
            receipt = await producer.send(NewMessage("T", b"x"), queue=queues[4])
            assert receipt.queue == queues[4]

    run(scenario)


def test_a_definite_failure_is_retried_with_the_same_unique_key() -> None:
    async def scenario() -> None:
        async with stage(2) as (brokers, client):
            producer = client.producer("g")
            for broker in brokers:
                broker.answers = [(2, "busy")]
            for _ in range(2):
                receipt = await producer.send(NewMessage("T", b"x"))
                assert receipt.unknown_attempts == 0
            first, second = [[command.get_str("i") for command in broker.sent] for broker in brokers]
            assert len(first) + len(second) >= 3
            keys = [decode_properties(text)["UNIQ_KEY"] for text in first + second]
            assert len(set(keys)) == 2, "copies of one message carry the same key"

    run(scenario)


def test_a_retry_goes_to_another_broker() -> None:
    async def scenario() -> None:
        async with stage(2, queues=3) as (brokers, client):
            producer = client.producer("g")
            brokers[0].answers = [(2, "busy")] * 20
            for _ in range(6):
                receipt = await producer.send(NewMessage("T", b"x"))
                assert receipt.queue.broker_name == "b1"
            refused = [decode_properties(command.get_str("i"))["UNIQ_KEY"] for command in brokers[0].sent]
            assert refused and len(set(refused)) == len(refused), "no message is offered to the busy broker twice"

    run(scenario)


def test_an_unknown_outcome_is_retried_only_with_retry_unknown() -> None:
    async def scenario() -> None:
        async with stage() as (brokers, client):
            for answer in ("hang up", (1, "no quorum")):
                brokers[0].sent.clear()
                brokers[0].answers = [answer]
                with pytest.raises(SendFailed) as caught:
                    await Producer.send(client.producer(f"g-{answer[0]}"), NewMessage("T", b"x"))
                assert not caught.value.is_definite and len(caught.value.attempts) == 1
                assert len(brokers[0].sent) == 1
            assert not isinstance(caught.value.attempts[0], OutcomeUnknown) and caught.value.code == 1
            brokers[0].sent.clear()
            brokers[0].answers = [(1, "no quorum"), "hang up"]
            receipt = await client.producer("bold", retry_unknown=True).send(NewMessage("T", b"x"))
            assert receipt.unknown_attempts == 2 and len(brokers[0].sent) == 3

    run(scenario)


def test_failure_is_definite_only_if_every_attempt_was() -> None:
    async def scenario() -> None:
        async with stage() as (brokers, client):
            brokers[0].answers = [(2, "busy"), (14, "starting"), (2, "busy")]
            with pytest.raises(SendFailed) as caught:
                await client.producer("g").send(NewMessage("T", b"x"))
            assert caught.value.is_definite and [error.code for error in caught.value.attempts] == [2, 14, 2]
            brokers[0].answers = [(2, "busy"), (1, "?"), (2, "busy")]
            with pytest.raises(SendFailed) as caught:
                await client.producer("h", retry_unknown=True).send(NewMessage("T", b"x"))
            assert not caught.value.is_definite

    run(scenario)


def test_the_hint_to_the_leader_is_followed() -> None:
    async def scenario() -> None:
        async with stage() as (brokers, client):
            leader = Script(RemotingServer("127.0.0.1", 0))
            await leader.server.start()
            leader.server.register(310, leader.process)
            brokers[0].answers = [(14, f"NOT_LEADER leader=n2 addr={leader.address}")]
            producer = client.producer("g")
            receipt = await producer.send(NewMessage("T", b"x"))
            assert receipt.result.address == leader.address and receipt.unknown_attempts == 0
            await producer.send(NewMessage("T", b"x"))
            assert (len(brokers[0].sent), len(leader.sent)) == (1, 2)
            await leader.server.stop()

    run(scenario)


def test_the_timeout_ends_a_send_before_its_retries_do() -> None:
    async def scenario() -> None:
        async with stage() as (brokers, client):
            brokers[0].answers = [(2, "busy")] * 100
            with pytest.raises(SendFailed) as caught:
                await client.producer("g", retries=100).send(NewMessage("T", b"x"), timeout_ms=400)
            assert caught.value.is_definite and 2 <= len(caught.value.attempts) < 10

    run(scenario)


def test_oneway_batches_and_compression() -> None:
    async def scenario() -> None:
        async with stage() as (brokers, client):
            producer = client.producer("g", compress_over_bytes=100)
            await producer.send_oneway(NewMessage("T", b"one"))
            receipt = await producer.send(NewMessage("T", bytes(1000), tags="a"))
            batch = await producer.send_batch([NewMessage("T", b"%d" % n) for n in range(3)])
            oneway, compressed, batched = brokers[0].sent
            assert oneway.is_oneway and oneway.body == b"one"
            assert compressed.get_int("f") == 1 and len(compressed.body) < 100 and receipt.queue_offset == 1
            assert (batched.code, batched.get_bool("m"), len(batch.unique_keys)) == (320, True, 3)
            for bad in ([], [NewMessage("T", b""), NewMessage("U", b"")], [NewMessage("T", b"", delay_level=1)]):
                with pytest.raises(ValueError):
                    await producer.send_batch(bad)

    run(scenario)


def test_a_producer_sends_heartbeats_and_unregisters_its_group() -> None:
    async def scenario() -> None:
        async with stage() as (brokers, client):
            heard: list[tuple[int, Any]] = []

            def hear(command: Command, connection: Connection) -> Command:
                heard.append((command.code, json.loads(command.body) if command.body else command.ext_fields))
                return command.reply(0)

            brokers[0].server.register(34, hear)
            brokers[0].server.register(35, hear)
            producer = client.producer("g")
            with pytest.raises(ValueError, match="already"):
                client.producer("g")
            await producer.send(NewMessage("T", b"x"))
            while not heard:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await producer.stop()
            assert heard[0][1]["clientID"] == client.client_id
            assert heard[0][1]["producerDataSet"] == [{"groupName": "g"}]
            assert heard[-1] == (35, {"clientID": client.client_id, "producerGroup": "g"})

    run(scenario)
