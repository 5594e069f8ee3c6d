"""Consume queues: unit bytes, reads across files and memory, restoring to a checkpoint."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.store.consume_queue import ConsumeQueue, QueueGap, Unit, pack_unit, pack_units
from node.store.file_cache import FileCache


def make(disk: Any, *, units_per_file: int = 4, max_open: int = 256) -> ConsumeQueue:
    files = FileCache(disk, max_open=max_open)
    return ConsumeQueue(disk, files, "/q/topic/0", units_per_file=units_per_file)


def fill(queue: ConsumeQueue, count: int) -> list[Unit]:
    start = queue.max_offset
    units = [Unit(number * 1000, 100 + number, -number) for number in range(start, start + count)]
    for number, unit in enumerate(units, start):
        assert queue.append(number, unit.physical_offset, unit.size_bytes, unit.tag_hash)
    return units


@pytest.mark.mechanism("ConsumeQueue 20 B: offset8,size4,tagHash8")
def test_unit_encoding_golden_bytes(disk: Any) -> None:
    queue = make(disk)
    queue.append(0, 0x0102030405060708, 0x0A0B0C0D, -1)
    queue.append(1, 48, 107, 3552231)
    asyncio.run(queue.flush())
    assert bytes(disk.files["/q/topic/0/00000000000000000000"]).hex() == (
        "0102030405060708" "0a0b0c0d" "ffffffffffffffff"
        "0000000000000030" "0000006b" "00000000003633e7"
    )  # fmt: skip


def test_files_are_named_by_their_first_byte_and_roll_over(disk: Any) -> None:
    queue = make(disk, units_per_file=4)
    units = fill(queue, 9)
    asyncio.run(queue.flush())
    assert {path: len(content) for path, content in disk.files.items()} == {
        "/q/topic/0/00000000000000000000": 80,
        "/q/topic/0/00000000000000000080": 80,
        "/q/topic/0/00000000000000000160": 20,
    }
    assert queue.read(0, 100) == units


def test_a_repeated_number_changes_nothing_and_a_gap_is_refused(disk: Any) -> None:
    queue = make(disk)
    units = fill(queue, 3)
    assert queue.append(1, 7, 7, 7) is False
    with pytest.raises(QueueGap, match="number 4 follows 2"):
        queue.append(4, 7, 7, 7)
    assert queue.read(0, 10) == units


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.one_of(st.integers(1, 9), st.just("flush")), max_size=12),
    offset=st.integers(-2, 60),
    count=st.integers(0, 60),
    units_per_file=st.integers(1, 7),
)
def test_reads_agree_with_a_list_in_memory_and_across_files(
    new_disk: Any, steps: list[int | str], offset: int, count: int, units_per_file: int
) -> None:
    queue = make(new_disk(), units_per_file=units_per_file, max_open=2)
    expected: list[Unit] = []
    for step in steps:
        if isinstance(step, int):
            expected += fill(queue, step)
        else:
            asyncio.run(queue.flush())
    assert queue.max_offset == len(expected)
    assert queue.read(offset, count) == (expected[offset : offset + count] if offset >= 0 else [])


def test_units_can_be_read_while_they_are_being_written(disk: Any) -> None:
    queue = make(disk, units_per_file=2)
    seen: list[list[Unit]] = []
    units = fill(queue, 5)
    disk.before_write = lambda path: seen.append(queue.read(0, 10))
    asyncio.run(queue.flush())
    assert seen == [units] * 6  # three files, read before each is created and before each is written


def test_a_failed_write_keeps_the_units_for_the_next_try(disk: Any) -> None:
    queue = make(disk)
    units = fill(queue, 6)
    disk.fail_writes = True
    with pytest.raises(OSError, match="No space"):
        asyncio.run(queue.flush())
    assert queue.read(0, 10) == units
    disk.fail_writes = False
    asyncio.run(queue.flush())
    assert queue.unflushed_bytes == 0
    assert queue.read(0, 10) == units


@pytest.mark.parametrize("keep", range(10))
def test_restoring_cuts_back_to_the_given_bounds(disk: Any, keep: int) -> None:
    before = make(disk)
    units = fill(before, keep)
    sums = before.sums()
    units += fill(before, 9 - keep)
    asyncio.run(before.flush())
    disk.open("/q/topic/0/leftover.tmp")
    queue = make(disk)
    assert asyncio.run(queue.restore(0, keep, sums))
    assert queue.read(0, 100) == units[:keep]
    assert sum(len(content) for content in disk.files.values()) == 20 * keep
    more = fill(queue, 3)
    asyncio.run(queue.flush())
    assert queue.read(0, 100) == units[:keep] + more
    assert asyncio.run(make(disk).restore(0, keep + 3, queue.sums())), "the checksums continue from the restored ones"


def test_a_queue_with_a_flipped_bit_is_not_restored(disk: Any, caplog: Any) -> None:
    """A flipped bit in a tag hash would hide the message from its consumers."""
    queue = make(disk)
    fill(queue, 9)
    asyncio.run(queue.flush())
    sums = queue.sums()
    assert [start for start, _ in sums[0]] == [0, 80, 160]
    for path, content in disk.files.items():
        for at in range(len(content)):
            content[at] ^= 1 << at % 8
            assert not asyncio.run(make(disk).restore(0, 9, sums)), (path, at)
            content[at] ^= 1 << at % 8
    assert asyncio.run(make(disk).restore(0, 9, sums))
    assert "/q/topic/0/00000000000000000160 is damaged: its checksum is" in caplog.text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(st.integers(1, 9), st.sampled_from(["flush", "sums", "trim", "restore"])), max_size=20),
    st.integers(0, 20),
)
def test_checksums_match_the_files(new_disk: Any, steps: list[Any], first: int) -> None:
    """At any time: a later flush only continues the bytes that they cover."""
    disk = new_disk()
    queue = make(disk)
    queue.begin_at(first)
    for step in steps:
        if step == "flush":
            asyncio.run(queue.flush())
        elif step == "sums":
            queue.sums()
        elif step == "trim":
            queue.min_offset = (queue.min_offset + queue.max_offset) // 2
        elif step == "restore":
            sums, bounds = queue.sums(), (queue.min_offset, queue.max_offset)
            asyncio.run(queue.flush())
            queue = make(disk)
            assert asyncio.run(queue.restore(*bounds, sums))
        else:
            fill(queue, step)
    sums = queue.sums()
    asyncio.run(queue.flush())
    for start, crc in sums[0]:
        base = start - start % 80
        content = disk.files[f"/q/topic/0/{base:020d}"]
        assert zlib.crc32(content[start - base :]) == crc


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_restoring_refuses_files_that_lack_units(disk: Any, damage: str) -> None:
    before = make(disk)
    fill(before, 9)
    asyncio.run(before.flush())
    sums = before.sums()
    if damage == "missing":
        del disk.files["/q/topic/0/00000000000000000080"]
    else:
        del disk.files["/q/topic/0/00000000000000000080"][79:]
    assert not asyncio.run(make(disk).restore(0, 9, sums))


def test_reading_a_file_that_shrank_while_in_use_is_an_error(disk: Any) -> None:
    queue = make(disk)
    fill(queue, 3)
    asyncio.run(queue.flush())
    del disk.files["/q/topic/0/00000000000000000000"][50:]
    with pytest.raises(OSError, match="ends at 50"):
        queue.read(0, 3)


def test_a_queue_may_begin_at_a_later_offset(disk: Any) -> None:
    queue = make(disk)
    queue.begin_at(6)
    units = fill(queue, 4)
    asyncio.run(queue.flush())
    assert sorted(disk.files) == ["/q/topic/0/00000000000000000080", "/q/topic/0/00000000000000000160"]
    assert queue.read(0, 9) == []
    assert queue.read(6, 9) == units
    again = make(disk)
    assert asyncio.run(again.restore(6, 10, queue.sums()))
    assert again.read(6, 9) == units
    with pytest.raises(ValueError, match="not empty"):
        again.begin_at(11)


def test_open_files_are_bounded(disk: Any) -> None:
    files = FileCache(disk, max_open=3)
    queues = [ConsumeQueue(disk, files, f"/q/t/{number}", units_per_file=4) for number in range(20)]
    for queue in queues:
        fill(queue, 1)
        asyncio.run(queue.flush())
    assert disk.open_handles == 3
    assert all(queue.read(0, 1) for queue in queues)
    assert disk.open_handles == 3
    files.close()
    assert disk.open_handles == 0


def test_record_crcs_are_stored_and_restored_with_the_units(disk: Any) -> None:
    def make_both() -> ConsumeQueue:
        return ConsumeQueue(disk, FileCache(disk), "/q/t/0", units_per_file=4, crc_directory="/c/t/0")

    queue = make_both()
    crcs = [0, 1, 0xFFFFFFFF, 0x80000000, 5, 6]
    for number, crc in enumerate(crcs):
        assert queue.append(number, 100 * number, 100, 0, crc)
    assert queue.read_crcs(0, 99) == crcs and queue.read_crcs(6, 1) == () == queue.read_crcs(-1, 1)
    asyncio.run(queue.flush())
    asyncio.run(queue.sync())
    assert sorted(disk.files) == [f"/{row}/t/0/{base:020d}" for row, base in (("c", 0), ("c", 16), ("q", 0), ("q", 80))]
    assert disk.files["/c/t/0/00000000000000000000"] == bytes.fromhex("00000000 00000001 ffffffff 80000000")
    again = make_both()
    assert asyncio.run(again.restore(0, 6, queue.sums()))
    assert again.read_crcs(1, 4) == crcs[1:5]
    disk.files["/c/t/0/00000000000000000016"][1] ^= 1
    assert not asyncio.run(make_both().restore(0, 6, queue.sums()))
    assert make(disk).read_crcs(0, 1) == ()


longs = st.integers(-(1 << 63), (1 << 63) - 1)
sizes = st.integers(1, (1 << 31) - 1)
unit_rows = st.lists(st.tuples(st.integers(0, (1 << 63) - 1), sizes, longs, st.integers(0, (1 << 32) - 1)), min_size=1)


@given(unit_rows | st.tuples(sizes, longs, unit_rows).map(lambda same: [(p, *same[:2], c) for p, _, _, c in same[2]]))
def test_packing_units_together_equals_packing_them_singly(rows: list[tuple[int, int, int, int]]) -> None:
    positions, all_sizes, tags, crcs = ([row[column] for row in rows] for column in range(4))
    singly = [pack_unit(*row) for row in rows]
    expected = b"".join(unit for unit, _ in singly), b"".join(crc for _, crc in singly)
    assert pack_units(positions, all_sizes, tags, crcs) == expected
