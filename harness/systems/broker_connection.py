"""How one logical client sends single requests to the brokers.

Each client has a *home* broker, as in Jepsen, so that the clients together ask every replica, including one that has
been deposed and does not know it. A broker that does not lead refuses before it does anything and names the leader if
it knows one; such a refusal is certain, so the client may ask the next broker within the same operation. Any uncertain
outcome ends the operation at once as it is: no retry could append a message twice.

A refused client asks next: the leader named in the refusal, else the master in the name server's route, else the next
broker in order. Writes begin at the last broker that accepted one; reads always begin at home. Once all brokers have
refused, the client pauses before each further request, unless a leader was named.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, TypeVar

from node.client import BrokerClient, ClientError, NotLeader, PullStatus

__all__ = ["BadMessage", "BrokerConnection", "StoredInPart", "decode_body", "encode_body"]

HOP_PAUSE_S = 0.04
"""Pause before each further request once every broker has refused and none named a leader. An election takes a few
heartbeats, and any broker that has seen its result names the new leader. Asking all of them each time was most of the
work of twenty clients and their brokers while nobody led, and found the leader no sooner than asking one."""

ROUTE_PAUSE_S = 0.1
"""Minimum time between a client's route queries; the route changes only when a new master registers itself."""

ATTEMPT_TIMEOUT_RATIO = 0.7
"""Fraction of the operation's timeout that one request may take, so that time remains to follow a refusal."""

ROUTE_TIMEOUT_MS = 300
"""For asking the name server. The route only saves a hop or two, so it may not cost much of the operation's time."""

BUSY = 2
UNAVAILABLE = 14

T = TypeVar("T")


def _no_number(name: str) -> Any:
    raise ValueError(name)


_encode_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_decode_json = json.JSONDecoder(parse_constant=_no_number).decode


def encode_body(value: Any) -> bytes:
    """The message body for a JSON value."""
    return _encode_json(value).encode()


def decode_body(body: bytes) -> Any:
    """The JSON value of a message body. Raises BadMessage for what the harness cannot have sent."""
    try:
        return _decode_json(body.decode())
    except (ValueError, RecursionError):
        raise BadMessage(f"a message body that nobody sent: {body[:40]!r}") from None


class BadMessage(Exception):
    """A broker returned something that no client of this run has sent."""

    is_definite = False


class StoredInPart(Exception):
    """A broker stored a message with a status other than SUCCESS. For a client that accepts only SUCCESS as an
    acknowledgement, the outcome is unknown."""

    is_definite = False


