"""Batches of entries of the same size, as is common: encoded and verified column by column.

Where a loop would handle one entry at a time, one built-in function handles a whole column of them. The results are
those of `node.dledger.entry_batch`, as the tests check: anything that is not plainly valid is left to it.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

from node.dledger.entry import BODY_FIELDS, HEAD, HEADER, HEADER_SIZE_BYTES, NOOP_MAGIC, NORMAL_MAGIC
from node.interpreter import least_rows
from node.store.checksummed import crcs_of
from node.store.columns import pack_table, progression

__all__ = ["LEAST_ENTRIES", "encode_uniform", "scan_uniform"]

LEAST_ENTRIES = least_rows(6)
"""With fewer entries, a loop is as fast."""
SIZES_REMEMBERED = 64

_COVERED = struct.Struct(f"{HEAD.size + BODY_FIELDS.size}s")
"""What the chain CRC of an entry covers: the fields before and after that CRC, without it."""
_HEADER = struct.Struct(f"{HEADER_SIZE_BYTES}s")


@lru_cache(maxsize=SIZES_REMEMBERED)
def _pieces(body_size: int) -> struct.Struct:
    return struct.Struct(f">{HEAD.size}sI{BODY_FIELDS.size}s{body_size}s")


def _split(term: int) -> tuple[int, int]:
    return term >> 32, term & 0xFFFFFFFF


def encode_uniform(
    magic: int, index: int, term: int, pos: int, previous_chain_crc: int, bodies: Sequence[bytes]
) -> tuple[bytes, bytes, int] | None:
    """New entries with these bodies, which have the same size: the entries' bytes, their index units, and the chain CRC
    of the last. None if that takes a loop. Arguments as for `encode_batch`."""
    crc32, count, body_size, chain_crc = zlib.crc32, len(bodies), len(bodies[0]), previous_chain_crc
    size = HEADER_SIZE_BYTES + body_size
    indices, places = progression(index, count, 1), progression(pos, count, size)
    if indices is None or places is None:
        return None
    head = [magic, size, indices[0], 0, *_split(term), places[0], 0, 0]
    columns = [(3, indices[1]), (7, places[1])]
    crcs = array("I", crcs_of(bodies))
    covered = pack_table([*head, 0, body_size], count, [*columns, (9, crcs)])
    chain_crcs = array("I", [chain_crc := crc32(each, chain_crc) for (each,) in _COVERED.iter_unpack(covered)])
    headers = pack_table([*head, 0, 0, body_size], count, [*columns, (9, chain_crcs), (10, crcs)])
    pieces = [b""] * (2 * count)
    pieces[::2], pieces[1::2] = chain.from_iterable(_HEADER.iter_unpack(headers)), bodies
    return b"".join(pieces), _units(magic, size, term, indices, places, count), chain_crc


def scan_uniform(data: bytes, offset: int, previous_chain_crc: int | None) -> tuple[int, bytes, int, int] | None:
    """The entries that fill `data` from `offset` on, if they are valid and have the same size and term: the size of
    each, their index units, the term, and the chain CRC of the last. Otherwise None."""
    left = len(data) - offset
    if left < HEADER_SIZE_BYTES:
        return None
    magic, size, index, term, pos, channel, first_crc, _, body_size = HEADER.unpack_from(data, offset)
    if (
        magic not in (NORMAL_MAGIC, NOOP_MAGIC) or size - body_size != HEADER_SIZE_BYTES or body_size < 0
        or term < 0 or channel or left % size or left < LEAST_ENTRIES * size
    ):  # fmt: skip
        return None
    crc32, count = zlib.crc32, left // size
    indices, places = progression(index, count, 1), progression(pos, count, size)
    if indices is None or places is None:
        return None
    heads, chain_crcs, fields, bodies = zip(
        *_pieces(body_size).iter_unpack(memoryview(data)[offset:] if offset else data), strict=True
    )
    crcs = array("I", map(crc32, bodies))
    if b"".join(fields) != pack_table([0, body_size], count, [(0, crcs)]):
        return None
    head = [magic, size, indices[0], 0, *_split(term), places[0], 0, 0]
    if b"".join(heads) != pack_table(head, count, [(3, indices[1]), (7, places[1])]):
        return None
    if previous_chain_crc is None:
        crc, begin = first_crc, 1
    else:
        crc, begin = previous_chain_crc, 0
    computed = [crc := crc32(own, crc32(head, crc)) for head, own in zip(heads[begin:], fields[begin:], strict=True)]
    if computed != list(chain_crcs[begin:]):
        return None
    return size, _units(magic, size, term, indices, places, count), term, crc


def _units(
    magic: int, size: int, term: int, indices: tuple[int, array[int]], places: tuple[int, array[int]], count: int
) -> bytes:
    """The units of entries of the same size; see `node.dledger.index`."""
    batch = [magic, places[0], 0, size, indices[0], 0, *_split(term)]
    return pack_table(batch, count, [(2, places[1]), (5, indices[1])])
