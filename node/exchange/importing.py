"""`import-store`: writes a store of Apache RocketMQ 4.9 (`storePathRootDir`) in this broker's layout.

The log is copied as it is. What Apache keeps in tables and this broker in its log is appended to it as op messages, so
that no restart and no rebuilding of the queues can lose it: how far the messages of a delay level are delivered (R:
delayOffset.json), and which transactions have ended without a committed copy. In Apache such an end is an op message
with the half message's number, or a check of the half message under a new number, after which the consumer offset has
passed the old one.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from node.broker.consumer_offsets import ConsumerOffsets, split_key
from node.broker.delay import DelayProgress
from node.broker.internal_topics import DELAY_LEVELS_MS, HALF_TOPIC, OP_TOPIC, SCHEDULE_TOPIC
from node.broker.requeue import delay_source
from node.broker.subscription_groups import SubscriptionGroups
from node.broker.topics import TopicTable
from node.broker.transactions import DONE_BEFORE, REMOVE_TAG, names_half
from node.config import BrokerConfig
from node.exchange.apache_queues import queue_ends
from node.exchange.exporting import TRANSACTION_GROUP
from node.exchange.inventory import Inventory, Queue
from node.exchange.log_files import LogFiles, LogWriter, ReadRecord
from node.exchange.staging import ExchangeError, locked_apache_store, staged, sync_file
from node.exchange.tables import read_apache_table
from node.exchange.waiting import Waiting
from node.real_runtime import RealDisk
from node.store.properties import join_properties
from node.store.queue_store import CHECKPOINT_VERSION, StoreTimestamps
from node.store.record import (
    SYS_FLAG_TRANSACTION_COMMIT,
    SYS_FLAG_TRANSACTION_MASK,
    RecordSummary,
    decode_record,
)
from node.store.record_batch import batch_of_one
from node.store.table_file import encode_table

__all__ = ["import_store"]

MAX_UNENDED_HALVES = 1_000_000
"""The most half messages without a committed copy that are remembered, with some 200 bytes of memory each."""
TABLES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("topics.json", {"topicConfigTable": {}, "dataVersion": {"timestamp": 0, "counter": 0}}),
    ("consumerOffset.json", {"offsetTable": {}}),
    ("subscriptionGroup.json", {"subscriptionGroupTable": {}, "dataVersion": {"timestamp": 0, "counter": 0}}),
    ("delayOffset.json", {"offsetTable": {}}),
)


def import_store(config: BrokerConfig, source: Path) -> list[str]:
    """Create the store of `config`, whose directory must be missing or empty, from `source`; returns lines that
    describe it. Raises ExchangeError, OSError."""
    if config.classic is None:
        raise ExchangeError("a store can be imported to a classic log only: DLedger's has a header before every record")
    if not source.is_dir():
        raise ExchangeError(f"there is no store: {source} is no directory")
    with locked_apache_store(source), staged(Path(config.data_dir)) as directory:
        return _Import(config, source, directory).run()


class _ApacheTransactions:
    """Which transactions are open in Apache's view, and which of the others this broker would take for open."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._unended: dict[int, int] = {}
        self._removed: set[int] = set()

    def take(self, record: ReadRecord, summary: RecordSummary) -> None:
        """Process the next message. Raises ExchangeError."""
        if summary.topic == HALF_TOPIC:
            if len(self._unended) >= MAX_UNENDED_HALVES:
                raise ExchangeError(f"more than {MAX_UNENDED_HALVES} half messages of the log have no committed copy")
            self._unended[record.position] = summary.queue_offset
        elif summary.topic == OP_TOPIC:
            body = decode_record(record.data)[0].body
            position = summary.prepared_transaction_offset
            if position in self._unended and (position != 0 or names_half(body, self._unended[position])):
                del self._unended[position]
            for text in body.split(b","):  # more than one: RocketMQ 5
                if text.isdigit() and int(text) >= self._first:
                    self._removed.add(int(text))
        elif summary.sys_flag & SYS_FLAG_TRANSACTION_MASK == SYS_FLAG_TRANSACTION_COMMIT:
            self._unended.pop(summary.prepared_transaction_offset, None)

    def settle(self) -> tuple[int, array[int]]:
        """How many are open, and the positions of half messages that have ended only in Apache's view."""
        ended = array("q")
        for position, number in self._unended.items():
            if number < self._first or number in self._removed:
                ended.append(position)
        return len(self._unended) - len(ended), ended


