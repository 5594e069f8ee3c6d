"""Requests to a small helper process: one JSON object a line, each answered by one.

    {"id": ..., "op": name, ...}  ->  {"id": ..., "ok": true, ...} or {"id": ..., "ok": false, "error": text}

The helper hears them on a Unix socket, which its first argument names. Standard library only: this goes to hosts that
have nothing of ours.
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
"""Longest request: the listeners or the shapes of all links of the largest cluster, several times over."""

Message = dict[str, Any]
Operation = Callable[[Message], Awaitable[Message]]


async def _converse(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, operations: Mapping[str, Operation]
) -> None:
    """Answer requests until the other side ends. Raises ConnectionError, ValueError for what is no request."""
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
    """Answer on a Unix socket for as long as the process lives. Raises OSError."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ValueError):
            await _converse(reader, writer, operations)
        writer.close()

    os.chdir(os.path.dirname(path))  # the address of a socket may have 107 bytes, a directory's path may have more
    server = await asyncio.start_unix_server(take, os.path.basename(path), limit=MAX_LINE_BYTES)
    async with server:
        await server.serve_forever()


def run_helper(operations: Mapping[str, Operation]) -> None:
    """Be a helper process: answer on the socket that the first argument names, until killed."""
    asyncio.run(serve_path(sys.argv[1], operations))
