"""Producers: which queue a message goes to, how often it is tried, and what is known if that fails.

An attempt that certainly stored nothing is repeated, on another broker if there is one. An attempt whose outcome is
unknown is not, unless the program accepts duplicates (`retry_unknown`); then the receipt says how many attempts may
have stored a copy as well. All copies carry the same unique key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from node.client.errors import ClientError, NoRoute, SendFailed
from node.client.messages import MessageQueue, NewMessage, ReceivedMessage, deflate, encode_batch
from node.client.requests import send_request
from node.client.results import Route, SendResult
from node.client.routes import RouteBook
from node.client.session import Session
from node.remoting import Command, RequestCode, ResponseCode
from node.store.properties import UNIQUE_KEY
from node.store.record import java_string_hash

__all__ = ["Producer", "Receipt"]

COMPRESS_OVER_BYTES: Final = 4096
"""Bodies from this size on are compressed (R: compressMsgBodyOverHowmuch)."""
MAX_RETRIES: Final = 100
RETRY_PAUSE_S: Final = 0.05
"""Pause before the second attempt; it doubles each time."""
MAX_RETRY_PAUSE_S: Final = 1.0
MAX_BATCH_MESSAGES: Final = 4096
"""The most messages in one batch, as many as a broker takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A message, or a whole batch, that was stored. `queue_offset` is that of its first message."""

    queue: MessageQueue
    queue_offset: int
    unique_keys: tuple[str, ...]
    result: SendResult
    """The broker's reply, with its message ids."""
    unknown_attempts: int = 0
    """Attempts before the one that succeeded that may have stored a copy too."""

    @property
    def unique_key(self) -> str:
        """The unique key of the (first) message, by which consumers recognise copies."""
        return self.unique_keys[0]


