"""Reading an answer of a binary protocol, field by field."""

from __future__ import annotations

import struct

__all__ = ["FieldReader"]


class FieldReader:
    """Reads the fields of an answer in sequence. Raises ValueError if it ends too early."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size_bytes: int) -> bytes:
        piece = self._data[self._at : self._at + size_bytes]
        if len(piece) < size_bytes:
            raise ValueError("the answer ends within a field")
        self._at += size_bytes
        return piece

    def number(self, form: str) -> int:
        """A number in network byte order, in a format of `struct`."""
        return int(struct.unpack(f">{form}", self.take(struct.calcsize(f">{form}")))[0])

    @property
    def left(self) -> int:
        """Bytes that have not been read."""
        return len(self._data) - self._at
