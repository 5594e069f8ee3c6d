"""A server on loopback for one test, and one connection to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from harness.sdk import Streams, connection

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def over_a_connection(
    serve: Serve, opened: Callable[[Streams], Awaitable[Any]], scenario: Callable[[Any], Awaitable[Any]]
) -> Any:
    """Start a server on loopback with `serve`, connect to it, and run `scenario` on what `opened` makes of that."""

    async def main() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            async with connection("{}:{}".format(*server.sockets[0].getsockname()[:2])) as streams:
                return await scenario(await opened(streams))
        finally:
            server.close()

    return asyncio.run(main())
