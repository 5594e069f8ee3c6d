"""The interface between the harness and a system under test.

A system knows how to install and start itself on the hosts of a cluster, who its leader is, how clients talk
to it, and what its replicas must agree on at the end of a run. It does not know how hosts are made or which faults are
in force. Workloads talk to it through a *connection* of a kind that the system offers; the kinds are `QueueConnection`,
a replica's queues by offset, and `MessagingConnection`, producers and consumer groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from harness.clusters.base import HostProcess
from harness.errors import nearest
from harness.metrics.expression import Metric, Page
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
    "MeetsSomeFaults",
    "MessagingConnection",
    "NamesPrograms",
    "Operated",
    "QueueConnection",
    "RefusesFaults",
    "ServesMetrics",
    "Setting",
    "StoresFiles",
    "System",
    "TellsTime",
    "ToldTime",
    "setting_problems",
]

CLIENTS_DECIDE = "clients_decide"
"""Key in the details of an unknown `recovers` outcome: if the system then answers no client, it has not recovered."""

MAX_KNOWN_CHARS = 500
"""Limit of the settings with their descriptions in the message about an unknown one; above it, only their names."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One option of a system under test, given as `--set name=value`."""

    name: str
    default: str
    description: str
    choices: tuple[str, ...] = ()
    bounds: tuple[int, int] | None = None
    """Minimum and maximum of an integer setting, both inclusive."""

    def problem(self, value: str) -> str | None:
        """Why a value is invalid, as one line; None if it is valid."""
        if self.choices and value not in self.choices:
            return f"{self.name} must be one of {', '.join(self.choices)}, not {value!r}{nearest(value, self.choices)}"
        if self.bounds is not None:
            least, greatest = self.bounds
            if not (value.isascii() and value.isdigit()) or not least <= int(value) <= greatest:
                return f"{self.name} must be a whole number from {least} to {greatest}, not {value!r}"
        return None


def setting_problems(known: Sequence[Setting], given: Mapping[str, str]) -> list[str]:
    """Every problem with the settings as they were given, one line each."""
    by_name = {setting.name: setting for setting in known}
    problems = []
    for name, value in given.items():
        if name not in by_name:
            names = f"{nearest(name, by_name)}; known: {_names_of(known)}" if by_name else "; it has no settings"
            problems.append(f"unknown setting {name!r}{names}")
        elif (problem := by_name[name].problem(value)) is not None:
            problems.append(problem)
    return problems


def _names_of(settings: Sequence[Setting]) -> str:
    """The names of settings, each with its description unless the text would be too long."""
    ordered = sorted(settings, key=lambda setting: setting.name)
    described = ", ".join(f"{each.name} ({each.description})" if each.description else each.name for each in ordered)
    return described if len(described) <= MAX_KNOWN_CHARS else ", ".join(each.name for each in ordered)


class QueueConnection(Protocol):
    """A client's view of a set of append-only queues, numbered by key from 0.

    Every method may raise an error with `is_definite` (see harness.worker); `node` on the connection is the host that
    the last request went to.
    """

    node: str | None
    durability: str | None
    """"local" if the last append was acknowledged with less durability than configured, else None."""

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

    Every connection is a producer and a member of the one group. What `receive` returned counts as consumed at the next
    `receive`; a message may be delivered more than once. Errors as for `QueueConnection`.
    """

    node: str | None

    async def open(self) -> None:
        """Join the groups; may return before the first message can be received."""
        ...

    async def send(self, value: Any, *, delay_ms: int = 0) -> None:
        """Send a JSON value, to be delivered after `delay_ms` (0: immediately)."""
        ...

    async def send_in_transaction(self, value: Any, *, commit: bool, tell: bool) -> None:
        """Send a JSON value in a transaction that is decided once the message is stored. With `tell` the client reports
        the decision; without, the system must ask for it, and any connection of the run answers. An error whose
        `is_decided` is False means that no decision was made and none will be."""
        ...

    async def receive(self, max_messages: int) -> list[Any]:
        """Up to `max_messages` values for this member of the group; empty if nothing arrives within a moment."""
        ...

    async def lag(self) -> int:
        """Number of messages that the group has not consumed yet, by its stored offsets. Errors are always definite."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ToldTime:
    """The clock readings that a replica reports."""

    wall_ms: int
    monotonic_ns: int


@runtime_checkable
class TellsTime(Protocol):
    """A system whose replicas report their own clocks, to be compared with what is measured on their hosts."""

    async def tell_time(self, host: str, *, timeout_s: float) -> ToldTime | None:
        """The clock readings that the replica of a host reports; None if it does not answer in time."""
        ...


@dataclass(frozen=True, slots=True)
class LongRequest:
    """A request that may be sent any number of times on one connection, each answered with some kilobytes: the port it
    is sent to, and its bytes."""

    port: int
    data: bytes


@runtime_checkable
class AnswersAtLength(Protocol):
    """A system with a request that has a long answer, for the fault of clients that do not read their answers."""

    has_long_request: bool
    """Whether there is such a request."""

    def long_request(self, host: str) -> LongRequest:
        """The request for the replica of a host."""
        ...


@runtime_checkable
class NamesPrograms(Protocol):
    """A class of systems that knows before the start which programs its replicas run, so that `harness doctor` can tell
    whether faults would reach them."""

    @classmethod
    def program_commands(cls, settings: Mapping[str, str]) -> Mapping[str, Sequence[str]]:
        """Name -> command line of each program of a host, as on this machine; empty if not known yet. Raises
        OperatorError, SystemUnderTestError."""
        ...


