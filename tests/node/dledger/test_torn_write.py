"""Torn writes are told from damage by sectors, for every image that a crash can leave."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.exploration.rehearsal import rehearse_test
from harness.test import Test
from nemesis.schedule import HEAL, INJECT, FaultEvent, Schedule
from node.dledger import LedgerCorrupt
from node.dledger.entry import HEADER_SIZE_BYTES, TAIL_MARK_SIZE_BYTES, Entry, encode_entry, tail_mark
from node.dledger.recovery import LogScan
from node.dledger.torn_write import SECTOR_SIZE_BYTES, is_torn_write
from node.store.segments import SegmentedFile
from tests.node.store.conftest import MemoryDisk

SEGMENT = 8192

bodies = st.binary(max_size=40) | st.integers(0, 900).map(bytes) | st.integers(0, 900).map(lambda size: b"x" * size)


def entries_of(*contents: bytes) -> list[Entry]:
    entries: list[Entry] = []
    for index, body in enumerate(contents):
        pos, chain_crc = (entries[-1].end_pos, entries[-1].chain_crc) if entries else (0, 0)
        entries.append(encode_entry(magic=1, index=index, term=7, pos=pos, previous_chain_crc=chain_crc, body=body))
    return entries


def image_of(entries: list[Entry], durable: int) -> bytes:
    """The file after a write that ended with these entries."""
    end = entries[-1].end_pos if entries else 0
    return b"".join(entry.raw for entry in entries) + tail_mark(end, durable)


def scanned(image: bytes) -> tuple[LogScan, SegmentedFile]:
    """The scan of an image, and the files that hold it."""
    disk = MemoryDisk()
    disk.files[f"/data/{0:020d}"] = bytearray(image)
    data = SegmentedFile(disk, "/data", segment_size_bytes=SEGMENT)
    data.open()
    scan = LogScan(data, 0, next_index=0, chain_crc=0)
    scan.run()
    return scan, data


@given(st.lists(bodies, max_size=3), st.lists(bodies, min_size=1, max_size=4), st.data())
def test_no_interrupted_write_is_taken_for_damage(before: list[bytes], last: list[bytes], data: st.DataObject) -> None:
    """Any combination of old and new sectors, and any size that the file had meanwhile."""
    entries = entries_of(*before, *last)
    old = image_of(entries[: len(before)], 0) if before else b""
    new = image_of(entries, len(old))
    pieces = []
    for start in range(0, len(new), SECTOR_SIZE_BYTES):
        is_new = data.draw(st.booleans(), label=f"sector at {start} was written")
        stop = min(start + SECTOR_SIZE_BYTES, len(new))
        pieces.append(new[start:stop] if is_new else old[start:stop].ljust(stop - start, b"\0"))
    size = data.draw(st.sampled_from((len(new), len(old))) | st.integers(len(old), len(new)), label="size")
    scan, files = scanned(b"".join(pieces)[:size])
    assert is_torn_write(files, scan.stopped_at), scan.reason


@given(st.lists(bodies, max_size=3), st.lists(bodies, min_size=1, max_size=4), st.data())
@example([b"x" * 415], [b"", b"a"], None)
def test_a_flipped_bit_is_damage_unless_a_sector_may_be_old(
    before: list[bytes], last: list[bytes], data: st.DataObject | None
) -> None:
    """The oracle compares the entry with what stood there before the last write, sector by sector."""
    entries = entries_of(*before, *last)
    old = image_of(entries[: len(before)], 0) if before else b""
    new = image_of(entries, len(old))
    begin = entries[len(before)].pos
    at = data.draw(st.integers(begin, entries[-1].end_pos - 1), label="flipped at") if data else begin + 41
    bit = data.draw(st.integers(0, 7), label="bit") if data else 3
    damaged = bytearray(new)
    damaged[at] ^= 1 << bit
    scan, files = scanned(bytes(damaged))
    entry = next(each for each in entries if at < each.end_pos)
    assert scan.stopped_at == entry.pos, scan.reason
    old = old.ljust(len(new), b"\0")
    is_sized = not (at - entry.pos < 8 or 44 <= at - entry.pos < 48) or (at - entry.pos, bit) == (3, 1)
    end = entry.end_pos if is_sized else entry.pos + HEADER_SIZE_BYTES  # otherwise its size is unknown
    first_sector = entry.pos // SECTOR_SIZE_BYTES * SECTOR_SIZE_BYTES
    parts = [
        slice(max(start, entry.pos), min(start + SECTOR_SIZE_BYTES, end))
        for start in range(first_sector, end, SECTOR_SIZE_BYTES)
    ]
    can_be_old = any(damaged[part] == old[part] for part in parts)
    if entry.pos > begin and parts[0].stop - entry.pos <= 3 and can_be_old:
        # Its sector begins with entries of the same write, so that it is known to be new: fewer may be old.
        can_be_old = any(damaged[part] == old[part] for part in parts[1:])
    assert is_torn_write(files, scan.stopped_at) is can_be_old


@pytest.mark.parametrize("offset", [0, 5, 12, 20, 30, 34, 38, 42, 46, 60])
@pytest.mark.parametrize("is_only", [False, True])
def test_damage_in_the_last_write_of_a_killed_process_is_refused(bench: Any, offset: int, is_only: bool) -> None:
    """Nothing was written after it: no checkpoint, no index, no later tail mark."""

    async def scenario(bench: Any) -> None:
        store = await bench.open()
        if not is_only:
            bench.append(store, b"before")
            await bench.flushed(store)
        (entry,) = bench.append(store, b"acknowledged " * 30)
        await bench.flushed(store)
        bench.kill()
        bench.flip(entry.pos + offset)
        with pytest.raises(LedgerCorrupt, match="although all of it had been written") as caught:
            await bench.open()
        assert (caught.value.path, caught.value.offset_bytes) == (bench.path(0), entry.pos)
        bench.kill()
        bench.flip(entry.pos + offset)
        assert (await bench.open()).get(entry.index) == entry

    bench(scenario)


@pytest.mark.parametrize("at", range(TAIL_MARK_SIZE_BYTES))
def test_a_damaged_tail_mark_loses_no_entry(bench: Any, at: int) -> None:
    async def scenario(bench: Any) -> None:
        store = await bench.open()
        (entry,) = bench.append(store, b"acknowledged " * 30)
        await bench.flushed(store)
        bench.kill()
        bench.flip(entry.end_pos + at, bit=at % 8)
        assert (await bench.open()).get(0) == entry

    bench(scenario)


@pytest.mark.computed
def test_a_bit_flipped_at_rest_loses_no_entry() -> None:
    """A run that once lost one: a bit is flipped in the only entry of a replica that was killed at once."""
    schedule = Schedule(
        (
            FaultEvent(at_s=0.2632, action=INJECT, fault_id="f1", nemesis="bit-flip", variant="log@one"),
            FaultEvent(at_s=1.038, action=HEAL, fault_id="f1", nemesis="bit-flip", variant="log@one"),
            FaultEvent(at_s=2.6519, action=INJECT, fault_id="f0", nemesis="partition", variant="leader"),
            FaultEvent(at_s=3.492, action=HEAL, fault_id="f0", nemesis="partition", variant="leader"),
        )
    )
    test = Test(
        system="broker", cluster="sim", nodes=3, workload="delay", nemesis=(), nemesis_interval_s=5.0,
        time_limit_s=4.0, concurrency=4, rate=60.0, seed=652969865,
    )  # fmt: skip
    assert rehearse_test(test, schedule).symptoms == ()
