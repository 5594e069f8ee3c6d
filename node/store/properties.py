"""Message properties, as RocketMQ writes them into a record: `key \\x01 value \\x02`, repeated.

Java clients write a separator after every pair; some others leave the last one out, and some stores carry
an extra one at the end. All of these decode alike. A name without a separator is dropped, as in Java.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "CHECK_IMMUNITY_S",
    "CLUSTER",
    "DELAY_LEVEL",
    "FIRST_POP_TIME",
    "KEYS",
    "NAME_VALUE_SEPARATOR",
    "ORIGIN_MESSAGE_ID",
    "PRODUCER_GROUP",
    "PROPERTY_SEPARATOR",
    "PUSH_REPLY_TIME",
    "REAL_QUEUE_ID",
    "REAL_TOPIC",
    "REPLY_TO_CLIENT",
    "RETRY_TOPIC",
    "TAGS",
    "TIMER_DELAY_MS",
    "TIMER_DELAY_S",
    "TIMER_DELIVERED",
    "TIMER_DELIVER_MS",
    "TIMER_PROPERTIES",
    "TIMER_TAKE_BACK",
    "TRANSACTION_PREPARED",
    "UNIQUE_KEY",
    "WAIT_STORE",
    "PropertyError",
    "decode_properties",
    "encode_properties",
    "join_properties",
    "property_value",
    "whole_number",
]

_LONG_DIGITS = 19
"""Of a Java long; a property may hold numbers of thousands of digits, which Python refuses to read."""

NAME_VALUE_SEPARATOR = "\x01"
PROPERTY_SEPARATOR = "\x02"

TAGS = "TAGS"
KEYS = "KEYS"
UNIQUE_KEY = "UNIQ_KEY"
WAIT_STORE = "WAIT"
DELAY_LEVEL = "DELAY"
TIMER_DELAY_MS = "TIMER_DELAY_MS"
TIMER_DELAY_S = "TIMER_DELAY_SEC"
TIMER_DELIVER_MS = "TIMER_DELIVER_MS"
TIMER_PROPERTIES = (TIMER_DELAY_MS, TIMER_DELAY_S, TIMER_DELIVER_MS)
"""Any of these makes a timer message of RocketMQ 5: deliver after so many ms or s, or at this ms of the epoch."""
TIMER_TAKE_BACK = "TIMER_DEL_UNIQKEY"
"""Makes it a message that cancels another timer message."""
TIMER_DELIVERED = "TIMER_OUT_MS"
"""When a timer message was to be delivered, in ms of the epoch: a message that has it must not wait again."""
REAL_TOPIC = "REAL_TOPIC"
REAL_QUEUE_ID = "REAL_QID"
RETRY_TOPIC = "RETRY_TOPIC"
FIRST_POP_TIME = "1ST_POP_TIME"
"""When a POP consumer first got a message that was redelivered, in ms of the epoch."""
ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
TRANSACTION_PREPARED = "TRAN_MSG"
PRODUCER_GROUP = "PGROUP"
CLUSTER = "CLUSTER"
"""The cluster to which the reply to a message has to go."""
REPLY_TO_CLIENT = "REPLY_TO_CLIENT"
"""The id of the client that sent a request and waits for the reply."""
PUSH_REPLY_TIME = "PUSH_REPLY_TIME"
"""When the broker passed a reply on, in ms of the epoch."""
CHECK_IMMUNITY_S = "CHECK_IMMUNITY_TIME_IN_SECONDS"


class PropertyError(ValueError):
    """A property cannot be written because its name or value contains a separator, or its name is empty."""


def encode_properties(properties: Mapping[str, str]) -> str:
    """The property string of a message, in the mapping's order; "" for none.

    Raises PropertyError for an empty name and for a name or value with \\x01 or \\x02 in it, which
    would read back as something else.
    """
    parts: list[str] = []
    for name, value in properties.items():
        if not name:
            raise PropertyError("a property name is empty")
        for text in (name, value):
            if NAME_VALUE_SEPARATOR in text or PROPERTY_SEPARATOR in text:
                raise PropertyError(f"property {name!r} contains a separator (\\x01 or \\x02)")
        parts.append(f"{name}{NAME_VALUE_SEPARATOR}{value}{PROPERTY_SEPARATOR}")
    return "".join(parts)


def join_properties(properties: Mapping[str, str]) -> str:
    """Like `encode_properties`, for properties that a store holds already: whatever a client managed to put into a
    value is written again as it is, because a message must not be lost over it."""
    return "".join(f"{name}{NAME_VALUE_SEPARATOR}{value}{PROPERTY_SEPARATOR}" for name, value in properties.items())


def decode_properties(text: str) -> dict[str, str]:
    """The properties in `text`; a name that occurs twice keeps its last value."""
    properties: dict[str, str] = {}
    for pair in text.split(PROPERTY_SEPARATOR):
        name, separator, value = pair.partition(NAME_VALUE_SEPARATOR)
        if separator and name:
            properties[name] = value
    return properties


def property_value(text: str, name: str) -> str | None:
    """The value of one property without decoding the others; None when it is absent.

    Agrees with `decode_properties(text).get(name)`: if a name occurs twice, the last one counts.
    """
    needle = f"{name}{NAME_VALUE_SEPARATOR}"
    if needle not in text:
        return None
    value = None
    for pair in text.split(PROPERTY_SEPARATOR):
        if pair.startswith(needle):
            value = pair[len(needle) :]
    return value


def whole_number(text: str | None) -> int | None:
    """A property's value as a number; None if it is not decimal, or has more digits than a Java long."""
    return int(text) if text is not None and text.isdecimal() and len(text) <= _LONG_DIGITS else None
