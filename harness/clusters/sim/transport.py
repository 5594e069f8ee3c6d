"""A program's end of a connection: an asyncio transport that behaves like the selector event loop's.

Half of it is the program's (the protocol, the buffer of what the kernel does not accept yet) and stops with the
process; the other half is the kernel's (what has arrived, the state of the connection): it keeps working while the
process is paused, and closes the connection when the process is killed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from contextvars import Context, copy_context
from typing import Any, Protocol

from harness.clusters.sim.errors import NotSimulated
from harness.clusters.sim.lane import Lane
from harness.clusters.sim.loop import SimLoop
from harness.clusters.sim.wire import WINDOW_BYTES, Mark, Segment, Wire

__all__ = ["Acceptor", "SimTransport", "TransportNetwork"]

HIGH_WATER_BYTES = 64 * 1024
"""asyncio's default: beyond this the protocol is asked to pause writing."""

MAX_READ_BYTES = 256 * 1024
"""The most that one `data_received` gets (asyncio's own limit)."""


class TransportNetwork(Protocol):
    """What transports need from their network."""

    loop: SimLoop

    def forget(self, transport: SimTransport) -> None:
        """Forget an end of a connection that is gone."""
        ...


class Acceptor(Protocol):
    """The listening socket through which a connection came in."""

    def established(self, transport: SimTransport) -> None:
        """Queue a connection whose handshake is complete."""
        ...

    def detach(self, transport: SimTransport) -> None:
        """Forget a connection that is gone."""
        ...


