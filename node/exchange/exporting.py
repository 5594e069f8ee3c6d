"""`export-store`: writes a store of this broker's in the layout of Apache RocketMQ 4.9 (`storePathRootDir`).

The log is copied as it is. New records after its last one tell Apache which transactions have ended: for each half
message from its own consumer offset on, Apache checks whether an op message names it, whereas a transaction of ours may
have ended by its committed copy alone. There is one for each ended transaction after the oldest open one, with the
number of the half message as its body (R: TransactionalMessageServiceImpl); the consumer offset is that of the oldest
open one. How far delayed messages are delivered, which our log records, is written to a table.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from node.broker.broker_snapshots import BASIS
from node.broker.consumer_offsets import ConsumerOffsets
from node.broker.delay import DelayProgress
from node.broker.internal_topics import DELAY_LEVELS_MS, HALF_TOPIC, OP_TOPIC, SCHEDULE_TOPIC, system_topics
from node.broker.subscription_groups import SubscriptionGroups
from node.broker.topics import TopicTable
from node.broker.transactions import REMOVE_TAG, OpenTransactions
from node.config import BrokerConfig
from node.exchange.apache_queues import write_queue_end
from node.exchange.inventory import Inventory, Queue
from node.exchange.log_files import LogFiles, LogWriter
from node.exchange.staging import ExchangeError, locked_own_store, staged
from node.exchange.tables import write_apache_table
from node.exchange.waiting import Waiting
from node.real_runtime import RealDisk
from node.store.properties import join_properties
from node.store.queue_store import CHECKPOINT_VERSION
from node.store.record_batch import batch_of_one
from node.store.table_file import BACKUP_SUFFIX, TableDamaged, decode_table, read_table

__all__ = ["TRANSACTION_GROUP", "export_store"]

TRANSACTION_GROUP = "CID_RMQ_SYS_TRANS"
"""The consumer group with which Apache's broker itself reads half and op messages (R: MixAll.CID_SYS_RMQ_TRANS)."""


class _Durable(NamedTuple):
    """The durable position in the log's checkpoint, and whether there is one."""

    position: int
    is_known: bool


class _Derived(NamedTuple):
    """From the dispatch checkpoint and the table of queue ends: what the log may no longer show."""

    ends: dict[Queue, int]
    delivered: list[int]


def export_store(config: BrokerConfig, target: Path) -> list[str]:
    """Write the store of `config` to `target`; returns lines that describe it. Raises ExchangeError, OSError."""
    if config.classic is None:
        raise ExchangeError("only a classic log can be exported: DLedger's has a header before every record")
    data_dir = Path(config.data_dir)
    if not data_dir.is_dir():
        raise ExchangeError(f"there is no store: {data_dir} is no directory")
    with locked_own_store(data_dir), staged(target) as directory:
        return _Export(config, data_dir, directory).run()


