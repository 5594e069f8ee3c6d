"""A client of the broker: one call, one request, and errors that say whether it can have had an effect."""

from __future__ import annotations

from node.client.broker_client import BrokerClient
from node.client.errors import (
    BadReply,
    BrokerRefused,
    ClientError,
    NoRoute,
    NotLeader,
    NotSent,
    OutcomeUnknown,
)
from node.client.results import BrokerGroup, PullResult, PullStatus, Route, SendResult, SendStatus
from node.remoting import Credentials
from node.store.record import Message

__all__ = [
    "BadReply",
    "BrokerClient",
    "BrokerGroup",
    "BrokerRefused",
    "ClientError",
    "Credentials",
    "Message",
    "NoRoute",
    "NotLeader",
    "NotSent",
    "OutcomeUnknown",
    "PullResult",
    "PullStatus",
    "Route",
    "SendResult",
    "SendStatus",
]
