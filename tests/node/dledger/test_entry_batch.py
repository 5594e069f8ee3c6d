"""Batches: encoded, parsed, split and joined, compared with the same done entry by entry."""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.dledger.entry import CONFIG_MAGIC, NORMAL_MAGIC, BadEntry, Entry, encode_entry, parse_entries
from node.dledger.entry_batch import (
    BODY_PREFIX,
    EntryBatch,
    batch_of,
    encode_batch,
    join_batches,
    parse_batches,
    scan_batch,
)
from node.dledger.index import UNIT_SIZE_BYTES, pack_unit
from node.dledger.tail_cache import TailCache
from node.dledger.uniform_entries import encode_uniform, scan_uniform
from node.interpreter import IS_PYPY
from node.store.checksummed import ChecksummedBodies

uniform_bodies = st.integers(0, 30).flatmap(
    lambda size: st.lists(st.binary(min_size=size, max_size=size), min_size=1, max_size=14)
)
bodies = st.lists(st.binary(max_size=40) | st.just(bytes(2100)), min_size=1, max_size=8) | uniform_bodies
large_numbers = st.integers(0, 1 << 40) | st.integers((1 << 32) - 600, 1 << 32)
GAP_BYTES = 1000


def entries_of(batches: Sequence[EntryBatch]) -> list[Entry]:
    return [entry for batch in batches for entry in batch.entries()]


@st.composite
def logs(draw: st.DrawFn) -> list[Entry]:
    """Consecutive entries with non-decreasing terms and random gaps at the ends of files."""
    log: list[Entry] = []
    start = st.integers(0, 5) | st.integers((1 << 32) - 600, 1 << 32)
    index, term, pos, chain_crc = draw(start), draw(start), draw(start), 9
    is_plain = draw(st.booleans())
    for body in draw(bodies):
        term += 0 if is_plain else draw(st.integers(0, 1))
        magic = 1 if is_plain else draw(st.sampled_from([1, 1, 2, CONFIG_MAGIC]))
        pos += 0 if is_plain else draw(st.sampled_from([0, 0, 0, GAP_BYTES]))
        entry = encode_entry(magic=magic, index=index, term=term, pos=pos, previous_chain_crc=chain_crc, body=body)
        log.append(entry)
        index, pos, chain_crc = index + 1, entry.end_pos, entry.chain_crc
    return log


def raw(entries: Sequence[Entry]) -> bytes:
    return b"".join(entry.raw for entry in entries)


@given(bodies, large_numbers, large_numbers, large_numbers, st.integers(0, (1 << 32) - 1), st.booleans())
def test_encoding_a_batch_equals_encoding_its_entries(
    texts: list[bytes], index: int, term: int, pos: int, chain_crc: int, is_checksummed: bool
) -> None:
    batch = encode_batch(
        NORMAL_MAGIC, index, term, pos, chain_crc, ChecksummedBodies(texts) if is_checksummed else texts
    )
    expected: list[Entry] = []
    at, chain = pos, chain_crc
    for number, body in enumerate(texts, index):
        entry = encode_entry(magic=1, index=number, term=term, pos=at, previous_chain_crc=chain, body=body)
        expected.append(entry)
        at, chain = entry.end_pos, entry.chain_crc
    assert batch.entries() == expected
    assert (batch.first_index, batch.pos, batch.raw) == (index, pos, raw(expected))
    assert batch.units == b"".join(map(pack_unit, expected))
    last = expected[-1]
    assert (batch.last_index, batch.last_pos, batch.end_pos) == (last.index, last.pos, last.end_pos)
    assert (batch.term, batch.chain_crc) == (term, chain)
    for entry in expected:
        assert (batch.entry(entry.index), batch.end_of(entry.index)) == (entry, entry.end_pos)


@given(logs(), st.booleans())
def test_parsing_batches_equals_parsing_entries(log: list[Entry], knows_before: bool) -> None:
    batches = parse_batches(raw(log), 9 if knows_before else None)
    assert entries_of(batches) == log
    assert b"".join(batch.units for batch in batches) == b"".join(map(pack_unit, log))
    changes = [entry for batch in batches for entry in batch.changes]
    assert changes == [each for each in log if each.magic == CONFIG_MAGIC]
    for batch in batches:
        assert [batch.term_of(index) for index in range(batch.first_index, batch.last_index + 1)] == [
            entry.term for entry in batch.entries()
        ]
        last = batch.entries()[-1]
        assert (batch.term, batch.chain_crc) == (last.term, last.chain_crc)
    gaps = sum(before.end_pos != after.pos for before, after in itertools.pairwise(log))
    assert len(batches) == gaps + 1


