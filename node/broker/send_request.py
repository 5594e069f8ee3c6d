"""The contents of a send request: its header under either naming, and the messages of a batch."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from node.interpreter import IS_PYPY
from node.remoting import Command, RequestCode, RequestError, ResponseCode

__all__ = ["MAX_BATCH_MESSAGES", "SendHeader", "names_of", "split_batches"]

MAX_BATCH_MESSAGES = 4096
"""Messages in one batch: each becomes a log entry of its own, and the log takes 10 000 unacknowledged ones."""

_V2_NAMES = {
    "producerGroup": "a",
    "topic": "b",
    "defaultTopic": "c",
    "defaultTopicQueueNums": "d",
    "queueId": "e",
    "sysFlag": "f",
    "bornTimestamp": "g",
    "flag": "h",
    "properties": "i",
    "reconsumeTimes": "j",
    "maxReconsumeTimes": "l",
    "unitMode": "k",
    "batch": "m",
}
_V1_NAMES = {name: name for name in _V2_NAMES}
_LONG_NAMES_CODES = (RequestCode.SEND_MESSAGE, RequestCode.SEND_REPLY_MESSAGE)


def names_of(command: Command) -> Mapping[str, str]:
    """The name under which a request carries each field: either naming may come with either code."""
    fields = command.ext_fields
    if "b" in fields or ("topic" not in fields and command.code not in _LONG_NAMES_CODES):
        return _V2_NAMES
    return _V1_NAMES


_BATCH_HEAD = struct.Struct(">iiiii")
_INT16 = struct.Struct(">h")
UNIFORM_STRUCTS = 256
"""Cached pairs of sizes, of bodies and properties in uniform batches."""
MAX_PROPERTIES_BYTES = 0x7FFF


@dataclass(frozen=True, slots=True, kw_only=True)
class SendHeader:
    """The fields of a send request that matter to the store, under either naming."""

    topic: str
    queue_id: int
    sys_flag: int
    flag: int
    born_timestamp_ms: int
    properties_text: str
    reconsume_times: int
    batch: bool

    @classmethod
    def of(cls, command: Command) -> SendHeader:
        """Read the header of a 10, 310 or 320 request. Either naming is accepted with either code.

        Raises RequestError for a missing topic or queue id, or a number that is not one.
        """
        names = names_of(command)
        return cls(
            topic=command.get_str(names["topic"]),
            queue_id=command.get_int(names["queueId"]),
            sys_flag=command.get_int(names["sysFlag"], 0),
            flag=command.get_int(names["flag"], 0),
            born_timestamp_ms=command.get_int(names["bornTimestamp"], 0),
            properties_text=command.get_str(names["properties"], ""),
            reconsume_times=command.get_int(names["reconsumeTimes"], 0),
            batch=command.get_bool(names["batch"]) or command.code == RequestCode.SEND_BATCH_MESSAGE,
        )


class Columns(NamedTuple):
    """Flag, body and property text (UTF-8) of each message."""

    flags: Sequence[int]
    bodies: Sequence[bytes]
    texts: Sequence[bytes]
    is_uniform: bool
    """Whether all bodies are known to be of one size, and all texts too."""
    counts: Sequence[int]
    """Messages of each batch."""


@lru_cache(maxsize=UNIFORM_STRUCTS)
def _uniform_layout(size: int, properties_size: int) -> struct.Struct:
    return struct.Struct(f"{_BATCH_HEAD.size}s{size}s{_INT16.size}s{properties_size}s")


def _split_uniform(batches: Sequence[bytes]) -> Columns | None:
    """The messages of batches that are all of the same sizes and flag, as they often are; None if they are not, or if
    anything is wrong."""
    first = batches[0]
    if len(first) < _BATCH_HEAD.size:
        return None
    total, _, _, flag, size = _BATCH_HEAD.unpack_from(first)
    properties_size = total - _BATCH_HEAD.size - _INT16.size - size
    if not 0 <= size <= total or not 0 <= properties_size <= MAX_PROPERTIES_BYTES:
        return None
    if any([len(batch) % total or not 0 < len(batch) <= total * MAX_BATCH_MESSAGES for batch in batches]):
        return None
    together = b"".join(batches)
    count = len(together) // total
    heads, bodies, sizes, texts = zip(*_uniform_layout(size, properties_size).iter_unpack(together), strict=True)
    if heads.count(heads[0]) != count or sizes.count(_INT16.pack(properties_size)) != count:
        return None
    return Columns((flag,) * count, bodies, texts, True, [len(batch) // total for batch in batches])


def split_batches(batches: Sequence[bytes]) -> Columns:
    """The messages in the bodies of batches, one after another, as columns.

    A message is total size, magic and CRC (both ignored), flag, body length (int32 each), the body, the
    property length (int16) and the properties. Raises RequestError (MESSAGE_ILLEGAL) for anything else.
    """
    columns = (None if IS_PYPY else _split_uniform(batches)) or _split_each(batches)
    texts = columns.texts
    for number, text in enumerate(texts if not b"".join(texts).isascii() else ()):
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, f"message {number} of the batch: {error}") from error
    return columns


def _split_each(batches: Sequence[bytes]) -> Columns:
    columns = [_split(batch) for batch in batches]
    flags, bodies, texts = (list(chain.from_iterable(column)) for column in zip(*columns, strict=True))
    return Columns(flags, bodies, texts, False, [len(own) for own, _, _ in columns])


def _split(body: bytes) -> tuple[list[int], list[bytes], list[bytes]]:
    flags: list[int] = []
    bodies: list[bytes] = []
    texts: list[bytes] = []
    position = 0
    while position < len(body):
        if len(bodies) == MAX_BATCH_MESSAGES:
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, f"more than {MAX_BATCH_MESSAGES} messages in a batch")
        try:
            total, _, _, flag, size = _BATCH_HEAD.unpack_from(body, position)
            body_at = position + _BATCH_HEAD.size
            (properties_size,) = _INT16.unpack_from(body, body_at + size) if size >= 0 else (-1,)
            properties_at = body_at + size + _INT16.size
            end = properties_at + properties_size
            if properties_size < 0 or end != position + total or end > len(body):
                raise ValueError("sizes do not agree")
        except (struct.error, ValueError) as error:
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL, f"message {len(bodies)} of the batch, at byte {position}: {error}"
            ) from error
        flags.append(flag)
        bodies.append(body[body_at : body_at + size])
        texts.append(body[properties_at:end])
        position = end
    if not bodies:
        raise RequestError(ResponseCode.MESSAGE_ILLEGAL, "the batch is empty")
    return flags, bodies, texts
