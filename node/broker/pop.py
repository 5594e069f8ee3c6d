"""POP: consumers of RocketMQ 5 ask for messages from any queue of a topic, and get each for a time (code 200050).

Until that time is over nobody else in the group gets the message; then it is redelivered, unless it was acknowledged
(`pop_acks.py`, `pop_revive.py`). What is popped is in the log before the answer leaves (`pop_checkpoints.py`).
A request that finds nothing is held until something arrives, at most `pollTime` (R: PopMessageProcessor).

One request in five looks for redelivered messages first, the others do so if there is room left (R:
popFromRetryProbability). With `order` a queue's messages are popped one lot after the other (`pop_order.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from node.broker.append_errors import PUT_REFUSALS, all_stored, refusal
from node.broker.consumer_offsets import ConsumerOffsets, TooManyOffsets
from node.broker.dispatch_batch import Queue
from node.broker.due_queue import loop_ms
from node.broker.internal_topics import RETRY_PREFIX, dlq_topic
from node.broker.memory_window import MemoryWindow
from node.broker.message_store import MessageStore
from node.broker.pop_checkpoints import (
    ORDERED_REVIVE_QUEUE,
    PLACES,
    CheckpointKey,
    OpenCheckpoints,
    QueueOfGroup,
    ReviveLog,
    pop_retry_topic,
)
from node.broker.pop_order import OrderedQueues
from node.broker.pull import (
    HOLD_RECHECK_S,
    MAX_SUSPEND_MS,
    ConsumingGroups,
    PropertyFilter,
    PullHolds,
    PullProcessor,
    PullRequest,
    TagFilter,
    message_filter,
)
from node.broker.reads import ReadGate
from node.broker.topics import TopicTable
from node.config import TopicConfig, check_topic_name
from node.logs import LogLimiter
from node.remoting import Command, Connection, FieldValue, RequestError, ResponseCode
from node.runtime import Runtime
from node.store.consume_queue import ConsumeQueue
from node.store.record import RecordError

__all__ = ["PopProcessor"]

logger = logging.getLogger("node.broker")

RETRY_FIRST_PERCENT = 20
"""R: popFromRetryProbability."""
MAX_INVISIBLE_MS = 24 * 3_600_000
"""Longest time for which a message is popped: a day, twice the most that clients of RocketMQ 5 ask for."""
MAX_ANSWER_BYTES = 8 << 20
"""Bytes in one answer, over all queues, unless its first message alone is longer: half of the largest frame."""
MAX_ATTEMPT_CHARACTERS = 255
"""Length of an attempt's name, kept while messages popped in order are in hand; clients of RocketMQ 5 send a UUID."""
MAX_AHEAD = 100_000
"""Queues of groups for which it is noted up to where they were popped or scanned; at this number, all are dropped but
those whose checkpoints are not dispatched, of which the log accepts some thousands."""
_INIT_FROM_MIN = 0
_QUEUE_OFFSET = slice(20, 28)
"""Where a record has its queue offset."""


