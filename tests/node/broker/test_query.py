"""Searches by key, by id and by time, on a whole broker with a fake log."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from node.store.record import decode_record, decode_records


async def send(case: Any, keys: str, body: bytes, *, unique: str = "") -> int:
    """Send a message with keys; returns its physical offset."""
    properties = f"KEYS\x01{keys}\x02" + (f"UNIQ_KEY\x01{unique}\x02" if unique else "")
    reply = await case.ask(310, {"b": "t", "e": 0, "i": properties}, body)
    assert reply.code == 0
    return int(reply.ext_fields["msgId"][-16:], 16)


@pytest.mark.mechanism("IndexFile")
def test_messages_are_found_by_key_within_a_time_range(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        began_ms = case.clock.now_ms
        for number in range(5):
            await send(case, f"order-{number % 2} all", b"%d" % number, unique=f"U{number}")
            case.clock.now_ms += 1000

        async def find(key: str, begin: int = 0, end: int = 10, most: int = 32, **more: Any) -> list[bytes]:
            fields = {"topic": "t", "key": key, "maxNum": most, "beginTimestamp": began_ms + begin * 1000,
                      "endTimestamp": began_ms + end * 1000, **more}  # fmt: skip
            reply = await case.ask(12, fields)
            assert reply.code == (0 if reply.body else 22)
            assert int(reply.ext_fields["indexLastUpdateTimestamp"]) == began_ms + 4000
            return [message.body for message in decode_records(reply.body)]

        assert await find("order-0") == [b"0", b"2", b"4"]
        assert await find("order-0", begin=1, end=3) == [b"2"]
        assert await find("all", most=2) == [b"3", b"4"]
        assert await find("U3", _UNIQUE_KEY_QUERY=True) == [b"3"]
        assert await find("nothing") == []
        assert await find("order-0", topic="other") == []

    run_case(scenario)


def test_keys_with_the_same_hash_are_told_apart(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        await send(case, "Aa", b"first")
        await send(case, "BB", b"second")
        reply = await case.ask(12, {"topic": "t", "key": "BB", "maxNum": 32})
        assert [message.body for message in decode_records(reply.body)] == [b"second"]

    run_case(scenario)


@pytest.mark.mechanism("msgId = host+physical offset")
def test_a_message_is_found_by_its_id(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        offsets = [await send(case, "k", b"%d" % number) for number in range(3)]
        reply = await case.ask(33, {"offset": offsets[1]})
        assert (reply.code, decode_record(reply.body)[0].body) == (0, b"1")
        for wrong in (offsets[1] + 1, -1, 10**12):
            assert (await case.ask(33, {"offset": wrong})).code == 1

    run_case(scenario)


def test_an_offset_is_found_by_time(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        began_ms = case.clock.now_ms
        for number in range(9):
            await send(case, "k", b"%d" % number)
            case.clock.now_ms += 1000 * (number % 2)  # 0 and 1 in the same millisecond, 2 and 3 a second later...

        async def at(time_ms: int, queue_id: int = 0) -> int:
            reply = await case.ask(29, {"topic": "t", "queueId": queue_id, "timestamp": time_ms})
            return int(reply.ext_fields["offset"])

        assert [await at(began_ms + delta) for delta in (-1, 0, 1, 1000, 1001, 4000, 4001)] == [0, 0, 2, 2, 4, 8, 9]
        assert await at(began_ms, queue_id=1) == 0

    run_case(scenario)


@pytest.mark.mechanism("Reput dispatch (confirmOffset if duplication)")
def test_deleted_queues_and_index_are_rebuilt_identically(run_case: Any, helpers: Any, tmp_path: Path) -> None:
    ledger = helpers.FakeLedger()
    data = tmp_path / "data"

    def derived() -> dict[str, bytes]:
        roots = (data / "consumequeue", data / "index")
        return {str(path.relative_to(data)): path.read_bytes() for root in roots for path in sorted(root.rglob("*"))
                if path.is_file()}  # fmt: skip

    async def fill(case: Any) -> None:
        for number in range(50):
            await send(case, f"k{number} all", b"%d" % number)

    async def nothing(case: Any) -> None:
        assert (await case.ask(12, {"topic": "t", "key": "k7", "maxNum": 1})).code == 0

    options = {"limits.index_slots": "17", "limits.index_entries": "30"}
    run_case(fill, ledger=ledger, **options)
    before = derived()
    assert len([name for name in before if name.startswith("index")]) > 1
    for name in before:
        (data / name).unlink()
    run_case(nothing, ledger=ledger, **options)
    assert derived() == before
    next((data / "index").iterdir()).unlink()
    run_case(nothing, ledger=ledger, **options)
    assert derived() == before


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        (202, {"topic": "wide"}),
        (208, {"consumerGroup": "g"}),
        (222, {"topic": "wide", "group": "g", "timestamp": 0, "isForce": True}),
        (303, {"topic": "wide", "group": "g"}),
        (317, {"isOrder": False}),
    ],
)
def test_a_statistics_request_yields_to_the_event_loop_after_each_queue(
    run_case: Any, code: int, fields: dict[str, Any]
) -> None:
    """It reads messages of each: ten seconds for the 65,536 queues that a topic may have."""

    async def scenario(case: Any) -> None:
        await case.ask(17, {"topic": "wide", "readQueueNums": 1000, "writeQueueNums": 1000, "perm": 6})
        for queue_id in range(1000):
            case.broker.offsets.commit("g", "wide", queue_id, 0)
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        spinning = asyncio.create_task(others())
        reply = await case.ask(code, fields)
        spinning.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await spinning
        assert reply.code == (206 if code == 222 else 0)  # no consumer is connected
        assert turns >= 1000

    run_case(scenario)
