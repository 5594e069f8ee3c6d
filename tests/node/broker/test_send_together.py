"""Coalesced sends: stored and answered like single ones, byte for byte, whatever they contain."""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
from itertools import groupby
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.broker.ledger import DLedgerCode, Role, StoredInPart
from node.broker.send import VARIABLE_FIELDS, SendProcessor
from node.broker.send_back import RetryTopics
from node.remoting import Command, DeferredReply, FrameParser, TemplateRequest, decode, encode
from tests.node.broker.replies import replies_of, reply_of


def processor_of(parts: Any, *, accept_from_ms: int = 0) -> SendProcessor:
    return SendProcessor(
        store=parts.store,
        topics=parts.topics,
        runtime=parts.runtime,
        store_host="10.77.0.1:10911",
        max_message_size_bytes=1000,
        not_leader_remark=lambda: "NOT_LEADER leader=n2 addr=-",
        retries=RetryTopics(
            topics=parts.topics, groups=parts.groups, auto_create_groups=True, on_topics_changed=lambda: None
        ),
        honours_wait=True,
        accept_from_ms=accept_from_ms,
    )


def by_template(requests: list[Command]) -> list[Command]:
    """The requests as read by a connection that knows the templates of their headers."""
    parser = FrameParser(variable=VARIABLE_FIELDS)
    frames = [encode(request) for request in requests]
    for _ in range(66):
        for frame in frames:
            parser.feed(frame)
    return parser.feed(b"".join(frames))


async def turn(sends: SendProcessor, requests: list[Command], connection: Any) -> tuple[list[Command], list[int], int]:
    """Process requests that came in one turn as a connection does. Returns the replies, the number of the request that
    each answers, and how many were processed together."""
    answers: list[Any] = []
    numbers: list[int] = []
    at = together = 0
    while at < len(requests):
        _, run = next(groupby(requests[at:], lambda each: (each.code, type(each))))
        of_one_kind = [each for each in run if isinstance(each, TemplateRequest)]
        reply = sends.process_together(of_one_kind, connection) if of_one_kind else None
        if reply is None:
            answers.append(sends.process(requests[at], connection))
            numbers.append(at)
            at += 1
        else:
            answers.append(reply)
            places = {id(request): number for number, request in enumerate(requests)}
            numbers += [places[id(request)] for request in reply.requests]
            assert sorted(numbers[at:]) == list(range(at, at + len(reply.requests)))
            at += len(reply.requests)
            together += len(reply.requests)
    return [reply for answer in answers for reply in await replies_of(answer)], numbers, together


def in_queues(parts: Any) -> dict[Any, Any]:
    return {
        key: (queue.read(0, 1000), queue.read_crcs(0, 1000), queue.max_offset) for key, queue in parts.queues.items()
    }


def in_order_of_log(answered: list[tuple[int, Command]]) -> list[tuple[int, Command]]:
    """Numbers of requests and their replies, refusals first. A send that creates its topic is stored after some later
    ones."""
    return sorted(answered, key=lambda each: int(each[1].ext_fields.get("msgId", "0")[16:32] or "0", 16))


def queue_of(request: Command) -> tuple[Any, Any]:
    fields = request.ext_fields
    return fields.get("b", fields.get("topic")), fields.get("e", fields.get("queueId"))


