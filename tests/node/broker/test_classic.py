"""A broker with a log of its own instead of DLedger: the same behaviour, restarts, crashes, expiry, put statuses."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from node.broker import classic as classic_module
from node.broker import delay as delay_module
from node.broker import dispatcher as dispatcher_module
from node.broker import log_expiry as log_expiry_module
from node.broker import transactions as transactions_module
from node.broker.classic import ClassicStore
from node.broker.controller import BrokerController
from node.broker.dispatcher import Dispatcher
from node.config import parse_broker_config
from node.remoting import Command, RemotingClient
from node.store import commit_log as log_module
from node.store.record import decode_records

CONFIG = """
self_id = "n1"
listen = "127.0.0.1:0"
data_dir = "{data_dir}"
[classic]
[limits]
segment_size_bytes = 65536
max_message_size_bytes = 4096
queue_file_units = 50
index_slots = 31
[[topics]]
name = "t"
queues = 2
"""


class Case:
    def __init__(self, broker: BrokerController, client: RemotingClient, clock: Any) -> None:
        self.broker, self.client, self.clock = broker, client, clock

    async def ask(self, code: int, fields: dict[str, Any] | None = None, body: bytes = b"") -> Command:
        address = f"127.0.0.1:{self.broker.port}"
        return await self.client.invoke(address, Command.request(code, fields or {}, body), timeout_ms=5000)

    async def send(self, body: bytes, **fields: Any) -> Command:
        return await self.ask(310, {"b": "t", "e": 0, **fields}, body)

    async def bodies(self, offset: int = 0, queue_id: int = 0) -> list[bytes]:
        found: list[bytes] = []
        while True:
            reply = await self.ask(11, {"topic": "t", "queueId": queue_id, "queueOffset": offset + len(found)})
            if not reply.body:
                return found
            found += [message.body for message in decode_records(reply.body)]


@pytest.fixture
def run(helpers: Any, tmp_path: Path) -> Callable[..., None]:
    def runner(
        scenario: Callable[[Case], Coroutine[Any, Any, None]],
        *overrides: str,
        clock: Any = None,
        crash_into: Path | None = None,
    ) -> None:
        """`crash_into` gets a copy of the files as they are while the broker still runs."""

        async def main() -> None:
            config = parse_broker_config(CONFIG.format(data_dir=tmp_path / "data"), overrides)
            runtime = helpers.new_runtime(clock)
            broker, client = BrokerController(config, runtime), RemotingClient()
            await broker.start()
            try:
                await helpers.until(lambda: broker.store.is_master)
                await scenario(Case(broker, client, runtime.clock))
                if crash_into is not None:
                    shutil.copytree(tmp_path / "data", crash_into)
            finally:
                await client.close()
                await broker.stop()

        asyncio.run(main())

    return runner


SENT = [b"%d " % number + b"x" * (number * 37 % 3000) for number in range(120)]


async def fill(case: Case) -> None:
    for body in SENT:
        assert (await case.send(body, i="KEYS\x01k\x02")).code == 0


async def check_messages(case: Case) -> None:
    assert await case.bodies() == SENT
    reply = await case.ask(12, {"topic": "t", "key": "k", "maxNum": 3})
    assert [message.body for message in decode_records(reply.body)] == SENT[-3:]


@pytest.mark.mechanism("Orderly shutdown flush")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_all_messages_survive_an_orderly_restart(run: Any, tmp_path: Path, mode: str) -> None:
    run(fill, f"flush_mode={mode}")
    assert len(list((tmp_path / "data" / "commitlog").iterdir())) > 2
    run(check_messages, f"flush_mode={mode}")


async def fill_with_every_kind(case: Case) -> None:
    await fill(case)
    for number in range(60):
        fields = ({}, {"i": "DELAY\x0118\x02"}, {"f": 4, "i": "TRAN_MSG\x01true\x02PGROUP\x01g\x02"})[number % 3]
        assert (await case.send(b"m%d" % number, e=number % 2, **fields)).code == 0


def test_queues_rebuilt_in_batches_equal_those_rebuilt_one_by_one(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    run(fill_with_every_kind)
    alone: list[int] = []
    dispatch = Dispatcher._dispatch
    monkeypatch.setattr(
        Dispatcher, "_dispatch", lambda self, arrived: alone.append(self._mark.index) or dispatch(self, arrived)
    )

    def derived() -> dict[str, bytes]:
        for name in ("consumequeue", "consumequeue.crc", "index"):
            shutil.rmtree(data / name)
        (data / "consumequeue.checkpoint").unlink()
        alone.clear()
        run(look_at_the_beginning)
        files = [path for name in ("consumequeue", "consumequeue.crc", "index") for path in (data / name).rglob("*")]
        return {str(path.relative_to(data)): path.read_bytes() for path in files if path.is_file()}

    async def look_at_the_beginning(case: Case) -> None:
        assert (await case.bodies())[: len(SENT)] == SENT

    together = derived()
    count = len(alone)
    monkeypatch.setattr(ClassicStore, "read_committed", lambda self, first, last: [])
    assert derived() == together and len(alone) > len(SENT) + 60
    assert count < len(alone) / 2  # special messages are still dispatched singly


@pytest.mark.mechanism("CommitLog record (17 fields, §3)")
@pytest.mark.mechanism("StoreCheckpoint timestamps")
def test_all_acknowledged_messages_survive_a_crash(run: Any, tmp_path: Path) -> None:
    crashed = tmp_path / "crashed"
    run(fill, crash_into=crashed)
    shutil.rmtree(tmp_path / "data")
    crashed.rename(tmp_path / "data")

    async def after_crash(case: Case) -> None:
        await check_messages(case)
        assert (await case.send(b"next")).ext_fields["queueOffset"] == str(len(SENT))

    run(after_crash)


def test_deleted_queues_and_index_are_rebuilt_identically(run: Any, tmp_path: Path) -> None:
    data = tmp_path / "data"

    def derived() -> dict[str, bytes]:
        return {
            str(path): path.read_bytes()
            for root in ("consumequeue", "index")
            for path in sorted((data / root).rglob("*"))
            if path.is_file()
        }

    run(fill)
    before = derived()
    for root in ("consumequeue", "index"):
        shutil.rmtree(data / root)
    run(check_messages)
    assert derived() == before and before


def test_a_torn_tail_is_cut_off_the_log_and_the_queues(run: Any, tmp_path: Path) -> None:
    crashed = tmp_path / "crashed"
    run(fill, crash_into=crashed)
    last = max((crashed / "commitlog").iterdir())
    with last.open("r+b") as file:
        file.truncate(last.stat().st_size - 1)
    shutil.rmtree(tmp_path / "data")
    crashed.rename(tmp_path / "data")

    async def scenario(case: Case) -> None:
        assert await case.bodies() == SENT[:-1]
        assert (await case.send(b"again")).ext_fields["queueOffset"] == str(len(SENT) - 1)

    run(scenario)


@pytest.mark.mechanism("Sync flush GroupCommit: swapped queues, batch, two tries, 10 ms wait")
def test_a_send_whose_sync_stalls_gets_a_flush_timeout_with_all_reply_fields(run: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(log_module, "FLUSH_TIMEOUT_S", 0.05)

    async def scenario(case: Case) -> None:
        segments = case.broker.ledger.log._segments  # type: ignore[attr-defined]
        gate = asyncio.Event()
        append = segments.append

        async def stall(data: bytes, **options: Any) -> None:
            await gate.wait()
            await append(data, **options)

        monkeypatch.setattr(segments, "append", stall)
        reply = await case.send(b"late")
        assert (reply.code, reply.ext_fields["queueOffset"]) == (10, "0")
        assert len(reply.ext_fields["msgId"]) == 32
        quick = await case.send(b"does not wait", i="WAIT\x01false\x02")
        assert quick.code == 0
        gate.set()

    run(scenario)


@pytest.mark.mechanism("WAIT=false skips waiting")
def test_a_message_with_wait_false_is_answered_before_it_is_written(run: Any, monkeypatch: Any) -> None:
    async def scenario(case: Case) -> None:
        segments = case.broker.ledger.log._segments  # type: ignore[attr-defined]
        gate = asyncio.Event()
        append = segments.append

        async def stall(data: bytes, **options: Any) -> None:
            await gate.wait()
            await append(data, **options)

        monkeypatch.setattr(segments, "append", stall)
        assert (await case.send(b"x", i="WAIT\x01false\x02")).code == 0
        waiting = asyncio.ensure_future(case.send(b"y"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        gate.set()
        assert (await waiting).code == 0
        assert await case.bodies() == [b"x", b"y"]

    run(scenario)


EXPIRY_MECHANISM = "Expiry (3 days S1; 72 h, 04:00, R), no discard policy"


@pytest.mark.mechanism(EXPIRY_MECHANISM)
def test_old_files_are_removed_at_their_hour_and_readers_get_offset_moved(run: Any, helpers: Any) -> None:
    hour_ms = 3_600_000

    async def scenario(case: Case) -> None:
        case.clock.now_ms = 1000 * 24 * hour_ms + 3 * hour_ms
        await fill(case)
        ledger = case.broker.ledger
        case.clock.now_ms += hour_ms  # the right hour, but no file is old enough
        await ledger.expire()  # type: ignore[attr-defined]
        assert ledger.store.ledger_begin_index == 0
        case.clock.now_ms += 73 * hour_ms
        await ledger.expire()  # type: ignore[attr-defined]
        assert ledger.store.ledger_begin_index == 0, "old enough, but at another hour"
        case.clock.now_ms += 23 * hour_ms
        await ledger.expire()  # type: ignore[attr-defined]
        begin = ledger.store.ledger_begin_index
        assert begin > 0 and begin % 65536 == 0
        reply = await case.ask(11, {"topic": "t", "queueId": 0, "queueOffset": 0})
        low = int(reply.ext_fields["minOffset"])
        assert (reply.code, reply.ext_fields["nextBeginOffset"]) == (21, str(low)) and 0 < low < len(SENT)
        assert await case.bodies(low) == SENT[low:]
        assert (await case.ask(31, {"topic": "t", "queueId": 0})).ext_fields["offset"] == str(low)
        reply = await case.ask(14, {"consumerGroup": "g", "topic": "t", "queueId": 0})
        assert reply.code == 22

    async def after_a_restart(case: Case) -> None:
        low = int((await case.ask(31, {"topic": "t", "queueId": 0})).ext_fields["offset"])
        assert low > 0 and await case.bodies(low) == SENT[low:]

    run(scenario)
    run(after_a_restart)


@pytest.mark.mechanism(EXPIRY_MECHANISM)
def test_the_oldest_files_are_removed_from_a_crowded_disk_at_any_hour(run: Any) -> None:
    async def scenario(case: Case) -> None:
        await fill(case)
        ledger = case.broker.ledger
        await ledger.expire()  # type: ignore[attr-defined]
        left = ledger.store.ledger_end_index - ledger.store.ledger_begin_index
        assert ledger.store.ledger_begin_index > 0 and left <= 131_072

    run(scenario, "classic.disk_capacity_bytes=131072", "classic.disk_max_ratio_percent=75")


def test_a_checkpoint_on_a_bad_sector_falls_back_to_the_previous_one(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of another kind may be temporary, and is raised."""

    async def scenario(case: Case) -> None:
        ledger: Any = case.broker.ledger
        await fill(case)
        await ledger._write_position(1000, is_clean=False)
        await ledger._write_position(2000, is_clean=True)
        disk = ledger._runtime.disk
        read_file, error = disk.read_file, errno.EIO

        def fails(path: str) -> bytes:
            if path.endswith("checkpoint"):
                raise OSError(error, "no")
            content: bytes = read_file(path)
            return content

        monkeypatch.setattr(type(disk), "read_file", staticmethod(fails))
        assert ledger._read_checkpoint() == (1000, False)
        error = errno.EMFILE
        with pytest.raises(OSError, match="no"):
            ledger._read_checkpoint()
        monkeypatch.undo()

    run(scenario)


