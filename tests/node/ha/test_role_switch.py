"""The switch between roles of whole brokers, with DLedger: tables, delayed messages, transactions, consumers."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest

from node.client import Client, ClientTimings, NewMessage, ReceivedMessage, StartFrom, TransactionState

THREE = ("DLEDGER", "DLEDGER", "DLEDGER")
FAST = 'timing="fast"'
SYNC_MECHANISM = "Slave metadata sync 3 s then every 10 s: topics, consumer offsets, delay offsets, subscription groups"
TABLES = {
    21: "topicConfigTable",
    43: "offsetTable",
    45: "offsetTable",
    201: "subscriptionGroupTable",
}
TIMINGS = ClientTimings(
    route_interval_s=1, heartbeat_interval_s=1, rebalance_interval_s=1, persist_interval_s=0.5, pull_suspend_ms=1000,
    retry_pause_s=0.1, drain_timeout_s=1,
)  # fmt: skip


async def tables(group: Any, name: str) -> dict[int, Any]:
    return {code: json.loads((await group.ask(name, code)).body)[key] for code, key in TABLES.items()}


async def registered(group: Any, number: str, name: str) -> None:
    """Wait until the name server lists a broker under this broker id."""
    address = f"{group.hosts[name].address}:10911"
    for _ in range(10_000):
        if (await group.route()).get(number) == address:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{name} is never listed as {number}")


async def change_everything(group: Any, master: str, number: int) -> None:
    """Change each of the four tables."""
    assert (await group.ask(master, 17, {"topic": f"made{number}", "readQueueNums": 2, "writeQueueNums": 2})).code == 0
    fields = {"consumerGroup": "g", "topic": "t", "queueId": number, "commitOffset": 3 + number}
    assert (await group.ask(master, 15, fields)).code == 0
    body = json.dumps({"groupName": f"made{number}", "retryMaxTimes": 5}).encode()
    assert (await group.ask(master, 200, {}, body)).code == 0
    assert (await group.send(b"delayed", at=master, i="DELAY\x011\x02")).code == 0


@pytest.mark.mechanism(SYNC_MECHANISM)
@pytest.mark.parametrize("roles", [THREE, ("SYNC_MASTER", "SLAVE", "SLAVE")])
def test_slaves_have_the_masters_tables_after_thirteen_seconds(ha: Any, roles: tuple[str, ...]) -> None:
    async def scenario(group: Any) -> None:
        master = await group.master()
        slaves = [name for name in group.names if name != master]
        for number in range(2):
            await change_everything(group, master, number)
            await asyncio.sleep(13.5)
            wanted = await tables(group, master)
            assert f"made{number}" in wanted[21] and wanted[43] and f"made{number}" in wanted[201]
            assert wanted[45]["1"] == number + 1
            for slave in slaves:
                assert await tables(group, slave) == wanted
                disk = group.hosts[slave].disk
                delays = bytes(disk.inode("/data/delayOffset.json").cache)
                assert json.loads(delays)["offsetTable"] == wanted[45]

    ha(scenario, roles=roles)


@pytest.mark.mechanism(SYNC_MECHANISM)
def test_tables_are_copied_after_three_seconds_and_then_every_ten(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        slave, sync = group["n2"], group["n2"].slave.synchronize
        started_s = None
        times = []
        while len(times) < 3:
            if started_s is None and slave.slave.synchronize._task is not None:
                started_s = group.loop.time()
            if sync.rounds_total > len(times):
                times.append(group.loop.time() - (started_s or 0))
            await asyncio.sleep(0.01)
        assert all(9.9 < later - earlier < 10.2 for earlier, later in itertools.pairwise(times)) and times[0] < 3.2

    ha(scenario)


@pytest.mark.mechanism("CANDIDATE/FOLLOWER → changeToSlave")
@pytest.mark.mechanism("LEADER → changeToMaster")
def test_a_new_leader_registers_at_once_and_continues_the_queue_offsets(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        former = await group.master()
        await group.until(lambda: group[former].slave.master_address == "")
        for _ in range(10):
            await group.send(at=former)
        assert (await group.route())["0"] == f"{group.hosts[former].address}:10911"
        group.hosts[former].pause()
        others = [name for name in group.names if name != former]
        master = await group.master(*others)
        took_over_s = group.loop.time()
        await registered(group, "0", master)
        assert group.loop.time() - took_over_s < 1, "registered at once, not at the next interval"
        numbers = [int((await group.send(at=master)).ext_fields["queueOffset"]) for _ in range(5)]
        assert numbers == list(range(10, 15))
        group.hosts[former].resume()
        number = str(int(former[1:]) + 1)
        await group.until(lambda: not group[former].ledger.member_state.is_leader)
        reply = await group.send(at=former)
        assert reply.code == 14 and reply.remark.startswith("NOT_LEADER")
        await registered(group, number, former)
        table = await group.table(former)
        assert (table["brokerId"], table["brokerRole"], table["takesWrites"]) == (number, "SLAVE", "false")
        await group.until(lambda: group[former].slave.synchronize.rounds_total > 0)

    ha(scenario, roles=THREE)


@pytest.mark.parametrize("seed", range(1, 4))
def test_switches_neither_lose_nor_duplicate_delayed_messages(ha: Any, seed: int) -> None:
    """rocketmq#1934."""

    async def scenario(group: Any) -> None:
        sent = []
        for turn in range(4):
            master = await group.master()
            for number in range(10):
                body = b"%d of %d" % (number, turn)
                if (await group.send(body, at=master, i="DELAY\x011\x02")).code == 0:
                    sent.append(body)
            await asyncio.sleep(0.3 * turn)
            group.kill(master)
            await group.start(master, "DLEDGER")
        await asyncio.sleep(5)
        found = await group.bodies(await group.master())
        assert sorted(found) == sorted(set(found)), "no message is delivered twice"
        assert set(sent) <= set(found)

    ha(scenario, FAST, roles=THREE, seed=seed)


