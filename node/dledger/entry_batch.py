"""Consecutive entries as one unit, which is appended, written, pushed and cut as a whole.

The messages of a client's batch become one, and so do the entries that a leader pushes at once. Its bytes are those of
its entries in sequence, as in a file and between members, so that code which passes a batch on need not look at single
entries. A batch is traversed only once, when it is encoded or parsed: this verifies the entries' headers (when parsed)
and packs their index units. `node.dledger.entry` defines an entry and does the same for one entry at a time; the tests
compare the two.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from node.dledger.entry import (
    BODY_FIELDS,
    CHAIN,
    CONFIG_MAGIC,
    HEAD,
    HEADER,
    HEADER_SIZE_BYTES,
    MAGICS,
    BadEntry,
    Entry,
    entry_at,
)
from node.dledger.index import UNIT, UNIT_SIZE_BYTES
from node.dledger.uniform_entries import LEAST_ENTRIES, encode_uniform, scan_uniform
from node.store.checksummed import crcs_of

__all__ = ["BODY_PREFIX", "EntryBatch", "batch_of", "encode_batch", "join_batches", "parse_batches", "scan_batch"]

BODY_PREFIX = "i36xI4x"
"""`struct` codes of a header, big-endian, for reading it together with the body after it: they give the entry's magic
and the CRC-32 of its body."""

_CHAIN_AT = HEAD.size
_BODY_FIELDS_AT = _CHAIN_AT + CHAIN.size
_LARGE_BYTES = 2048
"""From this body size on, a view is cheaper than a copy."""


class EntryBatch:
    """At least one entry; each begins where the previous one ends, in the same file, and has the next index.

    `ends` holds each entry's end in `raw`; `units` are their packed index units; `term` and `chain_crc` are those of
    the last entry, and `changes` are the entries that change the group. A batch is never modified.
    """

    __slots__ = (
        "chain_crc", "changes", "end_pos", "ends", "first_index", "last_index", "pos", "raw", "term", "units",
    )  # fmt: skip

    def __init__(
        self,
        first_index: int,
        pos: int,
        raw: bytes,
        ends: Sequence[int],
        units: bytes,
        term: int,
        chain_crc: int,
        changes: Sequence[Entry] = (),
    ) -> None:
        self.first_index = first_index
        self.pos = pos
        self.raw = raw
        self.ends = ends
        self.units = units
        self.term = term
        self.chain_crc = chain_crc
        self.changes = changes
        self.last_index = first_index + len(ends) - 1
        self.end_pos = pos + len(raw)
        """Position after the last byte."""

    prefix_bytes = HEADER_SIZE_BYTES
    """Size of each entry's header, which precedes its body."""

    def number_of(self, index: int) -> int:
        """An entry's number within the batch, 0 for the first."""
        return index - self.first_index

    def index_behind(self, count: int) -> int:
        """Index of the entry after the first `count`."""
        return self.first_index + count

    @property
    def is_uniform(self) -> bool:
        """Whether all entries are known to have the same size."""
        return isinstance(self.ends, range) or len(self.ends) == 1

    @property
    def last_pos(self) -> int:
        """Position of the last entry's first byte."""
        ends = self.ends
        return self.pos + ends[-2] if len(ends) > 1 else self.pos

    def continues(self, previous_chain_crc: int) -> bool:
        """Whether the first entry, whose own bytes are verified, follows an entry with this chain CRC."""
        raw = self.raw
        head_crc = zlib.crc32(raw[:_CHAIN_AT], previous_chain_crc)
        chain_crc: int = CHAIN.unpack_from(raw, _CHAIN_AT)[0]
        return zlib.crc32(raw[_BODY_FIELDS_AT:HEADER_SIZE_BYTES], head_crc) == chain_crc

    def entry(self, index: int) -> Entry:
        """One of the entries."""
        if len(self.ends) == 1:
            return entry_at(self.raw, 0, len(self.raw))
        number = index - self.first_index
        return entry_at(self.raw, self.ends[number - 1] if number else 0, self.ends[number])

    def entries(self) -> list[Entry]:
        """All of them."""
        return [self.entry(index) for index in range(self.first_index, self.first_index + len(self.ends))]

    def end_of(self, index: int) -> int:
        """Position after an entry."""
        return self.pos + self.ends[index - self.first_index]

    def term_of(self, index: int) -> int:
        """Term of an entry."""
        number = index - self.first_index
        if number == len(self.ends) - 1:
            return self.term
        return int(HEAD.unpack_from(self.raw, self.ends[number - 1] if number else 0)[3])

    def head(self, last_index: int) -> EntryBatch:
        """The entries up to `last_index`, which is one of them."""
        count = last_index - self.first_index + 1
        if count == len(self.ends):
            return self
        last = self.entry(last_index)
        return EntryBatch(
            self.first_index, self.pos, self.raw[: self.ends[count - 1]], self.ends[:count],
            self.units[: count * UNIT_SIZE_BYTES], last.term, last.chain_crc,
            [entry for entry in self.changes if entry.index <= last_index],
        )  # fmt: skip

    def tail(self, first_index: int) -> EntryBatch:
        """The entries from `first_index` on, which is one of them."""
        left = first_index - self.first_index
        if not left:
            return self
        at = self.ends[left - 1]
        return EntryBatch(
            first_index, self.pos + at, self.raw[at:], _moved(self.ends[left:], -at),
            self.units[left * UNIT_SIZE_BYTES :], self.term, self.chain_crc,
            [entry for entry in self.changes if entry.index >= first_index],
        )  # fmt: skip


