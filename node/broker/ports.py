"""The ports that clients use: the broker's own, and the fast one, two below it, which takes no pulls.

R's clients send over the fast port when told to (the VIP channel), so that a crowd of consumers cannot hold up senders.
Here one loop serves both, so it is the same service under another number; it exists for those clients.
"""

from __future__ import annotations

from collections.abc import Callable

from node.config import BrokerConfig, split_address
from node.listening import listening
from node.remoting import (
    BatchProcessor,
    Command,
    Connection,
    Processor,
    RemotingServer,
    RequestCode,
    ServerLimits,
    VariableFields,
)

__all__ = ["FAST_PORT_BELOW", "PULL_CODES", "Ports"]

FAST_PORT_BELOW = 2
"""How far below the broker's port the fast one is (R: fastListenPort)."""
PULL_CODES = (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
"""Codes that the fast port does not take."""


class Ports:
    """One or two servers with the same processors. `guard` checks every request first."""

    def __init__(self, config: BrokerConfig, *, guard: Callable[[Command, Connection], None] | None) -> None:
        host, port = split_address(config.listen)
        wanted = [(port, "broker")]
        if config.fast_port:
            wanted.append((port - FAST_PORT_BELOW if port else 0, "broker fast port"))
        limits = ServerLimits(max_connections=config.limits.max_connections)
        tls = config.tls.server_context() if config.tls else None
        self._servers = [RemotingServer(host, port, limits=limits, name=name, tls=tls) for port, name in wanted]
        if guard is not None:
            for server in self._servers:
                server.register_guard(guard)

    @property
    def port(self) -> int:
        """The broker's port; known once started."""
        return self._servers[0].port

    @property
    def fast_port(self) -> int | None:
        """The fast port; None without one."""
        return self._servers[1].port if len(self._servers) > 1 else None

    @property
    def connection_count(self) -> int:
        """Connections open now."""
        return sum(server.connection_count for server in self._servers)

    def register(self, code: int, processor: Processor) -> None:
        """Answer requests of this code with `processor`."""
        for server in self._servers[: 1 if code in PULL_CODES else None]:
            server.register(code, processor)

    def register_template(self, code: int, variable: VariableFields, batch_processor: BatchProcessor) -> None:
        """Read requests of this code by a template, and offer those that come together to `batch_processor`."""
        for server in self._servers:
            server.register_template(code, variable, batch_processor)

    def register_default(self, processor: Processor) -> None:
        """Answer requests of every other code with `processor`."""
        for server in self._servers:
            server.register_default(processor)

    async def start(self) -> None:
        """Listen. Raises OSError if an address is in use or not this machine's."""
        for server, key in zip(self._servers, ("listen", "fast_port"), strict=False):
            with listening(key):
                await server.start()

    async def stop(self) -> None:
        """Stop listening and close every connection. Idempotent."""
        for server in self._servers:
            await server.stop()
