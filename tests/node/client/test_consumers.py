"""Consumers against a real broker: sharing, order, broadcasting, retries, offsets, transactions."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from node.client import (
    Client,
    ConsumeResult,
    MessageModel,
    MessageQueue,
    NewMessage,
    NoRoute,
    PullConsumer,
    ReceivedMessage,
    SendFailed,
    StartFrom,
    TransactionState,
)
from node.client import reader as reader_module
from node.remoting import Command, RequestError
from node.remoting.tool_json import Place, parse_queue_table
from node.store.record import RecordError

FIRST = {"start_from": StartFrom.FIRST}


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), 90)

    asyncio.run(bounded())


class Sink:
    """A handler that keeps what it was given."""

    def __init__(self) -> None:
        self.messages: list[ReceivedMessage] = []

    async def __call__(self, messages: Sequence[ReceivedMessage]) -> None:
        self.messages.extend(messages)

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.messages]


def queues_of(consumer: Any, topic: str) -> set[int]:
    return {queue.queue_id for queue in consumer.assigned if queue.topic == topic}


async def send(client: Client, bodies: Sequence[bytes], **options: Any) -> None:
    producer = client.producer("producers")
    for body in bodies:
        await producer.send(NewMessage("t", body, **options))
    await producer.stop()


async def wait_for_offsets(client: Client, served: Any, wanted: list[int]) -> None:
    """Wait until the broker stores these offsets of group g for the queues of t."""
    kept: list[int] = []
    async with asyncio.timeout(5):
        while kept != wanted:
            await asyncio.sleep(0.05)
            kept = [await served.committed(client.requests, "g", "t", queue) for queue in range(len(wanted))]


def test_members_share_the_queues_and_take_over_from_each_other(serving: Any, wait_until: Any) -> None:
    async def scenario() -> None:
        async with serving({"t": 5}) as served, AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(Client([served.name_server], timings=served.timings)) for _ in "ab"
            ]
            sinks = [Sink(), Sink()]
            one, two = (
                client.push_consumer("g", sink, {"t": "*"}, **FIRST)
                for client, sink in zip(clients, sinks, strict=True)
            )
            await one.start()
            await wait_until(lambda: queues_of(one, "t") == {0, 1, 2, 3, 4})
            await two.start()
            await wait_until(lambda: (len(queues_of(one, "t")), len(queues_of(two, "t"))) in ((2, 3), (3, 2)))
            assert queues_of(one, "t") | queues_of(two, "t") == {0, 1, 2, 3, 4}
            await send(clients[0], [b"%d" % number for number in range(50)])
            await wait_until(lambda: len(sinks[0].messages) + len(sinks[1].messages) == 50)
            assert sinks[0].messages and sinks[1].messages
            await two.stop()
            await wait_until(lambda: queues_of(one, "t") == {0, 1, 2, 3, 4})
            await send(clients[0], [b"more %d" % number for number in range(10)])
            await wait_until(lambda: len(sinks[0].messages) + len(sinks[1].messages) == 60)
            counts = Counter(sinks[0].bodies + sinks[1].bodies)
            assert set(counts.values()) == {1}
            await one.stop()
            kept = [await served.committed(clients[0].requests, "g", "t", queue) for queue in range(5)]
            assert sum(kept) == 60

    run(scenario)


def test_a_new_member_continues_at_the_offsets_of_the_group(serving: Any, wait_until: Any) -> None:
    async def scenario() -> None:
        async with serving({"t": 2}) as served:
            for generation in range(3):
                async with Client([served.name_server], timings=served.timings) as client:
                    sink = Sink()
                    await send(client, [b"%d-%d" % (generation, number) for number in range(6)])
                    consumer = client.push_consumer("g", sink, {"t": "*"}, **FIRST)
                    await consumer.start()
                    await wait_until(lambda sink=sink: len(sink.messages) >= 6)
                    await asyncio.sleep(0.3)
                assert sorted(sink.bodies) == [b"%d-%d" % (generation, number) for number in range(6)]

    run(scenario)


@pytest.mark.parametrize("ordered", [False, True])
def test_an_idle_consumer_restores_offsets_that_the_broker_has_lost(
    serving: Any, wait_until: Any, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    """As after a failover before the offsets were replicated. The queues are saved in turn."""
    monkeypatch.setattr("node.client.consumer.SAVE_ANYWAY_S", 1.5, raising=False)

    async def scenario() -> None:
        async with serving({"t": 6}) as served, Client([served.name_server], timings=served.timings) as client:
            saves: list[int] = []
            sink = Sink()
            consumer = client.push_consumer("g", sink, {"t": "*"}, ordered=ordered, **FIRST)
            save = consumer.offsets.save

            async def counted(offsets: Any) -> None:
                saves.append(len([queue for queue in offsets if queue.topic == "t"]))
                await save(offsets)

            consumer.offsets.save = counted  # type: ignore[method-assign]
            await consumer.start()
            await send(client, [b"x"] * 12)
            await wait_for_offsets(client, served, [2] * 6)
            saves.clear()
            for queue in range(6):
                fields = {"consumerGroup": "g", "topic": "t", "queueId": queue, "commitOffset": 1}
                await client.requests.invoke(served.address, Command.request(15, fields))
            await wait_for_offsets(client, served, [2] * 6)
            assert max(saves) <= 2, "not all at once"

    run(scenario)


async def reset(client: Client, served: Any, timestamp_ms: int) -> None:
    """Have the broker reset group g to the first message of a time, or with -1 to the end of each queue of t."""
    fields: Any = {"topic": "t", "group": "g", "timestamp": timestamp_ms, "isForce": True}
    reply = await client.requests.invoke(served.address, Command.request(222, fields))
    assert reply.code == 0, reply.remark


@pytest.mark.parametrize("ordered", [False, True])
def test_a_consumer_follows_a_reset_of_its_offsets(serving: Any, wait_until: Any, ordered: bool) -> None:
    """Back, and forward while a handler runs: messages read ahead are dropped, and nothing undoes the reset later."""

    async def scenario() -> None:
        async with serving({"t": 2}) as served, Client([served.name_server], timings=served.timings) as client:
            handled: list[tuple[int, int]] = []
            gate = asyncio.Event()
            gate.set()

            async def handle(messages: Sequence[ReceivedMessage]) -> None:
                handled.append((messages[0].queue.queue_id, messages[0].queue_offset))
                await gate.wait()

            consumer = client.push_consumer("g", handle, {"t": "*"}, ordered=ordered, concurrency=2, **FIRST)
            await consumer.start()
            await send(client, [b"x"] * 8)
            await wait_until(lambda: len(handled) == 8)
            await wait_for_offsets(client, served, [4, 4])
            handled.clear()
            gate.clear()
            await reset(client, served, 0)
            await wait_until(lambda: len(handled) == 2)
            await reset(client, served, -1)
            await asyncio.sleep(0.5)
            gate.set()
            await asyncio.sleep(1)
            assert len(handled) == 2, "messages read ahead are not handled"
            await send(client, [b"y"] * 2)
            await wait_until(lambda: len(handled) == 4)
            assert sorted(handled[2:]) == [(0, 4), (1, 4)]
            await reset(client, served, 0)
            await wait_until(lambda: len(handled) == 14)
            await consumer.stop()
            await wait_for_offsets(client, served, [5, 5])

    run(scenario)


def test_broadcasting_and_polling_consumers_follow_a_reset_of_offsets(
    serving: Any, wait_until: Any, tmp_path: Path
) -> None:
    """A broadcasting consumer keeps the new offsets in its file; a polling one continues from them as well."""

    async def scenario() -> None:
        async with serving({"t": 1}) as served, AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(Client([served.name_server], timings=served.timings)) for _ in "abc"
            ]
            sink, queue = Sink(), MessageQueue("t", "broker-a", 0)
            local = clients[0].local_offsets(f"{tmp_path}/offsets.json")
            broadcast = clients[0].push_consumer(
                "g", sink, {"t": "*"}, model=MessageModel.BROADCASTING, offsets=local, **FIRST
            )
            await broadcast.start()
            own = clients[1].pull_consumer("g", queues=[queue], **FIRST)
            await own.start()
            await send(clients[2], [b"x"] * 4)
            await wait_until(lambda: len(sink.messages) == 4)

            async def polled(count: int) -> list[int]:
                offsets: list[int] = []
                while len(offsets) < count:
                    offsets += [message.queue_offset for message in await own.poll()]
                assert await own.poll(timeout_ms=10) == [], (
                    "no other messages, and this poll marks the last ones as handled"
                )
                await own.commit()
                return offsets

            assert await polled(4) == [0, 1, 2, 3]
            members = 0
            while members < 2:  # brokers tell those whose heartbeat has arrived
                await asyncio.sleep(0.05)
                reply = await clients[2].requests.invoke(served.address, Command.request(38, {"consumerGroup": "g"}))
                members = len(json.loads(reply.body)["consumerIdList"])
            await reset(clients[2], served, 0)
            await wait_until(lambda: len(sink.messages) == 8)
            assert await polled(4) == [0, 1, 2, 3]
            await broadcast.stop()
            assert await local.load(queue) == 4

    run(scenario)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_consumer_reports_its_running_info(serving: Any, wait_until: Any, ordered: bool) -> None:
    """Code 307, through the broker, while a handler runs."""

    async def scenario() -> None:
        async with serving({"t": 1}) as served, Client([served.name_server], timings=served.timings) as client:
            begun_ms, gate = served.runtime.clock.wall_ms(), asyncio.Event()
            calls = 0

            async def handle(messages: Sequence[ReceivedMessage]) -> None:
                nonlocal calls
                calls += 1
                if messages[0].queue_offset:
                    await gate.wait()

            consumer = client.push_consumer("g", handle, {"t": "a || b"}, ordered=ordered, **FIRST)
            await consumer.start()
            await send(client, [b"x"] * 2, tags="a")
            await wait_until(lambda: calls == 2)
            fields = {"consumerGroup": "g", "clientId": client.client_id, "jstackEnable": "false"}
            reply = await client.requests.invoke(served.address, Command.request(307, fields))
            assert reply.code == 0, reply.remark
            table = {place: value for place, value in parse_queue_table(reply.body, "mqTable")}
            row = table[Place("t", "broker-a", 0)]
            now_ms = served.runtime.clock.wall_ms()
            assert (row["commitOffset"], row["cachedMsgCount"], row["droped"], row["locked"]) == (1, 1, False, ordered)
            assert row["cachedMsgMinOffset"] == row["cachedMsgMaxOffset"] == 1
            for name in ("lastPullTimestamp", "lastConsumeTimestamp", *(["lastLockTimestamp"] if ordered else [])):
                assert begun_ms <= row[name] <= now_ms
            told = json.loads(re.sub(rb'"mqTable":.*,"statusTable"', b'"statusTable"', reply.body))
            assert told["statusTable"] == {}
            assert ["a", "b"] in [subscription["tagsSet"] for subscription in told["subscriptionSet"]]
            assert told["properties"]["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
            assert told["properties"]["PROP_CONSUMEORDERLY"] == str(ordered).lower()
            assert begun_ms <= int(told["properties"]["PROP_CONSUMER_START_TIMESTAMP"]) <= now_ms
            gate.set()

    run(scenario)


@pytest.mark.parametrize("ordered", [False, True])
def test_an_operator_can_have_a_message_handled_again(serving: Any, wait_until: Any, ordered: bool) -> None:
    """Code 309, through the broker: the reply has the outcome of the handler; the group's offsets stay."""

    async def scenario() -> None:
        async with serving({"t": 1}) as served, Client([served.name_server], timings=served.timings) as client:
            handled: list[tuple[bytes, str]] = []
            outcomes: list[ConsumeResult | Exception | None] = [None, None]

            async def handle(messages: Sequence[ReceivedMessage]) -> ConsumeResult | None:
                handled.append((messages[0].body, messages[0].topic))
                outcome = outcomes.pop(0)
                if isinstance(outcome, Exception):
                    raise outcome
                return outcome

            consumer = client.push_consumer("g", handle, {"t": "*"}, ordered=ordered, **FIRST)
            await consumer.start()
            producer = client.producer("producers")
            first = await producer.send(NewMessage("t", b"first"))
            await producer.send(NewMessage("t", b"second"))
            await wait_until(lambda: len(handled) == 2)
            await wait_for_offsets(client, served, [2])
            fields = {"consumerGroup": "g", "clientId": client.client_id, "msgId": first.result.msg_id}
            for outcome, said, remark in [
                (None, "CR_SUCCESS", None),
                (ConsumeResult.LATER, "CR_LATER", None),
                (RuntimeError("no"), "CR_THROW_EXCEPTION", "RuntimeError: no"),
            ]:
                outcomes.append(outcome)
                reply = await client.requests.invoke(served.address, Command.request(309, fields))
                told = json.loads(reply.body)
                assert (told["consumeResult"], told["remark"], told["order"]) == (said, remark, ordered)
                assert told["autoCommit"] is True and told["spentTimeMills"] >= 0
            assert handled[2:] == [(b"first", "t")] * 3
            reply = await client.requests.invoke(served.address, Command.request(223, {"topic": "t", "group": "g"}))
            rows = re.search(rb'"consumerTable":\{"[^"]+":(.*)\},"messageQueueTable"', reply.body)
            assert rows is not None, reply.body
            assert parse_queue_table(b'{"o":%s}' % rows[1], "o") == [(Place("t", "broker-a", 0), 2)]
            await wait_for_offsets(client, served, [2])
            assert len(handled) == 5 and outcomes == []

    run(scenario)


