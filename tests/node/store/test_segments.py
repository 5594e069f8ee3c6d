"""Segmented files: against a plain byte string, across restarts, power cuts and disks that refuse."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.real_runtime import RealDisk
from node.store.segments import SegmentedFile, SegmentError, segment_name

DIRECTORY = "/data/log"
SEGMENT = 64


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def opened(disk: Any, *, size_bytes: int = SEGMENT, max_open: int = 64) -> SegmentedFile:
    row = SegmentedFile(disk, DIRECTORY, segment_size_bytes=size_bytes, max_open=max_open)
    row.open()
    return row


async def append(row: SegmentedFile, data: bytes, *, sync: bool, is_told: bool) -> None:
    """Append in one of the two ways in which that can be done."""
    if not is_told:
        await row.append(data, sync=sync)
        return
    ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    row.begin_append(data, ended.set_result, sync=sync)
    assert not ended.done()
    error = await ended
    if error is not None:
        raise error


def test_names_are_positions_in_twenty_digits(disk: Any) -> None:
    row = opened(disk)
    run(row.append(bytes(range(150))))
    assert disk.list(DIRECTORY) == [segment_name(0), segment_name(64), segment_name(128)]
    assert segment_name(64) == "00000000000000000064"
    assert [len(disk.files[f"{DIRECTORY}/{name}"]) for name in disk.list(DIRECTORY)] == [64, 64, 22]
    assert row.path_at(130) == f"{DIRECTORY}/{segment_name(128)}"
    assert (row.room_at(0), row.room_at(63), row.room_at(64)) == (64, 1, 64)


def test_reads_go_across_files_and_stop_at_the_end(disk: Any) -> None:
    row = opened(disk)
    data = bytes(range(150))
    run(row.append(data))
    assert row.read(0, 1000) == data
    assert row.read(60, 10) == data[60:70]
    assert row.read(150, 1) == row.read(-1, 5) == b""


def test_an_append_to_a_new_segment_is_durable_with_its_name(disk: Any) -> None:
    row = opened(disk)
    run(row.append(bytes(100), sync=True))
    assert row.synced_position == 100
    disk.cut_power()
    assert opened(disk).read(0, 200) == bytes(100)


def test_trailer_is_written_behind_the_end_and_overwritten(disk: Any) -> None:
    row = opened(disk)
    run(row.append(b"one", trailer=b"<end>"))
    assert disk.files[f"{DIRECTORY}/{segment_name(0)}"] == b"one<end>"
    assert (row.end_position, row.read(0, 50)) == (3, b"one")
    run(row.append(b"second", trailer=b"<end>"))
    assert disk.files[f"{DIRECTORY}/{segment_name(0)}"] == b"onesecond<end>"
    run(row.append(bytes(53), trailer=b"<end>"))  # two bytes are left: no room for the trailer
    assert len(disk.files[f"{DIRECTORY}/{segment_name(0)}"]) == 62
    run(row.append(b"ab" + b"next", trailer=b"<end>"))
    assert disk.files[f"{DIRECTORY}/{segment_name(64)}"] == b"next<end>"


def test_truncate_removes_later_files_from_the_back(disk: Any) -> None:
    row = opened(disk)
    run(row.append(bytes(range(200)), sync=True))
    removed: list[str] = []
    real_remove = disk.remove

    async def remove(path: str) -> None:
        removed.append(path[-3:])
        await real_remove(path)

    disk.remove = remove
    run(row.truncate(70))
    assert removed == ["192", "128"]
    assert row.read(0, 300) == bytes(range(70))
    disk.cut_power()
    assert opened(disk).end_position == 70


def test_truncate_to_a_boundary_removes_the_file_that_begins_there(disk: Any) -> None:
    row = opened(disk)
    run(row.append(bytes(130)))
    run(row.truncate(128))
    assert disk.list(DIRECTORY) == [segment_name(0), segment_name(64)]
    run(row.append(b"more"))
    assert row.read(126, 10) == b"\0\0more"


@pytest.mark.parametrize("position", [-1, 11])
def test_truncate_outside_the_row_is_an_error(disk: Any, position: int) -> None:
    row = opened(disk)
    run(row.append(bytes(10)))
    with pytest.raises(ValueError, match="holds 0 to 10"):
        run(row.truncate(position))
    assert row.end_position == 10


def test_reset_begins_anew_in_the_middle_of_a_segment(disk: Any) -> None:
    row = opened(disk)
    run(row.append(bytes(100)))
    run(row.reset(200))
    assert (row.begin_position, row.end_position, disk.list(DIRECTORY)) == (200, 200, [])
    run(row.append(b"fresh", sync=True))
    assert row.read(200, 5) == b"fresh"
    assert row.read(199, 5) == b""
    assert disk.list(DIRECTORY) == [segment_name(192)]


def test_remove_before_keeps_what_is_needed_and_the_last_file(disk: Any) -> None:
    row = opened(disk)
    run(row.append(bytes(range(200))))
    run(row.remove_before(130))
    assert (row.begin_position, row.read(128, 2), row.read(127, 2)) == (128, bytes([128, 129]), b"")
    run(row.remove_before(10_000))
    assert disk.list(DIRECTORY) == [segment_name(192)]


@pytest.mark.parametrize("fails", ["", "before", "after"])
def test_who_reads_while_a_file_goes_does_not_make_it_again(
    disk: Any, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Opening a file makes it where there is none. `fails` says on which side of the removal the disk does."""
    row = opened(disk)
    run(row.append(bytes(range(150))))
    remove, found = disk.remove, []

    async def slow(path: str) -> None:
        found.append((row.begin_position, row.read(0, 5)))
        if fails != "before":
            await remove(path)
        found.append((row.begin_position, row.read(0, 5)))
        if fails:
            raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(disk, "remove", slow)
    with pytest.raises(OSError, match="Input/output") if fails else contextlib.nullcontext():
        run(row.remove_before(64))
    begin = 0 if fails == "before" else 64
    assert found == [(64, b""), (64, b"")]
    assert (row.begin_position, row.read(0, 5)) == (begin, bytes(range(5)) if begin == 0 else b"")
    assert disk.list(DIRECTORY) == [segment_name(base) for base in range(begin, 150, 64)]
    assert opened(disk).first_gap(150) == ""


