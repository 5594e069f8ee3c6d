"""Mutants of classic HA: what a master takes for an acknowledgement, what a slave takes for a copy."""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any

from node.ha.client import HAClient
from node.ha.frames import Frame
from node.ha.ledger import HaLedger
from node.ha.replica import CopyLog, Replica
from node.ha.service import HAConnection, HAService
from node.mutants.parts import replace
from node.store.commit_log import CommitLog

__all__ = ["ack_before_slave_syncs", "ack_when_sent", "never_compares", "send_before_sync"]


def ack_when_sent(ledger: HaLedger) -> None:
    def _write(self: HAConnection, frame: Frame) -> None:
        HAConnection._write(self, frame)
        self.ack_position = max(self.ack_position, frame.position + len(frame.body))
        self._service.confirmed(self.ack_position)

    def opened(self: HAService, connection: HAConnection) -> bool:
        replace(connection, _write=_write)
        return HAService.opened(self, connection)

    if ledger.service is not None:
        replace(ledger.service, opened=opened)


class _HastyLog:
    """A log in which every byte counts as safe at once."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log

    @property
    def committed_position(self) -> int:
        return self._log.end_position

    written_position = committed_position

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


def send_before_sync(ledger: HaLedger) -> None:
    service = ledger.service
    if service is None:
        return

    def _add_batch(self: CommitLog, positions: Sequence[int], records: Sequence[bytes]) -> None:
        CommitLog._add_batch(self, positions, records)
        service.wake()

    replace(ledger.log, _add_batch=_add_batch)
    hasty: Any = _HastyLog(ledger.log)
    service.log = hasty


def ack_before_slave_syncs(ledger: HaLedger) -> None:
    if ledger.client is not None:
        hasty: Any = _HastyLog(ledger.log)
        ledger.client._log = hasty


class _Credulous(Replica):
    """Requests the position after its end and appends what arrives, as RocketMQ's slave does."""

    def __init__(self, log: CopyLog, *, compare_bytes: int, master_begin: int) -> None:
        super().__init__(log, compare_bytes=0, master_begin=master_begin)
        self.is_compared = True


def never_compares(ledger: HaLedger) -> None:
    original: Any = HAClient._follow
    names = {**original.__globals__, "Replica": _Credulous}
    follow = FunctionType(original.__code__, names, original.__name__, original.__defaults__)
    if ledger.client is not None:
        replace(ledger.client, _follow=follow)
