"""A connection that was accepted, until its TLS handshake is over.

The loop's own TLS hides a connection from the server until then, so strangers who open connections and stay silent
would not count towards the limit of open connections, and could take every descriptor of the process.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

from node.remoting.connection import peer_name
from node.remoting.limits import ConnectionLimits

__all__ = ["TlsHandshake"]


class TlsHandshake(asyncio.Protocol):
    """`on_opened(self)` is called when the connection is open. If the handshake succeeds, `on_done(self)` follows and
    returns the protocol that goes on inside TLS. `on_ended(self)` comes last, in either case."""

    def __init__(
        self,
        context: ssl.SSLContext,
        limits: ConnectionLimits,
        *,
        on_opened: Callable[[TlsHandshake], object],
        on_done: Callable[[TlsHandshake], asyncio.Protocol],
        on_ended: Callable[[TlsHandshake], object],
    ) -> None:
        self._context = context
        self._limits = limits
        self._on_opened = on_opened
        self._on_done = on_done
        self._on_ended = on_ended
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._inside: asyncio.Protocol | None = None
        self._early = bytearray()
        """Received and not passed on yet: first bytes of the handshake, if the loop reads before it begins (as uvloop
        does); later bytes from inside TLS, if they came together with the end of the handshake."""
        self._is_lost = False
        self.remote_address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.remote_address = peer_name(transport)
        self._on_opened(self)
        if not self._transport.is_closing():
            self._task = asyncio.get_running_loop().create_task(self._perform(self._transport))

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        if self._inside is not None:
            self._inside.connection_lost(exc)
        elif self._task is None:
            self._on_ended(self)

    def close(self) -> None:
        """The same as `abort`: nothing was sent yet."""
        self.abort()

    def abort(self, reason: str = "") -> None:
        """Close at once. Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    def _feed(self, transport: asyncio.Transport) -> None:
        """Pass on what was read before the handshake began. The transport has the protocol of the loop's TLS by now."""
        while self._early and not transport.is_closing():
            protocol = cast(asyncio.BufferedProtocol, transport.get_protocol())
            buffer = memoryview(protocol.get_buffer(len(self._early)))
            size = min(len(buffer), len(self._early))
            buffer[:size] = self._early[:size]
            del self._early[:size]
            protocol.buffer_updated(size)

    async def _perform(self, transport: asyncio.Transport) -> None:
        limits, encrypted = self._limits, None
        loop = asyncio.get_running_loop()
        starting = loop.create_task(
            loop.start_tls(
                transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=limits.tls_handshake_timeout_s,
                ssl_shutdown_timeout=limits.close_linger_s,
            )
        )
        # start_tls opens its protocol and resumes reading, both by call_soon; _feed must come next, before any read.
        loop.call_soon(loop.call_soon, self._feed, transport)
        try:
            encrypted = await starting
        except OSError:
            pass  # not a peer of ours, or one that does not trust us: the peer knows
        finally:
            if encrypted is None or self._is_lost:
                transport.abort()
                self._on_ended(self)
        if encrypted is not None and not self._is_lost:
            self._inside = self._on_done(self)
            encrypted.set_protocol(self._inside)
            self._inside.connection_made(encrypted)
            self._on_ended(self)
            if self._early:
                self._inside.data_received(bytes(self._early))
