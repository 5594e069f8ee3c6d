"""Sending: codes 10, 310 (the same with one-letter fields) and 320 (a batch).

Every request becomes a batch of records, or part of one, appended to the log in one piece. What requests of one
connection have in common (topic, queue, flags) is checked once and remembered, and requests that arrived together are
put together: one append, one write of all answers. Requests that need more checks (a delay, a transaction, a retry, a
topic to be created) are checked one by one, and then take the same path.

Everything that can be refused is refused before the append, with a code that means "certainly not stored". After the
append the answer is SUCCESS once the entry is committed, a code for "stored, but less safely" (StoredInPart), or
SYSTEM_ERROR: the outcome is unknown (quorum timeout, change of term, disk error). Checks and codes in order: seed S1
(SendMessageProcessor.msgCheck, DefaultMessageStore.putMessage) and the table of send outcomes.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from node.broker.dispatch_batch import Queue
from node.broker.internal_topics import AUTO_CREATE_TOPIC, HALF_TOPIC, RETRY_PREFIX, is_internal
from node.broker.ledger import DLedgerCode, DLedgerError
from node.broker.message_store import MessageStore, NotTogether, NotWritable, PendingPut, Placed
from node.broker.requeue import IllegalTimer, delay_level, delay_text, timer_due_ms, timer_place
from node.broker.send_back import RetryTopics
from node.broker.send_hooks import Answer, SendHooks, SendRefused
from node.broker.send_replies import RefusalTemplates, SendReplies, SendReplyWriter
from node.broker.send_request import SendHeader, names_of, split_batches
from node.broker.timers import MAX_OPEN_TIMERS, OpenTimers
from node.broker.topics import TopicTable, TopicTableFull
from node.broker.transactions import OpenTransactions
from node.config import PERM_WRITE, BrokerConfig, TopicConfig
from node.remoting import (
    Command,
    Connection,
    DeferredReply,
    FieldValue,
    HeaderTemplate,
    RequestCode,
    RequestError,
    ResponseCode,
    TemplateRequest,
    VariableFields,
)
from node.runtime import Runtime
from node.store.properties import (
    CLUSTER,
    DELAY_LEVEL,
    KEYS,
    REAL_QUEUE_ID,
    REAL_TOPIC,
    REPLY_TO_CLIENT,
    TRANSACTION_PREPARED,
    UNIQUE_KEY,
    WAIT_STORE,
    decode_properties,
    join_properties,
    property_value,
)
from node.store.record import (
    MAX_PROPERTIES_SIZE_BYTES,
    MAX_TOPIC_SIZE_BYTES,
    SYS_FLAG_TRANSACTION_MASK,
    SYS_FLAG_TRANSACTION_PREPARED,
    RecordError,
)
from node.store.record_batch import RecordBatch, RecordMaker, batch_of_one, record_maker

__all__ = ["VARIABLE_FIELDS", "SendProcessor"]

_KEY_NAME = f"{UNIQUE_KEY}\x01".encode()
VARIABLE_FIELDS = {
    RequestCode.SEND_MESSAGE_V2: VariableFields(("e", "g"), ("b", "i"), _KEY_NAME),
    RequestCode.SEND_BATCH_MESSAGE: VariableFields(("e", "g"), ("b", "i"), _KEY_NAME),
    RequestCode.SEND_MESSAGE: VariableFields(("queueId", "bornTimestamp"), ("topic", "properties"), _KEY_NAME),
}
"""Fields that differ between the sends of a client: queue, born timestamp, topic, properties (mostly in one key)."""
MAX_ROUTES = 1024
"""Kinds of requests remembered for one connection: a sender uses as many as it has queues. All are dropped when there
are more."""

_STATE_KEY = "send_routes"
_KEYS = f"{KEYS}\x01".encode()
_TIMER = "TIMER_"
_NAMES_THAT_NEED_CHECKS = f"{TRANSACTION_PREPARED}|{DELAY_LEVEL}|{_TIMER}"
_needs_checks = re.compile(_NAMES_THAT_NEED_CHECKS.encode()).search
"""Whether a property text may contain one of these names, or a value that looks like it."""
_request_needs_checks = re.compile(
    f"{_NAMES_THAT_NEED_CHECKS}|{REPLY_TO_CLIENT}|{WAIT_STORE}\x01(?!true\x02)".encode()
).search
"""The same for the text of a request: its sender may want a reply, or not wait until the message is stored."""


class _NeedsChecks(Exception):
    """A message of a batch needs more checks."""


class _Route(NamedTuple):
    """What requests of one kind become, or why they are refused."""

    maker: RecordMaker | None
    flags: tuple[int, ...] = ()
    """The client's flag of a message that is not in a batch, as a tuple of one."""
    reconsume_times: int = 0
    is_batch: bool = False
    needs_checks: bool = False
    """Whether each request of this kind needs more checks."""
    common: bytes | None = None
    """What the properties of a message that is not in a batch have in common, if UNIQ_KEY is its only key."""
    refusal: RequestError | None = None


