"""The part of Hazelcast's Open Binary Client Protocol (version 2) that a client of the harness needs.

One request at a time over one connection to one member. Nothing is retried here, so each operation is one request and
has its outcome. A message is a sequence of frames, the first of which has the fields of fixed size; types and fields of
messages are listed in the repository hazelcast-client-protocol.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from uuid import uuid4

from harness.sdk import Streams

__all__ = [
    "BOUND", "CLUSTER", "Fields", "Frame", "HazelcastError", "Member", "Value", "data", "new_uuid", "partition_of",
    "text", "value_of",
]  # fmt: skip

CLUSTER = "splitbrain"
CLIENT_VERSION = "5.3.0"
MAX_FRAME_BYTES = 16 << 20
"""Limit of one frame: far more than a value of any workload."""

AUTHENTICATION, CREATE_GROUP, ERROR = 0x000100, 0x1E0100, 0
"""Types of messages. An answer's is that of its request plus one, or ERROR."""

WHOLE, FINAL, BEGIN, END, NULL = 0xC000, 1 << 13, 1 << 12, 1 << 11, 1 << 10
"""Flags of frames: the first of a message that is not fragmented, the last, the bounds of a structure, no value."""
BOUND = BEGIN | END

HEADER = struct.Struct("<iH")
"""Before each frame: its length, including these bytes, and its flags."""

REQUEST, ANSWER = struct.Struct("<iqi"), struct.Struct("<iqB")
"""Begin the first frame: type, correlation ID, and a request's partition or the number of an answer's backups."""

ANY_PARTITION = -1
UNAWAITED = 0
"""Correlation ID of requests whose answers are dropped."""

LONG, STRING = -8, -11
"""Types of serialized values."""

Frame = tuple[int, bytes]
"""Flags and content."""

Value = int | str | None


class HazelcastError(OSError):
    """A member answered with an error. The request may have taken effect."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        """The class of the Java exception, without its package."""


@dataclass(frozen=True, slots=True)
class Fields:
    """An answer: its fields of fixed size, and its other frames."""

    fixed: bytes
    frames: Sequence[Frame]

    def truth(self) -> bool:
        """The first field as a boolean."""
        return self.fixed[:1] == b"\1"

    def number(self) -> int:
        """The first field as a 64-bit number."""
        return int.from_bytes(self.fixed[:8], "little", signed=True)


def text(value: str) -> Frame:
    """A text that is a field of a message."""
    return 0, value.encode()


def data(value: int | str) -> Frame:
    """A serialized value, the key or content of a data structure: a hash that is not used, the type, the value."""
    if isinstance(value, int):
        return 0, struct.pack(">iiq", 0, LONG, value)
    return 0, struct.pack(">iii", 0, STRING, len(value.encode())) + value.encode()


def value_of(frame: Frame) -> Value:
    """The value in a frame. Raises ValueError for a type that `data` does not make."""
    flags, content = frame
    if flags & NULL:
        return None
    kind = int.from_bytes(content[4:8], "big", signed=True)
    if kind == LONG:
        return int.from_bytes(content[8:16], "big", signed=True)
    if kind == STRING:
        return content[12:].decode()
    raise ValueError(f"a value of type {kind}")


def new_uuid() -> bytes:
    """A new UUID as a field of fixed size."""
    number = uuid4().int
    return struct.pack("<?QQ", False, number >> 64, number & (1 << 64) - 1)


def partition_of(key: Frame, partitions: int) -> int:
    """The partition of a serialized key: the MurmurHash3 (32 bits) of what follows its type."""
    mask, content = 0xFFFFFFFF, key[1][8:]
    found = 0x01000193
    for start in range(0, len(content), 4):
        block = content[start : start + 4]
        mixed = int.from_bytes(block, "little") * 0xCC9E2D51 & mask
        found ^= (mixed << 15 | mixed >> 17) * 0x1B873593 & mask
        if len(block) == 4:
            found = ((found << 13 | found >> 19) & mask) * 5 + 0xE6546B64 & mask
    found ^= len(content)
    found = (found ^ found >> 16) * 0x85EBCA6B & mask
    found = (found ^ found >> 13) * 0xC2B2AE35 & mask
    found ^= found >> 16
    signed = found - (found >> 31 << 32)
    return 0 if signed == -1 << 31 else abs(signed) % partitions


class Member:
    """A connection to a member. Use `opened`."""

    def __init__(self, streams: Streams) -> None:
        self.reader, self.writer = streams
        self.numbers = count(1)
        self.partitions = 0

    @classmethod
    async def opened(cls, streams: Streams) -> Member:
        """Authenticate as a client of the cluster. Raises OSError."""
        member = cls(streams)
        member.writer.write(b"CP2")
        nobody, nothing = (NULL, b""), [(BEGIN, b""), (END, b"")]
        texts = [text(CLUSTER), nobody, nobody, text("PYH"), text(CLIENT_VERSION), text("splitbrain")]
        said = await member.call(AUTHENTICATION, new_uuid() + b"\1", *texts, *nothing)
        status, member.partitions = said.fixed[0], struct.unpack_from("<i", said.fixed, 19)[0]
        if status:
            raise OSError(f"authentication failed with status {status}")
        return member

    def partition(self, key: Frame) -> int:
        """The partition of a serialized key."""
        return partition_of(key, self.partitions)

    async def group(self, name: str) -> tuple[Frame, ...]:
        """The identifier of a CP group, which is created if it does not exist. Raises OSError."""
        said = await self.call(CREATE_GROUP, b"", text(name))
        return tuple((flags & ~FINAL, content) for flags, content in said.frames)

    async def call(self, kind: int, fixed: bytes, *frames: Frame, partition: int = ANY_PARTITION) -> Fields:
        """Send a request and return its answer. Raises HazelcastError, or OSError if the outcome is unknown."""
        number = next(self.numbers)
        self.send(kind, fixed, *frames, partition=partition, number=number)
        answered = UNAWAITED
        while answered == UNAWAITED:
            (_, first), *others = await self.message()
            said, answered, _ = ANSWER.unpack_from(first)
        if answered != number:
            raise OSError(f"answer {answered} to request {number}")
        if said == ERROR:  # a list of the exception and its causes: each a structure of a code, a class and a message
            raise HazelcastError(others[3][1].decode().rpartition(".")[2], others[4][1].decode())
        if said != kind + 1:
            raise OSError(f"an answer of type {said:#x} to a request of type {kind:#x}")
        return Fields(first[ANSWER.size :], others)

    def send(
        self, kind: int, fixed: bytes, *frames: Frame, partition: int = ANY_PARTITION, number: int = UNAWAITED
    ) -> None:
        """Send a request without waiting for its answer."""
        message = [(WHOLE, REQUEST.pack(kind, number, partition) + fixed), *frames]
        message[-1] = message[-1][0] | FINAL, message[-1][1]
        self.writer.write(b"".join(HEADER.pack(HEADER.size + len(each), flags) + each for flags, each in message))

    async def message(self) -> list[Frame]:
        found: list[Frame] = []
        while not found or not found[-1][0] & FINAL:
            size, flags = HEADER.unpack(await self.reader.readexactly(HEADER.size))
            if not HEADER.size <= size <= MAX_FRAME_BYTES:
                raise OSError(f"a frame of {size} bytes")
            found.append((flags, await self.reader.readexactly(size - HEADER.size)))
        return found
