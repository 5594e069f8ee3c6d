"""The system calls behind network namespaces, which Python 3.11 does not have: setns and umount.

A namespace belongs to a thread, not to a process, and a socket stays in the namespace in which it was
made. So one process can hold sockets in many namespaces: enter, make the socket, leave.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator

__all__ = [
    "NETNS_DIR",
    "enter_namespace",
    "entered",
    "identity",
    "namespace_path",
    "open_current_namespace",
    "remove_namespace",
    "unmount",
]

NETNS_DIR = "/run/netns"
"""Where `ip netns` keeps its names: a file per namespace, on which the namespace is mounted."""

_CLONE_NEWNET = 0x40000000
_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def namespace_path(name: str) -> str:
    """The file through which the namespace `name` is entered."""
    return os.path.join(NETNS_DIR, name)


def identity(path: str) -> tuple[int, int]:
    """What identifies a namespace: device and inode of its file. Raises OSError."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def open_current_namespace() -> int:
    """A descriptor of the calling thread's network namespace; the caller closes it."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter_namespace(descriptor: int) -> None:
    """Move the calling thread into the network namespace of `descriptor`. Raises OSError."""
    _check(_libc.setns(descriptor, _CLONE_NEWNET), "cannot enter a network namespace")


@contextlib.contextmanager
def entered(path: str) -> Iterator[None]:
    """A context in which the calling thread is in the network namespace at `path`.

    Nothing may be awaited inside: other tasks of the thread would be in that namespace too.
    """
    home = open_current_namespace()
    try:
        there = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            enter_namespace(there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            enter_namespace(home)
    finally:
        os.close(home)


def unmount(path: str) -> bool:
    """Detach whatever is mounted on `path`, even if it is in use. False when nothing is. Raises OSError."""
    try:
        _check(_libc.umount2(os.fsencode(path), _MNT_DETACH), f"cannot unmount {path}")
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return False
        raise
    return True


def remove_namespace(name: str) -> bool:
    """Remove the name of a namespace; it ends when no process or socket is in it any more.

    False when there is no such name. Raises OSError.
    """
    path = namespace_path(name)
    while unmount(path):
        pass
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True
