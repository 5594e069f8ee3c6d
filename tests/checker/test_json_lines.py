"""The reader of JSON lines: however its input is split, each line is an object, damaged, or blank."""

from __future__ import annotations

import io
import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from checker.codecs import jsonl
from checker.codecs.jsonl import DamagedLine, JsonLines, read_batches

EVENTS = [{"process": number, "type": "ok", "value": "a\nb}{"} for number in range(5)]
LINES = [json.dumps(event).encode() for event in EVENTS]
WHOLE = st.sampled_from(LINES)
DAMAGED = st.sampled_from([LINES[0][:30], b"\xff\xfe", b"[" * 50_000, b"NaN", LINES[0][:-1] + b"," + LINES[1][1:]])
BLANK = st.sampled_from([b"", b" \r"])


def contents(data: bytes, *pieces: int) -> tuple[list[tuple[int, object]], list[int]]:
    """(line, object) of all objects, and the damaged lines, of data that is fed in pieces."""
    lines = JsonLines()
    edges = [0, *sorted(piece % (len(data) + 1) for piece in pieces), len(data)]
    batches = [lines.feed(data[begin:end]) for begin, end in itertools.pairwise(edges)]
    batches.append(lines.finish())
    found = [pair for batch in batches for pair in zip(batch.numbers, batch.objects, strict=True)]
    return found, [line.number for batch in batches for line in batch.damaged]


@given(st.lists(WHOLE | DAMAGED | BLANK, max_size=8), st.booleans(), st.lists(st.integers(0, 10_000), max_size=6))
@example([LINES[0], LINES[1]], True, [3, len(LINES[0]), len(LINES[0]) + 1])
def test_every_line_is_accounted_for_however_the_input_is_split(
    lines: list[bytes], has_end: bool, pieces: list[int]
) -> None:
    data = b"\n".join(lines) + (b"\n" if has_end else b"")
    expected = [(number, json.loads(line)) for number, line in enumerate(lines, 1) if line in LINES]
    damaged = [number for number, line in enumerate(lines, 1) if line not in LINES and line.strip()]
    assert contents(data) == (expected, damaged)
    assert contents(data, *pieces) == (expected, damaged)


def test_two_merged_lines_are_found_in_a_batch_that_parses() -> None:
    merged = b"\n".join([LINES[0], LINES[1][:-1] + b"," + LINES[2][1:], LINES[3], b""])
    assert json.loads(b"[" + merged.strip().replace(b"\n", b",") + b"]")
    assert contents(merged) == ([(1, EVENTS[0]), (3, EVENTS[3])], [2])


@pytest.mark.parametrize(
    "doubled",
    [
        '{"index":1,"process":0,"type":"ok","type":"fail","f":"write","value":1}',
        '{"index":1,"process":0,"type":"ok","f":"write","value":1,"value":2}',
        '{"index":1,"process":0,"type":"ok","f":"write","value":{"a":{"b":1,"b":2}}}',
        '{"index":1,"process":0,"type":"ok","f":"write","value":[[{"a":1,"a":1}]]}',
        '{"index":1,"process":0,"type" :"ok","type":"fail","f":"write","value":1}',
        '{"index":1,"process":0,"type":"ok","f":"write","value":"\\":","f":"read"}',
        '{"index":1,"process":0,"type":"ok","f":"write","value\\\\":1,"value\\\\":2,"x":"\\":"}',
    ],
)
def test_a_line_with_a_duplicate_name_is_damaged(doubled: str) -> None:
    before = '{"index":0,"process":0,"type":"invoke","f":"write","value":1}'
    after = '{"index":2,"process":0,"type":"invoke","f":"write","value":2}'
    data = f"{before}\n{doubled}\n{after}\n".encode()
    assert json.loads(doubled)
    assert contents(data) == ([(1, json.loads(before)), (3, json.loads(after))], [2])


NAMES = st.text('a":\\ \t')


@given(st.recursive(st.none() | NAMES, lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner)))
def test_a_line_without_duplicate_names_is_never_damaged(value: object) -> None:
    line = json.dumps({"index": 0, "value": value}, separators=(",", ":"))
    assert contents(f"{line}\n{line}\n".encode()) == ([(1, json.loads(line)), (2, json.loads(line))], [])


def test_the_events_before_the_first_damaged_line_are_yielded_and_none_after_it() -> None:
    batch = JsonLines().feed(b"\n".join([LINES[0], b"{", LINES[1], b""]))
    seen = []
    with pytest.raises(DamagedLine) as caught:
        for number, event in batch.whole():
            seen.append((number, event))
    assert seen == [(1, EVENTS[0])]
    assert (caught.value.number, caught.value.is_cut) == (2, False)


def test_only_a_last_line_without_a_newline_is_cut_short() -> None:
    lines = JsonLines()
    assert lines.feed(LINES[0][:9]).damaged == ()
    [cut] = lines.finish().damaged
    assert (cut.number, cut.is_cut, cut.size_bytes) == (1, True, 9)
    [whole] = JsonLines().feed(LINES[0][:9] + b"\n").damaged
    assert not whole.is_cut


def test_a_line_longer_than_the_limit_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "CHUNK_BYTES", 100)
    batches = list(read_batches(io.BytesIO(LINES[0] + b"\n" + b"x" * 5_000), max_line_bytes=1_000))
    [damaged] = [line for batch in batches for line in batch.damaged]
    assert (damaged.number, damaged.reason) == (2, "the line is longer than 1000 bytes")
    assert not damaged.is_cut and len(damaged.text) < 1_000
    assert [found for batch in batches for found in batch.objects] == [EVENTS[0]]
