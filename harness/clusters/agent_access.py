"""Access to hosts through their agents: `HostAccess` for mechanisms (nemesis.mechanisms.hosts), and file transfer."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import tarfile
from collections.abc import Callable, Mapping, Sequence

from harness.clusters.agent_link import AgentLink
from harness.clusters.threads import begin_in_thread
from nemesis.mechanisms.shell import ShellError

__all__ = ["MAX_FILE_BYTES", "AgentAccess", "fetch_directory", "get_file", "put_file"]

MAX_FILE_BYTES = 128 << 20
"""Largest file that is read whole: the harness holds it in memory."""

_PIECE_BYTES = 512 * 1024
"""File content per message; base64 adds a third, and the result must fit host_agent.MAX_LINE_BYTES."""

_PACK_TIMEOUT_S = 300.0
"""Time for a host to pack its directory: some gigabytes of logs on a slow disk."""

_PIECE_TIMEOUT_S = 60.0


class AgentAccess:
    """Commands, small files and clocks of hosts, through their agents and with the agents' privileges.

    `agent` returns the link to a host's agent. Every method raises ShellError when
    the host does not answer.
    """

    def __init__(self, agent: Callable[[str], AgentLink]) -> None:
        self._agent = agent

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
        """Overwrite the beginning of a file in place: its length and its memory mappings stay."""
        arguments = {"path": path, "data": base64.b64encode(data).decode(), "offset": 0, "keep": True}
        await self._agent(host).request("write", arguments)

    async def read(self, host: str, path: str, size_bytes: int) -> bytes:
        """The first bytes of a file."""
        answer = await self._agent(host).request("read", {"path": path, "offset": 0, "size_bytes": size_bytes})
        return base64.b64decode(answer["data"])

    async def now(self, host: str) -> tuple[int, int]:
        """The host's true wall and monotonic clocks, in nanoseconds; the agent itself never runs under the shim."""
        answer = await self._agent(host).request("hello")
        return int(answer["wall_ns"]), int(answer["monotonic_ns"])

    def python(self, host: str) -> str:
        """The path of a Python 3 on the host."""
        return self._agent(host).python


async def put_file(link: AgentLink, path: str, content: bytes, *, mode: int = 0o644) -> None:
    """Write a file on a host as root, creating parent directories. Raises ShellError."""
    offset = 0
    while offset == 0 or offset < len(content):
        piece = content[offset : offset + _PIECE_BYTES]
        arguments = {"path": path, "data": base64.b64encode(piece).decode(), "offset": offset, "mode": mode}
        await link.request("write", arguments, timeout_s=_PIECE_TIMEOUT_S)
        offset += max(1, len(piece))


async def get_file(link: AgentLink, path: str) -> bytes:
    """Read a file of a host as root. Raises ShellError, also if it is larger than MAX_FILE_BYTES."""
    content = bytearray()
    while True:
        arguments = {"path": path, "offset": len(content), "size_bytes": _PIECE_BYTES}
        answer = await link.request("read", arguments, timeout_s=_PIECE_TIMEOUT_S)
        piece = base64.b64decode(answer["data"])
        content += piece
        if len(piece) < _PIECE_BYTES:
            return bytes(content)
        if len(content) > MAX_FILE_BYTES:
            raise ShellError(link.host, ["read", path], 1, f"the file is larger than {MAX_FILE_BYTES} bytes")


async def fetch_directory(link: AgentLink, path: str, local_path: str) -> None:
    """Copy the files of a host's directory into `local_path`, replacing files of the same names.

    A missing directory counts as an empty one. Raises ShellError, OSError.
    """
    packed = await link.request("pack", {"path": path}, timeout_s=_PACK_TIMEOUT_S)
    os.makedirs(local_path, exist_ok=True)
    archive_path = os.path.join(local_path, ".fetched.tar.gz")
    try:
        with open(archive_path, "wb") as file:
            while file.tell() < packed["size_bytes"]:
                arguments = {"path": packed["path"], "offset": file.tell(), "size_bytes": _PIECE_BYTES}
                answer = await link.request("read", arguments, timeout_s=_PIECE_TIMEOUT_S)
                piece = base64.b64decode(answer["data"])
                if not piece:
                    raise ShellError(link.host, ["read", packed["path"]], 1, "the file ended early")
                file.write(piece)
        await begin_in_thread(_unpack, archive_path, local_path)
    except (tarfile.TarError, EOFError) as error:
        raise ShellError(link.host, ["pack", path], 1, f"the data received is not a valid archive: {error}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(archive_path)


def _unpack(archive_path: str, local_path: str) -> None:
    """Unpack regular files and directories only, all below `local_path`: a host is trusted with nothing else."""
    with tarfile.open(archive_path, "r:gz") as archive:
        for member in archive:
            name = os.path.normpath(member.name)
            if os.path.isabs(name) or name.split(os.sep)[0] == os.pardir:
                continue
            target = os.path.join(local_path, name)
            if member.isdir():
                os.makedirs(target, exist_ok=True)
            elif member.isreg() and (source := archive.extractfile(member)) is not None:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                if os.path.islink(target):
                    os.unlink(target)
                with source, open(target, "wb") as file:
                    shutil.copyfileobj(source, file)
