"""What a mechanism inside the hosts asks of a cluster: to run a command there, and to overwrite a small file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

__all__ = ["HostAccess"]


class HostAccess(Protocol):
    """A way into the hosts of a cluster, with the rights that its replicas have or more."""

    async def run(
        self,
        host: str,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> tuple[int, str, str]:
        """Run a command on a host; returns (status, output, errors). Status -9: it was killed after `timeout_s`
        seconds, and what it had printed by then is returned. It need not have ended then: one that waits in the
        kernel ends later."""
        ...

    async def overwrite(self, host: str, path: str, data: bytes) -> None:
        """Write `data` over the beginning of an existing file in one write, so that whoever has it mapped sees it."""
        ...

    async def read(self, host: str, path: str, size_bytes: int) -> bytes:
        """The first bytes of a file."""
        ...

    async def now(self, host: str) -> tuple[int, int]:
        """The host's true wall and monotonic clocks, in nanoseconds."""
        ...

    def python(self, host: str) -> str:
        """A Python 3 there."""
        ...