def _number(record: bytes) -> int:
    return int.from_bytes(record[_QUEUE_OFFSET], "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class _PopRequest:
    topic: TopicConfig
    group: str
    queue_id: int
    max_messages: int
    invisible_ms: int
    poll_ms: int
    init_mode: int
    wanted: TagFilter | PropertyFilter
    in_order: bool
    attempt: str

    @classmethod
    def of(cls, command: Command, groups: ConsumingGroups, topics: TopicTable) -> _PopRequest:
        """Raises RequestError."""
        group, name = command.get_str("consumerGroup"), command.get_str("topic")
        queue_id, messages = command.get_int("queueId", -1), command.get_int("maxMsgNums")
        invisible_ms = command.get_int("invisibleTime")
        groups.check(group)
        topic = topics.get(name)
        if topic is None:
            raise RequestError(ResponseCode.TOPIC_NOT_EXIST, f"topic {name!r} does not exist")
        if not topic.readable:
            raise RequestError(ResponseCode.NO_PERMISSION, f"topic {name!r} is not readable")
        if queue_id >= topic.read_queues:
            remark = f"queue {queue_id} of topic {name!r}, which has {topic.read_queues}"
            raise RequestError(ResponseCode.INVALID_PARAMETER, remark)
        if not 0 < messages <= PLACES:
            raise RequestError(ResponseCode.INVALID_PARAMETER, f"{messages} messages, at most {PLACES} can be had")
        if not 0 <= invisible_ms <= MAX_INVISIBLE_MS:
            raise RequestError(ResponseCode.INVALID_PARAMETER, f"invisibleTime {invisible_ms} ms, at most a day")
        try:
            check_topic_name(pop_retry_topic(group, name))
            check_topic_name(dlq_topic(group))
        except ValueError as error:  # unacknowledged messages could not be redelivered
            raise RequestError(ResponseCode.INVALID_PARAMETER, str(error)) from error
        attempt = command.get_str("attemptId", "")
        if len(attempt) > MAX_ATTEMPT_CHARACTERS:
            remark = f"attemptId of {len(attempt)} characters, at most {MAX_ATTEMPT_CHARACTERS}"
            raise RequestError(ResponseCode.INVALID_PARAMETER, remark)
        expression = command.get_str("exp", "") or "*"
        return cls(
            topic=topic,
            group=group,
            queue_id=queue_id,
            max_messages=messages,
            invisible_ms=invisible_ms,
            poll_ms=min(max(command.get_int("pollTime", 0), 0), MAX_SUSPEND_MS),
            init_mode=command.get_int("initMode", 0),
            wanted=message_filter(expression, command.get_str("expType", "") or "TAG"),
            in_order=command.get_bool("order"),
            attempt=attempt,
        )

    def own_queues(self) -> list[Queue]:
        """The queues that it names."""
        ids = range(self.topic.read_queues) if self.queue_id < 0 else (self.queue_id,)
        return [(self.topic.name, queue_id) for queue_id in ids]

    def retry_queues(self) -> list[Queue]:
        """Where unacknowledged messages are redelivered, unless that is the topic that it names."""
        name = pop_retry_topic(self.group, self.topic.name)
        return [] if self.in_order or name == self.topic.name else [(name, 0)]

    def queues(self) -> list[Queue]:
        """Every queue that may have messages for it."""
        return self.own_queues() + self.retry_queues()


class _Lot(NamedTuple):
    """Messages of one queue that are popped together."""

    queue: Queue
    offset: int
    records: Sequence[bytes]
    offsets: Sequence[int]
    tries: dict[int, int]


class PopProcessor:
    """Answers POP requests while this node is master."""

    def __init__(
        self,
        *,
        store: MessageStore,
        pulls: PullProcessor,
        gate: ReadGate,
        topics: TopicTable,
        holds: PullHolds,
        offsets: ConsumerOffsets,
        memory: MemoryWindow,
        checkpoints: OpenCheckpoints,
        revive_log: ReviveLog,
        runtime: Runtime,
    ) -> None:
        self._store = store
        self._pulls = pulls
        self._gate = gate
        self._topics = topics
        self._holds = holds
        self._offsets = offsets
        self._memory = memory
        self._checkpoints = checkpoints
        self._revive_log = revive_log
        self._random = runtime.random
        self.in_order = OrderedQueues()
        self._ahead: dict[QueueOfGroup, tuple[int, int]] = {}
        """Where a group continues, noted before that is dispatched, and the number of its last checkpoint; -1: nothing
        was popped, since nothing passed the filter."""
        self._complaints = LogLimiter(lambda: asyncio.get_running_loop().time())
        checkpoints.on_consumed = self._consumed

    def start(self) -> None:
        """This node is master now: the whole log is dispatched, so what was popped is known exactly."""
        self._ahead.clear()
        self.in_order.clear()
        self._revive_log.go_on(self._store.queues.items())
        for queue, offset in self._checkpoints.consumed():  # the table may be older, after a crash
            self._consumed(queue, offset)

    def stop(self) -> None:
        """Nothing to do: held requests are refused when they wake."""

    def _consumed(self, queue: QueueOfGroup, offset: int) -> None:
        """`commit`, unless the group has pulled meanwhile and is further."""
        if offset > (self._offsets.find(*queue) or 0):
            self.commit(queue, offset)

    def commit(self, queue: QueueOfGroup, offset: int) -> None:
        """A group is done with everything in a queue below the offset."""
        try:
            self._offsets.commit(*queue, offset)
        except TooManyOffsets as error:
            self._complaints.warning(logger, "offsets", "%s", error)

    async def process(self, command: Command, connection: Connection) -> Command | None:
        """Answer when there are messages, or the time is over; None if the connection is gone by then."""
        request = self._request(command)
        if not self._gate.is_open:
            await self._gate.enter()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + request.poll_ms / 1000
        while True:
            if not self._store.is_master:
                raise self._gate.not_leader()
            pop_time_ms = self._store.wall_ms()
            lots, rest, look_again_ms = await self._give(request, pop_time_ms)
            left_s = deadline_s - loop.time()
            if lots or left_s <= 0 or self._holds.is_full:
                return self._reply(command, request, lots, rest, pop_time_ms)
            wait_s = min(left_s, HOLD_RECHECK_S, max((look_again_ms - loop_ms()) / 1000, 0.001))
            await self._holds.wait(request.queues(), connection, wait_s)
            if connection.is_closing:
                return None
            request = self._request(command)  # what may be read may have changed

    def _request(self, command: Command) -> _PopRequest:
        """The request as parsed; raises RequestError if it must not be served now."""
        if not self._pulls.may_read:
            raise RequestError(ResponseCode.NO_PERMISSION, "this broker may not be read (brokerPermission)")
        return _PopRequest.of(command, self._pulls.groups, self._topics)

    def _reply(
        self, command: Command, request: _PopRequest, lots: Sequence[_Lot], rest: int, pop_time_ms: int
    ) -> Command:
        code = ResponseCode.SUCCESS if lots else ResponseCode.POLLING_TIMEOUT
        if not lots and request.poll_ms and self._holds.is_full:
            code = ResponseCode.POLLING_FULL
        places = [(f"{int(lot.queue[0].startswith(RETRY_PREFIX))}", lot) for lot in lots]
        fields: dict[str, FieldValue] = {
            "popTime": pop_time_ms,
            "invisibleTime": request.invisible_ms,
            "reviveQid": ORDERED_REVIVE_QUEUE if request.in_order else 0,
            "restNum": rest,
            "startOffsetInfo": ";".join(f"{mark} {lot.queue[1]} {lot.offset}" for mark, lot in places),
            "msgOffsetInfo": ";".join(
                f"{mark} {lot.queue[1]} {','.join(map(str, lot.offsets))}" for mark, lot in places
            ),
        }
        if request.in_order:
            fields["orderCountInfo"] = ";".join(
                f"{mark} qo{lot.queue[1]}%{offset} {count}"
                for mark, lot in places
                for offset, count in lot.tries.items()
            )
        self._pulls.get_total += sum(len(lot.records) for lot in lots)
        self._pulls.rates.given(request.group, sum(len(lot.records) for lot in lots))
        return command.reply(code, fields=fields, body=b"".join(record for lot in lots for record in lot.records))

    async def _give(self, request: _PopRequest, pop_time_ms: int) -> tuple[list[_Lot], int, float]:
        """The messages popped for a request; how many are left; and when it may look again, by the loop's clock in ms.
        Raises RequestError if the log accepts no checkpoint and nothing is popped."""
        lots: list[_Lot] = []
        written: list[asyncio.Future[None]] = []
        rest, look_again_ms, left, room_bytes = 0, float("inf"), request.max_messages, MAX_ANSWER_BYTES
        for queue in self._in_turn(request):
            key = (request.group, *queue)
            stored_queue = self._store.queues.find(*queue)
            if stored_queue is None:
                continue
            offset = self._position(request, key, stored_queue)
            if left and request.in_order:
                blocked_ms = self.in_order.blocked_until_ms(key, request.attempt, loop_ms())
                if blocked_ms:
                    look_again_ms = min(look_again_ms, blocked_ms)
                    continue
            if left and offset < stored_queue.max_offset and self._may_give(request):
                lot, following = self._read(request, queue, stored_queue, offset, left)
                room_bytes -= sum(map(len, lot.records))
                if lots and room_bytes < 0:  # what is too much for this answer comes with the next one
                    left = 0
                    rest += stored_queue.max_offset - offset
                    continue
                number = -1
                try:
                    if lot.records:
                        lot, number = self._write(request, key, lot, pop_time_ms, written)
                except PUT_REFUSALS as error:
                    if lots:
                        break
                    raise refusal(error, self._gate.not_leader().remark) from error
                if not request.in_order:
                    self._note_ahead(key, following, number)
                elif not lot.records:
                    self.commit(key, following)
                if lot.records:
                    lots.append(lot)
                    left -= len(lot.records)
                elif following > offset:  # nothing passed the filter, but later messages may
                    look_again_ms = min(look_again_ms, loop_ms())
                offset = following
                if not request.wanted.passes_all:  # each of many queues may take some ten milliseconds
                    await asyncio.sleep(0)
                    if not self._store.is_master:
                        break
            rest += max(stored_queue.max_offset - offset, 0)
        await all_stored(written)
        return lots, rest, look_again_ms

    def _in_turn(self, request: _PopRequest) -> Iterable[Queue]:
        """The queues of a request, beginning with a random one."""
        queues, again = request.own_queues(), request.retry_queues()
        first = self._random.randrange(len(queues))
        queues = queues[first:] + queues[:first]
        return again + queues if self._random.randrange(100) < RETRY_FIRST_PERCENT else queues + again

    def _position(self, request: _PopRequest, key: QueueOfGroup, queue: ConsumeQueue) -> int:
        """The offset of the next message for the group."""
        known = [self._offsets.find(*key)]  # beyond the others if the group has pulled meanwhile
        if not request.in_order:
            known += [self._checkpoints.next_offsets.get(key), self._ahead.get(key, (None, -1))[0]]
        following = max((offset for offset in known if offset is not None), default=None)
        if following is None:
            following = self._first(request, key[1], queue)
            self.commit(key, following)
        if following > queue.max_offset:  # the topic was deleted and created again
            following = queue.min_offset
        return max(following, queue.min_offset)

    def _first(self, request: _PopRequest, topic: str, queue: ConsumeQueue) -> int:
        """Where a group begins (R: getInitOffset): at the first message; at the last, if that is requested and the
        first is not in memory any more."""
        if request.init_mode == _INIT_FROM_MIN or topic.startswith(RETRY_PREFIX) or queue.max_offset == 0:
            return queue.min_offset
        units = queue.read(0, 1) if queue.min_offset <= 0 else []
        if units and not self._memory.is_behind(units[0].physical_offset):
            return 0
        return queue.max_offset - 1

    def _read(
        self, request: _PopRequest, queue: Queue, stored_queue: ConsumeQueue, offset: int, most: int
    ) -> tuple[_Lot, int]:
        """Messages from an offset on, and the offset to continue from."""
        passes_all = queue[0] != request.topic.name
        wanted = PullRequest(
            topic=queue[0],
            queue_id=queue[1],
            offset=offset,
            max_messages=most,
            tag_filter=TagFilter("*") if passes_all else request.wanted,
            group=request.group,
        )
        try:
            records, following, _ = self._pulls.collect(stored_queue, wanted)
        except (RecordError, OSError) as error:
            self._complaints.warning(logger, "pop", "queue %s/%d at %d cannot be read: %s", *queue, offset, error)
            records, following = [], offset
        if request.in_order:
            key = (request.group, *queue)
            records = [record for record in records if not self.in_order.is_done(key, _number(record))]
        offsets = [_number(record) for record in records]
        return _Lot(queue, offset, records, offsets, {}), following

    def _write(
        self, request: _PopRequest, key: QueueOfGroup, lot: _Lot, pop_time_ms: int, written: list[asyncio.Future[None]]
    ) -> tuple[_Lot, int]:
        """Record that these messages are popped; no answer may leave before `written` is done. Returns them with the
        number of their checkpoint, -1 if they need none. Raises PUT_REFUSALS."""
        if request.in_order:
            until_ms = loop_ms() + request.invisible_ms
            return lot._replace(tries=self.in_order.give(key, request.attempt, lot.offsets, pop_time_ms, until_ms)), -1
        group, topic, queue_id = key
        checkpoint = self._revive_log.checkpoint(
            CheckpointKey(topic, queue_id, lot.offset, group, pop_time_ms), request.invisible_ms, lot.offsets
        )
        put = self._store.put_one(checkpoint)
        written.append(put.committed)
        return lot, put.queue_offset

    def _may_give(self, request: _PopRequest) -> bool:
        """Whether there is room to record more popped messages; logs it if not."""
        if request.in_order or not self._checkpoints.is_full:
            return True
        in_hand = self._checkpoints.open_messages
        self._complaints.warning(
            logger, "full", "POP consumers get nothing: %d messages are in their hands, not acknowledged", in_hand
        )
        return False

    def _note_ahead(self, key: QueueOfGroup, following: int, number: int) -> None:
        """Note where a group continues at once, before that is dispatched."""
        if len(self._ahead) >= MAX_AHEAD and key not in self._ahead:
            dispatched = self._checkpoints.last_number
            self._ahead = {each: noted for each, noted in self._ahead.items() if noted[1] > dispatched}
        before = self._ahead.get(key, (0, -1))
        self._ahead[key] = max(following, before[0]), max(number, before[1])
