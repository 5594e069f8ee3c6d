"""Who holds how many bytes: a running total, and the greediest holder when the total is too large."""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["NOTABLE_BYTES", "ByteAccount"]

NOTABLE_BYTES = 16 * 1024
"""Smaller holders are only counted in the total: thousands of them would not fill any limit."""

HolderT = TypeVar("HolderT")


class ByteAccount(Generic[HolderT]):
    """Bytes held by each of many holders. `set` is O(1); `greediest` scans all and is for emergencies."""

    __slots__ = ("_held", "total_bytes")

    def __init__(self) -> None:
        self.total_bytes = 0
        self._held: dict[HolderT, int] = {}

    def set(self, holder: HolderT, size_bytes: int) -> None:
        """`holder` now holds `size_bytes` in all; zero forgets it."""
        self.total_bytes += size_bytes - self._held.get(holder, 0)
        if size_bytes:
            self._held[holder] = size_bytes
        else:
            self._held.pop(holder, None)

    def change(self, holder: HolderT, before_bytes: int, now_bytes: int) -> None:
        """`holder` now holds `now_bytes` in all. For holders that are not also given to `set`, and cheaper: small ones
        are not recorded."""
        self.total_bytes += now_bytes - before_bytes
        if now_bytes > NOTABLE_BYTES:
            self._held[holder] = now_bytes
        elif before_bytes > NOTABLE_BYTES:
            self._held.pop(holder, None)

    def held_bytes(self, holder: HolderT) -> int:
        return self._held.get(holder, 0)

    def greediest(self) -> HolderT | None:
        """The holder of most bytes (the earliest of equals); None when nobody holds any."""
        return max(self._held, key=self._held.__getitem__, default=None)
