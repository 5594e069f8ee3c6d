"""Tells a store of Apache RocketMQ from one of this broker, before anything is written to it.

Both have `commitlog/`, with the same file names, `consumequeue/`, `index/`, `lock` and `checkpoint`. A broker that took
the other's store for its own would cut off the zeros after the last record, or what it takes for zeros, and write its
own queues among the existing ones.
"""

from __future__ import annotations

from pathlib import Path

from node.store.table_file import BACKUP_SUFFIX

__all__ = ["mark_of_apache"]

_TABLES = ("topics.json", "consumerOffset.json", "subscriptionGroup.json", "delayOffset.json")
_CHECKPOINT_BYTES = 4096
"""R: StoreCheckpoint, a page of 8-byte numbers, a handful of which are used. The first is a time."""
_CHECKPOINT_USED_BYTES = 256


def mark_of_apache(data_dir: Path) -> str:
    """The file that shows the store to be Apache's; "" if it is not. Raises OSError.

    Apache's tables are below `config`, ours are not; its checkpoint is a page of numbers, ours a JSON object. A
    directory that has a checkpoint or a DLedger log of ours is ours, whatever else has been put there.
    """
    checkpoint = data_dir / "checkpoint"
    heads = {path: _head(path) for path in (checkpoint, data_dir / ("checkpoint" + BACKUP_SUFFIX))}
    if (data_dir / "dledger").exists() or any(head.startswith(b"{") for head in heads.values()):
        return ""
    for name in _TABLES:
        if (data_dir / "config" / name).is_file():
            return str(data_dir / "config" / name)
    page = heads[checkpoint]
    is_page = len(page) == _CHECKPOINT_BYTES and page[:1] == b"\0" and not any(page[_CHECKPOINT_USED_BYTES:])
    return str(checkpoint) if is_page else ""


def _head(path: Path) -> bytes:
    """The first bytes of a file, one more than Apache's checkpoint has; b"" if there is no file."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(_CHECKPOINT_BYTES + 1)
