"""The harness's end of the link proxy: starts the process and speaks its control protocol."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import harness
from harness.clusters.base import Program
from harness.clusters.link_proxy import MAX_LINE_BYTES
from harness.clusters.processes import ChildProcess, Processes
from harness.errors import HarnessError

__all__ = ["LinkProxyHandle", "LinkProxyRefused"]

REQUEST_TIMEOUT_S = 15.0
"""How long the proxy may take for one request: a second or so for a thousand listeners on a busy machine."""

STOP_GRACE_S = 3.0
"""How long the proxy may take to end by itself once its control connection is closed."""


class LinkProxyRefused(HarnessError):
    """The proxy refused a request; `reply` is its answer."""

    def __init__(self, message: str, reply: dict[str, Any]) -> None:
        super().__init__(message)
        self.reply = reply


class LinkProxyHandle:
    """A running link proxy. Made by `start`; requests may overlap and are carried out in order."""

    def __init__(self, child: ChildProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._child = child
        self._writer = writer
        self._ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def start(
        cls,
        processes: Processes,
        *,
        module: str = "harness.clusters.link_proxy",
        name: str = "link proxy",
        argv_prefix: Sequence[str] = (),
    ) -> LinkProxyHandle:
        """Start the proxy as a child, or another program that speaks as it does: `module`, called `name`, its
        command line after `argv_prefix`. Raises OperatorError when it cannot be run."""
        ours, theirs = socket.socketpair()
        program = Program(
            name=name,
            argv=[sys.executable, "-m", module],
            log_name=f"{name.replace(' ', '-')}.log",
            environment={"PYTHONPATH": _import_path()},
        )
        try:
            child = await processes.spawn("", program, argv_prefix=argv_prefix, stdin=theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        return cls(child, reader, writer)

    @property
    def pid(self) -> int:
        """The proxy's process id."""
        return self._child.pid

    @property
    def is_running(self) -> bool:
        """Whether the proxy can still be spoken to."""
        return not self._reading.done()

    async def request(self, op: str, **fields: Any) -> dict[str, Any]:
        """Have one operation carried out and return the reply.

        Raises LinkProxyRefused when the proxy says no, HarnessError when it has ended or does not answer.
        """
        if not self.is_running:
            raise HarnessError(self._obituary())
        number = next(self._ids)
        reply_future = asyncio.get_running_loop().create_future()
        self._replies[number] = reply_future
        try:
            self._writer.write(json.dumps({"id": number, "op": op, **fields}).encode() + b"\n")
            reply: dict[str, Any] = await asyncio.wait_for(reply_future, REQUEST_TIMEOUT_S)
        except TimeoutError:
            raise HarnessError(f"the {self._child.name} did not answer within {REQUEST_TIMEOUT_S:g} s") from None
        finally:
            self._replies.pop(number, None)
        if not reply["ok"]:
            raise LinkProxyRefused(f"{self._child.name}: {reply['error']}", reply)
        return reply

    async def stop(self) -> None:
        """End the proxy and all that goes through it. Idempotent."""
        self._writer.close()
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._child.wait(), STOP_GRACE_S)
        await self._child.kill()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                reply = json.loads(line)
                future = self._replies.get(reply["id"])
                if future is not None and not future.done():
                    future.set_result(reply)
        except ConnectionError:
            pass  # the same as its end
        finally:
            for future in self._replies.values():
                if not future.done():
                    future.set_exception(HarnessError(self._obituary()))

    def _obituary(self) -> str:
        return f"the {self._child.name} has ended; see {self._child.log_path}"


def _import_path() -> str:
    """PYTHONPATH with which a child finds the very packages that this process uses."""
    own_root = os.path.dirname(os.path.dirname(os.path.abspath(harness.__file__)))
    inherited = os.environ.get("PYTHONPATH")
    return own_root if not inherited else os.pathsep.join([own_root, inherited])
