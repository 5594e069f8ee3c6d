"""A disk in memory that knows what was synced, so that a test can cut the power."""

from __future__ import annotations

import asyncio
import posixpath

import pytest

from node.runtime import DiskUsage, Ended


class MemoryFile:
    """One handle of a `MemoryDisk` file."""

    def __init__(self, disk: MemoryDisk, path: str) -> None:
        self.path = path
        self._disk = disk

    def size_bytes(self) -> int:
        return len(self._disk.files[self.path])

    def read(self, offset: int, size_bytes: int) -> bytes:
        self._disk.before_read(self.path)
        return bytes(self._disk.files[self.path][offset : offset + size_bytes])

    async def write(self, offset: int, data: bytes, *, sync: bool = False) -> None:
        self._disk.before_write(self.path)
        content = self._disk.files[self.path]
        content.extend(bytes(max(0, offset + len(data) - len(content))))
        content[offset : offset + len(data)] = data
        if sync:
            await self.sync()

    def begin_write(self, offset: int, data: bytes, then: Ended, *, sync: bool = False) -> None:
        def begin() -> None:
            try:
                self.write(offset, data, sync=sync).send(None)  # never waits
            except StopIteration:
                then(None)
            except OSError as error:
                then(error)

        asyncio.get_running_loop().call_soon(begin)

    async def sync(self) -> None:
        self._disk.before_sync(self.path)
        self._disk.synced[self.path] = bytes(self._disk.files[self.path])

    async def truncate(self, size_bytes: int) -> None:
        content = self._disk.files[self.path]
        del content[size_bytes:]
        content.extend(bytes(size_bytes - len(content)))

    def close(self) -> None:
        self._disk.open_handles -= 1


class MemoryDisk:
    """Files by path. `synced` is what a power cut leaves; `fail_*` paths raise OSError."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.synced: dict[str, bytes] = {}
        self.synced_directories: list[str] = []
        self.fail_writes = False
        self.fail_syncs = False
        self.bad_paths: set[str] = set()
        """Files with a sector that cannot be read."""
        self.open_handles = 0
        self.sync_count = 0

    def before_read(self, path: str) -> None:
        if path in self.bad_paths:
            raise OSError(5, "Input/output error", path)

    def before_write(self, path: str) -> None:
        if self.fail_writes:
            raise OSError(28, "No space left on device", path)

    def before_sync(self, path: str) -> None:
        self.sync_count += 1
        if self.fail_syncs:
            raise OSError(5, "Input/output error", path)

    def cut_power(self) -> None:
        """Drop what was not synced; a created file that was never synced is gone as a whole."""
        self.files = {path: bytearray(content) for path, content in self.synced.items()}

    def open(self, path: str) -> MemoryFile:
        self.open_handles += 1
        self.files.setdefault(path, bytearray())
        return MemoryFile(self, path)

    async def create(self, path: str) -> MemoryFile:
        self.before_write(path)
        self.synced.setdefault(path, b"")
        return self.open(path)

    def exists(self, path: str) -> bool:
        return path in self.files or any(other.startswith(f"{path}/") for other in self.files)

    def list(self, path: str) -> list[str]:
        below = [other[len(path) + 1 :] for other in self.files if other.startswith(f"{path}/")]
        return sorted({name.partition("/")[0] for name in below})

    def make_dirs(self, path: str) -> None:
        assert posixpath.isabs(path)

    def read_file(self, path: str) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(path)
        self.before_read(path)
        return bytes(self.files[path])

    async def write_file_atomic(self, path: str, data: bytes) -> None:
        self.before_write(path)
        self.files[path] = bytearray(data)
        self.synced[path] = data

    async def remove(self, path: str) -> None:
        self.bad_paths.discard(path)
        self.files.pop(path, None)
        self.synced.pop(path, None)

    async def sync_dir(self, path: str) -> None:
        assert posixpath.isabs(path)
        self.synced_directories.append(path)

    def usage(self, path: str) -> DiskUsage:
        return DiskUsage(1 << 40, sum(map(len, self.files.values())))


@pytest.fixture
def new_disk() -> type[MemoryDisk]:
    """Makes disks, for tests that need a fresh one for each example."""
    return MemoryDisk


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()
