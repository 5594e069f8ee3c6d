"""All consume queues of a node, and the checkpoint that says how far their files can be trusted.

The checkpoint is one small file, replaced as a whole, written after the queues' files are durable. It names the
last log entry that was dispatched (index and term, which together identify the log up to there) and the bounds of
every queue at that moment. At start the queues are restored to exactly those bounds. A checkpoint that is
missing, damaged, or that does not fit the files or the log means: delete the queues and dispatch the log again.
(RocketMQ keeps a store checkpoint of three timestamps for the same purpose, seed S1. They are here too, for whoever
inspects a store: up to which store timestamp the newest messages of log, queues and index are durable. Recovery
goes by the entry, which is exact.)
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from node.runtime import Disk
from node.store.bad_sectors import is_of_a_bad_sector
from node.store.consume_queue import CRC_SIZE_BYTES, UNIT_SIZE_BYTES, ConsumeQueue
from node.store.file_cache import FileCache

__all__ = ["NOTHING_DISPATCHED", "DispatchMark", "QueueStore", "StoreTimestamps"]

logger = logging.getLogger("node.store")

CHECKPOINT_VERSION = 5
"""Version of the checkpoint's content; a checkpoint with another one is not read, and the queues are rebuilt."""


NO_SUMS: Sequence[Sequence[Any]] = ((), ())
"""Checksums of a queue without messages: none for its units, and none for their CRCs."""


class DispatchMark(NamedTuple):
    """The last log entry whose message, if it has one, is in the queues.

    `store_timestamp_ms` is the newest store timestamp up to there.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls here
    term: int
    store_timestamp_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTimestamps:
    """Store timestamps, in milliseconds of the epoch, of the newest durable message of each part (S1:
    StoreCheckpoint); 0 while there is none."""

    physic_msg_ms: int = 0
    """Of the log, as far as it is dispatched."""
    logics_msg_ms: int = 0
    """Of the consume queues."""
    index_msg_ms: int = 0
    """Of the key index."""

    def document(self) -> dict[str, int]:
        """By R's names."""
        return {
            "physicMsgTimestamp": self.physic_msg_ms,
            "logicsMsgTimestamp": self.logics_msg_ms,
            "indexMsgTimestamp": self.index_msg_ms,
        }


NOTHING_DISPATCHED = DispatchMark(index=-1, term=-1, store_timestamp_ms=0)


