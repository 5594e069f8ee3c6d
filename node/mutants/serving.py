"""Mutants of the broker above the log: promotion, queue offsets, dispatch."""

from __future__ import annotations

from typing import Any

from node.broker.controller import BrokerController
from node.broker.dispatcher import Dispatcher
from node.broker.message_store import MessageStore
from node.broker.pop import PopProcessor, _Lot
from node.broker.pop_checkpoints import OpenCheckpoints, QueueOfGroup
from node.broker.role import RoleChangeHandler
from node.broker.timers import OpenTimers
from node.mutants.parts import replace
from node.store.queue_store import DispatchMark, QueueStore

__all__ = [
    "duplicate_apply",
    "early_promotion",
    "in_hand_forgotten",
    "pop_without_checkpoint",
    "queue_offset_reuse",
    "timers_forgotten",
]

REPEATED_ENTRIES = 20
"""Entries that a restart dispatches once more."""


def early_promotion(broker: BrokerController) -> None:
    async def _change_to_master(self: RoleChangeHandler, term: int) -> None:
        self._store.promote(term, last_store_timestamp_ms=self._dispatcher.last_store_timestamp_ms)
        self._on_changed()

    replace(broker._roles, _change_to_master=_change_to_master)


def queue_offset_reuse(broker: BrokerController) -> None:
    def promote(self: MessageStore, term: int, *, last_store_timestamp_ms: int) -> None:
        former = dict(self._next_offsets)
        MessageStore.promote(self, term, last_store_timestamp_ms=last_store_timestamp_ms)
        self._next_offsets |= former

    replace(broker.store, promote=promote)


def duplicate_apply(broker: BrokerController) -> None:
    def append(self: QueueStore, topic: str, queue_id: int, queue_offset: int, **fields: Any) -> bool:
        queue = self.find(topic, queue_id)
        return QueueStore.append(self, topic, queue_id, queue.max_offset if queue is not None else 0, **fields)

    async def start(self: Dispatcher) -> None:
        await Dispatcher.start(self)
        index = max(self._mark.index - REPEATED_ENTRIES, -1)
        self._mark = DispatchMark(index=index, term=self._mark.term, store_timestamp_ms=self._mark.store_timestamp_ms)

    replace(broker.queues, append=append)
    replace(broker.dispatcher, start=start)


def pop_without_checkpoint(broker: BrokerController) -> None:
    def _write(self: PopProcessor, request: Any, key: QueueOfGroup, lot: _Lot, *rest: Any) -> tuple[_Lot, int]:
        self.commit(key, lot.offsets[-1] + 1)
        return lot, -1

    replace(broker._pops, _write=_write)


def in_hand_forgotten(broker: BrokerController) -> None:
    def snapshot(self: OpenCheckpoints) -> Any:
        return OpenCheckpoints.snapshot(self) | {"open": []}

    replace(broker.checkpoints, snapshot=snapshot)


def timers_forgotten(broker: BrokerController) -> None:
    def snapshot(self: OpenTimers) -> Any:
        return []

    replace(broker.open_timers, snapshot=snapshot)
