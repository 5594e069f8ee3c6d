"""Segmented files: compared with a plain byte string, across restarts, power cuts and disk errors."""

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
    segments = SegmentedFile(disk, DIRECTORY, segment_size_bytes=size_bytes, max_open=max_open)
    segments.open()
    return segments


async def append(segments: SegmentedFile, data: bytes, *, sync: bool, by_callback: bool) -> None:
    """Append with `append`, or with `begin_append` and its callback."""
    if not by_callback:
        await segments.append(data, sync=sync)
        return
    ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    segments.begin_append(data, ended.set_result, sync=sync)
    assert not ended.done()
    error = await ended
    if error is not None:
        raise error


def test_files_are_named_by_position_in_twenty_digits(disk: Any) -> None:
    segments = opened(disk)
    run(segments.append(bytes(range(150))))
    assert disk.list(DIRECTORY) == [segment_name(0), segment_name(64), segment_name(128)]
    assert segment_name(64) == "00000000000000000064"
    assert [len(disk.files[f"{DIRECTORY}/{name}"]) for name in disk.list(DIRECTORY)] == [64, 64, 22]
    assert segments.path_at(130) == f"{DIRECTORY}/{segment_name(128)}"
    assert (segments.room_at(0), segments.room_at(63), segments.room_at(64)) == (64, 1, 64)


def test_reads_go_across_files_and_stop_at_the_end(disk: Any) -> None:
    segments = opened(disk)
    data = bytes(range(150))
    run(segments.append(data))
    assert segments.read(0, 1000) == data
    assert segments.read(60, 10) == data[60:70]
    assert segments.read(150, 1) == segments.read(-1, 5) == b""


def test_an_append_to_a_new_segment_is_durable_with_its_name(disk: Any) -> None:
    segments = opened(disk)
    run(segments.append(bytes(100), sync=True))
    assert segments.synced_position == 100
    disk.cut_power()
    assert opened(disk).read(0, 200) == bytes(100)


def test_a_trailer_is_written_after_the_end_and_overwritten_by_the_next_append(disk: Any) -> None:
    segments = opened(disk)
    run(segments.append(b"one", trailer=b"<end>"))
    assert disk.files[f"{DIRECTORY}/{segment_name(0)}"] == b"one<end>"
    assert (segments.end_position, segments.read(0, 50)) == (3, b"one")
    run(segments.append(b"second", trailer=b"<end>"))
    assert disk.files[f"{DIRECTORY}/{segment_name(0)}"] == b"onesecond<end>"
    run(segments.append(bytes(53), trailer=b"<end>"))  # two bytes are left: no room for the trailer
    assert len(disk.files[f"{DIRECTORY}/{segment_name(0)}"]) == 62
    run(segments.append(b"ab" + b"next", trailer=b"<end>"))
    assert disk.files[f"{DIRECTORY}/{segment_name(64)}"] == b"next<end>"


def test_truncate_removes_later_files_from_the_back(disk: Any) -> None:
    segments = opened(disk)
    run(segments.append(bytes(range(200)), sync=True))
    removed: list[str] = []
    real_remove = disk.remove

    async def remove(path: str) -> None:
        removed.append(path[-3:])
        await real_remove(path)

    disk.remove = remove
    run(segments.truncate(70))
    assert removed == ["192", "128"]
    assert segments.read(0, 300) == bytes(range(70))
    disk.cut_power()
    assert opened(disk).end_position == 70


def test_truncate_to_a_boundary_removes_the_file_that_begins_there(disk: Any) -> None:
    segments = opened(disk)
    run(segments.append(bytes(130)))
    run(segments.truncate(128))
    assert disk.list(DIRECTORY) == [segment_name(0), segment_name(64)]
    run(segments.append(b"more"))
    assert segments.read(126, 10) == b"\0\0more"


@pytest.mark.parametrize("position", [-1, 11])
def test_truncating_to_a_position_outside_is_an_error(disk: Any, position: int) -> None:
    segments = opened(disk)
    run(segments.append(bytes(10)))
    with pytest.raises(ValueError, match="holds 0 to 10"):
        run(segments.truncate(position))
    assert segments.end_position == 10


def test_reset_may_begin_in_the_middle_of_a_segment(disk: Any) -> None:
    segments = opened(disk)
    run(segments.append(bytes(100)))
    run(segments.reset(200))
    assert (segments.begin_position, segments.end_position, disk.list(DIRECTORY)) == (200, 200, [])
    run(segments.append(b"fresh", sync=True))
    assert segments.read(200, 5) == b"fresh"
    assert segments.read(199, 5) == b""
    assert disk.list(DIRECTORY) == [segment_name(192)]


def test_remove_before_keeps_what_is_needed_and_the_last_file(disk: Any) -> None:
    segments = opened(disk)
    run(segments.append(bytes(range(200))))
    run(segments.remove_before(130))
    assert (segments.begin_position, segments.read(128, 2), segments.read(127, 2)) == (128, bytes([128, 129]), b"")
    run(segments.remove_before(10_000))
    assert disk.list(DIRECTORY) == [segment_name(192)]


