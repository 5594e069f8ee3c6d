"""The listening side: accepts connections and hands their requests to processors."""

from __future__ import annotations

import asyncio
import ssl

from node.remoting.connection import Connection, Endpoint
from node.remoting.limits import ServerLimits
from node.remoting.tls_handshake import TlsHandshake

__all__ = ["RemotingServer"]


class RemotingServer(Endpoint):
    """Serves the remoting protocol on one address, inside TLS when given a context. `name` appears in its log lines.

    `register(code, processor)` before or after `start`. A processor is called with the request and its
    connection, inside the loop, and returns the reply, None for no reply (or a later one by
    `connection.send`), or an awaitable of either. An exception becomes a reply with SYSTEM_ERROR, a
    RequestError one with its own code.
    """

    limits: ServerLimits
    stops_reading_when_unread = True

    def __init__(
        self,
        host: str,
        port: int,
        *,
        limits: ServerLimits | None = None,
        name: str = "remoting",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._server_limits = limits or ServerLimits()
        super().__init__(self._server_limits, name)
        self._host = host
        self._port = port
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._connections: dict[Connection | TlsHandshake, None] = {}
        self._silent: dict[Connection | TlsHandshake, None] = {}
        self._drained: asyncio.Future[None] | None = None
        self._stopping = False

    @property
    def port(self) -> int:
        """The port listened on; the one that the system chose when 0 was asked for and `start` has run."""
        return self._port

    @property
    def connection_count(self) -> int:
        """Connections open now."""
        return len(self._connections)

    async def start(self) -> None:
        """Listen. Raises OSError when the address is in use or not this machine's."""
        loop = asyncio.get_running_loop()
        self._stopping = False
        self._server = await loop.create_server(
            self._accepted, self._host, self._port, backlog=self._server_limits.accept_backlog
        )
        if self._port == 0:
            self._port = int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stop listening, cancel what is being worked on, close every connection. Idempotent."""
        server, self._server = self._server, None
        self._stopping = True
        if server is not None:
            server.close()
        await self.cancel_tasks()
        if self._connections:
            self._drained = asyncio.get_running_loop().create_future()
            for connection in list(self._connections):
                connection.close()
            await self._drained
            self._drained = None
        if server is not None:
            await server.wait_closed()

    def _accepted(self) -> asyncio.Protocol:
        if self._tls is None:
            return Connection(self)
        return TlsHandshake(
            self._tls,
            self._server_limits,
            on_opened=self._take,
            on_done=self._encrypted,
            on_ended=self._forget,
        )

    def _encrypted(self, handshake: TlsHandshake) -> Connection:
        for known in (self._connections, self._silent):  # makes room for the connection that replaces it
            known.pop(handshake, None)
        return Connection(self)

    def connection_opened(self, connection: Connection) -> None:
        self._take(connection)

    def _take(self, connection: Connection | TlsHandshake) -> None:
        if self._stopping or (len(self._connections) >= self._server_limits.max_connections and not self._evict()):
            connection.abort("no room for another connection")
            if not self._stopping:
                self.complaints.warn(
                    "full", f"refusing {connection.remote_address}: {len(self._connections)} connections are open"
                )
            return
        self._connections[connection] = None
        self._silent[connection] = None

    def first_frame(self, connection: Connection) -> None:
        self._silent.pop(connection, None)

    def connection_closed(self, connection: Connection) -> None:
        super().connection_closed(connection)
        self._forget(connection)

    def _forget(self, connection: Connection | TlsHandshake) -> None:
        self._silent.pop(connection, None)
        self._connections.pop(connection, None)
        if self._drained is not None and not self._connections and not self._drained.done():
            self._drained.set_result(None)

    def _evict(self) -> bool:
        """Make room by closing the oldest connection that never sent a frame; False if there is none."""
        victim = next(iter(self._silent), None)
        if victim is None:
            return False
        self._silent.pop(victim)
        self._connections.pop(victim, None)
        self.complaints.warn(
            "full", f"closing {victim.remote_address}, which never sent a request, to accept another connection"
        )
        victim.abort("made room for another connection")
        return True
