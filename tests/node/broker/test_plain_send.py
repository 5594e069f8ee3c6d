"""Plain sends: whatever is sent, they leave the same bytes in the log, the same queues and the same answer as the
processor that takes every message apart."""

from __future__ import annotations

import asyncio
import struct
import zlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.broker import send_request
from node.broker.ledger import DLedgerCode, Role
from node.broker.plain_send import PlainSends
from node.broker.send import SendProcessor
from node.broker.send_back import RetryTopics
from node.remoting import Command, LateReply, RequestError, decode, encode
from node.store.record import prepare_record
from node.store.record_row import record_maker


class Taker:
    """Stands where the connection does when a late reply is given."""

    def __init__(self) -> None:
        self.replies: list[Command] = []

    def answer(self, command: Command, reply: Command | bytes) -> None:
        if isinstance(reply, bytes):
            frame, reply = reply, decode(reply[4:])
            assert encode(reply) == frame and int.from_bytes(frame[:4], "big") == len(frame) - 4
        self.replies.append(reply)

    def late_reply(self, command: Command, size_bytes: int, reply: Command | bytes) -> None:
        self.answer(command, reply)


def processor_of(parts: Any, *, accept_from_ms: int = 0, max_message_size_bytes: int = 300) -> SendProcessor:
    return SendProcessor(
        store=parts.store,
        topics=parts.topics,
        runtime=parts.runtime,
        store_host="10.77.0.1:10911",
        max_message_size_bytes=max_message_size_bytes,
        not_leader_remark=lambda: "NOT_LEADER leader=n2 addr=-",
        retries=RetryTopics(
            topics=parts.topics, groups=parts.groups, auto_create_groups=True, on_topics_changed=lambda: None
        ),
        honours_wait=True,
        accept_from_ms=accept_from_ms,
    )


async def outcome(process: Any, request: Command, connection: Any) -> Command | None:
    result = process(request, connection)
    if isinstance(result, LateReply):
        taker = Taker()
        result.begin(taker, request, 0)  # type: ignore[arg-type]
        for _ in range(10):
            await asyncio.sleep(0)
        (reply,) = taker.replies
        return reply
    return result if result is None or isinstance(result, Command) else await asyncio.wait_for(result, 5)


async def drains_when_committed(parts: Any, sends: PlainSends) -> None:
    """A drain waits for what is under way, and no longer."""
    draining = asyncio.ensure_future(sends.drain(60))
    await asyncio.sleep(0.01)
    assert not draining.done()
    parts.ledger.commit()
    await asyncio.wait_for(draining, 5)


def in_queues(parts: Any) -> dict[Any, Any]:
    return {
        key: (queue.read(0, 1000), queue.read_crcs(0, 1000), queue.max_offset) for key, queue in parts.queues.items()
    }


async def both_ways(make_parts: Any, requests: list[Command], **options: Any) -> int:
    """Send everything to a broker with plain sends and to one without; returns how many were plain."""
    seen = []
    plain = 0
    for is_quick in (False, True):
        parts = make_parts()
        await parts.start(master=True)
        try:
            slow = processor_of(parts, **options)
            quick = PlainSends(slow)
            replies = []
            for request in requests:
                if is_quick:
                    before = parts.store.put_total
                    result = quick._plain(request, parts.connection)
                    plain += result is not None
                    assert result is not None or parts.store.put_total == before
                    process = quick.process if result is None else lambda *_, given=result: given
                    replies.append(await outcome(process, request, parts.connection))
                else:
                    replies.append(await outcome(slow.process, request, parts.connection))
            await asyncio.sleep(0.01)
            entries = [(entry.index, entry.body) for entry in parts.ledger.store.entries]
            assert parts.dispatcher.failure is None
            seen.append((replies, entries, in_queues(parts), parts.store.put_total, parts.store.committed_total))
        finally:
            await parts.stop()
    assert seen[0] == seen[1]
    return plain


