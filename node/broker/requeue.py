"""New messages made from stored ones: delivered after a delay, sent back for another try, committed by a transaction.

A copy keeps what its sender gave (body, flags, keys, born host and time) and gets another topic and queue. Its source
is written where clients cannot write: into the field for the prepared transaction's offset. A committed
message has the offset of its half message there (R). A delayed message that was delivered has a negative number there,
made of its level and its offset in the level's queue; RocketMQ leaves the field 0. So the log itself tells what was
delivered, and neither a crash nor a change of masters delivers twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from node.broker.internal_topics import DELAY_LEVELS_MS, SCHEDULE_TOPIC, TIMER_TOPIC
from node.store.properties import (
    DELAY_LEVEL,
    PROPERTY_SEPARATOR,
    REAL_QUEUE_ID,
    REAL_TOPIC,
    TIMER_DELAY_MS,
    TIMER_DELAY_S,
    TIMER_DELIVER_MS,
    TIMER_DELIVERED,
    TIMER_PROPERTIES,
    TIMER_TAKE_BACK,
    decode_properties,
    join_properties,
    whole_number,
)
from node.store.record import MAX_PROPERTIES_SIZE_BYTES, Message, RecordError
from node.store.record_batch import RecordBatch, batch_of_one

__all__ = [
    "MAX_TIMER_DELAY_MS",
    "POP_SOURCE",
    "TIMER_SOURCE",
    "IllegalTimer",
    "copy_of",
    "delay_level",
    "delay_source",
    "delay_text",
    "delayed_source_of",
    "real_place",
    "source_number",
    "source_of",
    "timer_due_ms",
    "timer_place",
]

MAX_TIMER_DELAY_MS = 3 * 24 * 3_600_000
"""R: timerMaxDelaySec."""
_KINDS = 32
"""Number of kinds that a source number has room for."""
POP_SOURCE = 30
"""The kind of a message that a POP consumer did not acknowledge in time."""
TIMER_SOURCE = 31
"""The kind of a timer message; a delay level is its own kind."""
_LONG_DIGITS = 19
"""Digits of a time that a client may give: more do not fit into a Java long."""


class IllegalTimer(ValueError):
    """A timer message that cannot be accepted."""

    def __init__(self) -> None:
        super().__init__(
            "timer message illegal, the delay time should not be bigger than the max delay"
            f" {MAX_TIMER_DELAY_MS}ms; or if set del msg, the delay time should be bigger than the current time"
        )


def source_number(kind: int, number: int) -> int:
    """The number that identifies the source of a message: the message `number` among those of `kind`."""
    return -(number * _KINDS + kind)


def source_of(number: int) -> tuple[int, int]:
    """Kind and number in a source number, which is negative."""
    source, kind = divmod(-number, _KINDS)
    return kind, source


def delay_source(level: int, queue_offset: int) -> int:
    """The source number of a delivered delayed message."""
    return source_number(level, queue_offset)


def delayed_source_of(number: int) -> tuple[int, int] | None:
    """Level and queue offset in the source number of a delayed message; None if it is no such number."""
    if number >= 0:
        return None
    level, offset = source_of(number)
    return (level, offset) if 1 <= level <= len(DELAY_LEVELS_MS) else None


def real_place(message: Message) -> tuple[str, int]:
    """Topic and queue for which a message that waits elsewhere is meant. Raises RecordError if it names none."""
    topic, queue_id = message.properties.get(REAL_TOPIC), whole_number(message.properties.get(REAL_QUEUE_ID))
    if not topic or queue_id is None:
        raise RecordError("the message names no place to go to")
    return topic, queue_id


def delay_level(text: str) -> int:
    """The level that a DELAY property asks for, 0 for none; above the highest level it is the highest (R).

    Raises ValueError if it is not a number.
    """
    return max(0, min(int(text), len(DELAY_LEVELS_MS))) if text else 0


def _delayed_place(
    topic: str, queue_id: int, properties: Mapping[str, str], level: int
) -> tuple[str, int, dict[str, str]]:
    """Where a message waits for `level`, and its properties there, which name its destination; a level overrides a
    timer (R: checkIfTimerMessage)."""
    others = {name: value for name, value in properties.items() if name not in TIMER_PROPERTIES}
    waiting = {**others, DELAY_LEVEL: str(level), REAL_TOPIC: topic, REAL_QUEUE_ID: str(queue_id)}
    return SCHEDULE_TOPIC, level - 1, waiting


def timer_due_ms(properties: Mapping[str, str], now_ms: int) -> int | None:
    """When a message asks to be delivered, in ms of the epoch; None: at once, also if the time is over (R: HookUtils).

    Raises IllegalTimer if the time is no number or too far away, and for a message that cancels another one."""
    if TIMER_DELIVERED in properties:
        return None
    for name, begin_ms, unit_ms in (
        (TIMER_DELAY_S, now_ms, 1000), (TIMER_DELAY_MS, now_ms, 1), (TIMER_DELIVER_MS, 0, 1)
    ):  # fmt: skip
        text = properties.get(name)
        if text is not None:
            if not text.removeprefix("-").isdecimal() or len(text) > _LONG_DIGITS or TIMER_TAKE_BACK in properties:
                raise IllegalTimer
            due_ms = begin_ms + int(text) * unit_ms
            if due_ms - now_ms > MAX_TIMER_DELAY_MS:
                raise IllegalTimer
            return due_ms if due_ms > now_ms else None
    return None


def timer_place(
    properties: Mapping[str, str], topic: str, queue_id: int, due_ms: int
) -> tuple[str, int, dict[str, str]]:
    """Where a timer message waits, and its properties there, given its destination."""
    waiting = {**properties, TIMER_DELIVERED: str(due_ms), REAL_TOPIC: topic, REAL_QUEUE_ID: str(queue_id)}
    return TIMER_TOPIC, 0, waiting


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
    now_ms: int | None = None,
) -> RecordBatch:
    """A copy of `message` for this topic and queue, ready to be put.

    If `properties` ask for a delay, the copy goes to that level's queue first; with `now_ms`, it goes to the timer
    queue first if they ask for a time. Raises RecordError if the properties have grown too long.
    """
    try:
        level = delay_level(properties.get(DELAY_LEVEL, ""))
    except ValueError:
        level = 0
    if level > 0:
        topic, queue_id, properties = _delayed_place(topic, queue_id, properties, level)
    elif now_ms is not None:
        with suppress(IllegalTimer):  # such a timer is refused when it is sent
            due_ms = timer_due_ms(properties, now_ms)
            if due_ms is not None:
                topic, queue_id, properties = timer_place(properties, topic, queue_id, due_ms)
    text = join_properties(properties)
    if len(text.encode()) > MAX_PROPERTIES_SIZE_BYTES:
        text = text.removesuffix(PROPERTY_SEPARATOR)  # the sender of the message may have left it out
    return batch_of_one(
        topic=topic,
        queue_id=queue_id,
        body=message.body,
        properties_text=text,
        sys_flag=message.sys_flag if sys_flag is None else sys_flag,
        flag=message.flag,
        born_timestamp_ms=message.born_timestamp_ms,
        born_host=message.born_host,
        store_host=store_host,
        reconsume_times=message.reconsume_times if reconsume_times is None else reconsume_times,
        prepared_transaction_offset=prepared_transaction_offset,
    )


def delay_text(properties_text: str, topic: str, queue_id: int, level: int) -> tuple[str, int, str]:
    """Topic, queue and properties of a message that a client sends with a delay, given its destination."""
    place, waiting_id, properties = _delayed_place(topic, queue_id, decode_properties(properties_text), level)
    return place, waiting_id, join_properties(properties)
