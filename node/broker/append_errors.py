"""Helpers of processors that put messages: replies to refused puts, waiting for the append, and checked reads."""

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
"""Errors of making a record and putting it after which nothing was stored."""

_SIZE_BYTES = 4


def refusal(error: Exception, not_leader_remark: str) -> RequestError:
    """The reply to a put that was refused with one of PUT_REFUSALS."""
    if isinstance(error, RecordError):
        return RequestError(ResponseCode.MESSAGE_ILLEGAL, error.reason)
    if isinstance(error, NotWritable):
        return RequestError(ResponseCode.SERVICE_NOT_AVAILABLE, not_leader_remark)
    return RequestError(ResponseCode.SYSTEM_BUSY, f"nothing was stored: {error}")


async def all_stored(committed: Sequence[asyncio.Future[None]]) -> None:
    """`stored` for several puts; when one of them failed, the outcome of the others does not matter."""
    for each in committed:
        forget(each)
    for each in committed:
        await stored(each)


async def stored(committed: asyncio.Future[None]) -> None:
    """Return when a message that was put is stored, even if less safely than it should be: that is a success (S1).

    Raises RequestError (SYSTEM_ERROR) if the outcome is unknown.
    """
    try:
        await committed
    except StoredInPart:
        pass
    except DLedgerError as error:
        raise RequestError(ResponseCode.SYSTEM_ERROR, f"the outcome is unknown: {error}") from error


def forget(committed: asyncio.Future[None]) -> None:
    """Do not wait for this put: retrieve its error once it is done, so that asyncio does not complain. What was
    appended stays in the log while this node leads, so there is nothing to repeat."""
    committed.add_done_callback(_retrieve_error)


def _retrieve_error(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()


def check_crc(record: bytes, crc: int | None, physical_offset: int) -> None:
    """Raise RecordError if a record is not, bit for bit, the one that was dispatched. The record's own CRC covers only
    its body; `crc`, which its queue keeps, covers all of it."""
    if crc is not None and zlib.crc32(record) != crc:
        raise RecordError(f"the record at {physical_offset} of the log is damaged: its CRC is not that of its queue")


def read_records(
    log: LedgerStore, units: Sequence[Unit], crcs: Sequence[int | None], most_bytes: int
) -> list[bytes] | None:
    """The records of `units`, at least one and no more than `most_bytes` of them; None if one of them cannot be read or
    is not the one that was dispatched: reading them one by one then tells which."""
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

    It is checked against its unit in its queue. Raises OSError; RecordError if there is none or it is another.
    """
    size_bytes = int.from_bytes(log.read_bytes(physical_offset, _SIZE_BYTES), "big")
    record = log.read_bytes(physical_offset, size_bytes)
    message, _ = decode_record(record)
    queue = queues.find(message.topic, message.queue_id)
    units = queue.read(message.queue_offset, 1) if queue is not None else []
    if queue is None or not units or units[0].physical_offset != physical_offset:
        raise RecordError(f"the record at {physical_offset} of the log is not the one in its queue")
    check_crc(record, queue.read_crcs(message.queue_offset, 1)[0], physical_offset)
    return message, record


def read_message(log: LedgerStore, queues: QueueStore, physical_offset: int) -> Message:
    """The message of `read_record`, without the record."""
    return read_record(log, queues, physical_offset)[0]


def stored_at(log: LedgerStore, queues: QueueStore, queue: ConsumeQueue | None, offset: int) -> int | None:
    """When the message at `offset` of a queue was stored, in ms of the epoch; None if none is there and readable."""
    try:
        for unit in queue.read(offset, 1) if queue is not None else ():
            return read_message(log, queues, unit.physical_offset).store_timestamp_ms
    except (OSError, RecordError) as error:
        logger.warning("a message that a tool asks about cannot be read: %s", error)
    return None
