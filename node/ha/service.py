"""The master's side: a port that slaves dial, and a connection for each of them (S4; R: AcceptSocketService,
HAConnection with its ReadSocketService and WriteSocketService).

A slave's first report is a request: where to begin. Later reports acknowledge what the slave has, and only they release
messages that wait. A report that cannot be true (a position that was never sent to this slave, or a negative one) ends
the connection and acknowledges nothing (rocketmq#3015, #1155: there it released every later message).

Only what is safe by the master's own flush mode is sent, so that a slave never has what a restarted master lacks,
unless that flush mode allows loss.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from node.ha.config import HaTimings
from node.ha.frames import Frame, ReportReader
from node.logs import LogLimiter

__all__ = ["HAConnection", "HAService", "TransferSource"]

logger = logging.getLogger("node.ha")

TIMER_GRAIN_S = 0.001
"""A timer may fire this much early; its event counts as due then."""
MAX_SLAVES = 64
"""Limit on connections; each costs a socket, a megabyte of buffer at most, and its share of the disk's reads."""
FRAMES_PER_TURN = 16
"""Frames written in one turn of the event loop."""
BUFFER_BYTES = 1 << 20
"""Bytes per slave that the system has not taken yet; above this nothing more is read from the log for that slave."""


class TransferSource(Protocol):
    """The master's log."""

    @property
    def begin_position(self) -> int: ...
    @property
    def committed_position(self) -> int: ...
    @property
    def written_position(self) -> int: ...
    @property
    def segment_size_bytes(self) -> int: ...
    def read_range(self, position: int, size_bytes: int) -> bytes: ...


