"""A way to run commands on hosts, which is all that a mechanism asks of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["HostShell", "ShellError"]


class ShellError(Exception):
    """A command on a host failed. The message is one line: host, command, what it said."""

    def __init__(self, host: str, argv: Sequence[str], status: int, output: str) -> None:
        said = " ".join(output.split()) or "no output"
        super().__init__(f"{host}: `{' '.join(argv)}` ended with status {status}: {said}")
        self.host = host
        self.status = status
        self.said = said
        """What it said, in one line."""


class HostShell(Protocol):
    """Runs short privileged commands in the place where a host's network, clock and disks are."""

    async def run(self, host: str, argv: Sequence[str], *, stdin: str = "") -> str:
        """Run `argv` on `host` with `stdin` as its input and return its standard output.

        A command that was started is waited for, also when the caller is cancelled, so that what it did is
        known. Raises ShellError when it ends with another status than 0 or cannot be started.
        """
        ...
