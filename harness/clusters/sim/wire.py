"""One direction of a connection: bytes in order, each exactly once, or the connection breaks.

What the kernels at both ends do, as far as programs can tell: segments arrive after the link's latency, never
before those sent earlier; a segment that is lost (the link is cut or lossy, the host has no power) is retransmitted,
first after RETRANSMIT_S, then after twice that and so on, and everything behind it waits; after GIVE_UP_S of this
the connection times out. A segment for a socket that no longer exists is answered with a reset.

The window: the sender's kernel accepts WINDOW_BYTES beyond what the receiving program has read. Acknowledgements
travel over the link in the other direction; if only that is cut, bytes also stop flowing once the window is full.
"""

from __future__ import annotations

import enum
import errno
import os
from bisect import insort
from heapq import heappush
from math import log
from operator import itemgetter
from typing import Protocol

from harness.clusters.sim.link import SimLink
from harness.clusters.sim.loop import SimLoop

__all__ = [
    "GIVE_UP_S",
    "RETRANSMIT_S",
    "SEGMENT_BYTES",
    "WINDOW_BYTES",
    "Mark",
    "Segment",
    "Wire",
    "WireEnd",
    "WireNetwork",
]

SEGMENT_BYTES = 64 * 1024
"""The most that arrives at once; what a program writes in one piece may arrive in several."""

WINDOW_BYTES = 512 * 1024
"""Bytes that both kernels together hold for one direction; Linux's default buffers are of this size."""

RETRANSMIT_S = 0.2
"""The first retransmission timeout (Linux's minimum; round trips here are shorter)."""

MAX_RETRANSMIT_S = 120.0
"""The longest retransmission timeout (Linux: TCP_RTO_MAX)."""

GIVE_UP_S = 924.6
"""How long bytes may stay unacknowledged before the connection ends (Linux: tcp_retries2 = 15)."""

SPLIT_RATIO = 0.02
"""Fraction of the writes that arrive in two pieces although they would fit into one segment."""


class Mark(enum.Enum):
    """Segments without bytes."""

    FIN = "fin"
    ACCEPT = "accept"
    """The last part of the handshake: tells the listening side that the connection is established."""


ACCEPT = Mark.ACCEPT
Segment = bytes | Mark


class WireEnd(Protocol):
    """One end of a connection, as its wires see it."""

    number: int
    """Number of the connection."""
    is_gone: bool
    has_vanished: bool
    buffered_bytes: int

    def arrived(self, segment: Segment) -> None:
        """Handle a segment that has arrived in this end's kernel."""
        ...

    def broken(self, error: OSError) -> None:
        """Handle a reset or timeout of the connection."""
        ...

    def room_made(self) -> None:
        """Send more, because the other end has read."""
        ...


class WireNetwork(Protocol):
    """What wires need from their network."""

    loop: SimLoop

    @property
    def trace(self) -> object:
        """None if nothing is traced."""
        ...

    def note(
        self, kind: str, link: SimLink, end: WireEnd | None, size_bytes: int, number: int = 0, content: bytes = b""
    ) -> None:
        """Report an event to the trace."""
        ...


