"""Acknowledgements of popped messages (codes 200051, 200151), and changes of the time at which one is redelivered
(200053).

An acknowledgement is answered when it is in the log. A late or repeated one changes nothing and is still a success (R:
AckMessageProcessor). A changed time is a new checkpoint of that one message, followed by an acknowledgement in the old
one (R: ChangeInvisibleTimeProcessor). The log takes both or none; if only the first is left after a crash, the message
comes twice.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from node.broker.append_errors import PUT_REFUSALS, all_stored, refusal, stored
from node.broker.dispatcher import Dispatcher, DispatchFailed
from node.broker.due_queue import loop_ms
from node.broker.internal_topics import RETRY_PREFIX
from node.broker.ledger import LedgerStore
from node.broker.message_store import MessageStore
from node.broker.pop import MAX_INVISIBLE_MS, PopProcessor
from node.broker.pop_checkpoints import (
    ORDERED_REVIVE_QUEUE,
    PLACES,
    Checkpoint,
    CheckpointKey,
    Handle,
    OpenCheckpoints,
    ReviveLog,
    pop_retry_topic,
)
from node.broker.pop_revive import PopRevival
from node.broker.pull import MAX_SCANNED_UNITS, PullHolds
from node.broker.topics import TopicTable
from node.remoting import Command, Connection, RequestCode, RequestError, ResponseCode
from node.store.flushing import settle
from node.store.record_batch import RecordBatch

__all__ = ["MAX_ACKS", "PopAckProcessor"]

MAX_ACKS = 1024
"""Checkpoints in one batch acknowledgement."""


class PopAckProcessor:
    """Answers while this node is master."""

    def __init__(
        self,
        *,
        store: MessageStore,
        log: LedgerStore,
        dispatcher: Dispatcher,
        topics: TopicTable,
        holds: PullHolds,
        checkpoints: OpenCheckpoints,
        revive_log: ReviveLog,
        revival: PopRevival,
        pops: PopProcessor,
        not_leader_remark: Callable[[], str],
    ) -> None:
        self._store = store
        self._log = log
        self._dispatcher = dispatcher
        self._topics = topics
        self._holds = holds
        self._checkpoints = checkpoints
        self._revive_log = revive_log
        self._revival = revival
        self._pops = pops
        self._not_leader_remark = not_leader_remark

    def processors(self) -> dict[int, Callable[[Command, Connection], Any]]:
        """The processors, by request code."""
        code = RequestCode
        return {
            code.ACK_MESSAGE: self.acknowledge,
            code.BATCH_ACK_MESSAGE: self.acknowledge_many,
            code.CHANGE_MESSAGE_INVISIBLETIME: self.change_time,
        }

    async def acknowledge(self, command: Command, connection: Connection) -> Command:
        """Code 200051: acknowledge one message."""
        handle, key, offset = self._of(command)
        if handle.revive_queue == ORDERED_REVIVE_QUEUE:
            self._acknowledge_in_order(key, offset)
        else:
            await self._acknowledge(((key, (offset,)),))
        return command.reply(ResponseCode.SUCCESS)

    async def acknowledge_many(self, command: Command, connection: Connection) -> Command:
        """Code 200151: the body names checkpoints, and for each, as a bit set, the messages from its start on."""
        try:
            content = json.loads(command.body)["acks"]
            if not 0 < len(content) <= MAX_ACKS:
                remark = f"{len(content)} acknowledgements, at most {MAX_ACKS}"
                return command.reply(ResponseCode.NO_MESSAGE, remark=remark)
            wanted = [_batch_ack(each) for each in content]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError, binascii.Error) as error:
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, f"these are no acknowledgements: {error!r}") from error
        self._check_master()
        for in_order, key, offsets in wanted:
            for offset in offsets if in_order else ():
                self._acknowledge_in_order(key, offset)
        await self._acknowledge([(key, offsets) for in_order, key, offsets in wanted if not in_order])
        return command.reply(ResponseCode.SUCCESS)

    async def change_time(self, command: Command, connection: Connection) -> Command:
        """Code 200053: redeliver the message `invisibleTime` from now. The answer has the parts of the new handle."""
        handle, key, offset = self._of(command)
        invisible_ms = command.get_int("invisibleTime")
        if not 0 <= invisible_ms <= MAX_INVISIBLE_MS:
            raise RequestError(ResponseCode.INVALID_PARAMETER, f"invisibleTime {invisible_ms} ms, at most a day")
        pop_time_ms = self._store.wall_ms()
        if handle.revive_queue == ORDERED_REVIVE_QUEUE:
            queue = (key.group, key.topic, key.queue_id)
            until_ms = loop_ms() + invisible_ms
            if not self._pops.in_order.postpone(queue, offset, key.pop_time_ms, until_ms):
                raise _no_message(key, offset)
            self._holds.wake(((key.topic, key.queue_id),))
            invisible_ms, pop_time_ms = max(pop_time_ms + invisible_ms - key.pop_time_ms, 0), key.pop_time_ms
        else:
            pop_time_ms = max(pop_time_ms, key.pop_time_ms + 1)
            again = key._replace(start_offset=offset, pop_time_ms=pop_time_ms)
            await self._change_time(key, offset, again, invisible_ms)
        fields = {"popTime": pop_time_ms, "invisibleTime": invisible_ms, "reviveQid": handle.revive_queue}
        return command.reply(ResponseCode.SUCCESS, fields=fields)

    async def _change_time(self, key: CheckpointKey, offset: int, again: CheckpointKey, invisible_ms: int) -> None:
        await self._catch_up()
        checkpoint = self._checkpoints.by_key.get(key)
        place = checkpoint.place_of(offset) if checkpoint is not None else None
        if checkpoint is None or place is None or not self._revival.claim(checkpoint, place):
            raise _no_message(key, offset)
        try:
            self._check_master()
            given = self._revive_log.checkpoint(again, invisible_ms, (offset,))
            put = self._put(given, self._revive_log.acknowledgement(key, (offset,)))
        except BaseException:
            self._revival.give_up_claim(checkpoint, place)
            raise
        await stored(put)

    async def _acknowledge(self, wanted: Sequence[tuple[CheckpointKey, Sequence[int]]]) -> None:
        await self._catch_up()
        self._check_master()
        put = []
        for key, offsets in wanted:
            checkpoint = self._checkpoints.by_key.get(key)
            if checkpoint is None:
                continue
            places = {offset: checkpoint.place_of(offset) for offset in offsets}
            held = {offset: place for offset, place in places.items() if place is not None}
            if held:
                put.append(self._put_acknowledgement(checkpoint, held))
        await all_stored(put)

    def _put_acknowledgement(self, checkpoint: Checkpoint, held: dict[int, int]) -> asyncio.Future[None]:
        """Acknowledge messages, given as offsets and places. They are not redelivered, even if their time is over
        before that is dispatched, however long the disk or the group takes."""
        claimed = [place for place in held.values() if self._revival.claim(checkpoint, place)]
        try:
            return self._put(self._revive_log.acknowledgement(checkpoint.key, list(held)))
        except BaseException:
            for place in claimed:
                self._revival.give_up_claim(checkpoint, place)
            raise

    def _acknowledge_in_order(self, key: CheckpointKey, offset: int) -> None:
        queue = (key.group, key.topic, key.queue_id)
        following = self._pops.in_order.acknowledged(queue, offset, key.pop_time_ms)
        if following is not None:
            self._pops.commit(queue, following)
            self._holds.wake(((key.topic, key.queue_id),))

    def _put(self, *batches: RecordBatch) -> asyncio.Future[None]:
        committed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            self._store.put(batches, partial(settle, committed))
        except PUT_REFUSALS as error:
            raise refusal(error, self._not_leader_remark()) from error
        return committed

    def _check_master(self) -> None:
        if not self._store.is_master:
            raise RequestError(ResponseCode.SERVICE_NOT_AVAILABLE, self._not_leader_remark())

    async def _catch_up(self) -> None:
        """Wait for dispatch: what was popped a moment ago must be known here."""
        try:
            dispatched = self._dispatcher.wait_for(self._log.committed_index)
            if dispatched is not None:
                await dispatched
        except DispatchFailed as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, str(error)) from error

    def _of(self, command: Command) -> tuple[Handle, CheckpointKey, int]:
        """Handle, checkpoint and offset of a request about one message. Raises RequestError."""
        handle = Handle.of(command.get_str("extraInfo"))
        topic, queue_id, offset = command.get_str("topic"), command.get_int("queueId"), command.get_int("offset")
        self._check_master()
        known = self._topics.get(topic)
        if known is None and not topic.startswith(RETRY_PREFIX):
            raise RequestError(ResponseCode.TOPIC_NOT_EXIST, f"topic {topic!r} does not exist")
        if queue_id < 0 or (known is not None and queue_id >= known.read_queues):
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, f"queue {queue_id} of topic {topic!r}")
        key = CheckpointKey(topic, queue_id, handle.start_offset, command.get_str("consumerGroup"), handle.pop_time_ms)
        queue = self._store.queues.find(topic, queue_id)
        if queue is None or not queue.min_offset <= offset < queue.max_offset:
            raise _no_message(key, offset)
        return handle, key, offset


def _no_message(key: CheckpointKey, offset: int) -> RequestError:
    place = f"{key.topic}/{key.queue_id}"
    return RequestError(ResponseCode.NO_MESSAGE, f"message {offset} of {place} is not in the hands of {key.group!r}")


def _batch_ack(content: dict[str, Any]) -> tuple[bool, CheckpointKey, list[int]]:
    """Whether it is ordered, its checkpoint, and its messages (R: BatchAck; the bit set is that of java.util.BitSet,
    lowest byte first, and reaches no further than a request for messages scans). Raises ValueError, KeyError,
    TypeError."""
    group, topic, start = str(content["c"]), str(content["t"]), int(content["so"])
    if str(content.get("r", "0")) == "1":
        topic = pop_retry_topic(group, topic)
    bits = int.from_bytes(base64.b64decode(content["b"], validate=True)[: MAX_SCANNED_UNITS // 8], "little")
    if bits.bit_count() > PLACES:
        raise ValueError(f"{bits.bit_count()} messages of one checkpoint, which has at most {PLACES}")
    offsets = [start + place for place in range(bits.bit_length()) if bits >> place & 1]
    key = CheckpointKey(topic, int(content["q"]), start, group, int(content["pt"]))
    return int(content["rq"]) == ORDERED_REVIVE_QUEUE, key, offsets
