"""Pulling: bounds and codes, caps, long polling, tag filters, damage that is never served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from node.broker import pull as pull_module
from node.broker.ledger import DLedgerCode, DLedgerError, ReadMode, Role
from node.broker.pull import PullHolds, PullProcessor, TagFilter
from node.remoting import Command, RequestError
from node.store.record import Message, decode_records, summarize_record
from node.store.record_batch import batch_of_one, encode_record

Scenario = Callable[[Any, PullProcessor], Coroutine[Any, Any, None]]


@pytest.fixture
def run(make_parts: Any) -> Callable[..., None]:
    def runner(scenario: Scenario, *, mode: ReadMode = ReadMode.READ_INDEX, master: bool = True) -> None:
        async def main() -> None:
            parts = make_parts(mode=mode)
            await parts.start(master=master)
            processor = PullProcessor(
                gate=parts.gate,
                log=parts.ledger.store,
                queues=parts.queues,
                topics=parts.topics,
                holds=parts.holds,
                groups=parts.groups,
                clients=parts.clients,
                offsets=parts.offsets,
                memory=parts.memory,
                put_total=lambda: parts.store.put_total,
            )
            try:
                await scenario(parts, processor)
            finally:
                await parts.stop()

        asyncio.run(main())

    return runner


def put(parts: Any, *bodies: bytes, tag: str = "", queue_id: int = 0) -> None:
    properties = f"TAGS\x01{tag}\x02" if tag else ""
    for body in bodies:
        record = batch_of_one(topic="t", queue_id=queue_id, body=body, properties_text=properties)
        parts.store.put_one(record)


def request(offset: int = 0, *, topic: str = "t", queue_id: int = 0, **fields: Any) -> Command:
    return Command.request(11, {"topic": topic, "queueId": queue_id, "queueOffset": offset, **fields})


async def pull(parts: Any, processor: PullProcessor, command: Command) -> Command:
    try:
        result = processor.process(command, parts.connection)
        reply = result if isinstance(result, Command) else await asyncio.wait_for(result, 5)
    except RequestError as error:
        return command.reply(error.code, remark=error.remark)
    assert reply is not None
    return reply


def bodies(reply: Command) -> list[bytes]:
    return [message.body for message in decode_records(reply.body)]


def bounds(reply: Command) -> tuple[int, int, int]:
    return tuple(int(reply.ext_fields[name]) for name in ("nextBeginOffset", "minOffset", "maxOffset"))  # type: ignore[return-value]


def test_a_pull_returns_messages_and_the_bounds_of_the_queue(run: Any) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        put(parts, b"a", b"b", b"c")
        reply = await pull(parts, processor, request(1))
        assert (reply.code, bodies(reply), bounds(reply)) == (0, [b"b", b"c"], (3, 0, 3))
        assert reply.ext_fields["suggestWhichBrokerId"] == "0"
        reply = await pull(parts, processor, request(0, maxMsgNums=1))
        assert (bodies(reply), bounds(reply)) == ([b"a"], (1, 0, 3))

    run(scenario)


def test_a_pull_right_after_a_send_returns_the_message(run: Any) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        for number in range(50):
            put(parts, b"%d" % number)
            assert bodies(await pull(parts, processor, request(number))) == [b"%d" % number]

    run(scenario)


@pytest.mark.parametrize(("offset", "code", "following"), [(3, 19, 3), (4, 21, 3), (99, 21, 3), (-1, 21, 0)])
def test_a_pull_outside_the_queue_returns_the_offset_to_continue_at(
    run: Any, offset: int, code: int, following: int
) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        put(parts, b"a", b"b", b"c")
        reply = await pull(parts, processor, request(offset))
        assert (reply.code, reply.body, bounds(reply)) == (code, b"", (following, 0, 3))

    run(scenario)


def test_a_queue_that_never_had_a_message_is_empty(run: Any) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        reply = await pull(parts, processor, request(0, queue_id=3))
        assert (reply.code, bounds(reply)) == (19, (0, 0, 0))
        assert (await pull(parts, processor, request(5, queue_id=3))).code == 21

    run(scenario)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (request(topic="unknown"), 17),
        (request(topic="write-only"), 16),
        (request(queue_id=4), 1),
        (request(queue_id=-1), 1),
        (request(expressionType="SQL92", sysFlag=4, subscription="a >"), 23),
        (request(sysFlag=4, subscription="x" * 9000), 23),
        (Command.request(11, {"topic": "t"}), 1),
    ],
)
def test_invalid_pulls_are_refused(run: Any, command: Command, code: int) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        assert (await pull(parts, processor, command)).code == code

    run(scenario)


def test_replies_are_capped_by_count_and_size(run: Any) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        put(parts, *[b"x"] * 40)
        assert bounds(await pull(parts, processor, request(0, maxMsgNums=1000)))[0] == 32
        put(parts, *[b"y" * 100_000] * 4, b"z" * 600_000, queue_id=1)
        reply = await pull(parts, processor, request(0, queue_id=1))
        assert (len(bodies(reply)), bounds(reply)[0]) == (2, 2)
        reply = await pull(parts, processor, request(4, queue_id=1))
        assert (len(bodies(reply)), bounds(reply)[0]) == (1, 5)

    run(scenario)


def test_a_held_pull_is_answered_when_a_message_arrives(run: Any, helpers: Any) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        put(parts, b"old", queue_id=1)
        held = asyncio.ensure_future(pull(parts, processor, request(0, sysFlag=2, suspendTimeoutMillis=4000)))
        await helpers.until(lambda: parts.holds.count == 1)
        put(parts, b"elsewhere", queue_id=1)
        await asyncio.sleep(0.01)
        assert not held.done()
        put(parts, b"new")
        reply = await held
        assert (reply.code, bodies(reply)) == (0, [b"new"])
        assert parts.holds.count == 0

    run(scenario)


@pytest.mark.parametrize("is_slave", [False, True])
def test_a_slave_does_not_correct_an_offset_outside_its_own_bounds(run: Any, is_slave: bool) -> None:
    """R, PullMessageProcessor: it may lag behind its master or have begun later; a consumer would adopt its bounds."""

    async def scenario(parts: Any, processor: PullProcessor) -> None:
        processor._is_slave = is_slave
        put(parts, b"a")
        reply = await pull(parts, processor, request(5))
        expected = (20, 5) if is_slave else (21, 1)
        assert (reply.code, int(reply.ext_fields["nextBeginOffset"])) == expected
        assert int(reply.ext_fields["maxOffset"]) == 1

    run(scenario)


def test_a_held_pull_ends_at_its_timeout(run: Any) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        reply = await pull(parts, processor, request(0, sysFlag=2, suspendTimeoutMillis=20))
        assert (reply.code, bounds(reply)) == (19, (0, 0, 0))
        assert parts.holds.count == 0

    run(scenario)


def test_a_held_pull_ends_when_the_lead_is_lost(run: Any, helpers: Any) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        held = asyncio.ensure_future(pull(parts, processor, request(0, sysFlag=2, suspendTimeoutMillis=4000)))
        await helpers.until(lambda: parts.holds.count == 1)
        parts.ledger.become(Role.FOLLOWER, 2, leader_id="n2")
        parts.holds.wake_all()
        assert (await held).code == 14

    run(scenario)


def test_a_held_pull_ends_when_its_connection_closes(run: Any, helpers: Any) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        held = [
            asyncio.ensure_future(processor.process(request(0, sysFlag=2, suspendTimeoutMillis=4000), parts.connection))
            for _ in range(3)
        ]
        await helpers.until(lambda: parts.holds.count == 3)
        parts.connection.close()
        assert await asyncio.wait_for(asyncio.gather(*held), 5) == [None] * 3
        assert parts.holds.count == 0
        assert len(parts.connection.callbacks) == 1

    run(scenario)


def test_held_pulls_are_bounded(run: Any, make_parts: Any) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        processor._holds = PullHolds(max_held=0)
        reply = await pull(parts, processor, request(0, sysFlag=2, suspendTimeoutMillis=4000))
        assert reply.code == 19

    run(scenario)


def test_no_rate_is_kept_for_an_invalid_group_name(run: Any) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        put(parts, b"x")
        for group in ("g" * 255, "g" * 256):
            reply = await pull(parts, processor, request(0, sysFlag=4, consumerGroup=group))
            assert (reply.code, bodies(reply)) == (0, [b"x"])
        assert list(processor.rates._counts) == ["g" * 255]

    run(scenario)


def test_a_tag_filter_passes_messages_with_one_of_its_tags_only(run: Any) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        for tag in ("a", "b", "", "Aa", "BB"):  # "Aa" and "BB" have one hash
            put(parts, (tag or "none").encode(), tag=tag)
        for expression, expected in {
            "*": [b"a", b"b", b"none", b"Aa", b"BB"],
            "": [b"a", b"b", b"none", b"Aa", b"BB"],
            "a || b": [b"a", b"b"],
            "a||*": [b"a", b"b", b"none", b"Aa", b"BB"],
            "BB": [b"BB"],
            "Aa": [b"Aa"],
        }.items():
            reply = await pull(parts, processor, request(0, sysFlag=4, subscription=expression))
            assert (reply.code, bodies(reply), bounds(reply)[0]) == (0, expected, 5), expression

    run(scenario)


def test_a_pull_whose_filter_matches_nothing_advances_the_offset(run: Any) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        put(parts, *[b"x"] * 900, tag="x")
        put(parts, b"wanted", tag="y")
        reply = await pull(parts, processor, request(0, sysFlag=4, subscription="y"))
        assert (reply.code, reply.body, bounds(reply)) == (20, b"", (800, 0, 901))
        reply = await pull(parts, processor, request(800, sysFlag=4, subscription="y"))
        assert (bodies(reply), bounds(reply)[0]) == ([b"wanted"], 901)

    run(scenario)


def test_a_full_filtered_pull_continues_at_the_next_matching_message(run: Any) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        for number in range(10):
            put(parts, b"%d" % number, tag="y" if number % 2 else "n")
        reply = await pull(parts, processor, request(0, sysFlag=4, subscription="y", maxMsgNums=2))
        assert (bodies(reply), bounds(reply)[0]) == ([b"1", b"3"], 5)

    run(scenario)


def test_a_tag_filter_tests_the_hash_first_and_passes_no_untagged_message() -> None:
    assert TagFilter(" || ").passes_all
    assert TagFilter("a").may_pass(97) and not TagFilter("a").may_pass(98)
    untagged = summarize_record(encode_record(Message(topic="t", queue_id=0, body=b"", properties={})))
    assert not TagFilter("a").passes(untagged)


@pytest.mark.parametrize("mode", [ReadMode.READ_INDEX, ReadMode.LEASE, ReadMode.LOG, ReadMode.UNSAFE])
def test_every_pull_passes_the_read_barrier_of_its_mode(run: Any, mode: ReadMode) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        await pull(parts, processor, request())
        assert parts.ledger.barriers == [mode]

    run(scenario, mode=mode)


@pytest.mark.parametrize(("mode", "code"), [(ReadMode.READ_INDEX, 14), (ReadMode.UNSAFE, 19)])
def test_a_follower_answers_unsafe_reads_only(run: Any, mode: ReadMode, code: int) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        reply = await pull(parts, processor, request())
        assert reply.code == code
        if code == 14:
            assert reply.remark == "NOT_LEADER leader=n2 addr=-"

    run(scenario, mode=mode, master=False)


@pytest.mark.parametrize(("offset", "is_confirmed"), [(1, False), (0, False), (2, True), (7, True)])
def test_a_pull_at_a_known_offset_skips_the_barrier_only_if_the_message_exists(
    run: Any, offset: int, is_confirmed: bool
) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        put(parts, b"a", b"b")
        await asyncio.sleep(0)
        reply = await pull(parts, processor, request(offset, maxMsgNums=1, knownOffset=True))
        assert bodies(reply) == [b"a", b"b"][offset : offset + 1]
        assert bool(parts.ledger.barriers) == is_confirmed

    run(scenario)


def test_a_pull_at_a_known_offset_is_refused_by_a_follower(run: Any) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        put(parts, b"a")
        await asyncio.sleep(0)
        parts.ledger.become(Role.FOLLOWER, 2)
        assert (await pull(parts, processor, request(0, knownOffset=True))).code == 14

    run(scenario)


def test_a_pull_whose_read_barrier_fails_gets_an_error(run: Any) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        parts.ledger.barrier_error = DLedgerError(DLedgerCode.WAIT_QUORUM_ACK_TIMEOUT, "no quorum")
        reply = await pull(parts, processor, request())
        assert reply.code == 1 and "could not be made safe: " in reply.remark

    run(scenario)


def test_a_pull_gets_an_error_if_dispatch_stays_behind(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        monkeypatch.setattr("node.broker.reads.DISPATCH_TIMEOUT_S", 0.01)
        monkeypatch.setattr(parts.dispatcher, "notify", lambda: None)
        put(parts, b"a")
        await asyncio.sleep(0)
        parts.ledger.store.add(1, b"", is_message=False)
        parts.ledger.store.committed_index += 1
        reply = await pull(parts, processor, request())
        assert reply.code == 1 and "dispatch is behind" in reply.remark

    run(scenario)


@pytest.mark.parametrize("damage", ["body", "other queue", "queue offset", "place", "tags", "gone"])
def test_damage_at_rest_is_reported_and_never_served(run: Any, damage: str) -> None:
    async def scenario(parts: Any, processor: PullProcessor) -> None:
        put(parts, b"hello", b"world", b"again", tag="tag")
        assert len(bodies(await pull(parts, processor, request()))) == 3
        entry = parts.ledger.store.get(2)
        changed = bytearray(entry.body)
        tags_at = changed.index(b"TAGS") if damage == "tags" else 0
        changed[
            {"body": 88, "other queue": 15, "queue offset": 27, "place": 35, "tags": tags_at, "gone": 4}[damage]
        ] ^= 1
        entry.body = b"" if damage == "gone" else bytes(changed)
        reply = await pull(parts, processor, request())
        assert (reply.code, bodies(reply), bounds(reply)[0]) == (0, [b"hello"], 1)
        reply = await pull(parts, processor, request(1))
        assert reply.code == 1 and "t/0 at 1 cannot be read" in reply.remark and not reply.body
        assert bodies(await pull(parts, processor, request(2))) == [b"again"]

    run(scenario)


@pytest.mark.parametrize("byte", [5, 11])
def test_a_damaged_queue_is_reported_and_rebuilt_at_the_next_start(
    run: Any, make_parts: Any, helpers: Any, tmp_path: Any, byte: int
) -> None:
    ledger: Any = None

    async def damage(parts: Any, processor: PullProcessor) -> None:
        nonlocal ledger
        ledger = parts.ledger
        put(parts, b"hello", b"world")
        await helpers.until(lambda: parts.dispatcher.dispatched_index == 2)
        await parts.queues.checkpoint(parts.dispatcher._mark)
        path = tmp_path / "consumequeue" / "t" / "0" / f"{0:020d}"
        content = bytearray(path.read_bytes())
        content[20 + byte] ^= 0x40
        path.write_bytes(content)
        assert (await pull(parts, processor, request(1))).code == 1
        assert bodies(await pull(parts, processor, request(0))) == [b"hello"]
        await parts.dispatcher.stop()

    async def restart() -> None:
        parts = make_parts(ledger)
        await parts.start(master=False)
        assert parts.dispatcher.dispatched_index == -1
        await helpers.until(lambda: parts.dispatcher.dispatched_index == 2)
        units = parts.queues.find("t", 0).read(0, 2)
        assert [unit.physical_offset for unit in units] == [ledger.store.get(index).body_pos for index in (1, 2)]
        await parts.stop()

    run(damage)
    asyncio.run(restart())


def test_a_held_pull_checks_its_queue_periodically(run: Any, monkeypatch: Any) -> None:
    """R: every 5 s, even if the notice of an arrival was lost."""
    monkeypatch.setattr(pull_module, "HOLD_RECHECK_S", 0.02)

    async def scenario(parts: Any, processor: PullProcessor) -> None:
        request = Command.request(
            11, {"topic": "t", "queueId": 0, "queueOffset": 0, "sysFlag": 2, "suspendTimeoutMillis": 5000}
        )
        answer = processor.process(request, parts.connection)
        assert not isinstance(answer, Command)
        held = asyncio.ensure_future(answer)
        await asyncio.sleep(0.01)
        monkeypatch.setattr(parts.holds, "wake", lambda queues: None)
        parts.dispatcher._on_arrival = lambda queues: None
        record = batch_of_one(topic="t", queue_id=0, body=b"x")
        await parts.store.put_one(record).committed
        reply = await asyncio.wait_for(held, 1)
        assert reply is not None and reply.code == 0

    run(scenario)


def test_pulls_from_disk_are_delayed_while_messages_arrive(run: Any, monkeypatch: Any) -> None:
    """Each waits twenty times as long as it takes; without senders it does not wait."""
    slept: list[float] = []

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)

    async def scenario(parts: Any, processor: PullProcessor) -> None:
        async def put() -> None:
            record = batch_of_one(topic="t", queue_id=0, body=b"x" * 100)
            await parts.store.put_one(record).committed

        async def pull(offset: int = 0) -> None:
            request = Command.request(11, {"topic": "t", "queueId": 0, "queueOffset": offset})
            result = processor.process(request, parts.connection)
            reply = result if isinstance(result, Command) else await result
            assert reply is not None and reply.code == 0
            processor._cold_cost_s = 0.01

        for _ in range(3):
            await put()
        await pull()
        monkeypatch.setattr(pull_module.asyncio, "sleep", sleep)
        for _ in range(3):
            await pull()
        assert slept == [], "there are no sends"
        for _ in range(3):
            await put()
            await pull()
        assert [round(delay_s, 1) for delay_s in slept] == [0.2, 0.4]
        parts.memory._size_bytes = 1 << 30
        await put()
        await pull()
        assert len(slept) == 2, "a pull from memory is not delayed"

    def behind(parts: Any, processor: PullProcessor) -> Any:
        parts.memory._size_bytes = 0
        return scenario(parts, processor)

    run(behind)
