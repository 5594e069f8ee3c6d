"""POP consumption, on a whole broker with a fake log; across restarts in `test_virtual_time.py`."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
from typing import Any, NamedTuple

import pytest

from node.broker import due_queue, pop, pop_acks, pop_checkpoints, pop_order, pop_revive, pull
from node.broker.internal_topics import REVIVE_PREFIX, check_stored_topic
from node.broker.ledger import DLedgerCode, Role
from node.broker.pop_checkpoints import Handle
from node.client import BrokerClient, NotLeader
from node.remoting import Command, ResponseCode
from node.store.record import Message, decode_records

POP, ACK, BATCH_ACK, CHANGE = 200050, 200051, 200151, 200053
ASKED = {
    "consumerGroup": "g", "topic": "t", "queueId": -1, "maxMsgNums": 32, "invisibleTime": 60_000, "pollTime": 0,
    "bornTime": 0, "initMode": 0,
}  # fmt: skip
REVIVE_TOPIC = "rmq_sys_REVIVE_LOG_splitbrain"


class ManualLoopTime:
    """The loop's time as the broker sees it, set by hand."""

    now_ms = 0


@pytest.fixture
def loop_time(monkeypatch: pytest.MonkeyPatch) -> ManualLoopTime:
    """Set the loop's time by hand; timers check it every few milliseconds."""
    time = ManualLoopTime()
    for module in (pop, pop_acks, pop_revive):
        monkeypatch.setattr(module, "loop_ms", lambda: time.now_ms)
    monkeypatch.setattr(due_queue, "RECHECK_MS", 5)
    monkeypatch.setattr(pop, "HOLD_RECHECK_S", 0.005)
    return time


class Got(NamedTuple):
    """A popped message, and the handle that a client makes from the reply (R: MQClientAPIImpl.processPopResponse)."""

    body: bytes
    message: Message
    extra: str

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "topic": self.message.topic, "queueId": self.message.queue_id, "offset": self.message.queue_offset,
            "extraInfo": self.extra, "consumerGroup": "g",
        }  # fmt: skip


def handles(reply: Command) -> list[Got]:
    starts = {}
    for part in filter(None, reply.get_str("startOffsetInfo").split(";")):
        mark, queue_id, offset = part.split(" ")
        starts[mark, int(queue_id)] = offset
    offsets_of = {}
    for part in filter(None, reply.get_str("msgOffsetInfo").split(";")):
        mark, queue_id, offsets = part.split(" ")
        offsets_of[mark, int(queue_id)] = [int(offset) for offset in offsets.split(",")]
    got = []
    for message in decode_records(reply.body):
        place = ("1" if message.topic.startswith("%RETRY%") else "0", message.queue_id)
        assert message.queue_offset in offsets_of[place]
        parts = (starts[place], reply.get_str("popTime"), reply.get_str("invisibleTime"), reply.get_str("reviveQid"))
        got.append(Got(message.body, message, " ".join((*parts, place[0], "b", str(place[1]), "0"))))
    return got


async def popped(
    case: Any, count: int = 32, *, invisible_ms: int = 60_000, poll_ms: int = 0, **fields: Any
) -> list[Got]:
    given = {"maxMsgNums": count, "invisibleTime": invisible_ms, "pollTime": poll_ms, "initMode": 1, **fields}
    reply = await case.ask(POP, ASKED | given)
    assert reply.code in (0, 210), reply
    assert bool(reply.body) is (reply.code == 0)
    return handles(reply)


def bodies(got: list[Got]) -> list[bytes]:
    return sorted(each.body for each in got)


async def ack(case: Any, got: Got) -> None:
    assert (await case.ask(ACK, got.fields)).code == 0


async def fill(case: Any, *sent: bytes) -> None:
    for number, body in enumerate(sent):
        assert (await case.send(body, queue_id=number % 2)).code == 0


async def redelivered(case: Any, count: int, **options: Any) -> list[Got]:
    """Pop until `count` messages are redelivered."""
    got: list[Got] = []
    deadline = asyncio.get_running_loop().time() + 5
    while len(got) < count:
        assert asyncio.get_running_loop().time() < deadline, got
        got += await popped(case, poll_ms=200, **options)
    return got


def test_each_message_is_popped_once_and_can_be_acknowledged(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        await fill(case, *(b"%d" % number for number in range(10)))
        first = await popped(case, 4)
        rest = await popped(case)
        assert len(first) == 4 and bodies(first + rest) == sorted(b"%d" % number for number in range(10))
        assert await popped(case) == [] and len(await popped(case, consumerGroup="other")) == 10
        assert (await case.table())["openPopMessages"] == "20"
        for each in first + rest:
            await ack(case, each)
            await ack(case, each)  # repeating it is no error
        assert (await case.table())["openPopMessages"] == "10"
        offsets = [await case.ask(14, {"consumerGroup": "g", "topic": "t", "queueId": queue}) for queue in (0, 1)]
        assert [reply.get_int("offset") for reply in offsets] == [5, 5]

    run_case(scenario)


def test_an_unacknowledged_message_is_redelivered_and_finally_dead_lettered(
    run_case: Any, loop_time: ManualLoopTime
) -> None:
    async def scenario(case: Any) -> None:
        group = {"groupName": "g", "retryQueueNums": 1, "retryMaxTimes": 2, "consumeEnable": True}
        assert (await case.ask(200, body=json.dumps(group).encode())).code == 0
        await case.ask(310, {"b": "t", "e": 1, "i": "TAGS\x01a\x02KEYS\x01k\x02"}, b"poison")
        (got,) = await popped(case, invisible_ms=1000)
        for tries in (1, 2):
            loop_time.now_ms += 999
            assert await popped(case, poll_ms=20) == [], "early"
            loop_time.now_ms += 1
            (got,) = await redelivered(case, 1, invisible_ms=1000)
            assert (got.message.topic, got.message.reconsume_times) == ("%RETRY%g_t", tries)
            assert (got.message.tags, got.message.properties["RETRY_TOPIC"]) == ("a", "t")
        loop_time.now_ms += 1000
        deadline = asyncio.get_running_loop().time() + 5
        while not (dead := await case.pull(0, topic="%DLQ%g", queue_id=0)).body:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)
        (message,) = decode_records(dead.body)
        assert (message.body, message.reconsume_times, message.properties["KEYS"]) == (b"poison", 3, "k")
        assert await popped(case) == [] and (await case.table())["openPopMessages"] == "0"
        await ack(case, got)  # too late

    run_case(scenario)