class QueueStore:
    """The consume queues below `directory`. Appends and reads are synchronous; files are written by `checkpoint`."""

    def __init__(self, disk: Disk, directory: str, *, units_per_file: int) -> None:
        self._disk = disk
        self._directory = directory
        self._checkpoint_path = f"{directory}.checkpoint"
        self._crc_directory = f"{directory}.crc"
        self._units_per_file = units_per_file
        self._files = FileCache(disk)
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._released: dict[tuple[str, int], int] = {}
        """Queues of deleted topics that hold no message any more -> the number of their next one; `find` makes the
        queue again."""
        self.is_deleted: Callable[[str], bool] = lambda topic: False
        """Whether a topic does not exist any more, so that its queues may be released once they are empty."""
        self._unflushed_bytes = 0
        self._presumed: dict[tuple[str, int], bool] = {}
        """Queues whose next number is presumed, and whether the real one may also be higher."""
        self._is_trusted = True
        self.timestamps = StoreTimestamps()
        """Those of the last checkpoint that was written or restored."""
        self.derived: dict[str, Any] = {}
        """After `restore`: what else was derived from the log up to the checkpoint's mark."""

    @property
    def unflushed_bytes(self) -> int:
        """Bytes of units that exist in memory only."""
        return self._unflushed_bytes

    def find(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """The queue, or None while it has never held a message."""
        queue = self._queues.get((topic, queue_id))
        if queue is None and (topic, queue_id) in self._released:
            queue = self._queues[topic, queue_id] = self._make(topic, queue_id)
            queue.begin_at(self._released.pop((topic, queue_id)))
        return queue

    def ends(self) -> Iterator[tuple[tuple[str, int], int]]:
        """Every queue that ever held a message, as (topic, queue id), with the number of its next one."""
        for key, queue in self._queues.items():
            yield key, queue.max_offset
        yield from self._released.items()

    def items(self) -> Iterable[tuple[tuple[str, int], ConsumeQueue]]:
        """Every queue that ever held a message, with its (topic, queue id), oldest first; not those that were
        released."""
        return self._queues.items()

    def append(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        *,
        physical_offset: int,
        size_bytes: int,
        tag_hash: int,
        crc: int = 0,
        first_offset: int = 0,
    ) -> bool:
        """Add one unit; see `ConsumeQueue.append` for the result and QueueGap.

        A queue that is new begins at `first_offset`.
        """
        queue = self.find(topic, queue_id)
        if queue is None:
            queue = self._make(topic, queue_id)
            queue.begin_at(first_offset)
            self._queues[topic, queue_id] = queue
        elif self._presumed and (topic, queue_id) in self._presumed:
            may_be_later = self._presumed.pop((topic, queue_id))
            if queue.max_offset == queue.min_offset and (may_be_later or queue_offset < queue.max_offset):
                queue.begin_at(queue_offset)
        added = queue.append(queue_offset, physical_offset, size_bytes, tag_hash, crc)
        if added:
            self._unflushed_bytes += UNIT_SIZE_BYTES + CRC_SIZE_BYTES
        return added

    def append_units(self, topic: str, queue_id: int, queue_offset: int, units: bytes, crcs: bytes) -> bool:
        """Add packed units to a queue, see `ConsumeQueue.append_units`. False also if the queue does not exist."""
        queue = self.find(topic, queue_id)
        if queue is None or not queue.append_units(queue_offset, units, crcs):
            return False
        if self._presumed:
            self._presumed.pop((topic, queue_id), None)
        self._unflushed_bytes += len(units) + len(crcs)
        return True

    def presume(self, topic: str, queue_id: int, offset: int | None, *, may_be_later: bool = False) -> None:
        """Make an empty queue whose next message has number `offset`, unless the log still holds earlier ones, which
        then come first; with `may_be_later` its number may also be higher, when `offset` may stem from another log.
        None: the queue exists, and was presumed before."""
        if offset is not None:
            self._released.pop((topic, queue_id), None)
            queue = self._queues[topic, queue_id] = self._make(topic, queue_id)
            queue.begin_at(offset)
        self._presumed[topic, queue_id] = may_be_later

    @property
    def presumed(self) -> list[tuple[str, int]]:
        """Presumed queues that no message has entered since."""
        return sorted(self._presumed)

    def may_begin_later(self, topic: str, queue_id: int) -> bool:
        """Whether the queue's next number is presumed and may also be higher: no message has entered it yet."""
        return self._presumed.get((topic, queue_id), False)

    def _make(self, topic: str, queue_id: int) -> ConsumeQueue:
        return ConsumeQueue(
            self._disk,
            self._files,
            f"{self._directory}/{topic}/{queue_id}",
            units_per_file=self._units_per_file,
            crc_directory=f"{self._crc_directory}/{topic}/{queue_id}",
        )

    async def checkpoint(
        self,
        mark: DispatchMark,
        derived: Mapping[str, Any] | None = None,
        flush_derived: Callable[[], Awaitable[None]] | None = None,
        timestamps: Callable[[], StoreTimestamps] = StoreTimestamps,
    ) -> None:
        """Make the queues durable as they are now, and record that they hold the log up to `mark`.

        `derived` is what else was derived from the log up to there, as JSON values; `restore` returns it.
        `flush_derived` makes durable what `derived` refers to; `timestamps` then reports what is durable.

        Files whose units were all trimmed by then are removed once the checkpoint is in force, and queues of deleted
        topics that hold nothing any more are released.

        What is appended meanwhile is left for the next checkpoint. Raises OSError; the former checkpoint then
        stays in force. After a failed fsync it stays in force permanently: the system may have dropped the
        pages that it could not write, so a later fsync that succeeds would prove nothing.
        """
        bounds: dict[str, dict[str, list[Any]]] = {}
        derived_text = json.dumps(derived or {}, separators=(",", ":"))  # as of this moment, like the bounds
        for (topic, queue_id), queue in self._queues.items():
            bounds.setdefault(topic, {})[str(queue_id)] = [queue.min_offset, queue.max_offset, queue.sums()]
        for (topic, queue_id), end in self._released.items():
            bounds.setdefault(topic, {})[str(queue_id)] = [end, end, NO_SUMS]
        try:
            await self._flush_queues()
        finally:
            self._unflushed_bytes = sum(queue.unflushed_bytes for queue in self._queues.values())
        if flush_derived is not None:
            await flush_derived()
        if not self._is_trusted:
            return
        durable = timestamps()
        text = json.dumps(
            {
                "version": CHECKPOINT_VERSION,
                "index": mark.index,
                "term": mark.term,
                "store_timestamp_ms": mark.store_timestamp_ms,
                "timestamps": durable.document(),
                "units_per_file": self._units_per_file,
                "queues": bounds,
                "derived": derived_text,
            },
            separators=(",", ":"),
        ).encode()
        await self._disk.write_file_atomic(self._checkpoint_path, b"%08x\n%s\n" % (zlib.crc32(text), text))
        if not self._is_trusted:  # changed meanwhile: `distrust` may have removed the file before this one came
            await self._disk.remove(self._checkpoint_path)
            return
        self.timestamps = durable
        await self._remove_trimmed(bounds)
        await self._release(bounds)

    async def _release(self, bounds: Mapping[str, Mapping[str, Sequence[Any]]]) -> None:
        """Keep only the next number of queues of deleted topics that were empty in a checkpoint, which is durable by
        now, and still are; delete their files. `restore` needs no file of such a queue."""
        empty = {}
        for (topic, queue_id), queue in self._queues.items():
            min_offset, max_offset, *_ = bounds.get(topic, {}).get(str(queue_id), (0, -1))
            is_empty = min_offset == max_offset == queue.min_offset == queue.max_offset
            if is_empty and not queue.unflushed_bytes and not queue.is_unsynced and self.is_deleted(topic):
                empty[topic, queue_id] = max_offset
        for key in empty:
            del self._queues[key]
        self._released |= empty
        try:
            for topic, queue_id in empty:
                for directory in (self._directory, self._crc_directory):
                    if (topic, queue_id) not in self._queues:  # made again meanwhile; its next flush is still to come
                        await self._delete_files(f"{directory}/{topic}/{queue_id}")
        except OSError as error:  # a restart deletes them
            logger.warning("files of queues of deleted topics could not be removed: %s", error)

    async def _remove_trimmed(self, bounds: Mapping[str, Mapping[str, Sequence[Any]]]) -> None:
        """Delete the files before the bounds of a checkpoint, which is durable by now."""
        try:
            for (topic, queue_id), queue in list(self._queues.items()):
                min_offset, *_ = bounds.get(topic, {}).get(str(queue_id), (0,))
                await queue.remove_before(min_offset)
        except OSError as error:  # the next checkpoint tries again, and so does a restart
            logger.warning("old files of consume queues could not be removed: %s", error)

    async def _flush_queues(self) -> None:
        for queue in list(self._queues.values()):
            if queue.unflushed_bytes:
                await queue.flush()
            if queue.is_unsynced and self._is_trusted:
                try:
                    await queue.sync()
                except OSError:
                    self._is_trusted = False
                    raise

    async def distrust(self) -> None:
        """The files were found to be wrong: let the next start rebuild every queue from the log.

        Raises OSError.
        """
        if self._is_trusted:
            self._is_trusted = False
            await self._disk.remove(self._checkpoint_path)

    def trim(self, physical_offset: int) -> int:
        """The log now begins at `physical_offset`: let every queue begin with its first message from there on (R:
        correctMinOffset). Returns how many messages are gone. Raises OSError."""
        dropped = 0
        for queue in self._queues.values():
            dropped -= queue.min_offset
            queue.trim(physical_offset)
            dropped += queue.min_offset
        if dropped:
            logger.warning("the log begins at %d: %d messages before it are gone", physical_offset, dropped)
        return dropped

    async def discard(self) -> None:
        """Delete every queue, because state that belongs to them cannot be restored. Raises OSError."""
        await self._delete_all()
        self.derived = {}

    async def restore(self, is_in_log: Callable[[int, int], bool]) -> DispatchMark:
        """Restore the queues to the last checkpoint; returns its mark.

        `is_in_log(index, term)` tells whether the log has exactly this entry. If checkpoint, files and log do
        not agree, the queues are deleted and NOTHING_DISPATCHED is returned: dispatch then starts over.
        Raises OSError.
        """
        content = self._read_checkpoint()
        if content is not None:
            mark = DispatchMark(
                index=content["index"],
                term=content["term"],
                store_timestamp_ms=content["store_timestamp_ms"],
            )
            if not is_in_log(mark.index, mark.term):
                logger.warning("the log does not hold entry %d of term %d any more", mark.index, mark.term)
            elif await self._restore_queues(content["queues"]):
                self.derived = json.loads(content["derived"])
                names = ("physicMsgTimestamp", "logicsMsgTimestamp", "indexMsgTimestamp")
                physic_ms, logics_ms, index_ms = (content["timestamps"][name] for name in names)
                self.timestamps = StoreTimestamps(
                    physic_msg_ms=physic_ms, logics_msg_ms=logics_ms, index_msg_ms=index_ms
                )
                return mark
            logger.warning("consume queues do not fit their checkpoint or the log; rebuilding them")
        await self.discard()
        return NOTHING_DISPATCHED

    def _read_checkpoint(self) -> dict[str, Any] | None:
        if not self._disk.exists(self._checkpoint_path):
            if self._disk.list(self._directory):
                logger.warning("%s is missing; rebuilding the consume queues", self._checkpoint_path)
            return None
        try:
            crc, _, text = self._disk.read_file(self._checkpoint_path).partition(b"\n")
        except OSError as error:
            if not is_of_a_bad_sector(error):
                raise
            logger.warning("%s is damaged (%s); rebuilding the consume queues", self._checkpoint_path, error)
            return None
        text = text.removesuffix(b"\n")
        if crc != b"%08x" % zlib.crc32(text):
            logger.warning("%s is damaged; rebuilding the consume queues", self._checkpoint_path)
            return None
        content: dict[str, Any] = json.loads(text)
        if content["version"] != CHECKPOINT_VERSION or content["units_per_file"] != self._units_per_file:
            return None
        return content

    async def _restore_queues(self, bounds: dict[str, dict[str, list[Any]]]) -> bool:
        for topic, queues in bounds.items():
            for queue_id, (min_offset, max_offset, sums) in queues.items():
                queue = self._make(topic, int(queue_id))
                if not await queue.restore(min_offset, max_offset, sums):
                    return False
                self._queues[topic, int(queue_id)] = queue
        for directory in (self._directory, self._crc_directory):
            for topic in self._disk.list(directory):
                for queue_name in self._disk.list(f"{directory}/{topic}"):
                    if queue_name not in bounds.get(topic, {}):
                        await self._delete_files(f"{directory}/{topic}/{queue_name}")
        return True

    async def _delete_all(self) -> None:
        self._files.close()
        self._queues.clear()
        self._released.clear()
        self._presumed.clear()
        self._unflushed_bytes = 0
        await self._disk.remove(self._checkpoint_path)
        for directory in (self._directory, self._crc_directory):
            for topic in self._disk.list(directory):
                for queue_name in self._disk.list(f"{directory}/{topic}"):
                    await self._delete_files(f"{directory}/{topic}/{queue_name}")

    async def _delete_files(self, directory: str) -> None:
        for name in self._disk.list(directory):
            self._files.forget(f"{directory}/{name}")
            await self._disk.remove(f"{directory}/{name}")

    def close(self) -> None:
        """Release the files; writes nothing."""
        self._files.close()
