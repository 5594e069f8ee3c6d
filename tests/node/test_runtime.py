"""The real disk and clocks, on the machine's own file system."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from node.real_runtime import RealClock, RealDisk, RealLineFile, real_runtime


@pytest.fixture
def disk() -> Iterator[RealDisk]:
    disk = RealDisk()
    yield disk
    disk.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The system calls that are made, in order; none of them may be made on the loop's thread."""
    made: list[str] = []
    main_thread = threading.get_ident()

    def watch(name: str) -> None:
        original = getattr(os, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            assert threading.get_ident() != main_thread, f"os.{name} on the event loop's thread"
            made.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(os, name, wrapper)

    for name in ("pwrite", "fsync", "fdatasync", "ftruncate", "replace", "unlink"):
        watch(name)
    return made


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def test_file_reads_back_what_was_written_and_knows_its_size(disk: RealDisk, tmp_path: Path) -> None:
    async def scenario() -> None:
        file = await disk.create(str(tmp_path / "file"))
        await file.write(0, b"hello")
        await file.write(8, b"world", sync=True)
        assert file.size_bytes() == 13
        assert file.read(0, 100) == b"hello\0\0\0world"
        assert file.read(20, 5) == b""
        await file.truncate(3)
        await file.sync()
        assert (file.size_bytes(), file.read(0, 9)) == (3, b"hel")
        file.close()
        file.close()

    run(scenario())
    assert (tmp_path / "file").read_bytes() == b"hel"


def test_calls_that_block_on_the_disk_run_off_the_event_loop(disk: RealDisk, tmp_path: Path, calls: list[str]) -> None:
    async def scenario() -> None:
        file = await disk.create(str(tmp_path / "file"))
        await file.write(0, b"data")
        assert calls == ["fsync", "pwrite"]  # of the directory, of the data
        calls.clear()
        await file.write(4, b"data", sync=True)
        await file.sync()
        assert calls == ["pwrite", "fdatasync", "fdatasync"]
        calls.clear()
        await file.truncate(2)
        await file.sync()  # a length that only shrank is not data: the whole inode is synced
        await file.sync()
        assert calls == ["ftruncate", "fsync", "fdatasync"]
        calls.clear()
        await disk.remove(str(tmp_path / "file"))
        assert calls == ["unlink", "fsync"]
        calls.clear()
        await disk.sync_dir(str(tmp_path))
        assert calls == ["fsync"]
        file.close()

    run(scenario())


@pytest.mark.parametrize("sync", [False, True])
def test_the_callback_of_a_write_runs_later_on_the_event_loop(
    disk: RealDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    """Also for writes that wait in the pool because another one is in progress, and for writes that fail."""

    async def scenario() -> None:
        file = await disk.create(str(tmp_path / "file"))
        loop, thread = asyncio.get_running_loop(), threading.get_ident()
        told: list[tuple[int, BaseException | None]] = []
        all_told = loop.create_future()

        def write(number: int, count: int) -> None:
            def on_done(error: BaseException | None) -> None:
                assert threading.get_ident() == thread
                told.append((number, error))
                if len(told) == count:
                    all_told.set_result(None)

            file.begin_write(number, b"%d" % number, on_done, sync=sync)

        for number in range(3):
            write(number, 3)
        assert not told
        await all_told
        assert sorted(told) == [(0, None), (1, None), (2, None)]
        assert file.read(0, 9) == b"012"

        def refuse(descriptor: int, data: bytes, offset: int) -> int:
            raise OSError(28, "full")

        monkeypatch.setattr(os, "pwrite", refuse)
        told.clear()
        all_told = loop.create_future()
        for number in range(3):
            write(number, 3)
        assert not told
        await all_told
        assert sorted((number, type(error)) for number, error in told) == [(n, OSError) for n in range(3)]
        file.close()

    run(scenario())


def test_atomic_write_syncs_the_content_before_and_the_directory_after_the_rename(
    disk: RealDisk, tmp_path: Path, calls: list[str]
) -> None:
    path = tmp_path / "state"

    async def scenario() -> None:
        await disk.write_file_atomic(str(path), b"old")
        calls.clear()
        await disk.write_file_atomic(str(path), b"new and longer")

    run(scenario())
    assert calls == ["fsync", "replace", "fsync"]
    assert path.read_bytes() == b"new and longer"
    assert disk.list(str(tmp_path)) == ["state"]


def test_failed_atomic_write_leaves_the_old_content(
    disk: RealDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"

    async def scenario() -> None:
        await disk.write_file_atomic(str(path), b"old")

        def fail(descriptor: int) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            await disk.write_file_atomic(str(path), b"new")

    run(scenario())
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize(("make", "said"), [(os.mkfifo, "not a regular file"), (os.mkdir, "Is a directory")])
def test_reading_a_pipe_or_a_directory_fails_without_blocking(
    make: Callable[[Path], None], said: str, disk: RealDisk, tmp_path: Path
) -> None:
    make(tmp_path / "odd")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=rf"{said}: '.*/odd'"):
        disk.read_file(str(tmp_path / "odd"))
    assert os.listdir("/proc/self/fd") == before


def test_short_writes_and_reads_are_continued(disk: RealDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_pwrite, real_pread = os.pwrite, os.pread
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real_pwrite(fd, bytes(data)[:3], at))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: real_pread(fd, min(size, 4), at))

    async def scenario() -> None:
        file = await disk.create(str(tmp_path / "file"))
        await file.write(0, b"0123456789")
        assert file.read(0, 10) == b"0123456789"
        assert file.read(5, 10) == b"56789"
        file.close()

    run(scenario())


def test_loop_stays_free_and_a_cancelled_waiter_waits_for_the_operation(
    disk: RealDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, release = threading.Event(), threading.Event()
    real_fdatasync = os.fdatasync

    def stall(descriptor: int) -> None:
        started.set()
        assert release.wait(20)
        real_fdatasync(descriptor)

    async def scenario() -> None:
        file = await disk.create(str(tmp_path / "file"))
        monkeypatch.setattr(os, "fdatasync", stall)
        task = asyncio.create_task(file.write(0, b"x", sync=True))
        assert await asyncio.to_thread(started.wait, 20)  # the loop turns while the disk does not
        task.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not task.done()  # the file could be closed, and its number given to another one, too early
        release.set()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        file.close()

    run(scenario())


def test_a_file_that_cannot_be_read_is_named(disk: RealDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a bad sector: the system does not name the file, but a start that fails on it has to."""
    file = disk.open(str(tmp_path / "f"))

    def fails(descriptor: int, size_bytes: int, offset: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fails)
    with pytest.raises(OSError, match=r"\[Errno 5\] .*/f'"):
        file.read(0, 10)


def test_a_closed_file_raises_os_error_for_every_operation(disk: RealDisk, tmp_path: Path) -> None:
    """Callers expect no other kind of error from a disk."""

    async def scenario() -> None:
        file = disk.open(str(tmp_path / "f"))
        file.close()
        for operation in (file.sync, lambda: file.write(0, b"x", sync=True), lambda: file.truncate(0)):
            with pytest.raises(OSError, match="Bad file descriptor"):
                await operation()
        with pytest.raises(OSError, match="Bad file descriptor"):
            file.read(0, 1)

    asyncio.run(scenario())


def test_directories_are_made_and_listed(disk: RealDisk, tmp_path: Path) -> None:
    deep = str(tmp_path / "a" / "b" / "c")
    disk.make_dirs(deep)
    disk.make_dirs(deep)
    assert os.path.isdir(deep)
    (tmp_path / "z").write_bytes(b"")
    (tmp_path / "m").write_bytes(b"1")
    assert disk.list(str(tmp_path)) == ["a", "m", "z"]
    assert disk.list(str(tmp_path / "absent")) == []
    assert disk.exists(deep) and not disk.exists(deep + "x")
    assert disk.read_file(str(tmp_path / "m")) == b"1"
    with pytest.raises(FileNotFoundError):
        disk.read_file(str(tmp_path / "absent"))


def test_removing_a_missing_file_is_no_error(disk: RealDisk, tmp_path: Path) -> None:
    run(disk.remove(str(tmp_path / "absent")))
    assert disk.list(str(tmp_path)) == []


def test_create_closes_its_descriptor_if_the_directory_cannot_be_synced(
    disk: RealDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    real_open, real_close = os.open, os.close

    def open_(*arguments: Any, **options: Any) -> int:
        descriptor = real_open(*arguments, **options)
        opened.append(descriptor)
        return descriptor

    def close(descriptor: int) -> None:
        opened.remove(descriptor)
        real_close(descriptor)

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    async def scenario() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", open_)
            patch.setattr(os, "close", close)
            patch.setattr(os, "fsync", fail)
            with pytest.raises(OSError, match="Input/output"):
                await disk.create(str(tmp_path / "file"))

    run(scenario())
    assert opened == []


def test_the_clock_reads_the_clocks_of_the_machine() -> None:
    clock = RealClock()
    before_ns, wall_ms = time.monotonic_ns(), clock.wall_ms()
    assert before_ns <= clock.monotonic_ns() <= time.monotonic_ns()
    assert abs(wall_ms - time.time() * 1000) < 60_000


def test_a_seed_repeats_the_random_numbers() -> None:
    one, two, other = real_runtime(7), real_runtime(7), real_runtime(8)
    draws = [runtime.random.random() for runtime in (one, two, other)]
    assert draws[0] == draws[1] != draws[2]
    for runtime in (one, two, other):
        assert isinstance(runtime.disk, RealDisk)
        runtime.disk.close()


def test_lines_are_added_behind_those_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    first = RealLineFile(str(path))
    first.append("one")
    assert path.read_text() == "one\n"  # although it is still open
    first.append("two")
    first.close()
    first.close()
    with path.open("a") as file:
        file.write('{"half')  # what a killed process may leave
    second = RealLineFile(str(path))
    second.append("three")
    assert path.read_text() == 'one\ntwo\n{"half\nthree\n'
    assert second.size_bytes() == path.stat().st_size
    second.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        second.append("four")
    with pytest.raises(FileNotFoundError):
        RealLineFile(str(tmp_path / "nowhere" / "lines"))