class Wire:
    """From `sender` to `receiver` over `link`; acknowledgements and resets come back over `reverse`."""

    __slots__ = (
        "_ack_armed",
        "_ack_tries",
        "_armed",
        "_arrives",
        "_draw",
        "_due",
        "_expected_number",
        "_last_arrival_s",
        "_loop",
        "_network",
        "_next_number",
        "_stalled",
        "_stalled_since_s",
        "_times",
        "_tries",
        "_unacknowledged_bytes",
        "link",
        "receiver",
        "reverse",
        "sender",
        "unread_bytes",
    )

    def __init__(self, network: WireNetwork, link: SimLink, reverse: SimLink) -> None:
        self._network = network
        self._loop = network.loop
        self._times, self._due = network.loop.times, network.loop.due
        self._arrives = self._arrive
        self._draw = link.random.random
        self.link = link
        self.reverse = reverse
        self.sender: WireEnd
        self.receiver: WireEnd
        self.unread_bytes = 0
        """Bytes sent and not yet known to have been read."""
        self._last_arrival_s = 0.0
        self._next_number = 0
        self._expected_number = 0
        self._stalled: list[tuple[int, Segment]] = []
        """Segments that were lost, or are behind a lost one, by number."""
        self._stalled_since_s = 0.0
        self._armed = False
        self._tries = 0
        self._unacknowledged_bytes = 0
        self._ack_armed = False
        self._ack_tries = 0

    @property
    def room_bytes(self) -> int:
        """How many more bytes the sending kernel accepts now."""
        return WINDOW_BYTES - self.unread_bytes

    def send(self, data: bytes) -> None:
        """Send bytes; the caller has checked `room_bytes`."""
        size = len(data)
        self.unread_bytes += size
        link = self.link
        if size > SEGMENT_BYTES:
            for start in range(0, size, SEGMENT_BYTES):
                self.put(data[start : start + SEGMENT_BYTES])
        elif self._draw() < SPLIT_RATIO and size > 1:
            middle = link.random.randrange(1, size)
            self.put(data[:middle])
            self.put(data[middle:])
        elif self._stalled or link.cut_by or link.shape is not None or self._network.trace is not None:
            self.put(data)
        else:  # the usual case: what `put` does on a healthy link, in one step
            number = self._next_number
            self._next_number = number + 1
            draw, model = self._draw, link.model
            when = self._loop.now + model.minimum_s - model.mean_extra_s * log(1.0 - draw())  # see `link.arrival_s`
            if draw() < model.slow_ratio:
                when += model.slow_max_s * draw()
            if when < self._last_arrival_s:
                when = self._last_arrival_s
            self._last_arrival_s = when
            due = self._due
            if when in due:
                due[when] += (self._arrives, (number, data))
            else:
                due[when] = [self._arrives, (number, data)]
                heappush(self._times, when)

    def put(self, segment: Segment) -> None:
        """Send one segment, behind those that wait to be retransmitted."""
        if self._network.trace is not None:
            if isinstance(segment, bytes):
                self._network.note("send", self.link, self.sender, len(segment), self._next_number, segment)
            else:
                self._network.note(str(segment.value), self.link, self.sender, 0, self._next_number)
        self._depart(segment)

    def _depart(self, segment: Segment) -> None:
        number = self._next_number
        self._next_number = number + 1
        link = self.link
        if self._stalled or link.cut_by or (link.shape is not None and link.loses()):
            self._stall(number, segment)
            return
        when = link.arrival_s(self._loop.now, 0 if link.shape is None else _size(segment))
        if when < self._last_arrival_s:
            when = self._last_arrival_s
        self._last_arrival_s = when
        self._loop.event_at(when, self._arrive, number, segment)

    def _stall(self, number: int, segment: Segment) -> None:
        if self.sender.is_gone and self.receiver.is_gone:
            return
        if not self._stalled:
            self._stalled_since_s = self._loop.now
        if self.link.cut_by:
            self.link.stopped_bytes += _size(segment)
        insort(self._stalled, (number, segment), key=itemgetter(0))
        if self._network.trace is not None:
            self._network.note("lost", self.link, self.sender, _size(segment), number)
        self._arm()

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            wait_s = min(RETRANSMIT_S * 2**self._tries, MAX_RETRANSMIT_S)
            self._tries += 1
            self._loop.event_at(self._loop.now + wait_s, self._retransmit)

    def _retransmit(self) -> None:
        self._armed = False
        if not self._stalled:
            return
        if self.sender.has_vanished:
            self._stalled.clear()
            return
        now = self._loop.now
        if self.link.loses() or not self.link.target.has_power:
            if now - self._stalled_since_s >= GIVE_UP_S:
                self._stalled.clear()
                self.sender.broken(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))
            else:
                self._arm()
            return
        self._tries = 0
        stalled, self._stalled = self._stalled, []
        when = max(
            self.link.arrival_s(now, sum(len(data) for _, data in stalled if isinstance(data, bytes))),
            self._last_arrival_s,
        )
        self._last_arrival_s = when
        if self._network.trace is not None:
            self._network.note("again", self.link, self.sender, len(stalled))
        for number, segment in stalled:
            self._loop.event_at(when, self._arrive, number, segment)

    def _arrive(self, number: int, segment: Segment) -> None:
        receiver = self.receiver
        if segment is ACCEPT and receiver.has_vanished:
            return  # the listening side would request it again, but it is gone
        link = self.link
        if link.cut_by or not link.target.has_power:
            self._stall(number, segment)
            return
        if receiver.is_gone:
            if self._network.trace is not None:
                self._network.note("arrive", link, self.sender, _size(segment), number)
            if isinstance(segment, bytes) or receiver.has_vanished:
                self._answer_with_reset(number, segment)
            return
        if number != self._expected_number:
            self._stall(number, segment)  # it waits for a lost one
            return
        if self._network.trace is not None:
            self._network.note("arrive", link, self.sender, _size(segment), number)
        self._expected_number = number + 1
        link.passed_bytes += _size(segment)
        receiver.arrived(segment)

    def _answer_with_reset(self, number: int, segment: Segment) -> None:
        if self.sender.is_gone:
            return
        if self.reverse.loses():
            self._stall(number, segment)  # unanswered, so it will be retransmitted
            return
        self._loop.event_at(self.reverse.arrival_s(self._loop.now, 0), self._reset_arrives)

    def _reset_arrives(self) -> None:
        if not self.reverse.cut_by and self.reverse.target.has_power:
            self.sender.broken(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))

    def reset(self) -> None:
        """Reset the connection from the sending side; the receiver's program sees that unless the reset is lost."""
        self._stalled.clear()
        if not self.link.loses():
            self._loop.event_at(
                max(self.link.arrival_s(self._loop.now, 0), self._last_arrival_s), self._own_reset_arrives
            )

    def _own_reset_arrives(self) -> None:
        if not self.link.cut_by and self.link.target.has_power:
            self.receiver.broken(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))

    # Acknowledgements

    def was_read(self, size_bytes: int) -> None:
        """Tell the sender that the receiving program has read bytes; while the reverse link is cut, try again later."""
        if self._ack_armed or self.reverse.cut_by:
            self._unacknowledged_bytes += size_bytes
            self._arm_ack()
            return
        self.unread_bytes -= size_bytes
        sender = self.sender
        if sender.buffered_bytes and not sender.is_gone:
            self._loop.event_at(self.reverse.arrival_s(self._loop.now, 0), sender.room_made)

    def _arm_ack(self) -> None:
        if not self._ack_armed:
            self._ack_armed = True
            wait_s = min(RETRANSMIT_S * 2**self._ack_tries, MAX_RETRANSMIT_S)
            self._ack_tries += 1
            self._loop.event_at(self._loop.now + wait_s, self._acknowledge)

    def _acknowledge(self) -> None:
        self._ack_armed = False
        if self.sender.is_gone or self.receiver.has_vanished:
            return
        if self.reverse.cut_by:
            self._arm_ack()
            return
        self._ack_tries = 0
        size_bytes, self._unacknowledged_bytes = self._unacknowledged_bytes, 0
        self.was_read(size_bytes)


def _size(segment: Segment) -> int:
    return len(segment) if isinstance(segment, bytes) else 0
