"""Messages that cannot be sent back (code 36)."""

from __future__ import annotations

from typing import Any

import pytest

from node.store.record import MAX_PROPERTIES_SIZE_BYTES, Message, decode_records


async def first_message(case: Any, properties: str) -> Message:
    """Send a message with these properties; returns it as stored."""
    assert (await case.ask(310, {"b": "t", "e": 1, "i": properties}, b"poison")).code == 0
    (message,) = decode_records((await case.pull(0, topic="t", queue_id=1)).body)
    return message


def filled(size_bytes: int) -> str:
    """A property that takes this many bytes."""
    return f"k\x01{'x' * (size_bytes - 3)}\x02"


@pytest.mark.parametrize("level", [0, -1], ids=["to the retry topic", "to the dead letters"])
def test_no_room_for_further_properties_is_answered_as_rocketmq_answers_it(run_case: Any, level: int) -> None:
    async def scenario(case: Any) -> None:
        message = await first_message(case, filled(MAX_PROPERTIES_SIZE_BYTES - 40))
        reply = await case.ask(36, {"offset": message.physical_offset, "group": "g", "delayLevel": level})
        assert reply.code == 1 and reply.remark.startswith("PROPERTIES_SIZE_EXCEEDED: properties of "), reply
        for topic in ("%RETRY%g", "%DLQ%g"):
            assert not (await case.pull(0, topic=topic, queue_id=0)).body

    run_case(scenario)


def test_with_room_for_them_a_message_is_sent_back(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        message = await first_message(case, filled(MAX_PROPERTIES_SIZE_BYTES - 200))
        assert (await case.ask(36, {"offset": message.physical_offset, "group": "g", "delayLevel": -1})).code == 0
        (dead,) = decode_records((await case.pull(0, topic="%DLQ%g", queue_id=0)).body)
        assert dead.properties["RETRY_TOPIC"] == "t" and dead.body == b"poison"

    run_case(scenario)
