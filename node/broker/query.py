"""Finding messages: by key (12), by offset in the log (33), by time (29).

All of them pass the read gate like pulls. A search by key uses the index; messages whose key only has the
same hash are left out here, where RocketMQ leaves that to its client.
"""

from __future__ import annotations

from node.broker.append_errors import read_message, read_record
from node.broker.ledger import LedgerStore
from node.broker.reads import ReadGate
from node.remoting import Command, Connection, RequestError, ResponseCode
from node.store.consume_queue import ConsumeQueue
from node.store.index_file import MessageIndex, keys_of
from node.store.properties import join_properties
from node.store.queue_store import QueueStore
from node.store.record import RecordError

__all__ = ["QueryProcessor", "offset_by_time"]

MAX_RESULTS = 64
"""Messages in one answer (R: maxMsgsNumBatch)."""
UNIQUE_KEY_RESULTS = 32
"""The same for a search by unique key (R: defaultQueryMaxNum)."""
MAX_RESULT_BYTES = 8 << 20
"""Bytes in one answer, unless its first message alone is longer: half of the largest frame."""
MAX_TIMESTAMP_MS = (1 << 63) - 1


class QueryProcessor:
    """Answers searches."""

    def __init__(self, *, gate: ReadGate, log: LedgerStore, queues: QueueStore, index: MessageIndex) -> None:
        self._gate = gate
        self._log = log
        self._queues = queues
        self._index = index

    async def by_key(self, command: Command, connection: Connection) -> Command:
        """Code 12: messages of a topic with a key, stored between two times; QUERY_NOT_FOUND when there is none."""
        topic, key = command.get_str("topic"), command.get_str("key")
        most = min(max(command.get_int("maxNum", UNIQUE_KEY_RESULTS), 1), MAX_RESULTS)
        if command.get_bool("_UNIQUE_KEY_QUERY"):
            most = UNIQUE_KEY_RESULTS
        begin_ms, end_ms = command.get_int("beginTimestamp", 0), command.get_int("endTimestamp", MAX_TIMESTAMP_MS)
        await self._gate.enter()
        try:
            offsets = self._index.find(topic, key, begin_ms=begin_ms, end_ms=end_ms, most=most)
            records = self._records(offsets, topic, key, begin_ms, end_ms)
        except (OSError, RecordError) as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"the messages cannot be read: {error}") from error
        last_ms, last_offset = self._index.last_update
        return command.reply(
            ResponseCode.SUCCESS if records else ResponseCode.QUERY_NOT_FOUND,
            remark=None if records else "no message has this key, or it was stored at another time",
            fields={"indexLastUpdateTimestamp": last_ms, "indexLastUpdatePhyoffset": last_offset},
            body=b"".join(records),
        )

    def _records(self, offsets: list[int], topic: str, key: str, begin_ms: int, end_ms: int) -> list[bytes]:
        records: list[bytes] = []
        size_bytes = 0
        for offset in offsets:
            message, record = read_record(self._log, self._queues, offset)
            if message.topic != topic or key not in keys_of(join_properties(message.properties)):
                continue
            if not begin_ms <= message.store_timestamp_ms <= end_ms:
                continue
            size_bytes += len(record)
            if records and size_bytes > MAX_RESULT_BYTES:
                break
            records.append(record)
        return records

    async def by_id(self, command: Command, connection: Connection) -> Command:
        """Code 33: the record at a physical offset, which clients take from the message's id."""
        offset = command.get_int("offset")
        await self._gate.enter()
        try:
            if offset < 0 or offset >= self._log.committed_pos:
                raise OSError("it lies outside the log")
            _, record = read_record(self._log, self._queues, offset)
        except (OSError, RecordError) as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"no message lies at {offset}: {error}") from error
        return command.reply(ResponseCode.SUCCESS, body=record)

    async def by_time(self, command: Command, connection: Connection) -> Command:
        """Code 29: the first offset of a queue whose message was stored at `timestamp` or later; the queue's end
        if all are older."""
        topic, queue_id, timestamp_ms = (
            command.get_str("topic"), command.get_int("queueId"), command.get_int("timestamp")
        )  # fmt: skip
        await self._gate.enter()
        queue = self._queues.find(topic, queue_id)
        try:
            offset = offset_by_time(self._log, self._queues, queue, timestamp_ms) if queue is not None else 0
        except (OSError, RecordError) as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"the queue cannot be searched: {error}") from error
        return command.reply(ResponseCode.SUCCESS, fields={"offset": offset})


def offset_by_time(log: LedgerStore, queues: QueueStore, queue: ConsumeQueue, timestamp_ms: int) -> int:
    """The first offset whose message was stored at `timestamp_ms` or later; the queue's end if all are older.

    A binary search: store timestamps never go back along the log. Raises OSError,
    RecordError.
    """
    low, high = queue.min_offset, queue.max_offset
    while low < high:
        middle = (low + high) // 2
        (unit,) = queue.read(middle, 1)
        if read_message(log, queues, unit.physical_offset).store_timestamp_ms < timestamp_ms:
            low = middle + 1
        else:
            high = middle
    return low
