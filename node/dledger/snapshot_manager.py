"""When snapshots are taken, which one is used, and what is removed once there is one (SnapshotManager, R).

Each member takes its own, of its own committed state: after a number of applied entries, before its log loses its
beginning, and when a follower needs one that reaches further than the existing ones. The rules that keep them safe:

- A snapshot ends with a committed entry and names that entry's term. One that contradicts the log is not used.
- The log loses its beginning, or begins later, only if a durable snapshot covers what is lost.
- A state never goes back: a snapshot that ends before what is applied is not loaded.

A log to which no state is attached has no snapshots.
"""

from __future__ import annotations

import asyncio
import logging

from node.dledger.config import DLedgerConfig
from node.dledger.files import LedgerCorrupt
from node.dledger.membership import Membership
from node.dledger.snapshot import MAX_SNAPSHOT_BYTES, DamagedSnapshot, Snapshot, SnapshotFiles, encode_snapshot
from node.dledger.state_machine import AppliedState
from node.dledger.store import DLedgerStore
from node.remoting.complaints import Complaints
from node.runtime import Disk

__all__ = ["SnapshotManager"]

logger = logging.getLogger("node.dledger.snapshot")

SAVE_SHARE = 0.1
"""The largest share of the time spent on saving snapshots; the next one waits accordingly."""

RETRY_S = 10.0
"""Pause after a snapshot could not be saved."""


