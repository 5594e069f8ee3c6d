"""Consumer offsets: how far each group has consumed each queue.

Kept in memory, written every few seconds to `consumerOffset.json` in RocketMQ's format (R: ConsumerOffsetManager): a
table from "topic@group" to {queue id: offset}. A broker that dies loses the last seconds of changes, and a new master
may know less than the old one did: consumers then get messages again, which is legal, but skip none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from typing import Any

from node.broker.lazy_file import LazyFile
from node.runtime import Disk

__all__ = ["MAX_CONSUMER_OFFSETS", "ConsumerOffsets", "TooManyOffsets", "split_key"]

logger = logging.getLogger("node.broker")

PERSIST_INTERVAL_S = 5.0
"""R: flushConsumerOffsetInterval."""
MAX_CONSUMER_OFFSETS = 500_000
"""Offsets kept, one for each group and queue; about 100 bytes each, written whole with every change."""
MAX_GROUP_CHARACTERS = 255
"""R: Validators.CHARACTER_MAX_LENGTH."""

_SEPARATOR = "@"


def split_key(key: str) -> tuple[str, str]:
    """Topic and group of a key of the table. A group's name may contain the separator, a topic's does not."""
    topic, _, group = key.partition(_SEPARATOR)
    return topic, group


class TooManyOffsets(Exception):
    """No further queue of a group can be remembered."""


class ConsumerOffsets:
    """Offsets by topic, group and queue. `topics` returns the topics that exist, a new object after each change.
    Offsets in deleted topics are kept in case these are created again, and forgotten when room runs out."""

    def __init__(self, disk: Disk, path: str, topics: Callable[[], Container[str] | None] = lambda: None) -> None:
        self._topics = topics
        self._looked_at: Container[str] | None = None
        """The topics at the last time there was no more room."""
        self._table: dict[str, dict[int, int]] = {}
        self._count = 0
        self._taken: dict[tuple[str, int], None] | None = None
        self._file = LazyFile(disk, path, delay_s=PERSIST_INTERVAL_S, render=self.document)

    def load(self) -> None:
        """Read the file. Raises OSError, ValueError when it is damaged."""
        self._file.load(self._adopt)

    def replace(self, content: Mapping[str, Any]) -> None:
        """Take over another broker's table, as a slave does from its master (S3).

        Raises ValueError, KeyError, TypeError or AttributeError when `content` is no such table.
        """
        self._adopt(content)
        self._file.touch()

    def _adopt(self, content: Mapping[str, Any]) -> None:
        table = {
            str(key): {int(queue_id): int(offset) for queue_id, offset in queues.items()}
            for key, queues in content["offsetTable"].items()
        }
        count = sum(map(len, table.values()))
        if count > MAX_CONSUMER_OFFSETS:
            raise ValueError(f"{count} offsets, at most {MAX_CONSUMER_OFFSETS} are kept")
        self._table, self._count = table, count

    def document(self) -> dict[str, Any]:
        """The table as it is stored and sent (code 43)."""
        return {
            "offsetTable": {
                key: {str(queue_id): offset for queue_id, offset in queues.items()}
                for key, queues in self._table.items()
            }
        }

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Remember that `group` continues at `offset`. A negative offset, which some clients send before they
        know theirs, changes nothing. Raises TooManyOffsets."""
        if offset < 0 or not group or len(group) > MAX_GROUP_CHARACTERS:
            return
        key = f"{topic}{_SEPARATOR}{group}"
        queues = self._table.get(key)
        if queues is None or queue_id not in queues:
            if self._count >= MAX_CONSUMER_OFFSETS and not self._has_forgotten():
                raise TooManyOffsets(f"{self._count} consumer offsets are kept, no more are possible")
            self._count += 1
            queues = self._table.setdefault(key, {})
        elif queues[queue_id] == offset:
            return
        queues[queue_id] = offset
        if self._taken is not None:
            self._taken[key, queue_id] = None
        self._file.touch()

    def _has_forgotten(self) -> bool:
        """Forget offsets in topics that do not exist; returns whether there were any."""
        topics = self._topics()
        if topics is None or topics is self._looked_at:
            return False
        self._looked_at = topics
        gone = [key for key in self._table if split_key(key)[0] not in topics]
        for key in gone:
            self._count -= len(self._table.pop(key))
        if gone:
            logger.warning("%d consumer offsets are kept: those in topics that were deleted make room", self._count)
        return bool(gone)

    def note_taken(self, wanted: bool) -> None:
        """Whether to remember from now on which offsets clients commit: a slave reports them to its master."""
        self._taken = {} if wanted else None

    def taken(self) -> list[tuple[str, int]]:
        """Keys and queues whose offset was committed while that was remembered, and still exists."""
        return [(key, queue_id) for key, queue_id in self._taken or () if queue_id in self._table.get(key, ())]

    def forget_taken(self, key: str, queue_id: int, offset: int | None) -> None:
        """The master knows this offset now; if another one was committed meanwhile, it stays remembered."""
        if self._taken is not None and self._table.get(key, {}).get(queue_id) == offset:
            self._taken.pop((key, queue_id), None)

    def find(self, group: str, topic: str, queue_id: int) -> int | None:
        """The offset at which `group` continues; None if it never committed one."""
        queues = self._table.get(f"{topic}{_SEPARATOR}{group}")
        return None if queues is None else queues.get(queue_id)

    def topics_of(self, group: str) -> list[str]:
        """The topics that `group` has consumed."""
        return [topic for topic, owner in map(split_key, self._table) if owner == group]

    def groups_of(self, topic: str) -> list[str]:
        """The groups that have consumed `topic`."""
        return [group for name, group in map(split_key, self._table) if name == topic]

    def pairs(self) -> list[tuple[str, str]]:
        """Every topic with every group that has consumed it."""
        return list(map(split_key, self._table))

    def of(self, group: str, topic: str) -> dict[int, int]:
        """Where `group` continues in the queues of `topic`, by queue id."""
        return dict(self._table.get(f"{topic}{_SEPARATOR}{group}", {}))

    def forget_group(self, group: str) -> None:
        """Drop every offset of `group`."""
        for key in [key for key in self._table if split_key(key)[1] == group]:
            self._count -= len(self._table.pop(key))
            self._file.touch()

    def keep_within(self, end_of: Callable[[str, int], int]) -> None:
        """Reduce offsets beyond the end of their queue to that end. If a log without a quorum has lost its newest
        messages, new ones get the same offsets, and a group that had consumed the lost ones would skip them."""
        for key, queues in self._table.items():
            topic, _ = split_key(key)
            for queue_id, offset in queues.items():
                end = end_of(topic, queue_id)
                if offset > end:
                    queues[queue_id] = end
                    self._file.touch()

    async def stop(self) -> None:
        """Write what is pending."""
        await self._file.stop()
