"""Mutants of snapshots: how they are verified, and in which order they and the log change.

They are put into members that keep a state beside their log (`node.dledger.state_machine`) and tested there, in
`tests/node/dledger/test_snapshot_mutants.py`: under a broker's workloads they would hardly ever show, because its log
is removed only after days.
"""

from __future__ import annotations

from node.dledger import DLedgerServer
from node.dledger.document import DamagedDocument, decode_document
from node.dledger.messages import InstallSnapshotRequest
from node.dledger.snapshot import Snapshot, SnapshotFiles
from node.dledger.snapshot_manager import SnapshotManager
from node.dledger.snapshot_transfer import SnapshotReceiver
from node.dledger.state_machine import StateMachineCaller
from node.mutants.parts import replace

__all__ = ["install_goes_back", "log_removed_before_snapshot", "snapshot_term_ignored", "snapshot_unverified"]


def snapshot_unverified(ledger: DLedgerServer) -> None:
    """A snapshot's bytes are verified neither from the disk nor from the network."""

    def parse(self: SnapshotFiles, data: bytes) -> Snapshot:
        end = data.find(b"\n", data.find(b"\n") + 1) + 1
        try:
            head = decode_document(data[:end])
        except DamagedDocument:
            return SnapshotFiles.parse(self, data)
        files = {}
        for name, size_bytes, _ in head["files"]:
            files[name] = data[end : end + size_bytes]
            end += size_bytes
        return Snapshot(index=head["last_included_index"], term=head["last_included_term"], files=files)

    def is_whole(self: SnapshotReceiver, request: InstallSnapshotRequest, data: bytes) -> bool:
        return True

    replace(ledger.snapshots.files, parse=parse)
    replace(ledger.snapshot_receiver, is_whole=is_whole)


def log_removed_before_snapshot(ledger: DLedgerServer) -> None:
    """The beginning of the log is removed when a snapshot is taken, before the snapshot is durable."""

    async def _keep(self: SnapshotManager, snapshot: Snapshot, data: bytes) -> None:
        self._newest = snapshot
        await self._remove_log()
        await self.files.save(snapshot, data)

    replace(ledger.snapshots, _keep=_keep)


def snapshot_term_ignored(ledger: DLedgerServer) -> None:
    """The term of a snapshot's last entry is not compared with the log's."""

    def fits(self: SnapshotManager, snapshot: Snapshot) -> bool:
        return True

    def _confirm(self: StateMachineCaller) -> None:
        pass

    replace(ledger.snapshots, fits=fits)
    if ledger.machine is not None:
        replace(ledger.machine, _confirm=_confirm)


def install_goes_back(ledger: DLedgerServer) -> None:
    """Any snapshot that a leader sends is loaded at once, even one that ends before what is applied."""

    def is_needed(self: SnapshotManager, index: int) -> bool:
        return True

    async def install(self: SnapshotManager, data: bytes, index: int, term: int) -> None:
        await SnapshotManager.install(self, data, index, term)
        machine = ledger.machine
        if machine is not None:
            snapshot = self.files.parse(data)
            machine._machine.load(snapshot.files)
            machine._index, machine._term = snapshot.index, snapshot.term

    replace(ledger.snapshots, is_needed=is_needed, install=install)
