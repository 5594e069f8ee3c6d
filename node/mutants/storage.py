"""Mutants of what is on the disk: marks that claim too much, and the handling of damaged files."""

from __future__ import annotations

import asyncio
import dataclasses
from types import FunctionType
from typing import Any

from node.dledger import DLedgerServer
from node.dledger.files import Checkpoint, LedgerCorrupt, LedgerFiles
from node.dledger.member_state import MemberState
from node.dledger.recovery import LogScan, Recovered
from node.dledger.store import DLedgerStore
from node.dledger.writer import LogWriter
from node.mutants.parts import copy_of, replace

__all__ = ["checkpoint_ahead", "damage_cut_off", "durable_mark_stays", "vote_lost_with_its_file"]


def vote_lost_with_its_file(ledger: DLedgerServer) -> None:
    def load(self: MemberState) -> None:
        try:
            MemberState.load(self)
        except LedgerCorrupt:
            pass  # continue like a member that has never voted

    def check_against_log(self: MemberState, ledger_end_term: int) -> None:
        self.term = max(self.term, ledger_end_term)
        self.known_max_term = max(self.known_max_term, self.term)

    replace(ledger.member_state, load=load, check_against_log=check_against_log)


def durable_mark_stays(ledger: DLedgerServer) -> None:
    def cut(self: LogWriter, position: int, end_index: int, **options: Any) -> asyncio.Future[None]:
        marks = self.written_index, self.durable_index
        done = LogWriter.cut(self, position, end_index, **options)
        self.written_index, self.durable_index = marks
        return done

    replace(ledger.store.writer, cut=cut)


def checkpoint_ahead(ledger: DLedgerServer) -> None:
    async def _checkpoint(self: DLedgerStore) -> None:
        async with self._files.index_lock:
            last_index = self.ledger_end_index
            if last_index >= 0:
                await self._files.write_checkpoint(
                    committed_index=self.committed_index,
                    durable_index=last_index,
                    durable_pos=self._end_pos,
                    members=self.members.snapshot(last_index),
                )

    replace(ledger.store, _checkpoint=_checkpoint)


def damage_cut_off(ledger: DLedgerServer) -> None:
    """This member's recovery runs from a copy of its module for which the log ends wherever reading stops."""
    careless = copy_of("node.dledger.recovery")

    def _durable_position(files: LedgerFiles, checkpoint: Checkpoint, scan: LogScan) -> int:
        return scan.position

    careless.__dict__["_durable_position"] = _durable_position
    careless.__dict__["is_torn_write"] = lambda data, position: True

    async def recover(files: LedgerFiles) -> Recovered:
        found = await careless.__dict__["recover"](files)
        last_index = found.last.index if found.last is not None else -1
        return Recovered(
            **{field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
            | {"committed_index": min(found.committed_index, last_index)}
        )

    original = DLedgerStore.open
    names = {**original.__globals__, "recover": recover}
    replace(ledger.store, open=FunctionType(original.__code__, names, original.__name__, original.__defaults__))
