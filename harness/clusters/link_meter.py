"""The link meter: sends and receives the packets that measure the quality of a host's links.

It runs on a host with an agent, beside the tested programs and outside their faults. Packets are stamped by the host's
wall clock when sent, and by the kernel on arrival; the caller knows how the clocks of two hosts differ. It takes
requests on the Unix socket that its argument names, in the format of control_server:

    open      {"address": own}   -> {"port"}    where it receives packets; later calls return the same
    send      {"measurement": n, "to": [[address, port], ...], "count", "size_bytes", "spacing_s"}
              -> {"sent_ns": {address: [time of each]}}    answered when all are sent; 0 for one that failed to send
    arrivals  {"measurement": n, "sources": [address, ...], "count", "wait_s"}
              -> {"arrivals": {address: [[number, time], ...]}, "damaged": {address: count}}    in order, as soon as
              `count` different ones have come from each source, or after `wait_s` seconds
    refused   -> {"segments"}    TCP segments that the host's kernel has dropped for a wrong checksum since it started

Only packets of the newest measurement seen are kept. They carry a checksum of their own and none of UDP's, so that a
packet with a flipped bit arrives here and is counted, instead of being dropped by the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
import zlib
from pathlib import Path
from typing import Any

from harness.clusters.control_server import run_helper

__all__ = ["HEADER_BYTES", "LinkMeter", "arrival_ns", "main", "refused_segments", "stamp_arrivals"]

MAX_ARRIVALS = 200_000
"""Packets kept per measurement: twice what a hundred peers send."""
MAX_PACKETS_PER_WAKE = 256

_SO_TIMESTAMPNS = 35
_SO_NO_CHECK = 11
_TIMESPEC = struct.Struct("=qq")
_HEADER = struct.Struct("!III")
"""Packet number, measurement number, and a CRC-32 checksum of both and of all that follows the header."""
HEADER_BYTES = _HEADER.size
_RECEIVE_BUFFER_BYTES = 4 << 20
_ANCILLARY_BYTES = 128


class LinkMeter:
    """One host's end of every link."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._measurement = 0
        self._arrivals: dict[str, list[tuple[int, int]]] = {}
        self._different: dict[str, set[int]] = {}
        self._count = 0
        self._damaged: dict[str, int] = {}
        self._news = asyncio.Event()

    async def open(self, message: dict[str, Any]) -> dict[str, Any]:
        """Bind the socket, unless it is bound already."""
        if self._socket is None:
            made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                stamp_arrivals(made)
                made.setsockopt(socket.SOL_SOCKET, _SO_NO_CHECK, 1)
                made.setblocking(False)
                made.bind((message["address"], 0))
            except BaseException:
                made.close()
                raise
            asyncio.get_running_loop().add_reader(made, self._read, made)
            self._socket = made
        return {"port": self._socket.getsockname()[1]}

    async def send(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send to every destination in turn, pausing `spacing_s` between two rounds."""
        if self._socket is None:
            raise ValueError("the meter was not opened")
        measurement, size_bytes = int(message["measurement"]), int(message["size_bytes"])
        sent_ns: dict[str, list[int]] = {address: [] for address, _ in message["to"]}
        for number in range(int(message["count"])):
            data = _packet(number, measurement, size_bytes)
            for address, port in message["to"]:
                at_ns = time.time_ns()
                try:
                    self._socket.sendto(data, (address, port))
                except OSError:  # counts as not sent
                    at_ns = 0
                sent_ns[address].append(at_ns)
            if message["spacing_s"]:
                await asyncio.sleep(message["spacing_s"])
        return {"sent_ns": sent_ns}

    async def arrivals(self, message: dict[str, Any]) -> dict[str, Any]:
        """Wait for packets, and return when and from where they arrived."""
        measurement, sources, count = int(message["measurement"]), message["sources"], int(message["count"])
        self._begin(measurement)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(message["wait_s"]):
                while self._measurement == measurement and any(
                    len(self._different.get(source, ())) < count for source in sources
                ):
                    self._news.clear()
                    await self._news.wait()
        if self._measurement != measurement:
            raise ValueError(f"measurement {measurement} is over")
        return {
            "arrivals": {source: self._arrivals.get(source, []) for source in sources},
            "damaged": {source: self._damaged.get(source, 0) for source in sources},
        }

    async def refused(self, message: dict[str, Any]) -> dict[str, Any]:
        """Read the kernel's counter."""
        return {"segments": refused_segments(Path("/proc/net/snmp").read_text(encoding="ascii"))}

    def _begin(self, measurement: int) -> None:
        if measurement > self._measurement:
            self._measurement = measurement
            self._arrivals, self._different, self._count, self._damaged = {}, {}, 0, {}
            self._news.set()

    def _read(self, receiver: socket.socket) -> None:
        for _ in range(MAX_PACKETS_PER_WAKE):
            try:
                data, ancillary, _, (source, _port) = receiver.recvmsg(1 << 16, _ANCILLARY_BYTES)
            except OSError:
                break
            if len(data) < HEADER_BYTES:
                continue
            number, measurement, checksum = _HEADER.unpack_from(data)
            if checksum != _checksum(data):
                self._damaged[source] = self._damaged.get(source, 0) + 1
                continue
            self._begin(measurement)
            if measurement == self._measurement and self._count < MAX_ARRIVALS:
                self._count += 1
                self._arrivals.setdefault(source, []).append((number, arrival_ns(ancillary)))
                self._different.setdefault(source, set()).add(number)
        self._news.set()


def _checksum(data: bytes) -> int:
    return zlib.crc32(data[HEADER_BYTES:], zlib.crc32(data[: HEADER_BYTES - 4]))


def _packet(number: int, measurement: int, size_bytes: int) -> bytes:
    plain = _HEADER.pack(number, measurement, 0).ljust(size_bytes, b"\0")
    return _HEADER.pack(number, measurement, _checksum(plain)) + plain[HEADER_BYTES:]


def refused_segments(shown: str) -> int:
    """TCP segments with a wrong checksum, from the text of /proc/net/snmp. Raises ValueError if it does not say."""
    names, values = [line.split() for line in shown.splitlines() if line.startswith("Tcp:")]
    return int(values[names.index("InCsumErrors")])


def stamp_arrivals(receiver: socket.socket) -> None:
    """Have the kernel stamp packets that a socket receives, and enlarge its receive buffer. Raises OSError."""
    with contextlib.suppress(OSError):
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
    receiver.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)


def arrival_ns(ancillary: list[tuple[int, int, bytes]]) -> int:
    """When the kernel received a packet, from its ancillary data; the present time if that has no timestamp."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(data) >= _TIMESPEC.size:
            seconds, nanoseconds = _TIMESPEC.unpack_from(data)
            return int(seconds * 1_000_000_000 + nanoseconds)
    return time.time_ns()


def main() -> None:
    """Run the meter on the path that is the first argument."""
    meter = LinkMeter()
    run_helper({"open": meter.open, "send": meter.send, "arrivals": meter.arrivals, "refused": meter.refused})


if __name__ == "__main__":
    main()