@pytest.mark.parametrize("fails", ["", "before", "after"])
def test_a_read_during_a_removal_does_not_recreate_the_file(
    disk: Any, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Opening a missing file creates it. `fails`: whether the disk fails before or after the removal."""
    segments = opened(disk)
    run(segments.append(bytes(range(150))))
    remove, found = disk.remove, []

    async def slow(path: str) -> None:
        found.append((segments.begin_position, segments.read(0, 5)))
        if fails != "before":
            await remove(path)
        found.append((segments.begin_position, segments.read(0, 5)))
        if fails:
            raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(disk, "remove", slow)
    with pytest.raises(OSError, match="Input/output") if fails else contextlib.nullcontext():
        run(segments.remove_before(64))
    begin = 0 if fails == "before" else 64
    assert found == [(64, b""), (64, b"")]
    assert (segments.begin_position, segments.read(0, 5)) == (begin, bytes(range(5)) if begin == 0 else b"")
    assert disk.list(DIRECTORY) == [segment_name(base) for base in range(begin, 150, 64)]
    assert opened(disk).first_gap(150) == ""


def test_another_segment_size_is_refused(disk: Any) -> None:
    run(opened(disk).append(bytes(100)))
    with pytest.raises(SegmentError, match="another segment size"):
        opened(disk, size_bytes=50)
    run(opened(disk, size_bytes=64).truncate(60))
    with pytest.raises(SegmentError, match="60 bytes long, segments have 32"):
        opened(disk, size_bytes=32)


def test_reading_stops_at_a_missing_and_at_a_short_file(disk: Any) -> None:
    run(opened(disk).append(bytes(range(200))))
    del disk.files[f"{DIRECTORY}/{segment_name(64)}"]
    segments = opened(disk)
    assert segments.read(0, 200) == bytes(range(64))
    assert segments.read(128, 200) == bytes(range(128, 200))
    disk.files[f"{DIRECTORY}/{segment_name(64)}"] = bytearray(b"short")
    assert opened(disk).read(0, 200) == bytes(range(64)) + b"short"


def test_files_held_open_are_bounded(disk: Any) -> None:
    segments = opened(disk, size_bytes=10, max_open=3)
    run(segments.append(bytes(200), sync=True))
    for position in range(200):
        segments.read(position, 1)
    assert disk.open_handles <= 3
    segments.close()
    assert disk.open_handles == 0


def test_a_refused_append_changes_nothing_and_can_be_repeated(disk: Any) -> None:
    segments = opened(disk)
    run(segments.append(b"before", sync=True))
    disk.fail_writes = True
    with pytest.raises(OSError, match="No space left") as caught:
        run(segments.append(bytes(100), sync=True))
    assert caught.value.errno == errno.ENOSPC
    assert segments.end_position == 6
    disk.fail_writes = False
    run(segments.append(b"after", sync=True))
    assert segments.read(0, 50) == b"beforeafter"


@pytest.mark.parametrize("by_callback", [False, True])
@pytest.mark.parametrize("failed_bytes", [20, 100])
def test_bytes_of_a_failed_write_are_cut_off_before_the_next_write(
    disk: Any, failed_bytes: int, by_callback: bool
) -> None:
    """Recovery takes nonzero bytes after the end for a write: those of a failed one must not remain."""
    segments = opened(disk)
    run(segments.append(b"before", sync=True))
    disk.fail_syncs = True
    with pytest.raises(OSError, match="Input/output"):
        run(append(segments, b"F" * failed_bytes, sync=True, by_callback=by_callback))
    disk.fail_syncs = False
    assert disk.files[f"{DIRECTORY}/{segment_name(0)}"][6:26] == b"F" * 20
    at_write: list[bytes] = []
    disk.before_write = lambda path: at_write.append(disk.synced[path])
    run(append(segments, b"after", sync=False, by_callback=by_callback))
    assert at_write == [b"before"]
    assert bytes(disk.files[f"{DIRECTORY}/{segment_name(0)}"]) == b"beforeafter"
    assert disk.list(DIRECTORY) == [segment_name(0)]


def test_data_that_a_failed_sync_may_have_dropped_is_rewritten(disk: Any) -> None:
    """After a failed fsync the kernel may take dirty pages for clean: a second fsync alone then proves nothing."""
    segments = opened(disk)
    run(segments.append(b"A" * 40))
    run(segments.append(b"B" * 60))
    disk.fail_syncs = True
    with pytest.raises(OSError, match="Input/output"):
        run(segments.sync())
    disk.fail_syncs = False
    for content in disk.files.values():  # dropped pages read back as they were on the disk
        content[:] = bytes(len(content))
    run(segments.append(b"C", sync=True))
    disk.cut_power()
    assert opened(disk).read(0, 200) == b"A" * 40 + b"B" * 60 + b"C"


def test_removed_data_is_not_rewritten_after_a_failed_sync(disk: Any) -> None:
    """After a restart it would reappear in part: without the bytes synced before."""
    segments = opened(disk)
    run(segments.append(b"A" * 30, sync=True))
    run(segments.append(b"A" * 70))
    run(segments.remove_before(64))
    disk.fail_syncs = True
    with pytest.raises(OSError, match="Input/output"):
        run(segments.sync())
    disk.fail_syncs = False
    run(segments.append(b"B", sync=True))
    assert (segments.begin_position, disk.list(DIRECTORY)) == (64, [segment_name(64)])
    disk.cut_power()
    again = opened(disk)
    assert (again.begin_position, again.read(64, 100)) == (64, b"A" * 36 + b"B")


def test_write_again_syncs_the_names_of_the_files(disk: Any) -> None:
    """For a file created just before the process died, it is unknown whether its directory was synced."""
    segments = opened(disk)
    run(segments.append(b"x" * 100))
    again = opened(disk)
    run(again.write_again(0))
    assert disk.synced_directories == [DIRECTORY]


def test_write_again_makes_the_end_durable_without_trusting_a_sync(disk: Any) -> None:
    segments = opened(disk)
    run(segments.append(b"x" * 100, sync=True))
    run(segments.append(b"y" * 100))
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
def test_segments_behave_like_one_long_byte_string(new_disk: Any, operations: list[Any], size_bytes: int) -> None:
    disk = new_disk()
    segments = opened(disk, size_bytes=size_bytes, max_open=2)
    model, begin = b"", 0

    async def apply(operation: tuple[Any, ...]) -> None:
        nonlocal model, begin, segments
        kind, *arguments = operation
        if kind == "append":
            await append(segments, arguments[0], sync=arguments[1], by_callback=arguments[2])
            model += arguments[0]
            if arguments[0]:
                held = sum(len(disk.files[f"{DIRECTORY}/{name}"]) for name in disk.list(DIRECTORY))
                assert held == len(model) - begin // size_bytes * size_bytes, "nothing may remain of a failed write"
        elif kind == "truncate":
            position = begin + int((len(model) - begin) * arguments[0])
            await segments.truncate(position)
            model = model[:position]
        elif kind == "remove_before":
            position = begin + int((len(model) - begin) * arguments[0])
            await segments.remove_before(position)
            assert begin <= segments.begin_position <= position
            begin = segments.begin_position
        elif kind == "sync":
            await segments.sync()
        elif kind == "fail":
            disk.fail_writes, disk.fail_syncs = arguments[1], True
            with pytest.raises(OSError):
                await append(segments, arguments[0], sync=True, by_callback=arguments[2])
            disk.fail_writes = disk.fail_syncs = False
        elif segments.end_position > segments.begin_position and len(model) % size_bytes:
            await segments.truncate(len(model))  # as a caller does that knows where its records end
            segments.close()
            segments = opened(disk, size_bytes=size_bytes, max_open=2)

    async def scenario() -> None:
        for operation in operations:
            await apply(operation)
            assert (segments.begin_position, segments.end_position) == (begin, len(model))
            assert segments.read(begin, len(model) + 9) == model[begin:]
            middle = (begin + len(model)) // 2
            assert segments.read(middle, 3) == model[middle : middle + 3]

    asyncio.run(scenario())


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(
        st.tuples(st.binary(min_size=1, max_size=90), st.booleans(), st.booleans()), min_size=1, max_size=12
    ),
    seed=st.integers(0, 999),
)
def test_synced_data_survives_a_power_cut(new_disk: Any, pieces: list[tuple[bytes, bool, bool]], seed: int) -> None:
    disk = new_disk()

    async def scenario() -> tuple[bytes, int]:
        segments = opened(disk)
        written, synced = b"", 0
        for data, sync, by_callback in pieces:
            if random.Random(f"{seed}/{len(written)}").random() < 0.2:
                disk.fail_syncs = True
                with pytest.raises(OSError):
                    await append(segments, data, sync=True, by_callback=by_callback)
                disk.fail_syncs = False
            await append(segments, data, sync=sync, by_callback=by_callback)
            written += data
            if sync:
                synced = len(written)
                assert segments.synced_position == synced
        return written, synced

    written, synced = asyncio.run(scenario())
    disk.cut_power()
    segments = opened(disk)
    assert segments.read(0, synced) == written[:synced]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_open_refuses_a_directory_in_place_of_a_segment(tmp_path: Path, place: int) -> None:
    async def scenario(disk: RealDisk) -> None:
        segments = SegmentedFile(disk, str(tmp_path / "log"), segment_size_bytes=SEGMENT)
        segments.open()
        await segments.append(bytes(range(2 * SEGMENT + 7)), sync=True)
        segments.close()
        path = tmp_path / "log" / segment_name(place * SEGMENT)
        path.unlink()
        path.mkdir()
        again = SegmentedFile(disk, str(tmp_path / "log"), segment_size_bytes=SEGMENT)
        with pytest.raises(IsADirectoryError) as caught:
            again.open()
        assert caught.value.filename == str(path)

    with contextlib.closing(RealDisk()) as disk:
        run(scenario(disk))
