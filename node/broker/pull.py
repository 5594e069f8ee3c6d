"""Pulling: code 11, with long polling and tag filters.

A pull passes the read gate and is then answered in one synchronous step. If it asks to be suspended and its
queue has nothing new, it is held until a message arrives, its time is over, or this node stops leading. A
held pull that a message wakes needs no second barrier: the message was committed after the pull's own barrier, so
the queue's state with it was current at some moment while the pull was under way.

Status codes (seed S1 and R, PullMessageProcessor): SUCCESS; PULL_NOT_FOUND at the end of the queue;
PULL_RETRY_IMMEDIATELY when no message passed the filter; PULL_OFFSET_MOVED outside the queue's bounds,
with the nearest bound as nextBeginOffset. A slave of classic HA may have begun later than its master, or lag: it sends
a consumer that wants what it lacks back to the master, with PULL_RETRY_IMMEDIATELY and the same offset.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from node.broker.append_errors import check_crc, read_records
from node.broker.client_manager import ClientManager
from node.broker.consumer_offsets import ConsumerOffsets, TooManyOffsets
from node.broker.dispatcher import Queue
from node.broker.group_rates import GroupRates
from node.broker.ledger import LedgerStore
from node.broker.memory_window import MemoryWindow
from node.broker.reads import ReadGate
from node.broker.sql92 import SqlError, parse_sql
from node.broker.subscription_groups import DEFAULT_SLOW_BROKER_ID, MASTER_ID, SubscriptionGroups
from node.broker.topics import TopicTable
from node.config import PERM_READ, BrokerConfig
from node.logs import LogLimiter
from node.remoting import Command, Connection, RequestError, ResponseCode
from node.store.consume_queue import ConsumeQueue, Unit
from node.store.properties import decode_properties
from node.store.queue_store import QueueStore
from node.store.record import RecordError, RecordSummary, java_string_hash, summarize_record

__all__ = [
    "ConsumingGroups",
    "PropertyFilter",
    "PullHolds",
    "PullProcessor",
    "PullRequest",
    "TagFilter",
    "message_filter",
]

logger = logging.getLogger("node.broker")

MAX_BATCH_MESSAGES = 32
"""Messages in one reply (R: maxTransferCountOnMessageInMemory)."""
MAX_BATCH_BYTES = 256 * 1024
"""Bytes in one reply, unless its first message alone is longer (R: maxTransferBytesOnMessageInMemory)."""
MAX_DISK_MESSAGES = 8
"""Messages in one reply as soon as one of them comes from the disk (R: maxTransferCountOnMessageInDisk)."""
MAX_DISK_BYTES = 64 * 1024
"""Bytes in such a reply, unless its first message alone is longer (R: maxTransferBytesOnMessageInDisk)."""
COLD_SHARE = 0.05
"""Share of the time that pulls from the disk may take while messages come in: a long backlog is read beside the
senders, not instead of them. Copying to the socket comes on top, about as much again."""
MAX_COLD_WAIT_S = 2.0
"""Longest wait of a pull from the disk for its turn, however many there are; clients wait for seconds."""
HOLD_RECHECK_S = 5.0
"""A held pull checks its queue again after this time in any case (R: PullRequestHoldService)."""
PLACES_OF_HELD = 64
"""Queues at which a held pull waits, at most, on average; each takes some 150 bytes."""
MAX_SCANNED_UNITS = 800
"""Units that one filtered pull scans (R: maxFilterMessageCount 16000 bytes of 20-byte units)."""
MAX_SCANNED_MESSAGES = 128
"""Messages that one pull with a property filter scans: each has to be read, a few milliseconds in all."""
MAX_FILTER_EFFORT = 16_000_000
"""Characters of the expression times those of properties, summed over all messages that such a pull scans except the
last one: LIKE may take as many steps, some ten milliseconds in all. Ordinary pulls need a tenth of it."""
MAX_SUSPEND_MS = 60_000
"""Longest time a pull is held, whatever it asks for: clients use 15 to 30 s."""
MAX_SUBSCRIPTION_CHARACTERS = 8192
"""A tag expression beyond this is refused."""

BROADCASTING = "BROADCASTING"

_STATE_KEY = "held_pulls"

SYS_FLAG_COMMIT_OFFSET = 1
SYS_FLAG_SUSPEND = 2
SYS_FLAG_SUBSCRIPTION = 4


class TagFilter:
    """A tag expression: "*" or "" lets everything through, "a || b" messages whose tag is a or b.

    A unit is first checked by its hash, which another tag may share; the message itself is then checked by its tag.
    """

    __slots__ = ("_hashes", "_tags")

    def __init__(self, expression: str) -> None:
        tags = [tag.strip() for tag in expression.split("||")]
        self._tags = frozenset(tag for tag in tags if tag)
        if "*" in self._tags:
            self._tags = frozenset()
        self._hashes = frozenset(map(java_string_hash, self._tags))

    @property
    def tags(self) -> frozenset[str]:
        """The tags that pass; empty if all do."""
        return self._tags

    @property
    def passes_all(self) -> bool:
        return not self._tags

    def may_pass(self, tag_hash: int) -> bool:
        """Whether a unit with this hash can belong to a message that passes."""
        return not self._tags or tag_hash in self._hashes

    def passes(self, record: RecordSummary) -> bool:
        """Whether a message with this TAGS property passes."""
        return not self._tags or record.tags in self._tags

    def effort(self, record: RecordSummary) -> int:
        """The cost of checking a message, see MAX_FILTER_EFFORT."""
        return 0


class PropertyFilter:
    """A SQL92 expression over the properties. Units do not have these, so every message is read."""

    __slots__ = ("_sql",)
    passes_all = False

    def __init__(self, expression: str) -> None:
        try:
            self._sql = parse_sql(expression)
        except SqlError as error:
            raise RequestError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, f"the expression {error}") from error

    def may_pass(self, tag_hash: int) -> bool:
        return True

    def passes(self, record: RecordSummary) -> bool:
        """Whether the expression is true for the message's properties."""
        return self._sql.matches(decode_properties(record.properties_text))

    def effort(self, record: RecordSummary) -> int:
        """The cost of checking a message, see MAX_FILTER_EFFORT."""
        return len(self._sql.expression) * len(record.properties_text)


