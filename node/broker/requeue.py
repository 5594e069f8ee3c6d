"""New messages made from stored ones: delivered after a delay, sent back for another try, committed by a transaction.

A copy keeps what its sender gave (body, flags, keys, born host and time) and gets another place. What it came
from is written where clients cannot write: into the field for the prepared transaction's offset. A committed
message has the offset of its half message there (R). A delayed one that was delivered has a negative number there,
made of its level and its offset in the level's queue; RocketMQ leaves the field 0. So the log itself says what was
delivered, and neither a crash nor a change of masters delivers twice.
"""

from __future__ import annotations

from collections.abc import Mapping

from node.broker.internal_topics import DELAY_LEVELS_MS, SCHEDULE_TOPIC
from node.store.properties import (
    DELAY_LEVEL,
    REAL_QUEUE_ID,
    REAL_TOPIC,
    TIMER_PROPERTIES,
    decode_properties,
    join_properties,
)
from node.store.record import Message
from node.store.record_batch import RecordBatch, batch_of_one

__all__ = ["copy_of", "delay_level", "delay_source", "delay_text", "delayed_source_of"]

_LEVELS = 32
"""Levels that the source number has room for."""


def delay_source(level: int, queue_offset: int) -> int:
    """The number that says which delayed message a delivered one was."""
    return -(queue_offset * _LEVELS + level)


def delayed_source_of(number: int) -> tuple[int, int] | None:
    """Level and queue offset in such a number; None when it is none."""
    if number >= 0:
        return None
    offset, level = divmod(-number, _LEVELS)
    return (level, offset) if 1 <= level <= len(DELAY_LEVELS_MS) else None


def delay_level(text: str) -> int:
    """The level that a DELAY property asks for, 0 for none; too high a one means the highest (R).

    Raises ValueError when it is no number.
    """
    return max(0, min(int(text), len(DELAY_LEVELS_MS))) if text else 0


def _delayed_place(
    topic: str, queue_id: int, properties: Mapping[str, str], level: int
) -> tuple[str, int, dict[str, str]]:
    """Where a message waits for `level`, and its properties there, which say where it is to go; a level overrides a
    timer (R: checkIfTimerMessage)."""
    others = {name: value for name, value in properties.items() if name not in TIMER_PROPERTIES}
    waiting = {**others, DELAY_LEVEL: str(level), REAL_TOPIC: topic, REAL_QUEUE_ID: str(queue_id)}
    return SCHEDULE_TOPIC, level - 1, waiting


def copy_of(
    message: Message,
    *,
    topic: str,
    queue_id: int,
    properties: Mapping[str, str],
    store_host: str,
    sys_flag: int | None = None,
    reconsume_times: int | None = None,
    prepared_transaction_offset: int = 0,
) -> RecordBatch:
    """A copy of `message` for this place, ready to be put.

    When `properties` ask for a delay the copy goes to that level's queue first. Raises RecordError when the
    properties have grown too long.
    """
    try:
        level = delay_level(properties.get(DELAY_LEVEL, ""))
    except ValueError:
        level = 0
    if level > 0:
        topic, queue_id, properties = _delayed_place(topic, queue_id, properties, level)
    return batch_of_one(
        topic=topic,
        queue_id=queue_id,
        body=message.body,
        properties_text=join_properties(properties),
        sys_flag=message.sys_flag if sys_flag is None else sys_flag,
        flag=message.flag,
        born_timestamp_ms=message.born_timestamp_ms,
        born_host=message.born_host,
        store_host=store_host,
        reconsume_times=message.reconsume_times if reconsume_times is None else reconsume_times,
        prepared_transaction_offset=prepared_transaction_offset,
    )


def delay_text(properties_text: str, topic: str, queue_id: int, level: int) -> tuple[str, int, str]:
    """Topic, queue and properties of a message that a client sends with a delay, given where it is to go."""
    place, waiting_id, properties = _delayed_place(topic, queue_id, decode_properties(properties_text), level)
    return place, waiting_id, join_properties(properties)
