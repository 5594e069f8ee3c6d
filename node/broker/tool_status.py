"""What R's own tools look for in the answers to codes 28 and 26, under R's names: mqadmin's clusterList needs it.

Where this node has no such thing the value shows that: it has no thread pools, so nothing queues there.
"""

from __future__ import annotations

from collections.abc import Mapping

from node.broker.disk_watch import DiskWatch
from node.broker.internal_topics import AUTO_CREATE_QUEUES, DELAY_LEVELS_MS
from node.broker.ledger import LedgerStore
from node.config import BrokerConfig, split_address
from node.store.consume_queue import UNIT_SIZE_BYTES
from node.store.record import RecordError, summarize_record

__all__ = ["settings_of", "tool_status"]

MAX_SEARCHED_ENTRIES = 64
"""Entries at the beginning of the log in which the first message is searched: those before it are a new leader's."""


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


def settings_of(config: BrokerConfig, table: Mapping[str, object]) -> dict[str, object]:
    """The configuration under RocketMQ's names (R: BrokerConfig, MessageStoreConfig), as far as this broker has the
    same settings. `table` is the status, which knows the current role. Contains no secrets."""
    host, port = split_address(config.advertise)
    classic, limits, transactions = config.classic, config.limits, config.transactions
    settings: dict[str, object] = {
        "brokerClusterName": config.cluster_name,
        "brokerName": config.broker_name,
        "brokerId": table["brokerId"],
        "brokerRole": table["brokerRole"],
        "brokerIP1": host,
        "listenPort": port,
        "namesrvAddr": ";".join(config.name_servers),
        "brokerPermission": config.broker_permission,
        "autoCreateTopicEnable": config.auto_create_topics,
        "autoCreateSubscriptionGroup": config.auto_create_groups,
        "defaultTopicQueueNums": AUTO_CREATE_QUEUES,
        "slaveReadEnable": config.slave_read_enable,
        "startAcceptSendRequestTimeStamp": config.start_accept_send_timestamp_ms,
        "flushDiskType": "SYNC_FLUSH" if config.flush_mode == "sync" else "ASYNC_FLUSH",
        "transientStorePoolEnable": classic is not None and classic.transient_pool,
        "maxMessageSize": limits.max_message_size_bytes,
        "mappedFileSizeCommitLog": limits.segment_size_bytes,
        "mappedFileSizeConsumeQueue": limits.queue_file_units * UNIT_SIZE_BYTES,
        "accessMessageInMemoryMaxRatio": limits.in_memory_percent,
        "messageDelayLevel": " ".join(map(_duration, DELAY_LEVELS_MS)),
        "rejectTransactionMessage": transactions.reject,
        "transactionTimeOut": round(transactions.timeout_s * 1000),
        "transactionCheckInterval": round(transactions.check_interval_s * 1000),
        "transactionCheckMax": transactions.max_checks,
        "regionId": config.region_id,
        "traceOn": config.trace_on,
        "traceTopicEnable": False,
        "msgTraceTopicName": "RMQ_SYS_TRACE_TOPIC",
        "filterServerNums": 0,
        "fileReservedTime": config.retention.retention_hours,
        "useTLS": config.tls is not None,
        "aclEnable": config.acl is not None,
        "enableDLegerCommitLog": classic is None,
        "storePathRootDir": config.data_dir,
    }
    if classic is None:
        members = ";".join(f"{name}-{address.replace(':', '-')}" for name, address in config.dledger_peers.items())
        settings |= {"dLegerGroup": config.group, "dLegerSelfId": config.self_id, "dLegerPeers": members}
    return settings


def _duration(delay_ms: int) -> str:
    for unit, size_ms in (("h", 3_600_000), ("m", 60_000)):
        if delay_ms % size_ms == 0:
            return f"{delay_ms // size_ms}{unit}"
    return f"{delay_ms // 1000}s"


def _earliest_ms(log: LedgerStore) -> int:
    """Store timestamp of the oldest message of the log; -1 if there is none (R)."""
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
