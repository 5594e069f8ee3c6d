"""Timer messages of RocketMQ 5, on a whole broker with a fake log; with real restarts in `test_virtual_time.py`."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest

from node.broker import due_queue as due_queue_module
from node.broker import send as send_module
from node.broker import timers as timers_module
from node.broker import transactions as transactions_module
from node.broker.ledger import DLedgerCode, Role
from node.broker.requeue import MAX_TIMER_DELAY_MS, TIMER_SOURCE, IllegalTimer, source_number, source_of, timer_due_ms
from node.store.record import Message, decode_records


@pytest.fixture(autouse=True)
def recheck_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests set the clock by hand, so it must be checked often."""
    for name in ("RECHECK_MS", "BUSY_RETRY_MS", "RETRY_MS"):
        monkeypatch.setattr(due_queue_module, name, 5)


async def send(case: Any, body: bytes, **properties: Any) -> Any:
    text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
    return await case.ask(310, {"b": "t", "e": 1, "i": text}, body)


async def messages(case: Any) -> list[Message]:
    return list(decode_records((await case.pull(0, queue_id=1)).body))


async def arrived(case: Any, *bodies: bytes) -> list[Message]:
    deadline = asyncio.get_running_loop().time() + 5
    while [message.body for message in await messages(case)] != list(bodies):
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.002)
    return await messages(case)


