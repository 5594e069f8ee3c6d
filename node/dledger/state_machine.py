"""State machines built from the committed log, and the part that feeds them (StateMachineCaller, R).

A state machine gets every committed entry once, in order; the same entries make the same state on every member. Its
state can be saved as files and loaded again, so that a member needs the log only from there on. A member whose log
begins after its state ends loads its leader's state.

A broker's state machine is its dispatcher, which has its own pace and its own checkpoints
(`node.broker.broker_snapshots`). To the snapshots it is an `AppliedState`; for machines that only apply entries,
StateMachineCaller is one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from node.dledger.entry import Entry
from node.dledger.files import LedgerCorrupt
from node.dledger.snapshot import Snapshot
from node.dledger.store import DLedgerStore

__all__ = ["AppliedState", "SnapshotSource", "StateMachine", "StateMachineCaller"]

logger = logging.getLogger("node.dledger.snapshot")

PORTION_ENTRIES = 256
"""Entries applied in one turn of the event loop."""

RETRY_S = 1.0
"""Pause before an entry that could not be read from disk is read again."""


class StateMachine(Protocol):
    """A state made from the log. No method may block, or depend on anything but the entries."""

    def apply(self, entry: Entry) -> None:
        """Apply the next committed entry, which may be a no-op or a change of the group."""
        ...

    def save(self) -> Mapping[str, bytes]:
        """The state as files by name."""
        ...

    def load(self, files: Mapping[str, bytes]) -> None:
        """Replace the state with a saved one. Raises ValueError if it is not valid; nothing has changed then."""
        ...


class AppliedState(Protocol):
    """A state of which snapshots are taken."""

    @property
    def applied_index(self) -> int:
        """The last entry in the state; -1 before the first."""
        ...

    @property
    def applied_term(self) -> int:
        """That entry's term; -1 while it is unknown: then no snapshot can be taken."""
        ...

    def capture(self) -> Mapping[str, bytes]:
        """The state as of `applied_index`, as files by name."""
        ...


class SnapshotSource(Protocol):
    """What StateMachineCaller needs of the snapshots; SnapshotManager implements it."""

    def basis(self, index: int) -> Snapshot | None: ...
    def missing(self, begin_index: int) -> LedgerCorrupt: ...
    def applied(self) -> None: ...


class StateMachineCaller:
    """Applies committed entries. If the state can no longer be built, `failure` is set and nothing more is applied."""

    def __init__(
        self,
        machine: StateMachine,
        store: DLedgerStore,
        snapshots: SnapshotSource,
    ) -> None:
        self._machine = machine
        self._store = store
        self._snapshots = snapshots
        self._index = -1
        self._term = -1
        self._is_confirmed = True
        self._scheduled: asyncio.Handle | None = None
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._is_running = False
        self.failure: Exception | None = None
        store.add_commit_listener(self.notify)

    @property
    def applied_index(self) -> int:
        return self._index

    @property
    def applied_term(self) -> int:
        return self._term

    def capture(self) -> Mapping[str, bytes]:
        return self._machine.save()

    def start(self) -> None:
        """Load the newest snapshot and continue from it. Raises LedgerCorrupt if the log does not reach back to one."""
        begin_index = max(self._store.ledger_begin_index, 0)
        self._load(begin_index - 1)
        if self._index < begin_index - 1:
            raise self._snapshots.missing(begin_index)
        self._is_running = True
        self.notify()

    def stop(self) -> None:
        """Stop applying."""
        self._is_running = False
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        for _, future in self._waiters:
            future.cancel()
        self._waiters.clear()

    async def wait_for(self, index: int) -> None:
        """Wait until entry `index` is applied, as a read does after its barrier. Raises `failure` if that is set."""
        if self.failure is not None:
            raise self.failure
        if index > self._index:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((index, future))
            await future

    def notify(self) -> None:
        """Note that there may be something to apply."""
        if self._is_running and self._scheduled is None and self.failure is None:
            self._scheduled = asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = None
        try:
            self._apply_portion()
        except LedgerCorrupt as error:
            self._fail(error)
        except OSError as error:
            logger.error("entry %d cannot be applied: %s", self._index + 1, error)
            self._scheduled = asyncio.get_running_loop().call_later(RETRY_S, self._run)
        except Exception as error:
            logger.exception("entry %d cannot be applied", self._index + 1)
            self._fail(error)

    def _apply_portion(self) -> None:
        store = self._store
        if self._index < store.ledger_begin_index - 1:
            self._load(store.ledger_begin_index - 1)
            if self._index < store.ledger_begin_index - 1:
                raise self._snapshots.missing(store.ledger_begin_index)
        self._confirm()
        before = self._index
        for index in range(before + 1, min(store.committed_index, before + PORTION_ENTRIES) + 1):
            entry = store.get(index)
            if entry is None:
                return
            self._machine.apply(entry)
            self._index, self._term = entry.index, entry.term
        self._tell()
        if self._index > before:
            self._snapshots.applied()
        if self._index < store.committed_index:
            self.notify()

    def _load(self, index: int) -> None:
        """Load the newest snapshot that reaches at least `index`, if one exists and goes further than the state."""
        snapshot = self._snapshots.basis(index)
        if snapshot is None or snapshot.index <= self._index:
            return
        self._machine.load(snapshot.files)
        logger.info("the state is that of the snapshot of entry %d now", snapshot.index)
        self._index, self._term, self._is_confirmed = snapshot.index, snapshot.term, False

    def _confirm(self) -> None:
        """Check that a loaded snapshot's last entry has the same term in the log once it is committed there. Raises
        ValueError."""
        if not self._is_confirmed and self._index <= self._store.committed_index:
            term = self._store.term_at(self._index)
            if term not in (-1, self._term):
                raise ValueError(f"entry {self._index} is of term {term}, of {self._term} in the snapshot")
            self._is_confirmed = True

    def _tell(self) -> None:
        for index, future in self._waiters:
            if index <= self._index and not future.done():
                future.set_result(None)
        self._waiters = [item for item in self._waiters if not item[1].done()]

    def _fail(self, error: Exception) -> None:
        logger.error("the state machine stands still: %s", error)
        self.failure = error
        for _, future in self._waiters:
            if not future.done():
                future.set_exception(error)
        self._waiters.clear()
