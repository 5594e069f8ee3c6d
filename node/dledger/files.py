"""The files of one member's log, and the order in which they change.

    <data_dir>/dledger/data/<20-digit position>    entries (`entry.py`)
    <data_dir>/dledger/index/<20-digit position>   where each entry lies (`index.py`)
    <data_dir>/dledger/checkpoint                  what is known to be committed and durable
    <data_dir>/dledger/member_state                term and vote (`member_state.py`)

Below the committed position the bytes of `data` are the same on every member. The data files are the log; only they
are synced before an entry is acknowledged. Index and checkpoint never claim more than is durable, so entries that are
cut off the log are removed from the checkpoint and the index first.
"""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass, replace
from typing import Any

from node.dledger.config import DLedgerConfig
from node.dledger.document import DamagedDocument, decode_document, encode_document
from node.dledger.entry import blank, tail_mark
from node.dledger.entry_batch import EntryBatch
from node.dledger.index import UNIT_SIZE_BYTES, LogIndex
from node.dledger.membership import are_members
from node.runtime import Disk, Ended
from node.store.segments import SegmentedFile

__all__ = ["Checkpoint", "LedgerCorrupt", "LedgerFiles"]


class LedgerCorrupt(OSError):
    """Bytes of the log that were durable are missing or differ from what was written. Never served, never cut off.

    `path` and `offset_bytes` say where. An OSError (EBADMSG), because to a reader it is one: the disk has not returned
    what was written to it.
    """

    def __init__(self, path: str, offset_bytes: int, problem: str) -> None:
        super().__init__(errno.EBADMSG, f"{path} is damaged at byte {offset_bytes}: {problem}")
        self.path = path
        self.offset_bytes = offset_bytes

    def __str__(self) -> str:
        return str(self.args[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Lower bounds of the committed and the durable part of the log. Never ahead of the data files."""

    committed_index: int = -1
    durable_index: int = -1
    durable_pos: int = 0
    begin_pos: int = 0
    members: tuple[tuple[int, dict[str, str]], ...] = ()
    """The groups that entries up to `durable_index` define, with the entries' indices; of later entries, only the
    groups known to be committed."""

    @property
    def is_of_reset(self) -> bool:
        """Whether it was written by `LedgerFiles.reset`: the log begins anew at `begin_pos`, and is still empty."""
        return self.durable_index < 0 < self.durable_pos

    @classmethod
    def from_document(cls, content: dict[str, Any]) -> Checkpoint:
        """Raises DamagedDocument if a field is missing or not a number."""
        values = {}
        for name in ("committed_index", "durable_index", "durable_pos", "begin_pos"):
            value = content.get(name)
            if value.__class__ is not int:
                raise DamagedDocument(f"the field {name} is missing or no number")
            values[name] = value
        return cls(**values, members=_members(content.get("members", [])))


def _members(content: Any) -> tuple[tuple[int, dict[str, str]], ...]:
    try:
        found = tuple((index, peers) for index, peers in content)
    except (TypeError, ValueError):
        raise DamagedDocument("the field members is no list of pairs") from None
    if not all(index.__class__ is int and are_members(peers) for index, peers in found):
        raise DamagedDocument("the field members holds no groups")
    return found


class LedgerFiles:
    """Reads and changes the files. Data operations run one at a time; index operations and checkpoints take
    `index_lock`."""

    def __init__(self, config: DLedgerConfig, disk: Disk) -> None:
        self._disk = disk
        self._directory = config.ledger_dir
        self.data = SegmentedFile(disk, f"{self._directory}/data", segment_size_bytes=config.data_segment_size_bytes)
        self._index_file = SegmentedFile(
            disk, f"{self._directory}/index", segment_size_bytes=config.index_segment_size_bytes
        )
        self.index = LogIndex(self._index_file)
        self.index_lock = asyncio.Lock()
        self.checkpoint = Checkpoint()
        """The checkpoint last written successfully, or found on disk."""
        self._file_may_differ = False
        """Whether a failed write may have replaced the file nevertheless: the sync of the directory comes last."""

    @property
    def checkpoint_path(self) -> str:
        return f"{self._directory}/checkpoint"

    def open(self) -> None:
        """Find the files. Raises OSError, SegmentError."""
        self._disk.make_dirs(self._directory)
        self.data.open()
        self._index_file.open()

    def load_checkpoint(self) -> Checkpoint | None:
        """The checkpoint as last written; None if none exists. Raises LedgerCorrupt, OSError."""
        if not self._disk.exists(self.checkpoint_path):
            return None
        try:
            self.checkpoint = Checkpoint.from_document(decode_document(self._disk.read_file(self.checkpoint_path)))
        except DamagedDocument as error:
            raise LedgerCorrupt(self.checkpoint_path, 0, str(error)) from error
        return self.checkpoint

    def error_at(self, position: int, problem: str) -> LedgerCorrupt:
        """The error for damage at `position` of the log."""
        return LedgerCorrupt(self.data.path_at(position), position % self.data.segment_size_bytes, problem)

    def begin_write(self, batches: list[EntryBatch], on_done: Ended, *, sync: bool) -> None:
        """Write entries that continue the log, with the blanks between them; `on_done` is called when the write has
        ended, in a later turn of the event loop. If this raises OSError, `on_done` is not called."""
        data = self.data
        position = data.end_position
        if len(batches) == 1 and batches[0].pos == position:
            raw = batches[0].raw
            position += len(raw)
        else:
            pieces = []
            for batch in batches:
                if batch.pos != position:
                    pieces.append(blank(batch.pos - position))
                pieces.append(batch.raw)
                position = batch.end_pos
            raw = b"".join(pieces)
        data.begin_append(raw, on_done, sync=sync, trailer=tail_mark(position, data.synced_position))

    async def cut(self, position: int, end_index: int) -> None:
        """Make the log end at `position`, before entry `end_index`, durably; if it ends earlier already, it stays so.
        Raises OSError; may be repeated."""
        async with self.index_lock:
            before = self.checkpoint
            if before.durable_pos > position:
                checkpoint = replace(
                    before,
                    committed_index=min(before.committed_index, end_index - 1),
                    durable_index=end_index - 1,
                    durable_pos=position,
                    members=tuple(
                        item for item in before.members if item[0] < end_index or item[0] > before.durable_index
                    ),
                )
                await self._write_checkpoint(checkpoint)
            elif self._file_may_differ:
                await self._write_checkpoint(before)
            await self.index.truncate(end_index)
        if position < self.data.end_position:
            # Cut off the tail mark first. A file system writes zeros after the new end before it writes the new length:
            # with a single cut, a power failure in between leaves a log that ends below what its mark says was durable.
            await self.data.truncate(self.data.end_position)
        if position <= self.data.end_position:  # else those bytes were never written
            await self.data.truncate(position)
        await self.mark_tail()

    async def mark_tail(self) -> None:
        """Write a tail mark at the end of the log, and sync. Raises OSError."""
        position = self.data.end_position
        if position > self.data.begin_position:
            await self.data.append(b"", sync=True, trailer=tail_mark(position, position))

    async def reset(self, position: int, index: int, members: tuple[tuple[int, dict[str, str]], ...]) -> None:
        """Forget the whole log, durably, except the groups known to be committed, `members`; the log continues with
        entry `index` at `position`. Raises OSError."""
        async with self.index_lock:
            await self._write_checkpoint(Checkpoint(durable_pos=position, begin_pos=position, members=members))
            await self.index.reset(index)
        await self.data.reset(position)

    async def write_checkpoint(
        self,
        *,
        committed_index: int,
        durable_index: int,
        durable_pos: int,
        members: tuple[tuple[int, dict[str, str]], ...] = (),
    ) -> None:
        """Write the index to its files, then record what is durable and committed. Raises OSError.

        The caller holds `index_lock` and has read the three numbers after taking it.
        """
        await self.index.write(durable_index + 1)
        await self.index.sync()
        await self._write_checkpoint(
            Checkpoint(
                committed_index=committed_index,
                durable_index=durable_index,
                durable_pos=durable_pos,
                begin_pos=self.data.begin_position,
                members=members,
            )
        )

    async def _write_checkpoint(self, checkpoint: Checkpoint) -> None:
        content = {name: getattr(checkpoint, name) for name in Checkpoint.__slots__}
        self._file_may_differ = True
        await self._disk.write_file_atomic(self.checkpoint_path, encode_document(content))
        self.checkpoint, self._file_may_differ = checkpoint, False

    async def remove_before(self, position: int, index: int) -> None:
        """Remove the files below `position`, where entry `index` begins a file. Raises OSError; may be repeated.

        The caller holds `index_lock`, and the checkpoint is not below `index`. The checkpoint is changed first: a log
        that begins earlier than its checkpoint says is fine, one that begins later has lost something.
        """
        await self._write_checkpoint(replace(self.checkpoint, begin_pos=position))
        await self.data.remove_before(position)
        await self._index_file.remove_before(index * UNIT_SIZE_BYTES)

    def close(self) -> None:
        """Close the files; writes nothing."""
        self.data.close()
        self._index_file.close()
