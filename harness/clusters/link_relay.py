"""The link relay: packets that a link fault shapes go through this program.

It runs on the host that sends them. The host's own nftables rules redirect packets on shaped links to a device that
leads nowhere; the relay takes them from there and sends them through the device that they were meant for when they are
due: late, twice, out of order, at a rate, or never. So it needs only packet sockets and nftables, and works without
netem and inside a user namespace. Packets that the kernel has joined into one for speed (GSO) are delayed or lost as
one; while a link damages packets, the kernel segments them and fills in each checksum before they come here, so that
the receiver of a packet with a flipped bit can detect it.

It is a process of its own, so that a busy harness does not delay packets. It takes requests on the Unix socket that its
argument names, in the format of control_server:

    open    {"seed": n, "ports": {address: device}, "aside": device, "into": device}    the device that leads to each
            address, the one on which packets to be shaped arrive, and that one's other end, where they are put in
    shape   {"pairs": [[source, destination, shape], ...]}    all shaped pairs; in force when answered
    stats   -> {"relayed", "lost", "queued"}
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import heapq
import itertools
import random
import socket
import struct
from typing import Any

from harness.clusters.control_server import run_helper

__all__ = ["RELAYED_MARK", "LinkRelay", "Schedule", "main"]

MAX_QUEUED_PACKETS = 20_000
"""Packets queued at a time, over all links: 160 ms of what one Python can relay. More are lost, as in any router."""

MAX_BACKLOG_S = 1.0
"""A link with a rate queues this much and loses the rest, as a router with a full buffer would."""

MAX_PACKETS_PER_WAKE = 64
MAX_FRAME_BYTES = 70_000
"""A joined packet has at most 64 KiB plus some headers."""

RELAYED_MARK = 0x5B1A
"""Mark on packets that the relay sends, so that the rule which redirected them lets them pass."""

_ETH_P_ALL = 0x0003
"""Sockets for all protocols see a packet before the bridge takes it; those for one protocol do not."""

_ETHER_TYPE_IP = b"\x08\x00"
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_PACKET_OUTGOING = 4
_VNET_HEADER_BYTES = 10
_ETHER_TYPE = _VNET_HEADER_BYTES + 12
_IP_HEADER = _VNET_HEADER_BYTES + 14
_IP_SOURCE = _IP_HEADER + 12
_SIOCETHTOOL = 0x8946
_ETHTOOL_STXCSUM, _ETHTOOL_SGSO = 0x17, 0x24


class Schedule:
    """When the packets of one shaped link go out. Times are in seconds, by whichever clock the caller uses."""

    def __init__(self, shape: dict[str, float], rng: random.Random) -> None:
        self._shape = shape
        self._rng = rng
        self._last_due_s = 0.0
        self._next_free_s = 0.0

    def due(self, now_s: float, size_bytes: int) -> list[float]:
        """When the copies of a packet that arrives now go out: none if it is lost, two if it is duplicated."""
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
            due_s = start_s  # ahead of packets that wait out the delay
        else:
            jitter_s = rng.uniform(-shape["jitter_ms"], shape["jitter_ms"]) / 1000
            due_s = max(self._last_due_s, start_s + max(0.0, shape["delay_ms"] / 1000 + jitter_s))
            self._last_due_s = due_s
        copies = 2 if rng.random() * 100 < shape["duplicate_percent"] else 1
        return [due_s] * copies

    def damaged(self, frame: bytes) -> bytes:
        """The frame as it goes out: some get one flipped bit, anywhere after the IP header."""
        percent = self._shape.get("corrupt_percent", 0.0)
        if not percent or self._rng.random() * 100 >= percent:
            return frame
        first = _IP_HEADER + 4 * (frame[_IP_HEADER] & 0x0F)
        end = _IP_HEADER + int.from_bytes(frame[_IP_HEADER + 2 : _IP_HEADER + 4])  # without the padding of short frames
        if not first < end <= len(frame):
            return frame
        changed = bytearray(frame)
        changed[self._rng.randrange(first, end)] ^= 1 << self._rng.randrange(8)
        return bytes(changed)


class LinkRelay:
    """The packet sockets on the devices, and the queued packets."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._devices: dict[bytes, str] = {}
        self._aside: str | None = None
        self._into: str | None = None
        self._is_segmented = False
        """Whether packets arrive here segmented, each with its checksum."""
        self._receivers: dict[str, socket.socket] = {}
        self._senders: dict[str, socket.socket] = {}
        self._shaped: dict[tuple[bytes, bytes], Schedule] = {}
        self._shapes: dict[tuple[bytes, bytes], dict[str, float]] = {}
        self._waiting: list[tuple[float, int, bytes, bytes]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._relayed = self._lost = 0

    async def open(self, message: dict[str, Any]) -> dict[str, Any]:
        """Learn which device leads to each host."""
        self._rng.seed(int(message["seed"]))
        self._devices = {socket.inet_aton(address): device for address, device in message["ports"].items()}
        self._aside, self._into = str(message["aside"]), message.get("into")
        return {}

    async def shape(self, message: dict[str, Any]) -> dict[str, Any]:
        """Replace all shapes. A link whose shape stays the same keeps its schedule; queued packets still go out."""
        shapes = {
            (socket.inet_aton(source), socket.inet_aton(destination)): shape
            for source, destination, shape in message["pairs"]
        }
        self._shaped = {
            pair: self._shaped[pair] if self._shapes.get(pair) == shape else Schedule(shape, self._rng)
            for pair, shape in shapes.items()
        }
        self._shapes = shapes
        self._set_segmented(any(shape.get("corrupt_percent") for shape in shapes.values()))
        for device in {self._devices[destination] for _, destination in shapes} - self._senders.keys():
            self._senders[device] = _packet_socket(device, 0)
        if shapes and self._aside is not None and self._aside not in self._receivers:
            self._listen(self._aside)
        if not shapes:
            self._flush()
            self._forget_all()
        return {}

    async def stats(self, message: dict[str, Any]) -> dict[str, Any]:
        """Count the packets that were relayed, lost, and are queued."""
        return {"relayed": self._relayed, "lost": self._lost, "queued": len(self._waiting)}

    def _set_segmented(self, is_segmented: bool) -> None:
        """Have the kernel segment packets and fill in their checksums on the way here, or not. Raises OSError."""
        if is_segmented != self._is_segmented and self._into is not None:
            for command in (_ETHTOOL_STXCSUM, _ETHTOOL_SGSO):
                _set_offload(self._into, command, not is_segmented)
            self._is_segmented = is_segmented

    def close(self) -> None:
        """Close every socket. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._forget_all()

    def _listen(self, device: str) -> None:
        receiver = self._receivers[device] = _packet_socket(device, _ETH_P_ALL)
        asyncio.get_running_loop().add_reader(receiver, self._read, receiver)

    def _forget_all(self) -> None:
        for receiver in self._receivers.values():
            asyncio.get_running_loop().remove_reader(receiver)
        for port in (*self._receivers.values(), *self._senders.values()):
            port.close()
        self._receivers.clear()
        self._senders.clear()

    def _read(self, port: socket.socket) -> None:
        now_s = asyncio.get_running_loop().time()
        for _ in range(MAX_PACKETS_PER_WAKE):
            try:
                frame, address = port.recvfrom(MAX_FRAME_BYTES)
            except BlockingIOError:
                break
            except OSError:  # the device went down for a moment
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
                sent = schedule.damaged(frame)
                heapq.heappush(self._waiting, (due_s, next(self._order), destination, sent))
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
        port = self._senders.get(self._devices[destination])
        try:
            if port is not None:
                port.send(frame)
                self._relayed += 1
        except OSError:  # a full device queue loses packets here as elsewhere
            self._lost += 1

    def _flush(self) -> None:
        """Send all queued packets, in order, because nothing is shaped any more."""
        for _, _, destination, frame in sorted(self._waiting):
            self._send(destination, frame)
        self._waiting.clear()
        self._send_due()


def _set_offload(device: str, command: int, is_on: bool) -> None:
    """Turn one of the kernel's offloads on a device on or off. Raises OSError."""
    value = bytearray(struct.pack("=II", command, is_on))
    pointer = ctypes.addressof((ctypes.c_char * len(value)).from_buffer(value))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, struct.pack("16sP16x", device.encode(), pointer))


def _packet_socket(device: str, protocol: int) -> socket.socket:
    """Open a socket for whole frames on a device; with protocol 0 it only sends. Raises OSError."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    try:
        port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        with contextlib.suppress(OSError):  # older kernels: outgoing frames are recognised by their type when read
            port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        if protocol == 0:
            port.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, RELAYED_MARK)
        port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        port.setblocking(False)
        port.bind((device, protocol))
    except BaseException:
        port.close()
        raise
    return port


def main() -> None:
    """Run the relay on the path that is the first argument."""
    relay = LinkRelay()
    run_helper({"open": relay.open, "shape": relay.shape, "stats": relay.stats})


if __name__ == "__main__":
    main()
