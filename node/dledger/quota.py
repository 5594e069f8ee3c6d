"""How much may go to one peer in a second (S0, S2; R: peerPushQuota), and how fast while others wait."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Pace", "Quota"]


class Pace:
    """Rests after each push for as long as it took: half the time is left to others, whatever it is that is scarce.
    Not in a second after one in which the peer did not gain on the log: it would never catch up with busy senders."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._second = -1
        self._lacking = 0
        self._gains = True
        self._began_ns = 0
        self._until_ns = 0

    def began(self) -> None:
        """A push was sent."""
        self._began_ns = self._now_ns()

    def ended(self) -> None:
        """The last push was answered."""
        now_ns = self._now_ns()
        self._until_ns = now_ns + (now_ns - self._began_ns)

    def gains(self, lacking: int) -> bool:
        """Whether the peer, which lacks so many entries now, has gained in the last second that was looked at."""
        second = self._now_ns() // 1_000_000_000
        if second != self._second:
            self._gains = second != self._second + 1 or lacking < self._lacking
            self._second, self._lacking = second, lacking
        return self._gains

    def wait_ns(self) -> int:
        """Until the rest is over; 0 when it is."""
        return max(self._until_ns - self._now_ns(), 0)


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