class System(Protocol):
    """A system under test on the hosts of one cluster.

    Optional interfaces are `TellsTime`, `Operated`, `StoresFiles`, `RefusesFaults`, `UsesCapabilities` and `Fetched`
    here, and those of harness.faults.triggers.
    """

    name: str
    description: str
    offers: frozenset[str]
    settings: Sequence[Setting]
    ports: Sequence[int]
    recovery_timeout_s: float
    """How long the system may take, once every fault is healed, until it serves again and its replicas are equal.
    Taking longer is a violation (check `recovers`), so the limit is generous for slow machines."""
    extra_hosts: Sequence[str]
    """Names of the hosts that it needs besides those of its replicas, for a name server for example."""

    async def start(self) -> None:
        """Install and start everything and wait until it serves. Raises SystemUnderTestError."""
        ...

    async def stop(self) -> None:
        """Shut down every process gracefully. Idempotent."""
        ...

    async def leaders(self) -> Sequence[str]:
        """Hosts whose replica reports that it leads, newest term first."""
        ...

    def process(self, host: str) -> HostProcess | None:
        """The most recently started process of a host's replica; None if it was never started."""
        ...

    async def restart(self, host: str) -> None:
        """Start the replica of a host again, same program, same configuration; does nothing while it runs. Returns once
        it is started, not once it serves."""
        ...

    async def status(self, host: str, *, timeout_s: float) -> Mapping[str, str] | None:
        """The status that the replica of a host reports; None if it does not answer in time."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """What to store about the system with the results (JSON data)."""
        ...

    async def recover(self, *, timeout_s: float) -> CheckOutcome:
        """After all faults are healed: wait until the system serves again and its replicas have caught up,
        at most `timeout_s` seconds. Never raises for a system that does not recover.

        Returns the outcome of the check `recovers`: False if the system was reached and did not come back, "unknown" if
        that cannot be determined. Its details have `missing`, the hosts that did not, and CLIENTS_DECIDE if it is
        unknown only because the status query itself may hang."""
        ...

    def last_words(self, host: str) -> Sequence[str]:
        """The last lines that the programs of a host have logged, as far as the logs are on this machine."""
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
    """A system, or a cluster, that must know before the start which capabilities the run will use."""

    def prepare(self, capabilities: Collection[tuple[str, str]]) -> None:
        """Called before `start` with pairs of interface and ability (nemesis.target.ABILITIES)."""
        ...


@runtime_checkable
class JudgesOperations(Protocol):
    """A class of systems that knows which operator actions it supports."""

    @staticmethod
    def operation_missing(ability: str, settings: Mapping[str, str]) -> str | None:
        """Why it lacks an operator's ability (nemesis.target.ABILITIES) with these settings, in one line, or None."""
        ...


@runtime_checkable
class Operated(JudgesOperations, Protocol):
    """A system that supports operator actions: transferring leadership, changing members, promoting a replica."""

    given_settings: Mapping[str, str]
    """Settings as given, without defaults; set by the constructor."""
    operator: Operator
    """Performs the actions; set by the constructor."""


@runtime_checkable
class LimitsClusters(Protocol):
    """A class of systems that does not run on every cluster."""

    @classmethod
    def cannot_run_on(cls, cluster_class: Any) -> str | None:
        """Why a cluster (the class or an instance) cannot run it, as one line; None if it can."""
        ...


@runtime_checkable
class RefusesFaults(Protocol):
    """A system for which some faults make no sense, whatever the cluster supports."""

    cannot: Mapping[str, str]
    """Nemesis, nemesis=form, nemesis=@target or nemesis=form@target -> why it makes no sense for this system."""
    tells_leader: bool
    """Whether it can tell who leads; otherwise faults that strike the leader are unavailable."""


@runtime_checkable
class MeetsSomeFaults(Protocol):
    """A system that never meets some faults, though they can be injected: a run of only these ends unknown."""

    never_meets: Mapping[str, str]
    """Nemesis -> why its faults never affect the system."""


@runtime_checkable
class Fetched(Protocol):
    """A system whose packages have to be fetched."""

    @classmethod
    def fetch(cls, say: Callable[[str], None], settings: Mapping[str, str]) -> None:
        """Fetch what these settings need to this machine; `say` gets a line for each package and its destination.
        Raises OperatorError."""
        ...


@runtime_checkable
class HasClientPrograms(Protocol):
    """A system whose clients may be separate programs on the harness's machine."""

    client_environment: Mapping[str, str]
    """Environment variables of such a program, by which it is recognised as belonging to the run."""


@runtime_checkable
class HasCodeFiles(Protocol):
    """A system with third-party code, which may block without `await`."""

    @property
    def code_files(self) -> Collection[str]:
        """The source files of the system and of its clients, as code objects name them."""
        ...

    @property
    def set_up_timeout_s(self) -> float:
        """How long a single method may take while the system is started or stopped."""
        ...


@runtime_checkable
class ServesMetrics(Protocol):
    """A system whose hosts have pages of metrics for Prometheus."""

    metric_pages: Sequence[Page]
    metrics: Sequence[Metric]
    """The metrics that are read unless the operator wants none."""

    def metrics_url(self, host: str, port: str) -> str:
        """ "http://ip:port" at which clients reach a port, by its name, of a host."""
        ...


@runtime_checkable
class StoresFiles(Protocol):
    """A system with files that may be corrupted at rest."""

    @staticmethod
    def stored_files(settings: Mapping[str, str]) -> Mapping[str, str]:
        """Role (log, vote, checkpoint) -> glob pattern below a host's data directory, with these settings."""
        ...
