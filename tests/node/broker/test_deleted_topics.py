"""Topics that are deleted, and made again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from node.broker import dispatcher


def test_queues_of_a_deleted_topic_are_released_with_its_last_message_and_continue(
    run_case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "CHECKPOINT_INTERVAL_S", 0.01)

    async def scenario(case: Any) -> None:
        queues = case.broker.queues

        async def send(topic: str) -> int:
            reply = await case.ask(310, {"b": topic, "c": "TBW102", "d": 1, "e": 0}, b"x")
            return int(reply.get_int("queueOffset"))

        assert [await send(topic) for topic in ("new", "new", "t")] == [0, 1, 0]
        assert (await case.ask(215, {"topic": "new"})).code == 0
        queues_before = {topic for (topic, _), _ in queues.items()}
        assert queues_before == {"new", "t"}, "the messages are still in the log"
        case.broker.dispatcher.trim(1 << 40)
        async with asyncio.timeout(10):
            while "new" in {topic for (topic, _), _ in queues.items()}:  # noqa: ASYNC110 - another task
                await asyncio.sleep(0.01)
        assert {topic for (topic, _), _ in queues.items()} == {"t"}
        assert [await send(topic) for topic in ("new", "t")] == [2, 1]

    run_case(scenario)
