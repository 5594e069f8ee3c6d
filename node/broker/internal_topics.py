"""Topics that the broker itself creates: their names, and which of them clients may touch.

Names are RocketMQ's (R: TopicValidator, MixAll); tools know them.
"""

from __future__ import annotations

from node.config import PERM_READ, PERM_WRITE, TopicConfig, check_topic_name
from node.config_reader import check_name
from node.store.record import RecordSummary

__all__ = [
    "AUTO_CREATE_QUEUES",
    "AUTO_CREATE_TOPIC",
    "DELAY_LEVELS_MS",
    "DLQ_PREFIX",
    "HALF_TOPIC",
    "OP_TOPIC",
    "PERM_INHERIT",
    "REPLY_SUFFIX",
    "RETRY_PREFIX",
    "REVIVE_PREFIX",
    "SCHEDULE_TOPIC",
    "TIMER_TOPIC",
    "UNRESOLVED_TOPIC",
    "check_stored_topic",
    "dlq_topic",
    "is_internal",
    "named_topics",
    "retry_topic",
    "system_topics",
    "tells_by_body",
]

AUTO_CREATE_TOPIC = "TBW102"
"""The template for new topics: its permission 7 allows creating a topic by sending to it (R)."""
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
"""Where delayed messages wait; queue n holds level n + 1."""
TIMER_TOPIC = "rmq_sys_wheel_timer"
"""Where timer messages wait."""
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
"""Where messages of open transactions wait."""
OP_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
"""One message for each transaction that ended without a message of its own."""
UNRESOLVED_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
"""Half messages whose producers never reported how their transaction ended."""
REVIVE_PREFIX = "rmq_sys_REVIVE_LOG_"
"""Followed by the name of a cluster: the topic that logs what POP consumers were given and have acknowledged."""
REPLY_SUFFIX = "_REPLY_TOPIC"
"""Preceded by the name of a cluster: the topic of the replies to requests."""
CLUSTER_TOPIC_QUEUES = 16
"""R: the default number of queues of a topic."""
RETRY_PREFIX = "%RETRY%"
DLQ_PREFIX = "%DLQ%"

PERM_INHERIT = 1
AUTO_CREATE_QUEUES = 8
"""R: defaultTopicQueueNums of the broker."""

_S, _M, _H = 1000, 60_000, 3_600_000
DELAY_LEVELS_MS = (
    1 * _S, 5 * _S, 10 * _S, 30 * _S,
    1 * _M, 2 * _M, 3 * _M, 4 * _M, 5 * _M, 6 * _M, 7 * _M, 8 * _M, 9 * _M, 10 * _M, 20 * _M, 30 * _M,
    1 * _H, 2 * _H,
)  # fmt: skip
"""The delay of level 1, 2, ... in milliseconds (R: messageDelayLevel)."""

_INTERNAL = frozenset((SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC, OP_TOPIC))


def retry_topic(group: str) -> str:
    """The topic of messages that a consumer of `group` could not handle."""
    return RETRY_PREFIX + group


def dlq_topic(group: str) -> str:
    """The topic of messages that `group` gave up on."""
    return DLQ_PREFIX + group


def is_internal(topic: str) -> bool:
    """Whether clients must not send to `topic`, because its messages mean something to the broker."""
    return topic in _INTERNAL or topic.startswith(REVIVE_PREFIX)


def check_stored_topic(topic: str) -> None:
    """Raise ValueError for a topic that cannot have messages in the log. The name of POP's log contains the cluster's,
    which may have dots; topics that clients name have none."""
    if topic.startswith(REVIVE_PREFIX):
        check_name(topic.removeprefix(REVIVE_PREFIX))
    else:
        check_topic_name(topic)


def named_topics(cluster_name: str, broker_name: str) -> tuple[TopicConfig, ...]:
    """The topics of every broker that are named after its cluster and itself (R: TopicConfigManager): tools and
    proxies query their routes to find all brokers of a cluster, or this one; and the broker's own log of what POP
    consumers were given. Names that are not valid for a topic are left out.
    """
    perm = PERM_READ | PERM_WRITE | PERM_INHERIT
    wanted = {
        cluster_name + REPLY_SUFFIX: (1, PERM_READ | PERM_WRITE),
        broker_name: (1, perm),
        cluster_name: (CLUSTER_TOPIC_QUEUES, perm),
        REVIVE_PREFIX + cluster_name: (1, PERM_READ),
    }
    return tuple(
        TopicConfig(name=name, queues=queues, perm=perm) for name, (queues, perm) in wanted.items() if _can_be(name)
    )


def _can_be(name: str) -> bool:
    try:
        check_topic_name(name)
    except ValueError:
        return False
    return True


def system_topics() -> tuple[TopicConfig, ...]:
    """The topics that exist on every broker."""
    return (
        TopicConfig(name=AUTO_CREATE_TOPIC, queues=AUTO_CREATE_QUEUES, perm=PERM_READ | PERM_WRITE | PERM_INHERIT),
        TopicConfig(name=SCHEDULE_TOPIC, queues=len(DELAY_LEVELS_MS), perm=PERM_READ),
        TopicConfig(name=TIMER_TOPIC, queues=1, perm=PERM_READ),
        TopicConfig(name=HALF_TOPIC, queues=1, perm=0),
        TopicConfig(name=OP_TOPIC, queues=1, perm=0),
        TopicConfig(name=UNRESOLVED_TOPIC, queues=1),
    )


def tells_by_body(record: RecordSummary) -> bool:
    """Whether derivations need the body of this message: if it is POP's, or an op message without the half message's
    physical offset, which Apache's brokers leave 0."""
    if record.topic == OP_TOPIC:
        return record.prepared_transaction_offset == 0
    return record.topic.startswith(REVIVE_PREFIX)
