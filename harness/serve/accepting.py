"""How many connections the server holds, and who waits where there are as many as may be.

asyncio's own server accepts whoever comes, so that what is too many must be cut off again, be its request on its way or
not. Here those for whom there is no room wait in the kernel's queue, and get their answer a little later.
"""

from __future__ import annotations

__all__ = ["BACKLOG", "MAX_CONNECTIONS", "Acceptor", "RoomyServer"]

import asyncio
import socket
from typing import Any

import uvicorn

from harness.serve.connections import PatientProtocol

MAX_CONNECTIONS = 128
"""Connections at a time that are answered by the application, live views included. uvicorn's bound: one that is refused
with 503 counts as one of them."""

SPARE_CONNECTIONS = 8
"""Connections beyond these, which are refused with 503 while all others are at work."""

PATIENCE_WHEN_FULL_S = 1.0
"""How long a connection that asks nothing keeps its place where others wait for one, and how long others wait for a
place of those that are at work until they are told that there is none. A client that is sent to wait for the processor
between its connection and its request takes some tenths of that."""

POLL_INTERVAL_S = 0.02
"""How often a full server looks whether there is room; it does not otherwise hear of it."""

BACKLOG = 512
"""Connections that wait in the kernel's queue. Of more, the kernel drops the first packet, which comes again after a
second."""


class RoomyServer(uvicorn.Server):  # type: ignore[misc]
    """uvicorn's server, with listeners that accept only whom there is room for."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept."""
        await super().startup(sockets=[])
        self.servers += [Acceptor(listener, self) for listener in sockets or ()]


class Acceptor:
    """A listener at which others wait while there is no room for them. It has the two functions of asyncio's servers
    that uvicorn uses."""

    def __init__(self, listener: socket.socket, server: uvicorn.Server) -> None:
        self._listener = listener
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self._vain_looks = 0  # since there was room
        self._is_closed = False
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._listen()

    def close(self) -> None:
        """Accept nobody any more. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listener)
            if self._timer is not None:
                self._timer.cancel()

    async def wait_closed(self) -> None:
        """Wait for those connections that were about to be accepted."""
        if self._opening:
            await asyncio.wait(self._opening)

    def _listen(self) -> None:
        self._timer = None
        self._loop.add_reader(self._listener, self._accept_one)

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener)
        self._timer = self._loop.call_later(POLL_INTERVAL_S, self._listen)

    def _accept_one(self) -> None:
        """Somebody waits: accept one where there is room, so that those accepted are read before more of them come."""
        if not self._has_room():
            self._pause()
            return
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it went away meanwhile
            return
        except OSError:  # no descriptor is left, or no memory
            self._pause()
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._open(connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        transport, _ = await self._loop.connect_accepted_socket(self._make_protocol, connection)
        if self._is_closed:  # the server has told its connections to end before this was one
            transport.abort()

    def _make_protocol(self) -> PatientProtocol:
        server = self._server
        return PatientProtocol(server.config, server.server_state, server.lifespan.state)

    def _has_room(self) -> bool:
        """Whether there is a place, if need be that of the connection whose request is waited for longest."""
        now_s = self._loop.time()
        connections: set[Any] = self._server.server_state.connections
        number = len(connections) + len(self._opening)
        if number < MAX_CONNECTIONS - 1:  # uvicorn refuses what comes on the last one
            self._vain_looks = 0
            return True
        silent = [one for one in connections if one.waiting_since_s + PATIENCE_WHEN_FULL_S <= now_s and one.is_silent]
        for one in sorted(silent, key=lambda one: float(one.waiting_since_s)):
            if not one.has_unread:
                one.give_up()
                self._vain_looks = 0
                return True
        self._vain_looks += 1  # in the place of a clock: a time at which the server was elsewhere does not count
        waited_s = self._vain_looks * POLL_INTERVAL_S
        return waited_s > PATIENCE_WHEN_FULL_S and number < MAX_CONNECTIONS + SPARE_CONNECTIONS
