"""The interface of a workload: what clients do, how they do it, and what must hold of the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from harness.generator import Generator
from harness.systems.base import CheckOutcome, Setting
from harness.worker import Client

__all__ = [
    "CLIENT",
    "AlsoByCapability",
    "ByCapability",
    "CheckContext",
    "ConnectionClient",
    "OffersClients",
    "OnlineChecker",
    "TellsWrites",
    "Workload",
]

CLIENT = "client"
"""The kind of connection that a system of `harness.sdk` offers: a client whose methods are its capabilities."""


@dataclass(frozen=True, slots=True)
class CheckContext:
    """Budgets for checking one history."""

    timeout_s: float
    memory_mb: int


class Connection(Protocol):
    """The methods of every kind of connection."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...


C = TypeVar("C", bound=Connection)


@dataclass(slots=True)
class ConnectionClient(Generic[C]):
    """A client that is opened and closed with its connection; a subclass performs the operations."""

    connection: C

    async def open(self) -> None:
        await self.connection.open()

    async def close(self) -> None:
        await self.connection.close()


class OnlineChecker(Protocol):
    """Checks a history event by event while it is recorded. It may miss violations, but has no false positives."""

    def feed(self, event: Mapping[str, Any]) -> str | None:
        """Take the next event; returns a message if it completes a violation, else None."""
        ...


class Workload(Protocol):
    """A workload, created for one test (its constructor takes the settings by keyword)."""

    name: str
    description: str
    requires: str
    """The kind of connection that it needs from the system."""
    keys: int
    """Independent keys; for queue-like workloads the queues that the system must have."""
    check_names: Sequence[str]
    """The names of the checks that `check` may return."""

    def generator(self) -> Generator:
        """The clients' operations during the fault phase; endless, as the runner limits it."""
        ...

    def final_generator(self) -> Generator:
        """The final reads after everything is healed, until the generator is exhausted."""
        ...

    def client(self, connection: Any) -> Client:
        """A client over a connection of the required kind."""
        ...

    def online(self) -> OnlineChecker | None:
        """A new online checker for the running history; None if nothing can be decided before the end."""
        ...

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        """Outcome of every check of this workload, by name. `history` holds the clients' events only."""
        ...


@runtime_checkable
class TellsWrites(Protocol):
    """A workload that knows which of its operations write."""

    def is_write(self, f: str, value: Any) -> bool:
        """Whether an operation, by its name and the value of any of its events, can change what the system holds."""
        ...


@runtime_checkable
class ByCapability(Protocol):
    """A workload for any client that has certain methods; created with the given settings."""

    name: str
    description: str
    capabilities: Sequence[str]
    """The methods that a client must have."""
    settings: Sequence[Setting]
    """The settings that `--set workload.NAME=VALUE` accepts."""


@runtime_checkable
class AlsoByCapability(Protocol):
    """A workload over another kind of connection that also has a variant, under the same name, for clients of
    `harness.sdk`."""

    by_capability: type[ByCapability]


@runtime_checkable
class OffersClients(Protocol):
    """A system that declares its client class, so that missing methods can be reported before the start."""

    client_class: type