def test_another_segment_size_is_recognized(disk: Any) -> None:
    run(opened(disk).append(bytes(100)))
    with pytest.raises(SegmentError, match="another segment size"):
        opened(disk, size_bytes=50)
    run(opened(disk, size_bytes=64).truncate(60))
    with pytest.raises(SegmentError, match="60 bytes long, segments have 32"):
        opened(disk, size_bytes=32)


def test_reading_stops_at_a_missing_and_at_a_short_file(disk: Any) -> None:
    run(opened(disk).append(bytes(range(200))))
    del disk.files[f"{DIRECTORY}/{segment_name(64)}"]
    row = opened(disk)
    assert row.read(0, 200) == bytes(range(64))
    assert row.read(128, 200) == bytes(range(128, 200))
    disk.files[f"{DIRECTORY}/{segment_name(64)}"] = bytearray(b"short")
    assert opened(disk).read(0, 200) == bytes(range(64)) + b"short"


def test_files_held_open_are_bounded(disk: Any) -> None:
    row = opened(disk, size_bytes=10, max_open=3)
    run(row.append(bytes(200), sync=True))
    for position in range(200):
        row.read(position, 1)
    assert disk.open_handles <= 3
    row.close()
    assert disk.open_handles == 0


def test_a_refused_append_changes_nothing_and_can_be_repeated(disk: Any) -> None:
    row = opened(disk)
    run(row.append(b"before", sync=True))
    disk.fail_writes = True
    with pytest.raises(OSError, match="No space left") as caught:
        run(row.append(bytes(100), sync=True))
    assert caught.value.errno == errno.ENOSPC
    assert row.end_position == 6
    disk.fail_writes = False
    run(row.append(b"after", sync=True))
    assert row.read(0, 50) == b"beforeafter"


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("failed_bytes", [20, 100])
def test_what_a_failed_write_left_is_cut_off_before_the_next(disk: Any, failed_bytes: int, is_told: bool) -> None:
    """Whoever finds the end after a crash takes what is not zero behind it for written: an old write must not be."""
    row = opened(disk)
    run(row.append(b"before", sync=True))
    disk.fail_syncs = True
    with pytest.raises(OSError, match="Input/output"):
        run(append(row, b"F" * failed_bytes, sync=True, is_told=is_told))
    disk.fail_syncs = False
    assert disk.files[f"{DIRECTORY}/{segment_name(0)}"][6:26] == b"F" * 20
    at_write: list[bytes] = []
    disk.before_write = lambda path: at_write.append(disk.synced[path])
    run(append(row, b"after", sync=False, is_told=is_told))
    assert at_write == [b"before"]
    assert bytes(disk.files[f"{DIRECTORY}/{segment_name(0)}"]) == b"beforeafter"
    assert disk.list(DIRECTORY) == [segment_name(0)]


