"""The dialling side: one connection per address, with many requests under way on each."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

from node.remoting.command import FLAG_ONEWAY, Command
from node.remoting.connection import Connection, Endpoint, tls_options
from node.remoting.errors import ConnectFailed, RemotingError
from node.remoting.limits import ClientLimits
from node.remoting.outstanding import OutcomeCallback

__all__ = ["RemotingClient"]


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[ip6]:port". Raises ConnectFailed (definite) if it is malformed."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConnectFailed(f"{address!r} is no address of the form host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


class RemotingClient(Endpoint):
    """Sends requests to any number of peers. `register` sets processors for requests that peers send back.

    Connections are opened when first needed, shared by all requests to an address, and reopened after they
    were lost. Nothing is sent twice: a request whose fate is unknown ends in an indefinite error.

    With `tls` every connection is encrypted. `sign` is called with each request before it is sent, to add the
    fields that say who asks.
    """

    limits: ClientLimits

    def __init__(
        self,
        limits: ClientLimits | None = None,
        *,
        name: str = "client",
        tls: ssl.SSLContext | None = None,
        sign: Callable[[Command], None] | None = None,
    ) -> None:
        self._client_limits = limits or ClientLimits()
        super().__init__(self._client_limits, name)
        self._tls_options = tls_options(tls, self._client_limits)
        self._sign = sign
        self._connections: dict[str, Connection] = {}
        self._dials: dict[str, asyncio.Task[Connection | str]] = {}
        self._asking: dict[asyncio.Task[None], None] = {}
        self._closed = False

    @property
    def connection_count(self) -> int:
        """Connections open now."""
        return len(self._connections)

    async def invoke(self, address: str, command: Command, *, timeout_ms: float) -> Command:
        """Send a request to `address` ("ip:port") and return the reply, whatever its code.

        Sets `command.opaque`. Raises ConnectFailed, PeerOverloaded, FrameError (definite: nothing was sent),
        ConnectionLost, RequestTimeout (indefinite). The time includes connecting.
        """
        if self._sign is not None:
            self._sign(command)
        connection = self._connections.get(address)
        if connection is None or connection.is_closing:
            loop = asyncio.get_running_loop()
            deadline_s = loop.time() + timeout_ms / 1000
            connection = await self._connect(address, timeout_ms)
            timeout_ms = max((deadline_s - loop.time()) * 1000, 0.0)
        return await connection.invoke(command, timeout_ms=timeout_ms)

    def ask(self, address: str, command: Command, on_done: OutcomeCallback, *, timeout_ms: float) -> None:
        """Like `invoke`, without a task: `on_done` is called once, in a later turn of the loop, with the reply or the
        error that `invoke` would raise. The frame is written at once: the caller has batched what belongs together."""
        if self._sign is not None:
            self._sign(command)
        connection = self._connections.get(address)
        if connection is None or connection.is_closing:
            task = asyncio.get_running_loop().create_task(self._connect_and_ask(address, command, on_done, timeout_ms))
            self._asking[task] = None
            task.add_done_callback(partial(self._asked, on_done))
            return
        try:
            connection.ask(command, on_done, timeout_ms=timeout_ms, at_once=True)
        except RemotingError as error:
            asyncio.get_running_loop().call_soon(on_done, error)

    async def _connect_and_ask(
        self, address: str, command: Command, on_done: OutcomeCallback, timeout_ms: float
    ) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_ms / 1000
        try:
            connection = await self._connect(address, timeout_ms)
            connection.ask(command, on_done, timeout_ms=max((deadline_s - loop.time()) * 1000, 0.0))
        except RemotingError as error:
            on_done(error)

    def _asked(self, on_done: OutcomeCallback, task: asyncio.Task[None]) -> None:
        self._asking.pop(task, None)
        if task.cancelled():
            on_done(ConnectFailed("this client is closed"))

    async def send_oneway(self, address: str, command: Command) -> None:
        """Send a request that nobody answers; marks it as one-way. Returns once it is queued.

        Raises ConnectFailed or FrameError, both definite. Returning says nothing about arrival.
        """
        command.flag |= FLAG_ONEWAY
        if self._sign is not None:
            self._sign(command)
        connection = self._connections.get(address)
        if connection is None or connection.is_closing:
            connection = await self._connect(address, self._client_limits.connect_timeout_ms)
        connection.send(command)

    def drop(self, address: str) -> None:
        """Give up the connection to `address`, if there is one; its open requests end in ConnectionLost."""
        connection = self._connections.get(address)
        if connection is not None:
            connection.abort("dropped by this side")

    async def close(self) -> None:
        """Close every connection; open requests end in ConnectionLost. Idempotent; nothing works afterwards."""
        self._closed = True
        tasks: list[asyncio.Future[Any]] = [*self._asking, *self._dials.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.cancel_tasks()
        gone: list[asyncio.Future[None]] = []
        for connection in list(self._connections.values()):
            lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            connection.on_close(lambda _, lost=lost: lost.done() or lost.set_result(None))  # type: ignore[misc]
            gone.append(lost)
            if connection.outstanding_requests:
                connection.abort("closed by this side")
            else:
                connection.close()
        if gone:
            await asyncio.wait(gone)

    async def _connect(self, address: str, timeout_ms: float) -> Connection:
        """The connection to `address`, dialled only once however many callers ask for it at the same time."""
        if self._closed:
            raise ConnectFailed("this client is closed")
        dial = self._dials.get(address)
        if dial is None:
            host, port = split_address(address)
            dial = asyncio.get_running_loop().create_task(self._dial(address, host, port))
            self._dials[address] = dial
            dial.add_done_callback(lambda _: self._dials.pop(address, None))
        await asyncio.wait((dial,), timeout=timeout_ms / 1000)
        if not dial.done() or dial.cancelled():
            raise ConnectFailed(f"no connection to {address} within {timeout_ms:g} ms")
        result = dial.result()
        if isinstance(result, str):
            raise ConnectFailed(result)
        return result

    async def _dial(self, address: str, host: str, port: int) -> Connection | str:
        """A new connection, or why there is none."""
        loop = asyncio.get_running_loop()
        timeout_ms = self._client_limits.connect_timeout_ms
        try:
            dialling = loop.create_connection(lambda: Connection(self, address), host, port, **self._tls_options)
            _, connection = await asyncio.wait_for(dialling, timeout_ms / 1000)
        except TimeoutError:
            return f"no connection to {address} within {timeout_ms} ms"
        except OSError as error:
            return f"no connection to {address}: {error.strerror or error}"
        except ValueError as error:  # raised for a host name that cannot be one
            return f"no connection to {address}: {error}"
        self._evict_unused()
        self._connections[address] = connection
        connection.on_close(lambda lost: self._lost(address, lost))
        return connection

    def _lost(self, address: str, connection: Connection) -> None:
        if self._connections.get(address) is connection:
            del self._connections[address]

    def _evict_unused(self) -> None:
        """Keep the pool within its bound: close the longest unused connection that nobody waits on."""
        while len(self._connections) >= self._client_limits.max_connections:
            unused = [item for item in self._connections.items() if not item[1].outstanding_requests]
            if not unused:
                return
            address, connection = min(unused, key=lambda item: item[1].last_activity_s)
            del self._connections[address]
            connection.close()
