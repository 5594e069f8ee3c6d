"""Plain messages that came together are stored together: one append, one word of the log, one write of all answers.

A connection hands over the sends that it has read in one turn of the loop, read by the form of their headers. As many
of them, from the first on, as are plain single messages (see `plain_send`), or as are plain batches, go into the log as
one row, each message with its place in its own queue. The first that is not is left to the processor, as all are when
the log refuses them. What is stored and answered is the same as one by one, byte for byte; the tests hold both against
each other.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from node.broker.ledger import DLedgerError, StoredInPart
from node.broker.message_store import GroupMessage, MessageRow, NotTogether, NotWritable, PutRow
from node.broker.plain_send import MAX_PLANS, REPLY_NAMES, PlainSends, SendPlan, batch_row, ids_of
from node.broker.ports import Ports
from node.remoting import (
    Command,
    Connection,
    FormedRequest,
    HeaderForm,
    LateReplies,
    Places,
    RequestCode,
    RequestError,
    ResponseCode,
    encode,
)
from node.store.properties import DELAY_LEVEL, TRANSACTION_PREPARED, UNIQUE_KEY, WAIT_STORE, property_value
from node.store.record import MAX_PROPERTIES_SIZE_BYTES

__all__ = ["GatheredSends", "register_gathered"]

PLACES = {
    RequestCode.SEND_MESSAGE_V2: Places(("e", "g"), ("b", "i")),
    RequestCode.SEND_BATCH_MESSAGE: Places(("e", "g"), ("b", "i")),
    RequestCode.SEND_MESSAGE: Places(("queueId", "bornTimestamp"), ("topic", "properties")),
}
"""What differs between the sends of a client: queue, born timestamp, topic and properties."""

_STATE_KEY = "gathered_plans"
_HARMLESS = frozenset((b"", f"{WAIT_STORE}\x01true\x02".encode()))
_PREPARED = TRANSACTION_PREPARED.encode()
_DELAY = DELAY_LEVEL.encode()
_TIMER = b"TIMER_"
_WAITS = f"{WAIT_STORE}\x01".encode()
_WAITS_INDEED = f"{WAIT_STORE}\x01true\x02".encode()
_KEY = UNIQUE_KEY.encode()

_PlanKey = tuple[HeaderForm, bytes | None, bytes | None]


def _is_special(text: bytes) -> bool:
    """Whether the processor is to look at a message with these properties."""
    return (
        _PREPARED in text
        or _DELAY in text
        or _TIMER in text
        or (_WAITS in text and (text.count(_WAITS) > 1 or _WAITS_INDEED not in text))
        or len(text) > MAX_PROPERTIES_SIZE_BYTES
    )


def register_gathered(ports: Ports, sends: GatheredSends) -> None:
    """Have sends read by the form of their headers, and gathered."""
    for code, places in PLACES.items():
        ports.register_form(code, places, sends.take)


class GatheredSends:
    """Takes sends that came together; `is_hooked` says whether each is to be looked at by a hook."""

    def __init__(self, plain: PlainSends, *, is_hooked: Callable[[], bool]) -> None:
        self._plain = plain
        self._is_hooked = is_hooked
        self._store = plain.store
        self._topics = plain.topics
        self._max_message_size_bytes = plain.max_message_size_bytes

    def take(
        self, requests: Sequence[Command], start: int, stop: int, connection: Connection
    ) -> LateReplies | None:
        """Store the plain ones among `requests[start:stop]`, from the first on, up to one that is not, or is a batch
        where the first is none and the other way round. None, and nothing is changed, where there are none or they are
        refused."""
        plain = self._plain
        if self._is_hooked() or not plain.takes_now:
            return None
        plans: dict[_PlanKey, SendPlan] | None = connection.state.get(_STATE_KEY)
        if plans is None:
            plans = connection.state[_STATE_KEY] = {}
        topics, max_bytes = self._topics, self._max_message_size_bytes
        messages: list[GroupMessage] = []
        rows: list[MessageRow] = []
        size_bytes = 0
        for at in range(start, stop):
            request = requests[at]
            if request.__class__ is not FormedRequest:
                break
            queue, born, topic, text = request.values
            key = request.form, topic, queue
            plan = plans.get(key)
            if plan is None or topics.get(plan.topic.name) is not plan.topic:
                plan = plain.plan(request, connection.remote_address)
                if plan is None:
                    break
                if len(plans) >= MAX_PLANS:
                    plans.clear()
                plans[key] = plan
            body = request.body
            text = text or b""
            if len(body) > max_bytes or (text not in _HARMLESS and _is_special(text)):
                break
            if not plan.is_batch:
                if rows:
                    break
                messages.append((plan.maker, plan.flag, body, text, int(born) if born else 0, plan.reconsume_times))
            elif messages:
                break
            else:
                row = _batch_row(plan, body, born)
                if row is None:
                    break
                rows.append(row)
            size_bytes += request.size_bytes
        own = requests[start : start + (len(rows) or len(messages))]
        if not own:
            return None
        group: _Group
        try:
            if rows:
                group = batches = _Batches(plain, own, rows, size_bytes)
                batches.put = self._store.put_rows(rows, group.stored)
            else:
                group = singles = _Singles(plain, own, messages, size_bytes)
                singles.offsets, singles.positions = self._store.put_group(messages, group.stored)
        except (ValueError, struct.error, NotTogether, NotWritable, DLedgerError):
            return None  # nothing was stored; whoever looks closely says why
        plain.taken()
        group.go_on()
        return group


def _batch_row(plan: SendPlan, body: bytes, born: bytes | None) -> MessageRow | None:
    try:
        return batch_row(plan, body, int(born) if born else 0)
    except RequestError:
        return None


_UNKNOWN = object()


class _Group(LateReplies, ABC):
    """The replies to requests whose messages are stored together."""

    __slots__ = ("_began_s", "_count", "_outcome", "_plain", "_requests")

    def __init__(self, plain: PlainSends, requests: Sequence[Command], count: int, size_bytes: int) -> None:
        super().__init__(len(requests), size_bytes)
        self._plain = plain
        self._requests = requests
        self._count = count
        self._began_s = plain.now_s()
        self._outcome: Exception | object | None = _UNKNOWN

    @abstractmethod
    def _is_placed(self) -> bool:
        """Whether it is known where the messages are."""

    @abstractmethod
    def _values(self) -> Iterable[tuple[str, str, str, str]]:
        """For each request what its reply says, by `REPLY_NAMES`."""

    def stored(self, error: Exception | None) -> None:
        """What became of the messages; before `go_on` it is only noted."""
        if not self._is_placed():
            self._outcome = error
            return
        plain = self._plain
        plain.answered()
        frames: list[bytes] = []
        if error is None or isinstance(error, StoredInPart):
            plain.note(self._count, plain.now_s() - self._began_s, requests=len(self._requests))
            frame = plain.form.frame
            for request, values in zip(self._requests, self._values(), strict=True):
                if error is None:
                    frames.append(frame(request, values))
                else:
                    told = {**dict(zip(REPLY_NAMES, values, strict=True)), **plain.told}
                    frames.append(encode(request.reply(error.code, remark=str(error), fields=told)))
        else:
            remark = f"the outcome is unknown: {error}"
            for request in self._requests:
                frames.append(encode(request.reply(ResponseCode.SYSTEM_ERROR, remark=remark, fields=plain.told)))
        self.give(b"".join(frames))

    def go_on(self) -> None:
        """The messages are in the log, and it is known where."""
        if self._outcome is not _UNKNOWN:
            assert self._outcome is None or isinstance(self._outcome, Exception)
            self.stored(self._outcome)


class _Singles(_Group):
    """To requests with one message each."""

    __slots__ = ("_messages", "offsets", "positions")

    def __init__(
        self, plain: PlainSends, requests: Sequence[Command], messages: Sequence[GroupMessage], size_bytes: int
    ) -> None:
        super().__init__(plain, requests, len(messages), size_bytes)
        self._messages = messages
        self.offsets: Sequence[int] = ()
        self.positions: Sequence[int] = ()

    def _is_placed(self) -> bool:
        return bool(self.positions)

    def _values(self) -> Iterable[tuple[str, str, str, str]]:
        host = self._plain.host_text
        for message, offset, position in zip(self._messages, self.offsets, self.positions, strict=True):
            text = message[3]
            key = (property_value(text.decode(), UNIQUE_KEY) or "") if _KEY in text else ""
            yield f"{host}{position:016X}", str(message[0].queue_id), str(offset), key


class _Batches(_Group):
    """To requests with a batch each."""

    __slots__ = ("_rows", "put")

    def __init__(
        self, plain: PlainSends, requests: Sequence[Command], rows: Sequence[MessageRow], size_bytes: int
    ) -> None:
        super().__init__(plain, requests, sum([len(row.messages) for row in rows]), size_bytes)
        self._rows = rows
        self.put: Sequence[PutRow] = ()

    def _is_placed(self) -> bool:
        return bool(self.put)

    def _values(self) -> Iterable[tuple[str, str, str, str]]:
        host = self._plain.host_text
        for request, row, put in zip(self._requests, self._rows, self.put, strict=True):
            assert isinstance(request, FormedRequest)
            text = request.values[3] or b""
            key = (property_value(text.decode(), UNIQUE_KEY) or "") if _KEY in text else ""
            yield ids_of(host, put.positions), str(row.maker.queue_id), str(put.queue_offset), key
