"""Small tables as JSON files that detect when they are damaged, each with its predecessor beside it.

A table is replaced as a whole, so a crash leaves the old one or the new one. Against everything else that can happen to
a file (a flipped bit may leave valid JSON with another number in it) the text ends in a checksum of itself, as
one more member of the object:

    {"offsetTable":{"t@g":{"0":17}},"crc32":"5b1c0c4e"}

RocketMQ's own tables have no checksum and are read as well, as are tables written by hand. Before a table is replaced,
the old one is kept under the same name with the suffix `.bak` (R: ConfigManager); it is read if the table itself is
damaged or gone.
"""

from __future__ import annotations

import json
import logging
import re
import zlib
from typing import Any

from node.runtime import Disk
from node.store.bad_sectors import is_of_a_bad_sector

__all__ = ["BACKUP_SUFFIX", "TableDamaged", "decode_table", "encode_table", "read_table", "write_table"]

logger = logging.getLogger("node.store")

BACKUP_SUFFIX = ".bak"

_CHECKSUM = re.compile(rb',"crc32":"([0-9a-f]{8})"\}\s*\Z')


class TableDamaged(ValueError):
    """A file is not the table that was written; the text says why."""


def encode_table(table: dict[str, Any]) -> bytes:
    """The text of a table, an object with at least one member, with its checksum."""
    text = json.dumps(table, separators=(",", ":")).encode()
    return b'%s,"crc32":"%08x"}' % (text[:-1], zlib.crc32(text))


def decode_table(data: bytes) -> dict[str, Any]:
    """The table in a text, which may have no checksum. Raises TableDamaged."""
    found = _CHECKSUM.search(data)
    if found is not None:
        text = data[: found.start()] + b"}"
        if zlib.crc32(text) != int(found[1], 16):
            raise TableDamaged(f"its checksum is {zlib.crc32(text):08x}, not {found[1].decode()}")
        data = text
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TableDamaged(f"it is no JSON: {error}") from error
    if not isinstance(table, dict):
        raise TableDamaged("it is no JSON object")
    table.pop("crc32", None)
    return table


def _is_whole(data: bytes) -> bool:
    found = _CHECKSUM.search(data)
    if found is not None:
        return zlib.crc32(data[: found.start()] + b"}") == int(found[1], 16)
    try:
        decode_table(data)
    except TableDamaged:
        return False
    return True


def read_table(disk: Disk, path: str) -> dict[str, Any] | None:
    """The table at `path`; if it is damaged or gone, its predecessor; None if neither exists.

    Raises OSError, or TableDamaged if neither can be read: the contents are then unknown.
    """
    problem = ""
    if disk.exists(path):
        try:
            return decode_table(disk.read_file(path))
        except TableDamaged as error:
            problem = str(error)
    backup = path + BACKUP_SUFFIX
    if disk.exists(backup):
        try:
            table = decode_table(disk.read_file(backup))
        except TableDamaged as error:
            problem = problem or "it is gone"
            raise TableDamaged(
                f"{path} is damaged ({problem}), and so is {backup} ({error});"
                " restore one, or remove both to start empty"
            ) from error
        logger.warning("%s %s; going on with its predecessor %s", path, problem or "is gone", backup)
        return table
    if problem:
        raise TableDamaged(f"{path} is damaged: {problem}; restore it, or remove it to start empty")
    return None


async def write_table(disk: Disk, path: str, table: dict[str, Any]) -> None:
    """Replace the table at `path`, and keep the old one, if it is whole, as its predecessor. Raises OSError."""
    data = encode_table(table)
    if disk.exists(path):
        try:
            before = disk.read_file(path)
        except OSError as error:
            if not is_of_a_bad_sector(error):
                raise
            before = b""
        if before != data and _is_whole(before):  # an existing predecessor is worth more than a damaged table
            await disk.write_file_atomic(path + BACKUP_SUFFIX, before)
    await disk.write_file_atomic(path, data)
