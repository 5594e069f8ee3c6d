"""How long a client may keep its connection without asking, or without taking what it asked for.

uvicorn ends a connection that is idle after an answer. It waits without end for a first request, for the rest of one
and for a client that reads nothing, and refuses everybody else once there are too many of these.
"""

from __future__ import annotations

__all__ = ["PATIENCE_S", "PatientProtocol"]

import asyncio
import fcntl
import termios

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE_S = 30.0
"""From the beginning of a connection, or the last answer on it, to the end of a request; and from the moment at which
no more can be sent until a client has taken 48 KB of it. A browser does either within a second."""


class PatientProtocol(H11Protocol):  # type: ignore[misc]
    """A connection that ends when its client is waited for too long."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._is_full = False
        self._wait()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Look no more."""
        self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """An answer is given: wait for the client to take the rest of it, and to ask again."""
        self._wait()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The buffer is full: wait for the client to read."""
        self._is_full = True
        self._wait()
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client has read, but for a little."""
        self._is_full = False
        self._wait()
        super().resume_writing()

    @property
    def is_silent(self) -> bool:
        """Whether no request is at work: none has come as a whole, or it is answered."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    @property
    def has_unread(self) -> bool:
        """Whether something of the client's has come that was not looked at yet. The connection must be open."""
        unread = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.FIONREAD, bytes(4))
        return unread != bytes(4)

    def give_up(self) -> None:
        """End the connection, whatever is on its way; it counts no more from now on."""
        self.connections.discard(self)
        self.transport.abort()

    def _wait(self) -> None:
        self.waiting_since_s = self.loop.time()

    def _look(self) -> None:
        rest_s = self.waiting_since_s + PATIENCE_S - self.loop.time()
        if rest_s <= 0 and (self.is_silent or self._is_full):
            self.give_up()
        else:  # what begins to be waited for meanwhile has its time from then
            self._timer = self.loop.call_later(rest_s if rest_s > 0 else PATIENCE_S, self._look)
