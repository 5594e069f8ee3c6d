"""A client: what the producers and consumers of one program share.

One connection to each broker, one heartbeat for all groups, one book of routes, and one place for the requests that
brokers send to clients (transaction checks, changes of consumer groups, resets of offsets).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Protocol

from node.client.broker_client import BrokerClient
from node.client.errors import ClientError
from node.client.messages import MessageQueue, ReceivedMessage, UniqueKeys
from node.client.requests import group_of_check, heartbeat_request, read_offsets
from node.client.routes import RouteBook
from node.logs import LogLimiter
from node.remoting import Command, Connection, Credentials, RequestCode, RequestError, ResponseCode
from node.remoting.command import Serializer
from node.runtime import Runtime
from node.store.record import RecordError, decode_record

__all__ = ["ClientTimings", "GroupMember", "Session"]

logger = logging.getLogger("node.client")

MAX_MEMBERS: Final = 1000
"""Limit on producers and consumers of one session: each is in every heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTimings:
    """Intervals and timeouts of a client. Defaults are those of RocketMQ's clients (R)."""

    route_interval_s: float = 30.0
    heartbeat_interval_s: float = 30.0
    rebalance_interval_s: float = 20.0
    persist_interval_s: float = 5.0
    lock_interval_s: float = 20.0
    lock_lease_s: float = 30.0
    """How long a lock counts after a broker has confirmed it; brokers keep it for 60 s."""
    pull_suspend_ms: int = 15_000
    """How long a broker holds a pull that finds nothing."""
    retry_pause_s: float = 1.0
    """Pause before a queue is pulled again after an error, and before an ordered message is handled again."""
    drain_timeout_s: float = 10.0
    """How long stopping waits for running handlers."""


class GroupMember(Protocol):
    """A producer or a consumer, as seen by its session."""

    @property
    def group(self) -> str: ...

    def consumer_data(self) -> Mapping[str, Any] | None:
        """A consumer's entry in the heartbeat; None for a producer."""
        ...

    def members_changed(self) -> None:
        """A member joined or left the group."""
        ...

    async def check_transaction(self, command: Command, address: str) -> None:
        """A broker asks for the outcome of a transaction of this group."""
        ...

    def reset_offsets(self, offsets: Mapping[MessageQueue, int]) -> None:
        """A consumer is to continue at these offsets."""
        ...

    def running_info(self) -> bytes:
        """A consumer's state, in R's format."""
        ...

    def consumer_status(self, topic: str) -> bytes:
        """A consumer's offsets in its queues of a topic, in R's format."""
        ...

    async def handle_now(self, message: ReceivedMessage) -> bytes:
        """A consumer is to handle one message at once; returns the result, in R's format. Raises RequestError."""
        ...

    async def stop(self) -> None: ...


