"""What members say to each other: requests and answers as JSON objects, checked field by field when they arrive.

Names on the wire are DLedger's (R). Entries travel as they lie on the disk, one behind the other, in base64.
Nothing that comes from the network is trusted to be of the right type, sign or size: a message that is not exactly
what it should be raises MalformedMessage, and nothing else.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import enum
import json
from dataclasses import dataclass, field
from typing import Any, Self, cast

from node.dledger.rpc import DLedgerCode, PushType, VoteResult

__all__ = [
    "AppendEntryRequest",
    "AppendEntryResponse",
    "GetEntriesRequest",
    "GetEntriesResponse",
    "HeartBeatRequest",
    "HeartBeatResponse",
    "MalformedMessage",
    "Message",
    "MetadataRequest",
    "MetadataResponse",
    "PushEntryRequest",
    "PushEntryResponse",
    "Request",
    "Response",
    "VoteRequest",
    "VoteResponse",
]

MAX_ID_CHARACTERS = 128
"""Of a group's or member's name."""

_MAX_NUMBER = (1 << 63) - 1


class MalformedMessage(Exception):
    """The bytes are no message of the expected kind; the text names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all messages. Every field is an integer from -1 on, a name, bytes, or an enum."""

    group: str
    remote_id: str
    """The member that the message is for."""
    local_id: str
    """The member that it comes from."""
    term: int = -1
    leader_id: str = ""

    def to_body(self) -> bytes:
        """The JSON text."""
        content: dict[str, Any] = {}
        for name, key, _, _ in _spec(type(self)):
            value = getattr(self, name)
            if isinstance(value, enum.Enum):
                value = value.value
            elif isinstance(value, bytes):
                value = base64.b64encode(value).decode("ascii")
            content[key] = value
        return json.dumps(content, separators=(",", ":")).encode("ascii")

    @classmethod
    def from_body(cls, body: bytes) -> Self:
        """The message in a JSON text. Raises MalformedMessage."""
        try:
            content = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise MalformedMessage(f"no JSON: {str(error)[:80]}") from None
        if not isinstance(content, dict):
            raise MalformedMessage("no JSON object")
        values: dict[str, Any] = {}
        for name, key, kind, required in _spec(cls):
            value = content.get(key)
            if value is None:
                if required:
                    raise MalformedMessage(f"the field {key} is missing")
                continue
            values[name] = _checked(key, kind, value)
        return cls(**values)


_Spec = tuple[tuple[str, str, type, bool], ...]
_specs: dict[type[Message], _Spec] = {}


def _spec(message: type[Message]) -> _Spec:
    """(attribute, JSON key, type, required) of each field of a message class."""
    spec = _specs.get(message)
    if spec is None:
        spec = _specs[message] = _make_spec(message)
    return spec


def _make_spec(message: type[Message]) -> _Spec:
    kinds = cast(
        dict[str, type],
        {"str": str, "int": int, "bytes": bytes, "DLedgerCode": DLedgerCode, "PushType": PushType,
         "VoteResult": VoteResult},
    )  # fmt: skip
    found = []
    for each in dataclasses.fields(message):
        first, *others = each.name.split("_")
        key = each.metadata.get("key", first + "".join(word.title() for word in others))
        found.append((each.name, key, kinds[str(each.type)], each.default is dataclasses.MISSING))
    return tuple(found)


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
    if value.__class__ is bool:
        raise MalformedMessage(f"the field {key} is unknown")
    try:
        return kind(value)
    except (ValueError, TypeError):
        raise MalformedMessage(f"the field {key} has an unknown value") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Message):
    """Base of all requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response(Message):
    """Base of all answers. `term` is the answering member's, `leader_id` the leader that it knows."""

    code: DLedgerCode = DLedgerCode.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteRequest(Request):
    """`leader_id` would like to lead `term`; this is how far its log goes."""

    term: int
    leader_id: str
    ledger_end_index: int
    ledger_end_term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteResponse(Response):
    vote_result: VoteResult = VoteResult.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartBeatRequest(Request):
    """`leader_id` leads `term`."""

    term: int
    leader_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartBeatResponse(Response):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class PushEntryRequest(Request):
    """A leader's request to its follower.

    APPEND carries a row of entries and the term of the entry before them, COMPARE and TRUNCATE one entry; COMMIT none.
    TRUNCATE also says, by term and chain CRC, which entry follows at the leader (-1 when none does).
    """

    term: int
    leader_id: str
    type: PushType
    commit_index: int
    entries: bytes = b""
    previous_term: int = field(default=-1, metadata={"key": "preLogTerm"})
    next_term: int = -1
    next_chain_crc: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PushEntryResponse(Response):
    """`index` is the last entry that the answer is about; the other two are the ends of the follower's log."""

    index: int = -1
    begin_index: int = -1
    end_index: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataRequest(Request):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataResponse(Response):
    """What a member knows of itself and its group."""

    role: str = ""
    ledger_begin_index: int = -1
    ledger_end_index: int = -1
    committed_index: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class GetEntriesRequest(Request):
    """Asks for committed entries from `begin_index` on."""

    begin_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GetEntriesResponse(Response):
    entries: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendEntryRequest(Request):
    """Asks the leader to append one entry with this body."""

    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendEntryResponse(Response):
    index: int = -1
    pos: int = -1
