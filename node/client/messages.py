"""Messages as a program sees them: those it sends, the queues that hold them, those it receives."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from node.runtime import Runtime
from node.store.properties import KEYS, TAGS, UNIQUE_KEY, WAIT_STORE, PropertyError, encode_properties
from node.store.record import SYS_FLAG_COMPRESSED, Message

__all__ = [
    "BodyError",
    "MessageQueue",
    "NewMessage",
    "ReceivedMessage",
    "UniqueKeys",
    "deflate",
    "encode_batch",
    "inflate",
    "retry_topic",
]

KEY_SEPARATOR: Final = " "
"""Separates the keys of one message (R: MessageConst.KEY_SEPARATOR)."""
DELAY: Final = "DELAY"
RETRY_TOPIC: Final = "RETRY_TOPIC"
ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
TRANSACTION_PREPARED: Final = "TRAN_MSG"
PRODUCER_GROUP: Final = "PGROUP"
RESERVED: Final = frozenset(
    {TAGS, KEYS, WAIT_STORE, DELAY, UNIQUE_KEY, RETRY_TOPIC, ORIGIN_MESSAGE_ID, TRANSACTION_PREPARED, PRODUCER_GROUP}
    | {"REAL_TOPIC", "REAL_QID", "RECONSUME_TIME", "MAX_RECONSUME_TIMES", "TRANSACTION_CHECK_TIMES"}
)
"""Property names with a meaning to brokers; a program sets them through parameters or not at all."""

MAX_INFLATED_BYTES: Final = 32 * 1024 * 1024
"""The largest body after inflation: eight times the largest message. A decompression bomb must not fill the memory."""
COMPRESSION_LEVEL: Final = 5
"""The level of zlib (R: zipCompressLevel)."""

_BATCH_HEAD = struct.Struct(">iiiii")
_INT16 = struct.Struct(">h")


class BodyError(ValueError):
    """A compressed body that is damaged, or larger than this client accepts once it is inflated."""


class MessageQueue(NamedTuple):
    """One queue of a topic: the unit of order, and of the division of work in a consumer group."""

    topic: str
    broker_name: str
    queue_id: int


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message to be sent. `tags` is what consumers filter by, `keys` what it can be found by; `delay_level` 1 to
    18 delays it (1 s to 2 h by default; the broker defines the delays)."""

    topic: str
    body: bytes
    tags: str | None = None
    keys: Sequence[str] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    delay_level: int = 0

    def stored_properties(self, unique_key: str) -> dict[str, str]:
        """All properties that are sent with the body. Raises PropertyError (a ValueError) for a reserved name, an
        empty key or one with a space in it."""
        properties = dict(self.properties)
        for name in properties:
            if name in RESERVED:
                raise PropertyError(f"property {name!r} is reserved; set it by its parameter")
        if isinstance(self.keys, str):
            raise PropertyError("keys is a sequence of strings, not one string")
        for key in self.keys:
            if not key or KEY_SEPARATOR in key:
                raise PropertyError(f"key {key!r} is empty or contains a space")
        if self.keys:
            properties[KEYS] = KEY_SEPARATOR.join(self.keys)
        if self.tags:
            properties[TAGS] = self.tags
        if self.delay_level:
            properties[DELAY] = str(self.delay_level)
        properties[UNIQUE_KEY] = unique_key
        properties[WAIT_STORE] = "true"
        return properties


class ReceivedMessage:
    """A message that was received. `topic` is the one it was sent to, even if it was read from a retry topic;
    `queue` and `queue_offset` are where it was read."""

    __slots__ = ("_body", "queue", "reconsume_times", "stored", "topic")

    def __init__(self, stored: Message, queue: MessageQueue) -> None:
        self.stored = stored
        self.queue = queue
        self.topic = stored.properties.get(RETRY_TOPIC, stored.topic)
        self.reconsume_times = stored.reconsume_times
        """How often it was sent back before."""
        self._body: bytes | None = None

    def __repr__(self) -> str:
        return f"ReceivedMessage({self.topic!r}, {self.queue!r}, {self.queue_offset}, {len(self.stored.body)} bytes)"

    @property
    def body(self) -> bytes:
        """The body that was sent, inflated if it arrived compressed. Raises BodyError if that is impossible."""
        if self._body is None:
            compressed = self.stored.sys_flag & SYS_FLAG_COMPRESSED
            self._body = inflate(self.stored.body) if compressed else self.stored.body
        return self._body

    @property
    def tags(self) -> str | None:
        """The tag it was sent with."""
        return self.stored.tags

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys it was sent with."""
        return tuple(self.stored.properties.get(KEYS, "").split())

    @property
    def properties(self) -> Mapping[str, str]:
        """All properties, including those that brokers and clients use."""
        return self.stored.properties

    @property
    def queue_offset(self) -> int:
        """Its number in `queue`."""
        return self.stored.queue_offset

    @property
    def message_id(self) -> str:
        """The sender's id for it: the same for every copy that a repeated send or delivery makes. The broker's own id
        if the sender gave none."""
        return self.stored.properties.get(UNIQUE_KEY) or self.stored.message_id

    @property
    def born_timestamp_ms(self) -> int:
        """When it was sent, by the sender's clock."""
        return self.stored.born_timestamp_ms

    @property
    def store_timestamp_ms(self) -> int:
        """When it was stored, by the broker's clock."""
        return self.stored.store_timestamp_ms


class UniqueKeys:
    """Generates ids of messages: 32 hex digits (R's length), 20 drawn once per client and 12 counted."""

    def __init__(self, runtime: Runtime) -> None:
        self._prefix = f"{runtime.random.getrandbits(80):020X}"
        self._count = 0

    def next(self) -> str:
        """An id that no other message has."""
        self._count += 1
        return f"{self._prefix}{self._count & 0xFFFFFFFFFFFF:012X}"


def retry_topic(group: str) -> str:
    """The topic of messages that the group has sent back."""
    return f"%RETRY%{group}"


def deflate(body: bytes, over_bytes: int) -> tuple[bytes, int]:
    """The body to send and its system flag: compressed if it has `over_bytes` or more and becomes smaller; 0: never."""
    if over_bytes and len(body) >= over_bytes:
        small = zlib.compress(body, COMPRESSION_LEVEL)
        if len(small) < len(body):
            return small, SYS_FLAG_COMPRESSED
    return body, 0


def inflate(body: bytes) -> bytes:
    """The content of a zlib body. Raises BodyError."""
    machine = zlib.decompressobj()
    try:
        content = machine.decompress(body, MAX_INFLATED_BYTES)
    except zlib.error as error:
        raise BodyError(f"the body is not zlib: {error}") from None
    if machine.unconsumed_tail:
        raise BodyError(f"the body inflates to more than {MAX_INFLATED_BYTES} bytes")
    if not machine.eof:
        raise BodyError("the compressed body ends too early")
    return content


def encode_batch(messages: Sequence[tuple[bytes, Mapping[str, str]]]) -> bytes:
    """The body of a batch (R: MessageDecoder.encodeMessages): total size, magic and CRC (0), flag, body, properties
    of each. Raises PropertyError."""
    parts: list[bytes] = []
    for body, properties in messages:
        text = encode_properties(properties).encode()
        if len(text) > 0x7FFF:
            raise PropertyError(f"properties of {len(text)} bytes, allowed are 32767")
        total = _BATCH_HEAD.size + len(body) + _INT16.size + len(text)
        parts += (_BATCH_HEAD.pack(total, 0, 0, 0, len(body)), body, _INT16.pack(len(text)), text)
    return b"".join(parts)
