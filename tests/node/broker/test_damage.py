"""Damaged files of every kind: found, reported, repaired if that is safe, and never served as if they were intact.

Each case damages one file of a store and starts the broker on it. Either it refuses to start and names the file; or it
starts, and then every message is served as it was sent or refused with an error, and every table is the latest or its
predecessor.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from node.broker.controller import BrokerController
from node.config import parse_broker_config
from node.real_runtime import real_runtime
from node.remoting import Command, RemotingClient
from node.store.record import decode_records
from node.store.segments import SegmentError
from node.store.table_file import encode_table

CONFIG = """
self_id = "n1"
listen = "127.0.0.1:0"
data_dir = "{data_dir}"
[classic]
[limits]
segment_size_bytes = 65536
max_message_size_bytes = 10000
queue_file_units = 20
index_slots = 64
index_entries = 40
[[topics]]
name = "t"
queues = 1
"""
SENT = [b"%d " % number + b"x" * (number * 37 % 3000) for number in range(100)]
TABLES = ("topics.json", "consumerOffset.json", "subscriptionGroup.json")
FILES = ("commitlog first", "commitlog last", "consumequeue", "index", "consumequeue.checkpoint", "checkpoint", *TABLES)
DAMAGES = ("truncated", "zeroed", "flipped", "missing", "longer")


class Asker:
    def __init__(self, client: RemotingClient, port: int) -> None:
        self._client, self._address = client, f"127.0.0.1:{port}"

    async def __call__(self, code: int, fields: dict[str, Any] | None = None, body: bytes = b"") -> Command:
        return await self._client.invoke(self._address, Command.request(code, fields or {}, body), timeout_ms=5000)


async def serve(data: Path, scenario: Any) -> None:
    broker = BrokerController(parse_broker_config(CONFIG.format(data_dir=data)), real_runtime(1))
    client = RemotingClient()
    await broker.start()
    try:
        await scenario(Asker(client, broker.port), broker)
    finally:
        await client.close()
        await broker.stop()


async def fill(ask: Asker, broker: BrokerController) -> None:
    """Messages, and two versions of every table."""
    for number, body in enumerate(SENT):
        reply = await ask(310, {"b": "t", "e": 0, "i": f"TAGS\x01tag\x02KEYS\x01k{number}\x02"}, body)
        assert reply.code == 0
    for number in (1, 2):
        assert (await ask(17, {"topic": f"made-{number}"})).code == 0
        group = json.dumps({"groupName": f"g{number}"}).encode()
        assert (await ask(200, body=group)).code == 0
        offset = {"consumerGroup": "g", "topic": "t", "queueId": 0, "commitOffset": 10 * number}
        assert (await ask(15, offset)).code == 0
        await broker.offsets._file.flush()


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A store after an orderly stop, and one after a crash."""
    base = tmp_path_factory.mktemp("stores")

    async def scenario(ask: Asker, broker: BrokerController) -> None:
        await fill(ask, broker)
        await broker.dispatcher._checkpoint()
        await broker.ledger._write_checkpoint(is_clean=False)  # type: ignore[attr-defined]
        shutil.copytree(base / "data", base / "crashed")

    asyncio.run(serve(base / "data", scenario))
    (base / "data").rename(base / "stopped")
    return {"stopped": base / "stopped", "crashed": base / "crashed"}


def file_of(data: Path, kind: str) -> Path:
    name, _, which = kind.partition(" ")
    if name == "commitlog":
        return sorted((data / "commitlog").iterdir())[0 if which == "first" else -1]
    if name == "consumequeue":
        return sorted((data / "consumequeue" / "t" / "0").iterdir())[1]
    if name == "index":
        return sorted((data / "index").iterdir())[0]
    return data / kind


def do_damage(path: Path, damage: str) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    if damage == "truncated":
        del content[middle:]
    elif damage == "zeroed":
        content = bytearray(len(content))
    elif damage == "flipped":
        content[middle] ^= 4
    elif damage == "longer":
        content += b"\x01garbage" * 9
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content)


