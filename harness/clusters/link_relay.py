"""The link relay of a `netns` cluster: packets that a link fault shapes go through this program.

It runs in the bridge's namespace. The bridge is told (by nftables) to forward no packets of shaped pairs of hosts;
the relay sees those same packets as they come in at the source's port of the bridge, and sends them out of the
destination's port when their time has come: late, twice, out of order, at a rate, or never. So it needs nothing of the
kernel beyond packet sockets, and works where netem is missing and inside a user namespace. Packets that the kernel
has joined into one for speed (GSO) travel, and are lost, as one.

It is a process of its own, so that a busy harness makes no packet late. The harness speaks to it over the socket that
is its standard input, one JSON object a line, each answered by {"id": ..., "ok": ...}:

    open    {"seed": n, "ports": {address: device}}    where each host is
    shape   {"pairs": [[source, destination, shape], ...]}    all shaped pairs; in force when answered
    stats   -> {"relayed", "lost", "queued"}
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import json
import random
import socket
import sys
from typing import Any

__all__ = ["LinkRelay", "Schedule", "main"]

MAX_QUEUED_PACKETS = 20_000
"""Packets that wait at a time, over all links: 160 ms of what one Python can relay. More are lost, as in any router."""

MAX_BACKLOG_S = 1.0
"""A link with a rate queues this much and loses the rest, as a router's buffer would."""

MAX_LINE_BYTES = 1 << 20
MAX_PACKETS_PER_WAKE = 64
MAX_FRAME_BYTES = 70_000
"""A joined packet has at most 64 KiB, and some headers."""

_ETH_P_ALL = 0x0003
"""Sockets for all protocols see a packet before the bridge takes it; those for one protocol do not."""

_ETHER_TYPE_IP = b"\x08\x00"
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_PACKET_OUTGOING = 4
_VNET_HEADER_BYTES = 10
_ETHER_TYPE = _VNET_HEADER_BYTES + 12
_IP_SOURCE = _VNET_HEADER_BYTES + 14 + 12


class Schedule:
    """When the packets of one shaped link go out. Times are seconds of one clock, whichever the caller uses."""

    def __init__(self, shape: dict[str, float], rng: random.Random) -> None:
        self._shape = shape
        self._rng = rng
        self._last_due_s = 0.0
        self._next_free_s = 0.0

    def due(self, now_s: float, size_bytes: int) -> list[float]:
        """When copies of a packet that comes in now go out: none when it is lost, two when it is doubled."""
        shape, rng = self._shape, self._rng
        if rng.random() * 100 < shape["loss_percent"]:
            return []
        start_s = now_s
        rate = shape["rate_bytes_per_s"]
        if rate:
            start_s = max(now_s, self._next_free_s)
            if start_s - now_s > MAX_BACKLOG_S:
                return []
            start_s += size_bytes / rate
            self._next_free_s = start_s
        if shape["reorder_percent"] and rng.random() * 100 < shape["reorder_percent"]:
            due_s = start_s  # ahead of those that wait out the delay
        else:
            jitter_s = rng.uniform(-shape["jitter_ms"], shape["jitter_ms"]) / 1000
            due_s = max(self._last_due_s, start_s + max(0.0, shape["delay_ms"] / 1000 + jitter_s))
            self._last_due_s = due_s
        copies = 2 if rng.random() * 100 < shape["duplicate_percent"] else 1
        return [due_s] * copies