class Session:
    """The shared part of a client. Programs use `node.client.Client`, which adds producers and consumers."""

    def __init__(
        self,
        name_servers: Sequence[str],
        *,
        runtime: Runtime,
        client_id: str | None = None,
        timings: ClientTimings | None = None,
        request_timeout_ms: int = 3000,
        connect_timeout_ms: int = 1000,
        translate: Callable[[str], str] = lambda address: address,
        serializer: Serializer = "json",
        tls: ssl.SSLContext | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self.runtime = runtime
        self.timings = timings or ClientTimings()
        self.client_id = client_id or f"splitbrain@{runtime.random.getrandbits(64):016x}"
        self.requests = BrokerClient(
            name_servers=name_servers,
            runtime=runtime,
            request_timeout_ms=request_timeout_ms,
            connect_timeout_ms=connect_timeout_ms,
            translate=translate,
            client_id=self.client_id,
            serializer=serializer,
            tls=tls,
            credentials=credentials,
        )
        self.routes = RouteBook(
            self.requests, max_age_s=self.timings.route_interval_s, on_new_address=self.heartbeat_soon
        )
        self.unique_keys = UniqueKeys(runtime)
        self.complaints = LogLimiter(lambda: asyncio.get_running_loop().time())
        self._members: list[GroupMember] = []
        self._greet = asyncio.Event()
        self._heart: asyncio.Task[None] | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._greeted: dict[str, None] = {}
        self.requests.register(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, self._members_changed)
        self.requests.register(RequestCode.CHECK_TRANSACTION_STATE, self._check_transaction)
        self.requests.register(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, self._reset_offsets)
        self.requests.register(RequestCode.GET_CONSUMER_RUNNING_INFO, self._running_info)
        self.requests.register(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, self._consumer_status)
        self.requests.register(RequestCode.CONSUME_MESSAGE_DIRECTLY, self._handle_now)

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop every consumer and producer, then close the connections. Idempotent."""
        for member in list(self._members):
            await member.stop()
        tasks = [*self._tasks, *([self._heart] if self._heart is not None else [])]
        self._heart = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.routes.close()
        await self.requests.close()

    # Members

    def join(self, member: GroupMember) -> None:
        """Include `member` in heartbeats from now on. Raises ValueError if this client has one of its group already."""
        is_consumer = member.consumer_data() is not None
        for other in self._members:
            if other.group == member.group and (other.consumer_data() is not None) == is_consumer:
                kind = "consumer" if is_consumer else "producer"
                raise ValueError(f"this client has a {kind} of group {member.group!r} already; use another client")
        if len(self._members) >= MAX_MEMBERS:
            raise ValueError(f"this client has {MAX_MEMBERS} producers and consumers already")
        self._members.append(member)
        if self._heart is None:
            self._heart = asyncio.get_running_loop().create_task(self._beat())
        self._greeted.clear()
        self.heartbeat_soon()

    async def leave(self, member: GroupMember) -> None:
        """Remove `member` and unregister it from the brokers that can be reached."""
        if member not in self._members:
            return
        self._members.remove(member)
        field = "producerGroup" if member.consumer_data() is None else "consumerGroup"
        fields = {"clientID": self.client_id, field: member.group}
        farewells = [
            self._tell(address, Command.request(RequestCode.UNREGISTER_CLIENT, fields))
            for address in self.routes.addresses()
        ]
        await asyncio.gather(*farewells)

    def spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        """Run something in the background; it is cancelled when the session closes."""

        async def run() -> None:
            await work

        task = asyncio.get_running_loop().create_task(run())
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    # Heartbeats

    def heartbeat_soon(self) -> None:
        """Send heartbeats to brokers that have had none yet, as soon as possible."""
        self._greet.set()

    async def heartbeat(self, *, only_new: bool = False) -> None:
        """Send a heartbeat to every known broker, or to new ones only; returns when each has answered or failed to."""
        known = self.routes.addresses()
        self._greeted = {address: None for address in self._greeted if address in known}
        wanted = [address for address in known if not (only_new and address in self._greeted)]
        if self._members and wanted:
            await asyncio.gather(*(self._greet_one(address) for address in wanted))

    async def _greet_one(self, address: str) -> None:
        consumers = [data for member in self._members if (data := member.consumer_data()) is not None]
        producers = [member.group for member in self._members if member.consumer_data() is None]
        if await self._tell(address, heartbeat_request(self.client_id, producers, consumers)):
            self._greeted[address] = None
        else:
            self._greeted.pop(address, None)

    async def _tell(self, address: str, request: Command) -> bool:
        try:
            reply = await self.requests.invoke(address, request)
        except ClientError as error:
            self.complaints.warning(logger, f"tell {address}", "%s", error)
            return False
        if reply.code != ResponseCode.SUCCESS:
            self.complaints.warning(
                logger, f"tell {address}", "%s refuses request %d: %s", address, request.code, reply.remark
            )
        return reply.code == ResponseCode.SUCCESS

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            self._greet.clear()
            everybody = loop.time() >= due_s
            if everybody:
                due_s = loop.time() + self.timings.heartbeat_interval_s
            await self.heartbeat(only_new=not everybody)
            try:
                async with asyncio.timeout(max(due_s - loop.time(), 0)):
                    await self._greet.wait()
            except TimeoutError:
                pass

    # What brokers ask

    def _members_changed(self, command: Command, connection: Connection) -> None:
        group = command.get_str("consumerGroup", "")
        for member in self._members:
            if member.group == group:
                member.members_changed()

    def _reset_offsets(self, command: Command, connection: Connection) -> None:
        """An operator resets a group's offsets; brokers notify each of its members (R: ResetOffsetBody)."""
        try:
            group, topic = command.get_str("group"), command.get_str("topic")
            offsets = read_offsets(command.body)
        except (RequestError, ValueError) as error:
            self.complaints.warning(
                logger, f"reset {connection.remote_address}", "%s has offsets reset, and it cannot be read which: %s",
                connection.remote_address, error,
            )  # fmt: skip
            return
        for member in self._members:
            if member.group == group and member.consumer_data() is not None:
                member.reset_offsets({queue: offset for queue, offset in offsets.items() if queue.topic == topic})

    def _running_info(self, command: Command, connection: Connection) -> Command:
        """Raises RequestError."""
        consumer = self._consumer(command.get_str("consumerGroup"))
        return command.reply(ResponseCode.SUCCESS, body=consumer.running_info())

    def _consumer_status(self, command: Command, connection: Connection) -> Command:
        """Raises RequestError."""
        consumer = self._consumer(command.get_str("group"))
        return command.reply(ResponseCode.SUCCESS, body=consumer.consumer_status(command.get_str("topic")))

    async def _handle_now(self, command: Command, connection: Connection) -> Command:
        """An operator has one message handled again (R: ConsumeMessageDirectlyResult). Raises RequestError."""
        consumer = self._consumer(command.get_str("consumerGroup"))
        try:
            stored, _ = decode_record(command.body)
        except RecordError as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"the message cannot be read: {error}") from error
        queue = MessageQueue(stored.topic, command.get_str("brokerName", ""), stored.queue_id)
        return command.reply(ResponseCode.SUCCESS, body=await consumer.handle_now(ReceivedMessage(stored, queue)))

    def _consumer(self, group: str) -> GroupMember:
        for member in self._members:
            if member.group == group and member.consumer_data() is not None:
                return member
        raise RequestError(ResponseCode.SYSTEM_ERROR, f"this client has no consumer of group {group[:127]!r}")

    async def _check_transaction(self, command: Command, connection: Connection) -> None:
        group = group_of_check(command)
        for member in list(self._members):
            if member.group == group and member.consumer_data() is None:
                await member.check_transaction(command, connection.remote_address)
