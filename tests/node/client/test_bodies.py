"""Bodies as RocketMQ's own brokers write them."""

from __future__ import annotations

import json

import pytest

from node.client.bodies import read_body
from node.client.messages import MessageQueue
from node.client.requests import read_offsets


def test_integer_keys_are_read_as_strings() -> None:
    body = (
        b'{"brokerAddrTable":{"broker-a":{"brokerAddrs":{0:"10.0.0.1:10911",1:"10.0.0.2:10911"},'
        b'"brokerName":"broker-a","cluster":"c"}}, "levels" : {-1 : [1, 2],\n 3:{4:null}}}'
    )
    assert read_body(body) == {
        "brokerAddrTable": {
            "broker-a": {
                "brokerAddrs": {"0": "10.0.0.1:10911", "1": "10.0.0.2:10911"},
                "brokerName": "broker-a",
                "cluster": "c",
            }
        },
        "levels": {"-1": [1, 2], "3": {"4": None}},
    }


def test_strings_that_look_like_integer_keys_are_unchanged() -> None:
    value = {"a": '{0:"x"}, 1:', "b": ["\\", ',2:"', "é"], "c": '"{3:', "4": 5}
    plain = json.dumps(value, ensure_ascii=False).encode()
    assert read_body(plain) == value
    assert read_body(b"{0:" + plain + b"}") == {"0": value}


@pytest.mark.parametrize("body", [b"", b"{", b"{a:1}", b'{0"1"}', b"\xff"])
def test_invalid_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        read_body(body)


def test_offsets_are_read_by_queue() -> None:
    queue = b'{"brokerName":"broker-a","queueId":3,"topic":"t"}'
    assert read_offsets(b'{"offsetTable":{%s:7}}' % queue) == {MessageQueue("t", "broker-a", 3): 7}
    assert read_offsets(b'{"offsetTable":{}}') == {}


@pytest.mark.parametrize(
    "table", [b"", b"[]", b"{1:2}", b"{{}:1}", *(b'{{"brokerName":"b","queueId":0,"topic":"t"}:%s}' % value for value in
    (b"-1", b"null", b"[]", b"1e999", b"9223372036854775808", b""))],
)  # fmt: skip
def test_invalid_offset_tables_are_refused(table: bytes) -> None:
    with pytest.raises(ValueError):
        read_offsets(b'{"offsetTable":' + table + b"}")
