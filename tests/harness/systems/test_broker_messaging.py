"""The lag of a consumer group, and a transaction whose half message was not answered."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from harness.systems.broker_messaging import BrokerMessaging, Undecided
from node.client import MessageQueue, OutcomeUnknown, SendFailed


def messaging(client: Any, keys: int = 1) -> BrokerMessaging:
    return BrokerMessaging(
        client=client,
        topic="t",
        broker_name="b",
        keys=keys,
        host_of=lambda address: "n1",
        decisions={},
        timeout_s=1.0,
    )


def lag_of(ends: dict[int, int], stored: dict[int, int | None]) -> int:
    """The lag by the ends of the queues and the offsets of the group."""

    async def end_of(topic: str, queue_id: int, *, address: str) -> int:
        return ends[queue_id]

    async def load(queue: MessageQueue) -> int | None:
        return stored[queue.queue_id]

    async def get(topic: str) -> None:
        return None

    client: Any = SimpleNamespace()
    client.routes = SimpleNamespace(get=get, require_master=lambda name: "10.0.0.1:10911")
    client.requests = SimpleNamespace(max_offset=end_of)
    client.pull_consumer = client.transaction_producer = lambda *words, **options: None
    group = messaging(client, keys=len(ends))
    group._offsets = SimpleNamespace(load=load)  # type: ignore[assignment]
    return asyncio.run(group.lag())


def test_the_lag_is_the_number_of_messages_beyond_the_offsets_of_the_group() -> None:
    assert lag_of({0: 5, 1: 10}, {0: 5, 1: 7}) == 3
    assert lag_of({0: 5, 1: 10}, {0: None, 1: 10}) == 5


def test_an_offset_beyond_one_queue_does_not_reduce_the_lag_of_the_others() -> None:
    assert lag_of({0: 5, 1: 10}, {0: 8, 1: 7}) == 3
    assert lag_of({0: 5, 1: 10}, {0: 8, 1: 10}) == 0


def test_a_transaction_whose_half_message_was_not_answered_is_undecided() -> None:
    async def half(*words: Any) -> Any:
        raise SendFailed([OutcomeUnknown("no answer", address="10.0.0.1:10911")])

    client: Any = SimpleNamespace(pull_consumer=lambda *words, **options: None)
    client.transaction_producer = lambda *words, **options: SimpleNamespace(send_in_transaction=half)
    with pytest.raises(Undecided, match="no answer") as caught:
        asyncio.run(messaging(client).send_in_transaction(7, commit=True, tell=True))
    assert not caught.value.is_decided and not caught.value.is_definite
