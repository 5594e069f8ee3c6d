"""The ends of Apache's consume queues, which its log no longer shows for queues whose last message has expired.

A queue is a sequence of 20-byte units, as ours is, in files of the same size that are filled up with zeros (R:
ConsumeQueue). The units are rebuilt from the log; only the number of the next message is read from here, and written
here for queues of which the log holds nothing.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

from node.exchange.inventory import Queue
from node.exchange.staging import ExchangeError, sync_file
from node.store.consume_queue import UNIT_SIZE_BYTES
from node.store.segments import segment_name

__all__ = ["queue_ends", "write_queue_end"]

_NAME = re.compile(r"[0-9]{20}")
_UNIT = struct.Struct(">qiq")
FILLER = _UNIT.pack(0, 1, 0)
"""The unit of a message that is gone. To Apache, a unit is valid if its size is positive, and the greatest end of a
message in a queue is how far the log is dispatched: an end of 1 does not affect that."""
LIGHT_QUEUE_PREFIX = "%LMQ%"
"""Queues of RocketMQ 4.9's light messages, which are not queues of their messages' topics (R: MixAll)."""


def queue_ends(directory: Path, log_end: int) -> Iterator[tuple[Queue, int]]:
    """Every queue below a `consumequeue` directory and the number that its next message gets, if the log ends at
    `log_end`. Raises ExchangeError, OSError."""
    if not directory.is_dir():
        return
    for topic in sorted(directory.iterdir()):
        if topic.name.startswith(LIGHT_QUEUE_PREFIX):
            raise ExchangeError(f"{topic} is a queue of light messages, which this broker has not")
        for queue in sorted(topic.iterdir()) if topic.is_dir() else ():
            if queue.name.isascii() and queue.name.isdecimal():
                yield (topic.name, int(queue.name)), _end(queue, log_end)


def _end(directory: Path, log_end: int) -> int:
    """The number after the last unit: in the last file that has any, up to the first invalid or past the log."""
    for path in sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), reverse=True):
        data = path.read_bytes()
        count = 0
        for position, size_bytes, _ in _UNIT.iter_unpack(data[: len(data) - len(data) % UNIT_SIZE_BYTES]):
            if not 0 <= position < log_end or size_bytes <= 0:
                break
            count += 1
        if count:
            return int(path.name) // UNIT_SIZE_BYTES + count
    return 0


def write_queue_end(directory: Path, end: int, units_per_file: int) -> None:
    """Write the last file of a queue that has had `end` messages, all of which are gone. Raises OSError."""
    first = (end - 1) // units_per_file * units_per_file
    directory.mkdir(parents=True)
    path = directory / segment_name(first * UNIT_SIZE_BYTES)
    units = FILLER * (end - first)
    path.write_bytes(units.ljust(units_per_file * UNIT_SIZE_BYTES, b"\0"))
    sync_file(path)