_Kind = tuple[HeaderTemplate, bytes | None, bytes | None, bytes | None]


class _Coalesced(NamedTuple):
    """Requests of one kind, for one queue and born at the same time, with no other request for that queue between."""

    kind: _Kind
    born: bytes | None
    route: _Route
    requests: list[TemplateRequest]


class _Routes(dict[_Kind, _Route]):
    """The routes of one connection, valid for one state of the topic table."""

    def __init__(self, topics: Mapping[str, TopicConfig]) -> None:
        super().__init__()
        self.topics = topics


class SendProcessor:
    """Answers send requests. `not_leader_remark` names whom to ask instead; `store_host` is this broker's address."""

    def __init__(
        self,
        *,
        store: MessageStore,
        topics: TopicTable,
        runtime: Runtime,
        store_host: str,
        max_message_size_bytes: int,
        not_leader_remark: Callable[[], str],
        retries: RetryTopics,
        timers: OpenTimers | None = None,
        transactions: OpenTransactions | None = None,
        hooks: SendHooks | None = None,
        honours_wait: bool = False,
        auto_create_topics: bool = True,
        on_topics_changed: Callable[[], None] = lambda: None,
        cluster_name: str = "",
        region_id: str = "DefaultRegion",
        trace_on: bool = True,
        accept_from_ms: int = 0,
    ) -> None:
        common = {"MSG_REGION": region_id, "TRACE_ON": "true" if trace_on else "false"}
        self._common_reply_fields: Mapping[str, str] = common
        self._cluster_name = cluster_name
        self._accept_from_ms = accept_from_ms
        self._may_write = True
        self._clock = runtime.clock
        self._store = store
        self._topics = topics
        self._auto_create_topics = auto_create_topics
        self._on_topics_changed = on_topics_changed
        self._retries = retries
        self._timers = timers if timers is not None else OpenTimers()
        self._transactions = transactions
        self._hooks = hooks if hooks is not None else SendHooks()
        self._honours_wait = honours_wait
        self._random = runtime.random
        self._store_host = store_host
        self._max_message_size_bytes = max_message_size_bytes
        self._not_leader_remark = not_leader_remark
        self._replies = SendReplyWriter(store, store_host, common)
        self._refusals = RefusalTemplates(common)

    def configure(self, config: BrokerConfig, transactions: OpenTransactions) -> None:
        """Apply `config` from now on; `transactions` are those of the broker."""
        self._max_message_size_bytes = config.limits.max_message_size_bytes
        self._auto_create_topics = config.auto_create_topics
        self._accept_from_ms = config.start_accept_send_timestamp_ms
        self._transactions = None if config.transactions.reject else transactions
        self._may_write = bool(config.broker_permission & PERM_WRITE)

    async def drain(self, timeout_s: float) -> None:
        """Wait until every message under way is answered, at most `timeout_s` seconds."""
        await self._replies.drain(timeout_s)

    def process(self, command: Command, connection: Connection) -> Answer:
        """Check, append, and answer when the message is committed. Every answer names this region and tells whether
        messages are traced here (S1)."""
        context = None
        try:
            if self._hooks:
                context = self._hooks.before(command, connection)
            answer = self._process(command, connection)
        except SendRefused as refused:
            return refused.reply
        except RequestError as error:
            answer = self._refuse(command, error)
        if isinstance(answer, Awaitable):
            answer = self._later(command, answer)
        return answer if context is None else self._hooks.watch(context, answer)

    async def _later(self, command: Command, answer: Awaitable[Command | DeferredReply]) -> Command | DeferredReply:
        try:
            return await answer
        except RequestError as error:
            return self._refuse(command, error)

    def _refuse(self, command: Command, error: RequestError) -> Command:
        return command.reply(error.code, remark=error.remark, fields=self._common_reply_fields)

    # Requests that arrived together

    def process_together(self, requests: Sequence[TemplateRequest], connection: Connection) -> DeferredReply | None:
        """Store the first few of `requests` that need no more checks; or refuse the first few, whose kinds are refused.
        None, and nothing is changed, if the first is neither, or a message of a batch needs checks.

        Messages of one queue stay in their order; those of different queues may change places in the log."""
        if self._hooks or not self._takes_now or not self._may_write:
            return None
        if not self._store.is_master:
            return self._refuse_together(requests, [self._not_master()] * len(requests))
        routes: _Routes | None = connection.state.get(_STATE_KEY)
        if routes is None or routes.topics is not self._topics.table:
            routes = connection.state[_STATE_KEY] = _Routes(self._topics.table)
        together: list[_Coalesced] = []
        latest: dict[Queue, _Coalesced] = {}
        refusals: list[RequestError] = []
        for request in requests:
            queue, born, topic, text = request.values
            kind = request.template, topic, queue, request.common
            route = routes.get(kind)
            if route is None:
                route = self._route(request, connection.remote_address)
                if route is None:
                    break
                if len(routes) >= MAX_ROUTES:
                    routes.clear()
                routes[kind] = route
            if route.refusal is not None and not together:
                refusals.append(route.refusal)
                continue
            if refusals or route.refusal is not None or not self._needs_no_checks(route, request, text):
                break
            assert route.maker is not None
            coalesced = latest.get(route.maker.queue)
            if coalesced is None or coalesced.kind != kind or coalesced.born != born:
                coalesced = latest[route.maker.queue] = _Coalesced(kind, born, route, [])
                together.append(coalesced)
            coalesced.requests.append(request)
        if refusals:
            return self._refuse_together(requests[: len(refusals)], refusals)
        return self._put_together(together) if together else None

    def _put_together(self, together: Sequence[_Coalesced]) -> DeferredReply | None:
        """Store requests, group by group; None, and nothing is changed, if they have to be checked one by one."""
        own: list[TemplateRequest] = []
        batches: list[RecordBatch] = []
        counts: list[int] = []
        queue_ids: list[int] = []
        try:
            for coalesced in together:
                batch, own_counts = _batches(coalesced) if coalesced.route.is_batch else _messages(coalesced)
                own += coalesced.requests
                batches.append(batch)
                counts += own_counts
                queue_ids += [batch.maker.queue_id] * len(own_counts)
            return self._put(own, batches, counts, queue_ids)
        except (_NeedsChecks, NotTogether, RequestError, RecordError, NotWritable, DLedgerError):
            return None  # nothing was stored; one by one, the reason shows

    def _needs_no_checks(self, route: _Route, request: TemplateRequest, text: bytes | None) -> bool:
        """Whether a request may be stored by its route alone."""
        if route.needs_checks or len(request.body) > self._max_message_size_bytes:
            return False
        if text is None:
            return True
        if len(text) > MAX_PROPERTIES_SIZE_BYTES:
            return False
        return request.common is not None or _request_needs_checks(text) is None

    def _route(self, request: TemplateRequest, born_host: str) -> _Route | None:
        """The route of requests of this kind; None if each has to be checked on its own."""
        try:
            header = SendHeader.of(request)
        except RequestError:
            return None
        topic, common = self._topics.get(header.topic), request.common
        if topic is None or header.queue_id < 0 or header.reconsume_times > 0:
            return None
        if header.sys_flag & SYS_FLAG_TRANSACTION_MASK:
            return None
        try:
            self._check_topic(header)
            maker = record_maker(topic.name, header.queue_id, header.sys_flag, born_host, self._store_host)
        except RequestError as refusal:
            return _Route(None, refusal=refusal)
        except RecordError:
            return None
        needs_checks = common is not None and _request_needs_checks(common) is not None
        if common is not None and _KEYS in common:
            common = None
        return _Route(maker, (header.flag,), header.reconsume_times, header.batch, needs_checks, common)

    def _refuse_together(self, requests: Sequence[Command], errors: Sequence[RequestError]) -> DeferredReply:
        reply = DeferredReply(requests)
        reply.send(self._refusals.frames(requests, errors))
        return reply

    # One request

    @property
    def _takes_now(self) -> bool:
        return not self._accept_from_ms or self._clock.wall_ms() >= self._accept_from_ms

    def _not_master(self) -> RequestError:
        return RequestError(ResponseCode.SERVICE_NOT_AVAILABLE, self._not_leader_remark())

    def _check_takes(self) -> None:
        if not self._takes_now:
            raise RequestError(  # R: startAcceptSendRequestTimeStamp
                ResponseCode.SYSTEM_ERROR, f"no messages are taken before {self._accept_from_ms} ms of the epoch"
            )
        if not self._store.is_master:
            raise self._not_master()

    def put_reply(self, command: Command, born_host: str) -> tuple[int, PendingPut]:
        """Put the reply to a request (codes 324, 325) into its topic; returns its queue id and the put. Raises
        RequestError: nothing was stored."""
        self._check_takes()
        try:
            queue_id, batch = self._checked_request(SendHeader.of(command), command.body, born_host)
            return queue_id, self._store.put_one(batch)
        except RecordError as error:
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, error.reason) from error
        except (NotWritable, DLedgerError) as error:
            raise self._not_stored(error) from error

    def reply_fields(self, queue_id: int, put: PendingPut) -> dict[str, FieldValue]:
        """The fields of the answer to the sender of a reply."""
        message = f"{self._replies.host_text}{put.physical_offset:016X}"
        return {"msgId": message, "queueId": queue_id, "queueOffset": put.queue_offset, **self._common_reply_fields}

    def _process(self, command: Command, connection: Connection) -> Answer:
        self._check_takes()
        header = SendHeader.of(command)
        if header.reconsume_times > 0 and header.topic.startswith(RETRY_PREFIX):
            return self._send_retry(command, header, connection)
        if self._topics.get(header.topic) is None:
            model = self._model(command, header)
            if model is not None:
                return self._create_and_send(model, command, header, connection)
        return self._send(command, header, connection)

    def _model(self, command: Command, header: SendHeader) -> TopicConfig | None:
        """The topic that this message creates; None if the topic must exist already."""
        names = names_of(command)
        if header.topic.startswith(RETRY_PREFIX):
            default_topic, queues = AUTO_CREATE_TOPIC, 1
        elif self._auto_create_topics:
            default_topic = command.get_str(names["defaultTopic"], "")
            queues = command.get_int(names["defaultTopicQueueNums"], 4)
        else:
            return None
        return self._topics.model(header.topic, default_topic, queues)

    async def _send_retry(self, command: Command, header: SendHeader, connection: Connection) -> DeferredReply:
        """A retry by the client itself: its group's limit holds here too (R: handleRetryAndDLQ)."""
        names = names_of(command)
        group = self._retries.group(header.topic.removeprefix(RETRY_PREFIX))
        allowed = command.get_int(names["maxReconsumeTimes"], -1)
        if allowed < 0:
            allowed = group.retry_max_times
        topic = await self._retries.target(group, is_dead=header.reconsume_times >= allowed)
        if not self._store.is_master:
            raise self._not_master()
        if topic.name != header.topic:
            # A client asks for the delay of its next attempt, but there is none (R: DELAY -1).
            properties = decode_properties(header.properties_text)
            properties.pop(DELAY_LEVEL, None)
            header = replace(header, topic=topic.name, queue_id=0, properties_text=join_properties(properties))
        return self._send(command, header, connection)

    async def _create_and_send(
        self, model: TopicConfig, command: Command, header: SendHeader, connection: Connection
    ) -> DeferredReply:
        try:
            if self._topics.get(model.name) is None:
                await self._topics.put(model)
                self._on_topics_changed()
        except (OSError, TopicTableFull) as error:
            remark = f"topic {model.name!r} could not be made: {error}"
            raise RequestError(ResponseCode.TOPIC_NOT_EXIST, remark) from error
        if not self._store.is_master:
            raise self._not_master()
        return self._send(command, header, connection)

    def _send(self, command: Command, header: SendHeader, connection: Connection) -> DeferredReply:
        try:
            queue_id, batch = self._checked_request(header, command.body, connection.remote_address)
            reply = self._put((command,), (batch,), (batch.count,), (queue_id,))
        except RecordError as error:
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, error.reason) from error
        except (NotWritable, DLedgerError) as error:
            raise self._not_stored(error) from error
        if self._honours_wait and (property_value(header.properties_text, WAIT_STORE) or "").lower() == "false":
            reply.stored(None)
        return reply

    def _checked_request(self, header: SendHeader, body: bytes, born_host: str) -> tuple[int, RecordBatch]:
        """Queue id and records of a request. Raises RequestError, RecordError."""
        topic = self._check_topic(header)
        if len(body) > self._max_message_size_bytes:
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL, f"body of {len(body)} bytes, allowed are {self._max_message_size_bytes}"
            )
        queue_id = header.queue_id if header.queue_id >= 0 else self._random.randrange(topic.queues)
        return queue_id, self._checked_batch(header, queue_id, body, born_host)

    def _check_topic(self, header: SendHeader) -> TopicConfig:
        name = header.topic
        if len(name) > MAX_TOPIC_SIZE_BYTES:
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, f"topic longer than {MAX_TOPIC_SIZE_BYTES}")
        topic = self._topics.get(name)
        if topic is None:
            raise RequestError(ResponseCode.TOPIC_NOT_EXIST, f"topic {name!r} does not exist, create it first")
        if is_internal(name):  # clients learn a topic's W from name servers; it is not checked here (R)
            raise RequestError(ResponseCode.NO_PERMISSION, f"topic {name!r} is not writable")
        if topic.order and not self._may_write:  # R: for other topics, clients learn it from the name servers
            raise RequestError(ResponseCode.NO_PERMISSION, "this broker may not be written to (brokerPermission)")
        if header.queue_id >= topic.all_queues:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR, f"queue {header.queue_id} of topic {name!r}, which has {topic.all_queues}"
            )
        return topic

    def _checked_batch(self, header: SendHeader, queue_id: int, body: bytes, born_host: str) -> RecordBatch:
        """The records of a request. Raises RequestError, RecordError."""
        if not header.batch:
            return self._checked_message(header, queue_id, body, born_host)
        flags, bodies, texts, is_uniform, _ = split_batches((body,))
        for text in texts:
            _check_size(text)
            if _asks_for_transaction(header, text.decode()):
                self._check_half(header)
                raise RequestError(ResponseCode.MESSAGE_ILLEGAL, "messages of a batch cannot be transactional")
            if _delay_level(text.decode()) > 0 or (_TIMER in text.decode() and self._due_ms(text.decode()) is not None):
                raise RequestError(ResponseCode.MESSAGE_ILLEGAL, "messages of a batch cannot be delayed")
        maker = record_maker(header.topic, queue_id, header.sys_flag, born_host, self._store_host)
        born_ms, times = header.born_timestamp_ms, header.reconsume_times
        return RecordBatch(maker, flags, bodies, texts, born_ms, times, is_uniform=is_uniform)

    def _checked_message(self, header: SendHeader, queue_id: int, body: bytes, born_host: str) -> RecordBatch:
        text, topic, sys_flag = header.properties_text, header.topic, header.sys_flag
        _check_size(text)
        level = _delay_level(text)
        due_ms = self._due_ms(text) if not level and _TIMER in text else None
        if property_value(text, REPLY_TO_CLIENT) is not None:
            # its consumer derives the reply's topic from this (R: MessageUtil; there every message has it)
            text = join_properties(decode_properties(text) | {CLUSTER: self._cluster_name})
        if _asks_for_transaction(header, text):
            # its sender commits it or rolls it back later: it waits where no consumer reads
            self._check_half(header)
            properties = decode_properties(text) | {REAL_TOPIC: topic, REAL_QUEUE_ID: str(queue_id)}
            if due_ms is not None:  # once committed it waits for its time, and needs room for the properties of that
                _check_size(join_properties(timer_place(properties, topic, queue_id, due_ms)[2]).encode())
            topic, queue_id, text = HALF_TOPIC, 0, join_properties(properties)
            sys_flag &= ~SYS_FLAG_TRANSACTION_MASK
        elif level > 0:
            topic, queue_id, text = delay_text(text, topic, queue_id, level)
        elif due_ms is not None:
            topic, queue_id, properties = timer_place(decode_properties(text), topic, queue_id, due_ms)
            text = join_properties(properties)
        return batch_of_one(
            topic=topic,
            queue_id=queue_id,
            body=body,
            properties_text=text,
            sys_flag=sys_flag,
            flag=header.flag,
            born_timestamp_ms=header.born_timestamp_ms,
            born_host=born_host,
            store_host=self._store_host,
            reconsume_times=header.reconsume_times,
        )

    def _due_ms(self, text: str) -> int | None:
        """When a message is to be delivered, None: at once. Raises RequestError if it cannot be accepted."""
        try:
            due_ms = timer_due_ms(decode_properties(text), self._clock.wall_ms())
        except IllegalTimer as error:
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, str(error)) from error
        if due_ms is not None and self._timers.is_full:  # R: SYSTEM_ERROR, which here means an unknown outcome
            raise RequestError(
                ResponseCode.SYSTEM_BUSY, f"timer message is under flow control, max num limit is {MAX_OPEN_TIMERS}"
            )
        return due_ms

    def _check_half(self, header: SendHeader) -> None:
        if header.sys_flag & SYS_FLAG_TRANSACTION_MASK not in (0, SYS_FLAG_TRANSACTION_PREPARED):
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, "only the broker ends transactions")
        if self._transactions is None:
            raise RequestError(ResponseCode.NO_PERMISSION, "this broker does not take transactional messages")
        if not header.batch and self._transactions.is_full:
            raise RequestError(ResponseCode.SYSTEM_BUSY, "too many transactions are open")

    # All requests

    def _put(
        self,
        requests: Sequence[Command],
        batches: Sequence[RecordBatch],
        counts: Sequence[int],
        queue_ids: Sequence[int],
    ) -> SendReplies:
        """Append the records of requests: each has the next `counts` messages of the batches, and its reply names its
        id in `queue_ids`. Raises what the store raises."""
        replies = SendReplies(self._replies, requests, queue_ids)
        placed = self._store.put(batches, replies.stored, requests=len(requests))
        replies.placed(_placed_each(placed, counts))
        return replies

    def _not_stored(self, error: NotWritable | DLedgerError) -> RequestError:
        """The answer when nothing was appended: always one that a client may take as certain."""
        if isinstance(error, NotWritable) or error.code == DLedgerCode.NOT_LEADER:
            return self._not_master()
        if error.code == DLedgerCode.LEADER_PENDING_FULL:
            return RequestError(ResponseCode.SYSTEM_BUSY, f"too many unacknowledged messages: {error}")
        return RequestError(ResponseCode.SERVICE_NOT_AVAILABLE, f"nothing was stored: {error}")


