"""Faults of a whole file system that belongs to one host: frozen, full, shut down. Linux, as root, on this machine.

The kernel itself fails here, for every program and every kind of access, including those that the shim does not
reach; in return the host needs a file system of its own.

    freeze     FIFREEZE: whatever would change something waits in the kernel, and cannot even be killed, until thawed
    fill       a ballast file takes every free block: ENOSPC
    shut_down  EXT4_IOC_SHUTDOWN without flushing the journal: EIO from now on, and once mounted again everything that
               was not synced is gone, as after a power loss
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["BALLAST_PREFIX", "CALL_TIMEOUT_S", "OPERATIONS", "fill", "freeze", "remove_ballast", "shut_down", "thaw"]

BALLAST_PREFIX = ".splitbrain-ballast-"
"""How the names of ballast files begin."""

CALL_TIMEOUT_S = 20.0
"""For one call to the kernel; a freeze first waits for writes in progress."""

_FIFREEZE = 0xC0045877
_FITHAW = 0xC0045878
_EXT4_IOC_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2

_LEAST_BLOCKS = 1
_MAX_PIECES = 4096
"""Limit on the pieces in which the space is taken: each takes half of what is left or more, so few are needed."""


def freeze(path: str) -> None:
    """Freeze the file system that `path` is on, after waiting for writes in progress. Raises OSError."""
    _ioctl(path, _FIFREEZE, 0)


def thaw(path: str) -> bool:
    """Thaw a frozen file system. False when it was not frozen. Raises OSError."""
    try:
        _ioctl(path, _FITHAW, 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


def shut_down(path: str) -> None:
    """Make every access to an ext4 file system fail with EIO until it is mounted again. Idempotent. Raises OSError."""
    try:
        _ioctl(path, _EXT4_IOC_SHUTDOWN, struct.pack("=I", _NO_LOG_FLUSH))
    except OSError as error:
        if error.errno != errno.EIO:  # it is shut down already
            raise


def fill(path: str, name: str) -> int:
    """Allocate every free block of the file system at `path` to a file there; returns its size in bytes.

    The blocks are reserved, not written, so that this is fast whatever the size. Raises OSError.
    """
    descriptor = os.open(os.path.join(path, BALLAST_PREFIX + name), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fsync(descriptor)  # so that blocks reserved for delayed writes are counted
        size_bytes = 0
        for _ in range(_MAX_PIECES):
            status = os.fstatvfs(descriptor)
            blocks = max(status.f_bavail, _LEAST_BLOCKS)
            while blocks >= _LEAST_BLOCKS:
                try:
                    os.posix_fallocate(descriptor, size_bytes, blocks * status.f_frsize)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    blocks //= 2
                else:
                    break
            if blocks < _LEAST_BLOCKS:
                break
            size_bytes += blocks * status.f_frsize
        return size_bytes
    finally:
        os.close(descriptor)


def remove_ballast(path: str, name: str) -> None:
    """Free the blocks again. Idempotent. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(path, BALLAST_PREFIX + name))


def _ioctl(path: str, request: int, argument: int | bytes) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, request, argument)
    finally:
        os.close(descriptor)


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    operation.__name__: operation for operation in (freeze, thaw, shut_down, fill, remove_ballast)
}
"""Name -> operation; the first argument of each is the path."""
