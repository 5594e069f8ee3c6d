"""Listening sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, NamedTuple, Protocol

from harness.clusters.sim.lane import Lane
from harness.clusters.sim.loop import SimLoop
from harness.clusters.sim.transport import SimTransport

__all__ = ["ListeningSocket", "ServerNetwork", "SimServer"]


class ServerNetwork(Protocol):
    """What listening sockets need from their network."""

    loop: SimLoop

    def unlisten(self, server: SimServer) -> None:
        """Free a server's port."""
        ...


class ListeningSocket(NamedTuple):
    """What `Server.sockets` holds: enough to learn the address."""

    address: tuple[str, int]

    def getsockname(self) -> tuple[str, int]:
        return self.address


class SimServer(asyncio.AbstractServer):
    """Accepts connections on one address of a host for one process. `wait_closed` waits for its connections too."""

    def __init__(
        self,
        network: ServerNetwork,
        lane: Lane,
        factory: Callable[[], asyncio.BaseProtocol],
        address: tuple[str, int],
        backlog: int,
    ) -> None:
        self._network = network
        self.lane = lane
        self.address = address
        self._factory = factory
        self._backlog = backlog
        self._context = copy_context()
        self._pending: dict[SimTransport, None] = {}
        """Connections established by the kernel and not yet accepted by the program."""
        self._active: dict[SimTransport, None] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._serving_forever: asyncio.Future[None] | None = None
        self._serving = False
        self._closed = False
        lane.__dict__.setdefault("sockets", {})[self] = None

    @property
    def sockets(self) -> tuple[ListeningSocket, ...]:
        return () if self._closed else (ListeningSocket(self.address),)

    @property
    def has_room(self) -> bool:
        """Whether the kernel accepts another connection into the backlog."""
        return self._serving and len(self._pending) < self._backlog

    def get_loop(self) -> Any:
        return self._network.loop

    def is_serving(self) -> bool:
        return self._serving

    async def start_serving(self) -> None:
        self.listen()

    def listen(self) -> None:
        """Accept connections from now on."""
        if not self._closed:
            self._serving = True

    async def serve_forever(self) -> None:
        if self._closed:
            raise RuntimeError("server is closed")
        self.listen()
        self._serving_forever = self._network.loop.create_future()
        try:
            await self._serving_forever
        finally:
            self._serving_forever = None
            self.close()

    def established(self, transport: SimTransport) -> None:
        """Queue a connection whose handshake is complete; the program accepts it when it next runs."""
        if self._closed:
            transport.close_socket()
            return
        self._pending[transport] = None
        self._network.loop.call_soon(self._accept, transport, context=self._context.copy())

    def _accept(self, transport: SimTransport) -> None:
        if self._closed or self._pending.pop(transport, self) is self or transport.is_gone:
            return
        self._active[transport] = None
        try:
            transport.start(self._factory())
        except Exception as error:
            self._network.loop.call_exception_handler(
                {"message": "Exception while accepting a connection", "exception": error, "transport": transport}
            )
            transport.abort()

    def detach(self, transport: SimTransport) -> None:
        """Forget a connection that is gone."""
        self._pending.pop(transport, None)
        self._active.pop(transport, None)
        self._wake_waiters()

    def close(self) -> None:
        """Stop listening; connections that were accepted stay."""
        if self._closed:
            return
        self._closed = True
        self.close_socket()
        if self._serving_forever is not None and not self._serving_forever.done():
            self._serving_forever.cancel()
        self._wake_waiters()

    def close_socket(self) -> None:
        """The kernel's part of closing, also when the process has died: connections not yet accepted are closed."""
        self._closed = True
        self._serving = False
        self._network.unlisten(self)
        self.lane.__dict__["sockets"].pop(self, None)
        for transport in list(self._pending):
            transport.close_socket()
        self._pending.clear()

    def vanish(self) -> None:
        """Disappear without a segment to anyone, because the host lost power."""
        self._closed = True
        self._network.unlisten(self)
        self.lane.__dict__["sockets"].pop(self, None)

    def close_clients(self) -> None:
        """Close every accepted connection (Python 3.13)."""
        for transport in list(self._active):
            transport.close()

    def abort_clients(self) -> None:
        """Abort every accepted connection (Python 3.13)."""
        for transport in list(self._active):
            transport.abort()

    async def wait_closed(self) -> None:
        """Return once the server is closed and its last connection is gone (as Python 3.12 does)."""
        if not self._closed or self._active:
            waiter = self._network.loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def _wake_waiters(self) -> None:
        if self._closed and not self._active:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
