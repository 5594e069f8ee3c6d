"""The topics of a broker: those of its configuration and those created while it runs.

Created topics are kept in `topics.json`, replaced as a whole on every change, in the shape of RocketMQ's
topic table (R: TopicConfigManager). The configuration wins over the file for the topics it names.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from typing import Any

from node.config import MAX_QUEUES, MAX_TOPICS, TopicConfig, check_topic_name
from node.runtime import Disk

__all__ = ["TopicTable", "TopicTableFull", "topic_json"]


class TopicTableFull(Exception):
    """No further topic can be created."""


class TopicTable:
    """Topics by name. `data_version` counts changes, as the name server is told."""

    def __init__(self, disk: Disk, path: str, configured: Iterable[TopicConfig]) -> None:
        self._disk = disk
        self._path = path
        self._configured = {topic.name: topic for topic in configured}
        self._topics: dict[str, TopicConfig] = {}
        self._changing = asyncio.Lock()
        self.data_version = 0

    def load(self) -> None:
        """Read the created topics. Raises OSError, and ValueError when the file is not a topic table."""
        created: dict[str, TopicConfig] = {}
        if self._disk.exists(self._path):
            try:
                content = json.loads(self._disk.read_file(self._path))
                for entry in content["topicConfigTable"].values():
                    topic = _topic(entry)
                    created[topic.name] = topic
                self.data_version = int(content["dataVersion"]["counter"])
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise ValueError(f"{self._path} is no topic table: {error}") from error
        self._topics = created | self._configured

    def get(self, name: str) -> TopicConfig | None:
        """The topic, or None when it does not exist."""
        return self._topics.get(name)

    def __iter__(self) -> Iterator[TopicConfig]:
        return iter(self._topics.values())

    def __len__(self) -> int:
        return len(self._topics)

    async def put(self, topic: TopicConfig) -> None:
        """Create or change a topic; durable on return. Raises OSError (nothing changed), TopicTableFull."""
        async with self._changing:
            if topic.name not in self._topics and len(self._topics) >= MAX_TOPICS:
                raise TopicTableFull(f"{len(self._topics)} topics exist, no more are possible")
            topics = self._topics | {topic.name: topic}
            content = {
                "topicConfigTable": {name: topic_json(each) for name, each in topics.items()},
                "dataVersion": {"counter": self.data_version + 1},
            }
            await self._disk.write_file_atomic(self._path, json.dumps(content, indent=1).encode())
            self._topics = topics
            self.data_version += 1


def topic_json(topic: TopicConfig) -> dict[str, Any]:
    """A topic as it stands in the topic table and in a registration (R: TopicConfig)."""
    return {
        "topicName": topic.name,
        "readQueueNums": topic.queues,
        "writeQueueNums": topic.queues,
        "perm": topic.perm,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": False,
    }


def _topic(entry: dict[str, Any]) -> TopicConfig:
    queues, perm = int(entry["writeQueueNums"]), int(entry["perm"])
    if not (1 <= queues <= MAX_QUEUES and 0 <= perm <= 7):
        raise ValueError(f"{queues} queues with permission {perm}")
    return TopicConfig(name=check_topic_name(entry["topicName"]), queues=queues, perm=perm)
