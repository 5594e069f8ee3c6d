"""JSON as R's tools write and read it: fastjson's dialect, in which the key of an object may itself be an object.

{"offsetTable":{{"brokerName":"a","queueId":0,"topic":"t"}:{"maxOffset":7}}} is what RocketMQ calls a table by message
queue. That is not JSON, yet brokers and clients send it to each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

__all__ = ["Place", "parse_queue_table", "queue_row", "queue_table", "to_json"]

MAX_TABLE_CHARACTERS = 4 << 20
"""Limit of a table that a client sends: one entry for each of its queues."""


class Place(NamedTuple):
    """A queue of a topic on a broker."""

    topic: str
    broker_name: str
    queue_id: int

    def document(self) -> dict[str, Any]:
        """As an object (R: MessageQueue)."""
        return {"brokerName": self.broker_name, "queueId": self.queue_id, "topic": self.topic}


def to_json(value: object) -> str:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":"))


def queue_row(place: Place, value: object) -> str:
    """A queue's entry in a table by queue; `value` is encoded as JSON."""
    return f"{to_json(place.document())}:{to_json(value)}"


def queue_table(rows: Iterable[str]) -> str:
    """A table by queue, of such entries."""
    return f"{{{','.join(rows)}}}"


def parse_queue_table(body: bytes, name: str) -> list[tuple[Place, Any]]:
    """The table by queue that is member `name` of an object whose other members are all JSON.

    Raises ValueError if there is none, or it cannot be read.
    """
    text = body.decode()
    if len(text) > MAX_TABLE_CHARACTERS:
        raise ValueError(f"{len(text)} characters")
    at = text.find(f'"{name}":{{')
    if at < 0:
        raise ValueError(f"there is no {name}")
    at += len(name) + 4
    decoder = json.JSONDecoder()
    rows: list[tuple[Place, Any]] = []
    while text[at : at + 1] == "{":
        key, at = decoder.raw_decode(text, at)
        if text[at : at + 1] != ":":
            raise ValueError(f"no value for {key}")
        value, at = decoder.raw_decode(text, at + 1)
        rows.append((_place(key), value))
        at += text[at : at + 1] == ","
    if text[at : at + 1] != "}":
        raise ValueError(f"{name} is cut short at {text[at : at + 20]!r}")
    return rows


def _place(key: Mapping[str, Any]) -> Place:
    try:
        return Place(str(key["topic"]), str(key["brokerName"]), int(key["queueId"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{key} is no queue") from error
