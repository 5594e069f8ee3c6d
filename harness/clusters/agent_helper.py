"""Helper processes on hosts with agents: modules of the harness that run there beside the replicas.

The helpers need nothing but the standard library and are brought along in one archive. An agent starts them, so they
carry the run's mark and end with it; the harness speaks to them over a Unix socket in the agent's directory, by a
short command of the agent's. That survives broken connections as every request to an agent does.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

from harness.clusters.agent_files import put_file
from harness.clusters.agent_link import AgentLink
from nemesis.mechanisms.shell import ShellError

__all__ = ["START_TIMEOUT_S", "AgentHelper", "helper_archive"]

MODULES = tuple(
    f"harness.clusters.{name}" for name in ("clock_keeper", "control_server", "link_meter", "link_relay")
)
"""What the archive holds, beside the packages that these are in."""

_ARCHIVE = "helpers.zip"
START_TIMEOUT_S = 60.0
"""For a helper that was just started to listen: an emulated machine takes seconds to start a Python."""

_LISTEN_TIMEOUT_S = 5.0
"""For one that listened before: if it does not now, it has ended."""

_REQUEST_TIMEOUT_S = 20.0
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can say: the same source gives the same bytes."""

_ASK = """
import os, socket, sys, time
path, end = sys.argv[1], time.monotonic() + float(sys.argv[2])
os.chdir(os.path.dirname(path))
while True:
    asker = socket.socket(socket.AF_UNIX)
    try:
        asker.connect(os.path.basename(path))
        break
    except OSError as error:
        if time.monotonic() > end:
            sys.exit("does not listen: %s" % error)
        asker.close()
        time.sleep(0.05)
asker.sendall(sys.stdin.buffer.read())
asker.shutdown(socket.SHUT_WR)
while data := asker.recv(1 << 16):
    sys.stdout.buffer.write(data)
"""


def helper_archive() -> bytes:
    """The modules that run on hosts, as an archive that a Python can import from."""
    names = {*MODULES}
    for module in MODULES:
        names |= {module.rsplit(".", depth)[0] for depth in range(1, module.count(".") + 1)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(names):
            found = importlib.util.find_spec(name)
            if found is None or found.origin is None:
                raise ImportError(f"the harness lacks its own module {name}")
            path = name.replace(".", "/") + ("/__init__.py" if found.submodule_search_locations else ".py")
            archive.writestr(zipfile.ZipInfo(path, _FIXED_TIME), Path(found.origin).read_bytes())
    return buffer.getvalue()


class AgentHelper:
    """One helper on one host. `directory` is the agent's; `python` the interpreter there."""

    def __init__(self, link: AgentLink, *, module: str, directory: str, python: str) -> None:
        self._link = link
        self._module = module
        self._python = python
        self._archive = os.path.join(directory, _ARCHIVE)
        name = module.rpartition(".")[2]
        self._path = os.path.join(directory, f"{name}.sock")
        self._log = os.path.join(directory, f"{name}.log")
        self.pid: int | None = None
        """Its process there, once it was started."""

    @staticmethod
    async def bring(link: AgentLink, directory: str) -> None:
        """Bring the archive of all helpers to a host, before any is started there. Raises ShellError."""
        await put_file(link, os.path.join(directory, _ARCHIVE), helper_archive())

    async def start(self) -> None:
        """Start the helper; it listens, or will in a moment. Raises ShellError."""
        arguments = {
            "argv": [self._python, "-P", "-S", "-m", self._module, self._path],
            "environment": {"PYTHONPATH": self._archive},
            "log": self._log,
        }
        self.pid = int((await self._link.request("spawn", arguments))["pid"])

    async def request(
        self,
        op: str,
        *,
        timeout_s: float = _REQUEST_TIMEOUT_S,
        patience_s: float = _LISTEN_TIMEOUT_S,
        **fields: Any,
    ) -> dict[str, Any]:
        """Ask for an operation and return the answer; `patience_s` is for the helper to listen. Raises ShellError."""
        line = json.dumps({"id": 0, "op": op, **fields}) + "\n"
        argv = [self._python, "-I", "-S", "-c", _ASK, self._path, str(patience_s)]
        status, output, errors = await self._link.run(argv, stdin=line, timeout_s=patience_s + timeout_s)
        what = [self._module, op]
        try:
            answer: dict[str, Any] = json.loads(output)
        except ValueError:
            _, log, _ = await self._link.run(["tail", "-n", "3", self._log])
            said = (errors.strip().splitlines() or ["it answered nothing"])[-1]
            raise ShellError(self._link.host, what, status, f"{said}; {log.strip()[-300:]}") from None
        if not answer.get("ok"):
            raise ShellError(self._link.host, what, 1, str(answer.get("error")))
        return answer
