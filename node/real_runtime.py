"""The runtime of a node process: the machine's clocks, its files, and a few threads that wait for the disk.

Whatever may wait for a disk runs in a small pool of threads, so that a stalled disk leaves the event loop free. Writes
that are not synced nearly always only copy into the page cache: the loop blocks on them briefly (`disk_thread`).
Reads need no thread: they come from the page cache in all but rare cases. What has to survive a power cut is synced
with fdatasync, which also makes a file's new length durable; creations, renames and removals additionally sync
the directory, without which a file's name may be gone after the cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from node.disk_thread import DiskThread
from node.runtime import DiskUsage, Ended, Runtime

__all__ = ["DISK_THREADS", "RealClock", "RealDisk", "RealFile", "RealLineFile", "real_runtime"]

T = TypeVar("T")

DISK_THREADS = 4
"""Disk operations under way at once: log, index, term file and queues have one each at most."""

TEMPORARY_SUFFIX = ".tmp"
"""Suffix of a file that is to replace another; a leftover of a crash is overwritten by the next replacement."""


class RealClock:
    """The machine's clocks."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()


class RealFile:
    """A file of the machine: positioned reads run inline, everything that may wait runs in the disk's threads."""

    def __init__(self, path: str, pool: ThreadPoolExecutor, own: DiskThread) -> None:
        self._path = path
        self._pool = pool
        self._own = own
        self._length_was_cut = False
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    @property
    def path(self) -> str:
        return self._path

    def size_bytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read(self, offset: int, size_bytes: int) -> bytes:
        try:
            data = os.pread(self._descriptor, size_bytes, offset)
            if len(data) == size_bytes or not data:
                return data
            pieces = [data]  # a read may be cut short by a signal, or at 2 GiB
            missing_bytes = size_bytes - len(data)
            while missing_bytes:
                data = os.pread(self._descriptor, missing_bytes, offset + size_bytes - missing_bytes)
                if not data:
                    break
                pieces.append(data)
                missing_bytes -= len(data)
            return b"".join(pieces)
        except OSError as error:
            error.filename = self._path  # the system does not report it for a descriptor
            raise

    async def write(self, offset: int, data: bytes, *, sync: bool = False) -> None:
        def write() -> None:
            self._write(offset, data)

        own = self._own
        if sync and own.is_free:
            await own.run(write, self._sync)
        elif sync or not own.is_quick:
            await _in_pool(self._pool, lambda: self._write(offset, data, sync))
        elif not own.run_blocking(write):
            await _in_pool(self._pool, own.wait)

    def begin_write(self, offset: int, data: bytes, on_done: Ended, *, sync: bool = False) -> None:
        own, loop = self._own, asyncio.get_running_loop()
        write: Callable[[], None] = partial(self._write, offset, data)
        if sync and own.is_free:
            own.begin(write, self._sync, on_done)
            return
        if sync or not own.is_quick:
            write = partial(self._write, offset, data, sync)
        else:
            try:
                is_done = own.run_blocking(write)
            except OSError as error:
                loop.call_soon(on_done, error)
                return
            if is_done:
                loop.call_soon(on_done, None)
                return
            write = own.wait
        loop.run_in_executor(self._pool, write).add_done_callback(lambda future: on_done(future.exception()))

    async def sync(self) -> None:
        await _in_pool(self._pool, self._sync)

    async def truncate(self, size_bytes: int) -> None:
        await _in_pool(self._pool, lambda: self._truncate(size_bytes))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, offset: int, data: bytes, sync: bool = False) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            offset += written
            view = view[written:]
        if sync:
            self._sync()

    def _sync(self) -> None:
        if self._descriptor < 0:  # the calls below would raise ValueError
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self._path)
        if self._length_was_cut:  # fdatasync need not write a length that only became smaller
            os.fsync(self._descriptor)
            self._length_was_cut = False
        else:
            os.fdatasync(self._descriptor)

    def _truncate(self, size_bytes: int) -> None:
        os.ftruncate(self._descriptor, size_bytes)
        self._length_was_cut = True


class RealLineFile:
    """A file of lines. Each is handed to the system before `append` returns; that takes microseconds, since it is only
    copied into the page cache. Behind half a line, which a killed process may leave, a new line begins."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size_bytes = os.fstat(self._descriptor).st_size
        if self._size_bytes and os.pread(self._descriptor, 1, self._size_bytes - 1) != b"\n":
            self._write(b"\n")

    def append(self, line: str) -> None:
        if self._descriptor < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self._path)
        self._write(line.encode() + b"\n")

    def size_bytes(self) -> int:
        return self._size_bytes

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self._descriptor, view)
            self._size_bytes += written
            view = view[written:]


class RealDisk:
    """The machine's file system. One for each node process; `close` waits for what is under way."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="disk")
        self._own = DiskThread()

    def open(self, path: str) -> RealFile:
        return RealFile(path, self._pool, self._own)

    async def create(self, path: str) -> RealFile:
        def create() -> RealFile:
            directory = os.path.dirname(path)
            if not os.path.isdir(directory):
                self.make_dirs(directory)
            file = RealFile(path, self._pool, self._own)
            try:
                _sync_directory(directory)
            except OSError:
                file.close()
                raise
            return file

        return await _in_pool(self._pool, create)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def list(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def make_dirs(self, path: str) -> None:
        missing = []
        parent = path
        while not os.path.isdir(parent):
            missing.append(parent)
            parent = os.path.dirname(parent)
        os.makedirs(path, exist_ok=True)
        for made in missing:
            _sync_directory(os.path.dirname(made))

    def read_file(self, path: str) -> bytes:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a FIFO would block
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(mode):
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            if not stat.S_ISREG(mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            with open(descriptor, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(descriptor)

    async def write_file_atomic(self, path: str, data: bytes) -> None:
        def replace() -> None:
            temporary = path + TEMPORARY_SUFFIX
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
            _sync_directory(os.path.dirname(path))

        await _in_pool(self._pool, replace)

    async def remove(self, path: str) -> None:
        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                _sync_directory(os.path.dirname(path))

        await _in_pool(self._pool, remove)

    async def sync_dir(self, path: str) -> None:
        await _in_pool(self._pool, lambda: _sync_directory(path))

    def usage(self, path: str) -> DiskUsage:
        found = os.statvfs(path)
        used = found.f_blocks - found.f_bfree
        return DiskUsage((used + found.f_bavail) * found.f_frsize, used * found.f_frsize)

    def close(self) -> None:
        """Wait for operations under way and end the threads. Nothing but reads works afterwards."""
        self._pool.shutdown()
        self._own.close()


async def _in_pool(pool: ThreadPoolExecutor, operation: Callable[[], T]) -> T:
    """Run `operation` in a thread; it runs to its end even if the waiting task is cancelled.

    A cancelled waiter waits for that end before it passes the cancellation on: the caller may close the file then,
    and its descriptor may be reused for another file.
    """
    future = asyncio.get_running_loop().run_in_executor(pool, operation)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((future,))
        if not future.cancelled():
            future.exception()
        raise


def _sync_directory(path: str) -> None:
    descriptor = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def real_runtime(seed: int | None = None) -> Runtime:
    """A runtime on this machine. `seed` makes its random numbers repeatable; None takes the system's entropy."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Runtime(
        clock=RealClock(),
        disk=RealDisk(),
        random=random.Random(seed),
        memory_bytes=memory_bytes,
        open_lines=RealLineFile,
    )
