"""Logs that do not match: a slave reports it, and refuses or heals, however they diverged.

rocketmq#3388 (a slave outside the master's log silently gets nothing) and similar cases."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.ha.frames import Frame
from node.ha.replica import BeginsWithin, Diverged, Mismatch, Replica, StartsAt
from node.store.record import BLANK_MAGIC, decode_records
from node.store.record_batch import batch_of_one

HEAL = 'classic.ha_mismatch="heal"'
PLACE = {"topic": "t", "queueId": 0}
SEGMENT = 1000


class MemoryLog:
    """A log in memory: whole records, blanks at the ends of files."""

    def __init__(self, begin: int = 0) -> None:
        self.begin_position = begin
        self.data = b""
        self.starts: list[int] = []
        self.segment_size_bytes = SEGMENT

    @property
    def end_position(self) -> int:
        return self.begin_position + len(self.data)

    def put(self, body: bytes, store_timestamp_ms: int) -> None:
        """Append as a master. Two masters' records at one position differ at least in their store timestamps."""
        batch = batch_of_one(topic="t", queue_id=0, body=body)
        room = SEGMENT - self.end_position % SEGMENT
        if batch.sizes()[0] + 8 > room:
            self.append_copy(room.to_bytes(4, "big") + BLANK_MAGIC.to_bytes(4, "big") + bytes(room - 8))
        (record,) = batch.records((self.end_position,), queue_offset=0, store_timestamp_ms=store_timestamp_ms)
        self.append_copy(record)

    def append_copy(self, record: bytes) -> None:
        self.starts.append(self.end_position)
        self.data += record

    def read_range(self, position: int, size_bytes: int) -> bytes:
        size_bytes = min(size_bytes, SEGMENT - position % SEGMENT)
        return self.data[position - self.begin_position :][:size_bytes]

    def record_before(self, position: int) -> int:
        if position >= self.end_position:
            return self.end_position
        return max(start for start in self.starts if start <= position)

    def cut(self, position: int) -> None:
        if not self.begin_position < position <= self.end_position:
            self.begin_position, self.data, self.starts = position, b"", []
        self.data = self.data[: position - self.begin_position]
        self.starts = [start for start in self.starts if start < position]


def stream(master: MemoryLog, request: int, sizes: list[int]) -> list[Frame]:
    """What a master sends to a slave that requests `request`: frames of at most these sizes, then a heartbeat."""
    end = master.end_position
    at = request if request else max(master.begin_position, end - end % SEGMENT)
    if not master.begin_position <= at <= end:
        return [Frame(master.begin_position if at < master.begin_position else end, b"")]
    frames = []
    while at < end:
        body = master.read_range(at, sizes[len(frames) % len(sizes)])
        frames.append(Frame(at, body))
        at += len(body)
    return [*frames, Frame(at, b"")]


bodies = st.lists(st.binary(max_size=60) | st.just(b"same"), max_size=25)


@given(
    common=bodies, masters=bodies, slaves=bodies, expired=st.integers(0, 3),
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=4), compared=st.sampled_from([1, 40, 200, 5000]),
)  # fmt: skip
@settings(max_examples=200)
def test_a_healing_slave_ends_with_the_masters_log_and_drops_no_more_than_needed(
    common: list[bytes], masters: list[bytes], slaves: list[bytes], expired: int, sizes: list[int], compared: int
) -> None:
    master, slave = MemoryLog(), MemoryLog()
    for body in common:
        master.put(body, 1)
        slave.put(body, 1)
    for body in masters:
        master.put(body, 2)
    for body in slaves:
        slave.put(body, 3)
    same = 0
    while same < min(len(master.data), len(slave.data)) and master.data[same] == slave.data[same]:
        same += 1
    keep = max([start for start in [*slave.starts, slave.end_position] if start <= same], default=0)
    begin = min(expired * SEGMENT, master.end_position - master.end_position % SEGMENT)
    master.data, master.begin_position = master.data[begin:], begin
    lowest = slave.end_position
    compare_bytes, master_begin = compared, 0
    for _ in range(60):
        replica = Replica(slave, compare_bytes=compare_bytes, master_begin=master_begin)
        try:
            for frame in stream(master, replica.request_position, sizes):
                replica.receive(frame)
            break
        except StartsAt as error:
            slave.cut(error.position)
        except BeginsWithin as error:
            master_begin = error.position
            continue
        except Diverged as error:
            if not error.is_certain:
                compare_bytes *= 2
                continue
            compare_bytes = compared
            slave.cut(error.keep_position or 0)
        except Mismatch as error:
            slave.cut(error.keep_position or 0)
        lowest = min(lowest, slave.end_position)
    else:
        raise AssertionError("the slave never follows")
    assert replica.is_compared and slave.end_position == master.end_position
    from_position = max(slave.begin_position, master.begin_position)
    assert slave.data[from_position - slave.begin_position :] == master.data[from_position - master.begin_position :]
    if keep > begin:
        assert lowest >= keep and slave.begin_position == 0


