"""Limits the number of connections, and makes further clients wait.

asyncio's own server accepts every connection, so that excess ones must be closed again, even with a request in flight.
Here they wait in the kernel's queue instead, and are answered a little later.
"""

from __future__ import annotations

__all__ = ["BACKLOG", "MAX_CONNECTIONS", "Acceptor", "RoomyServer"]

import asyncio
import socket
from typing import Any

import uvicorn

from harness.serve.connections import PatientProtocol

MAX_CONNECTIONS = 128
"""Concurrent connections that the application answers, live views included. uvicorn's limit, in which a connection
refused with 503 counts too."""

SPARE_CONNECTIONS = 8
"""Connections beyond MAX_CONNECTIONS, which are refused with 503 while all others are busy."""

FULL_TIMEOUT_S = 1.0
"""How long an idle connection keeps its slot while others wait for one, and how long a client waits for a busy slot
before it is refused. A client descheduled between connecting and sending its request takes some tenths of it."""

POLL_INTERVAL_S = 0.02
"""Interval at which a full server checks for a free slot; nothing notifies it."""

BACKLOG = 512
"""Connections that wait in the kernel's queue. For more, the kernel drops the SYN, which is retransmitted after a
second."""


class RoomyServer(uvicorn.Server):  # type: ignore[misc]
    """uvicorn's server with listeners that accept a connection only if there is a free slot."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting connections."""
        await super().startup(sockets=[])
        self.servers += [Acceptor(listener, self) for listener in sockets or ()]


class Acceptor:
    """A listener that accepts only while slots are free. Has the two methods of asyncio's servers that uvicorn uses."""

    def __init__(self, listener: socket.socket, server: uvicorn.Server) -> None:
        self._listener = listener
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self._full_polls = 0  # since there was last a free slot
        self._is_closed = False
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._listen()

    def close(self) -> None:
        """Stop accepting connections. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listener)
            if self._timer is not None:
                self._timer.cancel()

    async def wait_closed(self) -> None:
        """Wait for the connections that are being accepted."""
        if self._opening:
            await asyncio.wait(self._opening)

    def _listen(self) -> None:
        self._timer = None
        self._loop.add_reader(self._listener, self._accept_one)

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener)
        self._timer = self._loop.call_later(POLL_INTERVAL_S, self._listen)

    def _accept_one(self) -> None:
        """Accept one connection if there is a free slot; only one, so that it is read before more are accepted."""
        if not self._has_room():
            self._pause()
            return
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it was closed meanwhile
            return
        except OSError:  # out of descriptors or memory
            self._pause()
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._open(connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        transport, _ = await self._loop.connect_accepted_socket(self._make_protocol, connection)
        if self._is_closed:  # the server closed its connections before this one was added
            transport.abort()

    def _make_protocol(self) -> PatientProtocol:
        server = self._server
        return PatientProtocol(server.config, server.server_state, server.lifespan.state)

    def _has_room(self) -> bool:
        """Whether there is a free slot; if necessary, frees that of the connection that has been idle longest."""
        now_s = self._loop.time()
        connections: set[Any] = self._server.server_state.connections
        number = len(connections) + len(self._opening)
        if number < MAX_CONNECTIONS - 1:  # uvicorn refuses requests on the last one
            self._full_polls = 0
            return True
        silent = [one for one in connections if one.waiting_since_s + FULL_TIMEOUT_S <= now_s and one.is_silent]
        for one in sorted(silent, key=lambda one: float(one.waiting_since_s)):
            if not one.has_unread:
                one.give_up()
                self._full_polls = 0
                return True
        self._full_polls += 1  # instead of a clock, so that time in which the server was busy does not count
        waited_s = self._full_polls * POLL_INTERVAL_S
        return waited_s > FULL_TIMEOUT_S and number < MAX_CONNECTIONS + SPARE_CONNECTIONS
