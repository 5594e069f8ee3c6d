"""The messages between members: requests and answers in a binary format, checked field by field when they arrive.

    1 byte    version of the format: 1
    2 bytes   length of the names that follow
    names     group, remote_id, local_id, leader_id: each 2 bytes of length and UTF-8
    numbers   8 bytes each, signed: term and the message's other numbers and enums, in the order of its fields
    content   the message's other texts and bytes, in order: each 4 bytes of length and the data

All big-endian; nothing follows. Entries are concatenated, encoded as on disk. DLedger's members send JSON (R), in which
entries need base64; only members read this format, and each operation costs a dozen messages.

Nothing that comes from the network is trusted to be of the right type, sign or size: a message that is not exactly
what it should be raises MalformedMessage, and nothing else.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import Any, ClassVar, Final, Self

from node.dledger.rpc import DLedgerCode, PushType, VoteResult

__all__ = [
    "AppendEntryRequest",
    "AppendEntryResponse",
    "ChangeMembersRequest",
    "ChangeMembersResponse",
    "GetEntriesRequest",
    "GetEntriesResponse",
    "HeartBeatRequest",
    "HeartBeatResponse",
    "InstallSnapshotRequest",
    "InstallSnapshotResponse",
    "LeadershipTransferRequest",
    "LeadershipTransferResponse",
    "MalformedMessage",
    "MembersRequest",
    "MembersResponse",
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

VERSION: Final = 1

MAX_ID_CHARACTERS = 128
"""Limit on a group's or member's name."""

MAX_CACHED_MESSAGES = 256
"""Decoded messages cached for each class that `repeats`: while one leader leads, there is one for each peer."""

MAX_CACHED_NAMES = 1024
"""Blocks of names that are cached decoded, and as many encoded: each pair of members uses two."""

_NAMES: Final = ("group", "remote_id", "local_id", "leader_id")
_HEAD: Final = Struct(">BH")
_SHORT: Final = Struct(">H")
_LENGTH: Final = Struct(">I")
_MIN_NUMBER: Final = -1

Names = tuple[str, str, str, str]
_encoded_names: dict[Names, bytes] = {}
_decoded_names: dict[bytes, Names] = {}


class MalformedMessage(Exception):
    """The bytes are not a message of the expected class; the text says why."""


@dataclass(slots=True, kw_only=True)
class Message:
    """Base of all messages. Every field is an integer of at least -1, a name, bytes, or an enum.

    Not frozen, although never modified: frozen objects take three times as long to create.
    """

    group: str
    remote_id: str
    """The member that the message is for."""
    local_id: str
    """The member that it comes from."""
    term: int = -1
    leader_id: str = ""

    repeats: ClassVar[bool] = False
    """Whether the same bytes arrive repeatedly for as long as a leader leads: these are decoded once."""

    def to_body(self) -> bytes:
        """The encoded message."""
        form = _forms.get(type(self)) or _form_of(type(self))
        names = self.group, self.remote_id, self.local_id, self.leader_id
        head = _encoded_names.get(names) or _encode_names(names)
        numbers = form.numbers.pack(*form.numbers_of(self))
        if not form.contents:
            return head + numbers
        parts = [head, numbers]
        for name, is_text in form.contents:
            content = getattr(self, name)
            data = content.encode() if is_text else content
            parts += (_LENGTH.pack(len(data)), data)
        return b"".join(parts)

    @classmethod
    def from_body(cls, body: bytes) -> Self:
        """The message in some bytes. Raises MalformedMessage."""
        form = _forms.get(cls) or _form_of(cls)
        if cls.repeats:
            same: Self | None = form.decoded.get(body)  # type: ignore[assignment]  # each class has its own form
            if same is not None:
                return same
        size_bytes = len(body)
        if size_bytes < _HEAD.size:
            raise MalformedMessage(f"a message of {size_bytes} bytes")
        version, names_size = _HEAD.unpack_from(body)
        at = _HEAD.size + names_size
        if version != VERSION:
            raise MalformedMessage(f"a message of version {version}")
        if size_bytes < at + form.numbers.size:
            raise MalformedMessage(f"a {cls.__name__} of {size_bytes} bytes")
        head = body[:at]
        names = _decoded_names.get(head) or _decode_names(head)
        numbers = form.numbers.unpack_from(body, at)
        if min(numbers) < _MIN_NUMBER:
            raise MalformedMessage(f"the field {form.fields[numbers.index(min(numbers))]} is no number from -1 on")
        at += form.numbers.size
        contents: list[str | bytes] = []
        for name, is_text in form.contents:
            content, at = _read_content(body, at, name, is_text)
            contents.append(content)
        if at != size_bytes:
            raise MalformedMessage(f"{size_bytes - at} bytes behind a {cls.__name__}")
        try:
            message: Self = form.make(names, numbers, contents)  # type: ignore[assignment]
        except KeyError:
            name, value = form.unknown(numbers)
            raise MalformedMessage(f"the field {name} has an unknown value: {value}") from None
        if cls.repeats:
            if len(form.decoded) >= MAX_CACHED_MESSAGES:
                form.decoded.clear()
            form.decoded[body] = message
        return message


def _encode_names(names: Names) -> bytes:
    """The start of an encoded message: version and names."""
    texts = [name.encode() for name in names]
    block = b"".join(_SHORT.pack(len(text)) + text for text in texts)
    head = _HEAD.pack(VERSION, len(block)) + block
    if len(_encoded_names) >= MAX_CACHED_NAMES:
        _encoded_names.clear()
    _encoded_names[names] = head
    return head


def _decode_names(head: bytes) -> Names:
    names: list[str] = []
    at = _HEAD.size
    for field in _NAMES:
        if at + 2 > len(head):
            raise MalformedMessage(f"the field {field} is missing")
        (size_bytes,) = _SHORT.unpack_from(head, at)
        at += 2
        text = head[at : at + size_bytes]
        at += size_bytes
        if len(text) < size_bytes:
            raise MalformedMessage(f"the field {field} is cut off")
        names.append(_name(field, text))
    if at != len(head):
        raise MalformedMessage(f"{len(head) - at} bytes behind the names")
    group, remote_id, local_id, leader_id = names
    if len(_decoded_names) >= MAX_CACHED_NAMES:
        _decoded_names.clear()
    _decoded_names[head] = group, remote_id, local_id, leader_id
    return group, remote_id, local_id, leader_id


def _name(field: str, text: bytes) -> str:
    try:
        name = text.decode()
    except UnicodeDecodeError:
        name = "\n"
    if len(name) > MAX_ID_CHARACTERS or not name.isprintable():
        raise MalformedMessage(f"the field {field} is no name")
    return name


def _read_content(body: bytes, at: int, field: str, is_text: bool) -> tuple[str | bytes, int]:
    """A text or bytes, and where it ends."""
    begin = at + _LENGTH.size
    if begin > len(body):
        raise MalformedMessage(f"the field {field} is missing")
    end = begin + _LENGTH.unpack_from(body, at)[0]
    if end > len(body):
        raise MalformedMessage(f"the field {field} is cut off")
    data = body[begin:end]
    return (_name(field, data) if is_text else data), end


class _Form:
    """How a class of messages is encoded: `fields` are its numbers, including enums; `contents` (name, whether it is
    text) follow them.

    `numbers_of` and `make` are generated for the class, as one would write them by hand: `attrgetter` with many names
    and keyword arguments from a mapping take twice as long, and many times as long with a just-in-time compiler.
    """

    __slots__ = ("_enums", "contents", "decoded", "fields", "make", "numbers", "numbers_of")

    def __init__(self, message: type[Message]) -> None:
        kinds = {each.name: str(each.type) for each in dataclasses.fields(message) if each.name not in _NAMES}
        self.fields = tuple(name for name, kind in kinds.items() if kind == "int" or kind in _MEMBERS)
        self._enums = {name: _MEMBERS[kinds[name]] for name in self.fields if kinds[name] in _MEMBERS}
        self.contents = tuple((name, kind == "str") for name, kind in kinds.items() if kind in ("str", "bytes"))
        self.numbers = Struct(f">{len(self.fields)}q")
        self.decoded: dict[bytes, Message] = {}
        values = "".join(f"message.{name}, " for name in self.fields)
        self.numbers_of: Callable[[Message], tuple[Any, ...]] = eval(f"lambda message: ({values})")
        arguments = [f"{name}=names[{at}]" for at, name in enumerate(_NAMES)]
        for at, name in enumerate(self.fields):
            value = f"numbers[{at}]"
            arguments.append(f"{name}=enums[{name!r}][{value}]" if name in self._enums else f"{name}={value}")
        arguments += [f"{name}=contents[{at}]" for at, (name, _) in enumerate(self.contents)]
        self.make: Callable[[Names, tuple[int, ...], list[str | bytes]], Message] = eval(
            f"lambda names, numbers, contents: message({', '.join(arguments)})",
            {"message": message, "enums": self._enums},
        )
        """Makes the message; raises KeyError if a number is not in its enum."""

    def unknown(self, numbers: tuple[int, ...]) -> tuple[str, int]:
        """The first of the numbers that is not in its enum, preceded by its field's name."""
        named = zip(self.fields, numbers, strict=True)
        return next((name, value) for name, value in named if value not in self._enums.get(name, (value,)))


