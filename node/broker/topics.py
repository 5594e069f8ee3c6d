"""The topics of a broker: those of its configuration and those created while it runs.

Topics are kept in `topics.json`, replaced as a whole on every change, in the format of RocketMQ's topic table (R:
TopicConfigManager). A topic in the configuration is as configured until a tool changes it: the change stays, here and
on brokers that take the table over, until the configuration itself is different from what it was then. For such a topic
the file also has what was configured. The broker's own topics (`internal_topics.py`) always exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from node.broker.internal_topics import AUTO_CREATE_TOPIC, PERM_INHERIT, is_internal, system_topics
from node.config import DEFAULT_PERM, MAX_QUEUES, MAX_TOPICS, TopicConfig, check_topic_name
from node.runtime import Disk
from node.store.table_file import read_table, write_table

__all__ = ["TopicTable", "TopicTableFull", "changed_message_type", "check_topic", "topic_json"]

_TABLE, _CONFIGURED = "topicConfigTable", "configuredTopicTable"
"""The topics; and for those that a tool has changed, what was configured. RocketMQ only has the first."""

MESSAGE_TYPE = "message.type"
MESSAGE_TYPES = ("", "NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED")
"""What a topic may be for (R: TopicMessageType); RocketMQ's proxy takes "" for NORMAL."""


class TopicTableFull(Exception):
    """No further topic can be created."""


