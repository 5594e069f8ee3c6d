"""What R's own tools look for in the answer to code 28, in their words: `mqadmin clusterList` fails without it.

Where this node has no such thing the value is the one that says so: it has no thread pools, so nothing queues there.
"""

from __future__ import annotations

from collections.abc import Mapping

from node.broker.disk_watch import DiskWatch
from node.broker.ledger import LedgerStore
from node.store.record import RecordError, summarize_record

__all__ = ["tool_status"]

MAX_SEARCHED_ENTRIES = 64
"""Entries at the begin of the log among which the first message is looked for: others are a new leader's."""


def tool_status(
    table: Mapping[str, object], watch: DiskWatch, log: LedgerStore, *, boot_ms: int, accept_from_ms: int
) -> dict[str, object]:
    """The entries to add to a status `table`. Rates are per second over the last 10 s, minute and ten minutes."""
    puts, gets = watch.rates()
    put_rates, get_rates = (" ".join(f"{rate:.1f}" for rate in rates) for rates in (puts, gets))
    return {
        "brokerVersionDesc": f"splitbrain {table['version']}",
        "bootTimestamp": boot_ms,
        "startAcceptSendRequestTimeStamp": accept_from_ms,
        "putTps": put_rates,
        "getTotalTps": get_rates,
        "getFoundTps": get_rates,
        "getTransferedTps": get_rates,
        "msgPutTotalTodayNow": table["putTotal"],
        "msgGetTotalTodayNow": table["getTotal"],
        "putMessageEntireTimeMax": round(float(str(table["putMaxSeconds"])) * 1000),
        "commitLogMaxOffset": table["committedPos"],
        "earliestMessageTimeStamp": _earliest_ms(log),
        "pageCacheLockTimeMills": 0,
        "sendThreadPoolQueueSize": 0,
        "sendThreadPoolQueueHeadWaitTimeMills": 0,
        "pullThreadPoolQueueSize": 0,
        "pullThreadPoolQueueHeadWaitTimeMills": 0,
    }


def _earliest_ms(log: LedgerStore) -> int:
    """Store timestamp of the oldest message of the log; -1 when there is none (R)."""
    index = log.ledger_begin_index
    try:
        for _ in range(MAX_SEARCHED_ENTRIES):
            entry = log.get(index) if index <= log.committed_index else None
            if entry is None:
                break
            if entry.is_message:
                return summarize_record(entry.body).store_timestamp_ms
            index = entry.index + 1
    except (OSError, RecordError):
        pass
    return -1
