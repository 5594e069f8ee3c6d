"""Which log a broker keeps, by its configuration: DLedger's, or a classic one."""

from __future__ import annotations

from node.broker.classic import ClassicLedger, ClassicLogOptions
from node.broker.ledger import Ledger
from node.config import BrokerConfig, split_address
from node.dledger import TIMINGS, DLedgerConfig, DLedgerRequestCode, DLedgerServer
from node.dledger.rpc import JSON_CODES
from node.ha.ledger import HaLedger
from node.runtime import Runtime
from node.store.commit_log import FlushPolicy

__all__ = ["new_dledger", "new_ledger"]


def new_dledger(config: BrokerConfig, runtime: Runtime) -> Ledger:
    """This broker's member of its DLedger group. Nothing is opened before it is started.

    Appends from outside (the APPEND request of DLedger's own clients) are not served: an entry that is not a message
    record would stop every broker that dispatches it.
    """
    ledger = DLedgerServer(
        DLedgerConfig(
            group=config.group,
            self_id=config.self_id,
            peers=config.dledger_peers,
            listen=config.dledger_listen,
            data_dir=config.data_dir,
            flush_mode="async" if config.flush_mode == "async" else "sync",
            flush_interval_ms=config.flush_interval_ms,
            flush_least_pages=config.flush_least_pages,
            flush_thorough_interval_ms=config.flush_thorough_interval_ms,
            timing=TIMINGS[config.timing],
            preferred_leaders=config.preferred_leaders,
            members_may_change=config.members_may_change,
            joins=config.joins,
            data_segment_size_bytes=config.limits.segment_size_bytes,
            snapshot_threshold_entries=config.snapshots.threshold_entries,
            snapshots_kept=config.snapshots.kept,
        ),
        runtime,
    )
    for code in (DLedgerRequestCode.APPEND, DLedgerRequestCode.APPEND + JSON_CODES):
        ledger.remoting.processors.pop(code)
    return ledger


def new_ledger(config: BrokerConfig, runtime: Runtime) -> Ledger:
    """The log that the configuration asks for."""
    if config.classic is None:
        return new_dledger(config, runtime)
    options = ClassicLogOptions(
        self_id=config.self_id,
        data_dir=config.data_dir,
        segment_size_bytes=config.limits.segment_size_bytes,
        flush_mode=config.flush_mode,
        flush=FlushPolicy(
            interval_ms=config.flush_interval_ms,
            least_pages=config.flush_least_pages,
            thorough_interval_ms=config.flush_thorough_interval_ms,
        ),
        config=config.classic,
    )
    ha = config.classic.ha
    if ha is None:
        return ClassicLedger(options, runtime)
    host, port = split_address(config.listen)
    ha_port = ha.listen_port or (port + 1 if port else 0)
    return HaLedger(
        options,
        runtime,
        ha=ha,
        slave_reads=config.slave_read_enable,
        timing=config.timing,
        host=host,
        port=ha_port,
    )
