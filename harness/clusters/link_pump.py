"""How bytes move through a link proxy: gates and pumps.

A *gate* is one directed link. It decides whether bytes may pass from its source host to its destination host,
and how late and how fast. A *pump* moves the bytes of one direction of one connection through a gate; a proxied
connection has two, one for what the opener sends and one for what it gets back. All pumps of one direction
between two hosts share one gate, whichever host opened the connection.

A cut gate stops everything, including the end of a stream and a reset, like a cable that carries no packets.
What is sent meanwhile waits in buffers of bounded size (here, and in the kernel behind a paused socket) and
moves on when the gate opens, as TCP would retransmit it. What was written to the destination's socket before
the cut counts as delivered.

A gate counts the bytes that pass it and the bytes that wait at it while it is cut, except on the harness's own
connections.
"""

from __future__ import annotations

import asyncio
import fcntl
import random
import socket
import struct
import termios
from collections import deque
from enum import Enum
from typing import cast

__all__ = ["MAX_HELD_BYTES", "Gate", "Pump", "Side", "reset"]

MAX_HELD_BYTES = 1 << 20
"""Bytes that one pump holds until they are due; at this many it pauses the sender. Enough for 10 MB/s at 100 ms of
delay. One more read (256 KiB at most, asyncio's own limit) may be added."""

KERNEL_BUFFER_BYTES = 128 << 10
"""Per socket and direction; the kernel doubles it. Left alone, the kernel would grow it to some megabytes on loopback,
and a host whose peer reads nothing would not notice until it had sent as much."""

PIECES_PER_S = 50
"""A throttled link passes its bytes in this many pieces a second, so that they flow evenly rather than in bursts."""

MIN_PIECE_BYTES = 64
"""Smallest piece of a throttled link."""


class _End(Enum):
    """How a stream ends."""

    EOF = "eof"
    RESET = "reset"


class Gate:
    """One directed link: open or cut, with a delay and a rate. Times inside the proxy are in seconds."""

    __slots__ = (
        "_rng",
        "_stopped_bytes",
        "delay_s",
        "is_cut",
        "jitter_s",
        "next_free_s",
        "passed_bytes",
        "pumps",
        "rate_bytes_per_s",
        "stopped_connections",
    )

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.is_cut = False
        self.delay_s = 0.0
        self.jitter_s = 0.0
        self.rate_bytes_per_s = 0.0
        self.next_free_s = 0.0
        self.pumps: dict[Pump, None] = {}
        self.passed_bytes = 0
        self.stopped_connections = 0
        """Connection attempts while it was cut."""
        self._stopped_bytes = 0

    @property
    def stopped_bytes(self) -> int:
        """Bytes that came while it was cut, including those that passed later or were lost with their connection."""
        return self._stopped_bytes + sum(pump.note_stopped() for pump in self.pumps)

    def leave(self, pump: Pump) -> None:
        """Remove a pump; the bytes that waited at it stay counted. Idempotent."""
        if pump in self.pumps:
            self._stopped_bytes += pump.note_stopped()
            del self.pumps[pump]

    @property
    def is_plain(self) -> bool:
        """Whether bytes pass at once."""
        return not (self.is_cut or self.delay_s or self.jitter_s or self.rate_bytes_per_s)

    def set(self, *, is_cut: bool, delay_ms: float, jitter_ms: float, rate_bytes_per_s: float) -> None:
        """Change the link; in force for every connection on return. A rate of 0 means no limit.

        Bytes that are already held keep the delay that they started with.
        """
        if self.is_cut and not is_cut:
            self._stopped_bytes = self.stopped_bytes
            for pump in self.pumps:
                pump.forget_stopped()
        self.is_cut = is_cut
        self.delay_s = delay_ms / 1000
        self.jitter_s = jitter_ms / 1000
        self.rate_bytes_per_s = rate_bytes_per_s
        self.next_free_s = 0.0
        for pump in list(self.pumps):
            pump.gate_changed()

    def due_s(self, now_s: float) -> float:
        """When bytes that start now are due: after the delay, plus or minus the jitter, but never before now."""
        if not self.delay_s and not self.jitter_s:
            return now_s
        return now_s + max(0.0, self.delay_s + self._rng.uniform(-self.jitter_s, self.jitter_s))


