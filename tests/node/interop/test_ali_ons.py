"""The npm package ali-ons against our broker and our client: messages each way, retries, signatures, routes."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from node.client import Client, Credentials, NewMessage, StartFrom

pytestmark = [
    pytest.mark.long,  # an older client; those of Apache are tested every time
    pytest.mark.node_js,
    pytest.mark.skipif(shutil.which("npm") is None or shutil.which("node") is None, reason="needs Node.js and npm"),
]
MESSAGES = int(os.environ.get("SPLITBRAIN_INTEROP_MESSAGES", "2000"))
"""In each direction; 10,000 are required, which takes a few seconds more."""


def body_of(number: int) -> bytes:
    """The same bytes as `bodyOf` of the peer."""
    size_bytes = number * 37 % 3001
    period = bytes((number * 31 + at * 7) & 255 for at in range(min(256, size_bytes)))
    return (period * 12)[:size_bytes]  # built quickly: the broker under test shares this process


class Peer:
    """A running ali-ons. `lines` are the objects it has printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []

    async def read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.lines.append(json.loads(line))

    @property
    def errors(self) -> list[str]:
        return [line["error"] for line in self.lines if "error" in line]

    @property
    def received(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "body" in line]


@asynccontextmanager
async def peer(script: Path, **task: Any) -> AsyncIterator[Peer]:
    """Run ali-ons with a task; it must exit when the block ends."""
    process = await asyncio.create_subprocess_exec(
        "node", str(script), json.dumps(task), cwd=script.parent, stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE, limit=1 << 20,
    )  # fmt: skip
    running = Peer(process)
    reading = asyncio.create_task(running.read())
    try:
        yield running
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait_for(asyncio.gather(reading, process.wait()), 60)
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.wait((reading,))


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), 150)

    asyncio.run(bounded())


def test_our_consumer_receives_what_ali_ons_sends(serving: Any, wait_until: Any, ali_ons: Path) -> None:
    async def scenario() -> None:
        received: dict[int, Any] = {}

        async def handle(messages: Any) -> None:
            for message in messages:
                received[int(message.keys[0].removeprefix("k-"))] = message

        async with serving({"orders": 4}) as served, Client([served.name_server], timings=served.timings) as client:
            consumer = client.push_consumer("ours", handle, {"orders": "*"}, start_from=StartFrom.FIRST, batch_size=32)
            await consumer.start()
            task = {"nameServer": served.name_server, "topic": "orders", "group": "theirs"}
            async with peer(ali_ons, action="produce", first=0, count=MESSAGES, **task) as producer:
                await wait_until(lambda: len(received) == MESSAGES, timeout_s=100)
            assert producer.errors == []
            assert [line["status"] for line in producer.lines] == ["SEND_OK"] * MESSAGES
            for number, message in received.items():
                assert message.body == body_of(number)
                assert message.tags == f"tag-{number % 3}"
                assert message.keys == (f"k-{number}", f"all-{number % 10}")

    run(scenario)


