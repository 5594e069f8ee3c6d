"""The protocol of an HA connection (S4; R: HAConnection, HAClient). Integers are big-endian.

slave to master   8 bytes: the position up to which the slave has the log
master to slave   8 bytes: the position of what follows; 4 bytes: its size; the bytes of the log. Size 0 is a
                  heartbeat, whose position is the one that the next bytes will have
"""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = ["HEADER_SIZE_BYTES", "MAX_FRAME_BYTES", "Frame", "FrameError", "FrameReader", "ReportReader"]

MAX_FRAME_BYTES = 16 << 20
"""The most bytes of the log in one frame that a slave accepts; masters send 32 KB (R) by default, at most 8 MB."""

_REPORT = struct.Struct(">q")
_HEADER = struct.Struct(">qi")
HEADER_SIZE_BYTES = _HEADER.size


class FrameError(Exception):
    """What arrived is not a frame."""


class Frame(NamedTuple):
    """Bytes of the master's log from `position` on."""

    position: int
    body: bytes

    def encode(self) -> bytes:
        return _HEADER.pack(self.position, len(self.body)) + self.body


def encode_report(position: int) -> bytes:
    """A slave's report: it has the log up to `position`."""
    return _REPORT.pack(position)


class ReportReader:
    """Decodes reports from a stream, however that is split."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[int]:
        """The first and the newest report that are complete now; those in between add nothing."""
        data = self._rest + data
        whole = len(data) - len(data) % _REPORT.size
        self._rest = data[whole:]
        if not whole:
            return []
        first, newest = _REPORT.unpack_from(data, 0)[0], _REPORT.unpack_from(data, whole - _REPORT.size)[0]
        return [first] if whole == _REPORT.size else [first, newest]


class FrameReader:
    """Decodes frames from a stream, however that is split."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now. Raises FrameError."""
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        at = 0
        while len(buffer) - at >= HEADER_SIZE_BYTES:
            position, size_bytes = _HEADER.unpack_from(buffer, at)
            if position < 0 or not 0 <= size_bytes <= MAX_FRAME_BYTES:
                raise FrameError(f"the master sends no frame: position {position}, size {size_bytes}")
            end = at + HEADER_SIZE_BYTES + size_bytes
            if len(buffer) < end:
                break
            frames.append(Frame(position, bytes(buffer[at + HEADER_SIZE_BYTES : end])))
            at = end
        del buffer[:at]
        return frames