def test_what_a_failed_sync_may_have_dropped_is_written_again(disk: Any) -> None:
    """After a failed fsync the kernel may take dirty pages for clean: a second fsync alone then proves nothing."""
    row = opened(disk)
    run(row.append(b"A" * 40))
    run(row.append(b"B" * 60))
    disk.fail_syncs = True
    with pytest.raises(OSError, match="Input/output"):
        run(row.sync())
    disk.fail_syncs = False
    for content in disk.files.values():  # what dropping amounts to: the pages read back as they were on the disk
        content[:] = bytes(len(content))
    run(row.append(b"C", sync=True))
    disk.cut_power()
    assert opened(disk).read(0, 200) == b"A" * 40 + b"B" * 60 + b"C"


def test_what_was_removed_is_not_written_again(disk: Any) -> None:
    """It would be there again after a restart, in part: without what had been synced before."""
    row = opened(disk)
    run(row.append(b"A" * 30, sync=True))
    run(row.append(b"A" * 70))
    run(row.remove_before(64))
    disk.fail_syncs = True
    with pytest.raises(OSError, match="Input/output"):
        run(row.sync())
    disk.fail_syncs = False
    run(row.append(b"B", sync=True))
    assert (row.begin_position, disk.list(DIRECTORY)) == (64, [segment_name(64)])
    disk.cut_power()
    again = opened(disk)
    assert (again.begin_position, again.read(64, 100)) == (64, b"A" * 36 + b"B")


def test_write_again_syncs_the_names_of_the_files(disk: Any) -> None:
    """Of a file that was made just before the process died nobody knows whether its directory was synced."""
    row = opened(disk)
    run(row.append(b"x" * 100))
    again = opened(disk)
    run(again.write_again(0))
    assert disk.synced_directories == [DIRECTORY]


def test_write_again_makes_the_end_durable_without_trusting_a_sync(disk: Any) -> None:
    row = opened(disk)
    run(row.append(b"x" * 100, sync=True))
    run(row.append(b"y" * 100))
    written: list[str] = []
    disk.before_write = lambda path: written.append(path[-3:])
    again = opened(disk)
    run(again.write_again(110))
    assert written == ["064", "128", "192"]
    disk.cut_power()
    assert opened(disk).read(0, 300) == b"x" * 100 + b"y" * 100


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.binary(max_size=150), st.booleans(), st.booleans()),
        st.tuples(st.just("truncate"), st.floats(0, 1)),
        st.tuples(st.just("remove_before"), st.floats(0, 1)),
        st.tuples(st.just("sync")),
        st.tuples(st.just("reopen")),
        st.tuples(st.just("fail"), st.binary(min_size=1, max_size=100), st.booleans(), st.booleans()),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS, size_bytes=st.integers(1, 70))
