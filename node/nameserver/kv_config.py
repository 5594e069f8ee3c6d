"""Key-value configuration kept by a name server: namespaces of text, on disk when a path is given."""

from __future__ import annotations

import asyncio
import posixpath
from typing import Final

from node.runtime import Disk
from node.store.table_file import read_table, write_table

__all__ = ["KvConfig", "KvConfigFull"]

MAX_ENTRIES: Final = 10_000
"""Keys over all namespaces. The table is rewritten as a whole on every change."""
MAX_ENTRY_CHARS: Final = 64 * 1024
"""Namespace, key and value of one entry together."""


class KvConfigFull(Exception):
    """The entry is too large, or there are too many."""


class KvConfig:
    """Text by namespace and key. A change is durable before it is visible."""

    def __init__(self, disk: Disk, path: str | None) -> None:
        self._disk = disk
        self._path = path
        self._table: dict[str, dict[str, str]] = {}
        self._lock: asyncio.Lock | None = None

    async def load(self) -> None:
        """Read the file, if there is one, and create its directory, as a broker does its own: if entries cannot be
        stored, that is reported at the start and not to whoever sends one. Raises OSError, and ValueError if the file
        is no such table."""
        if self._path is None:
            return
        directory = posixpath.dirname(self._path) or "."
        self._disk.make_dirs(directory)
        content = read_table(self._disk, self._path)
        if content is None:
            return
        # The previous process may have replaced the file and been killed before its name was synced: sync it now.
        await self._disk.sync_dir(directory)
        try:
            table = content["configTable"]
            self._table = {
                str(namespace): {str(key): str(value) for key, value in entries.items()}
                for namespace, entries in table.items()
            }
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{self._path} is no key-value configuration: {error}") from error

    def get(self, namespace: str, key: str) -> str | None:
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str]:
        """All keys of a namespace; empty when there is none."""
        return dict(self._table.get(namespace, {}))

    async def put(self, namespace: str, key: str, value: str) -> None:
        """Set a value. Raises KvConfigFull, OSError (nothing changed)."""
        if len(namespace) + len(key) + len(value) > MAX_ENTRY_CHARS:
            raise KvConfigFull(f"an entry may have {MAX_ENTRY_CHARS} characters")
        async with self._changes():
            known = self._table.get(namespace, {})
            if key not in known and sum(map(len, self._table.values())) >= MAX_ENTRIES:
                raise KvConfigFull(f"{MAX_ENTRIES} entries exist, no more are possible")
            await self._save(self._table | {namespace: known | {key: value}})

    async def delete(self, namespace: str, key: str) -> None:
        """Remove a key; no error when it is absent. Raises OSError (nothing changed)."""
        async with self._changes():
            entries = self.namespace(namespace)
            if entries.pop(key, None) is None:
                return
            table = self._table | {namespace: entries}
            if not entries:
                del table[namespace]
            await self._save(table)

    def _changes(self) -> asyncio.Lock:
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock

    async def _save(self, table: dict[str, dict[str, str]]) -> None:
        if self._path is not None:
            await write_table(self._disk, self._path, {"configTable": table})
        self._table = table
