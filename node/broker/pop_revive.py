"""Redelivers messages that a POP consumer did not acknowledge in time (R: PopReviveService).

Each is copied into the group's retry topic for its topic, as its next try; after the last try that the group allows, to
the group's dead letters. Only the master does this, by a monotonic clock: setting a wall clock makes nothing early or
late, except that a new master only has the wall clock for what its predecessor popped.
"""

from __future__ import annotations

from collections.abc import Callable

from node.broker.append_errors import forget, read_message
from node.broker.due_queue import DueQueue, loop_ms
from node.broker.internal_topics import dlq_topic
from node.broker.ledger import DLedgerError, LedgerStore
from node.broker.message_store import MessageStore, NotWritable
from node.broker.pop_checkpoints import (
    MAX_OPEN_MESSAGES,
    PLACES,
    Checkpoint,
    OpenCheckpoints,
    ReviveLog,
    pop_retry_topic,
)
from node.broker.requeue import POP_SOURCE, copy_of, source_number
from node.broker.send_back import RetryTopics
from node.store.properties import DELAY_LEVEL, FIRST_POP_TIME, RETRY_TOPIC, join_properties
from node.store.record import MAX_PROPERTIES_SIZE_BYTES, RecordError

__all__ = ["PopRevival"]


FORGET_AT = 2 * MAX_OPEN_MESSAGES
"""Messages that are noted as being closed; at this number, those that are not open any more are forgotten."""


class PopRevival:
    """Redelivers messages while this node is master. `store_host` returns the address that records carry."""

    def __init__(
        self,
        *,
        store: MessageStore,
        log: LedgerStore,
        checkpoints: OpenCheckpoints,
        revive_log: ReviveLog,
        retries: RetryTopics,
        store_host: Callable[[], str],
    ) -> None:
        self._store = store
        self._log = log
        self._checkpoints = checkpoints
        self._revive_log = revive_log
        self._retries = retries
        self._store_host = store_host
        self._closing: set[tuple[int, int]] = set()
        self._queue = DueQueue("messages of POP consumers", now_ms=lambda: loop_ms(), act=self._revive)
        self.revived_total = 0
        """Messages redelivered since the start."""

    def start(self) -> None:
        """This node is master now: the whole log is dispatched, so what is open is exact."""
        self._closing.clear()
        self._checkpoints.on_opened = self._opened
        wall_ms, now_ms = self._store.wall_ms(), loop_ms()
        self._queue.start(
            (now_ms + min(max(each.key.pop_time_ms + each.invisible_ms - wall_ms, 0), each.invisible_ms), each.number)
            for each in self._checkpoints.by_number.values()
        )

    def stop(self) -> None:
        """Stop redelivering."""
        self._queue.stop()

    def claim(self, checkpoint: Checkpoint, place: int) -> bool:
        """Whether nobody else is closing this message; if so, the caller is from now on. It has to put what closes the
        message: an acknowledgement, or a copy. Until that is dispatched nobody else redelivers it."""
        if (checkpoint.number, place) in self._closing:
            return False
        if len(self._closing) >= FORGET_AT:
            known = self._checkpoints.by_number
            self._closing = {each for each in self._closing if each[0] in known and known[each[0]].is_open(each[1])}
        self._closing.add((checkpoint.number, place))
        return True

    def give_up_claim(self, checkpoint: Checkpoint, place: int) -> None:
        """Release a claim: nothing was put after all."""
        self._closing.discard((checkpoint.number, place))

    def _opened(self, checkpoint: Checkpoint) -> None:
        self._queue.add(loop_ms() + checkpoint.invisible_ms, checkpoint.number)

    def _revive(self, number: int) -> None:
        """Redeliver what is open of a checkpoint. A message that cannot be read does not hold up the others; the first
        such error is raised at the end."""
        checkpoint = self._checkpoints.by_number.get(number)
        failure: Exception | None = None
        for place in range(len(checkpoint.offsets) if checkpoint is not None else 0):
            if checkpoint is not None and checkpoint.is_open(place) and self.claim(checkpoint, place):
                try:
                    self._put_again(checkpoint, place)
                except Exception as error:
                    self.give_up_claim(checkpoint, place)
                    if isinstance(error, (NotWritable, DLedgerError)):
                        raise  # the log accepts nothing for the moment
                    failure = failure or error
        if failure is not None:
            raise failure

    def _put_again(self, checkpoint: Checkpoint, place: int) -> None:
        key, offset = checkpoint.key, checkpoint.offsets[place]
        queue = self._store.queues.find(key.topic, key.queue_id)
        if queue is None or offset < queue.min_offset:  # it was removed with the oldest files of the log
            forget(self._store.put_one(self._revive_log.acknowledgement(key, (offset,))).committed)
            return
        units = queue.read(offset, 1)
        if not units:
            raise RecordError(f"number {offset} of {key.topic}/{key.queue_id} is not in its queue")
        message = read_message(self._log, self._store.queues, units[0].physical_offset)
        is_dead = message.reconsume_times >= self._retries.max_times(key.group)
        topic = dlq_topic(key.group) if is_dead else pop_retry_topic(key.group, key.topic)
        self._retries.make_soon(topic)
        properties = {name: value for name, value in message.properties.items() if name != DELAY_LEVEL}
        added = {RETRY_TOPIC: message.topic, FIRST_POP_TIME: str(key.pop_time_ms)}
        if len(join_properties(added | properties).encode()) <= MAX_PROPERTIES_SIZE_BYTES:
            properties = added | properties  # otherwise it has to be redelivered without them
        copy = copy_of(
            message,
            topic=topic,
            queue_id=0,
            properties=properties,
            store_host=self._store_host(),
            reconsume_times=message.reconsume_times + 1,
            prepared_transaction_offset=source_number(POP_SOURCE, checkpoint.number * PLACES + place),
        )
        forget(self._store.put_one(copy).committed)
        self.revived_total += 1
