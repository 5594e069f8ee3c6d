"""Replies that are given by a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from node.remoting.command import Command
    from node.remoting.connection import Connection

__all__ = ["LateReplies", "LateReply"]


class LateReply:
    """A reply that will be given in some later turn of the loop, or was given meanwhile, by a call: what a processor
    returns that has neither a task nor a future to wait for. `give` must be called exactly once."""

    __slots__ = ("_command", "_connection", "_reply", "_size_bytes")

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._command: Command | None = None
        self._reply: Command | bytes | None = None
        self._size_bytes = 0

    def give(self, reply: Command | bytes) -> None:
        """Send the reply, or the whole frame of one."""
        if self._connection is None or self._command is None:
            self._reply = reply
        else:
            self._connection.late_reply(self._command, self._size_bytes, reply)

    def begin(self, connection: Connection, command: Command, size_bytes: int) -> bool:
        """Called by the connection when the processor has returned, with what the request is counted for; True when
        the reply was given before."""
        if self._reply is not None:
            connection.answer(command, self._reply)
            return True
        self._connection, self._command, self._size_bytes = connection, command, size_bytes
        return False


class LateReplies:
    """The same for `count` requests of one connection that are answered together."""

    __slots__ = ("_connection", "_frames", "_size_bytes", "count")

    def __init__(self, count: int, size_bytes: int) -> None:
        self.count = count
        self._size_bytes = size_bytes
        self._connection: Connection | None = None
        self._frames: bytes | None = None

    def give(self, frames: bytes) -> None:
        """Send the whole frames of all replies. Must be called exactly once."""
        if self._connection is None:
            self._frames = frames
        else:
            self._connection.late_replies(self.count, self._size_bytes, frames)

    def begin(self, connection: Connection) -> int:
        """Called by the connection that has handed the requests over: bytes that they are counted for until the replies
        are given; 0 when these were given before."""
        if self._frames is not None:
            connection.send_frames(self._frames)
            return 0
        self._connection = connection
        return self._size_bytes
