"""Subscription groups: what a consumer group may do here, and how often a message is retried for it.

A group that is not known is created with default settings at the first heartbeat of one of its consumers (R:
SubscriptionGroupManager, autoCreateSubscriptionGroup). The table is kept in `subscriptionGroup.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from node.broker.lazy_file import LazyFile
from node.runtime import Disk

__all__ = [
    "DEFAULT_RETRY_MAX_TIMES",
    "DEFAULT_SLOW_BROKER_ID",
    "MASTER_ID",
    "MAX_GROUPS",
    "SubscriptionGroup",
    "SubscriptionGroups",
    "TooManyGroups",
]

PERSIST_INTERVAL_S = 1.0
"""A group created by a heartbeat is created again by the next one, so losing a second's worth does no harm."""
MAX_GROUPS = 10_000
"""As many as topics: each group may have a retry topic of its own."""
MAX_GROUP_CHARACTERS = 255
MASTER_ID = 0
DEFAULT_SLOW_BROKER_ID = 1
"""R: the first slave."""
DEFAULT_RETRY_MAX_TIMES = 16
"""R: a message is redelivered up to 16 times, then it is a dead letter."""


class TooManyGroups(Exception):
    """No further group can be created."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionGroup:
    """One group's settings (R: SubscriptionGroupConfig)."""

    name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_orderly: bool = False
    """Whether its consumers of RocketMQ 5 want the messages of a queue in order (R: consumeMessageOrderly)."""
    retry_queues: int = 1
    retry_max_times: int = DEFAULT_RETRY_MAX_TIMES
    notify_changes: bool = True
    broker_id: int = MASTER_ID
    """Kept for tools that ask (R: brokerId)."""
    slow_broker_id: int = DEFAULT_SLOW_BROKER_ID
    """The broker id to which a consumer that lags far behind is sent (R: whichBrokerWhenConsumeSlowly)."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> SubscriptionGroup:
        """From RocketMQ's JSON. Raises ValueError, KeyError or TypeError if it is no such settings."""
        name = content["groupName"]
        if not isinstance(name, str) or not 0 < len(name) <= MAX_GROUP_CHARACTERS:
            raise ValueError(f"group name {name!r}")
        retry_queues, retry_max_times = int(content.get("retryQueueNums", 1)), int(content.get("retryMaxTimes", 16))
        if not (0 <= retry_queues <= 64 and 0 <= retry_max_times <= 1000):
            raise ValueError(f"{retry_queues} retry queues, {retry_max_times} retries")
        broker_id = int(content.get("brokerId", MASTER_ID))
        slow_broker_id = int(content.get("whichBrokerWhenConsumeSlowly", DEFAULT_SLOW_BROKER_ID))
        if not (0 <= broker_id < 1 << 31 and 0 <= slow_broker_id < 1 << 31):
            raise ValueError(f"broker ids {broker_id} and {slow_broker_id}")
        return cls(
            name=name,
            consume_enable=bool(content.get("consumeEnable", True)),
            consume_from_min_enable=bool(content.get("consumeFromMinEnable", True)),
            consume_broadcast_enable=bool(content.get("consumeBroadcastEnable", True)),
            consume_orderly=bool(content.get("consumeMessageOrderly", False)),
            retry_queues=retry_queues,
            retry_max_times=retry_max_times,
            notify_changes=bool(content.get("notifyConsumerIdsChangedEnable", True)),
            broker_id=broker_id,
            slow_broker_id=slow_broker_id,
        )

    def document(self) -> dict[str, Any]:
        """In RocketMQ's JSON."""
        return {
            "groupName": self.name,
            "consumeEnable": self.consume_enable,
            "consumeFromMinEnable": self.consume_from_min_enable,
            "consumeBroadcastEnable": self.consume_broadcast_enable,
            "consumeMessageOrderly": self.consume_orderly,
            "retryQueueNums": self.retry_queues,
            "retryMaxTimes": self.retry_max_times,
            "brokerId": self.broker_id,
            "whichBrokerWhenConsumeSlowly": self.slow_broker_id,
            "notifyConsumerIdsChangedEnable": self.notify_changes,
        }


class SubscriptionGroups:
    """Groups by name."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._groups: dict[str, SubscriptionGroup] = {}
        self._version = 0
        self._file = LazyFile(disk, path, delay_s=PERSIST_INTERVAL_S, render=self.document)

    def load(self) -> None:
        """Read the file. Raises OSError, ValueError when it is damaged."""
        self._file.load(self._adopt)

    def replace(self, content: Mapping[str, Any]) -> None:
        """Take over another broker's table. Raises like `SubscriptionGroup.of` if it is invalid."""
        self._adopt(content)
        self._file.touch()

    def _adopt(self, content: Mapping[str, Any]) -> None:
        groups = [SubscriptionGroup.of(entry) for entry in content["subscriptionGroupTable"].values()]
        if len(groups) > MAX_GROUPS:
            raise ValueError(f"{len(groups)} groups, at most {MAX_GROUPS} are kept")
        self._version = int(content.get("dataVersion", {}).get("counter", 0))
        self._groups = {group.name: group for group in groups}

    def document(self) -> dict[str, Any]:
        """The table as it is stored and sent (code 201)."""
        return {
            "subscriptionGroupTable": {name: group.document() for name, group in self._groups.items()},
            "dataVersion": {"timestamp": 0, "counter": self._version},
        }

    def get(self, name: str) -> SubscriptionGroup | None:
        return self._groups.get(name)

    def may_notify(self, name: str) -> bool:
        """Whether a group's consumers are notified when others come and go: yes, unless its settings forbid it."""
        known = self._groups.get(name)
        return known is None or known.notify_changes

    def __len__(self) -> int:
        return len(self._groups)

    def find_or_create(self, name: str) -> SubscriptionGroup:
        """The group, created with default settings if it is new. Raises TooManyGroups, ValueError for a bad name."""
        group = self._groups.get(name)
        if group is None:
            group = SubscriptionGroup.of({"groupName": name})
            self._put(group)
        return group

    def _put(self, group: SubscriptionGroup) -> None:
        if group.name not in self._groups and len(self._groups) >= MAX_GROUPS:
            raise TooManyGroups(f"{len(self._groups)} consumer groups exist, no more are possible")
        self._groups[group.name] = group
        self._version += 1
        self._file.touch()

    async def put(self, group: SubscriptionGroup) -> None:
        """Create or change a group; durable on return. Raises TooManyGroups; OSError if it is changed but not yet
        durable: it is written as soon as the disk allows."""
        self._put(group)
        await self._file.flush()

    async def remove(self, name: str) -> None:
        """Forget a group; durable on return. Raises OSError like `put`."""
        if self._groups.pop(name, None) is not None:
            self._version += 1
            self._file.touch()
        await self._file.flush()

    async def stop(self) -> None:
        """Write what is pending."""
        await self._file.stop()
