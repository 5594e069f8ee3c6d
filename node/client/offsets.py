"""Offsets of a consumer group: at the brokers if the group shares its messages, in a file if it does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Final, Protocol

from node.client.errors import BadReply, ClientError, NoRoute, error_from_reply
from node.client.messages import MessageQueue
from node.client.session import Session
from node.remoting import Command, RequestCode, RequestError, ResponseCode
from node.runtime import Disk

__all__ = ["BrokerOffsets", "LocalOffsets", "OffsetStore"]

MAX_LOCAL_OFFSETS: Final = 1_000_000
"""Limit on queues in one file of offsets."""


class OffsetStore(Protocol):
    """Remembers, for one group, the offset of the next message of each queue."""

    async def load(self, queue: MessageQueue) -> int | None:
        """The offset saved for `queue`, None if there is none. Raises ClientError or OSError."""
        ...

    async def save(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Save these. Raises ClientError or OSError; the former offsets may or may not be replaced then."""
        ...


class BrokerOffsets:
    """Offsets at the master of each queue (codes 14 and 15) or, while it is away, at a slave that takes them."""

    def __init__(self, session: Session, group: str) -> None:
        self._session = session
        self._group = group

    async def load(self, queue: MessageQueue) -> int | None:
        reply, address = await self._ask(queue, RequestCode.QUERY_CONSUMER_OFFSET, self._fields(queue))
        if reply.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        try:
            offset = reply.get_int("offset")
        except RequestError as error:
            raise BadReply(error.remark, address=address, code=reply.code) from None
        return offset if offset >= 0 else None

    async def save(self, offsets: Mapping[MessageQueue, int]) -> None:
        results = await asyncio.gather(
            *(self._save_one(queue, offset) for queue, offset in offsets.items()), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _save_one(self, queue: MessageQueue, offset: int) -> None:
        fields = self._fields(queue) | {"commitOffset": offset}
        await self._ask(queue, RequestCode.UPDATE_CONSUMER_OFFSET, fields)

    async def _ask(
        self, queue: MessageQueue, code: RequestCode, fields: Mapping[str, str | int | bool]
    ) -> tuple[Command, str]:
        """The answer of the master, or of a slave if the master gives none, and where it came from. Raises the master's
        ClientError if no slave answers. A slave may have older offsets, which repeats messages and skips none."""
        routes = self._session.routes
        failure: ClientError | None = None
        try:
            master = routes.require_master(queue.broker_name)
        except NoRoute as error:
            failure = error
        asked = [master] if failure is None else []
        for address in [*asked, *routes.slaves(queue.broker_name)]:
            try:
                reply = await self._session.requests.invoke(address, Command.request(code, dict(fields)))
                if reply.code in (ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND):
                    return reply, address
                refusal = error_from_reply(reply.code, reply.remark, address)
            except ClientError as error:
                failure = failure or error
                continue
            if failure is None:
                raise refusal
        raise failure or NoRoute(f"broker {queue.broker_name} is not known")

    def _fields(self, queue: MessageQueue) -> dict[str, str | int | bool]:
        return {"consumerGroup": self._group, "topic": queue.topic, "queueId": queue.queue_id}


class LocalOffsets:
    """Offsets in one JSON file, replaced as a whole. One consumer per file."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._offsets: dict[MessageQueue, int] | None = None
        self._writing = asyncio.Lock()

    async def load(self, queue: MessageQueue) -> int | None:
        return self._all().get(queue)

    async def save(self, offsets: Mapping[MessageQueue, int]) -> None:
        async with self._writing:
            await self._save(offsets)

    async def _save(self, offsets: Mapping[MessageQueue, int]) -> None:
        merged = self._all() | dict(offsets)
        if len(merged) > MAX_LOCAL_OFFSETS:
            raise OSError(f"{self._path}: more than {MAX_LOCAL_OFFSETS} queues")
        content = [[queue.topic, queue.broker_name, queue.queue_id, offset] for queue, offset in merged.items()]
        directory = self._path.rpartition("/")[0]
        if directory:
            self._disk.make_dirs(directory)
        await self._disk.write_file_atomic(self._path, json.dumps({"offsets": content}).encode())
        self._offsets = merged

    def _all(self) -> dict[MessageQueue, int]:
        if self._offsets is None:
            self._offsets = {}
            if self._disk.exists(self._path):
                try:
                    content = json.loads(self._disk.read_file(self._path))["offsets"]
                    self._offsets = {
                        MessageQueue(str(topic), str(broker), int(queue_id)): int(offset)
                        for topic, broker, queue_id, offset in content
                    }
                except (ValueError, KeyError, TypeError) as error:
                    self._offsets = None
                    raise OSError(f"{self._path} is no file of offsets: {error!r}") from error
        return self._offsets
