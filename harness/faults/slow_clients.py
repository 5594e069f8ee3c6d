"""Clients that send requests and hardly read: connections of the harness's own, besides those of the workload.

Each repeats one request, which the system defines, and leaves the answers unread. The number of requests is bounded,
and a client stops as soon as the host's kernel has something in the send queue of its connection, so that no replica
has to hold more than for a handful of requests. The cluster reports these send queues, at the replica's ends of the
connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from harness.clusters.abilities import SendQueue
from harness.systems.base import LongRequest
from nemesis.target import SlowClient, UnreadAnswers

__all__ = ["SlowClients"]

logger = logging.getLogger(__name__)

RECEIVE_BUFFER_BYTES = 4096
"""About the least that the kernel grants: a window that the first answers close."""

MAX_REQUESTS = 10_000
"""Most requests on one connection: with a kilobyte per answer, more than the kernels buffer for two stalled
connections, one of them a proxy's. On loopback that is some megabytes each."""

FIRST_BATCH, MAX_BATCH = 20, 160
BATCH_PAUSE_S = 0.05
"""Pause between batches of requests, each twice the last: long enough for a look at the send queues meanwhile."""

CONNECT_TIMEOUT_S = 3.0
AGAIN_PAUSE_S = 1.0
"""Pause before a client reconnects after the replica has ended or refused its connection."""

READS_PER_S = 4


@dataclass(slots=True)
class _Connection:
    """One client of one host. `ports` are the ports that it has connected from, the newest last."""

    host: str
    bytes_per_s: int
    ports: list[int] = field(default_factory=list)
    read_bytes: int = 0
    closed: int = 0
    has_enough: bool = False
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Fault:
    connections: list[_Connection]
    began_s: float
    ended_s: float | None = None


class SlowClients:
    """See nemesis.target.Clients. `request` returns a request with a long answer for the replica of a host, `address`
    where to send it, and `queues` the send queues of the replica's sockets to clients on the given ports."""

    def __init__(
        self,
        *,
        request: Callable[[str], LongRequest],
        address: Callable[[str, int], tuple[str, int]],
        queues: Callable[[str, Sequence[int]], Awaitable[Sequence[SendQueue]]],
    ) -> None:
        self._request = request
        self._address = address
        self._queues = queues
        self._faults: dict[str, _Fault] = {}

    async def connect(self, fault_id: str, clients: Mapping[str, SlowClient]) -> None:
        """Connect clients; returns at once, possibly before they are connected."""
        loop = asyncio.get_running_loop()
        made = [
            _Connection(host, client.bytes_per_s) for host, client in clients.items() for _ in range(client.connections)
        ]
        self._faults[fault_id] = _Fault(made, loop.time())
        for connection in made:
            connection.task = loop.create_task(self._keep(connection))

    async def unread(self, fault_id: str) -> Mapping[str, UnreadAnswers]:
        """What has become of a fault's clients. Raises ShellError when a host does not answer."""
        fault = self._faults.get(fault_id)
        if fault is None:
            return {}
        ports: dict[str, list[int]] = {}
        for connection in fault.connections:
            ports.setdefault(connection.host, []).extend(connection.ports)
        found = await asyncio.gather(*(self._queues(host, known) for host, known in ports.items()))
        end_s = asyncio.get_running_loop().time() if fault.ended_s is None else fault.ended_s
        return {
            host: self._unread(host, fault, queues, end_s - fault.began_s)
            for host, queues in zip(ports, found, strict=True)
        }

    def _unread(self, host: str, fault: _Fault, queues: Sequence[SendQueue], seconds: float) -> UnreadAnswers:
        connections = [connection for connection in fault.connections if connection.host == host]
        by_port = {port: connection for connection in connections for port in connection.ports}
        ours = [queue for queue in queues if queue.peer_port in by_port]
        stuck = [queue for queue in ours if queue.size_bytes]
        for queue in ours:  # a queue that is filled for a moment only, on a busy machine, is not enough
            by_port[queue.peer_port].has_enough = bool(queue.size_bytes)
        return UnreadAnswers(
            connections=len(ours),
            stuck=len(stuck),
            queued_bytes=sum(queue.size_bytes for queue in stuck),
            read_bytes=sum(connection.read_bytes for connection in connections),
            # Two reads beyond the rate: one at the beginning, one that was just about to be counted.
            may_read_bytes=sum(
                round(each.bytes_per_s * seconds) + 2 * (each.bytes_per_s // READS_PER_S) for each in connections
            ),
            closed=sum(connection.closed for connection in connections),
        )

    async def release(self, fault_id: str) -> None:
        """Close a fault's connections. Idempotent."""
        fault = self._faults.get(fault_id)
        if fault is None or fault.ended_s is not None:
            return
        fault.ended_s = asyncio.get_running_loop().time()
        tasks = [connection.task for connection in fault.connections if connection.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def release_all(self) -> None:
        """Close every connection. Idempotent."""
        for fault_id in list(self._faults):
            await self.release(fault_id)

    async def _keep(self, connection: _Connection) -> None:
        """Run one client until cancelled."""
        while True:
            try:
                await self._ask(connection)
            except (OSError, TimeoutError) as error:
                logger.debug("a slow client of %s: %s", connection.host, error)
            connection.has_enough = False
            await asyncio.sleep(AGAIN_PAUSE_S)

    async def _ask(self, connection: _Connection) -> None:
        """Connect and send requests until the replica ends the connection. Raises OSError, TimeoutError."""
        loop = asyncio.get_running_loop()
        request = self._request(connection.host)
        with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as sock:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.sock_connect(sock, self._address(connection.host, request.port))
            connection.ports.append(sock.getsockname()[1])
            asking = loop.create_task(_send(sock, request.data, connection))
            try:
                await self._wait(sock, connection)
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        connection.closed += 1

    async def _wait(self, sock: socket.socket, connection: _Connection) -> None:
        """Read at this client's rate until the replica ends the connection. A client with unread answers notices that
        only by an error of the connection."""
        piece_bytes = connection.bytes_per_s // READS_PER_S
        while True:
            await asyncio.sleep(1 / READS_PER_S)
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or _has_ended(sock):
                return
            if piece_bytes:
                with contextlib.suppress(BlockingIOError):
                    connection.read_bytes += len(sock.recv(piece_bytes))


async def _send(sock: socket.socket, data: bytes, connection: _Connection) -> None:
    loop = asyncio.get_running_loop()
    asked, batch = 0, FIRST_BATCH
    while asked < MAX_REQUESTS:
        if not connection.has_enough:
            await loop.sock_sendall(sock, data * batch)
            asked, batch = asked + batch, min(2 * batch, MAX_BATCH)
        await asyncio.sleep(BATCH_PAUSE_S)


def _has_ended(sock: socket.socket) -> bool:
    """Whether a connection has ended and nothing waits there to be read. Consumes nothing."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