def test_requests_to_handle_a_message_directly_are_refused_with_a_reason(serving: Any, wait_until: Any) -> None:
    async def scenario() -> None:
        async with serving({"t": 1}) as served, Client([served.name_server], timings=served.timings) as client:
            own = client.pull_consumer("polling", {"t": "*"})
            await own.start()
            sent = await client.producer("producers").send(NewMessage("t", b"x"))
            await client.heartbeat()
            fields = {"consumerGroup": "polling", "clientId": client.client_id, "msgId": sent.result.msg_id}
            reply = await client.requests.invoke(served.address, Command.request(309, fields))
            assert (reply.code, reply.remark) == (1, "the consumer of group 'polling' has no handler: it polls")
            for named, said in [("polling", "the message cannot be read"), ("other", "no consumer of group 'other'")]:
                asked = Command.request(309, {"consumerGroup": named, "clientId": client.client_id}, b"x" * 100)
                with pytest.raises(RequestError, match=said):
                    await client._handle_now(asked, None)  # type: ignore[arg-type]
            with pytest.raises(RequestError, match="no consumer of group 'other'"):
                client._consumer_status(Command.request(221, {"group": "other", "topic": "t"}), None)  # type: ignore[arg-type]

    run(scenario)


def test_only_subscribed_tags_are_delivered(serving: Any, wait_until: Any) -> None:
    async def scenario() -> None:
        async with serving({"t": 2}) as served, Client([served.name_server], timings=served.timings) as client:
            sink = Sink()
            consumer = client.push_consumer("g", sink, {"t": "Aa || c"}, **FIRST)
            await consumer.start()
            for tag in ("Aa", "BB", "c", "d"):  # Aa and BB have the same hash
                await send(client, [tag.encode()] * 3, tags=tag)
            await wait_until(lambda: len(sink.messages) == 6)
            assert Counter(sink.bodies) == {b"Aa": 3, b"c": 3}

    run(scenario)


