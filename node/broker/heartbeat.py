"""What clients report about themselves: the bodies of heartbeats (34) and lock requests (41, 42).

Clients in other languages encode the same things differently: enumerations by name or by number, booleans as text,
lists missing or null. All of that is read; a body that makes no sense is refused as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from node.broker.rebalance_locks import MessageQueue
from node.remoting import RequestError, ResponseCode

__all__ = ["ConsumerData", "Heartbeat", "LockRequest", "Subscription"]

MAX_GROUPS_PER_CLIENT = 1000
"""Groups in one heartbeat; ordinary clients have one to a dozen."""
MAX_SUBSCRIPTIONS = 1000
"""Topics that one group subscribes to."""
MAX_LOCK_QUEUES = 100_000
"""Queues in one lock request: more than one topic can have."""
MAX_NAME_CHARACTERS = 255
MAX_EXPRESSION_CHARACTERS = 8192
"""Length of a tag or SQL92 expression: as much as a pull may carry."""

MAX_CHOICE_DIGITS = 10
"""The number of an enumeration's member has fewer digits."""

CONSUME_TYPES = ("CONSUME_ACTIVELY", "CONSUME_PASSIVELY", "CONSUME_POP")
MESSAGE_MODELS = ("BROADCASTING", "CLUSTERING")
CONSUME_FROM = (
    "CONSUME_FROM_LAST_OFFSET",
    "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
    "CONSUME_FROM_MIN_OFFSET",
    "CONSUME_FROM_MAX_OFFSET",
    "CONSUME_FROM_FIRST_OFFSET",
    "CONSUME_FROM_TIMESTAMP",
)
_ALIASES = {"PULL": "CONSUME_ACTIVELY", "PUSH": "CONSUME_PASSIVELY"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """A group's subscription to one topic."""

    topic: str
    expression: str
    expression_type: str
    version: int
    """Grows with every change; clients use the time of the change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerData:
    """One consumer group of one client."""

    group: str
    consume_type: str
    message_model: str
    consume_from: str
    subscriptions: tuple[Subscription, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Everything that one client takes part in."""

    client_id: str
    producer_groups: tuple[str, ...]
    consumers: tuple[ConsumerData, ...]

    @classmethod
    def of(cls, body: bytes) -> Heartbeat:
        """Read the body of a heartbeat. Raises RequestError."""
        content = _document(body)
        producers = _list(content, "producerDataSet", MAX_GROUPS_PER_CLIENT)
        consumers = _list(content, "consumerDataSet", MAX_GROUPS_PER_CLIENT)
        return cls(
            client_id=_name(content, "clientID", "clientId"),
            producer_groups=tuple(_name(entry, "groupName") for entry in producers),
            consumers=tuple(map(_consumer, consumers)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRequest:
    """Queues that one client of a group wants for itself, or releases."""

    group: str
    client_id: str
    queues: tuple[MessageQueue, ...]

    @classmethod
    def of(cls, body: bytes) -> LockRequest:
        """Read the body of a lock or unlock request. Raises RequestError."""
        content = _document(body)
        queues = _list(content, "mqSet", MAX_LOCK_QUEUES)
        return cls(
            group=_name(content, "consumerGroup"),
            client_id=_name(content, "clientId", "clientID"),
            queues=tuple(
                MessageQueue(_name(queue, "topic"), _name(queue, "brokerName"), _number(queue, "queueId", 0))
                for queue in queues
            ),
        )


def _refuse(text: str) -> RequestError:
    return RequestError(ResponseCode.SYSTEM_ERROR, f"the body cannot be used: {text}")


def _document(body: bytes) -> dict[str, Any]:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _refuse(f"it is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise _refuse("it is no JSON object")
    return content


def _list(content: dict[str, Any], key: str, most: int) -> Sequence[dict[str, Any]]:
    value = content.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise _refuse(f"{key} is no list of objects")
    if len(value) > most:
        raise _refuse(f"{key} has {len(value)} entries, at most {most} are taken")
    return value


def _name(content: dict[str, Any], *keys: str) -> str:
    for key in keys:
        value = content.get(key)
        if value is not None:
            if not isinstance(value, str | int):
                raise _refuse(f"{key} is no name")
            text = str(value)
            if not 0 < len(text) <= MAX_NAME_CHARACTERS:
                raise _refuse(f"{key} has {len(text)} characters, allowed are 1 to {MAX_NAME_CHARACTERS}")
            return text
    raise _refuse(f"{keys[0]} is missing")


def _number(content: dict[str, Any], key: str, default: int) -> int:
    value = content.get(key)
    if value is None or value == "":
        return default
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _refuse(f"{key} is no number") from error
    if not -1 << 63 <= number < 1 << 63:
        raise _refuse(f"{key} is no number of 64 bits")
    return number


def _choice(content: dict[str, Any], key: str, names: Sequence[str], default: str) -> str:
    """A member of an enumeration, given by its name in any case or by its number."""
    value = content.get(key)
    if value is None or value == "":
        return default
    text = str(value).strip().upper()
    if text.isascii() and text.isdigit():
        if len(text) < MAX_CHOICE_DIGITS and int(text) < len(names):
            return names[int(text)]
    else:
        text = _ALIASES.get(text, text)
        if text in names:
            return text
    raise _refuse(f"{key} is {str(value)[:40]!r}, known are {', '.join(names)}")


def _expression(content: dict[str, Any]) -> str:
    text = str(content.get("subString") or "*")
    if len(text) > MAX_EXPRESSION_CHARACTERS:
        raise _refuse(f"subString has {len(text)} characters, allowed are {MAX_EXPRESSION_CHARACTERS}")
    return text


def _consumer(content: dict[str, Any]) -> ConsumerData:
    return ConsumerData(
        group=_name(content, "groupName"),
        consume_type=_choice(content, "consumeType", CONSUME_TYPES, "CONSUME_PASSIVELY"),
        message_model=_choice(content, "messageModel", MESSAGE_MODELS, "CLUSTERING"),
        consume_from=_choice(content, "consumeFromWhere", CONSUME_FROM, "CONSUME_FROM_LAST_OFFSET"),
        subscriptions=tuple(
            Subscription(
                topic=_name(entry, "topic"),
                expression=_expression(entry),
                expression_type=str(entry.get("expressionType") or "TAG").upper(),
                version=_number(entry, "subVersion", 0),
            )
            for entry in _list(content, "subscriptionDataSet", MAX_SUBSCRIPTIONS)
        ),
    )