def test_ali_ons_receives_what_our_producer_sends(serving: Any, wait_until: Any, ali_ons: Path) -> None:
    """Singly, in batches, and compressed."""

    async def scenario() -> None:
        async with serving({"orders": 4}) as served, Client([served.name_server], timings=served.timings) as client:
            producer = client.producer("ours", compress_over_bytes=1000)
            task = {"nameServer": served.name_server, "topic": "orders", "group": "theirs"}
            options = {"consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET"}
            async with peer(ali_ons, action="consume", options=options, **task) as consumer:
                messages = [
                    NewMessage(
                        "orders", body_of(number), tags=f"tag-{number % 3}", keys=(f"k-{number}", f"all-{number % 10}")
                    )
                    for number in range(MESSAGES)
                ]
                for message in messages[: MESSAGES // 2]:
                    await producer.send(message)
                for at in range(MESSAGES // 2, MESSAGES, 32):
                    await producer.send_batch(messages[at : at + 32])
                await wait_until(lambda: len(consumer.received) >= MESSAGES, timeout_s=100)
            assert consumer.errors == []
            by_keys = {line["keys"]: line for line in consumer.received}
            assert len(by_keys) == MESSAGES
            for number in range(MESSAGES):
                line = by_keys[f"k-{number} all-{number % 10}"]
                assert base64.b64decode(line["body"]) == body_of(number)
                assert line["tags"] == f"tag-{number % 3}"

    run(scenario)


def test_ali_ons_filters_by_tag_and_retries_a_failed_message(serving: Any, wait_until: Any, ali_ons: Path) -> None:
    """A handler that throws sends its message back (code 36): redelivered after delay level 3, 10 s."""

    async def scenario() -> None:
        async with serving({"orders": 4}) as served, Client([served.name_server], timings=served.timings) as client:
            producer = client.producer("ours")
            task = {"nameServer": served.name_server, "topic": "orders", "group": "theirs"}
            options = {"consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "pollNameServerInteval": 1000}
            options["rebalanceInterval"] = 1000
            async with peer(
                ali_ons, action="consume", options=options, expression="tag-1 || tag-2", failFirst="k-7", **task
            ) as consumer:
                for number in range(12):
                    await producer.send(
                        NewMessage("orders", body_of(number), tags=f"tag-{number % 3}", keys=(f"k-{number}", "x"))
                    )
                await wait_until(lambda: len(consumer.received) >= 8, timeout_s=60)
            numbers = [int(line["keys"].split()[0][2:]) for line in consumer.received]
            assert sorted(numbers) == [1, 2, 4, 5, 7, 8, 10, 11]
            (again,) = [line for line in consumer.received if line["keys"] == "k-7 x"]
            assert again["reconsumeTimes"] == 1
            assert base64.b64decode(again["body"]) == body_of(7)
            assert again["tags"] == "tag-1"

    run(scenario)


ACL = """
[acl]
[[acl.accounts]]
access_key = "operator"
secret_key = "operator-secret"
admin = true
[[acl.accounts]]
access_key = "service"
secret_key = "service-secret"
topics = { orders = "PUB|SUB" }
groups = { theirs = "SUB" }
"""


def test_access_control_accepts_valid_signatures_of_ali_ons_only(serving: Any, wait_until: Any, ali_ons: Path) -> None:
    async def scenario() -> None:
        operator = Credentials(access_key="operator", secret_key="operator-secret")
        service = Credentials(access_key="service", secret_key="service-secret")
        async with (
            serving({"orders": 4, "secret": 1}, extra=ACL, client_options={"credentials": operator}) as served,
            Client([served.name_server], timings=served.timings, credentials=service) as client,
        ):
            task = {"nameServer": served.name_server, "group": "theirs"}
            keys = {"accessKey": "service", "secretKey": "service-secret"}
            wrong = keys | {"secretKey": "something-else"}
            first = {"consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET"}
            produce: dict[str, Any] = {"action": "produce", "first": 0, **task}
            async with peer(ali_ons, topic="orders", count=20, options=keys, **produce) as producer:
                pass
            assert [line["status"] for line in producer.lines] == ["SEND_OK"] * 20
            await client.producer("ours").send(NewMessage("orders", b"mine", tags="t", keys=("mine", "x")))
            async with peer(ali_ons, action="consume", topic="orders", options=keys | first, **task) as consumer:
                await wait_until(lambda: len(consumer.received) >= 21, timeout_s=60)
            for topic, options in (("orders", wrong), ("orders", {}), ("secret", keys)):
                async with peer(ali_ons, topic=topic, count=1, options=options, **produce) as refused:
                    pass
                assert refused.errors and not [line for line in refused.lines if "status" in line], (topic, options)

    run(scenario)


def test_ali_ons_notices_new_queues_within_its_poll_interval(serving: Any, wait_until: Any, ali_ons: Path) -> None:
    """A topic grows from one queue to three: the peer, which asks every second, reads the new ones too."""

    async def scenario() -> None:
        async with serving({"unused": 1}) as served, Client([served.name_server], timings=served.timings) as client:
            await client.create_topic("orders", queues=1)
            producer = client.producer("ours")
            task = {"nameServer": served.name_server, "topic": "orders", "group": "theirs"}
            options: dict[str, Any] = {"pollNameServerInteval": 1000, "rebalanceInterval": 1000}
            options["consumeFromWhere"] = "CONSUME_FROM_FIRST_OFFSET"
            async with peer(ali_ons, action="consume", options=options, **task) as consumer:
                await producer.send(NewMessage("orders", b"one", tags="t", keys=("one", "x")))
                await wait_until(lambda: len(consumer.received) == 1, timeout_s=30)
                await client.create_topic("orders", queues=3)
                await client.routes.refresh("orders")
                for queue in await producer.queues("orders"):
                    await producer.send(NewMessage("orders", b"more", tags="t", keys=("more", "x")), queue=queue)
                await wait_until(lambda: len(consumer.received) == 4, timeout_s=10)
            assert consumer.errors == []

    run(scenario)
