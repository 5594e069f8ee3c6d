"""Optional abilities of clusters, as protocols. A cluster class has an ability if it has the protocol's members.

What every cluster must provide is `harness.clusters.base.Cluster`; its `missing` reports the faults it cannot inject.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from nemesis.target import Clocks, Disks, Links, Names, ProcessMember, Resources

__all__ = [
    "BendsClocks",
    "Configured",
    "DamagesDisks",
    "JudgesOptions",
    "KeepsAccount",
    "LimitsResources",
    "LiveLogs",
    "NamesHosts",
    "NamesLinkMechanism",
    "NamesMechanisms",
    "NotesItsLinks",
    "OwnWorld",
    "SeesSendQueues",
    "SeesStrays",
    "SendQueue",
    "ServesNames",
    "ShapesLinks",
    "TakesOptions",
    "Traced",
]


@runtime_checkable
class OwnWorld(Protocol):
    """A cluster class that brings its own event loop, and with it its own time, as the simulator does."""

    @staticmethod
    def run_harness(main: Coroutine[Any, Any, Any], *, seed: int) -> Any:
        """Run the coroutine that makes and uses such a cluster; returns its result."""
        ...


@runtime_checkable
class Traced(Protocol):
    """A cluster whose network can be traced message by message (`--trace`)."""

    def trace_to(self, path: str, zero_s: Callable[[], float | None]) -> None:
        """Write the trace to a file until the cluster stops; `zero_s` returns the event loop's time (s) at which the
        load began, or None before that. Raises OSError."""
        ...


@runtime_checkable
class NamesLinkMechanism(Protocol):
    """A cluster class that can name the mechanism of its link faults before any host exists."""

    @staticmethod
    def link_mechanism() -> str:
        """The mechanism that shapes links on this machine, in a few words."""
        ...


@runtime_checkable
class NamesMechanisms(Protocol):
    """A cluster class that can name the mechanisms by which it injects faults."""

    @classmethod
    def mechanism_of(cls, interface: str, ability: str) -> str:
        """The mechanism behind an ability of a fault interface (nemesis.target.ABILITIES), in a few words."""
        ...


@runtime_checkable
class NamesHosts(Protocol):
    """A cluster whose hosts may also know each other by name."""

    def names_of(self, host: str) -> Sequence[str]:
        """The names by which programs on the other hosts look up a host, each at the address it should use; empty if
        there are none. Known from `start` on."""
        ...


@runtime_checkable
class NotesItsLinks(Protocol):
    """A cluster that may know, before the load starts, what will keep link faults from being proven."""

    def notes_on_links(self) -> Sequence[str]:
        """A line for each problem that a user can fix. Known once the system has started."""
        ...


@runtime_checkable
class TakesOptions(Protocol):
    """A cluster class that takes options besides the number of nodes."""

    options: Sequence[str]
    """Their names, as on the command line and in the constructor."""


@runtime_checkable
class LiveLogs(Protocol):
    """A cluster or cluster class that declares whether programs' logs are on this machine while the programs run."""

    logs_are_live: bool


@runtime_checkable
class JudgesOptions(Protocol):
    """A cluster class that can tell from its options alone whether such a cluster is available."""

    @classmethod
    def require(cls, **options: Any) -> None:
        """Raises ClusterUnavailable if it is not."""
        ...


@runtime_checkable
class Configured(Protocol):
    """A cluster class whose options determine its abilities."""

    @classmethod
    def configured(cls, *, extra_hosts: Sequence[str] = (), **options: Any) -> Any:
        """The class with these options. Raises ClusterUnavailable."""
        ...


@runtime_checkable
class BendsClocks(Protocol):
    """A cluster whose hosts' clocks can be skewed."""

    clocks: Clocks | None


@runtime_checkable
class DamagesDisks(Protocol):
    """A cluster whose hosts' disks can be made to fail."""

    disks: Disks | None


@runtime_checkable
class LimitsResources(Protocol):
    """A cluster that can limit the host resources that replicas use."""

    @property
    def resources(self) -> Resources | None:
        """None unless the run was prepared for resource limits."""
        ...


@runtime_checkable
class KeepsAccount(Protocol):
    """A cluster that may keep an account of what its hosts' programs have written and not synced."""

    async def begin_account(self, host: str) -> None:
        """Start the account of a host afresh, because its data directory was emptied by something whose calls are not
        traced. Its programs must be down. Raises ShellError."""
        ...


@runtime_checkable
class ServesNames(Protocol):
    """A cluster whose hosts' programs find one another through a name service that can be disturbed."""

    @property
    def names(self) -> Names | None:
        """None unless the run was prepared for name faults."""
        ...


class SendQueue(NamedTuple):
    """A program's socket as its host's kernel reports it: the peer it is connected to, and how many bytes the peer has
    not acknowledged yet, whether they were sent or not."""

    peer_address: str
    peer_port: int
    size_bytes: int


@runtime_checkable
class SeesStrays(Protocol):
    """A cluster that finds stray processes: those that can no longer be traced to the program that started them."""

    async def strays(self, host: str) -> Sequence[ProcessMember]:
        """The strays of a host that have not ended."""
        ...

    async def adopt_strays(self, host: str) -> None:
        """Count the strays that are younger than the host's programs as theirs, so that they are killed, stopped and
        continued together. Raises ShellError."""
        ...


@runtime_checkable
class SeesSendQueues(Protocol):
    """A cluster that sees the send queues of the programs on its hosts."""

    async def send_queues(self, host: str, peer_ports: Collection[int]) -> Sequence[SendQueue]:
        """The sockets of a host's programs that are connected to clients of the harness on these ports, except those
        that a program has closed and the kernel has not. Raises ShellError."""
        ...


@runtime_checkable
class ShapesLinks(Protocol):
    """A cluster whose links can be made slow, lossy or narrow."""

    links: Links | None
