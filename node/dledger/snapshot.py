"""Snapshots: the state made of the committed log up to an entry, and the files that hold them.

    <data_dir>/dledger/snapshot/<20-digit index>-<term>

Index and term are those of the last entry included. A file starts with a document (`document`) of two lines that names
them, the group at that entry, and each of the state's files with its size and CRC-32; the files' bytes follow,
concatenated. A snapshot is one file so that it appears as a whole or not at all: it is written aside, synced and
renamed, and only then is an older one removed (SnapshotManager; R keeps 3).

A snapshot that does not read back is never used. The previous one is as good while the log holds what follows it.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from node.dledger.document import DamagedDocument, decode_document, encode_document
from node.dledger.membership import are_members
from node.runtime import Disk

__all__ = ["MAX_SNAPSHOT_BYTES", "DamagedSnapshot", "Snapshot", "SnapshotFiles", "decode_snapshot", "encode_snapshot"]

logger = logging.getLogger("node.dledger.snapshot")

MAX_SNAPSHOT_BYTES: Final = 256 * 1024 * 1024
"""The largest snapshot: it is held in memory while it is made, sent and read. A broker's half million consumer offsets
and ten thousand topics come to some 60 MB."""

MAX_FILES: Final = 1000
"""The most files in one snapshot."""

MAX_FILE_NAME_CHARACTERS: Final = 128

_NAME: Final = re.compile(r"(\d{20})-(\d+)")


class DamagedSnapshot(Exception):
    """The bytes are not a snapshot, or not the one that was asked for; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state after entry `index` of `term` was applied, as files by name."""

    index: int
    term: int
    files: Mapping[str, bytes]
    members_index: int = -1
    """The entry that defined the group as of `index`; -1 if only the configuration did."""
    members: Mapping[str, str] = field(default_factory=dict)
    """Ids and addresses of that group's members; empty if only the configuration defined it."""


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """A snapshot's bytes, the same for the same state. Raises ValueError if it is too large."""
    names = sorted(snapshot.files)
    head = encode_document(
        {
            "last_included_index": snapshot.index,
            "last_included_term": snapshot.term,
            "members_index": snapshot.members_index,
            "members": dict(snapshot.members),
            "files": [[name, len(snapshot.files[name]), zlib.crc32(snapshot.files[name])] for name in names],
        }
    )
    size_bytes = len(head) + sum(map(len, snapshot.files.values()))
    if size_bytes > MAX_SNAPSHOT_BYTES or len(names) > MAX_FILES:
        raise ValueError(f"a snapshot of {len(names)} files, {size_bytes} bytes; {MAX_SNAPSHOT_BYTES} are possible")
    return b"".join([head, *(snapshot.files[name] for name in names)])


def decode_snapshot(data: bytes) -> Snapshot:
    """Decode a snapshot and verify each of its files. Raises DamagedSnapshot."""
    end = data.find(b"\n", data.find(b"\n") + 1) + 1
    if end <= 0:
        raise DamagedSnapshot("it has no head")
    try:
        head = decode_document(data[:end])
    except DamagedDocument as error:
        raise DamagedSnapshot(f"its head is damaged: {error}") from error
    index, term, members_index = (
        _number(head, name) for name in ("last_included_index", "last_included_term", "members_index")
    )
    if index < 0 or term < 0:
        raise DamagedSnapshot("its head names no entry")
    members: Any = head.get("members")
    if members != {} and not are_members(members):
        raise DamagedSnapshot("its head names no group")
    files: dict[str, bytes] = {}
    for name, size_bytes, crc in _entries(head.get("files")):
        content = data[end : end + size_bytes]
        if len(content) < size_bytes or zlib.crc32(content) != crc:
            raise DamagedSnapshot(f"its file {name} is {'cut off' if len(content) < size_bytes else 'damaged'}")
        files[name] = content
        end += size_bytes
    if end != len(data):
        raise DamagedSnapshot(f"{len(data) - end} bytes follow its last file")
    return Snapshot(index=index, term=term, files=files, members_index=members_index, members=members)


def _number(head: Mapping[str, Any], name: str) -> int:
    number = head.get(name)
    if not isinstance(number, int) or isinstance(number, bool) or not -1 <= number < 1 << 63:
        raise DamagedSnapshot(f"its head has no {name}")
    return number


def _entries(content: Any) -> Iterable[tuple[str, int, int]]:
    """The files listed in a head: names, sizes, CRCs."""
    if not isinstance(content, list) or len(content) > MAX_FILES:
        raise DamagedSnapshot("its head names no files")
    names = set()
    for entry in content:
        if (
            not isinstance(entry, list)
            or [each.__class__ for each in entry] != [str, int, int]
            or not 0 < len(entry[0]) <= MAX_FILE_NAME_CHARACTERS
            or not 0 <= entry[1] <= MAX_SNAPSHOT_BYTES
            or entry[0] in names
        ):
            raise DamagedSnapshot("its head names no files")
        names.add(entry[0])
        yield entry[0], entry[1], entry[2]


class SnapshotFiles:
    """The snapshots of one member below `directory`, at most `kept` of them."""

    def __init__(self, disk: Disk, directory: str, *, kept: int) -> None:
        self._disk = disk
        self.directory = directory
        self._kept = kept
        self._damaged: set[str] = set()

    def names(self) -> list[str]:
        """Names of the snapshots' files, the oldest first."""
        found = [name for name in self._disk.list(self.directory) if _NAME.fullmatch(name)]
        return sorted(found, key=_place)

    def read(self, name: str) -> tuple[Snapshot, bytes]:
        """A snapshot and its bytes, verified. Raises DamagedSnapshot, OSError."""
        data = self._disk.read_file(f"{self.directory}/{name}")
        snapshot = self.parse(data)
        if (snapshot.index, snapshot.term) != _place(name):
            raise DamagedSnapshot(f"it is that of entry {snapshot.index} of term {snapshot.term}")
        return snapshot, data

    def parse(self, data: bytes) -> Snapshot:
        """Decode a snapshot. Raises DamagedSnapshot."""
        return decode_snapshot(data)

    def readable(self) -> Iterable[tuple[Snapshot, bytes]]:
        """Every snapshot that reads back, the newest first; the others are logged and removed by the next `save`."""
        for name in reversed(self.names()):
            try:
                yield self.read(name)
            except (DamagedSnapshot, OSError) as error:
                if name not in self._damaged:
                    logger.error("the snapshot %s/%s is not usable: %s", self.directory, name, error)
                    self._damaged.add(name)

    @property
    def damaged(self) -> list[str]:
        """Paths of the snapshots that were found damaged."""
        return [f"{self.directory}/{name}" for name in sorted(self._damaged, key=_place)]

    async def confirm(self) -> None:
        """Make the names of the existing snapshots durable: the previous process may have been killed while it saved
        one, and the log may be removed up to the newest. Raises OSError."""
        if self.names():
            await self._disk.sync_dir(self.directory)

    async def save(self, snapshot: Snapshot, data: bytes) -> None:
        """Save a snapshot, durable on return; then remove damaged ones and all but the newest ones. Raises OSError."""
        name = f"{snapshot.index:020d}-{snapshot.term}"
        self._disk.make_dirs(self.directory)
        await self._disk.write_file_atomic(f"{self.directory}/{name}", data)
        self._damaged.discard(name)
        good = [other for other in self.names() if other not in self._damaged]
        for old in (*sorted(self._damaged), *good[: -self._kept]):
            await self._disk.remove(f"{self.directory}/{old}")
        self._damaged.clear()


def _place(name: str) -> tuple[int, int]:
    index, term = name.split("-")
    return int(index), int(term)