def message_filter(expression: str, expression_type: str) -> TagFilter | PropertyFilter:
    """The filter of a subscription. Raises RequestError (SUBSCRIPTION_PARSE_FAILED)."""
    if expression_type not in ("TAG", "SQL92"):
        raise RequestError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, f"{expression_type[:40]!r} is neither TAG nor SQL92")
    if len(expression) > MAX_SUBSCRIPTION_CHARACTERS:
        raise RequestError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, "the tag expression is too long")
    return TagFilter(expression) if expression_type == "TAG" else PropertyFilter(expression)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """Which messages of a queue are wanted, and by whom."""

    topic: str
    queue_id: int
    offset: int
    max_messages: int
    tag_filter: TagFilter | PropertyFilter
    group: str
    suspend_ms: int = 0
    commit_offset: int = -1
    is_known: bool = False
    """The client knows from an answer that a message exists at the offset, and wants only messages that exist."""

    @classmethod
    def of(cls, command: Command, groups: ConsumingGroups) -> PullRequest:
        flags = command.get_int("sysFlag", 0)
        group, topic = command.get_str("consumerGroup", ""), command.get_str("topic")
        groups.check(group)
        expression, expression_type = "*", "TAG"
        if flags & SYS_FLAG_SUBSCRIPTION:
            expression = command.get_str("subscription", "*")
            expression_type = command.get_str("expressionType", "") or "TAG"
        elif group:
            expression, expression_type = groups.subscription(group, topic, command.get_int("subVersion", 0))
        suspend_ms = command.get_int("suspendTimeoutMillis", 0) if flags & SYS_FLAG_SUSPEND else 0
        return cls(
            topic=topic,
            queue_id=command.get_int("queueId"),
            offset=command.get_int("queueOffset"),
            max_messages=min(max(command.get_int("maxMsgNums", MAX_BATCH_MESSAGES), 1), MAX_BATCH_MESSAGES),
            suspend_ms=min(max(suspend_ms, 0), MAX_SUSPEND_MS),
            tag_filter=message_filter(expression, expression_type),
            group=group,
            commit_offset=command.get_int("commitOffset", -1) if flags & SYS_FLAG_COMMIT_OFFSET else -1,
            is_known=command.get_bool("knownOffset"),
        )