class BrokerConnection:
    """A `QueueConnection` over the queues of one topic. `addresses` maps hosts to the addresses that this client dials;
    `acknowledged` counts acknowledged appends by status. With `success_only` only SUCCESS acknowledges: an append with
    another status raises StoredInPart, its outcome unknown."""

    def __init__(
        self,
        *,
        client: BrokerClient,
        topic: str,
        addresses: Mapping[str, str],
        home: str,
        timeout_s: float,
        acknowledged: Counter[str] | None = None,
        success_only: bool = False,
    ) -> None:
        self.node: str | None = None
        self.durability: str | None = None
        """"local" if the last append was acknowledged as stored on the master only, else None."""
        self._acknowledged = acknowledged if acknowledged is not None else Counter()
        self._hosts_by_address = {address: host for host, address in addresses.items()}
        self._success_only = success_only
        self._client = client
        self._topic = topic
        self._addresses = addresses
        self._hosts = list(addresses)
        self._home = home
        self._writer = home
        self._timeout_s = timeout_s
        self._route_due_s = -math.inf

    async def open(self) -> None:
        """Nothing to do: connections are dialled on demand."""

    async def close(self) -> None:
        await self._client.close()

    async def append(self, key: int, value: Any) -> int:
        body = encode_body(value)

        async def send(address: str, timeout_ms: int) -> int:
            result = await self._client.send(self._topic, key, body, address=address, timeout_ms=timeout_ms)
            self._acknowledged[result.status.name] += 1
            if result.is_local and self._success_only:
                raise StoredInPart(f"stored, and {result.status.name}")
            self.durability = "local" if result.is_local else None
            return result.queue_offset

        offset = await self._at_leader(self._writer, send)
        self._writer = self.node or self._writer
        return offset

    async def tail(self, key: int) -> int:
        async def ask(address: str, timeout_ms: int) -> int:
            return await self._client.max_offset(self._topic, key, address=address, timeout_ms=timeout_ms)

        return await self._at_leader(self._home, ask)

    async def latest(self, key: int) -> Any:
        """The last message of the queue. Both requests go to the same broker, and the message at a committed offset
        never changes, so the result is as current as the first answer and the pull needs no second quorum read."""

        async def ask(address: str, timeout_ms: int) -> Any:
            tail = await self._client.max_offset(self._topic, key, address=address, timeout_ms=timeout_ms)
            if tail == 0:
                return None
            result = await self._client.pull(
                self._topic, key, tail - 1, 1, address=address, timeout_ms=timeout_ms, is_known=True
            )
            if result.status is not PullStatus.FOUND or result.messages[0].queue_offset != tail - 1:
                raise BadMessage(f"offset {tail - 1} of queue {key} is not there although the queue ends at {tail}")
            return decode_body(result.messages[0].body)

        return await self._at_leader(self._home, ask)

    async def read(self, key: int, offset: int, max_messages: int) -> tuple[int, list[Any], int]:
        async def ask(address: str, timeout_ms: int) -> tuple[int, list[Any], int]:
            result = await self._client.pull(
                self._topic, key, offset, max_messages, address=address, timeout_ms=timeout_ms
            )
            messages = result.messages
            for position, message in enumerate(messages, messages[0].queue_offset if messages else 0):
                if message.queue_offset != position or message.queue_id != key:
                    raise BadMessage(f"queue {key}: offset {message.queue_offset} where {position} was due")
            first = messages[0].queue_offset if messages else offset
            return first, [decode_body(message.body) for message in messages], result.max_offset

        return await self._at_leader(self._home, ask)

    async def _at_leader(self, first: str, request: Callable[[str, int], Awaitable[T]]) -> T:
        """Try brokers until one does not refuse. Raises the first uncertain error, or the last refusal at the end."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s * 0.95
        attempt_ms = int(self._timeout_s * 1000 * ATTEMPT_TIMEOUT_RATIO)
        host = first
        refused: set[str] = set()
        """Hosts that refused in this round."""
        since_pause: set[str] = set()
        is_first_round = True
        while True:
            self.node = host
            left_ms = int((deadline - loop.time()) * 1000)
            try:
                return await request(self._addresses[host], max(1, min(attempt_ms, left_ms)))
            except ClientError as error:
                if not error.is_definite or not _may_ask_elsewhere(error):
                    raise
                refused.add(host)
                since_pause.add(host)
                named = await self._named_by(error, since_pause)
                if named is not None:
                    host = named
                    continue
                host, is_new_round = self._next_host(host, refused)
                if is_new_round:
                    refused.clear()
                    is_first_round = False
                if is_first_round:
                    continue
                if deadline - loop.time() < HOP_PAUSE_S:
                    raise
                await asyncio.sleep(HOP_PAUSE_S)
                since_pause.clear()

    async def _named_by(self, error: ClientError, asked: Collection[str]) -> str | None:
        """The leader named in the refusal, else the master in the route; None if unknown or asked already."""
        if isinstance(error, NotLeader):
            leader = error.leader_id or self._hosts_by_address.get(error.leader_address or "")
            if leader is not None and leader in self._addresses and leader not in asked:
                return leader
        master = await self._master_by_route()
        return None if master in asked else master

    def _next_host(self, refused_by: str, refused: Collection[str]) -> tuple[str, bool]:
        """(the next host in order that has not refused, False); if all have, (the next in order, True): a new round."""
        place = self._hosts.index(refused_by) + 1
        in_order = self._hosts[place:] + self._hosts[:place]
        left = [host for host in in_order if host not in refused]
        return (left or in_order)[0], not left

    async def _master_by_route(self) -> str | None:
        """The master in the name server's route; None if unknown, or if the route was queried within ROUTE_PAUSE_S."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._route_due_s:
            return None
        self._route_due_s = now_s + ROUTE_PAUSE_S
        try:
            route = await self._client.route(self._topic, timeout_ms=ROUTE_TIMEOUT_MS)
        except ClientError:
            return None
        address = route.master_address
        return next((host for host, dialled in self._addresses.items() if dialled == address), None)


def _may_ask_elsewhere(error: ClientError) -> bool:
    """A broker that is not the leader, is busy, or cannot be reached has done nothing, so another one may be asked."""
    return error.code in (None, BUSY, UNAVAILABLE)