async def read_everything(ask: Asker, broker: BrokerController) -> dict[str, int]:
    """Read everything; returns how much was served and how much was refused. Nothing may be wrong or left out."""
    served = refused = 0
    high = int((await ask(30, {"topic": "t", "queueId": 0})).ext_fields["offset"])
    low = int((await ask(31, {"topic": "t", "queueId": 0})).ext_fields["offset"])
    for offset in range(low, high):
        fields = {"topic": "t", "queueId": 0, "queueOffset": offset, "maxMsgNums": 1}
        reply = await ask(11, fields | {"subscription": "tag", "sysFlag": 4})
        if reply.code == 1:
            assert "cannot be read" in (reply.remark or "")
            refused += 1
            continue
        (message,) = decode_records(reply.body)
        assert (message.queue_offset, message.body, message.tags) == (offset, SENT[offset], "tag")
        found = await ask(12, {"topic": "t", "key": f"k{offset}"})
        assert [each.body for each in decode_records(found.body)] == [SENT[offset]]
        served += 1
    return {"low": low, "high": high, "served": served, "refused": refused}


@pytest.mark.parametrize("end", ["stopped", "crashed"])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_reported_and_never_served_as_intact(
    stores: dict[str, Path], tmp_path: Path, kind: str, damage: str, end: str, caplog: Any
) -> None:
    data = tmp_path / "data"
    shutil.copytree(stores[end], data)
    path = file_of(data, kind)
    do_damage(path, damage)
    seen: dict[str, Any] = {}

    async def scenario(ask: Asker, broker: BrokerController) -> None:
        seen.update(await read_everything(ask, broker))
        topics = json.loads((await ask(21)).body)["topicConfigTable"]
        groups = json.loads((await ask(201)).body)["subscriptionGroupTable"]
        seen["topics"] = {name for name in topics if name.startswith("made-")}
        seen["groups"] = {name for name in groups if name.startswith("g")}
        seen["offset"] = (await ask(14, {"consumerGroup": "g", "topic": "t", "queueId": 0})).ext_fields.get("offset")

    try:
        asyncio.run(serve(data, scenario))
    except (ValueError, SegmentError) as error:
        assert kind.startswith("commitlog") and str(path) in str(error), error
        assert damage in ("truncated", "longer", "missing")
        return
    logged = caplog.text
    name = kind.partition(" ")[0]
    if name == "commitlog":
        if damage in ("zeroed", "flipped"):
            assert seen["refused"] > 0 and "cannot be read" in logged
            assert seen["served"] + seen["refused"] == len(SENT) == seen["high"]
        elif damage == "missing":  # the first file: as after expiry
            assert seen["low"] > 0 and seen["served"] == len(SENT) - seen["low"]
            assert "the log begins" in logged
        else:
            assert damage == "longer" and "cutting" in logged and seen["served"] == len(SENT)
        return
    assert (seen["served"], seen["refused"], seen["low"]) == (len(SENT), 0, 0), seen
    changed = {
        "topics.json": seen["topics"] != {"made-1", "made-2"},
        "consumerOffset.json": seen["offset"] != "20",
        "subscriptionGroup.json": not seen["groups"] >= {"g1", "g2"},
    }
    for table, differs in changed.items():
        assert not differs or table == kind, changed
    if kind in TABLES:
        assert changed[kind] and "going on with its predecessor" in logged
        assert seen["topics"] >= {"made-1"} and seen["offset"] in ("10", "20") and seen["groups"] >= {"g1"}
    elif damage != "longer":
        assert str(path) in logged, logged
    if name in ("consumequeue", "index") and damage != "longer":
        assert file_of(data, kind).read_bytes() == file_of(stores["stopped"], kind).read_bytes(), "rebuilt"


