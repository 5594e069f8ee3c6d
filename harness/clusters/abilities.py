"""What only some clusters can do, by name. A class of clusters has one of these by having its members.

What every cluster must be is `harness.clusters.base.Cluster`; which faults it can carry out it says by `missing`.
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
    """A class of clusters that bring their own event loop, and with it their own time, as simulation does."""

    @staticmethod
    def run_harness(main: Coroutine[Any, Any, Any], *, seed: int) -> Any:
        """Run the coroutine that makes and uses such a cluster; returns its result."""
        ...


@runtime_checkable
class Traced(Protocol):
    """A cluster whose network can be traced message by message (`--trace`)."""

    def trace_to(self, path: str, zero_s: Callable[[], float | None]) -> None:
        """Write the trace to a file until the cluster stops; `zero_s` gives the event loop's time (s) at which the
        load began, None before that. Raises OSError."""
        ...


@runtime_checkable
class NamesLinkMechanism(Protocol):
    """A class of clusters that can tell without their hosts what slows and breaks their links."""

    @staticmethod
    def link_mechanism() -> str:
        """What shapes links on this machine, in a few words."""
        ...


@runtime_checkable
class NamesMechanisms(Protocol):
    """A class of clusters that can tell by what it carries out faults."""

    @classmethod
    def mechanism_of(cls, interface: str, ability: str) -> str:
        """What an ability of a fault interface (nemesis.target.ABILITIES) is had by, in a few words."""
        ...


@runtime_checkable
class NamesHosts(Protocol):
    """A cluster whose hosts know each other by names as well."""

    def names_of(self, host: str) -> Sequence[str]:
        """The names by which programs on the other hosts find a host, as each of them is to reach it; none where there
        are none. Known from `start` on."""
        ...


@runtime_checkable
class NotesItsLinks(Protocol):
    """A cluster that may know, before the load, what will keep faults of links from being proven."""

    def notes_on_links(self) -> Sequence[str]:
        """A line for each thing that a user can mend. Known once the system has started."""
        ...


@runtime_checkable
class TakesOptions(Protocol):
    """A class of clusters that take options beside the number of nodes."""

    options: Sequence[str]
    """Their names, as on the command line and in the constructor."""


@runtime_checkable
class LiveLogs(Protocol):
    """A cluster, or a class of them, that says whether what programs log is on this machine while they run."""

    logs_are_live: bool


@runtime_checkable
class JudgesOptions(Protocol):
    """A class of clusters that can tell from its options alone whether such a cluster can be had."""

    @classmethod
    def require(cls, **options: Any) -> None:
        """Raises ClusterUnavailable where it cannot."""
        ...


@runtime_checkable
class Configured(Protocol):
    """A class of clusters whose options decide about what they can do."""

    @classmethod
    def configured(cls, *, extra_hosts: Sequence[str] = (), **options: Any) -> Any:
        """The class with these options. Raises ClusterUnavailable."""
        ...


@runtime_checkable
class BendsClocks(Protocol):
    """A cluster whose hosts' clocks can be made wrong."""

    clocks: Clocks | None


@runtime_checkable
class DamagesDisks(Protocol):
    """A cluster whose hosts' disks can be made to fail."""

    disks: Disks | None


@runtime_checkable
class LimitsResources(Protocol):
    """A cluster that limits what replicas may use of their hosts."""

    @property
    def resources(self) -> Resources | None:
        """None unless the run was prepared for them."""
        ...


@runtime_checkable
class KeepsAccount(Protocol):
    """A cluster that may keep an account of what its hosts' programs have not synced."""

    async def begin_account(self, host: str) -> None:
        """The data directory of a host was emptied, by nobody whose calls are seen: what was not synced before is none
        of its data any more. Its programs must be down. Raises ShellError."""
        ...


@runtime_checkable
class ServesNames(Protocol):
    """A cluster whose hosts' programs find one another by a name service that can be disturbed."""

    @property
    def names(self) -> Names | None:
        """None unless the run was prepared for it."""
        ...


class SendQueue(NamedTuple):
    """A socket of a program, as the kernel of its host has it: where it is connected to, and what its peer has not
    acknowledged yet, sent or not."""

    peer_address: str
    peer_port: int
    size_bytes: int


@runtime_checkable
class SeesStrays(Protocol):
    """A cluster that finds processes of its hosts which the programs' own agents have lost sight of."""

    async def strays(self, host: str) -> Sequence[ProcessMember]:
        """Those of a host that have not ended, and are none of its programs' as far as anybody else can tell."""
        ...

    async def adopt_strays(self, host: str) -> None:
        """Let those count as its programs' that are younger than these: they are killed, stopped and continued with
        them. Raises ShellError."""
        ...


@runtime_checkable
class SeesSendQueues(Protocol):
    """A cluster that sees what the programs on its hosts have sent and nobody has taken."""

    async def send_queues(self, host: str, peer_ports: Collection[int]) -> Sequence[SendQueue]:
        """The sockets of the programs of a host that are connected to clients of the harness which have these ports;
        those that its programs have closed and the kernel has not are left out. Raises ShellError."""
        ...


@runtime_checkable
class ShapesLinks(Protocol):
    """A cluster whose links can be made slow, lossy or narrow."""

    links: Links | None