def _moved(ends: Sequence[int], by: int) -> Sequence[int]:
    if isinstance(ends, range):
        return range(ends.start + by, ends.stop + by, ends.step)
    return [end + by for end in ends]


def batch_of(entry: Entry) -> EntryBatch:
    """A batch of one entry."""
    raw = entry.raw
    unit = UNIT.pack(entry.magic, entry.pos, len(raw), entry.index, entry.term)
    changes = (entry,) if entry.magic == CONFIG_MAGIC else ()
    return EntryBatch(entry.index, entry.pos, raw, (len(raw),), unit, entry.term, entry.chain_crc, changes)


def join_batches(batches: Sequence[EntryBatch]) -> EntryBatch:
    """Join batches that follow each other in one file."""
    first, last = batches[0], batches[-1]
    raw, units = b"".join([batch.raw for batch in batches]), b"".join([batch.units for batch in batches])
    changes = [entry for batch in batches for entry in batch.changes]
    size = first.ends[0]
    if all([batch.is_uniform and batch.ends[0] == size for batch in batches]):
        ends: Sequence[int] = range(size, len(raw) + 1, size)
    else:
        ends = [batch.pos - first.pos + end for batch in batches for end in batch.ends]
    return EntryBatch(first.first_index, first.pos, raw, ends, units, last.term, last.chain_crc, changes)


def encode_batch(
    magic: int, index: int, term: int, pos: int, previous_chain_crc: int, bodies: Sequence[bytes]
) -> EntryBatch:
    """New entries with these bodies, the first with `index` at `pos`. Arguments as for `encode_entry`."""
    if len(bodies) >= LEAST_ENTRIES and magic != CONFIG_MAGIC and len(set(map(len, bodies))) == 1:
        uniform = encode_uniform(magic, index, term, pos, previous_chain_crc, bodies)
        if uniform is not None:
            raw, index_units, last_crc = uniform
            size = HEADER_SIZE_BYTES + len(bodies[0])
            return EntryBatch(index, pos, raw, range(size, len(raw) + 1, size), index_units, term, last_crc)
    crc32, pack_head, pack_chain, pack_fields = zlib.crc32, HEAD.pack, CHAIN.pack, BODY_FIELDS.pack
    pack_unit = UNIT.pack
    chain_crc, number, at = previous_chain_crc, index, pos
    pieces: list[bytes] = []
    units: list[bytes] = []
    ends: list[int] = []
    for body, crc in zip(bodies, crcs_of(bodies), strict=True):
        body_size = len(body)
        size = HEADER_SIZE_BYTES + body_size
        head = pack_head(magic, size, number, term, at, 0)
        fields = pack_fields(crc, body_size)
        chain_crc = crc32(fields, crc32(head, chain_crc))
        pieces += (head, pack_chain(chain_crc), fields, body)
        units.append(pack_unit(magic, at, size, number, term))
        at += size
        number += 1
        ends.append(at - pos)
    raw = b"".join(pieces)
    if len(ends) == 1:  # tuples of numbers cost no garbage collection
        batch = EntryBatch(index, pos, raw, (len(raw),), units[0], term, chain_crc)
    else:
        batch = EntryBatch(index, pos, raw, ends, b"".join(units), term, chain_crc)
    if magic == CONFIG_MAGIC:
        batch.changes = batch.entries()
    return batch


