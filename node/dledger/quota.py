"""How much may go to one peer in a second (S0, S2; R: peerPushQuota)."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Quota"]


class Quota:
    """Bytes that may be sent in each second of a clock."""

    def __init__(self, limit_bytes: int, now_ns: Callable[[], int]) -> None:
        self._limit_bytes = limit_bytes
        self._now_ns = now_ns
        self._second = -1
        self._used_bytes = 0

    def use(self, size_bytes: int) -> None:
        """Count bytes that were sent."""
        self._turn()
        self._used_bytes += size_bytes

    def wait_ns(self) -> int:
        """Until the next second when this one's bytes are used up; 0 while some are left."""
        now_ns = self._turn()
        if self._used_bytes < self._limit_bytes:
            return 0
        return (self._second + 1) * 1_000_000_000 - now_ns

    def _turn(self) -> int:
        now_ns = self._now_ns()
        if now_ns // 1_000_000_000 != self._second:
            self._second = now_ns // 1_000_000_000
            self._used_bytes = 0
        return now_ns
