"""One entry of the replicated log: the same bytes on disk and between members.

All integers are big-endian:

    offset  size  field
         0     4  magic: 1 normal, 2 no-op, 3 config
         4     4  size of header and body
         8     8  index
        16     8  term
        24     8  pos: position of the entry's first byte in the log
        32     4  channel, 0
        36     4  chain CRC
        40     4  body CRC: crc32 of the body
        44     4  body length
        48     .  body

The chain CRC covers the header before it, the body's CRC and length, and, as its seed, the chain CRC of the
previous entry. Two logs whose entries at an index have the same chain CRC are therefore equal up to that index (but
for a chance of one in four thousand million), and a changed bit anywhere in an entry breaks one of the two CRCs.
The chain CRC of the very first entry (index 0) is seeded with 0.

An entry never crosses the end of a file. The rest of the file is filled by a blank: magic -1, the size of the rest,
zeros. There is always room for the blank's first eight bytes (seeds S0, S2 for the fields; R for the blank).

After the last entry there may be a *tail mark*: 32 bytes with magic -2 that are not part of the log, differ from node
to node, and are overwritten by the next entry. It records up to which position the log was durable when the mark was
written, together with the entries before it. Bytes below that position cannot have been torn by a power cut: if they do
not read back, the disk has damaged them.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

__all__ = [
    "BLANK_HEADER_SIZE_BYTES",
    "BODY_FIELDS",
    "CHAIN",
    "CONFIG_MAGIC",
    "HEAD",
    "HEADER",
    "HEADER_SIZE_BYTES",
    "MAGICS",
    "NOOP_MAGIC",
    "NORMAL_MAGIC",
    "TAIL_MARK_SIZE_BYTES",
    "BadEntry",
    "Entry",
    "blank",
    "blank_size_at",
    "encode_entry",
    "entry_at",
    "parse_entries",
    "parse_entry",
    "tail_mark",
    "tail_mark_at",
]

HEADER_SIZE_BYTES = 48
NORMAL_MAGIC = 1
NOOP_MAGIC = 2
CONFIG_MAGIC = 3
BLANK_MAGIC = -1
TAIL_MARK_MAGIC = -2
BLANK_HEADER_SIZE_BYTES = 8
TAIL_MARK_SIZE_BYTES = 32

HEADER = struct.Struct(">iiqqqiIIi")
"""The whole header, in the order of its fields."""
HEAD = struct.Struct(">iiqqqi")
"""The fields before the chain CRC."""
BODY_FIELDS = struct.Struct(">Ii")
"""The fields after the chain CRC: the body's CRC and length."""
CHAIN = struct.Struct(">I")
_CHAIN_AT = HEAD.size
_BODY_FIELDS_AT = _CHAIN_AT + CHAIN.size
_BLANK = struct.Struct(">ii")
_MARK = struct.Struct(">iiqqI")
MAGICS = frozenset((NORMAL_MAGIC, NOOP_MAGIC, CONFIG_MAGIC))


class BadEntry(Exception):
    """Bytes that are not the entry they should be; the message says what is wrong with them."""


