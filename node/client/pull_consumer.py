"""Consumers that the program polls for messages.

With `subscriptions` the queues are divided among the members of the group, as for push consumers; with `queues` the
program names its own, and they are not divided. Messages that `poll` returned count as processed at the next `poll`, or
only when `commit` is called (`auto_commit=False`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Final

from node.client.consumer import GroupConsumer
from node.client.messages import MessageQueue, ReceivedMessage
from node.client.reader import QueueReader
from node.client.session import Session
from node.client.subscriptions import SqlFilter, Subscription

__all__ = ["PullConsumer"]

MAX_POLL_MESSAGES: Final = 1000
"""The most messages that one poll returns."""
MAX_QUEUES: Final = 10_000
"""The most queues that a program may name: each takes a task and a held request."""


class PullConsumer(GroupConsumer):
    """Returns messages from `poll`, those of one queue in order. Made by `Client.pull_consumer`."""

    def __init__(
        self,
        session: Session,
        group: str,
        subscriptions: Mapping[str, str | SqlFilter] | None = None,
        *,
        queues: Iterable[MessageQueue] | None = None,
        auto_commit: bool = True,
        **options: Any,
    ) -> None:
        if (subscriptions is None) == (queues is None):
            raise ValueError("give either subscriptions or queues")
        self._own_queues = None if queues is None else list(dict.fromkeys(queues))
        if self._own_queues is not None and len(self._own_queues) > MAX_QUEUES:
            raise ValueError(f"{len(self._own_queues)} queues, at most {MAX_QUEUES} are possible")
        topics = subscriptions if subscriptions is not None else {queue.topic: "*" for queue in self._own_queues or ()}
        super().__init__(session, group, topics, **options)
        self._auto_commit = auto_commit
        self._arrived: asyncio.Queue[tuple[QueueReader, list[ReceivedMessage]]] = asyncio.Queue()
        self._rest: tuple[QueueReader, list[ReceivedMessage]] | None = None
        self._handed_out: list[tuple[QueueReader, list[ReceivedMessage]]] = []

    async def poll(self, *, timeout_ms: int = 1000, max_messages: int = 32) -> list[ReceivedMessage]:
        """Messages of one queue, at least one if any arrives in time, else none."""
        if self._auto_commit:
            self._settle()
        limit = min(max(max_messages, 1), MAX_POLL_MESSAGES)
        deadline_s = asyncio.get_running_loop().time() + timeout_ms / 1000
        while True:
            if self._rest is None:
                left_s = deadline_s - asyncio.get_running_loop().time()
                try:
                    self._rest = self._arrived.get_nowait()
                except asyncio.QueueEmpty:
                    try:
                        async with asyncio.timeout(max(left_s, 0)):
                            self._rest = await self._arrived.get()
                    except TimeoutError:
                        return []
            reader, messages = self._rest
            taken, left = messages[:limit], messages[limit:]
            self._rest = (reader, left) if left else None
            if not reader.dropped and reader.has_open(taken[0]):
                self._handed_out.append((reader, taken))
                return taken

    async def commit(self) -> None:
        """Everything that `poll` has returned is processed: save that now. Raises ClientError or OSError."""
        if not self._auto_commit:
            self._settle()
        await super().commit()

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue at `offset`; messages read ahead are dropped. Raises ValueError for a queue that is not assigned."""
        reader = self._readers.get(queue)
        if reader is None:
            raise ValueError(f"{queue} is not assigned to this consumer")
        reader.seek(offset)
        # Messages read before no longer count: their offsets may be those of messages that are read again.
        self._handed_out = [each for each in self._handed_out if each[0] is not reader]
        if self._rest is not None and self._rest[0] is reader:
            self._rest = None
        for _ in range(self._arrived.qsize()):
            waiting = self._arrived.get_nowait()
            if waiting[0] is not reader:
                self._arrived.put_nowait(waiting)

    async def take(self, reader: QueueReader, messages: list[ReceivedMessage]) -> None:
        self._arrived.put_nowait((reader, messages))  # bounded: a reader waits when it has too many open

    def _settle(self) -> None:
        handed_out, self._handed_out = self._handed_out, []
        for reader, messages in handed_out:
            reader.done(messages)

    async def _rebalance(self) -> bool:
        if self._own_queues is None:
            return await super()._rebalance()
        for queue in self._own_queues:
            if queue not in self._readers and queue not in self._leaving:
                reader = QueueReader(self, queue, Subscription(topic=queue.topic, expression="*"))
                self._readers[queue] = reader
                reader.start()
        return True
