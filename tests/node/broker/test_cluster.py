"""Brokers with the real replicated log, in this process: send, read, restart, fail over."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from node.broker.controller import BrokerController
from node.config import parse_broker_config
from node.dledger import DLedgerCode, DLedgerError
from node.real_runtime import RealDisk, real_runtime
from node.remoting import Command, RemotingClient, RemotingError
from node.store.record import Message, decode_records
from tests.ports import free_ports

pytestmark = pytest.mark.cluster


class Group:
    """The brokers of one group, by id."""

    def __init__(self, directory: Path, *, nodes: int, until: Any, **settings: str | dict[str, int]) -> None:
        self._directory = directory
        self._until = until
        self._numbers = settings.pop("numbers", {})
        self._settings = {"timing": "fast", **settings}
        self.ids = [f"n{number}" for number in range(1, nodes + 1)]
        ports = free_ports(2 * nodes)
        self._listen = dict(zip(self.ids, ports[:nodes], strict=True))
        self._ledger = dict(zip(self.ids, ports[nodes:], strict=True))
        self.brokers: dict[str, BrokerController] = {}
        self._disks: dict[str, RealDisk] = {}
        self.client = RemotingClient()
        self.sent_again = 0
        """Sends repeated without an acknowledgement; the earlier message may be stored too."""

    def path(self, node: str) -> Path:
        """The data directory of a broker."""
        return self._directory / node

    def config(self, node: str) -> str:
        lines = [
            f'self_id = "{node}"',
            f'listen = "127.0.0.1:{self._listen[node]}"',
            f'data_dir = "{self._directory}/{node}"',
            *(f'{key} = "{value}"' for key, value in self._settings.items()),
            f'dledger.listen = "127.0.0.1:{self._ledger[node]}"',
            "limits.queue_file_units = 16",
            *(f"{key} = {value}" for key, value in self._numbers.items()),
            "[dledger.peers]",
            *(f'{other} = "127.0.0.1:{port}"' for other, port in self._ledger.items()),
            "[[topics]]",
            'name = "t"',
            "queues = 3",
        ]
        return "\n".join(lines)

    async def start(self, *nodes: str) -> None:
        for node in nodes or self.ids:
            runtime = real_runtime()
            assert isinstance(runtime.disk, RealDisk)
            self._disks[node] = runtime.disk
            self.brokers[node] = BrokerController(parse_broker_config(self.config(node)), runtime)
            await self.brokers[node].start()

    async def stop(self, *nodes: str) -> None:
        for node in nodes or list(self.brokers):
            await self.brokers.pop(node).stop()
            self._disks.pop(node).close()

    async def close(self) -> None:
        await self.client.close()
        await self.stop()

    async def master(self) -> str:
        await self._until(lambda: any(broker.store.is_master for broker in self.brokers.values()), timeout_s=20)
        return next(node for node, broker in self.brokers.items() if broker.store.is_master)

    async def ask(self, node: str, code: int, fields: dict[str, Any], body: bytes = b"") -> Command:
        address = f"127.0.0.1:{self._listen[node]}"
        return await self.client.invoke(address, Command.request(code, fields, body), timeout_ms=5000)

    async def send(self, body: bytes, *, queue_id: int = 0, timeout_s: float = 20) -> int:
        """Send to the current master until acknowledged; returns the queue offset."""
        async with asyncio.timeout(timeout_s):
            while True:
                node = await self.master()
                try:
                    reply = await self.ask(node, 310, {"b": "t", "e": queue_id}, body)
                except RemotingError:
                    self.sent_again += 1
                    continue
                if reply.code == 0:
                    return int(reply.ext_fields["queueOffset"])
                assert reply.code in (1, 14), reply
                self.sent_again += 1
                await asyncio.sleep(0.02)

    async def read_all(self, node: str, *, queue_id: int = 0) -> list[Message]:
        messages: list[Message] = []
        while True:
            reply = await self.ask(node, 11, {"topic": "t", "queueId": queue_id, "queueOffset": len(messages)})
            if reply.code == 19:
                assert int(reply.ext_fields["maxOffset"]) == len(messages)
                return messages
            assert reply.code == 0, reply
            messages += decode_records(reply.body)


@pytest.fixture
def run(tmp_path: Path, helpers: Any) -> Callable[..., None]:
    def runner(scenario: Callable[[Group], Awaitable[None]], *, nodes: int, **settings: Any) -> None:
        async def main() -> None:
            group = Group(tmp_path, nodes=nodes, until=helpers.until, **settings)
            await group.start()
            try:
                await asyncio.wait_for(scenario(group), 60)
            finally:
                await group.close()

        asyncio.run(main())

    return runner


def queue_files(directory: Path) -> dict[str, bytes]:
    found = {}
    for path, _, names in os.walk(directory / "consumequeue"):
        for name in names:
            full = Path(path) / name
            found[str(full.relative_to(directory))] = full.read_bytes()
    return found


def test_a_single_broker_keeps_all_messages_across_orderly_restarts(run: Any) -> None:
    async def scenario(group: Group) -> None:
        for turn in range(3):
            for number in range(20):
                assert await group.send(b"%d-%d" % (turn, number)) == turn * 20 + number
            await group.stop()
            await group.start()
        node = await group.master()
        messages = await group.read_all(node)
        assert [message.body for message in messages] == [
            b"%d-%d" % (turn, number) for turn in range(3) for number in range(20)
        ]
        assert [message.queue_offset for message in messages] == list(range(60))

    run(scenario, nodes=1)


@pytest.mark.parametrize("read_mode", ["read_index", "lease", "log", "unsafe"])
def test_the_leader_serves_a_message_as_soon_as_it_is_acknowledged(run: Any, read_mode: str) -> None:
    async def scenario(group: Group) -> None:
        node = await group.master()
        for number in range(20):
            offset = await group.send(b"%d" % number)
            assert (await group.read_all(node))[offset].body == b"%d" % number

    run(scenario, nodes=3, read_mode=read_mode)


def test_followers_refuse_clients_and_have_the_same_queue_files(run: Any, tmp_path: Path, helpers: Any) -> None:
    async def scenario(group: Group) -> None:
        for number in range(60):
            await group.send(b"x" * number, queue_id=number % 3)
        master = await group.master()
        for node in group.ids:
            if node != master:
                for code in (11, 30, 310):
                    fields = {"topic": "t", "b": "t", "e": 0, "queueId": 0, "queueOffset": 0}
                    reply = await group.ask(node, code, fields)
                    assert (reply.code, reply.remark) == (14, f"NOT_LEADER leader={master} addr=-")
        last = group.brokers[master].ledger.store.committed_index
        await helpers.until(lambda: all(b.dispatcher.dispatched_index >= last for b in group.brokers.values()))
        await group.stop()
        files = [queue_files(tmp_path / node) for node in group.ids]
        assert files[0] == files[1] == files[2]
        assert 60 * 20 <= sum(map(len, files[0].values())) <= (60 + group.sent_again) * 20

    run(scenario, nodes=3)


def test_no_acknowledged_message_is_lost_when_masters_change(run: Any) -> None:
    async def scenario(group: Group) -> None:
        acknowledged: dict[int, bytes] = {}
        for turn in range(4):
            for number in range(15):
                body = b"%d-%d" % (turn, number)
                offset = await group.send(body)
                assert offset not in acknowledged
                acknowledged[offset] = body
            gone = await group.master()
            await group.stop(gone)
            acknowledged[await group.send(b"without " + gone.encode())] = b"without " + gone.encode()
            await group.start(gone)
        messages = await group.read_all(await group.master())
        assert {offset: messages[offset].body for offset in acknowledged} == acknowledged
        assert [message.queue_offset for message in messages] == list(range(len(messages)))
        stamps = [message.store_timestamp_ms for message in messages]
        assert stamps == sorted(stamps)

    run(scenario, nodes=3)


def test_a_minority_neither_acknowledges_nor_reads(run: Any) -> None:
    async def scenario(group: Group) -> None:
        await group.send(b"before")
        master = await group.master()
        await group.stop(*[node for node in group.ids if node != master])
        sent = await group.ask(master, 310, {"b": "t", "e": 0}, b"alone")
        assert sent.code in (1, 14)
        read = await group.ask(master, 11, {"topic": "t", "queueId": 0, "queueOffset": 0})
        assert read.code in (1, 14) and not read.body

    run(scenario, nodes=3)


def test_the_status_reports_the_leader_and_the_term(run: Any, helpers: Any) -> None:
    async def scenario(group: Group) -> None:
        master = await group.master()
        await group.send(b"x")
        # Two of three acknowledge it; the third may not have heard of the term yet.
        last = group.brokers[master].ledger.store.committed_index
        await helpers.until(lambda: all(b.dispatcher.dispatched_index >= last for b in group.brokers.values()))
        tables = {node: json.loads((await group.ask(node, 28, {})).body)["table"] for node in group.ids}
        assert [node for node, table in tables.items() if table["role"] == "LEADER"] == [master]
        assert tables[master]["brokerRole"] == "SYNC_MASTER"
        assert {table["term"] for table in tables.values()} == {tables[master]["term"]}

    run(scenario, nodes=3)


SMALL_LOG = {
    "dledger.disk_capacity_bytes": 120_000,
    "dledger.disk_max_ratio_percent": 50,
    "limits.segment_size_bytes": 65_536,
    "limits.max_message_size_bytes": 20_000,
}


async def transfer_lead(group: Group, member: str) -> None:
    """Make a member the leader. A leader transfers once it has heard from the member and knows its log; a member that
    does not take over in time leaves the group to an election. Both happen when the machine stalls."""
    expected = (DLedgerCode.NETWORK_ERROR, DLedgerCode.FALL_BEHIND_TOO_MUCH, DLedgerCode.TAKE_LEADERSHIP_FAILED)
    async with asyncio.timeout(20):
        while (leader := await group.master()) != member:
            try:
                await group.brokers[leader].ledger.transfer_leadership(member)
            except DLedgerError as error:
                if error.code not in expected:
                    raise
                await asyncio.sleep(0.05)


@pytest.mark.mechanism("Expiry (3 days S1; 72 h, 04:00, R), no discard policy")
def test_a_member_that_was_away_begins_after_the_removed_files_and_can_lead(run: Any, helpers: Any) -> None:
    async def scenario(group: Group) -> None:
        master = await group.master()
        away = next(node for node in group.ids if node != master)
        bodies = [b"%03d" % number + b"x" * 4000 for number in range(66)]  # the last of them in a fifth file
        for body in bodies[:3]:
            await group.send(body)
        await group.stop(away)
        for body in bodies[3:]:
            await group.send(body)
        for broker in group.brokers.values():
            await helpers.until(lambda broker=broker: broker.dispatcher.dispatched_index >= len(bodies))
            await broker.expiry.expire()
            assert broker.ledger.store.ledger_begin_index == 0, "the dispatch checkpoint does not cover it yet"
            await broker.dispatcher._checkpoint()
            await broker.expiry.expire()
            assert broker.ledger.store.ledger_begin_index > 30
        low = int((await group.ask(master, 31, {"topic": "t", "queueId": 0})).ext_fields["offset"])
        assert 30 < low < len(bodies)
        reply = await group.ask(master, 11, {"topic": "t", "queueId": 0, "queueOffset": 5})
        assert (reply.code, int(reply.ext_fields["nextBeginOffset"])) == (21, low)

        await group.start(away)
        last = group.brokers[master].ledger.store.committed_index
        await helpers.until(lambda: group.brokers[away].dispatcher.dispatched_index >= last)
        assert group.brokers[away].ledger.store.ledger_begin_index > 30
        assert group.brokers[away].dispatcher.failure is None
        for node in group.ids:
            if node != away:
                await group.stop(node)
                await group.start(node)
        await transfer_lead(group, away)
        await group.send(b"the last")
        offset, found = low, []
        while True:
            reply = await group.ask(away, 11, {"topic": "t", "queueId": 0, "queueOffset": offset})
            if reply.code != 0:
                break
            found += [message.body for message in decode_records(reply.body)]
            offset = int(reply.ext_fields["nextBeginOffset"])
        assert found == [*bodies[low:], b"the last"]

    run(scenario, nodes=3, numbers=SMALL_LOG)


def test_the_membership_entry_outlives_the_file_that_holds_it(run: Any, helpers: Any) -> None:
    async def scenario(group: Group) -> None:
        broker = group.brokers[await group.master()]
        await broker.ledger.members.restate()
        members = broker.ledger.store.members
        first = members.index
        for number in range(40):
            await group.send(b"%03d" % number + b"x" * 4000)
        await helpers.until(lambda: broker.dispatcher.dispatched_index >= 40)
        await broker.dispatcher._checkpoint()
        await broker.expiry.expire()
        assert broker.ledger.store.ledger_begin_index == 0 and members.index > first
        await helpers.until(lambda: broker.dispatcher.dispatched_index >= members.index)
        await broker.dispatcher._checkpoint()
        await broker.expiry.expire()
        assert broker.ledger.store.ledger_begin_index > first
        await group.stop()
        await group.start()
        again = group.brokers[await group.master()].ledger.store.members
        assert (again.ids, again.index > first) == (("n1",), True)

    run(scenario, nodes=1, numbers=SMALL_LOG)


def test_a_replicated_file_with_a_damaged_start_does_not_keep_older_files(run: Any, helpers: Any) -> None:
    """The age of a damaged message is that of the next one, which is no older."""

    async def scenario(group: Group) -> None:
        for number in range(60):
            await group.send(b"%03d" % number + b"x" * 4000)
        broker = group.brokers["n1"]
        await helpers.until(lambda: broker.dispatcher.dispatched_index >= 60)
        second = group.path("n1") / "dledger/data" / f"{65536:020d}"
        second.write_bytes(bytes(100) + second.read_bytes()[100:])
        store = broker.ledger.store
        store._tail_cache.trim(0, store.written_index)
        damaged = next(index for index in range(60) if store.term_at(index) >= 0 and reads_as_damaged(store, index))
        stored_ms = broker.expiry._stored_ms(damaged)
        assert stored_ms is not None and stored_ms == broker.expiry._stored_ms(damaged + 1)
        assert await expire(broker) > damaged

    run(scenario, nodes=1, numbers=SMALL_LOG)


def reads_as_damaged(store: Any, index: int) -> bool:
    try:
        store.get(index)
    except OSError:
        return True
    return False


async def expire(broker: BrokerController) -> int:
    """Have a broker write its checkpoint and remove old log files; returns where the log begins then."""
    await broker.dispatcher._checkpoint()
    assert broker.expiry is not None
    await broker.expiry.expire()
    return broker.ledger.store.ledger_begin_index


async def make_leader(group: Group, node: str) -> None:
    """Transfer the lead to `node`, repeatedly if need be: on a busy machine others may be elected meanwhile."""
    while (leader := await group.master()) != node:
        try:
            await group.brokers[leader].ledger.transfer_leadership(node)  # type: ignore[attr-defined]
        except DLedgerError:
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("how", ["left behind", "new", "lost its queues"])
def test_a_member_restores_from_a_snapshot_what_the_log_has_lost(run: Any, helpers: Any, how: str) -> None:
    """Offsets of emptied queues, delivered delayed messages, open transactions and the tables: a member that cannot
    derive them from the log has them, also when it leads."""

    async def scenario(group: Group) -> None:
        master = await group.master()
        other = next(node for node in group.ids if node != master)
        for number in range(5):
            assert await group.send(b"early %d" % number, queue_id=1) == number
        half = {"b": "t", "e": 1, "i": "TRAN_MSG\x01true\x02PGROUP\x01p\x02UNIQ_KEY\x01k\x02", "f": 4}
        assert (await group.ask(master, 310, half, b"half")).code == 0
        assert (await group.ask(master, 310, {"b": "t", "e": 2, "i": "DELAY\x011\x02"}, b"delayed")).code == 0
        await helpers.until(lambda: group.brokers[master].delay_progress.delivered[1] == 1, timeout_s=10)
        fields = {"consumerGroup": "g", "topic": "t", "queueId": 1, "commitOffset": 3}
        assert (await group.ask(master, 15, fields)).code == 0
        made = {"topic": "made", "readQueueNums": 2, "writeQueueNums": 2, "perm": 6}
        assert (await group.ask(master, 17, made)).code == 0
        last = group.brokers[master].ledger.store.committed_index
        await helpers.until(lambda: group.brokers[other].dispatcher.dispatched_index >= last)
        if how != "lost its queues":
            await group.stop(other)
        for number in range(60):
            await group.send(b"%03d" % number + b"x" * 4000)
        for broker in group.brokers.values():
            await helpers.until(lambda broker=broker: broker.dispatcher.dispatched_index >= last + 60)
            assert await expire(broker) > last
        if how == "lost its queues":
            await group.stop(other)
            (group.path(other) / "consumequeue.checkpoint").unlink()
        for name in ("topics.json", "consumerOffset.json"):
            for path in group.path(other).glob(f"{name}*"):
                path.unlink()
        if how == "new":
            shutil.rmtree(group.path(other) / "dledger")
        await group.start(other)
        broker = group.brokers[other]
        end = group.brokers[master].ledger.store.committed_index
        await helpers.until(lambda: broker.dispatcher.dispatched_index >= end)
        assert broker.ledger.store.ledger_begin_index > last and broker.dispatcher.failure is None
        assert broker.snapshots.index >= broker.ledger.store.ledger_begin_index - 1
        assert broker.delay_progress.delivered[1] == 1 and len(broker.transactions.halves) == 1
        queue = broker.queues.find("t", 1)
        assert queue is not None and (queue.min_offset, queue.max_offset) == (5, 5)
        if how != "lost its queues":  # then the snapshot is its own, with its own tables only
            await helpers.until(lambda: broker.topics.get("made") is not None)
            assert broker.offsets.find("g", "t", 1) == 3
        await broker.dispatcher._checkpoint()
        await group.stop(other)  # and once more from its own disk
        await group.start(other)
        await make_leader(group, other)
        assert await group.send(b"goes on", queue_id=1) == 5
        assert await group.send(b"and here") == 60
        for node in group.ids:
            await helpers.until(lambda node=node: group.brokers[node].queues.find("t", 1).max_offset == 6)
        low = int((await group.ask(other, 31, {"topic": "t", "queueId": 0})).ext_fields["offset"])
        reply = await group.ask(other, 11, {"topic": "t", "queueId": 0, "queueOffset": low})
        assert reply.code == 0 and decode_records(reply.body)[0].body[:3] == b"%03d" % low

    # The leader must not change: with the fast timing, half a second of a busy machine would change it.
    run(scenario, nodes=3, numbers=SMALL_LOG, timing="default")


def test_log_files_are_kept_if_no_snapshot_can_be_written(run: Any, helpers: Any) -> None:
    async def scenario(group: Group) -> None:
        master = await group.master()
        broker = group.brokers[master]
        for number in range(60):
            await group.send(b"%03d" % number + b"x" * 4000)
        await helpers.until(lambda: broker.dispatcher.dispatched_index >= 60)
        saves = broker.ledger.snapshots.files.save

        async def fails(*_: Any) -> None:
            raise OSError("no room")

        broker.ledger.snapshots.files.save = fails
        with pytest.raises(OSError, match="no room"):
            await expire(broker)
        assert broker.ledger.store.ledger_begin_index == 0
        broker.ledger.snapshots.files.save = saves
        assert await expire(broker) > 30

    run(scenario, nodes=1, numbers=SMALL_LOG)
