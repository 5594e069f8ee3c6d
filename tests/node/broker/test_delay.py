"""Delayed delivery, retries and dead letters, on a whole broker with a fake log."""

from __future__ import annotations

import asyncio
import errno
import json
from typing import Any

import pytest

from node.broker import delay as delay_module
from node.broker.internal_topics import DELAY_LEVELS_MS
from node.broker.ledger import Role
from node.broker.requeue import delay_source, delayed_source_of
from node.store.record import Message, decode_records

SEED_LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"


@pytest.fixture(autouse=True)
def recheck_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests set the clock by hand, so it must be checked often."""
    monkeypatch.setattr(delay_module, "RECHECK_S", 0.005)


async def send_delayed(case: Any, level: int, body: bytes, queue_id: int = 1) -> None:
    properties = f"TAGS\x01a\x02DELAY\x01{level}\x02"
    assert (await case.ask(310, {"b": "t", "e": queue_id, "i": properties}, body)).code == 0


async def messages(case: Any, topic: str = "t", queue_id: int = 1) -> list[Message]:
    found: list[Message] = []
    while True:
        reply = await case.pull(len(found), topic=topic, queue_id=queue_id)
        if not reply.body:
            return found
        found += decode_records(reply.body)


async def arrived(case: Any, count: int, topic: str = "t", queue_id: int = 1) -> list[Message]:
    deadline = asyncio.get_running_loop().time() + 5
    while len(found := await messages(case, topic, queue_id)) < count:
        assert asyncio.get_running_loop().time() < deadline, f"{len(found)} of {count} arrived"
        await asyncio.sleep(0.002)
    return found


def test_the_delay_levels_are_those_of_rocketmq() -> None:
    unit_ms = {"s": 1000, "m": 60_000, "h": 3_600_000}
    assert list(DELAY_LEVELS_MS) == [int(text[:-1]) * unit_ms[text[-1]] for text in SEED_LEVELS.split()]


DELAY_MECHANISM = (
    "Delay levels 1s 5s 10s 30s 1m..10m 20m 30m 1h 2h (R); clamp to max; SCHEDULE_TOPIC, queue=level−1;"
    " REAL_TOPIC/REAL_QID; first run 1 s, 100 ms poll, 10 s on failure; offsets persisted 10 s; clock correction"
)


@pytest.mark.mechanism(DELAY_MECHANISM)
def test_every_level_is_delivered_when_due_and_not_before(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        began_ms = case.clock.now_ms
        for level in (*range(18, 0, -1), 99):
            await send_delayed(case, level, b"level %d" % level)
        assert await messages(case) == []
        for number, delay_ms in enumerate(DELAY_LEVELS_MS, 1):
            case.clock.now_ms = began_ms + delay_ms - 1
            await asyncio.sleep(0.02)
            assert len(await messages(case)) == number - 1, "delivered early"
            case.clock.now_ms = began_ms + delay_ms
            found = await arrived(case, number + (number == 18))
            assert found[number - 1].body == b"level %d" % number
        last = found[-1]
        assert (last.body, last.tags, last.queue_id) == (b"level 99", "a", 1)
        assert "DELAY" not in last.properties and last.properties["REAL_TOPIC"] == "t"
        assert (last.store_timestamp_ms, last.born_host) == (case.clock.now_ms, found[0].born_host)
        waiting = await messages(case, "SCHEDULE_TOPIC_XXXX", 17)
        assert [message.body for message in waiting] == [b"level 18", b"level 99"]

    run_case(scenario)


TIMERS = ["TIMER_DELAY_MS\x014000\x02", "TIMER_DELAY_SEC\x014\x02", "TIMER_DELIVER_MS\x019999999999999\x02"]


@pytest.mark.parametrize("timer", TIMERS)
def test_a_delay_level_overrides_a_timer_as_in_rocketmq(run_case: Any, timer: str) -> None:
    async def scenario(case: Any) -> None:
        text = timer + "OWN\x01x\x02DELAY\x011\x02"
        assert (await case.ask(310, {"b": "t", "e": 1, "i": text}, b"late")).code == 0
        assert await messages(case) == []
        case.clock.now_ms += 1000
        (message,) = await arrived(case, 1)
        assert message.properties == {"OWN": "x", "REAL_TOPIC": "t", "REAL_QID": "1"}
        delivered = timer + "TIMER_OUT_MS\x011\x02"  # a timer message that another broker delivered does not wait again
        assert (await case.ask(310, {"b": "t", "e": 1, "i": delivered}, b"again")).code == 0
        assert [message.body for message in await arrived(case, 2)] == [b"late", b"again"]

    run_case(scenario)


@pytest.mark.parametrize(
    ("error", "tries", "delivered"),
    [
        (None, 20, [0, 1, 3, 4]),
        (OSError(errno.EBADMSG, "data/000 is damaged at byte 7"), 20, [0, 1, 3, 4]),
        (None, delay_module.DAMAGED_TRIES - 1, [0, 1, 2, 3, 4]),
        (OSError(errno.EIO, "Input/output error"), 20, [0, 1, 2, 3, 4]),
        (OSError("a file ends too early"), 20, [0, 1, 2, 3, 4]),
    ],
)
def test_a_damaged_message_is_skipped_after_some_tries_and_an_unreadable_one_never(
    run_case: Any, helpers: Any, monkeypatch: Any, caplog: Any, error: OSError | None, tries: int, delivered: list[int]
) -> None:
    """Message 2 is damaged or unreadable `tries` times."""
    monkeypatch.setattr(delay_module, "RETRY_S", 0.001)

    async def scenario(case: Any) -> None:
        for number in range(5):
            await send_delayed(case, 1, b"%d" % number)
        waiting = await messages(case, "SCHEDULE_TOPIC_XXXX", 0)
        read, left = case.ledger.store.read_bytes, tries

        def failing(position: int, size_bytes: int) -> bytes:
            nonlocal left
            if position != waiting[2].physical_offset or size_bytes != 4 or left == 0:
                return read(position, size_bytes)
            left -= 1
            if error is not None:
                raise error
            return bytes(size_bytes)

        monkeypatch.setattr(case.ledger.store, "read_bytes", failing)
        case.clock.now_ms += 1000
        bodies = [b"%d" % number for number in delivered]
        assert [message.body for message in await arrived(case, len(bodies))] == bodies
        is_skipped = len(bodies) == 4
        assert left == (tries - delay_module.DAMAGED_TRIES if is_skipped else 0)
        assert ("; skipping it after 6 tries" in caplog.text) is is_skipped
        case.ledger.become(Role.FOLLOWER, 2)
        await helpers.until(lambda: not case.broker.store.is_master)
        case.ledger.become(Role.LEADER, 3)
        await helpers.until(lambda: case.broker.store.is_master)
        await send_delayed(case, 1, b"later")
        case.clock.now_ms += 1000
        assert [message.body for message in await arrived(case, len(bodies) + 1)] == [*bodies, b"later"]

    run_case(scenario)


@pytest.mark.mechanism(DELAY_MECHANISM)
@pytest.mark.parametrize("ahead_ms", [7_200_000, 5_500])
def test_messages_stored_by_a_fast_clock_wait_their_delay_once_more_together(run_case: Any, ahead_ms: int) -> None:
    async def scenario(case: Any) -> None:
        began_ms = case.clock.now_ms
        case.clock.now_ms += ahead_ms
        for number in range(5):
            await send_delayed(case, 2, b"%d" % number)
        case.clock.now_ms = began_ms
        await asyncio.sleep(0.03)
        case.clock.now_ms = began_ms + 1_000
        await send_delayed(case, 2, b"later")  # store timestamps never go back, so this one's is too far ahead as well
        case.clock.now_ms = began_ms + 4_999
        await asyncio.sleep(0.03)
        assert await messages(case) == []
        case.clock.now_ms = began_ms + 5_000
        assert [message.body for message in await arrived(case, 5)] == [b"%d" % number for number in range(5)]
        case.clock.now_ms = began_ms + 5_999
        await asyncio.sleep(0.03)
        assert len(await messages(case)) == 5
        case.clock.now_ms = began_ms + 6_000
        assert (await arrived(case, 6))[-1].body == b"later"

    run_case(scenario)


@pytest.mark.mechanism(DELAY_MECHANISM)
def test_a_level_keeps_its_order_without_loss_or_duplicates_across_restarts(run_case: Any, helpers: Any) -> None:
    ledger = helpers.FakeLedger()
    sent = [b"%d" % number for number in range(300)]

    async def first(case: Any) -> None:
        for body in sent[:100]:
            await send_delayed(case, 2, body)
        case.clock.now_ms += 4000
        for body in sent[100:]:
            await send_delayed(case, 2, body)
        case.clock.now_ms += 1000
        assert [message.body for message in await arrived(case, 100)] == sent[:100]
        assert json.loads((await case.ask(45)).body)["offsetTable"]["2"] == 100

    async def second(case: Any) -> None:
        assert len(await messages(case)) == 100
        case.clock.now_ms += 60_000
        assert [message.body for message in await arrived(case, 300)] == sent

    async def third(case: Any) -> None:
        case.clock.now_ms += 60_000
        await asyncio.sleep(0.05)
        assert [message.body for message in await messages(case)] == sent

    run_case(first, ledger=ledger)
    run_case(second, ledger=ledger)
    run_case(third, ledger=ledger)


def test_delivered_messages_are_not_repeated_when_the_checkpoint_is_lost(
    run_case: Any, helpers: Any, tmp_path: Any
) -> None:
    """As after a crash, or on another member of the group: the log alone shows it."""
    ledger = helpers.FakeLedger()

    async def deliver(case: Any) -> None:
        for body in (b"a", b"b"):
            await send_delayed(case, 1, body)
        case.clock.now_ms += 1000
        await arrived(case, 2)

    async def check_delivered(case: Any) -> None:
        case.clock.now_ms += 10_000
        await asyncio.sleep(0.05)
        assert [message.body for message in await messages(case)] == [b"a", b"b"]

    run_case(deliver, ledger=ledger)
    (tmp_path / "data" / "consumequeue.checkpoint").unlink()
    run_case(check_delivered, ledger=ledger)


@pytest.mark.mechanism("CANDIDATE/FOLLOWER → changeToSlave")
def test_a_slave_delivers_nothing_and_the_next_master_delivers_once(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        await send_delayed(case, 1, b"late")
        case.ledger.become(Role.FOLLOWER, 2, leader_id="n2")
        case.clock.now_ms += 5000
        end = case.ledger.store.ledger_end_index
        await asyncio.sleep(0.05)
        assert case.ledger.store.ledger_end_index == end
        case.ledger.become(Role.LEADER, 3)
        assert [message.body for message in await arrived(case, 1)] == [b"late"]

    run_case(scenario)


def test_a_clock_that_is_set_back_adds_at_most_one_more_delay(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        await send_delayed(case, 1, b"x")
        case.clock.now_ms -= 3_600_000
        await asyncio.sleep(0.03)
        assert await messages(case) == []
        case.clock.now_ms += 999
        await asyncio.sleep(0.03)
        assert await messages(case) == []
        case.clock.now_ms += 1
        assert len(await arrived(case, 1)) == 1

    run_case(scenario)


def test_a_message_stored_after_the_clock_was_ahead_waits_only_its_delay(run_case: Any, monkeypatch: Any) -> None:
    """Its store timestamp is that of the message before it, an hour ahead; its own arrival counts."""
    monkeypatch.setattr(delay_module, "MAX_ARRIVALS", 3)

    async def scenario(case: Any) -> None:
        case.clock.now_ms += 3_600_000
        assert (await case.ask(310, {"b": "t", "e": 1}, b"from later")).code == 0
        case.clock.now_ms -= 3_600_000
        for number in range(6):
            await send_delayed(case, 1, b"%d" % number)
            case.clock.now_ms += 100
        case.clock.now_ms += 399
        await asyncio.sleep(0.03)
        assert len(await messages(case)) == 1
        case.clock.now_ms += 1
        assert [message.body for message in await arrived(case, 2)] == [b"from later", b"0"]
        case.clock.now_ms += 100
        assert (await arrived(case, 3))[-1].body == b"1"
        case.clock.now_ms += 300
        await asyncio.sleep(0.03)
        assert len(await messages(case)) == 3, "messages over the limit are due with the last one"
        case.clock.now_ms += 100
        assert len(await arrived(case, 7)) == 7

    run_case(scenario)


def test_many_messages_are_delivered_with_few_in_flight_at_a_time(run_case: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(delay_module, "MAX_IN_FLIGHT", 3)
    monkeypatch.setattr(delay_module, "PORTION_MESSAGES", 2)

    async def scenario(case: Any) -> None:
        for number in range(40):
            await send_delayed(case, 1, b"%d" % number)
        case.clock.now_ms += 1000
        assert [message.body for message in await arrived(case, 40)] == [b"%d" % number for number in range(40)]

    run_case(scenario)


def test_the_encoded_source_of_a_delivered_message_is_read_back() -> None:
    for level in (1, 7, 18):
        for offset in (0, 1, 2**40):
            assert delayed_source_of(delay_source(level, offset)) == (level, offset)
    assert [delayed_source_of(number) for number in (0, 5, -31)] == [None, None, None]


def test_batches_cannot_be_delayed(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        properties = b"DELAY\x013\x02"
        size = 20 + 1 + 2 + len(properties)
        numbers = (size, 0, 0, 0, 1)
        body = b"".join(number.to_bytes(4, "big") for number in numbers) + b"x"
        body += len(properties).to_bytes(2, "big") + properties
        assert (await case.ask(320, {"b": "t", "e": 0, "m": "true"}, body)).code == 13

    run_case(scenario)


@pytest.mark.mechanism("Retry/DLQ")
def test_a_message_becomes_a_dead_letter_after_sixteen_retries(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        await case.ask(310, {"b": "t", "e": 1, "i": "KEYS\x01k\x02TAGS\x01a\x02"}, b"poison")
        (message,) = await messages(case)
        original = message
        for number in range(16):
            fields = {"offset": message.physical_offset, "group": "g", "delayLevel": 0, "originMsgId": "x",
                      "originTopic": "t", "unitMode": False, "maxReconsumeTimes": 16}  # fmt: skip
            assert (await case.ask(36, fields)).code == 0
            level = min(3 + number, 18)
            case.clock.now_ms += DELAY_LEVELS_MS[level - 1] - 1
            await asyncio.sleep(0.01)
            assert len(await messages(case, "%RETRY%g", 0)) == number
            case.clock.now_ms += 1
            message = (await arrived(case, number + 1, "%RETRY%g", 0))[-1]
            assert (message.body, message.reconsume_times) == (b"poison", number + 1)
            assert message.properties["RETRY_TOPIC"] == "t"
            assert message.properties["ORIGIN_MESSAGE_ID"] == original.message_id
        assert (await case.ask(36, {**fields, "offset": message.physical_offset})).code == 0
        (dead,) = await messages(case, "%DLQ%g", 0)
        assert (dead.body, dead.properties["KEYS"], dead.tags) == (b"poison", "k", "a")

    run_case(scenario)


@pytest.mark.mechanism("Retry/DLQ")
def test_a_negative_delay_level_makes_a_dead_letter_at_once(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        await case.send(b"poison", queue_id=1)
        (message,) = await messages(case)
        assert (await case.ask(36, {"offset": message.physical_offset, "group": "g", "delayLevel": -1})).code == 0
        assert [dead.body for dead in await messages(case, "%DLQ%g", 0)] == [b"poison"]
        assert (await case.ask(36, {"offset": 1, "group": "g", "delayLevel": 0})).code == 1

    run_case(scenario)


@pytest.mark.mechanism("Retry/DLQ")
def test_a_retry_that_the_client_sends_itself_has_the_same_limit(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        for times, maximum in ((1, 16), (15, 16), (16, 16), (2, 2)):
            fields = {"b": "%RETRY%g", "e": 0, "j": times, "l": maximum}
            assert (await case.ask(310, fields, b"%d" % times)).code == 0
        assert [message.body for message in await messages(case, "%RETRY%g", 0)] == [b"1", b"15"]
        assert [message.body for message in await messages(case, "%DLQ%g", 0)] == [b"16", b"2"]
        late = {"b": "%RETRY%g", "e": 0, "j": 16, "l": 16, "i": "DELAY\x0118\x02KEYS\x01k\x02"}
        assert (await case.ask(310, late, b"late")).code == 0
        *_, dead = await messages(case, "%DLQ%g", 0)
        assert (dead.body, dead.properties.get("KEYS"), dead.properties.get("DELAY")) == (b"late", "k", None)

    run_case(scenario)