def _messages(coalesced: _Coalesced) -> tuple[RecordBatch, Sequence[int]]:
    """The records of requests that are not batches, and how many each request has."""
    route, requests = coalesced.route, coalesced.requests
    assert route.maker is not None
    batch = RecordBatch(
        route.maker,
        route.flags * len(requests),
        [request.body for request in requests],
        [request.values[3] or b"" for request in requests],
        int(coalesced.born) if coalesced.born else 0,
        route.reconsume_times,
        common=route.common,
        keys=None if route.common is None else [request.key or b"" for request in requests],
    )
    return batch, (1,) * len(requests)


def _batches(coalesced: _Coalesced) -> tuple[RecordBatch, Sequence[int]]:
    """The records of requests that are batches, and how many each has. Raises _NeedsChecks, RequestError."""
    route = coalesced.route
    assert route.maker is not None
    flags, bodies, texts, is_uniform, counts = split_batches([request.body for request in coalesced.requests])
    born_ms = int(coalesced.born) if coalesced.born else 0
    batch = RecordBatch(
        route.maker, flags, bodies, texts, born_ms, route.reconsume_times, is_uniform=is_uniform
    )  # fmt: skip
    if any(map(_needs_checks, texts if batch.common is None else (batch.common,))):
        raise _NeedsChecks
    return batch, counts