def _form_of(message: type[Message]) -> _Form:
    return _forms.setdefault(message, _Form(message))


_forms: dict[type[Message], _Form] = {}

_MEMBERS: Final[dict[str, dict[int, enum.IntEnum]]] = {
    kind.__name__: {int(member): member for member in kind} for kind in (DLedgerCode, PushType, VoteResult)
}


@dataclass(slots=True, kw_only=True)
class Request(Message):
    """Base of all requests."""


@dataclass(slots=True, kw_only=True)
class Response(Message):
    """Base of all answers. `term` is the answering member's, `leader_id` the leader it knows."""

    code: DLedgerCode = DLedgerCode.UNKNOWN


@dataclass(slots=True, kw_only=True)
class VoteRequest(Request):
    """`leader_id` asks for a vote to lead `term`; `ledger_end_...` is the last entry of its log. `transferred_term` is
    the term whose leader has given up in its favour, -1 if none has."""

    term: int
    leader_id: str
    ledger_end_index: int
    ledger_end_term: int
    transferred_term: int = -1


@dataclass(slots=True, kw_only=True)
class VoteResponse(Response):
    vote_result: VoteResult = VoteResult.UNKNOWN


@dataclass(slots=True, kw_only=True)
class HeartBeatRequest(Request):
    """`leader_id` leads `term`."""

    repeats = True
    term: int
    leader_id: str


