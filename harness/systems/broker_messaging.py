"""How one logical client takes part in groups: with the node's own producers and consumers, as applications use them.

While `broker_connection` sends single requests to chosen brokers, this uses the whole client with its routes,
heartbeats, rebalancing and retries. Every connection has its own client id, so each is a member of the group and the
queues are divided among the live clients. Consumers that join and leave because of faults are part of the test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final

from harness.systems.broker_configuration import TOPIC
from harness.systems.broker_connection import StoredInPart, decode_body, encode_body
from node.client import (
    BrokerOffsets,
    Client,
    ClientError,
    ClientTimings,
    MessageQueue,
    NewMessage,
    PoppedMessage,
    Receipt,
    ReceivedMessage,
    SendFailed,
    StartFrom,
    TransactionState,
)

__all__ = ["CONSUMER_GROUP", "DELAY_LEVELS", "TIMINGS", "BrokerMessaging", "LagUnknown", "Undecided"]

CONSUMER_GROUP: Final = "splitbrain-consumers"
PRODUCER_GROUP: Final = "splitbrain-producers"

POP_RETRY_TOPIC: Final = f"%RETRY%{CONSUMER_GROUP}_{TOPIC}"
"""Where unacknowledged messages are redelivered (R: KeyBuilder.buildPopRetryTopic)."""

DELAY_LEVELS: Final[Mapping[int, int]] = {0: 0, 1_000: 1}
"""Milliseconds -> delay level (R: messageDelayLevel), only the shortest; other delays are sent as timer messages."""

TIMINGS: Final = ClientTimings(
    route_interval_s=1.0,
    heartbeat_interval_s=1.0,
    rebalance_interval_s=1.0,
    persist_interval_s=0.5,
    pull_suspend_ms=1_000,
    retry_pause_s=0.1,
    drain_timeout_s=1.0,
)
"""A minute of faults must see many rebalances; with RocketMQ's intervals of 20 and 30 s it would see one or two."""

RECEIVE_TIMEOUT_MS: Final = 200
INVISIBLE_MS: Final = 2_000
"""How long a popped message stays invisible: long enough to acknowledge it, and over within a round of faults."""
FORGETS_EVERY: Final = 4
"""On every fourth receive of a single message a pop consumer drops the message, as a consumer that dies would."""
SEND_RETRIES: Final = 20
"""Attempts that certainly stored nothing may be retried until the operation's timeout."""


class LagUnknown(Exception):
    """The group's offsets or the queues' ends could not be read. Definite, as reading changes nothing."""

    is_definite = True


class Undecided(SendFailed):
    """The half message was not sent, or that is unknown: its transaction was never decided, nor will it be."""

    is_decided = False


