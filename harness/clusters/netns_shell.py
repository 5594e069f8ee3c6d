"""Commands in network namespaces: how a `netns` cluster lets mechanisms act on its hosts."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping, Sequence

from harness.clusters.netns_calls import namespace_path
from nemesis.mechanisms.shell import ShellError

__all__ = ["NamespaceShell", "run_command"]

_TIMEOUT_S = 20.0
"""Commands here take milliseconds; one that takes this long hangs and is killed."""

_NOT_STARTED = 127


async def run_command(
    host: str, argv: Sequence[str], *, stdin: str = "", environment: Mapping[str, str] | None = None
) -> str:
    """Run a short command and return its standard output; `host` is for the message only.

    The command has a session of its own, so that Ctrl-C on the terminal does not tear it in two, and is
    waited for even when the caller is cancelled: what it did is known. Raises ShellError.
    """
    task = asyncio.ensure_future(_run(host, argv, stdin, environment or {}))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # looked at, so that it is not reported as lost
        raise


async def _run(host: str, argv: Sequence[str], stdin: str, environment: Mapping[str, str]) -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=PIPE if stdin else DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    except OSError as error:
        raise ShellError(host, argv, _NOT_STARTED, str(error)) from None
    try:
        output, errors = await asyncio.wait_for(process.communicate(stdin.encode() or None), _TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise ShellError(host, argv, -9, f"killed: no end after {_TIMEOUT_S:g} s") from None
    status = process.returncode or 0
    if status != 0:
        raise ShellError(host, argv, status, errors.decode(errors="replace"))
    return output.decode(errors="replace")


class NamespaceShell:
    """A shell on each host of a cluster whose hosts are named network namespaces.

    `namespaces` maps hosts to namespace names; `nsenter` is the program; `environment` is added to every
    command's environment.
    """

    def __init__(self, namespaces: Mapping[str, str], *, nsenter: str, environment: Mapping[str, str]) -> None:
        self._namespaces = dict(namespaces)
        self._nsenter = nsenter
        self._environment = dict(environment)

    def prefix(self, host: str) -> list[str]:
        """What to put before a command line to run it on `host`."""
        return [self._nsenter, f"--net={namespace_path(self._namespaces[host])}", "--"]

    async def run(self, host: str, argv: Sequence[str], *, stdin: str = "") -> str:
        """See nemesis.mechanisms.shell.HostShell."""
        return await run_command(host, [*self.prefix(host), *argv], stdin=stdin, environment=self._environment)