class HAConnection(asyncio.Protocol):
    """One slave's connection."""

    def __init__(self, service: HAService) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._reports = ReportReader()
        self._transport: asyncio.Transport | None = None
        self._may_write = True
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._last_read_s = self._last_write_s = 0.0
        self._next = -1
        self._first = -1
        self.address = self.host = "?"
        self.request_position = -1
        """The position that the slave asked for; -1 until it did."""
        self.ack_position = -1
        """The position that the slave has acknowledged; -1 until it did."""

    @property
    def is_transferring(self) -> bool:
        """Whether the slave has asked for the log and gets it."""
        return self._next >= 0 and self._transport is not None and not self._transport.is_closing()

    @property
    def next_position(self) -> int:
        """The position that is sent next; -1 before there was a request."""
        return self._next

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        peer = transport.get_extra_info("peername")
        if peer:
            self.host, self.address = peer[0], f"{peer[0]}:{peer[1]}"
        transport.set_write_buffer_limits(high=BUFFER_BYTES)
        self._last_read_s = self._last_write_s = self._loop.time()
        if not self._service.opened(self):
            transport.abort()
            return
        self._arm()

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._service.closed(self, error)

    def pause_writing(self) -> None:
        self._may_write = False

    def resume_writing(self) -> None:
        self._may_write = True
        self.wake()

    def data_received(self, data: bytes) -> None:
        self._last_read_s = self._loop.time()
        for position in self._reports.feed(data):
            if self._transport is None or self._transport.is_closing():
                return
            if self.request_position < 0:
                self._requested(position)
            else:
                self._reported(position)

    def _requested(self, position: int) -> None:
        """Begin where the slave asks; 0 means that it has nothing, and then it gets only the last file (R)."""
        log = self._service.log
        begin, end = log.begin_position, self._service.end_position
        start = position
        if position == 0:
            start = max(begin, end - end % log.segment_size_bytes)
        self.request_position = max(position, 0)
        if not begin <= start <= end:
            bound = begin if start < begin else end
            self._service.complain(
                f"{self.host} refused",
                f"slave {self.address} asks for position {position}, this log holds {begin} to {end}: refused",
            )
            self._write(Frame(bound, b""))  # any slave sees that this is not what it asked for
            self.close()
            return
        self._first = self._next = start
        self._service.note(
            f"{self.host} asks", f"transferring from {start} to slave {self.address}, which asked for {position}"
        )
        if start == end:
            self._write(Frame(start, b""))  # so that it need not wait for a heartbeat to know that this is all
        self.wake()

    def _reported(self, position: int) -> None:
        if 0 <= position <= self._next:
            # A position before its request is valid: bytes that a slave compares may still wait for its disk.
            if position >= self._first and position > self.ack_position:
                self.ack_position = position
                self._service.confirmed(position)
        else:
            self._service.complain(
                f"{self.host} lies",
                f"slave {self.address} says that it has the log up to {position}, and was sent it up to {self._next}:"
                f" closing",
            )
            self.close()

    def wake(self) -> None:
        """There may be something to send."""
        if not self._scheduled and self._next >= 0 and self._may_write:
            self._scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._scheduled = False
        log = self._service.log
        for _ in range(FRAMES_PER_TURN):
            if not self._may_write or not self.is_transferring:
                return
            size_bytes = min(self._service.batch_bytes, self._service.end_position - self._next)
            if size_bytes <= 0:
                return
            try:
                body = log.read_range(self._next, size_bytes)
            except OSError as error:
                body = b""
                self._service.complain(f"{self.host} reads", f"the log cannot be read at {self._next}: {error}")
            if not body:  # removed from the front meanwhile, or unreadable: the slave asks again and learns it
                self.close()
                return
            self._write(Frame(self._next, body))
            self._next += len(body)
        self.wake()

    def _write(self, frame: Frame) -> None:
        assert self._transport is not None
        self._last_write_s = self._loop.time()
        self._transport.write(frame.encode())

    def _arm(self) -> None:
        self._timer = self._loop.call_at(min(self._silent_at_s(), self._heartbeat_at_s()), self._tick)

    def _silent_at_s(self) -> float:
        return self._last_read_s + self._service.timings.housekeeping_s

    def _heartbeat_at_s(self) -> float:
        return self._last_write_s + self._service.timings.heartbeat_s

    def _tick(self) -> None:
        now_s = self._loop.time() + TIMER_GRAIN_S
        if now_s >= self._silent_at_s():
            silent_s = self._service.timings.housekeeping_s
            self._service.complain(
                f"{self.host} silent", f"slave {self.address} was silent for {silent_s:g} s: closing"
            )
            assert self._transport is not None
            self._transport.abort()
            return
        if now_s >= self._heartbeat_at_s():
            if self.is_transferring and self._may_write and not self._scheduled:
                self._write(Frame(self._next, b""))  # tells a slave that compares that the log ends here
            else:  # nothing was requested, or frames that wait make a heartbeat needless
                self._last_write_s = self._loop.time()
        self._arm()

    def close(self) -> None:
        """End the connection once what was written is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._transport.abort()


class HAService:
    """Listens for slaves of `log`. `on_confirmed(position)` is called when a slave has more than any had before."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        log: TransferSource,
        timings: HaTimings,
        batch_bytes: int,
        fallbehind_max_bytes: int,
        on_confirmed: Callable[[int], None],
    ) -> None:
        self._host = host
        self._wanted_port = port
        self.log = log
        self.timings = timings
        self.batch_bytes = batch_bytes
        self._fallbehind_max_bytes = fallbehind_max_bytes
        self._on_confirmed = on_confirmed
        self._server: asyncio.Server | None = None
        self._connections: dict[HAConnection, None] = {}
        self._complaints = LogLimiter(lambda: asyncio.get_running_loop().time())
        self.push_to_slave_max_position = 0
        """The highest position that any slave has acknowledged (R: push2SlaveMaxOffset)."""
        self.accepted_total = 0

    @property
    def port(self) -> int:
        """The port listened on; known once started."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    @property
    def end_position(self) -> int:
        """The end of what may be sent: written, and safe by the master's own flush mode."""
        return min(self.log.committed_position, self.log.written_position)

    async def start(self) -> None:
        """Open the port. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: HAConnection(self), self._host, self._wanted_port)

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
            for connection in list(self._connections):
                connection.abort()
            self._connections.clear()
            self._server = None

    def opened(self, connection: HAConnection) -> bool:
        """Accept a new connection; False if there are too many."""
        if self._server is None or len(self._connections) >= MAX_SLAVES:
            self.complain("full", f"{len(self._connections)} slaves are connected, no more are taken")
            return False
        self._connections[connection] = None
        self.accepted_total += 1
        return True

    def closed(self, connection: HAConnection, error: Exception | None) -> None:
        """A connection is over."""
        if connection in self._connections:
            del self._connections[connection]
            if connection.next_position >= 0:
                reason = f": {error}" if error else ""
                self.note(f"{connection.host} leaves", f"slave {connection.address} is gone{reason}")

    def confirmed(self, position: int) -> None:
        """A slave has the log up to `position`."""
        if position > self.push_to_slave_max_position:
            self.push_to_slave_max_position = position
            self._on_confirmed(position)

    def is_slave_ok(self, position: int) -> bool:
        """Whether it is worth waiting for a slave to have the log up to `position` (R: isSlaveOK)."""
        is_near = position - self.push_to_slave_max_position < self._fallbehind_max_bytes
        return is_near and any(connection.is_transferring for connection in self._connections)

    def wake(self) -> None:
        """The log has grown."""
        for connection in self._connections:
            connection.wake()

    def complain(self, key: str, text: str) -> None:
        """Log a warning, rate-limited because a peer could cause a flood. The key has no port, because ports change."""
        self._complaints.warning(logger, key, "%s", text)

    def note(self, key: str, text: str) -> None:
        """Log what slaves do, rate-limited as well."""
        self._complaints.warning(logger, key, "%s", text, level=logging.INFO)

    def slaves(self) -> list[dict[str, Any]]:
        """Each connection's address and positions."""
        return [
            {"address": each.address, "sent": each.next_position, "confirmed": each.ack_position}
            for each in self._connections
        ]
