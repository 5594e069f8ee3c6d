"""What a mechanism inside the hosts asks of a cluster: to run a command there, and to overwrite a small file.

Where a command that fails is an error and nothing else matters, `CheckedShell` makes a shell of any such access.
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
"""Prints the directories in a directory, one a line. Small images of containers have no `find`; all have Python."""

EMPTY_SCRIPT = """
import os, shutil, sys
for entry in list(os.scandir(sys.argv[1])):
    if not entry.name.startswith(tuple(sys.argv[2:])):
        (shutil.rmtree if entry.is_dir(follow_symlinks=False) else os.unlink)(entry.path)
"""
"""Removes everything in a directory but the names that begin in one of the ways given."""


def script_arguments(python: str, script: str, *arguments: str) -> Sequence[str]:
    """The words that run one of the scripts above by a host's Python, which loads nothing beside it."""
    return [python, "-I", "-S", "-c", script, *arguments]


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


class CheckedShell:
    """A nemesis.mechanisms.shell.HostShell by way of an access."""

    def __init__(self, access: HostAccess) -> None:
        self._access = access

    async def run(self, host: str, argv: Sequence[str], *, stdin: str = "") -> str:
        """Run `argv` on `host` and return its standard output. Raises ShellError for any status but 0."""
        status, output, errors = await self._access.run(host, argv, stdin=stdin, timeout_s=_TIMEOUT_S)
        if status != 0:
            raise ShellError(host, argv, status, errors or (f"killed after {_TIMEOUT_S:g} s" if status == -9 else ""))
        return output
