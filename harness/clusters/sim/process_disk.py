"""A host's disk as one process uses it: `node.runtime.Disk` and `File`.

Once the process is dead, what it awaits never returns, and nothing that it calls changes anything any more.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

from harness.clusters.sim.disk import CHANGED, READ, SYNC, WRITE, SimDisk, disk_error
from harness.clusters.sim.inode import Inode, Layer
from harness.clusters.sim.lane import LANE, Lane
from harness.clusters.sim.primitives import SimFuture
from node.real_runtime import TEMPORARY_SUFFIX
from node.runtime import DiskUsage, Ended

if TYPE_CHECKING:
    from harness.clusters.sim.loop import SimLoop

__all__ = ["Operation", "ProcessDisk", "ProcessFile"]

UNLIMITED_BYTES = 1 << 40
"""Free space that a disk without a capacity reports."""

LATE_WRITE_RATIO = 0.25
"""Fraction of writes that reach the page cache at the end of the time they take; the others do at its beginning."""


class Operation:
    """A disk operation that a process waits for. Cancelling the waiter does not stop it: the waiter is cancelled
    afterwards, as with a disk that is driven by threads."""

    __slots__ = ("_done", "_error", "_loop", "_value", "_waiter")

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self._done = False
        self._error: OSError | None = None
        self._value: Any = None

    @property
    def is_done(self) -> bool:
        return self._done

    def finish(self, value: Any = None, error: OSError | None = None) -> None:
        """Set the outcome, and wake the waiter."""
        self._done, self._value, self._error = True, value, error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> Any:
        """Wait for the outcome. Raises OSError; CancelledError, but only once the operation is over."""
        cancelled: asyncio.CancelledError | None = None
        while not self._done:
            waiter = self._waiter = SimFuture(loop=self._loop)
            try:
                await waiter
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        if self._error is not None:
            raise self._error
        return self._value


class CallbackOperation:
    """A disk operation whose outcome is passed to a callback."""

    __slots__ = ("_disk", "_then")

    def __init__(self, disk: ProcessDisk, then: Ended) -> None:
        self._disk = disk
        self._then = then

    def finish(self, value: Any = None, error: OSError | None = None) -> None:
        """Call back with the outcome."""
        self._disk.tell(self._then, error)


class ProcessFile:
    """One open file of one process."""

    def __init__(self, disk: ProcessDisk, path: str, inode: Inode) -> None:
        self._disk = disk
        self._path = path
        self._inode = inode
        self._is_closed = False

    @property
    def path(self) -> str:
        return self._path

    def _check_open(self) -> None:
        if self._is_closed:
            raise disk_error(errno.EBADF, self._path)

    def size_bytes(self) -> int:
        self._check_open()
        return len(self._inode.cache)

    def read(self, offset: int, size_bytes: int) -> bytes:
        self._check_open()
        device = self._disk.device
        if device.error_ratios and device.fails(READ):
            raise disk_error(errno.EIO, self._path)
        if self._inode in device.watched:
            device.note_read(self._inode, offset, size_bytes)
        return self._inode.read(offset, size_bytes)

    def write(self, offset: int, data: bytes, *, sync: bool = False) -> Coroutine[Any, Any, None]:
        if self._is_closed:
            raise disk_error(errno.EBADF, self._path)
        operation = self._disk.new_operation()
        self._disk.write(self._path, self._inode, offset, bytes(data), sync, operation)
        return operation.wait()

    def begin_write(self, offset: int, data: bytes, then: Ended, *, sync: bool = False) -> None:
        if self._is_closed:
            raise disk_error(errno.EBADF, self._path)
        disk = self._disk
        disk.write(self._path, self._inode, offset, bytes(data), sync, CallbackOperation(disk, then))

    async def sync(self) -> None:
        self._check_open()
        operation = self._disk.new_operation()
        self._disk.sync(self._path, self._inode, operation)
        await operation.wait()

    async def truncate(self, size_bytes: int) -> None:
        self._check_open()
        await self._disk.truncate(self._path, self._inode, size_bytes).wait()

    def close(self) -> None:
        self._is_closed = True


class ProcessDisk:
    """The files of a host for the process of one lane."""

    def __init__(self, device: SimDisk, loop: SimLoop, lane: Lane) -> None:
        self.device = device
        self.loop = loop
        self._lane = lane
        self._context = copy_context()
        self._context.run(LANE.set, lane)

    # node.runtime.Disk

    def open(self, path: str) -> ProcessFile:
        return ProcessFile(self, path, self._open(path))

    def _open(self, path: str) -> Inode:
        inode = self.device.get(path)
        if inode is None:
            self._check_alive(path)
            if self.device.room_bytes() == 0:
                self.device.note("full")
                raise disk_error(errno.ENOSPC, path)
            inode = Inode()
            self.device.link(path, inode)
        return inode

    async def create(self, path: str) -> ProcessFile:
        directory = os.path.dirname(path)
        operation = self.new_operation()

        def create() -> None:
            if self._lane.is_dead:
                return
            try:
                if self.device.fails(WRITE):
                    raise disk_error(errno.EIO, path)
                self.device.make_dirs(directory)
                file = self.open(path)
            except OSError as error:
                operation.finish(error=error)
                return
            self._sync_names(directory, operation, file)

        self.device.later(self.device.write_s(0), WRITE, create, self._lane)
        created: ProcessFile = await operation.wait()
        return created

    def exists(self, path: str) -> bool:
        return self.device.exists(path)

    def list(self, path: str) -> list[str]:
        return self.device.names_in(path)

    def make_dirs(self, path: str) -> None:
        self._check_alive(path)
        self.device.make_dirs(path)

    def read_file(self, path: str) -> bytes:
        if self.device.fails(READ):
            raise disk_error(errno.EIO, path)
        inode = self.device.inode(path)
        if inode in self.device.watched:
            self.device.note_read(inode, 0, len(inode.cache))
        return bytes(inode.cache)

    async def write_file_atomic(self, path: str, data: bytes) -> None:
        temporary = path + TEMPORARY_SUFFIX
        operation = self.new_operation()

        def write() -> None:
            try:
                inode = self._open(temporary)
                inode.truncate(0)
                self._put(temporary, inode, 0, data)
            except OSError as error:
                operation.finish(error=error)
                return
            self._when_synced(temporary, inode, operation, lambda: rename(inode))

        def rename(inode: Inode) -> None:
            if self._lane.is_dead:
                return
            try:
                self.device.link(path, inode, replaced=temporary)
            except OSError as error:
                operation.finish(error=error)
                return
            self.device.note(CHANGED)
            self._sync_names(os.path.dirname(path), operation)

        self.device.later(self.device.write_s(len(data)), WRITE, self._unless_dead(write), self._lane)
        await operation.wait()

    async def remove(self, path: str) -> None:
        operation = self.new_operation()

        def remove() -> None:
            if self.device.get(path) is None:
                operation.finish()
                return
            if self.device.fails(WRITE):
                operation.finish(error=disk_error(errno.EIO, path))
                return
            self.device.unlink(path)
            self.device.note(CHANGED)
            self._sync_names(os.path.dirname(path), operation)

        self.device.later(self.device.write_s(0), WRITE, self._unless_dead(remove), self._lane)
        await operation.wait()

    async def sync_dir(self, path: str) -> None:
        operation = self.new_operation()
        self._sync_names(path, operation)
        await operation.wait()

    def usage(self, path: str) -> DiskUsage:
        self._check_alive(path)
        used_bytes, room_bytes = self.device.used_bytes(), self.device.room_bytes()
        return DiskUsage(used_bytes + (UNLIMITED_BYTES if room_bytes is None else room_bytes), used_bytes)

    # Steps of operations. Steps that would begin in a dead process do not happen.

    def new_operation(self) -> Operation:
        """A new operation to wait for."""
        return Operation(self.loop)

    def tell(self, then: Ended, error: OSError | None) -> None:
        """Call the process back at the end of an operation."""
        lane = self._lane
        if lane.is_dead:
            return
        if lane.queue or lane.is_paused:
            self.loop.call_soon(then, error, context=self._context)
            return
        # Nothing of this process is waiting to run, so this would run next anyway: no need to schedule it.
        try:
            self._context.run(then, error)
        except Exception as raised:
            report = {"message": "Exception where a disk's operation ended", "exception": raised}
            self._context.run(self.loop.call_exception_handler, report)

    def _check_alive(self, path: str) -> None:
        if self._lane.is_dead:
            raise disk_error(errno.EIO, path)

    def _unless_dead(self, step: Callable[[], None]) -> Callable[[], None]:
        def resume() -> None:
            if not self._lane.is_dead:
                step()

        return resume

    def _put(self, path: str, inode: Inode, offset: int, data: bytes) -> None:
        """Change the page cache. Raises OSError after writing what fits."""
        device = self.device
        if device.error_ratios and device.fails(WRITE):
            raise disk_error(errno.EIO, path)
        if device.capacity_bytes is not None:
            growth = offset + len(data) - len(inode.cache)
            room = device.room_bytes() or 0
            if growth > room:
                fitting = len(data) - (growth - room)
                if fitting > 0:
                    inode.name_serial = device.name_serial
                    inode.write(offset, data[:fitting])
                device.note("full")
                raise disk_error(errno.ENOSPC, path)
        if offset + len(data) > len(inode.cache):
            inode.name_serial = device.name_serial
        inode.write(offset, data)
        device.note(CHANGED)

    def write(
        self, path: str, inode: Inode, offset: int, data: bytes, sync: bool, operation: Operation | CallbackOperation
    ) -> None:
        """Begin a write; its end finishes `operation`."""
        device = self.device
        if self._lane.is_dead:
            return
        is_late = device.random.random() < LATE_WRITE_RATIO
        if not is_late and not device.is_stalled(WRITE):
            try:
                self._put(path, inode, offset, data)
            except OSError as error:
                device.later(device.write_s(0), WRITE, partial(operation.finish, error=error), self._lane)
                return
            if sync:
                self._when_synced(path, inode, operation, operation.finish, device.write_s(len(data)))
            else:
                device.later(device.write_s(len(data)), WRITE, operation.finish, self._lane)
            return

        def put() -> None:
            if self._lane.is_dead:
                return
            try:
                self._put(path, inode, offset, data)
            except OSError as error:
                operation.finish(error=error)
                return
            if sync:
                self._when_synced(path, inode, operation, operation.finish)
            else:
                operation.finish()

        device.later(device.write_s(len(data)), WRITE, put, self._lane)

    def truncate(self, path: str, inode: Inode, size_bytes: int) -> Operation:
        """Begin a truncation."""
        operation = Operation(self.loop)

        def cut() -> None:
            if self.device.fails(WRITE):
                operation.finish(error=disk_error(errno.EIO, path))
                return
            inode.name_serial = self.device.name_serial
            inode.truncate(size_bytes)
            self.device.note(CHANGED)
            operation.finish()

        self.device.later(self.device.write_s(0), WRITE, self._unless_dead(cut), self._lane)
        return operation

    def sync(self, path: str, inode: Inode, operation: Operation, after_s: float = 0.0) -> None:
        """Begin to make a file's content durable; the end of that finishes `operation`."""
        self._when_synced(path, inode, operation, operation.finish, after_s)

    def _when_synced(
        self,
        path: str,
        inode: Inode,
        operation: Operation | CallbackOperation,
        resume: Callable[[], None],
        after_s: float = 0.0,
    ) -> None:
        if self._lane.is_dead:
            return
        layer: Layer = inode.begin_sync()
        device, name_serial = self.device, inode.name_serial
        begins_s = self.loop.now + after_s

        def synced() -> None:
            if self._lane.died_s < begins_s:  # killed between write and sync, so the sync was never requested
                inode.drop_sync(layer)
                return
            if device.error_ratios and device.fails(SYNC, self._lane):
                inode.fail_sync(layer)
                operation.finish(error=disk_error(errno.EIO, path))
                return
            inode.end_sync(layer)
            device.journal_reaches(name_serial)
            resume()

        device.later(after_s + device.sync_s(), SYNC, synced, self._lane)

    def _sync_names(self, directory: str, operation: Operation, value: Any = None) -> None:
        if self._lane.is_dead:
            return
        if not self.device.is_dir(directory):
            operation.finish(error=disk_error(errno.ENOENT, directory))
            return
        changes = self.device.pending_changes()

        def synced() -> None:
            if self.device.fails(SYNC, self._lane):
                operation.finish(error=disk_error(errno.EIO, directory))
                return
            self.device.sync_names(directory, changes)
            operation.finish(value)

        self.device.later(self.device.sync_s(), SYNC, synced, self._lane)
