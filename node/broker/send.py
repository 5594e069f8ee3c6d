"""Sending: codes 10, 310 (the same with one-letter fields) and 320 (a batch).

Everything that can be refused is refused before the append, with a code that says "certainly not stored". After
the append only two answers are possible: SUCCESS once the entry is committed, or SYSTEM_ERROR, which says that
nobody knows (quorum timeout, change of term, disk error). Order of the checks and codes: seed S1
(SendMessageProcessor.msgCheck, DefaultMessageStore.putMessage) and the table of send outcomes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from node.broker.copies import delay_level, delay_text
from node.broker.internal_topics import AUTO_CREATE_TOPIC, HALF_TOPIC, RETRY_PREFIX, is_internal
from node.broker.ledger import AppendResult, DLedgerCode, DLedgerError, StoredInPart
from node.broker.message_store import MessageStore, NotWritable, PendingPut
from node.broker.puts import forget
from node.broker.send_back import RetryTopics
from node.broker.send_request import SendHeader, names_of, split_batch
from node.broker.topics import TopicTable, TopicTableFull
from node.broker.transactions import OpenTransactions
from node.config import TopicConfig
from node.remoting import Command, Connection, RequestError, ResponseCode
from node.runtime import Runtime
from node.store.properties import (
    DELAY_LEVEL,
    REAL_QUEUE_ID,
    REAL_TOPIC,
    TIMER_DELIVERED,
    TIMER_PROPERTIES,
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
    PreparedRecord,
    RecordError,
    message_id,
    prepare_record,
)

__all__ = ["SendProcessor"]

_Place = tuple[str, int, PreparedRecord]
"""A record with the topic and the queue that it is put into."""


class SendProcessor:
    """Answers send requests. `not_leader_remark` says whom to ask instead; `store_host` is this broker's address."""

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
        transactions: OpenTransactions | None = None,
        honours_wait: bool = False,
        auto_create_topics: bool = True,
        on_topics_changed: Callable[[], None] = lambda: None,
        region_id: str = "DefaultRegion",
        trace_on: bool = True,
        accept_from_ms: int = 0,
    ) -> None:
        self.told: Mapping[str, str] = {"MSG_REGION": region_id, "TRACE_ON": "true" if trace_on else "false"}
        self._accept_from_ms = accept_from_ms
        self._clock = runtime.clock
        self.store = store
        self.topics = topics
        self._auto_create_topics = auto_create_topics
        self._on_topics_changed = on_topics_changed
        self._retries = retries
        self._transactions = transactions
        self._honours_wait = honours_wait
        self._random = runtime.random
        self.store_host = store_host
        self.max_message_size_bytes = max_message_size_bytes
        self._not_leader_remark = not_leader_remark
        self._under_way: dict[asyncio.Future[Command | None], None] = {}

    @property
    def takes_now(self) -> bool:
        """Whether the time has come from which on messages are taken."""
        return not self._accept_from_ms or self._clock.wall_ms() >= self._accept_from_ms

    async def drain(self, timeout_s: float) -> None:
        """Wait until every message under way is answered, at most `timeout_s` seconds."""
        if self._under_way:
            await asyncio.wait(list(self._under_way), timeout=timeout_s)
            await asyncio.sleep(0)  # the replies are handed to their connections after the futures are done

    def process(self, command: Command, connection: Connection) -> Command | Awaitable[Command | None]:
        """Check, append, and answer when the message is committed. The answer is a future without a task, unless the
        message makes its topic. Every answer says which region this is and whether messages are traced here (S1)."""
        try:
            answer = self._process(command, connection)
        except RequestError as error:
            return command.reply(error.code, remark=error.remark, fields=self.told)
        return answer if isinstance(answer, Command | asyncio.Future) else self._later(command, answer)

    async def _later(self, command: Command, answer: Awaitable[Command | None]) -> Command | None:
        try:
            return await answer
        except RequestError as error:
            return command.reply(error.code, remark=error.remark, fields=self.told)

    def _process(self, command: Command, connection: Connection) -> Command | Awaitable[Command | None]:
        if not self.takes_now:
            raise RequestError(  # R: startAcceptSendRequestTimeStamp
                ResponseCode.SYSTEM_ERROR, f"no messages are taken before {self._accept_from_ms} ms of the epoch"
            )
        if not self.store.is_master:
            return self._refuse_not_master(command)
        header = SendHeader.of(command)
        if header.reconsume_times > 0 and header.topic.startswith(RETRY_PREFIX):
            return self._send_retry(command, header, connection)
        if self.topics.get(header.topic) is None:
            model = self._model(command, header)
            if model is not None:
                return self._create_and_send(model, command, header, connection)
        return self._send(command, header, connection)

    def _model(self, command: Command, header: SendHeader) -> TopicConfig | None:
        """The topic that this message makes; None when it must exist already."""
        names = names_of(command)
        if header.topic.startswith(RETRY_PREFIX):
            default_topic, queues = AUTO_CREATE_TOPIC, 1
        elif self._auto_create_topics:
            default_topic = command.get_str(names["defaultTopic"], "")
            queues = command.get_int(names["defaultTopicQueueNums"], 4)
        else:
            return None
        return self.topics.model(header.topic, default_topic, queues)

    async def _send_retry(self, command: Command, header: SendHeader, connection: Connection) -> Command | None:
        """A client retries by itself: its group's limit holds here too (R: handleRetryAndDLQ)."""
        names = names_of(command)
        group = self._retries.group(header.topic.removeprefix(RETRY_PREFIX))
        allowed = command.get_int(names["maxReconsumeTimes"], -1)
        if allowed < 0:
            allowed = group.retry_max_times
        topic = await self._retries.target(group, is_dead=header.reconsume_times >= allowed)
        if not self.store.is_master:
            return self._refuse_not_master(command)
        if topic.name != header.topic:
            header = replace(header, topic=topic.name, queue_id=0)
        result = self._send(command, header, connection)
        return result if isinstance(result, Command) else await result

    async def _create_and_send(
        self, model: TopicConfig, command: Command, header: SendHeader, connection: Connection
    ) -> Command | None:
        try:
            if self.topics.get(model.name) is None:
                await self.topics.put(model)
                self._on_topics_changed()
        except (OSError, TopicTableFull) as error:
            remark = f"topic {model.name!r} could not be made: {error}"
            raise RequestError(ResponseCode.TOPIC_NOT_EXIST, remark) from error
        if not self.store.is_master:
            return self._refuse_not_master(command)
        result = self._send(command, header, connection)
        return result if isinstance(result, Command) else await result

    def _send(
        self, command: Command, header: SendHeader, connection: Connection
    ) -> Command | asyncio.Future[Command | None]:
        topic = self._check_topic(header)
        if len(command.body) > self.max_message_size_bytes:
            size = len(command.body)
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL, f"body of {size} bytes, allowed are {self.max_message_size_bytes}"
            )
        queue_id = header.queue_id if header.queue_id >= 0 else self._random.randrange(topic.queues)
        if not header.batch:
            places = [self._prepare(header, queue_id, header.flag, command.body, header.properties_text, connection)]
        else:
            places = [
                self._prepare(header, queue_id, flag, body, properties, connection)
                for flag, body, properties in split_batch(command.body)
            ]
        return self._put(command, queue_id, places, header.properties_text)

    def _refuse_not_master(self, command: Command) -> Command:
        return command.reply(
            ResponseCode.SERVICE_NOT_AVAILABLE, remark=self._not_leader_remark(), fields=self.told
        )

    def _check_topic(self, header: SendHeader) -> TopicConfig:
        name = header.topic
        if len(name) > MAX_TOPIC_SIZE_BYTES:
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, f"topic longer than {MAX_TOPIC_SIZE_BYTES}")
        topic = self.topics.get(name)
        if topic is None:
            raise RequestError(ResponseCode.TOPIC_NOT_EXIST, f"topic {name!r} does not exist, create it first")
        if not topic.writable or is_internal(name):
            raise RequestError(ResponseCode.NO_PERMISSION, f"topic {name!r} is not writable")
        if header.queue_id >= topic.all_queues:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR, f"queue {header.queue_id} of topic {name!r}, which has {topic.all_queues}"
            )
        return topic

    def _prepare(
        self,
        header: SendHeader,
        queue_id: int,
        flag: int,
        body: bytes,
        properties_text: str,
        connection: Connection,
    ) -> _Place:
        if len(properties_text) > MAX_PROPERTIES_SIZE_BYTES:
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL, f"properties longer than {MAX_PROPERTIES_SIZE_BYTES} bytes"
            )
        level = _delay_level(property_value(properties_text, DELAY_LEVEL))
        if level == 0:
            _refuse_timer(properties_text)
        transactional = property_value(properties_text, TRANSACTION_PREPARED)
        if header.sys_flag & SYS_FLAG_TRANSACTION_MASK or (transactional or "").lower() == "true":
            return self._prepare_half(header, queue_id, body, properties_text, connection)
        topic = header.topic
        if level > 0:
            if header.batch:
                raise RequestError(ResponseCode.MESSAGE_ILLEGAL, "messages of a batch cannot be delayed")
            topic, queue_id, properties_text = delay_text(properties_text, topic, queue_id, level)
        try:
            record = prepare_record(
                topic=topic,
                queue_id=queue_id,
                body=body,
                properties_text=properties_text,
                sys_flag=header.sys_flag,
                flag=flag,
                born_timestamp_ms=header.born_timestamp_ms,
                born_host=connection.remote_address,
                store_host=self.store_host,
                reconsume_times=header.reconsume_times,
            )
        except RecordError as error:
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, error.reason) from error
        return topic, queue_id, record

    def _prepare_half(
        self, header: SendHeader, queue_id: int, body: bytes, properties_text: str, connection: Connection
    ) -> _Place:
        """A message whose sender will say later whether it counts: it waits where no consumer looks."""
        properties = decode_properties(properties_text)
        if header.sys_flag & SYS_FLAG_TRANSACTION_MASK not in (0, SYS_FLAG_TRANSACTION_PREPARED):
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, "only the broker ends transactions")
        if self._transactions is None:
            raise RequestError(ResponseCode.NO_PERMISSION, "this broker does not take transactional messages")
        if header.batch:
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, "messages of a batch cannot be transactional")
        if self._transactions.is_full:
            raise RequestError(ResponseCode.SYSTEM_BUSY, "too many transactions are open")
        properties |= {REAL_TOPIC: header.topic, REAL_QUEUE_ID: str(queue_id)}
        try:
            record = prepare_record(
                topic=HALF_TOPIC,
                queue_id=0,
                body=body,
                properties_text=join_properties(properties),
                sys_flag=header.sys_flag & ~SYS_FLAG_TRANSACTION_MASK,
                flag=header.flag,
                born_timestamp_ms=header.born_timestamp_ms,
                born_host=connection.remote_address,
                store_host=self.store_host,
                reconsume_times=header.reconsume_times,
            )
        except RecordError as error:
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, error.reason) from error
        return HALF_TOPIC, 0, record

    def _put(
        self, command: Command, queue_id: int, places: list[_Place], properties_text: str
    ) -> Command | asyncio.Future[Command | None]:
        puts: list[PendingPut] = []
        try:
            for topic, place_id, record in places:
                puts.append(self.store.put(topic, place_id, record))
        except (NotWritable, DLedgerError) as error:
            if not puts:
                return self._refuse(command, error)
            for put in puts:
                forget(put.committed)
            remark = f"batch stored in part: {len(puts)} of {len(places)} messages were appended ({error})"
            return command.reply(ResponseCode.SYSTEM_ERROR, remark=remark, fields=self.told)
        if self._honours_wait and (property_value(properties_text, WAIT_STORE) or "").lower() == "false":
            for put in puts:
                forget(put.committed)
            puts = [put._replace(committed=_done()) for put in puts]
        transaction_id = property_value(properties_text, UNIQUE_KEY) or ""
        answer = _Answer(command, puts, self.store_host, queue_id, self.store, transaction_id, self.told).future
        self._under_way[answer] = None
        answer.add_done_callback(self._answered)
        return answer

    def _answered(self, answer: asyncio.Future[Command | None]) -> None:
        self._under_way.pop(answer, None)

    def _refuse(self, command: Command, error: NotWritable | DLedgerError) -> Command:
        """The answer when nothing was appended: always one that a client may take as certain."""
        if isinstance(error, NotWritable) or error.code == DLedgerCode.NOT_LEADER:
            return self._refuse_not_master(command)
        if error.code == DLedgerCode.LEADER_PENDING_FULL:
            code, remark = ResponseCode.SYSTEM_BUSY, f"too many unacknowledged messages: {error}"
        else:
            code, remark = ResponseCode.SERVICE_NOT_AVAILABLE, f"nothing was stored: {error}"
        return command.reply(code, remark=remark, fields=self.told)


