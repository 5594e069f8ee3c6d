"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

__all__ = ["replace_file", "sync_directory", "write_all"]


def replace_file(path: Path, data: bytes, *, is_synced: bool = False) -> None:
    """Write a file whole or not at all, in the place of an older one; `is_synced` so that it outlives a power cut.
    Raises OSError."""
    temporary = path.with_name(f".{path.name.lstrip('.')}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if is_synced:
        sync_directory(path.parent)


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Have the names in a directory outlive a power cut. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write all of it, however little each call takes. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