class Producer:
    """Sends messages for a group. Made by `Client.producer`.

    `retries` is how many further attempts a message may get within its timeout; `retry_unknown` is whether it may even
    after an attempt that may have stored it. `compress_over_bytes` 0 never compresses. `create_topics` is whether a
    message may create its topic, on brokers that allow it.
    """

    def __init__(
        self,
        session: Session,
        group: str,
        *,
        retries: int = 2,
        retry_unknown: bool = False,
        timeout_ms: int = 3000,
        compress_over_bytes: int = COMPRESS_OVER_BYTES,
        create_topics: bool = True,
    ) -> None:
        if not 0 <= retries <= MAX_RETRIES:
            raise ValueError(f"retries must be from 0 to {MAX_RETRIES}, not {retries}")
        self._session = session
        self._group = group
        self._attempts = retries + 1
        self._retry_unknown = retry_unknown
        self._timeout_ms = timeout_ms
        self._compress_over_bytes = compress_over_bytes
        self._create_topics = create_topics
        self._turn = session.runtime.random.randrange(1 << 20)
        session.join(self)

    @property
    def group(self) -> str:
        """The producer group."""
        return self._group

    async def stop(self) -> None:
        """Leave the group. Sends in flight continue. Idempotent."""
        await self._session.leave(self)

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The queues of `topic` that can be written; for an unknown one, those that it would have. Raises NoRoute."""
        queues = RouteBook.write_queues(await self._route(topic))
        if not queues:
            raise NoRoute(f"topic {topic} has no queue that may be written")
        return queues

    async def _route(self, topic: str) -> Route:
        routes = self._session.routes
        try:
            return await routes.get(topic)
        except NoRoute as error:
            if not self._create_topics or error.code != ResponseCode.TOPIC_NOT_EXIST:
                raise
            try:
                return await routes.for_new_topic(topic)
            except NoRoute:
                raise error from None

    async def send(
        self,
        message: NewMessage,
        *,
        ordering_key: str | None = None,
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
    ) -> Receipt:
        """Send one message and wait until it is stored.

        Messages with the same `ordering_key` go to the same queue, in the order in which their sends were awaited,
        for as long as the topic keeps its number of queues; alternatively, name the `queue`. Without either, messages
        are spread. Raises SendFailed (see its `is_definite`), or PropertyError or ValueError before anything is sent.
        """
        key = self._session.unique_keys.next()
        body, sys_flag = deflate(message.body, self._compress_over_bytes)
        return await self._deliver(
            RequestCode.SEND_MESSAGE_V2, message.topic, body, message.stored_properties(key), (key,), sys_flag,
            ordering_key, queue, timeout_ms,
        )  # fmt: skip

    async def send_batch(
        self,
        messages: Sequence[NewMessage],
        *,
        ordering_key: str | None = None,
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
    ) -> Receipt:
        """Send messages of one topic to one queue, in one request, next to each other and in order.

        Delayed messages cannot be in a batch, and bodies are not compressed. Raises like `send`.
        """
        topics = {message.topic: None for message in messages}
        if len(topics) != 1 or len(messages) > MAX_BATCH_MESSAGES:
            raise ValueError(f"a batch is 1 to {MAX_BATCH_MESSAGES} messages of one topic, not {len(messages)}")
        if any(message.delay_level for message in messages):
            raise ValueError("a delayed message cannot be in a batch")
        keys = tuple(self._session.unique_keys.next() for _ in messages)
        body = encode_batch([(m.body, m.stored_properties(key)) for m, key in zip(messages, keys, strict=True)])
        return await self._deliver(
            RequestCode.SEND_BATCH_MESSAGE, messages[0].topic, body, {UNIQUE_KEY: ",".join(keys[:1])}, keys, 0,
            ordering_key, queue, timeout_ms,
        )  # fmt: skip

    async def send_oneway(
        self, message: NewMessage, *, ordering_key: str | None = None, queue: MessageQueue | None = None
    ) -> None:
        """Send one message without learning its outcome. Raises NoRoute or NotSent if it was not even sent."""
        key = self._session.unique_keys.next()
        body, sys_flag = deflate(message.body, self._compress_over_bytes)
        chosen = queue or self._choose(await self.queues(message.topic), ordering_key, None)
        request = self._request(RequestCode.SEND_MESSAGE_V2, chosen, body, message.stored_properties(key), sys_flag)
        await self._session.requests.send_oneway(self._session.routes.require_master(chosen.broker_name), request)

    # For sessions

    def consumer_data(self) -> Mapping[str, Any] | None:
        return None

    def members_changed(self) -> None:
        """Does not concern producers."""

    async def check_transaction(self, command: Command, address: str) -> None:
        """Only transactional producers are asked."""

    def reset_offsets(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Producers have no offsets."""

    def running_info(self) -> bytes:
        """Producers are not asked."""
        return b""

    def consumer_status(self, topic: str) -> bytes:
        """Producers are not asked."""
        return b""

    async def handle_now(self, message: ReceivedMessage) -> bytes:
        """Producers are not asked."""
        return b""

    # Inside

    async def _deliver(
        self,
        code: RequestCode,
        topic: str,
        body: bytes,
        properties: Mapping[str, str],
        keys: tuple[str, ...],
        sys_flag: int,
        ordering_key: str | None,
        queue: MessageQueue | None,
        timeout_ms: int | None,
    ) -> Receipt:
        """Try until an attempt succeeds, no further one is allowed, or the timeout is over."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + (timeout_ms or self._timeout_ms) / 1000
        failures: list[ClientError] = []
        failed: list[MessageQueue] = []
        pause_s = RETRY_PAUSE_S
        while True:
            chosen: MessageQueue | None = queue
            try:
                if chosen is None:
                    chosen = self._choose(await self.queues(topic), ordering_key, failed[-1] if failed else None)
                left_ms = int((deadline_s - loop.time()) * 1000)
                result = await self._session.requests.send(
                    topic, chosen.queue_id, body, properties=properties,
                    address=self._session.routes.require_master(chosen.broker_name),
                    timeout_ms=max(left_ms, 1), code=code, group=self._group, sys_flag=sys_flag,
                )  # fmt: skip
                unknown = sum(not failure.is_definite for failure in failures)
                return Receipt(
                    queue=chosen._replace(queue_id=result.queue_id), queue_offset=result.queue_offset,
                    unique_keys=keys, result=result, unknown_attempts=unknown,
                )  # fmt: skip
            except ClientError as error:
                failures.append(error)
                if chosen is not None:
                    self._session.routes.failed(chosen.broker_name, topic, error)
                    failed.append(chosen)
                may_repeat = self._may_repeat(error) and len(failures) < self._attempts
                if not may_repeat or loop.time() + pause_s >= deadline_s:
                    raise SendFailed(failures) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_PAUSE_S)

    def _may_repeat(self, error: ClientError) -> bool:
        return error.is_definite or self._retry_unknown

    def _choose(
        self, queues: list[MessageQueue], ordering_key: str | None, failed: MessageQueue | None
    ) -> MessageQueue:
        """By the key, or the next in turn: not on the broker that has just failed, if another one has a master."""
        if ordering_key is not None:
            return queues[java_string_hash(ordering_key) % len(queues)]
        served = [queue for queue in queues if self._session.routes.master(queue.broker_name) is not None]
        elsewhere = [queue for queue in served if failed is None or queue.broker_name != failed.broker_name]
        candidates = elsewhere or served or queues
        self._turn += 1
        return candidates[self._turn % len(candidates)]

    def _request(
        self, code: RequestCode, queue: MessageQueue, body: bytes, properties: Mapping[str, str], sys_flag: int
    ) -> Command:
        return send_request(
            code, self._group, queue.topic, queue.queue_id, body, properties=properties,
            born_ms=self._session.runtime.clock.wall_ms(), sys_flag=sys_flag,
        )  # fmt: skip
