"""Opens files of a run such that no path and no symbolic link leads out of the store.

Every directory on the path is opened relative to the previous one, without following links, so that nothing can be
swapped between a check and the opening (TOCTOU).
"""

from __future__ import annotations

__all__ = [
    "MAX_FILES",
    "MAX_SHOWN_BYTES",
    "FileEntry",
    "NoFile",
    "NotThere",
    "chunks",
    "list_files",
    "media_type",
    "open_beneath",
    "parts_of",
    "read_json",
]

import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

MAX_FILES = 400
"""Files of a run that its page lists; a broker may have thousands."""

MAX_DEPTH = 8
MAX_SHOWN_BYTES = 8 * 1024 * 1024
"""The part of a text file that is shown in the browser; the download has all of it."""

MAX_READ_JSON_BYTES = 32 * 1024 * 1024
"""The largest results.json that is read for a page: in memory it takes ten times as much."""

CHUNK_BYTES = 65_536

PAGES = frozenset(("report.html", "trace.html", "replay.html"))
"""HTML files that the harness writes; everything else is shown as text or downloaded."""

TEXT = (".json", ".jsonl", ".log", ".out", ".txt", ".md", ".conf", ".toml", ".properties", ".csv", ".err")


class NotThere(Exception):
    """There is no such file, or it must not be shown."""


class NoFile(NotThere):
    """The name exists but cannot be read: a pipe, a device, a directory, a link, a file of another user. The text is
    the reason, without the path."""


class FileEntry(NamedTuple):
    """A file of a run: its path in the run's directory, with slashes, and its size in bytes."""

    path: str
    size_bytes: int


def parts_of(path: str) -> list[str]:
    """The parts of a path from a URL. Raises NotThere for a path that could name anything but a file below the run."""
    parts = path.split("/")
    if not all(part and part not in (".", "..") and part.isprintable() and "\\" not in part for part in parts):
        raise NotThere(path)
    return parts


def open_beneath(root: Path, parts: Sequence[str]) -> int:
    """Open a regular file below `root` for reading. Returns its descriptor, which the caller must close.

    Raises NotThere, and NoFile if it is not a regular file: nothing else is opened, since opening a pipe may block, and
    opening a device may have side effects.
    """
    directory = None
    try:
        directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in parts[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            inner = os.open(part, flags, dir_fd=directory)
            os.close(directory)
            directory = inner
        place = os.open(parts[-1], os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except (OSError, ValueError, IndexError) as error:
        raise NotThere("/".join(parts)) from error
    finally:
        if directory is not None:
            os.close(directory)
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            raise NoFile("it is not a regular file")
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise NoFile(error.strerror or str(error)) from error
    finally:
        os.close(place)


def chunks(file: BinaryIO, most_bytes: int | None = None) -> Iterator[bytes]:
    """The content of a file; with `most_bytes` at most that much, followed by a line about the cut."""
    size_bytes = os.fstat(file.fileno()).st_size
    left = size_bytes if most_bytes is None else most_bytes
    while left > 0 and (data := file.read(min(CHUNK_BYTES, left))):
        left -= len(data)
        yield data
    if most_bytes is not None and size_bytes > most_bytes:
        yield f"\n[cut: {most_bytes:,} of {size_bytes:,} bytes; the download has all of them]\n".encode()


def read_json(root: Path, parts: Sequence[str]) -> dict[str, Any]:
    """A JSON object from a file below `root`; empty if there is none, or if it is damaged or too large."""
    try:
        fd = open_beneath(root, parts)
    except NotThere:
        return {}
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_size > MAX_READ_JSON_BYTES:
            return {}
        try:
            data = json.loads(file.read(MAX_READ_JSON_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
    return data if isinstance(data, dict) else {}


def list_files(run: Path) -> tuple[list[FileEntry], int]:
    """The regular files of a run, top-level ones first, and the number of further ones. Links are skipped."""
    found: list[FileEntry] = []
    more = 0
    for folder, folders, names in os.walk(run):
        inside = os.path.relpath(folder, run)
        is_deep = inside.count("/") >= MAX_DEPTH
        folders[:] = [] if is_deep else sorted(name for name in folders if name.isprintable())
        for name in sorted(names):
            try:
                entry = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            if not stat.S_ISREG(entry.st_mode) or not name.isprintable() or "\\" in name:
                continue
            if len(found) >= MAX_FILES:
                more += 1
                continue
            found.append(FileEntry(name if inside == "." else f"{inside}/{name}", entry.st_size))
    return found, more


def media_type(parts: Sequence[str]) -> str | None:
    """The media type for showing a file: HTML for our own pages, plain text for text; None for download only."""
    if len(parts) == 1 and parts[0] in PAGES:
        return "text/html"
    return "text/plain" if parts[-1].endswith(TEXT) else None