def parse_batches(data: bytes, previous_chain_crc: int | None = None) -> list[EntryBatch]:
    """The entries that fill `data`, in one batch, or more if a file ends in between. Each must follow the previous one
    in index, position and chain, and its term must not be smaller. `previous_chain_crc` as in `parse_entry`. Raises
    BadEntry."""
    batches: list[EntryBatch] = []
    offset, chain_crc = 0, previous_chain_crc
    while offset < len(data):
        batch, problem = scan_batch(data, offset, chain_crc)
        if batch is None or problem:
            raise BadEntry(problem)
        if batches:
            before, first = batches[-1], batch.entry(batch.first_index)
            if first.index != before.last_index + 1 or first.pos < before.end_pos or first.term < before.term:
                raise BadEntry(_no_successor(first.index, first.term, before.last_index))
        batches.append(batch)
        offset, chain_crc = offset + len(batch.raw), batch.chain_crc
    return batches


def scan_batch(
    data: bytes, offset: int = 0, previous_chain_crc: int | None = None, *, most: int | None = None
) -> tuple[EntryBatch | None, str]:
    """The batch of at most `most` entries that begins at `offset` of `data`, and the problem that ended it: "" if that
    was the end of `data`, `most`, or a gap between positions. The batch is None if even the first entry is bad.

    Checks everything that the bytes alone can prove and, given `previous_chain_crc`, that the first entry continues the
    previous one.
    """
    uniform = scan_uniform(data, offset, previous_chain_crc) if most is None else None
    if uniform is not None:
        size, index_units, term, last_crc = uniform
        index, pos = HEADER.unpack_from(data, offset)[2], HEADER.unpack_from(data, offset)[4]
        whole = data[offset:] if offset else data
        return EntryBatch(index, pos, whole, range(size, len(whole) + 1, size), index_units, term, last_crc), ""
    crc32, unpack, pack_unit = zlib.crc32, HEADER.unpack_from, UNIT.pack
    size, view = len(data), memoryview(data)
    start, chain_crc, problem = offset, previous_chain_crc, ""
    first_index = next_index = first_pos = next_pos = last_term = 0
    ends: list[int] = []
    units: list[bytes] = []
    changes: list[Entry] = []
    while offset < size and len(ends) != most:
        body_at = offset + HEADER_SIZE_BYTES
        if body_at > size:
            problem = f"{size - offset} bytes are no entry header"
            break
        magic, entry_size, index, term, pos, channel, own_chain_crc, body_crc, body_size = unpack(data, offset)
        if not ends:
            first_index, first_pos, next_index, next_pos = index, pos, max(index, 0), max(pos, 0)
        end = body_at + body_size
        if (
            index != next_index or pos != next_pos or term < last_term or end > size or body_size < 0 or channel
            or entry_size - body_size != HEADER_SIZE_BYTES or magic not in MAGICS
        ):  # fmt: skip
            problem = _problem(data, offset)
            is_next = index == next_index and pos > next_pos and term >= last_term
            if not problem and not is_next:
                problem = _no_successor(index, term, next_index - 1)
            break
        if crc32(data[body_at:end] if body_size < _LARGE_BYTES else view[body_at:end]) != body_crc:
            problem = f"the body of entry {index} does not match its CRC"
            break
        if chain_crc is not None:
            head_crc = crc32(data[offset : offset + _CHAIN_AT], chain_crc)
            if crc32(data[offset + _BODY_FIELDS_AT : body_at], head_crc) != own_chain_crc:
                problem = f"entry {index} does not match its chain CRC"
                break
        if magic == CONFIG_MAGIC:
            changes.append(entry_at(data, offset, end))
        units.append(pack_unit(magic, pos, entry_size, index, term))
        ends.append(end - start)
        chain_crc, last_term, next_index, next_pos, offset = own_chain_crc, term, index + 1, pos + entry_size, end
    if not ends or chain_crc is None:
        return None, problem
    raw = data if not start and offset == size else data[start:offset]
    return EntryBatch(first_index, first_pos, raw, ends, b"".join(units), last_term, chain_crc, changes), problem


def _problem(data: bytes, offset: int) -> str:
    """What is wrong with the header of an entry at `offset`; "" if nothing is."""
    magic, size, index, term, pos, channel, _, _, body_size = HEADER.unpack_from(data, offset)
    if magic not in MAGICS:
        return f"magic {magic} is unknown"
    if size != HEADER_SIZE_BYTES + body_size or body_size < 0 or index < 0 or term < 0 or pos < 0 or channel != 0:
        return f"the header contradicts itself (index {index}, size {size}, body {body_size})"
    if len(data) - offset < size:
        return f"entry {index} ends after {len(data) - offset} of {size} bytes"
    return ""


def _no_successor(index: int, term: int, before_index: int) -> str:
    return f"entry {index} of term {term} cannot follow entry {before_index}"
