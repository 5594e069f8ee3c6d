"""A client that runs beside a fuzzer in its own thread and must not be affected by it."""

from __future__ import annotations

import asyncio
import threading
from typing import Self

from node.remoting import RemotingClient

__all__ = ["PAUSE_S", "Bystander"]

PAUSE_S = 0.02
"""Time between two messages: the client is to detect failures, not to create load."""


class Bystander:
    """Sends messages during a `with` block, and then reads everything again; `failure` holds the first problem."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.sent = 0
        """Number of messages sent, which is the number of the next one."""
        self.failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @staticmethod
    def body(number: int) -> bytes:
        """The body of the message with this number."""
        return b"%d " % number + b"b" * (number * 37 % 500)

    async def _run(self) -> None:
        client = RemotingClient()
        try:
            await self.begin(client)
            while not self._stop.is_set():
                await self.step(client)
                await asyncio.sleep(PAUSE_S)
            await self.look_again(client)
        except BaseException as error:
            self.failure = error
        finally:
            await client.close()

    async def begin(self, client: RemotingClient) -> None:
        """Wait until sending can begin."""

    async def step(self, client: RemotingClient) -> None:
        """Send the next message."""
        raise TypeError(f"{type(self).__name__} does not say what it sends")

    async def look_again(self, client: RemotingClient) -> None:
        """Read everything in the end. Raises AssertionError."""
        raise TypeError(f"{type(self).__name__} does not say what it reads")
