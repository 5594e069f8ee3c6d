"""A consumer's subscription to a topic, and its encoding for brokers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from node.config import check_topic_name
from node.store.record import Message, java_string_hash

__all__ = ["MessageModel", "SqlFilter", "StartFrom", "Subscription", "consumer_data"]


class MessageModel(Enum):
    """How a group shares its messages. The values are those of the protocol."""

    CLUSTERING = "CLUSTERING"
    """Each message goes to one member; brokers remember how far the group is."""
    BROADCASTING = "BROADCASTING"
    """Each message goes to every member; each member remembers for itself, and nothing is redelivered."""


class StartFrom(Enum):
    """Where a group starts in a queue that it has never read. The values are those of the protocol."""

    LAST = "CONSUME_FROM_LAST_OFFSET"
    """With new messages only. Brokers have a young and small queue read from its beginning nevertheless."""
    FIRST = "CONSUME_FROM_FIRST_OFFSET"
    """With the oldest existing message."""
    TIMESTAMP = "CONSUME_FROM_TIMESTAMP"
    """With the first message stored at a given time or later."""


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """An SQL92 condition over a message's properties, such as "amount > 100 AND region = 'eu'"."""

    expression: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """A topic and a filter: tags ("*", "a || b"), or an SQL92 expression over properties."""

    topic: str
    expression: str
    is_sql: bool = False
    version: int = 0
    """Tells brokers which of two subscriptions is the newer one."""

    def __post_init__(self) -> None:
        check_topic_name(self.topic)
        if self.is_sql and not self.expression.strip():
            raise ValueError(f"the SQL filter for topic {self.topic!r} is empty")

    @property
    def expression_type(self) -> str:
        """The filter's type, as named in the protocol."""
        return "SQL92" if self.is_sql else "TAG"

    @property
    def tags(self) -> tuple[str, ...]:
        """The subscribed tags; none means all."""
        if self.is_sql:
            return ()
        tags = [tag.strip() for tag in self.expression.split("||")]
        return () if "*" in tags else tuple(dict.fromkeys(tag for tag in tags if tag))

    def passes(self, message: Message) -> bool:
        """Whether the message passes the filter. Brokers may judge by the tag's hash alone, and hashes collide."""
        tags = self.tags
        return not tags or message.tags in tags

    def data(self) -> dict[str, Any]:
        """The subscription's entry in a heartbeat."""
        return {
            "topic": self.topic,
            "subString": self.expression,
            "tagsSet": list(self.tags),
            "codeSet": [java_string_hash(tag) for tag in self.tags],
            "subVersion": self.version,
            "classFilterMode": False,
            "expressionType": self.expression_type,
        }


def consumer_data(
    group: str, model: MessageModel, start_from: StartFrom, subscriptions: Iterable[Subscription], *, is_push: bool
) -> Mapping[str, Any]:
    """One consumer's entry in a heartbeat."""
    return {
        "groupName": group,
        "consumeType": "CONSUME_PASSIVELY" if is_push else "CONSUME_ACTIVELY",
        "messageModel": model.value,
        "consumeFromWhere": start_from.value,
        "subscriptionDataSet": [subscription.data() for subscription in subscriptions],
        "unitMode": False,
    }
