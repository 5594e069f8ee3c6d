"""What only some clusters can do, by name. A class of clusters has one of these by having its members.

What every cluster must be is `harness.clusters.base.Cluster`; which faults it can carry out it says by `missing`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, runtime_checkable

__all__ = ["LiveLogs", "NamesLinkMechanism", "NamesMechanisms", "OwnWorld", "TakesOptions", "Traced"]


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
class TakesOptions(Protocol):
    """A class of clusters that take options beside the number of nodes."""

    options: Sequence[str]
    """Their names, as on the command line and in the constructor."""


@runtime_checkable
class LiveLogs(Protocol):
    """A cluster, or a class of them, that says whether what programs log is on this machine while they run."""

    logs_are_live: bool