class LinkRelay:
    """The packet sockets on the bridge's ports, and the packets that wait."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._devices: dict[bytes, str] = {}
        self._sockets: dict[str, socket.socket] = {}
        self._shaped: dict[tuple[bytes, bytes], Schedule] = {}
        self._shapes: dict[tuple[bytes, bytes], dict[str, float]] = {}
        self._waiting: list[tuple[float, int, bytes, bytes]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._relayed = self._lost = 0

    async def open(self, message: dict[str, Any]) -> dict[str, Any]:
        """Learn where the hosts are."""
        self._rng.seed(int(message["seed"]))
        self._devices = {socket.inet_aton(address): device for address, device in message["ports"].items()}
        return {"ok": True}

    async def shape(self, message: dict[str, Any]) -> dict[str, Any]:
        """Replace all shapes. A link whose shape stays keeps its place in time; packets that wait still go out."""
        shapes = {
            (socket.inet_aton(source), socket.inet_aton(destination)): shape
            for source, destination, shape in message["pairs"]
        }
        self._shaped = {
            pair: self._shaped[pair] if self._shapes.get(pair) == shape else Schedule(shape, self._rng)
            for pair, shape in shapes.items()
        }
        self._shapes = shapes
        wanted = {self._devices[address] for pair in shapes for address in pair}
        for device in wanted - self._sockets.keys():
            self._listen(device)
        if not wanted:
            self._flush()
            for device in list(self._sockets):
                self._forget(device)
        return {"ok": True}

    async def stats(self, message: dict[str, Any]) -> dict[str, Any]:
        """How many packets went through here."""
        return {"ok": True, "relayed": self._relayed, "lost": self._lost, "queued": len(self._waiting)}

    def close(self) -> None:
        """Close every socket. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        for device in list(self._sockets):
            self._forget(device)

    def _listen(self, device: str) -> None:
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        try:
            port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
            with contextlib.suppress(OSError):  # older kernels: told apart by their type below
                port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
            port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
            port.setblocking(False)
            port.bind((device, _ETH_P_ALL))
        except BaseException:
            port.close()
            raise
        self._sockets[device] = port
        asyncio.get_running_loop().add_reader(port, self._read, port)

    def _forget(self, device: str) -> None:
        port = self._sockets.pop(device)
        asyncio.get_running_loop().remove_reader(port)
        port.close()

    def _read(self, port: socket.socket) -> None:
        now_s = asyncio.get_running_loop().time()
        for _ in range(MAX_PACKETS_PER_WAKE):
            try:
                frame, address = port.recvfrom(MAX_FRAME_BYTES)
            except BlockingIOError:
                break
            except OSError:  # the port went down for a moment
                return
            if address[2] == _PACKET_OUTGOING or len(frame) < _IP_SOURCE + 8:
                continue
            if frame[_ETHER_TYPE : _ETHER_TYPE + 2] != _ETHER_TYPE_IP:
                continue
            source, destination = frame[_IP_SOURCE : _IP_SOURCE + 4], frame[_IP_SOURCE + 4 : _IP_SOURCE + 8]
            schedule = self._shaped.get((source, destination))
            if schedule is None:
                continue
            due = schedule.due(now_s, len(frame) - _VNET_HEADER_BYTES)
            if not due or len(self._waiting) >= MAX_QUEUED_PACKETS:
                self._lost += 1
                continue
            for due_s in due:
                heapq.heappush(self._waiting, (due_s, next(self._order), destination, frame))
        self._send_due()

    def _send_due(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        while self._waiting and self._waiting[0][0] <= now_s:
            _, _, destination, frame = heapq.heappop(self._waiting)
            self._send(destination, frame)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            self._timer = loop.call_at(self._waiting[0][0], self._send_due)

    def _send(self, destination: bytes, frame: bytes) -> None:
        port = self._sockets.get(self._devices[destination])
        try:
            if port is not None:
                port.send(frame)
                self._relayed += 1
        except OSError:  # a full device queue loses packets here as anywhere
            self._lost += 1

    def _flush(self) -> None:
        """Send everything that waits, in order: nothing is shaped any more."""
        for _, _, destination, frame in sorted(self._waiting):
            self._send(destination, frame)
        self._waiting.clear()
        self._send_due()


async def _serve(control: socket.socket) -> None:
    """Answer requests until the harness closes its end."""
    reader, writer = await asyncio.open_connection(sock=control, limit=MAX_LINE_BYTES)
    relay = LinkRelay()
    operations = {"open": relay.open, "shape": relay.shape, "stats": relay.stats}
    try:
        while line := await reader.readline():
            message = json.loads(line)
            operation = operations.get(message.get("op"))
            if operation is None:
                reply: dict[str, Any] = {"ok": False, "error": f"no operation {message.get('op')!r}"}
            else:
                try:
                    reply = await operation(message)
                except (KeyError, TypeError, ValueError, OSError) as error:
                    reply = {"ok": False, "error": f"{message['op']}: {error!r}"}
            writer.write(json.dumps({"id": message.get("id"), **reply}).encode() + b"\n")
            await writer.drain()
    except (ConnectionError, ValueError) as error:
        print(f"link relay: the control connection broke: {error}", file=sys.stderr)
    finally:
        relay.close()
        writer.close()


def main() -> None:
    """Run the relay on the control socket that is standard input."""
    try:
        control = socket.socket(fileno=0)
    except OSError:
        sys.exit("link relay: standard input is no socket; the harness starts this program itself")
    asyncio.run(_serve(control))


if __name__ == "__main__":
    main()