class SimTransport(asyncio.Transport):
    """One end of a connection. `out` carries what it sends; `incoming` what it receives."""

    def __init__(
        self,
        network: TransportNetwork,
        lane: Lane,
        number: int,
        local: tuple[str, int],
        remote: tuple[str, int],
        out: Wire,
        incoming: Wire,
    ) -> None:
        super().__init__({"sockname": local, "peername": remote, "socket": None})
        self._network = network
        self._loop = network.loop
        self.lane = lane
        self.number = number
        self.server: Acceptor | None = None
        self._out = out
        self._in = incoming
        out.sender = incoming.receiver = self
        self._protocol: asyncio.Protocol | None = None
        self._context: Context = copy_context()
        # The kernel's half
        self.is_gone = False
        """Whether the socket is closed (or vanished with its host): segments for it are answered with a reset."""
        self.has_vanished = False
        self._inbox: deque[Segment | OSError] = deque()
        self._inbox_bytes = 0
        self._broken: OSError | None = None
        # The program's half
        self._drain_scheduled = False
        self._reading_paused = False
        self._eof_received = False
        self._buffer: deque[bytes] = deque()
        self.buffered_bytes = 0
        """Bytes that the program has written and the kernel has not accepted."""
        self._high_water = HIGH_WATER_BYTES
        self._low_water = HIGH_WATER_BYTES // 4
        self._writing_paused = False
        self._eof_written = False
        self._fin_sent = False
        self._closing = False
        self._lost = False
        lane.__dict__.setdefault("sockets", {})[self] = None

    def __repr__(self) -> str:
        return f"<SimTransport {self.number} {self._extra['sockname']} -> {self._extra['peername']}>"  # type: ignore[attr-defined]

    @property
    def host_names(self) -> tuple[str, str]:
        """The host of this end and that of the other."""
        return self._out.link.source, self._out.link.destination

    def start(self, protocol: asyncio.BaseProtocol) -> None:
        """Give the connection its protocol; called in the program's own context."""
        self._context = copy_context()
        self.set_protocol(protocol)
        protocol.connection_made(self)
        self._schedule_drain()

    # Arrivals: called by the wire, outside every lane

    def arrived(self, segment: Segment) -> None:
        """Handle a segment that has arrived in this host's kernel."""
        lane = self.lane
        protocol = self._protocol
        if (
            lane.queue
            or self._inbox
            or self._reading_paused
            or self._closing
            or lane.is_paused
            or protocol is None
            or segment.__class__ is not bytes
        ):
            self._wait_to_be_read(segment)
            return
        # Nothing of this process is waiting to run, so this would run next anyway: no need to schedule it.
        try:
            self._context.run(protocol.data_received, segment)
        except Exception as error:
            self._context.run(self._fatal, error, "protocol.data_received() call failed")
        if not self.is_gone:
            self._in.was_read(len(segment))

    def _wait_to_be_read(self, segment: Segment) -> None:
        if segment is Mark.ACCEPT:
            if self.server is not None:
                self.server.established(self)
            return
        self._inbox.append(segment)
        if isinstance(segment, bytes):
            self._inbox_bytes += len(segment)
        self._schedule_drain()

    def broken(self, error: OSError) -> None:
        """Handle a reset or timeout of the connection; the program sees it after what has arrived before."""
        if self.is_gone or self._broken is not None:
            return
        self._broken = error
        self._inbox.append(error)
        self._schedule_drain()
        # A program that does not read finds out by writing the rest of its buffer.
        if self._buffer and (self._reading_paused or self._closing):
            self._loop.call_soon(self._fail, error, context=self._context)

    def room_made(self) -> None:
        """Send more of the buffer, because the peer has read."""
        if self.buffered_bytes and not self.is_gone:
            self._loop.call_soon(self._pump, context=self._context)

    # Reading: called in the program's lane

    def _schedule_drain(self) -> None:
        if self._inbox and not self._drain_scheduled and self._protocol is not None and not self._reading_paused:
            self._drain_scheduled = True
            self._loop.call_soon(self._drain, context=self._context)

    def _drain(self) -> None:
        self._drain_scheduled = False
        inbox = self._inbox
        while inbox and not self._reading_paused and not self._closing and self._protocol is not None:
            first = inbox.popleft()
            if isinstance(first, bytes):
                if inbox and isinstance(inbox[0], bytes):
                    first = self._join(first)
                self._inbox_bytes -= len(first)
                self._deliver(self._protocol, first)
            elif first is Mark.FIN:
                self._deliver_eof(self._protocol)
            elif isinstance(first, OSError):
                self._fail(first)

    def _join(self, first: bytes) -> bytes:
        """What one read returns: everything that has arrived, up to a limit."""
        pieces, size = [first], len(first)
        inbox = self._inbox
        while inbox and isinstance(inbox[0], bytes) and size + len(inbox[0]) <= MAX_READ_BYTES:
            piece = inbox.popleft()
            pieces.append(piece)  # type: ignore[arg-type]
            size += len(piece)  # type: ignore[arg-type]
        return b"".join(pieces)

    def _deliver(self, protocol: asyncio.Protocol, data: bytes) -> None:
        if self._closing:
            return  # closing programs do not read
        try:
            protocol.data_received(data)
        except Exception as error:
            self._fatal(error, "protocol.data_received() call failed")
        if not self.is_gone:
            self._in.was_read(len(data))

    def _deliver_eof(self, protocol: asyncio.Protocol) -> None:
        if self._closing or self._eof_received:
            return
        self._eof_received = True
        try:
            keep_open = protocol.eof_received()
        except Exception as error:
            self._fatal(error, "protocol.eof_received() call failed")
            return
        if not keep_open:
            self.close()

    def is_reading(self) -> bool:
        return not self._closing and not self._reading_paused

    def pause_reading(self) -> None:
        if not self._closing:
            self._reading_paused = True

    def resume_reading(self) -> None:
        if not self._closing and self._reading_paused:
            self._reading_paused = False
            self._schedule_drain()

    # Writing

    def write(self, data: Any) -> None:
        if data.__class__ is not bytes:
            if not isinstance(data, bytearray | memoryview):
                raise TypeError(f"data argument must be a bytes-like object, not {type(data).__name__!r}")
            data = bytes(data)
        if self._eof_written:
            raise RuntimeError("Cannot call write() after write_eof()")
        if not data or self._lost:
            return
        if self._broken is not None:
            self._fail(self._broken)
            return
        out = self._out
        if not self.buffered_bytes and len(data) <= WINDOW_BYTES - out.unread_bytes:
            out.send(data)
            return
        self._buffer.append(data)
        self.buffered_bytes += len(data)
        self._fill_window()
        self._maybe_pause_writing()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def _fill_window(self) -> None:
        buffer = self._buffer
        while buffer:
            room = self._out.room_bytes
            if room <= 0:
                return
            data = buffer.popleft()
            if len(data) > room:
                buffer.appendleft(data[room:])
                data = data[:room]
            self.buffered_bytes -= len(data)
            self._out.send(data)

    def _pump(self) -> None:
        if self._lost:
            return
        self._fill_window()
        if self._writing_paused and self.buffered_bytes <= self._low_water:
            self._writing_paused = False
            self._tell("resume_writing")
        if not self._buffer:
            if self._closing:
                self._lose(None)
            elif self._eof_written:
                self._send_fin()

    def _maybe_pause_writing(self) -> None:
        if self.buffered_bytes > self._high_water and not self._writing_paused:
            self._writing_paused = True
            self._tell("pause_writing")

    def _tell(self, what: str) -> None:
        try:
            getattr(self._protocol, what)()
        except Exception as error:
            self._loop.call_exception_handler({"message": f"protocol.{what}() failed", "exception": error})

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = HIGH_WATER_BYTES if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self._high_water, self._low_water = high, low
        self._maybe_pause_writing()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low_water, self._high_water

    def get_write_buffer_size(self) -> int:
        return self.buffered_bytes

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if self._closing or self._eof_written:
            return
        self._eof_written = True
        if not self._buffer:
            self._send_fin()

    def _send_fin(self) -> None:
        if not self._fin_sent:
            self._fin_sent = True
            self._out.put(Mark.FIN)

    # Closing

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        if isinstance(protocol, asyncio.BufferedProtocol):
            raise NotSimulated("BufferedProtocol is not available in simulation: use asyncio.Protocol")
        self._protocol = protocol  # type: ignore[assignment]

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        if not self._buffer:
            self._lose(None)

    def abort(self) -> None:
        self._force_close(None)

    def _fail(self, error: OSError) -> None:
        self._force_close(error)

    def _fatal(self, error: Exception, message: str) -> None:
        self._loop.call_exception_handler({"message": f"Fatal error: {message}", "exception": error, "transport": self})
        self._force_close(error)

    def _force_close(self, error: Exception | None) -> None:
        if self._lost:
            return
        self._buffer.clear()
        self.buffered_bytes = 0
        self._closing = True
        self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self._loop.call_soon(self._connection_lost, error, context=self._context)

    def _connection_lost(self, error: Exception | None) -> None:
        protocol = self._protocol
        try:
            if protocol is not None:
                protocol.connection_lost(error)
        finally:
            self._protocol = None
            self.close_socket()

    def close_socket(self) -> None:
        """The kernel's part of closing, also when the process has died: FIN, or a reset if bytes are unread."""
        if self.is_gone:
            return
        self.is_gone = self._lost = self._closing = True
        self.lane.__dict__["sockets"].pop(self, None)
        self._network.forget(self)
        if self.server is not None:
            self.server.detach(self)
        if self._broken is None:
            if self._inbox_bytes:
                self._out.reset()
            else:
                self._send_fin()
        self._inbox.clear()

    def vanish(self) -> None:
        """Disappear without a segment to the peer, because the host lost power."""
        self.is_gone = self.has_vanished = self._lost = self._closing = True
        self.lane.__dict__["sockets"].pop(self, None)
        self._network.forget(self)
        self._inbox.clear()