class _Import:
    def __init__(self, config: BrokerConfig, source: Path, directory: Path) -> None:
        self._config = config
        self._source = source
        self._directory = directory
        self._log = LogFiles(source / "commitlog")
        wanted = config.limits.segment_size_bytes
        if self._log.sizes and self._log.segment_size_bytes != wanted:
            raise ExchangeError(
                f"the files of the log have {self._log.segment_size_bytes} bytes, the configuration says {wanted}:"
                f" set limits.segment_size_bytes = {self._log.segment_size_bytes}"
            )
        for base, size_bytes in self._log.sizes.items():
            if size_bytes != self._log.segment_size_bytes:
                raise ExchangeError(f"{self._log.path_at(base)} has {size_bytes} bytes, the first file another number")
        self._tables = {name: self._read_table(name, empty) for name, empty in TABLES}
        self._writer = LogWriter(directory / "commitlog", wanted, self._log.begin)
        self._inventory = Inventory(begins_later=self._log.begin > 0)
        self._delays = DelayProgress()
        self._waiting = Waiting()
        own = self._tables["consumerOffset.json"]["offsetTable"]
        try:
            self._halves = _ApacheTransactions(int(own.get(f"{HALF_TOPIC}@{TRANSACTION_GROUP}", {}).get("0", 0)))
        except (AttributeError, TypeError, ValueError) as error:
            raise ExchangeError(f"{source}/config/consumerOffset.json is no table of offsets: {error}") from error

    def _read_table(self, name: str, empty: Mapping[str, Any]) -> dict[str, Any]:
        path = self._source / "config" / name
        table = read_apache_table(path)
        if table is None:
            if name == "topics.json":
                raise ExchangeError(f"there is no {path}: {self._source} is no store of RocketMQ 4.9")
            return dict(empty)
        for key, part in empty.items():
            if not isinstance(table.setdefault(key, part), dict):
                raise ExchangeError(f"{path} is damaged: {key} is no object")
        return {key: table[key] for key in empty}

    def run(self) -> list[str]:
        """Write everything; returns lines that describe it."""
        log = self._log
        try:
            cut_bytes = self._copy_log()
            self._waiting.check()
            end = self._writer.position
            opened, ended = self._halves.settle()
            waiting, levels = self._delivered()
            number = self._inventory.next_number((OP_TOPIC, 0))
            for at, source in enumerate((*levels, *ended), number):
                self._append_mark(at, source)
            self._writer.finish(fill_up=False)
        finally:
            self._writer.abandon()
        written = self._writer.position
        gone = self._write_queue_ends(end)
        tables = self._write_tables()
        position = written if written > log.begin else 0  # without a file nothing says where a log begins
        content = {"position": position, "isClean": True, "writtenAtMs": self._inventory.newest_ms}
        self._write("checkpoint", encode_table(content))
        return [
            f"imported {self._inventory.text()}, {end - log.begin} bytes of the log from {log.begin} to {end}",
            f"{waiting} delayed messages wait, {opened} transactions are open; added {len(levels)} marks of delay"
            f" levels and {len(ended)} ends of transactions",
            *([f"left out {cut_bytes} bytes at the end that are no whole record"] if cut_bytes else []),
            f"{tables}, {gone} queues without a message in the log",
        ]

    def _copy_log(self) -> int:
        """Copy the log up to its last whole record; returns how many bytes after it are left out.

        After an orderly stop there are none. After a crash (R: the file `abort` exists) there may be some, as Apache's
        own recovery allows: at the end of the last file that holds anything and, after a power cut, before that file,
        if the checkpoint says that nothing after them was durable.
        """
        log = self._log
        for record in log.records(log.end_of_files):
            if record.summary is not None:
                self._inventory.take(record.summary)
                self._delays.dispatch(record.summary)
                self._halves.take(record, record.summary)
                self._waiting.take(record.summary)
            self._writer.write(record.data)
        position, reason = log.stop
        durable_ms, newest_ms = self._durable_ms(), self._inventory.newest_ms
        if newest_ms < durable_ms:
            raise ExchangeError(
                f"{log.place(position)}: the log ends there{reason and f' ({reason})'}, with a message stored at"
                f" {newest_ms} ms; one stored at {durable_ms} ms was durable"
            )
        last = log.last_byte(position) if reason else -1
        if last < 0:
            return 0
        was_killed = (self._source / "abort").exists()
        if not was_killed or not (durable_ms or log.path_at(last) == log.path_at(position)):
            raise ExchangeError(f"{log.place(position)} is damaged: {reason}, and the log goes on to {last + 1}")
        return last + 1 - position

    def _durable_ms(self) -> int:
        """The store timestamp up to which messages were durable, in milliseconds of the epoch, as the checkpoint says
        (R: StoreCheckpoint, physicMsgTimestamp); 0 if it says nothing."""
        try:
            with (self._source / "checkpoint").open("rb") as file:
                return max(int.from_bytes(file.read(8), "big", signed=True), 0)
        except FileNotFoundError:
            return 0

    def _delivered(self) -> tuple[int, list[int]]:
        """How many delayed messages wait, and the marks for levels for which Apache's table is ahead of the log."""
        waiting, marks = 0, []
        table = self._tables["delayOffset.json"]["offsetTable"]
        path = self._source / "config" / "delayOffset.json"
        for topic, queue_id in self._inventory.queues:
            if topic == SCHEDULE_TOPIC and not 0 <= queue_id < len(DELAY_LEVELS_MS):
                raise ExchangeError(f"the log has a delay level {queue_id + 1}, there are {len(DELAY_LEVELS_MS)} here")
        for level in range(1, len(DELAY_LEVELS_MS) + 1):
            following = self._inventory.next_number((SCHEDULE_TOPIC, level - 1))
            known = self._delays.delivered[level]
            try:
                delivered = min(int(table.get(str(level), 0)), following)
            except (TypeError, ValueError):
                raise ExchangeError(f"{path} is damaged: {table[str(level)]!r} is no offset") from None
            if delivered > known:
                marks.append(delay_source(level, delivered - 1))
            waiting += following - max(delivered, known)
        return waiting, marks

    def _append_mark(self, number: int, source: int) -> None:
        """Append an op message whose field for the prepared transaction's offset names what is done."""
        batch = batch_of_one(
            topic=OP_TOPIC,
            queue_id=0,
            body=DONE_BEFORE,
            properties_text=join_properties({"TAGS": REMOVE_TAG}),
            born_timestamp_ms=self._inventory.newest_ms,
            prepared_transaction_offset=source,
        )
        self._writer.append(batch, number, self._inventory.newest_ms)

    def _write_queue_ends(self, end: int) -> int:
        """Write a dispatch checkpoint with the numbering of queues of which the log holds nothing, and the table for
        when the checkpoint is lost; returns how many queues these are."""
        known = set(self._inventory.queues)
        ends: dict[Queue, int] = {}
        for queue, following in queue_ends(self._source / "consumequeue", end):
            if queue not in known and following > 0:
                ends[queue] = following
        if not ends:
            return 0
        queues: dict[str, dict[str, Any]] = {}
        table: dict[str, dict[str, int]] = {}
        for (topic, queue_id), following in ends.items():
            queues.setdefault(topic, {})[str(queue_id)] = [following, following, [[], []]]
            table.setdefault(topic, {})[str(queue_id)] = following
        self._write("queueEnds.json", encode_table({"queueEnds": table}))
        content = {
            "version": CHECKPOINT_VERSION,
            "index": self._log.begin - 1 if end > self._log.begin else -1,
            "term": 1,
            "store_timestamp_ms": 0,
            "timestamps": StoreTimestamps().document(),
            "units_per_file": self._config.limits.queue_file_units,
            "queues": queues,
            "derived": json.dumps({"delay": None, "transactions": None, "index": None}),
        }
        text = json.dumps(content, separators=(",", ":")).encode()
        self._write("consumequeue.checkpoint", b"%08x\n%s\n" % (zlib.crc32(text), text))
        return len(ends)

    def _write_tables(self) -> str:
        """Write topics, offsets and groups, and load them once as the broker will; returns a text with their counts."""
        offsets = self._tables["consumerOffset.json"]["offsetTable"]
        for key in [key for key in offsets if split_key(key)[1] == TRANSACTION_GROUP]:
            del offsets[key]
        for name, _ in TABLES[:3]:
            self._write(name, encode_table(self._tables[name]))
        directory, disk = self._directory, RealDisk()
        try:
            topics = TopicTable(disk, f"{directory}/topics.json", self._config.topics)
            consumer_offsets = ConsumerOffsets(disk, f"{directory}/consumerOffset.json")
            groups = SubscriptionGroups(disk, f"{directory}/subscriptionGroup.json")
            for table in (topics, consumer_offsets, groups):
                table.load()
        except ValueError as error:
            text = str(error).replace(str(directory), str(self._source / "config"))
            raise ExchangeError(f"a table cannot be taken over: {text}") from error
        finally:
            disk.close()
        count = sum(map(len, consumer_offsets.document()["offsetTable"].values()))
        known = len(self._tables["topics.json"]["topicConfigTable"])
        return f"{known} topics, {len(groups)} groups, {count} consumer offsets"

    def _write(self, name: str, data: bytes) -> None:
        path = self._directory / name
        path.write_bytes(data)
        sync_file(path)
