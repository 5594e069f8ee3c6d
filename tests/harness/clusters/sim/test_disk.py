"""The simulated disk: file operations, what survives kills and power cuts, and faults."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable
from typing import Any

import pytest

from harness.clusters.sim.disk import READ, SYNC, WRITE
from harness.clusters.sim.faults import SimDisks
from harness.clusters.sim.host import Incarnation
from nemesis.target import DiskFault, FaultMet
from node.runtime import Disk, File

Simulate = Callable[..., Any]


async def run_on(world: Any, name: str, work: Callable[[Disk], Any]) -> Any:
    """Run `work` in a process of a host; returns its result or raises its error."""
    result = world.loop.create_future()

    async def program(process: Incarnation) -> None:
        try:
            result.set_result(await work(process.runtime.disk))
        except Exception as error:
            result.set_exception(error)

    world.on(name, program)
    return await result


def test_files_and_directories(simulate: Simulate) -> None:
    async def work(disk: Disk) -> None:
        with pytest.raises(FileNotFoundError):
            disk.open("/data/log/0")
        disk.make_dirs("/data/log")
        file = disk.open("/data/log/0")
        assert file.path == "/data/log/0" and file.size_bytes() == 0 and disk.exists("/data/log/0")
        await file.write(0, b"hello")
        await file.write(10, b"world", sync=True)
        assert file.read(0, 100) == b"hello\0\0\0\0\0world"
        assert file.read(12, 2) == b"rl" and file.read(99, 5) == b""
        await file.truncate(7)
        assert file.size_bytes() == 7
        await file.truncate(9)
        assert disk.read_file("/data/log/0") == b"hello\0\0\0\0"
        await file.sync()
        file.close()
        file.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            file.read(0, 1)
        await disk.write_file_atomic("/data/state", b"one")
        await disk.write_file_atomic("/data/state", b"two")
        created = await disk.create("/data/new/sub/file")
        assert created.size_bytes() == 0
        assert disk.list("/data") == ["log", "new", "state"] and disk.list("/nowhere") == []
        assert disk.read_file("/data/state") == b"two"
        await disk.remove("/data/state")
        await disk.remove("/data/state")
        assert not disk.exists("/data/state") and disk.exists("/data")
        await disk.sync_dir("/data")
        with pytest.raises(FileNotFoundError):
            disk.read_file("/data/state")
        with pytest.raises(FileNotFoundError):
            await disk.sync_dir("/nowhere")
        with pytest.raises(IsADirectoryError):
            disk.open("/data/log")

    async def scenario(world: Any) -> None:
        await run_on(world, "a", work)

    simulate(scenario)


def test_operations_take_time_and_longer_on_a_slow_disk(simulate: Simulate) -> None:
    async def scenario(world: Any) -> tuple[float, float]:
        async def work(disk: Disk) -> float:
            disk.make_dirs("/d")
            file = disk.open("/d/f")
            began_s = world.loop.time()
            for _ in range(50):
                await file.write(file.size_bytes(), b"x" * 100, sync=True)
            return (world.loop.time() - began_s) / 50  # type: ignore[no-any-return]

        normal_s = await run_on(world, "a", work)
        await world["a"].process.wait()
        world["a"].disk.delay_s = 0.01
        slow_s = await run_on(world, "a", work)
        world["a"].disk.heal()
        return normal_s, slow_s

    normal_s, slow_s = simulate(scenario)
    assert 0.0002 < normal_s < 0.003
    assert 0.02 < slow_s < 0.025


def test_a_kill_keeps_unsynced_writes_and_a_power_cut_may_lose_them(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        async def work(disk: Disk) -> None:
            disk.make_dirs("/d")
            file = await disk.create("/d/f")
            await file.write(0, b"synced", sync=True)
            await file.write(6, b" not synced")
            await asyncio.Event().wait()

        results = set()
        for host in "abc":
            world.on(host, lambda process: work(process.runtime.disk))
            await asyncio.sleep(1)
            world[host].kill()
            assert bytes(world[host].disk.inode("/d/f").cache) == b"synced not synced"
            world[host].power_fail()
            results.add(bytes(world[host].disk.inode("/d/f").cache))
        assert all(content.startswith(b"synced") and len(content) <= 17 for content in results)

    for seed in range(10):
        simulate(scenario, seed=seed)


def _after_power_cut(
    simulate: Simulate, seed: int, work: Callable[[Disk], Any], after_s: float = 1.0, model: str | None = None
) -> Any:
    """The disk of host a after `work` was interrupted by a power cut, of any model unless one is given."""

    async def scenario(world: Any) -> Any:
        async def program(process: Incarnation) -> None:
            await work(process.runtime.disk)
            await asyncio.Event().wait()

        world.on("a", program)
        await asyncio.sleep(after_s)
        world["a"].power_fail(model)
        return world["a"].disk

    return simulate(scenario, seed=seed)


def test_a_power_cut_may_lose_names_whose_directory_was_not_synced(simulate: Simulate) -> None:
    async def work(disk: Disk) -> None:
        disk.make_dirs("/d")
        for name in ("/d/1", "/d/2", "/d/3"):
            file = disk.open(name)
            await file.write(0, name.encode(), sync=True)
        await disk.sync_dir("/d")
        for name in ("/d/4", "/d/5"):
            await disk.open(name).write(0, name.encode(), sync=True)

    listings = {tuple(_after_power_cut(simulate, seed, work, model="posix").paths()) for seed in range(40)}
    certain = ("/d/1", "/d/2", "/d/3")
    assert listings == {certain, (*certain, "/d/4"), (*certain, "/d/5"), (*certain, "/d/4", "/d/5")}


@pytest.mark.parametrize("model", ["ext4", "torn"])
def test_a_journal_keeps_names_in_order_and_a_file_sync_commits_earlier_ones(simulate: Simulate, model: str) -> None:
    async def work(disk: Disk) -> None:
        disk.make_dirs("/d")
        for name in ("/d/1", "/d/2"):
            disk.open(name)
        file = disk.open("/d/3")
        await file.write(0, b"3", sync=True)
        for name in ("/d/4", "/d/5"):
            disk.open(name)

    listings = {tuple(_after_power_cut(simulate, seed, work, model=model).paths()) for seed in range(40)}
    certain = ("/d/1", "/d/2", "/d/3")
    assert listings == {certain, (*certain, "/d/4"), (*certain, "/d/4", "/d/5")}


def test_a_file_sync_commits_other_names_only_if_the_file_length_changed(simulate: Simulate) -> None:
    def writing(offset: int) -> Callable[[Disk], Any]:
        async def work(disk: Disk) -> None:
            disk.make_dirs("/d")
            file = disk.open("/d/log")
            await file.write(0, b"x" * 100, sync=True)
            disk.open("/d/other")
            await file.write(offset, b"y", sync=True)

        return work

    for offset, outcomes in ((0, {False, True}), (100, {True})):
        disks = [_after_power_cut(simulate, seed, writing(offset), model="ext4") for seed in range(30)]
        assert {disk.exists("/d/other") for disk in disks} == outcomes


def test_a_power_cut_never_tears_an_atomic_replacement(simulate: Simulate) -> None:
    async def work(disk: Disk) -> None:
        disk.make_dirs("/d")
        for number in range(1000):
            await disk.write_file_atomic("/d/state", b"%d" % number * 2000)

    seen = set()
    for seed in range(60):
        disk = _after_power_cut(simulate, seed, work, after_s=0.002 + seed * 0.0001)
        if disk.exists("/d/state"):
            content = bytes(disk.inode("/d/state").cache)
            number = content[:1] if len(content) == 2000 else content[:2]
            assert content == number * 2000
            seen.add(int(number))
        assert set(disk.paths()) <= {"/d/state", "/d/state.tmp"}
    assert len(seen) > 2


def test_a_power_cut_undoes_no_completed_create_replacement_or_removal(simulate: Simulate) -> None:
    async def work(disk: Disk) -> None:
        disk.make_dirs("/d")
        await disk.create("/d/created")
        await disk.write_file_atomic("/d/state", b"old")
        await disk.write_file_atomic("/d/state", b"new")
        await disk.create("/d/removed")
        await disk.remove("/d/removed")

    for seed in range(30):
        disk = _after_power_cut(simulate, seed, work)
        assert disk.paths() == ["/d/created", "/d/state"]
        assert bytes(disk.inode("/d/state").cache) == b"new"


def test_a_power_cut_keeps_any_subset_of_unsynced_blocks_possibly_torn(simulate: Simulate) -> None:
    async def work(disk: Disk) -> None:
        disk.make_dirs("/d")
        file = await disk.create("/d/f")
        await file.write(0, b"o" * 16384, sync=True)
        await file.write(0, b"n" * 16384)

    patterns = set()
    torn = 0
    for seed in range(80):
        content = bytes(_after_power_cut(simulate, seed, work, model="torn").inode("/d/f").cache)
        assert len(content) == 16384 and set(content) <= set(b"on")
        blocks = [content[start : start + 4096] for start in range(0, 16384, 4096)]
        patterns.add(tuple(block[:1] for block in blocks if len(set(block)) == 1))
        torn += sum(len(set(block)) == 2 for block in blocks)
    assert len(patterns) > 8
    assert torn > 5


def test_a_truncation_undone_by_a_power_cut_zeroes_at_most_the_rest_of_one_block(
    simulate: Simulate,
) -> None:
    """Freed blocks are not overwritten, so a file that regains its length has its old content there."""

    async def work(disk: Disk) -> None:
        disk.make_dirs("/d")
        file = await disk.create("/d/f")
        await file.write(0, b"o" * 16384, sync=True)
        await file.truncate(1000)

    ends = set()
    for seed in range(60):
        content = bytes(_after_power_cut(simulate, seed, work).inode("/d/f").cache)
        assert content.startswith(b"o" * 1000)
        if len(content) > 1000:
            assert content[4096:] == b"o" * 12288
        ends.add((len(content), content[1000:4096].strip(b"o")))
    assert ends == {(1000, b""), (16384, b""), (16384, bytes(3096))}


def test_a_kill_during_a_write_leaves_all_of_it_or_nothing(simulate: Simulate) -> None:
    async def scenario(world: Any) -> bytes:
        async def program(process: Incarnation) -> None:
            process.runtime.disk.make_dirs("/d")
            file = await process.runtime.disk.create("/d/f")
            await file.write(0, b"first")
            going.set()
            await file.write(5, b" second", sync=True)
            returned.append(True)

        going = asyncio.Event()
        returned: list[bool] = []
        world.on("a", program)
        await going.wait()
        world["a"].kill()
        await asyncio.sleep(10)
        assert not returned
        return bytes(world["a"].disk.inode("/d/f").cache)

    assert {simulate(scenario, seed=seed) for seed in range(20)} == {b"first", b"first second"}


@pytest.mark.parametrize(("after_s", "is_durable"), [(5e-6, False), (100e-6, True)])
def test_after_a_kill_a_sync_under_way_completes_but_none_begins(
    simulate: Simulate, after_s: float, is_durable: bool
) -> None:
    """Writing and syncing are two calls, which take at least 10 and 200 us."""

    async def scenario(world: Any) -> tuple[bytes, bytes]:
        async def program(process: Incarnation) -> None:
            process.runtime.disk.make_dirs("/d")
            file = await process.runtime.disk.create("/d/f")
            await file.write(0, b"first", sync=True)
            going.set()
            await file.write(5, b" second", sync=True)

        going = asyncio.Event()
        world.on("a", program)
        await going.wait()
        await asyncio.sleep(after_s)
        world["a"].kill()
        await asyncio.sleep(10)
        inode = world["a"].disk.inode("/d/f")
        return bytes(inode.cache), inode.durable_content()

    found = {simulate(scenario, seed=seed) for seed in range(20)}
    written = b"first second"
    assert (written, written if is_durable else b"first") in found
    assert ((written, b"first") in found) is not is_durable and ((written, written) in found) is is_durable


def test_a_stall_blocks_only_the_named_operations(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        done: list[str] = []
        disk = world["a"].disk

        async def work(process: Incarnation) -> None:
            process.runtime.disk.make_dirs("/d")
            file = process.runtime.disk.open("/d/f")
            await file.write(0, b"x")
            done.append("write")
            assert file.read(0, 1) == b"x"
            await file.sync()
            done.append("sync")
            await asyncio.Event().wait()

        disk.stall([SYNC])
        world.on("a", work)
        await asyncio.sleep(60)
        assert done == ["write"] and disk.is_stalled(SYNC)
        disk.unstall()
        await asyncio.sleep(0.1)
        assert done == ["write", "sync"]
        world["a"].kill()
        disk.stall()
        world.on("a", work)
        await asyncio.sleep(60)
        assert done == ["write", "sync"]
        disk.heal()
        await asyncio.sleep(1)
        assert done == ["write", "sync"] * 2
        with pytest.raises(ValueError, match="cannot stall"):
            disk.stall([READ])

    simulate(scenario)


def test_a_full_disk_writes_what_fits_and_then_fails_with_enospc(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        async def work(disk: Disk) -> None:
            disk.make_dirs("/d")
            file = disk.open("/d/f")
            world["a"].disk.capacity_bytes = 1000
            await file.write(0, b"x" * 900)
            with pytest.raises(OSError, match="No space") as caught:
                await file.write(900, b"y" * 200)
            assert caught.value.errno == errno.ENOSPC
            assert file.size_bytes() == 1000
            await file.write(0, b"z" * 1000)
            with pytest.raises(OSError, match="No space"):
                disk.open("/d/g")
            with pytest.raises(OSError, match="No space"):
                await disk.write_file_atomic("/d/state", b"more")
            world["a"].disk.heal()
            world["a"].disk.fill_up()
            with pytest.raises(OSError, match="No space"):
                await file.write(1000, b"y", sync=True)
            world["a"].disk.heal()
            await file.write(1000, b"y", sync=True)

        await run_on(world, "a", work)

    for seed in range(5):
        simulate(scenario, seed=seed)


def test_each_kind_of_injected_error_fails_its_operations_with_eio(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        device = world["a"].disk

        async def expect_eio(work: Any) -> None:
            with pytest.raises(OSError, match="Input/output") as caught:
                await work
            assert caught.value.errno == errno.EIO

        async def work(disk: Disk) -> None:
            disk.make_dirs("/d")
            file: File = disk.open("/d/f")
            await file.write(0, b"x", sync=True)
            device.fail(WRITE)
            for failing in (
                file.write(1, b"y"), file.truncate(0), disk.write_file_atomic("/d/s", b""), disk.create("/d/g"),
                disk.remove("/d/f"),
            ):  # fmt: skip
                await expect_eio(failing)
            device.fail(WRITE, 0)
            device.fail(SYNC)
            for failing in (file.sync(), file.write(1, b"z", sync=True), disk.sync_dir("/d"), disk.create("/d/g")):
                await expect_eio(failing)
            device.fail(SYNC, 0)
            device.fail(READ)
            with pytest.raises(OSError, match="Input/output"):
                file.read(0, 1)
            with pytest.raises(OSError, match="Input/output"):
                disk.read_file("/d/f")
            device.heal()
            assert file.read(0, 9) == b"xz"
            with pytest.raises(ValueError, match="no such kind"):
                device.fail("seek")

        await run_on(world, "a", work)

    for seed in range(5):
        simulate(scenario, seed=seed)


def test_blocks_of_a_failed_sync_are_not_written_by_a_later_sync(simulate: Simulate) -> None:
    async def scenario(world: Any) -> bytes:
        async def work(disk: Disk) -> None:
            file = await disk.create("/d/f")
            await file.write(0, b"a" * 4096, sync=True)
            await file.write(0, b"b" * 4096)
            await file.write(4096, b"c" * 4096)
            world["a"].disk.fail(SYNC)
            with pytest.raises(OSError, match="Input/output"):
                await file.sync()
            world["a"].disk.heal()
            await file.write(8192, b"d" * 4096)
            await file.sync()  # succeeds although blocks were lost
            assert file.read(0, 9000)[::4096] == b"bcd"

        await run_on(world, "a", work)
        world["a"].power_fail()
        return bytes(world["a"].disk.inode("/d/f").cache)[::4096]

    assert {simulate(scenario, seed=seed) for seed in range(10)} == {b"a\0d"}


def test_cancelling_a_write_takes_effect_only_once_the_write_has_ended(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        async def work(disk: Disk) -> None:
            file = await disk.create("/d/f")
            world["a"].disk.stall()
            writing = asyncio.create_task(file.write(0, b"x", sync=True))
            await asyncio.sleep(1)
            writing.cancel()
            await asyncio.sleep(1)
            assert not writing.done()
            world["a"].disk.unstall()
            with pytest.raises(asyncio.CancelledError):
                await writing
            assert file.read(0, 9) == b"x"

        await run_on(world, "a", work)

    simulate(scenario)


def test_write_callbacks_run_in_the_process_that_began_the_write(simulate: Simulate) -> None:
    """Not while the process is paused, and never after its death."""

    async def scenario(world: Any) -> None:
        told: list[tuple[int, int | None, str]] = []
        disk = world["a"].disk

        async def work(process: Incarnation) -> None:
            file = await process.runtime.disk.create("/d/f")
            disk.delay_s = 1.0

            def write(number: int) -> None:
                def on_done(error: BaseException | None) -> None:
                    code = error.errno if isinstance(error, OSError) else None
                    told.append((number, code, world.loop.current_lane().name))

                file.begin_write(number, b"x", on_done, sync=number == 0)

            for number in range(4):
                disk.fail(WRITE, number == 1)
                write(number)
                assert len(told) == number
                await asyncio.sleep(3)
            file.close()
            with pytest.raises(OSError, match="Bad file descriptor"):
                write(9)

        process = world.on("a", work)
        await asyncio.sleep(6.5)  # two writes have ended, the third has just begun
        lane = process.name
        assert told == [(0, None, lane), (1, errno.EIO, lane)]
        world["a"].pause()
        await asyncio.sleep(1.5)
        assert len(told) == 2
        world["a"].resume()
        await asyncio.sleep(0.1)
        assert told[2:] == [(2, None, lane)]
        await asyncio.sleep(1.4)  # the fourth write has begun
        world["a"].kill()
        await asyncio.sleep(5)
        assert len(told) == 3

    simulate(scenario)


def test_a_bit_flip_changes_synced_data_on_the_medium_and_unsynced_data_in_cache(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        disk = world["a"].disk
        disk.put("/d/f", b"\0" * 8)
        disk.flip_bit("/d/f", 3, bit=6)
        assert bytes(disk.inode("/d/f").cache) == b"\0\0\0@\0\0\0\0"
        world["a"].power_fail()
        assert bytes(disk.inode("/d/f").cache) == b"\0\0\0@\0\0\0\0"
        with pytest.raises(OSError, match="Invalid"):
            disk.flip_bit("/d/f", 8)
        # Unsynced data is flipped in the cache: nothing would read the stale block on the medium.
        disk.inode("/d/f").write(4, b"abcdefgh")
        for offset, bit in ((0, 1), (4, 0), (10, 2)):
            disk.flip_bit("/d/f", offset, bit)
        assert bytes(disk.inode("/d/f").cache) == b"\2\0\0@\x60bcdefch"
        assert disk.inode("/d/f").durable_content() == b"\2\0\0@\0\0\0\0"
        disk.flip_bit("/d/f", 0, 1)
        assert disk.inode("/d/f").durable_content() == b"\0\0\0@\0\0\0\0", "flipped back on the medium too"
        with pytest.raises(FileNotFoundError):
            disk.flip_bit("/d/g", 0)

    simulate(scenario)


@pytest.mark.parametrize(
    ("kind", "meets"),
    [
        ("stall-fsync", "sync"),
        ("stall", "write"),
        ("slow", "write"),
        ("full", "write"),
        ("error-write", "write"),
        ("error-fsync", "sync"),
        ("error-read", "read"),
    ],
)
def test_fault_hits_of_processes_are_counted_and_those_of_probes_are_not(
    simulate: Simulate, kind: str, meets: str
) -> None:
    async def scenario(world: Any) -> None:
        disks = SimDisks(world.loop, {"a": world["a"], "b": world["b"]}, {"a": "/data", "b": "/data"})

        async def prepare(disk: Disk) -> File:
            disk.make_dirs("/data")
            file = disk.open("/data/log")
            await file.write(0, b"x", sync=True)
            return file

        await run_on(world, "a", prepare)
        await run_on(world, "b", prepare)
        await disks.impair("f1", {host: DiskFault(kind=kind, delay_ms=20) for host in ("a", "b")})
        for host in ("a", "b"):
            await disks.probe(host, timeout_s=0.5)
        assert await disks.met("f1") == dict.fromkeys(("a", "b"), FaultMet(None, 0)), (
            "only probes of the harness were hit"
        )

        async def meet(disk: Disk) -> None:
            file = disk.open("/data/log")
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(0.5):
                    if meets == "read":
                        file.read(0, 1)
                    elif meets == "write":
                        await file.write(1, b"y")
                    else:
                        await file.sync()

        world.on("a", lambda process: meet(process.runtime.disk))
        await asyncio.sleep(1)
        found = await disks.met("f1")
        assert found["a"].met and not found["b"].met, found
        await disks.release("f1")
        assert await disks.met("f1") == {}

    simulate(scenario)


def test_reads_from_outside_the_host_hit_no_fault_and_are_not_counted(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        device = world["a"].disk
        device.put("/data/log", b"content")

        async def read(disk: Disk) -> None:
            file = disk.open("/data/log")
            device.fail("read")
            device.watched = {device.inode("/data/log"): {"f1": (0, 1, ord("c") & 1)}}
            with device.looked_at():
                assert file.read(0, 7) == disk.read_file("/data/log") == b"content"
            assert device.noted == {}
            with pytest.raises(OSError, match="error"):
                file.read(0, 7)
            device.fail("read", 0.0)
            assert file.read(0, 7) == b"content"
            assert device.noted == {"fail-read": 1, "flipped-f1": 1}

        await run_on(world, "a", read)

    simulate(scenario)


def test_hits_of_a_stall_are_unknown_while_operations_wait_for_an_earlier_one(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        disks = SimDisks(world.loop, {"a": world["a"]}, {"a": "/data"})

        async def write(disk: Disk) -> None:
            disk.make_dirs("/data")
            await disk.open("/data/log").write(0, b"x")

        await disks.impair("f1", {"a": DiskFault(kind="stall")})
        world.on("a", lambda process: write(process.runtime.disk))
        await asyncio.sleep(1)
        await disks.impair("f2", {"a": DiskFault(kind="stall")})
        assert (await disks.met("f1"))["a"].met == 1
        assert (await disks.met("f2"))["a"].met is None

    simulate(scenario)


@pytest.mark.parametrize("kind", ["stall-fsync", "error-fsync"])
def test_operations_left_by_a_killed_process_do_not_hit_a_later_fault(simulate: Simulate, kind: str) -> None:
    async def scenario(world: Any) -> None:
        disks = SimDisks(world.loop, {"a": world["a"]}, {"a": "/data"})

        async def write(disk: Disk) -> None:
            disk.make_dirs("/data")
            await disk.open("/data/log").write(0, b"x", sync=True)

        await disks.impair("f1", {"a": DiskFault(kind="slow", delay_ms=250)})
        world.on("a", lambda process: write(process.runtime.disk))
        await asyncio.sleep(0.3)
        world["a"].kill()
        await disks.impair("f2", {"a": DiskFault(kind=kind)})
        await asyncio.sleep(1)
        assert await disks.met("f2") == {"a": FaultMet(None, 0)}
        assert (await disks.met("f1"))["a"].met

    simulate(scenario)


def test_a_flipped_bit_counts_as_read_once_a_process_has_read_its_byte(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        disks = SimDisks(world.loop, {"a": world["a"]}, {"a": "/data"})

        async def write(disk: Disk) -> None:
            disk.make_dirs("/data")
            await disk.open("/data/log").write(0, bytes(range(1, 101)), sync=True)

        await run_on(world, "a", write)
        world["a"].kill()
        flipped = await disks.flip_bit("f1", "a", files="log", place=0.5, bit=0)
        assert await disks.met("f1") == {"a": FaultMet(None, 0)}

        async def read(disk: Disk) -> bytes:
            file = disk.open("/data/log")
            before = file.read(0, flipped.offset)
            assert (await disks.met("f1"))["a"].met == 0, "only other bytes were read"
            return before + file.read(flipped.offset, 1)

        async def read_all(disk: Disk) -> bytes:
            return disk.read_file("/data/log")

        await run_on(world, "a", read)
        assert (await disks.met("f1"))["a"].met == 1
        world["a"].kill()
        again = await disks.flip_bit("f2", "a", files="log", place=0.5, bit=1)
        assert again.offset == flipped.offset
        assert (await disks.met("f2"))["a"].met == 0, "the byte has not been read since"
        await disks.release("f1")
        assert await disks.met("f1") == {}
        await run_on(world, "a", read_all)
        assert (await disks.met("f2"))["a"].met == 1

        async def write_and_read(disk: Disk) -> None:
            await disk.open("/data/log").write(again.offset, bytes((again.before,)))
            disk.read_file("/data/log")

        world["a"].kill()
        await run_on(world, "a", write_and_read)
        assert (await disks.met("f2"))["a"].met == 1, "the byte was overwritten before this read"

    simulate(scenario)


@pytest.mark.parametrize("is_synced", [True, False])
def test_releasing_a_bit_flip_restores_synced_and_unsynced_blocks(simulate: Simulate, is_synced: bool) -> None:
    async def scenario(world: Any) -> None:
        disks = SimDisks(world.loop, {"a": world["a"]}, {"a": "/data"})

        async def write(disk: Disk) -> None:
            disk.make_dirs("/data")
            await disk.open("/data/log").write(0, bytes(range(1, 101)) + bytes(50), sync=True)
            await disk.open("/data/log").write(100, b"more", sync=is_synced)

        await run_on(world, "a", write)
        world["a"].kill()
        flipped = await disks.flip_bit("f1", "a", files="log", place=0.5, bit=3)
        assert flipped.after == flipped.before ^ 8 == world["a"].disk.inode("/data/log").cache[flipped.offset]
        await disks.release("f1")
        assert bytes(world["a"].disk.inode("/data/log").cache) == bytes(range(1, 101)) + b"more" + bytes(46)

    simulate(scenario)


@pytest.mark.parametrize(("count", "said"), [(3, "3 bytes, of 3 changes since"), (1, "1 byte, of 1 change since")])
def test_a_power_cut_reports_the_changes_since_the_previous_one(simulate: Simulate, count: int, said: str) -> None:
    async def scenario(world: Any) -> None:
        disks = SimDisks(world.loop, {"a": world["a"]}, {"a": "/data"})
        cuts = []

        async def write(disk: Disk) -> None:
            disk.make_dirs("/data")
            for at in range(count):
                await disk.open("/data/log").write(at, b"x")

        for work in (write, None):
            if work is not None:
                await run_on(world, "a", work)
                world["a"].kill()
            cuts.append(await disks.cut_power("f1", "a"))
        assert [cut.recorded for cut in cuts] == [count, 0]
        assert cuts[0].detail.startswith(said)

    simulate(scenario)


@pytest.mark.parametrize("kind", ["stall", "stall-fsync"])
def test_a_power_cut_ends_abandoned_probes(simulate: Simulate, kind: str) -> None:
    """Otherwise the run would wait for the probe at its end."""

    async def scenario(world: Any) -> None:
        disks = SimDisks(world.loop, {"a": world["a"]}, {"a": "/data"})
        await disks.impair("f1", {"a": DiskFault(kind=kind)})
        probe = await disks.probe("a", timeout_s=0.5)
        assert "no answer" in (probe.write.outcome, probe.sync.outcome)
        assert disks._abandoned
        await disks.cut_power("f2", "a")
        await asyncio.sleep(0.01)
        assert not disks._abandoned

    simulate(scenario)