def _placed_each(placed: Sequence[Placed], counts: Sequence[int]) -> Sequence[Placed]:
    """Where the messages of each request are, given where the batches are; `counts` has the messages per request."""
    if len(placed) == len(counts):
        return placed
    each: list[Placed] = []
    for first, positions in placed:
        at = 0
        while at < len(positions):
            count = counts[len(each)]
            each.append((first + at, positions[at : at + count]))
            at += count
    return each


def _check_size(text: str | bytes) -> None:
    if len(text) > MAX_PROPERTIES_SIZE_BYTES:
        raise RequestError(ResponseCode.MESSAGE_ILLEGAL, f"properties longer than {MAX_PROPERTIES_SIZE_BYTES} bytes")


def _asks_for_transaction(header: SendHeader, text: str) -> bool:
    prepared = property_value(text, TRANSACTION_PREPARED)
    return bool(header.sys_flag & SYS_FLAG_TRANSACTION_MASK) or (prepared or "").lower() == "true"


def _delay_level(text: str) -> int:
    """The delay level that a message asks for, 0 for none. Raises RequestError if it is no number."""
    delay = property_value(text, DELAY_LEVEL) or ""
    try:
        return delay_level(delay)
    except ValueError as error:
        raise RequestError(ResponseCode.MESSAGE_ILLEGAL, f"delay level {delay[:40]!r} is no number") from error