async def both_ways(make_parts: Any, requests: list[Command]) -> int:
    """Send everything together, then one by one in the resulting order of the log, which must keep that of the requests
    for each queue. The results must be equal; returns how many were processed together."""
    seen, together, numbers = [], 0, [-1]
    for is_together in (True, False):
        parts = make_parts()
        await parts.start(master=True)
        try:
            sends = processor_of(parts)
            if is_together:
                replies, numbers, together = await turn(sends, by_template(requests), parts.connection)
                stored = in_order_of_log(list(zip(numbers, replies, strict=True)))
                numbers, replies = [number for number, _ in stored], [reply for _, reply in stored]
                of_queues: dict[Any, list[int]] = {}
                for number, reply in stored:
                    if "msgId" in reply.ext_fields:
                        of_queues.setdefault(queue_of(requests[number]), []).append(number)
                assert all(of_queue == sorted(of_queue) for of_queue in of_queues.values())
            else:
                decoded = [decode(encode(requests[number])[4:]) for number in numbers]
                replies = [await reply_of(sends, request, parts.connection) for request in decoded]
            await asyncio.sleep(0.01)
            entries = [(entry.index, entry.body) for entry in parts.ledger.store.entries]
            assert parts.dispatcher.failure is None
            counts = parts.store.put_total, parts.store.committed_total, sum(parts.store.put_times.counts)
            seen.append((replies, entries, in_queues(parts), counts))
        finally:
            await parts.stop()
            shutil.rmtree(parts.data_dir)  # with the created topics
            os.mkdir(parts.data_dir)
    for one, other in zip(*seen, strict=True):
        assert one == other
    return together


def batch(messages: list[tuple[int, bytes, bytes]]) -> bytes:
    return b"".join(
        struct.pack(">iiiii", 22 + len(body) + len(text), 0, 0, flag, len(body)) + body
        + struct.pack(">h", len(text)) + text
        for flag, body, text in messages
    )  # fmt: skip


V2 = {"a": "g", "b": "t", "c": "TBW102", "d": 4, "e": 1, "f": 0, "g": 17, "h": 0, "i": "", "j": 0, "k": False}
V1_NAMES = {
    "a": "producerGroup", "b": "topic", "c": "defaultTopic", "d": "defaultTopicQueueNums", "e": "queueId",
    "f": "sysFlag", "g": "bornTimestamp", "h": "flag", "i": "properties", "j": "reconsumeTimes", "k": "unitMode",
    "m": "batch",
}  # fmt: skip


def request(
    serializer: str = "json", code: int = 310, body: bytes = b"body", opaque: int = 1, **changed: Any
) -> Command:
    fields = {**V2, **changed}
    if code == 10:
        fields = {V1_NAMES[name]: value for name, value in fields.items()}
    made = Command.request(code, fields, body)
    made.opaque, made.serializer = opaque, serializer  # type: ignore[assignment]
    return made


VALUES = st.sampled_from(["", "a", "é", "true", "false", "FALSE", "3", "0", "x y", "\ud800"])
NAMES = st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "WAIT", "DELAY", "TIMER_DELIVER_MS", "TRAN_MSG", "OWN"])
PROPERTIES = st.one_of(
    st.just(""),
    st.just("WAIT\x01true\x02"),
    st.lists(st.tuples(NAMES, VALUES), max_size=4).map(
        lambda pairs: "".join(f"{name}\x01{value}\x02" for name, value in pairs)
    ),
    st.text(max_size=20),
)
KEYED = [(0, b"body", b"UNIQ_KEY\x01%032X\x02WAIT\x01true\x02" % number) for number in range(9)]
BATCHES = st.sampled_from(
    [
        batch([(1, b"x", b"TAGS\x01a\x02"), (0, b"y", b"")]),
        batch([(0, b"body", b"")] * 9),
        batch(KEYED),
        batch([*KEYED[:7], (0, b"body", KEYED[0][2].replace(b"WAIT", b"TAGS"))]),
        batch([(7, bytes(number), b"UNIQ_KEY\x01%d\x02" % number) for number in range(4)]),
        batch([(0, b"one", b"KEYS\x01a b\x02TAGS\x01c\x02")]),
        batch([(0, b"later", b"DELAY\x013\x02")]),
        batch([(0, b"timed", b"TIMER_DELAY_MS\x013\x02")] * 7),
        batch([(0, b"half", b"TRAN_MSG\x01true\x02")]),
        batch([(0, b"body", b"\xff")]),
        b"no batch",
        b"",
    ]
)


