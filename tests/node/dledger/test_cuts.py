"""Truncated entries leave the log at once, however long the disk takes to follow."""

from __future__ import annotations

import asyncio
import errno
from functools import partial
from typing import Any

import pytest

from harness.clusters.sim.disk import disk_error
from harness.clusters.sim.process_disk import Operation, ProcessDisk
from node.dledger.entry import CONFIG_MAGIC, Entry, encode_entry
from node.dledger.membership import encode_members


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("flush_mode", ["sync", "async"])
def test_acked_entries_are_on_disk_when_two_truncations_overlap_a_stalled_write(
    bench: Any, refuses: bool, flush_mode: str
) -> None:
    """Entries queued before the first truncation are still written, but not acknowledged: they have left the log."""

    async def scenario(bench: Any) -> None:
        store = await bench.open()
        bench.append(store, *[b"flushed"] * 5)
        await bench.flushed(store)
        bench.disk.stall()
        bench.append(store, *[b"in flight"] * 3)
        await asyncio.sleep(0.1)
        bench.append(store, *[b"queued"] * 3)
        bench.on("n1", lambda: store.truncate(8))
        bench.append(store, b"replacement", term=2)
        bench.on("n1", lambda: store.truncate(6))
        replaced = bench.append(store, *[b"last"] * 3, term=3)
        marks: list[tuple[int, bytes]] = []

        def progressed() -> None:
            marks.append((store.acked_index, bench.content("n1", "/data/dledger/data")))

        store.add_progress_listener(progressed)
        if refuses:
            bench.disk.fail("write")
        bench.disk.unstall()
        await asyncio.sleep(1.0)
        bench.disk.heal()
        await bench.flushed(store)
        for acked_index, data in marks:
            for index in range(acked_index + 1):
                entry = store.get(index)
                assert data[entry.pos : entry.end_pos] == entry.raw, (
                    f"acked_index is {acked_index}, but entry {index} is not on disk"
                )
        bench.power_fail()
        again = await bench.open()
        assert [again.get(index) for index in (7, 8, 9)] == replaced and again.ledger_end_index == 9

    bench(scenario, flush_mode=flush_mode, flush_interval_ms=100, flush_least_pages=0)


@pytest.mark.parametrize("waits", [False, True])
def test_reads_from_disk_stop_where_the_tail_cache_begins(bench: Any, waits: bool) -> None:
    """Beyond that point, the disk may still hold truncated entries."""

    async def scenario(bench: Any) -> None:
        store = await bench.open()
        bench.append(store, *[b"cut off later"] * 20)
        await bench.flushed(store)
        await bench.close(store)
        bench.kill()
        store = await bench.open()
        if waits:
            bench.disk.stall()
        bench.on("n1", lambda: store.truncate(9))
        bench.append(store, *[b"put instead!!"] * 5, term=2)
        found: list[Entry] = []
        while len(found) < 15:
            found += store.read_entries(len(found), max_entries=100, max_bytes=1 << 20)
        assert found == [store.get(index) for index in range(15)]
        assert [entry.term for entry in found] == [1] * 10 + [2] * 5

    bench(scenario)


def test_a_power_failure_during_a_reset_leaves_the_old_log_the_new_one_or_none(bench: Any) -> None:
    """Remains of the old log are neither damage nor served in part. Its committed membership survives even if none of
    its entries does; an uncommitted change is lost with the old log."""

    def append_members(bench: Any, store: Any, *members: str) -> None:
        body = encode_members(dict.fromkeys(members, "a:1"))
        bench.on("n1", lambda: store.append_as_leader(1, len(body), lambda _: body, magic=CONFIG_MAGIC))

    async def scenario(bench: Any, steps: int) -> tuple[bool, int, int]:
        store = await bench.open()
        append_members(bench, store, "n1", "n2", "n3")
        bench.append(store, *[bytes(500)] * 18)
        store.update_committed_index(18)
        append_members(bench, store, "n1")
        await bench.flushed(store)
        await bench.close(store)
        bench.kill()
        store = await bench.open()
        first = encode_entry(magic=1, index=100, term=3, pos=8192 * 4, previous_chain_crc=77, body=b"first")
        done = bench.on("n1", lambda: store.reset(first))
        await asyncio.sleep(steps * 0.00005)
        was_done = done.done() and store.durable_index == 100
        bench.power_fail()
        again = await bench.open()
        group = ("n1",) if again.ledger_end_index == 19 else ("n1", "n2", "n3")
        assert again.members.ids == group
        (new,) = bench.append(again, b"the next one", term=4)
        found = again.ledger_begin_index, again.ledger_end_index
        await bench.flushed(again)
        bench.power_fail()
        again = await bench.open()
        assert again.get(new.index) == new and again.members.ids == group
        assert (again.ledger_begin_index, again.ledger_end_index) == found
        return was_done, *found

    seen = set()
    for steps in range(1000):
        was_done, *found = bench(partial(scenario, steps=steps))
        assert found in ([0, 20], [0, 0], [100, 101])
        assert not was_done or found == [100, 101]
        seen.add(tuple(found))
        if was_done:
            break
    assert seen == {(0, 20), (0, 0), (100, 101)}