def batch(messages: list[tuple[int, bytes, bytes]]) -> bytes:
    return b"".join(
        struct.pack(">iiiii", 22 + len(body) + len(text), 0, 0, flag, len(body)) + body
        + struct.pack(">h", len(text)) + text
        for flag, body, text in messages
    )  # fmt: skip


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
NUMBERS = st.sampled_from(["0", "0", "0", "1", "-1", "", "7", "12345678901234", "x", " 2 ", "2147483648"])
BODIES = st.one_of(
    st.binary(max_size=40),
    st.just(bytes(301)),
    st.lists(
        st.tuples(
            st.integers(-5, 5), st.binary(max_size=20), PROPERTIES.map(lambda text: text.encode("utf-8", "replace"))
        ),
        max_size=4,
    ).map(batch),
)


@st.composite
def requests(draw: Any) -> Command:
    fields = {"a": "group", "b": draw(st.sampled_from(["t", "t", "t", "t", "read-only", "no-such", "%RETRY%g", ""]))}
    fields["e"] = draw(st.sampled_from(["0", "1", "1", "3", "4", "9", "x"]))
    for name in "fghj":
        if draw(st.booleans()):
            fields[name] = draw(NUMBERS)
    if draw(st.booleans()):
        fields["i"] = draw(PROPERTIES)
    if draw(st.booleans()):
        fields["m"] = draw(st.sampled_from(["true", "false", "1", "maybe"]))
    if draw(st.integers(0, 9)) == 0:
        fields.pop(draw(st.sampled_from(sorted(fields))))
    request = Command.request(draw(st.sampled_from([310, 310, 320])), fields, draw(BODIES))
    request.opaque = draw(st.integers(0, 1000))
    request.serializer = draw(st.sampled_from(["json", "binary"]))
    return request


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(requests(), max_size=6))
def test_plain_sends_leave_what_the_processor_leaves(make_parts: Any, sent: list[Command]) -> None:
    asyncio.run(both_ways(make_parts, sent))


def test_what_clients_send_all_day_is_plain(make_parts: Any) -> None:
    fields = {"a": "g", "b": "t", "c": "TBW102", "d": 4, "e": 1, "f": 0, "g": 1700000000000, "h": 0, "j": 0, "k": False}
    texts = ["", "WAIT\x01true\x02", "UNIQ_KEY\x01AC10\x02WAIT\x01true\x02", "KEYS\x01a b\x02TAGS\x01c\x02"]
    sent = [Command.request(310, {**fields, "i": text, "m": False}, b"body") for text in texts]
    body = batch([(0, b"one", b""), (3, b"two", b"KEYS\x01k\x02"), (0, b"", b"TAGS\x01c\x02")])
    sent += [Command.request(320, {**fields, "i": "", "m": True}, body)] * 2
    assert asyncio.run(both_ways(make_parts, sent)) == len(sent)


@pytest.mark.parametrize(
    "changed",
    [
        {"i": "DELAY\x013\x02"},
        {"i": "TIMER_DELIVER_MS\x011\x02"},
        {"i": "TRAN_MSG\x01true\x02"},
        {"i": "WAIT\x01false\x02"},
        {"f": 4},
        {"e": -1},
        {"j": 1},
    ],
)
def test_what_needs_a_second_look_gets_it(make_parts: Any, changed: dict[str, Any]) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start(master=True)
        request = Command.request(310, {"b": "t", "e": 1, **changed}, b"body")
        assert PlainSends(processor_of(parts))._plain(request, parts.connection) is None
        assert parts.store.put_total == 0
        await parts.stop()

    asyncio.run(main())