class Producer:
    """A producer of transactions on the host `clients` that never decides them, and records the broker's checks."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.asked: list[tuple[float, bytes]] = []

    async def start(self) -> None:
        group = self._group
        runtime = group.hosts["clients"].runtime_for(group._process("clients"))

        async def check(message: ReceivedMessage) -> TransactionState:
            self.asked.append((group.loop.time(), message.body))
            return TransactionState.UNKNOWN

        async def begin() -> None:
            self.client = Client(
                [f"{group.hosts['ns1'].address}:9876"], runtime=runtime, client_id="p", timings=TIMINGS
            )
            self.producer = self.client.transaction_producer("p", check)

        await group.run("clients", begin)

    async def send(self, body: bytes) -> None:
        """Send a half message whose outcome the broker does not learn."""

        async def execute(receipt: Any) -> TransactionState:
            return TransactionState.UNKNOWN

        await self._group.run("clients", lambda: self.producer.send_in_transaction(NewMessage("t", body), execute))


@pytest.mark.mechanism("start/shutdownProcessorByHa")
def test_only_the_leader_checks_transactions(ha: Any) -> None:
    """A leader that was paused, and does not know yet that it was deposed, makes no checks."""

    async def scenario(group: Any) -> None:
        producer = Producer(group)
        await producer.start()
        former = await group.master()
        await producer.send(b"half")
        await asyncio.sleep(0.5)
        group.hosts[former].pause()
        others = [name for name in group.names if name != former]
        master = await group.master(*others)
        await asyncio.sleep(12)
        group.hosts[former].resume()
        await asyncio.sleep(5)
        totals = {name: group[name]._checks.checks_total for name in group.names}
        assert totals[master] > 0 and totals[former] == 0
        assert all(totals[name] == 0 for name in others if name != master)

    ha(scenario, "transactions.timeout_s=1", "transactions.check_interval_s=1", roles=THREE)


@pytest.mark.mechanism("Consumer offset may regress at switch")
@pytest.mark.parametrize("seed", range(1, 4))
def test_consumers_miss_no_message_over_switches_but_may_see_duplicates(ha: Any, seed: int) -> None:
    async def scenario(group: Any) -> None:
        got: list[bytes] = []
        runtime = group.hosts["clients"].runtime_for(group._process("clients"))

        async def handle(messages: Sequence[ReceivedMessage]) -> None:
            got.extend(message.body for message in messages)

        async def begin(number: int) -> Any:
            client = Client(
                [f"{group.hosts['ns1'].address}:9876"], runtime=runtime, client_id=f"c{number}", timings=TIMINGS
            )
            await client.push_consumer("g", handle, {"t": "*"}, start_from=StartFrom.FIRST).start()
            return client

        sent: list[bytes] = []
        for turn in range(4):
            client = await group.run("clients", lambda turn=turn: begin(turn))
            master = await group.master()
            for number in range(30):
                body = b"%d of %d" % (number, turn)
                if (await group.send(body, at=master)).code == 0:
                    sent.append(body)
            await asyncio.sleep(1.5)
            group.kill(master)
            await group.run("clients", client.close)
            await group.start(master, "DLEDGER")
        client = await group.run("clients", lambda: begin(9))
        await group.until(lambda: set(sent) <= set(got))
        broker = group[await group.master()]
        offset = broker.offsets.find("g", "t", 0)
        assert offset is None or offset <= broker.queues.find("t", 0).max_offset
        await group.run("clients", client.close)

    ha(scenario, FAST, roles=THREE, seed=seed)
