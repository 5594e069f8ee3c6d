"""A store that the node has written, read by an independent parser: only the writing uses `node`.

Log, consume queues and index as section 3 of the protocol's description has them, with every cross-reference checked.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from node.broker.controller import BrokerController
from node.config import parse_broker_config
from node.real_runtime import real_runtime
from node.remoting import Command, RemotingClient

SEGMENT_BYTES = 65536
QUEUE_FILE_BYTES = 20 * 50
SLOTS, ENTRIES = 32, 100
CONFIG = f"""
self_id = "n1"
listen = "127.0.0.1:0"
data_dir = "{{data_dir}}"
[classic]
[limits]
segment_size_bytes = {SEGMENT_BYTES}
max_message_size_bytes = 10000
queue_file_units = {QUEUE_FILE_BYTES // 20}
index_slots = {SLOTS}
index_entries = {ENTRIES}
[[topics]]
name = "t"
queues = 2
"""


@dataclass
class Record:
    """The seventeen fields, by their order in the record."""

    total: int
    magic: int
    crc: int
    queue_id: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_ms: int
    born_host: tuple[bytes, int]
    store_ms: int
    store_host: tuple[bytes, int]
    reconsume_times: int
    prepared_offset: int
    body: bytes
    topic: str
    properties: dict[str, str]


def read_record(data: bytes, at: int) -> Record:
    fixed = struct.unpack_from(">IIIiiqqiq4siq4siiqi", data, at)
    total, magic, crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born_ms = fixed[:9]
    born_ip, born_port, store_ms, store_ip, store_port, reconsume_times, prepared_offset, body_size = fixed[9:]
    assert sys_flag & (16 | 32) == 0, "this test uses IPv4"
    body_at = at + 88
    body = data[body_at : body_at + body_size]
    topic_at = body_at + body_size + 1
    topic = data[topic_at : topic_at + data[topic_at - 1]].decode()
    (size,) = struct.unpack_from(">h", data, topic_at + len(topic))
    text = data[topic_at + len(topic) + 2 :][:size].decode()
    assert topic_at + len(topic) + 2 + size == at + total
    properties = dict(pair.split("\x01") for pair in text.split("\x02") if pair)
    born, store = (born_ip, born_port), (store_ip, store_port)
    return Record(total, magic, crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born_ms, born, store_ms,
                  store, reconsume_times, prepared_offset, body, topic, properties)  # fmt: skip


def read_log(directory: Path) -> list[Record]:
    records: list[Record] = []
    paths = sorted(directory.iterdir())
    for number, path in enumerate(paths):
        data, at = path.read_bytes(), 0
        assert path.name == f"{number * SEGMENT_BYTES:020d}"
        while at < len(data):
            total, magic = struct.unpack_from(">II", data, at)
            if magic == 0xCBD43194:
                assert at + total == SEGMENT_BYTES == len(data)
                break
            assert magic == 0xDAA320A7
            record = read_record(data, at)
            assert record.physical_offset == number * SEGMENT_BYTES + at
            assert record.crc == zlib.crc32(record.body) & 0x7FFFFFFF
            records.append(record)
            at += total
        if path != paths[-1]:
            assert len(data) == SEGMENT_BYTES
    return records


def java_hash(text: str) -> int:
    value = 0
    for unit in struct.unpack(f">{len(text.encode('utf-16-be')) // 2}H", text.encode("utf-16-be")):
        value = (31 * value + unit) % 2**32
    return value - 2**32 if value >= 2**31 else value


def read_queue(directory: Path) -> list[tuple[int, int, int]]:
    units: list[tuple[int, int, int]] = []
    for number, path in enumerate(sorted(directory.iterdir())):
        assert path.name == f"{number * QUEUE_FILE_BYTES:020d}"
        units += struct.iter_unpack(">qiq", path.read_bytes())
    return units


def find_in_index(directory: Path, topic: str, key: str) -> list[int]:
    """Physical offsets filed under a key, newest first, by walking the chain of its slot in every file."""
    wanted = abs(java_hash(f"{topic}#{key}"))
    found = []
    for path in sorted(directory.iterdir(), reverse=True):
        data = path.read_bytes()
        begin_ms, end_ms, begin_offset, end_offset, used, count = struct.unpack_from(">qqqqii", data, 0)
        assert begin_ms <= end_ms and begin_offset <= end_offset and int(path.name) in (begin_offset, begin_offset + 1)
        slots = struct.unpack_from(f">{SLOTS}i", data, 40)
        assert used == sum(slot > 0 for slot in slots) and count <= ENTRIES
        number = slots[wanted % SLOTS]
        while number:
            hashed, offset, seconds, before = struct.unpack_from(">iqii", data, 40 + 4 * SLOTS + 20 * number)
            assert 0 <= before < number < count and hashed % SLOTS == wanted % SLOTS
            assert 0 <= seconds <= (end_ms - begin_ms) // 1000
            if hashed == wanted:
                found.append(offset)
            number = before
    return found


@pytest.mark.mechanism("CommitLog record (17 fields, §3)")
@pytest.mark.mechanism("ConsumeQueue 20 B: offset8,size4,tagHash8")
@pytest.mark.mechanism("IndexFile")
@pytest.mark.mechanism("msgId = host+physical offset")
def test_an_independent_parser_reads_the_store_that_the_node_wrote(tmp_path: Path) -> None:
    sent: dict[str, dict[str, Any]] = {}

    async def write() -> None:
        broker = BrokerController(parse_broker_config(CONFIG.format(data_dir=tmp_path / "data")), real_runtime(1))
        client = RemotingClient()
        await broker.start()

        async def ask(code: int, fields: dict[str, Any], body: bytes) -> Command:
            reply = await client.invoke(
                f"127.0.0.1:{broker.port}", Command.request(code, fields, body), timeout_ms=5000
            )
            assert reply.code == 0, reply
            return reply

        for number in range(300):
            body = bytes([number % 256]) * (number * 37 % 2000)
            tag, key = f"tag-ü-{number % 5}", f"key-{number % 40}"
            properties = f"TAGS\x01{tag}\x02KEYS\x01{key} all\x02UNIQ_KEY\x01U{number}\x02"
            fields = {"b": "t", "e": number % 2, "f": 1 if number % 7 == 0 else 0, "g": 1000 + number, "h": number}
            if number % 10 == 3:
                properties += "DELAY\x0118\x02"
            if number % 10 == 4:
                head = (22 + len(body) + len(properties.encode())).to_bytes(4, "big") + bytes(8)
                head += number.to_bytes(4, "big") + len(body).to_bytes(4, "big")
                batch = head + body + len(properties.encode()).to_bytes(2, "big") + properties.encode()
                reply = await ask(320, fields | {"m": True}, batch)
            else:
                reply = await ask(310, fields | {"i": properties}, body)
            msg_id = bytes.fromhex(reply.ext_fields["msgId"])
            ip, port, offset = struct.unpack(">4siq", msg_id)
            assert (ip, port) == (bytes((127, 0, 0, 1)), broker.port)
            sent[f"U{number}"] = {
                "body": body, "tag": tag, "keys": f"{key} all", "flag": number, "born_ms": 1000 + number,
                "sys_flag": fields["f"], "queue_id": number % 2, "offset": offset, "delayed": number % 10 == 3,
                "queue_offset": int(reply.ext_fields["queueOffset"]),
            }  # fmt: skip
        await client.close()
        await broker.stop()

    asyncio.run(write())
    data = tmp_path / "data"
    records = read_log(data / "commitlog")
    assert len(records) == len(sent) and len(list((data / "commitlog").iterdir())) > 3
    by_place: dict[tuple[str, int], list[Record]] = {}
    for before, record in zip([None, *records], records, strict=False):
        expected = sent[record.properties["UNIQ_KEY"]]
        by_place.setdefault((record.topic, record.queue_id), []).append(record)
        assert before is None or before.store_ms <= record.store_ms
        assert (record.body, record.flag, record.born_ms) == (expected["body"], expected["flag"], expected["born_ms"])
        assert (record.physical_offset, record.sys_flag) == (expected["offset"], expected["sys_flag"])
        assert record.queue_offset == expected["queue_offset"]
        assert (record.reconsume_times, record.prepared_offset) == (0, 0)
        assert record.born_host[0] == record.store_host[0] == bytes((127, 0, 0, 1))
        assert (record.properties["TAGS"], record.properties["KEYS"]) == (expected["tag"], expected["keys"])
        if expected["delayed"]:
            assert (record.topic, record.queue_id) == ("SCHEDULE_TOPIC_XXXX", 17)
            assert record.properties["REAL_TOPIC"] == "t"
            assert record.properties["REAL_QID"] == str(expected["queue_id"])
        else:
            assert (record.topic, record.queue_id) == ("t", expected["queue_id"])
    for (topic, queue_id), held in by_place.items():
        units = read_queue(data / "consumequeue" / topic / str(queue_id))
        assert [record.queue_offset for record in held] == list(range(len(units)))
        for record, (offset, size, tag_hash) in zip(held, units, strict=True):
            assert (offset, size) == (record.physical_offset, record.total)
            # The unit of a delayed message has its due time instead (R); level 18 is two hours.
            delayed = topic == "SCHEDULE_TOPIC_XXXX"
            assert tag_hash == (record.store_ms + 7_200_000 if delayed else java_hash(record.properties["TAGS"]))
    for name, key_of in (("U{}", lambda record: record.properties["UNIQ_KEY"]), ("key-{}", None)):
        for number in range(40):
            key = name.format(number)
            for topic in ("t", "SCHEDULE_TOPIC_XXXX"):
                wanted = [
                    record.physical_offset
                    for record in records
                    if record.topic == topic
                    and (key_of(record) == key if key_of else key in record.properties["KEYS"].split())
                ]
                assert find_in_index(data / "index", topic, key) == wanted[::-1]