def outcome(parse: object, data: bytes, before: int | None) -> object:
    try:
        parsed = parse(data, before)  # type: ignore[operator]
    except BadEntry:
        return BadEntry
    return entries_of(parsed) if parse is parse_batches else parsed


@given(logs(), st.data())
def test_the_batch_parser_and_the_entry_parser_refuse_the_same_bytes(log: list[Entry], data: st.DataObject) -> None:
    picked = data.draw(st.lists(st.sampled_from(log), min_size=1, max_size=6) | st.just(log))
    damaged = bytearray(raw(picked))
    for _ in range(data.draw(st.integers(0, 2))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)) | st.just(len(damaged)))])
    before = data.draw(st.sampled_from([None, 9, picked[0].chain_crc]))
    assert outcome(parse_batches, cut, before) == outcome(parse_entries, cut, before)


@given(logs(), st.integers(1, 9))
def test_scanning_returns_the_valid_entries_before_damage(log: list[Entry], most: int) -> None:
    batch, problem = scan_batch(raw(log) + bytes(60), most=most)
    assert batch is not None
    assert batch.entries() == log[: len(batch.ends)] and len(batch.ends) <= most
    assert ("magic 0 is unknown" in problem) == (len(batch.ends) == len(log) < most)
    assert scan_batch(bytes(60), most=most)[0] is None


@given(logs(), st.data())
def test_the_head_and_the_tail_of_a_batch_are_batches(log: list[Entry], data: st.DataObject) -> None:
    batch = parse_batches(raw(log))[0]
    at = 0
    for entry in batch.entries():
        assert struct.unpack_from(f">{BODY_PREFIX}", batch.raw, at) == (entry.magic, zlib.crc32(entry.body))
        at += entry.size_bytes
    index = data.draw(st.integers(batch.first_index, batch.last_index))
    for part, expected in (
        (batch.head(index), [entry for entry in batch.entries() if entry.index <= index]),
        (batch.tail(index), [entry for entry in batch.entries() if entry.index >= index]),
    ):
        assert part.entries() == expected
        assert (part.raw, part.pos, part.first_index) == (raw(expected), expected[0].pos, expected[0].index)
        assert part.units == b"".join(map(pack_unit, expected)) and len(part.units) % UNIT_SIZE_BYTES == 0
        assert (part.term, part.chain_crc) == (expected[-1].term, expected[-1].chain_crc)
        assert list(part.changes) == [entry for entry in expected if entry.magic == CONFIG_MAGIC]


@pytest.mark.skipif(IS_PYPY, reason="loops are faster there")
def test_uniform_size_batches_use_the_vectorised_encoder_and_scanner() -> None:
    texts = [b"body"] * 20
    batch = encode_batch(NORMAL_MAGIC, 5, 1, 100, 7, texts)
    assert encode_uniform(NORMAL_MAGIC, 5, 1, 100, 7, texts) == (batch.raw, batch.units, batch.chain_crc)
    assert scan_uniform(batch.raw, 0, 7) == scan_uniform(batch.raw, 0, None) == (52, batch.units, 1, batch.chain_crc)
    assert scan_uniform(batch.raw, 0, 8) is None
    rest = batch.tail(12)
    assert rest.is_uniform and scan_uniform(batch.raw, 7 * 52, None) == (52, rest.units, 1, batch.chain_crc)
    (parsed,) = parse_batches(batch.raw)
    joined = join_batches([parsed.head(11), parsed.tail(12).head(12), parsed.tail(13)])
    assert parsed.is_uniform and joined.is_uniform and joined.ends == batch.ends and joined.raw == batch.raw
    assert encode_uniform(NORMAL_MAGIC, (1 << 32) - 3, 1, 100, 7, texts) is None, (
        "the upper halves of the indices differ"
    )


def test_a_batch_of_one_entry_holds_that_entry() -> None:
    entry = encode_entry(magic=CONFIG_MAGIC, index=7, term=3, pos=100, previous_chain_crc=5, body=b"body")
    batch = batch_of(entry)
    assert batch.entries() == [entry] == list(batch.changes) and batch.units == pack_unit(entry)
    assert encode_batch(CONFIG_MAGIC, 7, 3, 100, 5, [b"body"]).changes == [entry]


