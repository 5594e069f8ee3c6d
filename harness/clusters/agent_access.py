"""The way into hosts with agents, as mechanisms ask for it: see nemesis.mechanisms.hosts.HostAccess."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence

from harness.clusters.agent_link import AgentLink

__all__ = ["AgentAccess"]


class AgentAccess:
    """Commands, small files and clocks of hosts, through their agents and with their rights.

    `agent` and `python` give the link to a host's agent and the interpreter there. Every method raises ShellError when
    the host cannot be asked.
    """

    def __init__(self, agent: Callable[[str], AgentLink], python: Callable[[str], str]) -> None:
        self._agent = agent
        self._python = python

    async def run(
        self,
        host: str,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> tuple[int, str, str]:
        """Run a command; (status, output, errors). Killed after `timeout_s` seconds: status -9 and what it printed."""
        return await self._agent(host).run(argv, stdin=stdin, timeout_s=timeout_s, environment=environment)

    async def overwrite(self, host: str, path: str, data: bytes) -> None:
        """Write over the beginning of a file, which keeps its length and whoever has it mapped."""
        arguments = {"path": path, "data": base64.b64encode(data).decode(), "offset": 0, "keep": True}
        await self._agent(host).request("write", arguments)

    async def read(self, host: str, path: str, size_bytes: int) -> bytes:
        """The first bytes of a file."""
        answer = await self._agent(host).request("read", {"path": path, "offset": 0, "size_bytes": size_bytes})
        return base64.b64decode(answer["data"])

    async def now(self, host: str) -> tuple[int, int]:
        """The host's true wall and monotonic clocks, in nanoseconds; the agent itself is never under the shim."""
        answer = await self._agent(host).request("hello")
        return int(answer["wall_ns"]), int(answer["monotonic_ns"])

    def python(self, host: str) -> str:
        """A Python 3 there."""
        return self._python(host)
