"""The RocketMQ remoting protocol: frames, commands, a server and a client on asyncio protocols."""

from __future__ import annotations

from node.remoting.client import RemotingClient
from node.remoting.codec import FrameParser, decode, encode
from node.remoting.codes import LanguageCode, RequestCode, ResponseCode
from node.remoting.command import Command, FieldValue
from node.remoting.connection import Connection, Processor
from node.remoting.errors import (
    ConnectFailed,
    ConnectionLost,
    FrameError,
    PeerOverloaded,
    RemotingError,
    RequestError,
    RequestTimeout,
)
from node.remoting.late_reply import LateReply
from node.remoting.limits import ClientLimits, ServerLimits
from node.remoting.reply_form import ReplyForm
from node.remoting.server import RemotingServer
from node.remoting.signature import Credentials

__all__ = [
    "ClientLimits",
    "Command",
    "ConnectFailed",
    "Connection",
    "ConnectionLost",
    "Credentials",
    "FieldValue",
    "FrameError",
    "FrameParser",
    "LanguageCode",
    "LateReply",
    "PeerOverloaded",
    "Processor",
    "RemotingClient",
    "RemotingError",
    "RemotingServer",
    "ReplyForm",
    "RequestCode",
    "RequestError",
    "RequestTimeout",
    "ResponseCode",
    "ServerLimits",
    "decode",
    "encode",
]
