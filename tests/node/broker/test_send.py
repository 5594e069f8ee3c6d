"""Sending: the codes of every refusal, the reply, queue offsets, the outcome after the append."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from node.broker.ledger import DLedgerCode, Role
from node.broker.send import SendProcessor
from node.broker.send_back import RetryTopics
from node.broker.send_request import SendHeader, split_batches
from node.remoting import Command, RequestError
from node.store.record import decode_record
from tests.node.broker.replies import replies_of, reply_of

Scenario = Callable[[Any, SendProcessor], Coroutine[Any, Any, None]]


@pytest.fixture
def run(make_parts: Any) -> Callable[..., Any]:
    def runner(scenario: Scenario, *, master: bool = True) -> Any:
        async def main() -> Any:
            parts = make_parts()
            await parts.start(master=master)
            processor = SendProcessor(
                store=parts.store,
                topics=parts.topics,
                runtime=parts.runtime,
                store_host="10.77.0.1:10911",
                max_message_size_bytes=1000,
                not_leader_remark=lambda: "NOT_LEADER leader=n2 addr=-",
                retries=RetryTopics(
                    topics=parts.topics, groups=parts.groups, auto_create_groups=True, on_topics_changed=lambda: None
                ),
            )
            try:
                await scenario(parts, processor)
            finally:
                await parts.stop()

        return asyncio.run(main())

    return runner


async def answer(parts: Any, processor: SendProcessor, request: Command) -> Command:
    """The reply that the remoting server would send."""
    return await reply_of(processor, request, parts.connection)


def test_the_reply_to_a_committed_send_has_the_queue_offset_and_message_id(run: Any, helpers: Any) -> None:
    async def scenario(parts: Any, processor: SendProcessor) -> None:
        request = helpers.send_request(queue_id=3, properties="TAGS\x01a\x02", flag=9, reconsumeTimes=2)
        reply = await answer(parts, processor, request)
        # the no-op takes the 48 bytes before, so the record lies at 48 + 48
        assert (reply.code, reply.ext_fields) == (
            0,
            {
                "msgId": "0A4D000100002A9F0000000000000060",
                "queueId": "3",
                "queueOffset": "0",
                "transactionId": "",
                "MSG_REGION": "DefaultRegion",
                "TRACE_ON": "true",
            },
        )
        message, _ = decode_record(parts.ledger.store.get(1).body)
        assert (message.topic, message.queue_id, message.body) == ("t", 3, b"hello")
        assert (message.physical_offset, message.queue_offset) == (96, 0)
        assert (message.born_host, message.store_host) == ("127.0.0.1:50000", "10.77.0.1:10911")
        assert (message.born_timestamp_ms, message.store_timestamp_ms) == (5, 1_700_000_000_000)
        assert (message.flag, message.reconsume_times, message.properties) == (9, 2, {"TAGS": "a"})
        assert message.message_id == reply.ext_fields["msgId"]

    run(scenario)


def test_queue_offsets_count_up_in_log_order(run: Any, helpers: Any) -> None:
    async def scenario(parts: Any, processor: SendProcessor) -> None:
        parts.ledger.commit_by_hand = True
        answers = [
            processor.process(helpers.send_request(queue_id=number % 2), parts.connection) for number in range(6)
        ]
        parts.ledger.commit()
        replies = [reply for each in answers for reply in await replies_of(each)]
        assert [reply.ext_fields["queueOffset"] for reply in replies] == ["0", "0", "1", "1", "2", "2"]

    run(scenario)


def test_a_send_is_not_answered_before_it_is_committed(run: Any, helpers: Any) -> None:
    async def scenario(parts: Any, processor: SendProcessor) -> None:
        parts.ledger.commit_by_hand = True
        future = asyncio.ensure_future(answer(parts, processor, helpers.send_request()))
        await asyncio.sleep(0.01)
        assert not future.done() and parts.store.committed_total == 0
        parts.ledger.commit()
        assert (await future).code == 0
        assert parts.store.committed_total == parts.store.put_total == 1

    run(scenario)


@pytest.mark.mechanism(
    "putMessage refusals: shutdown, SLAVE, not writeable → SERVICE_NOT_AVAILABLE; topic >127 →"
    " MESSAGE_ILLEGAL; properties >32767 → PROPERTIES_SIZE_EXCEEDED; page-cache busy"
)
@pytest.mark.mechanism("MESSAGE_SIZE_EXCEEDED")
@pytest.mark.parametrize(
    ("request_changes", "code", "remark"),
    [
        ({"topic": "unknown"}, 17, "create it first"),
        ({"topic": "SCHEDULE_TOPIC_XXXX", "queue_id": 0}, 16, "not writable"),
        ({"topic": "t" * 128}, 13, "longer than 127"),
        ({"properties": "k\x01" + "v" * 32766}, 13, "longer than 32767"),
        ({"properties": "k\x01" + "é" * 20000}, 13, "properties of 40002 bytes"),
        ({"properties": "k\x01\ud800"}, 13, "cannot be written as UTF-8"),
        ({"topic": "\ud800"}, 17, "create it first"),
        ({"body": b"x" * 1001}, 13, "body of 1001 bytes, allowed are 1000"),
        ({"queue_id": 4}, 1, "queue 4 of topic 't', which has 4"),
        ({"queue_id": "x"}, 1, "no whole number"),
        ({"sysFlag": 4}, 16, "transactional"),
        ({"properties": "TRAN_MSG\x01true\x02"}, 16, "transactional"),
        ({"properties": "TRAN_MSG\x01true\x02", "sysFlag": 8}, 13, "only the broker"),
        ({"properties": "DELAY\x01soon\x02"}, 13, "no number"),
        ({"properties": "TIMER_DELAY_SEC\x01259201\x02DELAY\x010\x02"}, 13, "timer message illegal"),
        ({"bornTimestamp": 2**63}, 1, "no whole number of 64 bits"),
        ({"flag": 2**31}, 13, "out of range"),
    ],
)
def test_invalid_sends_are_refused(
    run: Any, helpers: Any, request_changes: dict[str, Any], code: int, remark: str
) -> None:
    async def scenario(parts: Any, processor: SendProcessor) -> None:
        before = parts.ledger.store.ledger_end_index
        reply = await answer(parts, processor, helpers.send_request(**request_changes))
        assert reply.code == code and remark in str(reply.remark)
        assert parts.ledger.store.ledger_end_index == before

    run(scenario)


@pytest.mark.mechanism(
    "putMessage refusals: shutdown, SLAVE, not writeable → SERVICE_NOT_AVAILABLE; topic >127 → "
    "MESSAGE_ILLEGAL; properties >32767 → PROPERTIES_SIZE_EXCEEDED; page-cache busy"
)
def test_a_slave_refuses_a_send_without_appending_it(run: Any, helpers: Any) -> None:
    async def scenario(parts: Any, processor: SendProcessor) -> None:
        reply = await answer(parts, processor, helpers.send_request())
        assert (reply.code, reply.remark) == (14, "NOT_LEADER leader=n2 addr=-")
        assert parts.ledger.store.ledger_end_index == -1

    run(scenario, master=False)


@pytest.mark.mechanism(
    "putMessage refusals: shutdown, SLAVE, not writeable → SERVICE_NOT_AVAILABLE; topic >127 → "
    "MESSAGE_ILLEGAL; properties >32767 → PROPERTIES_SIZE_EXCEEDED; page-cache busy"
)
@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (DLedgerCode.NOT_LEADER, 14),
        (DLedgerCode.LEADER_PENDING_FULL, 2),
        (DLedgerCode.DISK_ERROR, 14),
    ],
)
def test_a_send_that_the_log_refuses_uses_no_queue_offset(run: Any, helpers: Any, refusal: int, code: int) -> None:
    async def scenario(parts: Any, processor: SendProcessor) -> None:
        parts.ledger.refuse_with = refusal
        assert (await answer(parts, processor, helpers.send_request())).code == code
        parts.ledger.refuse_with = None
        reply = await answer(parts, processor, helpers.send_request())
        assert reply.ext_fields["queueOffset"] == "0"  # the refused send used no queue offset

    run(scenario)


@pytest.mark.parametrize("failure", [DLedgerCode.WAIT_QUORUM_ACK_TIMEOUT, DLedgerCode.TERM_CHANGED])
def test_a_send_that_fails_after_the_append_has_an_unknown_outcome(run: Any, helpers: Any, failure: int) -> None:
    async def scenario(parts: Any, processor: SendProcessor) -> None:
        parts.ledger.commit_by_hand = True
        future = processor.process(helpers.send_request(), parts.connection)
        parts.ledger.fail_pending(failure)
        (reply,) = await replies_of(future)
        assert reply.code == 1 and "outcome is unknown" in reply.remark

    run(scenario)


def test_a_reelected_leader_refuses_sends_until_it_is_promoted(run: Any, helpers: Any) -> None:
    async def scenario(parts: Any, processor: SendProcessor) -> None:
        parts.ledger.commit_by_hand = True
        parts.ledger.become(Role.FOLLOWER, 2)
        parts.ledger.become(Role.LEADER, 3)
        assert (await answer(parts, processor, helpers.send_request())).code == 14
        parts.ledger.commit()
        await helpers.until(lambda: parts.store.is_master)
        parts.ledger.commit_by_hand = False
        assert (await answer(parts, processor, helpers.send_request())).code == 0

    run(scenario)


@pytest.mark.mechanism("Put lock (spin/reentrant); store time set inside")
def test_store_timestamps_never_go_back(run: Any, helpers: Any) -> None:
    async def scenario(parts: Any, processor: SendProcessor) -> None:
        for now_ms in (1000, 3000, 2000, 2500, 4000):
            parts.clock.now_ms = now_ms
            await answer(parts, processor, helpers.send_request())
        await helpers.until(lambda: parts.dispatcher.dispatched_index == 5)
        parts.clock.now_ms = 500
        parts.ledger.become(Role.LEADER, 2)
        await helpers.until(lambda: parts.store.is_master)
        await answer(parts, processor, helpers.send_request())
        stamps = [
            decode_record(entry.body)[0].store_timestamp_ms for entry in parts.ledger.store.entries if entry.is_message
        ]
        assert stamps == [1000, 3000, 3000, 3000, 4000, 4000]

    run(scenario)


def test_a_send_to_a_negative_queue_id_goes_to_any_queue(run: Any, helpers: Any) -> None:
    async def scenario(parts: Any, processor: SendProcessor) -> None:
        replies = [await answer(parts, processor, helpers.send_request(queue_id=-1)) for _ in range(60)]
        assert {reply.ext_fields["queueId"] for reply in replies} == {"0", "1", "2", "3"}

    run(scenario)


def test_one_letter_fields_mean_the_same_as_named_ones() -> None:
    request = Command.request(
        310,
        {"a": "group", "b": "t", "c": "TBW102", "d": 4, "e": 3, "f": 1, "g": 7, "h": 5, "i": "k\x01v", "j": 2,
         "k": False, "l": 16, "m": False, "n": "broker-a"},
    )  # fmt: skip
    named = Command.request(
        10,
        {"topic": "t", "queueId": 3, "sysFlag": 1, "bornTimestamp": 7, "flag": 5, "properties": "k\x01v",
         "reconsumeTimes": 2, "batch": "false"},
    )  # fmt: skip
    assert SendHeader.of(request) == SendHeader.of(named)
    assert SendHeader.of(request).queue_id == 3 and not SendHeader.of(request).batch


def batch_message(body: bytes, properties: bytes = b"", flag: int = 0) -> bytes:
    total = 4 + 4 + 4 + 4 + 4 + len(body) + 2 + len(properties)
    return struct.pack(">iiiii", total, 0, 0, flag, len(body)) + body + struct.pack(">h", len(properties)) + properties


def test_a_batch_is_stored_message_by_message(run: Any, helpers: Any) -> None:
    async def scenario(parts: Any, processor: SendProcessor) -> None:
        await answer(parts, processor, helpers.send_request(queue_id=1))
        body = batch_message(b"one", b"TAGS\x01x\x02", 1) + batch_message(b"") + batch_message(b"three")
        request = Command.request(320, {"b": "t", "e": 1, "m": "true"}, body)
        reply = await answer(parts, processor, request)
        assert reply.code == 0 and reply.ext_fields["queueOffset"] == "1"
        messages = [decode_record(entry.body)[0] for entry in parts.ledger.store.entries[2:]]
        assert [message.body for message in messages] == [b"one", b"", b"three"]
        assert [message.queue_offset for message in messages] == [1, 2, 3]
        assert (messages[0].tags, messages[0].flag) == ("x", 1)
        assert reply.ext_fields["msgId"].split(",") == [message.message_id for message in messages]

    run(scenario)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0",
        batch_message(b"x")[:-1],
        batch_message(b"x") + b"\0" * 19,
        batch_message(b"x").replace(b"\x01x", b"\x02x"),
        struct.pack(">iiiiih", 22, 0, 0, 0, -1, 0),
        batch_message(b"x", b"\xff"),
        batch_message(b"") * 4097,
    ],
)
def test_malformed_batches_are_illegal(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        split_batches([body])
    assert caught.value.code == 13


@pytest.mark.mechanism("Orderly shutdown flush")
def test_drain_waits_for_pending_sends(run: Any, helpers: Any) -> None:
    async def scenario(parts: Any, processor: SendProcessor) -> None:
        parts.ledger.commit_by_hand = True
        future = asyncio.ensure_future(reply_of(processor, helpers.send_request(), parts.connection))
        await processor.drain(0.01)
        assert not future.done()
        asyncio.get_running_loop().call_later(0.01, parts.ledger.commit)
        await processor.drain(5)
        assert (await asyncio.wait_for(future, 5)).code == 0

    run(scenario)
