"""The account of unsynced data: an undo log of what a power cut would lose, kept by the supervisor of a program.

Before a reported call changes a file under the root, the old content goes into the undo log, whose format is that of
shim/undo.c; nemesis/mechanisms/undo_log.py applies it. The supervisor performs syncs on the program's behalf, on the
program's own open file, because only then does it know whether they succeed. A write through a descriptor opened with
O_SYNC or O_DSYNC (or with RWF_SYNC or RWF_DSYNC) is durable when it returns. It is recorded so that its bytes survive
the undoing of older changes, and because it makes the file's name durable as a sync does.

Not seen: writes through shared mappings, and what io_uring does. Records are written before the call is made; if the
call then fails, its record restores what is there anyway. A failed synchronous write counts as successful: a name that
it should have made durable survives, which is milder than the worst case.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import time

__all__ = ["Account", "AccountError"]

_MAGIC = 0x4F444E55
_CHANGED, _CREATED, _UNLINKED, _RENAMED, _SYNCED, _BARRIER, _WRITTEN_THROUGH, _TRUNCATED = range(1, 9)
_RECORD = struct.Struct("=2I8Q2I")
_EVERYTHING = (0, 0)
"""In place of device and inode: everything under the root was synced."""
_FIRST_LIMIT_BYTES = 16 << 20
"""The log is compacted when it is longer than this, or than twice its size after the last compaction."""
_MAX_LOG_BYTES = 1 << 30
"""At this size the account is given up, and the harness is told."""
_CHUNK_BYTES = 1 << 20
_PREDECESSOR_S = 5.0
"""How long the log may stay locked for a program that was killed: its supervisor may have calls to finish."""
_LOCK_POLL_S = 0.01


class AccountError(RuntimeError):
    """Unsynced changes can no longer be logged."""


class Account:
    """The undo log in a directory, continued from where an earlier program left it."""

    def __init__(self, directory: str) -> None:
        """Raises BlockingIOError if another program keeps the account, OSError."""
        self._directory = directory
        self._path = os.path.join(directory, "log")
        self._log = open(self._path, "a+b", buffering=0)  # noqa: SIM115 (open for the program's life)
        _lock(self._log.fileno(), timeout_s=_PREDECESSOR_S)
        self._limit_bytes = _FIRST_LIMIT_BYTES
        records = self._records()
        self._next_seq = 1 + max((record[2] for record, _, _ in records), default=0)
        self._bytes = records[-1][2] if records else 0
        self._log.truncate(self._bytes)  # drop a torn record

    def begin_anew(self) -> None:
        """Empty the log: everything written so far is taken as durable. Raises OSError."""
        for name in os.listdir(self._directory):
            if name != os.path.basename(self._path):
                os.unlink(os.path.join(self._directory, name))
        self._log.truncate(0)
        self._bytes = 0

    def close(self) -> None:
        """Empty the log and stop logging. Raises OSError."""
        self.begin_anew()
        self._log.close()

    def changing(self, path: str, offset: int, length: int, *, is_cut: bool = False) -> None:
        """Record bytes [offset, offset + length) of a file before they change, or before its length becomes `offset`
        (`is_cut`). `path` may be one of /proc/PID/fd. Raises AccountError, OSError."""
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return
        end = status.st_size if is_cut else min(offset + length, status.st_size)
        count = max(0, end - offset)
        name = os.fsencode(os.readlink(path) if path.startswith("/proc/") else path)
        head = (status.st_dev, status.st_ino, status.st_ino, offset, 0 if is_cut else length, status.st_size, count)
        data_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if count else -1
        try:
            self._append(_TRUNCATED if is_cut else _CHANGED, head, name, b"", data_fd)
        finally:
            if data_fd >= 0:
                os.close(data_fd)

    def writing_through(self, path: str, offset: int, length: int) -> bool:
        """Record a write of bytes [offset, offset + length) of a file that is durable when it returns, before it is
        made. False when there is nothing to record. Raises AccountError, OSError."""
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) or not length:
            return False
        head = (status.st_dev, status.st_ino, status.st_ino, offset, length, status.st_size, 0)
        self._append(_WRITTEN_THROUGH, head)
        return True

    def creating(self, path: str) -> None:
        """Record that a file or directory is about to be created. Its inode is not known yet: the record has none."""
        parent = os.stat(os.path.dirname(path))
        self._append(_CREATED, (parent.st_dev, parent.st_ino, 0, 0, 0, 0, 0), os.fsencode(path))

    def unlinking(self, path: str) -> None:
        """Record that a name is about to be removed."""
        own, parent = os.lstat(path), os.stat(os.path.dirname(path))
        self._keep(path)
        self._append(_UNLINKED, (parent.st_dev, parent.st_ino, own.st_ino, 0, 0, 0, 0), os.fsencode(path))

    def renaming(self, source: str, destination: str) -> None:
        """Record that a file is about to be renamed."""
        own, parent = os.lstat(source), os.stat(os.path.dirname(destination))
        try:
            if stat.S_ISREG(os.lstat(destination).st_mode):
                self._keep(destination)
        except FileNotFoundError:
            pass
        head = (parent.st_dev, parent.st_ino, own.st_ino, 0, 0, 0, 0)
        self._append(_RENAMED, head, os.fsencode(source), os.fsencode(destination))

    def sync_begins(self) -> int:
        """A sequence number for `synced`: the sync makes everything recorded before this moment durable."""
        return self._next_seq

    def synced(self, status: os.stat_result, begun: int) -> None:
        """Record a successful sync of a file or directory that began at `begun`."""
        self._append(_SYNCED, (status.st_dev, status.st_ino, 0, 0, 0, 0, 0), seq=begun)

    def synced_everything(self, begun: int) -> None:
        """Record a successful sync of the whole file system that began at `begun`."""
        self._append(_SYNCED, (*_EVERYTHING, 0, 0, 0, 0, 0), seq=begun)

    def _keep(self, path: str) -> None:
        """Keep a file under another name until its removal is durable."""
        try:
            os.link(path, os.path.join(self._directory, f"k{self._next_seq}"), follow_symlinks=False)
        except FileExistsError:
            pass

    def _append(
        self,
        kind: int,
        head: tuple[int, ...],
        first: bytes = b"",
        second: bytes = b"",
        data_fd: int = -1,
        *,
        seq: int | None = None,
    ) -> None:
        *_, count = head
        if seq is None:
            seq = self._next_seq
            self._next_seq += 1
        content = _RECORD.pack(_MAGIC, kind, seq, *head, len(first), len(second)) + first + second
        if self._bytes + len(content) + count > _MAX_LOG_BYTES:
            raise AccountError("more is unsynced than can be tracked")
        self._write(content)
        offset = head[3]
        while count:
            piece = os.pread(data_fd, min(count, _CHUNK_BYTES), offset)
            if not piece:
                raise AccountError("a file shrank while its content was being saved")
            self._write(piece)
            offset += len(piece)
            count -= len(piece)
        if self._bytes > self._limit_bytes:
            self._compact()

    def _write(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            put = self._log.write(view)
            self._bytes += put
            view = view[put:]

    def _records(self) -> list[tuple[tuple[int, ...], int, int]]:
        """(fields, begin, end) of every complete record."""
        found, at, size = [], 0, os.fstat(self._log.fileno()).st_size
        while at + _RECORD.size <= size:
            record = _RECORD.unpack(os.pread(self._log.fileno(), _RECORD.size, at))
            end = at + _RECORD.size + record[9] + record[10] + record[11]
            if record[0] != _MAGIC or end > size:
                break
            found.append((record, at, end))
            at = end
        return found

    def _compact(self) -> None:
        """Rewrite the log without records of changes that have become durable."""
        records = self._records()
        durable: dict[tuple[int, int], int] = {}
        for record, _, _ in records:
            if record[1] == _SYNCED:
                key = record[3], record[4]
                durable[key] = max(durable.get(key, 0), record[2])
        everything = durable.get(_EVERYTHING, 0)
        kept_syncs = {(*key, seq) for key, seq in durable.items()}
        through = {record[3:5]: record[2] for record, _, _ in records if record[1] == _WRITTEN_THROUGH}
        pending = {
            fields[3:5]
            for fields, _, _ in records
            if fields[1] in (_CHANGED, _TRUNCATED)
            and fields[2] >= max(everything, durable.get((fields[3], fields[4]), 0))
        }
        fresh_path = self._path + ".new"
        with open(fresh_path, "wb") as fresh:
            barrier = _journal_barrier([fields for fields, _, _ in records], durable, through)
            fresh.write(_RECORD.pack(_MAGIC, _BARRIER, barrier, *[0] * 9))
            for record, begin, end in records:
                _, kind, seq, dev, ino, *_ = record
                if kind == _SYNCED:
                    # It may make the file's name durable, whose record belongs to the directory: keep the last sync.
                    if (dev, ino, seq) not in kept_syncs:
                        continue
                    kept_syncs.discard((dev, ino, seq))
                elif kind == _BARRIER:
                    continue
                elif seq < max(everything, durable.get((dev, ino), 0)):
                    if kind in (_UNLINKED, _RENAMED):
                        self._forget(seq)
                    continue
                elif kind == _WRITTEN_THROUGH and (dev, ino) not in pending and seq < through[dev, ino]:
                    continue  # keep the last one, as for syncs, and earlier ones while other changes may be undone
                for at in range(begin, end, _CHUNK_BYTES):
                    fresh.write(os.pread(self._log.fileno(), min(_CHUNK_BYTES, end - at), at))
        fresh_log = open(fresh_path, "a+b", buffering=0)  # noqa: SIM115
        _lock(fresh_log.fileno(), timeout_s=0)
        os.replace(fresh_path, self._path)
        self._log.close()
        self._log = fresh_log
        self._bytes = os.path.getsize(self._path)
        self._limit_bytes = max(_FIRST_LIMIT_BYTES, 2 * self._bytes)

    def _forget(self, seq: int) -> None:
        try:
            os.unlink(os.path.join(self._directory, f"k{seq}"))
        except FileNotFoundError:
            pass


def _lock(descriptor: int, *, timeout_s: float) -> None:
    """Lock the log for this program; a power cut waits for the lock. Raises BlockingIOError."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(_LOCK_POLL_S)


def _journal_barrier(
    records: list[tuple[int, ...]], durable: dict[tuple[int, int], int], through: dict[tuple[int, ...], int]
) -> int:
    """The last change of a name or length that a sync of the same file or directory has covered, as in undo.c.
    `through` has the last write of each file that was durable when it returned. A file whose inode was not known when
    it was created counts through its directory only."""
    barrier = 0
    for _, kind, seq, dev, ino, own, offset, length, size, *_ in records:
        is_write = kind in (_CHANGED, _WRITTEN_THROUGH)
        if kind == _SYNCED or (is_write and (not length or offset + length <= size)):
            continue
        # A synchronous write does not make the growth by other writes durable.
        by_write = 0 if kind == _CHANGED else through.get((dev, own), 0)
        by_sync = max(durable.get(key, 0) for key in ((dev, ino), (dev, own), _EVERYTHING))
        if kind in (_BARRIER, _WRITTEN_THROUGH) or seq < max(by_sync, by_write):
            barrier = max(barrier, seq)
    return barrier
