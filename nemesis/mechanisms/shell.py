"""The interface for running commands on hosts, which is all that a mechanism needs from a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["HostShell", "ShellError"]


class ShellError(Exception):
    """A command on a host failed. The message is one line: host, command, status, output."""

    def __init__(self, host: str, argv: Sequence[str], status: int, output: str) -> None:
        said = " ".join(output.split()) or "no output"
        super().__init__(f"{host}: `{' '.join(argv)}` ended with status {status}: {said}")
        self.host = host
        self.status = status
        self.said = said
        """The command's output, in one line."""


class HostShell(Protocol):
    """Runs short privileged commands in a host's own environment, with its network, clock and disks."""

    async def run(self, host: str, argv: Sequence[str], *, stdin: str = "") -> str:
        """Run `argv` on `host` with `stdin` as its input and return its standard output.

        Waits for a command that was started even if the caller is cancelled, so that its effect is known. Raises
        ShellError when it ends with a status other than 0 or cannot be started.
        """
        ...
