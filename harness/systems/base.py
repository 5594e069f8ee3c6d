"""What a system under test is to the harness.

A system knows how to install and start itself on the hosts of a cluster, who its leader is, how clients talk
to it, and what its replicas must agree on when everything is over. It does not know how hosts are made or
which faults are in force. Workloads talk to it through a *connection* of a kind that the system offers; the
kinds are `QueueConnection`, a replica's queues by offset, and `MessagingConnection`, producers and consumer groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from harness.clusters.base import HostProcess
from harness.errors import nearest
from harness.outcome import CheckOutcome
from nemesis.target import Operator

__all__ = [
    "CLIENTS_DECIDE",
    "AnswersAtLength",
    "CheckOutcome",
    "Fetched",
    "HasClientPrograms",
    "HasCodeFiles",
    "LimitsClusters",
    "LongRequest",
    "MessagingConnection",
    "NamesPrograms",
    "Operated",
    "QueueConnection",
    "RefusesFaults",
    "Setting",
    "StoresFiles",
    "System",
    "TellsTime",
    "ToldTime",
    "setting_problems",
]

CLIENTS_DECIDE = "clients_decide"
"""In the details of an unknown recovery: a system that then answers no client has not come back."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One option of a system under test, given as `--set name=value`."""

    name: str
    default: str
    description: str
    choices: tuple[str, ...] = ()
    bounds: tuple[int, int] | None = None
    """The least and the greatest value of a setting that is a whole number."""

    def problem(self, value: str) -> str | None:
        """What is wrong with a value, as one line; None when nothing is."""
        if self.choices and value not in self.choices:
            return f"{self.name} must be one of {', '.join(self.choices)}, not {value!r}{nearest(value, self.choices)}"
        if self.bounds is not None:
            least, greatest = self.bounds
            if not (value.isascii() and value.isdigit()) or not least <= int(value) <= greatest:
                return f"{self.name} must be a whole number from {least} to {greatest}, not {value!r}"
        return None


def setting_problems(known: Sequence[Setting], given: Mapping[str, str]) -> list[str]:
    """Everything that is wrong with settings as they were given, one line each."""
    by_name = {setting.name: setting for setting in known}
    problems = []
    for name, value in given.items():
        if name not in by_name:
            names = (
                f"{nearest(name, by_name)}; known: {', '.join(sorted(by_name))}" if by_name else "; it has no settings"
            )
            problems.append(f"unknown setting {name!r}{names}")
        elif (problem := by_name[name].problem(value)) is not None:
            problems.append(problem)
    return problems


class QueueConnection(Protocol):
    """A client's view of a set of append-only queues, numbered by key from 0.

    Every method may raise an error with `is_definite` (see harness.worker); `node` on the connection is the
    host that answered last.
    """

    node: str | None
    durability: str | None
    """What the system said of the last append, if it is less safe than it should be ("local")."""

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


