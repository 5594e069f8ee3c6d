"""Commands in network namespaces, and commands of a cluster that are not any host's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.clusters.netns_calls import namespace_path
from harness.faults.local_access import LocalAccess
from nemesis.mechanisms.hosts import CheckedShell

__all__ = ["NamespaceShell", "run_command"]


async def run_command(
    host: str, argv: Sequence[str], *, stdin: str = "", environment: Mapping[str, str] | None = None
) -> str:
    """Run a short command and return its standard output; `host` is for the message only. Raises ShellError."""
    return await CheckedShell(LocalAccess(environment or {})).run(host, argv, stdin=stdin)


class NamespaceShell(CheckedShell):
    """A shell on each host of a cluster whose hosts are named network namespaces.

    `namespaces` maps hosts to namespace names; `nsenter` is the program; `environment` is added to every
    command's environment.
    """

    def __init__(self, namespaces: Mapping[str, str], *, nsenter: str, environment: Mapping[str, str]) -> None:
        super().__init__(LocalAccess(environment, enter=self.prefix))
        self._namespaces = dict(namespaces)
        self._nsenter = nsenter

    def prefix(self, host: str) -> list[str]:
        """What to put before a command line to run it on `host`."""
        return [self._nsenter, f"--net={namespace_path(self._namespaces[host])}", "--"]
