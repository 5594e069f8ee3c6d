"""Limits how much is sent to one peer in a second (S0, S2; R: peerPushQuota)."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Quota"]

SECOND_NS = 1_000_000_000
MAX_FACTOR = 64
"""With the default quota, 64 times 20 MiB a second is more than a disk sustains, and so no limit any more."""


class Quota:
    """Bytes that may be sent in each second of a clock; the second in which sending begins is counted pro rata.

    A peer that has used up a second's bytes and is no nearer than it was a second before, because as much was appended
    meanwhile, would never catch up: its quota is doubled from the next second on, for as long as it is throttled.
    """

    def __init__(self, limit_bytes: int, now_ns: Callable[[], int]) -> None:
        self._limit_bytes = limit_bytes
        self._now_ns = now_ns
        self._second = -2
        self._left_bytes = 0
        self._factor = 1
        self._judged_second = -2
        self._behind_bytes = 0

    def use(self, size_bytes: int) -> None:
        """Count bytes that were sent."""
        self._turn()
        self._left_bytes -= size_bytes

    def wait_ns(self, behind_bytes: int | None = None) -> int:
        """Time until the next second if this one's bytes are used up; 0 while some are left. `behind_bytes`: how far
        the peer is behind, if that can grow."""
        now_ns = self._turn()
        if self._left_bytes > 0:
            return 0
        if behind_bytes is not None and self._judged_second != self._second:
            if self._judged_second != self._second - 1:
                self._factor = 1
            elif behind_bytes >= self._behind_bytes:
                self._factor = min(2 * self._factor, MAX_FACTOR)
            self._judged_second, self._behind_bytes = self._second, behind_bytes
        return (self._second + 1) * SECOND_NS - now_ns

    def _turn(self) -> int:
        now_ns = self._now_ns()
        second, since_ns = divmod(now_ns, SECOND_NS)
        if second != self._second:
            goes_on = second == self._second + 1
            self._left_bytes = self._limit_bytes * self._factor
            if not goes_on:
                self._left_bytes -= self._limit_bytes * since_ns // SECOND_NS
            self._second = second
        return now_ns
