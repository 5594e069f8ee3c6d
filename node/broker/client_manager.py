"""The registered clients: producers and consumers by group, each with the connection it is reached over.

A client belongs to its groups from its first heartbeat until it unregisters, its connection closes, or nothing was
heard of it for two minutes (R: ClientHousekeepingService, 120 s). Whenever the consumers of a group or their
subscriptions change, every consumer of the group is notified (code 40), so that it rebalances at once instead
of at its next turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from node.broker.heartbeat import ConsumerData, Heartbeat, Subscription
from node.remoting import Command, Connection, RequestCode, RequestError, ResponseCode

__all__ = ["CLIENT_EXPIRY_S", "MAX_REGISTRATIONS", "Client", "ClientManager", "ConsumerGroup"]

logger = logging.getLogger("node.broker")

CLIENT_EXPIRY_S = 120.0
"""R: channelExpiredTimeout; heartbeats come every 30 s."""
MAX_REGISTRATIONS = 50_000
"""Clients times their groups. Each costs about half a kilobyte."""
MAX_SUBSCRIBED_BYTES = 64 << 20
"""Approximate size of the subscriptions of all groups; beyond it none may grow. Ordinary ones take 300 bytes."""
SUBSCRIPTION_BYTES = 250
"""Size of a subscription without its texts."""

_STATE_KEY = "client_registrations"


@dataclass(slots=True)
class Client:
    """One client in one of its groups, as of its last heartbeat."""

    client_id: str
    connection: Connection
    seen_s: float
    language: int
    version: int


@dataclass(slots=True)
class ConsumerGroup:
    """What the consumers of one group have in common."""

    consume_type: str
    message_model: str
    consume_from: str
    subscriptions: dict[str, Subscription] = field(default_factory=dict)
    subscribed_bytes: int = 0
    """Approximate size of the subscriptions."""
    clients: dict[str, Client] = field(default_factory=dict)


class ClientManager:
    """The registered clients. `may_notify(group)` tells whether to notify a group's consumers of changes."""

    def __init__(self, *, may_notify: Callable[[str], bool]) -> None:
        self._may_notify = may_notify
        self._producers: dict[str, dict[str, Client]] = {}
        self._consumers: dict[str, ConsumerGroup] = {}
        self._count = 0
        self._subscribed_bytes = 0
        self._turns: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def producer_count(self) -> int:
        return sum(map(len, self._producers.values()))

    @property
    def consumer_count(self) -> int:
        return sum(len(group.clients) for group in self._consumers.values())

    def consumer_group(self, group: str) -> ConsumerGroup | None:
        """A group that has a consumer here, or None."""
        return self._consumers.get(group)

    def consumer_groups(self) -> Iterable[tuple[str, ConsumerGroup]]:
        """Every group that has a consumer here."""
        return self._consumers.items()

    def consumer_ids(self, group: str) -> list[str]:
        """The client ids of a group's consumers, in the order in which they registered."""
        found = self._consumers.get(group)
        return list(found.clients) if found is not None else []

    def next_producer(
        self, group: str, may_ask: Callable[[Connection], bool] = lambda connection: True
    ) -> Connection | None:
        """A connection to a producer of `group` for which `may_ask` holds, another one each time (R: round robin); None
        if there is none."""
        clients = [
            client
            for client in self._producers.get(group, {}).values()
            if not client.connection.is_closing and may_ask(client.connection)
        ]
        if not clients:
            return None
        turn = self._turns.get(group, -1) + 1
        self._turns[group] = turn % len(clients)
        return clients[turn % len(clients)].connection

    def producer(self, client_id: str) -> Connection | None:
        """The connection of a client that is in any producer group; None if it is in none."""
        for clients in self._producers.values():
            client = clients.get(client_id)
            if client is not None and not client.connection.is_closing:
                return client.connection
        return None

    def producer_groups(self) -> Iterable[tuple[str, dict[str, Client]]]:
        """Every group that has a producer here, with its producers by their ids."""
        return self._producers.items()

    def heartbeat(self, beat: Heartbeat, connection: Connection, *, language: int = 0, version: int = 0) -> None:
        """Register a client in its groups. Raises RequestError (SYSTEM_BUSY) if a bound is reached."""
        self._watch(connection)
        client = Client(beat.client_id, connection, asyncio.get_running_loop().time(), language, version)
        for group in beat.producer_groups:
            clients = self._producers.get(group, {})
            self._seen(clients, client)
            self._producers[group] = clients  # only now: a client that is refused leaves no empty group
        for data in beat.consumers:
            self._consumer_seen(data, client)
        if self._timer is None and self._count:
            self._timer = asyncio.get_running_loop().call_later(CLIENT_EXPIRY_S, self._expire)

    def _seen(self, clients: dict[str, Client], client: Client) -> bool:
        """Record that a client was heard of; returns whether it is new."""
        is_new = client.client_id not in clients
        if is_new and self._count >= MAX_REGISTRATIONS:
            raise RequestError(ResponseCode.SYSTEM_BUSY, f"{self._count} clients are registered, no more are taken")
        clients[client.client_id] = client
        self._count += is_new
        return is_new

    def _consumer_seen(self, data: ConsumerData, client: Client) -> None:
        group = self._consumers.get(data.group)
        if group is None:
            group = ConsumerGroup(data.consume_type, data.message_model, data.consume_from)
        wanted: dict[str, Subscription] = {}
        newer = False
        for subscription in data.subscriptions:
            known = group.subscriptions.get(subscription.topic)
            is_newer = known is None or subscription.version > known.version
            newer |= is_newer
            wanted[subscription.topic] = subscription if is_newer or known is None else known
        size_bytes = sum(map(_size_bytes, wanted.values())) if wanted else group.subscribed_bytes
        more_bytes = size_bytes - group.subscribed_bytes
        if more_bytes > 0 and self._subscribed_bytes + more_bytes > MAX_SUBSCRIBED_BYTES:
            raise RequestError(
                ResponseCode.SYSTEM_BUSY, "the subscriptions of all groups are too much, no more are taken"
            )
        changed = self._seen(group.clients, client) | newer
        self._consumers[data.group] = group
        group.consume_type, group.message_model = data.consume_type, data.message_model
        group.consume_from = data.consume_from
        if wanted:
            changed |= wanted.keys() != group.subscriptions.keys()
            group.subscriptions, group.subscribed_bytes = wanted, size_bytes
            self._subscribed_bytes += more_bytes
        if changed:
            self._notify(data.group)

    def _watch(self, connection: Connection) -> None:
        if _STATE_KEY not in connection.state:
            connection.state[_STATE_KEY] = True
            connection.on_close(self._connection_closed)

    def unregister(self, client_id: str, producer_group: str, consumer_group: str) -> None:
        """A client leaves a producer group, a consumer group, or both; an empty name stands for none."""
        if producer_group:
            self._remove_producers(producer_group, lambda client: client.client_id == client_id)
        if consumer_group:
            self._remove_consumers(consumer_group, lambda client: client.client_id == client_id)

    def _connection_closed(self, connection: Connection) -> None:
        self._remove(lambda client: client.connection is connection)

    def _expire(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        latest = loop.time() - CLIENT_EXPIRY_S
        self._remove(lambda client: client.seen_s <= latest)
        times = [client.seen_s for clients in self._producers.values() for client in clients.values()]
        times += [client.seen_s for group in self._consumers.values() for client in group.clients.values()]
        if times:
            self._timer = loop.call_at(min(times) + CLIENT_EXPIRY_S, self._expire)

    def _remove(self, is_gone: Callable[[Client], bool]) -> None:
        for name in list(self._producers):
            self._remove_producers(name, is_gone)
        for name in list(self._consumers):
            self._remove_consumers(name, is_gone)

    def _remove_producers(self, name: str, is_gone: Callable[[Client], bool]) -> None:
        clients = self._producers.get(name, {})
        self._drop(clients, is_gone)
        if not clients:
            self._producers.pop(name, None)
            self._turns.pop(name, None)

    def _remove_consumers(self, name: str, is_gone: Callable[[Client], bool]) -> None:
        group = self._consumers.get(name)
        if group is None or not self._drop(group.clients, is_gone):
            return
        if group.clients:
            self._notify(name)
        else:
            self._subscribed_bytes -= group.subscribed_bytes
            del self._consumers[name]

    def _drop(self, clients: dict[str, Client], is_gone: Callable[[Client], bool]) -> bool:
        gone = [client_id for client_id, client in clients.items() if is_gone(client)]
        for client_id in gone:
            del clients[client_id]
        self._count -= len(gone)
        return bool(gone)

    def _notify(self, name: str) -> None:
        if not self._may_notify(name):
            return
        notice = Command.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": name}, oneway=True)
        for client in self._consumers[name].clients.values():
            client.connection.send(notice)

    def stop(self) -> None:
        """Forget all clients; nobody is notified any more."""
        self._consumers.clear()
        self._producers.clear()
        self._count = self._subscribed_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _size_bytes(subscription: Subscription) -> int:
    texts = (subscription.topic, subscription.expression, subscription.expression_type)
    return SUBSCRIPTION_BYTES + sum(map(len, texts))