class ConsumingGroups:
    """What pulls need to know of consumer groups."""

    def __init__(self, groups: SubscriptionGroups, clients: ClientManager, auto_create: bool) -> None:
        self._groups = groups
        self._clients = clients
        self.auto_create = auto_create
        """Whether a pull may come from a group that was not created."""

    def slow_broker_id(self, name: str) -> int:
        """The broker for a consumer of the group that lags far behind (R: whichBrokerWhenConsumeSlowly)."""
        group = self._groups.get(name)
        return group.slow_broker_id if group is not None else DEFAULT_SLOW_BROKER_ID

    def check(self, name: str) -> None:
        """Refuse a group that must not consume here (R: PullMessageProcessor)."""
        group = self._groups.get(name)
        if group is None:
            if name and not self.auto_create:
                raise RequestError(
                    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"group {name!r} does not exist, create it first"
                )
        elif not group.consume_enable:
            raise RequestError(ResponseCode.NO_PERMISSION, f"group {name!r} may not consume")
        elif not group.consume_broadcast_enable:
            consumers = self._clients.consumer_group(name)
            if consumers is not None and consumers.message_model == BROADCASTING:
                raise RequestError(ResponseCode.NO_PERMISSION, f"group {name!r} may not consume by broadcast")

    def subscription(self, name: str, topic: str, version: int) -> tuple[str, str]:
        """The expression and its type in a group's heartbeats for `topic`, for a pull without one."""
        consumers = self._clients.consumer_group(name)
        known = consumers.subscriptions.get(topic) if consumers is not None else None
        if known is None:
            raise RequestError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST, f"group {name!r} has no subscription to topic {topic!r}"
            )
        if known.version < version:
            raise RequestError(
                ResponseCode.SUBSCRIPTION_NOT_LATEST,
                f"the subscription of group {name!r} here is of version {known.version}, not {version}",
            )
        return known.expression, known.expression_type


class _Unreadable(RequestError):
    """Messages of a queue cannot be read. With `accuses_queue` the log is fine but the queue's file is not: the next
    start then rebuilds the queues."""

    def __init__(self, place: str, error: RecordError | OSError) -> None:
        super().__init__(ResponseCode.SYSTEM_ERROR, f"{place} cannot be read: {error}")
        self.accuses_queue = isinstance(error, RecordError) or error.errno in (None, errno.EINVAL)


