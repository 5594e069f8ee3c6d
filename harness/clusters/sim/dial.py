"""The dialling side of a handshake: SYN, SYN-ACK, and the retries of both."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING

from harness.clusters.sim.lane import Lane

if TYPE_CHECKING:
    from harness.clusters.sim.network import NetworkHost, SimNetwork
    from harness.clusters.sim.transport import SimTransport

__all__ = ["SYN_ATTEMPTS", "Dial"]

SYN_ATTEMPTS = 7
"""SYNs sent, 1, 2, 4, ... seconds apart, before connecting times out after 127 s (Linux: tcp_syn_retries = 6)."""


class Dial:
    """One attempt of a process to connect; `established` becomes the connected transport, or fails with OSError."""

    def __init__(
        self, network: SimNetwork, lane: Lane, source: NetworkHost, destination: NetworkHost, port: int
    ) -> None:
        self._network = network
        self._loop = network.loop
        self._lane = lane
        self._source = source
        self._destination = destination
        self._port = port
        self._out = network.link(source.name, destination.name)
        self._back = network.link(destination.name, source.name)
        self._attempts = 0
        self._is_over = False
        self._source_power = source.power_cycles
        self.established: asyncio.Future[SimTransport] = self._loop.create_future()
        self._send_syn()

    def cancel(self) -> None:
        """Nobody waits for the result any more."""
        self._is_over = True
        future = self.established
        if future.done() and not future.cancelled() and future.exception() is None:
            future.result().close_socket()

    def _is_pointless(self) -> bool:
        return self._is_over or self._lane.is_dead or self._source.power_cycles != self._source_power

    def _fail(self, error: OSError) -> None:
        self._is_over = True
        if not self.established.done():
            self.established.set_exception(error)
            self.established.exception()  # who waits may be killed before it hears of this: nobody forgot it

    def _send_syn(self) -> None:
        if self._is_pointless():
            return
        if self._attempts == SYN_ATTEMPTS:
            self._fail(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))
            return
        now = self._loop.time()
        if self._network.trace is not None:
            self._network.note("syn", self._out, None, 0)
        if not self._out.loses():
            self._loop.event_at(self._out.arrival_s(now, 0), self._syn_arrives)
        self._loop.event_at(now + 2**self._attempts, self._send_syn)
        self._attempts += 1

    def _syn_arrives(self) -> None:
        if self._out.cut_by or not self._destination.has_power or self._is_over:
            return
        server = self._destination.listeners.get(self._port)
        if server is not None and not server.has_room:
            return  # as kernels do: the SYN is dropped and will be tried again
        if self._back.loses():
            return
        answer = self._refused if server is None else self._syn_ack_arrives
        self._loop.event_at(self._back.arrival_s(self._loop.time(), 0), answer)

    def _refused(self) -> None:
        if self._is_pointless() or self._back.cut_by:
            return
        if self._network.trace is not None:
            self._network.note("refused", self._back, None, 0)
        self._fail(ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)))

    def _syn_ack_arrives(self) -> None:
        if self._is_pointless() or self._back.cut_by or self.established.done():
            return
        server = self._destination.listeners.get(self._port)
        if server is None:
            return  # it closed meanwhile; the next SYN is refused
        self._is_over = True
        self.established.set_result(self._network.establish(self._lane, self._source, self._destination, server))
