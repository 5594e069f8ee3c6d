"""Sending plain messages, which is nearly all of sending: what needs no task, no future and no second look.

A plain message is for a topic that exists, is neither delayed nor part of a transaction nor a retry, and its sender
waits until it is stored. Everything else, and everything that is to be refused, is left to `SendProcessor.process`,
which this stands in front of: what both can answer they answer alike, which the tests hold against each other.

What requests of one connection have in common (topic, queue, flags) is judged once and remembered, as long as the
configuration of the topic is the same.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Sequence
from typing import NamedTuple

from node.broker.internal_topics import is_internal
from node.broker.ledger import DLedgerError, StoredInPart
from node.broker.message_store import MessageRow, NotWritable
from node.broker.send import SendProcessor
from node.broker.send_request import names_of, split_batch
from node.config import TopicConfig
from node.remoting import Command, Connection, LateReply, ReplyForm, RequestCode, RequestError, ResponseCode
from node.store.columns import pack_longs
from node.store.properties import DELAY_LEVEL, TRANSACTION_PREPARED, UNIQUE_KEY, WAIT_STORE, property_value
from node.store.record import (
    MAX_PROPERTIES_SIZE_BYTES,
    SYS_FLAG_TRANSACTION_MASK,
    RecordError,
    message_id,
)
from node.store.record_row import RecordMaker, record_maker

__all__ = ["MAX_PLANS", "REPLY_NAMES", "PlainSends", "SendPlan", "batch_row", "ids_of"]

MAX_PLANS = 1024
"""Kinds of requests remembered for one connection: a sender uses as many as it has queues. All are forgotten when there
are more."""

REPLY_NAMES = ("msgId", "queueId", "queueOffset", "transactionId")

_STATE_KEY = "send_plans"
_WAITS = f"{WAIT_STORE}\x01"
_WAITS_INDEED = f"{WAIT_STORE}\x01true\x02"
_TIMER = "TIMER_"
"""How the names of `TIMER_PROPERTIES` begin."""

_JUDGED = ("topic", "queueId", "sysFlag", "flag", "reconsumeTimes", "batch")
_Key = tuple[int | str | None, ...]


class SendPlan(NamedTuple):
    """What is done with requests of one kind."""

    topic: TopicConfig
    maker: RecordMaker
    flag: int
    reconsume_times: int
    is_batch: bool


class PlainSends:
    """Answers sends, plain ones by itself and others through `sends`."""

    def __init__(self, sends: SendProcessor) -> None:
        self._sends = sends
        self.store = self._store = sends.store
        self.topics = self._topics = sends.topics
        self._store_host = sends.store_host
        self.max_message_size_bytes = self._max_message_size_bytes = sends.max_message_size_bytes
        self.host_text = message_id(sends.store_host, 0)[:-16]
        """How the id of every message stored here begins; its position follows in 16 digits."""
        self.told = sends.told
        self.form = ReplyForm(REPLY_NAMES, sends.told)
        self.now_s = asyncio.get_running_loop().time
        self._under_way = 0
        self._all_answered: asyncio.Future[None] | None = None

    @property
    def takes_now(self) -> bool:
        """Whether the time has come from which on messages are taken."""
        return self._sends.takes_now

    async def drain(self, timeout_s: float) -> None:
        """Wait until every message under way is answered, at most `timeout_s` seconds."""
        await self._sends.drain(timeout_s)
        if self._under_way:
            self._all_answered = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._all_answered,), timeout=timeout_s)

    def process(self, command: Command, connection: Connection) -> Command | Awaitable[Command | None] | LateReply:
        """Check, append, and answer when the message is committed."""
        return self._plain(command, connection) or self._sends.process(command, connection)

    def _plain(self, command: Command, connection: Connection) -> LateReply | None:
        """The answer to be given; None, and nothing is changed, where the request is not plain."""
        fields = command.ext_fields
        get = fields.get
        code = command.code
        names = names_of(command)
        key = (code, *map(get, map(names.__getitem__, _JUDGED)))
        plans: dict[_Key, SendPlan] | None = connection.state.get(_STATE_KEY)
        if plans is None:
            plans = connection.state[_STATE_KEY] = {}
        plan = plans.get(key)
        if plan is None or self._topics.get(plan.topic.name) is not plan.topic:
            plan = self.plan(command, connection.remote_address)
            if plan is None:
                return None
            if len(plans) >= MAX_PLANS:
                plans.clear()
            plans[key] = plan
        text = get(names["properties"], "")
        body = command.body
        if (
            not self._sends.takes_now
            or len(body) > self._max_message_size_bytes
            or len(text) > MAX_PROPERTIES_SIZE_BYTES
            or TRANSACTION_PREPARED in text
            or DELAY_LEVEL in text
            or _TIMER in text
            or (_WAITS in text and (text.count(_WAITS) > 1 or _WAITS_INDEED not in text))
        ):
            return None
        try:
            born_timestamp_ms = command.get_int(names["bornTimestamp"], 0)
            row: MessageRow | None
            if plan.is_batch:
                row = batch_row(plan, body, born_timestamp_ms)
                if row is None:
                    return None
            else:
                message = plan.flag, body, text.encode()
                row = MessageRow(plan.maker, (message,), (text,), born_timestamp_ms, plan.reconsume_times)
            reply = _Sent(self, command, len(row.messages), text)
            ((reply.queue_offset, reply.positions),) = self._store.put_rows((row,), reply.stored)
        except (RequestError, ValueError, struct.error, NotWritable, DLedgerError):
            return None  # nothing was stored; whoever looks closely says why
        reply.queue_id = plan.maker.queue_id
        self.taken()
        reply.go_on()
        return reply

    def plan(self, command: Command, born_host: str) -> SendPlan | None:
        """What is done with plain messages like this one; None where they are not plain."""
        names = names_of(command)
        name = command.ext_fields.get(names["topic"])
        topic = self._topics.get(name) if name else None
        if topic is None or not topic.writable or is_internal(topic.name):
            return None
        try:
            queue_id = command.get_int(names["queueId"])
            sys_flag = command.get_int(names["sysFlag"], 0)
            flag = command.get_int(names["flag"], 0)
            reconsume_times = command.get_int(names["reconsumeTimes"], 0)
            is_batch = command.get_bool(names["batch"]) or command.code == RequestCode.SEND_BATCH_MESSAGE
            if sys_flag & SYS_FLAG_TRANSACTION_MASK or not 0 <= queue_id < topic.all_queues:
                return None
            if reconsume_times > 0:
                return None
            maker = record_maker(topic.name, queue_id, sys_flag, born_host, self._store_host)
        except (RequestError, RecordError):
            return None
        return SendPlan(topic, maker, flag, reconsume_times, is_batch)

    def taken(self) -> None:
        """A reply will be given, or several at once; `answered` is called then."""
        self._under_way += 1

    def answered(self) -> None:
        """One of the replies was given."""
        self._under_way -= 1
        if self._all_answered is not None and not self._under_way and not self._all_answered.done():
            self._all_answered.set_result(None)

    def note(self, count: int, duration_s: float, *, requests: int = 1) -> None:
        """So many messages, of so many requests, were stored in this time."""
        self._store.committed_total += count
        self._store.note_put(duration_s, requests)


def ids_of(host: str, positions: Sequence[int]) -> str:
    """The ids of messages at these positions, as a reply to their sender has them; `host` as `host_text`."""
    return f"{host}{pack_longs(positions).hex(',', 8).upper().replace(',', f',{host}')}"


def batch_row(plan: SendPlan, body: bytes, born_timestamp_ms: int) -> MessageRow | None:
    """The messages of a batch; None where any of them is not plain. Raises RequestError for what is no batch."""
    parts = split_batch(body)
    texts = [own for _, _, own in parts]
    if any(map(_is_special, filter(None, texts))):
        return None
    messages = [(flag, own_body, own.encode()) for flag, own_body, own in parts]
    return MessageRow(plan.maker, messages, texts, born_timestamp_ms, plan.reconsume_times)


def _is_special(text: str) -> bool:
    return bool(text) and (
        TRANSACTION_PREPARED in text
        or DELAY_LEVEL in text
        or _TIMER in text
        or len(text) > MAX_PROPERTIES_SIZE_BYTES
    )


_UNKNOWN = object()


class _Sent(LateReply):
    """The reply to one request, given when its messages are stored."""

    __slots__ = (
        "_began_s",
        "_count",
        "_outcome",
        "_request",
        "_sends",
        "_transaction_id",
        "positions",
        "queue_id",
        "queue_offset",
    )

    def __init__(self, sends: PlainSends, command: Command, count: int, text: str) -> None:
        super().__init__()
        self._sends = sends
        self._request = command
        self._count = count
        self._transaction_id = (text and property_value(text, UNIQUE_KEY)) or ""
        self._began_s = sends.now_s()
        self._outcome: Exception | object | None = _UNKNOWN
        self.queue_id = self.queue_offset = 0
        self.positions: Sequence[int] = ()

    def stored(self, error: Exception | None) -> None:
        """What became of the messages; before `go_on` it is only noted."""
        if not self.positions:
            self._outcome = error
            return
        sends, command = self._sends, self._request
        sends.answered()
        if error is None or isinstance(error, StoredInPart):
            sends.note(self._count, sends.now_s() - self._began_s)
            host, positions = sends.host_text, self.positions
            values = ids_of(host, positions), str(self.queue_id), str(self.queue_offset), self._transaction_id
            if error is None:
                self.give(sends.form.frame(command, values))
            else:
                told = {**dict(zip(REPLY_NAMES, values, strict=True)), **sends.told}
                self.give(command.reply(error.code, remark=str(error), fields=told))
        else:
            remark = f"the outcome is unknown: {error}"
            self.give(command.reply(ResponseCode.SYSTEM_ERROR, remark=remark, fields=sends.told))

    def go_on(self) -> None:
        """The messages are in the log, and it is known where."""
        if self._outcome is not _UNKNOWN:
            assert self._outcome is None or isinstance(self._outcome, Exception)
            self.stored(self._outcome)
