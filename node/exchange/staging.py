"""Files of commands that move a store while no broker runs: locks, and a target that is complete or absent.

Everything is written into a directory beside the target, made durable, and renamed to the target in one step. So a
command that is killed, or whose machine loses power, leaves no target, only a directory with the suffix `.partial`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = ["PARTIAL_SUFFIX", "ExchangeError", "locked_apache_store", "locked_own_store", "staged", "sync_file"]

PARTIAL_SUFFIX = ".partial"


class ExchangeError(Exception):
    """Why a store cannot be moved, in one line; nothing of it was changed, and there is no target."""


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A directory to write to, which becomes `target` at the end of the block, durably; after an exception there is
    neither. Raises ExchangeError if the target is not empty, or another command works or was killed there; OSError."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExchangeError(f"{target} exists and is not empty; nothing is overwritten, name another directory")
    directory = target.with_name(target.name + PARTIAL_SUFFIX)
    parent = directory.parent
    parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir()
    except FileExistsError:
        raise ExchangeError(
            f"{directory} is left of a command that was interrupted, or of one at work; remove it if none is at work"
        ) from None
    try:
        yield directory
        for path, _, _ in os.walk(directory):
            _sync_directory(Path(path))
        directory.rename(target)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    _sync_directory(parent)


def sync_file(path: Path) -> None:
    """Make the file's contents survive a power cut. Raises OSError."""
    _sync(path, os.O_RDWR)


def _sync_directory(path: Path) -> None:
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked_own_store(data_dir: Path) -> Iterator[None]:
    """Keep brokers of ours off `data_dir` meanwhile. Raises ExchangeError if one is using it; OSError."""
    with _opened_lock(data_dir / "lock") as descriptor:
        if descriptor is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ExchangeError(f"{data_dir} is in use by a broker; stop it first") from None
        yield


@contextlib.contextmanager
def locked_apache_store(directory: Path) -> Iterator[None]:
    """Keep Apache's brokers off the store meanwhile (R: they hold a lock on the first byte of `lock`). Raises
    ExchangeError if one is using it; OSError."""
    with _opened_lock(directory / "lock") as descriptor:
        if descriptor is not None:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                raise ExchangeError(f"{directory} is in use by a broker; stop it first") from None
        yield


@contextlib.contextmanager
def _opened_lock(path: Path) -> Iterator[int | None]:
    """The lock file's descriptor; None if there is no such file: no broker ever started there, and none is created."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)