class MessagingConnection(Protocol):
    """A client's view of a topic that a consumer group shares: messages go in, and come out to the group's members.

    Every connection is a producer and a member of the one group. What `receive` returned counts as dealt with at the
    next `receive`; a message may come out more than once. Errors as for `QueueConnection`.
    """

    node: str | None

    async def open(self) -> None:
        """Join the groups; returns before the first message can be received."""
        ...

    async def send(self, value: Any, *, delay_ms: int = 0) -> None:
        """Send a JSON value, to be delivered after `delay_ms` (one of the system's own delays, 0: at once)."""
        ...

    async def send_in_transaction(self, value: Any, *, commit: bool, tell: bool) -> None:
        """Send a JSON value in a transaction that is decided once it is stored. With `tell` the system hears the
        decision; without, it must ask, which any connection of the run answers. An error whose `is_decided` is False
        says that there was none, nor will be."""
        ...

    async def receive(self, max_messages: int) -> list[Any]:
        """Up to `max_messages` values for this member of the group; none when nothing comes for a moment."""
        ...

    async def lag(self) -> int:
        """Messages that the group, by its stored offsets, has still to deal with. Errors are always definite."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ToldTime:
    """What a replica says that its clocks show."""

    wall_ms: int
    monotonic_ns: int


@runtime_checkable
class TellsTime(Protocol):
    """A system whose replicas can be asked for the time: what they say is looked at beside what is read in their
    place."""

    async def tell_time(self, host: str, *, timeout_s: float) -> ToldTime | None:
        """The clocks of the replica of a host, by its own word; None when it does not answer in time."""
        ...


@dataclass(frozen=True, slots=True)
class LongRequest:
    """A request of which any number may be sent one after the other on one connection, each of which is answered with
    some kilobytes: the port that takes it, and its bytes."""

    port: int
    data: bytes


@runtime_checkable
class AnswersAtLength(Protocol):
    """A system with a request whose answer is long, for clients that do not read what they are answered."""

    has_long_request: bool
    """Whether there is one."""

    def long_request(self, host: str) -> LongRequest:
        """One for the replica of a host."""
        ...


@runtime_checkable
class NamesPrograms(Protocol):
    """A class of systems that can say before the start what its replicas run, so that `harness doctor` can tell what
    would have faults reach it."""

    @classmethod
    def program_commands(cls, settings: Mapping[str, str]) -> Mapping[str, Sequence[str]]:
        """Name -> the command of each program of a host, as on this machine; none that cannot be known yet. Raises
        OperatorError, SystemUnderTestError."""
        ...


class System(Protocol):
    """A system under test on the hosts of one cluster.

    What only some have are `TellsTime`, `Operated`, `StoresFiles`, `RefusesFaults`, `UsesCapabilities`
    and `Fetched` here, and those of harness.faults.triggers.
    """

    name: str
    description: str
    offers: frozenset[str]
    settings: Sequence[Setting]
    ports: Sequence[int]
    recovery_timeout_s: float
    """How long the system itself says that it may take, once every fault is gone, until it serves again and its
    replicas are equal. Longer is a violation (check `recovers`), so it is generous for slow machines."""
    extra_hosts: Sequence[str]
    """The hosts that it needs beside those of its replicas, for a directory of them, say: their names."""

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
        """What the replica of a host says of itself; None when it does not answer in time."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """What of the system is worth keeping with the results (JSON data)."""
        ...

    async def recover(self, *, timeout_s: float) -> CheckOutcome:
        """After all faults are healed: wait until the system serves again and its replicas have caught up,
        at most `timeout_s` seconds. Never raises for a system that does not.

        Returns the outcome of the check `recovers`: False where the system was reached and did not come back,
        "unknown" where that cannot be known. Its details have `missing`, the hosts that did not, and CLIENTS_DECIDE
        where it is unknown only because the system was asked in a way that may hang by itself."""
        ...

    def last_words(self, host: str) -> Sequence[str]:
        """The last lines that the programs of a host have logged, as far as they are on this machine by now."""
        ...

    def connection(self, kind: str, *, process: int, thread: int) -> Any:
        """A connection of an offered kind for one logical client, not yet open."""
        ...

    async def check(self, *, started_wall_ms: int) -> Mapping[str, CheckOutcome]:
        """What must hold of the system itself at the end (replica agreement, one leader per term); called
        after `stop`, when its files no longer change. `started_wall_ms` is the wall time at which the history's
        clock was 0."""
        ...


@runtime_checkable
class UsesCapabilities(Protocol):
    """A system, or a cluster, that must know beforehand what the run will use."""

    def prepare(self, capabilities: Collection[tuple[str, str]]) -> None:
        """Called before `start` with pairs of interface and ability (nemesis.target.ABILITIES)."""
        ...


@runtime_checkable
class JudgesOperations(Protocol):
    """A class of systems that can tell what an operator may ask of it."""

    @staticmethod
    def operation_missing(ability: str, settings: Mapping[str, str]) -> str | None:
        """Why it lacks an ability of an operator (nemesis.target.ABILITIES) with these settings, as one line; None when
        it has it."""
        ...


@runtime_checkable
class Operated(JudgesOperations, Protocol):
    """A system that can be operated: asked to give its lead away, to change its members, to promote a replica."""

    given_settings: Mapping[str, str]
    """Settings as they were given, without defaults; set when it is made."""
    operator: Operator
    """Who does it; set when it is made."""


@runtime_checkable
class LimitsClusters(Protocol):
    """A class of systems that not every cluster can run."""

    @classmethod
    def cannot_run_on(cls, cluster_class: Any) -> str | None:
        """Why a cluster (its class, or one that is made) cannot run it, as one line; None when it can."""
        ...


@runtime_checkable
class RefusesFaults(Protocol):
    """A system that cannot have every fault, whatever the cluster can do."""

    cannot: Mapping[str, str]
    """Nemesis, or nemesis=form -> why it makes no sense for this system."""
    tells_leader: bool
    """Whether it can say who leads; otherwise faults that strike the leader cannot be had."""


@runtime_checkable
class Fetched(Protocol):
    """A system that is made of packages which have to be fetched."""

    @classmethod
    def fetch(cls, say: Callable[[str], None], settings: Mapping[str, str]) -> None:
        """Have what these settings need on this machine, saying in words what is fetched and where to. Raises
        OperatorError."""
        ...


@runtime_checkable
class HasClientPrograms(Protocol):
    """A system whose clients may be programs of their own, on the harness's machine."""

    client_environment: Mapping[str, str]
    """What such a program has in its environment, so that it can be recognised as the run's."""


@runtime_checkable
class HasCodeFiles(Protocol):
    """A system whose code is somebody else's, and may wait without `await`."""

    @property
    def code_files(self) -> Collection[str]:
        """The files of its code and of its clients', as code objects name them."""
        ...

    @property
    def set_up_timeout_s(self) -> float:
        """How long one of its methods may take while it is started or stopped."""
        ...


@runtime_checkable
class StoresFiles(Protocol):
    """A system whose stored files may be damaged at rest."""

    @staticmethod
    def stored_files(settings: Mapping[str, str]) -> Mapping[str, str]:
        """Role (log, vote, checkpoint) -> pattern for glob below a host's data directory, with these settings."""
        ...
