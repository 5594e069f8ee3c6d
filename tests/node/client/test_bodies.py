"""Bodies as RocketMQ's own brokers write them."""

from __future__ import annotations

import json

import pytest

from node.client.bodies import read_body


def test_numbers_as_keys_are_read_as_their_digits() -> None:
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


def test_texts_are_left_as_they_are() -> None:
    value = {"a": '{0:"x"}, 1:', "b": ["\\", ',2:"', "é"], "c": '"{3:', "4": 5}
    plain = json.dumps(value, ensure_ascii=False).encode()
    assert read_body(plain) == value
    assert read_body(b"{0:" + plain + b"}") == {"0": value}


@pytest.mark.parametrize("body", [b"", b"{", b"{a:1}", b'{0"1"}', b"\xff"])
def test_what_is_neither_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        read_body(body)