def _delay_level(delay: str | None) -> int:
    try:
        return delay_level(delay or "")
    except ValueError as error:
        reason = f"delay level {(delay or '')[:40]!r} is no number"
        raise RequestError(ResponseCode.MESSAGE_ILLEGAL, reason) from error


def _refuse_timer(properties_text: str) -> None:
    """Refuse a message that asks for a time of delivery: here are delay levels only, and it would come at once.
    RocketMQ 5 without its timer wheel answers SYSTEM_ERROR, which here means that nobody knows the outcome."""
    for name in TIMER_PROPERTIES:
        if property_value(properties_text, name) is not None:
            if property_value(properties_text, TIMER_DELIVERED) is not None:
                return
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"accurate timer message is not enabled, timerWheelEnable is false: send it without {name}, or with a"
                " delay level",
            )


def _done() -> asyncio.Future[AppendResult]:
    future: asyncio.Future[AppendResult] = asyncio.get_running_loop().create_future()
    future.set_result(AppendResult(index=-1, pos=-1, term=-1))
    return future


class _Answer:
    """Completes `future` with the reply when every put of one request is committed, or the first has failed."""

    __slots__ = (
        "_began_s",
        "_code",
        "_command",
        "_left",
        "_loop",
        "_puts",
        "_queue_id",
        "_remark",
        "_store",
        "_store_host",
        "_told",
        "_transaction_id",
        "future",
    )

    def __init__(
        self,
        command: Command,
        puts: list[PendingPut],
        store_host: str,
        queue_id: int,
        store: MessageStore,
        transaction_id: str,
        told: Mapping[str, str],
    ) -> None:
        self._transaction_id = transaction_id
        self._told = told
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._code: int = ResponseCode.SUCCESS
        self._remark: str | None = None
        self._command = command
        self._puts = puts
        self._store_host = store_host
        self._queue_id = queue_id
        self._store = store
        self._left = len(puts)
        self.future: asyncio.Future[Command | None] = self._loop.create_future()
        for put in puts:
            put.committed.add_done_callback(self._one_done)

    def _one_done(self, committed: asyncio.Future[AppendResult]) -> None:
        error = asyncio.CancelledError() if committed.cancelled() else committed.exception()
        if isinstance(error, StoredInPart):
            self._code, self._remark, error = error.code, str(error), None
        if error is None:
            self._store.committed_total += 1
            self._left -= 1
        if self.future.done():
            return
        if error is not None:
            self.future.set_result(
                self._command.reply(
                    ResponseCode.SYSTEM_ERROR, remark=f"the outcome is unknown: {error}", fields=self._told
                )
            )
        elif self._left == 0:
            self._store.note_put(self._loop.time() - self._began_s)
            ids = ",".join(message_id(self._store_host, put.physical_offset) for put in self._puts)
            self.future.set_result(
                self._command.reply(
                    self._code,
                    remark=self._remark,
                    fields={
                        "msgId": ids,
                        "queueId": self._queue_id,
                        "queueOffset": self._puts[0].queue_offset,
                        "transactionId": self._transaction_id,
                        **self._told,
                    },
                )
            )
