"""Consumers and slaves: consumption continues while the master is down, consumer offsets survive, and consumers far
behind are redirected to a slave."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from node.client import Client, ClientTimings, ReceivedMessage, StartFrom

READS = "slave_read_enable=true"
TIMINGS = ClientTimings(
    route_interval_s=1, heartbeat_interval_s=1, rebalance_interval_s=1, persist_interval_s=0.5, pull_suspend_ms=1000,
    retry_pause_s=0.1, drain_timeout_s=1,
)  # fmt: skip


class Consumer:
    """A push consumer on the host `clients`, and the bodies that it got."""

    def __init__(self, group: Any, name: str) -> None:
        self._group = group
        self.got: list[bytes] = []
        self.may_handle = asyncio.Event()
        self.may_handle.set()
        self.client: Any = None
        self._name = name

    async def start(self) -> None:
        group = self._group
        runtime = group.hosts["clients"].runtime_for(group._process("clients"))

        async def handle(messages: Sequence[ReceivedMessage]) -> None:
            await self.may_handle.wait()
            self.got += [message.body for message in messages]

        async def begin() -> None:
            self.client = Client(
                [f"{group.hosts['ns1'].address}:9876"], runtime=runtime, client_id=self._name, timings=TIMINGS
            )
            consumer = self.client.push_consumer("g", handle, {"t": "*"}, start_from=StartFrom.FIRST)
            await consumer.start()

        await group.run("clients", begin)

    async def stop(self) -> None:
        await self._group.run("clients", self.client.close)


@pytest.mark.mechanism("Master down → read slave")
def test_consumption_continues_without_the_master_but_sends_are_refused(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        consumer = Consumer(group, "c1")
        consumer.may_handle.clear()
        await consumer.start()
        bodies = await group.fill(1300, size=0)  # more than a consumer holds at once
        await group.following("n2")
        group.kill("n1")
        assert (await group.send(at="n2")).code == 14
        consumer.may_handle.set()
        await group.until(lambda: set(consumer.got) == set(bodies))
        assert int((await group.table("n2"))["getTotal"]) > 0
        await group.start("n1", "SYNC_MASTER")
        bodies += await group.fill(20, mark=b"again ")
        await group.until(lambda: set(consumer.got) == set(bodies))
        assert len(consumer.got) == len(bodies), "a consumer that stays gets no message twice"
        await consumer.stop()

    ha(scenario, READS, roles=("SYNC_MASTER", "SLAVE"))


def test_a_consumer_started_without_the_master_resumes_at_the_groups_offset(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        first = Consumer(group, "c1")
        await first.start()
        bodies = await group.fill(20)
        await group.until(lambda: set(first.got) == set(bodies))
        await first.stop()
        await asyncio.sleep(11)  # the slave has copied the offsets
        await group.stop("n1")
        second = Consumer(group, "c2")
        await second.start()
        await asyncio.sleep(30)
        assert second.got == []
        await group.start("n1", "ASYNC_MASTER")
        more = await group.fill(5, mark=b"new ")
        await group.until(lambda: set(second.got) == set(more))
        await second.stop()

    ha(scenario, READS)


def test_a_restarted_master_learns_the_offsets_committed_at_the_slave(ha: Any) -> None:
    """rocketmq#1094: everything that was consumed at the slave was consumed again."""

    async def scenario(group: Any) -> None:
        consumer = Consumer(group, "c1")
        await consumer.start()
        await group.fill(10)
        await group.until(lambda: len(consumer.got) == 10)
        await asyncio.sleep(12)
        await consumer.stop()
        await group.fill(30, mark=b"more ")
        await group.following("n2")
        group.kill("n1")
        later = Consumer(group, "c2")
        await later.start()
        await group.until(lambda: len(later.got) >= 30)
        await asyncio.sleep(2)
        await later.stop()
        await group.start("n1", "ASYNC_MASTER")

        async def known() -> str:
            reply = await group.ask("n1", 14, {"consumerGroup": "g", "topic": "t", "queueId": 0})
            return str(reply.ext_fields["offset"])

        for _ in range(40):
            if await known() == "40":
                break
            await asyncio.sleep(1)
        assert await known() == "40"
        assert len(later.got) == 30, "no message is delivered twice"

    ha(scenario, READS)


