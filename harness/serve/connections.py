"""Time limits for clients that send no request, or do not read their answer.

uvicorn closes a connection that is idle after an answer. But it waits without limit for a first request, for the rest
of one, and for a client that does not read, and refuses everybody else once there are too many of these.
"""

from __future__ import annotations

__all__ = ["PATIENCE_S", "PatientProtocol"]

import asyncio
import fcntl
import termios

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE_S = 30.0
"""From the start of a connection, or the last answer on it, to the end of a request; and from a full send buffer until
the client has read 48 KB of it. A browser does either within a second."""


class PatientProtocol(H11Protocol):  # type: ignore[misc]
    """A connection that is closed if its client takes too long."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start waiting for a request."""
        super().connection_made(transport)
        self._is_full = False
        self._wait()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer."""
        self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """An answer is complete: wait for the client to read the rest of it and to send a request."""
        self._wait()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The send buffer is full: wait for the client to read."""
        self._is_full = True
        self._wait()
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client has read most of the buffer."""
        self._is_full = False
        self._wait()
        super().resume_writing()

    @property
    def is_silent(self) -> bool:
        """Whether no request is being processed: none has arrived completely, or it is answered."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    @property
    def has_unread(self) -> bool:
        """Whether there is unread data from the client. The connection must be open."""
        unread = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.FIONREAD, bytes(4))
        return unread != bytes(4)

    def give_up(self) -> None:
        """Abort the connection, whatever is in flight; it no longer counts."""
        self.connections.discard(self)
        self.transport.abort()

    def _wait(self) -> None:
        self.waiting_since_s = self.loop.time()

    def _look(self) -> None:
        rest_s = self.waiting_since_s + PATIENCE_S - self.loop.time()
        if rest_s <= 0 and (self.is_silent or self._is_full):
            self.give_up()
        else:  # a wait that starts meanwhile has its own full time
            self._timer = self.loop.call_later(rest_s if rest_s > 0 else PATIENCE_S, self._look)