class TopicTable:
    """Topics by name. `named` are those named after the broker and its cluster. `data_version` counts changes, and is
    part of registrations."""

    def __init__(
        self, disk: Disk, path: str, configured: Iterable[TopicConfig], *, named: Iterable[TopicConfig] = ()
    ) -> None:
        self._disk = disk
        self._path = path
        self._own = {topic.name: topic for topic in (*named, *system_topics())}
        self._configured = self._own | {topic.name: topic for topic in configured}
        self._topics: dict[str, TopicConfig] = {}
        self._changed: dict[str, TopicConfig] = {}
        """For topics that were changed, here or where the table is from: what was configured."""
        self._changing = asyncio.Lock()
        self.data_version = 0

    def load(self) -> None:
        """Read the created topics. Raises OSError, and ValueError if the file is not a topic table."""
        content = read_table(self._disk, self._path)
        if content is None:
            self._topics = dict(self._configured)
            return
        try:
            self._topics, self._changed = self._read(content)
            self.data_version = int(content["dataVersion"]["counter"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{self._path} is no topic table: {error}") from error

    def _read(self, content: Mapping[str, Any]) -> tuple[dict[str, TopicConfig], dict[str, TopicConfig]]:
        """The topics of a table, with those of this broker's configuration, and what was configured of changed ones."""
        found = {topic.name: topic for topic in map(_topic, content[_TABLE].values())}
        were = {topic.name: topic for topic in map(_topic, content.get(_CONFIGURED, {}).values())}
        changed = {name: was for name, was in were.items() if self._configured.get(name, was) == was}
        configured = {name: topic for name, topic in self._configured.items() if name not in found.keys() & changed}
        return found | configured, {name: was for name, was in changed.items() if name in found}

    async def replace(self, content: Mapping[str, Any]) -> bool:
        """Take over another broker's table, as a slave does from its master (S3); returns whether topics changed.

        Raises OSError (nothing changed); ValueError, KeyError, TypeError or AttributeError if `content` is no topic
        table.
        """
        async with self._changing:
            topics, changed = self._read(content)
            version = int(content["dataVersion"]["counter"])
            has_changed = topics != self._topics
            if has_changed or changed != self._changed:
                await self._write(topics, changed, version)
                self._topics, self._changed = topics, changed
            self.data_version = version
            return has_changed

    def get(self, name: str) -> TopicConfig | None:
        """The topic, or None if it does not exist."""
        return self._topics.get(name)

    @property
    def table(self) -> Mapping[str, TopicConfig]:
        """All topics; a new object after each change."""
        return self._topics

    def __iter__(self) -> Iterator[TopicConfig]:
        return iter(self._topics.values())

    def __len__(self) -> int:
        return len(self._topics)

    async def put(self, topic: TopicConfig) -> None:
        """Create or change a topic; durable on return. Raises OSError (nothing changed), TopicTableFull."""
        async with self._changing:
            if topic.name not in self._topics and len(self._topics) >= MAX_TOPICS + len(self._own):
                raise TopicTableFull(f"{len(self._topics)} topics exist, no more are possible")
            topics, changed = self._topics | {topic.name: topic}, dict(self._changed)
            before = changed.pop(topic.name, None)
            was = self._configured.get(topic.name, before)
            if was is not None and was != topic:
                changed[topic.name] = was
            await self._write(topics, changed, self.data_version + 1)
            self._topics, self._changed = topics, changed
            self.data_version += 1

    async def remove(self, name: str) -> None:
        """Forget a created topic; durable on return. The messages in its queues stay. Raises OSError; ValueError for a
        topic that is configured or that the broker needs."""
        async with self._changing:
            if name in self._configured:
                raise ValueError(f"topic {name!r} is configured and cannot be removed")
            topics = {other: topic for other, topic in self._topics.items() if other != name}
            changed = {other: was for other, was in self._changed.items() if other != name}
            await self._write(topics, changed, self.data_version + 1)
            self._topics, self._changed = topics, changed
            self.data_version += 1

    def model(self, name: str, default_topic: str, queues: int) -> TopicConfig | None:
        """The topic that a message to the unknown `name` would create, with `default_topic` as its template.

        None if the template is unknown or must not be used, or `name` is no topic name. A client asks for
        `queues`; it gets at most as many as the template has (R: createTopicInSendMessageMethod).
        """
        example = self._topics.get(default_topic)
        if example is None or not example.perm & PERM_INHERIT:
            return None
        try:
            check_topic_name(name)
        except ValueError:
            return None
        return TopicConfig(
            name=name,
            queues=max(1, min(queues, example.queues)),
            perm=example.perm & ~PERM_INHERIT,
            sys_flag=example.sys_flag,
        )

    async def _write(self, topics: Mapping[str, TopicConfig], changed: Mapping[str, TopicConfig], version: int) -> None:
        await write_table(self._disk, self._path, _document(topics, changed, version))

    def document(self) -> dict[str, Any]:
        """The table as it is stored and sent (code 21)."""
        return _document(self._topics, self._changed, self.data_version)

    @property
    def own_names(self) -> list[str]:
        """Names of the broker's own topics."""
        return sorted(self._own)

    def announced(self, *, auto_create: bool = True, permission: int = DEFAULT_PERM) -> dict[str, Any]:
        """The topics for registrations: those that clients may use; the template for new topics only if sending creates
        topics. None has more than the broker's `permission` (R: registerBrokerAll)."""
        granted = 7 if permission & DEFAULT_PERM == DEFAULT_PERM else permission
        hidden = () if auto_create else (AUTO_CREATE_TOPIC,)
        return {
            name: topic_json(topic) | {"perm": topic.perm & granted}
            for name, topic in self._topics.items()
            if not is_internal(name) and name not in hidden
        }


def _document(topics: Mapping[str, TopicConfig], changed: Mapping[str, TopicConfig], version: int) -> dict[str, Any]:
    were = {name: topic_json(was) for name, was in changed.items()}
    return {
        _TABLE: {name: topic_json(topic) for name, topic in topics.items()},
        "dataVersion": {"timestamp": 0, "counter": version},
        **({_CONFIGURED: were} if were else {}),
    }


def topic_json(topic: TopicConfig) -> dict[str, Any]:
    """A topic as written in the topic table, in a registration and in the answer to code 351 (R: TopicConfig)."""
    attributes = {"attributes": {MESSAGE_TYPE: topic.message_type}} if topic.message_type else {}
    return attributes | {
        "topicName": topic.name,
        "readQueueNums": topic.read_queues,
        "writeQueueNums": topic.queues,
        "perm": topic.perm,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": topic.sys_flag,
        "order": topic.order,
    }


def _topic(entry: dict[str, Any]) -> TopicConfig:
    queues, perm = int(entry["writeQueueNums"]), int(entry["perm"])
    read_queues, sys_flag = int(entry.get("readQueueNums", queues)), int(entry.get("topicSysFlag", 0))
    return check_topic(
        TopicConfig(
            name=check_topic_name(entry["topicName"]),
            queues=queues,
            perm=perm,
            read_queues=read_queues,
            order=bool(entry.get("order", False)),
            sys_flag=sys_flag,
            message_type=str((entry.get("attributes") or {}).get(MESSAGE_TYPE, "")),
        )
    )


def check_topic(topic: TopicConfig) -> TopicConfig:
    """`topic` itself; raises ValueError for values that no topic can have."""
    if not (1 <= topic.queues <= MAX_QUEUES and 1 <= topic.read_queues <= MAX_QUEUES):
        raise ValueError(f"{topic.queues} queues to write and {topic.read_queues} to read")
    if not (0 <= topic.perm <= 7 and 0 <= topic.sys_flag < 1 << 31):
        raise ValueError(f"permission {topic.perm}, topicSysFlag {topic.sys_flag}")
    if topic.message_type not in MESSAGE_TYPES:
        raise ValueError(f"{MESSAGE_TYPE} {topic.message_type[:40]!r} is none of {' '.join(MESSAGE_TYPES).strip()}")
    return topic


def changed_message_type(changes: str, before: str) -> str:
    """The message type after changes of attributes as RocketMQ 5 writes them: "+message.type=FIFO", "-message.type",
    separated by commas. Raises ValueError for other attributes."""
    for change in filter(None, changes.split(",")):
        name, _, value = change[1:].partition("=")
        if change[0] not in "+-" or name != MESSAGE_TYPE or (change[0] == "+") != bool(value):
            raise ValueError(f"attributes {change[:80]!r}: +{MESSAGE_TYPE}=VALUE and -{MESSAGE_TYPE} are possible")
        before = value
    return before
