"""The message index: golden bytes, a brute-force oracle, rebuilding, crashes between checkpoints."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.store.index_file import MessageIndex, _Header, _IndexFile, _pages, _used_pages, key_hash, keys_of
from node.store.record import RecordSummary, java_string_hash


def record(offset: int, keys: str, *, topic: str = "t", stored_ms: int = 1_700_000_000_000) -> RecordSummary:
    text = f"KEYS\x01{keys}\x02" if keys else ""
    return RecordSummary(topic, 0, 0, offset, 0, stored_ms, None, text, 0)


@pytest.fixture
def new_index(tmp_path: Path) -> Any:
    from node.real_runtime import real_runtime

    def make(name: str = "index", **options: int) -> MessageIndex:
        return MessageIndex(real_runtime(1).disk, str(tmp_path / name), **{"slots": 7, "entries": 5, **options})

    return make


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.mechanism("IndexFile")
def test_the_file_has_the_rocketmq_format_byte_for_byte(new_index: Any, tmp_path: Path) -> None:
    index = new_index(slots=4, entries=10)
    index.restore(None)
    index.dispatch(record(48, "a", stored_ms=1000))
    index.dispatch(record(300, "b", stored_ms=3999))
    index.dispatch(record(700, "a", stored_ms=4000))
    asyncio.run(index.flush())
    # "t#a": 116*31*31 + 35*31 + 97 = 112658, modulo 4 is 2; "t#b" is 112659, modulo 4 is 3
    slots = (0, 0, 3, 2)
    entries = [(0, 0, 0, 0), (112658, 48, 0, 0), (112659, 300, 2, 0), (112658, 700, 3, 1)]
    expected = struct.pack(">qqqqii", 1000, 4000, 48, 700, 2, 4)
    expected += struct.pack(">4i", *slots) + b"".join(struct.pack(">iqii", *entry) for entry in entries)
    assert files(tmp_path / "index") == {f"{48:020d}": expected}


def test_key_hashes_match_those_of_java() -> None:
    for topic, key in (("t", "a"), ("topic", "KEY-0001" * 7), ("t", "é"), ("t", "x" * 2000), ("%RETRY%g", "")):
        assert key_hash(topic, key) == abs(java_string_hash(f"{topic}#{key}"))
    assert java_string_hash("polygenelubricants") == -(1 << 31)


def test_keys_are_split_at_blanks_and_include_the_unique_key() -> None:
    assert keys_of("UNIQ_KEY\x01u\x02KEYS\x01a  b\x02") == ["u", "a", "b"]
    assert keys_of("TAGS\x01KEYS\x02") == []
    assert len(keys_of("KEYS\x01" + " ".join(map(str, range(1000))) + "\x02")) == 64


Messages = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", "a b", "Aa", "BB", ""]), st.integers(0, 3), st.booleans()), max_size=30
)


@settings(max_examples=60, deadline=None)
@given(Messages, st.integers(0, 40), st.integers(0, 40), st.integers(1, 8))
def test_find_agrees_with_a_full_scan(
    tmp_path_factory: pytest.TempPathFactory, sent: Any, begin_s: int, length_s: int, most: int
) -> None:
    from node.real_runtime import real_runtime

    directory = tmp_path_factory.mktemp("index")
    index = MessageIndex(real_runtime(1).disk, str(directory), slots=3, entries=5)
    index.restore(None)
    stored_ms, all_messages = 0, []
    for number, (keys, step_s, flush) in enumerate(sent):
        stored_ms += 1000 * step_s
        index.dispatch(record(number * 100, keys, stored_ms=stored_ms))
        all_messages.append((number * 100, keys.split(), stored_ms))
        if flush:
            asyncio.run(index.flush())
    begin_ms, end_ms = 1000 * begin_s, 1000 * (begin_s + length_s)
    for key in ("a", "b", "Aa", "z"):
        same = ("Aa", "BB") if key == "Aa" else (key,)  # these two have the same hash
        expected = [
            offset
            for offset, keys, stored in all_messages
            if any(each in keys for each in same) and begin_ms <= stored <= end_ms
        ][-most:]
        assert index.find("t", key, begin_ms=begin_ms, end_ms=end_ms, most=most) == expected
    index.close()


def test_a_rebuilt_index_has_the_same_files_and_a_full_file_is_followed(new_index: Any, tmp_path: Path) -> None:
    first, second = new_index("one"), new_index("two")
    for index in (first, second):
        index.restore(None)
    for number in range(23):
        message = record(number * 100, f"k{number % 5} x", stored_ms=1000 * number)
        first.dispatch(message)
        second.dispatch(message)
        if number % 4 == 0:
            asyncio.run(first.flush())
    asyncio.run(first.flush())
    asyncio.run(second.flush())
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert len(files(tmp_path / "one")) == 12
    asyncio.run(first.remove_before(1200))
    assert first.find("t", "x", begin_ms=0, end_ms=10**9, most=64)[0] == 1200, (
        "1100 is still in a file, but is not found"
    )
    assert len(files(tmp_path / "one")) == 6


@pytest.mark.parametrize("turns", range(1, 12))
def test_files_removed_during_a_flush_do_not_fail_it_and_stay_removed(
    new_index: Any, tmp_path: Path, turns: int
) -> None:
    async def scenario() -> None:
        index = new_index()
        index.restore(None)
        for number in range(30):
            index.dispatch(record(number * 100, "x"))
        flushed = asyncio.ensure_future(index.flush())
        for _ in range(turns):
            await asyncio.sleep(0)
        await index.remove_before(2600)
        assert index.find("t", "x", begin_ms=0, end_ms=10**13, most=64) == [2600, 2700, 2800, 2900]
        await flushed
        assert list(files(tmp_path / "index")) == [f"{2400:020d}", f"{2800:020d}"]

    asyncio.run(scenario())


def test_after_a_crash_newer_files_are_rolled_back_to_the_checkpoint(new_index: Any, tmp_path: Path) -> None:
    messages = [record(number * 100, f"k{number % 3}", stored_ms=1000 * number) for number in range(12)]
    index = new_index(entries=100)
    index.restore(None)
    for message in messages[:5]:
        index.dispatch(message)
    checkpoint = index.snapshot()
    asyncio.run(index.flush())
    for message in messages[5:9]:
        index.dispatch(message)
    asyncio.run(index.flush())  # written, but not covered by a checkpoint
    again = new_index(entries=100)
    again.restore(checkpoint)
    for key in range(3):
        expected = [number * 100 for number in range(5) if number % 3 == key]
        assert again.find("t", f"k{key}", begin_ms=0, end_ms=10**9, most=64) == expected
    for message in messages[5:]:
        again.dispatch(message)
    asyncio.run(again.flush())
    never_crashed = new_index("other", entries=100)
    never_crashed.restore(None)
    for message in messages:
        never_crashed.dispatch(message)
    asyncio.run(never_crashed.flush())
    assert files(tmp_path / "index") == files(tmp_path / "other")


def test_files_that_do_not_match_the_checkpoint_are_refused(new_index: Any, tmp_path: Path) -> None:
    index = new_index(entries=100)
    index.restore(None)
    for number in range(5):
        index.dispatch(record(number * 100, "k"))
    asyncio.run(index.flush())
    state = index.snapshot()
    path = tmp_path / "index" / f"{0:020d}"
    with pytest.raises(ValueError, match="other sizes"):
        new_index(entries=99).restore(state)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match="too short"):
        new_index(entries=100).restore(state)
    path.unlink()
    with pytest.raises(ValueError, match="missing"):
        new_index(entries=100).restore(state)


def test_unknown_files_are_removed(new_index: Any, tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / f"{77:020d}").write_bytes(b"old")
    index = new_index()
    index.restore(None)
    index.dispatch(record(0, "k"))
    asyncio.run(index.flush())
    assert list(files(tmp_path / "index")) == [f"{0:020d}"]


def test_an_index_with_a_flipped_bit_is_not_restored(new_index: Any, tmp_path: Path) -> None:
    """In any entry or slot of any file: otherwise a query would silently miss messages."""
    index = new_index()
    index.restore(None)
    for number in range(10):
        index.dispatch(record(100 * number, f"k{number}"))
    state = index.snapshot()
    index.dispatch(record(5000, "later"))
    asyncio.run(index.flush())
    index.close()
    again = new_index()
    again.restore(state)
    assert [again.find("t", f"k{number}", begin_ms=0, end_ms=1 << 60, most=9) for number in (0, 9)] == [[0], [900]]
    paths = sorted((tmp_path / "index").iterdir())
    assert len(paths) == 3
    entries_at = 40 + 4 * 7 + 20
    for path, counted in zip(paths, state["files"], strict=True):
        content = bytearray(path.read_bytes())
        slots_at = range(40, 40 + 4 * 7) if path != paths[-1] else range(0)  # those may be ahead of the snapshot
        for at in [*slots_at, *range(entries_at, entries_at + 20 * (counted[6] - 1))]:
            content[at] ^= 1 << at % 8
            path.write_bytes(content)
            with pytest.raises(ValueError, match="damaged"):
                new_index().restore(state)
            content[at] ^= 1 << at % 8
        path.write_bytes(content)
    new_index().restore(state)


@pytest.mark.parametrize("from_byte", [0, 60])
def test_an_unreadable_file_is_reported_as_damaged(
    new_index: Any, monkeypatch: pytest.MonkeyPatch, from_byte: int
) -> None:
    """So the index is rebuilt and the broker starts."""
    index = new_index()
    index.restore(None)
    index.dispatch(record(100, "k"))
    asyncio.run(index.flush())
    state = index.snapshot()
    index.close()
    pread = os.pread

    def fails(descriptor: int, size_bytes: int, offset: int) -> bytes:
        if offset + size_bytes > from_byte:
            raise OSError(errno.EIO, "Input/output error")
        return pread(descriptor, size_bytes, offset)

    monkeypatch.setattr(os, "pread", fails)
    with pytest.raises(ValueError, match=r"damaged: .*Input/output error"):
        new_index().restore(state)


def test_slots_ahead_of_the_snapshot_are_rolled_back_and_then_verified(new_index: Any, tmp_path: Path) -> None:
    index = new_index(entries=50)
    index.restore(None)
    for number in range(9):
        index.dispatch(record(100 * number, f"k{number}"))
    state = index.snapshot()
    for number in range(9, 20):
        index.dispatch(record(100 * number, f"k{number}"))
    asyncio.run(index.flush())
    index.close()
    again = new_index(entries=50)
    again.restore(state)
    assert again.snapshot()["files"] == state["files"]
    (path,) = (tmp_path / "index").iterdir()
    content = bytearray(path.read_bytes())
    refused = 0
    for at in range(40, 40 + 4 * 7):
        content[at] ^= 1
        path.write_bytes(content)
        try:
            new_index(entries=50).restore(state)
        except ValueError:
            refused += 1
        content[at] ^= 1
    assert refused >= 3 * 7, (
        "only a slot that leads to a later entry of its own chain is rolled back in spite of damage"
    )


@pytest.mark.parametrize("slots", [1, 7, 1023, 1024, 1025, 5000])
def test_the_known_checksums_of_empty_slots_equal_computed_ones(slots: int) -> None:
    computed, known = (_IndexFile("f", slots, _Header()) for _ in range(2))
    computed.sum_anew(array("i", bytes(4 * slots)), range(-(-slots // 1024)))
    known.sum_empty()
    assert known._page_crcs == computed._page_crcs


@given(size=st.integers(1, 9 * 1024), used=st.dictionaries(st.integers(0, 9 * 1024 - 1), st.integers(0, 2**31 - 1)))
def test_used_pages_are_exactly_those_with_entries(size: int, used: dict[int, int]) -> None:
    slots = array("i", bytes(4 * size))
    for slot, number in used.items():
        if slot < size:
            slots[slot] = number
    pages = -(-size // 1024)
    found = _used_pages(_pages(slots, 0, pages - 1))
    assert found == sorted({slot // 1024 for slot, number in used.items() if slot < size and number})
    one, other = (_IndexFile("f", size, _Header()) for _ in range(2))
    assert one.sum_anew(slots, found) == other.sum_anew(slots, range(pages))
    assert one._page_crcs == other._page_crcs