def test_order_holds_through_failures_and_rebalancing(serving: Any, wait_until: Any) -> None:
    """Every message of a queue in order, one handler at a time, although handlers fail and a member joins."""

    async def scenario() -> None:
        async with serving({"t": 4}) as served, AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(Client([served.name_server], timings=served.timings)) for _ in "ab"
            ]
            handled: dict[int, list[int]] = {}
            busy: Counter[int] = Counter()
            calls = 0

            async def handle(messages: Sequence[ReceivedMessage]) -> ConsumeResult | None:
                nonlocal calls
                calls += 1
                (message,) = messages
                queue_id = message.queue.queue_id
                busy[queue_id] += 1
                assert busy[queue_id] == 1, "two handlers on one queue"
                await asyncio.sleep(0.005)
                busy[queue_id] -= 1
                if calls % 17 == 0:
                    raise RuntimeError("the test wants a retry")
                if calls % 23 == 0:
                    return ConsumeResult.LATER
                handled.setdefault(queue_id, []).append(message.queue_offset)
                return None

            consumers = [client.push_consumer("g", handle, {"t": "*"}, ordered=True, **FIRST) for client in clients]
            await consumers[0].start()
            await send(clients[0], [b"x"] * 100)
            await wait_until(lambda: calls > 20)
            await consumers[1].start()
            await wait_until(lambda: len(queues_of(consumers[1], "t")) == 2)
            await send(clients[0], [b"x"] * 100)
            await wait_until(lambda: sum(map(len, handled.values())) >= 200, timeout_s=60)
            for consumer in consumers:
                await consumer.stop()
            for offsets in handled.values():
                assert offsets == list(range(50))

    run(scenario)


