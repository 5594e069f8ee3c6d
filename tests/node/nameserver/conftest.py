"""A runtime with a manual clock and a disk that is a dictionary."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from node.runtime import DiskUsage, File, Runtime


@dataclass
class ManualClock:
    now_ns: int = 0

    def wall_ms(self) -> int:
        return self.now_ns // 1_000_000

    def monotonic_ns(self) -> int:
        return self.now_ns

    def advance_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


@dataclass
class MemoryDisk:
    files: dict[str, bytes] = field(default_factory=dict)
    synced: list[str] = field(default_factory=list)
    """Directories that were synced, in order."""

    def open(self, path: str) -> File:
        raise OSError(f"this disk opens no files: {path}")

    def exists(self, path: str) -> bool:
        return path in self.files

    def list(self, path: str) -> list[str]:
        return sorted(self.files)

    def make_dirs(self, path: str) -> None:
        return None

    def read_file(self, path: str) -> bytes:
        return self.files[path]

    async def write_file_atomic(self, path: str, data: bytes) -> None:
        self.files[path] = data

    async def remove(self, path: str) -> None:
        self.files.pop(path, None)

    async def sync_dir(self, path: str) -> None:
        self.synced.append(path)

    def usage(self, path: str) -> DiskUsage:
        return DiskUsage(1 << 40, 0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


@pytest.fixture
def runtime(clock: ManualClock, disk: MemoryDisk) -> Runtime:
    return Runtime(clock=clock, disk=disk, random=random.Random(1))
