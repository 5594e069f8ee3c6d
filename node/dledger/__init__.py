"""A replicated log with leader election, after RocketMQ's DLedger: Raft with DLedger's parts and names."""

from __future__ import annotations

from node.dledger.config import DEFAULT_TIMING, FAST_TIMING, TIMINGS, DLedgerConfig, DLedgerTiming, FlushMode
from node.dledger.entry import Entry
from node.dledger.files import LedgerCorrupt
from node.dledger.member_state import MemberState
from node.dledger.quorum import AppendResult
from node.dledger.rpc import DLedgerCode, DLedgerError, DLedgerRequestCode, ReadMode, Role
from node.dledger.server import DLedgerServer
from node.dledger.store import DLedgerStore

__all__ = [
    "DEFAULT_TIMING",
    "FAST_TIMING",
    "TIMINGS",
    "AppendResult",
    "DLedgerCode",
    "DLedgerConfig",
    "DLedgerError",
    "DLedgerRequestCode",
    "DLedgerServer",
    "DLedgerStore",
    "DLedgerTiming",
    "Entry",
    "FlushMode",
    "LedgerCorrupt",
    "MemberState",
    "ReadMode",
    "Role",
]
