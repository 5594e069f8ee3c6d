"""Rows: made, parsed, cut and put together, held against the same done entry by entry."""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.dledger.entry import CONFIG_MAGIC, NORMAL_MAGIC, BadEntry, Entry, encode_entry, parse_entries
from node.dledger.entry_batch import BODY_PREFIX, EntryBatch, encode_batch, join_rows, parse_batches, row_of, scan_batch
from node.dledger.index import UNIT_SIZE_BYTES, pack_unit
from node.dledger.newest import NewestRows
from node.dledger.uniform_entries import encode_uniform, scan_uniform
from node.store.checksummed import ChecksummedBodies

even_bodies = st.integers(0, 30).flatmap(
    lambda size: st.lists(st.binary(min_size=size, max_size=size), min_size=1, max_size=14)
)
bodies = st.lists(st.binary(max_size=40) | st.just(bytes(2100)), min_size=1, max_size=8) | even_bodies
big = st.integers(0, 1 << 40) | st.integers((1 << 32) - 600, 1 << 32)
GAP_BYTES = 1000


def entries_of(rows: Sequence[EntryBatch]) -> list[Entry]:
    return [entry for row in rows for entry in row.entries()]


@st.composite
def logs(draw: st.DrawFn) -> list[Entry]:
    """Entries that follow each other, of terms that grow, in files that end here and there."""
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


@given(bodies, big, big, big, st.integers(0, (1 << 32) - 1), st.booleans())
def test_a_row_is_made_of_what_its_entries_are(
    texts: list[bytes], index: int, term: int, pos: int, chain_crc: int, is_summed: bool
) -> None:
    row = encode_batch(NORMAL_MAGIC, index, term, pos, chain_crc, ChecksummedBodies(texts) if is_summed else texts)
    expected: list[Entry] = []
    at, chain = pos, chain_crc
    for number, body in enumerate(texts, index):
        entry = encode_entry(magic=1, index=number, term=term, pos=at, previous_chain_crc=chain, body=body)
        expected.append(entry)
        at, chain = entry.end_pos, entry.chain_crc
    assert row.entries() == expected
    assert (row.first_index, row.pos, row.raw) == (index, pos, raw(expected))
    assert row.units == b"".join(map(pack_unit, expected))
    assert (row.last_index, row.last_pos, row.end_pos) == (expected[-1].index, expected[-1].pos, expected[-1].end_pos)
    assert (row.term, row.chain_crc) == (term, chain)
    for entry in expected:
        assert (row.entry(entry.index), row.end_of(entry.index)) == (entry, entry.end_pos)


@given(logs(), st.booleans())
def test_rows_are_parsed_as_entries_are(log: list[Entry], knows_before: bool) -> None:
    rows = parse_batches(raw(log), 9 if knows_before else None)
    assert entries_of(rows) == log
    assert b"".join(row.units for row in rows) == b"".join(map(pack_unit, log))
    assert [entry for row in rows for entry in row.changes] == [each for each in log if each.magic == CONFIG_MAGIC]
    for row in rows:
        assert [row.term_of(index) for index in range(row.first_index, row.last_index + 1)] == [
            entry.term for entry in row.entries()
        ]
        last = row.entries()[-1]
        assert (row.term, row.chain_crc) == (last.term, last.chain_crc)
    gaps = sum(before.end_pos != after.pos for before, after in itertools.pairwise(log))
    assert len(rows) == gaps + 1


def outcome(parse: object, data: bytes, before: int | None) -> object:
    try:
        parsed = parse(data, before)  # type: ignore[operator]
    except BadEntry:
        return BadEntry
    return entries_of(parsed) if parse is parse_batches else parsed


@given(logs(), st.data())
def test_whatever_is_refused_entry_by_entry_is_refused_in_rows(log: list[Entry], data: st.DataObject) -> None:
    picked = data.draw(st.lists(st.sampled_from(log), min_size=1, max_size=6) | st.just(log))
    damaged = bytearray(raw(picked))
    for _ in range(data.draw(st.integers(0, 2))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)) | st.just(len(damaged)))])
    before = data.draw(st.sampled_from([None, 9, picked[0].chain_crc]))
    assert outcome(parse_batches, cut, before) == outcome(parse_entries, cut, before)


@given(logs(), st.integers(1, 9))
def test_what_is_good_before_something_bad_can_be_had(log: list[Entry], most: int) -> None:
    row, problem = scan_batch(raw(log) + bytes(60), most=most)
    assert row is not None
    assert row.entries() == log[: len(row.ends)] and len(row.ends) <= most
    assert ("magic 0 is unknown" in problem) == (len(row.ends) == len(log) < most)
    assert scan_batch(bytes(60), most=most)[0] is None


@given(logs(), st.data())
def test_heads_and_tails_are_rows_themselves(log: list[Entry], data: st.DataObject) -> None:
    row = parse_batches(raw(log))[0]
    at = 0
    for entry in row.entries():
        assert struct.unpack_from(f">{BODY_PREFIX}", row.raw, at) == (entry.magic, zlib.crc32(entry.body))
        at += entry.size_bytes
    index = data.draw(st.integers(row.first_index, row.last_index))
    for part, expected in (
        (row.head(index), [entry for entry in row.entries() if entry.index <= index]),
        (row.tail(index), [entry for entry in row.entries() if entry.index >= index]),
    ):
        assert part.entries() == expected
        assert (part.raw, part.pos, part.first_index) == (raw(expected), expected[0].pos, expected[0].index)
        assert part.units == b"".join(map(pack_unit, expected)) and len(part.units) % UNIT_SIZE_BYTES == 0
        assert (part.term, part.chain_crc) == (expected[-1].term, expected[-1].chain_crc)
        assert list(part.changes) == [entry for entry in expected if entry.magic == CONFIG_MAGIC]


