"""What the broker needs of its log, as interfaces: implemented by DLedger, the classic log and tests' stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from node.broker.log_batches import RecordRun
from node.dledger.entry_batch import EntryBatch
from node.dledger.rpc import DLedgerCode, DLedgerError, ReadMode, Role

__all__ = [
    "DLedgerCode",
    "DLedgerError",
    "EntryBatch",
    "Ledger",
    "LedgerEntry",
    "LedgerStore",
    "MemberState",
    "ReadMode",
    "Role",
    "StoredInPart",
]


class StoredInPart(Exception):
    """A message is in the log but less safe than it should be: `code` is the put status that tells what is missing
    (FLUSH_DISK_TIMEOUT, SLAVE_NOT_AVAILABLE, FLUSH_SLAVE_TIMEOUT). Such an answer carries everything that a
    success does (S1)."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class LedgerEntry(Protocol):
    """One entry of the log."""

    @property
    def index(self) -> int: ...
    @property
    def term(self) -> int: ...
    @property
    def is_message(self) -> bool: ...
    @property
    def body(self) -> bytes: ...
    @property
    def body_pos(self) -> int: ...


class LedgerStore(Protocol):
    """The contents of the log, in memory and on disk."""

    @property
    def ledger_begin_index(self) -> int: ...
    @property
    def ledger_end_index(self) -> int: ...
    @property
    def committed_index(self) -> int: ...
    @property
    def committed_pos(self) -> int: ...
    @property
    def durable_index(self) -> int:
        """The last index that survives a power cut of this node."""
        ...

    def get(self, index: int) -> LedgerEntry | None: ...
    def holds(self, index: int, term: int) -> bool:
        """Whether the log has exactly this entry."""
        ...

    def read_committed(self, first_index: int, last_index: int) -> Sequence[EntryBatch | RecordRun]:
        """Committed entries from `first_index` on and to `last_index` at most, as many as make a few milliseconds of
        work; none if the first cannot be read this way. Raises OSError."""
        ...

    def read_bytes(self, pos: int, size_bytes: int) -> bytes: ...
    def read_records(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes at places given as position and size. Raises OSError; what cannot be read whole may be short."""
        ...


class MemberState(Protocol):
    """This node's place in its group."""

    @property
    def self_id(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def term(self) -> int: ...
    @property
    def leader_id(self) -> str | None: ...
    @property
    def is_leader(self) -> bool: ...


class Ledger(Protocol):
    """The replicated log: see `node.dledger`."""

    @property
    def store(self) -> LedgerStore: ...
    @property
    def member_state(self) -> MemberState: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def append_batch(
        self,
        sizes: Sequence[int],
        encode: Callable[[Sequence[int]], Sequence[bytes]],
        on_done: Callable[[Exception | None], object],
    ) -> tuple[int, int, int]:
        """Append bodies of these sizes, one after another, all or none; `encode` gets their positions.

        `on_done` is called once, possibly before this returns: with None when all are committed; with StoredInPart; or
        with a DLedgerError (WAIT_QUORUM_ACK_TIMEOUT, TERM_CHANGED, DISK_ERROR) if the outcome is unknown. Returns the
        first index (-1 if something of the log's own lies between them), the last, and the term. Raises DLedgerError
        (NOT_LEADER, LEADER_PENDING_FULL, DISK_FULL, ...) and what `encode` raises: nothing was appended."""
        ...

    def takes_together(self, count: int, size_bytes: int) -> bool:
        """Whether `count` bodies of separate senders, `size_bytes` in all, may be appended as one batch: all of them
        then have the same outcome."""
        ...

    def add_commit_listener(self, listener: Callable[[], None]) -> None: ...
    def add_role_listener(self, listener: Callable[[int, Role], None]) -> None: ...
    async def read_barrier(self, mode: ReadMode) -> int: ...

    def ask_barrier(self, mode: ReadMode, on_done: Callable[[int | DLedgerError], object]) -> bool:
        """`read_barrier` without a task: `on_done` gets the index, or the error, possibly before this returns. Returns
        False, without calling it, if only `read_barrier` can tell. Raises DLedgerError."""
        ...
