"""Encodes requests of producers and consumers, and decodes their replies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from node.client.bodies import read_body
from node.client.messages import PRODUCER_GROUP, MessageQueue
from node.remoting import Command, RequestCode
from node.remoting.tool_json import parse_queue_table
from node.store.properties import encode_properties
from node.store.record import RecordError, decode_record

__all__ = [
    "DEFAULT_TOPIC",
    "DEFAULT_TOPIC_QUEUES",
    "end_transaction_request",
    "group_of_check",
    "heartbeat_request",
    "lock_request",
    "read_consumer_ids",
    "read_locked",
    "read_offsets",
    "retry_request",
    "send_back_request",
    "send_request",
]

DEFAULT_TOPIC: Final = "TBW102"
"""The topic whose settings an unknown topic would inherit (R)."""
DEFAULT_TOPIC_QUEUES: Final = 4
"""How many queues it would get at most (R: defaultTopicQueueNums of a producer)."""

_V2_NAMES: Final = {
    "producerGroup": "a", "topic": "b", "defaultTopic": "c", "defaultTopicQueueNums": "d", "queueId": "e",
    "sysFlag": "f", "bornTimestamp": "g", "flag": "h", "properties": "i", "reconsumeTimes": "j", "unitMode": "k",
    "maxReconsumeTimes": "l", "batch": "m",
}  # fmt: skip
_LONG_NAMES: Final = tuple(_V2_NAMES)
_SHORT_NAMES: Final = tuple(_V2_NAMES.values())


def send_request(
    code: int,
    group: str,
    topic: str,
    queue_id: int,
    body: bytes,
    *,
    properties: Mapping[str, str],
    born_ms: int,
    sys_flag: int = 0,
) -> Command:
    """A send request in one of its three forms: 10, 310, or 320 for a batch body.

    Raises ValueError for another code; PropertyError (a ValueError) for properties that cannot be written.
    """
    if code not in (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE):
        raise ValueError(f"code {code} sends no message")
    names = _LONG_NAMES if code == RequestCode.SEND_MESSAGE else _SHORT_NAMES
    values: tuple[str, ...] = (  # strings already, in the order of _V2_NAMES: this is on every send's path
        group, topic, DEFAULT_TOPIC, str(DEFAULT_TOPIC_QUEUES), str(queue_id), str(sys_flag), str(born_ms), "0",
        encode_properties(properties) if properties else "", "0", "false", "0",
        "true" if code == RequestCode.SEND_BATCH_MESSAGE else "false",
    )  # fmt: skip
    return Command(code, dict(zip(names, values, strict=True)), body)


def retry_request(
    group: str,
    topic: str,
    body: bytes,
    *,
    properties: Mapping[str, str],
    born_ms: int,
    sys_flag: int,
    flag: int,
    reconsume_times: int,
    is_dead: bool,
) -> Command:
    """A copy of a message for `topic`, the retry topic of `group`, in a queue of the broker's choice.

    `is_dead` sends it to the group's dead letters instead. Brokers decide that by comparing `reconsume_times` with a
    limit, by `>=` in RocketMQ 4.9 and by `>` in 5; the limit is therefore set one below or above, so that both agree.
    Raises PropertyError (a ValueError).
    """
    request = send_request(
        RequestCode.SEND_MESSAGE_V2, group, topic, -1, body, properties=properties, born_ms=born_ms, sys_flag=sys_flag
    )
    limit = reconsume_times - 1 if is_dead else reconsume_times + 1
    changed = {"flag": flag, "reconsumeTimes": reconsume_times, "maxReconsumeTimes": limit}
    request.ext_fields |= {_V2_NAMES[name]: str(value) for name, value in changed.items()}
    return request


def heartbeat_request(client_id: str, producers: Iterable[str], consumers: Sequence[Mapping[str, Any]]) -> Command:
    """This client's id, the groups that it produces for, and its consumers with their subscriptions."""
    body = {
        "clientID": client_id,
        "producerDataSet": [{"groupName": group} for group in producers],
        "consumerDataSet": list(consumers),
    }
    return Command.request(RequestCode.HEART_BEAT, {}, json.dumps(body).encode())


def read_consumer_ids(reply: Command) -> list[str]:
    """The members of a group, sorted as every member sorts them. Raises ValueError."""
    try:
        return sorted(str(member) for member in read_body(reply.body)["consumerIdList"])
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no list of consumers: {error!r}") from None


def lock_request(code: int, group: str, client_id: str, queues: Iterable[MessageQueue]) -> Command:
    """Lock (41) or unlock (42) queues of one broker for this client."""
    body = {
        "consumerGroup": group,
        "clientId": client_id,
        "mqSet": [
            {"topic": queue.topic, "brokerName": queue.broker_name, "queueId": queue.queue_id} for queue in queues
        ],
    }
    return Command.request(code, {}, json.dumps(body).encode())


def read_locked(reply: Command) -> list[MessageQueue]:
    """The queues that are locked for this client now. Raises ValueError."""
    try:
        return [
            MessageQueue(str(queue["topic"]), str(queue["brokerName"]), int(queue["queueId"]))
            for queue in read_body(reply.body)["lockOKMQSet"]
        ]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no list of locked queues: {error!r}") from None


def read_offsets(body: bytes) -> dict[MessageQueue, int]:
    """The offsets at which the consumers of queues are to continue. Raises ValueError."""
    try:
        rows = parse_queue_table(body, "offsetTable")
        offsets = {MessageQueue(place.topic, place.broker_name, place.queue_id): int(value) for place, value in rows}
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no table of offsets: {error!r}") from None
    if any(not 0 <= offset < 1 << 63 for offset in offsets.values()):
        raise ValueError("an offset is none")
    return offsets


def send_back_request(
    group: str, *, physical_offset: int, message_id: str, topic: str, delay_level: int, max_reconsume_times: int
) -> Command:
    """Send a message back for redelivery after the delay of `delay_level`; 0 is a delay that grows with each time,
    below 0 means never (it goes to the group's dead letters)."""
    return Command.request(
        RequestCode.CONSUMER_SEND_MSG_BACK,
        {
            "offset": physical_offset,
            "group": group,
            "delayLevel": delay_level,
            "originMsgId": message_id,
            "originTopic": topic,
            "unitMode": False,
            "maxReconsumeTimes": max_reconsume_times,
        },
    )


def end_transaction_request(
    group: str, *, flag: int, queue_offset: int, physical_offset: int, message_id: str, from_check: bool
) -> Command:
    """Commit (8), roll back (12) or leave undecided (0) the half message at these offsets."""
    return Command.request(
        RequestCode.END_TRANSACTION,
        {
            "producerGroup": group,
            "tranStateTableOffset": queue_offset,
            "commitLogOffset": physical_offset,
            "commitOrRollback": flag,
            "fromTransactionCheck": from_check,
            "msgId": message_id,
            "transactionId": message_id,
        },
    )


def group_of_check(command: Command) -> str:
    """The producer group that a check is meant for; "" if it cannot be read."""
    try:
        return decode_record(command.body)[0].properties.get(PRODUCER_GROUP, "")
    except RecordError:
        return ""
