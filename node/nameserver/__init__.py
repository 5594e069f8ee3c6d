"""The name server: which brokers live, and which of them serves which topic."""

from __future__ import annotations

from node.nameserver.server import NameServer, NameServerOptions

__all__ = ["NameServer", "NameServerOptions"]
