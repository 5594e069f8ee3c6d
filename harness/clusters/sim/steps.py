"""Records which steps of the replication protocol a simulated cluster takes, and the state of its members then."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence
from typing import NamedTuple

from harness.clusters.sim.cluster import SimCluster
from node.dledger import DLedgerServer

__all__ = ["MAX_STEPS", "Step", "StepObserver", "rank_of"]

MAX_STEPS = 4_000
"""Steps recorded per run at most, which takes a hundredth of a second; 15 s under many faults have some hundred."""

SIZES = (0, 1, 8, 64)

STEPS = frozenset(("voting", "voted", "elected", "promoted", "matched", "recovered"))
"""The nemesis.triggers.KINDS that are recorded: storing is too frequent. Truncations are recorded as well, by size."""


class Step(NamedTuple):
    """A step of the protocol. `at_s` is the loop's time."""

    at_s: float
    kind: str
    host: str
    role: str
    uncommitted: int
    """How many of SIZES are below the number of entries after the committed index."""
    is_unsynced: bool
    view: tuple[tuple[str, int, bool], ...]
    """For each member, sorted: role, terms behind the newest (2 means two or more), whether it runs."""


class StepObserver:
    """Records the steps of a cluster from its creation on, MAX_STEPS at most. Does not affect the run."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._now_s = asyncio.get_running_loop().time
        self._ledgers: dict[str, DLedgerServer] = {}
        self.steps: list[Step] = []
        tell = cluster.watch.tell
        tell.recovered.append(self._recovered)
        tell.occurrence.append(self._occurred)
        tell.role.append(lambda host, term, role: self._note(f"becomes {_word(role)}", host))
        tell.truncated.append(self._truncated)

    def _recovered(self, host: str, ledger: DLedgerServer) -> None:
        self._ledgers[host] = ledger

    def _occurred(self, kind: str, host: str) -> None:
        if kind in STEPS:
            self._note(kind, host)

    def _truncated(self, host: str, stays: int, before: int, _: object) -> None:
        self._note(f"truncates {rank_of(before - stays, SIZES)}", host)

    def _note(self, kind: str, host: str) -> None:
        ledger = self._ledgers.get(host)
        if ledger is None or len(self.steps) >= MAX_STEPS:
            return
        store = ledger.store
        newest = max(each.member_state.term for each in self._ledgers.values())
        self.steps.append(
            Step(
                at_s=self._now_s(),
                kind=kind,
                host=host,
                role=_word(ledger.member_state.role),
                uncommitted=rank_of(store.ledger_end_index - store.committed_index, SIZES),
                is_unsynced=store.durable_index < store.ledger_end_index,
                view=tuple(sorted(self._seen(name, each, newest) for name, each in self._ledgers.items())),
            )
        )

    def _seen(self, host: str, ledger: DLedgerServer, newest: int) -> tuple[str, int, bool]:
        process = self._cluster.machine(host).process
        state = ledger.member_state
        return _word(state.role), min(2, newest - state.term), process is not None and process.is_running


def _word(role: enum.Enum) -> str:
    return role.name.lower()


def rank_of(value: float, bounds: Sequence[float]) -> int:
    """How many of the bounds a value exceeds."""
    return sum(value > bound for bound in bounds)