def diverge(group: Any, slave_also: bool = True) -> Any:
    """The master loses in a power cut a tail that the slave has; with `slave_also` it then stores other messages."""

    async def run() -> tuple[list[bytes], list[bytes]]:
        kept = await group.fill(150)
        await group.following("n2")
        await asyncio.sleep(15)  # the thorough flush: these are on the master's disk
        while True:  # a power cut need not take what was not synced: until one does
            last = await group.fill(1, mark=b"lost ")
            await group.following("n2")
            group.power_fail("n1")
            await group.start("n1", "ASYNC_MASTER")
            if group.ledger("n1").log.end_position < group.ledger("n2").log.end_position:
                break
            kept += last
            await group.following("n2")
        more = await group.fill(20, mark=b"other ") if slave_also else []
        return kept, more

    return run()


LOSES = ("flush_mode=async", "flush_least_pages=100000", "slave_read_enable=true")


@pytest.mark.parametrize("slave_also", [False, True])
def test_a_slave_ahead_of_its_master_refuses_to_follow_and_reports_why(ha: Any, slave_also: bool) -> None:
    async def scenario(group: Any) -> None:
        await diverge(group, slave_also)
        held = group.content("n2")
        await group.until(lambda: group.ledger("n2").client.state == "REFUSING")
        trouble = (await group.table("n2"))["haTrouble"]
        assert ("differ at" if slave_also else "bytes that the master lacks") in trouble
        assert 'set ha_mismatch = "heal"' in group.lines("n2")
        await group.fill(20, mark=b"later ")
        await asyncio.sleep(30)
        assert group.content("n2") == held, "a refusing slave must not change its log"
        assert group.ledger("n2").client.state == "REFUSING"

    ha(scenario, *LOSES)


