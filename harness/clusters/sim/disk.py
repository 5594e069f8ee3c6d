"""The disk of one host: files in memory, operations that take time, and what a power cut leaves.

Programs see the page cache, which outlives their processes. Less survives a power cut:

    content   what was synced; every 4 KiB block written since may be there or be missing, in any combination, and
              so may the new length (inode.py); in the model `torn` a block may also be torn
    names     creations, replacements and removals that were followed by a sync of their directory; in the models
              `ext4` and `torn`, as in a journal, also those up to the last change of name or length of a file that
              was synced since, and the first few of the others; in the model `posix` any subset of the others

Directories themselves are durable at once, because `make_dirs` promises it.

Operations under way when a process is killed never return to it. A write that had begun may or may not have
reached the page cache; a sync that had begun continues, and one that was to follow a write never begins. When
power fails, everything under way is lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Iterator
from math import log
from typing import TYPE_CHECKING

from harness.clusters.sim.inode import Inode
from nemesis.mechanisms.undo_log import POWER_MODELS

if TYPE_CHECKING:
    from harness.clusters.sim.lane import Lane
    from harness.clusters.sim.loop import SimLoop

__all__ = ["CHANGED", "KINDS", "READ", "SYNC", "WRITE", "SimDisk", "disk_error", "flipped_key"]

READ, WRITE, SYNC = "read", "write", "sync"
KINDS = (READ, WRITE, SYNC)
"""Operations that can fail separately: reading; changing the page cache or a directory; making things durable."""

CHANGED = "changed"
"""Key in `SimDisk.noted`: a process has changed a file or a name."""

WRITE_S = 20e-6
SYNC_MIN_S = 200e-6
SYNC_MEAN_EXTRA_S = 300e-6
SYNC_EXTRA_RATE = 1 / SYNC_MEAN_EXTRA_S
SYNC_MAX_S = 2e-3
"""A sync takes 0.2 to 2 ms, as on a solid-state disk."""
SLOW_SYNC_RATIO = 0.001
SLOW_SYNC_MAX_S = 0.05
"""One sync in a thousand takes tens of ms, as when a solid-state disk collects garbage."""
BYTES_PER_S = 1e9

Change = dict[str, Inode | None]
"""Name -> the file that it refers to after a change; None if it is removed."""


def flipped_key(fault_id: str) -> str:
    """Key in `SimDisk.noted`: a process has read the bit that a fault has flipped."""
    return f"flipped-{fault_id}"


def disk_error(number: int, path: str) -> OSError:
    """The error that a kernel would raise."""
    return OSError(number, os.strerror(number), path)


class SimDisk:
    """Files of one host, across the lives of its processes. Programs hold a `ProcessDisk` on it."""

    is_counted = True
    """Whether operations on it count as those of the host's processes."""

    def __init__(self, loop: SimLoop, host: str) -> None:
        self._loop = loop
        self.random = loop.streams.get(f"disk/{host}")
        self.power_cycles = 0
        self.delay_s = 0.0
        """Every write and sync takes this much longer."""
        self.capacity_bytes: int | None = None
        """Writes beyond it fail with ENOSPC; None means unlimited."""
        self.error_ratios: dict[str, float] = {}
        """Kind -> fraction of the operations that fail with EIO."""
        self.noted: dict[str, int] = {}
        """How often processes have met each fault ("stall-sync", "fail-write", "slow", "full"), and CHANGED."""
        self.watched: dict[Inode, dict[str, tuple[int, int, int]]] = {}
        """File with flipped bits -> fault -> (offset of the byte, mask of the bit, the masked bit after the flip)."""
        self._stalled: dict[str, None] = {}
        self._parked: list[tuple[str, Callable[[], None]]] = []
        """Stalled operations: kind, and what resumes them."""
        self._files: dict[str, Inode] = {}
        self._directories: dict[str, None] = {"/": None}
        self._durable: dict[str, Inode] = {}
        self._pending: list[tuple[int, Change]] = []
        """Name changes that no directory sync has covered, with their serial numbers, in order; each is atomic."""
        self.name_serial = 0
        """Serial number of the last name change."""
        self._journal_serial = 0
        """Serial number of the last name change that the journal has on disk."""

    # Faults

    def stall(self, kinds: Collection[str] = (WRITE, SYNC)) -> None:
        """Make operations of these kinds wait until `unstall`, including those under way."""
        for kind in kinds:
            if kind not in (WRITE, SYNC):
                raise ValueError(f"cannot stall {kind!r}: a disk stalls on {WRITE} and {SYNC}")
            self._stalled[kind] = None

    def unstall(self, kinds: Collection[str] = (WRITE, SYNC)) -> None:
        """Resume waiting operations of these kinds. Idempotent."""
        for kind in kinds:
            self._stalled.pop(kind, None)
        parked, self._parked = self._parked, []
        for _, resume in parked:
            self._loop.event_at(self._loop.time() + WRITE_S, resume)

    def note(self, what: str) -> None:
        """Count something that a process of the host has met or done."""
        if self.is_counted:
            self.noted[what] = self.noted.get(what, 0) + 1

    def note_read(self, inode: Inode, offset: int, size_bytes: int) -> None:
        """Count the flipped bits that a process reads in a file, except those that were overwritten since."""
        for fault_id, (at, bit, flipped) in self.watched[inode].items():
            if offset <= at < min(offset + size_bytes, len(inode.cache)) and inode.cache[at] & bit == flipped:
                self.note(flipped_key(fault_id))

    @contextlib.contextmanager
    def looked_at(self) -> Iterator[None]:
        """A context for reads that are not by the host's processes: they meet no errors, and none are counted."""
        ratios, watched = self.error_ratios, self.watched
        self.error_ratios, self.watched = {}, {}
        try:
            yield
        finally:
            self.error_ratios, self.watched = ratios, watched

    def waits(self, kinds: Collection[str]) -> bool:
        """Whether any operations of these kinds are waiting."""
        return any(kind in kinds for kind, _ in self._parked)

    def is_stalled(self, kind: str) -> bool:
        """Whether operations of this kind are to wait."""
        return kind in self._stalled

    def fill_up(self) -> None:
        """Leave no free space, even after something is removed."""
        self.capacity_bytes = 0

    def fail(self, kind: str, ratio: float = 1.0) -> None:
        """Make a fraction of the operations of one kind fail with EIO; 0 ends it."""
        if kind not in KINDS:
            raise ValueError(f"no such kind of operation: {kind!r}")
        self.error_ratios[kind] = ratio

    def heal(self) -> None:
        """Undo stalls, delays, errors and lack of space. Flipped bits stay flipped. Idempotent."""
        self.delay_s = 0.0
        self.capacity_bytes = None
        self.error_ratios.clear()
        self.unstall()

    def flip_bit(self, path: str, offset: int, bit: int = 0) -> None:
        """Change one bit of a file at rest. Raises OSError when there is no such byte."""
        inode = self.inode(path)
        if not 0 <= offset < len(inode.cache):
            raise disk_error(errno.EINVAL, path)
        inode.flip_bit(offset, bit)

    def power_fail(self, model: str | None = None) -> int:
        """Lose what was not durable, by the given one of `POWER_MODELS` or a random one; chance decides the details.
        Returns how many bytes have changed."""
        self.power_cycles += 1
        self._parked.clear()
        rng = self.random
        model = model or rng.choice(POWER_MODELS)
        if model != "posix":
            reached = sum(serial <= self._journal_serial for serial, _ in self._pending)
            surviving = self._pending[: rng.randrange(reached, len(self._pending) + 1)]
        elif rng.random() < 0.5:  # a prefix, as if there were a journal
            surviving = self._pending[: rng.randrange(len(self._pending) + 1)]
        else:
            surviving = [pending for pending in self._pending if rng.random() < 0.5]
        for _, change in surviving:
            _apply(self._durable, change)
        self._pending.clear()
        before, self._files = self._files, dict(self._durable)
        kept = dict.fromkeys(self._files.values())
        gone_bytes = sum(len(inode.cache) for inode in dict.fromkeys(before.values()) if inode not in kept)
        return gone_bytes + sum(inode.power_fail(rng, tears=model == "torn") for inode in kept)

    # State

    def inode(self, path: str) -> Inode:
        """The file at a path. Raises FileNotFoundError."""
        inode = self._files.get(path)
        if inode is None:
            raise disk_error(errno.ENOENT, path)
        return inode

    def get(self, path: str) -> Inode | None:
        """The file at a path, if there is one."""
        return self._files.get(path)

    def paths(self) -> list[str]:
        """Every file, sorted."""
        return sorted(self._files)

    def exists(self, path: str) -> bool:
        """Whether there is a file or directory of this name."""
        return path in self._files or path in self._directories

    def is_dir(self, path: str) -> bool:
        """Whether there is a directory of this name."""
        return (path.rstrip("/") or "/") in self._directories

    def names_in(self, path: str) -> list[str]:
        """Names in a directory, sorted."""
        prefix = path.rstrip("/") + "/"
        inside = (other for names in (self._files, self._directories) for other in names if other.startswith(prefix))
        return sorted({name for other in inside if (name := other[len(prefix) :]) and "/" not in name})

    def make_dirs(self, path: str) -> None:
        """Create a directory and its parents, durably."""
        while path not in self._directories:
            if path in self._files:
                raise disk_error(errno.ENOTDIR, path)
            self._directories[path] = None
            path = os.path.dirname(path)

    def link(self, path: str, inode: Inode, *, replaced: str | None = None) -> None:
        """Give a file a name; with `replaced`, remove that other name in the same step (a rename)."""
        if not self.is_dir(os.path.dirname(path)):
            raise disk_error(errno.ENOENT, path)
        if path in self._directories:
            raise disk_error(errno.EISDIR, path)
        change: Change = {path: inode}
        if replaced is not None:
            change[replaced] = None
        self._change(change)

    def unlink(self, path: str) -> None:
        """Remove a file's name. Raises FileNotFoundError."""
        self.inode(path)
        self._change({path: None})

    def _change(self, change: Change) -> None:
        self.name_serial += 1
        for inode in change.values():
            if inode is not None:
                inode.name_serial = self.name_serial
        _apply(self._files, change)
        self._pending.append((self.name_serial, change))

    def sync_names(self, directory: str, changes: list[tuple[int, Change]]) -> None:
        """Make those of `changes` durable that affect a directory."""
        directory = directory.rstrip("/") or "/"
        for serial, change in changes:
            if any(os.path.dirname(path) == directory for path in change):
                self.journal_reaches(serial)
                if (serial, change) in self._pending:
                    self._pending.remove((serial, change))
                    _apply(self._durable, change)

    def journal_reaches(self, serial: int) -> None:
        """Record that a sync has brought the journal to disk up to this name change."""
        self._journal_serial = max(self._journal_serial, serial)

    def pending_changes(self) -> list[tuple[int, Change]]:
        """The name changes that are not durable yet."""
        return list(self._pending)

    def used_bytes(self) -> int:
        """Bytes in all files."""
        return sum(len(inode.cache) for inode in self._files.values())

    def put(self, path: str, content: bytes) -> None:
        """Put a file there from outside the simulation, durably, creating its parents. Takes no time."""
        self.make_dirs(os.path.dirname(path))
        inode = Inode()
        inode.write(0, content)
        inode.make_durable()
        self._files[path] = self._durable[path] = inode

    # Time

    def write_s(self, size_bytes: int) -> float:
        """How long a write takes."""
        if self.delay_s:
            self.note("slow")
        return WRITE_S * (0.5 + self.random.random()) + size_bytes / BYTES_PER_S + self.delay_s

    def sync_s(self) -> float:
        """How long a sync takes."""
        if self.delay_s:
            self.note("slow")
        draw = self.random.random()
        if draw < SLOW_SYNC_RATIO:
            return SLOW_SYNC_MAX_S * self.random.random() + self.delay_s
        extra_s = -log(1.0 - self.random.random()) / SYNC_EXTRA_RATE
        return min(SYNC_MIN_S + extra_s, SYNC_MAX_S) + self.delay_s

    def later(self, after_s: float, kind: str, resume: Callable[[], None], by: Lane) -> None:
        """Call `resume` when an operation of a kind, begun by the process of a lane, is done: after `after_s`, and once
        the disk is not stalled. Never if power fails before."""
        loop = self._loop
        loop.event_at(loop.now + after_s, self._done, kind, self.power_cycles, resume, by)

    def _done(
        self, kind: str, power_cycles: int, resume: Callable[[], None], by: Lane, has_waited: bool = False
    ) -> None:
        if power_cycles != self.power_cycles:
            return
        if kind in self._stalled:
            if not has_waited and not by.is_dead:
                self.note(f"stall-{kind}")
            self._parked.append((kind, lambda: self._done(kind, power_cycles, resume, by, True)))
            return
        resume()

    def fails(self, kind: str, by: Lane | None = None) -> bool:
        """Whether the next operation of a kind fails with EIO. A failure is not counted if the process that began the
        operation (`by`) is dead."""
        ratio = self.error_ratios.get(kind, 0.0)
        is_failing = ratio > 0 and self.random.random() < ratio
        if is_failing and (by is None or not by.is_dead):
            self.note(f"fail-{kind}")
        return is_failing

    def room_bytes(self) -> int | None:
        """Free space; None if it is not limited."""
        return None if self.capacity_bytes is None else max(0, self.capacity_bytes - self.used_bytes())


def _apply(names: dict[str, Inode], change: Change) -> None:
    for path, inode in change.items():
        if inode is None:
            names.pop(path, None)
        else:
            names[path] = inode