def test_each_timer_message_is_delivered_at_its_millisecond_and_not_before(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        began_ms = case.clock.now_ms
        for body, wanted in (
            (b"third", {"TIMER_DELIVER_MS": began_ms + 5001}),
            (b"first", {"TIMER_DELAY_MS": 1500, "TAGS": "a", "KEYS": "k"}),
            (b"second", {"TIMER_DELAY_SEC": 4}),
            (b"last", {"TIMER_DELAY_MS": MAX_TIMER_DELAY_MS}),
        ):
            assert (await send(case, body, **wanted)).code == 0
        assert (await send(case, b"at once", TIMER_DELIVER_MS=began_ms)).code == 0
        delivered = [b"at once"]
        for due_ms, body in ((1500, b"first"), (4000, b"second"), (5001, b"third"), (MAX_TIMER_DELAY_MS, b"last")):
            case.clock.now_ms = began_ms + due_ms - 1
            await asyncio.sleep(0.02)
            assert [message.body for message in await messages(case)] == delivered, "early"
            case.clock.now_ms += 1
            delivered.append(body)
            found = (await arrived(case, *delivered))[-1]
            assert found.properties["TIMER_OUT_MS"] == str(began_ms + due_ms)
            assert "REAL_TOPIC" not in found.properties and "REAL_QID" not in found.properties
        (first,) = (message for message in await messages(case) if message.body == b"first")
        assert (first.tags, first.properties["KEYS"], first.queue_id) == ("a", "k", 1)
        assert (await case.table())["openTimers"] == "0"

    run_case(scenario)


LIMIT = "the delay time should not be bigger than the max delay 259200000ms"


@pytest.mark.parametrize(
    "properties",
    [
        {"TIMER_DELAY_MS": MAX_TIMER_DELAY_MS + 1}, {"TIMER_DELIVER_MS": 9999999999999}, {"TIMER_DELAY_SEC": "soon"},
        {"TIMER_DELAY_SEC": "1" * 20}, {"TIMER_DELAY_SEC": 4, "TIMER_DEL_UNIQKEY": "k"}, {"TIMER_DELIVER_MS": ""},
        {"TIMER_DELAY_SEC": 259201, "TRAN_MSG": "true"},
    ],
)  # fmt: skip
def test_an_invalid_timer_is_refused_with_apaches_remark(run_case: Any, properties: dict[str, Any]) -> None:
    async def scenario(case: Any) -> None:
        reply = await send(case, b"x", **properties)
        assert (reply.code, LIMIT in reply.remark) == (13, True)
        assert await messages(case) == [] and (await case.table())["openTimers"] == "0"

    run_case(scenario)


def test_messages_of_a_batch_cannot_have_timers(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        own = b"TIMER_DELAY_MS\x014000\x02"
        body = struct.pack(">5i", 23 + len(own), 0, 0, 0, 1) + b"x" + struct.pack(">h", len(own)) + own
        reply = await case.ask(320, {"b": "t", "e": 1, "i": "", "m": True}, body)
        assert (reply.code, reply.remark) == (13, "messages of a batch cannot be delayed")

    run_case(scenario)


def test_timers_beyond_the_limit_are_refused_by_flow_control(run_case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers_module, "MAX_OPEN_TIMERS", 2)
    monkeypatch.setattr(send_module, "MAX_OPEN_TIMERS", 2)

    async def scenario(case: Any) -> None:
        for number in range(2):
            assert (await send(case, b"%d" % number, TIMER_DELAY_SEC=1)).code == 0
        reply = await send(case, b"x", TIMER_DELAY_SEC=1)
        assert (reply.code, reply.remark) == (2, "timer message is under flow control, max num limit is 2")
        case.clock.now_ms += 1000
        await arrived(case, b"0", b"1")
        assert (await send(case, b"2", TIMER_DELAY_SEC=1)).code == 0

    run_case(scenario)


def test_the_timer_of_a_transactional_message_starts_at_the_commit(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        half = await send(case, b"half", TRAN_MSG="true", PGROUP="p", UNIQ_KEY="k", TIMER_DELAY_SEC=5)
        fields = {"producerGroup": "p", "tranStateTableOffset": half.get_int("queueOffset"), "commitOrRollback": 8}
        offset = int(half.get_str("msgId")[-16:], 16)
        case.clock.now_ms += 10_000
        assert (await case.ask(37, {**fields, "commitLogOffset": offset})).code == 0
        assert await messages(case) == [] and (await case.table())["openTransactions"] == "0"
        case.clock.now_ms += 4_999
        await asyncio.sleep(0.02)
        assert await messages(case) == [], "its delay begins with the commit"
        case.clock.now_ms += 1
        await arrived(case, b"half")

    run_case(scenario)


def test_a_half_message_without_room_for_its_timer_property_is_refused(run_case: Any) -> None:
    """It could never be committed."""

    async def scenario(case: Any) -> None:
        common = {"PGROUP": "p", "UNIQ_KEY": "k", "TIMER_DELAY_SEC": 5}
        written = "TRAN_MSG\x01true\x02pad\x01\x02REAL_TOPIC\x01t\x02REAL_QID\x011\x02"
        written += f"TIMER_OUT_MS\x01{case.clock.now_ms}\x02"
        room = 32767 - len(written) - sum(len(f"{name}\x01{value}\x02") for name, value in common.items())
        assert (await send(case, b"half", TRAN_MSG="true", pad="x" * (room + 1), **common)).code == 13
        half = await send(case, b"half", TRAN_MSG="true", pad="x" * room, **common)
        assert half.code == 0
        fields = {"producerGroup": "p", "tranStateTableOffset": half.get_int("queueOffset"), "commitOrRollback": 8}
        offset = int(half.get_str("msgId")[-16:], 16)
        assert (await case.ask(37, {**fields, "commitLogOffset": offset})).code == 0

    run_case(scenario)


def test_a_stored_half_message_without_room_for_its_timer_property_is_given_up(
    run_case: Any, monkeypatch: pytest.MonkeyPatch, helpers: Any
) -> None:
    """A store of an earlier version may hold one. The copy that is given up waits for no timer."""

    async def scenario(case: Any) -> None:
        monkeypatch.setattr(transactions_module, "OLD_FOR_S", 0.0)
        monkeypatch.setattr(send_module, "timer_place", lambda properties, topic, queue_id, due_ms: ("", 0, {}))
        half = await send(case, b"half", PGROUP="p", UNIQ_KEY="k", TIMER_DELAY_SEC=5, TRAN_MSG="true", pad="x" * 32680)
        assert half.code == 0
        fields = {"producerGroup": "p", "tranStateTableOffset": half.get_int("queueOffset"), "commitOrRollback": 8}
        offset = int(half.get_str("msgId")[-16:], 16)
        assert (await case.ask(37, {**fields, "commitLogOffset": offset})).code == 13
        case.clock.now_ms += 73 * 3_600_000
        await helpers.until(lambda: not case.broker.transactions.halves)
        (given_up,) = list(decode_records((await case.pull(0, topic="TRANS_CHECK_MAX_TIME_TOPIC", queue_id=0)).body))
        assert given_up.body == b"half"

    run_case(scenario)


def test_a_slave_delivers_nothing_and_the_next_master_delivers_once(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        await send(case, b"late", TIMER_DELAY_SEC=1)
        case.ledger.become(Role.FOLLOWER, 2, leader_id="n2")
        case.clock.now_ms += 5000
        end = case.ledger.store.ledger_end_index
        await asyncio.sleep(0.03)
        assert case.ledger.store.ledger_end_index == end
        case.ledger.become(Role.LEADER, 3)
        await arrived(case, b"late")
        case.ledger.become(Role.LEADER, 4)
        await asyncio.sleep(0.03)
        assert [message.body for message in await messages(case)] == [b"late"]

    run_case(scenario)


@pytest.mark.parametrize("checkpoint", ["stays", "lost"])
def test_timer_messages_are_delivered_once_across_restarts(
    run_case: Any, helpers: Any, tmp_path: Any, checkpoint: str
) -> None:
    """As after a crash, or on another member of the group: the log alone shows what waits."""
    ledger = helpers.FakeLedger()

    async def first(case: Any) -> None:
        for number in range(4):
            await send(case, b"%d" % number, TIMER_DELAY_SEC=1 + number // 2)
        case.clock.now_ms += 1000
        await arrived(case, b"0", b"1")

    async def second(case: Any) -> None:
        case.clock.now_ms += 1999
        await arrived(case, b"0", b"1")
        case.clock.now_ms += 1
        await arrived(case, b"0", b"1", b"2", b"3")
        await asyncio.sleep(0.02)
        assert len(await messages(case)) == 4

    run_case(first, ledger=ledger)
    if checkpoint == "lost":
        (tmp_path / "data" / "consumequeue.checkpoint").unlink()
    run_case(second, ledger=ledger)


def test_delivery_is_retried_while_the_log_refuses_appends(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        for number in range(3):
            await send(case, b"%d" % number, TIMER_DELAY_SEC=1)
        case.ledger.refuse_with = DLedgerCode.LEADER_PENDING_FULL
        case.clock.now_ms += 1000
        await asyncio.sleep(0.02)
        assert await messages(case) == []
        case.ledger.refuse_with = None
        await arrived(case, b"0", b"1", b"2")

    run_case(scenario)


def test_a_retry_of_an_unreadable_timer_is_not_postponed_by_a_clock_that_was_ahead(
    run_case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, broken = timers_module.read_message, [True]
    failed = asyncio.Event()

    def read_message(log: Any, queues: Any, offset: int) -> Message:
        if broken[0]:
            failed.set()
            raise OSError("a bad sector")
        return real(log, queues, offset)

    monkeypatch.setattr(timers_module, "read_message", read_message)

    async def scenario(case: Any) -> None:
        await send(case, b"x", TIMER_DELAY_SEC=1)
        case.clock.now_ms += 3_600_000
        await failed.wait()
        case.clock.now_ms -= 3_600_000
        await asyncio.sleep(0.02)
        broken[0] = False
        assert await messages(case) == []
        case.clock.now_ms += 1000
        await arrived(case, b"x")

    run_case(scenario)


def test_an_unreadable_timer_message_does_not_delay_others(run_case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, broken = timers_module.read_message, [True]

    def read_message(log: Any, queues: Any, offset: int) -> Message:
        message = real(log, queues, offset)
        if message.body == b"0" and broken[0]:
            raise OSError("a bad sector")
        return message

    monkeypatch.setattr(timers_module, "read_message", read_message)

    async def scenario(case: Any) -> None:
        for number in range(3):
            await send(case, b"%d" % number, TIMER_DELAY_SEC=1)
        case.clock.now_ms += 1000
        await arrived(case, b"1", b"2")
        broken[0] = False
        case.clock.now_ms += 10
        await arrived(case, b"1", b"2", b"0")

    run_case(scenario)


def test_due_times_are_computed_from_the_timer_properties() -> None:
    def due(**properties: str) -> int | None:
        return timer_due_ms(properties, 1000)

    assert due(TIMER_DELAY_SEC="2", TIMER_DELAY_MS="5", TIMER_DELIVER_MS="7") == 3000
    assert due(TIMER_DELAY_MS="5", TIMER_DELIVER_MS="7000") == 1005
    assert [due(TIMER_DELIVER_MS=text) for text in ("1001", "1000", "-5")] == [1001, None, None]
    assert due() is due(TIMER_DELAY_SEC="2", TIMER_OUT_MS="1") is None
    with pytest.raises(IllegalTimer):
        due(TIMER_DELIVER_MS="1.5")
    assert source_of(source_number(TIMER_SOURCE, 2**40)) == (TIMER_SOURCE, 2**40)
