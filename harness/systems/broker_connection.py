"""How one logical client talks to the brokers.

Each client has a *home* broker, as in the field's other harnesses, so that the clients together ask every
replica, also one that has been deposed and does not know it. A broker that does not lead refuses before it
does anything and names the leader if it knows one; such a refusal is certain, so the client may ask the next
broker within the same operation. Anything that is not certain ends the operation at once and as it is: there
is no retry that could append a message twice.

Where a client looks next: the leader named in the refusal, else the master in the name server's route, else the
next broker in order. Writes begin at the last broker that took one; reads always begin at home. Once all have been
asked it waits before each further one, unless that one was named.
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
"""Once every broker was asked and none could say who leads: before each that is asked again. An election takes a few
heartbeats, and whoever has heard of its end names the new leader. To ask all of them each time was most of what twenty
clients and their brokers did while nobody led, and finds the leader no sooner than one of them does."""

ROUTE_PAUSE_S = 0.1
"""Between two questions of a client for the route, which changes only when a new master registers itself."""

ATTEMPT_TIMEOUT_RATIO = 0.7
"""Part of the operation's time that one request may take, so that a refusal elsewhere can still be followed."""

ROUTE_TIMEOUT_MS = 300
"""For asking the name server. It only saves a hop or two, so it may not cost much of the operation's time."""

BUSY = 2
UNAVAILABLE = 14

T = TypeVar("T")


def _no_number(name: str) -> Any:
    raise ValueError(name)


_encode_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_decode_json = json.JSONDecoder(parse_constant=_no_number).decode


def encode_body(value: Any) -> bytes:
    """The message that holds a JSON value."""
    return _encode_json(value).encode()


def decode_body(body: bytes) -> Any:
    """The JSON value that a message holds. Raises BadMessage for what the harness cannot have sent."""
    try:
        return _decode_json(body.decode())
    except (ValueError, RecursionError):
        raise BadMessage(f"a message body that nobody sent: {body[:40]!r}") from None


class BadMessage(Exception):
    """A broker returned something that no client of this run has sent."""

    is_definite = False


class StoredInPart(Exception):
    """A broker stored a message and it is not as safe as it should be; a client that takes SUCCESS alone for an
    acknowledgement knows nothing then."""

    is_definite = False


class BrokerConnection:
    """A `QueueConnection` over the queues of one topic. `addresses` maps hosts to what this client dials; acknowledged
    appends are counted by status in `acknowledged`. With `success_only` other statuses than SUCCESS acknowledge
    nothing: such an append ends in StoredInPart, its outcome unknown."""

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
        """Of the last append: "local" when it was acknowledged as stored on the master only, else None."""
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
        """The message before the end of the queue; both questions go to the same broker, and the message at a
        committed offset never changes, so the answer is as current as the first of them, and a quorum need not be
        asked a second time."""

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
        """Try brokers until one does not refuse. Raises the error that ended it, the last refusal at the end."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s * 0.95
        attempt_ms = int(self._timeout_s * 1000 * ATTEMPT_TIMEOUT_RATIO)
        host = first
        refused: set[str] = set()
        """By whom, in this round."""
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
        """The leader by the refusal, or the master by the route; None where there is none but those asked already."""
        if isinstance(error, NotLeader):
            leader = error.leader_id or self._hosts_by_address.get(error.leader_address or "")
            if leader is not None and leader in self._addresses and leader not in asked:
                return leader
        master = await self._master_by_route()
        return None if master in asked else master

    def _next_host(self, refused_by: str, refused: Collection[str]) -> tuple[str, bool]:
        """The next in order that has not refused, or where all have, the next one and True: a round is over."""
        place = self._hosts.index(refused_by) + 1
        in_order = self._hosts[place:] + self._hosts[:place]
        left = [host for host in in_order if host not in refused]
        return (left or in_order)[0], not left

    async def _master_by_route(self) -> str | None:
        """None also where it has just been asked for."""
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
    """A broker that is not the leader, is busy, or cannot be reached has done nothing; another one may."""
    return error.code in (None, BUSY, UNAVAILABLE)