class BrokerMessaging:
    """A `MessagingConnection` over one topic of `keys` queues at one broker group.

    `host_of` maps a dialled address to its host. `decisions` maps a message body to the decision of its local
    transaction, and is shared by the connections of a run. `success_only` as for BrokerConnection.
    """

    def __init__(
        self,
        *,
        client: Client,
        topic: str,
        broker_name: str,
        keys: int,
        host_of: Callable[[str], str | None],
        decisions: MutableMapping[bytes, TransactionState],
        timeout_s: float,
        success_only: bool = False,
        pops: bool = False,
    ) -> None:
        self.node: str | None = None
        self._success_only = success_only
        self._client = client
        self._topic = topic
        self._queues = [MessageQueue(topic, broker_name, key) for key in range(keys)]
        self._host_of = host_of
        self._decisions = decisions
        self._send_timeout_ms = int(timeout_s * 950)
        self._offsets = BrokerOffsets(client, CONSUMER_GROUP)
        self._consumer = (
            None if pops else client.pull_consumer(CONSUMER_GROUP, {topic: "*"}, start_from=StartFrom.FIRST)
        )
        if pops:
            self._queues.append(MessageQueue(POP_RETRY_TOPIC, broker_name, 0))
        self._received = 0
        self._popped: list[tuple[PoppedMessage, str]] = []
        self._producer = client.transaction_producer(
            PRODUCER_GROUP, self._decided, retries=SEND_RETRIES, timeout_ms=self._send_timeout_ms
        )

    async def open(self) -> None:
        if self._consumer is not None:
            await self._consumer.start()

    async def close(self) -> None:
        await self._client.close()

    async def send(self, value: Any, *, delay_ms: int = 0) -> None:
        timer = {} if delay_ms in DELAY_LEVELS else {"TIMER_DELAY_MS": str(delay_ms)}
        message = NewMessage(
            self._topic, encode_body(value), delay_level=DELAY_LEVELS.get(delay_ms, 0), properties=timer
        )
        try:
            receipt = await self._producer.send(message)
        except SendFailed as error:
            self.node = self._host_of(error.address or "")
            raise
        self._check(receipt)

    async def send_in_transaction(self, value: Any, *, commit: bool, tell: bool) -> None:
        body = encode_body(value)
        decision = TransactionState.COMMIT if commit else TransactionState.ROLLBACK

        async def decide(_: object) -> TransactionState:
            self._decisions[body] = decision
            return decision if tell else TransactionState.UNKNOWN

        try:
            receipt, _ = await self._producer.send_in_transaction(NewMessage(self._topic, body), decide)
        except SendFailed as error:
            self.node = self._host_of(error.address or "")
            raise Undecided(error.attempts) from error
        self._check(receipt)

    def _check(self, receipt: Receipt) -> None:
        self.node = self._host_of(receipt.result.address)
        if receipt.result.is_local and self._success_only:
            raise StoredInPart(f"stored, and {receipt.result.status.name}")

    async def _decided(self, message: ReceivedMessage) -> TransactionState:
        """Answers a broker's transaction check. UNKNOWN while the send is pending, or if it was abandoned."""
        return self._decisions.get(message.body, TransactionState.UNKNOWN)

    async def receive(self, max_messages: int) -> list[Any]:
        self.node = None
        if self._consumer is None:
            return await self._pop(max_messages)
        messages = await self._consumer.poll(timeout_ms=RECEIVE_TIMEOUT_MS, max_messages=max_messages)
        return [decode_body(message.body) for message in messages]

    async def _pop(self, max_messages: int) -> list[Any]:
        """Pop messages. The next receive acknowledges them: acknowledging now would lose them if this operation ended
        without returning them. Messages dropped on purpose are seen only when they are redelivered."""
        routes, name = self._client.routes, self._queues[0].broker_name
        try:
            await self._acknowledge()
            await routes.get(self._topic)
            address = routes.require_master(name)
            self.node = self._host_of(address)
            popped = await self._client.requests.pop(
                self._topic, group=CONSUMER_GROUP, broker_name=name, max_messages=max_messages,
                invisible_ms=INVISIBLE_MS, poll_ms=RECEIVE_TIMEOUT_MS, address=address,
            )  # fmt: skip
        except ClientError as error:
            routes.failed(name, self._topic, error)
            raise
        self._received += max_messages == 1
        if max_messages == 1 and self._received % FORGETS_EVERY == 0:
            return []
        self._popped = [(each, address) for each in popped]
        return [decode_body(each.message.body) for each in popped]

    async def _acknowledge(self) -> None:
        """Acknowledge the messages of the previous receive; if the outcome is unknown they may be redelivered."""
        popped, self._popped = self._popped, []
        for each, address in popped:
            with contextlib.suppress(ClientError):
                await self._client.requests.acknowledge(each, group=CONSUMER_GROUP, address=address)

    async def lag(self) -> int:
        try:
            await self._client.routes.get(self._topic)
            waiting = 0
            for queue in self._queues:
                address = self._client.routes.require_master(queue.broker_name)
                self.node = self._host_of(address)
                end = await self._client.requests.max_offset(queue.topic, queue.queue_id, address=address)
                # A group may be ahead of a queue that lost its end; that must not offset the lag of other queues.
                waiting += max(0, end - (await self._offsets.load(queue) or 0))
            return waiting
        except ClientError as error:
            self._client.routes.failed(self._queues[0].broker_name, self._topic, error)
            raise LagUnknown(str(error)) from error