def test_a_truncation_rolls_back_a_checkpoint_written_despite_a_sync_error(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new checkpoint has its name when the sync of the directory fails, and may cover truncated entries."""
    sync_names, refused = ProcessDisk._sync_names, asyncio.Event()

    def refuse(self: ProcessDisk, directory: str, operation: Operation, value: Any = None) -> None:
        if directory.endswith("dledger") and not refused.is_set():
            refused.set()
            operation.finish(error=disk_error(errno.EIO, directory))
        else:
            sync_names(self, directory, operation, value)

    async def scenario(bench: Any) -> None:
        store = await bench.open()
        bench.append(store, *[b"entry"] * 20)
        await bench.flushed(store)
        await bench.until(lambda: store._files.checkpoint.durable_index == 19)
        bench.append(store, *[b"entry"] * 20)
        await bench.flushed(store)
        monkeypatch.setattr(ProcessDisk, "_sync_names", refuse)
        await refused.wait()
        assert b'"durable_index":39' in bytes(bench.disk.inode("/data/dledger/checkpoint").cache)
        done = bench.on("n1", lambda: store.truncate(29))
        await done
        assert b'"durable_index":19' in bytes(bench.disk.inode("/data/dledger/checkpoint").cache)
        bench.kill()
        assert (await bench.open()).ledger_end_index == 29

    bench(scenario)


def test_an_index_file_whose_removal_was_not_synced_does_not_extend_a_truncated_log(bench: Any) -> None:
    """Its units would continue the log and show their entries as having been durable."""

    async def scenario(bench: Any) -> None:
        store = await bench.open()
        bench.append(store, *[bytes(150)] * 60)
        await bench.flushed(store)
        await bench.run("n1", store._checkpoint)
        second = "/data/dledger/index/00000000000000000640"
        assert bench.disk.exists(second)
        cut = bench.on("n1", lambda: store.truncate(19))
        await bench.until(lambda: not bench.disk.exists(second), every_s=10e-6)
        bench.disk.fail("sync")
        await bench.until(lambda: store.writer.failure is not None)
        bench.disk.heal()
        await cut
        bench.hosts["n1"].power_fail("posix")
        assert (await bench.open()).ledger_end_index == 19

    for seed in range(6):
        bench(scenario, seed=seed)


def test_a_truncation_of_the_index_that_was_not_synced_is_retried(bench: Any) -> None:
    """The file is already shorter when the sync fails, and a power failure may restore the units."""

    async def scenario(bench: Any) -> None:
        store = await bench.open()
        bench.append(store, *[b"entry"] * 15)
        await bench.flushed(store)
        await bench.run("n1", store._checkpoint)
        units = bench.disk.inode("/data/dledger/index/00000000000000000000")
        cut = bench.on("n1", lambda: store.truncate(9))
        await bench.until(lambda: len(units.cache) == 320, every_s=10e-6)
        bench.disk.fail("sync")
        await bench.until(lambda: store.writer.failure is not None)
        bench.disk.heal()
        await cut
        bench.power_fail()
        assert (await bench.open()).ledger_end_index == 9

    for seed in range(12):
        bench(scenario, seed=seed)
