"""Files that appear whole or not at all, and in whose place an older one stays until then."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path

__all__ = ["replace_file", "sync_directory", "write_all", "write_output"]


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


_NOT_REPLACED = frozenset({errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS})
"""Errors of a directory in which no other file can take the place of one that may be written by itself: it belongs to
somebody else, or the file is a mount of its own."""


def write_output(path: Path, text: str) -> None:
    """Write what a command was asked to write to `path`: a file whole or not at all, so that a full disk costs no older
    one, and behind a link the file that it leads to; a device or a pipe as it is. Raises OSError."""
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
