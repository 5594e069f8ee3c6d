"""Replies that a processor sends by a call, usually after it has returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from node.remoting.command import Command

__all__ = ["DeferredReply", "ReplyWriter"]


class ReplyWriter(Protocol):
    """The connection that requests came over, as their reply sees it."""

    def write_reply(self, requests: Sequence[Command], reply: Command | bytes) -> None:
        """Send a reply."""
        ...

    def end_deferred(self, deferred: DeferredReply, reply: Command | bytes) -> None:
        """Send a deferred reply; its requests are done."""
        ...


class DeferredReply:
    """The reply to one request, or the replies to several of one connection, none of them one-way, that are answered
    together. A processor that has neither a task nor a future to wait for returns it. `send` must be called exactly
    once, in some later turn of the loop or before the processor returns."""

    __slots__ = ("_connection", "_observer", "_reply", "requests", "size_bytes")

    def __init__(self, requests: Sequence[Command]) -> None:
        self.requests = requests
        self.size_bytes = 0
        """Bytes that the requests count for until the reply is sent."""
        self._observer: Callable[[Command | bytes], None] | None = None
        self._connection: ReplyWriter | None = None
        self._reply: Command | bytes | None = None

    def send(self, reply: Command | bytes) -> None:
        """Send the reply to the only request, or the whole frames of all replies."""
        self._reply = reply
        if self._observer is not None:
            self._observer(reply)
        if self._connection is not None:
            self._connection.end_deferred(self, reply)

    def observe(self, observer: Callable[[Command | bytes], None]) -> None:
        """Call `observer` with the reply when it is sent; at once if it was sent already."""
        if self._reply is not None:
            observer(self._reply)
        else:
            self._observer = observer

    def attach(self, connection: ReplyWriter, size_bytes: int) -> bool:
        """Called by the connection when the processor has returned, with the bytes that the requests count for; True if
        the reply was sent before, and is written now."""
        if self._reply is not None:
            connection.write_reply(self.requests, self._reply)
            return True
        self._connection, self.size_bytes = connection, size_bytes
        return False