@st.composite
def requests(draw: Any) -> Command:
    changed: dict[str, Any] = {
        "b": draw(st.sampled_from(["t", "t", "t", "t", "read-only", "SCHEDULE_TOPIC_XXXX", "no-such", ""])),
        "e": draw(st.sampled_from([0, 1, 1, 2, 3, 9, "x"])),
        "g": draw(st.sampled_from([0, 1700000000000, 10**17, "", " 2 "])),
        "i": draw(PROPERTIES),
        "f": draw(st.sampled_from([0, 0, 0, 1, 4])),
        "h": draw(st.sampled_from([0, 0, 3, 2**31])),
        "j": draw(st.sampled_from([0, 0, 0, 1])),
    }
    body = draw(st.sampled_from([b"", b"body", bytes(1001)]))
    code = draw(st.sampled_from([310, 310, 10, 320, 320, 320]))
    if code == 320 or draw(st.integers(0, 7)) == 0:
        changed["m"], body = draw(st.booleans()) or code != 320, draw(BATCHES)
    return request(
        draw(st.sampled_from(["json", "binary"])), code, body,
        draw(st.integers(0, 1000)), **changed,
    )  # fmt: skip


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(requests(), max_size=8))
def test_coalesced_sends_are_stored_and_answered_like_single_ones(make_parts: Any, sent: list[Command]) -> None:
    asyncio.run(both_ways(make_parts, sent))


@pytest.mark.parametrize("code", [310, 10])
@pytest.mark.parametrize("serializer", ["json", "binary"])
def test_ordinary_sends_are_coalesced(make_parts: Any, code: int, serializer: str) -> None:
    texts = ["", "WAIT\x01true\x02", "UNIQ_KEY\x01AC10\x02WAIT\x01true\x02", "KEYS\x01a b\x02TAGS\x01c\x02"]
    sent = [
        request(serializer, code, opaque=number, e=number % 4, i=texts[number % len(texts)]) for number in range(12)
    ]
    assert asyncio.run(both_ways(make_parts, sent)) == len(sent)


