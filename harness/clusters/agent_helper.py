"""Helper processes on hosts with agents: modules of the harness that run there beside the replicas.

The helpers need only the standard library; hosts that lack the harness's files are sent them in one archive. The agent
starts the helpers, so they carry the run's mark and end with it, and forwards the harness's requests to them over a
Unix socket in the agent's directory. Like every request to an agent, these survive broken connections.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

from harness.clusters.agent_access import put_file
from harness.clusters.agent_link import AgentGone, AgentLink
from nemesis.mechanisms.archives import add_module
from nemesis.mechanisms.shell import ShellError

__all__ = ["START_TIMEOUT_S", "AgentHelper", "HelperRefused", "helper_archive"]

MODULES = tuple(
    f"harness.clusters.{name}" for name in ("clock_helper", "control_server", "link_meter", "link_relay", "name_server")
)
"""The modules in the archive, besides the packages that contain them."""

_ARCHIVE = "helpers.zip"
START_TIMEOUT_S = 60.0
"""Time for a helper that was just started to listen: an emulated machine takes seconds to start a Python."""

_LISTEN_TIMEOUT_S = 5.0
"""The same for one that listened before: if it does not by then, it has ended."""

_REQUEST_TIMEOUT_S = 20.0
_GRACE_S = 5.0
"""Added to the helper's own timeout, for the round trip and one reconnection."""


def helper_archive() -> bytes:
    """The modules that run on hosts, as an archive that a Python can import from."""
    names = {*MODULES}
    for module in MODULES:
        names |= {module.rsplit(".", depth)[0] for depth in range(1, module.count(".") + 1)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(names):
            found = importlib.util.find_spec(name)
            if found is None or found.origin is None:
                raise ImportError(f"the harness lacks its own module {name}")
            path = name.replace(".", "/") + ("/__init__.py" if found.submodule_search_locations else ".py")
            add_module(archive, path, Path(found.origin).read_bytes())
    return buffer.getvalue()


class HelperRefused(ShellError):
    """A helper rejected a request; `reply` is its answer."""

    def __init__(self, host: str, what: list[str], reply: dict[str, Any]) -> None:
        super().__init__(host, what, 1, str(reply.get("error")))
        self.reply = reply


class AgentHelper:
    """One helper on one host, through an agent that was greeted. `import_path` is where an interpreter there finds the
    modules, if not in the archive that `bring` sends."""

    def __init__(self, link: AgentLink, *, module: str, import_path: str | None = None) -> None:
        self._link = link
        self._module = module
        self._import_path = import_path or os.path.join(link.directory, _ARCHIVE)
        name = module.rpartition(".")[2]
        self._path = os.path.join(link.directory, f"{name}.sock")
        self._log = os.path.join(link.directory, f"{name}.log")
        self.pid: int | None = None
        """Its process id on the host, once it was started."""

    @staticmethod
    async def bring(link: AgentLink) -> None:
        """Send the archive of all helpers to a host, before any is started there. Raises ShellError."""
        await put_file(link, os.path.join(link.directory, _ARCHIVE), helper_archive())

    async def start(self) -> None:
        """Start the helper; it may begin to listen only after this returns. Raises ShellError."""
        arguments = {
            "argv": [self._link.python, "-P", "-S", "-m", self._module, self._path],
            "environment": {"PYTHONPATH": self._import_path},
            "log": self._log,
        }
        self.pid = int((await self._link.request("spawn", arguments))["pid"])

    async def request(
        self,
        op: str,
        *,
        timeout_s: float = _REQUEST_TIMEOUT_S,
        listens_within_s: float = _LISTEN_TIMEOUT_S,
        **fields: Any,
    ) -> dict[str, Any]:
        """Request an operation and return the answer; the helper must listen within `listens_within_s` seconds. Raises
        HelperRefused when it rejects the request, ShellError when it has ended or does not answer."""
        arguments = {
            "name": os.path.basename(self._path),
            "line": json.dumps({"id": 0, "op": op, **fields}),
            "timeout_s": timeout_s,
            "listens_within_s": listens_within_s,
        }
        what = [self._module, op]
        try:
            said = await self._link.request_to_its_end(
                "ask", arguments, timeout_s=listens_within_s + timeout_s + _GRACE_S
            )
            answer: dict[str, Any] = json.loads(said["answer"])
        except AgentGone:
            raise
        except (ShellError, ValueError) as error:
            _, log, _ = await self._link.run(["tail", "-n", "3", self._log])
            raise ShellError(self._link.host, what, 1, f"{error}; {log.strip()[-300:]}") from None
        if not answer.get("ok"):
            raise HelperRefused(self._link.host, what, answer)
        return answer