class Model:
    """A tail cache and the list of the entries that it should hold."""

    def __init__(self) -> None:
        self.batches = TailCache()
        self.log: list[Entry] = []

    def add(self, texts: list[bytes], gap: int) -> None:
        index, pos, chain = (
            (self.log[-1].index + 1, self.log[-1].end_pos + gap, self.log[-1].chain_crc) if self.log else (3, 500, 0)
        )
        batch = encode_batch(1, index, 1, pos, chain, texts)
        self.batches.add(batch)
        self.log += batch.entries()

    def begins_batch(self, index: int) -> bool:
        batch = self.batches.find(index)
        return batch is not None and batch.first_index == index

    def check(self) -> None:
        assert self.batches.size_bytes == sum(len(entry.raw) for entry in self.log)
        assert self.batches.begin_pos == (self.log[0].pos if self.log else None)
        for entry in self.log:
            batch = self.batches.find(entry.index)
            assert batch is not None and batch.entry(entry.index) == entry
            assert self.batches.body_at(entry.pos, 1000000) == entry.body
            assert self.batches.body_at(entry.pos, 2) == entry.body[:2]
            assert self.batches.body_at(entry.pos + 1, 2) is None
        if self.log:
            assert self.batches.find(self.log[0].index - 1) is None


@given(st.data())
def test_the_tail_cache_agrees_with_a_list_of_entries(data: st.DataObject) -> None:
    model = Model()
    for _ in range(data.draw(st.integers(1, 10))):
        step = data.draw(st.sampled_from(["add", "add", "add", "cut", "trim", "collect", "join"]))
        if step == "add" or not model.log:
            model.add(data.draw(bodies), data.draw(st.sampled_from([0, 0, GAP_BYTES])))
        elif step == "cut":
            end = data.draw(st.integers(model.log[0].index, model.log[-1].index + 1))
            model.batches.cut(end)
            model.log = [entry for entry in model.log if entry.index < end]
        elif step == "trim":
            written = data.draw(st.integers(model.log[0].index - 1, model.log[-1].index))
            most = data.draw(st.integers(0, 4000))
            before = model.batches.size_bytes
            model.batches.trim(most, written)
            kept = model.batches.size_bytes
            while model.log and sum(len(entry.raw) for entry in model.log) > kept:
                assert model.log.pop(0).index <= written
            assert before == kept or kept <= before
        else:
            first = data.draw(st.integers(model.log[0].index, model.log[-1].index))
            last = data.draw(st.integers(first, model.log[-1].index))
            most = data.draw(st.integers(0, 5000))
            if step == "join":
                model.batches.join(first, last, most)
            found = entries_of(model.batches.collect(first, last, most))
            wanted = [entry for entry in model.log if first <= entry.index <= last]
            assert found == wanted[: len(found)] and found
            sizes = [len(entry.raw) for entry in wanted]
            fit = max(count for count in range(1, len(wanted) + 1) if count == 1 or sum(sizes[:count]) <= most)
            whole = [number for number, entry in enumerate(wanted) if number and model.begins_batch(entry.index)]
            whole.append(len(wanted))
            assert len(found) == (fit if fit < whole[0] else max(count for count in whole if count <= fit))
        model.check()
    if model.log:
        begins = [after.index for before, after in itertools.pairwise(model.log) if before.end_pos != after.pos]
        for index in (model.log[0].index, *begins):
            model.batches.join(index, 1 << 40, 1 << 40)
        model.check()
        joined = model.batches.collect(model.log[0].index, model.log[-1].index, 1 << 40)
        assert len(joined) == len(begins) + 1 and entries_of(joined) == model.log
        assert b"".join(batch.units for batch in joined) == b"".join(map(pack_unit, model.log))
    model.batches.clear()
    assert (model.batches.begin_pos, model.batches.size_bytes) == (None, 0)


def test_the_error_names_the_entry_that_cannot_follow() -> None:
    (first, second) = (
        encode_entry(magic=1, index=index, term=1, pos=0, previous_chain_crc=0, body=b"") for index in (0, 2)
    )
    with pytest.raises(BadEntry, match="entry 2 of term 1 cannot follow entry 0"):
        parse_batches(first.raw + second.raw)
