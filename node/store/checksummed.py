"""Bodies with their checksums: computed once, where the bodies are made, for whoever stores them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

__all__ = ["ChecksummedBodies", "crcs_of"]


class ChecksummedBodies(list[bytes]):
    """Bodies with the CRC-32 of each: `crcs`, or computed here."""

    __slots__ = ("crcs",)

    def __init__(self, bodies: Iterable[bytes], crcs: Sequence[int] | None = None) -> None:
        super().__init__(bodies)
        self.crcs: Sequence[int] = list(map(zlib.crc32, self)) if crcs is None else crcs


def crcs_of(bodies: Sequence[bytes]) -> Sequence[int]:
    """The CRC-32 of each."""
    return bodies.crcs if isinstance(bodies, ChecksummedBodies) else list(map(zlib.crc32, bodies))
