"""The way into hosts that share the harness's own machine: see nemesis.mechanisms.hosts.HostAccess."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping, Sequence

__all__ = ["LocalAccess"]

MAX_OUTPUT_BYTES = 1 << 20
"""Kept of a command's output: more than any tool that is called here prints."""

_NOT_STARTED = 127
_KILLED = -9


class LocalAccess:
    """Hosts that are loopback addresses or namespaces: same files, same clocks, same processes.

    `environment` marks every process that is started here as the run's; `enter` gives what goes before a command line
    so that it sees the files of a host as the host's programs do.
    """

    def __init__(self, environment: Mapping[str, str], *, enter: Callable[[str], Sequence[str]] | None = None) -> None:
        self._environment = dict(environment)
        self._enter = enter
        self._lingering: set[asyncio.Task[None]] = set()

    async def run(
        self,
        host: str,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> tuple[int, str, str]:
        """Run a command; (status, output, errors). Killed after `timeout_s` seconds: status -9 and what it printed.

        It has a session of its own, so that Ctrl-C on the terminal does not tear it in two, and is waited for even when
        the caller is cancelled: what it did is known.
        """
        task = asyncio.ensure_future(self._run(host, argv, stdin, timeout_s, environment))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # looked at, so that it is not reported as lost
            raise

    async def _run(
        self, host: str, argv: Sequence[str], stdin: str, timeout_s: float, environment: Mapping[str, str] | None
    ) -> tuple[int, str, str]:
        try:
            process = await asyncio.create_subprocess_exec(
                *([] if self._enter is None else self._enter(host)),
                *argv,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env={**os.environ, **self._environment, **(environment or {})},
                start_new_session=True,
            )
        except OSError as error:
            return _NOT_STARTED, "", str(error)
        output, errors = bytearray(), bytearray()
        work = asyncio.create_task(_converse(process, stdin.encode(), output, errors))
        try:
            await asyncio.wait({work}, timeout=timeout_s)
        finally:
            if not work.done():
                if process.returncode is None:
                    process.kill()
                # One that waits in the kernel ends when that lets it go; until then it is not forgotten.
                self._lingering.add(work)
                work.add_done_callback(self._lingering.discard)
        status = process.returncode if work.done() and process.returncode is not None else _KILLED
        return status, output.decode(errors="replace"), errors.decode(errors="replace")

    async def overwrite(self, host: str, path: str, data: bytes) -> None:
        """One write over the beginning of a file. Raises OSError."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, data, 0)
        finally:
            os.close(descriptor)

    async def read(self, host: str, path: str, size_bytes: int) -> bytes:
        """The first bytes of a file. Raises OSError."""
        with open(path, "rb") as file:
            return file.read(size_bytes)

    async def now(self, host: str) -> tuple[int, int]:
        """This machine's clocks."""
        return time.time_ns(), time.monotonic_ns()

    def python(self, host: str) -> str:
        """The harness's own."""
        return sys.executable

    async def close(self, *, grace_s: float = 2.0) -> None:
        """Wait a moment for commands that were killed and had not ended."""
        if self._lingering:
            await asyncio.wait(self._lingering, timeout=grace_s)


async def _converse(process: asyncio.subprocess.Process, stdin: bytes, output: bytearray, errors: bytearray) -> None:
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None

    async def gather(stream: asyncio.StreamReader, into: bytearray) -> None:
        while piece := await stream.read(65536):
            into += piece[: MAX_OUTPUT_BYTES - len(into)]

    async def feed(stream: asyncio.StreamWriter) -> None:
        try:
            stream.write(stdin)
            await stream.drain()
            stream.close()
        except ConnectionError:
            pass  # it ended without reading everything

    await asyncio.gather(feed(process.stdin), gather(process.stdout, output), gather(process.stderr, errors))
    await process.wait()
