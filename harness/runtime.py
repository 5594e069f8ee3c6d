"""Clock, disk and randomness of the harness and its clients."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from harness.seeded import Streams
from node.real_runtime import real_runtime
from node.runtime import Runtime

__all__ = ["OwnRuntime", "OwnStreams", "harness_runtime", "harness_streams"]


@runtime_checkable
class OwnRuntime(Protocol):
    """A cluster with clocks, a disk and randomness of its own, for the harness and its clients as well."""

    def runtime(self) -> Runtime:
        """Those of the harness."""
        ...


def harness_runtime(cluster: Any) -> Runtime:
    """This machine's, unless the cluster brings a world of its own, as simulation does."""
    return cluster.runtime() if isinstance(cluster, OwnRuntime) else real_runtime()


@runtime_checkable
class OwnStreams(Protocol):
    """A cluster whose streams of random numbers can be seeded anew; those of the clients are among them then."""

    @property
    def streams(self) -> Streams: ...


def harness_streams(cluster: Any, seed: int) -> Streams:
    """The cluster's where it has its own, which are of the run's seed; else new ones."""
    return cluster.streams if isinstance(cluster, OwnStreams) else Streams(seed)