def test_rows_of_entries_of_one_size_are_made_and_parsed_without_a_loop() -> None:
    texts = [b"body"] * 20
    row = encode_batch(NORMAL_MAGIC, 5, 1, 100, 7, texts)
    assert encode_uniform(NORMAL_MAGIC, 5, 1, 100, 7, texts) == (row.raw, row.units, row.chain_crc)
    assert scan_uniform(row.raw, 0, 7) == scan_uniform(row.raw, 0, None) == (52, row.units, 1, row.chain_crc)
    assert scan_uniform(row.raw, 0, 8) is None
    rest = row.tail(12)
    assert rest.is_uniform and scan_uniform(row.raw, 7 * 52, None) == (52, rest.units, 1, row.chain_crc)
    (parsed,) = parse_batches(row.raw)
    joined = join_rows([parsed.head(11), parsed.tail(12).head(12), parsed.tail(13)])
    assert parsed.is_uniform and joined.is_uniform and joined.ends == row.ends and joined.raw == row.raw
    assert encode_uniform(NORMAL_MAGIC, (1 << 32) - 3, 1, 100, 7, texts) is None, "numbers with different upper halves"


def test_a_row_of_one_entry_is_that_entry() -> None:
    entry = encode_entry(magic=CONFIG_MAGIC, index=7, term=3, pos=100, previous_chain_crc=5, body=b"body")
    row = row_of(entry)
    assert row.entries() == [entry] == list(row.changes) and row.units == pack_unit(entry)
    assert encode_batch(CONFIG_MAGIC, 7, 3, 100, 5, [b"body"]).changes == [entry]


class Model:
    """The newest rows as a list of entries."""

    def __init__(self) -> None:
        self.rows = NewestRows()
        self.log: list[Entry] = []

    def add(self, texts: list[bytes], gap: int) -> None:
        index, pos, chain = (
            (self.log[-1].index + 1, self.log[-1].end_pos + gap, self.log[-1].chain_crc) if self.log else (3, 500, 0)
        )
        row = encode_batch(1, index, 1, pos, chain, texts)
        self.rows.add(row)
        self.log += row.entries()

    def check(self) -> None:
        assert self.rows.size_bytes == sum(len(entry.raw) for entry in self.log)
        assert self.rows.begin_pos == (self.log[0].pos if self.log else None)
        for entry in self.log:
            row = self.rows.find(entry.index)
            assert row is not None and row.entry(entry.index) == entry
            assert self.rows.body_at(entry.pos, 1000000) == entry.body
            assert self.rows.body_at(entry.pos, 2) == entry.body[:2]
            assert self.rows.body_at(entry.pos + 1, 2) is None
        if self.log:
            assert self.rows.find(self.log[0].index - 1) is None


@given(st.data())
def test_the_newest_rows_are_those_that_were_added_and_not_cut_or_trimmed(data: st.DataObject) -> None:
    model = Model()
    for _ in range(data.draw(st.integers(1, 10))):
        step = data.draw(st.sampled_from(["add", "add", "add", "cut", "trim", "collect", "join"]))
        if step == "add" or not model.log:
            model.add(data.draw(bodies), data.draw(st.sampled_from([0, 0, GAP_BYTES])))
        elif step == "cut":
            end = data.draw(st.integers(model.log[0].index, model.log[-1].index + 1))
            model.rows.cut(end)
            model.log = [entry for entry in model.log if entry.index < end]
        elif step == "trim":
            written = data.draw(st.integers(model.log[0].index - 1, model.log[-1].index))
            most = data.draw(st.integers(0, 4000))
            before = model.rows.size_bytes
            model.rows.trim(most, written)
            kept = model.rows.size_bytes
            while model.log and sum(len(entry.raw) for entry in model.log) > kept:
                assert model.log.pop(0).index <= written
            assert before == kept or kept <= before
        else:
            first = data.draw(st.integers(model.log[0].index, model.log[-1].index))
            last = data.draw(st.integers(first, model.log[-1].index))
            most = data.draw(st.integers(0, 5000))
            if step == "join":
                model.rows.join(first, last, most)
            found = entries_of(model.rows.collect(first, last, most))
            wanted = [entry for entry in model.log if first <= entry.index <= last]
            assert found == wanted[: len(found)] and found
            sizes = [len(entry.raw) for entry in wanted]
            fit = max(count for count in range(1, len(wanted) + 1) if count == 1 or sum(sizes[:count]) <= most)
            assert len(found) == fit
        model.check()
    if model.log:
        begins = [after.index for before, after in itertools.pairwise(model.log) if before.end_pos != after.pos]
        for index in (model.log[0].index, *begins):
            model.rows.join(index, 1 << 40, 1 << 40)
        model.check()
        joined = model.rows.collect(model.log[0].index, model.log[-1].index, 1 << 40)
        assert len(joined) == len(begins) + 1 and entries_of(joined) == model.log
        assert b"".join(row.units for row in joined) == b"".join(map(pack_unit, model.log))
    model.rows.clear()
    assert (model.rows.begin_pos, model.rows.size_bytes) == (None, 0)


def test_an_entry_that_no_row_can_hold_says_why() -> None:
    (first, second) = (
        encode_entry(magic=1, index=index, term=1, pos=0, previous_chain_crc=0, body=b"") for index in (0, 2)
    )
    with pytest.raises(BadEntry, match="entry 2 of term 1 cannot follow entry 0"):
        parse_batches(first.raw + second.raw)
