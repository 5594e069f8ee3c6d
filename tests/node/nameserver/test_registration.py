"""Registrations as received: formats of the body, checksum, refusals."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.nameserver import registration
from node.nameserver.registration import QueueData, Registration, read_registration
from node.remoting import Command, RequestError

TOPIC = {"topicName": "T", "readQueueNums": 4, "writeQueueNums": 8, "perm": 6, "topicSysFlag": 1, "order": False}
VERSION = {"timestamp": 5, "counter": 2}
BODY = {
    "topicConfigSerializeWrapper": {"topicConfigTable": {"T": TOPIC}, "dataVersion": VERSION},
    "filterServerList": ["f:1"],
}


def command(body: bytes, **fields: Any) -> Command:
    values = {"brokerName": "b", "brokerAddr": "10.0.0.1:10911", "clusterName": "c", "brokerId": 0}
    return Command.request(103, values | {"haServerAddr": "10.0.0.1:10912"} | fields, body)


EXPECTED = Registration(
    cluster="c", broker_name="b", broker_id=0, address="10.0.0.1:10911", ha_address="10.0.0.1:10912",
    topics={"T": QueueData(4, 8, 6, 1)}, data_version='{"counter": 2, "timestamp": 5}', filter_servers=("f:1",),
)  # fmt: skip


def packed(*topics: str, version: bytes = b'{"timestamp":5,"counter":2}', servers: bytes = b'["f:1"]') -> bytes:
    """R's own compressed form, before deflating."""
    parts = version, None, *[topic.encode() for topic in topics], servers
    return b"".join(
        len(topics).to_bytes(4, "big") if part is None else len(part).to_bytes(4, "big") + part for part in parts
    )


def test_a_json_body_is_read_with_or_without_checksum_and_term() -> None:
    body = json.dumps(BODY).encode()
    crc = zlib.crc32(body) & 0x7FFFFFFF
    assert read_registration(command(body)) == EXPECTED
    assert read_registration(command(body, bodyCrc32=crc, compressed=False)) == EXPECTED
    assert read_registration(command(body, bodyCrc32=0, dledgerTerm=7)).dledger_term == 7


def test_a_deflated_body_is_read_as_json_or_in_rocketmqs_own_format() -> None:
    assert read_registration(command(zlib.compress(json.dumps(BODY).encode()), compressed=True)) == EXPECTED
    body = zlib.compress(packed("T 4 8 6 SINGLE_TAG", "U 1 1 4 SINGLE_TAG"))
    read = read_registration(command(body, compressed="true", bodyCrc32=zlib.crc32(body) & 0x7FFFFFFF))
    assert read.topics == {"T": QueueData(4, 8, 6), "U": QueueData(1, 1, 4)}
    assert (read.data_version, read.filter_servers) == (EXPECTED.data_version, ("f:1",))


def test_bodies_with_missing_fields_or_numbers_as_text_are_accepted() -> None:
    assert read_registration(command(b"")).topics is None
    old = read_registration(command(json.dumps(BODY["topicConfigSerializeWrapper"]).encode()))
    assert old.topics == EXPECTED.topics
    text = dict(TOPIC, readQueueNums="4", writeQueueNums="8", perm="6", topicSysFlag=None)
    del text["topicSysFlag"]
    text["topicSynFlag"] = "1"
    body = {"topicConfigSerializeWrapper": {"topicConfigTable": {"T": text}}, "filterServerList": None}
    read = read_registration(command(json.dumps(body).encode()))
    assert (read.topics, read.data_version, read.filter_servers) == (EXPECTED.topics, "", ())
    assert read_registration(command(b'{"topicConfigSerializeWrapper":null}')).topics is None


def body_with(entry: object) -> bytes:
    return json.dumps({"topicConfigSerializeWrapper": {"topicConfigTable": {"T": entry}}}).encode()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (command(b"{}", bodyCrc32=1), "bodyCrc32"),
        (command(b"nonsense"), "no JSON"),
        (command(b"[1]"), "no JSON object"),
        (command(b"[" * 100_000), "no JSON"),
        (command(b"{}", compressed=True), "is not"),
        (command(zlib.compress(b"{}")[:-3], compressed=True), "cut short"),
        (command(zlib.compress(packed("T 4 8")), compressed=True), "no usable topic"),
        (command(zlib.compress(packed("T 4 8 x")), compressed=True), "no number"),
        (command(zlib.compress(packed("T 4 8 6")[:-2]), compressed=True), "cannot be read"),
        (command(zlib.compress(b"\0\0"), compressed=True), "cannot be read"),
        (command(zlib.compress(b"\xff\xff\xff\xff"), compressed=True), "cannot be read"),
        (command(zlib.compress(packed("T 4 8 6", version=b"{")), compressed=True), "cannot be read"),
        (command(body_with(5)), "no usable entry"),
        (command(body_with({"perm": []})), "no number"),
        (command(body_with({"perm": 8})), "out of range"),
        (command(body_with({"readQueueNums": -1})), "out of range"),
        (command(b"{}", brokerName=""), "brokerName"),
        (command(b"{}", brokerAddr="x" * 256), "brokerAddr"),
        (command(b"{}", brokerId=-1), "brokerId"),
        (command(b"{}", brokerId="one"), "brokerId"),
        (command(b"{}", dledgerTerm="x"), "dledgerTerm"),
    ],
)
def test_a_refusal_names_the_invalid_part(wrong: Command, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_registration(wrong)
    assert caught.value.code == 1 and reason in caught.value.remark


def test_a_decompression_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "MAX_INFLATED_BYTES", 100_000)
    with pytest.raises(RequestError, match="too large"):
        read_registration(command(zlib.compress(bytes(1_000_000)), compressed=True))


@given(st.binary(max_size=100), st.booleans(), st.booleans())
def test_any_body_is_read_or_refused(data: bytes, compressed: bool, deflate: bool) -> None:
    try:
        read = read_registration(command(zlib.compress(data) if deflate else data, compressed=compressed))
    except RequestError as error:
        assert error.remark
    else:
        assert read.broker_name == "b"
