"""What a workload is: what clients do, how, and what must hold of the history."""

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
"""The kind of connection that a system of `harness.sdk` offers: a client whose methods say what it can do."""


@dataclass(frozen=True, slots=True)
class CheckContext:
    """Budgets for checking one history."""

    timeout_s: float
    memory_mb: int


class Connection(Protocol):
    """What connections of every kind have."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...


C = TypeVar("C", bound=Connection)


@dataclass(slots=True)
class ConnectionClient(Generic[C]):
    """A client that is opened and closed with its connection; a subclass says how it does an operation."""

    connection: C

    async def open(self) -> None:
        await self.connection.open()

    async def close(self) -> None:
        await self.connection.close()


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
        """A new checker to feed while the clients work; None when nothing can be decided before the end."""
        ...

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        """Every check of this workload by name. `history` holds the clients' events only."""
        ...


@runtime_checkable
class TellsWrites(Protocol):
    """A workload that knows which of its operations write."""

    def is_write(self, f: str, value: Any) -> bool:
        """Whether an operation, by its name and the value of any of its events, can change what the system holds."""
        ...


@runtime_checkable
class ByCapability(Protocol):
    """A workload that any client can be asked for that has certain methods; made with the settings it is given."""

    name: str
    description: str
    capabilities: Sequence[str]
    """The methods that a client must have."""
    settings: Sequence[Setting]
    """What `--set workload.NAME=VALUE` takes."""


@runtime_checkable
class AlsoByCapability(Protocol):
    """A workload over connections of another kind that has a form for clients of `harness.sdk` under the same name."""

    by_capability: type[ByCapability]


@runtime_checkable
class OffersClients(Protocol):
    """A system that says what its clients are, so that what they lack can be reported before the start."""

    client_class: type
