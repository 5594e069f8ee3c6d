"""Collects the replies of processors as a connection does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from node.remoting import Command, DeferredReply, decode, encode


class ReplyCollector:
    """A fake connection to which deferred replies are sent."""

    def __init__(self) -> None:
        self.replies: list[Command] = []
        self.is_done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def write_reply(self, requests: Sequence[Command], reply: Command | bytes) -> None:
        frames = reply if isinstance(reply, bytes) else encode(reply)
        while frames:
            end = 4 + int.from_bytes(frames[:4], "big")
            self.replies.append(decode(frames[4:end]))
            assert encode(self.replies[-1]) == frames[:end], "every frame equals what `encode` returns"
            frames = frames[end:]
        assert len(self.replies) == len(requests)
        self.is_done.set_result(None)

    def end_deferred(self, deferred: DeferredReply, reply: Command | bytes) -> None:
        self.write_reply(deferred.requests, reply)


async def replies_of(answer: Any) -> list[Command]:
    """The replies of a processor, awaited for five seconds at most if it returned no command."""
    if isinstance(answer, Command):
        return [decode(encode(answer)[4:])]
    if isinstance(answer, DeferredReply):
        collector = ReplyCollector()
        answer.attach(collector, 0)  # type: ignore[arg-type]
        await asyncio.wait_for(collector.is_done, 5)
        return collector.replies
    return await replies_of(await asyncio.wait_for(answer, 5))


async def reply_of(processor: Any, request: Command, connection: Any) -> Command:
    """The reply to one request that is processed alone."""
    (reply,) = await replies_of(processor.process(request, connection))
    return reply
