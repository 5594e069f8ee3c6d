"""Clock, disk and randomness of the harness and its clients."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from harness.seeded import Streams
from node.real_runtime import real_runtime
from node.runtime import Runtime

__all__ = ["OwnRuntime", "OwnStreams", "harness_runtime", "harness_streams"]


@runtime_checkable
class OwnRuntime(Protocol):
    """A cluster with its own clocks, disk and randomness, also for the harness and its clients."""

    def runtime(self) -> Runtime:
        """The harness's runtime."""
        ...


def harness_runtime(cluster: Any) -> Runtime:
    """The cluster's own runtime, as in simulation, else this machine's."""
    return cluster.runtime() if isinstance(cluster, OwnRuntime) else real_runtime()


@runtime_checkable
class OwnStreams(Protocol):
    """A cluster whose random streams, including those of the clients, can be reseeded."""

    @property
    def streams(self) -> Streams: ...


def harness_streams(cluster: Any, seed: int) -> Streams:
    """The cluster's own streams, which use the run's seed, else new ones."""
    return cluster.streams if isinstance(cluster, OwnStreams) else Streams(seed)
