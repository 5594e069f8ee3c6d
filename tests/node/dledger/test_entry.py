"""Entries: their encoding, what the parser accepts, and the detection of every flipped bit."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.dledger.entry import (
    CONFIG_MAGIC,
    HEADER_SIZE_BYTES,
    NOOP_MAGIC,
    NORMAL_MAGIC,
    BadEntry,
    Entry,
    blank,
    blank_size_at,
    encode_entry,
    parse_entries,
    parse_entry,
    tail_mark,
    tail_mark_at,
)
from node.dledger.index import UNIT_SIZE_BYTES, pack_unit


def chain_of(*bodies: bytes, term: int = 1) -> list[Entry]:
    entries: list[Entry] = []
    for body in bodies:
        before = entries[-1] if entries else None
        entries.append(
            encode_entry(
                magic=NORMAL_MAGIC,
                index=before.index + 1 if before else 0,
                term=term,
                pos=before.end_pos if before else 0,
                previous_chain_crc=before.chain_crc if before else 0,
                body=body,
            )
        )
    return entries


def test_golden_bytes() -> None:
    entry = encode_entry(magic=1, index=2, term=3, pos=4, previous_chain_crc=0, body=b"body")
    body_crc = zlib.crc32(b"body").to_bytes(4, "big")
    head = bytes.fromhex("00000001 00000034 0000000000000002 0000000000000003 0000000000000004 00000000")
    chain_crc = zlib.crc32(body_crc + b"\0\0\0\4", zlib.crc32(head)).to_bytes(4, "big")
    assert entry.raw == head + chain_crc + body_crc + b"\0\0\0\4" + b"body"
    assert HEADER_SIZE_BYTES == 48
    assert (entry.body, entry.body_pos, entry.end_pos, entry.size_bytes) == (b"body", 52, 56, 52)
    assert pack_unit(entry) == bytes.fromhex("00000001 0000000000000004 00000034 0000000000000002 0000000000000003")
    assert UNIT_SIZE_BYTES == 32


def test_only_normal_entries_are_messages() -> None:
    magics = (NORMAL_MAGIC, NOOP_MAGIC, CONFIG_MAGIC)
    assert magics == (1, 2, 3)
    kinds = [encode_entry(magic=magic, index=0, term=0, pos=0, previous_chain_crc=0, body=b"") for magic in magics]
    assert [entry.is_message for entry in kinds] == [True, False, False]


def test_the_chain_crc_covers_all_previous_entries() -> None:
    one, two = chain_of(b"a", b"b", b"c"), chain_of(b"A", b"b", b"c")
    assert one[1].raw[48:] == two[1].raw[48:]
    assert one[2].chain_crc != two[2].chain_crc
    assert parse_entries(b"".join(entry.raw for entry in one), 0) == one
    with pytest.raises(BadEntry, match="entry 2 does not match its chain CRC"):
        parse_entries(one[1].raw + two[2].raw)
    with pytest.raises(BadEntry, match="chain CRC"):
        parse_entry(one[2].raw, 0, two[1].chain_crc)


@pytest.mark.parametrize("broken", [[0, 2], [1, 1], [1, 0]])
def test_entries_with_a_gap_or_a_repetition_are_refused(broken: list[int]) -> None:
    entries = chain_of(b"a", b"b", b"c")
    with pytest.raises(BadEntry, match="does not match its chain CRC"):
        parse_entries(b"".join(entries[index].raw for index in broken))


@pytest.mark.parametrize("index", [0, 2])
def test_an_entry_with_a_wrong_index_is_refused(index: int) -> None:
    first = chain_of(b"a")[0]
    second = encode_entry(
        magic=1, index=index, term=first.term, pos=first.end_pos, previous_chain_crc=first.chain_crc, body=b""
    )
    with pytest.raises(BadEntry, match=f"entry {index} of term {first.term} cannot follow"):
        parse_entries(first.raw + second.raw)


def test_entries_with_a_decreasing_term_are_refused() -> None:
    first = chain_of(b"a", term=5)[0]
    second = encode_entry(magic=1, index=1, term=4, pos=first.end_pos, previous_chain_crc=first.chain_crc, body=b"")
    with pytest.raises(BadEntry, match="term 4 cannot follow"):
        parse_entries(first.raw + second.raw)


@given(
    magic=st.sampled_from((1, 2, 3)),
    index=st.integers(0, 2**63 - 1),
    term=st.integers(0, 2**63 - 1),
    pos=st.integers(0, 2**62),
    chain=st.integers(0, 2**32 - 1),
    body=st.binary(max_size=300),
    padding=st.binary(max_size=20),
)
def test_an_encoded_entry_parses_to_itself(
    magic: int, index: int, term: int, pos: int, chain: int, body: bytes, padding: bytes
) -> None:
    entry = encode_entry(magic=magic, index=index, term=term, pos=pos, previous_chain_crc=chain, body=body)
    assert parse_entry(padding + entry.raw + padding, len(padding), chain) == entry
    assert entry.body == body


@given(body=st.binary(max_size=60), bit=st.integers(0), chain=st.integers(0, 2**32 - 1))
def test_every_flipped_bit_is_detected(body: bytes, bit: int, chain: int) -> None:
    raw = bytearray(encode_entry(magic=1, index=7, term=3, pos=99, previous_chain_crc=chain, body=body).raw)
    bit %= len(raw) * 8
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadEntry):
        parse_entry(bytes(raw), 0, chain)


@given(st.binary(max_size=200))
def test_garbage_raises_nothing_but_bad_entry(data: bytes) -> None:
    try:
        entries = parse_entries(data)
    except BadEntry:
        return
    assert b"".join(entry.raw for entry in entries) == data


def test_a_blank_is_recognised_by_its_magic_and_size() -> None:
    assert blank(8) == b"\xff\xff\xff\xff\0\0\0\x08"
    assert blank(20) == b"\xff\xff\xff\xff\0\0\0\x14" + bytes(12)
    assert blank_size_at(b"xx" + blank(20), 2) == 20
    assert blank_size_at(blank(8)[:7], 0) is None
    assert blank_size_at(chain_of(b"a")[0].raw, 0) is None


def test_a_tail_mark_is_recognised_only_if_intact_and_at_its_position() -> None:
    mark = tail_mark(1000, 900)
    assert len(mark) == 32
    assert tail_mark_at(b"abc" + mark, 3, 1000) == 900
    assert tail_mark_at(mark, 0, 1001) is None
    assert tail_mark_at(mark[:-1], 0, 1000) is None
    assert tail_mark_at(mark, -1, 1000) is None
    for bit in range(28 * 8):
        broken = bytearray(mark)
        broken[bit // 8] ^= 1 << bit % 8
        assert tail_mark_at(bytes(broken), 0, 1000) is None
    with pytest.raises(BadEntry):
        parse_entry(mark + bytes(50))
