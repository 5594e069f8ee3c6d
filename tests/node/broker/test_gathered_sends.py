"""Sends that came together: stored and answered as one by one, byte for byte, whatever is among them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.broker.gathered_sends import PLACES, GatheredSends
from node.broker.ledger import DLedgerCode, StoredInPart
from node.broker.plain_send import PlainSends
from node.remoting import Command, FormedRequest, FrameParser, LateReply, decode, encode
from tests.node.broker.test_plain_send import (
    PROPERTIES,
    Taker,
    batch,
    drains_when_committed,
    in_queues,
    outcome,
    processor_of,
)


def _taken() -> bool:
    return False


def _hooked() -> bool:
    return True


class GroupTaker(Taker):
    """The same for replies that are given together."""

    def send_frames(self, frames: bytes) -> None:
        while frames:
            end = 4 + int.from_bytes(frames[:4], "big")
            self.answer(Command(0), frames[:end])
            frames = frames[end:]

    def late_replies(self, count: int, size_bytes: int, frames: bytes) -> None:
        before = len(self.replies)
        self.send_frames(frames)
        assert len(self.replies) == before + count


def formed(requests: list[Command]) -> list[Command]:
    """The requests as a connection reads them that knows their forms."""
    parser = FrameParser(places=PLACES)
    frames = [encode(request) for request in requests]
    for frame in [frame for frame in frames for _ in range(2)]:
        parser.feed(frame)
    for _ in range(64):
        for frame in frames:
            parser.feed(frame)
    return [command for frame in frames for command in parser.feed(frame)]


async def turn(gathered: GatheredSends, plain: PlainSends, requests: list[Command], connection: Any) -> list[Any]:
    """What a connection does with requests that came in one turn: their replies, in order, and how many were taken."""
    waiting: list[Any] = []
    at = taken = 0
    while at < len(requests):
        replies = gathered.take(requests, at, len(requests), connection)
        if replies is not None:
            taker = GroupTaker()
            replies.begin(taker)  # type: ignore[arg-type]
            waiting.append(taker)
            at += replies.count
            taken += replies.count
            continue
        result = plain.process(requests[at], connection)
        if isinstance(result, LateReply):
            taker = GroupTaker()
            result.begin(taker, requests[at], 0)  # type: ignore[arg-type]
            waiting.append(taker)
        else:
            waiting.append(result)
        at += 1
    for _ in range(10):
        await asyncio.sleep(0)
    answers: list[Any] = []
    for each in waiting:
        if isinstance(each, GroupTaker):
            answers += each.replies
        else:
            answers.append(each if each is None or isinstance(each, Command) else await asyncio.wait_for(each, 5))
    return [answers, taken]


async def both_ways(make_parts: Any, requests: list[Command]) -> int:
    """Send everything together, and one by one to a broker that takes each apart; returns how many were gathered."""
    seen, taken = [], 0
    for is_together in (False, True):
        parts = make_parts()
        await parts.start(master=True)
        try:
            slow = processor_of(parts)
            if is_together:
                plain = PlainSends(slow)
                gathered = GatheredSends(plain, is_hooked=lambda: False)
                replies, taken = await turn(gathered, plain, formed(requests), parts.connection)
            else:
                long_way = [decode(encode(request)[4:]) for request in requests]
                replies = [await outcome(slow.process, request, parts.connection) for request in long_way]
            await asyncio.sleep(0.01)
            entries = [(entry.index, entry.body) for entry in parts.ledger.store.entries]
            assert parts.dispatcher.failure is None
            counts = parts.store.put_total, parts.store.committed_total, sum(parts.store.put_times.counts)
            seen.append((replies, entries, in_queues(parts), counts))
        finally:
            await parts.stop()
    for one, other in zip(*seen, strict=True):
        assert one == other
    return taken


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


BATCHES = st.sampled_from(
    [
        batch([(1, b"x", b"TAGS\x01a\x02"), (0, b"y", b"")]),
        batch([(0, b"body", b"")] * 9),
        batch([(0, b"body", b"")] * 9),
        batch([(7, bytes(number), b"UNIQ_KEY\x01%d\x02" % number) for number in range(4)]),
        batch([(0, b"one", b"KEYS\x01a b\x02TAGS\x01c\x02")]),
        batch([(0, b"later", b"DELAY\x013\x02")]),
        batch([(0, b"body", b"\xff")]),
        b"no batch",
        b"",
    ]
)


@st.composite
def requests(draw: Any) -> Command:
    changed: dict[str, Any] = {
        "b": draw(st.sampled_from(["t", "t", "t", "t", "read-only", "no-such"])),
        "e": draw(st.sampled_from([0, 1, 1, 2, 3, 9])),
        "g": draw(st.sampled_from([0, 1700000000000, 10**17])),
        "i": draw(PROPERTIES),
        "f": draw(st.sampled_from([0, 0, 0, 1, 4])),
        "h": draw(st.sampled_from([0, 0, 3, 2**31])),
    }
    body = draw(st.sampled_from([b"", b"body", bytes(301)]))
    code = draw(st.sampled_from([310, 310, 10, 320, 320, 320]))
    if code == 320 or draw(st.integers(0, 7)) == 0:
        changed["m"], body = draw(st.booleans()) or code != 320, draw(BATCHES)
    return request(
        draw(st.sampled_from(["json", "binary"])), code, body,
        draw(st.integers(0, 1000)), **changed,
    )  # fmt: skip


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(requests(), max_size=8))
def test_what_is_stored_together_is_what_is_stored_one_by_one(make_parts: Any, sent: list[Command]) -> None:
    asyncio.run(both_ways(make_parts, sent))


@pytest.mark.parametrize("code", [310, 10])
@pytest.mark.parametrize("serializer", ["json", "binary"])
def test_what_clients_send_all_day_is_gathered(make_parts: Any, code: int, serializer: str) -> None:
    texts = ["", "WAIT\x01true\x02", "UNIQ_KEY\x01AC10\x02WAIT\x01true\x02", "KEYS\x01a b\x02TAGS\x01c\x02"]
    sent = [
        request(serializer, code, opaque=number, e=number % 4, i=texts[number % len(texts)]) for number in range(12)
    ]
    assert asyncio.run(both_ways(make_parts, sent)) == len(sent)


@pytest.mark.parametrize("serializer", ["json", "binary"])
def test_batches_are_gathered_as_well(make_parts: Any, serializer: str) -> None:
    bodies = [batch([(0, b"body", b"")] * 9), batch([(1, b"x", b"TAGS\x01a\x02"), (0, b"y", b"UNIQ_KEY\x01B7\x02")])]
    texts = ["", "WAIT\x01true\x02", "UNIQ_KEY\x01AC10\x02WAIT\x01true\x02"]
    sent = [
        request(serializer, 320, bodies[number % 2], number, e=number % 4, i=texts[number % len(texts)], m=True)
        for number in range(12)
    ]
    assert asyncio.run(both_ways(make_parts, sent)) == len(sent)
    mixed = [*sent[:3], request(serializer, opaque=90), request(serializer, opaque=91), *sent[3:6]]
    assert asyncio.run(both_ways(make_parts, mixed)) == len(mixed)


def test_one_that_is_not_plain_keeps_its_place(make_parts: Any) -> None:
    texts = ["", "", "DELAY\x013\x02", "", "TRAN_MSG\x01true\x02", "WAIT\x01false\x02", ""]
    sent = [request(opaque=number, i=text) for number, text in enumerate(texts)]
    assert asyncio.run(both_ways(make_parts, sent)) == texts.count("")


@pytest.mark.parametrize("is_batch", [False, True])
def test_refusals_lost_outcomes_and_halves_are_answered_as_alone(make_parts: Any, is_batch: bool) -> None:
    kind: dict[str, Any] = {"code": 320, "body": batch([(0, b"body", b"")] * 7), "m": True} if is_batch else {}

    async def main() -> None:
        answers = []
        for is_together in (False, True):
            parts = make_parts()
            await parts.start(master=True)
            slow = processor_of(parts)
            plain = PlainSends(slow)
            gathered = GatheredSends(plain, is_hooked=_taken if is_together else _hooked)
            sent = formed([request(opaque=number, **kind) for number in range(3)])
            seen: list[Any] = []
            parts.ledger.refuse_with = DLedgerCode.LEADER_PENDING_FULL
            seen.append((await turn(gathered, plain, sent, parts.connection))[0])
            parts.ledger.refuse_with = None
            parts.ledger.commit_by_hand = True
            for failure in (None, StoredInPart(10, "not synced"), DLedgerCode.TERM_CHANGED):
                waiting = asyncio.ensure_future(turn(gathered, plain, sent, parts.connection))
                await asyncio.sleep(0)
                if failure is None:
                    parts.ledger.commit()
                elif isinstance(failure, StoredInPart):
                    pending, parts.ledger._pending = parts.ledger._pending, []
                    for _, then in pending:
                        then(failure)
                else:
                    parts.ledger.fail_pending(failure)
                replies, taken = await waiting
                assert taken == (len(sent) if is_together else 0)
                seen.append(replies)
            await parts.stop()
            answers.append(seen)
        assert answers[0] == answers[1]
        assert [reply.opaque for reply in answers[1][1]] == [0, 1, 2]

    asyncio.run(main())


def test_a_drain_waits_for_messages_that_came_together(make_parts: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start(master=True)
        parts.ledger.commit_by_hand = True
        plain = PlainSends(processor_of(parts))
        gathered = GatheredSends(plain, is_hooked=lambda: False)
        replies = gathered.take(formed([request(), request()]), 0, 2, parts.connection)
        assert replies is not None and replies.count == 2
        await drains_when_committed(parts, plain)
        await parts.stop()

    asyncio.run(main())


def test_what_was_not_read_by_its_form_is_not_taken(make_parts: Any) -> None:
    async def main() -> None:
        parts = make_parts()
        await parts.start(master=True)
        gathered = GatheredSends(PlainSends(processor_of(parts)), is_hooked=lambda: False)
        long_way = [decode(encode(request())[4:])]
        assert not isinstance(long_way[0], FormedRequest)
        assert gathered.take(long_way, 0, 1, parts.connection) is None
        await parts.stop()

    asyncio.run(main())
