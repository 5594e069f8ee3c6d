"""The server side of small helper processes: one JSON object per line as a request, one as its answer.

    {"id": ..., "op": name, ...}  ->  {"id": ..., "ok": true, ...} or {"id": ..., "ok": false, "error": text}

The helper listens on the Unix socket that its first argument names. Standard library only: this is copied to hosts that
have none of our files.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

__all__ = ["MAX_LINE_BYTES", "Message", "Operation", "run_helper", "serve_path"]

MAX_LINE_BYTES = 4 << 20
"""Longest request: several times the listeners or shapes of all links of the largest cluster."""

Message = dict[str, Any]
Operation = Callable[[Message], Awaitable[Message]]


async def _converse(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, operations: Mapping[str, Operation]
) -> None:
    """Answer requests until the other side closes. Raises ConnectionError; ValueError for a malformed request."""
    while line := await reader.readline():
        message = json.loads(line)
        operation = operations.get(message.get("op"))
        if operation is None:
            reply: Message = {"ok": False, "error": f"no operation {message.get('op')!r}"}
        else:
            try:
                reply = {"ok": True, **await operation(message)}
            except (KeyError, TypeError, ValueError, OSError) as error:
                reply = {"ok": False, "error": f"{message['op']}: {error!r}"}
        writer.write(json.dumps({"id": message.get("id"), **reply}).encode() + b"\n")
        await writer.drain()


async def serve_path(path: str, operations: Mapping[str, Operation]) -> None:
    """Serve requests on a Unix socket until the process ends. Raises OSError."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ValueError):
            await _converse(reader, writer, operations)
        writer.close()

    os.chdir(os.path.dirname(path))  # a socket address is limited to 107 bytes, and the path may be longer
    server = await asyncio.start_unix_server(take, os.path.basename(path), limit=MAX_LINE_BYTES)
    async with server:
        await server.serve_forever()


def run_helper(operations: Mapping[str, Operation]) -> None:
    """Run as a helper process: serve requests on the socket that the first argument names, until killed."""
    asyncio.run(serve_path(sys.argv[1], operations))