@pytest.mark.parametrize("rule", ["age", "crowded disk"])
def test_a_file_with_a_damaged_start_does_not_keep_older_files(run: Any, tmp_path: Path, rule: str) -> None:
    """A later file shows its minimum age; on a crowded disk age does not count."""

    async def scenario(case: Case) -> None:
        ledger = case.broker.ledger
        await fill(case)
        await fill(case)
        second = tmp_path / "data" / "commitlog" / f"{65536:020d}"
        second.write_bytes(bytes(100) + second.read_bytes()[100:])
        case.broker.ledger.log.recent.clear()  # type: ignore[attr-defined]
        if rule == "age":
            case.clock.now_ms += (100 * 24 - case.clock.now_ms // 3_600_000 % 24 + 4) * 3_600_000  # the right hour
        await ledger.expire()  # type: ignore[attr-defined]
        assert ledger.store.ledger_begin_index > 65536

    run(scenario, *(CROWDED if rule == "crowded disk" else ()))


def test_a_search_by_key_ignores_removed_messages(run: Any, tmp_path: Path) -> None:
    """The newest index file stays, though it refers to removed files of the log."""

    async def found(case: Case, key: str) -> list[bytes]:
        reply = await case.ask(12, {"topic": "t", "key": key, "maxNum": 64})
        assert reply.code == (0 if reply.body else 22), reply.remark
        return [message.body for message in decode_records(reply.body)]

    async def expire(case: Case) -> None:
        await case.send(b"gone", i="KEYS\x01rare one\x02")
        await fill(case)
        await case.send(b"left", i="KEYS\x01rare\x02")
        await case.broker.ledger.expire()  # type: ignore[attr-defined]
        await check_messages(case)

    async def check_messages(case: Case) -> None:
        assert case.broker.ledger.store.ledger_begin_index > 0
        assert (await found(case, "rare"), await found(case, "one")) == ([b"left"], [])

    run(expire, *CROWDED)
    run(check_messages, *CROWDED)


@pytest.mark.mechanism(EXPIRY_MECHANISM)
def test_queue_files_are_removed_with_the_log_files_that_they_point_into(
    run: Any, helpers: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """On a broker that gets no further message."""
    monkeypatch.setattr(dispatcher_module, "CHECKPOINT_INTERVAL_S", 0.01)

    async def scenario(case: Case) -> None:
        for _ in range(4):
            await fill(case)
        dispatcher = case.broker.dispatcher
        await helpers.until(lambda: dispatcher.checkpointed_index == dispatcher.dispatched_index)
        await case.broker.ledger.expire()  # type: ignore[attr-defined]
        queue = case.broker.queues.find("t", 0)
        assert queue is not None
        first = queue.min_offset // 50 * 50
        wanted = [f"{first * 20:020d}", f"{first * 4:020d}"]
        roots = [tmp_path / "data" / name / "t" / "0" for name in ("consumequeue", "consumequeue.crc")]
        assert first > 0
        await helpers.until(lambda: [min(path.name for path in root.iterdir()) for root in roots] == wanted)

    run(scenario, "classic.disk_capacity_bytes=131072", "classic.disk_max_ratio_percent=75")


def test_a_delayed_message_is_delivered_after_a_restart_without_dledger(
    run: Any, helpers: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(delay_module, "RECHECK_S", 0.005)

    async def first(case: Case) -> None:
        assert (await case.send(b"late", i="DELAY\x011\x02")).code == 0
        assert await case.bodies() == []

    async def second(case: Case) -> None:
        case.clock.now_ms += 1000
        await helpers.until(lambda: case.broker.delays.delivered_total == 1)
        await helpers.until(lambda: case.broker.queues.find("t", 0) is not None)
        assert await case.bodies() == [b"late"]

    run(first)
    run(second)


def test_a_delay_level_continues_after_many_of_its_messages_were_removed(
    run: Any, helpers: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(delay_module, "RECHECK_S", 0.005)
    monkeypatch.setattr(delay_module, "MAX_IN_FLIGHT", 10)

    async def scenario(case: Case) -> None:
        for _ in range(120):
            assert (await case.send(b"x" * 2000, i="DELAY\x0118\x02")).code == 0
        await case.broker.ledger.expire()
        waiting = case.broker.queues.find("SCHEDULE_TOPIC_XXXX", 17)
        assert waiting is not None and waiting.min_offset > 10
        case.clock.now_ms += 7_200_000
        await helpers.until(lambda: case.broker.delays.delivered_total == 120 - waiting.min_offset)

    run(scenario, "classic.disk_capacity_bytes=131072", "classic.disk_max_ratio_percent=75")


CROWDED = ("classic.disk_capacity_bytes=131072", "classic.disk_max_ratio_percent=75")


async def lose_queue_1(case: Case) -> None:
    """A group consumes a hundred messages, which are then removed with the oldest files."""
    for number in range(100):
        assert (await case.send(b"%d" % number, e=1)).code == 0
    consumed = {"consumerGroup": "g", "topic": "t", "queueId": 1, "commitOffset": 100}
    assert (await case.ask(15, consumed)).code == 0
    await fill(case)
    await case.broker.ledger.expire()
    queue = case.broker.queues.find("t", 1)
    assert queue is not None and (queue.min_offset, queue.max_offset) == (100, 100)


async def consume_new_messages(case: Case, first: int) -> None:
    """The group's offset and the next messages of the queue begin at `first`."""
    reply = await case.ask(14, {"consumerGroup": "g", "topic": "t", "queueId": 1})
    assert reply.ext_fields["offset"] == str(first)
    for number in range(3):
        reply = await case.send(b"new %d" % number, e=1)
        assert reply.ext_fields["queueOffset"] == str(first + number)
    assert await case.bodies(first, queue_id=1) == [b"new 0", b"new 1", b"new 2"]


@pytest.mark.parametrize("lost", ["checkpoint", "checkpoint and ends"])
def test_an_emptied_queue_without_its_checkpoint_keeps_the_end_from_the_table(
    run: Any, tmp_path: Path, lost: str
) -> None:
    """With the table damaged as well, it begins at 0 again."""

    async def second(case: Case) -> None:
        await consume_new_messages(case, 100 if lost == "checkpoint" else 0)

    async def third(case: Case) -> None:
        queue = case.broker.queues.find("t", 1)
        assert queue is not None and queue.max_offset == (103 if lost == "checkpoint" else 3)

    run(lose_queue_1, *CROWDED)
    (tmp_path / "data" / "consumequeue.checkpoint").unlink()
    if lost != "checkpoint":
        for name in ("queueEnds.json", "queueEnds.json.bak"):
            (tmp_path / "data" / name).write_bytes(b"{}?")
    run(second, *CROWDED)
    run(third, *CROWDED)


def test_a_group_offset_beyond_the_end_of_a_truncated_log_is_set_back(run: Any, tmp_path: Path) -> None:
    """An asynchronous flush and a power cut: the next messages get the queue offsets of the lost ones."""
    synced = 0

    async def first(case: Case) -> None:
        nonlocal synced
        for number in range(5):
            assert (await case.send(b"%d" % number, e=1)).code == 0
        await case.broker.ledger.log.sync()
        synced = case.broker.ledger.log.synced_position
        for number in range(5, 10):
            assert (await case.send(b"%d" % number, e=1)).code == 0
        assert (await case.ask(15, {"consumerGroup": "g", "topic": "t", "queueId": 1, "commitOffset": 10})).code == 0
        await case.broker.offsets.stop()  # written, as it is every few seconds

    async def second(case: Case) -> None:
        await consume_new_messages(case, 5)

    options = ("flush_mode=async", "flush_interval_ms=60000")
    run(first, *options, crash_into=tmp_path / "crash")
    shutil.rmtree(tmp_path / "data")
    shutil.copytree(tmp_path / "crash", tmp_path / "data")
    os.truncate(next((tmp_path / "data" / "commitlog").iterdir()), synced)
    run(second, *options)


HALF = {"f": 4, "i": "TRAN_MSG\x01true\x02PGROUP\x01p\x02"}


async def end_of(case: Case, body: bytes) -> dict[str, Any]:
    """Send a half message; returns the fields of its END, a commit."""
    reply = await case.send(body, **HALF)
    offset = int(reply.ext_fields["msgId"][-16:], 16)
    numbers = {"tranStateTableOffset": reply.ext_fields["queueOffset"], "commitLogOffset": offset}
    return {"producerGroup": "p", "commitOrRollback": 8, **numbers}


def test_a_retry_of_a_committed_message_ends_no_other_transaction(run: Any) -> None:
    """The retried copy gives 0 as its half message's position, where the log's first one lies."""

    async def scenario(case: Case) -> None:
        first, second = await end_of(case, b"first"), await end_of(case, b"second")
        assert first["commitLogOffset"] == 0
        assert (await case.ask(37, second)).code == 0
        (record,) = decode_records((await case.ask(11, {"topic": "t", "queueId": 0, "queueOffset": 0})).body)
        assert (await case.ask(36, {"offset": record.physical_offset, "group": "g", "delayLevel": 1})).code == 0
        assert (await case.ask(37, first)).code == 0
        assert await case.bodies() == [b"second", b"first"]

    run(scenario)


def test_a_failed_removal_of_index_files_is_logged_and_tried_again(
    run: Any, tmp_path: Path, helpers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(case: Case) -> None:
        ledger, disk = case.broker.ledger, case.broker._runtime.disk
        remove = disk.remove

        async def fails(path: str) -> None:
            if "/index/" in path:
                raise OSError(errno.EIO, "Input/output error", path)
            await remove(path)

        monkeypatch.setattr(disk, "remove", fails)
        await fill(case)
        await case.broker.dispatcher._checkpoint()
        first = min((tmp_path / "data" / "index").iterdir())
        await ledger.expire()  # type: ignore[attr-defined]
        await helpers.until(lambda: "old files of the index could not be removed: [Errno 5] Input" in caplog.text)
        assert first.exists()
        monkeypatch.setattr(disk, "remove", remove)
        await fill(case)
        await ledger.expire()  # type: ignore[attr-defined]
        await helpers.until(lambda: not first.exists())
        await asyncio.sleep(0)
        gc.collect()
        assert "never retrieved" not in caplog.text

    run(scenario, *CROWDED, "limits.index_entries=20")


def test_a_transaction_whose_half_message_was_removed_is_closed(
    run: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be ended, and would count towards the limit of open ones for ever."""
    monkeypatch.setattr(transactions_module, "RECHECK_S", 0.005)

    async def scenario(case: Case) -> None:
        end = await end_of(case, b"half")
        await fill(case)
        await case.broker.ledger.expire()  # type: ignore[attr-defined]
        assert case.broker.ledger.store.ledger_begin_index > 0
        case.clock.now_ms += 60_000
        await helpers.until(lambda: not case.broker.transactions.halves)
        assert (await case.ask(37, end)).code == 1

    run(scenario, "classic.disk_capacity_bytes=131072", "classic.disk_max_ratio_percent=75")


@pytest.mark.parametrize("until", ["second file", "dispatch"])
def test_queues_point_to_existing_files_when_not_all_old_files_can_be_removed(
    run: Any, monkeypatch: Any, until: str
) -> None:
    async def scenario(case: Case) -> None:
        await fill(case)
        ledger, disk, removed = case.broker.ledger, case.broker._runtime.disk, 0
        remove = disk.remove

        async def fails(path: str) -> None:
            nonlocal removed
            removed += "/commitlog/" in path
            if removed > 1:
                raise OSError(errno.EIO, "Input/output error", path)
            await remove(path)

        monkeypatch.setattr(disk, "remove", fails)
        if until == "dispatch":
            case.broker.dispatcher._mark = case.broker.dispatcher._mark._replace(index=70_000)
            await ledger.expire()
        else:
            with pytest.raises(OSError, match="Input/output error"):
                await ledger.expire()
        monkeypatch.setattr(disk, "remove", remove)
        assert ledger.store.ledger_begin_index == 65_536
        queue = case.broker.queues.find("t", 0)
        assert queue is not None
        assert queue.read(queue.min_offset, 1)[0].physical_offset >= 65_536

    run(scenario, "classic.disk_capacity_bytes=70000")


def test_pulls_during_a_removal_get_offset_moved_and_the_store_stays_intact(
    run: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    capacity = "classic.disk_capacity_bytes=70000"

    async def scenario(case: Case) -> None:
        await fill(case)
        disk, codes = case.broker._runtime.disk, []
        remove = disk.remove

        async def slow(path: str) -> None:
            is_log = "/commitlog/" in path
            for goes in (False, True) if is_log else (True,):
                if goes:
                    await remove(path)
                if is_log:
                    pulled = await case.ask(11, {"topic": "t", "queueId": 0, "queueOffset": 0})
                    by_key = await case.ask(12, {"topic": "t", "key": "k", "maxNum": 64})
                    codes.append((pulled.code, by_key.code))

        monkeypatch.setattr(disk, "remove", slow)
        await case.broker.ledger.expire()
        assert len(codes) >= 2 and set(codes) == {(21, 0)}

    async def again(case: Case) -> None:
        assert case.broker.queues.find("t", 0).min_offset > 0 and (await case.bodies(119)) == SENT[119:]

    run(scenario, capacity)
    assert (tmp_path / "data" / "consumequeue.checkpoint").exists()
    run(again, capacity)


def test_old_files_are_removed_periodically(run: Any, helpers: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(classic_module, "EXPIRY_CHECK_S", 0.01)

    async def scenario(case: Case) -> None:
        await fill(case)
        await helpers.until(lambda: case.broker.ledger.store.ledger_begin_index > 0)

    run(scenario, "classic.disk_capacity_bytes=70000")


@pytest.mark.mechanism("OS page cache busy")
def test_a_send_during_a_slow_write_gets_system_busy(run: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(log_module, "BUSY_S", 0.01)

    async def scenario(case: Case) -> None:
        log = case.broker.ledger.log  # type: ignore[attr-defined]
        monkeypatch.setattr(log, "_write_began_s", asyncio.get_running_loop().time() - 1)
        assert (await case.send(b"x")).code == 2
        assert await case.bodies() == []

    run(scenario)


@pytest.mark.mechanism("StoreCheckpoint timestamps")
def test_the_checkpoint_records_how_far_each_part_is_durable(run: Any, helpers: Any) -> None:
    """Checked before and after a sync of the log, and after a restart."""

    async def scenario(case: Case) -> None:
        log = case.broker.ledger.log  # type: ignore[attr-defined]
        for step in range(3):
            case.clock.now_ms += 1000
            assert (await case.send(b"%d" % step, i=f"KEYS\x01k{step}\x02" if step < 2 else "")).code == 0
            await helpers.until(lambda: case.broker.dispatcher.dispatched_index == log.committed_position - 1)
            if step == 0:
                await log.sync()
            assert await case.broker.dispatcher._checkpoint()
        first_ms = case.clock.now_ms - 2000
        assert case.broker.queues.timestamps.document() == {
            "physicMsgTimestamp": first_ms,
            "logicsMsgTimestamp": first_ms + 2000,
            "indexMsgTimestamp": first_ms + 1000,
        }
        table = json.loads((await case.ask(28)).body)["table"]
        assert (table["physicMsgTimestamp"], table["logicsMsgTimestamp"]) == (str(first_ms), str(first_ms + 2000))
        assert int(table["flushBehind"]) > 0

    async def again(case: Case) -> None:
        table = json.loads((await case.ask(28)).body)["table"]
        assert int(table["logicsMsgTimestamp"]) - int(table["indexMsgTimestamp"]) == 1000
        assert table["flushBehind"] == "0"

    run(scenario, "flush_mode=async", "flush_interval_ms=3600000")
    run(again)


def test_checkpoints_and_file_removal_continue_after_unexpected_errors(
    run: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(classic_module, "CHECKPOINT_INTERVAL_S", 0.02)
    monkeypatch.setattr(classic_module, "EXPIRY_CHECK_S", 0.02)

    async def scenario(case: Case) -> None:
        ledger: Any = case.broker.ledger
        for name in ("_write_checkpoint", "expire"):
            real, failures = getattr(ledger, name), iter([RuntimeError(f"an error of {name}")])

            async def fails_once(*args: Any, real: Any = real, failures: Any = failures, **named: Any) -> None:
                for failure in failures:
                    raise failure
                await real(*args, **named)

            monkeypatch.setattr(ledger, name, fails_once)
        begin = ledger._read_checkpoint()
        await fill(case)
        await helpers.until(lambda: ledger.log.begin_position > 0 and ledger._read_checkpoint() != begin)
        assert "an error of _write_checkpoint" in caplog.text and "an error of expire" in caplog.text

    run(scenario, "classic.disk_capacity_bytes=131072", "classic.disk_max_ratio_percent=75")


def test_file_removal_of_a_dledger_log_continues_after_an_unexpected_error(
    helpers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_expiry_module, "EXPIRY_CHECK_S", 0.01)
    checks = 0

    class NothingToRemove:
        begin_pos = 0

        def first_of_next_file(self) -> None:
            nonlocal checks
            checks += 1
            if checks == 1:
                raise RuntimeError("an error of its own")

    async def main() -> None:
        parts: Any = {name: None for name in ("snapshots", "dispatcher", "retention", "clock", "on_removed", "restate")}
        expiry = log_expiry_module.LogExpiry(store=NothingToRemove(), **parts)  # type: ignore[arg-type]
        expiry.start()
        await helpers.until(lambda: checks == 3)
        assert "an error of its own" in caplog.text
        await expiry.stop()

    asyncio.run(main())