def test_a_slave_does_not_give_back_offsets_that_it_copied_from_the_master(ha: Any) -> None:
    """Only offsets that clients committed at the slave go back: an operator may have reset one at the master."""

    async def scenario(group: Any) -> None:
        await group.fill(10)
        fields = {"consumerGroup": "g", "topic": "t", "queueId": 0}
        await group.ask("n1", 15, {**fields, "commitOffset": 9})
        await asyncio.sleep(13)
        assert (await group.ask("n2", 14, fields)).ext_fields["offset"] == "9"
        await group.ask("n1", 15, {**fields, "commitOffset": 2})
        await asyncio.sleep(13)
        for name in ("n1", "n2"):
            assert (await group.ask(name, 14, fields)).ext_fields["offset"] == "2"

    ha(scenario, READS)


def shrink_memory(group: Any) -> None:
    """Pretend that the brokers have little memory: 40 % of a machine's is more than any test writes."""
    for broker in group.brokers.values():
        broker._memory._size_bytes = 5000


def pull(offset: int) -> dict[str, Any]:
    return {"topic": "t", "queueId": 0, "queueOffset": offset, "consumerGroup": "g", "sysFlag": 4, "subscription": "*"}


@pytest.mark.mechanism("Slave redirect on backlog")
def test_a_consumer_far_behind_is_redirected_to_a_slave(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.fill(100)
        await group.following("n2")
        shrink_memory(group)
        old, new = await group.ask("n1", 11, pull(0)), await group.ask("n1", 11, pull(99))
        assert (old.code, old.ext_fields["suggestWhichBrokerId"]) == (0, "1")
        assert (new.code, new.ext_fields["suggestWhichBrokerId"]) == (0, "0")

    ha(scenario, READS)


@pytest.mark.mechanism("Slave redirect on backlog")
def test_without_slave_reads_no_consumer_is_redirected(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.fill(100)
        shrink_memory(group)
        old = await group.ask("n1", 11, pull(0))
        assert (old.code, old.ext_fields["suggestWhichBrokerId"]) == (0, "0")
        assert (await group.ask("n2", 11, pull(0))).code == 14

    ha(scenario)


@pytest.mark.mechanism("Backlog questions: capacity=disk; sends unaffected when a slave serves old reads")
def test_a_consumer_far_behind_reads_mostly_from_the_slave(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        bodies = await group.fill(300)
        await group.following("n2")
        shrink_memory(group)
        consumer = Consumer(group, "c1")
        await consumer.start()
        await group.until(lambda: set(consumer.got) == set(bodies))
        from_master = int((await group.table("n1"))["getTotal"])
        from_slave = int((await group.table("n2"))["getTotal"])
        assert from_slave > 250 and from_master < 50
        assert (await group.send(b"meanwhile")).code == 0
        await consumer.stop()

    ha(scenario, READS)


@pytest.mark.parametrize("slave", ["alive", "alone at first"])
def test_a_consumer_skips_no_message_that_the_slave_lacks(ha: Any, slave: str) -> None:
    """The master redirects consumers far behind to a slave that has the newest messages only."""

    async def scenario(group: Any) -> None:
        bodies = await group.fill(600)
        await group.start("n2", "SLAVE")
        await group.following("n2")
        lacked = group["n2"].queues.find("t", 0).min_offset
        assert lacked > 100
        shrink_memory(group)
        reply = await group.ask("n2", 11, pull(10))
        assert (reply.code, reply.ext_fields["nextBeginOffset"]) == (20, "10")
        assert reply.ext_fields["suggestWhichBrokerId"] == "0"
        if slave != "alive":
            group.kill("n1")
        consumer = Consumer(group, "c1")
        await consumer.start()
        if slave != "alive":
            await asyncio.sleep(20)
            assert consumer.got == []
            await group.start("n1", "ASYNC_MASTER")
            shrink_memory(group)
        await group.until(lambda: len(consumer.got) >= 600)
        assert sorted(consumer.got) == sorted(bodies)
        await consumer.stop()

    ha(scenario, READS, roles=("ASYNC_MASTER",))