@dataclass(slots=True, kw_only=True)
class HeartBeatResponse(Response):
    repeats = True


@dataclass(slots=True, kw_only=True)
class PushEntryRequest(Request):
    """A leader's request to its follower.

    APPEND carries a batch of entries and the term of the previous entry, COMPARE and TRUNCATE carry one entry, COMMIT
    none. TRUNCATE also names, by term and chain CRC, the entry that follows in the leader's log (-1 if none does).
    """

    term: int
    leader_id: str
    type: PushType
    commit_index: int
    entries: bytes = b""
    previous_term: int = -1
    next_term: int = -1
    next_chain_crc: int = -1


@dataclass(slots=True, kw_only=True)
class PushEntryResponse(Response):
    """`index` is the last entry that the answer is about; the others are the first and last of the follower's log."""

    index: int = -1
    begin_index: int = -1
    end_index: int = -1


@dataclass(slots=True, kw_only=True)
class InstallSnapshotRequest(Request):
    """A piece of the leader's snapshot that ends with entry `last_included_index`: `data`, whose CRC-32 is `data_crc`,
    belongs at `offset` of the snapshot's `size_bytes` bytes, whose SHA-256 is `digest`. Without data it asks how many
    bytes the follower has."""

    term: int
    leader_id: str
    last_included_index: int
    last_included_term: int
    size_bytes: int
    digest: str
    offset: int
    data_crc: int
    data: bytes = b""


@dataclass(slots=True, kw_only=True)
class InstallSnapshotResponse(Response):
    """The follower wants the bytes from `offset` on. If that is the snapshot's size, it has all it needs, durably."""

    offset: int = -1


@dataclass(slots=True, kw_only=True)
class LeadershipTransferRequest(Request):
    """`transfer_id`, the leader of `term`, is to give its leadership to `transferee_id`. Tells the leader to do so, or
    tells the transferee that it has been done and to take over once its log reaches `take_index`."""

    term: int
    transfer_id: str
    transferee_id: str
    take_index: int = -1


@dataclass(slots=True, kw_only=True)
class LeadershipTransferResponse(Response):
    pass


@dataclass(slots=True, kw_only=True)
class ChangeMembersRequest(Request):
    """Asks the leader to add `member` to the group at `address`, or to remove it if `address` is empty."""

    member: str
    address: str = ""


@dataclass(slots=True, kw_only=True)
class ChangeMembersResponse(Response):
    """`index` is the entry that makes the change."""

    index: int = -1


@dataclass(slots=True, kw_only=True)
class MembersRequest(Request):
    """Asks any member who belongs to the group."""


@dataclass(slots=True, kw_only=True)
class MembersResponse(Response):
    """`peers` are the ids and addresses as that member knows them, encoded as in the log's entries; `index` is the
    entry that defines them, -1 for the member's configuration."""

    index: int = -1
    peers: bytes = b""


@dataclass(slots=True, kw_only=True)
class MetadataRequest(Request):
    pass


@dataclass(slots=True, kw_only=True)
class MetadataResponse(Response):
    """What a member knows of itself and its group."""

    role: str = ""
    ledger_begin_index: int = -1
    ledger_end_index: int = -1
    committed_index: int = -1


@dataclass(slots=True, kw_only=True)
class GetEntriesRequest(Request):
    """Asks for committed entries from `begin_index` on."""

    begin_index: int


@dataclass(slots=True, kw_only=True)
class GetEntriesResponse(Response):
    entries: bytes = b""


@dataclass(slots=True, kw_only=True)
class AppendEntryRequest(Request):
    """Asks the leader to append one entry with this body."""

    body: bytes


@dataclass(slots=True, kw_only=True)
class AppendEntryResponse(Response):
    index: int = -1
    pos: int = -1