def test_refusals_and_lost_outcomes_are_answered_alike(make_parts: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start(master=True)
        slow = processor_of(parts)
        quick = PlainSends(slow)
        request = Command.request(310, {"b": "t", "e": 1}, b"body")
        for code in (DLedgerCode.LEADER_PENDING_FULL, DLedgerCode.DISK_ERROR, DLedgerCode.NOT_LEADER):
            parts.ledger.refuse_with = code
            first = await outcome(slow.process, request, parts.connection)
            assert await outcome(quick.process, request, parts.connection) == first
        parts.ledger.refuse_with = None
        parts.ledger.commit_by_hand = True
        answers = []
        for process in (slow.process, quick.process):
            waiting = asyncio.ensure_future(outcome(process, request, parts.connection))
            await asyncio.sleep(0)
            parts.ledger.fail_pending(DLedgerCode.TERM_CHANGED)
            answers.append(await waiting)
        assert answers[0] == answers[1] and answers[0].remark.startswith("the outcome is unknown")
        parts.ledger.become(Role.FOLLOWER, 9, leader_id="n2")
        assert await outcome(quick.process, request, parts.connection) == await outcome(
            slow.process, request, parts.connection
        )
        await parts.stop()

    asyncio.run(main())


def test_a_drain_waits_for_plain_messages_under_way(make_parts: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start(master=True)
        parts.ledger.commit_by_hand = True
        quick = PlainSends(processor_of(parts))
        reply = quick.process(Command.request(310, {"b": "t", "e": 1}, b"body"), parts.connection)
        assert isinstance(reply, LateReply)
        await drains_when_committed(parts, quick)
        await parts.stop()

    asyncio.run(main())


ALIKE = st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(0, 40), st.sampled_from([0, 0, 5])).flatmap(
    lambda kind: st.lists(
        st.tuples(
            st.just(kind[0]),
            st.binary(min_size=kind[1], max_size=kind[1]),
            st.text("abcdef", min_size=kind[2], max_size=kind[2]),
        ),
        min_size=1,
        max_size=20,
    )
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["t", "a-longer-topic", "é"]), st.integers(0, 2**31 - 1), st.integers(-(2**31), 2**31 - 1),
    st.sampled_from(["10.0.0.1:5", "[::1]:70", "[fe80::1]:9"]), st.sampled_from(["10.77.0.1:10911", "[::2]:1"]),
    st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.binary(max_size=50), st.text(max_size=20)), min_size=1)
    | ALIKE,
    st.integers(0, 2**40), st.integers(0, 2**62),
)  # fmt: skip
def test_a_row_of_records_is_the_records_one_by_one(
    topic: str, queue_id: int, sys_flag: int, born: str, store: str, messages: Any, offset: int, position: int
) -> None:
    maker = record_maker(topic, queue_id, sys_flag, born, store)
    encodable = [(flag, body, text) for flag, body, text in messages if text.isprintable()]
    row = [(flag, body, text.encode()) for flag, body, text in encodable]
    positions = list(range(position, position + len(row)))
    made = maker.make(
        row, positions, queue_offset=offset, born_timestamp_ms=7, store_timestamp_ms=9, reconsume_times=3
    )
    singly = [
        prepare_record(
            topic=topic, queue_id=queue_id, body=body, properties_text=text, sys_flag=sys_flag, flag=flag,
            born_timestamp_ms=7, born_host=born, store_host=store, reconsume_times=3,
        ).seal(queue_offset=offset + at, physical_offset=position + at, store_timestamp_ms=9)
        for at, (flag, body, text) in enumerate(encodable)
    ]  # fmt: skip
    assert made == singly and made.crcs == list(map(zlib.crc32, singly))
    numbers = zip(row, positions, strict=True)
    assert made == [maker.make_one(one, at, offset + n, 7, 9, 3) for n, (one, at) in enumerate(numbers)]
    assert maker.sizes(row) == [len(record) for record in singly]


EVEN = st.builds(
    lambda size, text, flags: batch([(flag, bytes([flag & 255]) * size, text) for flag in flags]),
    st.integers(0, 5), st.sampled_from([b"", b"A\x01b\x02", b"\xc3\xa9", b"\xff"]),
    st.lists(st.integers(-5, 5), min_size=1, max_size=5),
)  # fmt: skip


def split(body: bytes) -> list[tuple[int, bytes, str]] | str:
    try:
        return send_request.split_batch(body)
    except RequestError as error:
        return str(error)


@settings(max_examples=400, deadline=None)
@given(st.one_of(EVEN, BODIES), st.data())
def test_batches_of_messages_of_one_size_are_split_as_others(body: bytes, data: st.DataObject) -> None:
    if body and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(body) - 1))
        body = body[:at] + data.draw(st.sampled_from([b"", b"\0", b"\1", b"\xff"])) + body[at + 1 :]
    with pytest.MonkeyPatch.context() as patch:
        quick = split(body)
        patch.setattr(send_request, "_split_even", lambda body: None)
        assert quick == split(body)