class SnapshotManager:
    """The snapshots of one member. Call `attach` before `open`; without a state there are no snapshots, and no need."""

    def __init__(self, config: DLedgerConfig, disk: Disk, store: DLedgerStore, members: Membership) -> None:
        self._config = config
        self._store = store
        self._members = members
        self.files = self.make_files(disk)
        self._state: AppliedState | None = None
        self._newest: Snapshot | None = None
        self._saving = asyncio.Lock()
        self._due: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._next_s = 0.0
        self._is_open = False
        self._complaints = Complaints(logger, lambda: asyncio.get_running_loop().time())
        self.saved_total = 0
        """Snapshots taken here since the start."""
        self.installed_total = 0
        """Snapshots received from a leader since the start."""

    def make_files(self, disk: Disk) -> SnapshotFiles:
        return SnapshotFiles(disk, self._store.snapshot_dir, kept=self._config.snapshots_kept)

    def attach(self, state: AppliedState) -> None:
        """Take snapshots of `state` from now on."""
        self._state = state

    @property
    def is_used(self) -> bool:
        """Whether there is a state, which the log alone may be unable to restore."""
        return self._state is not None

    @property
    def newest_index(self) -> int:
        """The last entry in the newest snapshot, found intact at the start or saved since; -1 without one."""
        return self._newest.index if self._newest is not None else -1

    @property
    def applied_index(self) -> int:
        """The last entry applied to the state; -1 before the first."""
        return self._state.applied_index if self._state is not None else -1

    async def open(self) -> None:
        """Find the existing snapshots and make them durable. Raises OSError."""
        if not self.is_used:
            return
        await self.files.confirm()
        self._newest = next((snapshot for snapshot, _ in self.files.readable()), None)
        self.adopt_members()
        self._is_open = True

    async def close(self) -> None:
        """Take no more snapshots; one that is being written is finished."""
        self._is_open = False
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def basis(self, index: int) -> Snapshot | None:
        """The newest snapshot that reaches at least `index` and does not contradict the log. Raises OSError."""
        for snapshot, _ in self.files.readable():
            if snapshot.index < index:
                break
            if self.fits(snapshot):
                return snapshot
        return None

    def fits(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot's last entry has the same term in the log, if the log holds it."""
        term = self._store.term_at(snapshot.index)
        if term in (-1, snapshot.term):
            return True
        logger.error(
            "the snapshot of entry %d is of term %d, the log of term %d there; it is not used",
            snapshot.index, snapshot.term, term,
        )  # fmt: skip
        return False

    def missing(self, begin_index: int) -> LedgerCorrupt:
        """The error for a state that cannot be restored: no snapshot reaches `begin_index`, where the log begins."""
        path = (self.files.damaged or [self.files.directory])[-1]
        return LedgerCorrupt(path, 0, f"no other snapshot reaches entry {begin_index}, where the log begins")

    def covers(self, index: int) -> bool:
        """Whether the log may begin after entry `index`: a durable snapshot covers it, or no state needs it."""
        return not self.is_used or index < 0 or self.newest_index >= index

    def adopt_members(self) -> None:
        """Make the known group at least as new as the newest snapshot's."""
        newest = self._newest
        if newest is not None and newest.members:
            self._members.adopt(newest.members_index, newest.members)

    # Taking one

    def applied(self) -> None:
        """The state has advanced: take a snapshot soon if the last one is far behind."""
        threshold = self._config.snapshot_threshold_entries
        if not self._is_open or not threshold or self._due is not None or self._task is not None:
            return
        if self.applied_index - self.newest_index >= threshold:
            loop = asyncio.get_running_loop()
            self._due = loop.call_at(max(self._next_s, loop.time()), self._begin)

    def _begin(self) -> None:
        self._due = None
        self._task = asyncio.get_running_loop().create_task(self._save_in_background(), name="dledger-snapshot")

    async def _save_in_background(self) -> None:
        try:
            await self.save()
        except (OSError, ValueError) as error:
            self._complaints.warn("save", f"no snapshot could be taken: {error}")
            self._next_s = asyncio.get_running_loop().time() + RETRY_S
        except Exception:  # logged now, not when this task is collected, and not retried at once
            logger.exception("a snapshot met an error of its own")
            self._next_s = asyncio.get_running_loop().time() + RETRY_S
        finally:
            self._task = None
        self.applied()

    async def save(self) -> bool:
        """Take a snapshot of the state as it is now; durable on return. Returns False if the newest snapshot has it
        already or the last entry's term is unknown. Raises OSError; ValueError if the state is too large for one."""
        async with self._saving:
            state = self._state
            if state is None or state.applied_index <= self.newest_index or state.applied_term < 0:
                return False
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            members_index, members = self._members.at(state.applied_index)
            snapshot = Snapshot(
                index=state.applied_index,
                term=state.applied_term,
                files=state.capture(),
                members_index=members_index,
                members=members,
            )
            await self._keep(snapshot, encode_snapshot(snapshot))
            self.saved_total += 1
            self._next_s = loop.time() + (loop.time() - began_s) / SAVE_SHARE
            logger.info("took a snapshot of entry %d", snapshot.index)
        await self._remove_log()
        return True

    async def _keep(self, snapshot: Snapshot, data: bytes) -> None:
        await self.files.save(snapshot, data)
        self._newest = snapshot

    async def _remove_log(self) -> None:
        """Remove the files of the log that the snapshot covers, if `snapshot_removes_log` is set."""
        if not self._config.snapshot_removes_log:
            return
        while True:
            first = self._store.first_of_next_file()
            if first is None or not self.may_remove(first.index) or not await self._store.remove_before(first):
                return

    def may_remove(self, first_index: int) -> bool:
        """Whether the log may begin at `first_index` and still keep entries for followers nearly up to date."""
        return self.covers(first_index + self._config.snapshot_log_kept_entries - 1)

    async def for_install(self, index: int) -> tuple[Snapshot, bytes]:
        """A snapshot that reaches at least `index`, and its bytes; taken now if none exists.

        Raises OSError; LedgerCorrupt if that is not possible.
        """
        for attempt in range(2):
            if attempt:
                await self.save()
            for snapshot, data in self.files.readable():
                if snapshot.index >= index and self.fits(snapshot):
                    return snapshot, data
        raise LedgerCorrupt(
            self.files.directory, 0, f"no snapshot reaches entry {index}, and the state ends at {self.applied_index}"
        )

    # Getting one

    def is_needed(self, index: int) -> bool:
        """Whether a leader's snapshot of entry `index` is needed: all snapshots here end before it."""
        return index > self.newest_index

    async def install(self, data: bytes, index: int, term: int) -> None:
        """Save a leader's snapshot, which must be that of entry `index` of `term`; durable on return. The state loads
        it once the log begins after what is applied, unless the state is already further.

        Raises DamagedSnapshot, OSError.
        """
        snapshot = self.files.parse(data)
        if (snapshot.index, snapshot.term) != (index, term) or len(data) > MAX_SNAPSHOT_BYTES:
            raise DamagedSnapshot(f"it is that of entry {snapshot.index} of term {snapshot.term}")
        async with self._saving:
            if not self.is_needed(index):
                return
            await self._keep(snapshot, data)
            self.installed_total += 1
        logger.info("got the snapshot of entry %d", index)
