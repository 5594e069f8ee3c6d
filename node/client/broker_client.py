"""A low-level client of brokers and name servers: one call, one request, one honest outcome.

Nothing is retried here. A call returns, or raises an error that says whether the request certainly had no
effect (`ClientError.is_definite`); what to do about it is the caller's choice.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Final, NoReturn

from node.client.bodies import read_body
from node.client.errors import BadReply, ClientError, NoRoute, NotLeader, NotSent, OutcomeUnknown, error_from_reply
from node.client.requests import DEFAULT_TOPIC, send_request
from node.client.results import BrokerGroup, PoppedMessage, PullResult, PullStatus, Route, SendResult, SendStatus
from node.remoting import (
    ClientLimits,
    Command,
    Credentials,
    FieldValue,
    Processor,
    RemotingClient,
    RemotingError,
    RequestCode,
    RequestError,
    ResponseCode,
)
from node.remoting.command import Serializer
from node.runtime import Runtime
from node.store.record import RecordError, decode_records

__all__ = ["BrokerClient"]

ROUTE_MAX_AGE_MS: Final = 30_000
"""How long a route is used without asking again (R: pollNameServerInterval)."""
MAX_CACHED_ROUTES: Final = 1024
"""Limit on cached routes; above it the oldest is dropped."""
MAX_CONNECTIONS: Final = 64
"""Limit on open connections of one client: several times the brokers and name servers of a large test."""
_SYS_FLAG_SUSPEND: Final = 2
_SYS_FLAG_SUBSCRIPTION: Final = 4
_SEND_STATUS: Final = {int(status.value): status for status in SendStatus}
_PULL_STATUS: Final = {int(status.value): status for status in PullStatus}
_READ_ERRORS = (KeyError, TypeError, ValueError, AttributeError, RecursionError)


def _identity(address: str) -> str:
    return address


class BrokerClient:
    """Talks to the brokers behind some name servers.

    `translate` maps an address that a broker advertises to the one that this client must dial (if every link goes
    through a proxy); addresses in routes and leader hints are translated already, and an `address` argument is dialled
    as it is. Without `address`, a call goes to the master in the topic's route.
    `client_id` identifies this client to brokers (as its group name). Times are in milliseconds. `tls` encrypts
    every connection, to name servers too; `credentials` sign every request.

    A connection on which two requests in a row time out with nothing received is closed, and the next call
    dials anew. Use as `async with BrokerClient(...) as client`, or call `close`.
    """

    def __init__(
        self,
        *,
        name_servers: Sequence[str],
        runtime: Runtime,
        request_timeout_ms: int = 3000,
        connect_timeout_ms: int = 1000,
        translate: Callable[[str], str] = _identity,
        client_id: str = "splitbrain",
        serializer: Serializer = "json",
        tls: ssl.SSLContext | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self._name_servers = list(name_servers)
        self._clock = runtime.clock
        self._request_timeout_ms = request_timeout_ms
        self._translate = translate
        self._client_id = client_id
        self._serializer: Serializer = serializer
        limits = ClientLimits(connect_timeout_ms=connect_timeout_ms, max_connections=MAX_CONNECTIONS)
        sign = credentials.sign if credentials is not None else None
        self._remoting = RemotingClient(limits, name="client", tls=tls, sign=sign)
        self._routes: dict[str, tuple[int, Route]] = {}

    async def __aenter__(self) -> BrokerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; calls in flight end in OutcomeUnknown. Idempotent."""
        await self._remoting.close()

    # Routes

    async def route(self, topic: str, *, timeout_ms: int | None = None) -> Route:
        """Ask the name servers, one after the other, who serves `topic`.

        Raises NoRoute (definite) if none of them knows and answers within `timeout_ms`, which they share.
        """
        request = Command.request(RequestCode.GET_ROUTE_INFO_BY_TOPIC, {"topic": topic})
        reply, address = await self._ask_name_servers(request, timeout_ms)
        try:
            route = Route.from_body(topic, read_body(reply.body))
        except _READ_ERRORS as error:
            raise NoRoute(f"the route cannot be read: {error!r}", address=address) from None
        return replace(
            route, groups=tuple(replace(group, addresses=self._dialled(group.addresses)) for group in route.groups)
        )

    async def cluster_groups(self, *, timeout_ms: int | None = None) -> tuple[BrokerGroup, ...]:
        """Every broker name that any name server knows. All of them are asked; for each name, the first one that knows
        it counts. Raises NoRoute if none of them answers."""
        asked = [self._cluster_groups_at(address, timeout_ms) for address in self._name_servers]
        groups: dict[str, BrokerGroup] = {}
        failures: list[NoRoute] = []
        for answer in await asyncio.gather(*asked):
            if isinstance(answer, NoRoute):
                failures.append(answer)
                continue
            for group in answer:
                groups.setdefault(group.name, group)
        if len(failures) == len(asked):
            raise failures[0] if failures else NoRoute("no name server is configured")
        return tuple(groups.values())

    async def _cluster_groups_at(self, address: str, timeout_ms: int | None) -> tuple[BrokerGroup, ...] | NoRoute:
        try:
            reply = await self.invoke(address, Command.request(RequestCode.GET_BROKER_CLUSTER_INFO), timeout_ms)
            self._expect_success(reply, None, address)
            table = read_body(reply.body)["brokerAddrTable"]
            route = Route.from_body("", {"queueDatas": [], "brokerDatas": list(table.values())})
        except ClientError as error:
            return NoRoute(f"no name server helps: {error.remark}", address=address, code=error.code)
        except _READ_ERRORS as error:
            return NoRoute(f"the cluster info cannot be read: {error!r}", address=address)
        return tuple(replace(group, addresses=self._dialled(group.addresses)) for group in route.groups)

    # Messages

    async def send(
        self,
        topic: str,
        queue_id: int,
        body: bytes,
        *,
        properties: Mapping[str, str] | None = None,
        address: str | None = None,
        timeout_ms: int | None = None,
        code: RequestCode = RequestCode.SEND_MESSAGE_V2,
        group: str | None = None,
        sys_flag: int = 0,
    ) -> SendResult:
        """Append one message to a queue. `code` may be SEND_MESSAGE (10), the same with long field names, or
        SEND_BATCH_MESSAGE (320), whose body holds several messages. `group` is the producer's, the client's id
        by default.

        Raises ClientError; only if its `is_definite` is True is it certain that the message is not stored and
        never will be. Raises PropertyError (a ValueError) before anything is sent.
        """
        request = send_request(
            code, group or self._client_id, topic, queue_id, body, properties=properties or {},
            born_ms=self._clock.wall_ms(), sys_flag=sys_flag,
        )  # fmt: skip
        reply, address = await self._ask_broker(request, topic, address, timeout_ms)
        status = _SEND_STATUS.get(reply.code)
        if status is None:
            self._refuse(reply, topic, address)
        try:
            return SendResult(
                status=status,
                msg_id=reply.get_str("msgId"),
                queue_id=reply.get_int("queueId"),
                queue_offset=reply.get_int("queueOffset"),
                transaction_id=reply.get_str("transactionId", ""),
                address=address,
            )
        except RequestError as error:
            raise BadReply(error.remark, address=address, code=reply.code) from None

    async def pull(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int,
        *,
        subscription: str = "*",
        suspend_ms: int = 0,
        address: str | None = None,
        timeout_ms: int | None = None,
        group: str | None = None,
        expression_type: str = "TAG",
        version: int = 0,
        is_known: bool = False,
    ) -> PullResult:
        """Read messages of a queue from `offset` on, at most `max_messages` and as many as the broker returns at once.

        With `suspend_ms` the broker holds the request that long if there is nothing new; `timeout_ms` (by
        default the request timeout plus `suspend_ms`) must be longer. `group` is the consumer's, the client's id by
        default; `version` is that of its subscription. Bodies are as stored. Raises ClientError,
        a BadReply if a record in the answer is damaged.

        `is_known` tells a broker of this project that there is a message at `offset`, because `max_offset` said so:
        it may then answer without having a quorum confirm that it leads. The bounds in such an answer may be old.
        """
        flags = _SYS_FLAG_SUBSCRIPTION | (_SYS_FLAG_SUSPEND if suspend_ms > 0 else 0)
        fields: dict[str, FieldValue] = {
            "consumerGroup": group or self._client_id, "topic": topic, "queueId": queue_id, "queueOffset": offset,
            "maxMsgNums": max_messages, "sysFlag": flags, "commitOffset": 0,
            "suspendTimeoutMillis": suspend_ms, "subscription": subscription, "subVersion": version,
            "expressionType": expression_type,
        }  # fmt: skip
        if is_known:
            fields["knownOffset"] = True
        request = Command.request(RequestCode.PULL_MESSAGE, fields)
        if timeout_ms is None:
            timeout_ms = self._request_timeout_ms + suspend_ms
        reply, address = await self._ask_broker(request, topic, address, timeout_ms)
        status = _PULL_STATUS.get(reply.code)
        if status is None:
            self._refuse(reply, topic, address)
        try:
            return PullResult(
                status=status,
                messages=tuple(decode_records(reply.body)) if status is PullStatus.FOUND else (),
                next_offset=reply.get_int("nextBeginOffset"),
                min_offset=reply.get_int("minOffset"),
                max_offset=reply.get_int("maxOffset"),
                suggested_broker_id=reply.get_int("suggestWhichBrokerId", 0),
                address=address,
            )
        except (RequestError, RecordError) as error:
            raise BadReply(str(error), address=address, code=reply.code) from None

    async def pop(
        self,
        topic: str,
        *,
        group: str,
        broker_name: str,
        max_messages: int = 32,
        invisible_ms: int = 30_000,
        poll_ms: int = 0,
        expression: str = "*",
        address: str | None = None,
        timeout_ms: int | None = None,
    ) -> list[PoppedMessage]:
        """Messages from any queue, as in RocketMQ 5; none if none arrives within `poll_ms`. They are invisible to other
        consumers for `invisible_ms`, and redelivered to the group unless they are acknowledged by then. Raises
        ClientError: the broker may have handed out messages nevertheless, and redelivers them."""
        fields: dict[str, FieldValue] = {
            "consumerGroup": group, "topic": topic, "queueId": -1, "maxMsgNums": max_messages,
            "invisibleTime": invisible_ms, "pollTime": poll_ms, "bornTime": self._clock.wall_ms(), "initMode": 0,
            "exp": expression, "expType": "TAG",
        }  # fmt: skip
        if timeout_ms is None:
            timeout_ms = self._request_timeout_ms + poll_ms
        request = Command.request(RequestCode.POP_MESSAGE, fields)
        reply, address = await self._ask_broker(request, topic, address, timeout_ms)
        if reply.code in (ResponseCode.POLLING_TIMEOUT, ResponseCode.POLLING_FULL):
            return []
        self._expect_success(reply, topic, address)
        try:
            return PoppedMessage.of_reply(reply, broker_name)
        except (RequestError, RecordError, KeyError, ValueError) as error:
            raise BadReply(str(error), address=address, code=reply.code) from None

    async def acknowledge(
        self, popped: PoppedMessage, *, group: str, address: str | None = None, timeout_ms: int | None = None
    ) -> None:
        """Acknowledge a popped message; returns when the broker has that in its log. Raises ClientError."""
        stored = popped.message
        fields: dict[str, FieldValue] = {
            "consumerGroup": group, "topic": stored.topic, "queueId": stored.queue_id,
            "offset": stored.queue_offset, "extraInfo": popped.handle,
        }  # fmt: skip
        request = Command.request(RequestCode.ACK_MESSAGE, fields)
        reply, address = await self._ask_broker(request, stored.topic, address, timeout_ms)
        self._expect_success(reply, stored.topic, address)

    async def max_offset(
        self, topic: str, queue_id: int, *, address: str | None = None, timeout_ms: int | None = None
    ) -> int:
        """The offset that the next message of the queue will get. Raises ClientError."""
        return await self._offset(RequestCode.GET_MAX_OFFSET, topic, queue_id, address, timeout_ms)

    async def min_offset(
        self, topic: str, queue_id: int, *, address: str | None = None, timeout_ms: int | None = None
    ) -> int:
        """The offset of the oldest message of the queue. Raises ClientError."""
        return await self._offset(RequestCode.GET_MIN_OFFSET, topic, queue_id, address, timeout_ms)

    # Administration

    async def runtime_info(self, address: str, *, timeout_ms: int | None = None) -> dict[str, str]:
        """The runtime information of the broker at `address` (code 28). Raises ClientError."""
        reply = await self.invoke(address, Command.request(RequestCode.GET_BROKER_RUNTIME_INFO), timeout_ms)
        self._expect_success(reply, None, address)
        try:
            return {str(name): str(value) for name, value in read_body(reply.body)["table"].items()}
        except _READ_ERRORS as error:
            raise BadReply(f"the runtime info cannot be read: {error!r}", address=address, code=0) from None

    async def broker_config(self, address: str, *, timeout_ms: int | None = None) -> dict[str, str]:
        """The properties that the broker at `address` runs with, including its current role (code 26). Raises
        ClientError."""
        reply = await self.invoke(address, Command.request(RequestCode.GET_BROKER_CONFIG), timeout_ms)
        self._expect_success(reply, None, address)
        lines = reply.body.decode("utf-8", "replace").splitlines()
        return {name: value for name, separator, value in (line.partition("=") for line in lines) if separator}

    async def topic_names(self, address: str, *, timeout_ms: int | None = None) -> frozenset[str]:
        """The topics that the broker at `address` knows (code 21). Raises ClientError."""
        reply = await self.invoke(address, Command.request(RequestCode.GET_ALL_TOPIC_CONFIG), timeout_ms)
        self._expect_success(reply, None, address)
        try:
            return frozenset(map(str, read_body(reply.body)["topicConfigTable"]))
        except _READ_ERRORS as error:
            raise BadReply(f"the topics cannot be read: {error!r}", address=address, code=0) from None

    async def create_topic(
        self,
        topic: str,
        *,
        queues: int = 4,
        perm: int = 6,
        address: str | None = None,
        timeout_ms: int | None = None,
    ) -> None:
        """Create or change a topic on one broker, or on the master of every group that is known.

        Raises ClientError; NoRoute if no master is known.
        """
        if address is not None:
            masters = [address]
        else:
            groups = await self.cluster_groups(timeout_ms=timeout_ms)
            masters = [group.master_address for group in groups if group.master_address is not None]
            if not masters:
                raise NoRoute("no name server knows a master")
        for master in masters:
            request = Command.request(
                RequestCode.UPDATE_AND_CREATE_TOPIC,
                {
                    "topic": topic, "defaultTopic": DEFAULT_TOPIC, "readQueueNums": queues, "writeQueueNums": queues,
                    "perm": perm, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": False,
                },
            )  # fmt: skip
            self._expect_success(await self.invoke(master, request, timeout_ms), None, master)
        self._routes.pop(topic, None)

    # Any request

    async def invoke(self, address: str, request: Command, timeout_ms: float | None = None) -> Command:
        """Send one request to `address`; returns the reply, whatever its code. Raises NotSent or OutcomeUnknown."""
        request.serializer = self._serializer
        if timeout_ms is None:
            timeout_ms = self._request_timeout_ms
        try:
            return await self._remoting.invoke(address, request, timeout_ms=timeout_ms)
        except RemotingError as error:
            kind = NotSent if error.is_definite else OutcomeUnknown
            raise kind(str(error), address=address) from error

    async def send_oneway(self, address: str, request: Command) -> None:
        """Send one request that has no reply to `address`. Raises NotSent; a return does not mean that it arrived."""
        request.serializer = self._serializer
        try:
            await self._remoting.send_oneway(address, request)
        except RemotingError as error:
            raise NotSent(str(error), address=address) from error

    def register(self, code: int, processor: Processor) -> None:
        """Have `processor` called with requests of `code` that brokers send to this client."""
        self._remoting.register(code, processor)

    # Inside

    def _dialled(self, addresses: Mapping[int, str]) -> dict[int, str]:
        return {number: self._translate(address) for number, address in addresses.items()}

    async def _offset(
        self, code: RequestCode, topic: str, queue_id: int, address: str | None, timeout_ms: int | None
    ) -> int:
        request = Command.request(code, {"topic": topic, "queueId": queue_id})
        reply, address = await self._ask_broker(request, topic, address, timeout_ms)
        self._expect_success(reply, topic, address)
        try:
            return reply.get_int("offset")
        except RequestError as error:
            raise BadReply(error.remark, address=address, code=reply.code) from None

    async def _ask_broker(
        self, request: Command, topic: str, address: str | None, timeout_ms: int | None
    ) -> tuple[Command, str]:
        """The reply, whatever its code, and where it came from: `address`, or the master in the topic's route."""
        if address is not None:
            return await self.invoke(address, request, timeout_ms), address
        if timeout_ms is None:
            timeout_ms = self._request_timeout_ms
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_ms / 1000
        address = await self._master_of(topic, timeout_ms)
        left_ms = (deadline_s - loop.time()) * 1000
        if left_ms <= 0:
            raise NotSent(f"no time was left of {timeout_ms} ms after asking for the route", address=address)
        try:
            return await self.invoke(address, request, left_ms), address
        except ClientError:
            self._routes.pop(topic, None)  # the master may be another one by now
            raise

    async def _master_of(self, topic: str, timeout_ms: int) -> str:
        now_ns = self._clock.monotonic_ns()
        cached = self._routes.get(topic)
        if cached is None or now_ns - cached[0] > ROUTE_MAX_AGE_MS * 1_000_000:
            route = await self.route(topic, timeout_ms=timeout_ms)
            if len(self._routes) >= MAX_CACHED_ROUTES:
                self._routes.pop(next(iter(self._routes)))
            cached = self._routes[topic] = (now_ns, route)
        master = cached[1].master_address
        if master is None:
            self._routes.pop(topic, None)
            raise NoRoute(f"topic {topic} has no master now")
        return master

    async def _ask_name_servers(self, request: Command, timeout_ms: int | None) -> tuple[Command, str]:
        """The first good reply and the server that sent it, which is asked first the next time."""
        if timeout_ms is None:
            timeout_ms = self._request_timeout_ms
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_ms / 1000
        failure: ClientError | None = None
        for position, address in enumerate(list(self._name_servers)):
            share_ms = (deadline_s - loop.time()) * 1000 / (len(self._name_servers) - position)
            try:
                reply = await self.invoke(address, request, max(share_ms, 1.0))
                self._expect_success(reply, None, address)
            except ClientError as error:
                if failure is None or error.code is not None:  # "does not exist" says more than "no answer"
                    failure = error
                continue
            if position:
                self._name_servers.remove(address)
                self._name_servers.insert(0, address)
            return reply, address
        if failure is None:
            raise NoRoute("no name server is configured")
        raise NoRoute(f"no name server helps: {failure.remark}", address=failure.address, code=failure.code)

    def _expect_success(self, reply: Command, topic: str | None, address: str) -> None:
        if reply.code != ResponseCode.SUCCESS:
            self._refuse(reply, topic, address)

    def _refuse(self, reply: Command, topic: str | None, address: str) -> NoReturn:
        """Raise the error for a failure reply; forget the route of a topic that its master no longer serves."""
        error = error_from_reply(reply.code, reply.remark, address)
        if isinstance(error, NotLeader) and error.leader_address is not None:
            error.leader_address = self._translate(error.leader_address)
        if topic is not None and error.code in (ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.SYSTEM_ERROR):
            self._routes.pop(topic, None)
        raise error