def test_a_message_without_room_for_more_properties_is_redelivered_with_its_own(
    run_case: Any, loop_time: ManualLoopTime
) -> None:
    """Redelivery adds two properties, for origin and time; a record holds 32,767 bytes of properties at most."""

    async def scenario(case: Any) -> None:
        properties = "k\x01" + "v" * (32767 - 2)
        assert (await case.ask(310, {"b": "t", "e": 0, "i": properties}, b"x")).code == 0
        (got,) = await popped(case, invisible_ms=1000)
        assert got.message.properties.keys() == {"k"}
        loop_time.now_ms += 1000
        (back,) = await redelivered(case, 1)
        assert back.body == b"x" and back.message.topic == "%RETRY%g_t" and back.message.reconsume_times == 1
        assert back.message.properties == got.message.properties
        await ack(case, back)
        assert (await case.table())["openPopMessages"] == "0"

    run_case(scenario)


def test_only_the_unacknowledged_messages_of_a_checkpoint_are_redelivered(
    run_case: Any, loop_time: ManualLoopTime
) -> None:
    async def scenario(case: Any) -> None:
        await fill(case, *(b"%d" % number for number in range(6)))
        for each in await popped(case, invisible_ms=100):
            if each.body in b"024":
                await ack(case, each)
        loop_time.now_ms += 100
        assert bodies(await redelivered(case, 3)) == [b"1", b"3", b"5"]
        assert await popped(case, poll_ms=20) == []

    run_case(scenario)


def test_a_batch_acknowledges_several_messages_by_bitmap(run_case: Any, loop_time: ManualLoopTime) -> None:
    async def scenario(case: Any) -> None:
        for number in range(12):
            await case.send(b"%d" % number)
        got = await popped(case, queueId=0, invisible_ms=150)
        handle = Handle.of(got[0].extra)
        content = {"c": "g", "t": "t", "r": "0", "so": handle.start_offset, "q": 0, "rq": 0, "pt": handle.pop_time_ms}
        content |= {"it": 150, "b": base64.b64encode(bytes([0b00001001, 0b10])).decode()}  # 0, 3 and 9
        body = json.dumps({"brokerName": "b", "acks": [content]}).encode()
        assert (await case.ask(BATCH_ACK, body=body)).code == 0
        assert (await case.table())["openPopMessages"] == "9"
        loop_time.now_ms += 150
        assert bodies(await redelivered(case, 9)) == sorted(b"%d" % number for number in (1, 2, 4, 5, 6, 7, 8, 10, 11))
        for damaged in (
            b"",
            b"{}",
            b'{"acks":[{}]}',
            b'{"acks":3}',
            body.replace(b'"CQI="', b'"!"'),
            body.replace(b'"so": 0', b'"so": 1e999'),
        ):
            assert (await case.ask(BATCH_ACK, body=damaged)).code == 13
        assert (await case.ask(BATCH_ACK, body=b'{"acks":[]}')).code == 208

    run_case(scenario)


