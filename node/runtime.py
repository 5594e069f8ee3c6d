"""What a node may use of the outside world: clocks, a disk, randomness.

Everything else a node does with the outside goes through the running asyncio event loop (timers,
connections, servers). A node that takes its time, files and random numbers only from here, and its
network only from the loop, runs unchanged on real hosts and inside a deterministic simulation, which
gives it another `Runtime` and another loop.

Two clocks, because faults tell them apart: `wall_ms` may jump (an operator, NTP, a nemesis) and is only
good for stamping messages; `monotonic_ns` never goes backwards and is what timeouts and leases use.
Timers themselves are the loop's (`loop.call_later`, `asyncio.sleep`).

Disk: writing and syncing are awaited, because a disk may stall and the node must stay able to answer and
to step down while it does. Reading is synchronous: it is served from the page cache in all but rare cases,
and an `await` per message would cost more than the read.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = ["Clock", "Disk", "DiskUsage", "Ended", "File", "LineFile", "Runtime"]

Ended = Callable[[BaseException | None], object]
"""Called when an operation is over, with None or what went wrong (OSError). Must not raise."""


class Clock(Protocol):
    """The two clocks of one node."""

    def wall_ms(self) -> int:
        """Milliseconds since the Unix epoch by this node's own clock; may jump either way."""
        ...

    def monotonic_ns(self) -> int:
        """Nanoseconds since an arbitrary start; never goes backwards while the process lives."""
        ...


class File(Protocol):
    """One open file, addressed by position. Offsets and sizes are bytes.

    Calls that change one file are ordered by the caller: it awaits one before it starts the next.
    """

    @property
    def path(self) -> str: ...

    def size_bytes(self) -> int:
        """Current length, including what is written but not yet synced."""
        ...

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Up to `size_bytes` bytes from `offset`; shorter at the end of the file. Raises OSError."""
        ...

    async def write(self, offset: int, data: bytes, *, sync: bool = False) -> None:
        """Write all of `data` at `offset`, growing the file where needed.

        On return the bytes survive a crash of the process; with `sync` also a power cut (one call, so
        that a real disk needs a single hand-over to its thread). Raises OSError (ENOSPC, EIO).
        """
        ...

    def begin_write(self, offset: int, data: bytes, on_done: Ended, *, sync: bool = False) -> None:
        """Like `write`, but no task waits: `on_done` is called once, in a later turn of the loop, and never if this
        call raises. A write under way runs to its end whatever becomes of the caller. Raises OSError (EBADF)."""
        ...

    async def sync(self) -> None:
        """Everything written so far, and the length, survives a power cut on return. Raises OSError."""
        ...

    async def truncate(self, size_bytes: int) -> None:
        """Cut (or zero-extend) to `size_bytes`; durable only after the next `sync`. Raises OSError."""
        ...

    def close(self) -> None:
        """Release the handle; writes nothing. Idempotent."""
        ...


class DiskUsage(NamedTuple):
    """Size of a file system, and how much of it is in use by anyone."""

    total_bytes: int
    used_bytes: int

    @property
    def used_ratio(self) -> float:
        """From 0 to 1; a file system without any room is full."""
        return min(self.used_bytes / self.total_bytes, 1.0) if self.total_bytes > 0 else 1.0


class Disk(Protocol):
    """The files of one node. Paths are absolute strings; parents must exist unless said otherwise."""

    def open(self, path: str) -> File:
        """Open for reading and writing, creating an empty file when there is none. Raises OSError."""
        ...

    async def create(self, path: str) -> File:
        """Open like `open`, with the file's existence durable on return (its directory is synced).

        Parent directories that do not exist are created, durably as well. Awaited, because
        creating a file waits for a disk that stalls, and the node must not. Raises OSError.
        """
        ...

    def exists(self, path: str) -> bool: ...

    def list(self, path: str) -> list[str]:
        """Names (not paths) in a directory, sorted; empty when there is no such directory."""
        ...

    def make_dirs(self, path: str) -> None:
        """Create a directory and its parents; no error when it exists."""
        ...

    def read_file(self, path: str) -> bytes:
        """The whole file. Raises FileNotFoundError, OSError."""
        ...

    async def write_file_atomic(self, path: str, data: bytes) -> None:
        """Replace a small file as a whole: after a crash or power cut at any moment the old or the new
        content is there, never a mixture; on return the new one is durable (temporary file, fsync,
        rename, fsync of the directory). Raises OSError.
        """
        ...

    async def remove(self, path: str) -> None:
        """Delete a file, durably (the directory is synced). No error when it is absent."""
        ...

    async def sync_dir(self, path: str) -> None:
        """Make creations in a directory durable."""
        ...

    def usage(self, path: str) -> DiskUsage:
        """Room on the file system that holds `path`, as a program that is not root may use it. Raises OSError."""
        ...


class LineFile(Protocol):
    """A file that lines are only added to, such as a trace. It is none of the node's own data: it may lie on another
    disk, and no power cut matters to it."""

    def append(self, line: str) -> None:
        """Add a line. On return it survives the end of the process. Raises OSError."""
        ...

    def size_bytes(self) -> int:
        """The file's size, without a system call."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Runtime:
    """What one node process runs on. `random` is seeded by whoever makes the runtime."""

    clock: Clock
    disk: Disk
    random: random.Random
    memory_bytes: int = 4 << 30
    """Physical memory of the machine, a share of which is assumed to hold the newest part of the log."""
    open_lines: Callable[[str], LineFile] | None = None
    """Opens a file of lines by its path, behind those that it has. May raise OSError. None: there are no such files."""
