"""The RocketMQ remoting protocol: frames, commands, a server and a client on asyncio protocols."""

from __future__ import annotations

from node.remoting.client import RemotingClient
from node.remoting.codec import FrameParser, decode, encode
from node.remoting.codes import LanguageCode, RequestCode, ResponseCode
from node.remoting.command import Command, FieldValue
from node.remoting.connection import Connection
from node.remoting.errors import (
    ConnectFailed,
    ConnectionLost,
    FrameError,
    PeerOverloaded,
    RemotingError,
    RequestError,
    RequestTimeout,
)
from node.remoting.header_form import FormedRequest, HeaderForm, Places
from node.remoting.late_reply import LateReplies, LateReply
from node.remoting.limits import ClientLimits, ServerLimits
from node.remoting.processing import Gatherer, Processor
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
    "FormedRequest",
    "FrameError",
    "FrameParser",
    "Gatherer",
    "HeaderForm",
    "LanguageCode",
    "LateReplies",
    "LateReply",
    "PeerOverloaded",
    "Places",
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