class Entry(NamedTuple):
    """An entry and its encoding. Two are equal only if every byte is."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls
    term: int
    pos: int
    magic: int
    chain_crc: int
    raw: bytes

    @property
    def size_bytes(self) -> int:
        """Size of header and body."""
        return len(self.raw)

    @property
    def end_pos(self) -> int:
        """Position after the last byte."""
        return self.pos + len(self.raw)

    @property
    def body(self) -> bytes:
        return self.raw[HEADER_SIZE_BYTES:]

    @property
    def body_pos(self) -> int:
        """Position of the body's first byte: what RocketMQ calls a message's physical offset."""
        return self.pos + HEADER_SIZE_BYTES

    @property
    def is_message(self) -> bool:
        """Whether the body is a message; no-ops and configurations belong to the log itself."""
        return self.magic == NORMAL_MAGIC


def encode_entry(*, magic: int, index: int, term: int, pos: int, previous_chain_crc: int, body: bytes) -> Entry:
    """A new entry. `previous_chain_crc` is that of the previous entry, 0 for the entry with index 0."""
    head = HEAD.pack(magic, HEADER_SIZE_BYTES + len(body), index, term, pos, 0)
    body_fields = BODY_FIELDS.pack(zlib.crc32(body), len(body))
    chain_crc = zlib.crc32(body_fields, zlib.crc32(head, previous_chain_crc))
    raw = b"".join((head, CHAIN.pack(chain_crc), body_fields, body))
    return Entry(index, term, pos, magic, chain_crc, raw)


def parse_entry(data: bytes, offset: int = 0, previous_chain_crc: int | None = None) -> Entry:
    """The entry that begins at `offset` of `data`.

    Checks everything that the bytes alone can prove and, given `previous_chain_crc`, that the entry continues the
    previous one. Raises BadEntry, also if `data` ends too early.
    """
    if len(data) - offset < HEADER_SIZE_BYTES:
        raise BadEntry(f"{len(data) - offset} bytes are no entry header")
    magic, size, index, term, pos, channel, chain_crc, body_crc, body_size = HEADER.unpack_from(data, offset)
    if magic not in MAGICS:
        raise BadEntry(f"magic {magic} is unknown")
    if size != HEADER_SIZE_BYTES + body_size or body_size < 0 or index < 0 or term < 0 or pos < 0 or channel != 0:
        raise BadEntry(f"the header contradicts itself (index {index}, size {size}, body {body_size})")
    raw = data if offset == 0 and len(data) == size else data[offset : offset + size]
    if len(raw) < size:
        raise BadEntry(f"entry {index} ends after {len(raw)} of {size} bytes")
    if zlib.crc32(memoryview(raw)[HEADER_SIZE_BYTES:]) != body_crc:
        raise BadEntry(f"the body of entry {index} does not match its CRC")
    if previous_chain_crc is not None and _chain_crc(raw, previous_chain_crc) != chain_crc:
        raise BadEntry(f"entry {index} does not match its chain CRC")
    return Entry(index, term, pos, magic, chain_crc, raw)


def parse_entries(data: bytes, previous_chain_crc: int | None = None) -> list[Entry]:
    """The entries that fill `data`. Each must follow the previous one in index, position and chain, and its term must
    not be smaller. `previous_chain_crc` as in `parse_entry`. Raises BadEntry.
    """
    entries: list[Entry] = []
    offset = 0
    while offset < len(data):
        entry = parse_entry(data, offset, previous_chain_crc)
        if entries:
            before = entries[-1]
            if entry.index != before.index + 1 or entry.pos < before.end_pos or entry.term < before.term:
                raise BadEntry(f"entry {entry.index} of term {entry.term} cannot follow entry {before.index}")
        entries.append(entry)
        previous_chain_crc = entry.chain_crc
        offset += len(entry.raw)
    return entries


def entry_at(data: bytes, start: int, end: int) -> Entry:
    """The entry known to lie in `data` from `start` to `end`; nothing is checked."""
    magic, _, index, term, pos, _, chain_crc, _, _ = HEADER.unpack_from(data, start)
    return Entry(index, term, pos, magic, chain_crc, data if not start and end == len(data) else data[start:end])


def _chain_crc(raw: bytes, previous_chain_crc: int) -> int:
    view = memoryview(raw)
    return zlib.crc32(view[_BODY_FIELDS_AT:HEADER_SIZE_BYTES], zlib.crc32(view[:_CHAIN_AT], previous_chain_crc))


def blank(size_bytes: int) -> bytes:
    """The blank that fills the last `size_bytes` (at least 8) bytes of a file."""
    return _BLANK.pack(BLANK_MAGIC, size_bytes) + bytes(size_bytes - BLANK_HEADER_SIZE_BYTES)


def blank_size_at(data: bytes, offset: int) -> int | None:
    """The size that a blank at `offset` claims; None if there is no blank."""
    if len(data) - offset < BLANK_HEADER_SIZE_BYTES:
        return None
    magic, size_bytes = _BLANK.unpack_from(data, offset)
    return size_bytes if magic == BLANK_MAGIC else None


def tail_mark(position: int, durable_position: int) -> bytes:
    """A tail mark for `position`: everything below `durable_position` was durable before this was written."""
    fields = _MARK.pack(TAIL_MARK_MAGIC, TAIL_MARK_SIZE_BYTES, position, durable_position, 0)[:-4]
    return fields + CHAIN.pack(zlib.crc32(fields)) + bytes(TAIL_MARK_SIZE_BYTES - _MARK.size)


def tail_mark_at(data: bytes, offset: int, position: int) -> int | None:
    """The durable position in the tail mark at `offset`, which is `position` of the log; None if there is no mark."""
    if offset < 0 or len(data) - offset < TAIL_MARK_SIZE_BYTES:
        return None
    magic, size_bytes, own_position, durable_position, crc = _MARK.unpack_from(data, offset)
    if magic != TAIL_MARK_MAGIC or size_bytes != TAIL_MARK_SIZE_BYTES or own_position != position:
        return None
    if zlib.crc32(data[offset : offset + _MARK.size - 4]) != crc or not 0 <= durable_position <= position:
        return None
    return int(durable_position)