@pytest.mark.parametrize("before", ["n1", "both"])
def test_a_refusing_slave_keeps_its_own_tables(ha: Any, before: str) -> None:
    """A master restarts with an empty disk: the slave has the only messages, and the tables needed to read them."""
    topic = {"topic": "made", "defaultTopic": "TBW102", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    place = {"consumerGroup": "g", "topic": "made", "queueId": 0}

    async def scenario(group: Any) -> None:
        assert (await group.ask("n1", 17, topic)).code == 0
        bodies = [b"%d" % number for number in range(9)]
        for body in bodies:
            assert (await group.ask("n1", 310, {"b": "made", "e": 0}, body)).code == 0
        assert (await group.ask("n1", 15, {**place, "commitOffset": 7})).code == 0
        await group.following("n2")
        await asyncio.sleep(13)
        group.kill("n1")
        if before == "both":
            await group.stop("n2")
        await group.remove_files("n1", "/data")
        await group.start("n1", "ASYNC_MASTER")
        if before == "both":
            await group.start("n2", "SLAVE")
        await group.until(lambda: group.ledger("n2").client.state == "REFUSING")
        await asyncio.sleep(30)
        await group.stop("n1")
        await group.stop("n2")
        await group.start("n2", "ASYNC_MASTER")
        assert await group.bodies("n2", topic="made") == bodies
        assert (await group.ask("n2", 14, place)).ext_fields["offset"] == "7"

    ha(scenario)


@pytest.mark.parametrize("slave_also", [False, True])
def test_a_healing_slave_drops_what_the_master_lost(ha: Any, slave_also: bool) -> None:
    async def scenario(group: Any) -> None:
        kept, more = await diverge(group, slave_also)
        more += await group.fill(20, mark=b"later ")
        await group.following("n2")
        assert group.content("n1") == group.content("n2")
        assert await group.bodies("n2") == await group.bodies("n1") == kept + more
        assert int((await group.table("n2"))["haCutBytesTotal"]) > 0
        assert "giving up" in group.lines("n2")
        await group.stop("n2")
        await group.start("n2", "SLAVE")
        await group.following("n2")
        assert await group.bodies("n2") == kept + more

    ha(scenario, *LOSES, HEAL)


def test_a_slave_that_expired_files_numbers_queues_as_the_master_after_a_reset(ha: Any) -> None:
    """Its table holds the ends of its queues when its own files expired; the master's queues have grown since."""

    async def scenario(group: Any) -> None:
        bodies = await group.fill(500)
        await group.following("n2")
        await group.run("n2", group.ledger("n2").expire)
        assert group.ledger("n2").log.begin_position > 0
        await group.stop("n2")
        bodies += await group.fill(500)
        await group.run("n1", group.ledger("n1").expire)
        await group.start("n2", "SLAVE")
        await group.following("n2")
        bodies += await group.fill(5, mark=b"later ")
        await group.following("n2")
        low, high = [int((await group.ask("n2", code, PLACE)).ext_fields["offset"]) for code in (31, 30)]
        assert 500 < low < high == len(bodies)
        reply = await group.ask("n2", 11, PLACE | {"queueOffset": high - 5})
        assert [message.body for message in decode_records(reply.body)] == bodies[-5:]

    options = ("classic.disk_capacity_bytes=140000", "classic.disk_max_ratio_percent=75", "slave_read_enable=true")
    ha(scenario, *options, HEAL)


@pytest.mark.parametrize("heals", [False, True])
def test_a_slave_that_ends_before_the_masters_log_begins_refuses_or_starts_over(ha: Any, heals: bool) -> None:
    """The case of rocketmq#3388: the master removed what the slave needs next while the slave was away."""

    async def scenario(group: Any) -> None:
        bodies = await group.fill(30)
        await group.following("n2")
        await group.stop("n2")
        bodies += await group.fill(500)
        await group.run("n1", group.ledger("n1").expire)
        assert group.ledger("n1").log.begin_position > 0
        await group.start("n2", "SLAVE")
        if not heals:
            await group.until(lambda: group.ledger("n2").client.state == "REFUSING")
            assert "behind the end of this one" in (await group.table("n2"))["haTrouble"]
            assert "refused" in group.lines("n1")
            reply = await group.send(b"x")
            assert reply.code == 11, "a SYNC_MASTER reports it to the sender"
            return
        await group.following("n2")
        assert group.ledger("n2").log.begin_position > 0
        reply = await group.ask("n2", 11, {"topic": "t", "queueId": 0, "queueOffset": len(bodies) - 1})
        assert bodies[-1] in reply.body

    options = ("classic.disk_capacity_bytes=140000", "classic.disk_max_ratio_percent=75", "slave_read_enable=true")
    ha(scenario, *options, *([HEAL] if heals else []), roles=("SYNC_MASTER", "SLAVE"))


@pytest.mark.parametrize("heals", [False, True])
def test_a_slave_whose_log_begins_before_its_new_masters_follows_and_keeps_it(ha: Any, heals: bool) -> None:
    """Its comparison starts before the begin of the master's log; the common part is identical."""

    async def scenario(group: Any) -> None:
        bodies = await group.fill(160)
        await group.following("n2")
        await group.start("n3", "SLAVE")
        await group.following("n2", "n3")
        end = group.ledger("n2").log.end_position
        begin = group.ledger("n3").log.begin_position
        assert begin < end < begin + 32768
        await group.stop("n1")
        await group.stop("n3")
        await group.start("n3", "SYNC_MASTER")
        await group.until(lambda: group.ledger("n2").client.state in ("FOLLOWING", "REFUSING"))
        await group.following("n2")
        bodies += await group.fill(20, at="n3")
        await group.following("n2")
        assert group.ledger("n2").log.begin_position == 0 and await group.bodies("n2") == bodies
        assert "giving up" not in group.lines("n2")

    ha(scenario, "slave_read_enable=true", *([HEAL] if heals else []), size=3)


def test_a_former_master_that_heals_rejoins_as_a_slave(ha: Any) -> None:
    """It drops the messages that no slave had; both brokers end with the same log."""

    async def scenario(group: Any) -> None:
        bodies = await group.fill(100)
        await group.following("n2")
        await group.cut("n2")
        await group.fill(200, mark=b"only here ")
        group.kill("n1")
        await group.heal()
        await group.stop("n2")
        await group.start("n2", "ASYNC_MASTER")
        bodies += await group.fill(250, at="n2", mark=b"new ")
        await group.start("n1", "SLAVE", HEAL)
        await group.following("n1")
        assert group.content("n1") == group.content("n2")
        assert await group.bodies("n1") == bodies

    ha(scenario, "slave_read_enable=true")


def test_a_slave_with_an_unrelated_log_keeps_it_unless_it_may_heal(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.start("n2", "ASYNC_MASTER", "name_servers=[]")
        await group.fill(30, at="n2", mark=b"a ")
        await group.stop("n2")
        await group.start("n1", "ASYNC_MASTER")
        await group.fill(60, mark=b"b ")
        await group.start("n2", "SLAVE")
        await group.until(lambda: group.ledger("n2").client.state == "REFUSING")
        assert len(await group.bodies("n2")) == 30
        await group.stop("n2")
        await group.start("n2", "SLAVE", HEAL)
        await group.following("n2")
        assert await group.bodies("n2") == await group.bodies("n1")

    ha(scenario, "slave_read_enable=true", roles=())


def test_a_slave_continues_copying_after_an_unexpected_error(ha: Any) -> None:
    async def scenario(group: Any) -> None:
        await group.fill(3)
        await group.following("n2")
        client = group.ledger("n2").client
        for name in ("_cut", "_follow"):
            real, failures = getattr(client, name), iter([RuntimeError(f"an error of {name}")])

            async def fails_once(argument: int, real: Any = real, failures: Any = failures) -> Any:
                for failure in failures:
                    raise failure
                return await real(argument)

            setattr(client, name, fails_once)
        group.kill("n1")
        await group.remove_files("n1", "/data/")
        await group.start("n1", "ASYNC_MASTER")
        await group.fill(3)
        await group.following("n2")
        assert "an error of _cut" in group.lines("n2") and "an error of _follow" in group.lines("n2")

    ha(scenario, HEAL)


def test_a_slave_appends_nothing_after_a_cut_until_its_queues_are_discarded(ha: Any) -> None:
    """Once the log is as long as before, nothing would show that the queues belong to the old one."""

    async def scenario(group: Any) -> None:
        await group.fill(30)
        await group.following("n2")
        queues = group["n2"].dispatcher._queues
        real, failures = queues.discard, iter([OSError("the disk refuses")] * 3)

        async def discard() -> None:
            for failure in failures:
                assert group.ledger("n2").log.end_position == 0
                raise failure
            await real()

        queues.discard = discard
        group.kill("n1")
        await group.remove_files("n1", "/data/")
        await group.start("n1", "ASYNC_MASTER")
        bodies = await group.fill(50, mark=b"other ")
        await group.following("n2")
        assert await group.bodies("n2") == bodies

    ha(scenario, HEAL, "slave_read_enable=true")