class PullHolds:
    """Pulls that wait for a message, by queue. A POP request waits at every queue of its topic."""

    def __init__(self, *, max_held: int) -> None:
        self._max_held = max_held
        self._held: dict[Queue, dict[asyncio.Future[None], None]] = {}
        self.count = 0
        self._places = 0

    @property
    def is_full(self) -> bool:
        return self.count >= self._max_held or self._places >= self._max_held * PLACES_OF_HELD

    async def wait(self, queues: Sequence[Queue], connection: Connection, timeout_s: float) -> None:
        """Return when something has arrived in `queues`, the connection is gone or the time is over."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for queue in queues:
            self._held.setdefault(queue, {})[woken] = None
        of_connection = connection.state.get(_STATE_KEY)
        if of_connection is None:
            of_connection = connection.state[_STATE_KEY] = {}
            connection.on_close(self._connection_closed)
        of_connection[woken] = None
        self.count += 1
        self._places += len(queues)
        try:
            await asyncio.wait((woken,), timeout=timeout_s)
        finally:
            self.count -= 1
            self._places -= len(queues)
            of_connection.pop(woken, None)
            for queue in queues:
                waiting = self._held.get(queue)
                if waiting is not None:
                    waiting.pop(woken, None)
                    if not waiting:
                        del self._held[queue]

    def wake(self, queues: Iterable[Queue]) -> None:
        """Messages have arrived in `queues`."""
        if self._held:
            for queue in queues:
                self._wake(self._held.pop(queue, {}))

    def wake_all(self) -> None:
        """Let every held pull look again, for instance because this node no longer leads."""
        held, self._held = self._held, {}
        for waiting in held.values():
            self._wake(waiting)

    def close(self) -> None:
        """Hold nothing any more: pulls that wait are answered with what exists."""
        self._max_held = 0
        self.wake_all()

    def _connection_closed(self, connection: Connection) -> None:
        self._wake(connection.state.get(_STATE_KEY, {}))

    def _wake(self, waiting: dict[asyncio.Future[None], None]) -> None:
        for woken in waiting:
            if not woken.done():
                woken.set_result(None)


class PullProcessor:
    """Answers pulls from the consume queues and the log."""

    def __init__(
        self,
        *,
        gate: ReadGate,
        log: LedgerStore,
        queues: QueueStore,
        topics: TopicTable,
        holds: PullHolds,
        groups: SubscriptionGroups,
        clients: ClientManager,
        offsets: ConsumerOffsets,
        memory: MemoryWindow,
        put_total: Callable[[], int],
        auto_create_groups: bool = True,
        slave_read_enable: bool = False,
        is_slave: bool = False,
    ) -> None:
        self._is_slave = is_slave
        self._put_total = put_total
        self._cold_puts = 0
        self._cold_at_s = 0.0
        self._cold_cost_s = 0.0
        self.groups = ConsumingGroups(groups, clients, auto_create_groups)
        self._memory = memory
        self._slave_read_enable = slave_read_enable
        self.may_read = True
        self._offsets = offsets
        self._gate = gate
        self._log = log
        self._queues = queues
        self._topics = topics
        self._holds = holds
        self._complaints = LogLimiter(lambda: asyncio.get_running_loop().time())
        self.get_total = 0
        """Messages delivered since the start."""
        self.rates = GroupRates(lambda: asyncio.get_running_loop().time())

    def configure(self, config: BrokerConfig) -> None:
        """Apply `config` from now on."""
        self.groups.auto_create = config.auto_create_groups
        self._slave_read_enable = config.slave_read_enable
        self.may_read = bool(config.broker_permission & PERM_READ)

    def process(self, command: Command, connection: Connection) -> Command | Awaitable[Command | None]:
        """Answer now, or later if the pull may have to wait; None if its connection is gone by then."""
        request = PullRequest.of(command, self.groups)
        self._check(request)
        may_read = (request.is_known and self._has(request)) or self._gate.is_open
        if not may_read or request.commit_offset >= 0 or self._is_cold(request):
            return self._answer_later(command, connection, request, may_read=may_read)
        with suppress(_Unreadable):  # `_answer_later` meets it again, and reports it
            reply = self._answer(command, request)
            if reply.code != ResponseCode.PULL_NOT_FOUND or request.suspend_ms == 0:
                return reply
        return self._answer_later(command, connection, request, may_read=True)

    async def _answer_later(
        self, command: Command, connection: Connection, request: PullRequest, *, may_read: bool
    ) -> Command | None:
        if not may_read:
            await self._gate.enter()
        if request.commit_offset >= 0:
            try:
                self._offsets.commit(request.group, request.topic, request.queue_id, request.commit_offset)
            except TooManyOffsets as error:
                self._complaints.warning(logger, "offsets", "%s", error)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + request.suspend_ms / 1000
        while True:
            is_cold = self._is_cold(request)
            if is_cold:
                await self._cold_turn()
            began_s = loop.time()
            try:
                reply = self._answer(command, request)
            except _Unreadable as error:
                self._complaints.warning(logger, "unreadable", "%s", error.remark)
                if error.accuses_queue:
                    await self._queues.distrust()
                raise
            if is_cold:
                self._cold_cost_s = loop.time() - began_s
            left_s = deadline_s - loop.time()
            if reply.code != ResponseCode.PULL_NOT_FOUND or left_s <= 0 or self._holds.is_full:
                return reply
            await self._holds.wait(((request.topic, request.queue_id),), connection, min(left_s, HOLD_RECHECK_S))
            if connection.is_closing:
                return None
            # What may be read may have changed (R: PullRequestHoldService asks anew).
            self.groups.check(request.group)
            self._check(request)
            if self._gate.needs_leader and not self._gate.leads:
                raise self._gate.not_leader()

    def _check(self, request: PullRequest) -> None:
        """Refuse what must not be read: from this broker, or of the topic, or because there is no such queue."""
        if not self.may_read:
            raise RequestError(ResponseCode.NO_PERMISSION, "this broker may not be read (brokerPermission)")
        topic = self._topics.get(request.topic)
        if topic is None:
            raise RequestError(ResponseCode.TOPIC_NOT_EXIST, f"topic {request.topic!r} does not exist")
        if not topic.readable:
            raise RequestError(ResponseCode.NO_PERMISSION, f"topic {request.topic!r} is not readable")
        if not 0 <= request.queue_id < topic.read_queues:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"queue {request.queue_id} of topic {request.topic!r}, which has {topic.read_queues}",
            )

    def _has(self, request: PullRequest) -> bool:
        """Whether the message that the client knows to exist is here, on a node that believes it leads.

        Such a pull is answered without asking a quorum. The queues hold only what is committed, and a committed message
        never changes, so the client gets the same answer from whoever leads; only the bounds in it may be old. The
        read is linearizable because the client learned the offset from an answer that was.
        """
        queue = self._queues.find(request.topic, request.queue_id)
        return queue is not None and queue.min_offset <= request.offset < queue.max_offset and self._gate.leads

    def _is_cold(self, request: PullRequest) -> bool:
        """Whether what is wanted has to be read from the disk."""
        queue = self._queues.find(request.topic, request.queue_id)
        try:
            units = queue.read(request.offset, 1) if queue is not None else []
        except OSError:
            return False  # the answer reports it
        return bool(units) and self._memory.is_behind(units[0].physical_offset)

    async def _cold_turn(self) -> None:
        """Wait until the next pull from the disk may take its time; at once while nobody sends."""
        puts, before = self._put_total(), self._cold_puts
        self._cold_puts = puts
        if puts != before:
            now_s = asyncio.get_running_loop().time()
            turn_s = min(max(self._cold_at_s, now_s), now_s + MAX_COLD_WAIT_S)
            self._cold_at_s = turn_s + self._cold_cost_s / COLD_SHARE
            if turn_s > now_s:
                await asyncio.sleep(turn_s - now_s)

    def _answer(self, command: Command, request: PullRequest) -> Command:
        """The reply from this moment's state. Raises _Unreadable when its messages cannot be read."""
        queue = self._queues.find(request.topic, request.queue_id)
        low, high = (queue.min_offset, queue.max_offset) if queue is not None else (0, 0)
        offset = request.offset
        body = b""
        suggested_id = MASTER_ID
        if self._is_slave and not low <= offset <= high:
            # The master may have what precedes this log, or what this log does not have yet, and sends consumers that
            # are far behind here. A consumer that went by these bounds would skip messages, or get them again (R:
            # offsetCheckInSlave).
            code, following = ResponseCode.PULL_RETRY_IMMEDIATELY, offset
        elif offset < low:
            code, following = ResponseCode.PULL_OFFSET_MOVED, low
        elif offset > high:
            code, following = ResponseCode.PULL_OFFSET_MOVED, high
        elif offset == high or queue is None:
            code, following = ResponseCode.PULL_NOT_FOUND, offset
        else:
            try:
                records, following, last = self.collect(queue, request)
            except (RecordError, OSError) as error:
                raise _Unreadable(f"queue {request.topic}/{request.queue_id} at {offset}", error) from error
            self.get_total += len(records)
            self.rates.given(request.group, len(records))
            body = b"".join(records)
            code = ResponseCode.SUCCESS if records else ResponseCode.PULL_RETRY_IMMEDIATELY
            if self._slave_read_enable and self._memory.is_behind(last):
                suggested_id = self.groups.slow_broker_id(request.group)
        return command.reply(
            code,
            fields={
                "suggestWhichBrokerId": suggested_id,
                "nextBeginOffset": following,
                "minOffset": low,
                "maxOffset": high,
            },
            body=body,
        )

    def collect(self, queue: ConsumeQueue, request: PullRequest) -> tuple[list[bytes], int, int]:
        """Records from the offset on that pass the filter, within the caps; the offset to continue from; and the log
        position of the last message that was scanned.

        Stops before a message that cannot be read; raises RecordError or OSError if that is the first one.
        """
        passes_all = request.tag_filter.passes_all
        wanted = request.max_messages
        if not passes_all:
            wanted = MAX_SCANNED_UNITS if isinstance(request.tag_filter, TagFilter) else MAX_SCANNED_MESSAGES
        units = queue.read(request.offset, wanted)
        crcs = queue.read_crcs(request.offset, wanted)
        records: list[bytes] = []
        most, most_bytes = request.max_messages, MAX_BATCH_BYTES
        if units and self._memory.is_behind(units[0].physical_offset):
            # Reading from the disk must not take long (R: isTheBatchFull). Later messages may be in memory again: they
            # come with the next pull.
            most, most_bytes = min(most, MAX_DISK_MESSAGES), MAX_DISK_BYTES
        whole = read_records(self._log, units[:most], crcs, most_bytes) if units and passes_all else None
        if whole is not None:
            return whole, request.offset + len(whole), units[len(whole) - 1].physical_offset
        size_bytes = effort = 0
        offset, last = request.offset, 0
        for offset, unit in enumerate(units, request.offset):
            last = unit.physical_offset
            if not request.tag_filter.may_pass(unit.tag_hash):
                continue
            if records and (len(records) >= most or size_bytes + unit.size_bytes > most_bytes):
                return records, offset, last
            try:
                record, summary = self._read_record(unit, crcs[offset - request.offset], request, offset)
            except (RecordError, OSError):
                if records:
                    return records, offset, last
                raise
            if summary is None or request.tag_filter.passes(summary):
                records.append(record)
                size_bytes += len(record)
            if summary is not None and (effort := effort + request.tag_filter.effort(summary)) > MAX_FILTER_EFFORT:
                break
        return records, offset + 1, last

    def _read_record(
        self, unit: Unit, crc: int | None, request: PullRequest, offset: int
    ) -> tuple[bytes, RecordSummary | None]:
        """The record of `unit`, checked bit for bit to be the one that was dispatched; with its summary unless the
        filter does not need it. Raises RecordError."""
        record = self._log.read_bytes(unit.physical_offset, unit.size_bytes)
        check_crc(record, crc, unit.physical_offset)
        if crc is not None and request.tag_filter.passes_all:
            return record, None  # nothing in it can differ from what was dispatched
        summary = summarize_record(record)
        if summary.queue_offset != offset or summary.queue_id != request.queue_id or summary.topic != request.topic:
            raise RecordError(
                f"at {unit.physical_offset} of the log lies number {summary.queue_offset} of"
                f" {summary.topic}/{summary.queue_id}"
            )
        return record, summary
