"""Bounds on what one peer, and all peers together, may cost a node.

Every number is a default of a field, so that a test can make it small; none is meant to be tuned daily.
"""

from __future__ import annotations

from dataclasses import dataclass

from node.remoting.codec import MAX_FRAME_BYTES, MAX_HEADER_BYTES

__all__ = ["ClientLimits", "ConnectionLimits", "ServerLimits"]

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of each connection, on either side, and of all connections of one endpoint together."""

    max_frame_bytes: int = MAX_FRAME_BYTES
    """A longer frame closes the connection."""
    max_header_bytes: int = MAX_HEADER_BYTES
    """A longer header closes the connection."""
    frame_timeout_s: float = 10.0
    """A frame that was begun must be complete after this long plus the time its bytes take at
    `frame_min_bytes_per_s`: trickling bytes must not hold memory for ever."""
    frame_min_bytes_per_s: int = 64 * 1024
    """The slowest link that must still get a large frame through: about half a megabit a second."""
    idle_timeout_s: float = 120.0
    """A connection without a byte in either direction is closed (120 s in R)."""
    max_turn_requests: int = 256
    """Requests of one connection that are started in one turn of the loop, a few milliseconds of work: the others wait
    until every connection has had its turn."""
    max_running_requests: int = 4096
    """Requests of one connection in the hands of asynchronous processors; beyond it nothing more is read from
    that connection. A consumer holds one pull for each of its queues, so hundreds are ordinary."""
    max_running_bytes: int = 64 * MEBIBYTE
    """The same, by size: four of the largest frames."""
    max_total_running_bytes: int = 256 * MEBIBYTE
    """Bytes of requests being worked on over all connections. Beyond it a connection runs one request
    at a time and is not read meanwhile."""
    max_total_held_bytes: int = 512 * MEBIBYTE
    """The same, including requests that had been read when reading stopped; the connection that holds most is
    closed. The most that a node may spend on requests at the worst moment."""
    max_total_unfinished_bytes: int = 128 * MEBIBYTE
    """Bytes of half-received frames over all connections. Beyond it the connection that holds most is closed."""
    write_high_water_bytes: int = MEBIBYTE
    """Unsent bytes at which a connection's requests are no longer read until the peer takes its replies."""
    max_unsent_bytes: int = 64 * MEBIBYTE
    """Unsent bytes at which a connection whose peer does not read is closed: four of the largest frames."""
    max_total_unsent_bytes: int = 256 * MEBIBYTE
    """The same over all connections that are above their high-water mark; the one that holds most is closed."""
    write_stall_timeout_s: float = 60.0
    """A peer that stays above the high-water mark this long is closed. Longer than any fault that the harness
    injects by default, so that a paused peer is not cut off by its partner's impatience."""
    max_outstanding_requests: int = 16384
    """Unanswered requests that this side may have sent over one connection."""
    max_silent_timeouts: int = 2
    """Requests that may time out with not one byte received since before the connection is given up: after a
    partition the old connection sits in the kernel's retransmission back-off while a new one works at once."""
    tls_handshake_timeout_s: float = 10.0
    """How long a TLS handshake may take: the same as a frame of plain text."""
    close_linger_s: float = 1.0
    """How long a closing connection may take to get its last bytes out to a peer that reads slowly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits(ConnectionLimits):
    """Limits of a listening endpoint."""

    max_connections: int = 4096
    """Open connections, including those in a TLS handshake. When full, the oldest one that never sent a whole frame is
    closed; if each has sent one, the newcomer is refused. Each costs about 3 KB and a file descriptor."""
    accept_backlog: int = 1024
    """Connections that the kernel may hold until they are accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits(ConnectionLimits):
    """Limits of a dialling endpoint."""

    idle_timeout_s: float = 110.0
    """A little shorter than a server's, so that the side that might send a request is the one that closes."""
    connect_timeout_ms: int = 1000
    """How long a connection attempt may take. A round trip is milliseconds; a cut link never answers."""
    max_connections: int = 512
    """Open connections, one for each address; beyond it the longest unused one without open requests is closed."""
