"""The RocketMQ remoting protocol: frames, commands, a server and a client on asyncio protocols."""

from __future__ import annotations

from node.remoting.client import RemotingClient
from node.remoting.codec import FrameParser, decode, encode
from node.remoting.codes import LanguageCode, RequestCode, ResponseCode
from node.remoting.command import Command, FieldValue, FrameError
from node.remoting.connection import BatchProcessor, Connection, Processor
from node.remoting.deferred_reply import DeferredReply
from node.remoting.errors import (
    ConnectFailed,
    ConnectionLost,
    PeerOverloaded,
    RemotingError,
    RequestError,
    RequestTimeout,
)
from node.remoting.header_template import HeaderTemplate, TemplateRequest, VariableFields
from node.remoting.limits import ClientLimits, ServerLimits
from node.remoting.reply_template import ReplyTemplate, framed
from node.remoting.server import RemotingServer
from node.remoting.signature import Credentials

__all__ = [
    "BatchProcessor",
    "ClientLimits",
    "Command",
    "ConnectFailed",
    "Connection",
    "ConnectionLost",
    "Credentials",
    "DeferredReply",
    "FieldValue",
    "FrameError",
    "FrameParser",
    "HeaderTemplate",
    "LanguageCode",
    "PeerOverloaded",
    "Processor",
    "RemotingClient",
    "RemotingError",
    "RemotingServer",
    "ReplyTemplate",
    "RequestCode",
    "RequestError",
    "RequestTimeout",
    "ResponseCode",
    "ServerLimits",
    "TemplateRequest",
    "VariableFields",
    "decode",
    "encode",
    "framed",
]
