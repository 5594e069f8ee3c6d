"""Writes files atomically: until the new file is complete, an older one stays in place."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path

__all__ = ["replace_file", "sync_directory", "write_all", "write_lines", "write_output"]

LINES_AT_ONCE = 4_096
"""Lines that `write_lines` writes together: some hundred kilobytes."""


def replace_file(path: Path, data: bytes, *, is_synced: bool = False) -> None:
    """Write or replace a file atomically; with `is_synced` it survives a power cut. Raises OSError."""
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


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines to `path` as they come: a file atomically, following links; a device or pipe directly. If `lines`
    raises, an older file stays in place. Raises OSError."""
    is_direct = path.exists() and not path.is_file()
    target = path if is_direct else path.resolve()
    place = target if is_direct else target.with_name(f".{target.name.lstrip('.')}.{os.getpid()}.{time.monotonic_ns()}")
    waiting = iter(lines)
    try:
        with open(place, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            for line in waiting:
                file.write("".join(f"{each}\n" for each in chain([line], islice(waiting, LINES_AT_ONCE - 1))))
        if not is_direct:
            os.replace(place, target)
    except BaseException as error:
        if not is_direct:
            with contextlib.suppress(OSError):
                place.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


_NOT_REPLACED = frozenset({errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS})
"""Errors if a file cannot be replaced in its directory but may still be writable: the directory belongs to another
user, or the file is a mount point."""


def write_output(path: Path, text: str) -> None:
    """Write a command's output to `path`: a file atomically, so that a full disk does not destroy an older one,
    following links; a device or pipe directly. Raises OSError."""
    data = text.encode("utf-8", "backslashreplace")
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    try:
        replace_file(path.resolve(), data)
    except OSError as error:
        if error.errno not in _NOT_REPLACED or not path.is_file():
            raise OSError(error.errno, error.strerror, str(path)) from None
        path.write_bytes(data)


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Sync a directory, so that its entries survive a power cut. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write all data, despite short writes. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