def test_a_batch_of_acknowledgements_is_bounded(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        await case.send(b"x")
        (got,) = await popped(case)
        handle = Handle.of(got.extra)
        content = {"c": "g", "t": "t", "so": 0, "q": got.message.queue_id, "rq": 0, "pt": handle.pop_time_ms}
        many = content | {"b": base64.b64encode(b"\xff" * 1024).decode()}  # of a checkpoint, which has at most 32
        assert (await case.ask(BATCH_ACK, body=json.dumps({"acks": [many]}).encode())).code == 13
        body = json.dumps({"acks": ["not looked at"] * (pop_acks.MAX_ACKS + 1)}).encode()
        assert (await case.ask(BATCH_ACK, body=body)).code == 208
        assert (await case.table())["openPopMessages"] == "1"
        far = content | {"b": base64.b64encode(b"\1" + bytes(1023) + b"\xff" * 8).decode()}
        assert (await case.ask(BATCH_ACK, body=json.dumps({"acks": [far]}).encode())).code == 0
        assert (await case.table())["openPopMessages"] == "0"

    run_case(scenario)


def test_changing_the_invisible_time_makes_a_new_handle_and_spends_the_old_one(
    run_case: Any, loop_time: ManualLoopTime
) -> None:
    async def scenario(case: Any) -> None:
        await fill(case, b"sooner", b"later")
        by_body = {each.body: each for each in await popped(case, invisible_ms=400)}
        for body, invisible_ms in ((b"sooner", 0), (b"later", 60_000)):
            reply = await case.ask(CHANGE, {**by_body[body].fields, "invisibleTime": invisible_ms})
            assert (reply.code, reply.get_int("invisibleTime"), reply.get_int("reviveQid")) == (0, invisible_ms, 0)
            old = by_body[body]
            parts = (str(old.message.queue_offset), reply.get_str("popTime"), str(invisible_ms))
            by_body[body] = old._replace(extra=" ".join((*parts, *old.extra.split(" ")[3:])))
            assert (await case.ask(CHANGE, {**old.fields, "invisibleTime": 5})).code == 208, "the old handle is spent"
        assert bodies(await redelivered(case, 1)) == [b"sooner"]
        loop_time.now_ms += 59_999
        assert await popped(case, poll_ms=20) == [], "the longer time has replaced the first one"
        await ack(case, by_body[b"later"])
        assert (await case.table())["openPopMessages"] == "1", "the redelivered message, under its own handle"

    run_case(scenario)


@pytest.mark.parametrize("appends", [0, 1])
def test_a_change_of_the_invisible_time_is_logged_as_a_whole_or_not_at_all(
    run_case: Any, loop_time: ManualLoopTime, monkeypatch: pytest.MonkeyPatch, appends: int
) -> None:
    """The log accepts `appends` appends, then refuses more."""

    async def scenario(case: Any) -> None:
        assert (await case.send(b"m")).code == 0
        (got,) = await popped(case, invisible_ms=1000)
        append, left = case.ledger.append_batch, appends

        def limited(*given: Any) -> Any:
            nonlocal left
            case.ledger.refuse_with = None if left else DLedgerCode.LEADER_PENDING_FULL
            left -= 1
            return append(*given)

        with monkeypatch.context() as patch:
            patch.setattr(case.ledger, "append_batch", limited)
            reply = await case.ask(CHANGE, {**got.fields, "invisibleTime": 2000})
        case.ledger.refuse_with = None
        assert reply.code == (0 if appends else 2)
        assert (await case.table())["openPopMessages"] == "1"
        loop_time.now_ms += 1000
        if appends:
            assert await popped(case, poll_ms=20) == []
            loop_time.now_ms += 1000
        await ack(case, *(await redelivered(case, 1)))
        assert (await case.table())["openPopMessages"] == "0"
        offset = await case.ask(14, {"consumerGroup": "g", "topic": "t", "queueId": 0})
        assert offset.get_int("offset") == 1

    run_case(scenario)


def test_a_held_pop_ends_with_a_message_in_any_queue_or_a_redelivery(run_case: Any, helpers: Any) -> None:
    async def scenario(case: Any) -> None:
        waiting = asyncio.create_task(popped(case, poll_ms=10_000))
        await helpers.until(lambda: case.broker._holds.count == 1)
        await case.send(b"x", queue_id=1)
        (got,) = await waiting
        assert (got.body, (await case.table())["heldPulls"]) == (b"x", "0")
        reply = await case.ask(CHANGE, {**got.fields, "invisibleTime": 50})
        assert reply.code == 0
        assert bodies(await popped(case, poll_ms=10_000)) == [b"x"]

    run_case(scenario)


def test_held_pops_are_bounded_by_the_number_of_queues_they_wait_at(
    run_case: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.broker.pull.PLACES_OF_HELD", 1)

    async def scenario(case: Any) -> None:
        waiting = asyncio.create_task(case.ask(POP, ASKED | {"pollTime": 30_000}))  # at two queues and the retry topic
        await helpers.until(lambda: case.broker._holds.count == 1)
        assert (await case.ask(POP, ASKED | {"pollTime": 30_000})).code == ResponseCode.POLLING_FULL
        await case.send(b"x")
        assert bodies(handles(await waiting)) == [b"x"]
        again = asyncio.create_task(case.ask(POP, ASKED | {"pollTime": 30_000}))
        await helpers.until(lambda: case.broker._holds.count == 1)
        await case.send(b"y")
        assert bodies(handles(await again)) == [b"y"]

    run_case(scenario, **{"limits.max_held_pulls": "3"})


def test_a_pop_with_a_tag_filter_gets_and_redelivers_matching_messages_only(
    run_case: Any, loop_time: ManualLoopTime
) -> None:
    async def scenario(case: Any) -> None:
        for tag in "abab":
            await case.ask(310, {"b": "t", "e": 0, "i": f"TAGS\x01{tag}\x02"}, tag.encode())
        got = await popped(case, exp="b", expType="TAG", invisible_ms=20)
        assert bodies(got) == [b"b", b"b"] and [each.message.queue_offset for each in got] == [1, 3]
        loop_time.now_ms += 20
        assert bodies(await redelivered(case, 2, exp="b", expType="TAG")) == [b"b", b"b"]
        assert (await case.ask(POP, {"consumerGroup": "g", "topic": "t", "maxMsgNums": 1, "invisibleTime": 1,
                                     "exp": "a =", "expType": "SQL92"})).code == 23  # fmt: skip

    run_case(scenario)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("wanted", [("b", "TAG"), ("a = 'b'", "SQL92")])
def test_a_pop_finds_a_matching_message_behind_many_that_do_not_match(
    run_case: Any, monkeypatch: pytest.MonkeyPatch, wanted: tuple[str, str], in_order: bool
) -> None:
    """One scan of a queue covers only a limited number of messages."""
    monkeypatch.setattr(pull, "MAX_SCANNED_UNITS", 4)
    monkeypatch.setattr(pull, "MAX_SCANNED_MESSAGES", 4)
    monkeypatch.setattr(pop, "HOLD_RECHECK_S", 60.0)

    async def scenario(case: Any) -> None:
        for tag in "aaaaaaaaaaaaaaaab":
            await case.ask(310, {"b": "t", "e": 0, "i": f"TAGS\x01{tag}\x02a\x01{tag}\x02"}, tag.encode())
        exp, kind = wanted
        assert bodies(await popped(case, poll_ms=2000, exp=exp, expType=kind, order=in_order)) == [b"b"]

    run_case(scenario)


@pytest.mark.parametrize("wanted", [("b", "TAG"), ("a = 'b'", "SQL92")])
def test_a_filtered_pop_yields_to_the_event_loop_after_each_queue(
    run_case: Any, monkeypatch: pytest.MonkeyPatch, wanted: tuple[str, str]
) -> None:
    """Scanning one takes some ten milliseconds at most, and a topic may have thousands."""
    turns, turns_at_scan = 0, []
    collect = pull.PullProcessor.collect

    async def scenario(case: Any) -> None:
        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        def collected(pulls: Any, queue: Any, request: Any) -> Any:
            turns_at_scan.append(turns)
            return collect(pulls, queue, request)

        assert (await case.ask(17, {"topic": "t", "readQueueNums": 8, "writeQueueNums": 8, "perm": 6})).code == 0
        for queue_id in range(8):
            assert (await case.send(b"x", queue_id=queue_id)).code == 0
        monkeypatch.setattr(pull.PullProcessor, "collect", collected)
        counting = asyncio.create_task(others())
        assert await popped(case, exp=wanted[0], expType=wanted[1]) == []
        counting.cancel()
        assert len(turns_at_scan) == len(set(turns_at_scan)) == 8

    run_case(scenario)


def test_an_ordered_pop_waits_until_all_earlier_messages_are_acknowledged(
    run_case: Any, loop_time: ManualLoopTime
) -> None:
    async def scenario(case: Any) -> None:
        for number in range(4):
            await case.send(b"%d" % number)
        ordered = {"order": True, "attemptId": "first"}
        got = await popped(case, 2, **ordered)
        assert [each.body for each in got] == [b"0", b"1"] and got[0].extra.split(" ")[3] == "999"
        assert await popped(case, 2, order=True, attemptId="second") == []
        assert [each.body for each in await popped(case, 2, **ordered)] == [b"0", b"1"], "the same attempt, repeated"
        got = await popped(case, 2, **ordered)
        await ack(case, got[0])
        assert await popped(case, 2, order=True, attemptId="second") == []
        waiting = asyncio.create_task(popped(case, 2, poll_ms=10_000, order=True, attemptId="second", invisible_ms=100))
        await ack(case, got[1])
        assert [each.body for each in await waiting] == [b"2", b"3"]
        assert await popped(case, 1, order=True, attemptId="third") == []
        loop_time.now_ms += 100
        reply = await case.ask(POP, {"consumerGroup": "g", "topic": "t", "queueId": -1, "maxMsgNums": 1, "order": True,
                                     "invisibleTime": 1000, "pollTime": 5000, "attemptId": "third"})  # fmt: skip
        assert [each.body for each in handles(reply)] == [b"2"], "its invisible time is over"
        assert reply.get_str("orderCountInfo") == "0 qo0%2 1"
        assert (await case.table())["openPopMessages"] == "0", "ordered pops are not in the log"

    run_case(scenario)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_ordered_messages_acknowledged_out_of_order_are_not_redelivered(
    run_case: Any, loop_time: ManualLoopTime, order: tuple[int, ...]
) -> None:
    async def scenario(case: Any) -> None:
        for number in range(4):
            await case.send(b"%d" % number)
        got = await popped(case, 3, order=True, attemptId="first")
        for number in order:
            await ack(case, got[number])
        assert [each.body for each in await popped(case, 4, order=True, attemptId="second")] == [b"3"]

    run_case(scenario)


def test_an_ordered_pop_redelivers_only_unacknowledged_messages(run_case: Any, loop_time: ManualLoopTime) -> None:
    async def scenario(case: Any) -> None:
        for number in range(4):
            await case.send(b"%d" % number)
        got = await popped(case, 3, order=True, attemptId="first", invisible_ms=100)
        await ack(case, got[1])
        loop_time.now_ms += 100
        got = await popped(case, 3, order=True, attemptId="second")
        assert [each.body for each in got] == [b"0", b"2"]
        for each in reversed(got):
            await ack(case, each)
        assert [each.body for each in await popped(case, 4, order=True, attemptId="third")] == [b"3"]

    run_case(scenario)


@pytest.mark.parametrize("checkpoint", ["stays", "lost"])
def test_the_state_of_popped_messages_survives_restarts_and_changes_of_master(
    run_case: Any, helpers: Any, tmp_path: Any, checkpoint: str
) -> None:
    ledger = helpers.FakeLedger()
    kept: list[Got] = []

    async def first(case: Any) -> None:
        await fill(case, *(b"%d" % number for number in range(8)))
        got = await popped(case, 5, invisible_ms=60_000)
        for each in got[:2]:
            await ack(case, each)
        kept.extend(got[2:])
        case.ledger.become(Role.FOLLOWER, 2, leader_id="n2")
        reply = await case.ask(ACK, kept[0].fields)
        assert (reply.code, "NOT_LEADER" in reply.remark) == (14, True)
        fields = {"consumerGroup": "g", "topic": "t", "maxMsgNums": 1, "invisibleTime": 1}
        assert (await case.ask(POP, fields)).code == 14
        case.ledger.become(Role.LEADER, 3)
        await helpers.until(lambda: case.broker.store.is_master)

    async def second(case: Any) -> None:
        await ack(case, kept[0])
        rest = await popped(case, invisible_ms=60_000)
        assert len(rest) == 3 and not {each.body for each in rest} & {each.body for each in kept}
        assert (await case.table())["openPopMessages"] == "5"

    async def third(case: Any) -> None:
        case.clock.now_ms += 60_000
        case.ledger.become(Role.LEADER, case.ledger.member_state.term + 1)
        await helpers.until(lambda: case.broker.store.is_master)
        assert len({each.body for each in await redelivered(case, 5)}) == 5
        assert (await case.table())["popRevived"] == "5"

    run_case(first, ledger=ledger)
    if checkpoint == "lost":
        (tmp_path / "data" / "consumequeue.checkpoint").unlink()
        (tmp_path / "data" / "consumerOffset.json").unlink(missing_ok=True)
    run_case(second, ledger=ledger)
    run_case(third, ledger=ledger)


def test_popped_messages_are_redelivered_after_the_cluster_is_renamed(
    run_case: Any, helpers: Any, loop_time: ManualLoopTime
) -> None:
    ledger = helpers.FakeLedger()

    async def first(case: Any) -> None:
        await fill(case, b"x", b"y")
        assert len(await popped(case, 1)) == 1

    async def second(case: Any) -> None:
        (got,) = await popped(case, 1)
        assert (await case.table())["openPopMessages"] == "2"
        await ack(case, got)
        case.clock.now_ms += 60_000
        loop_time.now_ms += 60_000
        assert len(await redelivered(case, 1)) == 1

    run_case(first, ledger=ledger)
    run_case(second, ledger=ledger, cluster_name="renamed")


def test_no_message_is_returned_before_its_checkpoint_is_committed(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        await fill(case, b"x")
        fields = {"consumerGroup": "g", "topic": "t", "queueId": -1, "maxMsgNums": 1, "invisibleTime": 60_000}
        case.ledger.refuse_with = DLedgerCode.LEADER_PENDING_FULL
        assert (await case.ask(POP, fields)).code == 2
        case.ledger.refuse_with = None
        case.ledger.commit_by_hand = True
        waiting = asyncio.create_task(case.ask(POP, fields))
        await asyncio.sleep(0.05)
        assert not waiting.done(), "its checkpoint is not committed"
        case.ledger.fail_pending(DLedgerCode.WAIT_QUORUM_ACK_TIMEOUT)
        assert (await waiting).code == 1
        case.ledger.commit_by_hand = False
        case.ledger.commit()
        assert await popped(case) == [], "it may have been delivered"

    run_case(scenario)


def test_a_failed_checkpoint_fails_the_request_without_unretrieved_exceptions(
    run_case: Any, helpers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(case: Any) -> None:
        for queue_id in (0, 1):
            await case.send(b"x", queue_id=queue_id)
        case.ledger.commit_by_hand = True
        waiting = asyncio.create_task(case.ask(POP, ASKED))
        await helpers.until(lambda: len(case.ledger._pending) == 2)  # a checkpoint for each queue
        case.ledger.fail_pending(DLedgerCode.WAIT_QUORUM_ACK_TIMEOUT)
        assert (await waiting).code == 1

    run_case(scenario)
    gc.collect()  # upon which asyncio logs exceptions that were never retrieved
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


def test_an_acknowledgement_is_answered_when_it_is_committed(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        await fill(case, b"x")
        (got,) = await popped(case)
        case.ledger.commit_by_hand = True
        waiting = asyncio.create_task(case.ask(ACK, got.fields))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        case.ledger.commit()
        assert (await waiting).code == 0

    run_case(scenario)


async def advance_time(case: Any, helpers: Any, loop_time: ManualLoopTime, ms: int) -> None:
    """Advance the time; return when everything due by then was handled."""
    loop_time.now_ms += ms
    due = case.broker.revival._queue
    await helpers.until(lambda: not due._due or due._due[0][0] > loop_time.now_ms)


@pytest.mark.parametrize("code", [ACK, BATCH_ACK])
def test_a_timely_acknowledgement_prevents_redelivery_however_late_it_is_committed(
    run_case: Any, helpers: Any, loop_time: ManualLoopTime, code: int
) -> None:
    async def scenario(case: Any) -> None:
        await fill(case, b"m")
        (got,) = await popped(case, invisible_ms=1000)
        handle = Handle.of(got.extra)
        entry = {
            "c": "g", "r": "0", "t": "t", "so": handle.start_offset, "it": 1000, "pt": handle.pop_time_ms,
            "q": got.message.queue_id, "rq": 0, "b": base64.b64encode(b"\x01").decode(),
        }  # fmt: skip
        case.ledger.commit_by_hand = True
        asked = [(code, got.fields, json.dumps({"acks": [entry]}).encode()) for _ in range(2)]
        acks = [asyncio.ensure_future(case.ask(*each)) for each in asked]
        await helpers.until(lambda: len(case.ledger._pending) == 2)
        await advance_time(case, helpers, loop_time, 1000)
        assert not any(each.done() for each in acks), "answered before it is in the log"
        case.ledger.commit_by_hand = False
        case.ledger.commit()
        assert [(await each).code for each in acks] == [0, 0]
        assert case.broker.revival.revived_total == 0 and await popped(case) == []
        assert (await case.table())["openPopMessages"] == "0"

    run_case(scenario)


def test_a_refused_acknowledgement_does_not_prevent_redelivery(run_case: Any, loop_time: ManualLoopTime) -> None:
    async def scenario(case: Any) -> None:
        await fill(case, b"m")
        (got,) = await popped(case, invisible_ms=1000)
        case.ledger.refuse_with = DLedgerCode.LEADER_PENDING_FULL
        assert (await case.ask(ACK, got.fields)).code == 2
        case.ledger.refuse_with = None
        loop_time.now_ms += 1000
        assert bodies(await redelivered(case, 1)) == [b"m"]

    run_case(scenario)


def test_the_records_of_acknowledgements_are_bounded(
    run_case: Any, loop_time: ManualLoopTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pop_revive, "FORGET_AT", 12)

    async def scenario(case: Any) -> None:
        for _ in range(5):
            for _ in range(8):
                assert (await case.send(b"x")).code == 0
            *acked, _ = await popped(case, 8)
            for each in acked:
                await ack(case, each)
        assert (await case.table())["openPopMessages"] == "5"
        assert len(case.broker.revival._closing) <= 12
        loop_time.now_ms += 60_000
        assert len(await redelivered(case, 5)) == 5 and await popped(case) == []

    run_case(scenario)


def test_no_message_is_popped_beyond_the_limit_of_unacknowledged_ones(
    run_case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pop_checkpoints, "MAX_OPEN_MESSAGES", 3)

    async def scenario(case: Any) -> None:
        for number in range(5):
            await case.send(b"%d" % number)
        got = await popped(case, 3)
        assert len(got) == 3 and await popped(case) == []
        await ack(case, got[0])
        assert len(await popped(case)) == 2

    run_case(scenario)


def test_beyond_the_limit_the_least_recent_group_pops_from_its_consumer_offset(
    run_case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pop_checkpoints, "MAX_QUEUES_OF_GROUPS", 2)

    async def scenario(case: Any) -> None:
        known = case.broker.checkpoints.next_offsets
        await case.send(b"x")
        for group in ("a", "b", "c", "d"):
            (got,) = await popped(case, consumerGroup=group)
            assert (await case.ask(ACK, got.fields | {"consumerGroup": group})).code == 0
        assert [group for group, _, _ in known] == ["c", "d"]
        assert len(case.broker.checkpoints._of_queue) == 2
        await case.send(b"y")
        for group in ("e", "f"):
            assert len(await popped(case, consumerGroup=group)) == 2  # and it stays unacknowledged
        assert [group for group, _, _ in known] == ["e", "f"]
        for group in ("a", "c"):
            assert bodies(await popped(case, consumerGroup=group)) == [b"y"]
            assert await popped(case, consumerGroup="e") == []
        assert {"e", "f"} < {group for group, _, _ in known}

    run_case(scenario)


def test_expired_ordered_pops_make_room_for_other_groups(
    run_case: Any, loop_time: ManualLoopTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.broker.pop_order.MAX_QUEUES_IN_ORDER", 2)

    async def scenario(case: Any) -> None:
        await case.send(b"x")
        for group, count in (("a", 1), ("b", 1), ("c", 0)):
            assert len(await popped(case, consumerGroup=group, order=True, invisible_ms=1500)) == count
        loop_time.now_ms += 1500
        for group, count in (("c", 1), ("a", 1), ("b", 0)):
            assert len(await popped(case, consumerGroup=group, order=True, invisible_ms=1500)) == count

    run_case(scenario)


def test_an_ordered_pop_of_many_queues_searches_for_expired_ones_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search scans all hundred thousand."""
    monkeypatch.setattr(pop_order, "MAX_QUEUES_IN_ORDER", 50)
    searches = 0

    class CountedDict(dict[Any, Any]):
        def items(self) -> Any:
            nonlocal searches
            searches += 1
            return super().items()

    queues = pop_order.OrderedQueues()
    queues._in_hand = CountedDict()
    for number in range(50):
        queues.give(("g", "t", number), "", [0], 1, 5000)
    for now_ms in (10, 11, 1009):
        waits = [queues.blocked_until_ms(("h", "t", number), "", now_ms) for number in range(20)]
        assert (waits, searches) == ([1010] * 20, 1)
        queues._in_hand = CountedDict(queues._in_hand)
    assert (queues.blocked_until_ms(("h", "t", 0), "", 1010), searches) == (2010, 2)
    assert queues.blocked_until_ms(("h", "t", 0), "", 5000) == 0


def test_the_records_of_scanned_queues_are_bounded(
    run_case: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pop, "MAX_AHEAD", 3)

    async def scenario(case: Any) -> None:
        await case.send(b"x")
        for number in range(7):
            assert await popped(case, consumerGroup=f"g{number}", exp="nothing has this tag") == []
            assert len(case.broker._pops._ahead) <= 3
        case.ledger.commit_by_hand = True
        waiting = [asyncio.create_task(popped(case, consumerGroup=f"h{number}")) for number in range(4)]
        await helpers.until(lambda: len(case.ledger._pending) == 4)
        assert [group for group, _, _ in case.broker._pops._ahead][-4:] == ["h0", "h1", "h2", "h3"]
        assert await popped(case, consumerGroup="h0") == []  # popped already, though not yet dispatched
        case.ledger.commit_by_hand = False
        case.ledger.commit()
        assert [len(each) for each in await asyncio.gather(*waiting)] == [1, 1, 1, 1]
        assert await popped(case, consumerGroup="i", exp="nothing has this tag") == []
        assert len(case.broker._pops._ahead) == 1

    run_case(scenario)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"topic": "nowhere"}, 17), ({"queueId": 2}, 29), ({"maxMsgNums": 33}, 29), ({"maxMsgNums": 0}, 29),
        ({"invisibleTime": -1}, 29), ({"invisibleTime": 86_400_001}, 29), ({"consumerGroup": "g" * 120}, 29),
        ({"consumerGroup": "idle"}, 16), ({"exp": "x", "expType": "XPATH"}, 23), ({"attemptId": "a" * 256}, 29),
    ],
)  # fmt: skip
def test_invalid_pop_requests_are_refused(run_case: Any, changes: dict[str, Any], code: int) -> None:
    async def scenario(case: Any) -> None:
        await case.ask(200, body=json.dumps({"groupName": "idle", "consumeEnable": False}).encode())
        fields = {"consumerGroup": "g", "topic": "t", "queueId": -1, "maxMsgNums": 1, "invisibleTime": 1000}
        assert (await case.ask(POP, fields | changes)).code == code

    run_case(scenario)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"topic": "nowhere"}, 17), ({"queueId": 2}, 13), ({"queueId": -1}, 13), ({"offset": 1}, 208),
        ({"offset": -1}, 208), ({"extraInfo": "0 0"}, 13), ({"extraInfo": "a b c d"}, 13),
    ],
)  # fmt: skip
@pytest.mark.parametrize("asked", [ACK, CHANGE])
def test_invalid_handles_are_refused(run_case: Any, asked: int, changes: dict[str, Any], code: int) -> None:
    async def scenario(case: Any) -> None:
        await case.send(b"x")
        (got,) = await popped(case)
        assert (await case.ask(asked, {**got.fields, "invisibleTime": 5, **changes})).code == code
        assert (await case.table())["openPopMessages"] == "1"

    run_case(scenario)


def test_clients_cannot_write_pop_checkpoints_but_can_read_them(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        assert (await case.send(b"{}", topic=REVIVE_TOPIC)).code == 16
        await fill(case, b"x")
        await popped(case)
        (message,) = decode_records((await case.pull(0, topic=REVIVE_TOPIC)).body)
        assert message.tags == "ck" and json.loads(message.body)["d"] == [0]

    run_case(scenario)


def test_pop_works_in_a_cluster_whose_name_has_dots(run_case: Any) -> None:
    ledger = None

    async def scenario(case: Any) -> None:
        nonlocal ledger
        ledger = case.ledger
        await fill(case, b"x", b"y")
        await ack(case, min(await popped(case)))
        assert (await case.send(b"z")).code == 0 and case.broker.dispatcher.failure is None

    async def restarted(case: Any) -> None:
        assert bodies(await popped(case)) == [b"z"] and (await case.table())["openPopMessages"] == "2"

    run_case(scenario, cluster_name="prod.eu-1")
    run_case(restarted, ledger=ledger, cluster_name="prod.eu-1")


@pytest.mark.parametrize("name", ["prod.eu/1", "", "x" * 101])
def test_a_revive_topic_with_an_invalid_cluster_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError):
        check_stored_topic(REVIVE_PREFIX + name)


@pytest.mark.parametrize("order", [False, True])
def test_a_pop_reply_with_messages_of_the_maximum_size_fits_into_a_frame(run_case: Any, order: bool) -> None:
    limits = {"limits.max_message_size_bytes": str(8 << 20), "topics": '[{name = "t", queues = 3}]'}

    async def scenario(case: Any) -> None:
        for queue_id in range(3):
            assert (await case.send(b"%d" % queue_id * (8 << 20), queue_id=queue_id)).code == 0
        got = []
        for left in (2, 1, 0):
            reply = await case.ask(POP, {**ASKED, "order": order})
            assert reply.code == 0 and reply.get_int("restNum") == left
            got += handles(reply)
        assert [body[:1] for body in bodies(got)] == [b"0", b"1", b"2"]

    run_case(scenario, **limits)


@pytest.mark.parametrize("group", ["a.b", "a/b", "g" * 123])
def test_a_group_whose_name_allows_no_dead_letter_topic_cannot_pop_a_retry_topic(run_case: Any, group: str) -> None:
    async def scenario(case: Any) -> None:
        tried_often = {"b": "%RETRY%x", "e": 0, "j": 16, "l": 100}
        assert (await case.ask(310, tried_often, b"m")).code == 0
        refused = await case.ask(POP, {**ASKED, "topic": "%RETRY%x", "consumerGroup": group, "invisibleTime": 1})
        assert refused.code == ResponseCode.INVALID_PARAMETER and "topic name" in refused.remark
        (got,) = await popped(case, topic="%RETRY%x", invisible_ms=1)
        (dead,) = await redelivered(case, 1, topic="%DLQ%g", consumerGroup="looks")
        assert (got.body, dead.body) == (b"m", b"m") and case.broker.dispatcher.failure is None

    run_case(scenario)


def test_a_direct_pop_of_a_retry_topic_returns_each_queue_once(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        for number in range(4):
            again = {"b": "%RETRY%g", "e": 0, "j": 1, "l": 16}
            assert (await case.ask(310, again, b"%d" % number * 200_000)).code == 0
        for left in (3, 2, 1, 0):
            reply = await case.ask(POP, {**ASKED, "topic": "%RETRY%g"})
            assert reply.get_str("startOffsetInfo") == f"1 0 {3 - left}" and reply.get_int("restNum") == left
            (got,) = handles(reply)
            await ack(case, got)
        assert (await case.table())["openPopMessages"] == "0"

    run_case(scenario)


def test_a_smaller_ordered_pop_does_not_redeliver_acknowledged_messages(
    run_case: Any, loop_time: ManualLoopTime
) -> None:
    async def scenario(case: Any) -> None:
        for number in range(7):
            assert (await case.send(b"%d" % number)).code == 0
        got = await popped(case, 6, order=True, invisible_ms=1000)
        assert bodies(got) == [b"%d" % number for number in range(6)]
        for number in (3, 5):
            await ack(case, got[number])
        for count, wanted in ((2, b"01"), (1, b"2"), (2, b"4"), (9, b"6")):
            loop_time.now_ms += 1000
            got = await popped(case, count, order=True, invisible_ms=1000)
            assert b"".join(bodies(got)) == wanted
            for each in got:
                await ack(case, each)
        assert (await case.ask(14, {"consumerGroup": "g", "topic": "t", "queueId": 0})).ext_fields["offset"] == "7"
        assert case.broker._pops.in_order._in_hand == {}

    run_case(scenario)


def test_a_group_that_pulled_before_pops_from_its_consumer_offset(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        for number in range(3):
            await case.send(b"%d" % number)
        await case.ask(15, {"consumerGroup": "g", "topic": "t", "queueId": 0, "commitOffset": 2})
        assert bodies(await popped(case)) == [b"2"]

    run_case(scenario)


@pytest.mark.parametrize("when", ["late acknowledgement", "change of masters"])
def test_the_offset_of_a_group_that_pulls_after_popping_is_not_set_back(run_case: Any, helpers: Any, when: str) -> None:
    async def scenario(case: Any) -> None:
        for number in range(10):
            assert (await case.send(b"%d" % number, queue_id=0)).code == 0
        got = await popped(case, 3)
        for each in got[:2]:
            await ack(case, each)
        pulling = {"consumerGroup": "g", "topic": "t", "queueId": 0}
        assert (await case.ask(15, {**pulling, "commitOffset": 8})).code == 0
        await ack(case, got[2])
        if when == "change of masters":
            case.ledger.become(Role.FOLLOWER, 2, leader_id="n2")
            await helpers.until(lambda: not case.broker.store.is_master)
            case.ledger.become(Role.LEADER, 3)
            await helpers.until(lambda: case.broker.store.is_master)
        assert (await case.ask(14, pulling)).ext_fields["offset"] == "8"
        assert bodies(await popped(case)) == [b"8", b"9"]

    run_case(scenario)


def test_redelivery_waits_while_the_log_refuses_appends(
    run_case: Any, loop_time: ManualLoopTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_queue, "BUSY_RETRY_MS", 5)

    async def scenario(case: Any) -> None:
        await fill(case, b"x", b"y")
        await popped(case, invisible_ms=10)
        case.ledger.refuse_with = DLedgerCode.LEADER_PENDING_FULL
        loop_time.now_ms += 10
        await asyncio.sleep(0.03)
        assert case.broker.revival.revived_total == 0
        case.ledger.refuse_with = None
        assert bodies(await redelivered(case, 2)) == [b"x", b"y"]
        assert (await case.table())["popRevived"] == "2"

    run_case(scenario)


def test_an_unreadable_message_does_not_block_the_redelivery_of_others(
    run_case: Any, helpers: Any, loop_time: ManualLoopTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_queue, "RETRY_MS", 10)

    async def scenario(case: Any) -> None:
        for number in range(4):
            assert (await case.send(b"%d" % number)).code == 0
        got = await popped(case, invisible_ms=1000)
        bad = [each.message.physical_offset for each in got if each.body in (b"0", b"2")]
        read = case.ledger.store.read_bytes

        def zeroed(position: int, size_bytes: int) -> bytes:
            return bytes(size_bytes) if position in bad else read(position, size_bytes)

        with monkeypatch.context() as patch:
            patch.setattr(case.ledger.store, "read_bytes", zeroed)
            loop_time.now_ms += 1000
            assert bodies(await redelivered(case, 2)) == [b"1", b"3"]
            assert (await case.table())["openPopMessages"] == "4", "two remain until their records can be read"
        assert bodies(await redelivered(case, 2)) == [b"0", b"2"] and await popped(case) == []

    run_case(scenario)


def test_the_low_level_client_pops_and_acknowledges(run_case: Any, helpers: Any, loop_time: ManualLoopTime) -> None:
    async def scenario(case: Any) -> None:
        await fill(case, b"x", b"y")
        place = {"group": "g", "address": f"127.0.0.1:{case.broker.port}"}
        async with BrokerClient(name_servers=[], runtime=helpers.new_runtime()) as client:
            first, second = await client.pop("t", broker_name="b", invisible_ms=1000, **place)
            await client.acknowledge(first, **place)
            loop_time.now_ms += 1000
            (again,) = await client.pop("t", broker_name="b", poll_ms=4000, **place)
            assert (again.message.body, again.message.topic) == (second.message.body, "%RETRY%g_t")
            await client.acknowledge(again, **place)
            assert await client.pop("t", broker_name="b", **place) == []
            case.ledger.become(Role.FOLLOWER, 2, leader_id="n2")
            with pytest.raises(NotLeader):
                await client.pop("t", broker_name="b", **place)

    run_case(scenario)
