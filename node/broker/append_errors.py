"""What processors that put messages have in common: what a refusal is called, and what may come after the append."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Sequence

from node.broker.ledger import DLedgerError, LedgerStore, StoredInPart
from node.broker.message_store import NotWritable
from node.remoting import RequestError, ResponseCode
from node.store.consume_queue import ConsumeQueue, Unit
from node.store.queue_store import QueueStore
from node.store.record import Message, RecordError, decode_record

__all__ = [
    "PUT_REFUSALS",
    "all_stored",
    "check_crc",
    "forget",
    "read_message",
    "read_record",
    "read_records",
    "refusal",
    "stored",
    "stored_at",
]

logger = logging.getLogger("node.broker")

PUT_REFUSALS = (RecordError, NotWritable, DLedgerError)
"""What making a record and putting it may raise; nothing was stored then."""

_SIZE_BYTES = 4


def refusal(error: Exception, not_leader_remark: str) -> RequestError:
    """The answer to whoever wanted something put that was refused with one of PUT_REFUSALS."""
    if isinstance(error, RecordError):
        return RequestError(ResponseCode.MESSAGE_ILLEGAL, error.reason)
    if isinstance(error, NotWritable):
        return RequestError(ResponseCode.SERVICE_NOT_AVAILABLE, not_leader_remark)
    return RequestError(ResponseCode.SYSTEM_BUSY, f"nothing was stored: {error}")


async def all_stored(committed: Sequence[asyncio.Future[None]]) -> None:
    """As `stored`, for several puts; what became of the others when one of them failed is nobody's business."""
    for each in committed:
        forget(each)
    for each in committed:
        await stored(each)


async def stored(committed: asyncio.Future[None]) -> None:
    """Return when a message that was put is stored, if not as safely as it should be: that counts as success (S1).

    Raises RequestError (SYSTEM_ERROR) when nobody knows.
    """
    try:
        await committed
    except StoredInPart:
        pass
    except DLedgerError as error:
        raise RequestError(ResponseCode.SYSTEM_ERROR, f"the outcome is unknown: {error}") from error


def forget(committed: asyncio.Future[None]) -> None:
    """Nobody waits for this put: look at its failure once it is done, so that asyncio does not complain. What was
    appended stays in the log while this node leads, so there is nothing to repeat."""
    committed.add_done_callback(_look)


def _look(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()


def check_crc(record: bytes, crc: int | None, physical_offset: int) -> None:
    """Raise RecordError where a record is not, bit for bit, the one that was dispatched. Its own CRC is of its body
    alone; this one, which its queue keeps, is of all of it."""
    if crc is not None and zlib.crc32(record) != crc:
        raise RecordError(f"the record at {physical_offset} of the log is damaged: its CRC is not that of its queue")


def read_records(
    log: LedgerStore, units: Sequence[Unit], crcs: Sequence[int | None], most_bytes: int
) -> list[bytes] | None:
    """The records behind `units`, at least one and no more than `most_bytes` of them; None where one of them cannot be
    read or is not the one that was dispatched: whoever then looks at each finds out which."""
    size_bytes, count = units[0].size_bytes, 1
    for unit in units[1:]:
        size_bytes += unit.size_bytes
        if size_bytes > most_bytes:
            break
        count += 1
    places = [(position, size) for position, size, _ in units[:count]]
    try:
        records = log.read_records(places)
    except OSError:
        return None
    return records if list(map(zlib.crc32, records)) == list(crcs[:count]) else None


def read_record(log: LedgerStore, queues: QueueStore, physical_offset: int) -> tuple[Message, bytes]:
    """The message whose record begins at `physical_offset`, and the record.

    It is held against its unit in its queue. Raises OSError, RecordError when there is none or it is another.
    """
    size_bytes = int.from_bytes(log.read_bytes(physical_offset, _SIZE_BYTES), "big")
    record = log.read_bytes(physical_offset, size_bytes)
    message, _ = decode_record(record)
    queue = queues.find(message.topic, message.queue_id)
    units = queue.read(message.queue_offset, 1) if queue is not None else []
    if queue is None or not units or units[0].physical_offset != physical_offset:
        raise RecordError(f"the record at {physical_offset} of the log is not one that its queue means")
    check_crc(record, queue.read_crcs(message.queue_offset, 1)[0], physical_offset)
    return message, record


def read_message(log: LedgerStore, queues: QueueStore, physical_offset: int) -> Message:
    """The same without the record."""
    return read_record(log, queues, physical_offset)[0]


def stored_at(log: LedgerStore, queues: QueueStore, queue: ConsumeQueue | None, offset: int) -> int | None:
    """When the message at `offset` of a queue was stored, in ms of the epoch; None where none is that can be read."""
    try:
        for unit in queue.read(offset, 1) if queue is not None else ():
            return read_message(log, queues, unit.physical_offset).store_timestamp_ms
    except (OSError, RecordError) as error:
        logger.warning("a message that a tool asks about cannot be read: %s", error)
    return None
