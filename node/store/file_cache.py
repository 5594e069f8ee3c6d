"""A bounded set of open files."""

from __future__ import annotations

from collections import OrderedDict

from node.runtime import Disk, File

__all__ = ["MAX_OPEN_FILES", "FileCache"]

MAX_OPEN_FILES = 256
"""Queue files held open at once; a quarter of the 1024 descriptors that a process usually gets."""


class FileCache:
    """Keeps the most recently used files open, up to a bound, for all queues of a node."""

    def __init__(self, disk: Disk, *, max_open: int = MAX_OPEN_FILES) -> None:
        self._disk = disk
        self._max_open = max_open
        self._files: OrderedDict[str, File] = OrderedDict()
        self._pinned: str | None = None

    def open(self, path: str) -> File:
        """The file at `path`, which must exist. Valid until the next `open` or `create` unless pinned."""
        file = self._files.get(path)
        if file is None:
            return self._keep(path, self._disk.open(path))
        self._files.move_to_end(path)
        return file

    async def create(self, path: str) -> File:
        """The file at `path`; if it does not exist, it and its directories are created durably."""
        if path not in self._files:
            file = await self._disk.create(path)
            if path not in self._files:  # a reader may have opened it meanwhile
                return self._keep(path, file)
            file.close()
        return self.open(path)

    def _keep(self, path: str, file: File) -> File:
        self._files[path] = file
        if len(self._files) > self._max_open:
            oldest = next((other for other in self._files if other not in (path, self._pinned)), path)
            if oldest != path:
                self._files.pop(oldest).close()
        return file

    def pin(self, path: str | None) -> None:
        """Keep this one file open while a write to it is awaited; None releases it."""
        self._pinned = path

    def forget(self, path: str) -> None:
        """Close `path` if it is open."""
        file = self._files.pop(path, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        """Close every file."""
        while self._files:
            self._files.popitem()[1].close()
