"""What a workload is: what clients do, how, and what must hold of the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from harness.generator import Generator
from harness.systems.base import CheckOutcome
from harness.worker import Client

__all__ = ["CheckContext", "OnlineChecker", "Workload"]


@dataclass(frozen=True, slots=True)
class CheckContext:
    """Budgets for checking one history."""

    timeout_s: float
    memory_mb: int


class OnlineChecker(Protocol):
    """Judges a history event by event while it is made. It may miss violations, but never reports one that is none."""

    def feed(self, event: Mapping[str, Any]) -> str | None:
        """Take the next event; words when it completes a violation."""
        ...


class Workload(Protocol):
    """One workload, made for one test (its constructor takes the settings by keyword)."""

    name: str
    description: str
    requires: str
    """The kind of connection it needs of the system."""
    keys: int
    """Independent keys; for queue-like workloads the queues that the system must have."""
    check_names: Sequence[str]
    """The checks that `check` makes."""

    def generator(self) -> Generator:
        """What the clients do while faults come and go; endless, the runner limits it."""
        ...

    def final_generator(self) -> Generator:
        """What they do once everything is healed, until it is exhausted: the final reads."""
        ...

    def client(self, connection: Any) -> Client:
        """A client over a connection of the required kind."""
        ...

    def online(self) -> OnlineChecker | None:
        """A new checker to feed while the clients work; None when nothing can be told before the end."""
        ...

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        """Every check of this workload by name. `history` holds the clients' events only."""
        ...