class Pump:
    """One direction of one connection, from a source transport through a gate to a destination transport.

    `direct` is True while bytes may be written to the destination as they come.
    """

    __slots__ = (
        "_destination",
        "_destination_is_full",
        "_held",
        "_loop",
        "_paused",
        "_stopped_bytes",
        "_timer",
        "delivered_end",
        "direct",
        "gate",
        "held_bytes",
        "is_counted",
        "is_ended",
        "source",
    )

    def __init__(self, gate: Gate) -> None:
        self._loop = asyncio.get_running_loop()
        self.gate = gate
        self.source: asyncio.Transport | None = None
        self._destination: asyncio.Transport | None = None
        self._destination_is_full = False
        self._held: deque[tuple[float, bytes | _End]] = deque()
        self.held_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._paused = True  # connections start paused, until both sides are there
        self.is_ended = False
        self.delivered_end = False
        self.direct = False
        self._stopped_bytes = 0
        self.is_counted = True
        """Whether its bytes belong to the tested programs, not to the harness."""
        gate.pumps[self] = None

    def connect(self, source: asyncio.Transport, destination: asyncio.Transport) -> None:
        """Begin to move bytes. Both transports are connected; the source is paused."""
        self.source = source
        self._destination = destination
        self.gate_changed()

    def write(self, data: bytes) -> None:
        """Write bytes to the destination now; only while `direct`."""
        self._deliver(cast(asyncio.Transport, self._destination), data)

    def hold(self, data: bytes) -> None:
        """Queue bytes that may have to wait, and deliver what is due."""
        self._append(data)
        self.held_bytes += len(data)
        self._drain()

    def end(self, *, is_reset: bool) -> None:
        """Record that the source sends no more: its stream ended or was reset. The end passes the gate like bytes."""
        if not self.is_ended or is_reset:
            self.note_stopped()  # bytes in the kernel's buffer are lost with the socket
            self.is_ended = True
            self._append(_End.RESET if is_reset else _End.EOF)
            self._drain()

    def destination_lost(self) -> None:
        """Handle the loss of the destination: drop what is held and stop reading the source.

        The pump of the other direction lets the source know.
        """
        self._destination = None
        self.close()
        self._update_reading()

    def destination_full(self, is_full: bool) -> None:
        """Record that the destination has no room left, or has room again."""
        self._destination_is_full = is_full
        if is_full:
            self._update_reading()
        else:
            self._drain()

    def gate_changed(self) -> None:
        """Adapt to a change of the gate."""
        self.direct = False
        self._drain()

    def close(self) -> None:
        """Drop what is held and leave the gate. Idempotent."""
        self.direct = False
        self.gate.leave(self)
        self._held.clear()
        self.held_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _append(self, item: bytes | _End) -> None:
        # A stream keeps its order whatever the jitter: what is due early waits behind what came before it.
        self._held.append((self.gate.due_s(self._loop.time()), item))

    def _drain(self) -> None:
        """Deliver what is due, and set a timer for the rest."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        gate, destination = self.gate, self._destination
        while self._held and destination is not None and not gate.is_cut and not self._destination_is_full:
            now_s = self._loop.time()
            due_s, item = self._held[0]
            if gate.rate_bytes_per_s:
                due_s = max(due_s, gate.next_free_s)
            if due_s > now_s:
                self._timer = self._loop.call_at(due_s, self._drain)
                break
            self._held.popleft()
            if isinstance(item, _End):
                self._deliver_end(destination, item)
                return
            if gate.rate_bytes_per_s:
                item = self._piece_of(item, now_s)
            self.held_bytes -= len(item)
            self._deliver(destination, item)
        self.direct = not self._held and gate.is_plain and destination is not None
        self._update_reading()

    def _deliver(self, destination: asyncio.Transport, data: bytes) -> None:
        if self.is_counted:
            self.gate.passed_bytes += len(data)
        destination.write(data)

    def note_stopped(self) -> int:
        """How many counted bytes have waited here since the gate was cut; 0 if it is not cut. The number does not go
        down when a connection breaks and the waiting bytes are lost."""
        if self.gate.is_cut and self.is_counted:
            self._stopped_bytes = max(self._stopped_bytes, self._waiting_bytes())
        return self._stopped_bytes

    def forget_stopped(self) -> None:
        """Start again at 0, because the gate has added them to its own count."""
        self._stopped_bytes = 0

    def _waiting_bytes(self) -> int:
        """Bytes received but not delivered: held here, or by the kernel in a socket that is not read."""
        own_socket = None if self.source is None else self.source.get_extra_info("socket")
        unread_bytes = 0
        if own_socket is not None and own_socket.fileno() >= 0:
            (unread_bytes,) = struct.unpack("i", fcntl.ioctl(own_socket.fileno(), termios.FIONREAD, bytes(4)))
        return self.held_bytes + unread_bytes

    def _piece_of(self, data: bytes, now_s: float) -> bytes:
        """Take as much of `data` as a throttled link passes at once; the rest goes back to the head of the queue."""
        gate = self.gate
        size_bytes = max(MIN_PIECE_BYTES, int(gate.rate_bytes_per_s / PIECES_PER_S))
        piece, rest = data[:size_bytes], data[size_bytes:]
        if rest:
            self._held.appendleft((now_s, rest))
        gate.next_free_s = max(now_s, gate.next_free_s) + len(piece) / gate.rate_bytes_per_s
        return piece

    def _deliver_end(self, destination: asyncio.Transport, end: _End) -> None:
        if end is _End.RESET:
            reset(destination)
            self.close()
        else:
            self.delivered_end = True
            if not destination.is_closing():
                destination.write_eof()
            cast(Side, destination.get_protocol()).stream_ended()

    def _update_reading(self) -> None:
        if self.source is None or self.source.is_closing():
            return
        stop = (
            self.gate.is_cut
            or self._destination_is_full
            or self._destination is None
            or self.held_bytes >= MAX_HELD_BYTES
        )
        if stop and not self._paused:
            self._paused = True
            self.source.pause_reading()
        elif not stop and self._paused:
            self._paused = False
            self.source.resume_reading()


class Side(asyncio.Protocol):
    """One end of a proxied connection: the socket to the opener, or the one to the far host."""

    def __init__(self, *, incoming: Pump, outgoing: Pump) -> None:
        """`incoming` writes to this socket, `outgoing` moves what is read from it."""
        self.incoming = incoming
        self.outgoing = outgoing
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.pause_reading()
        own_socket = transport.get_extra_info("socket")
        if own_socket is not None:
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                own_socket.setsockopt(socket.SOL_SOCKET, buffer, KERNEL_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        pump = self.outgoing
        if pump.direct:
            pump.write(data)
        else:
            pump.hold(data)

    def eof_received(self) -> bool:
        self.outgoing.end(is_reset=False)
        return True  # the other direction goes on

    def connection_lost(self, exc: Exception | None) -> None:
        has_closed = self.incoming.delivered_end and self.outgoing.delivered_end
        self.incoming.destination_lost()
        if has_closed:
            self.outgoing.close()
        else:
            self.outgoing.end(is_reset=True)

    def pause_writing(self) -> None:
        self.incoming.destination_full(True)

    def resume_writing(self) -> None:
        self.incoming.destination_full(False)

    def stream_ended(self) -> None:
        """Handle the delivered end of the incoming stream: once both streams have ended, close both sockets."""
        if self.incoming.delivered_end and self.outgoing.delivered_end:
            for transport in (self.transport, self.incoming.source):
                if transport is not None:
                    transport.close()


def reset(transport: asyncio.Transport) -> None:
    """Close a connection with a TCP reset, dropping what was not sent."""
    own_socket = transport.get_extra_info("socket")
    if own_socket is not None and not transport.is_closing():
        own_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