@pytest.mark.parametrize("serializer", ["json", "binary"])
def test_coalesced_messages_of_a_queue_keep_their_order(make_parts: Any, serializer: str) -> None:
    """Similar messages form one batch, though others of the same queue lie between them."""
    texts = ["UNIQ_KEY\x01AC1%03d\x02WAIT\x01true\x02"] * 9
    texts += ["TAGS\x01a\x02UNIQ_KEY\x01%03d\x02", "", "KEYS\x01b%03d\x02"]
    sent = [
        request(serializer, body=b"%02d" % (number % 20), opaque=100 + number, e=number % 2, g=17 + number // 25,
            i=texts[number * 7 // 10 % len(texts)].replace("%03d", f"{number:03}"))
        for number in range(50)
    ]  # fmt: skip
    assert asyncio.run(both_ways(make_parts, sent)) == len(sent)


@pytest.mark.parametrize("serializer", ["json", "binary"])
def test_batch_sends_are_coalesced_too(make_parts: Any, serializer: str) -> None:
    bodies = [batch(KEYED), batch([(1, b"x", b"TAGS\x01a\x02"), (0, b"y", b"UNIQ_KEY\x01B7\x02")])]
    texts = ["", "WAIT\x01true\x02", "UNIQ_KEY\x01AC10\x02WAIT\x01true\x02"]
    sent = [
        request(serializer, 320, bodies[number % 2], number, e=number % 4, i=texts[number % len(texts)], m=True)
        for number in range(12)
    ]
    assert asyncio.run(both_ways(make_parts, sent)) == len(sent)
    mixed = [*sent[:3], request(serializer, opaque=90), request(serializer, opaque=91), *sent[3:6]]
    assert asyncio.run(both_ways(make_parts, mixed)) == len(mixed)


def test_a_send_that_needs_the_slow_path_keeps_its_place(make_parts: Any) -> None:
    texts = ["", "", "DELAY\x013\x02", "", "TRAN_MSG\x01true\x02", "WAIT\x01false\x02", "TIMER_DELIVER_MS\x011\x02", ""]
    sent = [request(opaque=number, i=text) for number, text in enumerate(texts)]
    assert asyncio.run(both_ways(make_parts, sent)) == texts.count("")
    for changed in ({"f": 4}, {"j": 1}):
        assert asyncio.run(both_ways(make_parts, [request(**changed)])) == 0


@pytest.mark.parametrize("serializer", ["json", "binary"])
@pytest.mark.parametrize("changed", [{"e": 9}, {"b": "SCHEDULE_TOPIC_XXXX"}])
def test_sends_to_an_invalid_queue_or_topic_are_refused_together(
    make_parts: Any, serializer: str, changed: dict[str, Any]
) -> None:
    sent = [request(serializer, opaque=number, **changed) for number in range(3)]
    assert asyncio.run(both_ways(make_parts, [sent[0], request(serializer), *sent[1:]])) == 4


def test_a_slave_refuses_coalesced_sends_like_single_ones(make_parts: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start(master=True)
        sends = processor_of(parts)
        sent = by_template([request(opaque=number) for number in range(3)])
        assert (await turn(sends, sent, parts.connection))[2] == 3
        parts.ledger.become(Role.FOLLOWER, 9, leader_id="n2")
        replies, _, together = await turn(sends, sent, parts.connection)
        assert together == 3 and [reply.opaque for reply in replies] == [0, 1, 2]
        assert replies == [await reply_of(sends, each, parts.connection) for each in sent]
        await parts.stop()

    asyncio.run(main())


@pytest.mark.parametrize("is_batch", [False, True])
def test_coalesced_sends_that_fail_are_answered_like_single_ones(make_parts: Any, is_batch: bool) -> None:
    kind: dict[str, Any] = {"code": 320, "body": batch(KEYED), "m": True} if is_batch else {}

    async def main() -> None:
        answers = []
        for is_together in (False, True):
            parts = make_parts()
            await parts.start(master=True)
            sends = processor_of(parts)
            sent = [request(opaque=number, **kind) for number in range(3)]
            sent = by_template(sent) if is_together else sent
            seen: list[Any] = []
            for code in (DLedgerCode.LEADER_PENDING_FULL, DLedgerCode.DISK_ERROR, DLedgerCode.NOT_LEADER):
                parts.ledger.refuse_with = code
                seen.append((await turn(sends, sent, parts.connection))[0])
            parts.ledger.refuse_with = None
            parts.ledger.commit_by_hand = True
            for failure in (None, StoredInPart(10, "not synced"), DLedgerCode.TERM_CHANGED):
                waiting = asyncio.ensure_future(turn(sends, sent, parts.connection))
                await asyncio.sleep(0)
                if failure is None:
                    parts.ledger.commit()
                elif isinstance(failure, StoredInPart):
                    parts.ledger.fail_pending_with(failure)
                else:
                    parts.ledger.fail_pending(failure)
                replies, _, together = await waiting
                assert together == (len(sent) if is_together else 0)
                seen.append(replies)
            await parts.stop()
            answers.append(seen)
        assert answers[0] == answers[1]
        assert [reply.opaque for reply in answers[1][3]] == [0, 1, 2]

    asyncio.run(main())


def test_a_drain_waits_for_coalesced_sends(make_parts: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start(master=True)
        parts.ledger.commit_by_hand = True
        sends = processor_of(parts)
        sent = cast("list[TemplateRequest]", by_template([request(), request()]))
        reply = sends.process_together(sent, parts.connection)
        assert isinstance(reply, DeferredReply) and len(reply.requests) == 2
        draining = asyncio.ensure_future(sends.drain(60))
        await asyncio.sleep(0.01)
        assert not draining.done()
        parts.ledger.commit()
        await asyncio.wait_for(draining, 5)
        await parts.stop()

    asyncio.run(main())
