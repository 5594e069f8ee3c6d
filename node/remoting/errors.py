"""Errors between two peers of the remoting protocol.

`is_definite` says whether the request certainly had no effect at the peer. Everything that was handed to a
socket and not answered is indefinite: it may have happened, or may still happen.
"""

from __future__ import annotations

__all__ = [
    "ConnectFailed",
    "ConnectionLost",
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


class RequestError(Exception):
    """Raised by a request processor to answer with `code` and `remark` (no stack trace is logged)."""

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(remark)
        self.code = code
        self.remark = remark
