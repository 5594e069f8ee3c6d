"""What can go wrong between two peers of the remoting protocol.

`is_definite` says whether the request certainly had no effect at the peer. Everything that was handed to a
socket and not answered is indefinite: it may have happened, or may still happen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from node.remoting.command import Command

__all__ = [
    "ConnectFailed",
    "ConnectionLost",
    "FrameError",
    "PeerOverloaded",
    "RemotingError",
    "RequestError",
    "RequestTimeout",
]


class RemotingError(Exception):
    """A request was not answered."""

    is_definite: bool = False


class ConnectFailed(RemotingError):
    """No connection could be made in time; nothing was sent."""

    is_definite = True


class ConnectionLost(RemotingError):
    """The connection closed while the request was under way."""


class RequestTimeout(RemotingError):
    """The peer did not answer in time."""


class PeerOverloaded(RemotingError):
    """Too much is already under way to this peer; the request was not sent."""

    is_definite = True


class FrameError(RemotingError):
    """Bytes that are no frame of this protocol, or a command that does not fit into one.

    Raised by the parser, `commands` holds the commands that were complete before the bad bytes. Raised
    when encoding, nothing was sent, hence definite.
    """

    is_definite = True

    def __init__(self, message: str, commands: Sequence[Command] = ()) -> None:
        super().__init__(message)
        self.commands: list[Command] = list(commands)


class RequestError(Exception):
    """Raised by a request processor to answer with `code` and `remark` (no stack trace is logged)."""

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(remark)
        self.code = code
        self.remark = remark