def test_behaves_like_one_long_byte_string(new_disk: Any, operations: list[Any], size_bytes: int) -> None:
    disk = new_disk()
    row = opened(disk, size_bytes=size_bytes, max_open=2)
    model, begin = b"", 0

    async def apply(operation: tuple[Any, ...]) -> None:
        nonlocal model, begin, row
        kind, *arguments = operation
        if kind == "append":
            await append(row, arguments[0], sync=arguments[1], is_told=arguments[2])
            model += arguments[0]
            if arguments[0]:
                held = sum(len(disk.files[f"{DIRECTORY}/{name}"]) for name in disk.list(DIRECTORY))
                assert held == len(model) - begin // size_bytes * size_bytes, "of a write that failed nothing is left"
        elif kind == "truncate":
            position = begin + int((len(model) - begin) * arguments[0])
            await row.truncate(position)
            model = model[:position]
        elif kind == "remove_before":
            position = begin + int((len(model) - begin) * arguments[0])
            await row.remove_before(position)
            assert begin <= row.begin_position <= position
            begin = row.begin_position
        elif kind == "sync":
            await row.sync()
        elif kind == "fail":
            disk.fail_writes, disk.fail_syncs = arguments[1], True
            with pytest.raises(OSError):
                await append(row, arguments[0], sync=True, is_told=arguments[2])
            disk.fail_writes = disk.fail_syncs = False
        elif row.end_position > row.begin_position and len(model) % size_bytes:
            await row.truncate(len(model))  # what a caller does that knows where its records end
            row.close()
            row = opened(disk, size_bytes=size_bytes, max_open=2)

    async def scenario() -> None:
        for operation in operations:
            await apply(operation)
            assert (row.begin_position, row.end_position) == (begin, len(model))
            assert row.read(begin, len(model) + 9) == model[begin:]
            middle = (begin + len(model)) // 2
            assert row.read(middle, 3) == model[middle : middle + 3]

    asyncio.run(scenario())


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(
        st.tuples(st.binary(min_size=1, max_size=90), st.booleans(), st.booleans()), min_size=1, max_size=12
    ),
    seed=st.integers(0, 999),
)
def test_what_was_synced_survives_a_power_cut(new_disk: Any, pieces: list[tuple[bytes, bool, bool]], seed: int) -> None:
    disk = new_disk()

    async def scenario() -> tuple[bytes, int]:
        row = opened(disk)
        written, synced = b"", 0
        for data, sync, is_told in pieces:
            if random.Random(f"{seed}/{len(written)}").random() < 0.2:
                disk.fail_syncs = True
                with pytest.raises(OSError):
                    await append(row, data, sync=True, is_told=is_told)
                disk.fail_syncs = False
            await append(row, data, sync=sync, is_told=is_told)
            written += data
            if sync:
                synced = len(written)
                assert row.synced_position == synced
        return written, synced

    written, synced = asyncio.run(scenario())
    disk.cut_power()
    row = opened(disk)
    assert row.read(0, synced) == written[:synced]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_directory_in_the_place_of_a_segment_is_found_before_anybody_reads(tmp_path: Path, place: int) -> None:
    async def scenario(disk: RealDisk) -> None:
        row = SegmentedFile(disk, str(tmp_path / "log"), segment_size_bytes=SEGMENT)
        row.open()
        await row.append(bytes(range(2 * SEGMENT + 7)), sync=True)
        row.close()
        path = tmp_path / "log" / segment_name(place * SEGMENT)
        path.unlink()
        path.mkdir()
        again = SegmentedFile(disk, str(tmp_path / "log"), segment_size_bytes=SEGMENT)
        with pytest.raises(IsADirectoryError) as caught:
            again.open()
        assert caught.value.filename == str(path)

    with contextlib.closing(RealDisk()) as disk:
        run(scenario(disk))
