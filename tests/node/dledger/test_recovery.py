"""Recovery: torn tails are cut off, and damage to durable entries is refused and named."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.dledger import DLedgerStore, LedgerCorrupt
from node.dledger.entry import TAIL_MARK_SIZE_BYTES
from node.dledger.recovery import recover
from node.store.segments import SegmentedFile, SegmentError


async def filled(bench: Any, count: int = 60, size_bytes: int = 150) -> list[Any]:
    """A closed log of `count` durable entries."""
    store = await bench.open()
    entries = []
    for n in range(count):
        entries += bench.append(store, b"%03d" % n + bytes(size_bytes - 3))
        if n % 7 == 0:
            await bench.flushed(store)
    await bench.flushed(store)
    store.update_committed_index(count // 2)
    await bench.close(store)
    bench.kill()
    return entries


async def refused(bench: Any) -> LedgerCorrupt:
    with pytest.raises(LedgerCorrupt) as caught:
        await bench.open()
    bench.kill()
    return caught.value


@pytest.mark.parametrize("victim", [0, 10, 30, 31, 58, 59])
@pytest.mark.parametrize("offset", [0, 5, 12, 20, 30, 34, 38, 42, 46, 60, 197])
def test_a_flipped_bit_in_any_field_is_reported_with_file_and_offset(bench: Any, victim: int, offset: int) -> None:
    async def scenario(bench: Any) -> None:
        entries = await filled(bench)
        position = entries[victim].pos + offset
        bench.flip(position, bit=position % 8)
        error = await refused(bench)
        assert error.path == bench.path(position)
        assert error.offset_bytes == entries[victim].pos % 4096
        assert "durable" in str(error)
        bench.flip(position, bit=position % 8)
        assert (await bench.open()).ledger_end_index == 59

    bench(scenario)


def test_a_damaged_entry_is_never_served(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(bench: Any) -> None:
        entries = await filled(bench)
        store = await bench.open()
        bench.flip(entries[20].pos + 100)
        with pytest.raises(LedgerCorrupt, match="body of entry 20 does not match its CRC"):
            store.get(20)
        with pytest.raises(LedgerCorrupt, match=str(entries[20].pos % 4096)):
            store.read_bytes(entries[20].body_pos, 10)
        assert store.get(19) == entries[19] and store.get(21) == entries[21]
        assert store.corrupt_reads == 2
        assert "the log cannot be served" in caplog.text

    bench(scenario, max_cached_bytes=1)


@pytest.mark.parametrize("victim", [0, 20, 59])
@pytest.mark.parametrize("offset", [3, 11, 23, 31, 35, 39, 43, 47])
def test_an_entry_whose_header_is_damaged_while_the_log_is_open_is_never_served(
    bench: Any, victim: int, offset: int
) -> None:
    async def scenario(bench: Any) -> None:
        entries = await filled(bench)
        for bit in range(8):
            store = await bench.open()
            bench.flip(entries[victim].pos + offset, bit)
            with pytest.raises(LedgerCorrupt, match=f"byte {entries[victim].pos % 4096}: "):
                store.get(victim)
            found: list[Any] = []
            with pytest.raises(LedgerCorrupt):
                while len(found) < 60:
                    found += store.read_entries(len(found), max_entries=100, max_bytes=1 << 20)
            assert found == entries[:victim] and store.corrupt_reads == 2
            bench.flip(entries[victim].pos + offset, bit)
            bench.kill()

    bench(scenario)


def test_first_of_next_file_is_none_if_that_files_first_header_is_wrong(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        entries = await filled(bench)
        store = await bench.open()
        assert store.first_of_next_file() == entries[20]
        bench.flip(entries[20].pos + 15, 0)  # its header claims index 21
        assert store.first_of_next_file() is None

    bench(scenario)


@pytest.mark.parametrize("victim", [0, 20, 21])
@pytest.mark.parametrize("offset", [2, 3, 11, 15, 18, 31])
def test_a_damaged_index_unit_is_reported_and_the_entry_found_without_it(
    bench: Any, caplog: pytest.LogCaptureFixture, victim: int, offset: int
) -> None:
    async def scenario(bench: Any) -> None:
        entries = await filled(bench)
        assert entries[20].pos == 4096 > entries[19].end_pos  # after a blank
        for bit in range(8):
            store = await bench.open()
            bench.disk.flip_bit(f"/data/dledger/index/{victim // 20 * 640:020d}", victim % 20 * 32 + offset, bit)
            caplog.clear()
            assert store.get(victim) == entries[victim]
            assert f"index is damaged at byte {victim * 32}: " in caplog.text and not store.corrupt_reads
            assert [store.get(index) for index in range(59, -1, -1)] == entries[::-1]
            assert store.read_entries(victim, max_entries=100, max_bytes=4096)[0] == entries[victim]
            bench.kill()
            assert (await bench.open()).get(victim) == entries[victim]
            bench.kill()

    bench(scenario)


@pytest.mark.parametrize("kept", ["none", "some", "most"])
def test_missing_index_files_are_rebuilt_from_the_data(bench: Any, kept: str) -> None:
    async def scenario(bench: Any) -> None:
        entries = await filled(bench)
        before = bench.content("n1", "/data/dledger/index")
        names = [path for path in bench.disk.paths() if "/index/" in path]
        for path in {"none": names, "some": names[1:], "most": names[-1:]}[kept]:
            bench.disk.unlink(path)
        store = await bench.open()
        assert [store.get(index) for index in range(60)] == entries
        assert bench.content("n1", "/data/dledger/index") == before

    bench(scenario)


@pytest.mark.parametrize("bad", [0, 21, 59])
def test_unreadable_index_units_are_rebuilt(
    bench: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bad: int
) -> None:
    read = SegmentedFile._read_one

    def of_a_bad_sector(file: SegmentedFile, position: int, size_bytes: int) -> bytes:
        if "/index/" in file.path_at(position) and position <= bad * 32 < position + size_bytes:
            raise OSError(errno.EIO, "Input/output error", file.path_at(position))
        return read(file, position, size_bytes)

    async def scenario(bench: Any) -> None:
        entries = await filled(bench)
        before = bench.content("n1", "/data/dledger/index")
        monkeypatch.setattr(SegmentedFile, "_read_one", of_a_bad_sector)
        store = await bench.open()
        assert (store.ledger_begin_index, store.ledger_end_index) == (0, 59)
        assert bench.content("n1", "/data/dledger/index") == before  # written again, which gives it another sector
        assert [store.get(index) for index in range(60)] == entries
        assert f"index is damaged at byte {bad * 32}: " in caplog.text and not store.corrupt_reads

    bench(scenario)


def test_a_missing_data_file_is_refused_and_named(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        await filled(bench)
        for number in range(3):
            path = bench.path(4096 * number)
            content = bytes(bench.disk.inode(path).cache)
            bench.disk.unlink(path)
            error = await refused(bench)
            assert error.path == path
            bench.disk.put(path, content)
        assert (await bench.open()).ledger_end_index == 59

    bench(scenario)


def test_a_checkpoint_without_any_data_file_is_refused(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        await filled(bench)
        for path in bench.disk.paths():
            if "/data/dledger/data/" in path:
                bench.disk.unlink(path)
        error = await refused(bench)
        assert error.path == bench.path(0)

    bench(scenario)


def test_a_damaged_checkpoint_is_refused_and_named(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        await filled(bench)
        bench.disk.flip_bit("/data/dledger/checkpoint", 15)
        assert str(await refused(bench)) == "/data/dledger/checkpoint is damaged at byte 0: its CRC does not match"

    bench(scenario)


def test_without_evidence_of_durability_an_unreadable_end_is_a_torn_tail(bench: Any) -> None:
    """No checkpoint, no index, no tail mark: an unreadable end may never have been written."""

    async def scenario(bench: Any) -> None:
        store = await bench.open()
        entries = bench.append(store, *[bytes(100)] * 10)
        await bench.flushed(store)
        bench.kill()
        inode = bench.disk.inode(bench.path(0))
        assert len(inode.cache) == entries[-1].end_pos + TAIL_MARK_SIZE_BYTES
        inode.truncate(entries[-1].end_pos - 1)
        again = await bench.open()
        assert again.ledger_end_index == 8
        assert "cutting an unfinished write" in bench.hosts["n1"].log.text()

    bench(scenario)


def test_a_torn_last_write_is_cut_off_although_its_later_entries_are_intact(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        store = await bench.open()
        first = bench.append(store, *[b"durable" * 20] * 8)
        await bench.flushed(store)
        bench.disk.stall(("sync",))
        last = bench.append(store, *[b"in the last write" * 10] * 8)
        await bench.until(lambda: len(bench.disk.inode(bench.path(0)).cache) > last[-1].end_pos)
        bench.kill()
        inode = bench.disk.inode(bench.path(0))
        inode.write(last[2].pos, bytes(last[2].size_bytes))  # one page of the write never reached the disk
        bench.disk.heal()
        again = await bench.open()
        assert [again.get(index) for index in range(again.ledger_end_index + 1)] == [*first, *last[:2]]

    bench(scenario, data_segment_size_bytes=8192)


def test_damage_before_the_last_write_is_not_taken_for_a_torn_tail(bench: Any) -> None:
    """The tail mark of the last write says where it began: everything before it had been synced."""

    async def scenario(bench: Any) -> None:
        store = await bench.open()
        first = bench.append(store, *[b"durable" * 20] * 8)
        await bench.flushed(store)
        bench.append(store, *[b"the last write" * 10] * 8)
        await bench.flushed(store)
        bench.kill()
        assert not bench.disk.exists("/data/dledger/checkpoint")
        bench.flip(first[5].pos + 90)
        error = await refused(bench)
        assert error.offset_bytes == first[5].pos

    bench(scenario, data_segment_size_bytes=8192)


def test_a_log_with_another_segment_size_is_refused(bench: Any) -> None:
    async def scenario(bench: Any) -> dict[str, bytes]:
        await filled(bench)
        return {path: bytes(bench.disk.inode(path).cache) for path in bench.disk.paths()}

    files = bench(scenario)

    async def other(bench: Any) -> None:
        for path, content in files.items():
            bench.disk.put(path, content)
        with pytest.raises(SegmentError, match="another segment size"):
            await bench.open()

    bench(other, data_segment_size_bytes=8192 + 32)


def test_the_whole_log_is_read_if_the_index_unit_at_the_scan_start_is_damaged(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        entries = await filled(bench, count=200)
        path = bench.path(entries[-1].pos)
        end = int(path.rpartition("/")[2]) + len(bench.disk.inode(path).cache)
        begin = max(entry.index for entry in entries if entry.pos <= end - 8000)
        bench.disk.flip_bit(f"/data/dledger/index/{begin // 20 * 640:020d}", begin % 20 * 32 + 11, 4)
        store = bench.on("n1", lambda: DLedgerStore(bench.config, bench.runtime))
        recovered = await bench.run("n1", lambda: recover(store._files, scan_size_bytes=8000))
        assert (recovered.begin_index, recovered.last) == (0, entries[-1])
        store._adopt(recovered)
        assert [store.get(index) for index in range(200)] == entries

    bench(scenario)


def test_only_the_newest_part_of_a_long_log_is_scanned(bench: Any) -> None:
    async def scenario(bench: Any) -> None:
        entries = await filled(bench, count=200)
        bench.flip(entries[3].pos + 60)
        store = bench.on("n1", lambda: DLedgerStore(bench.config, bench.runtime))
        recovered = await bench.run("n1", lambda: recover(store._files, scan_size_bytes=8000))
        assert (recovered.begin_index, recovered.last) == (0, entries[-1])
        store._adopt(recovered)
        assert [store.get(index) for index in range(4, 200)] == entries[4:]
        with pytest.raises(LedgerCorrupt):
            store.get(3)

    bench(scenario)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    groups=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 700)), min_size=1, max_size=8),
    last=st.tuples(st.integers(1, 12), st.integers(0, 700)),
    seed=st.integers(0, 10_000),
)
def test_a_power_cut_in_the_middle_of_a_write_loses_at_most_that_write(
    bench: Any, groups: list[tuple[int, int]], last: tuple[int, int], seed: int
) -> None:
    async def scenario(bench: Any) -> None:
        store = await bench.open()
        entries = []
        for count, size_bytes in groups:
            entries += bench.append(store, *[bytes(size_bytes)] * count)
            await bench.flushed(store)
        durable = len(entries)
        bench.disk.stall(("sync",))
        entries += bench.append(store, *[b"\xff" * last[1]] * last[0])
        await bench.until(lambda: store.writer.stalled_ms > 1)
        bench.power_fail()
        bench.disk.heal()
        again = await bench.open()
        found = [again.get(index) for index in range(again.ledger_end_index + 1)]
        assert len(found) >= durable
        assert found == entries[: len(found)]
        added = bench.append(again, b"goes on", term=9)
        await bench.flushed(again)
        bench.power_fail()
        assert (await bench.open()).get(len(found)) == added[0]

    bench(scenario, seed=seed, data_segment_size_bytes=8192)


def test_a_power_cut_in_the_middle_of_a_truncation_leaves_a_log_that_opens(bench: Any) -> None:
    """A file may keep its length, with zeros after the new end: no tail mark then shows how much was durable."""
    length: list[int] = []

    async def scenario(bench: Any, after_s: float) -> None:
        store = await bench.open()
        for number in range(60):
            bench.append(store, b"%03d" % number + bytes(147))
            await bench.flushed(store)
        truncated = bench.on("n1", lambda: store.truncate(9))
        await asyncio.sleep(after_s)
        is_done = truncated.done()
        bench.power_fail()
        length.append(bench.disk.inode("/data/dledger/data/00000000000000000000").cache.rstrip(b"\0").count(b"059"))
        again = await bench.open()
        assert [again.get(index).body[:3] for index in range(10)] == [b"%03d" % number for number in range(10)]
        assert again.ledger_end_index == 9 if is_done else again.ledger_end_index in (9, 59)

    for seed in range(80):
        bench(lambda bench, at_s=seed * 50e-6: scenario(bench, at_s), seed=seed, data_segment_size_bytes=1 << 20)
    assert set(length) == {0, 1}, "some cuts came before the end of the truncation, and some after it"


def test_a_power_cut_in_the_middle_of_a_start_leaves_a_log_that_opens(bench: Any) -> None:
    """Entries that a killed process had not synced are found, then lost; the index must not name them before a sync."""
    ends: set[int] = set()

    async def scenario(bench: Any, after_s: float) -> None:
        store = await bench.open()
        entries = bench.append(store, *[bytes(150)] * 5)
        await bench.close(store)
        bench.kill()
        store = await bench.open()
        entries += bench.append(store, *[bytes(150)] * 40)
        await bench.until(lambda: store.written_index == 44)
        bench.kill()
        starting = bench.on("n1", lambda: DLedgerStore(bench.config, bench.runtime))
        opening = bench.on("n1", lambda: asyncio.get_running_loop().create_task(starting.open()))
        await asyncio.sleep(after_s)
        assert not opening.done() or opening.exception() is None
        bench.power_fail()
        again = await bench.open()
        end = again.ledger_end_index
        assert [again.get(index) for index in range(end + 1)] == entries[: end + 1]
        ends.add(end)

    for seed in range(60):
        options = {"flush_mode": "async", "flush_interval_ms": 10_000, "data_segment_size_bytes": 1 << 20}
        bench(lambda bench, at_s=seed * 30e-6: scenario(bench, at_s), seed=seed, **options)
    assert {4, 44} <= ends, "some cuts took what was not synced, and some came after that"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1), bit=st.integers(0, 7), seed=st.integers(0, 100))
def test_any_flipped_bit_is_detected_unless_it_lies_outside_all_entries(
    bench: Any, place: float, bit: int, seed: int
) -> None:
    async def scenario(bench: Any) -> None:
        entries = await filled(bench, count=40)
        position = int(place * (entries[-1].end_pos - 1))
        bench.flip(position, bit)
        try:
            store = await bench.open()
        except LedgerCorrupt:
            return
        assert [store.get(index) for index in range(40)] == entries
        assert not any(entry.pos <= position < entry.end_pos for entry in entries)

    bench(scenario, seed=seed)
