"""A client of the broker: producers and consumers for programs, and a low-level client for single requests.

A program opens a `Client`. `BrokerClient` sends one request per call and never retries; both raise errors that say
whether a request can have had an effect.
"""

from __future__ import annotations

from node.client.allocation import AllocationStrategy, allocate_averagely, allocate_in_circle
from node.client.broker_client import BrokerClient
from node.client.client import Client
from node.client.errors import (
    BadReply,
    BrokerRefused,
    ClientError,
    NoRoute,
    NotLeader,
    NotSent,
    OutcomeUnknown,
    SendFailed,
)
from node.client.messages import BodyError, MessageQueue, NewMessage, ReceivedMessage
from node.client.offsets import BrokerOffsets, LocalOffsets, OffsetStore
from node.client.producer import Producer, Receipt
from node.client.pull_consumer import PullConsumer
from node.client.push_consumer import ConsumeResult, PushConsumer
from node.client.results import BrokerGroup, PoppedMessage, PullResult, PullStatus, Route, SendResult, SendStatus
from node.client.session import ClientTimings
from node.client.subscriptions import MessageModel, SqlFilter, StartFrom
from node.client.transactions import TransactionProducer, TransactionState
from node.remoting import Credentials
from node.store.record import Message

__all__ = [
    "AllocationStrategy",
    "BadReply",
    "BodyError",
    "BrokerClient",
    "BrokerGroup",
    "BrokerOffsets",
    "BrokerRefused",
    "Client",
    "ClientError",
    "ClientTimings",
    "ConsumeResult",
    "Credentials",
    "LocalOffsets",
    "Message",
    "MessageModel",
    "MessageQueue",
    "NewMessage",
    "NoRoute",
    "NotLeader",
    "NotSent",
    "OffsetStore",
    "OutcomeUnknown",
    "PoppedMessage",
    "Producer",
    "PullConsumer",
    "PullResult",
    "PullStatus",
    "PushConsumer",
    "Receipt",
    "ReceivedMessage",
    "Route",
    "SendFailed",
    "SendResult",
    "SendStatus",
    "SqlFilter",
    "StartFrom",
    "TransactionProducer",
    "TransactionState",
    "allocate_averagely",
    "allocate_in_circle",
]
