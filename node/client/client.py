"""The client that programs open: producers and consumers over one session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from node.client.messages import MessageQueue, ReceivedMessage
from node.client.offsets import LocalOffsets
from node.client.producer import Producer
from node.client.pull_consumer import PullConsumer
from node.client.push_consumer import Handler, PushConsumer
from node.client.session import Session
from node.client.subscriptions import SqlFilter
from node.client.transactions import TransactionProducer, TransactionState
from node.runtime import Runtime

__all__ = ["Client"]


class Client(Session):
    """A program's connection to the brokers behind some name servers. Use as `async with Client([...]) as client`.

    Without `runtime` the machine's own clock, files and randomness are used. Further options: `client_id` (must differ
    between members of a consumer group; drawn at random by default), `timings`, `request_timeout_ms`,
    `connect_timeout_ms`, `serializer`, `tls` (an ssl.SSLContext), `credentials`, `translate` (see BrokerClient).
    """

    def __init__(self, name_servers: Sequence[str], *, runtime: Runtime | None = None, **options: Any) -> None:
        self._own_runtime: Runtime | None = None
        if runtime is None:
            from node.real_runtime import real_runtime

            runtime = self._own_runtime = real_runtime()
        super().__init__(name_servers, runtime=runtime, **options)

    async def __aenter__(self) -> Client:
        return self

    async def close(self) -> None:
        """Stop every consumer and producer, then close the connections. Idempotent."""
        await super().close()
        if self._own_runtime is not None:
            from node.real_runtime import RealDisk

            disk = self._own_runtime.disk
            self._own_runtime = None
            if isinstance(disk, RealDisk):
                disk.close()

    def producer(
        self,
        group: str = "splitbrain",
        *,
        retries: int = 2,
        retry_unknown: bool = False,
        timeout_ms: int = 3000,
        compress_over_bytes: int = 4096,
        create_topics: bool = True,
    ) -> Producer:
        """A producer of `group`; see Producer for the options."""
        return Producer(
            self, group, retries=retries, retry_unknown=retry_unknown, timeout_ms=timeout_ms,
            compress_over_bytes=compress_over_bytes, create_topics=create_topics,
        )  # fmt: skip

    def transaction_producer(
        self,
        group: str,
        check: Callable[[ReceivedMessage], Awaitable[TransactionState]],
        *,
        retries: int = 2,
        timeout_ms: int = 3000,
    ) -> TransactionProducer:
        """A producer whose messages appear when a local transaction commits; see TransactionProducer."""
        return TransactionProducer(self, group, check, retries=retries, timeout_ms=timeout_ms)

    def push_consumer(
        self, group: str, handler: Handler, subscriptions: Mapping[str, str | SqlFilter], **options: Any
    ) -> PushConsumer:
        """A consumer that calls `handler`; see PushConsumer and GroupConsumer for the options. Not started yet."""
        return PushConsumer(self, group, handler, subscriptions, **options)

    def pull_consumer(
        self,
        group: str,
        subscriptions: Mapping[str, str | SqlFilter] | None = None,
        *,
        queues: Iterable[MessageQueue] | None = None,
        **options: Any,
    ) -> PullConsumer:
        """A consumer that the program polls; see PullConsumer for the options. Not started yet."""
        return PullConsumer(self, group, subscriptions, queues=queues, **options)

    def local_offsets(self, path: str) -> LocalOffsets:
        """Offsets in a file of this machine, for a broadcasting consumer."""
        return LocalOffsets(self.runtime.disk, path)

    async def create_topic(self, topic: str, *, queues: int = 4, perm: int = 6) -> None:
        """Create or change a topic on the master of every group that any name server knows. Raises ClientError."""
        await self.requests.create_topic(topic, queues=queues, perm=perm)