class _Export:
    def __init__(self, config: BrokerConfig, data_dir: Path, directory: Path) -> None:
        self._config = config
        self._data_dir = data_dir
        self._directory = directory
        segment_size_bytes = config.limits.segment_size_bytes
        self._log = LogFiles(data_dir / "commitlog", segment_size_bytes)
        self._writer = LogWriter(directory / "commitlog", segment_size_bytes, self._log.begin)
        self._inventory = Inventory(begins_later=self._log.begin > 0)
        self._delays = DelayProgress()
        self._transactions = OpenTransactions(timeout_ms=0)
        self._waiting = Waiting()

    def run(self) -> list[str]:
        """Write everything; returns lines that describe it."""
        log, config_directory = self._log, self._directory / "config"
        try:
            cut_bytes = self._copy_log()
            self._waiting.check()
            end = self._writer.position
            derived = self._read_derived(end)
            halves = self._inventory.next_number((HALF_TOPIC, 0)) or derived.ends.get((HALF_TOPIC, 0), 0)
            ops = self._inventory.next_number((OP_TOPIC, 0)) or derived.ends.get((OP_TOPIC, 0), 0)
            opened = {half.queue_offset for half in self._transactions.halves.values()}
            first_open = min(opened, default=halves)
            added = self._append_ends(ops, (number for number in range(first_open, halves) if number not in opened))
            self._writer.finish(fill_up=True)
        finally:
            self._writer.abandon()
        delivered = [max(pair) for pair in zip(self._delays.delivered, derived.delivered, strict=True)]
        config_directory.mkdir()
        tables = self._write_tables(config_directory, halves and first_open, ops)
        levels = {level: offset for level, offset in enumerate(delivered) if offset}
        write_apache_table(config_directory / "delayOffset.json", {"offsetTable": levels})
        gone = self._write_queue_ends(derived.ends)
        waiting = sum(
            max(self._inventory.next_number((SCHEDULE_TOPIC, level - 1)) - delivered[level], 0)
            for level in range(1, len(DELAY_LEVELS_MS) + 1)
        )
        return [
            f"exported {self._inventory.text()}, {end - log.begin} bytes of the log from {log.begin} to {end}",
            f"{waiting} delayed messages wait, {len(opened)} transactions are open; added {added} ends of transactions",
            *([f"left out {cut_bytes} bytes at the end that are no whole record"] if cut_bytes else []),
            f"{tables}, {gone} queues without a message in the log",
            f"Apache's broker needs mappedFileSizeCommitLog={log.segment_size_bytes}"
            f" and mappedFileSizeConsumeQueue={self._config.limits.queue_file_units * 20}",
        ]

    def _copy_log(self) -> int:
        """Copy the log as recovery would leave it; returns how many bytes at its end are left out."""
        log, durable = self._log, self._read_checkpoint()
        if log.end_of_files < durable.position:
            raise ExchangeError(
                f"{log.path_at(log.end_of_files)}: the log ends at {log.end_of_files},"
                f" {durable.position - log.end_of_files} bytes that were durable are missing"
            )
        gap = log.first_gap(durable.position if durable.is_known else log.end_of_files)
        if gap:
            raise ExchangeError(gap)
        for record in log.records(log.end_of_files):
            if record.summary is not None:
                self._inventory.take(record.summary)
                self._delays.dispatch(record.summary)
                self._transactions.dispatch(record.summary)
                self._waiting.take(record.summary)
            self._writer.write(record.data)
        position, reason = log.stop
        if position < durable.position:
            raise ExchangeError(f"{log.place(position)} is damaged: {reason}; {durable.position} was durable")
        if reason and not durable.is_known and log.path_at(position) != log.path_at(max(log.sizes)):
            raise ExchangeError(f"{log.place(position)} is damaged: {reason}; no checkpoint says what was durable")
        return log.end_of_files - position if log.sizes else 0

    def _read_checkpoint(self) -> _Durable:
        for name in ("checkpoint", "checkpoint" + BACKUP_SUFFIX):
            try:
                content = decode_table((self._data_dir / name).read_bytes())
                return _Durable(int(content["position"]), True)
            except (FileNotFoundError, ValueError, KeyError, TypeError):
                continue
        return _Durable(0, False)

    def _read_derived(self, end: int) -> _Derived:
        """As the broker would: from the dispatch checkpoint, if it can be read and belongs to this log, and from the
        table for queues that the checkpoint lacks or presumes to end earlier. Raises ExchangeError, OSError."""
        table = self._read_queue_ends() if self._log.begin > 0 else {}
        delivered = [0] * (len(DELAY_LEVELS_MS) + 1)
        try:
            crc, _, text = (self._data_dir / "consumequeue.checkpoint").read_bytes().partition(b"\n")
            text = text.removesuffix(b"\n")
            if crc != b"%08x" % zlib.crc32(text):
                return _Derived(table, delivered)
            content: dict[str, Any] = json.loads(text)
            if content["version"] != CHECKPOINT_VERSION or not self._log.begin - 1 <= content["index"] < end:
                return _Derived(table, delivered)
            ends = {
                (topic, int(queue_id)): int(bounds[1])
                for topic, queues in content["queues"].items()
                for queue_id, bounds in queues.items()
            }
            derived = json.loads(content["derived"])
            presumed = {(topic, queue_id) for topic, queue_id in (derived.get(BASIS) or {}).get("presumed", ())}
            known = {queue: end for queue, end in ends.items() if queue not in presumed or end >= table.get(queue, 0)}
            return _Derived(table | known, [0, *(derived["delay"] or delivered[1:])])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return _Derived(table, delivered)

    def _read_queue_ends(self) -> dict[Queue, int]:
        path, disk = f"{self._data_dir}/queueEnds.json", RealDisk()
        try:
            table = (read_table(disk, path) or {}).get("queueEnds", {})
            return {(topic, int(number)): int(end) for topic, ends in table.items() for number, end in ends.items()}
        except TableDamaged as error:
            raise ExchangeError(str(error)) from error
        except (ValueError, TypeError, AttributeError) as error:
            raise ExchangeError(f"{path} is no table of queues' ends: {error}") from error
        finally:
            disk.close()

    def _append_ends(self, first: int, numbers: Iterable[int]) -> int:
        """Append op messages for the half messages with these `numbers`, the first op message as number `first` of its
        queue; returns how many."""
        count = 0
        for number in numbers:
            batch = batch_of_one(
                topic=OP_TOPIC,
                queue_id=0,
                body=str(number).encode(),
                properties_text=join_properties({"TAGS": REMOVE_TAG}),
                born_timestamp_ms=self._inventory.newest_ms,
            )
            self._writer.append(batch, first + count, self._inventory.newest_ms)
            count += 1
        return count

    def _write_tables(self, directory: Path, half_offset: int, op_offset: int) -> str:
        """Write topics, offsets and groups as the broker would load them; returns a text with their counts."""
        data_dir, disk = self._data_dir, RealDisk()
        try:
            topics = TopicTable(disk, f"{data_dir}/topics.json", self._config.topics)
            offsets = ConsumerOffsets(disk, f"{data_dir}/consumerOffset.json")
            groups = SubscriptionGroups(disk, f"{data_dir}/subscriptionGroup.json")
            for table in (topics, offsets, groups):
                table.load()
        except (TableDamaged, ValueError) as error:
            raise ExchangeError(str(error)) from error
        finally:
            disk.close()
        document = topics.document()
        own = {topic.name for topic in system_topics()}
        kept = {name: topic for name, topic in document["topicConfigTable"].items() if name not in own}
        apaches = {"topicConfigTable": kept, "dataVersion": document["dataVersion"]}
        write_apache_table(directory / "topics.json", apaches)
        positions = offsets.document()
        count = sum(map(len, positions["offsetTable"].values()))
        if half_offset:
            positions["offsetTable"][f"{HALF_TOPIC}@{TRANSACTION_GROUP}"] = {"0": half_offset}
        if op_offset:
            positions["offsetTable"][f"{OP_TOPIC}@{TRANSACTION_GROUP}"] = {"0": op_offset}
        write_apache_table(directory / "consumerOffset.json", positions)
        write_apache_table(directory / "subscriptionGroup.json", groups.document())
        return f"{len(kept)} topics, {len(groups)} groups, {count} consumer offsets"

    def _write_queue_ends(self, ends: dict[Queue, int]) -> int:
        """Write files for queues of which the log holds nothing, so that their numbers continue; returns how many."""
        known = set(self._inventory.queues)
        gone = {queue: end for queue, end in ends.items() if queue not in known and end > 0}
        for (topic, queue_id), end in gone.items():
            path = self._directory / "consumequeue" / topic / str(queue_id)
            write_queue_end(path, end, self._config.limits.queue_file_units)
        return len(gone)
