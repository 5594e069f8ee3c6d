"""What a system under test is to the harness.

A system knows how to install and start itself on the hosts of a cluster, who its leader is, how clients talk
to it, and what its replicas must agree on when everything is over. It does not know how hosts are made or
which faults are in force. Workloads talk to it through a *connection* of a kind that the system offers; the
kind that queue-like workloads need is `QueueConnection`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.clusters.base import HostProcess

__all__ = ["CheckOutcome", "QueueConnection", "Setting", "System"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One option of a system under test, given as `--set name=value`."""

    name: str
    default: str
    description: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """What a check beside the history's found: valid is True, False or "unknown"."""

    valid: bool | str
    reason: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"valid": self.valid, "reason": self.reason, **self.details}


class QueueConnection(Protocol):
    """A client's view of a set of append-only queues, numbered by key from 0.

    Every method may raise an error with `is_definite` (see harness.worker); `node` on the connection is the
    host that answered last.
    """

    node: str | None

    async def open(self) -> None: ...

    async def append(self, key: int, value: Any) -> int:
        """Append a JSON value; returns its offset in the queue."""
        ...

    async def latest(self, key: int) -> Any:
        """The newest committed value of a queue, None when it is empty."""
        ...

    async def read(self, key: int, offset: int, max_messages: int) -> tuple[int, list[Any], int]:
        """Consecutive values from `offset` on; returns (first offset, values, tail of the queue)."""
        ...

    async def tail(self, key: int) -> int:
        """The number of committed values of a queue."""
        ...

    async def close(self) -> None: ...


class System(Protocol):
    """A system under test on the hosts of one cluster."""

    name: str
    description: str
    offers: frozenset[str]
    settings: Sequence[Setting]
    ports: Sequence[int]

    async def start(self) -> None:
        """Install and start everything and wait until it serves. Raises SystemUnderTestError."""
        ...

    async def stop(self) -> None:
        """End every process in order. Idempotent."""
        ...

    async def leaders(self) -> Sequence[str]:
        """Hosts that say they lead, newest term first."""
        ...

    def process(self, host: str) -> HostProcess | None:
        """The replica of a host as it was last started; None when it never was."""
        ...

    async def restart(self, host: str) -> None:
        """Start the replica of a host again, same program, same configuration; nothing while it runs.
        Returns once it is started, not once it serves."""
        ...

    async def status(self, host: str, *, timeout_s: float) -> Mapping[str, str] | None:
        """What the replica of a host says of itself; None when it does not answer in time. Its clocks are
        among it, as `wallClockMs` and `monotonicNs`, where the system tells them."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """What of the system is worth keeping with the results (JSON data)."""
        ...

    async def recover(self, *, timeout_s: float) -> None:
        """After all faults are healed: wait until the system serves again and its replicas have caught up,
        at most `timeout_s` seconds. Returns in any case; what is not equal by then shows in `check`."""
        ...

    def connection(self, kind: str, *, process: int, thread: int) -> Any:
        """A connection of an offered kind for one logical client, not yet open."""
        ...

    async def check(self, *, started_wall_ms: int) -> Mapping[str, CheckOutcome]:
        """What must hold of the system itself at the end (replica agreement, one leader per term); called
        after `stop`, when its files no longer change. `started_wall_ms` is the wall time at which the history's
        clock was 0."""
        ...
