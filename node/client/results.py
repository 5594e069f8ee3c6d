"""What client calls return."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from node.remoting import Command, ResponseCode
from node.store.record import Message, decode_records

__all__ = ["MASTER_ID", "BrokerGroup", "PoppedMessage", "PullResult", "PullStatus", "Route", "SendResult", "SendStatus"]

MASTER_ID: Final = 0


class SendStatus(enum.Enum):
    """How safely a message is stored."""

    OK = ResponseCode.SUCCESS
    """As durable as the broker promises."""
    FLUSH_DISK_TIMEOUT = ResponseCode.FLUSH_DISK_TIMEOUT
    SLAVE_NOT_AVAILABLE = ResponseCode.SLAVE_NOT_AVAILABLE
    FLUSH_SLAVE_TIMEOUT = ResponseCode.FLUSH_SLAVE_TIMEOUT


@dataclass(frozen=True, slots=True, kw_only=True)
class SendResult:
    """A message that was stored. `address` is that of the broker."""

    status: SendStatus
    msg_id: str
    queue_id: int
    queue_offset: int
    transaction_id: str
    address: str

    @property
    def is_local(self) -> bool:
        """True when the message is stored on the master and may be lost with it (replies 10, 11, 12)."""
        return self.status is not SendStatus.OK


class PullStatus(enum.Enum):
    """What a pull found."""

    FOUND = ResponseCode.SUCCESS
    NO_NEW = ResponseCode.PULL_NOT_FOUND
    """The offset is the end of the queue."""
    NO_MATCH = ResponseCode.PULL_RETRY_IMMEDIATELY
    """There are messages, but none passed the filter; continue at `next_offset`."""
    OFFSET_ILLEGAL = ResponseCode.PULL_OFFSET_MOVED
    """The offset lies outside the queue; `next_offset` is the nearest inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """The answer to a pull. `max_offset` is the number of the next message to be stored, as of the time when
    `messages` were read."""

    status: PullStatus
    messages: tuple[Message, ...]
    next_offset: int
    min_offset: int
    max_offset: int
    suggested_broker_id: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoppedMessage:
    """A message that this consumer has in hand for a time, and the handle that its acknowledgement must name."""

    message: Message
    handle: str

    @classmethod
    def of_reply(cls, reply: Command, broker_name: str) -> list[PoppedMessage]:
        """The messages in a reply (R: MQClientAPIImpl.processPopResponse). Raises RequestError, RecordError, KeyError
        or ValueError if it is not valid."""
        starts: dict[tuple[str, str], str] = {}
        for part in filter(None, reply.get_str("startOffsetInfo").split(";")):
            mark, queue_id, start = part.split(" ")
            starts[mark, queue_id] = start
        times = [reply.get_str(name) for name in ("popTime", "invisibleTime", "reviveQid")]
        popped = []
        for message in decode_records(reply.body):
            mark, queue_id = str(int(message.topic.startswith("%RETRY%"))), str(message.queue_id)
            parts = (starts[mark, queue_id], *times, mark, broker_name, queue_id, str(message.queue_offset))
            popped.append(cls(message=message, handle=" ".join(parts)))
        return popped


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerGroup:
    """A broker name: its addresses (where this client dials them) by broker id, and the topic's queues on it."""

    name: str
    cluster: str
    addresses: Mapping[int, str]
    read_queues: int = 0
    write_queues: int = 0
    perm: int = 0

    @property
    def master_address(self) -> str | None:
        """Where the master is dialled; None while the group has none."""
        return self.addresses.get(MASTER_ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Who serves a topic."""

    topic: str
    groups: tuple[BrokerGroup, ...]

    @property
    def master_address(self) -> str | None:
        """Where the master of the first group that has one is dialled; None if there is none now."""
        return next((group.master_address for group in self.groups if group.master_address is not None), None)

    @classmethod
    def from_body(cls, topic: str, body: Mapping[str, Any]) -> Route:
        """Decode a route reply's body. Raises KeyError, TypeError, ValueError or AttributeError if it is not valid."""
        queues = {data["brokerName"]: data for data in body["queueDatas"]}
        groups = []
        for data in body["brokerDatas"]:
            queue = queues.get(data["brokerName"], {})
            groups.append(
                BrokerGroup(
                    name=str(data["brokerName"]),
                    cluster=str(data.get("cluster", "")),
                    addresses={int(number): str(address) for number, address in data["brokerAddrs"].items()},
                    read_queues=int(queue.get("readQueueNums", 0)),
                    write_queues=int(queue.get("writeQueueNums", 0)),
                    perm=int(queue.get("perm", 0)),
                )
            )
        return cls(topic=topic, groups=tuple(groups))
