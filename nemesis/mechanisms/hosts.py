"""What a mechanism needs from a cluster to act inside its hosts: running a command, overwriting and reading a file.

`CheckedShell` turns such an access into a shell in which every failed command is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from nemesis.mechanisms.shell import ShellError

__all__ = ["DIRECTORIES_SCRIPT", "EMPTY_SCRIPT", "CheckedShell", "HostAccess", "script_arguments"]

_TIMEOUT_S = 20.0
"""Commands of a checked shell take milliseconds; one that takes this long hangs and is killed."""


DIRECTORIES_SCRIPT = """
import os, sys
for path in sorted(entry.path for entry in os.scandir(sys.argv[1]) if entry.is_dir(follow_symlinks=False)):
    print(path)
"""
"""Prints the directories in a directory, one per line. Small container images have no `find`; all have Python."""

EMPTY_SCRIPT = """
import os, shutil, sys
for entry in list(os.scandir(sys.argv[1])):
    if not entry.name.startswith(tuple(sys.argv[2:])):
        (shutil.rmtree if entry.is_dir(follow_symlinks=False) else os.unlink)(entry.path)
"""
"""Removes everything in a directory except names with one of the given prefixes."""


def script_arguments(python: str, script: str, *arguments: str) -> Sequence[str]:
    """The command that runs one of the scripts above with a host's Python, isolated from its site packages."""
    return [python, "-I", "-S", "-c", script, *arguments]


class HostAccess(Protocol):
    """Access to the hosts of a cluster, with at least the rights of its replicas."""

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
        seconds, and what it had printed by then is returned. It may not have ended yet: a command that waits in the
        kernel ends later."""
        ...

    async def overwrite(self, host: str, path: str, data: bytes) -> None:
        """Overwrite the beginning of an existing file in one write, so that processes that have it mapped see it."""
        ...

    async def read(self, host: str, path: str, size_bytes: int) -> bytes:
        """The first bytes of a file."""
        ...

    async def now(self, host: str) -> tuple[int, int]:
        """The host's true wall and monotonic clocks, in nanoseconds."""
        ...

    def python(self, host: str) -> str:
        """The path of a Python 3 on the host."""
        ...


class CheckedShell:
    """A nemesis.mechanisms.shell.HostShell that uses a HostAccess."""

    def __init__(self, access: HostAccess) -> None:
        self._access = access

    async def run(self, host: str, argv: Sequence[str], *, stdin: str = "") -> str:
        """Run `argv` on `host` and return its standard output. Raises ShellError for any status but 0."""
        status, output, errors = await self._access.run(host, argv, stdin=stdin, timeout_s=_TIMEOUT_S)
        if status != 0:
            raise ShellError(host, argv, status, errors or (f"killed after {_TIMEOUT_S:g} s" if status == -9 else ""))
        return output
