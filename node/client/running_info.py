"""A consumer's answers to operators: R's ConsumerRunningInfo (307), shown by `mqadmin consumerStatus` and the console,
and its offsets in the queues of a topic (221). Rates are not counted here, and Python has no jstack; both are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from node.client.reader import QueueReader
from node.client.subscriptions import Subscription
from node.remoting.tool_json import Place, queue_row, queue_table, to_json

__all__ = ["consumer_status", "running_info"]

_MIB = 1 << 20


def running_info(
    properties: Mapping[str, str],
    subscriptions: Iterable[Subscription],
    readers: Iterable[QueueReader],
    *,
    now_s: float,
    wall_ms: int,
    lock_lease_s: float,
) -> bytes:
    """The body of the answer. `now_s` is the loop's time, `wall_ms` the same moment in ms of the epoch; a lock lasts
    `lock_lease_s` from its request."""
    rows = []
    for reader in readers:
        age_s = now_s - (reader.locked_until_s - lock_lease_s)
        locked_ms = wall_ms - round(age_s * 1000) if reader.locked_until_s > float("-inf") else 0
        row = _process_queue(reader) | {"locked": reader.locked_until_s >= now_s, "lastLockTimestamp": locked_ms}
        rows.append(queue_row(_place(reader), row))
    members = {
        "properties": to_json(dict(properties)),
        "subscriptionSet": to_json([subscription.data() for subscription in subscriptions]),
        "mqTable": queue_table(rows),
        "statusTable": "{}",
    }
    return f"{{{','.join(f'{to_json(name)}:{value}' for name, value in members.items())}}}".encode()


def consumer_status(readers: Iterable[QueueReader]) -> bytes:
    """The body of the answer to 221: each queue's first offset that is not processed yet."""
    rows = [
        queue_row(_place(reader), reader.tracker.committed_offset) for reader in readers if reader.tracker is not None
    ]
    return f'{{"messageQueueTable":{queue_table(rows)}}}'.encode()


def _place(reader: QueueReader) -> Place:
    return Place(reader.queue.topic, reader.queue.broker_name, reader.queue.queue_id)


def _process_queue(reader: QueueReader) -> dict[str, object]:
    """R: ProcessQueueInfo. `droped` is its spelling."""
    tracker = reader.tracker
    first, last = tracker.open_range if tracker is not None else (0, 0)
    return {
        "commitOffset": tracker.committed_offset if tracker is not None else -1,
        "cachedMsgMinOffset": first,
        "cachedMsgMaxOffset": last,
        "cachedMsgCount": tracker.open_count if tracker is not None else 0,
        "cachedMsgSizeInMiB": tracker.open_bytes // _MIB if tracker is not None else 0,
        "transactionMsgMinOffset": 0,
        "transactionMsgMaxOffset": 0,
        "transactionMsgCount": 0,
        "tryUnlockTimes": 0,
        "droped": reader.dropped,
        "lastPullTimestamp": reader.pulled_ms,
        "lastConsumeTimestamp": reader.handled_ms,
    }
