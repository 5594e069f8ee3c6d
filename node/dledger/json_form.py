"""DLedger's own format of the messages: a JSON object, for DLedger's request codes (R).

Members use the binary format among themselves (`messages.py`), which costs a fraction. This one is for everybody else:
field names are DLedger's, and entries are concatenated as on disk and encoded in base64. It is trusted as little: input
that is not exactly what it should be raises MalformedMessage, and nothing else.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import enum
import json
from typing import Any, Final, TypeVar

from node.dledger.messages import MAX_ID_CHARACTERS, MalformedMessage, Message
from node.dledger.rpc import DLedgerCode, PushType, VoteResult

__all__ = ["from_json", "to_json"]

MessageT = TypeVar("MessageT", bound=Message)

_MAX_NUMBER: Final = (1 << 63) - 1
_NAMED: Final = (PushType, VoteResult)
"""Enums that travel by name; codes travel as numbers."""

_KINDS: Final[dict[str, type]] = {
    "str": str, "int": int, "bytes": bytes,
    "DLedgerCode": DLedgerCode, "PushType": PushType, "VoteResult": VoteResult,
}  # fmt: skip


def to_json(message: Message) -> bytes:
    """The JSON text of a message."""
    content: dict[str, Any] = {}
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        if isinstance(value, _NAMED):
            value = value.name
        elif isinstance(value, enum.IntEnum):
            value = int(value)
        elif isinstance(value, bytes):
            value = base64.b64encode(value).decode("ascii")
        content[_key(field.name)] = value
    return json.dumps(content, separators=(",", ":")).encode("ascii")


def from_json(kind: type[MessageT], body: bytes) -> MessageT:
    """The message in a JSON text; unknown fields are ignored. Raises MalformedMessage."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"no JSON: {str(error)[:80]}") from None
    if not isinstance(content, dict):
        raise MalformedMessage("no JSON object")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        key = _key(field.name)
        value = content.get(key)
        if value is not None:
            values[field.name] = _checked(key, _KINDS[str(field.type)], value)
        elif field.default is dataclasses.MISSING:
            raise MalformedMessage(f"the field {key} is missing")
    return kind(**values)


def _key(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.title() for word in others)


def _checked(key: str, kind: type, value: Any) -> Any:
    if kind is int:
        if value.__class__ is not int or not -1 <= value <= _MAX_NUMBER:
            raise MalformedMessage(f"the field {key} is no number from -1 on")
        return value
    if kind is str:
        if value.__class__ is not str or len(value) > MAX_ID_CHARACTERS or not value.isprintable():
            raise MalformedMessage(f"the field {key} is no name")
        return value
    if kind is bytes:
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError, TypeError):
            raise MalformedMessage(f"the field {key} is no base64") from None
    try:
        if issubclass(kind, _NAMED):
            return kind[value]
        if value.__class__ is int and issubclass(kind, DLedgerCode):
            return kind(value)
    except (KeyError, ValueError, TypeError):
        pass
    raise MalformedMessage(f"the field {key} has an unknown value")