@pytest.mark.parametrize("table", TABLES)
def test_a_table_whose_predecessor_is_damaged_too_is_refused(
    stores: dict[str, Path], tmp_path: Path, table: str
) -> None:
    data = tmp_path / "data"
    shutil.copytree(stores["stopped"], data)
    for path in (data / table, data / f"{table}.bak"):
        do_damage(path, "flipped")
    with pytest.raises(ValueError, match="restore one, or remove both to start empty") as caught:
        asyncio.run(serve(data, None))
    assert str(data / table) in str(caught.value)


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_without_any_checkpoint_a_damaged_log_is_not_cut(stores: dict[str, Path], tmp_path: Path, damage: str) -> None:
    """It is unknown what was durable then: messages behind the damage may have been acknowledged."""
    data = tmp_path / "data"
    shutil.copytree(stores["crashed"], data)
    for path in data.glob("checkpoint*"):
        do_damage(path, damage)
    first = file_of(data, "commitlog first")
    do_damage(first, "flipped")
    sizes = [path.stat().st_size for path in sorted((data / "commitlog").iterdir())]
    with pytest.raises(ValueError, match="and no checkpoint says what was durable") as caught:
        asyncio.run(serve(data, None))
    assert f"{first} is damaged at byte " in str(caught.value)
    assert [path.stat().st_size for path in sorted((data / "commitlog").iterdir())] == sizes


@pytest.mark.parametrize("is_clean", [False, True])
@pytest.mark.parametrize("position", ["of an empty log", "within a record", "behind a record"])
def test_a_checkpoint_of_another_store_never_cuts_the_log(
    stores: dict[str, Path], tmp_path: Path, position: str, is_clean: bool
) -> None:
    """Records of this log follow the position that it gives, or lie across it."""
    data = tmp_path / "data"
    shutil.copytree(stores["stopped"], data)
    last = file_of(data, "commitlog last")
    behind = int(last.name) + int.from_bytes(last.read_bytes()[:4], "big")
    at = {"of an empty log": 0, "within a record": behind + 10, "behind a record": behind}[position]
    (data / "checkpoint").write_bytes(encode_table({"position": at, "isClean": is_clean, "writtenAtMs": 0}))
    log = {path.name: path.read_bytes() for path in (data / "commitlog").iterdir()}
    seen: dict[str, int] = {}

    async def scenario(ask: Asker, broker: BrokerController) -> None:
        seen.update(await read_everything(ask, broker))

    if position == "within a record":
        with pytest.raises(ValueError, match="the checkpoint is not of this log") as caught:
            asyncio.run(serve(data, scenario))
        assert str(last) in str(caught.value)
    else:
        asyncio.run(serve(data, scenario))
        assert seen["served"] == len(SENT) and seen["low"] == 0
    assert {path.name: path.read_bytes() for path in (data / "commitlog").iterdir()} == log


def test_a_record_with_a_flipped_bit_is_never_served(stores: dict[str, Path], tmp_path: Path) -> None:
    """In the body, or in the header and properties, which the record's own CRC does not cover; by a pull, a query or a
    copy."""
    data = tmp_path / "data"
    shutil.copytree(stores["stopped"], data)
    number = 3
    log = file_of(data, "commitlog first")
    content = bytearray(log.read_bytes())
    begin = 0
    for _ in range(number):
        begin += int.from_bytes(content[begin : begin + 4], "big")
    size = int.from_bytes(content[begin : begin + 4], "big")

    async def scenario(ask: Asker, broker: BrokerController) -> None:
        pull = {"topic": "t", "queueId": 0, "queueOffset": number, "maxMsgNums": 1}
        assert (await ask(11, pull)).code == 0
        for at in range(begin, begin + size):
            with log.open("r+b") as file:
                file.seek(at)
                file.write(bytes((content[at] ^ 1 << at % 8,)))
                file.flush()
                assert (await ask(11, pull)).code == 1, at - begin
                assert (await ask(33, {"offset": begin})).code == 1, at - begin
                if at % 8 == 0:
                    assert (await ask(12, {"topic": "t", "key": f"k{number}"})).code == 1, at - begin
                    assert (await ask(36, {"offset": begin, "group": "g", "delayLevel": 0})).code == 1, at - begin
                file.seek(at)
                file.write(content[at : at + 1])
        assert (await ask(11, pull)).code == 0
        assert len(decode_records((await ask(33, {"offset": begin})).body)) == 1

    asyncio.run(serve(data, scenario))