def test_broadcasting_delivers_every_message_to_every_member_once(
    serving: Any, wait_until: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with serving({"t": 3}) as served:
            for generation in range(2):
                async with AsyncExitStack() as stack:
                    sinks = [Sink(), Sink()]
                    for name, sink in zip("ab", sinks, strict=True):
                        client = await stack.enter_async_context(Client([served.name_server], timings=served.timings))
                        consumer = client.push_consumer(
                            "g", sink, {"t": "*"}, model=MessageModel.BROADCASTING,
                            offsets=client.local_offsets(f"{tmp_path}/offsets/{name}.json"), **FIRST,
                        )  # fmt: skip
                        await consumer.start()
                    await send(client, [b"%d-%d" % (generation, number) for number in range(20)])
                    await wait_until(lambda sinks=sinks: all(len(sink.messages) >= 20 for sink in sinks))
                for sink in sinks:
                    assert sorted(sink.bodies) == sorted(b"%d-%d" % (generation, number) for number in range(20))
            with pytest.raises(ValueError, match="LocalOffsets"):
                client.push_consumer("h", sinks[0], {"t": "*"}, model=MessageModel.BROADCASTING)

    run(scenario)


def test_a_broadcasting_member_misses_no_message_of_new_queues(serving: Any, wait_until: Any, tmp_path: Path) -> None:
    """Messages sent before it has noticed the queues are delivered, even with LAST; those older than itself are not."""

    async def scenario() -> None:
        async with serving({"t": 1}) as served, Client([served.name_server], timings=served.timings) as client:
            sink = Sink()
            consumer = client.push_consumer(
                "g", sink, {"t": "*", "later": "*", "old": "*"}, model=MessageModel.BROADCASTING,
                offsets=client.local_offsets(f"{tmp_path}/offsets.json"),
            )  # fmt: skip
            await send(client, [b"before"] * 3)
            hidden = client.requests.route

            async def route(topic: str, **options: Any) -> Any:
                if topic == "old":
                    raise NoRoute("its broker is away", code=17)
                return await hidden(topic, **options)

            await client.create_topic("old", queues=1)
            await client.requests.send("old", 0, b"before", address=served.address)
            client.requests.route = route  # type: ignore[method-assign]
            await asyncio.sleep(0.01)
            await consumer.start()
            await wait_until(lambda: queues_of(consumer, "t") == {0})
            await asyncio.sleep(0.5)
            await client.create_topic("t", queues=3)
            await client.create_topic("later", queues=1)
            for topic, queue in (("t", 1), ("t", 2), ("later", 0), ("old", 0)):
                body = f"{topic}-{queue}".encode()
                await client.requests.send(topic, queue, body, address=served.address)
            client.requests.route = hidden  # type: ignore[method-assign]
            await wait_until(lambda: len(sink.messages) >= 4)
            await asyncio.sleep(0.3)
            assert sorted(sink.bodies) == [b"later-0", b"old-0", b"t-1", b"t-2"]

    run(scenario)


def test_a_failed_message_is_redelivered_and_then_becomes_a_dead_letter(serving: Any, wait_until: Any) -> None:
    async def scenario() -> None:
        async with serving({"t": 1}) as served, Client([served.name_server], timings=served.timings) as client:
            seen: list[tuple[bytes, int, str]] = []

            async def handle(messages: Sequence[ReceivedMessage]) -> ConsumeResult | None:
                for message in messages:
                    seen.append((message.body, message.reconsume_times, message.topic))
                    if message.body == b"bad":
                        return ConsumeResult.LATER
                return None

            consumer = client.push_consumer("g", handle, {"t": "*"}, max_reconsume_times=1, **FIRST)
            await consumer.start()
            await send(client, [b"bad", b"good"])
            await wait_until(lambda: len(seen) == 3, timeout_s=40)
            assert sorted(seen) == [(b"bad", 0, "t"), (b"bad", 1, "t"), (b"good", 0, "t")]
            dead = PullConsumer(
                client, "undertaker", queues=[MessageQueue("%DLQ%g", "broker-a", 0)], start_from=StartFrom.FIRST
            )
            await dead.start()
            buried: list[ReceivedMessage] = []
            while not buried:
                buried += await dead.poll()
            assert [message.body for message in buried] == [b"bad"]

    run(scenario)


def test_an_ordered_consumer_skips_a_message_after_the_maximum_of_retries(serving: Any, wait_until: Any) -> None:
    async def scenario() -> None:
        async with serving({"t": 1}) as served, Client([served.name_server], timings=served.timings) as client:
            seen: list[tuple[bytes, int]] = []

            async def handle(messages: Sequence[ReceivedMessage]) -> None:
                seen.append((messages[0].body, messages[0].reconsume_times))
                if messages[0].body == b"bad":
                    raise ValueError("always")

            consumer = client.push_consumer("g", handle, {"t": "*"}, ordered=True, max_reconsume_times=2, **FIRST)
            await consumer.start()
            await send(client, [b"bad", b"good"])
            await wait_until(lambda: len(seen) == 4)
            assert seen == [(b"bad", 0), (b"bad", 1), (b"bad", 2), (b"good", 0)]

    run(scenario)


async def dead_letters(client: Client, group: str) -> list[ReceivedMessage]:
    """The first dead letters of the group, once there are any."""
    queue = MessageQueue(f"%DLQ%{group}", "broker-a", 0)
    async with PullConsumer(client, "undertaker", queues=[queue], start_from=StartFrom.FIRST) as consumer:
        found: list[ReceivedMessage] = []
        while not found:
            found += await consumer.poll()
        return found


@pytest.fixture
def records_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker no longer has the record of any message that is sent back."""

    def read(log: Any, queues: Any, physical_offset: int) -> Any:
        raise RecordError("it has expired")

    monkeypatch.setattr("node.broker.send_back.read_message", read)


@pytest.mark.usefixtures("records_are_gone")
def test_a_message_that_cannot_be_sent_back_is_copied_to_the_retry_topic(serving: Any, wait_until: Any) -> None:
    """R: sendMessageBack. The copy is redelivered as often as the broker's would be, then becomes a dead letter."""

    async def scenario() -> None:
        async with serving({"t": 1}) as served, Client([served.name_server], timings=served.timings) as client:
            seen: list[tuple[bytes, int, str, str]] = []

            async def handle(messages: Sequence[ReceivedMessage]) -> ConsumeResult | None:
                (message,) = messages
                seen.append((message.body, message.reconsume_times, message.topic, message.message_id))
                return ConsumeResult.LATER

            consumer = client.push_consumer("g", handle, {"t": "*"}, max_reconsume_times=1, **FIRST)
            await consumer.start()
            producer = client.producer("p")
            bad = b"bad" * 3000
            receipt = await producer.send(NewMessage("t", bad, tags="a", keys=("k",), properties={"own": "x"}))
            await wait_until(lambda: len(seen) == 2, timeout_s=40)
            key = receipt.unique_key
            assert seen == [(bad, 0, "t", key), (bad, 1, "t", key)]
            (buried,) = await dead_letters(client, "g")
            assert (buried.body, buried.message_id, buried.reconsume_times, buried.topic) == (bad, key, 2, "t")
            assert (buried.tags, buried.keys, buried.properties["own"]) == ("a", ("k",), "x")
            assert buried.properties["ORIGIN_MESSAGE_ID"] == key
            assert buried.properties["RECONSUME_TIME"] == "2"
            assert buried.properties["MAX_RECONSUME_TIMES"] == "1"
            assert len(seen) == 2
            await wait_until(lambda: consumer.open_bytes == 0)

    run(scenario)


@pytest.mark.usefixtures("records_are_gone")
def test_an_ordered_queue_continues_after_a_message_that_cannot_be_sent_back(serving: Any, wait_until: Any) -> None:
    async def scenario() -> None:
        async with serving({"t": 1}) as served, Client([served.name_server], timings=served.timings) as client:
            seen: list[bytes] = []

            async def handle(messages: Sequence[ReceivedMessage]) -> None:
                seen.append(messages[0].body)
                if messages[0].body == b"bad":
                    raise ValueError("always")

            consumer = client.push_consumer("g", handle, {"t": "*"}, ordered=True, max_reconsume_times=1, **FIRST)
            await consumer.start()
            await send(client, [b"bad", b"good"])
            await wait_until(lambda: b"good" in seen)
            assert seen == [b"bad", b"bad", b"good"]
            assert [message.body for message in await dead_letters(client, "g")] == [b"bad"]

    run(scenario)


@pytest.mark.usefixtures("records_are_gone")
def test_a_message_that_cannot_be_copied_either_is_retried_locally(
    serving: Any, wait_until: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("node.client.push_consumer.RETRY_HERE_PAUSE_S", 0.1)

    async def scenario() -> None:
        async with serving({"t": 1}) as served, Client([served.name_server], timings=served.timings) as client:
            await client.create_topic("%RETRY%g", queues=1, perm=4)
            seen: Counter[bytes] = Counter()

            async def handle(messages: Sequence[ReceivedMessage]) -> ConsumeResult | None:
                seen[messages[0].body] += 1
                return None if seen[messages[0].body] > 3 else ConsumeResult.LATER

            consumer = client.push_consumer("g", handle, {"t": "*"}, **FIRST)
            await consumer.start()
            await send(client, [b"one", b"two"])
            await wait_until(lambda: seen[b"one"] == 4 and seen[b"two"] == 4)
            await wait_until(lambda: consumer.open_bytes == 0)

    run(scenario)
    lines = [record.getMessage() for record in caplog.records if "handled again here" in record.getMessage()]
    assert len(lines) == 2 and any("message 0 of" in line for line in lines), lines


def test_polled_messages_are_committed_by_the_next_poll_or_by_commit(serving: Any) -> None:
    """Polled messages count as handled at the next poll or at `commit`; others are delivered again."""

    async def scenario() -> None:
        async with serving({"t": 1}) as served:
            queue = MessageQueue("t", "broker-a", 0)

            async def polled(consumer: PullConsumer, count: int) -> list[int]:
                offsets: list[int] = []
                while len(offsets) < count:
                    messages = await consumer.poll(max_messages=min(4, count - len(offsets)))
                    offsets += [message.queue_offset for message in messages]
                return offsets

            async with Client([served.name_server], timings=served.timings) as client:
                await send(client, [b"%d" % number for number in range(20)])
                by_hand = client.pull_consumer("g", {"t": "*"}, auto_commit=False, **FIRST)
                await by_hand.start()
                assert await polled(by_hand, 8) == list(range(8))
                await by_hand.commit()
                assert await polled(by_hand, 4) == [8, 9, 10, 11]
                await by_hand.stop()
                again = client.pull_consumer("g", {"t": "*"}, **FIRST)
                await again.start()
                assert await polled(again, 8) == list(range(8, 16))
                again.seek(queue, 3)
                assert await polled(again, 2) == [3, 4]
                with pytest.raises(ValueError, match="not assigned"):
                    again.seek(queue._replace(queue_id=7), 0)
                assert await polled(again, 15) == list(range(5, 20))
                assert await again.poll(timeout_ms=50) == []
                await again.commit()
                assert await served.committed(client.requests, "g", "t", 0) == 20
                own = client.pull_consumer("other", queues=[queue], **FIRST)
                await own.start()
                assert await polled(own, 20) == list(range(20))
                with pytest.raises(ValueError, match="either"):
                    client.pull_consumer("x", {"t": "*"}, queues=[queue])

    run(scenario)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_seek_rereads_from_its_offset_whatever_was_read_ahead(
    serving: Any, wait_until: Any, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """With the whole queue read ahead, and with as much as may be read ahead."""
    if is_full:
        monkeypatch.setattr(reader_module, "MAX_OPEN_MESSAGES", 32)

    async def scenario() -> None:
        async with serving({"t": 1}) as served, Client([served.name_server], timings=served.timings) as client:
            await send(client, [b"%d" % number for number in range(100)])
            consumer = client.pull_consumer("g", {"t": "*"}, **FIRST)
            await consumer.start()
            first = await consumer.poll(timeout_ms=5000, max_messages=10)
            assert first[0].queue_offset == 0
            (reader,) = consumer._readers.values()
            for offset in (5, 0, 50):
                consumer.seek(first[0].queue, offset)
                least = 32 if is_full else 100 - offset
                await wait_until(lambda least=least: reader.tracker is not None and reader.tracker.open_count >= least)
                found: list[int] = []
                while len(found) < (100 - offset if offset == 50 else 7):
                    found += [message.queue_offset for message in await consumer.poll(max_messages=7)]
                assert found == list(range(offset, offset + len(found)))

    run(scenario)


def test_a_new_group_starts_at_its_timestamp_or_at_the_end(serving: Any) -> None:
    async def scenario() -> None:
        async with serving({"t": 1}) as served, Client([served.name_server], timings=served.timings) as client:
            await send(client, [b"old"] * 5)
            middle_ms = served.runtime.clock.wall_ms() + 1
            while served.runtime.clock.wall_ms() <= middle_ms:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            await send(client, [b"new"] * 5)
            queue = MessageQueue("t", "broker-a", 0)
            consumer = client.pull_consumer(
                "g", queues=[queue], start_from=StartFrom.TIMESTAMP, start_timestamp_ms=middle_ms
            )
            await client.routes.get("t")
            kept = consumer.offsets.load

            async def nothing_kept(queue: MessageQueue) -> None:
                await kept(queue)

            consumer.offsets.load = nothing_kept  # type: ignore[method-assign]
            assert await consumer.first_offset(queue) == 5
            last = client.pull_consumer("h", queues=[queue])
            last.offsets.load = nothing_kept  # type: ignore[method-assign]
            assert await last.first_offset(queue) == 10

    run(scenario)


def test_transactions_become_visible_when_they_commit(serving: Any, wait_until: Any) -> None:
    async def scenario() -> None:
        async with serving({"t": 2}) as served, Client([served.name_server], timings=served.timings) as client:
            sink = Sink()
            checked: list[bytes] = []
            consumer = client.push_consumer("g", sink, {"t": "*"}, **FIRST)
            await consumer.start()

            async def check(message: ReceivedMessage) -> TransactionState:
                checked.append(message.body)
                return TransactionState.COMMIT

            producer = client.transaction_producer("bank", check)

            def outcome(state: TransactionState) -> Callable[[Any], Awaitable[TransactionState]]:
                async def execute(receipt: Any) -> TransactionState:
                    await asyncio.sleep(0.2)
                    assert b"%d" % state not in sink.bodies, "a half message is not visible"
                    return state

                return execute

            for state in TransactionState:
                receipt, told = await producer.send_in_transaction(NewMessage("t", b"%d" % state), outcome(state))
                assert told is state and receipt.queue.topic == "t"

            async def broken(receipt: Any) -> TransactionState:
                raise RuntimeError("the local transaction broke")

            with pytest.raises(RuntimeError, match="broke"):
                await producer.send_in_transaction(NewMessage("t", b"broken"), broken)
            await wait_until(lambda: len(sink.messages) == 3, timeout_s=60)
            assert sorted(sink.bodies) == sorted([b"8", b"0", b"broken"])
            assert sorted(checked) == [b"0", b"broken"]

    run(scenario)


def test_a_message_to_an_unknown_topic_creates_the_topic(serving: Any, wait_until: Any) -> None:
    """R: the route of TBW102 is used first; afterwards the topic has a route of its own."""

    async def scenario() -> None:
        async with serving({"t": 1}) as served, Client([served.name_server], timings=served.timings) as client:
            careful = client.producer("careful", create_topics=False)
            with pytest.raises(SendFailed) as caught:
                await careful.send(NewMessage("new", b"refused"))
            assert caught.value.is_definite
            producer = client.producer("bold")
            assert len(await producer.queues("new")) == 4
            receipts = [await producer.send(NewMessage("new", b"%d" % number)) for number in range(8)]
            assert {receipt.queue.queue_id for receipt in receipts} == {0, 1, 2, 3}
            await producer.send_batch([NewMessage("new-too", b"a"), NewMessage("new-too", b"b")])
            sink = Sink()
            consumer = client.push_consumer("g", sink, {"new": "*", "new-too": "*"}, **FIRST)
            await consumer.start()
            await wait_until(lambda: len(sink.messages) == 10)
            assert len(await careful.queues("new")) == 4, "it is an ordinary topic now"

    run(scenario)


def test_no_topic_is_created_if_the_brokers_do_not_allow_it(serving: Any) -> None:
    async def scenario() -> None:
        async with (
            serving({"t": 1}, overrides=("auto_create_topics=false",)) as served,
            Client([served.name_server], timings=served.timings) as client,
        ):
            with pytest.raises(SendFailed, match="no broker has registered topic new") as caught:
                await client.producer("p").send(NewMessage("new", b"refused"))
            assert caught.value.is_definite

    run(scenario)
