"""A store as Apache's broker would write it, made only from the description of its file formats."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HALF, OP, SCHEDULE = "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC", "SCHEDULE_TOPIC_XXXX"
SEGMENT_BYTES = 65536
CONFIG = f"""
self_id = "n1"
listen = "127.0.0.1:0"
data_dir = "{{data_dir}}"
[classic]
[limits]
segment_size_bytes = {SEGMENT_BYTES}
max_message_size_bytes = 10000
queue_file_units = 50
index_slots = 32
index_entries = 100
"""


def pack(
    *, topic: str, queue_id: int, number: int, position: int, body: bytes, text: str, sys_flag: int = 0,
    prepared: int = 0, stored_ms: int = 0,
) -> bytes:  # fmt: skip
    """A record with IPv4 hosts, field by field."""
    name, properties = topic.encode(), text.encode()
    host = bytes((127, 0, 0, 1)) + (10911).to_bytes(4, "big")
    fields = (queue_id, 0, number, position, sys_flag, 1, host, stored_ms, host, 0, prepared, len(body))
    rest = struct.pack(">iiqqiq8sq8siqi", *fields)
    rest += body + bytes((len(name),)) + name + len(properties).to_bytes(2, "big") + properties
    crc = (zlib.crc32(body) & 0x7FFFFFFF).to_bytes(4, "big")
    return (len(rest) + 12).to_bytes(4, "big") + bytes.fromhex("daa320a7") + crc + rest


@dataclass
class ApacheStore:
    """What a broker stores, message by message. `begin` is where its log begins."""

    begin: int = 0
    log: bytearray = field(default_factory=bytearray)
    numbers: dict[tuple[str, int], int] = field(default_factory=dict)
    units: dict[tuple[str, int], list[bytes]] = field(default_factory=dict)
    delivered: dict[int, int] = field(default_factory=dict)
    offsets: dict[str, dict[int, int]] = field(default_factory=dict)
    open: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Open half messages, by position: number and real topic."""
    at_half: int = 0
    """The broker's own consumer offset for half messages."""
    clock_ms: int = 1_700_000_000_000

    def put(self, topic: str, queue_id: int, body: bytes, text: str = "", **fields: int) -> tuple[int, int]:
        """Append a message; returns its number and position."""
        number = self.numbers.get((topic, queue_id), 0)
        self.clock_ms += 7
        size_bytes = len(pack(topic=topic, queue_id=queue_id, number=number, position=0, body=body, text=text))
        room = SEGMENT_BYTES - len(self.log) % SEGMENT_BYTES
        if size_bytes + 8 > room:
            self.log += room.to_bytes(4, "big") + bytes.fromhex("cbd43194") + bytes(room - 8)
        position = self.begin + len(self.log)
        self.log += pack(topic=topic, queue_id=queue_id, number=number, position=position, body=body, text=text,
                         stored_ms=self.clock_ms, **fields)  # fmt: skip
        self.numbers[topic, queue_id] = number + 1
        self.units.setdefault((topic, queue_id), []).append(struct.pack(">qiq", position, size_bytes, 0))
        return number, position

    def delay(self, level: int, body: bytes) -> None:
        """Append a delayed message."""
        self.put(SCHEDULE, level - 1, body, f"DELAY\x01{level}\x02REAL_TOPIC\x01t\x02REAL_QID\x010\x02")

    def deliver(self, level: int) -> None:
        """Deliver the next message of a level; only the table records that."""
        following = self.delivered.get(level, 0)
        if following < self.numbers.get((SCHEDULE, level - 1), 0):
            self.put("t", 0, b"delivered", "REAL_TOPIC\x01t\x02")
            self.delivered[level] = following + 1

    def half(self, topic: str, body: bytes) -> None:
        """Begin a transaction."""
        text = f"TRAN_MSG\x01true\x02PGROUP\x01p\x02REAL_TOPIC\x01{topic}\x02REAL_QID\x010\x02"
        number, position = self.put(HALF, 0, body, text)
        self.open[position] = (number, topic)

    def end(self, position: int, *, commit: bool) -> None:
        """End a transaction: a copy if it is committed, and an op message with the half message's number."""
        number, topic = self.open.pop(position)
        if commit:
            self.put(topic, 0, b"committed", "PGROUP\x01p\x02", sys_flag=8, prepared=position)
        self.put(OP, 0, str(number).encode(), "TAGS\x01d\x02")

    def ask(self) -> None:
        """Check the oldest half message: it is put again under a new number, and the offset passes the old one."""
        if self.open:
            position, (number, topic) = min(self.open.items())
            del self.open[position]
            self.half(topic, b"asked about")
            self.at_half = number + 1

    def write(self, root: Path, *, killed: bool = False, ahead: bool = False) -> None:
        """Write all files; with `ahead`, one more file of the log, created before it is needed."""
        (root / "commitlog").mkdir(parents=True)
        (root / "config").mkdir()
        for at in range(0, len(self.log), SEGMENT_BYTES):
            data = bytes(self.log[at : at + SEGMENT_BYTES]).ljust(SEGMENT_BYTES, b"\0")
            (root / "commitlog" / f"{self.begin + at:020d}").write_bytes(data)
        if ahead:
            following = self.begin + -(-len(self.log) // SEGMENT_BYTES) * SEGMENT_BYTES
            (root / "commitlog" / f"{following:020d}").write_bytes(bytes(SEGMENT_BYTES))
        for (topic, queue_id), units in self.units.items():
            directory = root / "consumequeue" / topic / str(queue_id)
            directory.mkdir(parents=True)
            first = self.numbers[topic, queue_id] - len(units)
            data = bytes(20 * (first % 50)) + b"".join(units)
            path = directory / f"{20 * (first - first % 50):020d}"
            path.write_bytes(data.ljust(-(-len(data) // 1000) * 1000, b"\0"))
        if killed:
            (root / "abort").touch()
        offsets = {**self.offsets}
        if self.at_half:
            offsets[f"{HALF}@CID_RMQ_SYS_TRANS"] = {0: self.at_half}
        topics = {name: topic_json(name) for name, _ in self.numbers}
        version = {"counter": 3, "timestamp": 1}
        for name, table in (
            ("topics", {"dataVersion": version, "topicConfigTable": topics}),
            ("consumerOffset", {"offsetTable": offsets}),
            ("delayOffset", {"offsetTable": self.delivered}),
            ("subscriptionGroup", {"dataVersion": version, "subscriptionGroupTable": {"g": {"groupName": "g"}}}),
        ):
            (root / "config" / f"{name}.json").write_text(fastjson(table))


def topic_json(name: str) -> dict[str, Any]:
    return {"order": False, "perm": 6, "readQueueNums": 4, "topicFilterType": "SINGLE_TAG", "topicName": name,
            "topicSysFlag": 0, "writeQueueNums": 4}  # fmt: skip


def fastjson(value: Any) -> str:
    """As fastjson writes it: integer keys have no quotes."""
    if isinstance(value, Mapping):
        names = (key if isinstance(key, int) else json.dumps(key) for key in value)
        members = (f"{name}:{fastjson(each)}" for name, each in zip(names, value.values(), strict=True))
        return "{" + ",\n\t".join(members) + "}"
    return json.dumps(value)


def tree(root: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
