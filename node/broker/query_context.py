"""The parts of a broker that processors of queries use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from node.broker.client_manager import ClientManager
from node.broker.consumer_offsets import ConsumerOffsets
from node.broker.ledger import LedgerStore
from node.broker.reads import ReadGate
from node.broker.topics import TopicTable
from node.store.consume_queue import ConsumeQueue
from node.store.queue_store import QueueStore

__all__ = ["QueryContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryContext:
    """One broker. Whoever reads from `log` or `queues` enters the `gate` first."""

    gate: ReadGate
    log: LedgerStore
    queues: QueueStore
    topics: TopicTable
    offsets: ConsumerOffsets
    clients: ClientManager
    broker_name: str

    async def each_queue(self, topic: str, count: int) -> AsyncIterator[tuple[int, ConsumeQueue | None]]:
        """The first `count` queues of a topic by their ids, None for one that never held a message. Lets others run
        after each: there may be thousands, and callers read messages of each."""
        for queue_id in range(count):
            yield queue_id, self.queues.find(topic, queue_id)
            await asyncio.sleep(0)
