"""Hosts that do not exist: enough of a cluster to ask a system for its commands before a run."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PlannedHosts"]


class PlannedHosts:
    """Three replica hosts and the system's extra hosts. Addresses and paths look like those of a cluster."""

    name = "planned"

    def __init__(self, extra_hosts: Sequence[str]) -> None:
        self.hosts = ("n1", "n2", "n3")
        self.extra_hosts = tuple(extra_hosts)

    def bind_address(self, host: str) -> str:
        """A different loopback address for each host."""
        return f"127.0.0.{1 + (*self.hosts, *self.extra_hosts).index(host)}"

    def address_from(self, source: str, destination: str, port: int) -> str:
        """The bind address with a port, from any source."""
        return f"{self.bind_address(destination)}:{port}"

    def data_dir(self, host: str) -> str:
        """A path that does not exist."""
        return f"/nonexistent/{host}/data"
